"""Mixtral and Qwen3-MoE models of transformers, with their experts divided between the ranks.

:func:`expert_parallel` replaces the experts of a model. Importing this module imports torch and transformers.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .core._ferry import Group, Plan
from .core.communicator import Communicator
from .core.config import Config
from .core.errors import ArgumentError, refuse
from .torch import Exchange, Experts, require_layer

__all__ = ["config_of", "expert_parallel"]

#: Major version of transformers whose blocks are known: read in 5.0.0 and 5.24.0, run with 5.24.0.
KNOWN_VERSION = "5"
#: Blocks that are known: class of the block, and of its router and experts.
_BLOCKS = {
    "MixtralSparseMoeBlock": ("MixtralTopKRouter", "MixtralExperts"),
    "Qwen3MoeSparseMoeBlock": ("Qwen3MoeTopKRouter", "Qwen3MoeExperts"),
}
#: Options of an experts class, which transformers' decorator sets, with the values that are known. Versions
#: before an option have its known value.
_OPTIONS = {
    "has_bias": False,
    "has_gate": True,
    "has_post_expert_norm": False,
    "is_concatenated": True,
    "is_transposed": False,
    "_is_expert_parallel": False,
}
#: Most tokens of a pass on a rank, unless another number is given.
MAX_TOKENS = 4096
#: Arguments of the experts' forward pass.
_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


def config_of(model: nn.Module, *, max_tokens_per_rank: int = MAX_TOKENS, **options: Any) -> Config:
    """Returns the configuration of a communicator for all blocks of ``model``. Not collective.

    ``max_tokens_per_rank`` is the most tokens of one forward pass on a rank: sequences times their length.
    ``options`` are those of :class:`ferry_ep.Config`, such as ``deadline``.

    Raises :class:`ferry_ep.ArgumentError` for a model without blocks of Mixtral or Qwen3-MoE, or with others
    than these, for a version of transformers whose blocks are not known, for blocks of different sizes, for
    experts that are not BF16, and for ``options`` that :class:`ferry_ep.torch.Experts` refuses.
    """
    sizes = {name: _sizes(name, block) for name, block in _blocks(model).items()}
    (first, wanted), *others = sizes.items()
    for name, given in others:
        if given != wanted:
            raise ArgumentError(f"{name} has the sizes {given}, but {first} has {wanted}")
    known = {field.name for field in fields(Config)}
    for name, option in options.items():
        if name in wanted or name not in known:
            why = "the model has it" if name in wanted else "Config has no such field"
            raise ArgumentError(f"{name} is {option}, but {why}")
    config = Config(**wanted, max_tokens_per_rank=max_tokens_per_rank, **options)
    require_layer(config)
    return config


def expert_parallel(
    model: nn.Module, group: Group | Communicator, *, max_tokens_per_rank: int | None = None, **options: Any
) -> Communicator:
    """Divides the experts of ``model`` between the ranks of ``group``. Collective. Synchronizes.

    ``model`` is a Mixtral or Qwen3-MoE model of transformers in BF16, with the same weights on all ranks, on
    the rank's device: the CPU for a simulated group. It is changed: in each block ``experts`` becomes
    :class:`ferry_ep.torch.Experts` with a copy of this rank's part of the weights, under other names and
    without hooks: save the model before, as no ``from_pretrained`` loads a divided one. Routers and all else
    stay whole.

    ``group`` is a group of which this process has one rank; then ``max_tokens_per_rank`` and ``options`` are
    those of :func:`config_of`. If this process has several ranks, give each one's model its communicator
    instead, made with the configuration of :func:`config_of`: for each rank a thread.

    All blocks share one communicator, which is returned: close it after the last pass. Each rank has its own
    sequences. A pass makes a round for each block, so all ranks make the same number of passes, on sequences
    of any sizes; in ``generate``, the same number of new tokens. There is no backward pass: use
    ``torch.no_grad()``.

    Raises as :func:`config_of` and :class:`ferry_ep.Communicator`, and :class:`ferry_ep.ArgumentError` for a
    communicator that does not fit the model; the model is as it was then.
    """
    if isinstance(group, Communicator):
        communicator, wanted = group, config_of(model)
        if options or max_tokens_per_rank is not None:
            raise ArgumentError("a communicator has its configuration: give no options beside it")
    else:
        most = MAX_TOKENS if max_tokens_per_rank is None else max_tokens_per_rank
        wanted = config_of(model, max_tokens_per_rank=most, **options)
        communicator = Communicator(group, Plan(group, wanted))
    plan = communicator.plan
    for field in ("experts", "top_k", "hidden"):
        given, needed = getattr(plan.config, field), getattr(wanted, field)
        if given != needed:
            raise ArgumentError(f"{field} of the communicator is {given}, but the model's is {needed}")
    exchange = Exchange(communicator, capacity="distinct")
    blocks, device = _blocks(model), exchange.device
    for name, block in blocks.items():
        for weight, parameter in block.experts.named_parameters():
            if parameter.device != device:
                given = f"memory of {parameter.device}"
                raise refuse(f"{name}.experts.{weight}", f"memory of {device}", given)
    first = plan.first_expert(communicator.rank)
    here = slice(first, first + plan.local_experts)
    # All before one is replaced: without memory for them the model stays as it was.
    parts = [_part(exchange, block.experts, here) for block in blocks.values()]
    for block, part in zip(blocks.values(), parts, strict=True):
        block.experts = part
    return communicator


def _part(exchange: Exchange, experts: Any, here: slice) -> Experts:
    """Copies the weights of the experts ``here``, which transformers has transposed."""

    def copy(weight: Tensor) -> Tensor:
        return weight.detach()[here].clone().transpose(1, 2)

    return Experts(exchange, copy(experts.gate_up_proj), copy(experts.down_proj))


def _blocks(model: nn.Module) -> dict[str, Any]:
    """Returns the blocks of a model with experts by their names."""
    version = transformers.__version__
    known = f"known are {' and '.join(_BLOCKS)} of transformers {KNOWN_VERSION}"
    found = {name: module for name, module in model.named_modules() if hasattr(module, "experts")}
    if not found:
        raise ArgumentError(
            f"model is {type(model).__name__} of transformers {version}, without a block of experts; {known}"
        )
    for name, block in found.items():
        unknown = _unknown(block)
        if version.split(".")[0] != KNOWN_VERSION:
            unknown = "a version that is not known"
        if unknown is not None:
            kind = type(block).__name__
            raise ArgumentError(f"{name} is {kind} of transformers {version}, {unknown}; {known}")
    return found


def _unknown(block: Any) -> str | None:
    """Returns in what a block differs from those that are known."""
    classes = _BLOCKS.get(type(block).__name__)
    if classes is None or not type(block).__module__.startswith("transformers."):
        return "which is not known"
    if isinstance(block.experts, Experts):
        return "whose experts are divided between ranks already"
    given = type(getattr(block, "gate", None)).__name__, type(block.experts).__name__
    if given != classes:
        return f"whose router and experts are {' and '.join(given)}, not {' and '.join(classes)}"
    for option, known in _OPTIONS.items():
        value = getattr(block.experts, option, known)
        if value != known:
            return f"whose experts have {option} = {value}, not {known}"
    arguments = list(inspect.signature(block.experts.forward).parameters)
    if arguments != _ARGUMENTS:
        return f"whose experts take {arguments}, not {_ARGUMENTS}"
    activation = type(block.experts.act_fn).__name__
    if activation not in ("SiLU", "SiLUActivation"):
        return f"whose experts have the activation {activation}, not SiLU"
    return None


def _sizes(name: str, block: Any) -> dict[str, Any]:
    """Returns the sizes of a block, as fields of a configuration."""
    gates_and_ups, downs = block.experts.gate_up_proj, block.experts.down_proj
    for field, weight in (("gate_up_proj", gates_and_ups), ("down_proj", downs)):
        if weight.dtype != torch.bfloat16:
            raise ArgumentError(
                f"{name}.experts.{field} is {weight.dtype}, but rows are BF16: model.to(torch.bfloat16)"
            )
    experts, hidden, intermediate = downs.shape
    if tuple(gates_and_ups.shape) != (experts, 2 * intermediate, hidden):
        raise ArgumentError(
            f"{name}.experts.gate_up_proj has the shape {list(gates_and_ups.shape)}, but down_proj has "
            f"{list(downs.shape)}"
        )
    return {"experts": experts, "top_k": block.gate.top_k, "hidden": hidden}
