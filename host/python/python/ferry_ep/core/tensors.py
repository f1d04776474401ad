"""Arrays of other libraries as tensors: NumPy, torch, DLPack, ``__cuda_array_interface__``, addresses.

No library is imported unless an array of it is given.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

from ._ferry import Reader, Tensor, format_sizes
from .capsules import of_capsule
from .errors import ArgumentError, refuse
from .scalars import shown
from .storages import require_storage

__all__ = [
    "Described",
    "Repeated",
    "allocate",
    "describe",
    "element",
    "elements_of",
    "is_allocated_here",
    "reader_of",
    "reader_of_torch",
    "refuse",
    "require_numpy_memory",
    "require_plain",
    "scales_of",
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
NUMPY = {
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
TORCH = {
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


def element(data_type: Any) -> str:
    """Returns the name here of a type of elements, which is that name, or one of NumPy or torch."""
    name = data_type if isinstance(data_type, str) else getattr(data_type, "name", None)
    if name is None:
        name = getattr(data_type, "__name__", None)
    if name is None and type(data_type).__name__ == "dtype":
        name = str(data_type).removeprefix("torch.")
    name = _TYPES.get(name, name) if isinstance(name, str) else None
    if name not in NUMPY:
        raise ArgumentError(f"data_type is {shown(data_type)}, but there are {', '.join(NUMPY)}")
    return name


def describe(name: str, value: Any, wanted: str, *, written: bool = False) -> Described:
    """Describes the argument ``name``, whose elements are to be ``wanted``.

    Raises :class:`TensorError` for an object that is no array, for elements without a name here, for an array
    that has less memory than its shape says, and with ``written`` for one that is read-only; shapes and all
    else is checked by the call.
    """
    found = _as(_found(name, value, wanted, written), wanted)
    if found.address == 0 and 0 not in found.shape:
        raise refuse(name, "memory", "none: its address is 0")
    given = found.data_type
    if wanted == "i32" and given == "u32":
        raise refuse(name, "elements of i32 or i64" if name == "topk_ids" else "elements of i32", given)
    if wanted == "bf16" and given not in ("bf16", "u16") and not written:
        raise refuse(name, _elements(value, wanted), given)
    return found


def elements_of(format: str) -> str:
    """Returns the type of a format's elements."""
    return {16: "bf16", 8: "e4m3", 4: "e2m1"}[format_sizes(format)[0]]


def scales_of(format: str) -> str:
    """Returns the type of a format's scales."""
    if format == "fp8":
        return "f32"
    return "e4m3" if format.startswith("nvfp4") else "e8m0"


def _found(name: str, value: Any, wanted: str, written: bool) -> Described:
    """Describes an array in the words of its library."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if isinstance(value, Tensor):
        return Described(
            value.address, value.data_type, tuple(value.shape), tuple(value.strides), "rank", value
        )
    if torch is not None and isinstance(value, torch.Tensor):
        found = _of_torch(name, value, wanted)
        if not written:
            _require_no_gradient(name, value)
        return found
    is_numpy = numpy is not None and isinstance(value, numpy.ndarray)
    of_ferry = getattr(value, "__ferry_tensor__", None)
    if written and not (of_ferry()[1] if of_ferry else _is_writable(name, value, is_numpy)):
        raise refuse(name, "memory that can be written", f"a read-only {type(value).__name__}")
    if is_numpy:
        return _of_numpy(name, value, wanted)
    if of_ferry is not None:
        return _found(name, of_ferry()[0], wanted, written)
    if hasattr(value, "__cuda_array_interface__"):
        return _of_cuda_interface(name, value, wanted)
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(name, value, wanted, written)
    raise refuse(name, f"a tensor of {wanted}", f"{type(value).__name__}")


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


def is_allocated_here(like: Any, is_simulated: bool) -> bool:
    """Whether :func:`allocate` makes arrays that a rank's calls can write. Raises :class:`TensorError` for an
    object that is no array.

    Other libraries have no arrays to write (JAX), or are not known: NumPy stands for them in the simulator.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return True
    if like is None or isinstance(like, Tensor) or hasattr(like, "__ferry_tensor__"):
        return False
    if numpy is not None and isinstance(like, numpy.ndarray):
        return True
    if not hasattr(like, "__cuda_array_interface__") and not hasattr(like, "__dlpack__"):
        raise refuse("like", "an array", type(like).__name__)
    return is_simulated or type(like).__module__.partition(".")[0] == "cupy"


def allocate(like: Any, data_type: str, shape: list[int]) -> Any:
    """Allocates an array in the library, and on the device, of ``like``; not cleared."""
    if data_type == "e2m1":
        shape = [*shape[:-1], shape[-1] // 2]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, TORCH[data_type]), device=like.device)
    module = type(like).__module__.partition(".")[0]
    if module == "cupy":
        return sys.modules["cupy"].empty(shape, dtype=NUMPY[data_type])
    import numpy

    return numpy.empty(shape, dtype=NUMPY[data_type])


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


def require_plain(name: str, value: Any) -> None:
    """Raises unless the memory of a tensor of torch has its values: :class:`ArgumentError` for one that
    requires a gradient, and else :class:`TensorError`.
    """
    _require_memory(name, value)
    _require_no_gradient(name, value)


def _require_no_gradient(name: str, value: Any) -> None:
    if value.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ArgumentError(
            f"tensor {name} requires a gradient, and this call has no backward pass: make it under "
            f"torch.no_grad(), or pass {name}.detach()"
        )


def _require_memory(name: str, value: Any) -> None:
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
    require_storage(name, value)


def _of_torch(name: str, value: Any, wanted: str) -> Described:
    data_type = _name_of(name, value, str(value.dtype).removeprefix("torch."), wanted)
    _require_memory(name, value)
    device = value.device
    place = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
    found = Described(value.data_ptr(), data_type, tuple(value.shape), value.stride(), place, value)
    if data_type == "e2m1":
        # torch counts pairs.
        return _as(found._replace(data_type="u8"), "e2m1")
    return found


def _is_writable(name: str, value: Any, is_numpy: bool) -> bool:
    """Whether calls may write an array of any library but torch; DLPack alone says so later."""
    if is_numpy:
        return bool(value.flags.writeable)
    if hasattr(value, "__cuda_array_interface__"):
        return not _interface_of(name, value)["data"][1]
    # Their arrays never change, and not every version says so.
    return type(value).__module__.partition(".")[0] not in ("jax", "jaxlib", "tensorflow")


def _of_numpy(name: str, value: Any, wanted: str) -> Described:
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray) and masked.is_masked(value):
        raise refuse(name, "plain values: call filled()", "a masked array")
    found = _of_interface(name, value, value.__array_interface__, value.dtype.name, wanted, "cpu")
    require_numpy_memory(name, value)
    return found


def require_numpy_memory(name: str, value: Any) -> None:
    """Raises :class:`TensorError` for an array of NumPy that is longer than its memory: a view may be by now,
    or by ``as_strided``.
    """
    owner: Any = value
    while hasattr(owner, "__array_interface__") and getattr(owner, "base", None) is not None:
        owner = owner.base
    there = _memory_of(owner)
    if there is not None and owner is not value and value.size:
        begin, end = there
        first = value.__array_interface__["data"][0]
        steps = [(size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)]
        last = first + sum(step for step in steps if step > 0) + value.itemsize
        first += sum(step for step in steps if step < 0)
        if not (begin <= first and last <= end):
            raise refuse(name, "a view that ends within its array", "a longer one, of freed or other memory")


def _memory_of(owner: Any) -> tuple[int, int] | None:
    """Returns begin and end of the memory of an array that owns it, of NumPy or torch; ``None`` of others."""
    numpy, torch = sys.modules["numpy"], sys.modules.get("torch")
    if torch is not None and isinstance(owner, torch.Tensor):
        storage = owner.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if isinstance(owner, numpy.ndarray) and owner.flags.owndata:
        begin = owner.__array_interface__["data"][0]
        return begin, begin + owner.nbytes
    return None


def _interface_of(name: str, value: Any) -> dict[str, Any]:
    """Returns the interface of an array on a GPU. Raises :class:`TensorError` for one that is incomplete."""
    interface = value.__cuda_array_interface__
    try:
        address, is_read_only = interface["data"]
        typestr, shape, strides = str(interface["typestr"]), interface["shape"], interface.get("strides")
        return {
            "data": (int(address), bool(is_read_only)),
            "typestr": f"{typestr[:2]}{int(typestr[2:])}",
            "shape": tuple(int(size) for size in shape),
            "strides": None if strides is None else tuple(int(stride) for stride in strides),
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        given = f"a {type(value).__name__} with an incomplete one: {error!r}"
        raise refuse(name, "a whole __cuda_array_interface__", given) from None


def _of_cuda_interface(name: str, value: Any, wanted: str) -> Described:
    interface = _interface_of(name, value)
    kind = _type_of_typestr(str(interface["typestr"]))
    kind = str(getattr(getattr(value, "dtype", None), "name", kind))
    device = getattr(getattr(value, "device", None), "id", 0)
    return _of_interface(name, value, interface, kind, wanted, f"cuda:{device}")


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
        strides = dense(shape)
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


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def _of_dlpack(name: str, value: Any, wanted: str, written: bool) -> Described:
    try:
        given = of_capsule(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        given_text = f"a {type(value).__name__} whose __dlpack__ fails: {error}"
        raise refuse(name, f"a tensor of {wanted}", given_text) from None
    if written and given.is_read_only:
        raise refuse(name, "memory that can be written", f"a read-only {type(value).__name__}")
    data_type = _name_of(name, value, given.element, wanted)
    # kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged.
    kind, number = given.device
    places = {1: "cpu", 2: f"cuda:{number}", 3: "cpu", 13: f"cuda:{number}"}
    place = places.get(kind)
    if place is None:
        raise refuse(name, "memory of the CPU or of a GPU", f"DLPack device {kind}")
    strides = dense(given.shape) if given.strides is None else given.strides
    if any(stride < 0 for stride in strides):
        raise refuse(name, "strides of at least 0: make it contiguous", f"strides {list(strides)}")
    return Described(given.address, data_type, given.shape, strides, place, given.capsule)
