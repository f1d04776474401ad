"""Dispatch and combine as operators of torch, and an MoE layer on them.

The operators are ``torch.ops.ferry.dispatch`` and ``torch.ops.ferry.combine``. They write tensors that the
caller gives, say so in their schemas, and have fake implementations: ``torch.compile(fullgraph=True)`` takes
them. :class:`Exchange` allocates the tensors and calls them. Importing this module imports torch.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor, nn

from .core._ferry import capacity_of
from .core.communicator import Communicator
from .core.config import Config
from .core.errors import ArgumentError, ClosedError, refuse
from .core.handles import Handle
from .core.outputs import DispatchOutput
from .core.rank import end_of
from .core.scalars import shown, whole
from .core.tensors import TORCH, reader_of_torch

__all__ = ["Exchange", "Experts", "MoE", "register"]

#: Communicators by their handles, the numbers that operators take.
_communicators: dict[int, weakref.ref[Communicator]] = {}
_handles: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)
_reader = reader_of_torch()


def register(communicator: Communicator) -> int:
    """Returns the handle of a communicator for the operators, the same in every call.

    The handle does not keep the communicator alive; an :class:`Exchange` does.
    """
    handle = _handles.get(communicator)
    if handle is None:
        handle = _handles[communicator] = next(_numbers)
        _communicators[handle] = weakref.ref(communicator, lambda _: _communicators.pop(handle))
    return handle


def _communicator(handle: int) -> Communicator:
    reference = _communicators.get(handle)
    found = None if reference is None else reference()
    if found is None:
        raise ClosedError(f"communicator is {handle}, but there is none with this handle any more")
    return found


_library = torch.library.Library("ferry", "DEF")
_library.define(
    "dispatch(int communicator, Tensor(a!) state, Tensor x, Tensor topk_ids, Tensor? topk_weights, "
    "Tensor(b!)[] outputs) -> ()"
)
_library.define(
    "combine(int communicator, Tensor(a!) state, Tensor expert_rows, Tensor? topk_weights, "
    "Tensor(b!) combined) -> ()"
)
_library.define("grouped_mm(Tensor rows, Tensor weights, Tensor ends) -> Tensor")


def _dispatch(
    handle: int,
    state: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    outputs: list[Tensor],
) -> None:
    communicator = _communicator(handle)
    end = end_of(communicator)
    if _reader is not None and not end.copies:
        inputs = (x, topk_ids, topk_weights)
        is_captured = end.native.enqueue_tensors(_reader, "dispatch", inputs, outputs)
    else:
        names = end.output_names()
        if len(names) != len(outputs):
            raise ArgumentError(f"{len(outputs)} outputs were given, and there are {len(names)}")
        named = dict(zip(names, outputs, strict=True))
        blocks = named["scales"].shape[0] if "scale_offsets" in named else 0
        out = DispatchOutput(**named, rows=named["src_info"].shape[0], scale_blocks=blocks)
        communicator.dispatch(x, topk_ids, topk_weights, out=out)
        is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured:
        _retain(communicator)


def _combine(
    handle: int, state: Tensor, expert_rows: Tensor, topk_weights: Tensor | None, combined: Tensor
) -> None:
    communicator = _communicator(handle)
    end = end_of(communicator)
    if _reader is not None and not end.copies:
        answers = (expert_rows, topk_weights)
        is_captured = end.native.enqueue_tensors(_reader, "combine", answers, (combined,))
    else:
        communicator.combine(expert_rows, topk_weights=topk_weights, out=combined)
        is_captured = expert_rows.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured:
        _retain(communicator)


def _grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the rows of each group by its matrix; rows behind the last group are zero."""
    product = rows.new_zeros(rows.shape[0], weights.shape[2])
    begin = 0
    for matrix, end in zip(weights, ends.tolist(), strict=True):
        product[begin:end] = rows[begin:end] @ matrix
        begin = end
    return product


def _retain(communicator: Communicator) -> None:
    """Lets the graph that is captured keep the communicator alive, if this torch can."""
    of_graph = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)
    graph = None if of_graph is None else of_graph()
    if graph is not None and hasattr(graph, "retain_object"):
        graph.retain_object(communicator)


_library.impl("dispatch", _dispatch, "CompositeExplicitAutograd")
_library.impl("combine", _combine, "CompositeExplicitAutograd")
_library.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")


@torch.library.register_fake("ferry::dispatch", lib=_library)
def _(
    handle: int,
    state: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    outputs: list[Tensor],
) -> None:
    return None


@torch.library.register_fake("ferry::combine", lib=_library)
def _(handle: int, state: Tensor, expert_rows: Tensor, topk_weights: Tensor | None, combined: Tensor) -> None:
    return None


@torch.library.register_fake("ferry::grouped_mm", lib=_library)
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


_dispatch_operator = torch.ops.ferry.dispatch.default
_combine_operator = torch.ops.ferry.combine.default


class Exchange(Handle):
    """Dispatch and combine of one communicator with torch's tensors, in eager mode, in graphs, and compiled.

    Outputs have static shapes: those of ``capacity`` (:meth:`ferry_ep.Communicator.outputs`). Calls are made
    on the current stream. On a GPU they only enqueue; with a simulated group tensors are on the CPU, and a
    call waits for its peers.

    Rows of a view (``Config.receive``) stay in the window: :meth:`ferry_ep.Communicator.view` of
    ``communicator`` has them, outside of what is compiled.

    There is no backward pass: tensors that require a gradient are refused while gradients are recorded.
    """

    _unpicklable = "an exchange belongs to its process, and cannot be pickled"

    def __init__(
        self,
        communicator: Communicator,
        *,
        capacity: int | str = "max",
        device: torch.device | str | None = None,
    ) -> None:
        """Raises :class:`ferry_ep.CapacityError`, and :class:`ferry_ep.ArgumentError` if the plan has
        ``combine_weights``. ``device`` is by default the communicator's.
        """
        if not isinstance(communicator, Communicator):
            raise ArgumentError(f"communicator is {shown(communicator)}, but it is a ferry_ep.Communicator")
        place = communicator.device if device is None else device
        self.device = torch.device("cpu" if end_of(communicator).copies else place)
        self.communicator = communicator
        self.handle = register(communicator)
        config = communicator.plan.config
        if config.combine_weights:
            raise ArgumentError("combine_weights is true, but the operators return no weights")
        self.hidden, self.top_k = config.hidden, config.top_k
        self.is_exact = config.combine == "exact"
        self._rows, self._blocks = capacity_of(communicator.plan, capacity)
        #: Name, type and shape of each output; received ids have the type of those that are sent.
        self._layout: list[tuple[str, torch.dtype, list[int]]] = []
        for name, data_type, shape, _, _ in communicator.plan.output_layout(capacity):
            if data_type == "e2m1":
                shape = [*shape[:-1], shape[-1] // 2]
            self._layout.append((name, getattr(torch, TORCH[data_type]), shape))
        #: Written by both operators, so that they stay in order, and are not dropped as without effect.
        self._state = torch.empty(0, device=self.device)
        self.device = self._state.device

    def dispatch(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        out: DispatchOutput | None = None,
    ) -> DispatchOutput:
        """Makes :meth:`ferry_ep.Communicator.dispatch` on the current stream. Collective.

        ``x``: bfloat16 ``[tokens, hidden]``; ``topk_ids``: int32 or int64 ``[tokens, top_k]``;
        ``topk_weights``: float32 ``[tokens, top_k]``. ``out``: outputs of an earlier dispatch, which this one
        overwrites, so that it allocates nothing. Errors are those of that call.
        """
        _require(x=x, topk_ids=topk_ids, topk_weights=topk_weights)
        if out is None:
            named = {
                name: torch.empty(shape, dtype=topk_ids.dtype if name == "ids" else dtype, device=self.device)
                for name, dtype, shape in self._layout
            }
            out = DispatchOutput(**named, rows=self._rows, scale_blocks=self._blocks)
        elif not isinstance(out, DispatchOutput):
            raise refuse("out", "a DispatchOutput", type(out).__name__)
        tensors = []
        for name, _, shape in self._layout:
            tensor = getattr(out, name)
            if not isinstance(tensor, Tensor):
                raise refuse(name, f"a tensor, shape {shape}", _kind(tensor))
            tensors.append(tensor)
        _dispatch_operator(self.handle, self._state, x, topk_ids, topk_weights, tensors)
        return out

    def combine(
        self,
        expert_rows: Tensor,
        tokens: int,
        topk_weights: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Makes :meth:`ferry_ep.Communicator.combine` of a round with ``tokens`` tokens. Collective.

        ``expert_rows``: bfloat16 ``[rows, hidden]``; ``topk_weights``: float32 ``[tokens, top_k]``, exact
        mode only. Returns bfloat16 ``[tokens, hidden]``, or the rows apart: ``out`` if it is given, which
        this call overwrites. Errors are those of that call.
        """
        _require(expert_rows=expert_rows, topk_weights=topk_weights, combined=out)
        if out is None:
            apart = self.is_exact and topk_weights is None
            if not torch.compiler.is_compiling():
                tokens = whole("tokens", tokens)
            shape = [tokens, self.top_k, self.hidden] if apart else [tokens, self.hidden]
            out = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        _combine_operator(self.handle, self._state, expert_rows, topk_weights, out)
        return out


def _kind(given: object) -> str:
    return "none" if given is None else type(given).__name__


def _require(**given: Tensor | None) -> None:
    """Raises for arguments that are no tensors, and for inputs that require a gradient."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) and (
            tensor is not None or name in ("x", "topk_ids", "expert_rows")
        ):
            raise refuse(name, "a tensor of torch", _kind(tensor))
        if tensor is not None and name != "combined" and torch.is_grad_enabled() and tensor.requires_grad:
            raise ArgumentError(
                "a tensor requires a gradient, but this has no backward pass: ferry_ep.autograd has one"
            )


def require_layer(config: Config) -> None:
    """Raises :class:`ferry_ep.ArgumentError` for a plan whose rows :class:`Experts` cannot multiply."""
    if config.format != "bf16":
        raise ArgumentError(f"format is {config.format}, but this layer multiplies BF16")
    if config.receive != "by-expert":
        raise ArgumentError(f"receive is {config.receive}, but this layer multiplies rows by expert")
    if config.shared_expert:
        raise ArgumentError("shared_expert is true, but this layer has routed experts alone")
    if config.skip_a2a:
        raise ArgumentError("skip_a2a is true, but this layer returns the sums of all ranks' experts")


class Experts(nn.Module):
    """This rank's experts of a layer whose experts are divided between the ranks: dispatch, two grouped
    matrix multiplications with SiLU between them, combine. BF16, without a backward pass.

    ``gates_and_ups``, ``[local_experts, hidden, 2 * intermediate]``, and ``downs``, ``[local_experts,
    intermediate, hidden]``, are those of the experts from ``plan.first_expert(rank)`` on.
    """

    def __init__(self, exchange: Exchange, gates_and_ups: Tensor, downs: Tensor) -> None:
        """Makes the experts of these weights, which are not copied; they may be transposed views.

        Raises :class:`ferry_ep.ArgumentError` unless the plan's format is ``bf16`` and it receives by expert,
        and if it has ``shared_expert`` or ``skip_a2a``; :class:`ferry_ep.TensorError` for weights of another
        type, shape or device.
        """
        super().__init__()
        plan = exchange.communicator.plan
        config = plan.config
        require_layer(config)
        intermediate = downs.shape[1]
        shapes = [config.hidden, 2 * intermediate], [intermediate, config.hidden]
        for name, weight, shape in zip(
            ("gates_and_ups", "downs"), (gates_and_ups, downs), shapes, strict=True
        ):
            wanted = f"{torch.bfloat16} {[plan.local_experts, *shape]} on {exchange.device}"
            given = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
            if given != wanted:
                raise refuse(name, wanted, given)
        self.exchange = exchange
        self.gates_and_ups = nn.Parameter(gates_and_ups, requires_grad=False)
        self.downs = nn.Parameter(downs, requires_grad=False)

    def multiply(self, rows: Tensor, row_offsets: Tensor) -> Tensor:
        """Returns the outputs of this rank's experts, bfloat16 ``[rows, hidden]``. Not collective."""
        ends = row_offsets[1:]
        gates, ups = _multiply(rows, self.gates_and_ups, ends).chunk(2, dim=-1)
        inner = (nn.functional.silu(gates.float()) * ups.float()).to(torch.bfloat16)
        return _multiply(inner, self.downs, ends)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Returns the sums of the experts' outputs times their weights, bfloat16 ``[tokens, hidden]``.
        Collective.

        Arguments as in :meth:`Exchange.dispatch`; weights of any type become float32.
        """
        topk_ids, topk_weights = topk_ids.to(torch.int32), topk_weights.float().contiguous()
        received = self.exchange.dispatch(x, topk_ids, topk_weights)
        answers = self.multiply(received.tokens, received.row_offsets)
        given = topk_weights if self.exchange.is_exact else None
        return self.exchange.combine(answers, x.shape[0], given)


class MoE(nn.Module):
    """A mixture-of-experts layer whose experts are divided between the ranks: a router, and ``experts``
    (:class:`Experts`). BF16, without a backward pass.

    ``router`` is ``[experts, hidden]``, the same on all ranks.
    """

    def __init__(self, exchange: Exchange, intermediate: int, *, renormalize: bool = True) -> None:
        """Makes a layer with weights that are not set. ``renormalize`` lets a token's weights sum to 1.

        Errors are those of :class:`Experts`.
        """
        super().__init__()
        plan = exchange.communicator.plan
        experts, hidden = plan.local_experts, plan.config.hidden
        self.top_k = plan.config.top_k
        self.renormalize = renormalize
        options = {"dtype": torch.bfloat16, "device": exchange.device}
        router = torch.empty(plan.config.experts, hidden, **options)
        self.router = nn.Parameter(router, requires_grad=False)
        self.experts = Experts(
            exchange,
            torch.empty(experts, hidden, 2 * intermediate, **options),
            torch.empty(experts, intermediate, hidden, **options),
        )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the experts of each token, int32, and their weights, float32, both ``[tokens, top_k]``."""
        scores = torch.softmax(x.float() @ self.router.float().T, dim=-1)
        topk_weights, topk_ids = torch.topk(scores, self.top_k, dim=-1)
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        return topk_ids.to(torch.int32), topk_weights.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output, bfloat16 ``[tokens, hidden]``, for ``x`` of that shape. Collective."""
        return self.experts(x, *self.route(x))


def _multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the rows of each group by its matrix."""
    if rows.is_cuda:
        return torch._grouped_mm(rows, weights, offs=ends)
    return torch.ops.ferry.grouped_mm(rows, weights, ends)
