"""Calls of a round as values, and what makes them: on one rank, or on all ranks of a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ._ferry import Call as NativeCall
from ._ferry import Communicator as Native
from .calls import Answers, Arguments, Sent, finish, launch, received, result
from .end import End
from .outputs import DispatchOutput

__all__ = ["Call", "Combine", "CombineAsync", "CombineWait", "Dispatch", "DispatchAsync"]
__all__ += ["DispatchCounts", "DispatchWait", "GiveUp", "make"]


@dataclass(eq=False)
class Call:
    """A call of a round with its arrays, which :meth:`ferry_ep.Communicators.together` makes.

    Each has the name and the arguments of a method of :class:`ferry_ep.Communicator`, which says what they
    are, what the call returns, and what it raises. A value can be used again.
    """

    _name: ClassVar[str] = "Call"
    #: Whether it waits on the host if arrays are on the CPU, and what it adds to its rank's counts before.
    _waits: ClassVar[bool] = False
    _sent: ClassVar[int] = 0
    _returned: ClassVar[int] = 0

    def _prepare(self, own: Arguments) -> tuple[NativeCall, Any]:
        """Returns the call with checked arguments, and what it will return."""
        return NativeCall(self._name), None


@dataclass(eq=False)
class Dispatch(Sent, Call):
    """A :meth:`ferry_ep.Communicator.dispatch`."""

    out: DispatchOutput | None = None
    capacity: int | str = "max"
    _name, _waits, _sent = "dispatch", True, 1

    def _prepare(self, own: Arguments) -> tuple[NativeCall, Any]:
        given, out = own.input(self), self.out
        if out is None:
            out = received(own.end, self.x, self.capacity, given.wide_ids, own.stream)
        return NativeCall(self._name, given, own.outputs(out)), out


@dataclass(eq=False)
class DispatchAsync(Sent, Call):
    """A :meth:`ferry_ep.Communicator.dispatch_async`."""

    _name = "dispatch_async"

    def _prepare(self, own: Arguments) -> tuple[NativeCall, Any]:
        return NativeCall(self._name, own.input(self)), None


@dataclass(eq=False)
class DispatchCounts(Call):
    """A :meth:`ferry_ep.Communicator.dispatch_counts`."""

    _name = "dispatch_counts"


@dataclass(eq=False)
class DispatchWait(Call):
    """A :meth:`ferry_ep.Communicator.dispatch_wait`."""

    out: DispatchOutput | None = None
    like: Any = None
    capacity: int | str = "max"
    _name, _waits = "dispatch_wait", True

    def _prepare(self, own: Arguments) -> tuple[NativeCall, Any]:
        out = self.out
        if out is None:
            out = received(own.end, self.like, self.capacity, own.end.native.last()[1], own.stream)
        return NativeCall(self._name, None, own.outputs(out)), out


class _Returns(Answers, Call):
    """A combine, or its first half."""

    def _prepare(self, own: Arguments) -> tuple[NativeCall, Any]:
        own.leaves = not self._waits
        out, weights = result(own.end, self, own.stream)
        made = out if weights is None else (out, weights)
        return NativeCall(self._name, own.answers(self), own.sums(out, weights)), made


@dataclass(eq=False)
class Combine(_Returns):
    """A :meth:`ferry_ep.Communicator.combine`."""

    _name, _waits, _returned = "combine", True, 1


@dataclass(eq=False)
class CombineAsync(_Returns):
    """A :meth:`ferry_ep.Communicator.combine_async`."""

    _name = "combine_async"


@dataclass(eq=False)
class CombineWait(Call):
    """A :meth:`ferry_ep.Communicator.combine_wait`."""

    _name, _waits = "combine_wait", True

    def _prepare(self, own: Arguments) -> tuple[NativeCall, Any]:
        own.resume()
        return NativeCall(self._name), None


@dataclass(eq=False)
class GiveUp(Call):
    """A :meth:`ferry_ep.Communicator.give_up`."""

    _name = "give_up"


def make(ends: Sequence[End], calls: Sequence[Call], streams: Sequence[Any]) -> list[Any]:
    """Makes a call on each of these ranks, on all or on none. Returns what each call returns."""
    owns = [Arguments(end, stream) for end, stream in zip(ends, streams, strict=True)]
    prepared = [call._prepare(own) for call, own in zip(calls, owns, strict=True)]
    for call, own in zip(calls, owns, strict=True):
        if call._waits and own.copies:
            own.end.require_peers(ends, sent=call._sent, returned=call._returned)
    launch(owns, Native.together, [native for native, _ in prepared])
    for own in owns:
        own.enqueued()
    if calls[0]._waits:
        finish(owns)
    return [made for _, made in prepared]
