"""Element types, and arrays of other libraries that are allocated here, in which none is imported unless an
array of it is given.
"""

from __future__ import annotations

import sys
from typing import Any

from ._ferry import Reader, Tensor, element_named, format_sizes
from .errors import ArgumentError, refuse
from .scalars import shown

__all__ = ["NUMPY", "TORCH", "Repeated", "allocate", "element", "elements_of", "is_allocated_here"]
__all__ += ["reader_of", "reader_of_torch", "scales_of", "stream_of"]

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


def element(data_type: Any) -> str:
    """Returns the name here of a type of elements, which is that name, or one of NumPy or torch."""
    name = data_type if isinstance(data_type, str) else getattr(data_type, "name", None)
    if name is None:
        name = getattr(data_type, "__name__", None)
    if name is None and type(data_type).__name__ == "dtype":
        name = str(data_type).removeprefix("torch.")
    name = element_named(name) if isinstance(name, str) else None
    if name not in NUMPY:
        raise ArgumentError(f"data_type is {shown(data_type)}, but there are {', '.join(NUMPY)}")
    return name


def elements_of(format: str) -> str:
    """Returns the type of a format's elements."""
    return {16: "bf16", 8: "e4m3", 4: "e2m1"}[format_sizes(format)[0]]


def scales_of(format: str) -> str:
    """Returns the type of a format's scales."""
    if format == "fp8":
        return "f32"
    return "e4m3" if format.startswith("nvfp4") else "e8m0"


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
