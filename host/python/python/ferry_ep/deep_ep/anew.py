"""Calls on a GPU whose outputs are torch's tensors as callers see them, each made anew. In a list of them the
last has all outputs that callers do not see.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._ferry import Places
from ..tensors import reader_of_torch

if TYPE_CHECKING:
    from ..rank import Rank

__all__ = ["Allocate", "CombineInputs", "DispatchInputs", "Memory"]
__all__ += ["combine", "dispatch", "dispatch_wait", "is_direct"]

#: Inputs of a dispatch: ``x``, ``topk_ids``, ``topk_weights``, and the scales of ``x``.
DispatchInputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
#: Inputs of a combine.
CombineInputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]

#: Allocates a tensor, not cleared, of these sizes, strides and type.
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]

#: Reads tensors natively.
_reader = reader_of_torch()


@cache
def _quick(index: int) -> Allocate | None:
    """Returns the function that compiled code of torch allocates with, on the current GPU: it takes half
    of the time of ``torch.empty``. ``None`` in a torch that has another one, or none. Tried on GPU ``index``.
    """
    found: Any = torch._C
    for name in ("_dynamo", "guards", "_empty_strided_cuda"):
        found = getattr(found, name, None)
    if found is None:
        return None
    with torch.cuda.device(index), suppress(TypeError):
        made = found((2, 3), (3, 1), torch.int64)
        if made.is_cuda and made.shape == (2, 3) and made.is_contiguous() and made.dtype == torch.int64:
            allocate: Allocate = found
            return allocate
    return None


class Memory:
    """Allocates tensors on the device of a communicator."""

    def __init__(self, rank: Rank) -> None:
        device = rank.device
        self.device = torch.device(device if device.startswith("cuda:") else "cpu")
        self._index = self.device.index
        # It keeps the interpreter's lock, also where it waits for the GPU to free memory, and so for a kernel
        # that waits for another rank, whose thread needs that lock.
        has_lock = self._index is not None and len(rank._peers) == 1
        self._quick = _quick(self._index) if has_lock else None

    def now(self) -> Allocate:
        """Returns the function that allocates as long as the current GPU is the same."""
        if (
            self._quick is not None
            and torch._C._cuda_getDevice() == self._index
            # Then tensors are filled.
            and not torch._C._get_deterministic_algorithms()
        ):
            return self._quick
        return self._allocate

    def _allocate(self, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=self.device)


def is_direct(rank: Rank) -> bool:
    """Returns whether these calls can be used: on a GPU, in a torch with DLPack's exchange API."""
    return rank.device.startswith("cuda:") and not rank._copies and _reader is not None


def dispatch(
    rank: Rank, inputs: DispatchInputs, made: list[Tensor], places: Places, *, is_half: bool = False
) -> bool:
    """Makes :meth:`ferry_ep.Communicator.dispatch`, or its first half, in torch's current stream. Inputs need
    no description (:func:`.checks.signature`). ``made``: the outputs at ``places``, of which a first half
    takes the kept ids alone. Returns whether the stream is captured.
    """
    assert _reader is not None
    return rank._native._dispatch_tensors(_reader, inputs, made, places, is_half)


def dispatch_wait(rank: Rank, made: list[Tensor], places: Places) -> None:
    """Makes :meth:`ferry_ep.Communicator.dispatch_wait`."""
    assert _reader is not None
    rank._native._dispatch_wait_tensors(_reader, made, places)


def combine(
    rank: Rank, answers: CombineInputs, sums: tuple[Tensor, Tensor | None], *, is_half: bool = False
) -> bool:
    """Makes :meth:`ferry_ep.Communicator.combine`, or its first half, in torch's current stream. ``answers``:
    ``expert_rows``, ``topk_weights``, ``received_weights``, and two of ``initial``, which need no
    description; blocks of rows may have a dimension of their own. ``sums``: ``out`` and ``weights``.
    Returns whether the stream is captured.
    """
    assert _reader is not None
    return rank._native._combine_tensors(_reader, answers, sums, is_half)
