#!/usr/bin/env python3
"""An MoE layer of ferry_ep.torch on several GPUs, a process for each, eagerly and replayed as a CUDA graph.

    torchrun --nproc-per-node 4 tests/layer.py

The layer routes on the GPU, and the rows of its experts are counted there (torch._grouped_mm), so that the
host waits for nothing. Times are the period of layers back to back, in us, of the slowest rank. Beside them
stands what NCCL needs in a graph to carry the tokens alone: an all-gather and a reduce-scatter, without the
sort and the sum. Two tokens of each rank are compared with f64. Needs torch 2.11, NCCL and a GPU from sm_90
on for each process.
"""

import argparse
import math
import os

import ferry_ep as ferry
import torch
import torch.distributed as dist
from ferry_ep.torch import Exchange, MoE

# |y - f64| / |f64|: a unit in the last place of BF16.
BAR = 2**-7
SAMPLES = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="1,8,64,512,4096", help="of each rank (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=7168, help="default: %(default)s")
    parser.add_argument("--intermediate", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--experts", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--iterations", type=int, default=20, help="measured layers (default: %(default)s)")
    return parser.parse_args()


def expert(given: argparse.Namespace, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the weights of an expert, the same on every rank."""
    random = torch.Generator("cuda").manual_seed(1 + number)
    options = {"device": "cuda", "generator": random}
    gates_and_ups = torch.randn(given.hidden, 2 * given.intermediate, **options) * given.hidden**-0.5
    downs = torch.randn(given.intermediate, given.hidden, **options) * given.intermediate**-0.5
    return gates_and_ups.bfloat16(), downs.bfloat16()


def errors(given: argparse.Namespace, layer: MoE, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Returns the errors of the first tokens, beside f64."""
    ids, weights = layer.route(x[:SAMPLES])
    found = []
    for token in range(ids.shape[0]):
        exact = torch.zeros(given.hidden, dtype=torch.float64, device="cuda")
        for number, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gates_and_ups, downs = expert(given, number)
            gate, up = (x[token].double() @ gates_and_ups.double()).chunk(2)
            exact += weight * ((torch.nn.functional.silu(gate) * up) @ downs.double())
        found.append(((y[token].double() - exact).norm() / exact.norm()).item())
    return found


def period(call, iterations: int) -> float:
    """Returns the time of a call among so many back to back, in us, of the slowest rank. Collective."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(iterations):
        call()
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor(1e3 * begin.elapsed_time(end) / iterations, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def captured(call) -> torch.cuda.CUDAGraph:
    """Captures a call, after one that is not captured. Collective."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def measure(given: argparse.Namespace, group: ferry.Group, tokens: int) -> tuple[float, float, float, float]:
    """Returns the layer's time, that of its graph, NCCL's, and the largest error."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = ferry.Plan(
        group,
        ferry.Config(
            experts=given.experts, top_k=given.top_k, hidden=given.hidden, max_tokens_per_rank=tokens
        ),
    )
    with ferry.Communicator(group, plan) as communicator, torch.no_grad():
        # Few tokens may all go to one rank. For many, twice what comes on average: more would be gigabytes.
        capacity = "max" if tokens < 512 else 2 * tokens * given.top_k
        layer = MoE(Exchange(communicator, capacity=capacity), intermediate=given.intermediate)
        # Scores of order 1.
        router = torch.randn(layer.router.shape, generator=torch.Generator().manual_seed(0))
        layer.router.copy_(router * given.hidden**-0.5)
        for index in range(plan.local_experts):
            weights = expert(given, plan.first_expert(rank) + index)
            layer.experts.gates_and_ups[index], layer.experts.downs[index] = weights
        x = torch.randn(tokens, given.hidden, generator=torch.Generator().manual_seed(1 + rank))
        x = x.bfloat16().cuda()

        y = torch.empty_like(x)
        eager = period(lambda: layer(x), given.iterations)
        graph = captured(lambda: y.copy_(layer(x)))
        y.fill_(math.nan)
        replayed = period(graph.replay, given.iterations)
        found = errors(given, layer, x, y) + errors(given, layer, x, layer(x))
        # Before NCCL's maximum, which may lose NaN.
        assert all(error <= BAR for error in found), f"rank {rank}: errors {found}, allowed {BAR}"
        worst = torch.tensor(max(found), device="cuda")
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        fault = communicator.check()
        assert fault is None, fault

        gathered = torch.empty(ranks * tokens, given.hidden, dtype=torch.bfloat16, device="cuda")

        def carry() -> None:
            dist.all_gather_into_tensor(gathered, x)
            dist.reduce_scatter_tensor(y, gathered)

        alone = captured(carry)
        nccl = period(alone.replay, given.iterations)
        del graph, alone
        communicator.assume_no_graphs()
    return eager, replayed, nccl, worst.item()


def main() -> None:
    given = arguments()
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    is_first = dist.get_rank() == 0
    if is_first:
        print(f"{dist.get_world_size()} ranks, {torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(given)
        print("tokens | layer, eager | as a graph | NCCL: all-gather, reduce-scatter | error", flush=True)
    with ferry.Group.node(ferry.torch_bootstrap(), device=device) as group:
        for tokens in map(int, given.tokens.split(",")):
            eager, replayed, nccl, worst = measure(given, group, tokens)
            times = f"{eager:12.1f} | {replayed:10.1f} | {nccl:32.1f}"
            if is_first:
                print(f"{tokens:6} | {times} | {worst:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
