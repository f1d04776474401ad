"""Rows that a call of ``ferry_ep.deep_ep`` loses are said, returned by ``check``, and raised on request."""

from __future__ import annotations

import logging
import pickle

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
deep_ep = pytest.importorskip("ferry_ep.deep_ep")
rig = pytest.importorskip("deep_ep_rig")
from deep_ep_rig import dispatch, on_host  # noqa: E402

EXPERTS, HIDDEN = 4, 64


def to_first(of, tokens):
    """Tokens of ones, all for the first expert, of weight 1."""
    x = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16, device=of.device)
    ids = torch.zeros(tokens, 1, dtype=torch.int64, device=of.device)
    return x, ids, torch.ones(tokens, 1, device=of.device)


def lose(of, buffer, rank, worst=None):
    """A round of which rank 0 has memory for two of four rows. Returns the sums of a rank's tokens."""
    tokens = (1, 3)[rank]
    rows, *_, handle, _ = dispatch(
        buffer, *to_first(of, tokens), EXPERTS, num_worst_tokens=worst or 2 * tokens
    )
    sums = on_host(buffer.combine(rows, handle)[0])[:, 0].tolist()
    of.meet()
    return sums


def kinds(buffer):
    return [fault.kind for fault in buffer.check()]


def said(caplog):
    """What buffers said. Communicators of earlier tests may be collected at any time, and say so as well."""
    return [each for each in caplog.records if each.name == "ferry_ep.deep_ep"]


def test_lost_rows_are_said_once_and_returned(world, caplog):
    of = world(2)

    def run(rank):
        buffer = of.buffer(rank)
        assert lose(of, buffer, rank) == ([1.0], [1.0, 0.0, 0.0])[rank]
        assert kinds(buffer) == (["OutputTooSmall"], [])[rank]
        assert buffer.check() == []
        for _ in range(2):
            lose(of, buffer, rank)
        assert kinds(buffer) == (["OutputTooSmall"], [])[rank]
        assert lose(of, buffer, rank, worst=8) == [1.0] * (1, 3)[rank]
        assert buffer.check() == []
        buffer.destroy()

    with caplog.at_level(logging.WARNING, logger="ferry_ep.deep_ep"):
        of.run(run)
    assert len(said(caplog)) == 1
    assert "num_worst_tokens is at least" in caplog.text


@pytest.mark.parametrize("is_low_latency", [False, True])
def test_destroy_says_what_was_lost_in_the_last_round(world, caplog, is_low_latency):
    of = world(2)

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=is_low_latency)
        if is_low_latency:
            # A token that names an expert twice: eight rows for the four of a block.
            ids = torch.zeros(2, 2, dtype=torch.int64, device=of.device)
            x, _, _ = to_first(of, 2)
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 2, EXPERTS, use_fp8=False)
            weights = torch.ones(2, 2, device=of.device)
            buffer.low_latency_combine(rows, ids, weights, handle)
        else:
            lose(of, buffer, rank)
        buffer.destroy()

    with caplog.at_level(logging.WARNING, logger="ferry_ep.deep_ep"):
        of.run(run)
    assert len(said(caplog)) == 1
    assert "rows were lost" in caplog.text


def test_strict_mode_raises_in_the_next_call_and_in_destroy(world, monkeypatch, caplog):
    of = world(2)
    monkeypatch.setenv("FERRY_DEEP_EP_STRICT", "1")

    def run(rank):
        buffer = of.buffer(rank)
        tokens = (1, 3)[rank]
        given = to_first(of, tokens)
        rows, *_, handle, _ = dispatch(buffer, *given, EXPERTS, num_worst_tokens=2 * tokens)
        of.meet()
        if rank == 0:
            with pytest.raises(deep_ep.InputFaultError, match="rows were lost") as raised:
                buffer.combine(rows, handle)
            assert raised.value.fault.kind == "OutputTooSmall"
        # It was raised once, and has sent nothing: the round goes on.
        buffer.combine(rows, handle)
        lose(of, buffer, rank, worst=8)
        rows, *_, handle, _ = dispatch(buffer, *given, EXPERTS, num_worst_tokens=2 * tokens)
        of.meet()
        assert kinds(buffer) == (["OutputTooSmall"], [])[rank]
        buffer.combine(rows, handle)
        dispatch(buffer, *given, EXPERTS, num_worst_tokens=2 * tokens)
        of.meet()
        if rank == 0:
            with pytest.raises(deep_ep.InputFaultError):
                buffer.destroy()
        else:
            buffer.destroy()
        assert buffer.runtime is None
        buffer.destroy()

    of.run(run)
    assert said(caplog) == []


@pytest.mark.parametrize("is_low_latency", [False, True], ids=["normal", "low_latency"])
def test_fillers_are_no_faults_and_hide_none(world, caplog, is_low_latency):
    of = world(2)

    def send(buffer, x, ids, weights):
        if is_low_latency:
            rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, 2, EXPERTS, use_fp8=False)
            return buffer.low_latency_combine(rows, ids, weights, handle)[0]
        rows, *_, handle, _ = dispatch(buffer, x, ids, weights, EXPERTS)
        return buffer.combine(rows, handle)[0]

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        x, ids, weights = to_first(of, 2)
        ids[0] = EXPERTS
        for wrong in (0, EXPERTS):
            ids[1] = wrong
            assert on_host(send(buffer, x, ids, weights))[:, 0].tolist() == [0, wrong == 0]
            of.meet()
            assert kinds(buffer) == []
        for wrong in (EXPERTS + 1, -7):
            ids[1] = wrong
            # On a GPU ids go as they are, and a kernel reports one slot of a round.
            ids[0] = EXPERTS if of.gpu is None else -1
            assert on_host(send(buffer, x, ids, weights)).eq(0).all()
            of.meet()
            assert kinds(buffer) == ["InvalidExpert"]
        buffer.destroy()

    with caplog.at_level(logging.WARNING, logger="ferry_ep.deep_ep"):
        of.run(run)
    assert len(said(caplog)) == 2  # on each rank


@pytest.mark.filterwarnings("ignore:ferry_ep.deep_ep. a .*combine had")
def test_a_late_combine_means_the_ids_of_its_dispatch(world):
    of = world(2)

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        x, ids, weights = to_first(of, 2)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 2, EXPERTS, use_fp8=False)
        answers = torch.full_like(rows, 1 + rank)
        others = torch.full_like(ids, EXPERTS - 1)
        for _ in range(2):  # in the open round, and after it
            sums, *_ = buffer.low_latency_combine(answers, others, weights, handle)
            assert on_host(sums).eq(1).all()
        buffer.destroy()

    of.run(run)


def test_ids_that_were_overwritten_are_refused(world):
    of = world(2)
    if of.gpu is None:
        pytest.skip("on the CPU a handle has a copy")

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        x, ids, weights = to_first(of, 2)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 2, EXPERTS, use_fp8=False)
        ids.fill_(1)
        buffer.low_latency_combine(rows, ids, weights, handle)
        with pytest.raises(ferry.OrderError, match="overwritten"):
            buffer.low_latency_combine(rows, ids, weights, handle)
        buffer.destroy()

    of.run(run)


def test_the_exception_can_be_pickled():
    error = deep_ep.InputFaultError("lost", None)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is deep_ep.InputFaultError and str(again) == "lost" and again.fault is None
