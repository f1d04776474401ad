"""Ferry as an implementation of expert parallelism of transformers, by default under the name ``ferry``.

:func:`register` adds it there, for ``DistributedConfig(ep_size=.., ep_implementation="ferry")``. It serves
every model with a plan for experts. Importing this module imports torch and transformers, from 5.23 on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from .autograd import RowExchange
from .core._ferry import Group, Plan
from .core.bootstraps import torch_bootstrap
from .core.communicator import Communicator
from .core.config import Config
from .core.errors import ArgumentError, ClosedError, OrderError, refuse
from .torch import Exchange

__all__ = ["FerryEP", "Registration", "register"]

#: Fields of a configuration that a model has, or that :class:`FerryEP` needs as they are.
_OWN = ("experts", "top_k", "hidden", "max_tokens_per_rank", "format", "receive", "combine_weights")


class Registration:
    """Communicators of the models that were loaded with a name: one for all layers of the same sizes, and
    another one for passes with gradients. :func:`register` makes it.

    A ``with`` block closes them; one that an exception leaves waits for no other process, and drops them.
    """

    def __init__(self, wanted: dict[str, Any], share_gpus: bool, connect: Any) -> None:
        self._wanted = wanted
        #: Most tokens that a rank brings to a layer.
        self.max_tokens_per_rank: int = wanted["max_tokens_per_rank"]
        self._share_gpus = share_gpus
        self._connect = self._connect_node if connect is None else connect
        self._communicators: dict[tuple[Any, ...], Communicator] = {}
        self._ends = contextlib.ExitStack()
        self._is_closed = False

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """Communicators that passes have made so far, to ``check`` them. If an exception has left a round
        open, all ranks ``give_up`` those whose ``round`` is not ``"idle"``.
        """
        return tuple(self._communicators.values())

    def communicator(self, ep_mesh: Any, x: Tensor, *, has_gradients: bool, **sizes: int) -> Communicator:
        """Returns the communicator of a layer with the tokens ``x``. Collective over ``ep_mesh`` where it is
        made, and synchronizes then.

        Raises :class:`ferry_ep.ClosedError` after the end, :class:`ferry_ep.OrderError` where a graph is
        captured before it was made, and the exceptions of :class:`ferry_ep.Plan` and of groups.
        """
        if self._is_closed:
            raise ClosedError("the registration was closed, and the model's communicators with it")
        group = ep_mesh.get_group()
        key = (group.group_name, has_gradients, *sizes.values())
        found = self._communicators.get(key)
        if found is None:
            if _is_captured(x):
                raise OrderError(
                    "a graph is captured, but the first pass makes communicators: make one before"
                )
            given: dict[str, Any] = sizes | self._wanted
            config = Config(receive="compact", combine_weights=has_gradients, **given)
            found = self._connect(config, ep_mesh)
            _require(found, config, ep_mesh)
            self._communicators[key] = found
        return found

    def _connect_node(self, config: Config, ep_mesh: Any) -> Communicator:
        """Makes a node group over the mesh's processes. Collective."""
        over = torch_bootstrap(ep_mesh.get_group())
        device = torch.cuda.current_device()
        group = self._ends.enter_context(Group.node(over, device=device, share_gpus=self._share_gpus))
        return self._ends.enter_context(Communicator(group, Plan(group, config)))

    def close(self) -> None:
        """Closes the communicators and groups that passes have made, but not those of ``connect``.
        Collective; a second call does nothing. Synchronizes. Destroy graphs before.

        Raises :class:`ferry_ep.OrderError` while a round is open, and closes nothing.
        """
        for each in self.communicators:
            if not each.closed and each.round != "idle":
                raise OrderError(f"close is out of order: a round is {each.round}; give_up comes before")
        self.__exit__(None, None, None)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, kind: Any, raised: Any, trace: Any) -> None:
        self._is_closed = True
        self._communicators = {}
        self._ends.__exit__(kind, raised, trace)


def register(
    name: str = "ferry",
    *,
    max_tokens_per_rank: int,
    share_gpus: bool = False,
    connect: Callable[[Config, Any], Communicator] | None = None,
    **options: Any,
) -> Registration:
    """Registers Ferry in transformers' ``EPImplementationInterface``, for models that are loaded afterwards.
    Not collective.

    ``max_tokens_per_rank`` is the most tokens that a rank brings to a layer: sequences of its batch times
    their length, divided by ``tp_size`` and rounded up. Windows are of this size, so it has no default.
    ``options`` are other fields of :class:`ferry_ep.Config`, such as ``deadline``. ``share_gpus``: whether
    ranks may share a GPU, to develop and test. ``connect`` makes this rank's communicator from a
    configuration and the mesh of the experts, for simulated groups, or those of several nodes; it stays yours
    to close. Without it: a node group, a process for each GPU.

    Raises :class:`ferry_ep.ArgumentError` for options that the model or the layer has.
    """
    known = {field.name for field in fields(Config)}
    for field, option in options.items():
        if field in _OWN or field not in known:
            why = "the model or its layers have it" if field in _OWN else "Config has no such field"
            raise ArgumentError(f"{field} is {option}, but {why}")
    wanted = {"max_tokens_per_rank": max_tokens_per_rank, **options}
    registration = Registration(wanted, share_gpus, connect)

    def implementation(experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> FerryEP:
        return FerryEP(registration, experts, ep_mesh, tp_mesh)

    EPImplementationInterface.register(name, implementation)
    return registration


class FerryEP(EPImplementation):
    """How the experts of a layer get their tokens: a round of Ferry for each pass.

    A rank gets one row for each token that has an expert there, whatever its number of experts, and the
    experts' own ``forward`` makes the weighted sum of its experts. Ranks of a tensor-parallel group hold the
    same batch: each sends its slice of it, so that experts compute each token once, and an all-gather brings
    the sums of the others.

    Where the group of experts is that of tensors, a pass reads nothing back. Otherwise a rank does not know
    how many tokens its peers have, and an eager pass reads the number of rows; in a graph the experts get the
    rows of ``max_tokens_per_rank`` on all ranks, most of them without a token.
    """

    def __init__(self, registration: Registration, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.registration = registration
        #: To ask whether they require gradients: of the module, as a parameter can be replaced.
        self._experts = experts
        #: That of the last pass, and its capacity.
        self._kept: tuple[Exchange, int | str] | None = None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the sums of the experts' outputs times their weights, bfloat16 ``[tokens, hidden]``.
        Collective, and so is the backward pass.

        ``hidden_states``: bfloat16 ``[tokens, hidden]``; ``top_k_index``: int32 or int64 ``[tokens, top_k]``,
        global; ``top_k_weights``: of that shape and any floating-point type, float32 on the way.

        Raises :class:`ferry_ep.TensorError` for tokens of another type, or too many, and the exceptions of
        :meth:`Registration.communicator`.
        """
        if hidden_states.dtype != torch.bfloat16:
            raise refuse("hidden_states", str(torch.bfloat16), str(hidden_states.dtype))
        tokens = hidden_states.shape[0]
        # Of the longest slice, which all ranks of the batch know: they refuse it alike.
        slice_, most = -(-tokens // self.tp_mesh.size()), self.registration.max_tokens_per_rank
        if slice_ > most:
            raise refuse(
                "hidden_states", f"at most {most} tokens on a rank (max_tokens_per_rank)", str(slice_)
            )
        given = hidden_states, top_k_weights.float()
        if self.tp_mesh.size() > 1:
            given = tuple(_Split.apply(of, self.tp_mesh) for of in given)
            top_k_index = _slice_of(top_k_index, self.tp_mesh)
        x, weights = (of.contiguous() for of in given)
        sums = self._round(x, top_k_index.contiguous(), weights, tokens, top_k_weights.dtype)
        return _Gather.apply(sums, tokens, self.tp_mesh) if self.tp_mesh.size() > 1 else sums

    def _round(
        self, x: Tensor, ids: Tensor, weights: Tensor, tokens: int, weight_type: torch.dtype
    ) -> Tensor:
        """Makes a round with this rank's slice of ``tokens``."""
        has_gradients = torch.is_grad_enabled() and (
            x.requires_grad
            or weights.requires_grad
            or any(of.requires_grad for of in self._experts.parameters())
        )
        communicator = self.registration.communicator(
            self.ep_mesh,
            x,
            has_gradients=has_gradients,
            experts=self.num_local_experts * self.ep_mesh.size(),
            top_k=ids.shape[1],
            hidden=x.shape[1],
        )
        # Slices of one batch: each of its tokens comes once at most.
        capacity = tokens if self.shares_batch else "max"
        if has_gradients:
            rows = RowExchange(communicator, capacity=capacity)
            answered = rows.dispatch(x, ids, weights)
            return rows.combine(self._evaluate(answered, weight_type, is_trained=True), answered)
        exchange = self._exchange_of(communicator, capacity)
        received = exchange.dispatch(x, ids, weights)
        return exchange.combine(self._evaluate(received, weight_type), x.shape[0])

    def _exchange_of(self, communicator: Communicator, capacity: int | str) -> Exchange:
        """Returns the exchange of the last pass, if that had the same capacity."""
        if self._kept is None or self._kept[0].communicator is not communicator or self._kept[1] != capacity:
            self._kept = Exchange(communicator, capacity=capacity), capacity
        return self._kept[0]

    def _evaluate(self, received: Any, weight_type: torch.dtype, *, is_trained: bool = False) -> Tensor:
        """Returns the sums of this rank's experts for each row. ``is_trained``: whether all parameters are to
        have gradients, also where no row came.
        """
        rows, ids, weights = received.tokens, received.ids, received.weights
        capacity = rows.shape[0]
        if not self.shares_batch and not _is_captured(rows):
            came = max(1, int((ids >= 0).any(dim=1).sum()))
            rows, ids, weights = rows[:came], ids[:came], weights[:came]
        if is_trained and rows.shape[0]:
            rows, ids, weights = _with_one(rows, ids, weights)
        is_absent = ids < 0
        # As transformers marks the experts of other ranks.
        ids = ids.masked_fill(is_absent, self.num_local_experts)
        weights = weights.masked_fill(is_absent, 0.0).to(weight_type)
        sums = self.experts_forward(rows, ids, weights).to(torch.bfloat16)
        return nn.functional.pad(sums, (0, 0, 0, capacity - sums.shape[0]))


def _with_one(rows: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gives the first row, of zeros, to the first expert with weight 0 if no row has an expert here. Else
    parameters would have no gradient, and a reduction of them over copies of the layer would not be made.
    """
    is_first = torch.zeros_like(ids, dtype=torch.bool)
    is_first[0, 0] = True
    is_given = is_first & (ids < 0).all()
    rows = rows.masked_fill(is_given.any(dim=1, keepdim=True), 0.0)
    return rows, ids.masked_fill(is_given, 0), weights.masked_fill(is_given, 0.0)


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _require(communicator: Any, config: Config, ep_mesh: Any) -> None:
    """Checks the communicator that ``connect`` has returned."""
    if not isinstance(communicator, Communicator):
        raise ArgumentError(f"connect returned {communicator!r}, but it is a ferry_ep.Communicator")
    given = {"rank": communicator.rank, "ranks": communicator.plan.ranks}
    wanted = {"rank": ep_mesh.get_local_rank(), "ranks": ep_mesh.size()}
    for field in _OWN:
        given[field], wanted[field] = getattr(communicator.plan.config, field), getattr(config, field)
    for field, value in given.items():
        if value != wanted[field]:
            raise ArgumentError(f"{field} of connect's communicator is {value}, not {wanted[field]}")


def _slice_of(batch: Tensor, mesh: Any) -> Tensor:
    """Returns this rank's slice of a batch: as many rows on each rank, rounded up, fewer on the last ones."""
    rows = -(-batch.shape[0] // mesh.size())
    return batch[mesh.get_local_rank() * rows :][:rows]


def _gathered(part: Tensor, tokens: int, mesh: Any) -> Tensor:
    """Returns the batch of ``tokens`` rows of which each rank gives its slice. Collective."""
    rows = -(-tokens // mesh.size())
    padded = nn.functional.pad(part, (0, 0, 0, rows - part.shape[0])).contiguous()
    whole = part.new_empty(rows * mesh.size(), part.shape[1])
    distributed.all_gather_into_tensor(whole, padded, group=mesh.get_group())
    # A view that a Function returns could not be changed in place.
    return whole if whole.shape[0] == tokens else whole[:tokens].clone()


class _Split(torch.autograd.Function):
    """Slices a batch that all ranks of a mesh hold; gathers the gradients of the slices."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor, mesh: Any) -> Tensor:
        ctx.tokens, ctx.mesh = batch.shape[0], mesh
        return _slice_of(batch, mesh).clone()

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Any:
        return _gathered(gradients, ctx.tokens, ctx.mesh), None


class _Gather(torch.autograd.Function):
    """Gathers slices to a batch; slices its gradient, which all ranks of the mesh have."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, tokens: int, mesh: Any) -> Tensor:
        ctx.mesh = mesh
        return _gathered(part, tokens, mesh)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Any:
        return _slice_of(gradients, ctx.mesh).contiguous(), None, None
