"""Operators of torch, skipped without torch: `cargo xtask test-python --torch` has it, on the CPU.

With `pytest --gpu 0` tensors are on a GPU, which all ranks share. Set CUDA_MODULE_LOADING=EAGER for it, as a
kernel that torch loads late would wait for a round that waits for it.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import ferry_ep as ferry
import numpy as np
import pytest
from conftest import in_processes, on_streams
from oracle import Problem, bf16, bits

torch = pytest.importorskip("torch", reason="torch is not installed")
ferry_torch = pytest.importorskip("ferry_ep.torch")


def tensors_of(problem, rank, device):
    x = torch.from_numpy(problem.x[rank]).bfloat16()
    ids, weights = torch.from_numpy(problem.ids[rank]), torch.from_numpy(problem.weights[rank])
    return x.to(device), ids.to(device), weights.to(device)


def tensors(of, problem, rank):
    return tensors_of(problem, rank, of.device)


def answers_of(plan, rank, output):
    rows = torch.full_like(output.tokens, float("nan"))
    for group in range(plan.local_experts):
        at = output.rows_of(group)
        factor = 1 + (plan.first_expert(rank) + group) / 8
        rows[at] = (output.tokens[at].float() * factor).bfloat16()
    return rows


def answers(of, rank, output):
    return answers_of(of.plan, rank, output)


def as_bits(tensor):
    return tensor.cpu().view(torch.int16).numpy().view(np.uint16)


def test_tensors_of_torch(bench):
    of = bench(2)
    problem = of.problem(1)
    given = [tensors(of, problem, rank) for rank in range(2)]
    streams = None
    if of.device != "cpu":
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
    rows = of.together(ferry.Dispatch, *zip(*given, strict=True), streams=streams)
    of.ranks.synchronize(streams=streams)
    assert rows[0].tokens.dtype == torch.bfloat16 and rows[0].row_offsets.dtype == torch.int32
    given = [answers(of, rank, output) for rank, output in enumerate(rows)]
    if streams is not None:
        torch.cuda.synchronize()
    sums = of.together(ferry.Combine, given, streams=streams)
    of.ranks.synchronize(streams=streams)
    for rank, combined in enumerate(sums):
        np.testing.assert_array_equal(as_bits(combined), bits(bf16(problem.sums(rank, "reduced"))))


@pytest.mark.parametrize("format", ["fp8", "mxfp8:tiled", "mxfp4:row-major", "nvfp4-row:tiled"])
def test_formats(bench, format):
    of = bench(1, format=format, hidden=128)
    exchange = ferry_torch.Exchange(of.ranks[0])
    x, ids, weights = tensors(of, of.problem(2), 0)
    output = exchange.dispatch(x, ids, weights)
    plain = bench(1, gpu=None, format=format, hidden=128)
    problem = plain.problem(2)
    (wanted,) = plain.together(ferry.Dispatch, *problem.arguments)
    end = int(wanted.row_offsets[-1])
    codes = output.tokens.view(torch.uint8)[:end].cpu().numpy()
    np.testing.assert_array_equal(codes, wanted.tokens[:end])
    exchange.combine(torch.zeros(output.rows, 128, dtype=torch.bfloat16, device=of.device), 5)


@pytest.mark.parametrize("mode", ["reduced", "exact"])
def test_operators_in_threads(bench, mode):
    of = bench(4, combine=mode)
    problem = of.problem(3)

    def run(rank):
        exchange = ferry_torch.Exchange(of.ranks[rank])
        x, ids, weights = tensors(of, problem, rank)
        output = exchange.dispatch(x, ids, weights)
        given = weights if mode == "exact" else None
        return exchange.combine(answers(of, rank, output), 5, given)

    for rank, combined in enumerate(on_streams(of.device, run, 4)):
        np.testing.assert_array_equal(as_bits(combined), bits(bf16(problem.sums(rank, mode))))


def test_compiled_without_a_break(bench):
    of = bench(1)
    exchange = ferry_torch.Exchange(of.ranks[0])

    def layers(x, ids, weights):
        for _ in range(2):
            output = exchange.dispatch(x, ids, weights)
            x = exchange.combine(output.tokens * 2, x.shape[0]) + 1
        return x

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    for seed, tokens in ((1, 5), (2, 5), (3, 3)):
        given = tensors(of, of.problem(seed, tokens=tokens, holes=0), 0)
        torch.testing.assert_close(compiled(*given), layers(*given), rtol=0, atol=0)


def test_a_round_whose_result_nobody_reads_is_not_dropped(bench):
    of = bench(1)
    exchange = ferry_torch.Exchange(of.ranks[0])

    def unused(x, ids):
        output = exchange.dispatch(x, ids)
        exchange.combine(output.tokens, x.shape[0])
        return x + 1

    x, ids, _ = tensors(of, of.problem(1), 0)
    compiled = torch.compile(unused, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(x, ids)
        assert of.ranks[0].round == "idle"
    assert of.ranks[0]._end.native.counts() == (2, 2)


class Whole:
    """A communicator that makes the rest of the round with each call, for checks that repeat a call."""

    def __init__(self, rank, x, ids):
        self.rank, self.given, self.plan = rank, (x, ids), rank.plan
        self._end = SimpleNamespace(copies=True, output_names=rank._end.output_names)

    def dispatch(self, *arguments, out):
        self.rank.dispatch(*arguments, out=out)
        self.rank.combine(out.tokens)

    def combine(self, rows, *, topk_weights, out):
        self.rank.dispatch(*self.given)
        self.rank.combine(rows, out=out)


def test_opcheck(bench):
    of = bench(1)
    rank = of.ranks[0]
    exchange = ferry_torch.Exchange(rank)
    x, ids, weights = tensors(of, of.problem(4), 0)
    output = exchange.dispatch(x, ids, weights)
    exchange.combine(output.tokens, 5)
    whole = Whole(rank, x, ids)
    ferry_torch._communicators[exchange.handle] = lambda: whole
    state = exchange._state
    outputs = [getattr(output, name).clone() for name, *_ in exchange._layout]
    dispatch, combine = torch.ops.ferry.dispatch.default, torch.ops.ferry.combine.default
    torch.library.opcheck(dispatch, (exchange.handle, state, x, ids, weights, outputs))
    torch.library.opcheck(dispatch, (exchange.handle, state, x, ids, None, outputs))
    combined = torch.zeros(5, 64, dtype=torch.bfloat16, device=of.device)
    torch.library.opcheck(combine, (exchange.handle, state, output.tokens, None, combined))
    rows, ends = torch.randn(6, 8), torch.tensor([2, 5], dtype=torch.int32)
    torch.library.opcheck(torch.ops.ferry.grouped_mm.default, (rows, torch.randn(2, 8, 4), ends))


def test_outputs_that_are_given_are_overwritten(bench):
    of = bench(1)
    exchange = ferry_torch.Exchange(of.ranks[0])

    def layer(given, rows, out):
        output = exchange.dispatch(*given, out=rows)
        return output, exchange.combine(answers(of, 0, output), 5, out=out)

    rows, out = layer(tensors(of, of.problem(1), 0), None, None)
    problem = of.problem(2)
    given = tensors(of, problem, 0)
    assert layer(given, rows, out.fill_(float("nan"))) == (rows, out)
    np.testing.assert_array_equal(as_bits(out), bits(bf16(problem.sums(0, "reduced"))))

    def doubled(given, rows, out):
        exchange.dispatch(*given, out=rows)
        return exchange.combine(rows.tokens * 2, 5, out=out)

    wanted = doubled(given, rows, out).clone()
    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given, rows, out.fill_(float("nan"))), wanted, rtol=0, atol=0)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    rows.expert_ids = None
    with pytest.raises(ferry.TensorError, match=r"tensor expert_ids: .* given none"):
        exchange.dispatch(*given, out=rows)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("x", lambda x: x.float(), "elements of bf16, given f32"),
        ("x", lambda x: x.double(), "elements of bf16, given float64"),
        ("x", lambda x: x[:, :32], r"shape \[5, 64\], given \[5, 32\]"),
        ("x", lambda x: x[None], r"2 dimensions, given shape \[1, 5, 64\]"),
        ("topk_ids", lambda ids: ids[:3], r"shape \[5, 2\], given \[3, 2\]"),
        ("topk_weights", lambda weights: weights.repeat(1, 2)[:, ::2], r"given \[4, 2\]"),
        ("tokens", lambda rows: rows.float(), "elements of bf16, given f32"),
        ("tokens", lambda rows: rows.repeat(1, 2)[:, :64], "make it contiguous"),
        ("src_info", lambda info: info.long(), "elements of i32, given i64"),
        ("row_offsets", lambda offsets: offsets[:2], r"shape \[3\], given \[2\]"),
        ("expert_rows", lambda rows: rows[:3], "shape"),
        ("expert_rows", lambda rows: rows.half(), "elements of bf16, given f16"),
        ("combined", lambda out: out.repeat(1, 2)[:, :64], "make it contiguous"),
        ("combined", lambda out: out[:3].clone(), r"shape \[5, 64\], given \[3, 64\]"),
    ],
)
def test_tensors_of_operators_that_do_not_fit_are_named(bench, name, change, match):
    of = bench(1)
    exchange = ferry_torch.Exchange(of.ranks[0])
    given = dict(zip(("x", "topk_ids", "topk_weights"), tensors(of, of.problem(7), 0), strict=True))
    rows = exchange.dispatch(*given.values())
    out = exchange.combine(rows.tokens, 5)
    rows_of_experts = rows.tokens
    with pytest.raises(ferry.TensorError, match=match) as refused:
        if name in given:
            exchange.dispatch(*(given | {name: change(given[name])}).values(), out=rows)
        elif hasattr(rows, name) and name != "expert_rows":
            setattr(rows, name, change(getattr(rows, name)))
            exchange.dispatch(*given.values(), out=rows)
        else:
            exchange.dispatch(*given.values(), out=rows)
            combining = {"expert_rows": rows_of_experts, "combined": out}
            combining[name] = change(combining[name])
            exchange.combine(combining["expert_rows"], 5, out=combining["combined"])
    assert refused.value.name == name
    assert of.ranks[0].round == ("dispatched" if name in ("expert_rows", "combined") else "idle")


def test_gradients_and_ended_communicators_are_refused(bench):
    of = bench(1)
    exchange = ferry_torch.Exchange(of.ranks[0])
    x, ids, _ = tensors(of, of.problem(5), 0)
    with pytest.raises(ferry.ArgumentError, match="gradient"):
        exchange.dispatch(x.requires_grad_(), ids)
    with pytest.raises(ferry.TensorError, match="topk_ids"):
        exchange.dispatch(x.detach(), ids.long())
    group = ferry.Group.simulated(1)
    plan = ferry.Plan(group, ferry.Config(experts=1, top_k=1, hidden=8, max_tokens_per_rank=1))
    handle = ferry_torch.register(ferry.Communicator(group, plan))
    gc.collect()
    with pytest.raises(ferry.ClosedError, match="no"):
        torch.ops.ferry.combine(handle, torch.empty(0), x, None, x.detach().clone())
    of.ranks.close()
    with pytest.raises(ferry.ClosedError):
        exchange.dispatch(x.detach(), ids)


def dense(layers, x):
    """The layer of all ranks' experts, in f64 except where the layer rounds to BF16."""
    weights = [
        torch.cat([getattr(layer.experts, name) for layer in layers]).double()
        for name in ("gates_and_ups", "downs")
    ]
    ids, topk_weights = layers[0].route(x)
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(x.shape[0]):
        for number, weight in zip(ids[token].tolist(), topk_weights[token].tolist(), strict=True):
            gate, up = (x[token].double() @ weights[0][number]).bfloat16().double().chunk(2)
            inner = (gate * torch.sigmoid(gate) * up).bfloat16().double()
            result[token] += weight * (inner @ weights[1][number]).bfloat16().double()
    return result


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_layer_of_experts(bench, is_compiled):
    ranks = 1 if is_compiled else 2
    of = bench(ranks, experts=4)
    torch.manual_seed(1)
    router = torch.randn(4, 64).bfloat16()
    layers = []
    for rank in of.ranks:
        layer = ferry_torch.MoE(ferry_torch.Exchange(rank), 32)
        layer.router.copy_(router)
        layer.experts.gates_and_ups.copy_(torch.randn(layer.experts.gates_and_ups.shape) / 8)
        layer.experts.downs.copy_(torch.randn(layer.experts.downs.shape) / 6)
        layers.append(layer)
    x = [torch.randn(5, 64).bfloat16().to(of.device) for _ in layers]
    run = [
        torch.compile(layer, fullgraph=True, backend="aot_eager") if is_compiled else layer
        for layer in layers
    ]
    results = on_streams(of.device, lambda rank: run[rank](x[rank]), ranks)
    for rank, result in enumerate(results):
        # Three roundings to BF16 of sums of at most a few units, and two of the parts and the sum.
        torch.testing.assert_close(result.double(), dense(layers, x[rank]), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"format": "fp8", "hidden": 128}, "format is fp8"),
        ({"receive": "compact"}, "receive is compact"),
        ({"receive": "compact", "combine_weights": True}, "combine_weights is true"),
    ],
)
def test_a_layer_of_another_plan_is_refused(bench, config, match):
    of = bench(1, **config)
    with pytest.raises(ferry.ArgumentError, match=match):
        ferry_torch.MoE(ferry_torch.Exchange(of.ranks[0]), 32)


def over_gathered_rows(exchange, layer, x):
    """The layer over rows that stay as they came: gathered by expert, multiplied, weighted and summed."""
    ids, weights = layer.route(x)
    output = exchange.dispatch(x, ids, weights)
    experts, multiply = layer.experts, ferry_torch._multiply
    groups = len(experts.downs)
    order = torch.where(output.ids < 0, groups, output.ids).flatten().argsort(stable=True)
    rows = order // output.ids.shape[1]
    ends = output.expert_counts.cumsum(0).int()
    gate, up = multiply(output.tokens[rows], experts.gates_and_ups, ends).chunk(2, dim=-1)
    inner = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
    products = multiply(inner, experts.downs, ends).float() * output.weights.flatten()[order, None]
    # Picks of other ranks come behind the last group, where products are anything.
    products[torch.arange(len(order), device=x.device) >= ends[-1]] = 0
    sums = torch.zeros(output.tokens.shape, device=x.device).index_add_(0, rows, products)
    return exchange.combine(sums.bfloat16(), len(x))


@pytest.mark.parametrize("receive", ["strided", "compact"])
def test_a_layer_over_gathered_rows(bench, receive):
    ranks = 2
    # On one GPU all kernels that wait for peers must fit at a time.
    of = bench(ranks, experts=4, receive=receive, max_sms=16)
    by_expert = bench(ranks, experts=4, max_sms=16)
    torch.manual_seed(2)
    layers = [ferry_torch.MoE(ferry_torch.Exchange(rank), 32) for rank in by_expert.ranks]
    router = torch.randn(4, 64).bfloat16()
    for layer in layers:
        layer.router.copy_(router)
        layer.experts.gates_and_ups.copy_(torch.randn(layer.experts.gates_and_ups.shape) / 8)
        layer.experts.downs.copy_(torch.randn(layer.experts.downs.shape) / 6)
    x = [torch.randn(5, 64).bfloat16().to(of.device) for _ in layers]
    exchanges = [ferry_torch.Exchange(rank) for rank in of.ranks]
    results = on_streams(
        of.device, lambda rank: over_gathered_rows(exchanges[rank], layers[rank], x[rank]), ranks
    )
    for rank, result in enumerate(results):
        # As above.
        torch.testing.assert_close(result.double(), dense(layers, x[rank]), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("receive", ["view", "strided", "compact"])
def test_rows_as_they_came(bench, receive, id_type):
    of, plain = bench(2, receive=receive), bench(2, gpu=None, receive=receive)
    problem = of.problem(6)
    ids = [given.astype("int64" if id_type == torch.int64 else "int32") for given in problem.ids]
    wanted = plain.together(ferry.Dispatch, problem.arguments[0], ids, problem.arguments[2])

    def run(rank):
        exchange = ferry_torch.Exchange(of.ranks[rank])
        x, _, weights = tensors(of, problem, rank)
        output = exchange.dispatch(x, torch.from_numpy(ids[rank]).to(x.device), weights)
        shape = (output.rows, of.config.hidden)
        sums = exchange.combine(torch.ones(shape, dtype=torch.bfloat16, device=x.device), len(x))
        return output, sums

    for rank, (output, sums) in enumerate(on_streams(of.device, run, 2)):
        assert output.ids.dtype == id_type and (output.tokens is None) == (receive == "view")
        for name in ("src_info", "ids", "weights", "source_counts", "expert_counts"):
            np.testing.assert_array_equal(getattr(output, name).cpu().numpy(), getattr(wanted[rank], name))
        if receive != "view":
            here = output.src_info[:, 0].cpu().numpy() >= 0
            np.testing.assert_array_equal(as_bits(output.tokens)[here], wanted[rank].tokens[here])
        # Each rank with an expert of the token returns a row of ones.
        experts = of.plan.local_experts
        came = [
            len({number // experts for number in row if number >= 0}) for row in problem.ids[rank].tolist()
        ]
        np.testing.assert_array_equal(sums[:, 0].float().cpu().numpy(), came)


@pytest.mark.parametrize("receive", ["by-expert", "compact"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_captured_graph(bench, ranks, receive):
    """Two rounds in a graph of each rank; replays of fresh tokens have the bits of eager calls."""
    of = bench(ranks, receive=receive)
    if of.device == "cpu":
        pytest.skip("graphs are captured on a GPU: pytest --gpu 0")
    exchanges = [ferry_torch.Exchange(rank) for rank in of.ranks]

    def layers(rank, x, ids, weights):
        for _ in range(2):
            output = exchanges[rank].dispatch(x, ids, weights)
            x = exchanges[rank].combine(output.tokens * 2, x.shape[0])
        return x

    given = [tensors(of, of.problem(0), rank) for rank in range(ranks)]
    on_streams(of.device, lambda rank: layers(rank, *given[rank]), ranks)
    graphs, results = [], []
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    for rank in range(ranks):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[rank], stream=streams[rank]):
            results.append(layers(rank, *given[rank]))
    for seed in range(1, 4):
        for rank in range(ranks):
            for tensor, fresh in zip(given[rank], tensors(of, of.problem(seed), rank), strict=True):
                tensor.copy_(fresh)
            results[rank].fill_(float("nan"))
        torch.cuda.synchronize()
        for rank in range(ranks):
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay()
        torch.cuda.synchronize()
        eager = on_streams(of.device, lambda rank: layers(rank, *given[rank]), ranks)
        for rank in range(ranks):
            np.testing.assert_array_equal(as_bits(results[rank]), as_bits(eager[rank]))
            assert torch.isfinite(results[rank]).all() and results[rank].any()
    graphs.clear()
    for rank in of.ranks:
        rank.assume_no_graphs()
    of.ranks.close()


PROCESS = """
import sys
import torch
import torch.distributed as distributed
import ferry_ep as ferry
import ferry_ep.torch
from oracle import Problem
from test_torch import answers_of, tensors_of
rank, ranks, gpu, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
with ferry.Group.node(ferry.torch_bootstrap(), gpu, share_gpus=True) as group:
    config = ferry.Config(experts=2 * ranks, top_k=2, hidden=64, max_tokens_per_rank=5, deadline=20.0)
    plan = ferry.Plan(group, config)
    with ferry.Communicator(group, plan) as communicator:
        exchange = ferry.torch.Exchange(communicator)
        for seed in range(3):
            x, ids, weights = tensors_of(Problem(seed, ranks, 5, 64, 2 * ranks, 2), rank, f"cuda:{gpu}")
            output = exchange.dispatch(x, ids, weights)
            sums = exchange.combine(answers_of(plan, rank, output), 5)
            torch.save(sums.cpu(), f"{folder}/{seed}-{rank}.pt")
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_that_share_a_gpu(request, tmp_path, ranks):
    gpu = request.config.getoption("--gpu")
    if gpu is None:
        pytest.skip("processes share a GPU: pytest --gpu 0")
    in_processes(PROCESS, ranks, gpu, tmp_path)
    for seed in range(3):
        wanted = Problem(seed, ranks, 5, 64, 2 * ranks, 2)
        for rank in range(ranks):
            sums = torch.load(tmp_path / f"{seed}-{rank}.pt")
            np.testing.assert_array_equal(as_bits(sums), bits(bf16(wanted.sums(rank, "reduced"))))
