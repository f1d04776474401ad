"""One rank of a communicator, without its calls: what it is, its memory, its waits and its end."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from ._ferry import Communicator as Native
from ._ferry import Fault, Group, Plan
from .end import End
from .errors import ArgumentError, FerryError, ForkError
from .handles import Handle
from .memory import DeviceArray, View
from .outputs import DispatchOutput
from .scalars import shown, whole
from .tensors import Repeated, element

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Rank", "end_of", "ranks_of"]


class Rank(Handle):
    """What a :class:`ferry_ep.Communicator` has beside its calls."""

    _unpicklable = "a communicator belongs to its process, and cannot be pickled"
    _end: End

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
        self._end = End(self, group, Native.create(group, plan)[0], [])

    @property
    def rank(self) -> int:
        """This rank."""
        return self._end.native.rank

    @property
    def plan(self) -> Plan:
        """Plan that it was made with."""
        return self._end.plan

    @property
    def device(self) -> str:
        """Device of this rank: ``"cuda:0"``, or ``"simulated"``."""
        return self._end.native.device

    @property
    def max_sms(self) -> int | None:
        """Most multiprocessors that the kernels of its next calls occupy; ``None`` for all."""
        return self._end.native.max_sms

    def limit_sms(self, max_sms: int | None) -> None:
        """Sets the most multiprocessors that the kernels of later calls occupy, until the next call of it.

        ``None`` is as many as at first: those of the plan, or this rank's part of a shared GPU. Each rank may
        choose its own, and so may each half of a split call; launches in a captured graph keep theirs. Not
        collective; does not synchronize.

        Raises :class:`ferry_ep.ArgumentError` for 0, for more than at first, and for any number if the plan's
        ``receive`` is ``"by-expert"`` or ``"padded"``.
        """
        self._end.native.limit_sms(max_sms)

    @property
    def deadline(self) -> float:
        """Longest time in seconds that a kernel of its next calls waits."""
        return self._end.native.deadline

    def set_deadline(self, deadline: float | None) -> None:
        """Sets the longest time in seconds that a kernel of later calls waits, until the next call of this.

        ``None`` is the plan's. Each rank may choose its own, and so may each half of a split call; launches
        in a captured graph keep theirs. Not collective; does not synchronize.

        Raises :class:`ferry_ep.ArgumentError` unless it is above 0 and at most a day.
        """
        self._end.native.set_deadline(deadline)

    @property
    def round(self) -> str:
        """State of the round: ``"idle"``, ``"dispatch sent"``, ``"dispatched"`` or ``"combine sent"``."""
        return self._end.native.round

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._end.native.closed

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
        return self._end.outputs(like, capacity, id_type)

    def view(self) -> View:
        """Returns the received rows of the last dispatch, which stay in the library's window.

        Reads no device memory. Not collective; does not synchronize. Raises :class:`ferry_ep.ArgumentError`
        unless the plan's ``receive`` is ``"view"``, :class:`ferry_ep.OrderError` unless :meth:`dispatch` or
        :meth:`dispatch_wait` was called last, and :class:`ferry_ep.PoisonedError`.
        """
        return View(self._end.blocks)

    def combined(self, like: Any = None, *, tokens: int | None = None, data_type: str = "bf16") -> Any:
        """Allocates the result of a combine, not cleared: ``[tokens, hidden]``.

        ``tokens`` is by default ``max_tokens_per_rank``; ``like`` as in :meth:`outputs`; ``data_type`` is
        ``"bf16"``, or ``"f16"`` or ``"f32"`` (by expert with ``Config.options``).
        """
        config, data_type = self.plan.config, element(data_type)
        rows = config.max_tokens_per_rank if tokens is None else whole("tokens", tokens)
        return self._end.allocate(Repeated([(data_type, [rows, config.hidden])]), like)[0]

    def empty(self, shape: tuple[int, ...], data_type: str) -> DeviceArray:
        """Allocates memory of this rank's device, not cleared, which lives until :meth:`close`. Synchronizes.

        ``data_type`` is ``"bf16"``, ``"f16"``, ``"f32"``, ``"i32"``, ``"i64"``, ``"u32"``, ``"e4m3"``,
        ``"e8m0"``, ``"e2m1"`` or ``"u8"``, or a name or ``dtype`` of these in NumPy or torch. Raises
        :class:`ferry_ep.ArgumentError` for others.
        """
        return DeviceArray(self._end.blocks, data_type, shape)

    # Waits, faults and the end

    def synchronize(self, stream: Any = None) -> Fault | None:
        """Waits for everything enqueued on ``stream``, and returns an input fault if there was one.

        An input fault is a value and no exception: the round goes on, and so must this rank. Raises
        :class:`ferry_ep.PeerTimeout` and other :class:`ferry_ep.FaultError` if a kernel gave up, which it
        does at the latest when the deadline has passed; :class:`ferry_ep.PeerGaveUp` on a late rank.
        """
        return self._end.synchronize(stream)

    def check(self) -> Fault | None:
        """Returns an input fault that was found so far, once. Does not wait.

        Raises as :meth:`synchronize`.
        """
        return self._end.check()

    def assume_no_graphs(self) -> None:
        """Promises that all CUDA graphs with calls of this communicator are destroyed, so that it may close.

        A graph that is launched after :meth:`close` writes memory that was freed.
        """
        self._end.native.assume_no_foreign_graphs()

    def release_thread(self) -> None:
        """Says that another thread makes the calls from now on, for the check of waits in one thread.

        Not needed after a thread has ended.
        """
        self._end.release_thread()

    def close(self) -> None:
        """Frees this rank's memory. Collective. Synchronizes. A second call does nothing.

        Raises :class:`ferry_ep.OrderError` while a round is open and :class:`ferry_ep.InUseError` while
        graphs have its calls: nothing was freed then.
        """
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        # After an exception peers may never come, neither to end the round nor to close.
        if kind is None:
            self.close()
        else:
            self._end.leave()

    def __repr__(self) -> str:
        try:
            if self._end.native.closed:
                return f"<ferry_ep.Communicator rank {self.rank}, closed>"
            state = self.round
        except ForkError:
            state = "of another process"
        except FerryError:
            state = "in a call of another thread"
        return f"<ferry_ep.Communicator rank {self.rank} of {self.plan.ranks} on {self.device}, {state}>"


def end_of(rank: Rank) -> End:
    """Returns what the package's calls work with."""
    return rank._end


Kind = TypeVar("Kind", bound=Rank)


def ranks_of(kind: type[Kind], group: Group, plan: Plan) -> list[Kind]:
    """Makes the communicators of all ranks of this process, of this class. Collective. Synchronizes."""
    _require_handles(group, plan)
    peers: list[weakref.ref[End]] = []
    made = []
    for native in Native.create(group, plan):
        one = kind.__new__(kind)
        one._end = End(one, group, native, peers)
        made.append(one)
    return made


def _require_handles(group: Any, plan: Any) -> None:
    """Raises unless these are a group and a plan."""
    for name, given, wanted in (("group", group, Group), ("plan", plan, Plan)):
        if not isinstance(given, wanted):
            raise ArgumentError(f"{name} is {shown(given)}, but it is a ferry_ep.{wanted.__name__}")
