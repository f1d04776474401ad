"""Sizes and behavior of a communicator, and tensors that follow from them: plain data."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

__all__ = ["Config", "TensorLayout", "with_fields"]

Class = TypeVar("Class", bound=type)


def with_fields(cls: Class) -> Class:
    """Adds the texts that follow the fields of ``cls`` to its docstring, if its source is there."""
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, SyntaxError):
        return cls
    lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Fields:"]
    body = found.body if isinstance(found, ast.ClassDef) else []
    for field, text in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
            continue
        lines += ["", ast.unparse(field)]
        if isinstance(text.value, ast.Constant):
            lines.append(textwrap.indent(inspect.cleandoc(str(text.value.value)), "    "))
    cls.__doc__ = "\n".join(lines)
    return cls


class TensorLayout(NamedTuple):
    """An output of a dispatch that is not allocated: :meth:`ferry_ep.Plan.output_layout`."""

    name: str
    """Field of :class:`ferry_ep.DispatchOutput`."""
    data_type: str
    """Type of the elements, as in :class:`ferry_ep.Tensor`."""
    shape: list[int]
    """Sizes in elements, without gaps."""
    nbytes: int
    """Bytes of all elements."""
    align: int
    """Alignment of the address that is needed, in bytes."""


@with_fields
@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and behavior of a communicator: plain data, which :class:`ferry_ep.Plan` checks.

    All ranks of a group agree on everything but ``deadline``, ``debug_checks``, ``max_sms``,
    ``specialise``, ``options``, ``transposed_scales``, ``clear_absent``, ``clear_padding``, ``row_sources``,
    ``m_indices``, without ``skip_a2a`` ``shared_expert``, and ``receive`` between ``"by-expert"`` and
    ``"padded"`` or between the other three; creating communicators compares.

    >>> Config(experts=8, top_k=2, hidden=64, max_tokens_per_rank=16).format
    'bf16'
    """

    experts: int
    """Experts of the whole group, 1 to 65,535, divisible by the ranks. Rank ``r`` holds the experts from
    ``r * experts / ranks`` on."""
    top_k: int
    """Experts that a token names, 1 to 32 and at most ``experts``."""
    hidden: int
    """Elements of a token, a multiple of 8; in formats with scales of 64 (NVFP4) or 128."""
    max_tokens_per_rank: int
    """Most tokens that one rank brings to a dispatch. A rank may bring fewer, or none."""
    format: str = "bf16"
    """Format in which dispatch encodes tokens: ``bf16``, ``fp8`` (blockwise), ``mxfp8``, ``mxfp4``,
    ``nvfp4`` or ``nvfp4-row``, the last four with ``:tiled`` scales (the default) or ``:row-major`` ones.
    Combine is BF16 in any case."""
    receive: str = "by-expert"
    """Layout of the rows that dispatch leaves on the experts' rank. ``"by-expert"``: a row for each expert of
    a token, expert after expert. Three keep one row for each (source rank, token) with an expert here,
    and combine takes one row for each: ``"view"`` leaves them in the library's window
    (:meth:`ferry_ep.Communicator.view`), ``"strided"`` copies them to row ``source * max_tokens_per_rank +
    token``, ``"compact"`` to consecutive rows. They exclude ``skip_a2a``, ``shared_expert``, exact mode and
    tiled scales. ``"padded"`` has rows by expert, each expert's in a block of ``ranks * max_tokens_per_rank``
    rows, and combine takes the weights; it excludes ``skip_a2a``, ``shared_expert``, ``expert_alignment``
    and, between nodes, exact mode."""
    transposed_scales: bool = False
    """Whether the scales of ``fp8`` are ``[hidden / 128, rows]`` in a layout that keeps rows as they came,
    and in each block of a padded one, rather than ``[rows, hidden / 128]``. By expert they always are, and
    this is false."""
    clear_absent: bool = False
    """Whether dispatch writes zeros to the payload and scales of rows without a token, ``"strided"`` only.
    Otherwise they keep their bits."""
    combine_weights: bool = False
    """Whether combine also returns f32 weights with the rows, one for each top-k slot, in a layout that keeps
    rows as they came: ``received_weights`` of :meth:`ferry_ep.Communicator.combine`."""
    combine: str = "reduced"
    """``"reduced"``: the experts' rank multiplies and sums a token's rows, and one row returns.
    ``"exact"``: each expert's row returns unchanged, and the token's rank sums."""
    p2p_world_size: int | None = None
    """Ranks of one node, which write each other's memory directly; ``None``: all."""
    shared_expert: bool = False
    """Whether every token also goes to a shared expert, of which each rank has a copy."""
    deadline: float = 10.0
    """Longest wait of a kernel in seconds, above 0 and at most a day, unless
    :meth:`ferry_ep.Communicator.set_deadline` sets that of a call."""
    debug_checks: bool = False
    """Whether kernels look for experts that a token lists twice."""
    max_sms: int | None = None
    """Most multiprocessors that a kernel occupies; ``None`` for all."""
    skip_a2a: bool = False
    """Whether every rank brings the same tokens, so that nothing travels."""
    specialise: bool = False
    """Whether kernels are compiled for this very shape when the communicator is made."""
    options: bool = False
    """Whether the kernels with options are loaded, too."""
    expert_alignment: int = 1
    """Number of which each group's first row is a multiple, by expert only: a power of two, 1 to 256. ``fp8``
    aligns groups to 4 rows in any case. Above 1, outputs have ``expert_counts`` and ``row_ends``, too. Exact
    mode between nodes takes only that of the format."""
    clear_padding: bool = False
    """Whether dispatch writes zeros to the payload and scales of rows that pad a group, if rows are by
    expert. Otherwise they keep their bits."""
    row_sources: bool = False
    """Whether ``src_info`` has a source rank for each row, and outputs have its ``weights``, if rows are by
    expert, in padded blocks, too. Where rows stay as they came they always do."""
    m_indices: bool = False
    """Whether outputs have the group of each row, if rows are by expert."""
