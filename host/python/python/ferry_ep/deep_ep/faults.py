"""Faults of the input that rounds of a buffer met: found by its next calls, and said once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..core.errors import FerryError

if TYPE_CHECKING:
    from ..core._ferry import Fault
    from ..core.communicator import Communicator

__all__ = ["Faults", "InputFaultError"]

_log = logging.getLogger("ferry_ep.deep_ep")

#: What lost rows mean, and what prevents that.
_ADVICE = {
    "OutputTooSmall": "rows were lost, and sums of tokens of any rank may lack them: num_worst_tokens is at "
    "least the ranks times the most tokens of a rank, and in low-latency mode a token names an expert once",
    "InvalidExpert": "such slots count as -1, and nothing is sent for them",
}


class InputFaultError(FerryError):
    """An earlier call met an input fault, ``fault``, and ``FERRY_DEEP_EP_STRICT`` is 1. Its results are not
    those of its whole input. The call that raises this has sent nothing.
    """

    fault: Fault

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault

    def __reduce__(self) -> tuple[type[InputFaultError], tuple[str, Fault]]:
        return type(self), (str(self), self.fault)


class Faults:
    """Input faults of a buffer's communicators. Only the rank that met one learns of it."""

    def __init__(self, is_strict: bool) -> None:
        """Takes whether a call raises for faults of earlier ones."""
        self.is_strict = is_strict
        #: The first of each kind that :meth:`take` has not returned.
        self._found: dict[str, Fault] = {}
        self._said: set[str] = set()
        #: Communicators that had a dispatch which received no rows on purpose.
        self._emptied: set[Communicator] = set()
        #: The first that is to be raised.
        self._raised: Fault | None = None

    def look(self, communicator: Communicator) -> None:
        """Looks for faults that are known by now, says each kind once, or raises :class:`InputFaultError` if
        that is asked for. Does not wait. Raises also as :meth:`ferry_ep.Communicator.check`.
        """
        fault = communicator.check()
        # Calls come here, and find nothing.
        if fault is not None:
            self.note(communicator, fault)
            self.require_none()

    def note(self, communicator: Communicator, fault: Fault | None) -> None:
        """Notes a fault, if there is one, and all that are known behind it, and says each kind once."""
        while fault is not None:
            if not self._is_expected(communicator, fault):
                self._found.setdefault(fault.kind, fault)
                if self.is_strict:
                    self._raised = self._raised or fault
                elif fault.kind not in self._said:
                    self._said.add(fault.kind)
                    _log.warning("%s (said once; Buffer.check returns later ones)", _text_of(fault))
            fault = communicator.check()

    def expect_loss(self, communicator: Communicator) -> None:
        """Notes that the open dispatch of a communicator receives no rows, and that its caller knows."""
        self._emptied.add(communicator)

    def _is_expected(self, communicator: Communicator, fault: Fault) -> bool:
        """Returns whether a fault is none to callers."""
        if fault.kind == "InvalidExpert":
            # Engines fill slots without an expert with the number of experts.
            return fault.saw == communicator.plan.config.experts
        is_emptied = fault.kind == "OutputTooSmall" and fault.wanted == 0
        return is_emptied and communicator in self._emptied

    def require_none(self) -> None:
        """Raises :class:`InputFaultError` for the first fault that was noted, once, if that is asked for."""
        fault, self._raised = self._raised, None
        if fault is not None:
            raise InputFaultError(f"{_text_of(fault)} (FERRY_DEEP_EP_STRICT is set)", fault)

    def take(self) -> list[Fault]:
        """Returns the first fault of each kind since the last call of this. They are not raised any more."""
        found, self._found, self._raised = list(self._found.values()), {}, None
        return found


def _text_of(fault: Fault) -> str:
    advice = _ADVICE.get(fault.kind)
    return f"ferry_ep.deep_ep: {fault}" + ("" if advice is None else f"; {advice}")
