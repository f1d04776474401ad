"""DeepEP's ``Buffer`` over Ferry in processes that meet by Gloo: simulated, or sharing a GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("ferry_ep.deep_ep")

#: Of each process. The simulated world stands for `rig.World`, whose ranks are threads.
PROCESS = """
import sys, types
import ferry_ep as ferry, torch
from ferry_ep import deep_ep
from ferry_ep.deep_ep.utils import bench, init_dist
from deep_ep_blocks import back, check_numbers, check_rows, send, sums
from deep_ep_rig import Tokens, check_received, dispatch, by_rank, same

path, local_rank, ranks, gpu = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
connect = None
rank, size, process_group = init_dist(local_rank, ranks)
assert (rank, size, process_group.size()) == (local_rank, ranks, ranks)
assert torch.get_default_dtype() == torch.bfloat16
torch.set_default_dtype(torch.float32)
torch.set_default_device("cpu")
if gpu == "none":
    group = ferry.Group.simulated_at(path, rank, ranks, timeout=20, patience=20)
    def connect(config, given):
        assert given is process_group
        return ferry.Communicator(group, ferry.Plan(group, config))
else:
    torch.cuda.set_device(int(gpu))
world = types.SimpleNamespace(ranks=ranks, device="cpu" if gpu == "none" else "cuda:" + gpu)
buffer = deep_ep.Buffer(
    process_group, 1 << 20, low_latency_mode=True, explicitly_destroy=True, connect=connect
)
handles = []
for seed in range(4):
    tokens = Tokens(seed, world, [5, 0, 7, 3][:ranks] if seed else [4] * ranks)
    received = dispatch(buffer, *tokens.given(rank), tokens.experts)
    handles.append((tokens, check_received(tokens, rank, received)))
    same(buffer.combine(tokens.answers(rank, received[0]), handles[-1][1])[0], tokens.sums(rank))
for is_split in (False, True):
    rows, count, handle, _, hook = send(buffer, tokens, rank, use_fp8=False, return_recv_hook=is_split)
    hook and hook()
    check_rows(tokens, rank, rows)
    check_numbers(tokens, rank, count, handle)
    summed, _, hook = back(buffer, tokens, rank, handle, return_recv_hook=is_split)
    hook and hook()
    same(summed, sums(tokens, rank))
rows, _, _, counts, handle, _ = by_rank(buffer, tokens, rank)
same(rows, tokens.received(rank)["x"])
assert counts == tokens.received(rank)["counts"]
for tokens, handle in handles:
    answers = tokens.answers(rank, tokens.received(rank)["x"]).to(world.device)
    same(buffer.combine(answers, handle)[0], tokens.sums(rank))
mean, least, most = bench(lambda: buffer.combine(answers, handle), 1, 3)
assert 0 < least <= mean <= most
buffer.destroy()
if connect is not None:
    group.close()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
print("right")
"""


def test_processes(tmp_path, request):
    ranks, gpu = 2, request.config.getoption("--gpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "MASTER_PORT": str(port)}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        environment.pop(name, None)
    # None, or one that they share.
    environment["CUDA_VISIBLE_DEVICES"] = "" if gpu is None else str(gpu)
    arguments = [str(ranks), "none" if gpu is None else "0"]
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROCESS, str(tmp_path / "ranks"), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]
    try:
        ended = [(each.communicate(timeout=120), each.returncode) for each in started]
    finally:
        for each in started:
            each.kill()
    for (out, error), code in ended:
        assert code == 0 and out.strip().endswith("right"), [error for (_, error), _ in ended]
