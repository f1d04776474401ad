"""Handles of dispatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .rounds import Routing
from .sources import Sources

__all__ = ["Handle"]

#: Places in a handle, as in DeepEP's.
_PREFIX, _SOURCE_TOKENS, _IS_IN_RANK, _LENGTH = 0, 3, 4, 6


class Handle(tuple[Any, ...]):
    """What a dispatch returns for its combine, and for dispatches to the same ranks: a tuple of six.

    0: int32 ``[ranks, ranks]``, in the column of this rank the end of each source's rows, -1 in all others.
    3: int32 ``[rows]``, the token of each row on its source, -1 in rows without a token.
    4: bool ``[tokens, ranks]``, the ``is_token_in_rank`` of the dispatch. 5: the routing, the buffer's own.
    1, 2: ``None``, as they are DeepEP's alone. The first and the fourth are made when they are read, on the
    current stream, as engines read neither.
    """

    routing: Routing
    """What the buffer keeps of the dispatch."""
    _rank: int
    _sources: Sources

    def __new__(cls, rank: int, sources: Sources, is_token_in_rank: Tensor, routing: Routing) -> Handle:
        """Made by a dispatch alone."""
        made = super().__new__(cls, (None, None, None, None, is_token_in_rank, routing))
        made.routing, made._rank, made._sources = routing, rank, sources
        return made

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            return tuple(self)[index]
        at = index + _LENGTH if index < 0 else index
        if at == _PREFIX:
            return self._prefix()
        if at == _SOURCE_TOKENS:
            return self._sources.src_info(self.routing.rows)[:, 1]
        return tuple.__getitem__(self, index)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(_LENGTH))

    def __repr__(self) -> str:
        routing = self.routing
        return f"<ferry_ep.deep_ep handle of {len(routing.ids)} tokens, {routing.rows} rows>"

    def _prefix(self) -> Tensor:
        ranks = self[_IS_IN_RANK].shape[1]
        counts = self._sources.rest(self.routing.rows).view(torch.int32)[:ranks]
        ends = torch.full((ranks, ranks), -1, dtype=torch.int32, device=counts.device)
        ends[:, self._rank] = torch.cumsum(counts, 0)
        return ends
