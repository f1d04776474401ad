"""Events and the order of streams, with DeepEP's meaning. On the CPU they order nothing: calls wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..core.errors import ArgumentError
from ..core.scalars import shown
from ..core.tensors import stream_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "IN_CURRENT",
    "EventHandle",
    "EventOverlap",
    "Halves",
    "InPlace",
    "Ordered",
    "Streams",
    "current_handle",
    "mark_used",
]


class HasTensors(Protocol):
    """What is kept of an earlier call."""

    @property
    def made_on(self) -> int:
        """Handle of the stream on which the tensors were made."""
        ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that later calls read."""
        ...


class EventHandle:
    """An event of CUDA on a stream, by default on torch's current one; none before torch uses CUDA."""

    def __init__(self, stream: Any = None) -> None:
        """Records the event. Does not synchronize."""
        self._event: Any = None
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream() if stream is None else stream)

    def current_stream_wait(self) -> None:
        """Lets torch's current stream wait for the event. Does not synchronize."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event, or none, and tensors that live as long. As a context manager it lets the current stream wait
    at the end of the block.
    """

    hook_after_wait: Callable[[], Any] | None = None
    """What the next wait calls, once."""
    _releases = False

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Tensor | None, ...] | None = None
    ) -> None:
        """Takes the event: ``None`` if there is nothing to wait for."""
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Lets torch's current stream wait for the event, and returns what the hook of
        :meth:`register_hook_after_wait` does, else ``None``. With ``release_handle`` the event, and the
        tensors that live as long, are dropped. Does not synchronize.

        Raises :class:`ferry_ep.ArgumentError` without an event, as a call without ``async_finish`` returns.
        """
        if self.event is None:
            raise ArgumentError("event is None: the call that returned it was made without async_finish")
        self.event.current_stream_wait()
        result = None
        if self.hook_after_wait is not None:
            result = self.hook_after_wait()
            self.hook_after_wait = None
        if release_handle:
            self.event = self.extra_tensors = None
        return result

    def wait(self) -> Any:
        """As :meth:`current_stream_wait`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Lets the next wait call ``hook_after_wait``, once.

        Raises :class:`ferry_ep.ArgumentError` if there is such a hook.
        """
        if self.hook_after_wait is not None:
            raise ArgumentError("hook_after_wait is given, but there is one that no wait has called yet")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> Self:
        """Returns itself for ``with event(release_handle=True):``, whose wait drops the event."""
        self._releases = release_handle
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        releases, self._releases = self._releases, False
        if self.event is not None:
            self.current_stream_wait(releases)


class Streams:
    """Streams of a buffer's calls, of which each begins after the ones before it: a stream of the buffer's
    own, and torch's current one, which serves alone as long as nothing asks for another. Then no event has to
    be recorded and waited for, which takes the host longer than to enqueue a kernel.

    Captured calls use the buffer's own stream, and follow one another there.
    """

    def __init__(self) -> None:
        self._own: Any = None
        #: Whether the caller uses the buffer's own stream, too.
        self._is_lent = False
        #: The stream whose further work comes after all calls, which may be the buffer's own; None before the
        #: first call.
        self._behind: Any = None
        #: Whether the last call is in that stream itself.
        self._holds_call = False
        #: Work in that stream alone, if the last call was; calls may be there then.
        self._in_place: InPlace | None = None

    def own(self, device: torch.device) -> Any:
        """Returns the buffer's own stream, ``None`` on the CPU."""
        if device.type != "cuda":
            return None
        if self._own is None:
            # Before work that waits in other streams of the GPU, as DeepEP's is.
            self._own = torch.cuda.Stream(device, priority=-1)
        return self._own

    def lend(self, device: torch.device) -> Any:
        """Returns the buffer's own stream, behind all calls, and lets later calls use it."""
        own = self.own(device)
        self._is_lent, self._in_place = True, None
        self.follow()
        return own

    @property
    def last(self) -> Any:
        """The stream of the last call; ``None`` on the CPU, and before the first."""
        return self._behind if self._holds_call else self._own

    def ordered(
        self,
        device: torch.device,
        previous_event: EventOverlap | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> InPlace | Ordered:
        """Returns the block of a call's work, which begins now. Errors are those of :class:`Ordered`."""
        given = None
        if previous_event is not None:
            if not isinstance(previous_event, EventOverlap):
                problem = f"previous_event is {shown(previous_event)}, but it is an EventOverlap, or None"
                raise ArgumentError(problem)
            given = previous_event.event
        event = None if given is None else given._event
        if event is None and not async_finish and not allocate_on_comm_stream:
            found = self._in_place
            # Each call comes here, and steps in Python add up: so this one is taken first.
            if (
                found is None
                or found.device != device
                or found.handle != torch._C._cuda_getCurrentRawStream(found.index)
            ):
                if device.type != "cuda":
                    return IN_CURRENT
                found = self._take_current(device)
            # The default stream is never captured, and engines are there unless they capture.
            if found is not None and (found.handle == 0 or not torch.cuda.is_current_stream_capturing()):
                self._in_place, self._behind, self._holds_call = found, found.stream, True
                return found
        return Ordered(self, device, previous_event, async_finish, allocate_on_comm_stream)

    def _take_current(self, device: torch.device) -> InPlace | None:
        """Returns work in the current stream alone, if calls can be there."""
        if self._is_lent or torch.cuda.is_current_stream_capturing():
            return None
        handle, behind = current_handle(device), self._behind
        if behind is None:
            # Now, as it could not be made in a capture.
            self.own(device)
            behind = torch.cuda.current_stream(device)
        # Torch's own streams live as long as the process; the number of another one is its handle.
        if behind.cuda_stream != handle or (handle != 0 and behind.stream_id == handle):
            return None
        return InPlace(behind, device, handle)

    def follow(self, current: Any = None) -> None:
        """Lets the buffer's own stream wait for a call that is in another one, unless that is ``current``,
        for which it will wait anyway. Not in a capture, which cannot wait for what was not captured.
        """
        if not self._holds_call or torch.cuda.is_current_stream_capturing():
            return
        if current is None or current.cuda_stream != self._behind.cuda_stream:
            self._own.wait_stream(self._behind)
        self._holds_call = False

    def note(self, behind: Any) -> None:
        """Notes a call in the buffer's own stream, for which the stream ``behind`` waits. A captured call is
        none until its graph is launched.
        """
        if not torch.cuda.is_current_stream_capturing():
            self._behind, self._holds_call, self._in_place = behind, False, None


def current_handle(device: torch.device | None) -> int:
    """Returns the handle of torch's current stream, which costs less than the stream; 0 on the CPU."""
    if device is None or device.index is None:
        return 0
    return int(torch._C._cuda_getCurrentRawStream(device.index))


class Halves:
    """Stream of a call, or of its second half: torch's current one when it was made; none on the CPU."""

    def __init__(self, device: torch.device | None, handle: int, is_captured: bool) -> None:
        """Takes the GPU, its current stream's handle, and whether that is captured."""
        self._device, self.handle, self.is_captured = device, handle, is_captured
        #: Number of the capture, once the call has begun.
        self.capture: int | None = None

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Notes the current stream of a device. Does not synchronize."""
        if device.index is None:
            return cls(None, 0, False)
        return cls(device, current_handle(device), torch.cuda.is_current_stream_capturing())

    @property
    def stream(self) -> Any:
        """The stream, on a GPU."""
        return stream_of(self.handle, self._device)

    def wait_for(self, last: Halves) -> None:
        """Lets its stream, which is torch's current one, wait for that of an earlier call."""
        if last.handle != self.handle and last._device is not None:
            torch.cuda.current_stream(self._device).wait_stream(last.stream)


class InPlace:
    """Work of a call in torch's current stream, where it is in order, or on the CPU, which has no streams.
    Serves any number of calls.
    """

    is_apart = False
    """Whether it needs to know of the tensors that it reads and returns."""

    def __init__(self, stream: Any, device: torch.device | None, handle: int) -> None:
        self.stream, self.handle = stream, handle
        self.device, self._halves = device, Halves(device, handle, False)
        self.index = None if device is None else device.index

    @property
    def event(self) -> EventOverlap:
        """An event that is none; callers may keep tensors in it."""
        return EventOverlap()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def halves(self, device: torch.device) -> Halves:
        """Returns the stream of a call on a device: one object for all calls in place, which have no other
        half, and for each call of :data:`IN_CURRENT` a new one.
        """
        return self._halves if device == self.device else Halves.of(device)

    def reads(self, *tensors: Tensor | None) -> None:
        """Does nothing, as the stream is the tensors' own, or waits for it."""

    def returns(self, *tensors: Tensor | None) -> None:
        """Does nothing, as the tensors are made on the caller's stream."""

    def keeps(self, made: HasTensors) -> None:
        """As :meth:`Ordered.keeps`."""
        if made.made_on != self.handle and self.device is not None:
            _record(torch.cuda.current_stream(self.device), made.tensors)


#: Work with a hook in torch's current stream, whatever that is; and all work on the CPU.
IN_CURRENT = InPlace(None, None, 0)


class Ordered:
    """Work of one call: after ``previous_event``, or what is on the current stream; and before what follows
    on the current stream, unless ``async_finish``.

    Tensors made in the block belong to the stream of the work, and are safe on both.
    """

    is_apart = True
    """As of :class:`InPlace`."""

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        previous_event: EventOverlap | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> None:
        """Raises :class:`ferry_ep.ArgumentError` as DeepEP asserts."""
        given = getattr(previous_event, "event", None)
        if allocate_on_comm_stream and (given is None or not async_finish):
            raise ArgumentError(
                f"allocate_on_comm_stream is True, but previous_event is {previous_event} and async_finish "
                f"is {async_finish}: it needs an event, and async_finish"
            )
        self._streams, self._device = streams, device
        self._previous, self._is_async = given, async_finish
        #: The buffer's own stream and the current one, if the work is in the former.
        self._own: Any = None
        self._current: Any = None
        self._context: Any = None
        self._tensors: list[Tensor] = []
        #: What the call returns, once the block was left.
        self.event = EventOverlap()

    def __enter__(self) -> Self:
        if self._device.type != "cuda":
            return self
        event = None if self._previous is None else self._previous._event
        self._own = self._streams.own(self._device)
        self._current = torch.cuda.current_stream(self._device)
        if event is None:
            self._streams.follow(self._current)
            self._own.wait_stream(self._current)
        else:
            self._streams.follow()
            self._own.wait_event(event)
        self._context = torch.cuda.stream(self._own)
        self._context.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if self._own is None:
            if self._is_async:
                self.event = EventOverlap(EventHandle())
            return
        self._context.__exit__(kind, *raised)
        if kind is not None or not self._is_async:
            self._current.wait_stream(self._own)
            self._streams.note(self._current)
            return
        self._streams.note(self._own)
        # In a graph, tensors that the allocator was told of would share no memory: the event keeps them.
        kept = tuple(self._tensors) if torch.cuda.is_current_stream_capturing() else None
        self.event = EventOverlap(EventHandle(self._own), kept)

    def reads(self, *tensors: Tensor | None) -> None:
        """Notes tensors of the caller that the work reads."""
        if self._is_async:
            # Else the current stream waits for the work, and frees nothing earlier.
            self._record(self._own, tensors)

    def returns(self, *tensors: Tensor | None) -> None:
        """Notes tensors that were made in the block, and that the caller gets."""
        self._record(self._current, tensors)

    def halves(self, device: torch.device) -> Halves:
        """As :meth:`InPlace.halves`."""
        return Halves.of(device)

    def keeps(self, made: HasTensors) -> None:
        """Notes tensors of an earlier call that the work reads."""
        if self._device.type == "cuda" and made.made_on != current_handle(self._device):
            self._record(torch.cuda.current_stream(self._device), made.tensors)

    def _record(self, stream: Any, tensors: tuple[Tensor | None, ...]) -> None:
        if stream is None:
            return
        if torch.cuda.is_current_stream_capturing():
            self._tensors += [tensor for tensor in tensors if tensor is not None]
        else:
            _record(stream, tensors)


def mark_used(device: torch.device, *tensors: Tensor | None) -> None:
    """Tells the allocator that torch's current stream of a GPU uses tensors; in a capture, too: then nothing
    else in the graph gets their memory.
    """
    if device.index is not None:
        _record(torch.cuda.current_stream(device), tensors)


def _record(stream: Any, tensors: tuple[Tensor | None, ...]) -> None:
    """Tells the allocator that a stream uses tensors."""
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)
