"""Low-latency mode of ``ferry_ep.deep_ep``: each call, and each result that engines read, beside plain torch.

Ranks are threads, of a simulated group, or with ``--gpu`` of that device.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
deep_ep = pytest.importorskip("ferry_ep.deep_ep")
rig = pytest.importorskip("deep_ep_rig")
from deep_ep_blocks import (  # noqa: E402
    ENCODINGS,
    MOST,
    answers,
    back,
    check_numbers,
    check_rows,
    send,
    sums,
)
from deep_ep_rig import Tokens, dispatch, same  # noqa: E402
from ferry_ep.deep_ep import events, graphs, low_latency, settings  # noqa: E402
from oracle import blockwise  # noqa: E402


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("is_split", [False, True])
def test_dispatch_and_combine(world, ranks, encoding, is_split):
    of = world(ranks)
    tokens = Tokens(60, of, [6, 0, 3, MOST][:ranks], top_k=3, hidden=512)
    options, encode = ENCODINGS[encoding]
    options = options | {"return_recv_hook": is_split}

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        stats = torch.full((tokens.local,), 7, dtype=torch.int32, device=of.device)
        rows, count, handle, event, hook = send(
            buffer, tokens, rank, cumulative_local_expert_recv_stats=stats, **options
        )
        assert event.event is None and (hook is not None) == is_split
        if hook is not None:
            hook()
        check_rows(tokens, rank, rows, encode)
        check_numbers(tokens, rank, count, handle)
        same(stats - 7, count)
        out = torch.full(tokens.x[rank].shape, float("nan"), dtype=torch.bfloat16, device=of.device)
        summed, event, hook = back(buffer, tokens, rank, handle, out=out, return_recv_hook=is_split)
        assert event.event is None and (hook is not None) == is_split and summed is out
        if hook is not None:
            hook()
        same(out, sums(tokens, rank))
        buffer.destroy()

    of.run(run)


@pytest.mark.parametrize("encoding", ["round_scale", "ue8m0"])
def test_powers_of_two_at_their_borders(world, encoding):
    of = world(2)
    tokens = Tokens(61, of, [8, 8], top_k=2, hidden=512, holes=0)
    # Largest elements on, before and after a border, below the least scale, and zeros.
    for number, each in enumerate((448.0, 446.0, 450.0, 2.0**100, 1e-6, 0.0, 224.0, 1.0)):
        for x in tokens.x:
            x[number] = each * torch.linspace(-1, 1, 512)
    options, encode = ENCODINGS[encoding]

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        rows, count, handle, _, _ = send(buffer, tokens, rank, **options)
        check_rows(tokens, rank, rows, encode)
        check_numbers(tokens, rank, count, handle)

    of.run(run)


def test_hooks_of_two_micro_batches(world):
    """The order of vLLM's dual batch overlap: each half of a micro-batch while the other one computes."""
    of = world(2)
    batches = [Tokens(62 + each, of, [4, 6], hidden=128) for each in range(2)]

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        sent, returned = [None, None], [None, None]
        for layer in range(3):
            for batch, tokens in enumerate(batches):
                if layer:
                    returned[batch][2]()
                    same(returned[batch][0], sums(tokens, rank))
                sent[batch] = send(buffer, tokens, rank, use_fp8=layer == 1, return_recv_hook=True)
            for batch, tokens in enumerate(batches):
                rows, count, handle, _, hook = sent[batch]
                hook()
                check_rows(tokens, rank, rows, blockwise if layer == 1 else None)
                check_numbers(tokens, rank, count, handle)
                hook()  # again: nothing
                returned[batch] = back(buffer, tokens, rank, handle, return_recv_hook=True)
        for batch, tokens in enumerate(batches):
            returned[batch][2]()
            returned[batch][2]()
            same(returned[batch][0], sums(tokens, rank))
        buffer.destroy()

    of.run(run)
    # Two of each format, not one for each call.
    assert of.communicators == 4


def test_what_a_combine_reads_is_kept_until_its_hook(world):
    """The kernel of the second half reads the weights: nothing else may get their memory before."""
    of = world(2)
    tokens = Tokens(76, of, [4, 6], hidden=128)

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        _, _, handle, _, _ = send(buffer, tokens, rank, use_fp8=False)
        _, ids, weights = tokens.given(rank)
        given = [answers(tokens, rank), weights.clone()]
        freed = [weakref.ref(each) for each in given]
        summed, _, hook = buffer.low_latency_combine(given[0], ids, given[1], handle, return_recv_hook=True)
        given.clear()
        gc.collect()
        assert all(each() is not None for each in freed)
        hook()
        same(summed, sums(tokens, rank))
        buffer.destroy()

    of.run(run)


def test_a_hook_that_was_refused_can_be_called_again(world, monkeypatch):
    of = world(2)
    tokens = Tokens(77, of, [4, 6], hidden=128)
    wait, refused = ferry.Communicator.combine_wait, set()

    def refuses_once(self, **options):
        if self.rank not in refused:
            refused.add(self.rank)
            raise ferry.ArgumentError("not yet")
        return wait(self, **options)

    monkeypatch.setattr(ferry.Communicator, "combine_wait", refuses_once)

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        _, _, handle, _, _ = send(buffer, tokens, rank, use_fp8=False)
        summed, _, hook = back(buffer, tokens, rank, handle, return_recv_hook=True)
        with pytest.raises(ferry.ArgumentError, match="not yet"):
            hook()
        hook()
        same(summed, sums(tokens, rank))
        buffer.destroy()

    of.run(run)


def test_calls_before_their_hooks_are_refused_and_change_nothing(world):
    of = world(2)
    tokens = Tokens(64, of, [4, 6], hidden=128)

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        first = send(buffer, tokens, rank, use_fp8=False, return_recv_hook=True)
        with pytest.raises(ferry.OrderError, match="hook of the dispatch"):
            back(buffer, tokens, rank, first[2])
        second = send(buffer, tokens, rank, use_fp8=False, return_recv_hook=True)
        with pytest.raises(ferry.OrderError, match="hook of the oldest"):
            send(buffer, tokens, rank, use_fp8=False)
        for rows, count, handle, _, hook in (first, second):
            hook()
            check_rows(tokens, rank, rows)
            check_numbers(tokens, rank, count, handle)
        ends = [back(buffer, tokens, rank, each[2], return_recv_hook=True) for each in (first, second)]
        with pytest.raises(ferry.OrderError, match="hook of the oldest"):
            send(buffer, tokens, rank, use_fp8=False)
        for summed, _, hook in ends:
            hook()
            same(summed, sums(tokens, rank))
        # The end of a buffer calls hooks that nobody called.
        send(buffer, tokens, rank, use_fp8=False, return_recv_hook=True)
        handle = send(buffer, tokens, rank, use_fp8=False)[2]
        hook = back(buffer, tokens, rank, handle, return_recv_hook=True)[2]
        buffer.destroy()
        hook()
        assert all(each[rank].closed for each in of.made.values())

    of.run(run)


def test_unpaired_calls(world, monkeypatch):
    """DeepEP's test dispatches twice and combines twice; nobody's results are touched by later calls."""
    of = world(2)
    tokens = Tokens(65, of, [4, 6], hidden=128)
    barrier = threading.Barrier(2)
    settings._said.clear()

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        results = [send(buffer, tokens, rank, use_fp8=True) for _ in range(4)]
        for rows, count, handle, _, _ in results:
            check_rows(tokens, rank, rows, blockwise)
            check_numbers(tokens, rank, count, handle)
        for each in results[2:]:
            same(back(buffer, tokens, rank, each[2])[0], sums(tokens, rank))
        assert not settings._said
        barrier.wait(20)
        for handle in (results[3][2], results[0][2]):
            for is_split in (False, True):
                summed, _, hook = back(buffer, tokens, rank, handle, return_recv_hook=is_split)
                if hook is not None:
                    hook()
                same(summed, sums(tokens, rank))
        barrier.wait(20)
        assert any("made again" in text for text in settings._said)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of.run(run)
    assert of.communicators == 2
    monkeypatch.setenv("FERRY_DEEP_EP_STRICT", "1")
    strict = world(2)
    tokens = Tokens(65, strict, [4, 6], hidden=128)

    def refuses(rank):
        buffer = strict.buffer(rank, low_latency_mode=True)
        handles = [send(buffer, tokens, rank)[2] for _ in range(2)]
        with pytest.raises(ferry.OrderError, match="STRICT"):
            send(buffer, tokens, rank)
        same(back(buffer, tokens, rank, handles[0])[0], sums(tokens, rank))
        with pytest.raises(ferry.OrderError, match="STRICT"):
            back(buffer, tokens, rank, handles[0])
        same(back(buffer, tokens, rank, handles[1])[0], sums(tokens, rank))

    strict.run(refuses)


def test_zero_copy_takes_the_rows_of_the_handles_memory(world, monkeypatch):
    of = world(2)
    used, mark_used = [], low_latency.mark_used

    def note(device, tensor):
        used.append(tensor)
        mark_used(device, tensor)

    monkeypatch.setattr(low_latency, "mark_used", note)
    tokens = Tokens(66, of, [4, 6], hidden=128)

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        handle = send(buffer, tokens, rank)[2]
        _, ids, weights = tokens.given(rank)
        made = answers(tokens, rank)
        with pytest.raises(ferry.ArgumentError, match="zero_copy is True"):
            buffer.low_latency_combine(made, ids, weights, handle, zero_copy=True)
        memory = buffer.get_next_low_latency_combine_buffer(handle)
        assert memory.shape == made.shape and memory.dtype == torch.bfloat16
        memory[:, :, :] = made
        poison = torch.full_like(made, float("nan"))
        same(buffer.low_latency_combine(poison, ids, weights, handle, zero_copy=True)[0], sums(tokens, rank))
        assert any(each is memory for each in used)

    of.run(run)


def test_async_calls_return_events(world):
    of = world(2)
    tokens = Tokens(67, of, [4, 6], hidden=128)

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        rows, count, handle, event, hook = send(buffer, tokens, rank, async_finish=True)
        assert hook is None
        event.current_stream_wait()
        check_rows(tokens, rank, rows, blockwise)
        check_numbers(tokens, rank, count, handle)
        summed, event, hook = back(buffer, tokens, rank, handle, async_finish=True)
        assert hook is None
        event.current_stream_wait()
        same(summed, sums(tokens, rank))

    of.run(run)


@pytest.mark.parametrize("is_exact", ["0", "1"])
def test_sums_have_the_same_bits_for_any_number_of_ranks(world, monkeypatch, is_exact):
    monkeypatch.setenv("FERRY_DEEP_EP_EXACT", is_exact)
    found = []
    for ranks in (1, 2, 4):
        of = world(ranks)
        tokens = Tokens(68, of, [9] + [0] * (ranks - 1), experts=8, top_k=6, hidden=128)

        def run(rank, of=of, tokens=tokens):
            buffer = of.buffer(rank, low_latency_mode=True)
            summed = back(buffer, tokens, rank, send(buffer, tokens, rank)[2])[0]
            same(summed, sums(tokens, rank))
            if is_exact == "1":
                with pytest.raises(ferry.ArgumentError, match="FERRY_DEEP_EP_EXACT is 1"):
                    dispatch(buffer, *tokens.given(rank), tokens.experts)
            return summed

        found.append(of.run(run)[0])
    for each in found[1:]:
        same(each, found[0])


def test_one_buffer_serves_both_modes_in_turn(world):
    """SGLang: prefill in normal mode, decode in low-latency mode, with one buffer."""
    of = world(2)
    tokens = Tokens(69, of, [4, 6], hidden=128)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, 128, 2, tokens.experts)
    assert hint > 0 and hint % 128 == 0
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(2 * MOST, 128, 2, tokens.experts) > hint

    def run(rank):
        buffer = of.buffer(rank, num_rdma_bytes=hint, low_latency_mode=True, num_qps_per_rank=4)
        assert buffer.low_latency_mode and buffer.num_rdma_bytes == hint
        for _ in range(2):
            rows, _, _, _, handle, _ = dispatch(buffer, *tokens.given(rank), tokens.experts)
            same(rows, tokens.received(rank)["x"])
            buffer.clean_low_latency_buffer(MOST, 128, tokens.experts)
            sent = send(buffer, tokens, rank, use_fp8=False, return_recv_hook=True)
            same(buffer.combine(tokens.answers(rank, rows), handle)[0], tokens.sums(rank))
            sent[4]()
            check_rows(tokens, rank, sent[0])
            same(back(buffer, tokens, rank, sent[2])[0], sums(tokens, rank))
        assert all(each.plan.window_bytes <= hint for each in buffer.runtime.communicators[2:])
        buffer.assume_no_graphs()
        buffer.destroy()

    of.run(run)


@pytest.mark.parametrize("is_captured", [False, True])
def test_graphs_keep_the_communicators_of_both_halves(world, monkeypatch, is_captured):
    kept = []

    halves = events.Halves(None, 0, is_captured)
    monkeypatch.setattr(events.InPlace, "halves", lambda work, device: halves)
    monkeypatch.setattr(events.Halves, "of", lambda device: halves)
    monkeypatch.setattr(graphs.Graphs, "note", lambda self: kept.append(self._communicator))
    of = world(1)
    tokens = Tokens(71, of, [4], hidden=128)

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        for is_split in (False, True):
            calls = 2 if is_split else 1
            kept.clear()
            sent = send(buffer, tokens, rank, return_recv_hook=is_split)
            if is_split:
                sent[4]()
            assert kept == buffer.runtime.communicators * (calls * is_captured)
            kept.clear()
            returned = back(buffer, tokens, rank, sent[2], return_recv_hook=is_split)
            if is_split:
                returned[2]()
            assert kept == buffer.runtime.communicators * (calls * is_captured)
            same(returned[0], sums(tokens, rank))

    of.run(run)


def never(*arguments):
    raise AssertionError("nothing is to be made")


def good(**options):
    """Arguments of a dispatch of one rank of two."""
    return {
        "x": torch.zeros(3, 512, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(3, 2, dtype=torch.int64),
        "num_max_dispatch_tokens_per_rank": 4,
        "num_experts": 4,
    } | options


X, INT = torch.zeros(3, 512, dtype=torch.bfloat16), torch.int32


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"x": X.float()}, ferry.TensorError, "x"),
        ({"x": (X, X)}, ferry.TensorError, "x"),
        ({"x": X[:, :320].contiguous()}, ferry.TensorError, "hidden size 320"),
        ({"x": X[:, :384].contiguous(), "round_scale": True, "use_ue8m0": True}, ferry.TensorError, "384"),
        ({"topk_idx": torch.zeros(3, 2, dtype=INT)}, ferry.TensorError, "topk_idx"),
        ({"topk_idx": torch.zeros(2, 2, dtype=torch.int64)}, ferry.TensorError, "topk_idx"),
        ({"num_max_dispatch_tokens_per_rank": 2}, ferry.ArgumentError, "per_rank is 2.* has 3 tokens"),
        ({"num_experts": 5}, ferry.ArgumentError, "num_experts is 5.*2 ranks"),
        ({"use_ue8m0": True}, ferry.ArgumentError, "use_ue8m0 is True, but round_scale is False"),
        ({"async_finish": True, "return_recv_hook": True}, ferry.ArgumentError, "async_finish and return_"),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=INT)},
            ferry.TensorError,
            "cumulative_local_expert_recv_stats",
        ),
        ({"dispatch_wait_recv_cost_stats": X}, NotImplementedError, "dispatch_wait_recv_cost_stats"),
        ({"use_nvfp4": True}, NotImplementedError, "use_nvfp4 of low_latency_dispatch is not in .*FP8"),
        ({"fast": True}, TypeError, "'fast'"),
    ],
)
def test_wrong_arguments_of_a_dispatch(options, error, match):
    buffer = deep_ep.Buffer(rig.Member(0, 2), low_latency_mode=True, connect=never)
    # Right arguments are remembered, and change nothing.
    for _ in range(2):
        with pytest.raises(AssertionError, match="nothing is to be made"):
            buffer.low_latency_dispatch(**good(use_nvfp4=False, x_global_scale=None))
        with pytest.raises(error, match=match):
            buffer.low_latency_dispatch(**good(**options))


def test_wrong_arguments_of_a_combine(world):
    of = world(2)
    tokens = Tokens(70, of, [4, 6], hidden=128)
    cases = [
        ({"x": torch.zeros(4, 20, 128)}, ferry.TensorError, "x"),
        ({"x": torch.zeros(80, 128, dtype=torch.bfloat16)}, ferry.TensorError, "x"),
        ({"topk_idx": torch.zeros(9, 2, dtype=torch.int64)}, ferry.TensorError, "topk_idx"),
        ({"topk_weights": torch.zeros(9, 2)}, ferry.TensorError, "topk_weights"),
        ({"handle": (1, 2, 3, 4, 5)}, ferry.TensorError, "handle"),
        ({"out": torch.zeros(4, 128)}, ferry.TensorError, "out"),
        ({"use_logfmt": True}, NotImplementedError, "use_logfmt=True"),
        ({"combine_wait_recv_cost_stats": X}, NotImplementedError, "combine_wait_recv_cost_stats"),
        ({"overlap": True}, NotImplementedError, "overlap of low_latency_combine"),
        ({"num_sms": 3}, NotImplementedError, "num_sms of low_latency_combine"),
        ({"fast": True}, TypeError, "'fast'"),
    ]

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        # The second time checks may remember what was right the first time.
        for _ in range(2):
            handle = send(buffer, tokens, rank)[2]
            _, ids, weights = tokens.given(rank)
            right = {"x": answers(tokens, rank), "topk_idx": ids, "topk_weights": weights, "handle": handle}
            for options, error, match in cases:
                with pytest.raises(error, match=match):
                    buffer.low_latency_combine(**(right | options))
            with pytest.raises(ferry.TensorError, match="handle"):
                buffer.get_next_low_latency_combine_buffer((1, 2))
            same(buffer.low_latency_combine(**right, overlap=False)[0], sums(tokens, rank))

    of.run(run)


def test_a_buffer_without_low_latency_mode_refuses_its_calls():
    buffer = deep_ep.Buffer(rig.Member(0, 2), 1 << 20, connect=never)
    calls = {
        "low_latency_dispatch": good(),
        "low_latency_combine": {"x": X, "topk_idx": X, "topk_weights": X, "handle": ()},
        "clean_low_latency_buffer": {
            "num_max_dispatch_tokens_per_rank": 4,
            "hidden": 512,
            "num_experts": 4,
        },
        "get_next_low_latency_combine_buffer": {"handle": ()},
    }
    for name, arguments in calls.items():
        with pytest.raises(ferry.ArgumentError, match=f"low_latency_mode is False, but {name} needs"):
            getattr(buffer, name)(**arguments)
    with pytest.raises(ferry.ArgumentError, match="num_rdma_bytes is -1"):
        deep_ep.Buffer(rig.Member(0, 2), 0, -1, True, connect=never)
    with pytest.raises(ferry.PlanError, match="hidden"):
        deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 1 << 30, 2, 4)
