"""Memory of torch's tensors, which may be shorter than their shape says: FSDP frees it, for one."""

from __future__ import annotations

from typing import Any

from .errors import refuse

__all__ = ["require_storage"]


def require_storage(name: str, value: Any) -> None:
    """Raises :class:`ferry_ep.TensorError` unless the storage of a tensor of torch has all its elements."""
    try:
        # Fake tensors have a storage on no device; tensors of transforms have none, and say so.
        storage = value.untyped_storage()
        there = int(storage.nbytes()) if storage.device.type == value.device.type else 0
        offset, shape, strides = int(value.storage_offset()), tuple(value.shape), value.stride()
    except (RuntimeError, NotImplementedError) as error:
        raise refuse(name, "a tensor with memory", f"a {type(value).__name__}: {error}") from None
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    wanted = (offset + last + 1) * value.element_size()
    if wanted > there and 0 not in shape:
        given = f"one of {there} bytes: it was freed or shrunk, or is not there"
        raise refuse(name, f"a storage of {wanted} bytes, for shape {list(shape)}", given)
