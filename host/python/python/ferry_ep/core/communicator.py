"""One rank of a communicator."""

from __future__ import annotations

from typing import Any

from . import values
from ._ferry import PreparedCombine, PreparedDispatch
from .calls import Arguments, launch
from .errors import ArgumentError, refuse
from .outputs import DispatchOutput, ReceivedCounts, SiluOutput
from .rank import Rank
from .scalars import flag, number, shown, text, whole
from .tensors import elements_of, scales_of

__all__ = ["Communicator"]


class Communicator(Rank):
    """One rank of a communicator: sends tokens to their experts, and brings the experts' outputs back.

    ``dispatch`` and ``combine`` alternate. A round is collective: every rank of the group makes the same
    calls, each with its own data. :class:`ferry_ep.Communicators` makes all ranks of this process, and calls
    on all of them.

    Tensors are torch's, NumPy's, any with DLPack or ``__cuda_array_interface__``, a
    :class:`ferry_ep.DeviceArray`, or a :class:`ferry_ep.Tensor` with an address of the rank's device.

    On GPUs a call only enqueues: it neither waits nor allocates, except outputs that were not given. Tensors
    are in use until the stream has passed the kernel. In a simulated group arrays are on the CPU: they are
    copied in, and copied out when the call that fills them returns, so that such a call waits for its peers.
    Drive each rank from a thread (or a process) of its own then, or use
    :meth:`ferry_ep.Communicators.together`.

    One thread at a time makes calls of a communicator; another one gets :class:`ferry_ep.BusyError`.

    In a simulated group ``KeyboardInterrupt`` ends a wait of the main thread. The round stays open: drop the
    communicator, or leave its ``with`` block. A wait for a GPU ends by the deadline first.
    """

    def dispatch(
        self,
        x: Any,
        topk_ids: Any,
        topk_weights: Any = None,
        *,
        out: DispatchOutput | None = None,
        capacity: int | str = "max",
        input_scale: Any = None,
        tokens_on_device: Any = None,
        stream: Any = None,
    ) -> DispatchOutput:
        """Sends this rank's tokens to their experts, and receives those of its own experts. Collective.

        ``x``: BF16 ``[tokens, hidden]``, 16-byte aligned; rows may have a stride of a multiple of 16 bytes.
        Or a pair ``(codes, scales)`` of tokens that are encoded in the plan's format already, which arrive as
        they are (by expert with ``Config.options``): e4m3 ``[tokens, hidden]``, or e2m1, two in a byte.
        Scales: ``fp8`` f32 ``[tokens, hidden / 128]`` with any strides (row-major or transposed), or i32
        ``[tokens, hidden / 512]`` with any strides, four UE8M0 in each, the first in the lowest byte, which
        arrive as f32; ``mxfp8`` and ``mxfp4`` e8m0 ``[tokens, hidden / 32]``; ``nvfp4`` e4m3
        ``[tokens, hidden / 16]``, without ``input_scale``. Of the bits, two 32-bit words change: four e4m3
        ``0xff`` arrive as ``0x7f, 0xff, 0xff, 0xff``, all NaN, and scales of ``0xfffffffe`` as
        ``0xffffffff``, all NaN, with an input fault ``"LostScales"``.
        ``topk_ids``: i32 or i64 ``[tokens, top_k]``, experts of each token, -1 for none; i64 needs, by
        expert, ``Config.options``.
        ``topk_weights``: f32 ``[tokens, top_k]``, the router's weights, which a reduced combine applies.
        ``out``: outputs of :meth:`outputs`, whose ``ids`` are of the type of ``topk_ids``; ``None`` allocates
        them in the library of ``x`` (of torch, NumPy, CuPy, or :class:`ferry_ep.DeviceArray`; for others that
        on a GPU, and NumPy's in the simulator), with ``capacity``.
        ``input_scale``: f32 ``[1]``, ``nvfp4`` only. ``tokens_on_device``: u32 ``[1]``, number of tokens,
        read by the kernel (by expert with ``Config.options``). ``stream``: a stream of this rank's device, as
        torch's, CuPy's, or its handle; ``None`` is torch's current one if torch is loaded, else the default
        stream.

        Returns the outputs. Raises :class:`ferry_ep.TensorError`, :class:`ferry_ep.OrderError`,
        :class:`ferry_ep.CapacityError`, :class:`ferry_ep.ArgumentError`: nothing was sent or written then,
        and the round stays as it was. In a simulated group with CPU arrays also
        :class:`ferry_ep.FaultError`, as the call waits, and :class:`ferry_ep.ThreadError` if it would wait
        for a rank of this thread.
        """
        call = values.Dispatch(x, topk_ids, topk_weights, input_scale, tokens_on_device, out, capacity)
        return self._make(call, stream)

    def dispatch_async(
        self,
        x: Any,
        topk_ids: Any,
        topk_weights: Any = None,
        *,
        input_scale: Any = None,
        tokens_on_device: Any = None,
        stream: Any = None,
    ) -> None:
        """Sends, as the first half of :meth:`dispatch`; :meth:`dispatch_wait` comes next. Collective.

        Waits for nobody on the host. Tensors and errors are those of :meth:`dispatch`.
        """
        self._make(values.DispatchAsync(x, topk_ids, topk_weights, input_scale, tokens_on_device), stream)

    def dispatch_counts(self, *, stream: Any = None) -> None:
        """Tells the host how many rows the open dispatch brings, between :meth:`dispatch_async` and
        :meth:`dispatch_wait`, so that outputs can be allocated exactly; :meth:`received` reads the counts.
        Enqueues a kernel that waits for the counts of all ranks' dispatches. Not collective.

        Raises :class:`ferry_ep.OrderError` unless :meth:`dispatch_wait` comes next, and
        :class:`ferry_ep.ArgumentError` with ``skip_a2a`` and in a graph.
        """
        self._make(values.DispatchCounts(), stream)

    def received(self, *, wait: bool = False) -> ReceivedCounts | None:
        """Returns the counts of :meth:`dispatch_counts`; ``None`` until they have come. With ``wait`` it
        returns once they have: for a millisecond the thread looks for them all the time, then again and
        again. Meanwhile other threads of Python run, and their calls of this communicator raise
        :class:`ferry_ep.BusyError`. Does not synchronize, except in a simulated group, where it waits for the
        rank's kernels.

        Raises :class:`ferry_ep.OrderError` if no counts were asked for, and :class:`ferry_ep.FaultError` once
        the rank has given up, so that a loop around it ends.
        """
        counts = self._end.native.received(flag("wait", wait))
        return None if counts is None else ReceivedCounts(*counts)

    def dispatch_wait(
        self,
        *,
        out: DispatchOutput | None = None,
        like: Any = None,
        capacity: int | str = "max",
        stream: Any = None,
    ) -> DispatchOutput:
        """Receives, as the second half of :meth:`dispatch`. Collective.

        ``out`` as there; ``None`` allocates like ``like``. Errors are those of :meth:`dispatch`.
        """
        return self._make(values.DispatchWait(out, like, capacity), stream)

    def combine(
        self,
        expert_rows: Any,
        *,
        topk_weights: Any = None,
        row_weights: Any = None,
        row_scales: Any = None,
        bias: Any = None,
        bias2: Any = None,
        residual: Any = None,
        initial: Any = None,
        received_weights: Any = None,
        out: Any = None,
        weights: Any = None,
        data_type: str = "bf16",
        stream: Any = None,
    ) -> Any:
        """Sends the experts' rows back, and sums those of this rank's tokens; ends the round. Collective.

        ``expert_rows``: BF16 ``[rows, hidden]``, 16-byte aligned, in the order of the dispatch's ``tokens``
        and with the same number of rows; by expert without the router's weights, which are applied here:
        those of the dispatch, in exact mode ``topk_weights``.
        ``topk_weights``: f32 ``[tokens, top_k]``, exact mode only.
        ``row_weights``: f32 ``[rows]``, reduced mode only, instead of the router's, by expert with
        ``Config.options``; padded blocks need it.
        Steps on the sums, in this order (by expert with ``Config.options``): ``row_scales`` f32 ``[tokens]``,
        ``bias`` and ``bias2`` BF16 ``[hidden]``, ``residual`` BF16 ``[tokens, hidden]``.
        ``out``: ``[tokens, hidden]`` of BF16, or f16 or f32 (by expert with ``Config.options``); in exact
        mode without weights BF16 ``[tokens, top_k, hidden]``, the rows apart. ``None`` allocates it like
        ``expert_rows``, with elements of ``data_type``.

        In layouts that keep rows as they came (``Config.receive``) a row of ``expert_rows`` is the sum over
        this rank's experts of the token, with the weights applied; rows without a token are not read. A
        token's sum begins with ``initial``, BF16 ``[tokens, hidden]`` or a tuple of two, added in f32, and
        then adds one row for each rank with an expert of the token, by rank. With ``Config.combine_weights``
        ``received_weights``, f32 ``[rows, top_k]``, return to ``weights``, f32 ``[tokens, top_k]``: each slot
        has the value of its expert's rank, 0 if it is not routed; ``None`` allocates it, too.

        Returns ``out``, and with ``received_weights`` the tuple ``(out, weights)``. Raises as
        :meth:`dispatch` does.
        """
        others = (row_weights, row_scales, bias, bias2, residual, initial, received_weights)
        call = values.Combine(expert_rows, topk_weights, *others, out, weights, data_type)
        return self._make(call, stream)

    def combine_async(
        self,
        expert_rows: Any,
        *,
        topk_weights: Any = None,
        row_weights: Any = None,
        row_scales: Any = None,
        bias: Any = None,
        bias2: Any = None,
        residual: Any = None,
        initial: Any = None,
        received_weights: Any = None,
        out: Any = None,
        weights: Any = None,
        data_type: str = "bf16",
        stream: Any = None,
    ) -> Any:
        """Sends, as the first half of :meth:`combine`; :meth:`combine_wait` comes next. Collective.

        Returns as :meth:`combine` does; the wait fills it. Tensors and errors are those of :meth:`combine`.
        """
        others = (row_weights, row_scales, bias, bias2, residual, initial, received_weights)
        call = values.CombineAsync(expert_rows, topk_weights, *others, out, weights, data_type)
        return self._make(call, stream)

    def _make(self, call: values.Call, stream: Any) -> Any:
        """Makes a call of this rank, and returns what it returns."""
        return values.make([self._end], [call], [stream])[0]

    def combine_wait(self, *, stream: Any = None) -> None:
        """Receives and sums, as the second half of :meth:`combine`, into its ``out``. Collective."""
        self._make(values.CombineWait(), stream)

    def give_up(self, *, stream: Any = None) -> None:
        """Ends the round without a combine, after :meth:`dispatch` or :meth:`dispatch_wait`: a dispatch may
        follow. Enqueues only. Collective: all ranks give up a round, or all combine it; if one combines
        what another gives up, both end with :class:`ferry_ep.PeerTimeout` after their deadline, or with
        :class:`ferry_ep.PeerGaveUp`, at the latest in their next dispatch.

        Raises :class:`ferry_ep.OrderError` unless a dispatch is to be combined.
        """
        self._make(values.GiveUp(), stream)

    def prepare_dispatch(
        self,
        x: Any,
        topk_ids: Any,
        topk_weights: Any = None,
        *,
        out: DispatchOutput,
        input_scale: Any = None,
        tokens_on_device: Any = None,
    ) -> PreparedDispatch:
        """Prepares a :meth:`dispatch` of device memory, so that each call passes integers alone.

        Returns a function of ``(stream, x, topk_ids, topk_weights)``: handle and addresses, 0 for the default
        stream and for the prepared tensor. Another address is memory of the same type and shape. Scales are
        the prepared ones.
        """
        call = values.Dispatch(x, topk_ids, topk_weights, input_scale, tokens_on_device, out)
        return PreparedDispatch(self._end.native, values.prepared(self._end, call, out))

    def prepare_combine(
        self,
        expert_rows: Any,
        *,
        out: Any,
        topk_weights: Any = None,
        row_weights: Any = None,
        row_scales: Any = None,
        bias: Any = None,
        bias2: Any = None,
        residual: Any = None,
        initial: Any = None,
        received_weights: Any = None,
        weights: Any = None,
    ) -> PreparedCombine:
        """Prepares a :meth:`combine` of device memory, so that each call passes integers alone.

        Returns a function of ``(stream, expert_rows, combined, received_weights, weights)``, as
        :meth:`prepare_dispatch` does.
        """
        others = (row_weights, row_scales, bias, bias2, residual, initial, received_weights)
        call = values.Combine(expert_rows, topk_weights, *others, out, weights)
        return PreparedCombine(self._end.native, values.prepared(self._end, call, (out, weights)))

    def silu(
        self,
        gates_and_ups: Any,
        row_offsets: Any,
        *,
        format: str = "bf16",
        out: SiluOutput | None = None,
        scale_offsets: Any = None,
        input_scales: Any = None,
        interleaved: bool = False,
        clamp: tuple[float, float] | None = None,
        max_sms: int | None = None,
        stream: Any = None,
    ) -> SiluOutput:
        """Applies SiLU to the gates, and multiplies by the ups, between an expert's two matrix
        multiplications. Not collective, and needs no round.

        ``gates_and_ups``: BF16 ``[rows, 2 * columns]``: gates, then ups, or alternating (``interleaved``).
        ``row_offsets``: u32 ``[experts + 1]``, those of a dispatch. ``format``: of the result, any but
        ``nvfp4-row``. ``scale_offsets``: u32 ``[experts]``, those of a dispatch, for tiled scales.
        ``input_scales``: f32 ``[experts]``, ``nvfp4`` only. ``clamp``: ``(alpha, limit)`` of the clamped
        variant. ``out=None`` allocates like ``gates_and_ups``.

        Raises :class:`ferry_ep.TensorError` and :class:`ferry_ep.ArgumentError`.
        """
        call, format = Arguments(self._end, stream), text("format", format)
        out = call.silu_output(gates_and_ups, format) if out is None else out
        if not isinstance(out, SiluOutput):
            raise refuse("out", "a SiluOutput", type(out).__name__)
        tiled, offsets = format.endswith(":tiled"), call.maybe("scale_offsets", scale_offsets, "u32")
        scales = None if out.scales is None else call.give("scales", out.scales, scales_of(format))
        arguments = {
            "format": format,
            "scales": scales,
            "scale_offsets": offsets if tiled else None,
            "input_scales": call.maybe("input_scales", input_scales, "f32"),
            "interleaved": flag("interleaved", interleaved),
            "clamp": _clamp(clamp),
            "max_sms": None if max_sms is None else whole("max_sms", max_sms, least=1, most=2**32 - 1),
            "input": call.take("input", gates_and_ups, "bf16"),
            "row_offsets": call.take("row_offsets", row_offsets, "u32"),
            "output": call.give("output", out.rows, elements_of(format)),
        }
        launch([call], lambda ranks, streams: ranks[0].silu(streams[0], **arguments))
        call.finish(of_round=False)
        return out


def _clamp(given: Any) -> tuple[float, float] | None:
    """Returns alpha and limit of a clamped variant."""
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ArgumentError(f"clamp is {shown(given)}, but it is a pair, (alpha, limit)")
    return number("clamp", given[0]), number("clamp", given[1])
