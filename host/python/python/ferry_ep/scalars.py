"""Numbers, flags and names of calls."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

from .errors import ArgumentError

__all__ = ["flag", "number", "shape_of", "text", "whole"]

#: Most of a handle or an address.
_MOST = 2**64 - 1


def whole(name: str, given: Any, *, least: int = 0, most: int = _MOST) -> int:
    """Returns a whole number, the argument ``name``. True and False are none."""
    try:
        number = least - 1 if isinstance(given, bool) else operator.index(given)
    except (TypeError, ValueError, RuntimeError):
        # Arrays of several elements have an index that they refuse.
        number = least - 1
    if least <= number <= most:
        return number
    raise ArgumentError(f"{name} is {given!r}, but it is a whole number of {least} to {most}")


def number(name: str, given: Any) -> float:
    """Returns a number, the argument ``name``. True and False are none."""
    try:
        if not isinstance(given, (bool, str, bytes)):
            return float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise ArgumentError(f"{name} is {given!r}, but it is a number")


def flag(name: str, given: Any) -> bool:
    """Returns True or False, also NumPy's, the argument ``name``."""
    if isinstance(given, bool) or type(given).__name__ in ("bool_", "bool"):
        return bool(given)
    raise ArgumentError(f"{name} is {given!r}, but it is True or False")


def text(name: str, given: Any) -> str:
    """Returns a text, the argument ``name``."""
    if isinstance(given, str):
        return given
    raise ArgumentError(f"{name} is {given!r}, but it is a text")


def shape_of(given: Any) -> tuple[int, ...]:
    """Returns a shape: whole numbers, or one."""
    sizes: tuple[Any, ...]
    try:
        sizes = (given,) if isinstance(given, SupportsIndex) else tuple(given)
        return tuple(whole("shape", size) for size in sizes)
    except (ArgumentError, TypeError):
        text = f"shape is {given!r}, but its sizes are whole numbers of at least 0"
        raise ArgumentError(text) from None
