"""Rounds against the oracle, bit for bit."""

from __future__ import annotations

import ferry_ep as ferry
import numpy as np
import pytest
from conftest import in_threads, together
from oracle import bf16, bits, values


def check_rows(problem, rank, output):
    rows = problem.rows(rank)
    assert int(output.row_offsets[-1]) == len(rows)
    for at, (_, source, token, slot) in enumerate(rows):
        assert output.src_info[at].tolist() == [token, slot]
        np.testing.assert_array_equal(values(output.tokens[at]), problem.x[source][token])


@pytest.mark.parametrize("mode", ["reduced", "exact"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_in_one_thread(bench, mode, ranks):
    of = bench(ranks, combine=mode)
    for seed in range(3):
        problem = of.problem(seed, tokens=5 - seed)
        x, ids, weights = problem.arguments
        rows = of.together(ferry.Dispatch, x, ids, weights)
        for rank, output in enumerate(rows):
            check_rows(problem, rank, output)
        answers = [of.answers(rank, output) for rank, output in enumerate(rows)]
        given = weights if mode == "exact" else None
        sums = of.together(ferry.Combine, answers, topk_weights=given)
        for rank, combined in enumerate(sums):
            np.testing.assert_array_equal(combined, bits(bf16(problem.sums(rank, mode))))
        assert of.ranks.check() == [None] * ranks
    of.ranks.close()
    of.group.close()


@pytest.mark.parametrize("mode", ["reduced", "exact"])
def test_split_calls_of_all_ranks(bench, mode):
    of = bench(2, combine=mode)
    problem = of.problem(1)
    x, ids, weights = problem.arguments
    of.together(ferry.DispatchAsync, x, ids, weights)
    assert [rank.round for rank in of.ranks] == ["dispatch sent"] * 2
    rows = of.together(ferry.DispatchWait, like=x[0])
    answers = [of.answers(rank, output) for rank, output in enumerate(rows)]
    sums = of.together(ferry.CombineAsync, answers, topk_weights=weights if mode == "exact" else None)
    of.together(ferry.CombineWait)
    assert [rank._end.opened for rank in of.ranks] == [None, None], "arrays are not kept"
    for rank, combined in enumerate(sums):
        np.testing.assert_array_equal(combined, bits(bf16(problem.sums(rank, mode))))


def test_ranks_as_threads(bench):
    of = bench(4)
    problem = of.problem(3)
    x, ids, weights = problem.arguments

    def run(number):
        with of.ranks[number] as rank:
            for _ in range(2):
                output = rank.dispatch(x[number], ids[number], weights[number])
                combined = rank.combine(of.answers(number, output))
                rank.dispatch_async(x[number], ids[number], weights[number])
                output = rank.dispatch_wait(like=x[number])
                again = rank.combine_async(of.answers(number, output))
                rank.combine_wait()
                np.testing.assert_array_equal(combined, again)
            return combined

    for rank, combined in enumerate(in_threads(run, 4)):
        np.testing.assert_array_equal(combined, bits(bf16(problem.sums(rank, "reduced"))))
    of.group.close()


@pytest.mark.parametrize("receive", ["by-expert", "compact", "strided"])
def test_counts_before_rows(bench, receive):
    of = bench(2, receive=receive)
    problem = of.problem(4)
    x, ids, weights = problem.arguments
    with pytest.raises(ferry.OrderError, match="dispatch_counts is out of order"):
        of.together(ferry.DispatchCounts)
    of.together(ferry.DispatchAsync, x, ids, weights)
    with pytest.raises(ferry.OrderError, match="call dispatch_counts between"):
        of.ranks[0].received()
    of.together(ferry.DispatchCounts)
    here = of.plan.config.experts // 2
    for rank, communicator in enumerate(of.ranks):
        counts = communicator.received(wait=True)
        assert communicator.received() == counts
        local = [given - rank * here for given in ids]
        inside = [(given >= 0) & (given < here) for given in local]
        rows = [int(found.sum() if receive == "by-expert" else found.any(axis=1).sum()) for found in inside]
        assert counts.source_counts == rows
        of_experts = [sum(int((given == at).sum()) for given in local) for at in range(here)]
        assert counts.expert_counts == of_experts
        assert counts.rows == (of.plan.max_rows if receive == "strided" else sum(rows))
        output = communicator.outputs(x[0], counts.rows)
        assert output.tokens.shape == (counts.rows, 64)
    of.together(ferry.DispatchWait, like=x[0])
    of.together(ferry.GiveUp)
    assert of.ranks.check() == [None] * 2


def test_rounds_that_are_given_up(bench):
    of = bench(2)
    problem = of.problem(4)
    x, ids, weights = problem.arguments
    with pytest.raises(ferry.OrderError, match="give_up is out of order: no round is open"):
        of.together(ferry.GiveUp)
    first = of.together(ferry.Dispatch, x, ids, weights)
    of.together(ferry.GiveUp)
    assert [rank.round for rank in of.ranks] == ["idle"] * 2
    of.together(ferry.DispatchAsync, x, ids, weights)
    with pytest.raises(ferry.OrderError, match="dispatch_async was not waited for"):
        of.ranks[0].give_up()
    of.together(ferry.DispatchWait, like=x[0])
    for rank in of.ranks:
        rank.give_up()
    # The same ids with other rows, whose places are the same.
    other = of.problem(5).arguments[0]
    rows = of.together(ferry.Dispatch, other, ids, weights)
    for rank, output in enumerate(rows):
        rows_here = int(output.row_offsets[-1])
        np.testing.assert_array_equal(output.src_info[:rows_here], first[rank].src_info[:rows_here])
        check_rows(problem, rank, first[rank])
    of.together(ferry.Combine, [output.tokens for output in rows])
    assert of.ranks.check() == [None] * 2
    of.ranks.close()
    of.group.close()


def test_rows_apart(bench):
    of = bench(2, combine="exact")
    problem = of.problem(5)
    x, ids, _ = problem.arguments
    rows = of.together(ferry.Dispatch, x, ids)
    apart = of.together(ferry.Combine, [output.tokens for output in rows])
    for rank, result in enumerate(apart):
        assert result.shape == (5, 2, 64)
        for token, slot in np.ndindex(5, 2):
            there = problem.ids[rank][token, slot] >= 0
            wanted = x[rank][token] if there else np.zeros(64, dtype=np.uint16)
            np.testing.assert_array_equal(result[token, slot], wanted)


def test_options_of_a_combine(bench):
    of = bench(2, options=True)
    problem = of.problem(6)
    x, ids, weights = problem.arguments
    rows = of.together(ferry.Dispatch, x, ids, weights)
    random = np.random.default_rng(2)
    factors = [random.random(5).astype(np.float32) for _ in range(2)]
    bias = bf16(random.standard_normal(64))
    residual = [bf16(random.standard_normal((5, 64))) for _ in range(2)]
    sums = of.together(
        ferry.Combine,
        [of.answers(rank, output) for rank, output in enumerate(rows)],
        row_scales=factors,
        bias=[bits(bias)] * 2,
        residual=[bits(of_rank) for of_rank in residual],
        data_type="f32",
    )
    for rank, combined in enumerate(sums):
        wanted = problem.sums(rank, "reduced") * factors[rank][:, None] + bias + residual[rank]
        assert combined.dtype == np.float32
        np.testing.assert_array_equal(combined, wanted)


def test_row_weights(bench):
    of = bench(2, options=True)
    problem = of.problem(7)
    x, ids, weights = problem.arguments
    rows = of.together(ferry.Dispatch, x, ids)
    of_rows = []
    for rank, output in enumerate(rows):
        of_rank = np.full(output.rows, np.nan, dtype=np.float32)
        for at, (_, source, token, slot) in enumerate(problem.rows(rank)):
            of_rank[at] = weights[source][token, slot]
        of_rows.append(of_rank)
    answers = [of.answers(rank, output) for rank, output in enumerate(rows)]
    sums = of.together(ferry.Combine, answers, row_weights=of_rows)
    for rank, combined in enumerate(sums):
        np.testing.assert_array_equal(combined, bits(bf16(problem.sums(rank, "reduced"))))


def test_tokens_counted_on_the_device(bench):
    of = bench(2, options=True)
    problem = of.problem(8)
    x, ids, _ = problem.arguments
    count = np.array([2], dtype=np.uint32)
    rows = of.together(ferry.Dispatch, x, ids, tokens_on_device=[count, count])
    wanted = sum(int((of_rank[:2] >= 0).sum()) for of_rank in ids)
    assert sum(int(output.row_offsets[-1]) for output in rows) == wanted
    out = [np.full((5, 64), 7, dtype=np.uint16) for _ in range(2)]
    of.together(ferry.Combine, [output.tokens for output in rows], out=out)
    # Rows from the number on are not written.
    assert all((of_rank[2:] == 7).all() and (of_rank[:2] != 7).any() for of_rank in out)


def test_a_shared_expert_has_a_group_of_its_own(bench):
    of = bench(2, shared_expert=True)
    problem = of.problem(9)
    x, ids, _ = problem.arguments
    rows = of.together(ferry.Dispatch, x, ids)
    assert of.plan.groups == of.plan.local_experts + 1
    for rank, output in enumerate(rows):
        np.testing.assert_array_equal(output.tokens[output.rows_of(0)], x[rank])


def test_skip_a2a_needs_no_other_rank(bench):
    of = bench(2, skip_a2a=True)
    problem = of.problem(10)
    x, ids, weights = problem.arguments
    parts = []
    for rank in of.ranks:
        output = rank.dispatch(x[0], ids[0], weights[0])
        parts.append(values(rank.combine(of.answers(rank.rank, output))))
    np.testing.assert_array_equal(parts[0] + parts[1], problem.sums(0, "reduced"))
    exact = bench(2, skip_a2a=True, combine="exact")
    output = exact.ranks[0].dispatch(x[0], ids[0])
    assert exact.ranks[0].combine(output.tokens).shape == (5, 2, 64)


def test_outputs_serve_many_rounds_and_keep_what_is_not_written(bench):
    of = bench(2)
    outs = [rank.outputs(np.empty(0)) for rank in of.ranks]
    combined = [np.empty((5, 64), dtype=np.uint16) for _ in range(2)]
    for output in outs:
        output.tokens[:] = 0x1234
    for seed in range(2):
        problem = of.problem(seed)
        x, ids, weights = problem.arguments
        assert of.together(ferry.Dispatch, x, ids, weights, out=outs)[0] is outs[0]
        for rank, output in enumerate(outs):
            check_rows(problem, rank, output)
            end = max(int(output.row_offsets[-1]), len(of.problem(0).rows(rank)))
            assert (output.tokens[end:] == 0x1234).all()
        answers = [of.answers(rank, output) for rank, output in enumerate(outs)]
        of.together(ferry.Combine, answers, out=combined)
        for rank in range(2):
            np.testing.assert_array_equal(combined[rank], bits(bf16(problem.sums(rank, "reduced"))))


def test_a_rank_may_bring_no_token(bench):
    of = bench(2)
    nothing = np.empty((0, 64), dtype=np.uint16), np.empty((0, 2), dtype=np.int32)
    some = np.zeros((3, 64), dtype=np.uint16), np.zeros((3, 2), dtype=np.int32)
    some[1][:, 1] = 3
    rows = of.together(ferry.Dispatch, [nothing[0], some[0]], [nothing[1], some[1]])
    sums = of.together(ferry.Combine, [output.tokens for output in rows])
    assert [of_rank.shape for of_rank in sums] == [(0, 64), (3, 64)]


def test_rows_of_x_may_have_a_stride(bench):
    of = bench(1)
    wide = np.arange(5 * 80, dtype=np.uint16).reshape(5, 80)
    ids = np.zeros((5, 2), dtype=np.int32)
    ids[:, 1] = -1
    (output,) = of.together(ferry.Dispatch, [wide[:, :64]], [ids])
    np.testing.assert_array_equal(output.tokens[:5], wide[:, :64])


def test_fused_silu(bench):
    of = bench(1)
    random = np.random.default_rng(4)
    gates_and_ups = bf16(random.standard_normal((4, 64)))
    offsets = np.array([0, 1, 4], dtype=np.uint32)
    rank = of.ranks[0]
    out = rank.silu(bits(gates_and_ups), offsets)
    gate, up = gates_and_ups[:, :32].astype(np.float64), gates_and_ups[:, 32:]
    wanted = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(values(out.rows), wanted, rtol=2**-8)
    quantized = rank.silu(bits(np.tile(gates_and_ups, 4)), offsets, format="mxfp8:row-major")
    assert quantized.rows.shape == (4, 128) and quantized.scales.shape == (4, 4)


def test_two_communicators_of_a_group(bench):
    of = bench(2)
    second = ferry.Communicators(of.group, of.plan)
    one, two = of.problem(1), of.problem(2)
    rows_one = of.together(ferry.Dispatch, *one.arguments)
    rows_two = together(second, ferry.Dispatch, *two.arguments)
    for problem, ranks, rows in ((two, second, rows_two), (one, of.ranks, rows_one)):
        calls = [ferry.Combine(of.answers(rank, output)) for rank, output in enumerate(rows)]
        sums = ranks.together(calls)
        for rank, combined in enumerate(sums):
            np.testing.assert_array_equal(combined, bits(bf16(problem.sums(rank, "reduced"))))
    second.close()
