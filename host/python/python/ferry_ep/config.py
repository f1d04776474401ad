"""Sizes and behavior of a communicator."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Config"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and behavior of a communicator: plain data, which :class:`ferry_ep.Plan` checks.

    All ranks of a group agree on everything but ``deadline``, ``debug_checks``, ``max_sms``,
    ``specialise``, ``options`` and, without ``skip_a2a``, ``shared_expert``; creating communicators compares.

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
    combine: str = "reduced"
    """``"reduced"``: the experts' rank multiplies and sums a token's rows, and one row returns.
    ``"exact"``: each expert's row returns unchanged, and the token's rank sums."""
    p2p_world_size: int | None = None
    """Ranks of one node, which write each other's memory directly; ``None``: all."""
    shared_expert: bool = False
    """Whether every token also goes to a shared expert, of which each rank has a copy."""
    deadline: float = 10.0
    """Longest wait of a kernel in seconds, above 0 and at most a day."""
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
