"""Configurations of DeepEP's kernels, and the bytes that rounds of Ferry take instead."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch

from ..core import config as plans
from ..core._ferry import Group, Plan
from ..core.config import with_fields
from ..core.errors import ArgumentError, PlanError
from ..core.scalars import whole
from .settings import Settings

__all__ = [
    "DEFAULT_TOKENS",
    "MOST_SMS",
    "Config",
    "fitting_tokens",
    "latency_plan_of",
    "latency_window_bytes",
]
__all__ += ["plan_of", "topk_idx_t"]

#: Type of expert ids.
topk_idx_t = torch.int64
#: Tokens of a rank for which :meth:`Config.get_nvl_buffer_size_hint` asks for room, unless
#: ``FERRY_DEEP_EP_MAX_TOKENS`` is set.
DEFAULT_TOKENS = 4096
#: Most multiprocessors of a call.
MOST_SMS = (1 << 32) - 1
#: Most tokens that are tried for a buffer.
_MOST_TOKENS = 1 << 24
#: Most top-k slots of a plan (:class:`ferry_ep.Config`), and local experts for which the hint has room.
_MOST_SLOTS, _HINTED_EXPERTS = 32, 256


@with_fields
@dataclass
class Config:
    """Tuning of DeepEP's kernels. Ferry takes ``num_sms`` from it; chunks have no counterpart."""

    num_sms: int = 20
    """Most multiprocessors that the kernels of a call occupy (:meth:`ferry_ep.Communicator.limit_sms`), an
    even number; 0 for all."""
    num_max_nvl_chunked_send_tokens: int = 6
    """Ignored."""
    num_max_nvl_chunked_recv_tokens: int = 256
    """Ignored."""
    num_max_rdma_chunked_send_tokens: int = 6
    """Ignored."""
    num_max_rdma_chunked_recv_tokens: int = 256
    """Ignored."""

    def __post_init__(self) -> None:
        self.num_sms = whole("num_sms", self.num_sms, most=MOST_SMS)
        for each in fields(self)[1:]:
            setattr(self, each.name, whole(each.name, getattr(self, each.name)))
        for kind in ("nvl", "rdma"):
            sent = getattr(self, f"num_max_{kind}_chunked_send_tokens")
            received = getattr(self, f"num_max_{kind}_chunked_recv_tokens")
            if not 0 < sent < received:
                raise ArgumentError(
                    f"num_max_{kind}_chunked_send_tokens is {sent}, but it is at least 1 and less than "
                    f"num_max_{kind}_chunked_recv_tokens, {received}"
                )

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens of a chunk, which are ignored."""
        sent = (self.num_max_nvl_chunked_send_tokens, self.num_max_rdma_chunked_send_tokens)
        return (*sent, self.num_max_nvl_chunked_recv_tokens, self.num_max_rdma_chunked_recv_tokens)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes of a receive window for ``FERRY_DEEP_EP_MAX_TOKENS`` tokens of a rank, 4,096
        unless set, whose rows have ``hidden_bytes`` when they are sent: of FP8 elements and their scales, or
        of BF16 ones, whichever takes more. They return as BF16. Not collective.

        Raises :class:`ferry_ep.ArgumentError` for a size that no plan has.
        """
        hidden_bytes = whole("hidden_bytes", hidden_bytes)
        num_ranks = whole("num_ranks", num_ranks, least=1)
        tokens = Settings.read().max_tokens or DEFAULT_TOKENS
        bytes_ = _window_bytes(num_ranks, -(-hidden_bytes // 16) * 8, tokens, "bf16")
        with suppress(PlanError):
            # No plan has rows of as many elements: so they are BF16's.
            bytes_ = max(bytes_, _window_bytes(num_ranks, -(-hidden_bytes // 128) * 128, tokens, "fp8"))
        return -(-bytes_ // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns 0: nothing travels by RDMA."""
        return 0


def plan_of(
    experts: int, top_k: int, hidden: int, tokens: int, deadline: float = 10.0, format: str = "bf16"
) -> plans.Config:
    """Returns the configuration of a round whose rows travel in ``format``, and return as BF16."""
    return plans.Config(
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        max_tokens_per_rank=tokens,
        format=format,
        receive="compact",
        combine_weights=True,
        deadline=deadline,
    )


def latency_plan_of(
    experts: int, top_k: int, hidden: int, tokens: int, deadline: float = 10.0, format: str = "bf16"
) -> plans.Config:
    """Returns the configuration of a round of low-latency mode: padded blocks with transposed scales, whose
    rows return one by one, and are weighed and summed at the source.
    """
    of_normal_mode = plan_of(experts, top_k, hidden, tokens, deadline, format)
    return replace(
        of_normal_mode,
        receive="padded",
        transposed_scales=format == "fp8",
        combine="exact",
        combine_weights=False,
    )


def latency_window_bytes(tokens: int, hidden: int, ranks: int, experts: int) -> int:
    """Returns the bytes of a receive window of low-latency mode for BF16 rows and the most top-k slots."""
    config = latency_plan_of(experts, min(_MOST_SLOTS, experts), hidden, tokens)
    return Plan(Group.simulated(ranks), config).window_bytes


def fitting_tokens(num_nvl_bytes: int, ranks: int, config: plans.Config) -> int:
    """Returns the most tokens of each rank for which a receive window of ``config`` fits into
    ``num_nvl_bytes``, whatever its own number is; 0 if not even one does.

    Raises :class:`ferry_ep.PlanError` for a configuration that does not work with any number.
    """
    return _fitting(num_nvl_bytes, ranks, replace(config, max_tokens_per_rank=1))


@lru_cache(maxsize=64)
def _fitting(num_nvl_bytes: int, ranks: int, config: plans.Config) -> int:
    group = Group.simulated(ranks)
    # Raises what does not depend on the number of tokens.
    fits, too_many = 0, _MOST_TOKENS
    if Plan(group, config).window_bytes > num_nvl_bytes:
        return fits
    while too_many - fits > 1:
        tokens = (fits + too_many) // 2
        try:
            is_room = Plan(group, replace(config, max_tokens_per_rank=tokens)).window_bytes <= num_nvl_bytes
        except PlanError:
            is_room = False
        fits, too_many = (tokens, too_many) if is_room else (fits, tokens)
    return fits


@lru_cache(maxsize=64)
def _window_bytes(ranks: int, hidden: int, tokens: int, format: str) -> int:
    """Returns the bytes of a window for the most experts and top-k slots that the hint has room for."""
    config = plan_of(_HINTED_EXPERTS * ranks, _MOST_SLOTS, hidden, tokens, format=format)
    return Plan(Group.simulated(ranks), config).window_bytes
