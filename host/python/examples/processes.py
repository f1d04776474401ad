"""A process for each rank, in the simulator.

torchrun --nproc-per-node 2 processes.py          (torchrun sets RANK, WORLD_SIZE, LOCAL_RANK)
python processes.py 2                             (starts the processes itself)
"""

import os
import subprocess
import sys
import tempfile

import ferry_ep as ferry
import numpy as np


def work(rank: int, ranks: int, meeting: str) -> None:
    """Makes a round of one rank."""
    group = ferry.Group.simulated_at(meeting, rank, ranks)
    plan = ferry.Plan(group, ferry.Config(experts=2 * ranks, top_k=2, hidden=64, max_tokens_per_rank=1))
    with group, ferry.Communicator(group, plan) as communicator:
        x = ferry.to_bf16(np.full((1, 64), 1 + rank))
        ids = np.array([[0, 2 * ranks - 1]], dtype=np.int32)
        received = communicator.dispatch(x, ids)
        combined = communicator.combine(received.tokens)
        print(f"rank {rank} of {ranks}: {ferry.from_bf16(combined)[0, 0]}", flush=True)
        assert ferry.from_bf16(combined)[0, 0] == 2 * (1 + rank)


if "RANK" in os.environ:
    default = os.path.join(tempfile.gettempdir(), f"ferry-{os.getppid()}")
    meeting = os.environ.get("FERRY_MEETING", default)
    work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), meeting)
else:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            numbers = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "FERRY_MEETING": f"{folder}/ranks"}
            processes.append(subprocess.Popen([sys.executable, __file__], env=os.environ | numbers))
        failed = [process.wait() for process in processes]
    assert not any(failed), failed
