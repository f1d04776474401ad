"""DeepEP's ``Buffer`` over Ferry: calls that are refused leave all rounds as they were, in their order."""

from __future__ import annotations

import copy
import re
import warnings

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
deep_ep = pytest.importorskip("ferry_ep.deep_ep")
rig = pytest.importorskip("deep_ep_rig")
from deep_ep_rig import World, encoded  # noqa: E402

#: Hidden size of rows with packed scales, and most tokens of a rank in low-latency mode.
HIDDEN, MOST = 512, 8


class Given:
    """A buffer of one rank, and arguments of its calls."""

    def __init__(self):
        self.of = World(1, patience=5)
        self.buffer = self.of.buffer(0, low_latency_mode=True)
        self.tokens = rig.Tokens(1, self.of, [4], hidden=HIDDEN, holes=0)
        self.x, self.ids, self.weights = self.tokens.given(0)
        self.experts = self.tokens.experts
        self.stats = torch.zeros(self.experts, dtype=torch.int32)

    def layout(self, ids=None):
        return self.buffer.get_dispatch_layout(self.ids if ids is None else ids, self.experts)

    def dispatch(self, x=None, ids=None, weights=None, layout=None, **options):
        per_rank, _, per_expert, is_in_rank, _ = self.layout() if layout is None else layout
        return self.buffer.dispatch(
            self.x if x is None else x,
            topk_idx=self.ids if ids is None else ids,
            topk_weights=self.weights if weights is None else weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            **options,
        )

    def by_rank(self, is_in_rank=None, per_expert=None):
        per_rank, _, experts, in_rank, _ = self.layout()
        return self.buffer.dispatch(
            self.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank if is_in_rank is None else is_in_rank,
            num_tokens_per_expert=experts if per_expert is None else per_expert,
        )

    def low_latency(self, x=None, ids=None, most=MOST, experts=None, **options):
        options = {"use_fp8": False, "cumulative_local_expert_recv_stats": None} | options
        return self.buffer.low_latency_dispatch(
            self.x if x is None else x,
            self.ids if ids is None else ids,
            most,
            self.experts if experts is None else experts,
            **options,
        )


@pytest.fixture
def given():
    made = Given()
    yield made
    made.of.end()


def freed(tensor):
    """Returns a copy without its memory."""
    copy = tensor.clone(memory_format=torch.preserve_format)
    copy.untyped_storage().resize_(0)
    return copy


def on_meta(tensor):
    return tensor.to("meta")


UNREADABLE = {
    "topk_idx of a layout": lambda of, no: of.layout(no(of.ids)),
    "x": lambda of, no: of.dispatch(no(of.x)),
    "topk_idx": lambda of, no: of.dispatch(ids=no(of.ids)),
    "topk_weights": lambda of, no: of.dispatch(weights=no(of.weights)),
    "num_tokens_per_rank": lambda of, no: of.dispatch(
        layout=[no(each) if at == 0 else each for at, each in enumerate(of.layout())]
    ),
    "is_token_in_rank": lambda of, no: of.by_rank(no(of.layout()[3])),
    "num_tokens_per_expert": lambda of, no: of.by_rank(per_expert=no(of.layout()[2])),
    "x[0]": lambda of, no: of.dispatch((no(encoded(of.x, "rows")[0]), encoded(of.x, "rows")[1])),
    "x[1]": lambda of, no: of.dispatch((encoded(of.x, "rows")[0], no(encoded(of.x, "columns")[1]))),
    "x in low-latency mode": lambda of, no: of.low_latency(no(of.x)),
    "x to powers of two": lambda of, no: of.low_latency(no(of.x), use_fp8=True, round_scale=True),
    "topk_idx in low-latency mode": lambda of, no: of.low_latency(ids=no(of.ids)),
    "cumulative_local_expert_recv_stats": lambda of, no: of.low_latency(
        cumulative_local_expert_recv_stats=no(of.stats)
    ),
}


@pytest.mark.parametrize("no", [freed, on_meta])
@pytest.mark.parametrize("case", UNREADABLE)
def test_tensors_without_memory(given, case, no):
    # Ones with memory are remembered, and change nothing.
    UNREADABLE[case](given, torch.clone)
    with pytest.raises(ferry.TensorError, match=re.escape(f"tensor {case.partition(' ')[0]}: wanted")):
        UNREADABLE[case](given, no)


def test_statistics_that_are_freed_before_the_hook(given):
    *_, hook = given.low_latency(cumulative_local_expert_recv_stats=given.stats, return_recv_hook=True)
    given.stats.untyped_storage().resize_(0)
    with pytest.raises(ferry.TensorError, match="cumulative_local_expert_recv_stats: wanted a storage"):
        hook()
    # The rows are there, and the statistics are added once they can be.
    given.stats.untyped_storage().resize_(4 * given.experts)
    given.stats.zero_()
    hook()
    assert given.stats.tolist() == given.tokens.received(0)["counts"]


@pytest.mark.parametrize("is_split", [False, True])
def test_statistics_of_inference_mode(given, is_split):
    with torch.inference_mode():
        stats = torch.zeros(given.experts, dtype=torch.int32)
    *_, hook = given.low_latency(cumulative_local_expert_recv_stats=stats, return_recv_hook=is_split)
    if is_split:
        hook()
    assert stats.tolist() == given.tokens.received(0)["counts"]


def test_an_output_that_requires_a_gradient_is_written(given):
    rows, _, handle, _, _ = given.low_latency()
    out = torch.zeros(4, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    sums, _, _ = given.buffer.low_latency_combine(rows, given.ids, given.weights, handle, out=out)
    assert sums is out and out.abs().max() > 0


class Mode:
    """Calls of a mode with the tokens of a rank."""

    def __init__(self, is_low_latency):
        self.is_low_latency = is_low_latency

    def send(self, buffer, tokens, rank):
        """Returns rows and handle."""
        if self.is_low_latency:
            x, ids, _ = tokens.given(rank)
            rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, MOST, tokens.experts, use_fp8=False)
            return rows, handle
        rows, *_, handle, _ = rig.dispatch(buffer, *tokens.given(rank), tokens.experts)
        return rows, handle

    def combine(self, buffer, tokens, rank, rows, handle):
        if self.is_low_latency:
            _, ids, weights = tokens.given(rank)
            return buffer.low_latency_combine(rows, ids, weights, handle)[0]
        return buffer.combine(rows, handle)[0]


@pytest.mark.parametrize("is_low_latency", [False, True])
def test_a_refused_combine_leaves_the_order_of_rounds(is_low_latency, monkeypatch):
    """Refused on one rank alone, behind all checks: the ranks give up the same round later."""
    monkeypatch.setenv("FERRY_DEEP_EP_DEADLINE", "5")
    of, mode = World(2, patience=8), Mode(is_low_latency)
    first, second, third = (rig.Tokens(seed, of, [4, 4]) for seed in range(3))

    def refuse(*arguments, **options):
        raise ferry.ArgumentError("refused")

    def work(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        sent = [mode.send(buffer, tokens, rank) for tokens in (first, second)]
        if rank == 0:
            with monkeypatch.context() as context:
                for communicator in buffer.runtime.communicators:
                    context.setattr(communicator, "combine", refuse)
                with pytest.raises(ferry.ArgumentError, match="refused"):
                    mode.combine(buffer, first, rank, *sent[0])
        sent.append(mode.send(buffer, third, rank))
        for tokens, (rows, handle) in zip((second, third), sent[1:], strict=True):
            sums = mode.combine(buffer, tokens, rank, rows, handle)
            assert sums.shape == tokens.x[rank].shape
        return len(buffer.runtime.communicators)

    # No dispatch was made again.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of.run(work) == ([2, 2] if is_low_latency else [3, 3])
    of.end()


def trained(tensor):
    return tensor.clone().requires_grad_()


def narrow(tensor):
    """Returns rows of another size, whose calls are the first of theirs."""
    return tensor[:, :256].contiguous()


REFUSED = {
    "x that requires a gradient": lambda of: of.dispatch(trained(of.x)),
    "weights that require a gradient": lambda of: of.dispatch(weights=trained(of.weights)),
    "a negated view": lambda of: of.dispatch(torch._neg_view(of.x)),
    "freed rows": lambda of: of.dispatch(freed(of.x)),
    "freed ids": lambda of: of.dispatch(ids=freed(of.ids)),
    "ids on no device": lambda of: of.dispatch(ids=on_meta(of.ids)),
    "a first call that requires a gradient": lambda of: of.dispatch(trained(narrow(of.x))),
    "a first call with ids on no device": lambda of: of.dispatch(narrow(of.x), ids=on_meta(of.ids)),
    "num_worst_tokens of 34 bits": lambda of: of.dispatch(num_worst_tokens=1 << 33),
    "num_worst_tokens of 71 bits": lambda of: of.dispatch(num_worst_tokens=1 << 70),
    "num_worst_tokens of a half": lambda of: of.dispatch(num_worst_tokens=2.5),
    "num_worst_tokens as a text": lambda of: of.dispatch(num_worst_tokens="3"),
    "expert_alignment of a half": lambda of: of.dispatch(expert_alignment=1.5),
    "a number as config": lambda of: of.dispatch(config=3),
    "num_sms of 41 bits": lambda of: of.dispatch(config=deep_ep.Config(1 << 40)),
    "num_sms of 2.0": lambda of: of.dispatch(config=deep_ep.Config(2.0)),
    "num_sms that was set later": lambda of: of.dispatch(config=with_sms(1 << 40)),
    "a number as an event": lambda of: of.dispatch(previous_event=3),
    "a handle and a gradient": lambda of: of.buffer.dispatch(trained(of.x), handle=of.dispatched[0][1]),
    "a handle and freed rows": lambda of: of.buffer.dispatch(freed(of.x), handle=of.dispatched[0][1]),
    "a late combine that requires a gradient": lambda of: of.buffer.combine(
        trained(of.dispatched[0][0]), of.late
    ),
    "a late combine of freed rows": lambda of: of.buffer.combine(freed(of.dispatched[0][0]), of.late),
    "low latency: x that requires a gradient": lambda of: of.low_latency(trained(of.x)),
    "low latency: powers of two and a gradient": lambda of: of.low_latency(
        trained(of.x), use_fp8=True, round_scale=True
    ),
    "low latency: freed rows": lambda of: of.low_latency(freed(of.x)),
    "low latency: rows on no device": lambda of: of.low_latency(on_meta(of.x)),
    "low latency: half a token": lambda of: of.low_latency(most=8.5),
    "low latency: tokens as a float": lambda of: of.low_latency(most=8.0),
    "low latency: tokens as a text": lambda of: of.low_latency(most="8"),
    "low latency: tokens of 71 bits": lambda of: of.low_latency(most=1 << 70),
    "low latency: tokens of 41 bits": lambda of: of.low_latency(most=1 << 40),
    "low latency: experts of 71 bits": lambda of: of.low_latency(experts=1 << 70),
}


def with_sms(number):
    config = deep_ep.Config()
    config.num_sms = number
    return config


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_give_up_no_round(given, case):
    runtime, normal, low_latency = given.buffer.runtime, Mode(False), Mode(True)
    given.late = normal.send(given.buffer, given.tokens, 0)[1]
    given.dispatched = [normal.send(given.buffer, given.tokens, 0) for _ in range(2)]
    sent = [low_latency.send(given.buffer, given.tokens, 0) for _ in range(2)]
    before = [each.round for each in runtime.communicators]
    with pytest.raises(ferry.FerryError):
        REFUSED[case](given)
    assert [each.round for each in runtime.communicators] == before
    assert all(each.all for each in runtime._latency.values()) or "powers" in case
    with warnings.catch_warnings():
        # No dispatch is made again.
        warnings.simplefilter("error")
        for mode, opened in ((normal, given.dispatched), (low_latency, sent)):
            for rows, handle in opened:
                mode.combine(given.buffer, given.tokens, 0, rows, handle)


def hook_of_a_dispatch(given, what):
    rows, counts, *_ = given.low_latency(
        cumulative_local_expert_recv_stats=given.stats, return_recv_hook=True
    )
    return {"rows": rows, "counts": counts, "stats": given.stats}[what]


def hook_of_a_combine(given, what):
    rows, _, handle, _, _ = given.low_latency()
    sums, _, _ = given.buffer.low_latency_combine(
        rows, given.ids, given.weights, handle, return_recv_hook=True
    )
    return sums


@pytest.mark.parametrize(
    ("send", "what"),
    [
        (hook_of_a_dispatch, "rows"),
        (hook_of_a_dispatch, "counts"),
        (hook_of_a_dispatch, "stats"),
        (hook_of_a_combine, "sums"),
    ],
)
def test_a_hook_that_fails_in_destroy_closes_all(given, send, what):
    runtime = given.buffer.runtime
    given.dispatch()
    send(given, what).untyped_storage().resize_(0)
    with pytest.raises(ferry.FerryError):
        given.buffer.destroy()
    assert all(each.closed for each in runtime.communicators)
    assert given.buffer.runtime is None
    given.buffer.destroy()


def test_handles_of_other_buffers(given):
    rows, _, handle, _, _ = given.low_latency()
    other = given.of.buffer(0, low_latency_mode=True)
    with pytest.raises(ferry.ArgumentError, match="handle is of another Buffer"):
        other.low_latency_combine(rows, given.ids, given.weights, handle)
    with pytest.raises(ferry.ArgumentError, match="handle is of another Buffer"):
        other.get_next_low_latency_combine_buffer(handle)
    assert not other.runtime.communicators
    given.buffer.low_latency_combine(rows, given.ids, given.weights, handle)


def test_handles_of_other_groups(given):
    rows, *_, handle, _ = given.dispatch()
    # Of a rank of another number, or of another number of ranks.
    for rank in (0, 1):
        buffer = World(2).buffer(rank)
        named = f"handle is of rank 0 of 1, but this is a Buffer of rank {rank} of 2"
        with pytest.raises(ferry.ArgumentError, match=named):
            buffer.combine(rows, tuple(handle))
        with pytest.raises(ferry.ArgumentError, match=named):
            buffer.dispatch(given.x, handle=handle)
        assert not buffer.runtime.communicators


def test_copies_of_handles(given):
    for mode in (Mode(False), Mode(True)):
        for copied in (copy.copy, copy.deepcopy):
            rows, handle = mode.send(given.buffer, given.tokens, 0)
            wanted = mode.combine(given.buffer, given.tokens, 0, rows, copied(handle))
            rig.same(mode.combine(given.buffer, given.tokens, 0, rows, handle), wanted)
