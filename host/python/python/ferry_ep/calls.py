"""One call of one rank: its arguments, copies of CPU arrays, and its wait."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _ferry
from ._ferry import Tensor
from .blocks import HOST, Block
from .errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    FerryError,
    ForkError,
    OrderError,
    PoisonedError,
)
from .memory import DeviceArray, _Memory
from .outputs import TENSORS, DispatchOutput, SiluOutput
from .scalars import whole
from .tensors import Described, Repeated, describe, elements_of, refuse, scales_of, stream_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from .rank import Rank

__all__ = ["Answers", "Call", "Opened", "accepted", "codes_and_scales"]

#: Exceptions of calls that launched nothing, so that their memory is free at once.
_REFUSALS = (ArgumentError, BusyError, ClosedError, ForkError, OrderError, PoisonedError)


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
    described: Described
    nbytes: int
    copy: int

    def require_same(self) -> None:
        """Raises if the array has other memory than when the call began."""
        now = describe(self.name, self.value, self.wanted, written=True)
        if (now.address, now.shape, now.strides) != (
            self.described.address,
            self.described.shape,
            self.described.strides,
        ):
            raise refuse(self.name, "the memory that it had when the call began", "other memory")


class Opened(NamedTuple):
    """What a first half leaves for the second: whether it copies, what it writes, and memory of copies."""

    copies: bool
    written: list[_Written]
    blocks: list[Block]


@contextmanager
def accepted(calls: Sequence[Call]) -> Iterator[None]:
    """Surrounds the native call that launches ``calls``, of one rank each: what it launched keeps its memory
    until a wait of its rank, also if the launch was interrupted.
    """
    _require_apart(calls)
    try:
        yield
    except _REFUSALS:
        raise
    except BaseException:
        _keep(calls)
        raise
    _keep(calls)


def _keep(calls: Sequence[Call]) -> None:
    for call in calls:
        if call.copies:
            call.communicator._pending.append(call.blocks)


def _require_apart(calls: Sequence[Call]) -> None:
    """Raises if two arrays that calls write have a byte in common."""
    # CPU arrays and memory of the simulator have addresses of their own.
    all_written = sorted(
        (written.copy > 0, written.described.address, written.nbytes, call.communicator.rank, written.name)
        for call in calls
        for written in call.written
        if written.nbytes > 0
    )
    for one, other in itertools.pairwise(all_written):
        if one[0] == other[0] and one[1] + one[2] > other[1]:
            *_, other_rank, name = one
            raise refuse(other[-1], "memory of its own", f"that of {name} (rank {other_rank})")


class Call:
    """A call of one rank.

    With CPU arrays (simulated groups alone) inputs are copied to the rank's memory before the call; outputs,
    too, so that what a kernel does not write stays as it is; and back after the wait. The copies are the
    call's own: a call that is refused has changed nothing.
    """

    def __init__(self, communicator: Rank, stream: Any) -> None:
        self.communicator = communicator
        self.stream = communicator._stream(stream)
        #: Whether an argument is a CPU array.
        self.copies = False
        #: Arrays that the call writes.
        self.written: list[_Written] = []
        #: Memory of the copies.
        self.blocks: list[Block] = []

    def take(self, name: str, value: Any, wanted: str) -> Tensor:
        """Returns an argument that is read, of elements ``wanted``."""
        return self._place(name, describe(name, value, wanted))[0]

    def maybe(self, name: str, value: Any, wanted: str) -> Tensor | None:
        """Returns an argument that is read, if it was given."""
        return None if value is None else self.take(name, value, wanted)

    def give(self, name: str, value: Any, wanted: str) -> Tensor:
        """Returns an argument that is written."""
        described = describe(name, value, wanted, written=True)
        tensor, copy = self._place(name, described)
        self.written.append(_Written(name, value, wanted, described, tensor.nbytes, copy))
        return tensor

    def outputs(self, out: DispatchOutput) -> _ferry.DispatchOutput:
        """Returns the outputs of a dispatch."""
        if not isinstance(out, DispatchOutput):
            raise refuse("out", "a DispatchOutput", type(out).__name__)
        rows, blocks = whole("out.rows", out.rows), whole("out.scale_blocks", out.scale_blocks)
        tensors = {}
        plan = self.communicator.plan
        wide_ids = out.ids is not None and describe("ids", out.ids, "i32").data_type == "i64"
        for name, data_type, shape, _, _ in plan._output_layout(rows, blocks, wide_ids):
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
        return _ferry.DispatchOutput(plan, rows, blocks, wide_ids, tensors)

    def answers(self, given: Answers) -> _ferry.CombineInput:
        """Returns the inputs of a combine."""
        initial = given.initial if isinstance(given.initial, (tuple, list)) else [given.initial]
        if len(initial) > 2:
            raise refuse("initial", "at most 2 tensors", str(len(initial)))
        first, second = (*initial, None, None)[:2]
        return _ferry.CombineInput(
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

    def sums(self, out: Any, weights: Any) -> _ferry.CombineOutput:
        """Returns the output of a combine."""
        returned = None if weights is None else self.give("weights", weights, "f32")
        return _ferry.CombineOutput(self.give("combined", out, "bf16"), returned)

    def silu_output(self, like: Any, format: str) -> SiluOutput:
        """Allocates the outputs of a fused SiLU of ``like``."""
        shape = describe("input", like, "bf16").shape
        if len(shape) != 2:
            raise refuse("input", "2 dimensions", f"shape {list(shape)}")
        rows, columns = shape[0], shape[1] // 2
        _, group, layout = _ferry.format_sizes(format)
        element = elements_of(format)
        if group == 0:
            return SiluOutput(*self._allocate(like, (element, [rows, columns])))
        if layout is None:
            scales = [columns // group, rows]
        elif layout == "row-major":
            scales = [rows, columns // group]
        else:
            blocks = self.communicator.plan._capacity(rows)[1]
            scales = [blocks, columns // (4 * group), 32, 4, 4]
        made = self._allocate(like, (element, [rows, columns]), (scales_of(format), scales))
        return SiluOutput(*made)

    def require_peers(self, *, sent: int = 0, returned: int = 0) -> None:
        """Raises if the call would wait on the host for another rank of this thread."""
        if self.copies:
            self.communicator._require_peers(sent, returned)

    def require_device_memory(self) -> None:
        """Raises if an argument is a CPU array, and after close."""
        if self.communicator._native.closed:
            raise ClosedError(f"rank {self.communicator.rank}: the communicator was closed")
        if self.copies:
            raise ArgumentError("a prepared call takes memory of the device, and an array is on the CPU")

    def opened(self) -> Opened:
        """Returns what the second half of this call fills."""
        return Opened(self.copies, self.written, self.blocks)

    @classmethod
    def second(cls, communicator: Rank, opened: Opened | None, stream: Any) -> Self:
        """Begins the second half of a call. Raises if an array that it fills has other memory by now."""
        call = cls(communicator, stream)
        if opened is not None:
            call.copies, call.written, call.blocks = opened
            for written in call.written:
                written.require_same()
        return call

    def launch(self, native: Callable[..., None], *arguments: Any) -> None:
        """Makes the native call."""
        with accepted([self]):
            native(self.stream, *arguments)

    def finish(self, *, of_round: bool = True) -> None:
        """Waits, and copies what the call filled, if an argument is a CPU array."""
        communicator = self.communicator
        if of_round:
            communicator._drive()
        if not self.copies:
            return
        communicator._wait(self.stream, of_round=of_round, is_part=True)
        failed: list[FerryError] = []
        for written in self.written:
            if not written.copy:
                continue
            try:
                written.require_same()
                communicator._native._download(written.copy, written.described.address, written.nbytes)
            except FerryError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _allocate(self, like: Any, *layouts: tuple[str, list[int]]) -> list[Any]:
        return self.communicator._allocated(Repeated(list(layouts)), like, self.stream)

    def _place(self, name: str, described: Described) -> tuple[Tensor, int]:
        """Returns the tensor on the rank's device, and the address of its copy, 0 if it is none."""
        communicator = self.communicator
        if described.device in ("rank", communicator.device):
            _require_own(name, described.owner, communicator)
            self._record(described.owner)
            return described.tensor(), 0
        if described.device != "cpu" or not communicator._copies:
            wanted = "the CPU" if communicator._copies else communicator.device
            raise refuse(name, f"memory of {wanted}", f"memory of {described.device}")
        self.copies = True
        return self._copy(described)

    def _record(self, owner: Any) -> None:
        """Tells torch, or a lent array, that it is used on another stream than its own."""
        if isinstance(owner, Tensor):
            if isinstance(owner.owner, DeviceArray):
                owner.owner._used_on(self.stream)
            return
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(owner, torch.Tensor) or not owner.is_cuda:
            return
        if self.stream == self.communicator._stream(None) or torch.cuda.is_current_stream_capturing():
            return
        owner.record_stream(stream_of(self.stream, owner.device))

    def _copy(self, described: Described) -> tuple[Tensor, int]:
        """Copies a CPU array to memory of this call."""
        communicator = self.communicator
        nbytes = described.tensor().nbytes
        block = communicator._blocks.lend(nbytes, HOST)
        self.blocks.append(block)
        communicator._native._upload(block.address, described.address, nbytes)
        return described.tensor(block.address), block.address


def _require_own(name: str, owner: Any, communicator: Rank) -> None:
    """Raises for an array of another rank's device."""
    if isinstance(owner, Tensor):
        owner = owner.owner
    if not isinstance(owner, _Memory) or owner.communicator is communicator:
        return
    of = owner.communicator
    # Simulated ranks of a group, and ranks of other groups, have memory of their own.
    is_apart = communicator._copies and (of.rank, of._group) != (communicator.rank, communicator._group)
    if of.device != communicator.device or is_apart:
        wanted, given = (f"memory of rank {rank.rank} on {rank.device}" for rank in (communicator, of))
        raise refuse(name, wanted, given)
