"""CUDA graphs with calls of a communicator: whether they have ended, and what is freed after them."""

from __future__ import annotations

import atexit
import ctypes
import logging
import weakref
from contextlib import suppress
from typing import Any, Protocol

import torch

from ..core.communicator import Communicator
from ..core.errors import FerryError
from ..core.rank import end_of

__all__ = ["Graphs", "Held", "free_after", "note_freed"]

_log = logging.getLogger("ferry_ep.deep_ep")


class Held(Protocol):
    """A communicator of a buffer."""

    communicator: Communicator
    graphs: Graphs


class _Token:
    """What graphs retain: it ends with the last of them, and keeps a communicator until then."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator


class Graphs:
    """Graphs with calls of one communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        #: Whether there were any; then also whether torch tells when they end.
        self.are_any, self.are_told = False, True
        self._token: weakref.ref[_Token] | None = None

    @property
    def token(self) -> _Token | None:
        """What the graphs retain, if one of them has not ended."""
        return None if self._token is None else self._token()

    @property
    def have_ended(self) -> bool:
        """Whether all have, as far as torch tells."""
        return not self.are_any or (self.are_told and self.token is None)

    def note(self) -> None:
        """Notes that the graph under capture has a call."""
        self.are_any = True
        of_graph = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)
        graph: Any = None if of_graph is None else of_graph()
        if graph is None or not hasattr(graph, "retain_object"):
            self.are_told = False
            return
        token = self.token
        if token is None:
            token = _Token(self._communicator)
            self._token = weakref.ref(token)
        # Replays may be at work when the last one ends.
        graph.retain_object(token, synchronize_before_release=True)

    def note_if_captured(self) -> None:
        """As :meth:`note`, if torch's current stream is captured."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.note()

    def promise_none(self) -> None:
        """Takes the promise that all have ended."""
        self.are_any, self.are_told, self._token = False, True, None
        self._communicator.assume_no_graphs()


#: Communicators of buffers that were destroyed before their graphs.
_left: set[Communicator] = set()


def free_after(held: Held, is_local: bool) -> None:
    """Keeps a communicator of a destroyed buffer until its graphs have ended. Then, if ``is_local``, it is
    freed without waiting for other processes.
    """
    _left.add(held.communicator)
    token = held.graphs.token
    if is_local and held.graphs.are_told and token is not None:
        weakref.finalize(token, _free, held.communicator).atexit = False


def note_freed(communicator: Communicator) -> None:
    """Notes that a communicator was closed after all."""
    _left.discard(communicator)


def _free(communicator: Communicator) -> None:
    """Frees a communicator whose graphs have ended, of a group whose ranks are all in this process."""
    # Nobody is there to whom it could be raised, as in a fork.
    with suppress(FerryError):
        if not communicator.closed:
            communicator.assume_no_graphs()
            end_of(communicator).native.drop()
    _left.discard(communicator)


@atexit.register
def _say_what_is_left() -> None:
    open_ones = sum(not each.closed for each in _left)
    if not open_ones:
        return
    _log.warning(
        "ferry_ep.deep_ep: %d communicators of buffers that were destroyed before their CUDA graphs were not "
        "freed; they end with the process",
        open_ones,
    )
    # Graphs may still be there: so nothing of these is dropped on the way out.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_left))
