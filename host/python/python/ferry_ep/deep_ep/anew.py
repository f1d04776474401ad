"""Calls on a GPU whose outputs are torch's tensors as callers see them, each made anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._ferry import Places
from ..outputs import TensorLayout
from ..tensors import reader_of_torch

if TYPE_CHECKING:
    from ..rank import Rank

__all__ = ["Anew", "Model", "combine", "dispatch", "dispatch_wait", "is_direct"]


#: Inputs of a combine.
CombineInputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]

#: Reads tensors natively.
_reader = reader_of_torch()


class Model(NamedTuple):
    """A tensor that each dispatch makes, and the outputs in it, one behind the other."""

    tensor: Tensor | None
    """One of its type, shape and strides, which loses its memory; ``None`` for int64 of one dimension."""
    names: tuple[str, ...]
    """Fields of :class:`ferry_ep.DispatchOutput`."""
    is_kept: bool = False
    """Whether all dispatches share it; those come last."""


class Anew:
    """Tensors of dispatches on a GPU, and where the outputs are in them."""

    def __init__(self, layouts: list[TensorLayout], models: list[Model], device: torch.device) -> None:
        """Takes the outputs, ``layouts``, and tensors that have all of them."""
        named = {of.name: of for of in layouts}
        places: dict[str, tuple[int, int, str, list[int]]] = {}
        #: Tensors without memory: ``torch.empty_like`` of them takes half the time of ``torch.empty``.
        self.models: list[Tensor] = []
        #: Tensors of all dispatches, behind those.
        self.kept: list[Tensor] = []
        for number, (tensor, names, is_kept) in enumerate(models):
            end = 0
            for name in names:
                of = named[name]
                begin = -(-end // of.align) * of.align
                places[name] = number, begin, of.data_type, of.shape
                end = begin + of.nbytes
            if tensor is None:
                tensor = torch.empty(-(-end // 8), dtype=torch.int64, device=device)
            if is_kept:
                self.kept.append(tensor)
            else:
                tensor.untyped_storage().resize_(0)
                self.models.append(tensor)
        self.places = Places([places[of.name] for of in layouts])


def is_direct(rank: Rank, device: torch.device) -> bool:
    """Returns whether these calls can be used: on a GPU, in a torch with DLPack's exchange API."""
    return device.type == "cuda" and not rank._copies and _reader is not None


def dispatch(
    rank: Rank, x: Any, topk_ids: Tensor, topk_weights: Tensor | None, anew: Anew, *, is_half: bool = False
) -> list[Tensor]:
    """Makes :meth:`ferry_ep.Communicator.dispatch`, or its first half, in torch's current stream, and returns
    its tensors. Inputs need no description (:func:`.checks.signature`).
    """
    assert _reader is not None
    tokens, scales = x if isinstance(x, tuple) else (x, None)
    made = [*map(torch.empty_like, anew.models), *anew.kept]
    inputs = (tokens, topk_ids, topk_weights, scales)
    rank._native._dispatch_tensors(_reader, inputs, None if is_half else made, anew.places)
    return made


def dispatch_wait(rank: Rank, anew: Anew, made: list[Tensor]) -> None:
    """Makes :meth:`ferry_ep.Communicator.dispatch_wait` of a first half that returned ``made``."""
    assert _reader is not None
    rank._native._dispatch_wait_tensors(_reader, made, anew.places)


def combine(
    rank: Rank, answers: CombineInputs, sums: tuple[Tensor, Tensor | None], *, is_half: bool = False
) -> None:
    """Makes :meth:`ferry_ep.Communicator.combine`, or its first half, in torch's current stream. ``answers``:
    ``expert_rows``, ``topk_weights``, ``received_weights``, and two of ``initial``, which need no
    description; blocks of rows may have a dimension of their own. ``sums``: ``out`` and ``weights``.
    """
    assert _reader is not None
    rank._native._combine_tensors(_reader, answers, sums, is_half)
