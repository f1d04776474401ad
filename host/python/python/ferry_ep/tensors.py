"""Arrays of other libraries as tensors: NumPy, torch, DLPack, ``__cuda_array_interface__``, addresses.

No library is imported unless an array of it is given.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from typing import Any, NamedTuple

from ._ferry import Reader, Tensor
from .errors import ArgumentError, TensorError

__all__ = [
    "Described",
    "Repeated",
    "allocate",
    "describe",
    "element",
    "reader_of",
    "reader_of_torch",
    "refuse",
    "stream_of",
]

#: Names of element types in other libraries.
_TYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "int32": "i32",
    "int64": "i64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "float8_e4m3fn": "e4m3",
    "float8_e8m0fnu": "e8m0",
    "float4_e2m1fn_x2": "e2m1",
}
#: Types of NumPy and of torch for elements that Ferry writes. Two 4-bit elements are a byte.
_NUMPY = {
    "bf16": "uint16",
    "f16": "float16",
    "f32": "float32",
    "e4m3": "uint8",
    "e8m0": "uint8",
    "e2m1": "uint8",
    "i32": "int32",
    "i64": "int64",
    "u32": "uint32",
}
_TORCH = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "e4m3": "float8_e4m3fn",
    "e8m0": "uint8",
    "e2m1": "uint8",
    "i32": "int32",
    "i64": "int64",
    "u32": "int32",
}

#: The reader of torch's tensors, once it was asked for.
_readers: list[Reader | None] = []


class Described(NamedTuple):
    """An array: where it is, and what."""

    address: int
    data_type: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: ``"cpu"``, ``"cuda:1"``, or ``"rank"`` for an address of the rank's own device.
    device: str
    owner: Any

    def tensor(self, address: int | None = None) -> Tensor:
        """Returns it as a tensor, at another address if one is given."""
        at = self.address if address is None else address
        return Tensor(at, self.data_type, self.shape, self.strides, owner=self.owner)


def refuse(name: str, wanted: str, given: str) -> TensorError:
    """Returns the error of a tensor that does not fit."""
    return TensorError(f"tensor {name}: wanted {wanted}, given {given}", name, wanted, given)


def element(data_type: Any) -> str:
    """Returns the name here of a type of elements, which is that name, or one of NumPy or torch."""
    name = data_type if isinstance(data_type, str) else getattr(data_type, "name", None)
    if name is None:
        name = str(getattr(data_type, "__name__", data_type)).removeprefix("torch.")
    name = _TYPES.get(name, name)
    if name not in _NUMPY:
        raise ArgumentError(f"data_type is {data_type!r}, but there are {', '.join(_NUMPY)}")
    return name


def describe(name: str, value: Any, wanted: str, *, written: bool = False) -> Described:
    """Describes the argument ``name``, whose elements are to be ``wanted``.

    Raises :class:`TensorError` for an object that is no array, and for elements without a name here; shapes
    and all else is checked by the call.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if isinstance(value, Tensor):
        found = Described(
            value.address, value.data_type, tuple(value.shape), tuple(value.strides), "rank", value
        )
    elif torch is not None and isinstance(value, torch.Tensor):
        found = _of_torch(name, value, wanted)
        if not written and value.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"tensor {name} requires a gradient, and this call has no backward pass: make it under "
                f"torch.no_grad(), or pass {name}.detach()"
            )
    elif numpy is not None and isinstance(value, numpy.ndarray):
        if written and not value.flags.writeable:
            raise refuse(name, "memory that can be written", "a read-only array")
        found = _of_interface(name, value, value.__array_interface__, value.dtype.name, wanted, "cpu")
    elif hasattr(value, "_ferry_tensor"):
        found = describe(name, value._ferry_tensor(), wanted)
    elif hasattr(value, "__cuda_array_interface__"):
        interface = value.__cuda_array_interface__
        kind = _type_of_typestr(str(interface["typestr"]))
        kind = str(getattr(getattr(value, "dtype", None), "name", kind))
        device = getattr(getattr(value, "device", None), "id", 0)
        found = _of_interface(name, value, interface, kind, wanted, f"cuda:{device}")
    elif hasattr(value, "__dlpack__"):
        found = _of_dlpack(name, value, wanted)
    else:
        raise refuse(name, f"a tensor of {wanted}", f"{type(value).__name__}")
    found = _as(found, wanted)
    given = found.data_type
    if wanted == "i32" and given == "u32":
        raise refuse(name, "elements of i32 or i64" if name == "topk_ids" else "elements of i32", given)
    if wanted == "bf16" and given not in ("bf16", "u16") and not written:
        raise refuse(name, _elements(value, wanted), given)
    return found


def reader_of_torch() -> Reader | None:
    """Returns the reader of torch's tensors, which needs no Python; ``None`` in a torch without DLPack's
    exchange API. torch is imported.
    """
    if not _readers:
        _readers.append(Reader.of(sys.modules["torch"].Tensor))
    return _readers[0]


def reader_of(values: tuple[Any, ...], present: tuple[bool, ...] | None = None) -> Reader | None:
    """Returns the reader of values that are tensors of torch in a GPU's memory, or ``None``; ``None`` if one
    is something else, or if :func:`describe` has more to check. ``present``: which values, and no others, are
    to be there.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    reader = reader_of_torch()
    if reader is None or not reader.takes(values, torch.is_grad_enabled(), present):
        return None
    return reader


def stream_of(handle: int, device: Any) -> Any:
    """Returns torch's stream with this handle on a CUDA device."""
    cuda = sys.modules["torch"].cuda
    # Some versions of torch take 0, the default stream, for no handle, and make a stream of their own.
    return cuda.ExternalStream(handle, device=device) if handle else cuda.default_stream(device)


def allocate(like: Any, data_type: str, shape: list[int]) -> Any:
    """Allocates an array in the library, and on the device, of ``like``; not cleared."""
    if data_type == "e2m1":
        shape = [*shape[:-1], shape[-1] // 2]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, _TORCH[data_type]), device=like.device)
    module = type(like).__module__.partition(".")[0]
    if module == "cupy":
        return sys.modules["cupy"].empty(shape, dtype=_NUMPY[data_type])
    import numpy

    return numpy.empty(shape, dtype=_NUMPY[data_type])


class Repeated:
    """Arrays of fixed types and shapes that are allocated again and again.

    From the second time on torch's are made like templates of no memory: in half the time of ``torch.empty``.
    """

    def __init__(self, layouts: list[tuple[str, list[int]]]) -> None:
        """Takes the type and shape of each. Allocates nothing."""
        self.layouts = layouts
        #: Device of the last ones, and templates on it.
        self._device: Any = None
        self._templates: list[Any] | None = None

    def allocate(self, like: Any) -> list[Any]:
        """Allocates all of them in the library, and on the device, of ``like``; not cleared."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(like, torch.Tensor):
            if self._device != like.device:
                self._device, self._templates = like.device, None
            else:
                if self._templates is None:
                    self._templates = [allocate(like, *layout) for layout in self.layouts]
                    for template in self._templates:
                        template.untyped_storage().resize_(0)
                return [torch.empty_like(template) for template in self._templates]
        return [allocate(like, *layout) for layout in self.layouts]


def _as(found: Described, wanted: str) -> Described:
    """Takes bits of the same size for ``wanted``, as libraries have no better name for them."""
    given = found.data_type
    if wanted == "u32" and given == "i32":
        return found._replace(data_type="u32")
    if wanted == "e2m1" and given == "u8":
        shape, strides = found.shape, found.strides
        if shape and (len(strides) < 2 or strides[-1] == 1):
            last = (*(2 * stride for stride in strides[:-1]), 1)
            return found._replace(data_type="e2m1", shape=(*shape[:-1], 2 * shape[-1]), strides=last)
    return found


def _elements(value: Any, wanted: str) -> str:
    """Names the elements that are wanted, for a library that may not have them."""
    torch = sys.modules.get("torch")
    if wanted == "bf16" and not (torch is not None and isinstance(value, torch.Tensor)):
        return (
            "elements of bf16: torch.bfloat16, or its bits as uint16, which ferry_ep.to_bf16 makes of numbers"
        )
    return f"elements of {wanted}"


def _name_of(name: str, value: Any, given: str, wanted: str) -> str:
    data_type = _TYPES.get(given)
    if data_type is None:
        raise refuse(name, _elements(value, wanted), given)
    return data_type


def _of_torch(name: str, value: Any, wanted: str) -> Described:
    data_type = _name_of(name, value, str(value.dtype).removeprefix("torch."), wanted)
    device = value.device
    if device.type not in ("cpu", "cuda"):
        raise refuse(name, "memory of the CPU or of a GPU", f"a tensor on {device}")
    if str(value.layout) != "torch.strided":
        raise refuse(name, "a strided tensor", f"layout {value.layout}")
    if value.is_neg() or value.is_conj():
        # Its memory has other values.
        raise refuse(
            name, "plain values: call resolve_neg() and resolve_conj()", "a negated or conjugate view"
        )
    place = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
    found = Described(value.data_ptr(), data_type, tuple(value.shape), value.stride(), place, value)
    if data_type != "e2m1":
        return found
    # torch counts pairs.
    pairs = found._replace(data_type="u8")
    return _as(pairs, "e2m1")


def _of_interface(
    name: str, value: Any, interface: dict[str, Any], kind: str, wanted: str, device: str
) -> Described:
    typestr, native = str(interface["typestr"]), "<" if sys.byteorder == "little" else ">"
    if typestr[0] not in (native, "|", "="):
        raise refuse(name, "native byte order: convert with astype", f"type {typestr}")
    data_type = _name_of(name, value, kind, wanted)
    shape = tuple(int(size) for size in interface["shape"])
    itemsize = int(getattr(value, "itemsize", 0)) or int(typestr[2:])
    strides = interface.get("strides")
    if strides is None:
        strides = _dense(shape)
    else:
        if any(stride < 0 or stride % itemsize for stride in strides):
            given = f"strides of {tuple(strides)} bytes"
            raise refuse(name, "strides that are multiples of an element: make it contiguous", given)
        strides = tuple(stride // itemsize for stride in strides)
    return Described(int(interface["data"][0]), data_type, shape, strides, device, value)


def _type_of_typestr(typestr: str) -> str:
    kinds = {"f": "float", "i": "int", "u": "uint"}
    kind = kinds.get(typestr[1:2])
    return f"{kind}{8 * int(typestr[2:])}" if kind else typestr


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


#: ``DLTensor`` of dlpack.h, version 1.0: data, device type and number, dimensions, type (code, bits, lanes),
#: addresses of shape and strides, offset.
_DL_TENSOR = struct.Struct("@PiiiBBHPPQ")

#: Types by code and bits of dlpack.h.
_DLPACK = {
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (2, 16): "float16",
    (2, 32): "float32",
    (4, 16): "bfloat16",
    (10, 8): "float8_e4m3fn",
    (14, 8): "float8_e8m0fnu",
}


def _of_dlpack(name: str, value: Any, wanted: str) -> Described:
    capsule = value.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # The capsule is not consumed: as long as it lives, so does the memory.
    fields = _DL_TENSOR.unpack(ctypes.string_at(pointer(capsule, b"dltensor"), _DL_TENSOR.size))
    data, device_type, device_id, ndim, code, bits, _, shape_at, strides_at, offset = fields
    data_type = _name_of(name, value, _DLPACK.get((code, bits), f"DLPack type {(code, bits)}"), wanted)
    shape = _numbers(shape_at, ndim)
    strides = _numbers(strides_at, ndim) if strides_at else _dense(shape)
    # kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged.
    places = {1: "cpu", 2: f"cuda:{device_id}", 3: "cpu", 13: f"cuda:{device_id}"}
    place = places.get(device_type)
    if place is None:
        raise refuse(name, "memory of the CPU or of a GPU", f"DLPack device {device_type}")
    return Described(data + offset, data_type, shape, strides, place, capsule)


def _numbers(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"@{count}q", ctypes.string_at(address, 8 * count))
