"""Rows of a dispatch: BF16, or FP8 with scales, which travel as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import refuse
from .checks import require_rows, require_tensor

__all__ = ["GROUP", "Rows", "given", "rows_of"]

#: Elements that share a scale.
GROUP = 128


class Rows(NamedTuple):
    """Rows that a dispatch sends, ``[tokens, hidden]``: ``scales`` is ``None`` for BF16."""

    tokens: Tensor
    scales: Tensor | None

    @property
    def format(self) -> str:
        """Format of the plan."""
        return "bf16" if self.scales is None else "fp8"

    @property
    def given(self) -> Any:
        """The rows as callers have them."""
        return given(self.tokens, self.scales)

    def sent(self, ids: Tensor, weights: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the inputs of a dispatch of these rows, in the order of ``arguments_of``."""
        return self.tokens, ids, weights, None, None, self.scales

    def as_sent(self, scales: Tensor | None) -> Tensor | None:
        """Returns received scales, of the type of those that were sent, without gaps."""
        if scales is None or self.scales is None or self.scales.dtype == torch.float32:
            return scales
        # Packed powers of two have arrived as f32: their exponents are those that were packed.
        exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
        return exponents.view(torch.int32)


def given(tokens: Tensor, scales: Tensor | None) -> Any:
    """Returns rows as callers have them: a tensor, or a tuple of rows and scales."""
    return tokens if scales is None else (tokens, scales)


def rows_of(x: Any, tokens: int | None = None) -> Rows:
    """Checks rows of a dispatch: bfloat16 ``[tokens, hidden]``, or a tuple of these as float8_e4m3fn and
    their scales, float32 ``[tokens, hidden / 128]`` or int32 ``[tokens, hidden / 512]`` with any strides.
    """
    if not isinstance(x, tuple):
        return Rows(require_rows("x", x, (tokens, None)), None)
    if len(x) != 2:
        raise refuse("x", "a tensor, or a tuple of rows and scales", f"a tuple of {len(x)}")
    codes, scales = x
    require_tensor("x[0]", codes, torch.float8_e4m3fn, (tokens, None))
    count, hidden = codes.shape
    if hidden % GROUP:
        raise refuse("x[0]", f"rows of a multiple of {GROUP} elements", f"hidden size {hidden}")
    given = scales.dtype if isinstance(scales, Tensor) else None
    width = hidden // (4 * GROUP if given == torch.int32 else GROUP)
    is_type = given == torch.float32 or (given == torch.int32 and hidden % (4 * GROUP) == 0)
    if not is_type or scales.shape != (count, width):
        wanted = (
            f"a scale for {GROUP} elements of a row: torch.float32 [{count}, {hidden // GROUP}], or four of "
            f"them as UE8M0, torch.int32 [{count}, {hidden} / 512]"
        )
        if given not in (torch.float32, torch.int32):
            raise refuse("x[1]", wanted, type(scales).__name__ if given is None else str(given))
        raise refuse("x[1]", wanted, f"{given}, shape {list(scales.shape)}")
    return Rows(codes, scales)
