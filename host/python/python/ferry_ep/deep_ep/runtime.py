"""What a buffer has made: its lanes, its stream, and its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core import config as plans
from ..core._ferry import Fault, Group, Plan
from ..core.communicator import Communicator
from ..core.errors import ArgumentError, FaultError, FerryError, InUseError, PeerGaveUp, PoisonedError
from ..core.rank import end_of
from .checks import signature
from .events import IN_CURRENT, EventOverlap, InPlace, Ordered, Streams
from .faults import Faults
from .graphs import Graphs, Held, free_after, note_freed
from .handle import Handle, LaneKey, Routing
from .latency_rounds import LatencyLane
from .room import Room
from .rounds import Answers, Lane, Round
from .rows import Rows, given
from .settings import Settings
from .tuning import fitting_tokens, latency_plan_of, plan_of

__all__ = ["Checked", "Received", "Runtime", "layout_of"]

Found = TypeVar("Found")
#: ``previous_event``, ``async_finish`` and ``allocate_on_comm_stream`` of a call.
Order = tuple[EventOverlap | None, bool, bool]

#: Results of checks that a buffer keeps: engines have some hundreds of numbers of tokens. Combines of
#: numbers of rows that never come again take places, too, until all are forgotten.
_MOST_CHECKED = 4096
#: Greatest number that ranks tell each other.
_MOST_SENT = (1 << 31) - 1
#: Formats in which rows travel.
_FORMATS = ("bf16", "fp8")


class Checked(NamedTuple):
    """Results of the checks of a dispatch, which depend on its tensors' signatures alone."""

    lane: Lane
    is_plain: bool
    """Whether the tensors need no description."""


class _Adding:
    """A communicator of weights that are added."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.graphs = communicator, Graphs(communicator)


#: Results of a dispatch: rows, ids, weights, assignments to each expert, handle and event.
Received = tuple[Any, Tensor | None, Tensor | None, list[int], Handle, EventOverlap]


class Runtime:
    """Rounds of a buffer's calls, whose arguments were checked. ``order``: the arguments that order streams,
    those of :meth:`Streams.ordered`.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        num_nvl_bytes: int,
        settings: Settings,
        connect: Callable[[plans.Config], Communicator],
        own: Group | None,
        gather_flags: Callable[[list[bool]], list[list[bool]]] | None,
    ) -> None:
        """``own``: the group, if it is this object's to close; then ``gather_flags`` gathers flags of all
        ranks.
        """
        self.rank, self.ranks = rank, ranks
        self._num_nvl_bytes = num_nvl_bytes
        self._settings = settings
        self._connect = connect
        self._own, self._gather_flags = own, gather_flags
        self._lanes: dict[LaneKey, Lane] = {}
        #: Lanes of numbers that ranks tell each other, by their deadlines, too.
        self._exchanges: dict[tuple[LaneKey, float], Lane] = {}
        #: Communicators of weights that are added, by their plans.
        self._adding: dict[plans.Config, _Adding] = {}
        #: Lanes of low-latency mode, by experts, top-k slots, hidden size, tokens and format of their plans.
        self._latency: dict[tuple[int, int, int, int, str], LatencyLane] = {}
        #: Results of checks, none of them ``None``, by the signatures of tensors, and all else that they
        #: depend on. Keys of different calls differ in length, or in types.
        self.checked: dict[Any, Any] = {}
        self.streams = Streams()
        self.faults = Faults(settings.is_strict)
        #: Why hooks failed that :meth:`close` called.
        self._failed: list[Exception] = []

    def keep(self, key: Any, found: Found) -> Found:
        """Keeps the result of a check by all that it depends on, and returns it; ``None`` is no key."""
        if key is not None:
            if len(self.checked) >= _MOST_CHECKED:
                self.checked.clear()
            self.checked[key] = found
        return found

    @property
    def _normal(self) -> list[Lane]:
        """Lanes of normal mode."""
        return [*self._exchanges.values(), *self._lanes.values()]

    @property
    def _held(self) -> list[Held]:
        """Communicators that were made so far, in the order in which all ranks close them."""
        normal = (each for lane in self._normal for each in lane.all)
        latency = (each for lane in self._latency.values() for each in lane.all)
        return [*normal, *self._adding.values(), *latency]

    @property
    def communicators(self) -> list[Communicator]:
        """Communicators that were made so far."""
        return [each.communicator for each in self._held]

    def close(self) -> bool:
        """Gives up open rounds, and closes everything but communicators that are in graphs. Collective.
        Synchronizes. Returns whether nothing is left; else a later call tries again.

        A communicator that refuses stops no other one from being closed. The first refusal is raised in the
        end.
        """
        for lane in self._normal:
            lane.end(self.streams.last)
        for latency in self._latency.values():
            self._failed += latency.end()
        held = [each for each in self._held if not each.communicator.closed]
        refused: list[FerryError] = []
        left: list[Held] = []
        for each, have_ended in zip(held, self._have_ended(held), strict=True):
            if not have_ended:
                left.append(each)
                continue
            try:
                if each.graphs.are_any:
                    each.graphs.promise_none()
                each.communicator.close()
                note_freed(each.communicator)
            except InUseError:
                left.append(each)
            except FerryError as error:
                refused.append(error)
        for each in left:
            free_after(each, is_local=self._own is None and _is_local(each))
        if refused:
            raise refused[0]
        if not left and self._own is not None:
            self._own.close()
        return not left

    def require_no_failure(self) -> None:
        """Raises what :meth:`close` has met and no call has raised."""
        failed, self._failed = self._failed, []
        if failed:
            raise failed[0]
        self.faults.require_none()

    def _have_ended(self, held: list[Held]) -> list[bool]:
        """Waits for the work of communicators. Returns of which of them all graphs have ended, on all ranks
        if these are other processes. Collective if there were graphs, which is alike on all ranks.
        """
        has_given_up = False
        for each in held:
            try:
                # The kernel that gives a round up may be at work, in a simulated group also during close.
                fault = each.communicator.synchronize(stream=self.streams.last)
                self.faults.note(each.communicator, fault)
            except (FaultError, PeerGaveUp, PoisonedError):
                has_given_up = True
        told = [each.graphs.have_ended for each in held]
        if not any(each.graphs.are_any for each in held):
            return told
        if self._gather_flags is None:
            return [
                of and (_is_local(each) or not each.graphs.are_any)
                for of, each in zip(told, held, strict=True)
            ]
        if has_given_up or not all(each.graphs.are_told for each in held):
            # Lost ranks do not come; and where torch does not tell, all ranks know the same.
            return [not each.graphs.are_any for each in held]
        return [all(flags) for flags in zip(*self._gather_flags(told), strict=True)]

    def promise_no_graphs(self) -> None:
        """Takes the promise that all graphs with calls have ended."""
        for each in self._held:
            if not each.communicator.closed:
                each.graphs.promise_none()

    def check(self) -> list[Fault]:
        """Returns the first input fault of each kind since the last call of this. Not collective; does not
        synchronize. Raises as :meth:`ferry_ep.Communicator.check`.
        """
        for communicator in self.communicators:
            if not communicator.closed:
                self.faults.note(communicator, communicator.check())
        return self.faults.take()

    def lane(self, key: LaneKey) -> Lane:
        """Returns the lane of a plan. Not collective. Raises :class:`ferry_ep.PlanError`."""
        lane = self._lanes.get(key)
        if lane is None:
            experts, top_k, hidden, format = key

            def config(tokens: int) -> plans.Config:
                return plan_of(experts, top_k, hidden, tokens, self._settings.deadline, format)

            fitting = fitting_tokens(self._num_nvl_bytes, self.ranks, config(1))
            lane = self._lanes[key] = Lane(
                lambda tokens: self._made(config(tokens)),
                key,
                self.faults,
                lambda ids: self._agree(ids, fitting),
            )
        return lane

    def _agree(self, ids: Tensor, fitting: int) -> Room:
        """Agrees with all ranks on the room for a first call, with these ids. Collective. Synchronizes."""
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "a graph cannot have the first call of its sizes, which makes a communicator: make such a "
                "call before the capture"
            )
        given = Room(ids.shape[0], fitting, self._settings.max_tokens or 0)
        # No plan has as many tokens, which it says then.
        sent = [ids.new_full((self.ranks, 1), min(each, _MOST_SENT), dtype=torch.int32) for each in given]
        deadline = self._settings.first_deadline or self._settings.deadline
        found = self._gather(torch.cat(sent, 1), 0, IN_CURRENT, deadline)
        return Room(*(max(numbers) for numbers in zip(*found, strict=True)))

    def latency_lane(self, experts: int, top_k: int, hidden: int, tokens: int, format: str) -> LatencyLane:
        """Returns the lane of a plan of low-latency mode for ``tokens`` tokens of a rank. Not collective."""
        key = (experts, top_k, hidden, tokens, format)
        lane = self._latency.get(key)
        if lane is None:
            config = latency_plan_of(experts, top_k, hidden, tokens, self._settings.deadline, format)
            # Before there is a lane, and an older round is given up for it.
            Plan(Group.simulated(self.ranks), config)
            sizes = (tokens, hidden, experts)
            lane = self._latency[key] = LatencyLane(
                lambda: self._made(config), sizes, self.ranks, self.faults
            )
        return lane

    def _made(self, config: plans.Config) -> Communicator:
        """Makes a communicator for a first round, and checks that it is the one that is meant. Collective."""
        made = self._connect(config)
        wanted = (self.rank, self.ranks, config.max_tokens_per_rank, config.hidden)
        plan = made.plan
        given = (made.rank, plan.ranks, plan.config.max_tokens_per_rank, plan.config.hidden)
        if given != wanted:
            names = "rank, ranks, max_tokens_per_rank and hidden"
            raise ArgumentError(f"{names} of connect's communicator are {given}, not {wanted}")
        made.set_deadline(self._settings.first_deadline)
        return made

    def send(
        self,
        x: Rows,
        topk: tuple[Tensor, Tensor],
        checked: Checked,
        is_token_in_rank: Tensor,
        *,
        worst: int | None,
        num_sms: int,
        order: Order,
    ) -> Received:
        """Makes a dispatch to the ranks of the experts that ``topk``, ids and weights, names."""
        ids, weights = topk
        lane, is_plain = checked
        with self.streams.ordered(x.tokens.device, *order) as ordered:
            if ordered.is_apart:
                ordered.reads(*x, ids, weights)
            out, counts, routing = lane.dispatch(
                x, ids, weights, rows=worst, num_sms=num_sms, ordered=ordered, is_plain=is_plain
            )
            rows, scales, local_ids, local_weights = out
            if scales is not None:
                scales = x.as_sent(scales)
            if ordered.is_apart:
                ordered.returns(rows, scales, local_ids, *routing.tensors)
        listed = [] if counts is None else counts.expert_counts
        handle = Handle.of(is_token_in_rank, routing)
        return given(rows, scales), local_ids, local_weights, listed, handle, ordered.event

    def send_by_rank(
        self,
        x: Rows,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        *,
        num_sms: int,
        order: Order,
    ) -> Received:
        """Makes a dispatch to the ranks that ``is_token_in_rank`` has: one expert and one slot for each."""
        ranks = self.ranks
        lane = self.lane_for(x, ranks, ranks)
        with self.streams.ordered(x.tokens.device, *order) as ordered:
            ordered.reads(*x, is_token_in_rank, num_tokens_per_expert)
            per_rank, deadline = num_tokens_per_expert.view(ranks, -1), self._settings.deadline
            counts = self._gather(per_rank, num_sms, ordered, deadline)
            listed = [sum(each) for each in zip(*counts, strict=True)]
            numbers = torch.arange(ranks, dtype=torch.int32, device=is_token_in_rank.device)
            ids = torch.where(is_token_in_rank, numbers, -1)
            out, _, routing = lane.dispatch(
                x,
                ids,
                None,
                rows=None,
                num_sms=num_sms,
                ordered=ordered,
                is_plain=signature(*x, ids) is not None,
            )
            rows, scales, *_ = out
            scales = x.as_sent(scales)
            ordered.returns(rows, scales, *routing.tensors)
        handle = Handle.of(is_token_in_rank, routing)
        return given(rows, scales), None, None, listed, handle, ordered.event

    def send_again(
        self, x: Rows, routing: Routing, checked: Checked, *, num_sms: int, order: Order
    ) -> tuple[Any, EventOverlap]:
        """Makes a dispatch to the ranks of an earlier one."""
        lane, is_plain = checked.lane, checked.is_plain
        with self.streams.ordered(x.tokens.device, *order) as ordered:
            if ordered.is_apart:
                ordered.reads(*x)
            ordered.keeps(routing)
            rows, scales = lane.dispatch_again(x, routing, num_sms=num_sms, is_plain=is_plain)
            if scales is not None:
                scales = x.as_sent(scales)
            if ordered.is_apart:
                ordered.returns(rows, scales)
        return given(rows, scales), ordered.event

    def combine(
        self, answers: Answers, *, hidden: int, is_plain: bool, num_sms: int, order: Order
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows of each token, of ``hidden`` elements, at its source. ``is_plain``: whether tensors
        need no description.
        """
        rows, weights, initial, routing = answers
        lane = self._lanes.get(routing.key)
        opened = None if lane is None or hidden != lane.key[2] else lane.find(routing)
        if lane is None or opened is None:
            lane, opened = self._lane_of_combine(routing, hidden)
        with self.streams.ordered(rows.device, *order) as ordered:
            if ordered.is_apart:
                ordered.reads(rows, weights, *initial)
            ordered.keeps(routing)
            sums, returned = lane.combine(answers, opened, num_sms=num_sms, is_plain=is_plain)
            if weights is not None and self._settings.sums_weights:
                assert lane.room is not None
                returned = self._add(weights, routing, lane.room.tokens)
            if ordered.is_apart:
                ordered.returns(sums, returned)
        return sums, returned, ordered.event

    def _lane_of_combine(self, routing: Routing, hidden: int) -> tuple[Lane, Round | None]:
        """Returns the lane of an open round of ``routing``, and the round, or the lane of one to open. Not
        collective.
        """
        experts, top_k = routing.experts, routing.topk[1]
        # A dispatch with the handle may have sent rows in another format.
        for format in _FORMATS:
            lane = self._lanes.get((experts, top_k, hidden, format))
            opened = None if lane is None else lane.find(routing)
            if lane is not None and opened is not None:
                return lane, opened
        return self.lane((experts, top_k, hidden, routing.format)), None

    def lane_for(self, x: Rows, experts: int, top_k: int) -> Lane:
        """Returns the lane that sends these rows. Not collective."""
        return self.lane((experts, top_k, x.tokens.shape[1], x.format))

    def _gather(
        self, numbers: Tensor, num_sms: int, ordered: InPlace | Ordered, deadline: float
    ) -> list[list[int]]:
        """Sends row ``r`` of ``numbers``, int32 ``[ranks, n]``, to rank ``r``. Returns the rows of all ranks
        for this one. Collective; waits for it.

        A round of its own carries them, a token for each rank: two BF16 elements are an int32, bit for bit.
        """
        ranks, count = numbers.shape
        rows = numbers.new_zeros(ranks, -(-count // 4) * 4)
        rows[:, :count] = numbers
        key = (ranks, 1, 2 * rows.shape[1], "bf16")
        lane = self._exchanges.get((key, deadline))
        if lane is None:
            config = plan_of(*key[:3], ranks, deadline)
            lane = self._exchanges[key, deadline] = Lane(
                lambda _: self._made(config), key, self.faults, lambda _: Room(ranks, 0, 0)
            )
        ids = torch.arange(ranks, dtype=torch.int32, device=rows.device).unsqueeze(1)
        options: dict[str, Any] = {"rows": ranks, "num_sms": num_sms, "ordered": ordered}
        options["is_plain"] = signature(rows, ids) is not None
        out, _, routing = lane.dispatch(Rows(rows.view(torch.bfloat16), None), ids, None, **options)
        lane.give_up(routing)
        found = out[0].view(torch.int32)[:, :count]
        if found.is_cuda:
            # A copy to the host behind a kernel that waits would stop calls of ranks that share the GPU.
            torch.cuda.current_stream(found.device).synchronize()
        arrived: list[list[int]] = found.tolist()
        return arrived

    def _add(self, weights: Tensor, routing: Routing, most: int) -> Tensor:
        """Returns the sums over a token's ranks of all slots, f32, where a rank has at most ``most`` tokens.
        Collective.

        A round of its own brings the ranks' weights apart, bit for bit: two BF16 elements are an f32.
        """
        ranks, (tokens, top_k) = self.ranks, routing.topk
        width = -(-top_k // 4) * 4
        config = replace(
            plan_of(ranks, ranks, 2 * width, most, self._settings.deadline),
            receive="by-expert",
            combine="exact",
            combine_weights=False,
        )
        held = self._adding.get(config)
        if held is None:
            held = self._adding[config] = _Adding(self._made(config))
        communicator = held.communicator
        is_in_rank = _is_in_rank(routing.ids, routing.experts, ranks)
        numbers = torch.arange(ranks, dtype=torch.int32, device=weights.device)
        rows = weights.new_zeros(routing.rows, width)
        rows[:, :top_k] = weights
        x = torch.empty(tokens, 2 * width, dtype=torch.bfloat16, device=weights.device)
        out = communicator.outputs(x, routing.rows)
        communicator.dispatch(x, torch.where(is_in_rank, numbers, -1), out=out)
        apart = communicator.combine(rows.view(torch.bfloat16)).view(torch.float32)
        held.graphs.note_if_captured()
        communicator.set_deadline(None)
        return torch.where(is_in_rank.unsqueeze(2), apart[:, :, :top_k], 0).sum(1)


def _is_local(held: Held) -> bool:
    """Returns whether all ranks of a communicator are in this process."""
    return len(end_of(held.communicator).peers) == held.communicator.plan.ranks


def layout_of(topk_idx: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tokens that go to each rank, the assignments to each expert, both int32, and whether each
    token goes to each rank.
    """
    # Ids that are none, or no expert's, are counted before and after all others.
    places = (topk_idx.clamp(-1, experts) + 1).flatten()
    per_expert = torch.zeros(experts + 2, dtype=torch.int32, device=topk_idx.device)
    per_expert.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
    is_in_rank = _is_in_rank(topk_idx, experts, ranks)
    return is_in_rank.sum(0, dtype=torch.int32), per_expert[1:-1], is_in_rank


def _is_in_rank(topk_idx: Tensor, experts: int, ranks: int) -> Tensor:
    """Returns whether each token goes to each rank."""
    numbers = torch.arange(ranks, device=topk_idx.device)
    # Rounded down: -1 and ids beyond the experts are of no rank.
    return ((topk_idx // (experts // ranks)).unsqueeze(2) == numbers).any(1)
