"""Refused calls touch nothing: neither the open round, nor arrays, nor memory."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref

import ferry_ep as ferry
import numpy as np
import pytest
from conftest import in_threads, together
from ferry_ep.core import memory
from oracle import bf16, bits


def device_bytes(rank) -> int:
    """Number of pieces of device memory that the package has."""
    return len(rank._end.blocks._addresses)


def patiently(call, *arguments):
    """Makes a call again as long as another thread is in one."""
    while True:
        try:
            return call(*arguments)
        except ferry.BusyError:
            time.sleep(1e-4)


def test_an_open_dispatch_keeps_its_tokens(bench):
    of = bench(2)
    first, other = of.problem(1), of.problem(2)
    of.together(ferry.DispatchAsync, *first.arguments)
    x, ids, weights = other.arguments
    for _ in range(3):
        with pytest.raises(ferry.OrderError, match="nothing was launched"):
            of.together(ferry.DispatchAsync, x, ids, weights)
        for rank in of.ranks:
            at = rank.rank
            with pytest.raises(ferry.OrderError):
                rank.dispatch_async(x[at], ids[at], weights[at])
            with pytest.raises(ferry.FerryError):
                rank.dispatch(x[at], ids[at], weights[at])
            with pytest.raises(ferry.FerryError):
                rank.combine(np.zeros((40, 64), dtype=np.uint16))
    rows = of.together(ferry.DispatchWait, like=x[0])
    sums = of.together(ferry.Combine, [of.answers(rank, output) for rank, output in enumerate(rows)])
    for rank, given in enumerate(sums):
        np.testing.assert_array_equal(given, bits(bf16(first.sums(rank, "reduced"))))


def test_an_open_combine_keeps_its_rows(bench):
    of = bench(2)
    problem = of.problem(3)
    rows = of.together(ferry.Dispatch, *problem.arguments)
    answers = [of.answers(rank, output) for rank, output in enumerate(rows)]
    sums = of.together(ferry.CombineAsync, answers)
    untouched = np.full_like(sums[0], 7)
    for rank in of.ranks:
        with pytest.raises(ferry.FerryError):
            rank.combine(np.zeros_like(answers[0]), out=untouched)
        with pytest.raises(ferry.OrderError):
            rank.combine_async(np.zeros_like(answers[0]), out=untouched)
    with pytest.raises(ferry.OrderError):
        of.together(ferry.Dispatch, *of.problem(4).arguments)
    of.together(ferry.CombineWait)
    assert (untouched == 7).all()
    for rank, given in enumerate(sums):
        np.testing.assert_array_equal(given, bits(bf16(problem.sums(rank, "reduced"))))


def test_a_thread_that_is_refused_disturbs_no_other(bench):
    of = bench(2)
    problem, other = of.problem(5), of.problem(6)
    is_over = threading.Event()
    refusals = [0, 0]

    def work(thread: int) -> None:
        rank, at = of.ranks[thread % 2], thread % 2
        if thread < 2:
            try:
                for _ in range(10):
                    rows = patiently(rank.dispatch, *(given[at] for given in problem.arguments))
                    sums = patiently(rank.combine, of.answers(at, rows))
                    np.testing.assert_array_equal(sums, bits(bf16(problem.sums(at, "reduced"))))
            finally:
                is_over.set()
            return
        x, ids, weights = (given[at] for given in other.arguments)
        while not is_over.is_set():
            # Refused in any state of the round, or while the other thread is in a call.
            with pytest.raises(ferry.FerryError):
                rank.dispatch(x[:, :32], ids, weights, out=rank.outputs(x))
            with pytest.raises(ferry.FerryError):
                rank.combine(x[:, :32], out=np.full((5, 64), 9, dtype=np.uint16))
            refusals[at] += 1

    in_threads(work, 4)
    assert min(refusals) > 0


def test_calls_of_other_threads_leave_a_silu_alone(bench):
    of = bench(1)
    (rank,) = of.ranks
    offsets = np.array([0, 3, 3], dtype=np.uint32)

    def work(thread: int) -> None:
        given = ferry.to_bf16(np.full((3, 32), float(thread + 1)))
        wanted = rank.silu(given, offsets).rows
        for _ in range(40):
            np.testing.assert_array_equal(rank.silu(given, offsets).rows, wanted)

    in_threads(work, 3)


def test_refused_calls_keep_no_memory(bench):
    of = bench(2)
    x, ids, weights = of.problem(7).arguments
    of.together(ferry.DispatchAsync, x, ids, weights)

    def refuse() -> None:
        for rank in of.ranks:
            with pytest.raises(ferry.OrderError):
                rank.dispatch_async(x[0], ids[0], weights[0])
            with pytest.raises(ferry.TensorError):
                rank.dispatch_wait(out=ferry.DispatchOutput())

    refuse()
    before = device_bytes(of.ranks[0])
    for _ in range(20):
        refuse()
    assert device_bytes(of.ranks[0]) == before
    of.together(ferry.DispatchWait, like=x[0])


def test_tokens_of_work_that_nobody_waited_for_stay(bench):
    """With outputs in device memory nothing waits: the next round's tokens must not replace this one's."""
    of = bench(2)
    problems = [of.problem(seed) for seed in range(4)]
    outs = [[rank.outputs() for rank in of.ranks] for _ in problems]
    for problem, out in zip(problems, outs, strict=True):
        of.together(ferry.DispatchAsync, *problem.arguments)
        of.together(ferry.DispatchWait, out=out)
        of.together(ferry.Combine, [rows.tokens for rows in out], out=[rank.combined() for rank in of.ranks])
    of.ranks.synchronize()
    for problem, out in zip(problems, outs, strict=True):
        wanted = of.together(ferry.Dispatch, *problem.arguments)
        of.together(ferry.GiveUp)
        for rows, given in zip(wanted, out, strict=True):
            end = rows.row_offsets[-1]
            np.testing.assert_array_equal(given.row_offsets.numpy(), rows.row_offsets)
            np.testing.assert_array_equal(given.tokens.numpy()[:end], rows.tokens[:end])


def test_device_arrays_of_calls_are_used_again(bench):
    of = bench(2)
    problem = of.problem(8)

    def place(rank, array, kind):
        placed = rank.empty(array.shape, kind)
        placed.copy_from(array)
        return placed

    x, ids, weights = (
        [place(rank, array, kind) for rank, array in zip(of.ranks, given, strict=True)]
        for given, kind in zip(problem.arguments, ("bf16", "i32", "f32"), strict=True)
    )

    def play(count: int) -> list:
        for _ in range(count):
            rows = of.together(ferry.Dispatch, x, ids, weights)
            assert all(isinstance(output.tokens, ferry.DeviceArray) for output in rows)
            of.ranks.synchronize()
            for rank, output in enumerate(rows):
                host = ferry.DispatchOutput(
                    tokens=output.tokens.numpy(), row_offsets=output.row_offsets.numpy()
                )
                output.tokens.copy_from(of.answers(rank, host))
            sums = of.together(ferry.Combine, [output.tokens for output in rows])
            of.ranks.synchronize()
            for rank, given in enumerate(sums):
                np.testing.assert_array_equal(given.numpy(), bits(bf16(problem.sums(rank, "reduced"))))
        return sums

    play(2)
    before = [device_bytes(rank) for rank in of.ranks]
    kept = play(20)
    assert [device_bytes(rank) for rank in of.ranks] == before
    # An array that somebody has is nobody else's; nor is one whose address somebody has.
    held = {array._address for array in kept}
    assert not {array._address for array in play(3)} & held
    addresses = {array.address for array in kept}
    del kept
    assert addresses == held and not {array._address for array in play(3)} & held


def test_an_array_that_another_stream_uses_is_not_used_again(bench):
    """Simulated ranks have one stream: the array is told as a rank with several tells it."""
    of = bench(1)
    (rank,) = of.ranks
    places = []
    for stream, is_simulated in ((3, False), (3, False), (4, False), (3, False), (4, True), (3, False)):
        array = memory.lend(rank._end.blocks, "f32", (8,), 3)
        places.append(array._address)
        rank._end.blocks.copies = is_simulated
        memory.note_use(array, stream)
        rank._end.blocks.copies = True
        del array
    # Each one takes the place of the one before, unless that was used on another stream.
    assert [one == other for one, other in itertools.pairwise(places)] == [True, True, False, True, True]


def test_an_array_is_the_output_of_one_rank_alone(bench):
    of = bench(2)
    x, ids, weights = of.problem(9).arguments
    rows = of.together(ferry.Dispatch, x, ids, weights)
    answers = [output.tokens for output in rows]
    both = np.zeros((5, 64), dtype=np.uint16)
    with pytest.raises(
        ferry.TensorError, match=r"combined: wanted memory of its own, given that of combined"
    ):
        of.together(ferry.Combine, answers, out=[both, both])
    halves = np.zeros((9, 64), dtype=np.uint16)
    with pytest.raises(ferry.TensorError, match="memory of its own"):
        of.together(ferry.CombineAsync, answers, out=[halves[:5], halves[4:]])
    of.together(ferry.Combine, answers, out=[both, np.zeros_like(both)])
    out = of.ranks[0].outputs(x[0])
    with pytest.raises(ferry.TensorError, match="memory of its own"):
        of.together(ferry.Dispatch, x, ids, weights, out=[out, out])
    assert of.ranks[0].round == "idle"


def test_an_array_is_one_output(bench):
    of = bench(1)
    (x,), (ids,), (weights,) = of.problem(9).arguments
    (rank,) = of.ranks
    out = rank.outputs(x)
    out.expert_ids = out.row_offsets[1:].view(np.int32)
    with pytest.raises(
        ferry.TensorError, match="expert_ids: wanted memory of its own, given that of row_off"
    ):
        rank.dispatch(x, ids, weights, out=out)
    assert rank.round == "idle"


def test_arrays_that_a_wait_fills_are_still_there(bench):
    of = bench(2)
    x, ids, weights = of.problem(10).arguments
    rows = of.together(ferry.Dispatch, x, ids, weights)
    sums = of.together(ferry.CombineAsync, [output.tokens for output in rows])
    sums[1].resize((1, 64), refcheck=False)
    with pytest.raises(ferry.TensorError, match="combined: wanted the memory that it had"):
        of.together(ferry.CombineWait)
    with pytest.raises(ferry.TensorError, match="combined: wanted the memory that it had"):
        of.ranks[1].combine_wait()
    assert of.ranks[1].round == "combine sent"


def test_a_communicator_in_a_round_ends_with_its_last_reference(bench):
    """``del`` drops it, without a collection of cycles."""
    of = bench(2)
    x, ids, weights = of.problem(1).arguments
    group, plan = of.group, of.plan
    for half in (False, True):
        ranks = ferry.Communicators(group, plan)
        references = [weakref.ref(rank) for rank in ranks]
        if half:
            rows = together(ranks, ferry.Dispatch, x, ids, weights)
            together(ranks, ferry.CombineAsync, [output.tokens for output in rows])
        else:
            together(ranks, ferry.DispatchAsync, x, ids, weights)
        gc.disable()
        del ranks
        assert [reference() for reference in references] == [None, None]
        gc.enable()
