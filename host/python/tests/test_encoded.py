"""Tokens that are encoded already: a pair of codes and scales."""

from __future__ import annotations

import ferry_ep as ferry
import numpy as np
import pytest
from oracle import Kept

HIDDEN = 512
#: Type of the scales of a format, and elements that share one.
SCALES = {
    "fp8": (np.uint32, 128),
    "mxfp8:row-major": (np.uint8, 32),
    "mxfp4:row-major": (np.uint8, 32),
    "nvfp4:row-major": (np.uint8, 16),
}


def encoded(problem, format: str, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns random codes and scales for the tokens of each rank."""
    random = np.random.default_rng(seed)
    kind, group = SCALES[format]
    width = HIDDEN if "8" in format else HIDDEN // 2
    made = []
    for x in problem.x:
        codes = random.integers(0, 256, (len(x), width), dtype=np.uint8)
        codes[:, 8:12] = 255
        scales = random.integers(0, np.iinfo(kind).max, (len(x), HIDDEN // group), dtype=kind)
        made.append((codes, scales))
    return made


def arrived(codes: np.ndarray, format: str) -> np.ndarray:
    """Returns codes as they arrive: of four of all ones in a word the first loses its sign."""
    if "8" not in format:
        return codes
    words = np.ascontiguousarray(codes).view(np.uint32)
    return np.where(words == 0xFFFFFFFF, np.uint32(0xFFFFFF7F), words).view(np.uint8)


def compare(of, problem, given, output, rank: int, format: str) -> None:
    """Compares compact rows with the tokens that their sources gave."""
    kept = Kept(problem, rank, of.config.max_tokens_per_rank, output.rows)
    np.testing.assert_array_equal(output.src_info, kept.src_info)
    for (source, token), row in kept.row_of.items():
        codes, scales = given[source]
        np.testing.assert_array_equal(output.tokens[row], arrived(codes[token], format))
        found = output.scales[row].view(np.uint32) if format == "fp8" else output.scales[row]
        np.testing.assert_array_equal(found, scales[token])
    assert kept.row_of


@pytest.mark.parametrize("format", SCALES)
def test_codes_and_scales_arrive_as_they_are(bench, format):
    of = bench(2, format=format, hidden=HIDDEN, receive="compact", max_tokens_per_rank=9)
    problem = of.problem(3)
    given = encoded(problem, format, 5)
    _, ids, weights = problem.arguments
    as_floats = [(codes, scales.view(np.float32) if format == "fp8" else scales) for codes, scales in given]
    rows = of.together(ferry.Dispatch, as_floats, ids, weights)
    for rank, output in enumerate(rows):
        compare(of, problem, given, output, rank, format)
    of.together(ferry.GiveUp)


def test_scales_may_be_transposed_or_have_gaps(bench):
    of = bench(2, format="fp8", hidden=HIDDEN, receive="compact", max_tokens_per_rank=9)
    problem = of.problem(3)
    given = encoded(problem, "fp8", 5)
    _, ids, weights = problem.arguments
    (first, second) = given
    transposed = np.asfortranarray(first[1].view(np.float32))
    assert transposed.strides == (4, 36)
    gaps = np.zeros((9, 7), dtype=np.float32)
    gaps[:, :4] = second[1].view(np.float32)
    codes = np.zeros((9, HIDDEN + 16), dtype=np.uint8)
    codes[:, :HIDDEN] = second[0]
    x = [(first[0], transposed), (codes[:, :HIDDEN], gaps[:, :4])]
    rows = of.together(ferry.Dispatch, x, ids, weights)
    for rank, output in enumerate(rows):
        compare(of, problem, given, output, rank, "fp8")
    of.together(ferry.GiveUp)


def test_packed_powers_of_two_arrive_as_floats(bench):
    of = bench(2, format="fp8", hidden=HIDDEN, receive="compact", max_tokens_per_rank=9)
    problem = of.problem(3)
    given = encoded(problem, "fp8", 5)
    _, ids, weights = problem.arguments
    exponents = [np.random.default_rng(rank).integers(1, 255, (9, 4), dtype=np.uint8) for rank in range(2)]
    packed = [(given[rank][0], exponents[rank].view(np.int32)) for rank in range(2)]
    floats = [
        (codes, of_rank.astype(np.uint32) << 23) for (codes, _), of_rank in zip(given, exponents, strict=True)
    ]
    for rank, output in enumerate(of.together(ferry.Dispatch, packed, ids, weights)):
        compare(of, problem, floats, output, rank, "fp8")
    of.together(ferry.GiveUp)


def test_a_word_that_cannot_travel_is_a_fault(bench):
    of = bench(1, format="fp8", hidden=HIDDEN, receive="compact", max_tokens_per_rank=9)
    problem = of.problem(3, holes=0)
    ((codes, scales),) = encoded(problem, "fp8", 5)
    scales[4, 2] = 0xFFFFFFFE
    _, ids, weights = problem.arguments
    (output,) = of.together(ferry.Dispatch, [(codes, scales.view(np.float32))], ids, weights)
    fault = of.ranks[0].synchronize()
    assert (fault.kind, fault.is_input) == ("LostScales", True)
    assert (fault.index, fault.wanted, fault.saw) == (4, 2, 0xFFFFFFFE)
    assert output.scales[4].view(np.uint32)[2] == 0xFFFFFFFF
    of.together(ferry.GiveUp)


def test_pairs_that_do_not_fit_are_named(bench):
    of = bench(1, format="fp8", hidden=HIDDEN, receive="compact", max_tokens_per_rank=9)
    problem = of.problem(3)
    ((codes, scales),) = encoded(problem, "fp8", 5)
    scales = scales.view(np.float32)
    _, (ids,), _ = problem.arguments
    rank = of.ranks[0]

    def refused(x, words: str) -> None:
        with pytest.raises(ferry.TensorError, match=words):
            rank.dispatch(x, ids)

    refused((codes,), "tensor x: wanted an array, or a pair of codes and scales, given a tuple of 1")
    refused(codes, "tensor x: wanted elements of bf16")
    refused((codes, scales[:, :3]), r"tensor x_scales: wanted shape \[9, 4\], given \[9, 3\]")
    refused((codes, scales.astype(np.float16)), "tensor x_scales: wanted elements of f32, given f16")
    refused((codes, scales.view(np.int32)), r"tensor x_scales: wanted shape \[9, 1\], given \[9, 4\]")
    refused((codes[:, ::2], scales), "tensor x: wanted shape")
    of = bench(1, format="fp8", hidden=HIDDEN, max_tokens_per_rank=9)
    with pytest.raises(ferry.ArgumentError, match="`options` is false"):
        of.ranks[0].dispatch((codes, scales), ids)
    of = bench(1, format="bf16", hidden=HIDDEN, receive="compact", max_tokens_per_rank=9)
    with pytest.raises(ferry.TensorError, match="tensor x_scales: wanted none"):
        of.ranks[0].dispatch((np.zeros((9, HIDDEN), dtype=np.uint16), scales), ids)
