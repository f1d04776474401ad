"""Random sequences of calls of DeepEP's ``Buffer`` over Ferry, beside plain torch.

``python deep_ep_sequences.py --seconds 3600 --log FILE`` runs them for long; the tests run some seeds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings

import torch
from deep_ep_blocks import ENCODINGS, MOST, back, check_numbers, check_rows, send, sums
from deep_ep_rig import Tokens, World, by_rank, check_handle, check_received, dispatch, encoded, now, same
from ferry_ep.deep_ep import Buffer, Config

#: Calls of a sequence.
CALLS = 24
#: Kinds of calls, as often as they come.
KINDS = (
    *("topk", "topk", "topk", "worst", "by rank", "again", "again", "combine", "combine", "combine"),
    *("low latency", "low latency", "low-latency combine", "low-latency combine"),
)


class Sequence:
    """Calls that follow from a seed, the same on all ranks, with data of each."""

    def __init__(self, seed: int, gpu: int | None = None) -> None:
        choose = random.Random(seed)
        self.seed, self.choose = seed, choose
        self.world = World(choose.choice([1, 2, 2, 3, 4]), gpu)
        self.hidden, self.top_k = choose.choice([8, 64, 136, 128, 512]), choose.choice([1, 2, 5])
        self.experts = self.world.ranks * choose.choice([5, 6, 9])
        self.calls = [self.call(at) for at in range(CALLS)]

    def call(self, at: int) -> dict:
        """Draws a call. Those with handles name one of the dispatches before it."""
        choose = self.choose
        kind = choose.choice(KINDS)
        most = MOST if kind == "low latency" else 12
        counts = [choose.choice([0, 1, choose.randrange(most), most]) for _ in range(self.world.ranks)]
        tokens = Tokens(
            1000 * self.seed + at,
            self.world,
            counts,
            experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            holes=choose.choice([0, 0.3, 1]),
        )
        is_async = choose.random() < 0.5
        encodings = {0: [None], 128: [None, "f32", "columns"], 512: [None, "f32", "packed"]}
        return {
            "kind": kind,
            "low latency": choose.choice(
                [name for name in ENCODINGS if self.hidden % {"bf16": 8, "ue8m0": 512}.get(name, 128) == 0]
            ),
            "is_split": choose.random() < 0.7,
            "is_late": choose.random() < 0.5,
            "encoding": choose.choice(encodings[self.hidden if self.hidden % 128 == 0 else 0]),
            "tokens": tokens,
            "handle": choose.random(),
            "worst": sum(counts) + choose.choice([0, 1, 7]),
            "alignment": choose.choice([1, 1, 16, 128]),
            "has_weights": choose.random() < 0.5,
            "biases": choose.choice([0, 0, 1, 2]),
            "options": {
                "async_finish": is_async,
                "config": choose.choice([None, Config(choose.choice([2, 8]))]),
            },
            "event": choose.random() < 0.5,
            "allocate": choose.random() < 0.5,
        }

    def run(self) -> None:
        """Makes all calls on all ranks. Raises for the first wrong result."""
        self.world.run(lambda rank: self.run_rank(rank))
        self.world.end()

    def run_rank(self, rank: int) -> None:
        buffer = self.world.buffer(rank, low_latency_mode=True)
        #: Tokens of each dispatch, its handle, and whether it had ids.
        sent: list = []
        latency = Latency(buffer, rank)
        for at, call in enumerate(self.calls):
            kind = call["kind"] if sent else "topk"
            try:
                if kind.startswith("low"):
                    latency.make(kind, call)
                else:
                    self.make(kind, call, buffer, rank, sent)
            except Exception as error:
                raise AssertionError(f"seed {self.seed}, call {at} ({kind}), rank {rank}") from error
        latency.end()
        buffer.destroy()

    def make(self, kind: str, call: dict, buffer: Buffer, rank: int, sent: list) -> None:
        tokens, options = call["tokens"], dict(call["options"])
        if call["event"]:
            options["has_event"] = True
            options["allocate_on_comm_stream"] = options["async_finish"] and call["allocate"]
        if kind in ("topk", "worst", "by rank") and call["worst"] >= (kind == "worst"):
            sent.append((tokens, *first(kind, call, buffer, rank, options)))
            return
        if not sent:
            return
        of, handle, has_ids = sent[int(call["handle"] * len(sent))]
        if kind == "again":
            again(of, handle, buffer, rank, call, options)
        else:
            combine(of, handle, has_ids, buffer, rank, call, options)


class Latency:
    """Calls of low-latency mode of a rank. A late hook is called before the next call, or after it."""

    def __init__(self, buffer: Buffer, rank: int) -> None:
        self.buffer, self.rank = buffer, rank
        #: Tokens of each dispatch, and its handle.
        self.sent: list = []
        #: Hook and check of the last call.
        self.late: list = []

    def make(self, kind: str, call: dict) -> None:
        """Makes a call, and what is late before it or, sometimes, after."""
        before, self.late = self.late, []
        is_early = call["is_late"] and kind == "low latency"
        if not is_early:
            self.finish(before)
        is_split = call["is_split"]
        options = {"return_recv_hook": is_split}
        if not is_split:
            options["async_finish"] = call["options"]["async_finish"]
        if kind == "low latency":
            self.dispatch(call, options)
        elif self.sent:
            self.combine(call, options)
        if is_early:
            self.finish(before)
        if not call["is_late"]:
            self.end()

    def dispatch(self, call: dict, options: dict) -> None:
        tokens, rank = call["tokens"], self.rank
        named, encode = ENCODINGS[call["low latency"]]
        rows, count, handle, event, hook = send(self.buffer, tokens, rank, **named, **options)
        self.sent.append((tokens, handle))

        def check() -> None:
            check_rows(tokens, rank, rows, encode)
            check_numbers(tokens, rank, count, handle)

        self.late.append((hook, event, check))

    def combine(self, call: dict, options: dict) -> None:
        tokens, handle = self.sent[int(call["handle"] * len(self.sent))]
        x = others(tokens, call)
        summed, event, hook = back(self.buffer, tokens, self.rank, handle, x=x, **options)
        self.late.append((hook, event, lambda: same(summed, sums(tokens, self.rank, x))))

    def end(self) -> None:
        """Calls what is late."""
        late, self.late = self.late, []
        self.finish(late)

    @staticmethod
    def finish(late: list) -> None:
        for hook, event, check in late:
            if hook is not None:
                hook()
            wait(event)
            check()


def first(kind, call, buffer, rank, options):
    """A dispatch that makes a handle. Returns it, and whether it had ids."""
    tokens = call["tokens"]
    if kind == "by rank":
        given = encoded(tokens.given(rank)[0], call["encoding"])
        received = by_rank(buffer, tokens, rank, x=given, expert_alignment=call["alignment"], **options)
    else:
        named = (
            {"expert_alignment": call["alignment"]} if kind == "topk" else {"num_worst_tokens": call["worst"]}
        )
        x, *routed = tokens.given(rank)
        x = encoded(x, call["encoding"])
        received = dispatch(buffer, x, *routed, tokens.experts, **named, **options)
    wait(received[5])
    if kind == "topk" and call["encoding"] is None:
        return check_received(tokens, rank, received, call["alignment"]), True
    rows, ids, weights, counts, handle, _ = received
    wanted = tokens.received(rank)
    n = len(wanted["token"])
    size = same_rows(rows, wanted["x"], call["encoding"])
    if kind != "worst":
        assert size == n
        assert counts == [-(-count // call["alignment"]) * call["alignment"] for count in wanted["counts"]]
        check_handle(tokens, rank, handle, wanted)
    if kind == "by rank":
        assert (ids, weights) == (None, None)
        return handle, False
    assert kind == "topk" or (counts == [] and size == call["worst"])
    same(ids[:n], wanted["ids"])
    same(weights[:n], wanted["weights"])
    assert (ids[n:] == -1).all()
    return handle, True


def again(of, handle, buffer, rank, call, options):
    """A dispatch with a handle, of other rows."""
    other = others(of, call)
    given = encoded(other[rank].to(of.device), call["encoding"])
    rows, *nothing, event = buffer.dispatch(given, handle=handle, **now(options))
    wait(event)
    assert nothing == [None] * 4
    wanted = of.received(rank)
    n = len(wanted["token"])
    pairs = zip(wanted["source"].tolist(), wanted["token"].tolist(), strict=True)
    expected = [other[source][token] for source, token in pairs]
    size = same_rows(rows, torch.stack(expected) if n else wanted["x"], call["encoding"])
    assert size == len(handle[3])


def same_rows(rows, wanted, encoding):
    """Compares the first received rows with those that were sent. Returns the number of all."""
    if encoding is None:
        same(rows[: len(wanted)], wanted)
        return len(rows)
    for given, each in zip(rows, encoded(wanted, encoding), strict=True):
        assert given.is_contiguous()
        same(given[: len(wanted)], each)
    return len(rows[0])


def combine(of, handle, has_ids, buffer, rank, call, options):
    """A combine of what experts made of other rows than any dispatch brought."""
    other = others(of, call)
    wanted = of.received(rank)
    n = len(wanted["token"])
    rows = torch.full((len(handle[3]), of.x[rank].shape[1]), float("nan"), dtype=torch.bfloat16)
    for row, (source, token) in enumerate(
        zip(wanted["source"].tolist(), wanted["token"].tolist(), strict=True)
    ):
        rows[row] = of.answers(rank, other[source][token])
    weights = None
    if has_ids and call["has_weights"]:
        weights = torch.full((len(rows), of.top_k), float("nan"))
        weights[:n] = 2 * wanted["weights"]
        weights = weights.to(of.device)
    bias = tuple(torch.randn(other[rank].shape).bfloat16() for _ in range(call["biases"]))
    given = tuple(each.to(of.device) for each in bias)
    given = {0: None, 1: given[:1] and given[0], 2: given}[len(given)]
    rows = rows.to(of.device)
    sums, returned, event = buffer.combine(rows, handle, topk_weights=weights, bias=given, **now(options))
    wait(event)
    same(sums, of.sums(rank, bias, other[rank]))
    if weights is None:
        assert returned is None
    else:
        same(returned, torch.where(of.ids[rank] >= 0, 2 * of.weights[rank], 0))


def others(of, call):
    """Returns other rows for the tokens of a dispatch, which follow from the call."""
    random = torch.Generator().manual_seed(int(call["handle"] * 2**40))
    return [torch.randn(x.shape, generator=random).bfloat16() for x in of.x]


def wait(event):
    if event.event is not None:
        event.current_stream_wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long (60)")
    parser.add_argument("--first", type=int, default=0, help="first seed (0)")
    parser.add_argument("--gpu", type=int, help="CUDA device that all ranks share, instead of the simulator")
    parser.add_argument("--log", help="file to which the range of seeds is appended")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="ferry_ep.deep_ep: a .*combine had")
    begin, seed, said = time.monotonic(), given.first, 0.0
    while time.monotonic() - begin < given.seconds:
        Sequence(seed, given.gpu).run()
        seed += 1
        if time.monotonic() - said > 5:
            said = time.monotonic()
            print(
                f"{seed - given.first} sequences, {said - begin:.0f} of {given.seconds:.0f} s",
                file=sys.stderr,
            )
    line = f"seeds {given.first} to {seed - 1}, {CALLS} calls each, {time.monotonic() - begin:.0f} s: right"
    print(line)
    if given.log:
        with open(given.log, "a") as log:
            log.write(line + "\n")


if __name__ == "__main__":
    main()
