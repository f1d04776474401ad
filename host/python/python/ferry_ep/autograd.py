"""Dispatch and combine of rows that stay as they came, with a backward pass. Importing this imports torch.

A dispatch with the same ids puts every row in the same place, so the backward pass is a round, too: that of
combine is a dispatch of the sums' gradients, and that of dispatch is a combine of the rows' gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .core.communicator import Communicator
from .core.errors import ArgumentError, OrderError, refuse
from .core.handles import Handle
from .core.outputs import DispatchOutput
from .core.scalars import shown

__all__ = ["ReceivedRows", "RowExchange"]

#: Layouts whose rows are the caller's, so that they are still there in the backward pass.
_LAYOUTS = ("strided", "compact")
#: Fields of two configurations that must be equal for a backward pass.
_SAME = ("experts", "top_k", "hidden", "max_tokens_per_rank", "format", "receive", "combine_weights")


@dataclass(eq=False, kw_only=True)
class ReceivedRows(DispatchOutput):
    """The outputs of :meth:`RowExchange.dispatch`: gradients flow through ``tokens`` and ``weights``. Rows
    without a token are zeros.
    """

    topk_ids: Any = None
    """Experts of this rank's tokens, as they were given."""
    link: Any = None
    """A tensor without elements that lets the backward pass of combine come before that of dispatch."""
    forward: Any = None
    """Stands for the round in its backward pass."""


class RowExchange(Handle):
    """Dispatch and combine of one communicator with a backward pass, of BF16 rows that stay as they came.

    The plan's ``receive`` is ``"strided"`` or ``"compact"``: rows of a view are gone by then, and by expert a
    combine has no weights to return. Calls are eager and on the current stream, not for ``torch.compile``.

    All ranks make the same calls, and the same backward passes in the same order, each through dispatch and
    combine of a round. A backward pass is a round of ``backward``, by default the same communicator, of which
    no round may be open then: a program that runs the backward pass of one batch between dispatch and combine
    of another gives it a second communicator. Otherwise it raises :class:`ferry_ep.OrderError`, and nothing
    was sent. A checkpoint holds both dispatch and combine, or neither: between them dispatch would be made
    again in an open round. Gradients travel as BF16, those of weights as float32. There is no second
    derivative.
    """

    _unpicklable = "an exchange belongs to its process, and cannot be pickled"

    def __init__(
        self,
        communicator: Communicator,
        *,
        backward: Communicator | None = None,
        capacity: int | str = "max",
    ) -> None:
        """Raises :class:`ferry_ep.ArgumentError` for a plan without a backward pass and for a ``backward``
        with another plan. ``capacity`` as in :meth:`ferry_ep.Communicator.outputs`. Not collective.
        """
        for name, handle in (("communicator", communicator), ("backward", backward)):
            if not isinstance(handle, Communicator) and (handle is not None or name == "communicator"):
                raise ArgumentError(f"{name} is {shown(handle)}, but it is a ferry_ep.Communicator")
        config = communicator.plan.config
        if config.receive not in _LAYOUTS:
            raise ArgumentError(
                f"receive is {config.receive}, but only rows of {' and '.join(_LAYOUTS)} have a backward pass"
            )
        if config.format != "bf16":
            raise ArgumentError(f"format is {config.format}, but only bf16 has a backward pass")
        self.communicator = communicator
        self.backward = communicator if backward is None else backward
        other = self.backward.plan.config
        for field in _SAME:
            given, wanted = getattr(other, field), getattr(config, field)
            if given != wanted:
                raise ArgumentError(f"{field} of backward is {given}, but the communicator's is {wanted}")
        places = [(each.rank, each.plan.ranks) for each in (self.backward, communicator)]
        if places[0] != places[1]:
            given, wanted = (f"rank {rank} of {ranks}" for rank, ranks in places)
            raise ArgumentError(f"backward is {given}, but the communicator is {wanted}")
        self.capacity = capacity
        #: The forward round whose backward pass has opened a round that is still open.
        self._open_for: object | None = None

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor | None = None) -> ReceivedRows:
        """Makes :meth:`ferry_ep.Communicator.dispatch`. Collective.

        ``x``: bfloat16 ``[tokens, hidden]``; ``topk_ids``: int32 or int64 ``[tokens, top_k]``;
        ``topk_weights``: float32 ``[tokens, top_k]``. Errors are those of that call, and
        :class:`ferry_ep.ArgumentError` if ``topk_weights`` require a gradient without
        ``Config.combine_weights``, by which it returns.
        """
        _require_tensors(
            x=x, topk_ids=topk_ids, **({} if topk_weights is None else {"topk_weights": topk_weights})
        )
        needs_weights = topk_weights is not None and topk_weights.requires_grad and torch.is_grad_enabled()
        if needs_weights and not self.communicator.plan.config.combine_weights:
            raise ArgumentError(
                "topk_weights requires a gradient, but combine_weights is false: gradients return by it"
            )
        forward = object()
        tokens, weights, link, *others = _Dispatch.apply(self, forward, x, topk_ids, topk_weights)
        named = dict(zip(_OTHERS, others, strict=True))
        return ReceivedRows(
            tokens=tokens,
            weights=weights,
            link=link,
            forward=forward,
            topk_ids=topk_ids,
            rows=len(tokens),
            **named,
        )

    def combine(self, expert_rows: Tensor, received: ReceivedRows, weights: Tensor | None = None) -> Any:
        """Makes :meth:`ferry_ep.Communicator.combine` of the round of ``received``. Collective.

        ``expert_rows``: bfloat16 ``[rows, hidden]``; ``weights``: float32 ``[rows, top_k]``, with
        ``Config.combine_weights`` alone, by default zeros then. Returns bfloat16 ``[tokens, hidden]``, and
        with ``weights`` also float32 ``[tokens, top_k]``. Errors are those of that call.
        """
        if not isinstance(received, ReceivedRows):
            raise ArgumentError(f"received is {shown(received)}, but dispatch returns it")
        _require_tensors(expert_rows=expert_rows)
        if weights is not None:
            _require_tensors(weights=weights)
        given = weights
        if given is None and self.communicator.plan.config.combine_weights:
            given = torch.zeros_like(received.weights, requires_grad=False)
        apply = _Combine.apply
        sums, returned = apply(self, received.forward, received.topk_ids, received.link, expert_rows, given)
        return sums if weights is None else (sums, returned)

    def abandon(self) -> None:
        """Gives up the round that a backward pass left open, if one did: by an exception, or because only
        gradients were asked for that do not reach dispatch, as ``torch.autograd.grad`` of experts' weights.
        Collective: all ranks call it after the same pass. Enqueues only.
        """
        if self._open_for is not None:
            self.backward.give_up()
            self._open_for = None

    def _send(
        self, communicator: Communicator, x: Tensor, topk_ids: Tensor, weights: Tensor | None
    ) -> DispatchOutput:
        """Makes a dispatch whose rows without a token are zeros."""
        wide = topk_ids.dtype == torch.int64
        out = communicator.outputs(x, self.capacity, id_type="i64" if wide else "i32")
        out.tokens.zero_()
        return communicator.dispatch(x, topk_ids, weights, out=out)

    def _open(
        self, forward: object, gradients: Tensor, topk_ids: Tensor, weights: Tensor | None
    ) -> DispatchOutput:
        """Begins the round of the backward pass of ``forward``."""
        if self.backward.round != "idle":
            raise OrderError(
                "a backward pass is a round, and one is open ("
                + self.backward.round
                + "): end it before, give RowExchange another communicator as backward, or abandon() what a "
                "backward pass left open"
            )
        out = self._send(self.backward, gradients, topk_ids, weights)
        self._open_for = forward
        return out

    def _return(self, rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Ends the round of a backward pass."""
        if self.backward.plan.config.combine_weights:
            of_x, of_weights = self.backward.combine(rows, received_weights=weights)
        else:
            of_x, of_weights = self.backward.combine(rows), None
        self._open_for = None
        return of_x, of_weights


def _require_tensors(**given: Any) -> None:
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise refuse(name, "a tensor of torch", type(tensor).__name__)


#: Outputs that have no gradient.
_OTHERS = ("ids", "src_info", "source_counts", "expert_counts")


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: RowExchange,
        forward: object,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None,
    ) -> Any:
        if exchange._open_for is not None and exchange.backward is exchange.communicator:
            raise OrderError(
                "a dispatch in a backward pass whose round is open: a checkpoint that ends between dispatch "
                "and combine makes it again. Let a checkpoint hold both, or neither; abandon() ends the open "
                "round"
            )
        out = exchange._send(exchange.communicator, x, topk_ids, topk_weights)
        ctx.exchange, ctx.round, ctx.tokens = exchange, forward, len(x)
        ctx.save_for_backward(topk_ids)
        _, _, needs_x, _, needs_weights = ctx.needs_input_grad
        fixed = [out.tokens] * (not needs_x) + [out.weights] * (not needs_weights)
        ctx.mark_non_differentiable(*fixed, *(getattr(out, name) for name in _OTHERS))
        return out.tokens, out.weights, x.new_empty(0), *(getattr(out, name) for name in _OTHERS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, weights: Tensor, *others: Any) -> Any:
        exchange = ctx.exchange
        (topk_ids,) = ctx.saved_tensors
        if exchange._open_for is not ctx.round:
            # No gradient came through combine, which would have opened the round.
            nothing = rows.new_zeros(ctx.tokens, rows.shape[1])
            exchange._open(ctx.round, nothing, topk_ids, None)
        of_x, of_weights = exchange._return(rows.contiguous(), weights.contiguous())
        return None, None, of_x, None, of_weights if ctx.needs_input_grad[4] else None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: RowExchange,
        forward: object,
        topk_ids: Tensor,
        link: Tensor,
        expert_rows: Tensor,
        weights: Tensor | None,
    ) -> Any:
        ctx.exchange, ctx.round = exchange, forward
        ctx.save_for_backward(topk_ids)
        # Else the backward pass of dispatch does not come, which ends the round.
        ctx.is_followed = ctx.needs_input_grad[3]
        if weights is None:
            return exchange.communicator.combine(expert_rows), None
        return exchange.communicator.combine(expert_rows, received_weights=weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sums: Tensor, returned: Tensor | None) -> Any:
        exchange = ctx.exchange
        (topk_ids,) = ctx.saved_tensors
        weights = None if returned is None else returned.contiguous()
        out = exchange._open(ctx.round, sums.contiguous(), topk_ids, weights)
        if not ctx.is_followed:
            exchange._return(torch.zeros_like(out.tokens), torch.zeros_like(out.weights))
        of_weights = None if returned is None else out.weights
        return None, None, None, sums.new_empty(0), out.tokens, of_weights
