"""Deadlines of calls, which differ from their plan's."""

from __future__ import annotations

import time

import ferry_ep as ferry
import numpy as np
import pytest
from conftest import in_threads

#: Deadlines below and above the seconds by which rank 1 is late.
SHORT, LATE, LONG = 0.3, 1.5, 60.0


def late_round(of, deadline):
    """Makes a round whose dispatch rank 1 makes late, with a deadline of its own, if there is one."""
    x, ids, _ = of.problem(1).arguments

    def run(number):
        rank = of.ranks[number]
        rank.set_deadline(deadline)
        if number == 1:
            time.sleep(LATE)
        rows = rank.dispatch(x[number], ids[number])
        rank.set_deadline(LONG)
        rank.combine(of.answers(number, rows))

    in_threads(run, 2)


def test_a_call_may_wait_longer_than_its_plan_says(bench):
    late_round(bench(2, deadline=SHORT), LONG)


def test_a_call_waits_as_long_as_its_plan_says(bench):
    of = bench(2, deadline=SHORT)
    with pytest.raises(ferry.FerryError):
        late_round(of, None)
    with pytest.raises(ferry.PoisonedError) as raised:
        of.ranks[0].check()
    assert (raised.value.fault.kind, raised.value.fault.culprit) == ("PeerTimeout", 1)


def test_each_half_has_its_own(bench):
    of = bench(2, deadline=LONG)
    x, ids, _ = of.problem(2).arguments
    rank = of.ranks[0]
    of.ranks[1].release_thread()
    rank.dispatch_async(x[0], ids[0])
    rank.set_deadline(SHORT)

    def receive(_):
        begin = time.monotonic()
        with pytest.raises(ferry.PeerTimeout) as raised:
            rank.dispatch_wait(like=x[0])
        return raised.value.culprit, time.monotonic() - begin

    ((culprit, waited),) = in_threads(receive, 1)
    assert culprit == 1
    assert SHORT <= waited < LONG / 2


def test_deadlines_that_are_none(bench):
    of = bench(2, deadline=20)
    rank = of.ranks[0]
    assert rank.deadline == 20
    rank.set_deadline(86400)
    assert [each.deadline for each in of.ranks] == [86400, 20]
    for refused in (-1, -1.5, float("nan"), float("inf"), 1e300, "2", True, np.True_, [1], "soon"):
        with pytest.raises(ferry.ArgumentError, match="but it is a number of seconds, above 0"):
            rank.set_deadline(refused)
    for refused in (0, 1e-12, 86400.5):
        with pytest.raises(ferry.ArgumentError, match="but it must be above zero and at most a day"):
            rank.set_deadline(refused)
    assert rank.deadline == 86400
    rank.set_deadline(None)
    assert rank.deadline == 20
    rank.close()
    with pytest.raises(ferry.ClosedError):
        rank.set_deadline(1)
