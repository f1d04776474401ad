"""``python -m ferry_ep.bench``: time of rounds of one process, on its GPUs or in the simulator.

Dispatch and combine of each rank are prepared, in device memory; experts return their rows. Times of the
simulator are those of the simulation: they say nothing about GPUs. `cargo xtask bench` of the repository has
the times of kernels beside the machine's limits.
"""

from __future__ import annotations

import argparse
import statistics
import time

from . import Communicators, Config, Group, Plan, to_bf16
from .core.commands import sentences

PROGRAM = "python -m ferry_ep.bench"


@sentences(PROGRAM)
def main(arguments: list[str] | None = None) -> None:
    """Measures with these arguments, by default the program's."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=PROGRAM, description=description)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--devices", type=lambda text: [int(number) for number in text.split(",")])
    where.add_argument("--simulated", action="store_true", help="the simulator (default without --devices)")
    parser.add_argument("--ranks", type=int, default=2, help="simulated ranks (default: 2)")
    parser.add_argument("--experts", type=int, default=8, help="default: 8")
    parser.add_argument("--top-k", type=int, default=2, help="default: 2")
    parser.add_argument("--hidden", type=int, default=1024, help="default: 1024")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a rank (default: 16)")
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds (default: 20)")
    given = parser.parse_args(arguments)
    import numpy

    group = Group.local(given.devices) if given.devices else Group.simulated(given.ranks)
    config = Config(
        experts=given.experts,
        top_k=given.top_k,
        hidden=given.hidden,
        max_tokens_per_rank=given.tokens,
    )
    random = numpy.random.default_rng(0)
    with Communicators(group, Plan(group, config)) as ranks:
        calls = []
        for rank in ranks:
            x = rank.empty((given.tokens, given.hidden), "bf16")
            x.copy_from(to_bf16(random.standard_normal((given.tokens, given.hidden))))
            ids = rank.empty((given.tokens, given.top_k), "i32")
            order = random.random((given.tokens, given.experts)).argsort(axis=1)
            ids.copy_from(order[:, : given.top_k].astype(numpy.int32))
            rows = rank.outputs(capacity="distinct")
            dispatch = rank.prepare_dispatch(x, ids, out=rows)
            combine = rank.prepare_combine(rows.tokens, out=rank.combined(tokens=given.tokens))
            calls.append((dispatch, combine))
        host, whole = [], []
        for number in range(given.rounds + 3):
            begin = time.perf_counter()
            for dispatch, _ in calls:
                dispatch()
            for _, combine in calls:
                combine()
            enqueued = time.perf_counter()
            ranks.synchronize()
            if number >= 3:
                host.append(1e6 * (enqueued - begin) / len(calls))
                whole.append(1e6 * (time.perf_counter() - begin))
    group.close()
    device = "simulated: no measure of a GPU" if not given.devices else f"GPUs {given.devices}"
    print(f"{len(calls)} ranks, {device}; {config}")
    print(f"host time of dispatch and combine, a rank: {statistics.median(host):.1f} us (median)")
    print(f"a round with its wait: {statistics.median(whole):.1f} us (median of {given.rounds})")


if __name__ == "__main__":
    main()
