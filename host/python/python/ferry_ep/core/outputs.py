"""Outputs of a dispatch and of a fused SiLU."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ._ferry import describe
from .config import with_fields
from .errors import ArgumentError, refuse
from .memory import Memory
from .scalars import shown, whole

__all__ = ["TENSORS", "DispatchOutput", "ReceivedCounts", "SiluOutput"]


class ReceivedCounts(NamedTuple):
    """Numbers of the rows that a dispatch brings to a rank: :meth:`ferry_ep.Communicator.received`."""

    rows: int
    """Rows that the outputs need, and no more: a ``capacity`` for :meth:`ferry_ep.Communicator.outputs`."""
    scale_blocks: int
    """Blocks of tiled scales that the outputs need."""
    source_counts: list[int]
    """Rows of each source rank: by expert its assignments to this rank's experts, else its tokens that have
    one here."""
    expert_counts: list[int]
    """Assignments to each local expert."""


@with_fields
@dataclass(eq=False, kw_only=True)
class DispatchOutput:
    """The tensors that a dispatch writes, of one rank. :meth:`ferry_ep.Communicator.outputs` makes them.

    Tensors that the plan's format and ``receive`` layout do not have are ``None``. NumPy has no BF16, FP8 or
    4-bit elements: arrays have their bits as ``uint16`` or ``uint8``, two 4-bit elements in a byte. torch's
    ``row_offsets`` are ``int32``.

    By expert, ``groups`` are the local experts, in order, after the shared expert if there is one. In layouts
    that keep rows as they came there is a row for each source rank and token with an expert here: in views
    and strided rows row ``source * max_tokens_per_rank + token``; compact rows follow each other by source
    rank, then token. All others are rows without a token.
    """

    tokens: Any = None
    """``[rows, hidden]`` in the plan's format. By expert: rows by expert, then source rank, then token.
    Strided and compact: rows without a token are not written, or are zeros with ``clear_absent``. ``None`` in
    a view, where rows stay in the window (:meth:`ferry_ep.Communicator.view`)."""
    row_offsets: Any = None
    """u32 ``[groups + 1]``, by expert only: first row of each group, and the end of the last, with padding:
    multiples of ``plan.row_alignment``. Rows behind it are not written, nor are those that pad a group,
    unless ``clear_padding`` makes them zeros."""
    expert_ids: Any = None
    """i32 ``[groups]``, by expert only: ``0, 1, ..``."""
    src_info: Any = None
    """i32 ``[rows, 2]``. By expert: token of each row on its source rank, and its top-k slot there. Else:
    source rank and token, -1 and -1 in rows without a token. By expert with ``row_sources`` i32 ``[rows,
    3]``: source rank, token and top-k slot, -1 three times in rows without a token; slot -1 in the shared
    expert's rows."""
    ids: Any = None
    """``[rows, top_k]`` of the type of ``topk_ids``, not by expert: the local expert of each top-k slot, from
    0 on; -1 in slots of other ranks' experts, in slots that are not routed, and in rows without a token."""
    weights: Any = None
    """f32 ``[rows, top_k]``, not by expert: the router's weights where ``ids`` are not -1, 1 if the source
    gave none; 0 in all other slots. A weight whose bits are all ones arrives as ``0xfffffffe``. By expert
    with ``row_sources`` f32 ``[rows, 1]``: each row's weight, 1 in the shared expert's rows, 0 in rows
    without a token."""
    source_counts: Any = None
    """i32 ``[ranks]``, not by expert: number of rows from each source rank in these outputs."""
    expert_counts: Any = None
    """i32 ``[local_experts]``, not by expert: number of ``ids`` that name each local expert. A token that
    lists an expert twice counts twice. By expert with an ``expert_alignment`` above 1, and in padded blocks,
    i32 ``[groups]``: rows of each group, without padding."""
    row_ends: Any = None
    """u32 ``[groups]``, by expert with an ``expert_alignment`` above 1, and in padded blocks: the row after
    the last one of each group, without padding."""
    m_indices: Any = None
    """i32 ``[rows]``, with ``m_indices``: the group of each row, -1 in rows without a token: those that pad a
    group, and those behind ``row_offsets``."""
    source_ranges: Any = None
    """i64 ``[local_experts, ranks]``, of padded blocks: the rows of each source rank in each expert's block,
    in the lower 32 bits their number, in the upper ones the row of the block at which they begin."""
    scales: Any = None
    """Scales in the layout of the plan's format; ``None`` for BF16, and in a view, where they follow each
    row, unless they are transposed. ``fp8``: f32 ``[hidden / 128, rows]`` by expert and with
    ``transposed_scales`` (in padded blocks ``[local_experts * hidden / 128, rows of a block]``), else
    ``[rows, hidden / 128]``; row-major: a byte a scale, ``[rows, hidden /
    group]``; tiled: ``[scale_blocks, hidden / (4 * group), 32, 4, 4]``."""
    scale_offsets: Any = None
    """u32 ``[groups]``, tiled scales only: a row's block is ``row_offsets[group] // 128 +
    scale_offsets[group] + row_of_group // 128``."""
    row_scales: Any = None
    """BF16 ``[rows]``, ``nvfp4-row`` only: what each row is multiplied with besides its scales. ``None`` in a
    view, where it lies in each row."""
    rows: int = 0
    """Rows that fit."""
    scale_blocks: int = 0
    """Blocks of 128 rows of tiled scales that fit."""

    def rows_of(self, group: int) -> slice:
        """Returns the rows of ``group``, by expert only. Reads ``row_offsets``: waits for the device.

        Without a shared expert, group ``g`` on ``rank`` is expert ``plan.first_expert(rank) + g``. Raises
        :class:`ferry_ep.ArgumentError` unless ``group`` is 0 to ``plan.groups - 1``, and in layouts that keep
        rows as they came.
        """
        offsets = self.row_offsets
        if offsets is None:
            raise ArgumentError(
                f"group is {shown(group)}, but only rows by expert have groups: there is no row_offsets"
            )
        if isinstance(offsets, Memory):
            offsets = offsets.numpy()
        else:
            shape = describe("row_offsets", offsets, "u32")[0].shape
            if len(shape) != 1 or not hasattr(offsets, "__getitem__"):
                raise refuse("row_offsets", "1 dimension", f"shape {list(shape)}")
        groups = offsets.shape[0] - 1
        try:
            group = whole("group", group, most=groups - 1)
        except ArgumentError:
            raise ArgumentError(
                f"group is {shown(group)}, but there are {groups} groups, from 0 on"
            ) from None
        return slice(int(offsets[group]), int(offsets[group + 1]))

    def __repr__(self) -> str:
        return f"<ferry_ep.DispatchOutput of {self.rows} rows, {type(self.src_info).__name__}>"


#: Fields that are tensors.
TENSORS = tuple(field.name for field in fields(DispatchOutput) if field.name not in ("rows", "scale_blocks"))


@with_fields
@dataclass(eq=False)
class SiluOutput:
    """The tensors that a fused SiLU writes."""

    rows: Any
    """``[rows, columns]`` in the format."""
    scales: Any = None
    """Scales as dispatch writes them; ``None`` for BF16."""
