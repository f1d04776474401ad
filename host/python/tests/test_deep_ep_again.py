"""Calls of ``ferry_ep.deep_ep`` again and again, whose results are made like those before: each has memory of
its own, types that are torch's defaults or not, and a round that is open or over after a failure.
"""

from __future__ import annotations

import gc
import weakref

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
deep_ep = pytest.importorskip("ferry_ep.deep_ep")
rig = pytest.importorskip("deep_ep_rig")
from deep_ep_blocks import MOST, answers, back, check_numbers, check_rows, send, sums  # noqa: E402
from deep_ep_rig import Tokens, dispatch, encoded, on_host, same  # noqa: E402
from oracle import blockwise  # noqa: E402

CALLS = 4


@pytest.fixture(params=["float32", "bfloat16", "float64"])
def default_type(request):
    """Sets torch's default type, as engines and DeepEP's tests do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("encoding", [None, "f32", "packed"])
def test_results_of_normal_mode_are_kept(world, default_type, encoding):
    of, worst, default = world(2), 32, torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    batches = [Tokens(80 + seed, of, [5, 7], top_k=3, hidden=512) for seed in range(CALLS)]
    wanted = [[encoded(batch.x[rank], encoding) for rank in range(2)] for batch in batches]
    found = [[batch.received(rank) for rank in range(2)] for batch in batches]
    summed = [[batch.sums(rank) for rank in range(2)] for batch in batches]
    torch.set_default_dtype(default)

    def run(rank):
        buffer, kept, again = of.buffer(rank), [], []

        def sent_of(x):
            parts = [each.to(of.device) for each in (x[rank] if encoding else (x[rank],))]
            return tuple(parts) if encoding else parts[0]

        for batch, x, rows in zip(batches, wanted, found, strict=True):
            sent = sent_of(x)
            _, ids, weights = batch.given(rank)
            given = dispatch(buffer, sent, ids, weights, batch.experts, num_worst_tokens=worst)
            answers = torch.zeros(worst, 512, dtype=torch.bfloat16, device=of.device)
            answers[: len(rows[rank]["x"])] = batch.answers(rank, rows[rank]["x"]).to(of.device)
            kept.append((given, buffer.combine(answers, given[4])[0]))
        for x in wanted:
            again.append(buffer.dispatch(sent_of(x), handle=kept[0][0][4])[0])
            buffer.combine(answers, kept[0][0][4])
        for x, rows in zip(wanted, again, strict=True):
            check_rows_of(x, found[0][rank], rows, encoding)
        for x, rows, total, (given, returned) in zip(wanted, found, summed, kept, strict=True):
            check(x, rows[rank], given, encoding)
            same(returned, total[rank])
        buffer.destroy()

    of.run(run)


def check_rows_of(x, wanted, rows, encoding):
    """Compares received rows of rows ``x`` of all ranks."""
    count = len(wanted["token"])
    places = list(zip(wanted["source"].tolist(), wanted["token"].tolist(), strict=True))
    for index, part in enumerate(rows if encoding else (rows,)):
        each = [(x[source][index] if encoding else x[source])[token] for source, token in places]
        same(part[:count], torch.stack(each))


def check(x, wanted, given, encoding):
    """Compares the results of a dispatch, with more rows than come, of rows ``x`` of all ranks."""
    rows, ids, weights, counts, handle, _ = given
    count = len(wanted["token"])
    check_rows_of(x, wanted, rows, encoding)
    same(ids[:count], wanted["ids"])
    same(weights[:count], wanted["weights"])
    assert counts == [] and (on_host(ids)[count:] == -1).all()
    same(handle[3][:count], wanted["token"])


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_results_of_low_latency_mode_are_kept(world, default_type, is_fp8, is_split):
    of = world(2)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    batches = [Tokens(90 + seed, of, [6, MOST], top_k=3, hidden=512) for seed in range(CALLS)]
    torch.set_default_dtype(default)

    def run(rank):
        buffer, kept = of.buffer(rank, low_latency_mode=True), []
        for batch in batches:
            given = send(buffer, batch, rank, use_fp8=is_fp8, return_recv_hook=is_split)
            if is_split:
                given[4]()
            returned = back(buffer, batch, rank, given[2], return_recv_hook=is_split)
            if is_split:
                returned[2]()
            kept.append((given, returned[0]))
        buffer.destroy()
        return kept

    results = of.run(run)
    torch.set_default_dtype(torch.float32)
    for rank, kept in enumerate(results):
        for batch, (given, summed) in zip(batches, kept, strict=True):
            check_rows(batch, rank, given[0], blockwise if is_fp8 else None)
            check_numbers(batch, rank, given[1], given[2])
            same(summed, sums(batch, rank))
        handles = [given[2] for given, _ in kept]
        assert [handles.index(handle) for handle in handles] == list(range(CALLS))
        assert len({*handles}) == CALLS


def test_rows_that_fit_one_handle_may_not_fit_another(world):
    of = world(1)
    batches = [Tokens(97 + count, of, [count], hidden=128) for count in (4, 6)]

    def run(rank):
        buffer = of.buffer(rank)
        x = [batch.given(rank)[0] for batch in batches]
        handles = [dispatch(buffer, *batch.given(rank), batch.experts)[4] for batch in batches]
        for _ in range(2):
            for mine, other in ((0, 1), (1, 0)):
                rows = buffer.dispatch(x[mine], handle=handles[mine])[0]
                same(rows, batches[mine].received(rank)["x"])
                with pytest.raises(ferry.TensorError, match=f"tensor x: .* given .*{len(x[mine])}, 128"):
                    buffer.dispatch(x[mine], handle=handles[other])
                answers = batches[mine].answers(rank, rows)
                with pytest.raises(ferry.TensorError, match=f"tensor x: .* given .*{len(rows)}, 128"):
                    buffer.combine(answers, handles[other])
                same(buffer.combine(answers, handles[mine])[0], batches[mine].sums(rank))
        worst = [dispatch(buffer, *each.given(rank), each.experts, num_worst_tokens=9)[4] for each in batches]
        with pytest.raises(ferry.TensorError, match=f"tensor x: .* given .*{len(answers)}, 128"):
            buffer.combine(answers, worst[1])
        rows, bias = answers.new_zeros(9, 128), answers.new_zeros(4, 128)
        buffer.combine(rows, worst[0], bias=bias)
        with pytest.raises(ferry.TensorError, match=r"tensor bias: .* given .*4, 128"):
            buffer.combine(rows, worst[1], bias=bias)
        buffer.destroy()

    of.run(run)


def test_ids_that_fit_one_low_latency_handle_may_not_fit_another(world):
    of = world(1)
    batches = [Tokens(97 + count, of, [count], hidden=128) for count in (4, 6)]

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        # The second time checks may remember what was right the first time.
        for _ in range(2):
            handles = [send(buffer, batch, rank)[2] for batch in batches]
            for mine, other in ((0, 1), (1, 0)):
                batch = batches[mine]
                _, ids, weights = batch.given(rank)
                with pytest.raises(ferry.TensorError, match="tensor topk_idx"):
                    buffer.low_latency_combine(answers(batch, rank), ids, weights, handles[other])
                combined = buffer.low_latency_combine(answers(batch, rank), ids, weights, handles[mine])[0]
                same(combined, sums(batch, rank))
        buffer.destroy()

    of.run(run)


def test_a_refused_combine_changes_nothing(world):
    of = world(1)
    tokens = Tokens(98, of, [5], hidden=128)

    def run(rank):
        buffer = of.buffer(rank)
        rows = tokens.answers(rank, tokens.received(rank)["x"]).to(of.device)
        for _ in range(3):
            handle = dispatch(buffer, *tokens.given(rank), tokens.experts)[4]
            for device in {"meta", "cpu"} - {torch.device(of.device).type}:
                with pytest.raises(ferry.TensorError, match="tensor x: wanted memory of"):
                    buffer.combine(rows.to(device), handle)
            same(buffer.combine(rows, handle)[0], tokens.sums(rank))
        buffer.destroy()

    of.run(run)


def test_a_round_is_that_of_its_buffer(world):
    of = world(1)
    tokens = Tokens(99, of, [5], hidden=128)

    def run(rank):
        mine, other = of.buffer(rank), of.buffer(rank)
        rows = tokens.answers(rank, tokens.received(rank)["x"]).to(of.device)
        handle = dispatch(mine, *tokens.given(rank), tokens.experts)[4]
        same(other.combine(rows, handle)[0], tokens.sums(rank))
        assert len(other.runtime.communicators) == 2
        assert [each.round for each in mine.runtime.communicators] == ["idle", "dispatched"]
        same(mine.combine(rows, handle)[0], tokens.sums(rank))
        runtime = weakref.ref(mine.runtime)
        mine.destroy(), other.destroy()
        gc.collect()
        assert runtime() is None and len(handle) == 6

    of.run(run)


def test_rows_of_one_expert_may_have_any_stride_of_it(world):
    of = world(1)
    tokens = Tokens(95, of, [6], experts=1, top_k=1, hidden=128, holes=0)

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        rows, _, handle, _, _ = send(buffer, tokens, rank, use_fp8=False)
        apart = torch.empty(MOST, 1, 128, dtype=torch.bfloat16, device=of.device).transpose(0, 1)
        apart.copy_(rows)
        assert apart.is_contiguous() and apart.stride(0) == 128
        _, ids, weights = tokens.given(rank)
        same(buffer.low_latency_combine(apart, ids, weights, handle)[0], sums(tokens, rank))

    of.run(run)


@pytest.mark.parametrize("is_low_latency", [False, True])
def test_a_round_that_could_not_be_given_up_is_open(world, monkeypatch, is_low_latency):
    of = world(1)
    tokens = Tokens(96, of, [4], hidden=128)

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)

        def call():
            if is_low_latency:
                return send(buffer, tokens, rank, use_fp8=False)[2]
            return dispatch(buffer, *tokens.given(rank), tokens.experts)[4]

        call(), call()
        give_up = ferry.Communicator.give_up
        monkeypatch.setattr(ferry.Communicator, "give_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
        monkeypatch.setattr(ferry.Communicator, "give_up", give_up)
        handles = [call() for _ in range(3)]
        for handle in handles[1:]:
            if is_low_latency:
                same(back(buffer, tokens, rank, handle)[0], sums(tokens, rank))
            else:
                rows = tokens.answers(rank, tokens.received(rank)["x"]).to(of.device)
                same(buffer.combine(rows, handle)[0], tokens.sums(rank))
        buffer.destroy()

    of.run(run)


def interrupted(communicator):
    """As ``Communicator.give_up``, with Ctrl-C before it."""
    raise KeyboardInterrupt


def test_a_graph_of_a_round_has_the_results_of_eager_calls(world):
    of, worst = world(1), 7
    if of.gpu is None:
        pytest.skip("only CUDA has graphs")
    batches = [Tokens(190 + seed, of, [5], top_k=3, hidden=128) for seed in range(4)]
    experts = batches[0].experts

    def run(rank):
        buffer = of.buffer(rank)
        given = [tensor.clone() for tensor in batches[0].given(rank)]

        def calls():
            received = dispatch(buffer, *given, experts, num_worst_tokens=worst)
            halved = buffer.combine(received[0] / 2, received[4], topk_weights=received[2])
            again = buffer.dispatch(given[0] + 1, handle=received[4])[0]
            return [*received[:3], *halved[:2], again, buffer.combine(again, received[4])[0]]

        calls()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            replayed = calls()
        for batch in batches:
            for tensor, fresh in zip(given, batch.given(rank), strict=True):
                tensor.copy_(fresh)
            for tensor in replayed:
                tensor.fill_(99)
            graph.replay()
            rows = int((replayed[1] >= 0).any(1).sum())
            assert 0 < rows <= 5
            wanted = calls()
            for tensor, each in zip(replayed, wanted, strict=True):
                is_of_rows = len(tensor) == worst and tensor.dtype == torch.bfloat16
                same(*((tensor[:rows], each[:rows]) if is_of_rows else (tensor, each)))
            same(replayed[5][:rows], 1 + replayed[0][:rows])
        del graph, replayed
        buffer.assume_no_graphs()
        buffer.destroy()

    of.run(run)


def test_a_tuple_of_a_handles_parts_is_a_handle(world):
    """An engine may keep the six of them, as DeepEP's is a plain tuple."""
    of = world(2)
    tokens = Tokens(53, of, [3, 2])

    def run(rank):
        buffer = of.buffer(rank)
        rows, *_, handle, _ = dispatch(buffer, *tokens.given(rank), tokens.experts)
        for parts in (tuple(handle), list(handle), handle):
            same(buffer.combine(tokens.answers(rank, rows), parts)[0], tokens.sums(rank))
            again = buffer.dispatch(tokens.given(rank)[0], handle=parts)[0]
            same(again, tokens.received(rank)["x"])
        with pytest.raises(ferry.TensorError, match="handle"):
            buffer.combine(rows, tuple(handle)[:5])
        buffer.destroy()

    of.run(run)
