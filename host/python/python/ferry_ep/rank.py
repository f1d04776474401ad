"""One rank of a communicator, without its calls: its state, its memory, its waits and its end."""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _ferry
from ._ferry import Fault, Group, Plan
from .blocks import Block, Blocks
from .calls import Answers, Call, Opened, codes_and_scales
from .errors import ArgumentError, FaultError, FerryError, ForkError, PoisonedError, ThreadError
from .memory import DeviceArray, View
from .outputs import TENSORS, DispatchOutput
from .scalars import shown, whole
from .tensors import Repeated, element, elements_of, is_allocated_here, scales_of

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Rank"]

#: Kinds of groups whose ranks have no GPU: CPU arrays are copied in and out.
SIMULATED = ("simulated",)


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


class _Results(NamedTuple):
    """Results of a combine, and what was asked for: tokens, whether rows stay apart, type of the sums."""

    asked: tuple[int, bool, str]
    sums: Repeated
    weights: Repeated


class Rank:
    """State, memory, waits and end of a :class:`ferry_ep.Communicator`."""

    def __init__(self, group: Group, plan: Plan) -> None:
        """Makes the communicator of this process's only rank. Collective. Synchronizes.

        Raises :class:`ferry_ep.ArgumentError` if this process has several ranks: use
        :class:`ferry_ep.Communicators`.
        """
        _require_handles(group, plan)
        local = group.local_ranks
        if len(local) != 1:
            raise ArgumentError(
                f"this process has the ranks {local}: Communicators(group, plan) makes all of them"
            )
        self._begin(group, _ferry.Communicator._create(group, plan)[0], [])

    @classmethod
    def _all(cls, group: Group, plan: Plan) -> list[Self]:
        """Makes the communicators of all ranks of this process."""
        _require_handles(group, plan)
        peers: list[weakref.ref[Rank]] = []
        made = []
        for native in _ferry.Communicator._create(group, plan):
            communicator = cls.__new__(cls)
            communicator._begin(group, native, peers)
            made.append(communicator)
        return made

    def _begin(self, group: Group, native: _ferry.Communicator, peers: list[weakref.ref[Rank]]) -> None:
        self._group = group
        self._native = native
        self._copies = group.kind in SIMULATED
        #: All ranks of this process, in the order of their numbers.
        self._peers = peers
        peers.append(weakref.ref(self))
        #: Thread that made the last call of a round, if it lives; None before the first.
        self._driver: Callable[[], _Thread | None] = _nobody
        #: Input faults that a call found while it waited.
        self._faults: list[Fault] = []
        #: All device memory.
        self._blocks = Blocks(native)
        #: Copies of CPU arrays of calls, in use until the next wait.
        self._pending: list[list[Block]] = []
        #: The combine whose wait comes next.
        self._open: Opened | None = None
        #: Names of a dispatch's outputs, once they were asked for.
        self._names: list[str] | None = None
        self._taken: tuple[Callable[[Any], tuple[Any, ...]], tuple[bool, ...]] | None = None
        #: Outputs of a dispatch and results of a combine that were made last.
        self._made: _Made | None = None
        self._results: _Results | None = None
        #: Handle for torch's operators, once there is one.
        self._torch_handle: int | None = None
        self._stream_index = int(native.device[5:]) if native.device.startswith("cuda:") else None

    @property
    def rank(self) -> int:
        """This rank."""
        return self._native.rank

    @property
    def plan(self) -> Plan:
        """Plan that it was made with."""
        return self._native.plan

    @property
    def device(self) -> str:
        """Device of this rank: ``"cuda:0"``, or ``"simulated"``."""
        return self._native.device

    @property
    def max_sms(self) -> int | None:
        """Most multiprocessors that the kernels of its next calls occupy; ``None`` for all."""
        return self._native.max_sms

    def limit_sms(self, max_sms: int | None) -> None:
        """Sets the most multiprocessors that the kernels of later calls occupy, until the next call of it.

        ``None`` is as many as at first: those of the plan, or this rank's part of a shared GPU. Each rank may
        choose its own, and so may each half of a split call; launches in a captured graph keep theirs. Not
        collective; does not synchronize.

        Raises :class:`ferry_ep.ArgumentError` for 0, for more than at first, and for any number if the plan's
        ``receive`` is ``"by-expert"`` or ``"padded"``.
        """
        self._native.limit_sms(max_sms)

    @property
    def deadline(self) -> float:
        """Longest time in seconds that a kernel of its next calls waits."""
        return self._native.deadline

    def set_deadline(self, deadline: float | None) -> None:
        """Sets the longest time in seconds that a kernel of later calls waits, until the next call of this.

        ``None`` is the plan's. Each rank may choose its own, and so may each half of a split call; launches
        in a captured graph keep theirs. Not collective; does not synchronize.

        Raises :class:`ferry_ep.ArgumentError` unless it is above 0 and at most a day.
        """
        self._native.set_deadline(deadline)

    @property
    def round(self) -> str:
        """State of the round: ``"idle"``, ``"dispatch sent"``, ``"dispatched"`` or ``"combine sent"``."""
        return self._native.round

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._native.closed

    # Memory

    def outputs(
        self, like: Any = None, capacity: int | str = "max", *, id_type: str = "i32"
    ) -> DispatchOutput:
        """Allocates the outputs of dispatches, not cleared.

        ``like`` is an array in whose library and on whose device they are allocated; ``None`` for
        :class:`ferry_ep.DeviceArray`. ``capacity`` is a number of rows, ``"max"`` (never too small) or
        ``"distinct"`` (enough if the experts of each token differ). If more rows arrive, the first ones are
        written, with an input fault. Views, strided and padded rows have exactly ``plan.max_rows`` rows.
        ``id_type``, ``"i32"`` or ``"i64"``, is the type of the ``topk_ids`` of the dispatches, of which the
        received ``ids`` are, too: without effect by expert.

        Raises :class:`ferry_ep.CapacityError` and :class:`ferry_ep.ArgumentError`.
        """
        return self._outputs(like, capacity, id_type, None)

    def _outputs(self, like: Any, capacity: int | str, id_type: str, stream: int | None) -> DispatchOutput:
        """Makes :meth:`outputs`; with ``stream`` for a call there, if memory is the library's."""
        asked, made = (type(capacity), capacity, id_type), self._made
        if made is None or made.asked != asked:
            layouts = self.plan.output_layout(capacity, id_type=id_type)
            arrays = Repeated([(of.data_type, of.shape) for of in layouts])
            names = [of.name for of in layouts]
            made = self._made = _Made(asked, *self.plan._capacity(capacity), names, arrays)
        named = dict(zip(made.names, self._allocated(made.arrays, like, stream), strict=True))
        return DispatchOutput(**named, rows=made.rows, scale_blocks=made.blocks)

    def view(self) -> View:
        """Returns the received rows of the last dispatch, which stay in the library's window.

        Reads no device memory. Not collective; does not synchronize. Raises :class:`ferry_ep.ArgumentError`
        unless the plan's ``receive`` is ``"view"``, :class:`ferry_ep.OrderError` unless :meth:`dispatch` or
        :meth:`dispatch_wait` was called last, and :class:`ferry_ep.PoisonedError`.
        """
        return View(self)

    def combined(self, like: Any = None, *, tokens: int | None = None, data_type: str = "bf16") -> Any:
        """Allocates the result of a combine, not cleared: ``[tokens, hidden]``.

        ``tokens`` is by default ``max_tokens_per_rank``; ``like`` as in :meth:`outputs`; ``data_type`` is
        ``"bf16"``, or ``"f16"`` or ``"f32"`` (by expert with ``Config.options``).
        """
        config, data_type = self.plan.config, element(data_type)
        rows = config.max_tokens_per_rank if tokens is None else whole("tokens", tokens)
        return self._allocated(Repeated([(data_type, [rows, config.hidden])]), like)[0]

    def empty(self, shape: tuple[int, ...], data_type: str) -> DeviceArray:
        """Allocates memory of this rank's device, not cleared, which lives until :meth:`close`. Synchronizes.

        ``data_type`` is ``"bf16"``, ``"f16"``, ``"f32"``, ``"i32"``, ``"i64"``, ``"u32"``, ``"e4m3"``,
        ``"e8m0"``, ``"e2m1"`` or ``"u8"``, or a name or ``dtype`` of these in NumPy or torch. Raises
        :class:`ferry_ep.ArgumentError` for others.
        """
        return DeviceArray(self, data_type, shape)

    # Waits, faults and the end

    def synchronize(self, stream: Any = None) -> Fault | None:
        """Waits for everything enqueued on ``stream``, and returns an input fault if there was one.

        An input fault is a value and no exception: the round goes on, and so must this rank. Raises
        :class:`ferry_ep.PeerTimeout` and other :class:`ferry_ep.FaultError` if a kernel gave up, which it
        does at the latest when the deadline has passed; :class:`ferry_ep.PeerGaveUp` on a late rank.
        """
        call = Call(self, stream)
        if self._copies and self._native.round in ("idle", "dispatched"):
            call.copies = True
            call.require_peers()
        self._wait(call.stream)
        return self._faults.pop(0) if self._faults else None

    def check(self) -> Fault | None:
        """Returns an input fault that was found so far, once. Does not wait.

        Raises as :meth:`synchronize`.
        """
        self._note(self._native._check())
        return self._faults.pop(0) if self._faults else None

    def assume_no_graphs(self) -> None:
        """Promises that all CUDA graphs with calls of this communicator are destroyed, so that it may close.

        A graph that is launched after :meth:`close` writes memory that was freed.
        """
        self._native._assume_no_foreign_graphs()

    def release_thread(self) -> None:
        """Says that another thread makes the calls from now on, for the check of waits in one thread.

        Not needed after a thread has ended.
        """
        self._driver = _nobody

    def close(self) -> None:
        """Frees this rank's memory. Collective. Synchronizes. A second call does nothing.

        Raises :class:`ferry_ep.OrderError` while a round is open and :class:`ferry_ep.InUseError` while
        graphs have its calls: nothing was freed then.
        """
        if self._native.closed:
            return
        self._native._close()
        self._end()

    def _leave(self) -> None:
        """Closes it if that waits for no other process, else drops it."""
        waits = len(self._peers) < self.plan.ranks
        with suppress(FerryError):
            try:
                self._native._check()
            except (FaultError, PoisonedError):
                # A communicator that gave up waits for nobody.
                waits = False
            if not waits:
                self.close()
        self._native._drop()

    def _end(self) -> None:
        """Frees the device memory of a communicator that was closed."""
        self._pending.clear()
        self._blocks.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an exception peers may never come, neither to end the round nor to close.
        if kind is None:
            self.close()
        else:
            self._leave()

    def __copy__(self) -> Self:
        """Returns this very communicator: copies of a handle are the handle."""
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        """Returns this very communicator: copies of a handle are the handle."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a communicator belongs to its process, and cannot be pickled")

    def __repr__(self) -> str:
        try:
            if self._native.closed:
                return f"<ferry_ep.Communicator rank {self.rank}, closed>"
            state = self.round
        except ForkError:
            state = "of another process"
        except FerryError:
            state = "in a call of another thread"
        return f"<ferry_ep.Communicator rank {self.rank} of {self.plan.ranks} on {self.device}, {state}>"

    # Helpers of calls

    def _sending(
        self, x: Any, topk_ids: Any, topk_weights: Any, input_scale: Any, tokens: Any, stream: Any
    ) -> tuple[Call, _ferry.DispatchInput]:
        """Begins a call that sends ``x``."""
        call = Call(self, stream)
        (x, scales), format = codes_and_scales(x), self.plan.config.format
        given = _ferry.DispatchInput(
            call.take("x", x, "bf16" if scales is None else elements_of(format)),
            call.take("topk_ids", topk_ids, "i32"),
            call.maybe("topk_weights", topk_weights, "f32"),
            call.maybe("input_scale", input_scale, "f32"),
            call.maybe("tokens_on_device", tokens, "u32"),
            call.maybe("x_scales", scales, scales_of(format)),
        )
        return call, given

    def _received(self, like: Any, capacity: int | str, wide_ids: bool, stream: int) -> DispatchOutput:
        """Allocates outputs for a call on ``stream``, whose ids have the type of those sent."""
        like, _ = codes_and_scales(like)
        return self._outputs(like, capacity, "i64" if wide_ids else "i32", stream)

    def _result(self, given: Answers, out: Any, weights: Any, data_type: str, stream: int) -> tuple[Any, Any]:
        """Returns ``out`` and ``weights``, or allocates them for the tokens of the open round."""
        data_type = element(data_type)
        has_weights = weights is None and given.received_weights is not None
        if out is not None and not has_weights:
            return out, weights
        config, (tokens, _) = self.plan.config, self._native._last()
        is_apart = config.combine == "exact" and given.topk_weights is None
        asked, made = (tokens, is_apart, data_type), self._results
        if made is None or made.asked != asked:
            shape = [tokens, config.top_k, config.hidden] if is_apart else [tokens, config.hidden]
            weights_of = Repeated([("f32", [tokens, config.top_k])])
            made = self._results = _Results(asked, Repeated([(data_type, shape)]), weights_of)
        like = given.expert_rows
        if has_weights:
            weights = self._allocated(made.weights, like, stream)[0]
        if out is None:
            out = self._allocated(made.sums, like, stream)[0]
        return out, weights

    def _allocated(self, arrays: Repeated, like: Any, stream: int | None = None) -> list[Any]:
        """Allocates arrays in the library of ``like``: its own, or for ``None`` and those that have no arrays
        to write here, :class:`ferry_ep.DeviceArray`; these, with ``stream``, for a call there.
        """
        if is_allocated_here(like, self._copies):
            return arrays.allocate(like)
        layouts = [(data_type, tuple(shape)) for data_type, shape in arrays.layouts]
        # A graph uses its memory again.
        if stream is None or self._native._capture(stream) is not None:
            return [DeviceArray(self, *layout) for layout in layouts]
        return [DeviceArray._lent(self, *layout, stream) for layout in layouts]

    def _wait(self, stream: int, *, of_round: bool = True, is_part: bool = False) -> None:
        """Waits for everything enqueued on ``stream``. Copies of earlier calls are then free. ``is_part``: of
        a call that launched already, and so may not be refused any more.
        """
        # Those of calls that other threads make meanwhile stay: each is noted after its launch.
        pending, self._pending = self._pending, []
        try:
            if of_round:
                self._note(self._native._synchronize(stream, is_part))
            else:
                self._native._wait(stream)
        except BaseException:
            self._pending += pending
            raise

    def _stream(self, stream: Any) -> int:
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

    def _output_names(self) -> list[str]:
        """Returns the names of a dispatch's outputs, in order."""
        if self._names is None:
            self._names = [name for name, *_ in self.plan._output_layout(*self.plan._capacity("max"))]
        return self._names

    def _fields(self) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[bool, ...]]:
        """Returns a function that takes all tensors of outputs, the plan's first and in its order, and which
        of them the plan has.
        """
        if self._taken is None:
            names = self._output_names()
            others = [name for name in TENSORS if name not in names]
            has = (*(True for _ in names), *(False for _ in others))
            self._taken = operator.attrgetter(*names, *others), has
        return self._taken

    def _drive(self) -> None:
        """Notes that this thread makes a call of a round."""
        self._driver = weakref.ref(_this_thread())

    def _note(self, fault: Fault | None) -> None:
        if fault is not None:
            self._faults.append(fault)

    def _require_peers(self, sent: int, returned: int) -> None:
        """Raises if a call, which adds these to the counts, would wait for a rank of this thread."""
        if len(self._peers) == 1 or self.plan.config.skip_a2a:
            return
        own_sent, own_returned = self._native._counts()
        thread, is_alone = _this_thread(), _is_alone()
        for reference in self._peers:
            peer = reference()
            if peer is None or peer is self or peer._native.closed:
                continue
            peer_sent, peer_returned = peer._native._counts()
            has_come = peer_sent >= own_sent + sent and peer_returned >= own_returned + returned
            driver = peer._driver()
            if has_come or not (driver is thread or (driver is None and is_alone)):
                continue
            # A communicator that gave up says so, and waits for nobody.
            self._note(self._native._check())
            text = f"rank {self.rank} would wait for rank {peer.rank}, "
            if driver is thread:
                text += "which this thread drives, too"
            else:
                text += "which no thread drives, and there is no other thread"
            text += (
                ": use the calls of Communicators, which make a call on all ranks, or a thread for each rank"
            )
            if driver is thread:
                text += f"; if another thread drives rank {peer.rank} now, call its release_thread() first"
            raise ThreadError(text)


def _require_handles(group: Any, plan: Any) -> None:
    """Raises unless these are a group and a plan."""
    for name, given, wanted in (("group", group, Group), ("plan", plan, Plan)):
        if not isinstance(given, wanted):
            raise ArgumentError(f"{name} is {shown(given)}, but it is a ferry_ep.{wanted.__name__}")
