"""Calls on a GPU whose outputs are torch's tensors as callers see them, each made anew. In a list of them the
last has all outputs that callers do not see.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..core.communicator import Communicator
from ..core.rank import end_of
from ..core.tensors import reader_of_torch

__all__ = ["Allocate", "Direct"]

#: Allocates a tensor, not cleared, of these sizes, strides and type.
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


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


class Direct:
    """Calls of a communicator in torch's current stream, whose tensors need no description
    (:func:`.checks.signature`), and memory on its device.
    """

    def __init__(self, communicator: Communicator) -> None:
        end, reader = end_of(communicator), reader_of_torch()
        native, device = end.native, end.native.device
        self.device = torch.device(device if device.startswith("cuda:") else "cpu")
        self._index = self.device.index
        # It keeps the interpreter's lock, also where it waits for the GPU to free memory, and so for a kernel
        # that waits for another rank, whose thread needs that lock.
        has_lock = self._index is not None and len(end.peers) == 1
        self._quick = _quick(self._index) if has_lock else None
        #: Whether there are these calls: on a GPU, in a torch with DLPack's exchange API.
        self.is_there = self._index is not None and not end.copies and reader is not None
        if self.is_there:
            assert reader is not None
            #: Takes the name of a call; its inputs in the order of ``arguments_of``, blocks of rows as they
            #: are; and its outputs, those of a dispatch with their places, of which a first half takes the
            #: kept ids alone. Returns whether the stream is captured.
            self.enqueue = partial(native.enqueue_tensors, reader)

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
