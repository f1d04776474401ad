"""``destroy`` of ``ferry_ep.deep_ep`` while graphs have its calls, as vLLM makes it before it drops them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
deep_ep = pytest.importorskip("ferry_ep.deep_ep")
rig = pytest.importorskip("deep_ep_rig")
from deep_ep_rig import Tokens, dispatch, same  # noqa: E402
from ferry_ep.deep_ep import graphs, runtime  # noqa: E402


class Graph:
    """A graph that retains what it is given, as torch's from 2.15 on."""

    def __init__(self):
        self.kept = []

    def retain_object(self, kept, *, synchronize_before_release):
        assert synchronize_before_release
        self.kept.append(kept)


@pytest.fixture
def capture(monkeypatch):
    """Lets a thread's calls be those of a graph: a simulated one has no streams."""
    of = threading.local()
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "get_currently_capturing_graph", lambda: of.graph, raising=False
    )

    def note(self):
        if getattr(of, "graph", None) is not None:
            self.note()

    monkeypatch.setattr(graphs.Graphs, "note_if_captured", note)

    def captured(graph, work):
        of.graph = graph
        try:
            return work()
        finally:
            of.graph = None

    return captured


def layer(buffer, tokens, rank):
    rows, *_, handle, _ = dispatch(buffer, *tokens.given(rank), tokens.experts)
    same(buffer.combine(tokens.answers(rank, rows), handle)[0], tokens.sums(rank))


def simulated(world):
    of = world(2)
    if of.gpu is not None:
        pytest.skip("graphs of the simulator are none of a GPU")
    return of, Tokens(1, of, [4, 3]), Tokens(2, of, [4, 3], top_k=1)


def test_memory_is_freed_with_the_last_graph(world, capture):
    of, tokens, others = simulated(world)

    def run(rank):
        buffer = of.buffer(rank)
        for each in (others, tokens):
            layer(buffer, each, rank)
        first, second = Graph(), Graph()
        for graph in (first, second, first):
            capture(graph, lambda: layer(buffer, tokens, rank))
        *eager, captured = buffer.runtime.communicators
        buffer.destroy()
        assert buffer.runtime is None
        assert all(each.closed for each in eager) and not captured.closed
        with pytest.raises(ferry.ClosedError, match="destroyed"):
            layer(buffer, tokens, rank)
        with pytest.raises(ferry.ClosedError, match="destroyed"):
            buffer.check()
        buffer.destroy()
        del first, graph
        gc.collect()
        assert not captured.closed and captured in graphs._left
        del second
        gc.collect()
        assert captured.closed and captured not in graphs._left
        buffer.destroy()

    of.run(run)


def test_graphs_that_ended_before_are_in_nobodys_way(world, capture):
    of, tokens, _ = simulated(world)

    def run(rank):
        buffer = of.buffer(rank)
        for _ in range(2):
            capture(Graph(), lambda: layer(buffer, tokens, rank))
            gc.collect()
        made = buffer.runtime.communicators
        buffer.destroy()
        assert all(each.closed for each in made)

    of.run(run)


def test_a_torch_that_does_not_tell_needs_a_promise(world, capture):
    of, tokens, _ = simulated(world)

    def run(rank):
        buffer = of.buffer(rank)
        capture(object(), lambda: layer(buffer, tokens, rank))
        *_, captured = buffer.runtime.communicators
        for _ in range(2):
            buffer.destroy()
            assert buffer.runtime is None and not captured.closed
        buffer.assume_no_graphs()
        buffer.destroy()
        assert captured.closed and captured not in graphs._left
        with pytest.raises(ferry.ClosedError):
            buffer.assume_no_graphs()

    of.run(run)


@pytest.mark.parametrize("others", [True, False, "lost"])
def test_ranks_in_other_processes_close_together(world, capture, others):
    """Only once the graphs of all have ended; and a rank that gave up asks nobody."""
    of, tokens, _ = simulated(world)
    closed = []

    def run(rank):
        buffer = of.buffer(rank)
        layer(buffer, tokens, rank)
        graph = Graph()
        capture(graph, lambda: layer(buffer, tokens, rank))
        *_, captured = buffer.runtime.communicators
        made, asked = buffer.runtime, []

        def gather(flags):
            asked.append(flags)
            return [flags, [*[True] * (len(flags) - 1), others]]

        made._gather_flags, made._own = gather, type("Group", (), {"close": lambda: closed.append(1)})
        if others == "lost":

            def lost(stream=None):
                raise ferry.PoisonedError("it gave up")

            captured.synchronize = lost
        buffer.destroy()
        del graph
        gc.collect()
        assert not captured.closed and not closed
        of.ends.wait()
        buffer.destroy()
        assert captured.closed == (others is True)
        assert asked == ([] if others == "lost" else [[True, False], [True]])

    of.run(run)
    assert len(closed) == (2 if others is True else 0)


def test_ranks_of_a_callers_own_processes_need_a_promise(world, capture, monkeypatch):
    """Nobody says whether their graphs have ended, too."""
    of, tokens, _ = simulated(world)
    monkeypatch.setattr(runtime, "_is_local", lambda held: False)

    def run(rank):
        buffer = of.buffer(rank)
        layer(buffer, tokens, rank)
        capture(Graph(), lambda: layer(buffer, tokens, rank))
        gc.collect()
        *eager, captured = buffer.runtime.communicators
        buffer.destroy()
        assert all(each.closed for each in eager) and not captured.closed
        buffer.assume_no_graphs()
        buffer.destroy()
        assert captured.closed

    of.run(run)


def test_what_is_left_is_said_once_at_exit():
    code = (
        "import threading, torch, ferry_ep as ferry\n"
        "from deep_ep_rig import World, Tokens, dispatch\n"
        "from ferry_ep.deep_ep import graphs\n"
        "of = World(2)\n"
        "tokens = Tokens(1, of, [2, 2])\n"
        "def run(rank):\n"
        "    buffer = of.buffer(rank)\n"
        "    rows, *_, handle, _ = dispatch(buffer, *tokens.given(rank), tokens.experts)\n"
        "    buffer.combine(rows, handle)\n"
        "    buffer.runtime._held[-1].graphs.are_any = True\n"
        "    buffer.runtime._held[-1].graphs.are_told = False\n"
        "    buffer.destroy()\n"
        "of.run(run)\n"
        "of.made.clear()\n"
    )
    # The rig is a module beside this one.
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines() == [
        "ferry_ep.deep_ep: 2 communicators of buffers that were destroyed before their CUDA graphs were not "
        "freed; they end with the process"
    ]


@pytest.mark.parametrize("is_low_latency", [False, True])
def test_vllm_destroys_its_buffer_before_its_graphs(world, is_low_latency):
    """On a GPU, with torch's own graphs."""
    of = world(2)
    if of.gpu is None:
        pytest.skip("only CUDA has graphs")
    tokens, every = Tokens(3, of, [4, 3], hidden=128), range(2)
    buffers = [of.buffer(rank, low_latency_mode=True) for rank in every]
    given = [tokens.given(rank) for rank in every]

    def calls(rank):
        buffer, (x, ids, weights) = buffers[rank], given[rank]
        if is_low_latency:
            rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, 8, tokens.experts, use_fp8=False)
            return buffer.low_latency_combine(rows, ids, weights, handle)[0]
        rows, *_, handle, _ = dispatch(buffer, x, ids, weights, tokens.experts, num_worst_tokens=16)
        return buffer.combine(rows, handle)[0]

    def replay():
        for each, stream in zip(captured, streams, strict=True):
            with torch.cuda.stream(stream):
                each.replay()
        torch.cuda.synchronize()
        for each, alike in zip(sums, wanted, strict=True):
            same(each, alike)
            each.fill_(99)

    wanted = of.run(calls)
    captured, streams, sums = [], [torch.cuda.Stream() for _ in every], []
    for rank in every:
        captured.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(captured[rank], stream=streams[rank]):
            sums.append(calls(rank))
    replay()
    made = [each for buffer in buffers for each in buffer.runtime.communicators]
    of.run(lambda rank: buffers[rank].destroy())
    assert all(buffer.runtime is None for buffer in buffers)
    assert any(not each.closed for each in made)
    # Nothing was freed yet: all ranks may still launch them.
    replay()
    tells = hasattr(captured[0], "retain_object")
    captured.clear()
    gc.collect()
    torch.cuda.synchronize()
    if not tells:
        for buffer in buffers:
            buffer.assume_no_graphs()
        of.run(lambda rank: buffers[rank].destroy())
    assert all(each.closed for each in made)
