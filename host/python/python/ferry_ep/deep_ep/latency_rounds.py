"""Rounds of low-latency mode: padded blocks, in one call or in two, of which the second is a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core._ferry import Places, Plan
from ..core.communicator import Communicator
from ..core.errors import FaultError, OrderError, PeerGaveUp, PoisonedError
from ..core.outputs import TENSORS, DispatchOutput
from ..core.rank import end_of
from .anew import Direct
from .checks import signature
from .events import IN_CURRENT, Halves, InPlace, Ordered, mark_used
from .faults import Faults
from .graphs import Graphs
from .rounds import MOST_OPEN, Rounds, without_fillers
from .rows import GROUP, Rows
from .sources import Sources

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Blocks", "LatencyHandle", "LatencyLane"]

#: Outputs of padded blocks that follow from the plan, or from others.
_UNSEEN = ("row_offsets", "expert_ids", "row_ends")


class LatencyHandle(tuple[Any, ...]):
    """What a low-latency dispatch returns for its combine: a tuple of five.

    0: int32 ``[local_experts, ranks * num_max_dispatch_tokens_per_rank]``, the token of each row on its
    source. 1: int64 ``[local_experts, ranks]``, the rows of each source: begin in the upper 32 bits, number
    in the lower ones. 2: ``num_max_dispatch_tokens_per_rank``. 3: hidden size. 4: number of experts. The
    first two are made when they are read, on the current stream, as engines read neither.
    """

    lane: LatencyLane
    """Rounds of its plan."""
    topk: tuple[int, int]
    """Tokens and top-k slots of the dispatch."""
    scratch: Tensor | None
    """Memory of a combine with ``zero_copy``, once it was asked for."""
    sources: Sources
    """Where the rows came from."""
    _ids: Tensor
    _version: int | None

    def __new__(cls, lane: LatencyLane, ids: Tensor, sources: Sources) -> LatencyHandle:
        """Made by a dispatch alone, of these ids."""
        made = super().__new__(cls, (None, None, *lane.sizes))
        made.lane, made.topk, made.sources, made.scratch = lane, (ids.shape[0], ids.shape[1]), sources, None
        made._ids, made._version = ids, _version_of(ids)
        return made

    @property
    def ids(self) -> Tensor:
        """The ids of the dispatch. Raises :class:`ferry_ep.OrderError` if torch knows that they were
        overwritten since.
        """
        if _version_of(self._ids) != self._version:
            raise OrderError(
                "topk_idx of the dispatch of handle was overwritten, and the round of handle is over: a "
                "combine would need it to dispatch again"
            )
        return self._ids

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of the rows: local experts, rows of each, hidden size."""
        return self.lane.block_shape

    def __copy__(self) -> Self:
        """Returns itself: its round is that of this object."""
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        """Returns itself."""
        return self

    def __eq__(self, other: object) -> bool:
        """Whether both are of one dispatch."""
        return self is other

    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            return tuple(self)[index]
        at = index + len(self) if index < 0 else index
        experts, rows, _ = self.block_shape
        if at == 0:
            return self.sources.src_info(experts * rows)[:, 0].view(experts, rows)
        if at == 1:
            ranks = rows // self[2]
            return self.sources.numbers(experts * rows, experts * ranks).view(experts, ranks)
        return tuple.__getitem__(self, index)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

    def __repr__(self) -> str:
        return f"<ferry_ep.deep_ep low-latency handle of {self.topk[0]} tokens>"


class Blocks(NamedTuple):
    """Results of a dispatch."""

    rows: Tensor
    """``[local_experts, B, hidden]``."""
    scales: Tensor | None
    """f32 ``[local_experts, B, hidden / 128]``, with adjacent rows next to each other in memory."""
    counts: Tensor
    """int32 ``[local_experts]``, the rows of each."""
    sources: Sources

    @classmethod
    def of(cls, out: DispatchOutput, shape: tuple[int, int, int]) -> Blocks:
        """Returns the outputs of a dispatch in blocks of this shape."""
        scales = out.scales
        if scales is not None:
            scales = scales.view(shape[0], shape[2] // GROUP, shape[1]).transpose(1, 2)
        return cls(
            out.tokens.view(shape), scales, out.expert_counts, Sources(out.src_info, out.source_ranges)
        )


class _Half(NamedTuple):
    """Second half of a dispatch, and the tensors that it writes."""

    wait: Callable[[], Any]
    written: list[Tensor]


class _Outputs:
    """Tensors that dispatches on a GPU return, those of :class:`Blocks`, and one that has all else."""

    def __init__(self, plan: Plan, shape: tuple[int, int, int], direct: Direct) -> None:
        """Takes the shape of the rows."""
        experts, rows, hidden = shape
        visible = ["tokens", "expert_counts"]
        self.has_scales = plan.config.format == "fp8"
        row = torch.float8_e4m3fn if self.has_scales else torch.bfloat16
        #: Sizes, strides and type of each.
        self._kinds: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = [
            (shape, (rows * hidden, hidden, 1), row)
        ]
        if self.has_scales:
            groups = hidden // GROUP
            self._kinds.append(((experts, rows, groups), (rows * groups, 1, rows), torch.float32))
            visible.insert(1, "scales")
        packed = ("src_info", "source_ranges", *_UNSEEN)
        self.places = Places(plan, visible, packed, experts * rows, 0, True)
        self._kinds += [((experts,), (1,), torch.int32), ((self.places.words,), (1,), torch.int64)]
        self._direct = direct

    def allocate(self) -> list[Tensor]:
        """Allocates those of a dispatch."""
        new = self._direct.now()
        return [new(*kind) for kind in self._kinds]


class _Round:
    """A communicator, and the handle of its open round."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.handle: LatencyHandle | None = None
        self.sent = 0
        #: Hook that was not called yet, of a dispatch or of a combine.
        self.hook: Callable[[], None] | None = None
        #: Streams of the last call, or hook, and of the last one that was not captured.
        self.halves = self._last = Halves(None, 0, False)
        #: Stream of the last call that was captured.
        self._captured = self._last
        self._end = end_of(communicator)
        self._capture = self._end.native.capture
        #: Calls with plain tensors.
        self.direct = Direct(communicator)
        self.graphs = Graphs(communicator)
        self._outputs: _Outputs | None = None

    def begin(self, ordered: InPlace | Ordered) -> Self:
        """Begins a call of the communicator in torch's current stream, after the last call in any."""
        self._begin(ordered.halves(self.direct.device))
        return self

    def _begin(self, halves: Halves) -> None:
        """As :meth:`begin`, where ``halves`` is of the current stream. Calls of each capture are apart: they
        are none until its graph is launched.
        """
        if halves.is_captured:
            halves.capture = self._capture(halves.handle)
            if halves.capture == self._captured.capture:
                halves.wait_for(self._captured)
            self._captured = halves
        else:
            halves.wait_for(self._last)
            self._last = halves
        self.halves = halves

    def _begin_hook(self, sent: Halves, used: tuple[Tensor | None, ...]) -> None:
        """Begins the hook of a call, which was made in the stream ``sent``, in the current one."""
        device = self.direct.device
        halves = Halves.of(device)
        if halves.handle != sent.handle:
            if sent.is_captured and sent.capture == self._capture(sent.handle):
                # From here on the current stream is captured, too.
                halves.wait_for(sent)
                halves = Halves.of(device)
            mark_used(device, *used)
        self._begin(halves)

    def receive_nothing(self) -> None:
        """Ends the call whose hook failed, without its results. Collective."""
        communicator, self.hook = self.communicator, None
        if communicator.round == "dispatch sent":
            like = torch.empty(0, dtype=torch.bfloat16, device=self.direct.device)
            communicator.dispatch_wait(out=communicator.outputs(like, id_type="i64"))
        elif communicator.round == "combine sent":
            opened = self._end.opened
            self._end.opened = None if opened is None else opened._replace(written=[])
            communicator.combine_wait()

    def outputs(self, shape: tuple[int, int, int]) -> _Outputs | None:
        """Returns the tensors of dispatches, rows of ``shape``; ``None`` if calls need a description."""
        if self._outputs is None and self.direct.is_there:
            self._outputs = _Outputs(self.communicator.plan, shape, self.direct)
        return self._outputs

    def hook_of(
        self,
        wait: Callable[[], Any],
        used: tuple[Tensor | None, ...],
        finish: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        """Returns the hook that calls ``wait``, then ``finish``, on the current stream: once, later calls do
        nothing. One that failed goes on where it ended. It holds the tensors that its work reads or writes.
        """
        sent, pending = self.halves, finish

        def hook() -> None:
            nonlocal pending
            if self.hook is not hook and pending is None:
                return
            self._begin_hook(sent, used)
            if self.hook is hook:
                wait()
                self.hook = None
                if self.halves.is_captured:
                    self.graphs.note()
            if pending is not None:
                pending()
                pending = None

        self.hook = hook
        return hook


class LatencyLane(Rounds[_Round]):
    """Rounds of low-latency mode. Hooks are collective calls, too. A round is open from when it was sent."""

    _open_states = ("dispatch sent", "dispatched")

    def __init__(
        self, connect: Callable[[], Communicator], sizes: tuple[int, int, int], ranks: int, faults: Faults
    ) -> None:
        super().__init__(faults)
        self._connect = connect
        #: Tokens of a rank, hidden size, experts.
        self.sizes = sizes
        tokens, hidden, experts = sizes
        self.block_shape = (experts // ranks, ranks * tokens, hidden)

    def dispatch(
        self,
        x: Any,
        ids: Tensor,
        *,
        ordered: InPlace | Ordered,
        is_split: bool,
        is_plain: bool,
        finish: Callable[[Blocks], None] | None = None,
        written: tuple[Tensor | None, ...] = (),
        handle: LatencyHandle | None = None,
    ) -> tuple[Blocks, LatencyHandle, Callable[[], None] | None]:
        """Opens a round of ``x``: rows, or a tuple of FP8 rows and scales. ``finish`` enqueues what follows
        the receipt, and writes ``written``. ``is_split``: sends alone, and returns the hook that does
        the rest. ``is_plain``: whether inputs need no description. ``handle``: that of the round, a new one
        by default.
        """
        self._look_for_faults()
        opened = self._acquire(ordered)
        hook = None
        try:
            outputs = opened.outputs(self.block_shape) if is_plain else None
            if outputs is None and handle is None:
                ids = without_fillers(ids, self.sizes[2])
            blocks, half = self._send(opened, x, ids, is_split, outputs)
            if handle is None:
                # With plain tensors the caller's own, as a copy would take as long as a part of the dispatch.
                handle = LatencyHandle(self, ids, blocks.sources)
            if half is not None:
                ended = None if finish is None else partial(finish, blocks)
                hook = opened.hook_of(half.wait, (*half.written, *written), ended)
            elif finish is not None:
                finish(blocks)
            self._note_open(opened, handle)
        except BaseException:
            self._settle(opened)
            raise
        if opened.halves.is_captured:
            opened.graphs.note()
        return blocks, handle, hook

    def _send(
        self, opened: _Round, x: Any, ids: Tensor, is_half: bool, outputs: _Outputs | None
    ) -> tuple[Blocks, _Half | None]:
        """Makes a dispatch, or its first half, with ``outputs`` if there are some. Returns its results, and
        the second half.
        """
        communicator = opened.communicator
        if outputs is not None:
            made, places = outputs.allocate(), outputs.places
            tokens, scales = x if isinstance(x, tuple) else (x, None)
            name = "dispatch_async" if is_half else "dispatch"
            opened.direct.enqueue(name, Rows(tokens, scales).sent(ids, None), made, places)
            sent = made[1] if outputs.has_scales else None
            blocks = Blocks(made[0], sent, made[-2], Sources(made[-1], None))
            if not is_half:
                return blocks, None
            return blocks, _Half(partial(opened.direct.enqueue, "dispatch_wait", (), made, places), made)
        out = communicator.outputs(ids, id_type="i64")
        blocks = Blocks.of(out, self.block_shape)
        if not is_half:
            communicator.dispatch(x, ids, out=out)
            return blocks, None
        written = [tensor for name in TENSORS if (tensor := getattr(out, name)) is not None]
        half = _Half(partial(communicator.dispatch_wait, out=out), written)
        communicator.dispatch_async(x, ids)
        return blocks, half

    def combine(
        self,
        rows: Tensor,
        weights: Tensor,
        handle: LatencyHandle,
        *,
        ordered: InPlace | Ordered,
        out: Tensor | None,
        is_plain: bool,
        is_split: bool,
    ) -> tuple[Tensor, Callable[[], None] | None]:
        """Ends the round of ``handle``; repeats its dispatch first if it is not open any more. ``is_plain``:
        whether tensors need no description.
        """
        self._look_for_faults()
        opened = self.find(handle)
        if opened is None:
            self._repeat(handle, ordered)
            opened = self.find(handle)
            assert opened is not None
        if opened.hook is not None:
            raise OrderError("the hook of the dispatch of handle was not called: call it before the combine")
        communicator, hook = opened.begin(ordered).communicator, None
        try:
            shape = (handle.topk[0], rows.shape[2])
            if out is None:
                out = opened.direct.now()(shape, (shape[1], 1), torch.bfloat16)
            if is_plain and opened.direct.is_there:
                name = "combine_async" if is_split else "combine"
                opened.direct.enqueue(name, (rows, weights), (out,))
            else:
                call = communicator.combine_async if is_split else communicator.combine
                call(rows.view(-1, rows.shape[2]), topk_weights=weights, out=out)
            if is_split:
                hook = opened.hook_of(communicator.combine_wait, (out, rows, weights))
        except BaseException:
            self._settle(opened)
            raise
        self._end(opened)
        if opened.halves.is_captured:
            opened.graphs.note()
        return out, hook

    def end(self) -> list[Exception]:
        """Calls hooks that were not called, and gives up all open rounds. Collective. Returns why hooks
        failed, which stops no round from ending.
        """
        failed: list[Exception] = []
        for each in self._all:
            if each.communicator.closed:
                continue
            # A communicator that gave up waits for nobody, and is closed as it is.
            with suppress(FaultError, PeerGaveUp, PoisonedError):
                if each.hook is not None:
                    try:
                        each.hook()
                    except (FaultError, PeerGaveUp, PoisonedError):
                        raise
                    except Exception as error:
                        failed.append(error)
                        each.receive_nothing()
                each.begin(IN_CURRENT)
                if each.communicator.round == "dispatched":
                    each.communicator.give_up()
                self._faults.note(each.communicator, each.communicator.synchronize())
            each.handle = None
        self._open.clear()
        return failed

    def _acquire(self, ordered: InPlace | Ordered) -> _Round:
        """Begins the call of a round that is not open: an idle one, a new one, or the oldest open one, given
        up. Returns the round.
        """
        for each in self._all:
            # A call that failed on its way left a half: the communicator says why.
            if each not in self._open and each.hook is None:
                return self._again(each).begin(ordered)
        if len(self._all) < MOST_OPEN:
            self._all.append(_Round(self._connect()))
            return self._all[-1].begin(ordered)
        oldest = self._open[0] if self._open else self._all[0]
        if oldest.hook is not None:
            raise OrderError(
                f"{MOST_OPEN} low-latency rounds are under way, and the hook of the oldest was not called: "
                "call it before this dispatch"
            )
        return self._give_up(self._again(self._oldest()).begin(ordered))

    def _repeat(self, handle: LatencyHandle, ordered: InPlace | Ordered) -> None:
        """Opens a round of ``handle`` with rows of zeros."""
        ids = handle.ids
        self._say_repeat("low-latency combine")
        # Only the handle keeps them, and their stream may be another one.
        mark_used(ids.device, ids)
        x = torch.zeros(len(ids), handle[3], dtype=torch.bfloat16, device=ids.device)
        is_plain = signature(ids) is not None
        self.dispatch(x, ids, ordered=ordered, is_split=False, is_plain=is_plain, handle=handle)


def _version_of(tensor: Tensor) -> int | None:
    """Returns a number that grows when torch writes a tensor; ``None`` if it does not count."""
    return None if tensor.is_inference() else tensor._version
