"""Ferry as a communication of FlashInfer's expert-parallel layers, under the name ``ferry``.

Importing this module imports torch and ``flashinfer.moe_ep``, and registers :class:`FerryCommunication`
there, for ``create_communication(bootstrap, params, "ferry")`` and ``SplitConfig(comm=FerryCommConfig(..))``.
Written for FlashInfer 0.7.2 to 0.7.4, whose ``flashinfer.moe_ep.core`` has the classes to derive from.
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
from .core.errors import ArgumentError, ClosedError, OrderError, refuse
from .core.outputs import DispatchOutput
from .core.scalars import whole
from .torch import Exchange

__all__ = ["FerryCommConfig", "FerryCommunication"]

#: Formats of Ferry by the names of FlashInfer's ``dispatch_format``.
_FORMATS = {
    "BF16": "bf16",
    "DeepSeekFp8": "fp8",
    "MXFP8": "mxfp8:row-major",
    "NVFP4": "nvfp4:row-major",
    "MXFP4": "mxfp4:row-major",
}


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
    eplb_stats_num_experts: int = 0
    """Elements of the statistics that ranks may give to a dispatch; 0 for none."""
    connect: Callable[[Config, Any], Communicator] | None = None
    """Makes this rank's communicator from a configuration and FlashInfer's ``BootstrapConfig``, for groups of
    your own: simulated ones, or several ranks in a process. It stays yours to close. It is called once more
    if there are statistics, for a communicator of theirs. ``None``: a node group over
    ``bootstrap.process_group``, a process for each GPU."""


class _Statistics:
    """An all-gather of int32 statistics: a round of a communicator with one expert on each rank, to which
    each rank sends its statistics as BF16, given up once they have come.
    """

    @staticmethod
    def plan(plan: Config, ranks: int, elements: int) -> Config:
        """Returns the configuration for ``ranks`` ranks with the limits of ``plan``."""
        # A token names at most 32 experts.
        top_k = min(ranks, 32)
        return Config(
            experts=ranks,
            top_k=top_k,
            hidden=-(-2 * elements // 8) * 8,
            max_tokens_per_rank=-(-ranks // top_k),
            receive="strided",
            deadline=plan.deadline,
            max_sms=plan.max_sms,
        )

    def __init__(self, communicator: Communicator, elements: int) -> None:
        self.communicator = communicator
        self.elements = elements
        config = communicator.plan.config
        self._width = config.hidden // 2
        self._tokens, self._top_k = config.max_tokens_per_rank, config.top_k
        ids = torch.arange(self._tokens * self._top_k, dtype=torch.int32)
        ids[config.experts :] = -1
        self._ids = ids.view(self._tokens, self._top_k).to(Exchange(communicator).device)
        self._output: DispatchOutput | None = None

    def require(self, given: Tensor) -> None:
        """Raises :class:`ferry_ep.TensorError` for statistics that do not fit."""
        wanted = f"int32 [{self.elements}] on {self._ids.device}"
        if (given.dtype, list(given.shape), given.device) != (
            torch.int32,
            [self.elements],
            self._ids.device,
        ):
            name = str(given.dtype).removeprefix("torch.")
            raise refuse("eplb_local_stats", wanted, f"{name} {list(given.shape)} on {given.device}")

    def gather(self, given: Tensor) -> Tensor:
        """Returns the statistics of all ranks, int32 ``[ranks, elements]``. Collective."""
        padded = torch.nn.functional.pad(given, (0, self._width - self.elements))
        x = padded.view(torch.bfloat16).expand(self._tokens, -1).contiguous()
        self._output = self.communicator.dispatch(x, self._ids, out=self._output)
        self.communicator.give_up()
        rows = self._output.tokens.view(torch.int32).view(-1, self._tokens, self._width)
        return rows[:, self.communicator.rank // self._top_k, : self.elements].contiguous()


@register_communication("ferry")
class FerryCommunication(MoEEpCommunication):
    """Dispatch and combine of Ferry for a layer of FlashInfer: one round of Ferry for each pair.

    Row ``source * max_tokens_per_rank + token`` has that token, and its scales, if it has an expert on this
    rank. In all other rows ``topk_ids`` are ``params.invalid_expert_id``, and hidden states, scales and
    weights are of an earlier round, or anything: evaluate only ids of this rank. Picks of other ranks are
    that id, too. Sums are formed in f32 in the order of the ranks, and rounded once: runs do not differ.

    ``params.dispatch_format`` is what tokens come in: ``None`` or BF16, or DeepSeekFp8, MXFP8, NVFP4 or MXFP4
    with their scales, which pass through. Answers are BF16 in any case.

    If an exception comes between a dispatch and its combine, all ranks call
    ``exchange.communicator.give_up()``, before the next dispatch and before FlashInfer's layer is destroyed.

    Buffers are allocated once, for each type of ids: what :meth:`dispatch` returns is valid until the next
    one. The pair can be captured in a graph of CUDA after an eager one; destroy the graphs before
    :meth:`destroy`.
    """

    def __init__(
        self, bootstrap: Any, params: MoEEpCommParams, config: FerryCommConfig | None = None
    ) -> None:
        """Collective. Synchronizes.

        Raises ``NotImplementedError`` for answers that are not BF16 and for formats that Ferry does not
        carry, :class:`ferry_ep.ArgumentError`, and the exceptions of :class:`ferry_ep.Plan` and of groups.
        """
        super().__init__(bootstrap, params)
        config = FerryCommConfig() if config is None else config
        if params.token_dtype != torch.bfloat16:
            raise NotImplementedError(f"params.dtype is {params.token_dtype}, but Ferry carries bfloat16")
        form = "BF16" if params.dispatch_format is None else params.dispatch_format.name
        if form not in _FORMATS:
            raise NotImplementedError(
                f"params.dispatch_format is {form}, but Ferry carries {', '.join(_FORMATS)}"
            )
        if not -(2**31) <= params.invalid_expert_id < 2**31:
            raise ArgumentError(f"params.invalid_expert_id is {params.invalid_expert_id}, but ids are int32")
        statistics = whole("eplb_stats_num_experts", config.eplb_stats_num_experts)
        plan = Config(
            experts=params.num_experts,
            top_k=params.top_k,
            hidden=params.hidden_size,
            max_tokens_per_rank=params.max_tokens_per_rank,
            format=_FORMATS[form],
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
        self._statistics: _Statistics | None = None
        if statistics:
            small = _Statistics.plan(plan, self.ep_size, statistics)
            gatherer = connect(small, bootstrap)
            self._require(gatherer, small)
            self._statistics = _Statistics(gatherer, statistics)
        self._exchange: Exchange | None = Exchange(communicator)
        self._form = form
        self._first = communicator.plan.first_expert(self.ep_rank)
        #: Outputs of dispatches by type of ids.
        self._outputs: dict[torch.dtype, DispatchOutput] = {}
        #: Tokens of the last dispatch.
        self._tokens = 0
        #: What :meth:`get_combine_input_buffer` returns.
        self._answers: Tensor | None = None

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
        """Makes a communicator of a node group over the process group, which it makes once. Collective."""
        if self._group is None:
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
        """Makes :meth:`ferry_ep.Communicator.dispatch` on the current stream. Collective.

        ``hidden_states``: ``[tokens, hidden]``, bfloat16, or codes of ``params.dispatch_format``, of any type
        of one byte, in 4-bit formats ``[tokens, hidden / 2]``. ``hidden_states_scale``: the scales of codes,
        a row for each token, in bytes of any type or, of DeepSeekFp8, float32. What arrives has the types
        that were given. ``topk_ids``: int32 or int64 ``[tokens, top_k]``, global, -1 or
        ``invalid_expert_id`` for none; they arrive as int32, which kernels take. ``topk_weights``: float32 of
        that shape.
        ``runtime_max_tokens_per_rank``, before 0.7.4 ``max_tokens_per_rank``, has no effect, as shapes are
        static.
        ``eplb_local_stats``: int32 ``[config.eplb_stats_num_experts]``, not negative, given by all ranks or
        by none: ``eplb_gathered_stats`` has those of each rank, by a round of their own after the tokens'.

        Raises :class:`ferry_ep.ArgumentError`, and the exceptions of that call; nothing was sent then.
        """
        communicator = self.exchange.communicator
        if eplb_local_stats is not None:
            if not isinstance(eplb_local_stats, Tensor):
                raise refuse("eplb_local_stats", "a tensor of int32", type(eplb_local_stats).__name__)
            if self._statistics is None:
                raise ArgumentError(
                    f"eplb_local_stats has shape {list(eplb_local_stats.shape)}, but "
                    "config.eplb_stats_num_experts is 0"
                )
            self._statistics.require(eplb_local_stats)
        x = self._encoded(hidden_states, hidden_states_scale)
        if self.params.invalid_expert_id != -1:
            # Else a kernel reports them in every round, and no other id that is none.
            topk_ids = topk_ids.masked_fill(topk_ids == self.params.invalid_expert_id, -1)
        given = self._outputs.get(topk_ids.dtype)
        out = communicator.dispatch(x, topk_ids, topk_weights, out=given)
        self._outputs[topk_ids.dtype] = out
        self._tokens = hidden_states.shape[0]
        scales = None if hidden_states_scale is None else out.scales.view(hidden_states_scale.dtype)
        gathered = None
        if self._statistics is not None and eplb_local_stats is not None:
            gathered = self._statistics.gather(eplb_local_stats)
        local = out.ids.to(torch.int32)
        ids = torch.where(local < 0, self.params.invalid_expert_id, local + self._first)
        return MoEEpDispatchResult(
            hidden_states=out.tokens.view(hidden_states.dtype),
            hidden_states_scale=scales,
            topk_ids=ids,
            topk_weights=None if topk_weights is None else out.weights,
            tokens_per_rank=self.params.max_tokens_per_rank,
            eplb_gathered_stats=gathered,
        )

    def _encoded(self, tokens: Tensor, scales: Tensor | None) -> Any:
        """Returns what Ferry's dispatch takes: tokens, or codes and scales with elements of its types."""
        if self._form == "BF16":
            if scales is not None:
                raise ArgumentError("hidden_states_scale is given, but params.dispatch_format is BF16")
            return tokens
        if scales is None:
            raise ArgumentError(f"hidden_states_scale is None, but params.dispatch_format is {self._form}")
        has_floats = self._form == "DeepSeekFp8"
        if tokens.element_size() != 1:
            raise refuse("hidden_states", f"codes of one byte ({self._form})", str(tokens.dtype))
        if scales.element_size() != 1 and not (has_floats and scales.dtype == torch.float32):
            kinds = "bytes or float32" if has_floats else "bytes"
            raise refuse("hidden_states_scale", f"{kinds} ({self._form})", str(scales.dtype))
        codes = torch.uint8 if self._form in ("NVFP4", "MXFP4") else torch.float8_e4m3fn
        wanted = torch.float32 if has_floats else torch.uint8
        try:
            return tokens.view(codes), scales.view(wanted)
        except RuntimeError as error:
            given = f"strides {list(scales.stride())}, {scales.dtype}"
            raise refuse("hidden_states_scale", f"rows of whole elements of {wanted}", given) from error

    def get_combine_input_buffer(self, dtype: torch.dtype) -> Tensor:
        """Returns BF16 ``[ep_size * max_tokens_per_rank, hidden]`` for the answers, the same in each call. It
        is allocated in the first one and not cleared; :meth:`combine` copies no other tensor either.

        Raises :class:`ferry_ep.OrderError` unless :meth:`combine` comes next, and
        :class:`ferry_ep.TensorError` for another type.
        """
        exchange = self.exchange
        if exchange.communicator.round != "dispatched":
            raise OrderError(
                f"get_combine_input_buffer is out of order: the round is {exchange.communicator.round}"
            )
        if dtype != torch.bfloat16:
            raise refuse("dtype", "torch.bfloat16", str(dtype))
        if self._answers is None:
            rows = self.ep_size * self.params.max_tokens_per_rank
            shape = rows, self.params.hidden_size
            self._answers = torch.empty(shape, dtype=dtype, device=exchange.device)
        return self._answers

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
            made = [self._exchange.communicator]
            if self._statistics is not None:
                made.append(self._statistics.communicator)
            for communicator in made:
                if not communicator.closed:
                    communicator.close()
            self._group.close()
        self._exchange = self._group = self._statistics = self._answers = None
        self._outputs = {}
