"""Ferry as a communication of FlashInfer's expert-parallel layers, under the name ``ferry``.

Importing this module imports torch and ``flashinfer.moe_ep``, and registers :class:`FerryCommunication`
there, for ``create_communication(bootstrap, params, "ferry")`` and ``SplitConfig(comm=FerryCommConfig(..))``.
Written for FlashInfer 0.7.2 to 0.7.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from flashinfer.moe_ep.core.comm.communication import (
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpDispatchResult,
    register_communication,
)
from torch import Tensor

from .core._ferry import Group, Plan
from .core.bootstraps import torch_bootstrap
from .core.communicator import Communicator
from .core.config import Config
from .core.errors import ArgumentError, ClosedError
from .core.outputs import DispatchOutput
from .torch import Exchange

__all__ = ["FerryCommConfig", "FerryCommunication"]


@dataclass
class FerryCommConfig:
    """Options of :class:`FerryCommunication`, to give as FlashInfer's communication backend."""

    backend_name: str = "ferry"
    share_gpus: bool = False
    """Whether ranks may share a GPU, to develop and test."""
    deadline: float | None = None
    """Longest wait for a peer in a kernel, in seconds; ``None``: that of :class:`ferry_ep.Config`."""
    max_sms: int | None = None
    """Most multiprocessors that a kernel occupies; ``None`` for all."""
    connect: Callable[[Config, Any], Communicator] | None = None
    """Makes this rank's communicator from a configuration and FlashInfer's ``BootstrapConfig``, for groups of
    your own: simulated ones, or several ranks in a process. It stays yours to close. ``None``: a node group
    over ``bootstrap.process_group``, a process for each GPU."""


@register_communication("ferry")
class FerryCommunication(MoEEpCommunication):
    """Dispatch and combine of Ferry for a layer of FlashInfer: one round of Ferry for each pair.

    Row ``source * max_tokens_per_rank + token`` has that token, BF16, if it has an expert on this rank. In
    all other rows ``topk_ids`` are ``params.invalid_expert_id``, and hidden states and weights are of an
    earlier round, or anything: evaluate only ids of this rank. Picks of other ranks are that id, too. Sums
    are formed in f32 in the order of the ranks, and rounded once: runs do not differ.

    Buffers are allocated once, for each type of ids: what :meth:`dispatch` returns is valid until the next
    one. The pair can be captured in a graph of CUDA; destroy the graphs before :meth:`destroy`.
    """

    def __init__(
        self, bootstrap: Any, params: MoEEpCommParams, config: FerryCommConfig | None = None
    ) -> None:
        """Collective. Synchronizes.

        Raises ``NotImplementedError`` for tokens that are not BF16 or are quantized already, and the
        exceptions of :class:`ferry_ep.Plan` and of groups.
        """
        super().__init__(bootstrap, params)
        config = FerryCommConfig() if config is None else config
        if params.token_dtype != torch.bfloat16:
            raise NotImplementedError(f"params.dtype is {params.token_dtype}, but Ferry carries bfloat16")
        form = params.dispatch_format
        if form is not None and form.name != "BF16":
            raise NotImplementedError(
                f"params.dispatch_format is {form.name}, but Ferry takes no quantized tokens: dispatch BF16"
            )
        plan = Config(
            experts=params.num_experts,
            top_k=params.top_k,
            hidden=params.hidden_size,
            max_tokens_per_rank=params.max_tokens_per_rank,
            receive="strided",
            max_sms=config.max_sms,
        )
        if config.deadline is not None:
            plan = replace(plan, deadline=config.deadline)
        self._group: Group | None = None
        connect = self._connect if config.connect is None else config.connect
        self._share_gpus = config.share_gpus
        communicator = connect(plan, bootstrap)
        self._require(communicator, plan)
        self._exchange: Exchange | None = Exchange(communicator)
        self._first = communicator.plan.first_expert(self.ep_rank)
        #: Outputs of dispatches by type of ids.
        self._outputs: dict[torch.dtype, DispatchOutput] = {}
        #: Tokens of the last dispatch.
        self._tokens = 0

    def _require(self, communicator: Communicator, plan: Config) -> None:
        """Checks the communicator that ``connect`` has returned."""
        config = communicator.plan.config
        wanted = {"rank": self.ep_rank, "ranks": self.ep_size}
        given = {"rank": communicator.rank, "ranks": communicator.plan.ranks}
        for field in ("experts", "top_k", "hidden", "max_tokens_per_rank", "format", "receive"):
            wanted[field], given[field] = getattr(plan, field), getattr(config, field)
        for field, value in given.items():
            if value != wanted[field]:
                raise ArgumentError(f"{field} of connect's communicator is {value}, not {wanted[field]}")

    def _connect(self, plan: Config, bootstrap: Any) -> Communicator:
        """Makes a node group over the process group. Collective."""
        device = torch.cuda.current_device() if bootstrap.device is None else bootstrap.device
        over = torch_bootstrap(bootstrap.process_group)
        self._group = Group.node(over, device=device, share_gpus=self._share_gpus)
        return Communicator(self._group, Plan(self._group, plan))

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Whether the GPU has compute capability 8.0 or later; without one, simulated groups are left."""
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)

    @property
    def exchange(self) -> Exchange:
        """This rank's communicator, with its operators. Raises :class:`ferry_ep.ClosedError` after
        :meth:`destroy`.
        """
        if self._exchange is None:
            raise ClosedError("the communication was destroyed")
        return self._exchange

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """Makes :meth:`ferry_ep.torch.Exchange.dispatch` on the current stream. Collective.

        ``hidden_states``: bfloat16 ``[tokens, hidden]``; ``topk_ids``: int32 or int64 ``[tokens, top_k]``,
        global, -1 or ``invalid_expert_id`` for none; ``topk_weights``: float32 of that shape.
        ``runtime_max_tokens_per_rank``, before 0.7.4 ``max_tokens_per_rank``, has no effect, as shapes are
        static. Raises ``NotImplementedError`` for scales and statistics, else the exceptions of that call.
        """
        exchange = self.exchange
        if hidden_states_scale is not None:
            raise NotImplementedError("hidden_states_scale is given, but Ferry takes no quantized tokens")
        if eplb_local_stats is not None:
            raise NotImplementedError("eplb_local_stats is given, but Ferry gathers none: gather them apart")
        if self.params.invalid_expert_id >= 0:
            # Else a kernel reports them in every round, and no other id that is none.
            topk_ids = topk_ids.masked_fill(topk_ids == self.params.invalid_expert_id, -1)
        given = self._outputs.get(topk_ids.dtype)
        out = exchange.dispatch(hidden_states, topk_ids, topk_weights, out=given)
        self._outputs[topk_ids.dtype] = out
        self._tokens = hidden_states.shape[0]
        ids = torch.where(out.ids < 0, self.params.invalid_expert_id, out.ids + self._first)
        return MoEEpDispatchResult(
            hidden_states=out.tokens,
            topk_ids=ids,
            topk_weights=None if topk_weights is None else out.weights,
            tokens_per_rank=self.params.max_tokens_per_rank,
        )

    def combine(self, expert_output: Tensor, *, output: Tensor | None = None) -> Tensor:
        """Makes :meth:`ferry_ep.torch.Exchange.combine` on the current stream. Collective.

        ``expert_output``: bfloat16 ``[ep_size * max_tokens_per_rank, hidden]``, or that in three dimensions;
        rows without a token are not read. Returns bfloat16 ``[tokens, hidden]``: ``output``, if given.
        """
        exchange = self.exchange
        if expert_output.dim() == 3:
            expert_output = expert_output.flatten(0, 1)
        elif expert_output.dim() != 2:
            raise ArgumentError(f"expert_output has {expert_output.dim()} dimensions, but it takes 2 or 3")
        return exchange.combine(expert_output, self._tokens, out=output)

    def destroy(self) -> None:
        """Closes what this object made. Collective; a second call does nothing. Synchronizes.

        Raises :class:`ferry_ep.OrderError` between :meth:`dispatch` and :meth:`combine`, and closes nothing.
        """
        if self._exchange is not None and self._group is not None:
            if not self._exchange.communicator.closed:
                self._exchange.communicator.close()
            self._group.close()
        self._exchange = self._group = None
        self._outputs = {}
