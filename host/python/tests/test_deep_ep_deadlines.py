"""Deadlines of ``ferry_ep.deep_ep``: of first rounds, and of all others."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
rig = pytest.importorskip("deep_ep_rig")
from test_deep_ep_refused import Mode  # noqa: E402

FIRST, SERVICE = 600.0, 5.0


@pytest.mark.parametrize("is_low_latency", [False, True], ids=["normal", "low_latency"])
def test_the_first_round_of_a_communicator_has_a_deadline_of_its_own(world, monkeypatch, is_low_latency):
    monkeypatch.setenv("FERRY_DEEP_EP_FIRST_DEADLINE", str(FIRST))
    monkeypatch.setenv("FERRY_DEEP_EP_DEADLINE", str(SERVICE))
    of, mode = world(2), Mode(is_low_latency)
    tokens = rig.Tokens(1, of, [4, 4])

    def work(rank):
        buffer, found = of.buffer(rank, low_latency_mode=is_low_latency), []

        def note():
            found.append([each.deadline for each in buffer.runtime.communicators])

        for _ in range(2):
            rows, handle = mode.send(buffer, tokens, rank)
            note()
            mode.combine(buffer, tokens, rank, rows, handle)
            note()
        buffer.destroy()
        return found

    # The communicator of numbers that ranks tell each other before a first call comes first.
    told = [] if is_low_latency else [FIRST]
    first, later = [*told, FIRST], [*told, SERVICE]
    assert of.run(work) == [[first, first, later, later]] * 2


def test_ranks_may_be_late_in_the_first_round(world, monkeypatch):
    monkeypatch.setenv("FERRY_DEEP_EP_FIRST_DEADLINE", str(FIRST))
    monkeypatch.setenv("FERRY_DEEP_EP_DEADLINE", "0.5")
    of, mode = world(2, patience=None), Mode(is_low_latency=False)
    tokens = rig.Tokens(2, of, [4, 4])

    def work(rank):
        buffer = of.buffer(rank)
        time.sleep(1.5 * rank)
        rows, handle = mode.send(buffer, tokens, rank)
        time.sleep(1.5 * rank)
        mode.combine(buffer, tokens, rank, rows, handle)
        buffer.destroy()

    of.run(work)


@pytest.mark.parametrize("is_low_latency", [False, True], ids=["normal", "low_latency"])
def test_a_rank_may_be_late_in_the_first_round_of_which_others_wait_in_the_second(
    world, monkeypatch, is_low_latency
):
    monkeypatch.setenv("FERRY_DEEP_EP_FIRST_DEADLINE", str(FIRST))
    monkeypatch.setenv("FERRY_DEEP_EP_DEADLINE", "0.5")
    of, mode = world(2, patience=None), Mode(is_low_latency)
    # Rank 0 sends nothing, and so waits for no sum.
    tokens = rig.Tokens(2, of, [0, 4])

    def work(rank):
        buffer = of.buffer(rank, low_latency_mode=is_low_latency)
        for late in (1.5 * rank, 0):
            rows, handle = mode.send(buffer, tokens, rank)
            time.sleep(late)
            mode.combine(buffer, tokens, rank, rows, handle)
        buffer.destroy()

    of.run(work)
