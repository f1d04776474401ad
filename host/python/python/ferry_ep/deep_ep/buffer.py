"""``Buffer`` of DeepEP, version 1: what both modes share, and normal mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as distributed
from torch import Tensor

from ..core import config as plans
from ..core._ferry import Fault, Group, Plan
from ..core.bootstraps import torch_bootstrap
from ..core.communicator import Communicator
from ..core.errors import ArgumentError, DeviceError, refuse
from ..core.scalars import whole
from .absent import refuse_absent, require_present
from .checks import (
    require_bias,
    require_config,
    require_layout,
    require_on,
    require_readable,
    require_readable_on_cpu,
    require_rows,
    require_tensor,
    require_topk,
    signature,
)
from .events import EventHandle, EventOverlap
from .handle import Handle, Routing
from .low_latency import LowLatency
from .rounds import Answers
from .rows import Rows, rows_of
from .runtime import Checked, Runtime, layout_of
from .settings import Settings, say_once
from .tuning import MOST_SMS, Config, topk_idx_t

__all__ = ["Buffer"]

#: Most rows of the results of a dispatch.
_MOST_ROWS = (1 << 31) - 1
#: Names of arguments.
_TOPK = ("topk_idx", "topk_weights")
_LAYOUT = ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert")
_BIAS = ("bias[0]", "bias[1]")


class Buffer(LowLatency):
    """Dispatch and combine between the ranks of ``group``, as DeepEP's ``Buffer``, in normal and in
    low-latency mode.

    A dispatch and its combine are one round of Ferry. Communicators are made when they are first needed, for
    each number of experts, top-k slots, hidden size and format of rows: then ranks agree on the most tokens
    of one, and a call synchronizes. All ranks make the same calls in the same order.

    Two rounds may be open at a time; the second takes a window of its own. A dispatch beyond that gives the
    oldest round up. A combine whose handle is not that of an open round makes its dispatch again, which is
    right, but takes as long as a dispatch, and is said once by ``warnings``. With ``FERRY_DEEP_EP_STRICT=1``
    both raise :class:`ferry_ep.OrderError` instead, before anything is sent; and a call raises
    :class:`InputFaultError` if an earlier one lost rows (:meth:`check`).

    On GPUs calls work on a stream of the buffer, or in torch's current one as long as nothing asks for
    another. On the CPU, in a simulated group, they wait for their peers, and events order nothing.
    """

    num_sms: ClassVar[int] = 20
    """Multiprocessors of the configurations that :meth:`get_dispatch_config` and
    :meth:`get_combine_config` return."""

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        connect: Callable[[plans.Config, Any], Communicator] | None = None,
    ) -> None:
        """Makes the buffer of this rank. Collective. Synchronizes.

        ``group``: a process group of torch, Gloo or NCCL, a process for each GPU of one node.
        ``num_nvl_bytes``: bytes of a round's receive window, which may be larger: it has room for as many
        tokens of a rank as fit into these bytes, as ``FERRY_DEEP_EP_MAX_TOKENS`` says, and as any rank brings
        to the first call of its sizes, whichever is most on any rank. ``connect`` makes this rank's
        communicator from a configuration and ``group``, for groups of your own: simulated ones, or several
        ranks in a process. It is called for each communicator, on all ranks in the same order;
        :meth:`destroy` closes what it made.

        ``low_latency_mode``: whether the calls of low-latency mode are allowed, beside those of normal mode;
        ``num_rdma_bytes`` has no effect then, as their windows have the sizes of their calls.
        ``num_qps_per_rank``, ``allow_nvlink_for_low_latency_mode``, ``allow_mnnvl`` and ``use_fabric`` (at
        its place in 1.2.1) have no effect. Raises ``NotImplementedError`` for ``num_rdma_bytes``
        without ``low_latency_mode``, ``enable_shrink`` and ``comm``, :class:`ferry_ep.ArgumentError`, and the
        exceptions of :class:`ferry_ep.Group`.
        """
        require_present(num_rdma_bytes, low_latency_mode, enable_shrink, comm)
        if group is None:
            raise ArgumentError("group is None, but it is a process group")
        num_nvl_bytes = whole("num_nvl_bytes", num_nvl_bytes)
        num_rdma_bytes = whole("num_rdma_bytes", num_rdma_bytes)
        for name, value in (("allow_mnnvl", allow_mnnvl), ("use_fabric", use_fabric)):
            if value:
                say_once(f"ferry_ep.deep_ep: {name} has no effect, as ranks are of one node")
        self._settings = Settings.read()
        if not low_latency_mode:
            self._refuse_exact()
        self.group = group
        self.rank: int = group.rank()
        self.group_size: int = group.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        #: What calls work with; ``None`` after :meth:`destroy`.
        self.runtime: Runtime | None = self._begin(connect)
        #: What :meth:`destroy` has left to graphs.
        self._left: Runtime | None = None

    def _refuse_exact(self) -> None:
        """Raises if normal mode is to have the same bits for any number of ranks."""
        if self._settings.is_exact:
            raise ArgumentError(
                "FERRY_DEEP_EP_EXACT is 1, but in normal mode engines sum before combine, so that bits "
                "depend on the number of ranks: unset it, or use low-latency mode"
            )

    def _begin(self, connect: Callable[[plans.Config, Any], Communicator] | None) -> Runtime:
        own = gather_flags = None
        if connect is None:
            if not torch.cuda.is_available():
                raise DeviceError(
                    "Buffer works on a GPU, and torch finds none: on a CPU give it connect, which makes "
                    "communicators of a simulated group (ferry_ep.Group.simulated, or simulated_at with a "
                    "process for each rank)"
                )
            device = torch.cuda.current_device()
            over = torch_bootstrap(self.group)
            own = Group.node(over, device, share_gpus=self._settings.shares_gpus)
            gather_flags = self._gather_flags

        def make(config: plans.Config) -> Communicator:
            if own is not None:
                return Communicator(own, Plan(own, config))
            assert connect is not None
            return connect(config, self.group)

        return Runtime(
            self.rank, self.group_size, self.num_nvl_bytes, self._settings, make, own, gather_flags
        )

    def _gather_flags(self, flags: list[bool]) -> list[list[bool]]:
        """Returns the flags of all ranks. Collective."""
        gathered: list[Any] = [None] * self.group_size
        distributed.all_gather_object(gathered, flags, group=self.group)
        return gathered

    def destroy(self) -> None:
        """Gives up open rounds, and closes all communicators, and the group if it is the buffer's: no call
        may follow. Collective. Synchronizes.

        Communicators that CUDA graphs use are left to these, and nothing is raised. If all ranks are in this
        process, they are freed with the last graph, where torch tells of its end
        (``CUDAGraph.retain_object``). Else call this again on all ranks once the graphs are gone, with an
        older torch after :meth:`assume_no_graphs`. What is left in the end is said at exit. Without such
        communicators a second call does nothing.

        Raises :class:`ferry_ep.ArgumentError` without ``explicitly_destroy``, as
        :meth:`ferry_ep.Communicator.close`, and, once all is closed, as a hook that it called.
        """
        if not self.explicitly_destroy:
            raise ArgumentError("explicitly_destroy is False, but destroy needs a Buffer made with True")
        closing = self.runtime or self._left
        if closing is not None:
            is_closed = closing.close()
            self.runtime, self._left = None, None if is_closed else closing
            closing.require_no_failure()

    def check(self) -> list[Fault]:
        """Returns input faults that this rank's calls met, the first of each kind since the last call of
        this, such as ``"OutputTooSmall"``: rows that were lost. Not collective; does not synchronize, so that
        kernels at work may meet more. Other ranks do not learn of them, though their sums may lack the rows.
        Not DeepEP's.

        Calls and :meth:`destroy` look for them, too: they say each kind once, through the logger
        ``ferry_ep.deep_ep``, or with ``FERRY_DEEP_EP_STRICT=1`` raise :class:`InputFaultError`. Slots filled
        with the number of experts are none. Raises as :meth:`ferry_ep.Communicator.check`.
        """
        return self._live().check()

    def assume_no_graphs(self) -> None:
        """Promises that all CUDA graphs with calls of this buffer are destroyed, so that :meth:`destroy`, or
        a second one, may close: :meth:`ferry_ep.Communicator.assume_no_graphs`. Not DeepEP's.
        """
        closing = self.runtime or self._left
        if closing is None:
            self._live()
        else:
            closing.promise_no_graphs()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns ``True``: FP8 rows are taken."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the multiprocessors of default configurations, for all buffers.

        Raises :class:`ferry_ep.ArgumentError` for an odd number.
        """
        new_num_sms = whole("new_num_sms", new_num_sms, most=MOST_SMS)
        if new_num_sms % 2:
            raise ArgumentError(f"new_num_sms is {new_num_sms}, but it is even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event on torch's current stream. Does not synchronize."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns the configuration of dispatches, the same for any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Returns the configuration of combines, the same for any number of ranks."""
        return Config(Buffer.num_sms)

    def get_comm_stream(self) -> Any:
        """Returns the buffer's stream, behind all calls without a hook so far; all later ones work on it. Not
        behind them in a capture. Raises ``NotImplementedError`` without CUDA.
        """
        if not torch.cuda.is_available():
            refuse_absent("get_comm_stream without CUDA", "calls on the CPU wait, and order nothing")
        return self._live().streams.lend(torch.device("cuda", torch.cuda.current_device()))

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Counts what a dispatch of ``topk_idx`` sends. Not collective; does not synchronize.

        ``topk_idx``: int64 ``[tokens, top_k]``, -1 for none. Returns ``num_tokens_per_rank`` int32
        ``[ranks]``, ``None`` (no ranks of other nodes), ``num_tokens_per_expert`` int32 ``[num_experts]``,
        ``is_token_in_rank`` bool ``[tokens, ranks]``, and the event. Raises :class:`ferry_ep.TensorError`,
        :class:`ferry_ep.ArgumentError`.
        """
        require_tensor("topk_idx", topk_idx, topk_idx_t, (None, None))
        require_readable(signature(topk_idx), ("topk_idx",), (topk_idx,))
        num_experts = whole("num_experts", num_experts, least=1)
        if num_experts % self.group_size:
            raise ArgumentError(
                f"num_experts is {num_experts}, but it is a multiple of {self.group_size} ranks"
            )
        streams, device = self._live().streams, topk_idx.device
        block = streams.ordered(device, previous_event, async_finish, allocate_on_comm_stream)
        with block as ordered:
            ordered.reads(topk_idx)
            per_rank, per_expert, is_in_rank = layout_of(topk_idx, num_experts, self.group_size)
            ordered.returns(per_rank, per_expert, is_in_rank)
        return per_rank, None, per_expert, is_in_rank, ordered.event

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, tuple[Any, ...] | None, EventOverlap]:
        """Sends tokens to the ranks of their experts, and receives those of this rank's. Collective. Waits on
        the host for the number of rows, except with ``handle`` or ``num_worst_tokens``.

        ``x``: bfloat16 ``[tokens, hidden]``, or a tuple of float8_e4m3fn of that shape and its scales,
        float32 ``[tokens, hidden / 128]`` or int32 ``[tokens, hidden / 512]`` of four UE8M0, with any
        strides; they arrive as they are. With ``handle``, of an earlier dispatch, rows go where its went.
        Else ``num_tokens_per_rank``, ``is_token_in_rank`` and ``num_tokens_per_expert`` are those of
        :meth:`get_dispatch_layout`; with ``topk_idx``, int64 ``[tokens, top_k]``, and ``topk_weights``,
        float32, rows go to the experts' ranks, and the former are checked for type and shape alone; without,
        by ``is_token_in_rank``. ``expert_alignment``: numbers of the list are rounded up to a multiple of it.
        ``num_worst_tokens``: rows of the results, if the host shall not wait, as in a graph.

        Returns the rows, by source rank, then token; local expert ids, -1 in other ranks' slots, and weights,
        0 there, or ``None`` without ``topk_idx``; the list of assignments to each local expert, empty with
        ``num_worst_tokens``; the handle; and the event. With ``handle`` only rows and event, else ``None``.
        With ``num_worst_tokens`` rows behind the last one are not written, and their ids are -1.

        The handle is a tuple of six: its first element, int32 ``[ranks, ranks]``, has in the column of this
        rank the end of each source's rows, and -1 in all others; the fourth the token of each row on its
        source; the fifth ``is_token_in_rank``; the others are the buffer's.

        Raises :class:`ferry_ep.TensorError`, :class:`ferry_ep.ArgumentError`, :class:`ferry_ep.OrderError`,
        and as :meth:`ferry_ep.Communicator.dispatch`.
        """
        runtime = self._live()
        num_sms = Buffer.num_sms if config is None else require_config(config)
        expert_alignment = whole("expert_alignment", expert_alignment, least=1)
        worst = whole("num_worst_tokens", num_worst_tokens, most=_MOST_ROWS) or None
        if num_tokens_per_rdma_rank is not None:
            refuse_absent("num_tokens_per_rdma_rank", "ranks are of one node, so it is None")
        order = (previous_event, async_finish, allocate_on_comm_stream)
        # Only rows with scales are two parts: (rows, None) is no rows.
        is_pair = isinstance(x, tuple) and len(x) == 2 and x[1] is not None
        rows = Rows(x[0], x[1]) if is_pair else Rows(x, None)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ArgumentError("handle is given, and topk_idx or topk_weights, too: the handle has them")
            routing = self._routing(handle)
            checked = self._check_again(runtime, x, rows, routing)
            again, event = runtime.send_again(rows, routing, checked, num_sms=num_sms, order=order)
            return again, None, None, None, None, event
        layout = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        if topk_idx is not None or topk_weights is not None:
            topk = (topk_idx, topk_weights)
            key = signature(*rows, *layout, *topk)
            found: Checked | None = runtime.checked.get(key)
            if found is None:
                found = runtime.keep(key, self._check(runtime, x, layout, topk, key is not None))
            require_readable(key, (*_names_of(x), *_TOPK), (*rows, *topk))
            require_readable_on_cpu(_LAYOUT, layout)
            received = runtime.send(
                rows, topk, found, is_token_in_rank, worst=worst, num_sms=num_sms, order=order
            )
        elif worst is not None:
            raise ArgumentError(f"num_worst_tokens is {worst}, but topk_idx is None: it needs ids")
        else:
            self._refuse_exact()
            sent = rows_of(x)
            _, *by_rank = require_layout(*layout, sent.tokens.shape[0], self.group_size)
            given = (*sent, *by_rank)
            require_on(sent.tokens.device, ("x[1]", *_LAYOUT[1:]), given[1:])
            require_readable(signature(*given), (*_names_of(x), *_LAYOUT[1:]), given)
            received = runtime.send_by_rank(sent, *by_rank, num_sms=num_sms, order=order)
        if expert_alignment > 1:
            arrived, local_ids, local_weights, counts, made, event = received
            counts = [-(-count // expert_alignment) * expert_alignment for count in counts]
            return arrived, local_ids, local_weights, counts, made, event
        return received

    def _check(
        self,
        runtime: Runtime,
        x: Any,
        layout: tuple[Any, Any, Any],
        topk: tuple[Any, Any],
        is_plain: bool,
    ) -> Checked:
        """Checks the tensors of a dispatch with ids, and returns its lane."""
        self._refuse_exact()
        sent = rows_of(x)
        experts, *_ = require_layout(*layout, sent.tokens.shape[0], self.group_size)
        ids, _ = require_topk(*topk, sent.tokens.shape[0])
        require_on(sent.tokens.device, ("x[1]", *_TOPK), (sent.scales, *topk))
        return Checked(runtime.lane_for(sent, experts, ids.shape[1]), is_plain)

    def _check_again(self, runtime: Runtime, x: Any, rows: Rows, routing: Routing) -> Checked:
        """Checks the rows of a dispatch with a handle of ``routing``, and returns its lane."""
        experts, (tokens, top_k) = routing.experts, routing.topk
        tensors = signature(*rows)
        key = None if tensors is None else (tensors, experts, tokens, top_k, routing.is_plain)
        checked: Checked | None = runtime.checked.get(key)
        if checked is None:
            self._refuse_exact()
            lane = runtime.lane_for(rows_of(x, tokens), experts, top_k)
            require_on(routing.weights.device, _names_of(x), rows)
            checked = runtime.keep(key, Checked(lane, tensors is not None and routing.is_plain))
        require_readable(tensors, _names_of(x), rows)
        return checked

    def _routing(self, handle: Any) -> Routing:
        """Returns what a handle, or a tuple of its six parts, has for the buffer."""
        if isinstance(handle, Handle):
            routing = handle.routing
        elif isinstance(handle, (tuple, list)) and len(handle) == 6 and isinstance(handle[5], Routing):
            routing = handle[5]
        else:
            raise refuse("handle", "the handle of a dispatch of ferry_ep.deep_ep", type(handle).__name__)
        if (routing.rank, routing.ranks) != (self.rank, self.group_size):
            raise ArgumentError(
                f"handle is of rank {routing.rank} of {routing.ranks}, but this is a Buffer of rank "
                f"{self.rank} of {self.group_size}: give it the handle of a dispatch of its own"
            )
        return routing

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sends rows back, and sums those of each token, without weights. Collective. Does not synchronize.

        ``x``: bfloat16 ``[rows, hidden]``, in the order of the dispatch of ``handle``. ``topk_weights``:
        float32 ``[rows, top_k]``, which return, too. ``bias``: one or two bfloat16 ``[tokens, hidden]``, with
        which sums begin.

        Returns the sums, bfloat16 ``[tokens, hidden]``: in f32 from the bias on, by rank, rounded once; the
        weights, float32 ``[tokens, top_k]``, or ``None``; and the event. Each slot's weight is that from the
        rank of its expert, 0 if it is not routed. DeepEP adds those of all ranks: the same if they are 0 in
        other ranks' slots, as they arrive. ``FERRY_DEEP_EP_SUM_WEIGHTS=1`` adds, too, in a second round.

        Raises :class:`ferry_ep.TensorError`, :class:`ferry_ep.ArgumentError`, :class:`ferry_ep.OrderError`,
        and as :meth:`ferry_ep.Communicator.combine`.
        """
        runtime = self._live()
        routing = self._routing(handle)
        num_sms = Buffer.num_sms if config is None else require_config(config)
        initial = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        names = ("x", "topk_weights", *(_BIAS if isinstance(bias, tuple) else ("bias",))[: len(initial)])
        tensors = signature(x, topk_weights, *initial)
        key = tensors and (tensors, isinstance(bias, tuple), routing.has_topk, routing.rows, routing.topk)
        hidden = runtime.checked.get(key)
        if hidden is None:
            hidden = _check_answers(x, routing, topk_weights, bias)
            require_on(routing.weights.device, names, (x, topk_weights, *initial))
            runtime.keep(key, hidden)
        require_readable(tensors, names, (x, topk_weights, *initial))
        return runtime.combine(
            Answers(x, topk_weights, initial, routing),
            hidden=hidden,
            is_plain=tensors is not None,
            num_sms=num_sms,
            order=(previous_event, async_finish, allocate_on_comm_stream),
        )


def _names_of(x: Any) -> tuple[str, str]:
    """Returns the names of rows and scales."""
    return ("x[0]" if isinstance(x, tuple) else "x", "x[1]")


def _check_answers(x: Any, routing: Routing, topk_weights: Any, bias: Any) -> int:
    """Checks the tensors of a combine, and returns the hidden size."""
    require_rows("x", x, (routing.rows, None))
    tokens, top_k = routing.topk
    if topk_weights is not None:
        if not routing.has_topk:
            raise ArgumentError("topk_weights is given, but the dispatch of handle had no topk_idx")
        require_tensor("topk_weights", topk_weights, torch.float32, (routing.rows, top_k))
    hidden: int = x.shape[1]
    require_bias(bias, tokens, hidden)
    return hidden
