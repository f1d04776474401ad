"""DeepEP's ``Buffer`` over Ferry: each call, and each result that engines read, beside plain torch.

Ranks are threads, of a simulated group, or with ``--gpu`` of that device.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import time
import warnings
import weakref

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
deep_ep = pytest.importorskip("ferry_ep.deep_ep")
rig = pytest.importorskip("deep_ep_rig")
from deep_ep_rig import (  # noqa: E402
    Tokens,
    by_rank,
    check_handle,
    check_received,
    dispatch,
    encoded,
    on_host,
    same,
)
from ferry_ep.deep_ep import settings  # noqa: E402


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layout(world, ranks):
    of = world(ranks)
    tokens = Tokens(1, of, [5, 0, 3, 1][:ranks])

    def run(rank):
        ids = tokens.given(rank)[1]
        per_rank, per_node, per_expert, is_in_rank, event = of.buffer(rank).get_dispatch_layout(
            ids, tokens.experts
        )
        wanted = tokens.layout(rank)
        same(per_rank, wanted[0])
        same(per_expert, wanted[1])
        same(is_in_rank, wanted[2])
        assert per_node is None and event.event is None
        ids[:, 0] = tokens.experts + 1  # no expert
        tokens.ids[rank][:, 0] = -1
        per_rank, _, per_expert, is_in_rank, _ = of.buffer(rank).get_dispatch_layout(ids, tokens.experts)
        for given, wanted in zip((per_rank, per_expert, is_in_rank), tokens.layout(rank), strict=True):
            same(given, wanted)

    of.run(run)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("alignment", [1, 128])
def test_dispatch_and_combine(world, ranks, alignment):
    of = world(ranks)
    tokens = Tokens(2, of, [6, 0, 3, 9][:ranks], top_k=3)
    config = deep_ep.Buffer.get_dispatch_config(ranks)

    def run(rank):
        buffer = of.buffer(rank)
        received = dispatch(
            buffer, *tokens.given(rank), tokens.experts, expert_alignment=alignment, config=config
        )
        assert received[5].event is None
        handle = check_received(tokens, rank, received, alignment)
        sums, weights, event = buffer.combine(
            tokens.answers(rank, received[0]), handle, config=buffer.get_combine_config(ranks)
        )
        same(sums, tokens.sums(rank))
        assert weights is None and event.event is None
        buffer.destroy()

    of.run(run)


@pytest.mark.parametrize("encoding", ["f32", "columns", "packed"])
def test_fp8_rows_and_their_scales_arrive_as_they_are(world, encoding):
    of = world(2)
    tokens = Tokens(10, of, [6, 5], hidden=512)
    barrier = threading.Barrier(2)
    settings._said.clear()

    def run(rank):
        buffer = of.buffer(rank, 1 << 21)
        x, ids, weights = tokens.given(rank)
        wanted = tokens.received(rank)
        for worst in (0, 20):
            rows, got_ids, _, _, handle, _ = dispatch(
                buffer, encoded(x, encoding), ids, weights, tokens.experts, num_worst_tokens=worst
            )
            n = len(wanted["x"])
            for given, each in zip(rows, encoded(wanted["x"], encoding), strict=True):
                assert given.is_contiguous() and len(given) == (worst or n)
                same(given[:n], each)
            same(got_ids[:n], wanted["ids"])
            answers = torch.full((len(rows[0]), 512), float("nan"), dtype=torch.bfloat16, device=of.device)
            answers[:n] = tokens.answers(rank, wanted["x"]).to(of.device)
            same(buffer.combine(answers, handle)[0], tokens.sums(rank))
        # The same rows again, in the other format: the combine finds that round.
        same(buffer.dispatch(x, handle=handle)[0][:n], wanted["x"])
        same(buffer.combine(answers, handle)[0], tokens.sums(rank))
        handle = dispatch(buffer, x, ids, weights, tokens.experts)[4]
        answers = answers[:n].contiguous()
        buffer.combine(answers, handle)
        buffer.dispatch(encoded(x, encoding), handle=handle)
        same(buffer.combine(answers, handle)[0], tokens.sums(rank))
        assert not any("made again" in text for text in settings._said)
        barrier.wait(20)
        same(buffer.combine(answers, handle)[0], tokens.sums(rank))
        buffer.destroy()

    of.run(run)
    assert {config.format for config, _ in of.made} == {"bf16", "fp8"}


def test_weights_return(world):
    of = world(4)
    tokens = Tokens(3, of, [6, 2, 0, 9], top_k=4)

    def run(rank):
        buffer = of.buffer(rank)
        rows, _, weights, _, handle, _ = dispatch(buffer, *tokens.given(rank), tokens.experts)
        sums, returned, _ = buffer.combine(tokens.answers(rank, rows), handle, topk_weights=2 * weights)
        same(sums, tokens.sums(rank))
        same(returned, torch.where(tokens.ids[rank] >= 0, 2 * tokens.weights[rank], 0))

    of.run(run)


@pytest.mark.parametrize(("ranks", "top_k"), [(1, 2), (2, 3), (4, 8)])
def test_weights_of_all_ranks_are_added_on_request(world, monkeypatch, ranks, top_k):
    """DeepEP's own test fills slots of other ranks before it combines."""
    of = world(ranks)
    tokens = Tokens(3, of, [6, 2, 0, 9][:ranks], top_k=top_k, experts=4 * max(ranks, 2))
    monkeypatch.setenv("FERRY_DEEP_EP_SUM_WEIGHTS", "1")
    filled = [torch.randn(len(tokens.received(rank)["x"]), top_k) for rank in range(ranks)]

    def run(rank):
        buffer = of.buffer(rank)
        for worst in (0, 40):
            rows, _, _, _, handle, _ = dispatch(
                buffer, *tokens.given(rank), tokens.experts, num_worst_tokens=worst
            )
            given = torch.full((len(rows), top_k), float("nan"))
            given[: len(filled[rank])] = filled[rank]
            sums, returned, _ = buffer.combine(
                tokens.answers(rank, rows), handle, topk_weights=given.to(of.device)
            )
            same(sums, tokens.sums(rank))
            wanted = torch.zeros(len(tokens.x[rank]), top_k, dtype=torch.float64)
            for to in range(ranks):
                wanted_rows = tokens.received(to)
                for row in (wanted_rows["source"] == rank).nonzero().flatten().tolist():
                    wanted[int(wanted_rows["token"][row])] += filled[to][row].double()
            assert torch.allclose(on_host(returned).double(), wanted, rtol=1e-5, atol=1e-6)
        buffer.destroy()

    of.run(run)


@pytest.mark.parametrize("biases", [1, 2])
def test_sums_begin_with_the_bias(world, biases):
    of = world(2)
    tokens = Tokens(4, of, [6, 4])

    def run(rank):
        buffer = of.buffer(rank)
        rows, _, _, _, handle, _ = dispatch(buffer, *tokens.given(rank), tokens.experts)
        bias = tuple(torch.randn(tokens.x[rank].shape).bfloat16() for _ in range(biases))
        given = tuple(each.to(of.device) for each in bias)
        sums, _, _ = buffer.combine(
            tokens.answers(rank, rows), handle, bias=given if biases == 2 else given[0]
        )
        same(sums, tokens.sums(rank, bias))

    of.run(run)


def test_without_ids_rows_go_by_rank(world):
    of = world(4)
    tokens = Tokens(5, of, [6, 0, 4, 3], experts=24)

    def run(rank):
        buffer = of.buffer(rank)
        rows, ids, weights, counts, handle, _ = by_rank(buffer, tokens, rank, expert_alignment=4)
        wanted = tokens.received(rank)
        same(rows, wanted["x"])
        assert ids is None and weights is None
        assert counts == [-(-count // 4) * 4 for count in wanted["counts"]]
        check_handle(tokens, rank, handle, wanted)
        sums, _, _ = buffer.combine(tokens.answers(rank, rows), handle)
        same(sums, tokens.sums(rank))
        buffer.destroy()

    of.run(run)


@pytest.mark.parametrize("has_ids", [True, False])
def test_a_handle_sends_other_rows_to_the_same_places(world, has_ids):
    of = world(2)
    tokens = Tokens(6, of, [6, 4])
    other = Tokens(6, of, [6, 4])
    for rank in range(2):
        other.x[rank] = torch.randn(other.x[rank].shape).bfloat16()

    def run(rank):
        buffer = of.buffer(rank)
        x, ids, weights = tokens.given(rank)
        if has_ids:
            rows, *_, handle, _ = dispatch(buffer, x, ids, weights, tokens.experts)
        else:
            rows, *_, handle, _ = by_rank(buffer, tokens, rank)
        ids.fill_(0)  # the caller's again
        buffer.combine(rows, handle)
        again = buffer.dispatch(other.given(rank)[0], handle=handle)
        same(again[0], other.received(rank)["x"])
        assert again[1:5] == (None, None, None, None) and again[5].event is None
        sums, _, _ = buffer.combine(other.answers(rank, again[0]), handle)
        same(sums, other.sums(rank))
        assert of.communicators == 1

    of.run(run)


def test_worst_case_rows_have_a_static_shape(world):
    of = world(2)
    tokens = Tokens(7, of, [6, 4])
    worst = 2 * 6 + 3

    def run(rank):
        buffer = of.buffer(rank)
        rows, ids, weights, counts, handle, _ = dispatch(
            buffer, *tokens.given(rank), tokens.experts, num_worst_tokens=worst
        )
        wanted = tokens.received(rank)
        n = len(wanted["token"])
        assert counts == [] and len(rows) == len(ids) == len(weights) == worst > n
        same(rows[:n], wanted["x"])
        same(ids[:n], wanted["ids"])
        same(weights[:n], wanted["weights"])
        assert (ids[n:] == -1).all() and (weights[n:] == 0).all() and (handle[3][n:] == -1).all()
        rows[n:] = float("nan")
        sums, _, _ = buffer.combine(tokens.answers(rank, rows), handle)
        same(sums, tokens.sums(rank))
        again = buffer.dispatch(tokens.given(rank)[0], handle=handle)[0]
        assert len(again) == worst
        same(again[:n], wanted["x"])

    of.run(run)


def test_other_threads_run_while_a_dispatch_waits_for_its_counts(world):
    of = world(2)
    tokens = Tokens(28, of, [6, 4])

    def run(rank):
        buffer = of.buffer(rank)
        for late in (0, 1, 1):
            if rank == late:
                # Longer than the native wait of a GPU's rank looks at a time, and needs the interpreter.
                end = time.monotonic() + 0.03
                while time.monotonic() < end:
                    pass
            rows, *_ = received = dispatch(buffer, *tokens.given(rank), tokens.experts)
            handle = check_received(tokens, rank, received)
            same(buffer.combine(tokens.answers(rank, rows), handle)[0], tokens.sums(rank))

    of.run(run)


def test_two_rounds_are_open_at_a_time(world):
    """vLLM's and SGLang's micro-batches: dispatch A, dispatch B, combine A, combine B."""
    of = world(2)
    batches = [Tokens(8, of, [6, 4]), Tokens(9, of, [0, 5])]

    def run(rank):
        buffer = of.buffer(rank)
        for first in (0, 1, 0):
            received = [dispatch(buffer, *each.given(rank), each.experts) for each in batches]
            for at in (first, 1 - first):
                handle = check_received(batches[at], rank, received[at])
                sums, _, _ = buffer.combine(batches[at].answers(rank, received[at][0]), handle)
                same(sums, batches[at].sums(rank))
        # Of three the oldest is given up.
        dispatch(buffer, *batches[0].given(rank), batches[0].experts)
        received = [dispatch(buffer, *each.given(rank), each.experts) for each in batches]
        for each, (rows, *_, handle, _) in zip(batches, received, strict=True):
            same(buffer.combine(each.answers(rank, rows), handle)[0], each.sums(rank))
        buffer.destroy()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of.run(run)
    assert of.communicators == 2


def test_dispatches_alone_give_rounds_up_and_a_late_combine_is_right(world, recwarn):
    of = world(2)
    batches = [Tokens(seed, of, [seed % 5, 4]) for seed in range(20, 25)]
    settings._said.clear()

    def run(rank):
        buffer = of.buffer(rank)
        handles = []
        for each in batches:
            handles.append(check_received(each, rank, dispatch(buffer, *each.given(rank), each.experts)))
        for _ in range(2):
            for each, handle in zip(batches, handles, strict=True):
                answers = each.answers(rank, each.received(rank)["x"]).to(of.device)
                weights = each.received(rank)["weights"].to(of.device)
                sums, returned, _ = buffer.combine(answers, handle, topk_weights=weights)
                same(sums, each.sums(rank))
                same(returned, torch.where(each.ids[rank] >= 0, each.weights[rank], 0))
        buffer.dispatch(batches[0].given(rank)[0], handle=handles[0])
        buffer.destroy()  # with an open round

    of.run(run)
    said = [str(each.message) for each in recwarn if "made again" in str(each.message)]
    assert len(said) == 1
    assert [each.filename for each in recwarn if "made again" in str(each.message)] == [__file__]
    assert of.communicators == 2


def test_strict_mode_raises_before_anything_is_sent(world, monkeypatch):
    of = world(2)
    batches = [Tokens(seed, of, [3, 4]) for seed in range(30, 33)]
    monkeypatch.setenv("FERRY_DEEP_EP_STRICT", "1")

    def run(rank):
        buffer = of.buffer(rank)
        sent = [dispatch(buffer, *each.given(rank), each.experts) for each in batches[:2]]
        with pytest.raises(ferry.OrderError, match="2 rounds are open, and FERRY_DEEP_EP_STRICT"):
            dispatch(buffer, *batches[2].given(rank), batches[2].experts)
        for each, received in zip(batches, sent, strict=False):
            sums, _, _ = buffer.combine(each.answers(rank, received[0]), received[4])
            same(sums, each.sums(rank))
        with pytest.raises(ferry.OrderError, match="handle is not that of an open round, and FERRY_DEEP"):
            buffer.combine(sent[0][0], sent[0][4])
        check_received(batches[2], rank, dispatch(buffer, *batches[2].given(rank), batches[2].experts))

    of.run(run)


@pytest.mark.parametrize("allocate", [False, True])
def test_async_calls_return_events(world, allocate):
    of = world(2)
    tokens = Tokens(40, of, [6, 4])

    def run(rank):
        buffer = of.buffer(rank)
        x, ids, weights = tokens.given(rank)
        options = {"async_finish": True, "allocate_on_comm_stream": allocate}
        before = deep_ep.Buffer.capture()
        *layout, event = buffer.get_dispatch_layout(ids, tokens.experts, previous_event=before, **options)
        names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert")
        given = dict(zip((*names, "is_token_in_rank"), layout, strict=True))
        received = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, previous_event=event, **given, **options
        )
        assert received[5].event is not None
        received[5].current_stream_wait()
        handle = check_received(tokens, rank, received)
        rows = tokens.answers(rank, received[0])
        before = deep_ep.EventOverlap(deep_ep.EventHandle())
        sums, _, event = buffer.combine(rows, handle, previous_event=before, **options)
        with event:
            pass
        same(sums, tokens.sums(rank))
        # One event of an earlier call that was not async.
        buffer.dispatch(x, handle=handle, previous_event=deep_ep.EventOverlap())

    of.run(run)


def test_multiprocessors_of_a_configuration_limit_the_kernels(world):
    of = world(2)
    tokens = Tokens(41, of, [6, 4])

    def run(rank):
        buffer = of.buffer(rank)
        rows, *_, handle, _ = dispatch(
            buffer, *tokens.given(rank), tokens.experts, config=deep_ep.Config(num_sms=4)
        )
        made = buffer.runtime.communicators[-1]
        assert made.max_sms == 4
        buffer.combine(rows, handle, config=deep_ep.Config(6, 4, 64))
        assert made.max_sms == 6
        if of.gpu is None:
            buffer.dispatch(tokens.given(rank)[0], handle=handle, config=deep_ep.Config(0))
            assert made.max_sms is None
            buffer.dispatch(tokens.given(rank)[0], handle=handle)
            assert made.max_sms == 20

    of.run(run)


def test_hints_are_room_for_the_tokens_that_they_say(world, monkeypatch):
    ranks = 4
    for hidden, wanted in ((64, None), (2048, None), (256, "77")):
        if wanted is not None:
            monkeypatch.setenv("FERRY_DEEP_EP_MAX_TOKENS", wanted)
        config = deep_ep.Buffer.get_dispatch_config(ranks)
        hint = config.get_nvl_buffer_size_hint(2 * hidden, ranks)
        assert config.get_rdma_buffer_size_hint(2 * hidden, ranks) == 0 and hint % 128 == 0
        monkeypatch.delenv("FERRY_DEEP_EP_MAX_TOKENS", raising=False)
        group = ferry.Group.simulated(ranks)
        kinds = [(hidden, "bf16")] if hidden % 128 else [(hidden, "bf16"), (2 * hidden, "fp8")]
        for (experts, top_k), kind in itertools.product(((8, 2), (256, 32), (1024, 8)), kinds):
            plan = deep_ep.tuning.plan_of(experts, top_k, kind[0], 1, format=kind[1])
            tokens = deep_ep.tuning.fitting_tokens(hint, ranks, plan)
            assert tokens >= int(wanted or 4096)
            sizes = dataclasses.replace(plan, max_tokens_per_rank=tokens)
            assert ferry.Plan(group, sizes).window_bytes <= hint
            over = dataclasses.replace(plan, max_tokens_per_rank=tokens + 1)
            assert ferry.Plan(group, over).window_bytes > hint


def test_a_handle_keeps_no_rows(world):
    """Megatron keeps a handle for each layer until its backward pass."""
    of = world(2)
    tokens = Tokens(51, of, [3, 2])

    def run(rank):
        buffer = of.buffer(rank)
        rows, *_, handle, _ = dispatch(buffer, *tokens.given(rank), tokens.experts)
        freed = weakref.ref(rows)
        del rows
        gc.collect()
        assert freed() is None
        check_handle(tokens, rank, handle, tokens.received(rank))
        buffer.destroy()

    of.run(run)


def test_a_refusal_to_close_stops_no_other_communicator(world, monkeypatch):
    of = world(2)
    close, refused = ferry.Communicator.close, set()

    def refuses_once(self):
        if self.rank not in refused:
            refused.add(self.rank)
            raise ferry.DeviceError("not now")
        close(self)

    def run(rank):
        buffer = of.buffer(rank)
        for top_k in (1, 2):
            tokens = Tokens(52, of, [3, 2], top_k=top_k)
            dispatch(buffer, *tokens.given(rank), tokens.experts)
        first, *others = buffer.runtime.communicators
        monkeypatch.setattr(ferry.Communicator, "close", refuses_once)
        with pytest.raises(ferry.DeviceError):
            buffer.destroy()
        assert not first.closed and all(each.closed for each in others) and buffer.runtime is not None
        buffer.destroy()
        assert first.closed and buffer.runtime is None

    of.run(run)


def test_attributes_and_the_end(world):
    """Megatron and SGLang compare ``group`` and the bytes to see whether a buffer still serves."""
    of = world(2)

    def run(rank):
        member = rig.Member(rank, 2)
        buffer = deep_ep.Buffer(member, 1 << 20, 0, connect=of.connect, num_qps_per_rank=1)
        assert buffer.group is member and (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 20, 0)
        assert (buffer.rank, buffer.group_size, buffer.low_latency_mode) == (rank, 2, False)
        assert buffer.runtime is not None and buffer.is_sm90_compiled() is True
        with pytest.raises(ferry.ArgumentError, match="explicitly_destroy is False"):
            buffer.destroy()
        buffer = of.buffer(rank)
        tokens = Tokens(50, of, [3, 2])
        dispatch(buffer, *tokens.given(rank), tokens.experts)
        assert len(buffer.runtime.communicators) == 2  # one of numbers that ranks tell each other
        buffer.assume_no_graphs()
        buffer.destroy()
        buffer.destroy()
        assert buffer.runtime is None and all(each[rank].closed for each in of.made.values())
        with pytest.raises(ferry.ClosedError, match="destroyed"):
            buffer.get_dispatch_layout(tokens.given(rank)[1], tokens.experts)

    of.run(run)
    assert deep_ep.topk_idx_t is torch.int64
    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(8)
        assert deep_ep.Buffer.num_sms == deep_ep.Buffer.get_combine_config(2).num_sms == 8
    finally:
        deep_ep.Buffer.set_num_sms(before)
