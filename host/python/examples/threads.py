"""A thread for each rank, each with its own communicator, in the simulator."""

from concurrent.futures import ThreadPoolExecutor

import ferry_ep as ferry
import numpy as np

group = ferry.Group.simulated(4)
plan = ferry.Plan(group, ferry.Config(experts=8, top_k=2, hidden=64, max_tokens_per_rank=3))
ranks = ferry.Communicators(group, plan)


def work(rank: ferry.Communicator) -> float:
    """Makes three rounds of one rank, whose experts return their input."""
    x = ferry.to_bf16(np.full((3, 64), 1 + rank.rank))
    ids = np.array([[0, 3], [5, 7], [2, -1]], dtype=np.int32)
    for _ in range(3):
        received = rank.dispatch(x, ids)
        combined = rank.combine(received.tokens)
        if fault := rank.check():
            print(fault)
    return float(ferry.from_bf16(combined)[0, 0])


with group, ranks, ThreadPoolExecutor(len(ranks)) as pool:
    results = list(pool.map(work, ranks))
print(results)
assert results == [2.0, 4.0, 6.0, 8.0]
