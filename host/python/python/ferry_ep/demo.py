"""``python -m ferry_ep.demo``: rounds of simulated ranks, each compared with the sums that NumPy computes."""

from __future__ import annotations

import argparse

from . import Combine, Communicators, Config, Dispatch, Group, Plan, from_bf16, to_bf16
from .core.commands import sentences

PROGRAM = "python -m ferry_ep.demo"


@sentences(PROGRAM)
def main(arguments: list[str] | None = None) -> None:
    """Runs the demo with these arguments, by default the program's."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="simulated ranks (default: 4)")
    parser.add_argument("--experts", type=int, default=2, help="experts of a rank (default: 2)")
    parser.add_argument("--tokens", type=int, default=6, help="tokens of a rank (default: 6)")
    parser.add_argument("--hidden", type=int, default=64, help="elements of a token (default: 64)")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tokens and of the simulation")
    given = parser.parse_args(arguments)
    import numpy

    random = numpy.random.default_rng(given.seed)
    group = Group.simulated(given.ranks, given.seed)
    experts = given.ranks * given.experts
    plan = Plan(
        group,
        Config(
            experts=experts,
            top_k=given.top_k,
            hidden=given.hidden,
            max_tokens_per_rank=max(given.tokens, 1),
        ),
    )
    print(f"{group!r}\n{plan!r}: a window has {plan.window_bytes:,} bytes")
    every = range(given.ranks)
    with Communicators(group, plan) as ranks:
        for number in range(given.rounds):
            x = [to_bf16(random.standard_normal((given.tokens, given.hidden))) for _ in every]
            ids, weights = [], []
            for _ in every:
                order = random.random((given.tokens, experts)).argsort(axis=1)
                ids.append(order[:, : given.top_k].astype(numpy.int32))
                weights.append(random.random((given.tokens, given.top_k), dtype=numpy.float32))
            received = ranks.together([Dispatch(*of) for of in zip(x, ids, weights, strict=True)])
            sizes = [numpy.diff(output.row_offsets.astype(int)).tolist() for output in received]
            # The experts return their input, so that each sum is the token times the sum of its weights.
            sums = ranks.together([Combine(output.tokens) for output in received])
            worst = 0.0
            for rank in every:
                wanted = from_bf16(x[rank]) * weights[rank].sum(axis=1, keepdims=True)
                error = numpy.abs(from_bf16(sums[rank]) - wanted)
                worst = max(worst, float((error / (1e-6 + numpy.abs(wanted))).max(initial=0)))
            print(
                f"round {number + 1}: rows of each rank's experts {sizes}; largest relative error {worst:.2g}"
            )
            # Each rank's part and their sum are rounded to BF16: at most 2^-9 each.
            if worst > 2 * 2**-8:
                raise SystemExit("the sums are wrong")
    group.close()


if __name__ == "__main__":
    main()
