"""All ranks of a process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, overload

from . import _ferry
from ._ferry import Fault, Group, Plan
from .calls import Answers, Call, accepted
from .communicator import Communicator
from .errors import ArgumentError, FerryError
from .outputs import DispatchOutput

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Communicators"]

Each = Sequence[Any]


class Communicators(Sequence[Communicator]):
    """The communicators of all ranks of this process, in the order of their numbers.

    Its calls make a call on all of them: either it is enqueued on all ranks or on none, and no rank waits for
    one that comes later in the same thread. Arguments are sequences with a value for each rank, or ``None``.
    """

    def __init__(self, group: Group, plan: Plan) -> None:
        """Makes the communicators. Collective with other processes. Synchronizes.

        Raises :class:`ferry_ep.GroupError` if ranks were configured differently,
        :class:`ferry_ep.BootstrapError` and :class:`ferry_ep.PeerFailed` if a rank is lost,
        :class:`ferry_ep.ClosedError` after the group was closed.
        """
        self._ranks = Communicator._all(group, plan)

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
        calls, inputs = self._sending(x, topk_ids, topk_weights, input_scale, tokens_on_device, streams)
        if out is None:
            like = zip(self, self._each("x", x), inputs, calls, strict=True)
            out = [
                rank._received(of, capacity, given.wide_ids, call.stream) for rank, of, given, call in like
            ]
        outs: list[DispatchOutput] = self._each("out", out)
        outputs = [call.outputs(of) for call, of in zip(calls, outs, strict=True)]
        with accepted(calls):
            _ferry.dispatch_all(self._natives(), _streams(calls), inputs, outputs)
        _finish(calls)
        return outs

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
        calls, inputs = self._sending(x, topk_ids, topk_weights, input_scale, tokens_on_device, streams)
        with accepted(calls):
            _ferry.dispatch_async_all(self._natives(), _streams(calls), inputs)
        for rank in self:
            rank._drive()

    def dispatch_counts(self, *, streams: Each | None = None) -> None:
        """Makes :meth:`ferry_ep.Communicator.dispatch_counts` on all ranks."""
        _ferry.dispatch_counts_all(self._natives(), _streams(self._calls(streams)))

    def dispatch_wait(
        self,
        *,
        out: Sequence[DispatchOutput] | None = None,
        like: Any = None,
        capacity: int | str = "max",
        streams: Each | None = None,
    ) -> list[DispatchOutput]:
        """Makes :meth:`ferry_ep.Communicator.dispatch_wait` on all ranks. Returns the outputs of each."""
        calls = self._calls(streams)
        if out is None:
            each = zip(self, calls, strict=True)
            out = [
                rank._received(like, capacity, rank._native._last()[1], call.stream) for rank, call in each
            ]
        outs = self._each("out", out)
        outputs = [call.outputs(of) for call, of in zip(calls, outs, strict=True)]
        with accepted(calls):
            _ferry.dispatch_wait_all(self._natives(), _streams(calls), outputs)
        _finish(calls)
        return outs

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
        answers = Answers(
            expert_rows,
            topk_weights,
            row_weights,
            row_scales,
            bias,
            bias2,
            residual,
            initial,
            received_weights,
        )
        calls, inputs, outputs, results = self._answering(answers, out, weights, data_type, streams)
        with accepted(calls):
            _ferry.combine_all(self._natives(), _streams(calls), inputs, outputs)
        _finish(calls)
        return results

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
        answers = Answers(
            expert_rows,
            topk_weights,
            row_weights,
            row_scales,
            bias,
            bias2,
            residual,
            initial,
            received_weights,
        )
        calls, inputs, outputs, results = self._answering(answers, out, weights, data_type, streams)
        with accepted(calls):
            _ferry.combine_async_all(self._natives(), _streams(calls), inputs, outputs)
        for rank, call in zip(self, calls, strict=True):
            rank._drive()
            rank._open = call.opened()
        return results

    def combine_wait(self, *, streams: Each | None = None) -> None:
        """Makes :meth:`ferry_ep.Communicator.combine_wait` on all ranks."""
        each = self._each("streams", streams)
        opened = [rank._open for rank in self]
        halves = zip(self, opened, each, strict=True)
        calls = [Call.second(rank, half, stream) for rank, half, stream in halves]
        _ferry.combine_wait_all(self._natives(), _streams(calls))
        for rank, half in zip(self, opened, strict=True):
            if rank._open is half:
                rank._open = None
        _finish(calls)

    def give_up(self, *, streams: Each | None = None) -> None:
        """Makes :meth:`ferry_ep.Communicator.give_up` on all ranks."""
        _ferry.give_up_all(self._natives(), _streams(self._calls(streams)))

    def synchronize(self, *, streams: Each | None = None) -> list[Fault | None]:
        """Makes :meth:`ferry_ep.Communicator.synchronize` on all ranks; the first exception is raised at the
        end. Returns the input fault of each."""
        given = [None] * len(self) if streams is None else self._each("streams", streams)
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
        ranks = [rank for rank in self if not rank.closed]
        try:
            _ferry.close_all([rank._native for rank in ranks])
        finally:
            for rank in ranks:
                if rank.closed:
                    rank._end()

    def __enter__(self) -> Communicators:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # After an exception peers may never come, neither to end the round nor to close.
        if len(self) == self._ranks[0].plan.ranks:
            with suppress(FerryError):
                self.close()
        for rank in self:
            rank._leave()

    def __copy__(self) -> Communicators:
        """Returns these very communicators: copies of a handle are the handle."""
        return self

    def __deepcopy__(self, memo: Any) -> Communicators:
        """Returns these very communicators: copies of a handle are the handle."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("communicators belong to their process, and cannot be pickled")

    def __repr__(self) -> str:
        return f"<ferry_ep.Communicators {self._ranks}>"

    def _natives(self) -> list[_ferry.Communicator]:
        return [rank._native for rank in self]

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

    def _calls(self, streams: Each | None) -> list[Call]:
        each = self._each("streams", streams)
        return [Call(rank, stream) for rank, stream in zip(self, each, strict=True)]

    def _sending(
        self,
        x: Each,
        topk_ids: Each,
        topk_weights: Each | None,
        input_scale: Each | None,
        tokens: Each | None,
        streams: Each | None,
    ) -> tuple[list[Call], list[_ferry.DispatchInput]]:
        each = zip(
            self,
            self._each("x", x),
            self._each("topk_ids", topk_ids),
            self._each("topk_weights", topk_weights),
            self._each("input_scale", input_scale),
            self._each("tokens_on_device", tokens),
            self._each("streams", streams),
            strict=True,
        )
        pairs = [rank._sending(*given) for rank, *given in each]
        return [call for call, _ in pairs], [given for _, given in pairs]

    def _answering(
        self,
        answers: Answers,
        out: Each | None,
        weights: Each | None,
        data_type: str,
        streams: Each | None,
    ) -> tuple[list[Call], list[_ferry.CombineInput], list[_ferry.CombineOutput], list[Any]]:
        calls = self._calls(streams)
        each = [self._each(name, given) for name, given in zip(Answers._fields, answers, strict=True)]
        given = [Answers(*of_rank) for of_rank in zip(*each, strict=True)]
        each_out = zip(calls, given, self._each("out", out), self._each("weights", weights), strict=True)
        outs = [
            call.communicator._result(of, into, returned, data_type, call.stream)
            for call, of, into, returned in each_out
        ]
        inputs = [call.answers(of) for call, of in zip(calls, given, strict=True)]
        outputs = [call.sums(*of) for call, of in zip(calls, outs, strict=True)]
        results = [of if returned is None else (of, returned) for of, returned in outs]
        return calls, inputs, outputs, results


def _streams(calls: list[Call]) -> list[int]:
    return [call.stream for call in calls]


def _finish(calls: list[Call]) -> None:
    """Waits for all ranks; the first exception is raised at the end."""
    failed: list[FerryError] = []
    for call in calls:
        try:
            call.finish()
        except FerryError as error:
            failed.append(error)
    if failed:
        raise failed[0]
