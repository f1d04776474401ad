"""Exceptions of Ferry. All are a :class:`FerryError`.

A call that raises one has launched nothing, except :class:`FaultError` and its kinds, which are about a
kernel that was launched before, and a call of all ranks whose launch fails after that of its first. Faults
of the input are no exceptions but values (:meth:`ferry_ep.Communicator.check`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ._ferry import Fault

__all__ = [
    "ArgumentError",
    "BootstrapError",
    "BusyError",
    "CapacityError",
    "ClosedError",
    "DeviceError",
    "FaultError",
    "FerryError",
    "ForkError",
    "GroupError",
    "InUseError",
    "NotBuiltError",
    "OrderError",
    "PeerFailed",
    "PeerGaveUp",
    "PeerTimeout",
    "PlanError",
    "PoisonedError",
    "Problem",
    "SimulatorError",
    "TensorError",
    "ThreadError",
]


class FerryError(Exception):
    """An error of Ferry. Errors of the same class, text and fields are equal."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self.args == getattr(other, "args", None) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), str(self)))

    def __reduce__(self) -> Any:
        # With all attributes: fields, and notes of the user's.
        return _again, (type(self), self.args), vars(self)


def _again(cls: type[FerryError], arguments: tuple[Any, ...]) -> FerryError:
    """Makes an exception whose fields follow: its constructor takes more than its arguments."""
    return cls.__new__(cls, *arguments)


class Problem(NamedTuple):
    """A field of a :class:`ferry_ep.Config` that breaks a rule."""

    field: str
    value: str
    rule: str


class ArgumentError(FerryError, ValueError):
    """An argument with an invalid value, or one that does not match the others."""


class PlanError(ArgumentError):
    """A configuration that does not work. ``problems`` lists every :class:`Problem`."""

    problems: list[Problem]

    def __init__(self, message: str, problems: list[tuple[str, str, str]]) -> None:
        super().__init__(message)
        self.problems = [Problem(*problem) for problem in problems]


class CapacityError(ArgumentError):
    """A capacity that the outputs of a dispatch cannot have."""

    field: str
    value: str
    rule: str

    def __init__(self, message: str, field: str, value: str, rule: str) -> None:
        super().__init__(message)
        self.field, self.value, self.rule = field, value, rule


class TensorError(ArgumentError):
    """A tensor that does not fit: ``name`` is the argument, ``wanted`` and ``given`` are texts."""

    name: str
    wanted: str
    given: str

    def __init__(self, message: str, name: str, wanted: str, given: str) -> None:
        super().__init__(message)
        self.name, self.wanted, self.given = name, wanted, given


class OrderError(FerryError):
    """A call that does not come next in its round, or a communicator that is closed in an open one."""


class ThreadError(OrderError):
    """A call that would wait for another rank which the same thread drives."""


class BusyError(FerryError):
    """A call of a communicator while another thread is in one.

    In a simulated group also a call of a signal's handler that needs the group that its thread waits for, and
    one behind a call that a signal ended and that other ranks have not answered yet.
    """


class ClosedError(FerryError):
    """A use of a group, a communicator or its memory after it was closed."""


class InUseError(FerryError):
    """A group or communicator that is closed while communicators or graphs still need it."""


class ForkError(FerryError):
    """A use of a handle in a fork of the process that made it."""


class FaultError(FerryError):
    """A kernel gave up, and so did its communicator. ``fault`` is the reason.

    The communicator can only be closed.
    """

    fault: Fault

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault

    @property
    def rank(self) -> int:
        """Rank that gave up."""
        return self.fault.rank

    @property
    def culprit(self) -> int:
        """Rank at which the chain of waits begins."""
        return self.fault.culprit

    @property
    def phase(self) -> str:
        """``"dispatch"`` or ``"combine"``."""
        return self.fault.phase


class PeerTimeout(FaultError):
    """A rank did not come before the deadline: ``culprit`` is the rank that was lost or late."""


class PeerGaveUp(FerryError):
    """This ``rank`` came late, and ``peer`` had given up on it. The communicator can only be closed."""

    rank: int
    peer: int

    def __init__(self, message: str, rank: int, peer: int) -> None:
        super().__init__(message)
        self.rank, self.peer = rank, peer


class PoisonedError(FerryError):
    """A call of a communicator that gave up earlier, because of ``fault`` if a fault was the reason."""

    fault: Fault | None

    def __init__(self, message: str, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.fault = fault


class GroupError(FerryError):
    """Ranks, devices or processes that cannot be a group, or were configured differently."""


class PeerFailed(GroupError):
    """Set-up failed on another ``rank``, in the step ``step``. Its own error says why."""

    rank: int
    step: str

    def __init__(self, message: str, rank: int, step: str) -> None:
        super().__init__(message)
        self.rank, self.step = rank, step


class BootstrapError(FerryError):
    """Processes that did not find each other. ``lost_rank`` is the lost rank if it is known."""

    lost_rank: int | None

    def __init__(self, message: str, lost_rank: int | None = None) -> None:
        super().__init__(message)
        self.lost_rank = lost_rank


class DeviceError(FerryError):
    """An error of the CUDA driver or of NVSHMEM, or a machine that lacks one."""


class NotBuiltError(FerryError):
    """A call that needs a feature which this build lacks."""


class SimulatorError(FerryError):
    """An error of the simulator, such as a rank that was lost."""


def refuse(name: str, wanted: str, given: str) -> TensorError:
    """Returns the error of a tensor that does not fit."""
    return TensorError(f"tensor {name}: wanted {wanted}, given {given}", name, wanted, given)
