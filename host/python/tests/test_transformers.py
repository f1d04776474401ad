"""Models that transformers divides between ranks, with Ferry; skipped without torch and transformers."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import ferry_ep as ferry
import pytest
from conftest import in_processes
from transformers_rank import NEW_TOKENS

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip(
    "transformers", minversion="5.23", reason="transformers 5.23 is not installed"
)
pytest.importorskip(
    "accelerate", reason="accelerate is not installed: transformers loads divided models by it"
)
parallel = importlib.import_module("ferry_ep.transformers")

EXPERTS, TOP_K = 8, 2
SIZES = {
    "vocab_size": 24,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "head_dim": 16,
    # Of 1 / sqrt(hidden_size): each layer changes its input by about its size.
    "initializer_range": 0.125,
    "bos_token_id": None,
    "eos_token_id": None,
}
SMALL = {"num_experts": EXPERTS, "moe_intermediate_size": 24, "intermediate_size": 32}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
#: Families whose configurations have a plan for experts, with their own sizes.
FAMILIES = {
    "Mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 32},
    "GptOss": {"num_local_experts": EXPERTS, "intermediate_size": 32},
    "DeepseekV3": LATENT
    | {"n_routed_experts": EXPERTS, "moe_intermediate_size": 24, "intermediate_size": 32}
    | {"num_key_value_heads": 4, "head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
    "Qwen2Moe": SMALL | {"shared_expert_intermediate_size": 24},
    "Qwen3Moe": SMALL,
    "Olmoe": {"num_experts": EXPERTS, "intermediate_size": 32},
}
#: Calls of a layer of experts: of torch's collectives, and of Ferry.
EXCHANGE = {"alltoall_base_": 1, "all_to_all_single": 2}
GATHER = {"_allgather_base_": 1}
#: Ranks, sizes of the groups, families, and calls of a layer by implementation.
LAYOUTS = {
    "one batch": (
        2,
        {"tp_size": 2, "ep_size": 2},
        list(FAMILIES),
        {
            "ferry": (GATHER, 2),
            "auto": ({"allreduce_": 1}, 0),
            "all_to_all": (EXCHANGE | {"all_gather_into_tensor": 1}, 0),
        },
    ),
    "two batches": (
        2,
        {"fsdp_size": 2, "ep_size": 2},
        list(FAMILIES)[:2],
        {"ferry": ({}, 2), "auto": (EXCHANGE, 0)},
    ),
    "two batches on two ranks each": (
        4,
        {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
        list(FAMILIES)[:2],
        {"ferry": (GATHER, 2), "auto": (EXCHANGE | {"all_gather_into_tensor": 1}, 0)},
    ),
}
PROCESS = """
from transformers_rank import main
main({sizes!r}, {implementations!r})
"""


def save_model(folder, kind):
    """Saves a model with random weights."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | FAMILIES[kind]))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder / f"{kind}Config")


@pytest.fixture(scope="module", params=LAYOUTS)
def ran(request, tmp_path_factory):
    """What the ranks of a layout wrote of all its models."""
    ranks, sizes, families, calls = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("models")
    for kind in families:
        save_model(folder, kind)
    gpu = request.config.getoption("--gpu")
    code = PROCESS.format(sizes=sizes, implementations=list(calls))
    in_processes(code, ranks, folder, -1 if gpu is None else gpu, patience=400)
    results = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
    return sizes, families, calls, results


def test_greedy_tokens_are_those_of_transformers_own(ran):
    _, families, calls, results = ran
    for kind in families:
        for of_rank in results:
            mine, *others = (of_rank[f"{kind}Config", name]["tokens"] for name in calls)
            assert all(tokens == mine for tokens in others), kind
            assert len(mine[0]) in (NEW_TOKENS + 4, NEW_TOKENS + 5)
    # Not always the same token.
    assert (
        len({token for of_rank in results for run in of_rank.values() for token in run["tokens"][0][5:]}) > 5
    )


def test_calls_of_a_layer(ran):
    _, families, calls, results = ran
    layers = SIZES["num_hidden_layers"]
    for kind in families:
        for name, (collectives, ferrys) in calls.items():
            for of_rank in results:
                run = of_rank[f"{kind}Config", name]
                assert run["collectives"] == {call: layers * count for call, count in collectives.items()}
                assert run["ferry"] == layers * ferrys


def test_experts_compute_each_token_once(ran):
    sizes, families, calls, results = ran
    tokens = sum(5 - batch % 2 for batch in range(sizes.get("fsdp_size", 1)))
    for kind in families:
        for name in calls:
            pairs = [of_rank[f"{kind}Config", name]["pairs"] for of_rank in results]
            assert sum(pairs) == tokens * TOP_K * SIZES["num_hidden_layers"], (kind, name)


def test_gradients_are_those_of_transformers_own(ran):
    """An operation rounds to BF16, by 2^-8 at most: some of them, of which few are alike, remain far below
    the bound, and a gradient that lacks a rank's or a slice's part, or has it twice, is far above it.
    """
    _, families, _, results = ran
    for kind in families:
        for of_rank in results:
            mine, wanted = (of_rank[f"{kind}Config", name]["gradients"] for name in ("ferry", "auto"))
            assert mine.keys() == wanted.keys()
            names = {name.rpartition(".")[2] for name in mine if ".experts." in name}
            assert {"gate_up_proj", "down_proj"} <= names
            for name, exact in wanted.items():
                given, exact = torch.as_tensor(mine[name]), torch.as_tensor(exact)
                assert (given - exact).norm() <= exact.norm() / 16, (kind, name)


@pytest.fixture
def mesh(tmp_path, request):
    """A mesh of one process."""
    gpu = request.config.getoption("--gpu")
    kind = "cpu" if gpu is None else "cuda"
    if gpu is not None:
        torch.cuda.set_device(gpu)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh(kind, (1,))
    torch.distributed.destroy_process_group()


def simulated(config, ep_mesh):
    group = ferry.Group.simulated(1)
    return ferry.Communicator(group, ferry.Plan(group, config))


def layer_of(mesh, dtype=torch.bfloat16, implementation="grouped_mm", **options):
    """Returns a layer of experts with Ferry on one rank, and its registration."""
    experts = importlib.import_module("transformers.models.mixtral.modeling_mixtral").MixtralExperts
    config = transformers.MixtralConfig(**(SIZES | FAMILIES["Mixtral"]))
    config._experts_implementation = implementation
    torch.manual_seed(2)
    device = torch.device("cpu" if mesh.device_type == "cpu" else torch.cuda.current_device())
    made = experts(config).to(device, dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.125)
    made._is_expert_parallel = True
    where = {"connect": simulated} if device.type == "cpu" else {}
    registration = parallel.register(**({"max_tokens_per_rank": 3, "deadline": 5.0} | where | options))
    implementation = parallel.EPImplementationInterface()["ferry"](made, mesh, mesh)
    return implementation, registration, made


def input_of(device, seed, tokens=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, SIZES["hidden_size"], generator=generator).to(device, torch.bfloat16)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.to(device)
    weights = torch.rand(tokens, TOP_K, generator=generator).to(device)
    return x, ids, weights


def test_a_captured_pass_has_the_bits_of_an_eager_one(mesh):
    if mesh.device_type == "cpu":
        pytest.skip("graphs need a GPU: --gpu")
    layer, registration, experts = layer_of(mesh)
    device = experts.down_proj.device
    with registration, torch.no_grad():
        given = input_of(device, 1)
        layer(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sums = layer(*given)
        for seed in range(2, 5):
            fresh = input_of(device, seed)
            for place, tensor in zip(given, fresh, strict=True):
                place.copy_(tensor)
            graph.replay()
            torch.cuda.synchronize()
            captured = sums.clone()
            assert captured.abs().max() > 0 and torch.equal(captured, layer(*fresh))
        del graph, sums
        (communicator,) = registration.communicators
        communicator.assume_no_graphs()


def test_a_capture_before_the_first_pass_is_refused(mesh, monkeypatch):
    layer, registration, experts = layer_of(mesh)
    with registration, monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(parallel, "_is_captured", lambda tensor: True)
        with pytest.raises(ferry.OrderError, match="a graph is captured, but the first pass"):
            layer(*input_of(experts.down_proj.device, 1))


def test_passes_that_do_not_fit_are_refused(mesh):
    layer, registration, experts = layer_of(mesh)
    device = experts.down_proj.device
    x, ids, weights = input_of(device, 1, tokens=4)
    with torch.no_grad():
        with pytest.raises(
            ferry.TensorError, match=r"hidden_states: wanted torch.bfloat16, given torch.float32"
        ):
            layer(x.float(), ids, weights)
        with pytest.raises(ferry.TensorError, match=r"hidden_states: wanted at most 3 tokens .*, given 4"):
            layer(x, ids, weights)
        wanted = experts(x[:3], ids[:3], weights[:3])
        assert torch.equal(layer(x[:3], ids[:3], weights[:3]), wanted)
        assert len(registration.communicators) == 1
        registration.close()
        with pytest.raises(ferry.ClosedError, match="the registration was closed"):
            layer(x[:3], ids[:3], weights[:3])


def test_all_ranks_of_a_batch_refuse_one_whose_longest_slice_does_not_fit(mesh):
    layer, registration, experts = layer_of(mesh)
    given = input_of(experts.down_proj.device, 1, tokens=7)
    for rank in range(2):
        # Of 7 tokens the last rank has 3.
        layer.tp_mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda rank=rank: rank)
        with torch.no_grad(), pytest.raises(ferry.TensorError, match=r"at most 3 tokens .*, given 4"):
            layer(*given)
    assert registration.communicators == ()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("shares_batch", [True, False])
def test_experts_without_a_token_have_gradients_of_zeros(mesh, implementation, shares_batch):
    layer, registration, experts = layer_of(mesh, implementation=implementation)
    layer.shares_batch = shares_batch
    x, ids, weights = input_of(experts.down_proj.device, 1)
    with registration:
        sums = layer(x.requires_grad_(), torch.full_like(ids, -1), weights)
        sums.float().sum().backward()
    assert not sums.any() and not x.grad.any()
    for parameter in experts.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_a_registration_with_an_open_round_is_closed_once_it_was_given_up(mesh, monkeypatch):
    layer, registration, experts = layer_of(mesh)
    given = input_of(experts.down_proj.device, 1)

    def failing(*_):
        raise ZeroDivisionError

    with torch.no_grad(), monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(layer, "experts_forward", failing)
        layer(*given)
    with pytest.raises(ferry.OrderError, match="close is out of order: a round is dispatched"):
        registration.close()
    (communicator,) = registration.communicators
    communicator.give_up()
    with torch.no_grad():
        layer(*given)
    registration.close()
    assert registration.communicators == ()


def test_options_and_communicators_that_do_not_fit_are_refused(mesh):
    for option, why in (
        ("hidden", "the model or its layers have it"),
        ("dead_line", "Config has no such field"),
    ):
        with pytest.raises(ferry.ArgumentError, match=f"{option} is 8, but {why}"):
            parallel.register(max_tokens_per_rank=3, **{option: 8})
    given = input_of(mesh.device_type, 1)

    def other(config, ep_mesh):
        return simulated(ferry.Config(experts=8, top_k=2, hidden=64, max_tokens_per_rank=9), ep_mesh)

    for connect, match in ((other, "max_tokens_per_rank of connect's"), (lambda *_: 7, "connect returned 7")):
        layer, _, _ = layer_of(mesh, connect=connect)
        with torch.no_grad(), pytest.raises(ferry.ArgumentError, match=match):
            layer(*given)
