"""Rounds of one plan in the order in which DeepEP's calls come: opened, combined, given up, repeated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..core._ferry import Places
from ..core.communicator import Communicator
from ..core.errors import ArgumentError, FaultError, OrderError, PeerGaveUp, PoisonedError
from ..core.outputs import DispatchOutput, ReceivedCounts
from .anew import Direct
from .events import InPlace, Ordered
from .faults import Faults
from .graphs import Graphs, Held
from .handle import LaneKey, Routing
from .room import Room
from .rows import GROUP, Rows
from .settings import say_once

__all__ = ["Answers", "Lane", "Round", "without_fillers"]

#: Most rounds of a plan that are open at a time, each with a communicator and a window of its own.
MOST_OPEN = 2

Outputs = TypeVar("Outputs")

#: Results of a dispatch: rows ``[rows, hidden]``, their scales, f32 ``[rows, hidden / 128]``, ids and
#: weights, f32, ``[rows, top_k]``.
Arrived = tuple[Tensor, Tensor | None, Tensor, Tensor]

#: Outputs of dispatches by what callers see: all, nothing but the rows, or nothing, of a first half; and the
#: others.
_WHOLE, _AGAIN, _HALF = range(3)
_PLACES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("tokens", "scales", "ids", "weights"), ("src_info", "source_counts", "expert_counts", "kept_ids")),
    (("tokens", "scales"), ("ids", "weights", "src_info", "source_counts", "expert_counts")),
    ((), ("kept_ids",)),
)
#: Most places that a round remembers.
_MOST_PLACES = 1024


class Answers(NamedTuple):
    """What a combine sends back for the rows of a dispatch."""

    rows: Tensor
    """BF16 ``[rows, hidden]``."""
    weights: Tensor | None
    """f32 ``[rows, top_k]``, which return, too; ``None`` if the caller asks for none."""
    initial: tuple[Tensor, ...]
    """BF16 ``[tokens, hidden]`` each, with which sums begin."""
    routing: Routing
    """That of the dispatch."""


class Opened(Held, Protocol):
    """A communicator, and what names its open round."""

    handle: Any
    """What its combine is given; ``None`` if its dispatch failed, and returned nothing."""
    sent: int
    """Dispatches of the communicator so far, at most 2: calls have another deadline until then."""


Kept = TypeVar("Kept", bound=Opened)


class Round:
    """A communicator, and the routing of its open round."""

    def __init__(self, communicator: Communicator, faults: Faults) -> None:
        self.communicator, self._faults = communicator, faults
        self.rank, self.ranks = communicator.rank, communicator.plan.ranks
        self.handle: Routing | None = None
        self.sent = 0
        self.graphs = Graphs(communicator)
        #: Calls with plain tensors.
        self.direct = Direct(communicator)
        config = communicator.plan.config
        self._hidden, self._top_k, self._experts = config.hidden, config.top_k, config.experts
        #: Scales of a row, and the type of its elements.
        self._groups = config.hidden // GROUP if config.format == "fp8" else 0
        self._dtype = torch.float8_e4m3fn if self._groups else torch.bfloat16
        self._places = lru_cache(_MOST_PLACES)(self._placed)
        #: Most multiprocessors of a call, and of the last one; ``None`` for all.
        self.most_sms = self._limit = communicator.max_sms
        if communicator.device.startswith("cuda:"):
            properties = torch.cuda.get_device_properties(communicator.device)
            self.most_sms = self.most_sms or properties.multi_processor_count

    def limit(self, num_sms: int) -> None:
        """Sets the multiprocessors of the next calls, 0 for all."""
        limit: int | None = num_sms or None
        if limit is not None and self.most_sms is not None:
            limit = min(limit, self.most_sms)
        if limit != self._limit:
            self.communicator.limit_sms(limit)
            self._limit = limit

    def _outputs(self, of: int, rows: int, tokens: int, ids: Tensor) -> tuple[list[Tensor], Places]:
        """Allocates the outputs of a dispatch with ids of this type, and returns them and their places."""
        places = self._places(of, rows, tokens, ids.dtype == torch.int64)
        new, hidden, top_k = self.direct.now(), self._hidden, self._top_k
        made = []
        if of != _HALF:
            made.append(new((rows, hidden), (hidden, 1), self._dtype))
            if self._groups:
                made.append(new((rows, self._groups), (self._groups, 1), torch.float32))
        if of == _WHOLE:
            made.append(new((rows, top_k), (top_k, 1), ids.dtype))
            made.append(new((rows, top_k), (top_k, 1), torch.float32))
        made.append(new((places.words,), (1,), torch.int64))
        return made, places

    def _placed(self, of: int, rows: int, tokens: int, is_wide: bool) -> Places:
        """Returns places of outputs."""
        seen, packed = _PLACES[of]
        if not self._groups:
            seen = tuple(name for name in seen if name != "scales")
        return Places(self.communicator.plan, seen, packed, rows, tokens, is_wide)

    def _arrived(self, made: list[Tensor]) -> Arrived:
        """Returns the outputs that callers see."""
        return made[0], made[1] if self._groups else None, made[-3], made[-2]

    def dispatch(
        self, x: Rows, ids: Tensor, weights: Tensor | None, rows: int, is_direct: bool
    ) -> tuple[Arrived, tuple[Tensor, ...], int]:
        """Makes a dispatch with outputs of so many rows. Returns them, and ``memory`` and ``kept_at`` of its
        routing. ``is_direct``: whether its tensors need no description.
        """
        communicator = self.communicator
        if is_direct:
            made, places = self._outputs(_WHOLE, rows, ids.shape[0], ids)
            if self.direct.enqueue("dispatch", x.sent(ids, weights), made, places):
                self.graphs.note()
            return self._arrived(made), (made[-1],), places.kept_ids
        kept = without_fillers(ids, self._experts)
        out = self._described(x, kept, rows)
        communicator.dispatch(x.given, kept, weights, out=out)
        self.graphs.note_if_captured()
        return _seen(out), (out.src_info, out.source_counts, kept), 0

    def dispatch_again(
        self, x: Rows, ids: Tensor, rows: int, is_direct: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Makes a dispatch of which callers see the rows and scales alone, and returns these."""
        communicator = self.communicator
        if is_direct:
            made, places = self._outputs(_AGAIN, rows, 0, ids)
            if self.direct.enqueue("dispatch", x.sent(ids, None), made, places):
                self.graphs.note()
            return made[0], made[1] if self._groups else None
        out = self._described(x, ids, rows)
        communicator.dispatch(x.given, ids, None, out=out)
        self.graphs.note_if_captured()
        return out.tokens, out.scales

    def dispatch_counted(
        self, x: Rows, ids: Tensor, weights: Tensor | None, is_direct: bool
    ) -> tuple[Arrived, tuple[Tensor, ...], ReceivedCounts]:
        """Makes a dispatch whose outputs have as many rows as come. Returns them, ``memory`` of its routing,
        and the counts. If there is no memory for them, it receives no row: then the round is whole, and a
        later dispatch can give it up.
        """
        communicator = self.communicator
        if is_direct:
            (kept,), places = self._outputs(_HALF, 0, ids.shape[0], ids)
            self.direct.enqueue("dispatch_async", x.sent(ids, weights), [kept], places)
            counts, outputs = self._counted(x, ids, lambda rows: self._outputs(_WHOLE, rows, 0, ids))
            self.direct.enqueue("dispatch_wait", (), *outputs)
            made = outputs[0]
            return self._arrived(made), (made[-1], kept), counts
        kept = without_fillers(ids, self._experts)
        communicator.dispatch_async(x.given, kept, weights)
        counts, out = self._counted(x, kept, lambda rows: self._described(x, kept, rows))
        communicator.dispatch_wait(out=out)
        return _seen(out), (out.src_info, out.source_counts, kept), counts

    def _counted(
        self, x: Rows, ids: Tensor, allocate: Callable[[int], Outputs]
    ) -> tuple[ReceivedCounts, Outputs]:
        """Waits for the counts, and allocates outputs for as many rows."""
        communicator = self.communicator
        try:
            communicator.dispatch_counts()
            counts = communicator.received(wait=True)
            assert counts is not None
            return counts, allocate(counts.rows)
        except BaseException as error:
            # On the CPU a receipt waits, which whoever interrupts does not want.
            if ids.is_cuda or isinstance(error, Exception):
                # The first error says more than one of these.
                with suppress(Exception):
                    self._faults.expect_loss(communicator)
                    communicator.dispatch_wait(out=self._described(x, ids, 0))
            raise

    def _described(self, x: Rows, ids: Tensor, rows: int) -> DispatchOutput:
        """Allocates outputs with a description."""
        id_type = "i64" if ids.dtype == torch.int64 else "i32"
        return self.communicator.outputs(x.tokens, rows, id_type=id_type)

    def combine(self, answers: Answers, is_plain: bool) -> tuple[Tensor, Tensor | None]:
        """Makes the combine of a routing. Returns the sums, and the weights, if there are some."""
        rows, weights, initial, routing = answers
        new, tokens, is_wanted = self.direct.now(), routing.topk[0], weights is not None
        sums = new((tokens, self._hidden), (self._hidden, 1), torch.bfloat16)
        # The plan's rows bring weights, wanted or not.
        returned = new((tokens, self._top_k), (self._top_k, 1), torch.float32)
        weights = routing.weights if weights is None else weights
        communicator = self.communicator
        if is_plain and self.direct.is_there:
            first, second = (*initial, None, None)[:2] if initial else (None, None)
            inputs = (rows, *[None] * 6, first, second, weights)
            if self.direct.enqueue("combine", inputs, (sums, returned)):
                self.graphs.note()
        else:
            options: dict[str, Any] = {"received_weights": weights, "out": sums, "weights": returned}
            communicator.combine(rows, initial=initial or None, **options)
            self.graphs.note_if_captured()
        return sums, returned if is_wanted else None


def without_fillers(ids: Tensor, experts: int) -> Tensor:
    """Returns a copy of ids with -1 for the number of experts, with which engines fill slots: a kernel would
    report such a slot, and no other one of the round.
    """
    return ids.masked_fill(ids == experts, -1)


def _seen(out: DispatchOutput) -> Arrived:
    """Returns the outputs that callers see."""
    return out.tokens, out.scales, out.ids, out.weights


class Rounds(Generic[Kept]):
    """Rounds of one plan. Calls are collective, and all ranks make the same ones in the same order, so that
    they choose the same communicators.
    """

    #: States of a communicator whose round is open.
    _open_states: ClassVar[tuple[str, ...]] = ("dispatched",)

    def __init__(self, faults: Faults) -> None:
        self._faults, self._is_strict = faults, faults.is_strict
        #: All rounds, in the order in which they were made.
        self._all: list[Kept] = []
        #: Open rounds, the oldest first.
        self._open: list[Kept] = []

    def is_of(self, faults: Faults) -> bool:
        """Returns whether they are of the buffer with these faults."""
        return self._faults is faults

    @property
    def all(self) -> list[Kept]:
        """Rounds that were made so far, open or not."""
        return self._all

    def _look_for_faults(self) -> None:
        """Looks for input faults of earlier calls, before this one sends anything."""
        for each in self._all:
            self._faults.look(each.communicator)

    def find(self, handle: Any) -> Kept | None:
        """Returns the newest open round of a handle."""
        for each in reversed(self._open):
            if each.handle is handle:
                return each
        return None

    def _settle(self, opened: Kept) -> None:
        """Notes the state of a round after a call of it that failed. One that is still open keeps its place:
        all ranks give up the same round, also where only one of them was refused a call.
        """
        is_open = opened.communicator.round in self._open_states
        if is_open and opened not in self._open:
            self._open.append(opened)
        elif not is_open and opened in self._open:
            self._end(opened)

    def _again(self, used: Kept) -> Kept:
        """Returns what may have had a round before. A graph keeps the deadlines of its calls: the plan's."""
        is_second = used.sent == 1 and used.communicator.device.startswith("cuda:")
        if is_second and torch.cuda.is_current_stream_capturing():
            self._note_sent(used)
        return used

    def _note_open(self, opened: Kept, handle: Any) -> None:
        """Notes that a dispatch opened a round, and what its combine will be given."""
        opened.handle = handle
        self._open.append(opened)
        self._note_sent(opened)

    def _note_sent(self, opened: Kept) -> None:
        """Notes a dispatch. Calls after the second, which waits for first rounds, have the plan's."""
        if opened.sent < 2:
            opened.sent += 1
            if opened.sent == 2:
                opened.communicator.set_deadline(None)

    def _end(self, opened: Kept) -> None:
        """Notes that a round is over."""
        self._open.remove(opened)
        opened.handle = None

    def _give_up(self, opened: Kept) -> Kept:
        """Gives up an open round, and returns it. Collective."""
        try:
            opened.communicator.give_up()
        except BaseException:
            self._settle(opened)
            raise
        self._end(opened)
        return opened

    def _oldest(self) -> Kept:
        """Returns the oldest open round, to be given up. Refuses that if it is asked for."""
        oldest = self._open[0]
        # A call that failed after it was sent returned no handle: nobody will combine its round.
        if self._is_strict and oldest.handle is not None:
            raise OrderError(
                f"{MOST_OPEN} rounds are open, and FERRY_DEEP_EP_STRICT is set: combine one before this "
                "dispatch, which would give up the oldest"
            )
        return oldest

    def _say_repeat(self, call: str) -> None:
        """Refuses to repeat a dispatch, if that is asked for, and else says that it is repeated."""
        if self._is_strict:
            raise OrderError(
                "handle is not that of an open round, and FERRY_DEEP_EP_STRICT is set: combine each handle "
                "once, and before its round was given up"
            )
        say_once(
            f"ferry_ep.deep_ep: a {call} had a handle whose round is not open (combined before, or given up "
            "by later dispatches): its dispatch is made again, which is right, but takes its time"
        )


class Lane(Rounds[Round]):
    """Rounds of normal mode."""

    def __init__(
        self,
        connect: Callable[[int], Communicator],
        key: LaneKey,
        faults: Faults,
        agree: Callable[[Tensor], Room],
    ) -> None:
        """Takes functions that make a communicator for so many tokens of a rank, and that agree with all
        ranks on the room for a call with these ids. Both are collective.
        """
        super().__init__(faults)
        self._connect, self._agree = connect, agree
        self.key = key
        #: Tokens of a rank for which there is room; ``None`` before the first call.
        self.room: Room | None = None

    def dispatch(
        self,
        x: Rows,
        ids: Tensor,
        weights: Tensor | None,
        *,
        rows: int | None,
        num_sms: int,
        ordered: InPlace | Ordered,
        is_plain: bool,
    ) -> tuple[Arrived, ReceivedCounts | None, Routing]:
        """Opens a round. With ``rows`` outputs have so many, and the host does not wait; else they have as
        many as come, and it waits for that number. ``is_plain``: whether inputs need no description.
        """
        halves = ordered.halves(ids.device)
        if rows is None and halves.is_captured:
            raise ArgumentError(
                "num_worst_tokens is 0, but in a graph the host cannot wait for the number of rows: give it, "
                "or a handle"
            )
        opened = self._begin(ids, None)
        is_direct, counts, kept_at = is_plain and opened.direct.is_there, None, 0
        try:
            opened.limit(num_sms)
            if rows is None:
                arrived, memory, counts = opened.dispatch_counted(x, ids, weights, is_direct)
                rows = counts.rows
            else:
                arrived, memory, kept_at = opened.dispatch(x, ids, weights, rows, is_direct)
            routing = Routing(
                key=self.key,
                memory=memory,
                kept_at=kept_at,
                rows=rows,
                topk=(ids.shape[0], ids.shape[1]),
                has_topk=weights is not None,
                is_plain=is_plain,
                made_on=halves.handle,
                rank=opened.rank,
                ranks=opened.ranks,
                weights=arrived[3],
            )
            self._note_open(opened, routing)
        except BaseException:
            self._settle(opened)
            raise
        return arrived, counts, routing

    def dispatch_again(
        self, x: Rows, routing: Routing, *, num_sms: int, is_plain: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Opens a round of the routing of a handle. Returns its rows and their scales."""
        opened = self._begin(routing.ids, routing)
        try:
            opened.limit(num_sms)
            arrived = opened.dispatch_again(x, routing.ids, routing.rows, is_plain and opened.direct.is_there)
            self._note_open(opened, routing)
        except BaseException:
            self._settle(opened)
            raise
        return arrived

    def combine(
        self, answers: Answers, opened: Round | None, *, num_sms: int, is_plain: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Ends the round of a routing, ``opened``; repeats its dispatch first if there is none. ``is_plain``:
        whether tensors need no description.
        """
        routing = answers.routing
        self._look_for_faults()
        if opened is None:
            self._repeat(routing, self.key[2], num_sms)
            opened = self.find(routing)
            assert opened is not None
        try:
            opened.limit(num_sms)
            results = opened.combine(answers, is_plain)
        except BaseException:
            self._settle(opened)
            raise
        self._end(opened)
        return results

    def give_up(self, routing: Routing) -> None:
        """Gives up the open round of ``routing``. Collective."""
        opened = self.find(routing)
        assert opened is not None
        self._give_up(opened)

    def end(self, stream: Any) -> None:
        """Gives up all open rounds, on ``stream``. Collective."""
        for each in self._open:
            # A communicator that gave up waits for nobody, and is closed as it is.
            with suppress(FaultError, PeerGaveUp, PoisonedError):
                if not each.communicator.closed:
                    each.communicator.give_up(stream=stream)
            each.handle = None
        self._open.clear()

    def _make(self, ids: Tensor) -> Round:
        room = self._agree(ids) if self.room is None else self.room
        made = Round(self._connect(room.tokens), self._faults)
        # Not if there was no memory for as many: all ranks know that, and agree once more.
        self.room = room
        self._all.append(made)
        return made

    def _begin(self, ids: Tensor, again: Routing | None) -> Round:
        """Begins a dispatch of these ids, and returns its round."""
        if self.room is not None:
            self.room.require(ids.shape[0])
        self._look_for_faults()
        return self._acquire(ids, again)

    def _acquire(self, ids: Tensor, again: Routing | None) -> Round:
        """Returns a round that is not open: an idle one, a new one, or the oldest open one, given up. One
        that is open for the same routing serves first, as the new one brings the same rows.
        """
        same = None if again is None or self._is_strict else self.find(again)
        if same is not None:
            return self._give_up(self._again(same))
        for each in self._all:
            # A call that failed on its way left a half: the communicator says why.
            if each not in self._open:
                return self._again(each)
        if len(self._all) < MOST_OPEN:
            return self._make(ids)
        return self._give_up(self._again(self._oldest()))

    def _repeat(self, routing: Routing, hidden: int, num_sms: int) -> None:
        """Opens a round of ``routing`` with rows of zeros."""
        self._say_repeat("combine")
        x = torch.zeros(routing.topk[0], hidden, dtype=torch.bfloat16, device=routing.weights.device)
        self.dispatch_again(Rows(x, None), routing, num_sms=num_sms, is_plain=routing.is_plain)
