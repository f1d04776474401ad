"""All ranks of a process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, overload

from ._ferry import Communicator as Native
from ._ferry import Fault, Group, Plan
from .communicator import Communicator
from .errors import ArgumentError, FerryError
from .handles import Handle
from .rank import end_of, ranks_of
from .scalars import shown
from .values import Call, make

__all__ = ["Communicators"]

Each = Sequence[Any]


class Communicators(Handle, Sequence[Communicator]):
    """The communicators of all ranks of this process, in the order of their numbers.

    :meth:`together` makes a call on all of them: either it is enqueued on all ranks or on none, and no rank
    waits for one that comes later in the same thread.
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

    def together(self, calls: Sequence[Call], *, streams: Each | None = None) -> list[Any]:
        """Makes a call on all ranks: it is enqueued on all of them or on none. Collective with the other
        processes, but for ``DispatchCounts``.

        ``calls`` has one for each rank, all of one kind: :class:`ferry_ep.Dispatch`, ``DispatchAsync``,
        ``DispatchCounts``, ``DispatchWait``, ``Combine``, ``CombineAsync``, ``CombineWait`` or ``GiveUp``.
        ``streams``: one for each rank; ``None`` as in :meth:`ferry_ep.Communicator.dispatch`.

        Returns what each rank's method of that name returns. Raises as it does, and
        :class:`ferry_ep.ArgumentError` for calls of two kinds.
        """
        given, each = self._each("calls", calls), self._each("streams", streams)
        for at, call in enumerate(given):
            if not isinstance(call, Call):
                raise ArgumentError(f"calls[{at}] is {shown(call)}, but it is a Dispatch or another Call")
        return make(self._ends, given, each)

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
