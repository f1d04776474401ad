"""Configurations of DeepEP's kernels, and the bytes that rounds of Ferry take instead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .. import config as plans
from .._ferry import Group, Plan
from ..errors import ArgumentError, PlanError
from ..fields import with_fields
from .settings import Settings

__all__ = ["DEFAULT_TOKENS", "Config", "latency_plan_of", "latency_window_bytes", "max_tokens", "topk_idx_t"]

#: Type of expert ids.
topk_idx_t = torch.int64
#: Tokens of a rank for which :meth:`Config.get_nvl_buffer_size_hint` asks for room, unless
#: ``FERRY_DEEP_EP_MAX_TOKENS`` is set.
DEFAULT_TOKENS = 4096
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
        if self.num_sms < 0:
            raise ArgumentError(f"num_sms is {self.num_sms}, but it is at least 0")
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
        unless set, whose BF16 rows have ``hidden_bytes``. Not collective.

        Raises :class:`ferry_ep.ArgumentError` for a size that no plan has.
        """
        tokens = Settings.read().max_tokens or DEFAULT_TOKENS
        hidden = -(-hidden_bytes // 16) * 8
        bytes_ = _window_bytes(num_ranks, _HINTED_EXPERTS * num_ranks, _MOST_SLOTS, hidden, tokens)
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
    return plans.Config(
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        max_tokens_per_rank=tokens,
        format=format,
        receive="padded",
        transposed_scales=format == "fp8",
        combine="exact",
        deadline=deadline,
    )


def latency_window_bytes(tokens: int, hidden: int, ranks: int, experts: int) -> int:
    """Returns the bytes of a receive window of low-latency mode for BF16 rows and the most top-k slots."""
    config = latency_plan_of(experts, min(_MOST_SLOTS, experts), hidden, tokens)
    return Plan(Group.simulated(ranks), config).window_bytes


def max_tokens(num_nvl_bytes: int, ranks: int, config: plans.Config, settings: Settings) -> int:
    """Returns the most tokens that one rank may bring to rounds of ``config``, whose own number is ignored:
    that of the settings, or the largest whose receive window fits into ``num_nvl_bytes``.

    All ranks get the same, as they depend on nothing else. Raises :class:`ferry_ep.ArgumentError` if not
    even one token fits.
    """
    if settings.max_tokens is not None:
        return settings.max_tokens
    return _fitting(num_nvl_bytes, ranks, replace(config, max_tokens_per_rank=1))


@lru_cache(maxsize=64)
def _fitting(num_nvl_bytes: int, ranks: int, config: plans.Config) -> int:
    group = Group.simulated(ranks)
    # Raises what does not depend on the number of tokens.
    least = Plan(group, config).window_bytes
    if least > num_nvl_bytes:
        raise ArgumentError(
            f"num_nvl_bytes is {num_nvl_bytes}, but a window for one token of each rank takes {least}: give "
            f"Buffer the bytes of Config.get_nvl_buffer_size_hint, or set FERRY_DEEP_EP_MAX_TOKENS"
        )
    fits, too_many = 1, _MOST_TOKENS
    while too_many - fits > 1:
        tokens = (fits + too_many) // 2
        try:
            is_room = Plan(group, replace(config, max_tokens_per_rank=tokens)).window_bytes <= num_nvl_bytes
        except PlanError:
            is_room = False
        fits, too_many = (tokens, too_many) if is_room else (fits, tokens)
    return fits


@lru_cache(maxsize=64)
def _window_bytes(ranks: int, experts: int, top_k: int, hidden: int, tokens: int) -> int:
    plan = Plan(Group.simulated(ranks), plan_of(experts, top_k, hidden, tokens))
    return plan.window_bytes
