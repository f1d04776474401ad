"""Numbers, flags and names of calls."""

from __future__ import annotations

import operator
import sys
from typing import Any, SupportsIndex

from ._ferry import require_storage
from .errors import ArgumentError

__all__ = ["flag", "number", "shape_of", "shown", "text", "whole"]

#: Most of a handle or an address.
_MOST = 2**64 - 1
#: Types whose ``repr`` is short, and reads no memory of other libraries.
_PLAIN = (bool, int, float, str, bytes, type, type(None))


def shown(given: Any) -> str:
    """Returns the text of a wrong argument: its ``repr`` if that is safe, or its type."""
    if isinstance(given, _PLAIN):
        return repr(given)
    if isinstance(given, (tuple, list)) and all(isinstance(each, _PLAIN) for each in given):
        return repr(given)
    return f"of type {type(given).__name__}"


def whole(name: str, given: Any, *, least: int = 0, most: int = _MOST) -> int:
    """Returns a whole number, the argument ``name``. True and False are none."""
    # Those of each call of an engine come here.
    if type(given) is int and least <= given <= most:
        return given
    number = least - 1
    if not isinstance(given, bool):
        try:
            number = operator.index(_readable(name, given))
        except (TypeError, ValueError, RuntimeError):
            # Arrays of several elements have an index that they refuse.
            pass
    if least <= number <= most:
        return number
    raise ArgumentError(f"{name} is {shown(given)}, but it is a whole number of {least} to {most}")


def number(name: str, given: Any) -> float:
    """Returns a number, the argument ``name``. True and False are none, nor are NumPy's."""
    if not isinstance(given, (bool, str, bytes)) and type(given).__name__ not in ("bool_", "bool"):
        try:
            return float(_readable(name, given))
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise ArgumentError(f"{name} is {shown(given)}, but it is a number")


def flag(name: str, given: Any) -> bool:
    """Returns True or False, also NumPy's, the argument ``name``."""
    if isinstance(given, bool) or type(given).__name__ in ("bool_", "bool"):
        return bool(given)
    raise ArgumentError(f"{name} is {shown(given)}, but it is True or False")


def text(name: str, given: Any) -> str:
    """Returns a text, the argument ``name``."""
    if isinstance(given, str):
        return given
    raise ArgumentError(f"{name} is {shown(given)}, but it is a text")


def shape_of(given: Any) -> tuple[int, ...]:
    """Returns a shape: whole numbers, or one."""
    try:
        sizes = (given,) if isinstance(given, SupportsIndex) else tuple(given)
        return tuple(whole("shape", size) for size in sizes)
    except (ArgumentError, TypeError):
        problem = f"shape is {shown(given)}, but its sizes are whole numbers of at least 0"
        raise ArgumentError(problem) from None


def _readable(name: str, given: Any) -> Any:
    """Returns what may be a tensor of torch, whose memory is there."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        require_storage(name, given)
    return given
