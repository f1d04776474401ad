"""Rounds of one plan in the order in which DeepEP's calls come: opened, combined, given up, repeated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..communicator import Communicator
from ..config import Config
from ..errors import ArgumentError, FaultError, OrderError, PeerGaveUp, PoisonedError
from ..outputs import DispatchOutput, ReceivedCounts
from . import anew
from .anew import Anew, Model
from .events import Halves, InPlace, Ordered
from .rows import GROUP, Rows
from .settings import say_once
from .sources import Sources

__all__ = ["Answers", "Arrived", "Lane", "Round", "Routing", "Sums"]

#: Experts, top-k slots, hidden size, format and most tokens of a rank of a lane's plan.
LaneKey = tuple[int, int, int, str, int]

#: Most rounds of a plan that are open at a time, each with a communicator and a window of its own.
MOST_OPEN = 2


class Routing(NamedTuple):
    """What a handle keeps of its dispatch: enough to make the round once more."""

    experts: int
    """Experts of the plan: of all ranks, or one for each rank if the caller gave no ids."""
    format: str
    """Format of the dispatch's rows."""
    has_topk: bool
    """Whether the caller gave ids."""
    ids: Tensor
    """``[tokens, top_k]``, a copy of the buffer's: the caller may write its own."""
    is_plain: bool
    """Whether native code can read ``ids`` on a GPU."""
    key: LaneKey
    """Key of the lane of the dispatch."""
    made_on: int
    """Handle of the stream of the dispatch, on which ``ids`` and ``weights`` were made; 0 on the CPU."""
    rows: int
    """Rows of the outputs."""
    topk: tuple[int, int]
    """Tokens and top-k slots."""
    weights: Tensor
    """f32 ``[rows, top_k]``, any values: what a combine returns if the caller asks for no weights."""

    def __eq__(self, other: object) -> bool:
        """Whether both are of one dispatch."""
        return self is other

    def __ne__(self, other: object) -> bool:
        """Whether they are of two dispatches."""
        return self is not other

    def __hash__(self) -> int:
        return id(self)


class HasCommunicator(Protocol):
    """A round, open or not."""

    communicator: Communicator


Kept = TypeVar("Kept", bound=HasCommunicator)


class Arrived(NamedTuple):
    """Results of a dispatch."""

    tokens: Tensor
    """``[rows, hidden]``."""
    scales: Tensor | None
    """f32 ``[rows, hidden / 128]``."""
    ids: Tensor
    """``[rows, top_k]``."""
    weights: Tensor
    """f32 ``[rows, top_k]``."""
    sources: Sources

    @classmethod
    def of(cls, out: DispatchOutput) -> Arrived:
        """Returns the outputs of a dispatch."""
        sources = Sources(out.src_info, out.source_counts)
        return cls(out.tokens, out.scales, out.ids, out.weights, sources)


class Answers(NamedTuple):
    """Arguments of a combine."""

    rows: Tensor
    """``[rows, hidden]``."""
    weights: Tensor | None
    """f32 ``[rows, top_k]``, which return, too."""
    initial: tuple[Tensor, ...]
    """``[tokens, hidden]``, with which sums begin."""
    is_plain: bool
    """Whether they need no description."""


class Sums:
    """Results of combines, most of which have as many tokens as the last."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._model: Tensor | None = None

    def allocate(self, like: Tensor, tokens: int) -> Tensor:
        """Allocates one on the device of ``like``, ``[tokens, width]``, not cleared."""
        model = self._model
        if model is None or model.shape[0] != tokens or model.device != like.device:
            model = torch.empty(tokens, self._width, dtype=self._dtype, device=like.device)
            model.untyped_storage().resize_(0)
            self._model = model
        return torch.empty_like(model)


def _models(config: Config, ids: Tensor, rows: int, is_again: bool) -> list[Model]:
    """Returns the tensors of a dispatch on a GPU: those of :class:`Arrived`, then one that no caller sees. Of
    a dispatch with a handle callers see the rows alone: all else stays allocated for the next one.
    """
    device, top_k = ids.device, ids.shape[1]
    is_fp8 = config.format == "fp8"
    dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    models = [Model(torch.empty(rows, config.hidden, dtype=dtype, device=device), ("tokens",))]
    if is_fp8:
        scales = torch.empty(rows, config.hidden // GROUP, dtype=torch.float32, device=device)
        models.append(Model(scales, ("scales",)))
    return [
        *models,
        Model(torch.empty(rows, top_k, dtype=ids.dtype, device=device), ("ids",), is_again),
        Model(torch.empty(rows, top_k, dtype=torch.float32, device=device), ("weights",), is_again),
        Model(None, ("src_info", "source_counts"), is_again),
        Model(None, ("expert_counts",), is_kept=True),
    ]


class Round:
    """A communicator, and the routing of its open round."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.routing: Routing | None = None
        config = communicator.plan.config
        self._sums = Sums(config.hidden, torch.bfloat16)
        self._weights = Sums(config.top_k, torch.float32)
        #: Rows, type and device of ids, and handle of the current stream of the last dispatch, and its
        #: tensors, by whether it had a handle.
        self._anew: dict[bool, tuple[Any, Anew | None]] = {}
        #: Tokens, device, and handle of the current stream of the last combine that returned no weights, and
        #: the tensor that they went to.
        self._unwanted: tuple[Any, Tensor] | None = None
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

    def dispatch(
        self, x: Rows, ids: Tensor, weights: Tensor | None, rows: int, tensors: Anew | None
    ) -> Arrived:
        """Makes a dispatch with outputs of so many rows, those of ``tensors`` if there are some."""
        communicator = self.communicator
        if tensors is not None:
            made = anew.dispatch(communicator, x.given, ids, weights, tensors)
            scales = made[1] if len(made) == 6 else None
            return Arrived(made[0], scales, made[-4], made[-3], Sources(made[-2], None))
        out = communicator.outputs(x.tokens, rows, id_type=id_type_of(ids))
        return Arrived.of(communicator.dispatch(x.given, ids, weights, out=out))

    def anew_for(self, ids: Tensor, rows: int, halves: Halves, is_again: bool) -> Anew | None:
        """Returns the tensors of a dispatch of as many rows as the last one; ``None`` for others, and if its
        tensors belong to a graph. ``is_again``: whether the dispatch has a handle.
        """
        if halves.is_captured:
            return None
        key, last = (rows, ids.dtype, ids.device, halves.handle), self._anew.get(is_again)
        if last is None or last[0] != key:
            # Those on another stream are freed by its order.
            self._anew[is_again] = key, None
            return None
        tensors = last[1]
        if tensors is None and anew.is_direct(self.communicator, ids.device):
            plan = self.communicator.plan
            layouts = plan.output_layout(rows, id_type=id_type_of(ids))
            tensors = Anew(layouts, _models(plan.config, ids, rows, is_again), ids.device)
            self._anew[is_again] = key, tensors
        return tensors

    def _unwanted_weights(self, like: Tensor, tokens: int, halves: Halves) -> Tensor:
        """Returns memory for the weights of a combine whose caller wants none."""
        key, last = (tokens, like.device, halves.handle), self._unwanted
        if halves.is_captured:
            return self._weights.allocate(like, tokens)
        if last is None or last[0] != key:
            # One on another stream is freed by its order.
            last = self._unwanted = key, self._weights.allocate(like, tokens)
        return last[1]

    def combine(self, answers: Answers, routing: Routing, halves: Halves) -> tuple[Tensor, Tensor | None]:
        """Makes the combine of a routing. Returns the sums, and the weights, if there are some."""
        rows, weights, initial, is_plain = answers
        tokens, is_wanted = routing.topk[0], weights is not None
        sums = self._sums.allocate(rows, tokens)
        if weights is None:
            returned, weights = self._unwanted_weights(rows, tokens, halves), routing.weights
        else:
            returned = self._weights.allocate(rows, tokens)
        communicator = self.communicator
        if is_plain and anew.is_direct(communicator, rows.device):
            first, second = (*initial, None, None)[:2] if initial else (None, None)
            anew.combine(communicator, (rows, None, weights, first, second), (sums, returned))
        else:
            options: dict[str, Any] = {"received_weights": weights, "out": sums, "weights": returned}
            communicator.combine(rows, initial=initial or None, **options)
        return sums, returned if is_wanted else None


def id_type_of(ids: Tensor) -> str:
    """Returns the name here of the type of ids."""
    return "i64" if ids.dtype == torch.int64 else "i32"


class Rounds(Generic[Kept]):
    """Rounds of one plan. Calls are collective, and all ranks make the same ones in the same order, so that
    they choose the same communicators.
    """

    def __init__(self, connect: Callable[[], Communicator], is_strict: bool) -> None:
        self._connect = connect
        self._is_strict = is_strict
        #: All rounds, in the order in which they were made.
        self._all: list[Kept] = []
        #: Open rounds, the oldest first.
        self._open: list[Kept] = []

    @property
    def communicators(self) -> list[Communicator]:
        """Communicators that were made so far."""
        return [each.communicator for each in self._all]

    def _require_room(self) -> None:
        """Refuses to give the oldest round up, if that is asked for."""
        if self._is_strict:
            raise OrderError(
                f"{MOST_OPEN} rounds are open, and FERRY_DEEP_EP_STRICT is set: combine one before this "
                "dispatch, which would give up the oldest"
            )

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

    def __init__(self, connect: Callable[[], Communicator], key: LaneKey, is_strict: bool) -> None:
        super().__init__(connect, is_strict)
        self.key = key
        #: Most tokens of a rank.
        self.tokens = key[4]

    def dispatch(
        self,
        x: Rows,
        ids: Tensor,
        weights: Tensor | None,
        *,
        experts: int,
        rows: int | None,
        num_sms: int,
        ordered: InPlace | Ordered,
        is_plain: bool,
        again: Routing | None = None,
    ) -> tuple[Arrived, ReceivedCounts | None, Routing]:
        """Opens a round. With ``rows`` outputs have so many, and the host does not wait; else they have as
        many as come, and it waits for that number. ``is_plain``: whether inputs need no description.
        ``again``: the routing of a handle, whose ids these are.
        """
        halves = ordered.halves(ids)
        if rows is None and halves.is_captured:
            raise ArgumentError(
                "num_worst_tokens is 0, but in a graph the host cannot wait for the number of rows: give it, "
                "or a handle"
            )
        # Before anything is sent, as there may be no memory for it.
        kept = ids.clone() if again is None else again.ids
        opened = self._acquire(again)
        communicator = opened.communicator
        counts = None
        try:
            opened.limit(num_sms)
            if rows is not None:
                tensors = opened.anew_for(ids, rows, halves, again is not None) if is_plain else None
                arrived = opened.dispatch(x, ids, weights, rows, tensors)
            else:
                communicator.dispatch_async(x.given, ids, weights)
                out, counts = self._receive(communicator, x, ids)
                arrived, rows = Arrived.of(out), out.rows
            if again is None:
                again = Routing(
                    experts,
                    self.key[3],
                    has_topk=weights is not None,
                    ids=kept,
                    is_plain=is_plain,
                    key=self.key,
                    made_on=halves.handle,
                    rows=rows,
                    topk=(ids.shape[0], ids.shape[1]),
                    weights=arrived.weights,
                )
            opened.routing = again
            self._open.append(opened)
        except BaseException:
            self._note_failure(opened, None)
            raise
        return arrived, counts, again

    def combine(
        self,
        answers: Answers,
        routing: Routing,
        opened: Round | None,
        *,
        num_sms: int,
        ordered: InPlace | Ordered,
    ) -> tuple[Tensor, Tensor | None]:
        """Ends the round of ``routing``, ``opened``; repeats its dispatch first if there is none."""
        if opened is None:
            self._repeat(routing, self.key[2], num_sms, ordered)
            opened = self.find(routing)
            assert opened is not None
        self._open.remove(opened)
        try:
            opened.limit(num_sms)
            results = opened.combine(answers, routing, ordered.halves(answers.rows))
        except BaseException:
            self._note_failure(opened, routing)
            raise
        opened.routing = None
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
            each.routing = None
        self._open.clear()

    def find(self, routing: Routing) -> Round | None:
        """Returns the newest open round of a routing."""
        for each in reversed(self._open):
            if each.routing is routing:
                return each
        return None

    def _make(self) -> Round:
        made = Round(self._connect())
        self._all.append(made)
        return made

    def _acquire(self, again: Routing | None) -> Round:
        """Returns a round that is not open: an idle one, a new one, or the oldest open one, given up. One
        that is open for the same routing serves first, as the new one brings the same rows.
        """
        same = None if again is None or self._is_strict else self.find(again)
        if same is not None:
            return self._give_up(same)
        for each in self._all:
            # A call that failed on its way left a half: the communicator says why.
            if each not in self._open:
                return each
        if len(self._all) < MOST_OPEN:
            return self._make()
        # A call that failed after it was sent returned no handle: nobody will combine its round.
        if self._open[0].routing is not None:
            self._require_room()
        return self._give_up(self._open[0])

    def _give_up(self, opened: Round) -> Round:
        self._open.remove(opened)
        try:
            opened.communicator.give_up()
        except BaseException:
            self._note_failure(opened, opened.routing)
            raise
        opened.routing = None
        return opened

    def _note_failure(self, opened: Round, routing: Routing | None) -> None:
        """Notes the state of a round after a call of it that failed."""
        opened.routing = routing
        if opened.communicator.round == "dispatched" and opened not in self._open:
            self._open.append(opened)

    def _repeat(self, routing: Routing, hidden: int, num_sms: int, ordered: InPlace | Ordered) -> None:
        """Opens a round of ``routing`` with rows of zeros."""
        self._say_repeat("combine")
        x = torch.zeros(len(routing.ids), hidden, dtype=torch.bfloat16, device=routing.ids.device)
        options: dict[str, Any] = {"experts": routing.experts, "rows": routing.rows, "num_sms": num_sms}
        options["is_plain"] = routing.is_plain
        self.dispatch(Rows(x, None), routing.ids, None, again=routing, ordered=ordered, **options)

    def _receive(
        self, communicator: Communicator, like: Rows, ids: Tensor
    ) -> tuple[DispatchOutput, ReceivedCounts]:
        """Waits for the number of rows, allocates outputs for them, and receives. If that fails, as there may
        be no memory, it receives no row: then the round is whole, and a later dispatch can give it up.
        """
        try:
            communicator.dispatch_counts()
            counts = communicator.received(wait=True)
            assert counts is not None
            out = self._outputs(communicator, like, ids, counts.rows)
        except BaseException as error:
            # On the CPU a receipt waits, which whoever interrupts does not want.
            if ids.is_cuda or isinstance(error, Exception):
                # The first error says more than one of these.
                with suppress(Exception):
                    communicator.dispatch_wait(out=self._outputs(communicator, like, ids, 0))
            raise
        communicator.dispatch_wait(out=out)
        return out, counts

    @staticmethod
    def _outputs(communicator: Communicator, like: Rows, ids: Tensor, rows: int) -> Any:
        """Allocates outputs for ids of the type of ``ids``."""
        return communicator.outputs(like.tokens, rows, id_type=id_type_of(ids))
