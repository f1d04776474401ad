"""Calls of ``ferry_ep.deep_ep`` that find no memory after they have sent: the calls that follow are right."""

from __future__ import annotations

import threading

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("ferry_ep.deep_ep")
rig = pytest.importorskip("deep_ep_rig")
from deep_ep_blocks import ENCODINGS, back, check_rows, send, sums  # noqa: E402
from deep_ep_rig import Tokens, check_received, dispatch, same  # noqa: E402
from ferry_ep.deep_ep import low_latency, rounds  # noqa: E402


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("failing", [{0, 1}, {1}], ids=["all", "one"])
def test_a_dispatch_without_memory_for_its_rows_can_be_made_again(world, monkeypatch, failing, is_strict):
    of = world(2)
    tokens = Tokens(90, of, [5, 3])
    monkeypatch.setenv("FERRY_DEEP_EP_STRICT", str(int(is_strict)))
    is_short = [False, False]

    def short_of(allocate):
        def outputs(self, like, rows, *others, **options):
            if rows and is_short[self.rank]:
                raise MemoryError("no memory is left")
            return allocate(self, like, rows, *others, **options)

        return outputs

    for owner, name in ((ferry.Communicator, "outputs"), (rounds.Round, "_outputs")):
        monkeypatch.setattr(owner, name, short_of(getattr(owner, name)))

    def run(rank):
        buffer = of.buffer(rank)
        # The first one makes a communicator.
        rows, *_, handle, _ = dispatch(buffer, *tokens.given(rank), tokens.experts)
        buffer.combine(rows, handle)
        # A rank that did not fail has a round open for each of them, two at most in strict mode.
        for _ in range(4 if len(failing) == 2 or not is_strict else 1):
            is_short[rank] = rank in failing
            if is_short[rank]:
                with pytest.raises(MemoryError, match="no memory is left"):
                    dispatch(buffer, *tokens.given(rank), tokens.experts)
            else:
                check_received(tokens, rank, dispatch(buffer, *tokens.given(rank), tokens.experts))
            is_short[rank] = False
            received = dispatch(buffer, *tokens.given(rank), tokens.experts)
            handle = check_received(tokens, rank, received)
            same(buffer.combine(tokens.answers(rank, received[0]), handle)[0], tokens.sums(rank))
        buffer.destroy()

    of.run(run)
    assert of.communicators == 2


@pytest.fixture
def short(monkeypatch):
    """Threads of ranks that have no memory to pack scales."""
    threads, pack = set(), low_latency.pack

    def packs(scales, packed):
        if threading.get_ident() in threads:
            raise MemoryError("no memory is left")
        pack(scales, packed)

    monkeypatch.setattr(low_latency, "pack", packs)
    return threads


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("failing", [{0, 1}, {1}], ids=["all", "one"])
def test_a_low_latency_dispatch_without_memory_for_its_scales_can_be_made_again(
    world, monkeypatch, short, failing, is_strict
):
    of = world(2)
    tokens = Tokens(91, of, [4, 6], hidden=512)
    options, encode = ENCODINGS["ue8m0"]
    monkeypatch.setenv("FERRY_DEEP_EP_STRICT", str(int(is_strict)))

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        for _ in range(4 if len(failing) == 2 or not is_strict else 1):
            if rank in failing:
                short.add(threading.get_ident())
                with pytest.raises(MemoryError, match="no memory is left"):
                    send(buffer, tokens, rank, **options)
                short.remove(threading.get_ident())
            else:
                send(buffer, tokens, rank, **options)
            rows, _, handle, _, _ = send(buffer, tokens, rank, **options)
            check_rows(tokens, rank, rows, encode)
            same(back(buffer, tokens, rank, handle)[0], sums(tokens, rank))
        buffer.destroy()

    of.run(run)
    assert of.communicators == 2


def test_a_hook_without_memory_for_its_scales_can_be_called_again(world, short):
    of = world(2)
    tokens = Tokens(92, of, [4, 6], hidden=512)
    options, encode = ENCODINGS["ue8m0"]

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        stats = torch.zeros(tokens.local, dtype=torch.int32, device=of.device)
        rows, count, handle, _, hook = send(
            buffer,
            tokens,
            rank,
            return_recv_hook=True,
            cumulative_local_expert_recv_stats=stats,
            **options,
        )
        short.add(threading.get_ident())
        for _ in range(2):
            with pytest.raises(MemoryError, match="no memory is left"):
                hook()
        short.remove(threading.get_ident())
        for _ in range(2):
            hook()
        check_rows(tokens, rank, rows, encode)
        same(stats, count)
        same(back(buffer, tokens, rank, handle)[0], sums(tokens, rank))
        buffer.destroy()

    of.run(run)
