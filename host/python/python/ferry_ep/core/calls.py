"""Calls of one rank, or of all ranks of a process: arguments, copies of CPU arrays, and waits."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ._ferry import (
    CombineInput,
    CombineOutput,
    DispatchInput,
    Tensor,
    capacity_of,
    describe,
    format_sizes,
    layout_of,
)
from ._ferry import Communicator as Native
from ._ferry import DispatchOutput as Outputs
from .end import End, Results
from .errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    FerryError,
    ForkError,
    OrderError,
    PoisonedError,
    refuse,
)
from .memory import HOST, Block, DeviceArray, note_use, require_own
from .outputs import TENSORS, DispatchOutput, SiluOutput
from .scalars import whole
from .tensors import Repeated, element, elements_of, scales_of, stream_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Answers", "Call", "Sent", "codes_and_scales", "combine", "combine_wait"]
__all__ += ["dispatch", "dispatch_async", "dispatch_wait", "finish", "launch", "received", "result"]

#: Exceptions of calls that launched nothing, so that their memory is free at once.
_REFUSALS = (ArgumentError, BusyError, ClosedError, ForkError, OrderError, PoisonedError)


class Sent(NamedTuple):
    """Inputs of a dispatch: arrays of one rank, or sequences with an array for each rank."""

    x: Any
    topk_ids: Any
    topk_weights: Any
    input_scale: Any
    tokens_on_device: Any


class Answers(NamedTuple):
    """Inputs of a combine: arrays of one rank, or a sequence with an array for each rank."""

    expert_rows: Any
    topk_weights: Any
    row_weights: Any
    row_scales: Any
    bias: Any
    bias2: Any
    residual: Any
    initial: Any
    received_weights: Any


def codes_and_scales(x: Any) -> tuple[Any, Any]:
    """Returns the tokens of a dispatch, and their scales if they are encoded: a pair."""
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2:
        raise refuse("x", "an array, or a pair of codes and scales", f"a tuple of {len(x)}")
    codes, scales = x
    return codes, scales


class _Written(NamedTuple):
    """An array that a call writes, and the address of its copy, 0 if it is none."""

    name: str
    value: Any
    wanted: str
    tensor: Tensor
    copy: int

    def require_same(self) -> None:
        """Raises if the array has other memory than when the call began."""
        now, _ = describe(self.name, self.value, self.wanted, written=True)
        then = self.tensor
        if (now.address, now.shape, now.strides) != (then.address, then.shape, then.strides):
            raise refuse(self.name, "the memory that it had when the call began", "other memory")


class Opened(NamedTuple):
    """What a first half leaves for the second: whether it copies, what it writes, and memory of copies."""

    copies: bool
    written: list[_Written]
    blocks: list[Block]


class Call:
    """A call of one rank.

    With CPU arrays (simulated groups alone) inputs are copied to the rank's memory before the call; outputs,
    too, so that what a kernel does not write stays as it is; and back after the wait. The copies are the
    call's own: a call that is refused has changed nothing.
    """

    def __init__(self, end: End, stream: Any) -> None:
        self.end, self.stream = end, end.stream_of(stream)
        #: Whether an argument is a CPU array.
        self.copies = False
        #: Arrays that the call writes.
        self.written: list[_Written] = []
        #: Memory of the copies.
        self.blocks: list[Block] = []

    def take(self, name: str, value: Any, wanted: str) -> Tensor:
        """Returns an argument that is read, of elements ``wanted``."""
        return self._place(name, *describe(name, value, wanted))[0]

    def maybe(self, name: str, value: Any, wanted: str) -> Tensor | None:
        """Returns an argument that is read, if it was given."""
        return None if value is None else self.take(name, value, wanted)

    def give(self, name: str, value: Any, wanted: str) -> Tensor:
        """Returns an argument that is written."""
        described, place = describe(name, value, wanted, written=True)
        tensor, copy = self._place(name, described, place)
        self.written.append(_Written(name, value, wanted, described, copy))
        return tensor

    def input(self, given: Sent) -> DispatchInput:
        """Returns the inputs of a dispatch."""
        (x, scales), format = codes_and_scales(given.x), self.end.plan.config.format
        return DispatchInput(
            self.take("x", x, "bf16" if scales is None else elements_of(format)),
            self.take("topk_ids", given.topk_ids, "i32"),
            self.maybe("topk_weights", given.topk_weights, "f32"),
            self.maybe("input_scale", given.input_scale, "f32"),
            self.maybe("tokens_on_device", given.tokens_on_device, "u32"),
            self.maybe("x_scales", scales, scales_of(format)),
        )

    def outputs(self, out: DispatchOutput) -> Outputs:
        """Returns the outputs of a dispatch."""
        if not isinstance(out, DispatchOutput):
            raise refuse("out", "a DispatchOutput", type(out).__name__)
        rows, blocks = whole("out.rows", out.rows), whole("out.scale_blocks", out.scale_blocks)
        tensors = {}
        plan = self.end.plan
        wide_ids = out.ids is not None and describe("ids", out.ids, "i32")[0].data_type == "i64"
        for name, data_type, shape, _, _ in layout_of(plan, rows, blocks, wide_ids):
            value = getattr(out, name)
            if value is None:
                raise refuse(name, f"a tensor of {data_type}, shape {shape}", "none")
            tensor = self.give(name, value, data_type)
            if tensor.shape != shape:
                raise refuse(name, f"shape {shape}", f"{tensor.shape}")
            tensors[name] = tensor
        for name in TENSORS:
            if name not in tensors and getattr(out, name) is not None:
                config = plan.config
                raise refuse(name, f"none (format {config.format}, receive {config.receive})", "a tensor")
        return Outputs(plan, rows, blocks, wide_ids, tensors)

    def answers(self, given: Answers) -> CombineInput:
        """Returns the inputs of a combine."""
        initial = given.initial if isinstance(given.initial, (tuple, list)) else [given.initial]
        if len(initial) > 2:
            raise refuse("initial", "at most 2 tensors", str(len(initial)))
        first, second = (*initial, None, None)[:2]
        return CombineInput(
            self.take("expert_rows", given.expert_rows, "bf16"),
            self.maybe("topk_weights", given.topk_weights, "f32"),
            self.maybe("row_weights", given.row_weights, "f32"),
            [
                self.maybe("row_scales", given.row_scales, "f32"),
                self.maybe("bias", given.bias, "bf16"),
                self.maybe("bias2", given.bias2, "bf16"),
                self.maybe("residual", given.residual, "bf16"),
            ],
            [self.maybe("initial[0]", first, "bf16"), self.maybe("initial[1]", second, "bf16")],
            self.maybe("received_weights", given.received_weights, "f32"),
        )

    def sums(self, out: Any, weights: Any) -> CombineOutput:
        """Returns the output of a combine."""
        returned = None if weights is None else self.give("weights", weights, "f32")
        return CombineOutput(self.give("combined", out, "bf16"), returned)

    def silu_output(self, like: Any, format: str) -> SiluOutput:
        """Allocates the outputs of a fused SiLU of ``like``."""
        shape = describe("input", like, "bf16")[0].shape
        if len(shape) != 2:
            raise refuse("input", "2 dimensions", f"shape {list(shape)}")
        rows, columns = shape[0], shape[1] // 2
        _, group, layout = format_sizes(format)
        element = elements_of(format)
        if group == 0:
            return SiluOutput(*self._allocate(like, (element, [rows, columns])))
        if layout is None:
            scales = [columns // group, rows]
        elif layout == "row-major":
            scales = [rows, columns // group]
        else:
            blocks = capacity_of(self.end.plan, rows)[1]
            scales = [blocks, columns // (4 * group), 32, 4, 4]
        made = self._allocate(like, (element, [rows, columns]), (scales_of(format), scales))
        return SiluOutput(*made)

    def require_device_memory(self) -> None:
        """Raises if an argument is a CPU array, and after close."""
        if self.end.native.closed:
            raise ClosedError(f"rank {self.end.native.rank}: the communicator was closed")
        if self.copies:
            raise ArgumentError("a prepared call takes memory of the device, and an array is on the CPU")

    def opened(self) -> Opened:
        """Returns what the second half of this call fills."""
        return Opened(self.copies, self.written, self.blocks)

    @classmethod
    def second(cls, end: End, opened: Opened | None, stream: Any) -> Self:
        """Begins the second half of a call. Raises if an array that it fills has other memory by now."""
        call = cls(end, stream)
        if opened is not None:
            call.copies, call.written, call.blocks = opened
            for written in call.written:
                written.require_same()
        return call

    def finish(self, *, of_round: bool = True) -> None:
        """Waits, and copies what the call filled, if an argument is a CPU array."""
        if of_round:
            self.end.drive()
        if not self.copies:
            return
        self.end.wait(self.stream, of_round=of_round, is_part=True)
        failed: list[FerryError] = []
        for written in self.written:
            if not written.copy:
                continue
            try:
                written.require_same()
                self.end.native.download(written.copy, written.tensor.address, written.tensor.nbytes)
            except FerryError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _allocate(self, like: Any, *layouts: tuple[str, list[int]]) -> list[Any]:
        return self.end.allocate(Repeated(list(layouts)), like, self.stream)

    def _place(self, name: str, tensor: Tensor, place: str) -> tuple[Tensor, int]:
        """Returns the tensor on the rank's device, and the address of its copy, 0 if it is none."""
        end, device = self.end, self.end.native.device
        if place in ("rank", device):
            require_own(name, tensor.owner, end.blocks)
            self._record(tensor.owner, place)
            return tensor, 0
        if place != "cpu" or not end.copies:
            wanted = "the CPU" if end.copies else device
            raise refuse(name, f"memory of {wanted}", f"memory of {place}")
        self.copies = True
        return self._copy(tensor)

    def _record(self, owner: Any, place: str) -> None:
        """Tells torch, or a lent array, that it is used on another stream than its own."""
        if place == "rank":
            if isinstance(owner, DeviceArray):
                note_use(owner, self.stream)
            return
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(owner, torch.Tensor) or not owner.is_cuda:
            return
        if self.stream == self.end.stream_of(None) or torch.cuda.is_current_stream_capturing():
            return
        owner.record_stream(stream_of(self.stream, owner.device))

    def _copy(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Copies a CPU array to memory of this call."""
        block = self.end.blocks.lend(tensor.nbytes, HOST)
        self.blocks.append(block)
        self.end.native.upload(block.address, tensor.address, tensor.nbytes)
        copy = Tensor(block.address, tensor.data_type, tensor.shape, tensor.strides, owner=tensor.owner)
        return copy, block.address


def result(end: End, given: Answers, out: Any, weights: Any, data_type: str, stream: int) -> tuple[Any, Any]:
    """Returns ``out`` and ``weights`` of a combine, or allocates them for the tokens of the open round."""
    data_type = element(data_type)
    has_weights = weights is None and given.received_weights is not None
    if out is not None and not has_weights:
        return out, weights
    config, (tokens, _) = end.plan.config, end.native.last()
    is_apart = config.combine == "exact" and given.topk_weights is None
    asked, made = (tokens, is_apart, data_type), end.results
    if made is None or made.asked != asked:
        shape = [tokens, config.top_k, config.hidden] if is_apart else [tokens, config.hidden]
        weights_of = Repeated([("f32", [tokens, config.top_k])])
        made = end.results = Results(asked, Repeated([(data_type, shape)]), weights_of)
    like = given.expert_rows
    if has_weights:
        weights = end.allocate(made.weights, like, stream)[0]
    if out is None:
        out = end.allocate(made.sums, like, stream)[0]
    return out, weights


# Calls of ranks, of one or of all of this process. Each takes a value for each rank.


def dispatch(
    ends: Sequence[End],
    sent: Sequence[Sent],
    outs: Sequence[Any],
    capacity: int | str,
    streams: Sequence[Any],
) -> list[DispatchOutput]:
    """Makes :meth:`ferry_ep.Communicator.dispatch`."""
    calls = _calls(ends, streams)
    inputs = [call.input(of) for call, of in zip(calls, sent, strict=True)]
    asked = zip(calls, sent, inputs, outs, strict=True)
    made = [
        received(call.end, of.x, capacity, given.wide_ids, call.stream) if out is None else out
        for call, of, given, out in asked
    ]
    outputs = [call.outputs(out) for call, out in zip(calls, made, strict=True)]
    _require_peers(calls, sent=1)
    launch(calls, Native.dispatch, inputs, outputs)
    finish(calls)
    return made


def dispatch_async(ends: Sequence[End], sent: Sequence[Sent], streams: Sequence[Any]) -> None:
    """Makes :meth:`ferry_ep.Communicator.dispatch_async`."""
    calls = _calls(ends, streams)
    launch(calls, Native.dispatch_async, [call.input(of) for call, of in zip(calls, sent, strict=True)])
    for end in ends:
        end.drive()


def dispatch_wait(
    ends: Sequence[End], outs: Sequence[Any], like: Any, capacity: int | str, streams: Sequence[Any]
) -> list[DispatchOutput]:
    """Makes :meth:`ferry_ep.Communicator.dispatch_wait`."""
    calls = _calls(ends, streams)
    made = [
        received(call.end, like, capacity, call.end.native.last()[1], call.stream) if out is None else out
        for call, out in zip(calls, outs, strict=True)
    ]
    outputs = [call.outputs(out) for call, out in zip(calls, made, strict=True)]
    _require_peers(calls)
    launch(calls, Native.dispatch_wait, outputs)
    finish(calls)
    return made


def combine(
    ends: Sequence[End],
    answers: Sequence[Answers],
    outs: Sequence[tuple[Any, Any]],
    data_type: str,
    streams: Sequence[Any],
    *,
    is_half: bool,
) -> list[Any]:
    """Makes :meth:`ferry_ep.Communicator.combine`, or its first half. ``outs``: ``out`` and ``weights``."""
    calls = _calls(ends, streams)
    made = [
        result(call.end, of, *into, data_type, call.stream)
        for call, of, into in zip(calls, answers, outs, strict=True)
    ]
    inputs = [call.answers(of) for call, of in zip(calls, answers, strict=True)]
    outputs = [call.sums(*of) for call, of in zip(calls, made, strict=True)]
    if is_half:
        launch(calls, Native.combine_async, inputs, outputs)
        for call in calls:
            call.end.drive()
            call.end.opened = call.opened()
    else:
        _require_peers(calls, returned=1)
        launch(calls, Native.combine, inputs, outputs)
        finish(calls)
    return [out if weights is None else (out, weights) for out, weights in made]


def combine_wait(ends: Sequence[End], streams: Sequence[Any]) -> None:
    """Makes :meth:`ferry_ep.Communicator.combine_wait`."""
    opened = [end.opened for end in ends]
    calls = [Call.second(end, half, of) for end, half, of in zip(ends, opened, streams, strict=True)]
    _require_peers(calls)
    Native.combine_wait([end.native for end in ends], [call.stream for call in calls])
    for end, half in zip(ends, opened, strict=True):
        if end.opened is half:
            end.opened = None
    finish(calls)


def received(end: End, like: Any, capacity: int | str, wide_ids: bool, stream: int) -> DispatchOutput:
    """Allocates outputs for a call on ``stream``, whose ids have the type of those sent."""
    like, _ = codes_and_scales(like)
    return end.outputs(like, capacity, "i64" if wide_ids else "i32", stream)


def launch(calls: Sequence[Call], native: Callable[..., None], *arguments: Any) -> None:
    """Makes the native call of all these ranks. What it launched keeps its memory until a wait of its rank,
    also if the launch was interrupted.
    """
    _require_apart(calls)
    try:
        native([call.end.native for call in calls], [call.stream for call in calls], *arguments)
    except _REFUSALS:
        raise
    except BaseException:
        _keep(calls)
        raise
    _keep(calls)


def finish(calls: Sequence[Call], *, of_round: bool = True) -> None:
    """Waits for all these ranks; the first exception is raised at the end."""
    failed: list[FerryError] = []
    for call in calls:
        try:
            call.finish(of_round=of_round)
        except FerryError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _calls(ends: Sequence[End], streams: Sequence[Any]) -> list[Call]:
    return [Call(end, stream) for end, stream in zip(ends, streams, strict=True)]


def _require_peers(calls: Sequence[Call], *, sent: int = 0, returned: int = 0) -> None:
    """Raises if a call would wait on the host for another rank of this thread."""
    ends = [call.end for call in calls]
    for call in calls:
        if call.copies:
            call.end.require_peers(ends, sent=sent, returned=returned)


def _keep(calls: Sequence[Call]) -> None:
    for call in calls:
        if call.copies:
            call.end.pending.append(call.blocks)


def _require_apart(calls: Sequence[Call]) -> None:
    """Raises if two arrays that calls write have a byte in common."""
    # CPU arrays and memory of the simulator have addresses of their own.
    all_written = sorted(
        (written.copy > 0, written.tensor.address, written.tensor.nbytes, call.end.native.rank, written.name)
        for call in calls
        for written in call.written
        if written.tensor.nbytes > 0
    )
    for one, other in itertools.pairwise(all_written):
        if one[0] == other[0] and one[1] + one[2] > other[1]:
            *_, other_rank, name = one
            raise refuse(other[-1], "memory of its own", f"that of {name} (rank {other_rank})")
