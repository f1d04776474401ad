"""Settings from the environment, and remarks that are made once."""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from dataclasses import dataclass

from ..core.errors import ArgumentError

__all__ = ["Settings", "say_once"]

#: Shortest and longest deadline of a plan in seconds.
_LEAST_DEADLINE, _MOST_DEADLINE = 1e-9, 86400.0
_said: set[str] = set()
_lock = threading.Lock()


@dataclass(frozen=True)
class Settings:
    """Settings of a buffer, the same on all ranks, except the number of tokens."""

    max_tokens: int | None
    """``FERRY_DEEP_EP_MAX_TOKENS``: tokens of a rank for which windows have room at least."""
    deadline: float
    """``FERRY_DEEP_EP_DEADLINE``: longest wait for a peer in seconds. 100 unless set, as in DeepEP
    (``LEGACY_NUM_CPU_TIMEOUT_SECS``)."""
    first_deadline: float | None
    """``FERRY_DEEP_EP_FIRST_DEADLINE``: the same of each communicator's first round, in which ranks compile,
    and of the dispatch after it; ``None`` for that of all others."""
    is_strict: bool
    """``FERRY_DEEP_EP_STRICT``: whether calls raise that would give up a round or repeat a dispatch."""
    is_exact: bool
    """``FERRY_DEEP_EP_EXACT``: whether sums have the same bits for any number of ranks, which normal mode
    cannot have."""
    sums_weights: bool
    """``FERRY_DEEP_EP_SUM_WEIGHTS``: whether a combine adds the weights of all ranks in every slot, by a
    round of its own, rather than to return that of the expert's rank."""
    shares_gpus: bool
    """``FERRY_DEEP_EP_SHARE_GPUS``: whether ranks may share a GPU, to develop and test."""

    @staticmethod
    def read() -> Settings:
        """Reads the environment. Raises :class:`ferry_ep.ArgumentError` for a value that is not one."""
        tokens = _number("FERRY_DEEP_EP_MAX_TOKENS", 0.0, 1.0)
        first = _number("FERRY_DEEP_EP_FIRST_DEADLINE", 0.0, _LEAST_DEADLINE, _MOST_DEADLINE)
        return Settings(
            max_tokens=int(tokens) or None,
            deadline=_number("FERRY_DEEP_EP_DEADLINE", 100.0, _LEAST_DEADLINE, _MOST_DEADLINE),
            first_deadline=first or None,
            is_strict=_flag("FERRY_DEEP_EP_STRICT"),
            is_exact=_flag("FERRY_DEEP_EP_EXACT"),
            sums_weights=_flag("FERRY_DEEP_EP_SUM_WEIGHTS"),
            shares_gpus=_flag("FERRY_DEEP_EP_SHARE_GPUS"),
        )


def say_once(text: str) -> None:
    """Warns, if the process has not said this before."""
    with _lock:
        if text in _said:
            return
        _said.add(text)
    warnings.warn(text, stacklevel=2 + _depth())


def _depth() -> int:
    """Returns the number of callers of :func:`say_once` in this package: the warning names what called it."""
    package, depth, frame = __name__.rpartition(".")[0], 0, sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(package):
        depth, frame = depth + 1, frame.f_back
    return depth


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1", ""):
        raise ArgumentError(f"{name} is {value!r}, but it is 0 or 1")
    return value == "1"


def _number(name: str, default: float, least: float, most: float = math.inf) -> float:
    """Returns a number above 0, of tokens a whole one; ``default`` if it is not set."""
    value = os.environ.get(name)
    if not value:
        return default
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    is_whole = number.is_integer() or not name.endswith("TOKENS")
    if not (math.isfinite(number) and least <= number <= most and is_whole):
        limit = "" if most == math.inf else f" and at most {most:.0f}"
        raise ArgumentError(f"{name} is {value!r}, but it is a number above 0{limit}")
    return number
