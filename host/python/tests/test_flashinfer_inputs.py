"""What a communication of FlashInfer takes besides BF16 tokens: codes with scales, statistics, fillers, and
a buffer for answers; and FlashInfer's own layer over it.
"""

from __future__ import annotations

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
moe_ep = pytest.importorskip("flashinfer.moe_ep", reason="FlashInfer is not installed")
kernels = pytest.importorskip("flashinfer.moe_ep.core.kernel")
registry = pytest.importorskip("flashinfer.moe_ep.core.kernel.registry")
formats = pytest.importorskip("flashinfer.fused_moe.api").QuantFormat
rig = pytest.importorskip("flashinfer_rig")

RANKS, EXPERTS, TOP_K, TOKENS, INVALID = rig.RANKS, rig.EXPERTS, rig.TOP_K, rig.TOKENS, rig.INVALID
problem = rig.problem
#: Hidden size of quantized tokens.
WIDE = 256
#: Bytes of a token's codes and scales, and the types that FlashInfer's kernels may give them.
QUANTIZED = {
    "DeepSeekFp8": (WIDE, WIDE // 32, (torch.float8_e4m3fn, torch.float32)),
    "MXFP8": (WIDE, WIDE // 32, (torch.float8_e4m3fn, torch.float8_e8m0fnu)),
    "NVFP4": (WIDE // 2, WIDE // 16, (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)),
    "MXFP4": (WIDE // 2, WIDE // 32, (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)),
}


def codes_and_scales(seed: int, rank: int, tokens: int, name: str):
    """Returns random bytes, without the words that do not travel."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    sizes = QUANTIZED[name][:2]
    return [torch.randint(0, 255, (tokens, size), dtype=torch.uint8, generator=random) for size in sizes]


@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_and_scales_pass_through(meet, name, is_typed):
    meeting = meet()
    types = QUANTIZED[name][2] if is_typed else (torch.uint8, torch.uint8)
    local = EXPERTS // RANKS

    def run(rank):
        comm = meeting.communication(rank, hidden_size=WIDE, dispatch_format=formats[name])
        seen = 0
        for seed in range(2):
            sent = [codes_and_scales(seed, source, source + seed, name) for source in range(RANKS)]
            given = [problem(seed, source, source + seed, torch.int32) for source in range(RANKS)]
            codes, scales = (
                part.to(meeting.device).view(type_) for part, type_ in zip(sent[rank], types, strict=True)
            )
            _, ids, weights = (each.to(meeting.device) for each in given[rank])
            received = comm.dispatch(codes, ids, weights, hidden_states_scale=scales)
            rows = RANKS * TOKENS
            assert received.hidden_states.dtype == types[0] and received.hidden_states.shape[0] == rows
            assert received.hidden_states_scale.dtype == types[1]
            parts = received.hidden_states, received.hidden_states_scale
            bytes_of = [part.view(torch.uint8).cpu() for part in parts]
            for source in range(RANKS):
                for token, picks in enumerate(given[source][1].tolist()):
                    row = source * TOKENS + token
                    here = [pick if pick >= 0 and pick // local == rank else INVALID for pick in picks]
                    assert received.topk_ids[row].tolist() == here
                    if any(pick != INVALID for pick in here):
                        seen += 1
                        for found, wanted in zip(bytes_of, sent[source], strict=True):
                            assert torch.equal(found[row], wanted[token])
            comm.combine(torch.zeros(rows, WIDE, dtype=torch.bfloat16, device=meeting.device))
        comm.destroy()
        return seen

    assert all(meeting.run(run))


def test_codes_that_do_not_fit_are_named_before_anything_is_sent():
    meeting = rig.Meeting(ranks=1)
    comm = meeting.communication(0, hidden_size=WIDE, dispatch_format=formats.MXFP8)
    x, ids, weights = problem(1, 0, 2, torch.int32)
    codes, scales = codes_and_scales(1, 0, 2, "MXFP8")

    def refused(error, words, codes, scales):
        with pytest.raises(error, match=words):
            comm.dispatch(codes, ids, weights, hidden_states_scale=scales)

    refused(
        ferry.ArgumentError, "hidden_states_scale is None, but params.dispatch_format is MXFP8", codes, None
    )
    refused(ferry.TensorError, r"hidden_states: wanted codes of one byte \(MXFP8\)", x, scales)
    refused(ferry.TensorError, r"hidden_states_scale: wanted bytes \(MXFP8\)", codes, scales.float())
    refused(ferry.TensorError, r"tensor x: wanted shape \[2, 256\], given \[2, 128\]", codes[:, :128], scales)
    refused(ferry.TensorError, r"x_scales: wanted shape \[2, 8\], given \[2, 4\]", codes, scales[:, :4])
    assert comm.exchange.communicator.round == "idle"
    with pytest.raises(
        ferry.ArgumentError, match=r"params\.invalid_expert_id is 2147483648, but ids are int32"
    ):
        meeting.communication(0, invalid_expert_id=2**31)


def test_scales_in_bytes_with_gaps_are_named():
    comm = rig.Meeting(ranks=1).communication(0, hidden_size=WIDE, dispatch_format=formats.DeepSeekFp8)
    codes = torch.zeros(2, WIDE, dtype=torch.uint8)
    scales = torch.zeros(2, WIDE // 32 + 1, dtype=torch.uint8)[:, :-1]
    with pytest.raises(ferry.TensorError, match=r"hidden_states_scale: wanted rows of whole elements"):
        comm.dispatch(codes, torch.zeros(2, 1, dtype=torch.int32), hidden_states_scale=scales)


@pytest.mark.parametrize("ranks", [1, 4, 33])
def test_statistics_of_all_ranks_are_gathered(meet, ranks):
    # More than a token can name are simulated alone: two tokens carry theirs.
    meeting = meet(ranks=ranks, **({"gpu": None} if ranks > 4 else {}))
    elements = 6 if ranks > 1 else 8
    device = meeting.device

    def run(rank):
        comm = meeting.communication(
            rank, statistics=elements, num_experts=2 * ranks, top_k=min(ranks, 2), invalid_expert_id=-1
        )
        x, _, _ = problem(5, rank, 2, torch.int32, device)
        ids = torch.tensor([[rank], [ranks]], dtype=torch.int32, device=device) + torch.arange(
            comm.params.top_k, dtype=torch.int32, device=device
        )
        for seed in range(2):
            all_ = [torch.arange(elements, dtype=torch.int32) * 70001 + 1000 * r + seed for r in range(ranks)]
            received = comm.dispatch(x, ids, eplb_local_stats=all_[rank].to(device))
            assert torch.equal(received.eplb_gathered_stats.cpu(), torch.stack(all_))
            comm.combine(torch.zeros_like(received.hidden_states))
            received = comm.dispatch(x, ids)
            assert received.eplb_gathered_stats is None
            comm.combine(torch.zeros_like(received.hidden_states))
        with pytest.raises(ferry.TensorError, match=r"eplb_local_stats: wanted a tensor .*given list"):
            comm.dispatch(x, ids, eplb_local_stats=[1])
        wrong = [torch.zeros(elements + 1, dtype=torch.int32), torch.zeros(elements)]
        for stats, words in zip(wrong, (rf"int32 \[{elements + 1}\]", "given float32"), strict=True):
            with pytest.raises(ferry.TensorError, match=rf"eplb_local_stats: wanted int32 .*{words}"):
                comm.dispatch(x, ids, eplb_local_stats=stats.to(device))
        assert comm.exchange.communicator.round == "idle"
        comm.destroy()

    meeting.run(run)


def test_the_buffer_of_answers_is_the_same_and_combine_takes_it(meet):
    meeting = meet()

    def run(rank):
        comm = meeting.communication(rank)
        x, ids, weights = problem(6, rank, 3, torch.int64, meeting.device)
        places = set()
        for _ in range(2):
            received = comm.dispatch(x, ids, weights)
            buffer = comm.get_combine_input_buffer(torch.bfloat16)
            places.add(buffer.data_ptr())
            assert buffer.shape == received.hidden_states.shape
            assert buffer.data_ptr() != received.hidden_states.data_ptr()
            with pytest.raises(ferry.TensorError, match=r"dtype: wanted torch.bfloat16, given torch.float32"):
                comm.get_combine_input_buffer(torch.float32)
            buffer.copy_(received.hidden_states)
            ranks = [set((row[row >= 0] // comm.num_local_experts).tolist()) for row in ids]
            factors = torch.tensor([len(of) for of in ranks], device=meeting.device)
            assert torch.equal(comm.combine(buffer), x * factors[:, None])
        assert len(places) == 1
        with pytest.raises(ferry.OrderError, match="get_combine_input_buffer is out of order"):
            comm.get_combine_input_buffer(torch.bfloat16)

    meeting.run(run)


@pytest.mark.parametrize("invalid", [-1, -7, EXPERTS, 2**31 - 1])
def test_an_invalid_id_is_taken_and_returned_and_is_no_fault(meet, invalid):
    meeting = meet()

    def run(rank):
        comm = meeting.communication(rank, invalid_expert_id=invalid)
        x, ids, weights = problem(9, rank, 3, torch.int32, meeting.device)
        ids[1] = invalid
        received = comm.dispatch(x, ids, weights)
        first = rank * comm.num_local_experts
        here = received.topk_ids[rank * TOKENS : rank * TOKENS + 3]
        is_local = (ids >= first) & (ids < first + comm.num_local_experts)
        assert torch.equal(here, torch.where(is_local, ids, invalid))
        assert (received.topk_ids[rank * TOKENS + 3 : (rank + 1) * TOKENS] == invalid).all()
        sums = comm.combine(received.hidden_states)
        assert not sums[1].any()
        torch.cuda.synchronize() if meeting.device != "cpu" else None
        assert comm.exchange.communicator.check() is None

    meeting.run(run)
