"""Ferry as a communication of FlashInfer, skipped without it: `cargo xtask test-python --torch` has it."""

from __future__ import annotations

import ferry_ep as ferry
import pytest
from conftest import in_threads, on_streams

torch = pytest.importorskip("torch", reason="torch is not installed")
moe_ep = pytest.importorskip("flashinfer.moe_ep", reason="FlashInfer is not installed")
rig = pytest.importorskip("flashinfer_rig")

RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS = rig.RANKS, rig.EXPERTS, rig.TOP_K, rig.HIDDEN, rig.TOKENS
INVALID, MOST = rig.INVALID, rig.MOST
problem = rig.problem


def expert(x, number):
    return torch.tanh(x * (1 + number / 8)) + number / 4


def layer(comm, x, ids, weights):
    """The experts of one rank, as FlashInfer's contract has them: only ids of this rank are evaluated."""
    received = comm.dispatch(x, ids, weights, **{MOST: TOKENS})
    rows = received.hidden_states
    assert rows.shape == (RANKS * TOKENS, HIDDEN) and received.tokens_per_rank == TOKENS
    assert received.topk_ids.dtype == torch.int32
    first = comm.ep_rank * comm.num_local_experts
    is_local = (received.topk_ids >= first) & (received.topk_ids < first + comm.num_local_experts)
    assert (received.topk_ids[~is_local] == INVALID).all()
    answers = torch.full_like(rows, float("nan"))
    for row in is_local.any(dim=1).nonzero().flatten().tolist():
        parts = [
            expert(rows[row].float(), received.topk_ids[row, slot].item())
            * (1.0 if received.topk_weights is None else received.topk_weights[row, slot])
            for slot in is_local[row].nonzero().flatten().tolist()
        ]
        answers[row] = sum(parts).bfloat16()
    return answers


def wanted(x, ids, weights):
    """The same layer in f64, with the sum of each rank rounded to BF16, and the bound of its roundings."""
    sums = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    bound = torch.full_like(sums, 1e-30)
    for token in range(x.shape[0]):
        for slot in range(TOP_K):
            if ids[token, slot] >= 0:
                part = expert(x[token].double(), ids[token, slot].item()) * weights[token, slot].double()
                sums[token] += part
                bound[token] += part.abs()
    # Two roundings to BF16, of 2^-9 each, of each rank's sum and of the last; f32 adds less than 2^-20.
    return sums, bound * (2 * 2**-8 + 2**-16)


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_a_layer_is_ferrys_round(meet, id_type):
    meeting, direct = meet(), meet()
    config = ferry.Config(
        experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=TOKENS, receive="strided"
    )
    plain = [direct.connect(config, moe_ep.BootstrapConfig(world_size=RANKS, rank=r)) for r in range(RANKS)]

    def run(rank):
        comm = meeting.communication(rank)
        assert comm.backend_name == "ferry"
        for seed, tokens in enumerate([TOKENS, (rank + 1) % TOKENS, 0 if rank else 2]):
            x, ids, weights = problem(seed, rank, tokens, id_type, meeting.device)
            answers = layer(comm, x, ids, weights)
            output = torch.full_like(x, float("nan"))
            shaped = answers.view(RANKS, TOKENS, HIDDEN) if seed else answers
            sums = comm.combine(shaped, output=output if seed == 1 else None)
            assert seed != 1 or sums is output
            plain[rank].dispatch(x, ids, weights)
            same = plain[rank].combine(answers)
            assert torch.equal(sums.view(torch.int16), same.view(torch.int16))
            exact, bound = wanted(x, ids, weights)
            assert ((sums.double() - exact).abs() <= bound).all()
        comm.destroy()
        comm.destroy()
        with pytest.raises(ferry.ClosedError, match="destroyed"):
            comm.dispatch(x, ids, weights)

    on_streams(meeting.device, run, RANKS)


def test_a_captured_graph(meet):
    """Two layers in a graph of each rank; replays of fresh tokens have the bits of eager calls."""
    meeting = meet()
    if meeting.device == "cpu":
        pytest.skip("graphs are captured on a GPU: pytest --gpu 0")
    given = [problem(0, rank, TOKENS, torch.int64, meeting.device) for rank in range(RANKS)]
    results = [torch.empty_like(x) for x, _, _ in given]

    def layers(comm, x, ids, weights, output):
        for _ in range(2):
            received = comm.dispatch(x, ids, weights)
            first = comm.ep_rank * comm.num_local_experts
            is_local = (received.topk_ids >= first) & (received.topk_ids < first + comm.num_local_experts)
            factor = torch.where(is_local, received.topk_weights, 0).sum(dim=1, keepdim=True)
            rows = torch.where(is_local.any(dim=1, keepdim=True), received.hidden_states, 0)
            x = comm.combine((rows * factor).bfloat16(), output=output)
        return x

    comms = in_threads(lambda rank: meeting.communication(rank), RANKS)

    def eager(rank):
        return layers(comms[rank], *given[rank], torch.empty_like(results[rank]))

    on_streams(meeting.device, eager, RANKS)
    graphs, streams = [], [torch.cuda.Stream() for _ in comms]
    for rank, comm in enumerate(comms):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[rank], stream=streams[rank]):
            layers(comm, *given[rank], results[rank])
    for seed in range(1, 4):
        for rank in range(RANKS):
            fresh = problem(seed, rank, TOKENS, torch.int64, meeting.device)
            for tensor, values in zip(given[rank], fresh, strict=True):
                tensor.copy_(values)
            results[rank].fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for replayed, wanted in zip(results, on_streams(meeting.device, eager, RANKS), strict=True):
            assert torch.equal(replayed.view(torch.int16), wanted.view(torch.int16))
            assert torch.isfinite(replayed).all() and replayed.any()
    graphs.clear()
    for ranks in meeting.made.values():
        for rank in ranks:
            rank.assume_no_graphs()


def test_fillers_are_no_faults():
    meeting = rig.Meeting()

    def run(rank):
        comm = meeting.communication(rank)
        x, ids, weights = problem(9, rank, 3, torch.int64)
        ids[1, 0] = -1
        filled = ids.masked_fill(ids < 0, INVALID)
        sums = [comm.combine(layer(comm, x, each, weights)) for each in (ids, filled)]
        assert torch.equal(*sums)
        assert comm.exchange.communicator.check() is None
        comm.destroy()

    in_threads(run, RANKS)


def test_without_weights_all_are_one():
    meeting = rig.Meeting()

    def run(rank):
        comm = meeting.communication(rank)
        x, ids, _ = problem(7, rank, 3, torch.int32)
        received = comm.dispatch(x, ids)
        assert received.topk_weights is None
        comm.combine(torch.zeros_like(received.hidden_states))

    in_threads(run, RANKS)


def test_an_open_round_is_not_destroyed_and_another_ranks_communicator_is_refused():
    meeting = rig.Meeting()

    def run(rank):
        comm = meeting.communication(rank)
        comm._group = comm.exchange.communicator  # its own, as a node group is; both are closed below
        received = comm.dispatch(*problem(2, rank, 3, torch.int32))
        for _ in range(2):
            with pytest.raises(ferry.OrderError, match="cannot be closed"):
                comm.destroy()
        comm.combine(torch.zeros_like(received.hidden_states))

    in_threads(run, RANKS)
    other = rig.Meeting()
    other.connect = lambda config, bootstrap: rig.Meeting.connect(
        other, config, moe_ep.BootstrapConfig(world_size=RANKS, rank=1)
    )
    with pytest.raises(ferry.ArgumentError, match="rank of connect's communicator is 1, not 0"):
        other.communication(0)


def test_what_is_not_there_is_named_before_anything_is_sent():
    meeting = rig.Meeting()
    formats = pytest.importorskip("flashinfer.fused_moe.api").QuantFormat
    for form in (formats.FP16, formats.FP8PerTensor):
        with pytest.raises(NotImplementedError, match=f"dispatch_format is {form.name}, but"):
            meeting.communication(0, dispatch_format=form)
    with pytest.raises(NotImplementedError, match=r"params.dtype is torch.float16"):
        meeting.communication(0, dtype=torch.float16)
    with pytest.raises(ferry.ArgumentError, match="eplb_stats_num_experts is -1"):
        meeting.communication(0, statistics=-1)
    assert not meeting.made

    def run(rank):
        comm = meeting.communication(rank)
        x, ids, weights = problem(1, rank, 2, torch.int32)
        with pytest.raises(ferry.ArgumentError, match="hidden_states_scale is given"):
            comm.dispatch(x, ids, weights, hidden_states_scale=torch.ones(2, 1))
        with pytest.raises(ferry.ArgumentError, match=r"shape \[8\], but config.eplb_stats_num_experts is 0"):
            comm.dispatch(x, ids, weights, eplb_local_stats=torch.ones(EXPERTS))
        with pytest.raises(ferry.TensorError, match="topk_ids"):
            comm.dispatch(x, ids[:, :2], weights)
        with pytest.raises(ferry.OrderError, match="combine is out of order"):
            comm.combine(torch.zeros(RANKS * TOKENS, HIDDEN, dtype=torch.bfloat16))
        with pytest.raises(ferry.OrderError, match=r"get_combine_input_buffer is out of order: .* idle"):
            comm.get_combine_input_buffer(torch.bfloat16)
        with pytest.raises(ferry.ArgumentError, match="4 dimensions"):
            comm.combine(torch.zeros(1, 1, 1, HIDDEN, dtype=torch.bfloat16))
        assert comm.exchange.communicator.round == "idle"

    in_threads(run, RANKS)
