"""All ranks in one process and one thread: a round of a small MoE layer in the simulator, with NumPy."""

import ferry_ep as ferry
import numpy as np

RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 8, 2, 64, 5
random = np.random.default_rng(0)
group = ferry.Group.simulated(RANKS)
plan = ferry.Plan(
    group, ferry.Config(experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=TOKENS)
)
matrices = random.standard_normal((EXPERTS, HIDDEN, HIDDEN)).astype(np.float32) / 8
x = [ferry.to_bf16(random.standard_normal((TOKENS, HIDDEN))) for _ in range(RANKS)]
scores = [random.random((TOKENS, EXPERTS)).astype(np.float32) for _ in range(RANKS)]
ids = [np.argsort(-of_rank, axis=1)[:, :TOP_K].astype(np.int32) for of_rank in scores]
weights = [np.take_along_axis(of, of_ids, axis=1) for of, of_ids in zip(scores, ids, strict=True)]

with group, ferry.Communicators(group, plan) as ranks:
    calls = [ferry.Dispatch(*of_rank) for of_rank in zip(x, ids, weights, strict=True)]
    received = ranks.together(calls)
    calls = []
    for rank, output in zip(ranks, received, strict=True):
        rows = np.zeros_like(output.tokens)
        for expert in range(plan.local_experts):
            at = output.rows_of(expert)
            matrix = matrices[plan.first_expert(rank.rank) + expert]
            rows[at] = ferry.to_bf16(ferry.from_bf16(output.tokens[at]) @ matrix)
        calls.append(ferry.Combine(rows))
    sums = ranks.together(calls)

for rank in range(RANKS):
    wanted = sum(
        weights[rank][:, k : k + 1]
        * np.einsum("th,thg->tg", ferry.from_bf16(x[rank]), matrices[ids[rank][:, k]])
        for k in range(TOP_K)
    )
    error = np.abs(ferry.from_bf16(sums[rank]) - wanted).max()
    print(f"rank {rank}: largest error {error:.4f} of {np.abs(wanted).max():.2f}")
    assert error < 0.05
