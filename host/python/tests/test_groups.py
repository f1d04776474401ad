"""Bootstraps and groups."""

from __future__ import annotations

import socket
import threading
import time

import ferry_ep as ferry
import pytest
from conftest import in_threads


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("key", [None, b"a secret of 32 bytes............"])
def test_tcp(key):
    address = free_address()

    def run(rank):
        met = ferry.Bootstrap.tcp(address, rank, 3, timeout=10, key=key)
        assert (met.rank, met.ranks) == (rank, 3) and f"rank {rank} of 3" in repr(met)
        return met.gather(bytes([rank]) * rank)

    assert in_threads(run, 3) == [[b"", b"\1", b"\2\2"]] * 3


def test_tcp_without_the_others():
    begin = time.monotonic()
    with pytest.raises(ferry.BootstrapError, match="did not come"):
        ferry.Bootstrap.tcp(free_address(), 0, 2, timeout=0.3)
    assert time.monotonic() - begin < 3
    with pytest.raises(ferry.ArgumentError, match="host:port"):
        ferry.Bootstrap.tcp("nowhere", 0, 2)
    with pytest.raises(ferry.BootstrapError, match="rank 2 is not among"):
        ferry.Bootstrap.tcp(free_address(), 2, 2)
    with pytest.raises(ferry.ArgumentError, match="timeout is -1"):
        ferry.Bootstrap.tcp(free_address(), 0, 2, timeout=-1)


def test_any_all_gather():
    barrier, given = threading.Barrier(2), {}

    def run(rank):
        def gather(data):
            given[rank] = data
            barrier.wait()
            every = [given[0], given[1]]
            barrier.wait()
            return every

        return ferry.Bootstrap.all_gather(gather, rank, 2).gather(b"of %d" % rank)

    assert in_threads(run, 2) == [[b"of 0", b"of 1"]] * 2


def test_an_all_gather_that_fails():
    def lost(data):
        error = RuntimeError("no heartbeat")
        error.lost_rank = 1
        raise error

    bootstrap = ferry.Bootstrap.all_gather(lost, 0, 2)
    for _ in range(2):
        with pytest.raises(ferry.BootstrapError, match="no heartbeat") as raised:
            bootstrap.gather(b"")
        assert raised.value.lost_rank == 1
    for function, text in ((lambda data: [data], "returned the bytes of 1"), (lambda data: 7, "failed")):
        with pytest.raises(ferry.BootstrapError, match=text):
            ferry.Bootstrap.all_gather(function, 0, 2).gather(b"")


def test_a_group_closes_with_its_block():
    with ferry.Group.simulated(2) as group:
        assert (group.kind, group.ranks, group.local_ranks) == ("simulated", 2, [0, 1])
        assert group.device(1) == "simulated" and "simulated, 2 ranks" in repr(group)
        plan = ferry.Plan(group, ferry.Config(experts=4, top_k=2, hidden=64, max_tokens_per_rank=2))
    with pytest.raises(ferry.ClosedError):
        ferry.Communicators(group, plan)


def test_an_exception_in_a_block_is_not_hidden():
    group = ferry.Group.simulated(1)
    plan = ferry.Plan(group, ferry.Config(experts=1, top_k=1, hidden=8, max_tokens_per_rank=1))
    with pytest.raises(ZeroDivisionError), group, ferry.Communicators(group, plan) as ranks:
        import numpy

        ranks[0].dispatch(numpy.zeros((1, 8), numpy.uint16), numpy.zeros((1, 1), numpy.int32))
        _ = 1 / 0
    assert ranks[0].closed


def test_sizes_of_a_plan():
    group = ferry.Group.simulated(2)
    config = ferry.Config(experts=8, top_k=4, hidden=64, max_tokens_per_rank=3)
    plan = ferry.Plan(group, config)
    assert plan.config == config and plan == ferry.Plan(group, config)
    assert (plan.ranks, plan.local_experts, plan.groups) == (2, 4, 4)
    assert plan.first_expert(1) == 4
    assert (plan.max_rows, plan.max_rows_distinct) == (24, 24)
    assert plan.window_bytes > 0 and plan.workspace_bytes > 0
    assert plan.shared_tokens(0, 3) == (0, 0)
    assert "experts=8" in repr(plan)


def test_a_rank_that_left_is_named_in_a_sentence():
    address = free_address()

    def run(rank):
        met = ferry.Bootstrap.tcp(address, rank, 2, timeout=5)
        if rank == 0:
            with pytest.raises(ferry.BootstrapError) as raised:
                met.gather(b"")
            return str(raised.value)
        return None

    text = in_threads(run, 2)[0]
    assert text.endswith("the other side closed it, or its process ended"), text


def test_links():
    with ferry.Group.simulated(3, 5) as group:
        report = group.check_links()
    assert report.is_well
    assert repr(report) == "<ferry_ep.LinkReport, 0 of 18 tests of links went wrong>"
    pairs = [(source, to) for source in range(3) for to in range(3) if source != to]
    tests = [("flag", 8), ("inline", 4096), ("rows", 16384)]
    wanted = [(*pair, *test, "well") for test in tests for pair in pairs]
    assert [link[:5] for link in report.links] == wanted
    assert all(seconds > 0 for *_, seconds in report.links)
    assert "an inline row of 4 KiB, and its answer: µs, median " in str(report)
    with pytest.raises(ferry.ClosedError):
        group.check_links()
