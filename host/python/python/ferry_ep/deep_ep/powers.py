"""FP8 with scales that are powers of two, which DeepEP has in low-latency mode."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "to_powers_of_two"]

#: Elements that share a scale; largest value of E4M3; least absolute maximum of a group, as DeepEP's.
_GROUP, _E4M3_MAX, _LEAST = 128, 448.0, 1e-4
#: Mantissa bits of f32, all set.
_MANTISSA = (1 << 23) - 1


def to_powers_of_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns BF16 rows ``[tokens, hidden]`` as E4M3, and f32 scales ``[tokens, hidden / 128]``: the least
    powers of two with which no element is beyond E4M3.
    """
    groups = x.float().unflatten(1, (-1, _GROUP))
    # By a tensor: on a GPU torch multiplies by the inverse of a number, which is off by a bit at times.
    most = torch.full((), _E4M3_MAX, device=x.device)
    least = groups.abs().amax(2, keepdim=True).clamp_min(_LEAST) / most
    # Adding the mantissa's largest value carries into the exponent unless it is a power of two already.
    scales = ((least.view(torch.int32) + _MANTISSA) & ~_MANTISSA).view(torch.float32)
    return (groups / scales).to(torch.float8_e4m3fn).flatten(1), scales.squeeze(2)


def pack(scales: Tensor, packed: Tensor) -> None:
    """Writes scales that are powers of two, f32 ``[experts, hidden / 128, rows]``, as UE8M0, four in an int32
    ``[experts, hidden / 512, rows]``, the first in the lowest byte.
    """
    exponents = (scales.view(torch.int32) >> 23).unflatten(1, (-1, 4)).transpose(2, 3)
    packed.view(torch.uint8).unflatten(2, (-1, 4)).copy_(exponents)
