"""How the programs of the package end: with a sentence, where the user can mend what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import FerryError

__all__ = ["sentences"]


@contextmanager
def sentences(program: str) -> Iterator[None]:
    """Ends ``program`` with a sentence for an exception of Ferry, and without NumPy."""
    try:
        yield
    except FerryError as error:
        raise SystemExit(f"{program}: {error}") from None
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise SystemExit(f"{program} needs NumPy: pip install numpy") from None
