"""Events and the order of streams, with DeepEP's meaning. On the CPU they order nothing: calls wait."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ArgumentError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["EventHandle", "EventOverlap", "Halves", "Ordered", "Streams"]

#: The buffer's own stream, where a handle is meant: no handle.
_OWN = -1


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

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Tensor | None, ...] | None = None
    ) -> None:
        """Takes the event: ``None`` if there is nothing to wait for."""
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Lets torch's current stream wait for the event. Does not synchronize.

        Raises :class:`ferry_ep.ArgumentError` without an event, as a call without ``async_finish`` returns.
        """
        if self.event is None:
            raise ArgumentError("event is None: the call that returned it was made without async_finish")
        self.event.current_stream_wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


class Streams:
    """Streams of a buffer's calls, of which each begins after the ones before it: a stream of the buffer's
    own, and torch's current one, which serves alone as long as nothing asks for another. Then no event has to
    be recorded and waited for, which takes the host longer than to enqueue a kernel.
    """

    def __init__(self) -> None:
        self._own: Any = None
        #: Handle of the stream whose further work comes after all calls; ``_OWN`` for the buffer's own, None
        #: before the first call.
        self._behind: int | None = None
        #: Whether the last call is in that stream itself, and whether it was captured.
        self._holds_call = self._is_captured = False

    def own(self, device: torch.device) -> Any:
        """Returns the buffer's own stream, ``None`` on the CPU."""
        if device.type != "cuda":
            return None
        if self._own is None:
            # Before work that waits in other streams of the GPU, as DeepEP's is.
            self._own = torch.cuda.Stream(device, priority=-1)
        return self._own

    @property
    def last(self) -> Any:
        """The stream of the last call; ``None`` on the CPU, and before the first."""
        return self._behind if self._holds_call else self._own

    def take_current(self, current: int) -> bool:
        """Whether a call can be in the current stream alone. If so, notes it."""
        if self._behind not in (None, current):
            return False
        self._note(current, holds_call=True)
        return True

    def follow(self, device: torch.device) -> Any:
        """Lets the buffer's own stream wait for a call that is in another one, and returns it."""
        own = self.own(device)
        is_captured = torch.cuda.is_current_stream_capturing()
        # What was not captured cannot be waited for in a capture.
        if self._holds_call and self._is_captured == is_captured:
            own.wait_stream(torch.cuda.ExternalStream(self._behind, device=device))
        return own

    def note(self, current: int | None) -> None:
        """Notes a call in the buffer's own stream, for which ``current`` waits, if it is one."""
        self._note(_OWN if current is None else current, holds_call=False)

    def _note(self, behind: int, *, holds_call: bool) -> None:
        self._behind, self._holds_call = behind, holds_call
        self._is_captured = torch.cuda.is_current_stream_capturing()


class Ordered:
    """Work of one call: after ``previous_event``, or what is on the current stream; and before what follows
    on the current stream, unless ``async_finish``.

    Tensors made in the block belong to the stream of the work, and are safe on both.
    """

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
        current = torch._C._cuda_getCurrentRawStream(self._device.index)
        event = None if self._previous is None else self._previous._event
        if event is None and not self._is_async and self._streams.take_current(current):
            return self
        self._own = self._streams.follow(self._device)
        self._current = torch.cuda.current_stream(self._device)
        if event is None:
            self._own.wait_stream(self._current)
        else:
            self._own.wait_event(event)
        self._context = torch.cuda.stream(self._own)
        self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._own is None:
            if self._is_async:
                self.event = EventOverlap(EventHandle())
            return
        self._context.__exit__(kind, error, traceback)
        if kind is not None or not self._is_async:
            self._current.wait_stream(self._own)
            self._streams.note(self._current.cuda_stream)
            return
        self._streams.note(None)
        # In a capture the allocator cannot be told; what the graph's work uses is kept instead.
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

    def _record(self, stream: Any, tensors: tuple[Tensor | None, ...]) -> None:
        if stream is None:
            return
        is_captured = torch.cuda.is_current_stream_capturing()
        for tensor in tensors:
            if tensor is None:
                continue
            if is_captured:
                self._tensors.append(tensor)
            else:
                tensor.record_stream(stream)


class Halves:
    """Stream of the last half of a call, torch's current one when that was made; none on the CPU."""

    def __init__(self, like: Tensor | None) -> None:
        """Notes the current stream of the device of ``like``. Does not synchronize."""
        self._device = like.device if like is not None and like.is_cuda else None
        self._handle = self._current()
        self.is_captured = self._device is not None and torch.cuda.is_current_stream_capturing()

    def _current(self) -> int:
        """Returns the handle of the current stream, which costs less than the stream."""
        if self._device is None:
            return 0
        return int(torch._C._cuda_getCurrentRawStream(self._device.index))

    @property
    def stream(self) -> Any:
        """The stream; ``None`` on the CPU."""
        if self._device is None:
            return None
        return torch.cuda.ExternalStream(self._handle, device=self._device)

    def entered(self) -> AbstractContextManager[Any]:
        """Returns a block in which the stream is torch's current one."""
        return nullcontext() if self._device is None else torch.cuda.stream(self.stream)

    def follow(self, *tensors: Tensor | None) -> None:
        """Notes the current stream for the second half. If it is another one, it waits for that of the first,
        of which ``tensors`` are.
        """
        handle = self._current()
        if handle == self._handle:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self.stream)
        self._handle = handle
        if not torch.cuda.is_current_stream_capturing():
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(current)
