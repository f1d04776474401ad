"""Calls of a round as values, and what makes them: on one rank, or on all ranks of a process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ._ferry import Call as NativeCall
from ._ferry import Communicator as Native
from ._ferry import Tensor
from .calls import Answers, Arguments, Sent, finish, launch, received, result
from .end import End
from .outputs import DispatchOutput
from .tensors import reader_of

__all__ = ["Call", "Combine", "CombineAsync", "CombineWait", "Dispatch", "DispatchAsync"]
__all__ += ["DispatchCounts", "DispatchWait", "GiveUp", "make", "prepared"]


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
    #: Whether it has tensors.
    _has_tensors: ClassVar[bool] = False

    def _given(self) -> tuple[Any, ...]:
        """Returns the inputs in the order of ``arguments_of``."""
        return ()

    def _written(self, end: End, stream: int, id_type: str) -> Any:
        """Returns what the call writes: outputs, or sums and weights of a combine. Allocates what was not
        given. ``id_type``: of ids that are sent.
        """
        return None


@dataclass(eq=False)
class Dispatch(Sent, Call):
    """A :meth:`ferry_ep.Communicator.dispatch`."""

    out: DispatchOutput | None = None
    capacity: int | str = "max"
    _name, _waits, _sent, _has_tensors = "dispatch", True, 1, True

    def _written(self, end: End, stream: int, id_type: str) -> Any:
        return received(end, self.x, self.capacity, id_type, stream) if self.out is None else self.out


@dataclass(eq=False)
class DispatchAsync(Sent, Call):
    """A :meth:`ferry_ep.Communicator.dispatch_async`."""

    _name, _has_tensors = "dispatch_async", True


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
    _name, _waits, _has_tensors = "dispatch_wait", True, True

    def _written(self, end: End, stream: int, id_type: str) -> Any:
        # Of the dispatch, which sent them.
        id_type = "i64" if end.native.last()[1] else "i32"
        return received(end, self.like, self.capacity, id_type, stream) if self.out is None else self.out


class _Returns(Answers, Call):
    """A combine, or its first half."""

    _has_tensors = True

    def _written(self, end: End, stream: int, id_type: str) -> Any:
        return result(end, self, stream)


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


@dataclass(eq=False)
class GiveUp(Call):
    """A :meth:`ferry_ep.Communicator.give_up`."""

    _name = "give_up"


def make(ends: Sequence[End], calls: Sequence[Call], streams: Sequence[Any]) -> list[Any]:
    """Makes a call on each of these ranks, on all or on none. Returns what each call returns."""
    if len(calls) == 1 and streams[0] is None:
        made = _read(ends[0], calls[0])
        if made is not NotImplemented:
            return [made]
    owns = [Arguments(end, stream) for end, stream in zip(ends, streams, strict=True)]
    described = [_described(call, own) for call, own in zip(calls, owns, strict=True)]
    for call, own in zip(calls, owns, strict=True):
        if call._waits and own.copies:
            own.end.require_peers(ends, sent=call._sent, returned=call._returned)
    launch(owns, Native.together, [native for native, _ in described])
    for own in owns:
        own.enqueued()
    if calls[0]._waits:
        finish(owns)
    return [_returned(call, written) for call, (_, written) in zip(calls, described, strict=True)]


def prepared(end: End, call: Call, written: Any) -> NativeCall:
    """Returns a call of device memory with checked arguments, which writes these."""
    own = Arguments(end, 0)
    made = _checked(call, own, own.inputs(call._name, call._given()), written)
    own.require_device_memory()
    return made


def _checked(call: Call, own: Arguments, inputs: list[Tensor | None], written: Any) -> NativeCall:
    """Returns the call with described inputs that writes these arrays."""
    outputs: list[Tensor | None] = []
    if isinstance(call, Answers):
        outputs = own.sums(*written)
    elif call._waits and call._has_tensors:
        outputs = own.outputs(written)
    return NativeCall(own.end.native, call._name, inputs, outputs)


def _described(call: Call, own: Arguments) -> tuple[NativeCall, Any]:
    """Returns the call with checked arguments, and what it writes."""
    if isinstance(call, CombineWait):
        own.resume()
    own.leaves = isinstance(call, CombineAsync)
    inputs = own.inputs(call._name, call._given())
    id_type = "i32"
    if isinstance(call, Dispatch) and inputs[1] is not None:
        id_type = inputs[1].data_type
    written = call._written(own.end, own.stream, "i64" if id_type == "i64" else "i32")
    return _checked(call, own, inputs, written), written


def _returned(call: Call, written: Any) -> Any:
    """Returns what a call returns that writes these."""
    return written[0] if isinstance(call, Answers) and written[1] is None else written


def _read(end: End, call: Call) -> Any:
    """Makes a call in torch's current stream whose arguments are all its tensors on the rank's GPU, read
    without Python, and returns what it returns. ``NotImplemented`` for others: then it has enqueued nothing.
    """
    if end.copies or not call._has_tensors:
        return NotImplemented
    given = arrays = call._given()
    if isinstance(call, CombineAsync) and any(step is not None for step in given[2:7]):
        # Described, so that the second half can look whether its outputs are still there.
        return NotImplemented
    if isinstance(call, Answers):
        needed, arrays = given[:1], (*given, call.out, call.weights)
    elif isinstance(call, DispatchWait):
        needed = arrays = (call.like,) if call.out is None else ()
    else:
        needed = given[:2]
        if given[-1] is not None and end.plan.config.format != "fp8":
            # Codes of other formats have no type of their own in every version of torch.
            return NotImplemented
    for value in needed:
        if value is None:
            return NotImplemented
    reader = reader_of(arrays)
    if reader is None:
        return NotImplemented
    is_wide = isinstance(call, Dispatch) and given[1].dtype == sys.modules["torch"].int64
    written = call._written(end, 0, "i64" if is_wide else "i32")
    outputs: Sequence[Any] | None = written if isinstance(call, Answers) else ()
    if call._waits and not outputs:
        outputs = _tensors(end, written)
    if outputs is None:
        return NotImplemented
    end.native.enqueue_tensors(reader, call._name, given, outputs)
    return _returned(call, written)


def _tensors(end: End, out: DispatchOutput) -> list[Any] | None:
    """Returns the tensors of outputs in the order of the plan's, unless there are others, too few, or of
    other sizes than the outputs say.
    """
    if not isinstance(out, DispatchOutput):
        return None
    take, has = end.fields()
    tensors = take(out)
    if reader_of(tensors, has) is None:
        return None
    has_blocks = out.scale_offsets is not None
    if out.src_info.shape[0] != out.rows or (has_blocks and out.scales.shape[0] != out.scale_blocks):
        return None
    return [tensor for tensor in tensors if tensor is not None]
