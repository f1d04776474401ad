"""Quantization and comparisons of tests."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "calc_diff",
    "create_grouped_scores",
    "hash_tensor",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
]

#: Elements that share a scale; largest value of E4M3; least absolute maximum of a group, as DeepEP's.
_GROUP, _E4M3_MAX, _LEAST = 128, 448.0, 1e-4


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Returns ``1 - 2 * <x, y> / (<x, x> + <y, y>)`` of both plus 1, in f64: 0 if they are equal."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a.square() + b.square()).sum())


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows ``[tokens, hidden]`` as E4M3, and f32 scales ``[tokens, hidden / 128]``, rounded up."""
    hidden = x.shape[1]
    groups = torch.nn.functional.pad(x.float(), (0, -hidden % _GROUP)).unflatten(1, (-1, _GROUP))
    largest = groups.abs().amax(2, keepdim=True).clamp_min(_LEAST)
    rows = (groups * (_E4M3_MAX / largest)).to(torch.float8_e4m3fn).flatten(1)
    # By a tensor: on a GPU torch multiplies by the inverse of a number, which is off by a bit at times.
    most = torch.full((), _E4M3_MAX, device=x.device)
    return rows[:, :hidden].contiguous(), (largest / most).squeeze(2)


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """Returns E4M3 rows times their scales as BF16. Scales are f32, or int32 of four exponents (UE8M0)."""
    tokens, hidden = x_fp8.shape
    if tokens == 0:
        return x_fp8.to(torch.bfloat16)
    if x_scales.dtype == torch.int32:
        # A copy, as one column counts as contiguous with any stride.
        packed = x_scales.clone(memory_format=torch.contiguous_format)
        exponents = packed.view(torch.uint8).view(tokens, -1)
        x_scales = (exponents.int() << 23).view(torch.float32)
    groups = torch.nn.functional.pad(x_fp8.float(), (0, -hidden % _GROUP)).unflatten(1, (-1, _GROUP))
    scaled = groups * x_scales.float()[:, : groups.shape[1]].unsqueeze(2)
    rows: Tensor = scaled.flatten(1)[:, :hidden].to(torch.bfloat16).contiguous()
    return rows


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Leaves each number from 0 on once in a row of ``x``, largest first, and -1 behind them. All are less
    than ``num_slots``.
    """
    ordered = x.sort(dim=1, descending=True).values
    is_again = torch.zeros_like(ordered, dtype=torch.bool)
    is_again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    x.copy_(ordered.masked_fill(is_again | (ordered < 0), -1).sort(dim=1, descending=True).values)


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """Returns ``scores``, ``[tokens, experts]``, with 0 outside of each token's groups of experts."""
    tokens, experts = scores.shape
    is_chosen = torch.zeros(tokens, num_groups, dtype=torch.bool, device=scores.device)
    is_chosen.scatter_(1, group_idx, True)
    return scores * is_chosen.repeat_interleave(experts // num_groups, dim=1)


def hash_tensor(t: Tensor) -> int:
    """Returns the sum of a tensor's bits as int32."""
    return int(t.view(torch.int32).sum().item())
