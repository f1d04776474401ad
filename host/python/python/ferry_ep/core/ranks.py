"""All ranks of a process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar, overload

from . import calls
from ._ferry import Communicator as Native
from ._ferry import Fault, Group, Plan
from .calls import Answers, Sent
from .communicator import Communicator
from .errors import ArgumentError, FerryError
from .handles import Handle
from .outputs import DispatchOutput
from .rank import end_of, ranks_of

__all__ = ["Communicators"]

Each = Sequence[Any]
Given = TypeVar("Given", Sent, Answers)


class Communicators(Handle, Sequence[Communicator]):
    """The communicators of all ranks of this process, in the order of their numbers.

    Its calls make a call on all of them: either it is enqueued on all ranks or on none, and no rank waits for
    one that comes later in the same thread. Arguments are sequences with a value for each rank, or ``None``.
    """

    _unpicklable = "communicators belong to their process, and cannot be pickled"

    def __init__(self, group: Group, plan: Plan) -> None:
        """Makes the communicators. Collective with other processes. Synchronizes.

        Raises :class:`ferry_ep.GroupError` if ranks were configured differently,
        :class:`ferry_ep.BootstrapError` and :class:`ferry_ep.PeerFailed` if a rank is lost,
        :class:`ferry_ep.ClosedError` after the group was closed.
        """
        self._ranks = ranks_of(Communicator, group, plan)
        self._ends = [end_of(rank) for rank in self._ranks]

    @overload
    def __getitem__(self, index: int) -> Communicator: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Communicator]: ...
    def __getitem__(self, index: int | slice) -> Communicator | Sequence[Communicator]:
        return self._ranks[index]

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._ranks)

    def dispatch(
        self,
        x: Each,
        topk_ids: Each,
        topk_weights: Each | None = None,
        *,
        out: Sequence[DispatchOutput] | None = None,
        capacity: int | str = "max",
        input_scale: Each | None = None,
        tokens_on_device: Each | None = None,
        streams: Each | None = None,
    ) -> list[DispatchOutput]:
        """Makes :meth:`ferry_ep.Communicator.dispatch` on all ranks. Returns the outputs of each."""
        sent = self._all(Sent(x, topk_ids, topk_weights, input_scale, tokens_on_device))
        outs, each = self._each("out", out), self._each("streams", streams)
        return calls.dispatch(self._ends, sent, outs, capacity, each)

    def dispatch_async(
        self,
        x: Each,
        topk_ids: Each,
        topk_weights: Each | None = None,
        *,
        input_scale: Each | None = None,
        tokens_on_device: Each | None = None,
        streams: Each | None = None,
    ) -> None:
        """Makes :meth:`ferry_ep.Communicator.dispatch_async` on all ranks."""
        sent = self._all(Sent(x, topk_ids, topk_weights, input_scale, tokens_on_device))
        calls.dispatch_async(self._ends, sent, self._each("streams", streams))

    def dispatch_counts(self, *, streams: Each | None = None) -> None:
        """Makes :meth:`ferry_ep.Communicator.dispatch_counts` on all ranks."""
        Native.dispatch_counts(self._natives(), self._handles(streams))

    def dispatch_wait(
        self,
        *,
        out: Sequence[DispatchOutput] | None = None,
        like: Any = None,
        capacity: int | str = "max",
        streams: Each | None = None,
    ) -> list[DispatchOutput]:
        """Makes :meth:`ferry_ep.Communicator.dispatch_wait` on all ranks. Returns the outputs of each."""
        outs, each = self._each("out", out), self._each("streams", streams)
        return calls.dispatch_wait(self._ends, outs, like, capacity, each)

    def combine(
        self,
        expert_rows: Each,
        *,
        topk_weights: Each | None = None,
        row_weights: Each | None = None,
        row_scales: Each | None = None,
        bias: Each | None = None,
        bias2: Each | None = None,
        residual: Each | None = None,
        initial: Each | None = None,
        received_weights: Each | None = None,
        out: Each | None = None,
        weights: Each | None = None,
        data_type: str = "bf16",
        streams: Each | None = None,
    ) -> list[Any]:
        """Makes :meth:`ferry_ep.Communicator.combine` on all ranks. Returns the result of each."""
        others = (row_weights, row_scales, bias, bias2, residual, initial, received_weights)
        answers = Answers(expert_rows, topk_weights, *others)
        return self._combine(answers, out, weights, data_type, streams, is_half=False)

    def combine_async(
        self,
        expert_rows: Each,
        *,
        topk_weights: Each | None = None,
        row_weights: Each | None = None,
        row_scales: Each | None = None,
        bias: Each | None = None,
        bias2: Each | None = None,
        residual: Each | None = None,
        initial: Each | None = None,
        received_weights: Each | None = None,
        out: Each | None = None,
        weights: Each | None = None,
        data_type: str = "bf16",
        streams: Each | None = None,
    ) -> list[Any]:
        """Makes :meth:`ferry_ep.Communicator.combine_async` on all ranks."""
        others = (row_weights, row_scales, bias, bias2, residual, initial, received_weights)
        answers = Answers(expert_rows, topk_weights, *others)
        return self._combine(answers, out, weights, data_type, streams, is_half=True)

    def combine_wait(self, *, streams: Each | None = None) -> None:
        """Makes :meth:`ferry_ep.Communicator.combine_wait` on all ranks."""
        calls.combine_wait(self._ends, self._each("streams", streams))

    def give_up(self, *, streams: Each | None = None) -> None:
        """Makes :meth:`ferry_ep.Communicator.give_up` on all ranks."""
        Native.give_up(self._natives(), self._handles(streams))

    def synchronize(self, *, streams: Each | None = None) -> list[Fault | None]:
        """Makes :meth:`ferry_ep.Communicator.synchronize` on all ranks; the first exception is raised at the
        end. Returns the input fault of each."""
        given = self._each("streams", streams)
        faults: list[Fault | None] = []
        failed: list[FerryError] = []
        for rank, stream in zip(self, given, strict=True):
            try:
                faults.append(rank.synchronize(stream))
            except FerryError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return faults

    def check(self) -> list[Fault | None]:
        """Makes :meth:`ferry_ep.Communicator.check` on all ranks."""
        return [rank.check() for rank in self]

    def close(self) -> None:
        """Closes all ranks, in the order of their numbers; the first exception is raised at the end. If a
        round is open, none is closed. Collective. Synchronizes. A second call does nothing."""
        ends = [end for end in self._ends if not end.native.closed]
        try:
            Native.close_all([end.native for end in ends])
        finally:
            for end in ends:
                if end.native.closed:
                    end.end()

    def __enter__(self) -> Communicators:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self.close()
            return
        # After an exception peers may never come, neither to end the round nor to close.
        if len(self) == self._ranks[0].plan.ranks:
            with suppress(FerryError):
                self.close()
        for end in self._ends:
            end.leave()

    def __repr__(self) -> str:
        return f"<ferry_ep.Communicators {self._ranks}>"

    def _natives(self) -> list[Native]:
        return [end.native for end in self._ends]

    def _each(self, name: str, given: Any) -> list[Any]:
        """Returns a value for each rank."""
        if hasattr(given, "shape") or (given is not None and not isinstance(given, Iterable)):
            raise ArgumentError(
                f"{name} is one {type(given).__name__}, but the call is for {len(self)} ranks: give a "
                "sequence with one value for each rank"
            )
        values = [None] * len(self) if given is None else list(given)
        if len(values) != len(self):
            raise ArgumentError(
                f"{len(values)} {name} were given, but the call is for {len(self)} ranks, and takes one for "
                "each"
            )
        return values

    def _all(self, given: Given) -> list[Given]:
        """Returns the arguments of each rank."""
        each = [self._each(name, values) for name, values in zip(given._fields, given, strict=True)]
        return [type(given)(*of_rank) for of_rank in zip(*each, strict=True)]

    def _handles(self, streams: Each | None) -> list[int]:
        each = zip(self._ends, self._each("streams", streams), strict=True)
        return [end.stream_of(stream) for end, stream in each]

    def _combine(
        self,
        answers: Answers,
        out: Each | None,
        weights: Each | None,
        data_type: str,
        streams: Each | None,
        *,
        is_half: bool,
    ) -> list[Any]:
        """Makes a combine of each rank, or its first half."""
        given, each = self._all(answers), self._each("streams", streams)
        outs = list(zip(self._each("out", out), self._each("weights", weights), strict=True))
        return calls.combine(self._ends, given, outs, data_type, each, is_half=is_half)
