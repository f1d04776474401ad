"""Arguments of calls: copies of CPU arrays, launches, and waits."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ._ferry import Tensor, arguments_of, capacity_of, describe, format_sizes, layout_of
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

__all__ = ["Answers", "Arguments", "Sent", "codes_and_scales", "finish", "launch", "received", "result"]

#: Exceptions of calls that launched nothing, so that their memory is free at once.
_REFUSALS = (ArgumentError, BusyError, ClosedError, ForkError, OrderError, PoisonedError)


@dataclass(eq=False)
class Sent:
    """Inputs of a dispatch: arrays of one rank."""

    x: Any
    topk_ids: Any
    topk_weights: Any = None
    input_scale: Any = None
    tokens_on_device: Any = None

    def _given(self) -> tuple[Any, ...]:
        """Returns the inputs in the order of ``arguments_of``."""
        x, scales = codes_and_scales(self.x)
        return x, self.topk_ids, self.topk_weights, self.input_scale, self.tokens_on_device, scales


@dataclass(eq=False)
class Answers:
    """Inputs and results of a combine: arrays of one rank."""

    expert_rows: Any
    topk_weights: Any = None
    row_weights: Any = None
    row_scales: Any = None
    bias: Any = None
    bias2: Any = None
    residual: Any = None
    initial: Any = None
    received_weights: Any = None
    out: Any = None
    weights: Any = None
    data_type: str = "bf16"

    def _given(self) -> tuple[Any, ...]:
        """Returns the inputs in the order of ``arguments_of``."""
        initial = self.initial if isinstance(self.initial, (tuple, list)) else (self.initial,)
        if len(initial) > 2:
            raise refuse("initial", "at most 2 tensors", str(len(initial)))
        first, second = (*initial, None, None)[:2]
        steps = self.row_scales, self.bias, self.bias2, self.residual
        rows, weights = self.expert_rows, (self.topk_weights, self.row_weights)
        return rows, *weights, *steps, first, second, self.received_weights


#: Number of inputs of a dispatch.
_SENT = 6
#: Name and type of each input of a call, and whether it has to be there.
_table = functools.cache(arguments_of)


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


class Arguments:
    """Arguments of a call of one rank.

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
        #: Whether a second half fills what this call writes.
        self.leaves = False
        #: What the first half of this call has left.
        self.opened: Opened | None = None

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

    def inputs(self, name: str, given: tuple[Any, ...]) -> list[Tensor | None]:
        """Returns the inputs of the call ``name``, which are ``given``."""
        is_encoded = len(given) == _SENT and given[-1] is not None
        table = _table(name, self.end.plan.config.format, is_encoded)
        return [
            self.take(argument, value, wanted) if is_required else self.maybe(argument, value, wanted)
            for (argument, wanted, is_required), value in zip(table, given, strict=False)
        ]

    def outputs(self, out: DispatchOutput) -> list[Tensor | None]:
        """Returns the outputs of a dispatch."""
        if not isinstance(out, DispatchOutput):
            raise refuse("out", "a DispatchOutput", type(out).__name__)
        rows, blocks = whole("out.rows", out.rows), whole("out.scale_blocks", out.scale_blocks)
        tensors: dict[str, Tensor | None] = {}
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
        return list(tensors.values())

    def sums(self, out: Any, weights: Any) -> list[Tensor | None]:
        """Returns the results of a combine."""
        returned = None if weights is None else self.give("weights", weights, "f32")
        return [self.give("combined", out, "bf16"), returned]

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

    def resume(self) -> None:
        """Takes what the first half has left. Raises if an array that it fills has other memory by now."""
        self.opened = self.end.opened
        if self.opened is not None:
            self.copies, self.written, self.blocks = self.opened
            for written in self.written:
                written.require_same()

    def enqueued(self) -> None:
        """Notes that the call was enqueued: what a first half leaves, and what a second half had left."""
        self.end.drive()
        if self.leaves:
            self.end.opened = Opened(self.copies, self.written, self.blocks)
        elif self.opened is not None and self.end.opened is self.opened:
            self.end.opened = None

    def finish(self, *, of_round: bool = True) -> None:
        """Waits, and copies what the call filled, if an argument is a CPU array."""
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


def result(end: End, given: Answers, stream: int) -> tuple[Any, Any]:
    """Returns ``out`` and ``weights`` of a combine, or allocates them for the tokens of the open round."""
    out, weights, data_type = given.out, given.weights, element(given.data_type)
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


def received(end: End, like: Any, capacity: int | str, id_type: str, stream: int) -> DispatchOutput:
    """Allocates outputs for a call on ``stream``, whose ids have this type."""
    like, _ = codes_and_scales(like)
    return end.outputs(like, capacity, id_type, stream)


def launch(calls: Sequence[Arguments], native: Callable[..., None], *arguments: Any) -> None:
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


def finish(calls: Sequence[Arguments], *, of_round: bool = True) -> None:
    """Waits for all these ranks; the first exception is raised at the end."""
    failed: list[FerryError] = []
    for call in calls:
        try:
            call.finish(of_round=of_round)
        except FerryError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _keep(calls: Sequence[Arguments]) -> None:
    for call in calls:
        if call.copies:
            call.end.pending.append(call.blocks)


def _require_apart(calls: Sequence[Arguments]) -> None:
    """Raises if two arrays that calls write have a byte in common. A second half brings none of its own."""
    # CPU arrays and memory of the simulator have addresses of their own.
    all_written = sorted(
        (written.copy > 0, written.tensor.address, written.tensor.nbytes, call.end.native.rank, written.name)
        for call in calls
        for written in call.written
        if written.tensor.nbytes > 0 and call.opened is None
    )
    for one, other in itertools.pairwise(all_written):
        if one[0] == other[0] and one[1] + one[2] > other[1]:
            *_, other_rank, name = one
            raise refuse(other[-1], "memory of its own", f"that of {name} (rank {other_rank})")
