"""Calls in torch's current stream whose arguments are all its tensors on the rank's GPU, read without Python.

Each returns ``None`` for other arguments, and has enqueued nothing then: the caller describes them.
"""

from __future__ import annotations

import sys
from typing import Any

from ._ferry import Reader
from .calls import Answers, codes_and_scales, received, result
from .end import End
from .outputs import DispatchOutput
from .tensors import reader_of, reader_of_torch

__all__ = ["combine", "dispatch", "dispatch_async", "dispatch_wait"]


def dispatch(
    end: End, x: Any, topk_ids: Any, topk_weights: Any, out: DispatchOutput | None, capacity: int | str
) -> DispatchOutput | None:
    """Makes :meth:`ferry_ep.Communicator.dispatch`, and returns the outputs."""
    tokens, scales = codes_and_scales(x)
    reader = _sending(end, tokens, scales, topk_ids, topk_weights)
    if reader is None:
        return None
    if out is None:
        out = received(end, tokens, capacity, topk_ids.dtype == sys.modules["torch"].int64, 0)
    tensors = _tensors(end, out)
    if tensors is None:
        return None
    end.native.dispatch_tensors(reader, (tokens, topk_ids, topk_weights, scales), tensors, None, False)
    return out


def dispatch_async(end: End, x: Any, topk_ids: Any, topk_weights: Any) -> bool | None:
    """Makes :meth:`ferry_ep.Communicator.dispatch_async`."""
    tokens, scales = codes_and_scales(x)
    reader = _sending(end, tokens, scales, topk_ids, topk_weights)
    if reader is None:
        return None
    inputs = (tokens, topk_ids, topk_weights, scales)
    end.native.dispatch_tensors(reader, inputs, [], None, True)
    return True


def dispatch_wait(end: End, out: DispatchOutput) -> DispatchOutput | None:
    """Makes :meth:`ferry_ep.Communicator.dispatch_wait`, and returns the outputs."""
    tensors = None if end.copies else _tensors(end, out)
    reader = None if tensors is None else reader_of_torch()
    if tensors is None or reader is None:
        return None
    end.native.dispatch_wait_tensors(reader, tensors, None)
    return out


def combine(end: End, call: Answers, *, is_half: bool) -> Any:
    """Makes :meth:`ferry_ep.Communicator.combine`, or its first half, and returns its result."""
    rows, initial, received_weights = call.expert_rows, call.initial, call.received_weights
    if not (call.row_weights is call.row_scales is call.bias is call.bias2 is call.residual is None):
        return None
    if end.copies:
        return None
    first, second = (*initial, None, None)[:2] if isinstance(initial, (tuple, list)) else (initial, None)
    given = (rows, call.topk_weights, received_weights, first, second)
    reader = reader_of((*given, call.out, call.weights))
    if reader is None or (isinstance(initial, (tuple, list)) and len(initial) > 2):
        return None
    out, weights = result(end, call, 0)
    end.native.combine_tensors(reader, given, (out, weights), is_half)
    return out if weights is None else (out, weights)


def _sending(end: End, tokens: Any, scales: Any, topk_ids: Any, topk_weights: Any) -> Reader | None:
    """Returns the reader of a dispatch's inputs."""
    if end.copies or tokens is None or topk_ids is None:
        return None
    if scales is not None and end.plan.config.format != "fp8":
        return None
    return reader_of((tokens, scales, topk_ids, topk_weights))


def _tensors(end: End, out: DispatchOutput) -> list[Any] | None:
    """Returns the tensors of outputs in the order of the plan's, unless there are others, too few, or of
    other sizes than the outputs say.
    """
    if not isinstance(out, DispatchOutput):
        return None
    take, has = end.fields()
    tensors = take(out)
    if reader_of(tensors, has) is None:
        return None
    has_blocks = out.scale_offsets is not None
    if out.src_info.shape[0] != out.rows or (has_blocks and out.scales.shape[0] != out.scale_blocks):
        return None
    return [tensor for tensor in tensors if tensor is not None]
