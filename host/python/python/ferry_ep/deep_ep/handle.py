"""Handles of dispatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .sources import Sources

__all__ = ["Handle", "LaneKey", "Routing"]

#: Experts, top-k slots, hidden size and format of a lane's plan.
LaneKey = tuple[int, int, int, str]

#: Places in a handle, as in DeepEP's.
_PREFIX, _SOURCE_TOKENS, _IS_IN_RANK, _ROUTING, _LENGTH = 0, 3, 4, 5, 6


@dataclass(eq=False, slots=True)
class Routing:
    """What a handle keeps of its dispatch: enough to make the round once more."""

    key: LaneKey
    """Key of the lane of the dispatch."""
    memory: tuple[Tensor, ...]
    """Where the rows came from, as in :class:`.sources.Sources`, and the ids: ``[tokens, top_k]``, or packed,
    int32 words of the last tensor, which is int64 of one dimension.
    """
    kept_at: int
    """Number of words before the packed ids."""
    rows: int
    """Rows of the outputs."""
    topk: tuple[int, int]
    """Tokens and top-k slots."""
    has_topk: bool
    """Whether the caller gave ids."""
    is_plain: bool
    """Whether the tensors of its dispatch needed no description."""
    made_on: int
    """Handle of the stream of the dispatch, on which its tensors were made; 0 on the CPU."""
    rank: int
    """Rank that made it."""
    ranks: int
    """Ranks of its group."""
    weights: Tensor
    """f32 ``[rows, top_k]``, any values: what a combine returns if the caller asks for no weights."""
    _ids: Tensor | None = None
    """The ids, once they were asked for."""

    @property
    def experts(self) -> int:
        """Experts of the plan: of all ranks, or one for each rank if the caller gave no ids."""
        return self.key[0]

    @property
    def format(self) -> str:
        """Format of the dispatch's rows."""
        return self.key[3]

    @property
    def ids(self) -> Tensor:
        """``[tokens, top_k]``, a copy of the buffer's: the caller may write its own."""
        if self._ids is None:
            ids, (tokens, top_k) = self.memory[-1], self.topk
            if ids.dim() == 1:
                ids = ids.view(torch.int32).as_strided((tokens, top_k), (top_k, 1), self.kept_at)
            self._ids = ids
        return self._ids

    @property
    def sources(self) -> Sources:
        """Where the rows came from."""
        first, *others = self.memory
        return Sources(first, others[0] if len(others) == 2 else None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that later calls read."""
        return self.weights, *self.memory


class Handle(tuple[Any, ...]):
    """What a dispatch returns for its combine, and for dispatches to the same ranks: a tuple of six.

    0: int32 ``[ranks, ranks]``, in the column of this rank the end of each source's rows, -1 in all others.
    3: int32 ``[rows]``, the token of each row on its source, -1 in rows without a token.
    4: bool ``[tokens, ranks]``, the ``is_token_in_rank`` of the dispatch. 5: the routing, the buffer's own.
    1, 2: ``None``, as they are DeepEP's alone. The first and the fourth are made when they are read, on the
    current stream, as engines read neither.
    """

    @classmethod
    def of(cls, is_token_in_rank: Tensor, routing: Routing) -> Handle:
        """Made by a dispatch alone."""
        return tuple.__new__(cls, (None, None, None, None, is_token_in_rank, routing))

    @property
    def routing(self) -> Routing:
        """What the buffer keeps of the dispatch."""
        found: Routing = tuple.__getitem__(self, _ROUTING)
        return found

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            return tuple(self)[index]
        at = index + _LENGTH if index < 0 else index
        if at == _PREFIX:
            return self._prefix()
        if at == _SOURCE_TOKENS:
            return self.routing.sources.src_info(self.routing.rows)[:, 1]
        return tuple.__getitem__(self, index)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(_LENGTH))

    def __repr__(self) -> str:
        routing = self.routing
        return f"<ferry_ep.deep_ep handle of {routing.topk[0]} tokens, {routing.rows} rows>"

    def _prefix(self) -> Tensor:
        routing, ranks = self.routing, self[_IS_IN_RANK].shape[1]
        counts = routing.sources.numbers(routing.rows, -(-ranks // 2)).view(torch.int32)[:ranks]
        ends = torch.full((ranks, ranks), -1, dtype=torch.int32, device=counts.device)
        ends[:, routing.rank] = torch.cumsum(counts, 0)
        return ends
