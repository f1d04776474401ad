"""Capsules of DLPack."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

__all__ = ["of_capsule"]

#: ``DLTensor`` of dlpack.h, version 1.0: data, device type and number, dimensions, type (code, bits, lanes),
#: addresses of shape and strides, offset.
_TENSOR = struct.Struct("@PiiiBBHPPQ")
#: What ``DLManagedTensorVersioned`` has before its tensor: version, context, deleter, flags.
_VERSIONED = struct.Struct("@IIPPQ")
_MAJOR = 1
#: ``DLPACK_FLAG_BITMASK_READ_ONLY``.
_READ_ONLY = 1
#: Functions of the interpreter, with types of ours: ``ctypes.pythonapi`` is everybody's.
_API = ctypes.PyDLL(None)
_API.PyCapsule_IsValid.argtypes = ctypes.py_object, ctypes.c_char_p
_API.PyCapsule_GetPointer.argtypes = ctypes.py_object, ctypes.c_char_p
_API.PyCapsule_GetPointer.restype = ctypes.c_void_p
#: Types by code and bits.
_ELEMENTS = {
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


class Exported(NamedTuple):
    """An array in a capsule."""

    address: int
    #: Name of its elements' type.
    element: str
    shape: tuple[int, ...]
    #: In elements; None without gaps.
    strides: tuple[int, ...] | None
    #: Kind and number, as in dlpack.h.
    device: tuple[int, int]
    is_read_only: bool
    #: Keeps the memory alive: it is not consumed.
    capsule: Any


def of_capsule(value: Any) -> Exported:
    """Exports an array by ``__dlpack__``. Raises what that raises, and :class:`ValueError` for what is no
    capsule of DLPack.
    """
    try:
        # Read-only arrays are exported with a version alone.
        capsule = value.__dlpack__(max_version=(_MAJOR, 0))
    except TypeError:
        capsule = value.__dlpack__()
    is_read_only = False
    if _API.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        at = _API.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        major, *_, flags = _VERSIONED.unpack(ctypes.string_at(at, _VERSIONED.size))
        if major != _MAJOR:
            raise ValueError(f"DLPack version {major}")
        at, is_read_only = at + _VERSIONED.size, bool(flags & _READ_ONLY)
    else:
        at = _API.PyCapsule_GetPointer(capsule, b"dltensor")
    fields = _TENSOR.unpack(ctypes.string_at(at, _TENSOR.size))
    data, kind, number, ndim, code, bits, lanes, shape_at, strides_at, offset = fields
    element = _ELEMENTS.get((code, bits)) if lanes == 1 else None
    return Exported(
        (data or 0) + offset,
        element or f"DLPack type {(code, bits)}",
        _numbers(shape_at, ndim),
        _numbers(strides_at, ndim) if strides_at else None,
        (kind, number),
        is_read_only,
        capsule,
    )


def _numbers(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"@{count}q", ctypes.string_at(address, 8 * count))
