"""Models of transformers whose experts are divided between ranks; skipped without torch and transformers."""

from __future__ import annotations

import copy
import importlib
import weakref

import ferry_ep as ferry
import pytest
from conftest import in_processes, in_threads, on_streams

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
parallel = importlib.import_module("ferry_ep.transformers")

SIZES = {
    "vocab_size": 24,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    # Of 1 / sqrt(hidden_size): each layer changes its input by about its size.
    "initializer_range": 0.125,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS = ["Mixtral", "Qwen3Moe"]
NEW_TOKENS = 3
#: Kind and seed of a model, and seeds of the ranks' prompts: those whose best logits, and routes, are so
#: far apart that an evaluation in BF16 chooses no others.
SEEDS = [
    ("Mixtral", 1, (4, 104)),
    ("Mixtral", 2, (6, 104, 201, 305)),
    ("Qwen3Moe", 1, (4, 106, 203, 304)),
    ("Qwen3Moe", 2, (13, 103)),
]


def model_of(kind, seed=1, dtype=torch.bfloat16, **changes):
    torch.manual_seed(seed)
    own = {
        "Mixtral": {"num_local_experts": 8, "intermediate_size": 32},
        "Qwen3Moe": {"num_experts": 8, "intermediate_size": 32, "moe_intermediate_size": 24},
    }
    config = getattr(transformers, f"{kind}Config")(**(SIZES | own[kind] | changes))
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


def prompt_of(seed, rank):
    """Returns a prompt, whose length is other than that of the next rank's."""
    torch.manual_seed(1000 + seed)
    return torch.randint(0, SIZES["vocab_size"], (1, 4 - rank % 2))


def divided(model, ranks, gpu=None):
    """Returns a copy of the model for each rank, and their communicators."""
    if gpu is None:
        group = ferry.Group.simulated(ranks, seed=3)
    else:
        group, model = (
            ferry.Group.local([gpu] * ranks, share_gpus=True),
            copy.deepcopy(model).to(f"cuda:{gpu}"),
        )
    config = parallel.config_of(model, max_tokens_per_rank=32, deadline=60.0)
    communicators = ferry.Communicators(group, ferry.Plan(group, config))
    models = [copy.deepcopy(model) for _ in range(ranks)]
    for one, communicator in zip(models, communicators, strict=True):
        assert parallel.expert_parallel(one, communicator) is communicator
    return models, communicators


def generated(model, prompt):
    """Returns the prompt with the greedy tokens, and the logits and routes of a pass over all of it."""
    with torch.no_grad():
        tokens = model.generate(
            prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        output = model(tokens, output_router_logits=True)
    top_k = SIZES["num_experts_per_tok"]
    routes = [logits.topk(top_k).indices.sort(dim=-1).values for logits in output.router_logits]
    return tokens, output.logits, torch.stack(routes)


class Rounded(torch.overrides.TorchFunctionMode):
    """Multiplies each new f64 tensor by 1 plus a zero, to differentiate by it."""

    def __init__(self):
        super().__init__()
        self.errors = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float64:
            return result
        with torch._C.DisableTorchFunction():
            given = [of.untyped_storage().data_ptr() for of in arguments if isinstance(of, torch.Tensor)]
            if result.untyped_storage().data_ptr() in given or not result.requires_grad:
                return result
            self.errors.append(torch.zeros_like(result, requires_grad=True))
            return result * (1 + self.errors[-1])


def bound_of(model, tokens):
    """Derives the bound on the difference of two BF16 evaluations of the model's logits.

    Each new tensor of an evaluation is rounded to BF16: times 1 + e with |e| <= u = 2^-8. To the first order
    a logit changes by the sum of g_i * e_i, where g_i is its derivative by e_i, here of the model in f64.
    (What a model computes in f32 stays f32 here, and is not rounded.) Take the roundings as independent and
    uniform: their sum is sub-Gaussian, and exceeds t with a probability of at most 2 exp(-t^2 / (2 v)), with
    v = u^2 / 3 * sum(g_i^2). The difference of two evaluations has 2 v. With t = 6 sqrt(2 v) it is 3e-8. The
    derivatives do not know of other routes, so tests compare these apart.
    """
    exact = copy.deepcopy(model).double()
    # Not by expert in place, which would hide the rounding of sums.
    exact.set_experts_implementation("batched_mm")
    with Rounded() as rounded:
        logits = exact(tokens).logits
    ones = torch.eye(logits.numel(), dtype=torch.float64).view(-1, *logits.shape)
    gradients = torch.autograd.grad(logits, rounded.errors, ones, is_grads_batched=True, allow_unused=True)
    squares = sum(of.square().flatten(1).sum(1) for of in gradients if of is not None)
    return 6 * (2 / 3) ** 0.5 * 2**-8 * squares.sqrt().view(logits.shape)


@pytest.mark.parametrize(("kind", "seed", "prompts"), SEEDS)
def test_logits_and_greedy_tokens(request, kind, seed, prompts):
    """Ranks are threads, each with its own prompt. Routes and greedy tokens are equal, logits are near."""
    model = model_of(kind, seed)
    ranks = len(prompts)
    prompts = [prompt_of(of_rank, rank) for rank, of_rank in enumerate(prompts)]
    gpu = request.config.getoption("--gpu")
    models, communicators = divided(model, ranks, gpu)
    device = "cpu" if gpu is None else f"cuda:{gpu}"
    results = on_streams(device, lambda rank: generated(models[rank], prompts[rank].to(device)), ranks)
    communicators.close()
    results = [[of.cpu() for of in result] for result in results]
    largest = 0.0
    for prompt, (tokens, logits, routes) in zip(prompts, results, strict=True):
        wanted_tokens, wanted, wanted_routes = generated(model, prompt)
        assert torch.equal(routes, wanted_routes)
        bound = bound_of(model, wanted_tokens)
        # The bound is small beside the logits: no other model is so near.
        assert bound.mean() < wanted.float().std() / 6
        steps = slice(-NEW_TOKENS - 1, -1)
        best = wanted[:, steps].topk(2).values
        assert (best[..., 0] - best[..., 1] > bound[:, steps].amax(-1)).all(), "the seed decides nothing"
        assert torch.equal(tokens, wanted_tokens)
        difference = (logits.double() - wanted.double()).abs()
        largest = max(largest, (difference / bound).max().item())
    # Nothing was rounded otherwise, or the models are the same one.
    assert 0 < largest <= 1


def test_ranks_keep_their_experts_alone():
    model = model_of("Mixtral")
    whole = sum(of.numel() for of in model.parameters())
    experts = sum(of.numel() for layer in model.model.layers for of in layer.mlp.experts.parameters())
    original = copy.deepcopy(model)
    old = weakref.ref(model.model.layers[1].mlp.experts.gate_up_proj)
    group = ferry.Group.simulated(1)
    with parallel.expert_parallel(model, group, max_tokens_per_rank=8, deadline=5.0) as communicator:
        assert old() is None
        assert communicator.plan.config.deadline == 5.0
        assert communicator.plan.config.max_tokens_per_rank == 8
    models, communicators = divided(original, 4)
    for rank, one in enumerate(models):
        assert sum(of.numel() for of in one.parameters()) == whole - experts * 3 // 4
        for layer, source in zip(one.model.layers, original.model.layers, strict=True):
            part, all_of = layer.mlp.experts, source.mlp.experts
            here = slice(2 * rank, 2 * rank + 2)
            assert torch.equal(part.gates_and_ups.transpose(1, 2), all_of.gate_up_proj[here])
            assert torch.equal(part.downs.transpose(1, 2), all_of.down_proj[here])
            assert torch.equal(layer.mlp.gate.weight, source.mlp.gate.weight)
    communicators.close()


PROCESS = """
import sys
import torch
import ferry_ep as ferry
from ferry_ep.transformers import expert_parallel
from test_transformers import batch_of, model_of
rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
model = model_of("Qwen3Moe")
group = ferry.Group.simulated_at(f"{folder}/ranks", rank, ranks, timeout=100)
with group, expert_parallel(model, group, max_tokens_per_rank=32, deadline=60.0), torch.no_grad():
    torch.save(model(batch_of(rank)).logits, f"{folder}/{rank}.pt")
"""


def batch_of(rank):
    """Returns sequences of another number and length for each rank."""
    torch.manual_seed(50 + rank)
    return torch.randint(0, SIZES["vocab_size"], (2 - rank, 5 + rank))


def test_ranks_as_processes_have_the_bits_of_threads(tmp_path):
    in_processes(PROCESS, 2, tmp_path)
    models, communicators = divided(model_of("Qwen3Moe"), 2)

    def work(rank):
        with torch.no_grad():
            return models[rank](batch_of(rank)).logits

    for rank, logits in enumerate(in_threads(work, 2)):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), logits)
    communicators.close()


def refused(match, model, error=ferry.ArgumentError, group=None, **options):
    with pytest.raises(error, match=match):
        parallel.expert_parallel(model, group or ferry.Group.simulated(1), **options)


def test_blocks_and_versions_that_are_not_known_are_refused(monkeypatch):
    version = transformers.__version__
    refused(f"model is Linear of transformers {version}, without a block", torch.nn.Linear(2, 2))
    refused("float32, but rows are BF16", model_of("Mixtral", dtype=torch.float32))
    refused("activation GELUActivation, not SiLU", model_of("Mixtral", hidden_act="gelu"))
    model = model_of("Qwen3Moe")
    block = model.model.layers[1].mlp
    for option in ("has_bias", "is_transposed", "_is_expert_parallel"):
        setattr(block.experts, option, True)
        refused(f"mlp is Qwen3MoeSparseMoeBlock of transformers {version}, .* {option} = True", model)
        setattr(block.experts, option, False)
    block.experts.forward = lambda rows, ids: rows
    refused(r"experts take \['rows', 'ids'\]", model)
    del block.experts.forward
    kind = type(block)
    block.__class__ = type("OtherBlock", (kind,), {})
    refused(f"model.layers.1.mlp is OtherBlock of transformers {version}, which is not known", model)
    block.__class__ = kind
    block.gate = torch.nn.Linear(64, 8)
    refused("router and experts are Linear and Qwen3MoeExperts", model)
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", "6.0.1")
        text = "MixtralSparseMoeBlock of transformers 6.0.1, a version that is not known; known are"
        refused(text, model_of("Mixtral"))


def test_communicators_that_do_not_fit_are_refused():
    model = model_of("Mixtral")
    for other in ({"num_local_experts": 4}, {"num_experts_per_tok": 3}):
        group = ferry.Group.simulated(1)
        config = parallel.config_of(model_of("Mixtral", **other), max_tokens_per_rank=8)
        with ferry.Communicator(group, ferry.Plan(group, config)) as communicator:
            refused("of the communicator is [34], but the model's is [28]", model, group=communicator)
            refused("give no options", model, group=communicator, deadline=1.0)
            refused("give no options", model, group=communicator, max_tokens_per_rank=8)
    refused("this process has the ranks", model, group=ferry.Group.simulated(2))
    refused("receive is compact", model, receive="compact")
    refused("shared_expert is true, but this layer", model, shared_expert=True)
    refused("skip_a2a is true, but this layer", model, skip_a2a=True)
    refused("top_k is 3, but the model has it", model, top_k=3)
    refused("dead_line is 1.0, but Config has no such field", model, dead_line=1.0)
    refused("experts is 8", model, error=ferry.PlanError, group=ferry.Group.simulated(3))
    refused("max_tokens_per_rank is 0", model, error=ferry.PlanError, max_tokens_per_rank=0)
    assert parallel.config_of(model).max_tokens_per_rank == 4096
    # Nothing was changed.
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))


def test_a_pass_with_too_many_tokens_or_gradients_is_refused():
    model = model_of("Mixtral")
    with parallel.expert_parallel(model, ferry.Group.simulated(1), max_tokens_per_rank=3):
        with pytest.raises(ferry.ArgumentError, match="gradient"):
            model(torch.tensor([[1, 2]]))
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]))
            with pytest.raises(ferry.TensorError, match=r"4 tokens given, .* max_tokens_per_rank = 3"):
                model(torch.tensor([[1, 2], [3, 4]]))
        refused("divided between ranks already", model)
    with torch.no_grad(), pytest.raises(ferry.ClosedError):
        model(torch.tensor([[1, 2]]))
