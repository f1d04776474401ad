"""One rank's end of a communicator, which the public classes share: its memory, its waits and its end."""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ._ferry import Communicator, Fault, Group, capacity_of
from .errors import ArgumentError, FaultError, FerryError, PoisonedError, ThreadError
from .memory import Block, Blocks, DeviceArray, lend
from .outputs import TENSORS, DispatchOutput
from .scalars import shown, whole
from .tensors import Repeated, is_allocated_here

__all__ = ["End", "Results"]


class _Thread:
    """Identity of a thread, which ends with the thread; ``threading.get_ident()`` is used again."""


_threads = threading.local()


def _this_thread() -> _Thread:
    if not hasattr(_threads, "own"):
        _threads.own = _Thread()
    found: _Thread = _threads.own
    return found


def _is_alone() -> bool:
    """Whether no other thread could make a call; that which hands over messages makes none."""
    return sum(thread.name != "ferry messages" for thread in threading.enumerate()) == 1


def _nobody() -> None:
    return None


class _Made(NamedTuple):
    """Outputs of a dispatch, and what was asked for: type and value of the capacity, type of the ids."""

    asked: tuple[type, int | str, str]
    rows: int
    blocks: int
    names: list[str]
    arrays: Repeated


class Results(NamedTuple):
    """Results of a combine, and what was asked for: tokens, whether rows stay apart, type of the sums."""

    asked: tuple[int, bool, str]
    sums: Repeated
    weights: Repeated


class End:
    """One rank's end of a communicator: its handle, and all that calls keep of it."""

    def __init__(self, owner: Any, group: Group, native: Communicator, peers: list[weakref.ref[End]]) -> None:
        """Takes the public object that has it, and a list of all ends of this process, which it joins."""
        self.native, self.plan = native, native.plan
        #: All device memory.
        self.blocks = Blocks(owner, native, group)
        #: Whether CPU arrays are copied in and out.
        self.copies = self.blocks.copies
        #: All ranks of this process, in the order of their numbers.
        self.peers = peers
        peers.append(weakref.ref(self))
        #: Copies of CPU arrays of calls, in use until the next wait.
        self.pending: list[list[Block]] = []
        #: What the first half of a combine has left, whose wait comes next.
        self.opened: Any = None
        #: Results of a combine that were made last.
        self.results: Results | None = None
        #: Thread that made the last call of a round, if it lives; None before the first.
        self._driver: Callable[[], _Thread | None] = _nobody
        #: Input faults that a call found while it waited.
        self._faults: list[Fault] = []
        #: Names of a dispatch's outputs, once they were asked for.
        self._names: list[str] | None = None
        self._taken: tuple[Callable[[Any], tuple[Any, ...]], tuple[bool, ...]] | None = None
        #: Outputs of a dispatch that were made last.
        self._made: _Made | None = None
        self._stream_index = int(native.device[5:]) if native.device.startswith("cuda:") else None

    # Memory

    def outputs(
        self, like: Any, capacity: int | str, id_type: str, stream: int | None = None
    ) -> DispatchOutput:
        """Makes :meth:`ferry_ep.Communicator.outputs`; with ``stream`` for a call there, if memory is the
        library's.
        """
        asked, made = (type(capacity), capacity, id_type), self._made
        if made is None or made.asked != asked:
            layouts = self.plan.output_layout(capacity, id_type=id_type)
            arrays = Repeated([(of.data_type, of.shape) for of in layouts])
            names = [of.name for of in layouts]
            made = self._made = _Made(asked, *capacity_of(self.plan, capacity), names, arrays)
        named = dict(zip(made.names, self.allocate(made.arrays, like, stream), strict=True))
        return DispatchOutput(**named, rows=made.rows, scale_blocks=made.blocks)

    def allocate(self, arrays: Repeated, like: Any, stream: int | None = None) -> list[Any]:
        """Allocates arrays in the library of ``like``: its own, or for ``None`` and those that have no arrays
        to write here, :class:`ferry_ep.DeviceArray`; these, with ``stream``, for a call there.
        """
        if is_allocated_here(like, self.copies):
            return arrays.allocate(like)
        layouts = [(data_type, tuple(shape)) for data_type, shape in arrays.layouts]
        # A graph uses its memory again.
        if stream is None or self.native.capture(stream) is not None:
            return [DeviceArray(self.blocks, *layout) for layout in layouts]
        return [lend(self.blocks, *layout, stream) for layout in layouts]

    def output_names(self) -> list[str]:
        """Returns the names of a dispatch's outputs, in order."""
        if self._names is None:
            self._names = [of.name for of in self.plan.output_layout()]
        return self._names

    def fields(self) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[bool, ...]]:
        """Returns a function that takes all tensors of outputs, the plan's first and in its order, and which
        of them the plan has.
        """
        if self._taken is None:
            names = self.output_names()
            others = [name for name in TENSORS if name not in names]
            has = (*(True for _ in names), *(False for _ in others))
            self._taken = operator.attrgetter(*names, *others), has
        return self._taken

    # Waits and faults

    def stream_of(self, stream: Any) -> int:
        """Returns the handle of a stream."""
        if stream is None:
            torch = sys.modules.get("torch")
            if self._stream_index is None or torch is None or not torch.cuda.is_initialized():
                return 0
            return int(torch._C._cuda_getCurrentRawStream(self._stream_index))
        if isinstance(stream, int):
            return whole("stream", stream)
        for name in ("cuda_stream", "ptr", "handle"):
            handle = getattr(stream, name, None)
            if handle is not None:
                return whole(f"stream.{name}", handle)
        raise ArgumentError(f"stream is {shown(stream)}, but it is a stream of torch or CuPy, or a handle")

    def synchronize(self, stream: Any) -> Fault | None:
        """Makes :meth:`ferry_ep.Communicator.synchronize`."""
        handle = self.stream_of(stream)
        if self.copies and self.native.round in ("idle", "dispatched"):
            self.require_peers([self])
        self.wait(handle)
        return self._faults.pop(0) if self._faults else None

    def check(self) -> Fault | None:
        """Makes :meth:`ferry_ep.Communicator.check`."""
        self._note(self.native.check())
        return self._faults.pop(0) if self._faults else None

    def wait(self, stream: int, *, of_round: bool = True, is_part: bool = False) -> None:
        """Waits for everything enqueued on ``stream``. Copies of earlier calls are then free. ``is_part``: of
        a call that launched already, and so may not be refused any more.
        """
        # Those of calls that other threads make meanwhile stay: each is noted after its launch.
        pending, self.pending = self.pending, []
        try:
            if of_round:
                self._note(self.native.synchronize(stream, is_part))
            else:
                self.native.wait(stream)
        except BaseException:
            self.pending += pending
            raise

    def drive(self) -> None:
        """Notes that this thread makes a call of a round."""
        self._driver = weakref.ref(_this_thread())

    def release_thread(self) -> None:
        """Makes :meth:`ferry_ep.Communicator.release_thread`."""
        self._driver = _nobody

    def _note(self, fault: Fault | None) -> None:
        if fault is not None:
            self._faults.append(fault)

    def require_peers(self, ends: Sequence[End], *, sent: int = 0, returned: int = 0) -> None:
        """Raises if a call of ``ends``, which adds these to the counts, would wait on the host for another
        rank of this thread.
        """
        if len(self.peers) == len(ends) or self.plan.config.skip_a2a:
            return
        own_sent, own_returned = self.native.counts()
        thread, is_alone = _this_thread(), _is_alone()
        for reference in self.peers:
            peer = reference()
            if peer is None or peer in ends or peer.native.closed:
                continue
            peer_sent, peer_returned = peer.native.counts()
            has_come = peer_sent >= own_sent + sent and peer_returned >= own_returned + returned
            driver = peer._driver()
            if has_come or not (driver is thread or (driver is None and is_alone)):
                continue
            # A communicator that gave up says so, and waits for nobody.
            self._note(self.native.check())
            rank, other = self.native.rank, peer.native.rank
            text = f"rank {rank} would wait for rank {other}, "
            if driver is thread:
                text += "which this thread drives, too"
            else:
                text += "which no thread drives, and there is no other thread"
            text += ": use Communicators.together, which makes a call on all ranks, or a thread for each rank"
            if driver is thread:
                text += f"; if another thread drives rank {other} now, call its release_thread() first"
            raise ThreadError(text)

    # The end

    def close(self) -> None:
        """Makes :meth:`ferry_ep.Communicator.close`."""
        if not self.native.closed:
            self.native.close()
            self.end()

    def end(self) -> None:
        """Frees the device memory of a communicator that was closed."""
        self.pending.clear()
        self.blocks.end()

    def leave(self) -> None:
        """Closes it if that waits for no other process, else drops it."""
        waits = len(self.peers) < self.plan.ranks
        with suppress(FerryError):
            try:
                self.native.check()
            except (FaultError, PoisonedError):
                # A communicator that gave up waits for nobody.
                waits = False
            if not waits:
                self.close()
        self.native.drop()
