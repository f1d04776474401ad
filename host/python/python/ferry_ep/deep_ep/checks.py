"""Checks of arguments, before anything is sent. Where DeepEP asserts, these raise, with name and value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core._ferry import require_plain, require_storage
from ..core.errors import ArgumentError, refuse
from ..core.scalars import shown, whole
from ..core.tensors import reader_of_torch
from .settings import say_once
from .tuning import MOST_SMS, Config, topk_idx_t

__all__ = [
    "require_bias",
    "require_config",
    "require_layout",
    "require_memory",
    "require_on",
    "require_readable",
    "require_readable_on_cpu",
    "require_rows",
    "require_tensor",
    "require_topk",
    "signature",
]

#: Reads tensors natively.
_reader = reader_of_torch()
#: FP8, which needs scales.
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Chunks that nobody has set.
_CHUNKS = Config().chunks


def require_tensor(name: str, value: Any, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raises :class:`ferry_ep.TensorError` unless it is a tensor of this type without gaps; ``None`` in
    ``shape`` is any size.
    """
    if isinstance(value, Tensor) and value.dtype == dtype and value.is_contiguous():
        sizes = value.shape
        if len(sizes) == len(shape) and all(
            size is None or size == given for size, given in zip(shape, sizes, strict=True)
        ):
            return
    named = ", ".join("any" if size is None else str(size) for size in shape)
    wanted = f"a tensor of {dtype} without gaps, shape [{named}]"
    if not isinstance(value, Tensor):
        raise refuse(name, wanted, "none" if value is None else type(value).__name__)
    raise refuse(name, wanted, f"{value.dtype}, shape {list(value.shape)}, strides {list(value.stride())}")


def signature(*values: Any) -> bytes | None:
    """Returns the types, devices, shapes and strides of tensors: equal for arguments that the checks of a
    buffer cannot tell apart. ``None`` if calls on a GPU need a description of one (:meth:`Reader.takes`), and
    in a torch without DLPack's exchange API.
    """
    return None if _reader is None else _reader.signature(values, torch.is_grad_enabled())


def require_readable(signature: bytes | None, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    """Raises unless torch's tensors, or ``None``, have values in memory that calls can read. ``signature`` is
    theirs: it says all but whether their memory is there, so that this is for each call, also for tensors
    like those of an earlier one.

    Raises :class:`ferry_ep.TensorError`, or :class:`ferry_ep.ArgumentError` for one that requires a gradient.
    """
    for name, value in zip(names, values, strict=True):
        if value is None:
            continue
        if signature is None:
            require_plain(name, value)
        else:
            require_memory(name, value)


def require_on(device: torch.device, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    """Raises :class:`ferry_ep.TensorError` unless tensors, or ``None``, are on a device that has memory."""
    for name, value in zip(names, values, strict=True):
        # :func:`require_readable` refuses tensors without memory.
        if value is not None and value.device != device and device.type != "meta":
            raise refuse(name, f"memory of {device}", f"a tensor on {value.device}")


def require_memory(name: str, value: Tensor) -> None:
    """Raises :class:`ferry_ep.TensorError` if the memory of a tensor of torch that was there was freed."""
    if value.is_cuda:
        # Native code compares lengths, once it reads the tensor. What is freed is refused before.
        if value.data_ptr() == 0 and value.numel():
            require_storage(name, value)
        return
    # Steps in Python add up. A tensor with gaps is longer than its elements.
    if (
        not value.is_contiguous()
        or value.untyped_storage().nbytes() < value.nbytes + value.storage_offset() * value.itemsize
    ):
        require_storage(name, value)


def require_readable_on_cpu(names: tuple[str, ...], values: tuple[Tensor, ...]) -> None:
    """As :func:`require_readable`, for tensors that a call on a GPU does not read, and a later one may."""
    if not values[0].is_cuda:
        require_readable(signature(*values), names, values)


def require_rows(name: str, x: Any, shape: tuple[int | None, int | None] = (None, None)) -> Tensor:
    """Checks rows that travel, BF16 ``[tokens, hidden]``, and returns them."""
    if isinstance(x, Tensor) and x.dtype == torch.float16:
        raise refuse(name, "torch.bfloat16, in which sums are returned: convert float16 rows", str(x.dtype))
    if isinstance(x, Tensor) and x.dtype in _FP8:
        raise refuse(
            name, "torch.bfloat16, or in a dispatch a tuple of FP8 rows and their scales", str(x.dtype)
        )
    require_tensor(name, x, torch.bfloat16, shape)
    assert isinstance(x, Tensor)
    if x.shape[1] % 8:
        raise refuse(name, "rows of a multiple of 16 bytes", f"hidden size {x.shape[1]}")
    return x


def require_topk(topk_idx: Any, topk_weights: Any, tokens: int) -> tuple[Tensor, Tensor]:
    """Checks ids and weights of a dispatch, which come together, and returns them."""
    require_tensor("topk_idx", topk_idx, topk_idx_t, (tokens, None))
    require_tensor("topk_weights", topk_weights, torch.float32, (tokens, topk_idx.shape[1]))
    return topk_idx, topk_weights


def require_layout(
    num_tokens_per_rank: Any, is_token_in_rank: Any, num_tokens_per_expert: Any, tokens: int, ranks: int
) -> tuple[int, Tensor, Tensor]:
    """Checks the results of ``get_dispatch_layout``. Returns the number of experts, and the last two."""
    require_tensor("num_tokens_per_rank", num_tokens_per_rank, torch.int32, (ranks,))
    require_tensor("is_token_in_rank", is_token_in_rank, torch.bool, (tokens, ranks))
    require_tensor("num_tokens_per_expert", num_tokens_per_expert, torch.int32, (None,))
    experts = int(num_tokens_per_expert.shape[0])
    if experts == 0 or experts % ranks:
        raise refuse("num_tokens_per_expert", f"a multiple of {ranks} ranks", f"{experts} experts")
    return experts, is_token_in_rank, num_tokens_per_expert


def require_bias(bias: Any, tokens: int, hidden: int) -> None:
    """Checks the tensors with which sums begin."""
    if bias is None:
        return
    given = bias if isinstance(bias, tuple) else (bias,)
    if isinstance(bias, tuple) and len(bias) != 2:
        raise ArgumentError(f"bias has {len(bias)} tensors, but it is a tensor or a tuple of two")
    for index, each in enumerate(given):
        name = f"bias[{index}]" if isinstance(bias, tuple) else "bias"
        require_tensor(name, each, torch.bfloat16, (tokens, hidden))


def require_config(config: Any) -> int:
    """Returns the multiprocessors of a call, 0 for all. Says once that chunks are ignored."""
    if not isinstance(config, Config):
        raise ArgumentError(f"config is {shown(config)}, but it is a Config, or None")
    if config.chunks != _CHUNKS:
        say_once(
            "ferry_ep.deep_ep: chunk sizes of Config are tuning of DeepEP's kernels and have no effect here; "
            "num_sms has"
        )
    num_sms = whole("config.num_sms", config.num_sms, most=MOST_SMS)
    if num_sms % 2:
        raise ArgumentError(f"config.num_sms is {num_sms}, but it is even")
    return num_sms
