"""Outputs of a dispatch and of a fused SiLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DispatchOutput", "SiluOutput"]


@dataclass(eq=False)
class DispatchOutput:
    """The tensors that a dispatch writes, of one rank. :meth:`ferry_ep.Communicator.outputs` makes them.

    ``groups`` are the local experts, in order, after the shared expert if there is one. NumPy has no BF16,
    FP8 or 4-bit elements: arrays have their bits as ``uint16`` or ``uint8``, two 4-bit elements in a byte.
    torch's ``row_offsets`` are ``int32``.
    """

    tokens: Any
    """``[rows, hidden]`` in the plan's format: rows by expert, then source rank, then token."""
    row_offsets: Any
    """u32 ``[groups + 1]``: first row of each group, and the end of the last. Rows behind it are not
    written."""
    expert_ids: Any
    """i32 ``[groups]``: ``0, 1, ..``."""
    src_info: Any
    """i32 ``[rows, 2]``: token of each row on its source rank, and its top-k slot there."""
    scales: Any = None
    """Scales in the layout of the plan's format; ``None`` for BF16. ``fp8``: f32 ``[hidden / 128, rows]``;
    row-major: a byte a scale, ``[rows, hidden / group]``; tiled: ``[scale_blocks, hidden / (4 * group), 32,
    4, 4]``."""
    scale_offsets: Any = None
    """u32 ``[groups]``, tiled scales only: a row's block is ``row_offsets[group] // 128 +
    scale_offsets[group] + row_of_group // 128``."""
    row_scales: Any = None
    """BF16 ``[rows]``, ``nvfp4-row`` only: what each row is multiplied with besides its scales."""
    rows: int = 0
    """Rows that fit."""
    scale_blocks: int = 0
    """Blocks of 128 rows of tiled scales that fit."""

    def rows_of(self, group: int) -> slice:
        """Returns the rows of ``group``. Reads ``row_offsets``, which waits for the device."""
        return slice(int(self.row_offsets[group]), int(self.row_offsets[group + 1]))

    def __repr__(self) -> str:
        return f"<ferry_ep.DispatchOutput of {self.rows} rows, {type(self.tokens).__name__}>"


@dataclass(eq=False)
class SiluOutput:
    """The tensors that a fused SiLU writes."""

    rows: Any
    """``[rows, columns]`` in the format."""
    scales: Any = None
    """Scales as dispatch writes them; ``None`` for BF16."""
