"""Low-latency mode of DeepEP's ``Buffer``: padded blocks of each expert, and hooks that receive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ArgumentError, ClosedError, refuse
from ..core.scalars import whole
from .absent import Absent, refuse_absent, refuse_forks
from .checks import require_memory, require_on, require_readable, require_rows, require_tensor, signature
from .events import IN_CURRENT, EventOverlap, InPlace, Ordered, mark_used
from .latency_rounds import Blocks, LatencyHandle, LatencyLane
from .powers import pack, to_powers_of_two
from .rows import GROUP
from .runtime import Runtime
from .tuning import latency_window_bytes, topk_idx_t

__all__ = ["LowLatency"]

#: Elements that share an int32 of packed scales.
_PACKED = 4 * GROUP
#: Name of an argument.
_STATS = "cumulative_local_expert_recv_stats"
_NO_STATS = "kernels do not time their waits: leave it None"


class LowLatency(Absent):
    """Calls of low-latency mode. Rows return one by one, and are weighed and summed at their source in the
    order of the slots, so that sums have the same bits for any number of ranks.
    """

    group_size: int
    low_latency_mode: bool
    runtime: Runtime | None

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes of a receive window of low-latency mode, BF16, for as many top-k slots as a plan
        can have, at most 32. Not collective.

        Raises :class:`ferry_ep.PlanError` for sizes that no plan has.
        """
        tokens = whole("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank)
        num_experts = whole("num_experts", num_experts)
        return -(-latency_window_bytes(tokens, hidden, num_ranks, num_experts) // 128) * 128

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: both modes have windows of their own, which need no cleaning."""
        self._require_low_latency("clean_low_latency_buffer")

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **options: Any,
    ) -> tuple[Any, Tensor, LatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Sends tokens to their experts, and receives those of this rank's. Collective. Does not synchronize;
        on the CPU it waits for its peers, or the hook does.

        ``x``: bfloat16 ``[tokens, hidden]``. ``topk_idx``: int64 ``[tokens, top_k]``, -1 for none; a token
        names an expert once. ``num_max_dispatch_tokens_per_rank``: most tokens of a rank, the same on all.
        ``cumulative_local_expert_recv_stats``: int32 ``[local_experts]``, to which the counts are added.
        ``use_fp8``: rows travel as E4M3 with a scale for 128 elements; ``round_scale``: scales are powers of
        two; ``use_ue8m0``, with ``round_scale``: four of them in an int32. ``return_recv_hook``: sends alone,
        on the current stream; the hook receives on the stream that is current when it is called. Results are
        filled only then. All ranks call hooks in the same order between other calls.

        Returns rows ``[local_experts, B, hidden]``, where ``B`` is the ranks times
        ``num_max_dispatch_tokens_per_rank``, or a tuple of these and scales, float32 ``[local_experts, B,
        hidden / 128]`` or int32 ``[local_experts, B, hidden / 512]``, both with adjacent rows next to each
        other in memory; the rows of each expert, int32 ``[local_experts]``, behind which rows are not
        written; the handle (:class:`LatencyHandle`); the event; and the hook, or ``None``. An expert's rows
        are by source rank, then token.

        Raises ``NotImplementedError`` for ``dispatch_wait_recv_cost_stats`` and arguments of forks,
        :class:`ferry_ep.TensorError`, :class:`ferry_ep.ArgumentError`, :class:`ferry_ep.OrderError` if two
        rounds are under way and the hook of the oldest was not called, and as
        :meth:`ferry_ep.Communicator.dispatch`.
        """
        runtime = self._require_low_latency("low_latency_dispatch")
        if options:
            refuse_forks("low_latency_dispatch", options)
        if dispatch_wait_recv_cost_stats is not None:
            refuse_absent("dispatch_wait_recv_cost_stats", _NO_STATS)
        most = whole("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, least=1)
        num_experts = whole("num_experts", num_experts, least=1)
        stats = cumulative_local_expert_recv_stats
        sizes, encoding = (most, num_experts), (use_fp8, round_scale, use_ue8m0)
        tensors = signature(x, topk_idx, stats)
        key = tensors and (tensors, sizes, encoding)
        lane = runtime.checked.get(key)
        if lane is None:
            lane = runtime.keep(key, self._checked_lane(runtime, x, topk_idx, stats, sizes, encoding))
        require_readable(tensors, ("x", "topk_idx", _STATS), (x, topk_idx, stats))
        packed = None
        with _ordered(runtime, x, async_finish, return_recv_hook) as ordered:
            ordered.reads(x, topk_idx, stats)
            if use_fp8 and use_ue8m0:
                local, rows, hidden = lane.block_shape
                packed = torch.empty(local, hidden // _PACKED, rows, dtype=torch.int32, device=x.device)
            blocks, handle, hook = lane.dispatch(
                to_powers_of_two(x) if use_fp8 and round_scale else x,
                topk_idx,
                ordered=ordered,
                is_split=return_recv_hook,
                is_plain=tensors is not None,
                finish=None if packed is None and stats is None else partial(_finish, packed, stats),
                written=(packed, stats),
            )
            ordered.returns(blocks.rows, blocks.scales, packed, blocks.counts, *blocks.sources)
        received: Any = blocks.rows
        if use_fp8:
            received = (received, blocks.scales if packed is None else packed.transpose(1, 2))
        return received, blocks.counts, handle, ordered.event, hook

    def _checked_lane(
        self,
        runtime: Runtime,
        x: Any,
        topk_idx: Any,
        stats: Any,
        sizes: tuple[int, int],
        encoding: tuple[bool, bool, bool],
    ) -> LatencyLane:
        """Checks the arguments of a dispatch, and returns its lane. ``sizes``: most tokens of a rank, and
        experts. ``encoding``: ``use_fp8``, ``round_scale``, ``use_ue8m0``.
        """
        most, experts = sizes
        require_rows("x", x)
        tokens, hidden = x.shape
        require_tensor("topk_idx", topk_idx, topk_idx_t, (tokens, None))
        self._require_sizes(tokens, most, experts)
        if stats is not None:
            local = experts // self.group_size
            require_tensor(_STATS, stats, torch.int32, (local,))
        _require_scales(hidden, *encoding)
        require_on(x.device, ("topk_idx", _STATS), (topk_idx, stats))
        return runtime.latency_lane(
            experts, topk_idx.shape[1], hidden, most, "fp8" if encoding[0] else "bf16"
        )

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Sends rows back, and weighs and sums those of each token. Collective. Does not synchronize; on the
        CPU it waits for its peers, or the hook does.

        ``x``: bfloat16 ``[local_experts, B, hidden]``, in the order of the dispatch of ``handle``; rows
        behind each expert's last one are not read. ``topk_idx``: that of the dispatch, whose ids count,
        whatever it has. ``topk_weights``: float32 ``[tokens, top_k]``, those in slots of -1 are not used.
        ``zero_copy``: takes the rows from :meth:`get_next_low_latency_combine_buffer` instead of ``x``, which
        only has their shape. ``out``: bfloat16 ``[tokens, hidden]``. ``return_recv_hook``: as in
        :meth:`low_latency_dispatch`.

        Returns the sums, bfloat16 ``[tokens, hidden]``: in f32, in the order of the slots, rounded once; the
        event; and the hook, or ``None``.

        Raises ``NotImplementedError`` for ``use_logfmt``, ``combine_wait_recv_cost_stats`` and arguments of
        forks, :class:`ferry_ep.TensorError`, :class:`ferry_ep.ArgumentError`, :class:`ferry_ep.OrderError`
        before the hook of the dispatch, and as :meth:`ferry_ep.Communicator.combine`.
        """
        runtime = self._require_low_latency("low_latency_combine")
        if options:
            refuse_forks("low_latency_combine", options)
        if combine_wait_recv_cost_stats is not None:
            refuse_absent("combine_wait_recv_cost_stats", _NO_STATS)
        if use_logfmt:
            refuse_absent("use_logfmt=True", "rows return as BF16: leave it False")
        given = _require_handle(runtime, handle)
        # Of ids, and with zero_copy of rows, only the shape counts.
        rows = None if zero_copy else x
        tensors = signature(x, topk_idx, topk_weights, out)
        key = tensors and (tensors, given.lane.block_shape, given.topk, zero_copy)
        if key not in runtime.checked:
            _check_answers(given, x, topk_idx, topk_weights, out)
            require_on(given.sources.first.device, ("x", "topk_weights", "out"), (rows, topk_weights, out))
            runtime.keep(key, True)
        require_readable(tensors, ("x", "topk_weights"), (rows, topk_weights))
        if out is not None:
            require_readable(tensors, ("out",), (out.detach(),))
        if zero_copy:
            if given.scratch is None:
                raise ArgumentError(
                    "zero_copy is True, but get_next_low_latency_combine_buffer(handle) was not called"
                )
            x = given.scratch
            tensors = tensors and signature(x)
            require_readable(tensors, ("the rows of zero_copy",), (x,))
        with _ordered(runtime, x, async_finish, return_recv_hook) as ordered:
            ordered.reads(x, topk_weights, out)
            if zero_copy:
                # The handle's memory may be of another stream, and be freed before the work is done.
                mark_used(x.device, x)
            sums, hook = given.lane.combine(
                x,
                topk_weights,
                given,
                ordered=ordered,
                out=out,
                is_plain=tensors is not None,
                is_split=return_recv_hook,
            )
            ordered.returns(sums)
        return sums, ordered.event, hook

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """Returns memory for the rows of a combine with ``zero_copy``, bfloat16 ``[local_experts, B,
        hidden]``, not cleared: a tensor of the handle's, which the combine copies from. Not collective.
        """
        runtime = self._require_low_latency("get_next_low_latency_combine_buffer")
        given = _require_handle(runtime, handle)
        if given.scratch is None:
            device = given.sources.first.device
            given.scratch = torch.empty(given.block_shape, dtype=torch.bfloat16, device=device)
        return given.scratch

    def _live(self) -> Runtime:
        """Returns the runtime. Raises :class:`ferry_ep.ClosedError` after ``destroy``."""
        if self.runtime is None:
            raise ClosedError("the buffer was destroyed")
        return self.runtime

    def _require_low_latency(self, method: str) -> Runtime:
        """Returns the runtime of a buffer that has low-latency mode."""
        if self.runtime is not None and self.low_latency_mode:
            return self.runtime
        if not self.low_latency_mode:
            raise ArgumentError(
                f"low_latency_mode is False, but {method} needs a Buffer that was made with True"
            )
        return self._live()

    def _require_sizes(self, tokens: int, most: int, experts: int) -> None:
        """Checks numbers of a dispatch."""
        if tokens > most:
            raise ArgumentError(f"num_max_dispatch_tokens_per_rank is {most}, but x has {tokens} tokens")
        if experts % self.group_size:
            raise ArgumentError(f"num_experts is {experts}, but it is a multiple of {self.group_size} ranks")


def _require_scales(hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> None:
    """Checks how rows are encoded; without ``use_fp8`` the others have no effect, as in DeepEP."""
    if not use_fp8:
        return
    if use_ue8m0 and not round_scale:
        raise ArgumentError("use_ue8m0 is True, but round_scale is False: UE8M0 scales are powers of two")
    elements = _PACKED if use_ue8m0 else GROUP
    if hidden % elements:
        raise refuse("x", f"rows of a multiple of {elements} elements", f"hidden size {hidden}")


def _check_answers(handle: LatencyHandle, x: Any, topk_idx: Any, topk_weights: Any, out: Any) -> None:
    """Checks the tensors of a combine."""
    require_tensor("x", x, torch.bfloat16, handle.block_shape)
    require_tensor("topk_idx", topk_idx, topk_idx_t, handle.topk)
    require_tensor("topk_weights", topk_weights, torch.float32, handle.topk)
    if out is not None:
        require_tensor("out", out, torch.bfloat16, (handle.topk[0], handle.block_shape[2]))


def _finish(packed: Tensor | None, stats: Tensor | None, blocks: Blocks) -> None:
    """Enqueues what follows the receipt of a dispatch."""
    if packed is not None:
        assert blocks.scales is not None
        require_memory("the scales", blocks.scales)
        require_memory("the packed scales", packed)
        with _mode_of(packed):
            pack(blocks.scales.transpose(1, 2), packed)
    if stats is not None:
        require_memory("the rows of each expert", blocks.counts)
        require_memory(_STATS, stats)
        with _mode_of(stats):
            stats.add_(blocks.counts)


def _mode_of(written: Tensor) -> AbstractContextManager[Any]:
    """Returns the mode of torch in which a tensor can be written: one of inference mode in that alone."""
    return torch.inference_mode() if written.is_inference() else nullcontext()


def _require_handle(runtime: Runtime, handle: Any) -> LatencyHandle:
    if not isinstance(handle, LatencyHandle):
        wanted = "the handle that a low_latency_dispatch returned, not a tuple of its parts"
        raise refuse("handle", wanted, type(handle).__name__)
    if not handle.lane.is_of(runtime.faults):
        raise ArgumentError(
            "handle is of another Buffer, but the combine of a low-latency dispatch is made with its own"
        )
    return handle


def _ordered(runtime: Runtime, like: Tensor, async_finish: bool, return_recv_hook: bool) -> InPlace | Ordered:
    """Returns the block of a call's work: with a hook in the current stream."""
    if not return_recv_hook:
        return runtime.streams.ordered(like.device, None, async_finish, False)
    if async_finish:
        raise ArgumentError("async_finish and return_recv_hook are True, but only one of them can be")
    return IN_CURRENT
