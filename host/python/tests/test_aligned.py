"""Aligned rows by expert, and their tables, against the oracle, bit for bit."""

from __future__ import annotations

import ferry_ep as ferry
import numpy as np
import pytest
from conftest import in_threads
from oracle import Problem, bf16, bits, blockwise, expert, values

POISON = 0xA5


def aligned(problem, rank, alignment, capacity):
    """Returns offsets, counts, ends, groups, sources and weights of the rows of ``rank``."""
    local = problem.experts // problem.ranks
    offsets, counts, ends = [0], [], []
    groups = np.full(capacity, -1)
    sources = np.full((capacity, 3), -1)
    weights = np.zeros(capacity, dtype=np.float32)
    for group in range(local):
        row = offsets[-1]
        for number, source, token, slot in problem.rows(rank):
            if number == rank * local + group:
                groups[row], sources[row] = group, (source, token, slot)
                weights[row] = problem.weights[source][token, slot]
                row += 1
        counts.append(row - offsets[-1])
        ends.append(row)
        offsets.append(-(-row // alignment) * alignment)
    return offsets, counts, ends, groups, sources, weights


@pytest.mark.parametrize("alignment", [1, 4, 128, 256])
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_rows_are_aligned_and_described(bench, alignment, clear, format):
    is_padded = max(alignment, 4 if format == "fp8" else 1) > 1
    of = bench(
        2,
        format=format,
        hidden=128,
        expert_alignment=alignment,
        clear_padding=clear and is_padded,
        row_sources=True,
        m_indices=True,
    )
    problem = Problem(7, 2, of.config.max_tokens_per_rank, 128, of.config.experts, of.config.top_k)
    outs = [rank.outputs(np.empty(0)) for rank in of.ranks]
    for out in outs:
        for layout in of.plan.output_layout("max"):
            getattr(out, layout.name).view(np.uint8)[...] = POISON
    x, ids, weights = problem.arguments
    step = of.plan.row_alignment
    assert step == max(alignment, 4 if format == "fp8" else 1)

    def round_of(number):
        rank, out = of.ranks[number], outs[number]
        rank.dispatch(x[number], ids[number], weights[number], out=out)
        rank.synchronize()
        offsets, counts, ends, groups, sources, row_weights = aligned(problem, number, step, out.rows)
        np.testing.assert_array_equal(out.row_offsets, offsets)
        if alignment > 1:
            np.testing.assert_array_equal(out.expert_counts, counts)
            np.testing.assert_array_equal(out.row_ends, ends)
        else:
            assert out.expert_counts is None and out.row_ends is None
        np.testing.assert_array_equal(out.m_indices, groups)
        np.testing.assert_array_equal(out.src_info, sources)
        np.testing.assert_array_equal(out.weights[:, 0].view(np.uint32), row_weights.view(np.uint32))
        padding = (groups < 0) & (np.arange(out.rows) < offsets[-1])
        wanted = 0 if clear and is_padded else POISON
        assert (out.tokens[padding].view(np.uint8) == wanted).all()
        if format == "fp8":
            assert (out.scales[:, padding].copy().view(np.uint8) == wanted).all()
        answers = np.full((out.rows, 128), np.nan, dtype=np.float32)
        local = of.config.experts // 2
        for row in np.flatnonzero(groups >= 0):
            source, token, _ = sources[row]
            answers[row] = expert(problem.x[source][token], number * local + groups[row])
        rows = np.where(np.isnan(answers), np.uint16(0x7FC1), bits(answers))
        sums = rank.combine(rows)
        rank.synchronize()
        np.testing.assert_array_equal(values(sums), bf16(problem.sums(number, "reduced")))

    in_threads(round_of, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"expert_alignment": 0}, ("expert_alignment is 0", "a power of two")),
        ({"expert_alignment": 24}, ("expert_alignment is 24", "a power of two")),
        ({"expert_alignment": 512}, ("expert_alignment is 512", "1 to 256")),
        ({"expert_alignment": "8"}, ("expert_alignment is '8'", "a power of two")),
        ({"clear_padding": True}, ("clear_padding is true", "expert_alignment is 1")),
        ({"m_indices": True, "receive": "compact"}, ("m_indices is true", "receive is compact")),
        ({"expert_alignment": 8, "receive": "view"}, ("expert_alignment is 8", "receive is view")),
    ],
)
def test_plans_refuse_what_excludes_each_other(fields, words):
    sizes = {"experts": 4, "top_k": 2, "hidden": 128, "max_tokens_per_rank": 2}
    with pytest.raises(ferry.PlanError) as told:
        ferry.Plan(ferry.Group.simulated(2), ferry.Config(**sizes, **fields))
    for text in words:
        assert text in str(told.value)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("combine", ["reduced", "exact"])
def test_padded_blocks(bench, transposed, combine):
    of = bench(
        2,
        receive="padded",
        format="fp8",
        hidden=256,
        transposed_scales=transposed,
        combine=combine,
        row_sources=True,
    )
    problem = of.problem(9)
    block = 2 * of.config.max_tokens_per_rank
    assert of.plan.max_rows == 2 * block and of.plan.row_alignment == 1
    x, ids, weights = problem.arguments

    def round_of(number):
        rank = of.ranks[number]
        out = rank.dispatch(x[number], ids[number], weights[number])
        rank.synchronize()
        np.testing.assert_array_equal(out.row_offsets, [0, block, 2 * block])
        rows = problem.rows(number)
        answers = np.full((out.rows, 256), np.nan, dtype=np.float32)
        for group in range(2):
            here = [row for row in rows if row[0] == 2 * number + group]
            first = group * block
            assert out.expert_counts[group] == len(here)
            assert out.row_ends[group] == first + len(here)
            for source in range(2):
                before = sum(row[1] < source for row in here)
                count = sum(row[1] == source for row in here)
                assert out.source_ranges[group, source] == before << 32 | count
            for index, (_, source, token, slot) in enumerate(here):
                row = first + index
                assert tuple(out.src_info[row]) == (source, token, slot)
                codes, factors = blockwise(problem.x[source][token : token + 1])
                np.testing.assert_array_equal(out.tokens[row], codes[0])
                if transposed:
                    scales = out.scales.reshape(2, 2, block)[group, :, index]
                else:
                    scales = out.scales[row]
                np.testing.assert_array_equal(scales, factors[0])
                answers[row] = expert(problem.x[source][token], 2 * number + group)
        given = np.where(np.isnan(answers), np.uint16(0x7FC1), bits(answers))
        with pytest.raises(ferry.TensorError, match="weights"):
            rank.combine(given)
        if combine == "reduced":
            sums = rank.combine(given, row_weights=out.weights[:, 0])
        else:
            sums = rank.combine(given, topk_weights=weights[number])
        rank.synchronize()
        np.testing.assert_array_equal(values(sums), bf16(problem.sums(number, combine)))

    in_threads(round_of, 2)


def test_an_expert_with_more_rows_than_its_block_is_named(bench):
    of = bench(1, receive="padded")
    rank = of.ranks[0]
    tokens = of.config.max_tokens_per_rank
    rank.dispatch(np.zeros((tokens, 64), np.uint16), np.ones((tokens, 2), np.int32))
    fault = rank.synchronize()
    assert f"{2 * tokens} rows for expert 1" in str(fault)
    rank.give_up()
