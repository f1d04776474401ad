"""Launches of one communicator are in order, whatever streams random calls of ``ferry_ep.deep_ep`` are on: on
streams that know which launches come before their next one, and with ``--gpu`` on some of CUDA.
"""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace

import ferry_ep as ferry
import pytest
from ferry_ep.core.outputs import TENSORS

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("ferry_ep.deep_ep")
from deep_ep_blocks import MOST, answers, back, check_rows, send, sums  # noqa: E402
from deep_ep_rig import Tokens, same  # noqa: E402
from ferry_ep.deep_ep import events, faults, graphs, latency_rounds, low_latency  # noqa: E402

CUDA = torch.device("cuda", 0)
#: Calls of a sequence.
CALLS = 60
#: Cycles of a GPU by which a stream is late, about 0.2 s.
DELAY = 400_000_000


class Event:
    """Launches that come before it, and the number of the capture in which it is."""

    def record(self, stream):
        assert stream.cuda_stream != 0 or not any(each.capture for each in stream.gpu.streams)
        self.before, self.capture = dict(stream.before), stream.capture


class Stream:
    """A stream that counts launches, by stream, which come before its next one; captured ones apart."""

    device = CUDA

    def __init__(self, gpu, handle):
        self.gpu, self.cuda_stream, self.stream_id = gpu, handle, -1
        self.eager, self.captured, self.capture = {}, {}, 0
        #: Tensors that the allocator knows to be used on it, beside that on which they were made.
        self.used = []

    @property
    def before(self):
        return self.captured if self.capture else self.eager

    def wait_stream(self, other):
        if self.gpu.fails:
            raise RuntimeError("CUDA error")
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event):
        self.capture = self.capture or event.capture
        assert event.capture == self.capture, "a capture waits for what is not in it"
        for handle, launches in event.before.items():
            self.before[handle] = max(launches, self.before.get(handle, 0))


class Gpu:
    """Streams by their handles, of which the first is the default one."""

    def __init__(self):
        self.streams, self.communicators, self.fails, self.captures = [], [], False, 0
        for _ in range(4):
            self.stream()
        self.current = self.streams[0]

    def stream(self, device=None, priority=0):
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def capture(self):
        """A capture on the current stream, whose launches are none afterwards."""
        self.captures += 1
        self.current.capture = self.captures
        yield
        for each in self.streams:
            each.captured, each.capture = {}, 0
        for each in self.communicators:
            each.last[True] = (0, 0)


class Tensor:
    """A tensor, by what is asked of it."""

    def __init__(self, device=CUDA):
        self.device, self.is_cuda, self.shape = device, device.type == "cuda", (2, 1, 8)

    def __len__(self):
        return 2

    def view(self, *shape):
        return self

    def record_stream(self, stream):
        stream.used.append(self)


class Communicator:
    """Notes the launch of each call, and asserts that it comes after the last one."""

    device, closed, rank, max_sms = "cuda:0", False, 0, None

    def __init__(self, gpu):
        self.gpu, self.round, self.is_done = gpu, "idle", True
        native = SimpleNamespace(device="cuda:0", capture=lambda handle: gpu.streams[handle].capture or None)
        self._end = SimpleNamespace(native=native, copies=True, peers=(None, None))
        #: Stream and number of the last launch, captured or not.
        self.last = {False: (0, 0), True: (0, 0)}
        #: Whether launches have a first round's deadline: the next one, and each that was made.
        self.is_first, self.were_first = True, []
        gpu.communicators.append(self)

    def launch(self, before, after):
        """Launches a kernel in the current stream, between these states of the round."""
        assert self.round == before
        stream = self.gpu.current
        self.were_first.append(self.is_first)
        is_captured, self.is_done = stream.capture != 0, False
        of, number = self.last[is_captured]
        assert stream.before.get(of, 0) >= number, f"{self.round} on {of}, then {after} on another stream"
        handle = stream.cuda_stream
        stream.before[handle] = stream.before.get(handle, 0) + 1
        self.last[is_captured], self.round = (handle, stream.before[handle]), after

    def outputs(self, like, id_type):
        return SimpleNamespace(**dict.fromkeys(TENSORS, Tensor()) | {"scales": None})

    def dispatch(self, x, ids, out):
        if ids.device != CUDA:
            raise ferry.ArgumentError("ids are on the CPU")
        self.launch("idle", "dispatched")

    def dispatch_async(self, x, ids):
        self.launch("idle", "dispatch sent")

    def dispatch_wait(self, out):
        self.launch("dispatch sent", "dispatched")

    def combine(self, rows, topk_weights, out):
        self.launch("dispatched", "idle")

    def combine_async(self, rows, topk_weights, out):
        self.launch("dispatched", "combine sent")

    def combine_wait(self):
        self.launch("combine sent", "idle")

    def give_up(self):
        self.launch("dispatched", "idle")

    def set_deadline(self, deadline):
        assert deadline is None and self.is_first
        self.is_first = False

    def check(self):
        return None

    def synchronize(self):
        of, number = self.last[False]
        self.is_done = self.gpu.current.before.get(of, 0) >= number


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    for name, value in (
        ("is_initialized", lambda: True),
        ("current_stream", lambda device=None: made.current),
        ("default_stream", lambda device: made.streams[0]),
        ("ExternalStream", lambda handle, device: made.streams[handle]),
        ("stream", made.on),
        ("Stream", made.stream),
        ("Event", Event),
        ("is_current_stream_capturing", lambda: made.current.capture != 0),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: made.current.cuda_stream, raising=False
    )
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **options: Tensor())
    monkeypatch.setattr(latency_rounds, "signature", lambda *values: None)
    monkeypatch.setattr(graphs.Graphs, "note", lambda self: None)
    monkeypatch.setattr(latency_rounds, "without_fillers", lambda ids, experts: ids)
    monkeypatch.setattr(latency_rounds, "_version_of", lambda ids: None)
    return made


class Calls:
    """Calls of a buffer, on streams that follow from a seed."""

    def __init__(self, gpu, seed=0):
        self.gpu, self.choose = gpu, random.Random(seed)
        self.runtime = SimpleNamespace(streams=events.Streams())
        self.communicators = []
        self.lane = latency_rounds.LatencyLane(self.connect, (4, 8, 2), 1, faults.Faults(False))
        #: One that calls of normal mode launch.
        self.normal = Communicator(gpu)
        self.handles, self.hooks = [], []

    def connect(self):
        self.communicators.append(Communicator(self.gpu))
        return self.communicators[-1]

    def dispatch(self, is_async=False, is_split=False, device=CUDA, finish=None):
        ids = Tensor(device)
        with low_latency._ordered(self.runtime, ids, is_async, is_split) as ordered:
            _, handle, hook = self.lane.dispatch(
                Tensor(device), ids, ordered=ordered, is_split=is_split, is_plain=False, finish=finish
            )
        self.handles.append(handle)
        self.hooks.append(hook)
        return ordered.event

    def combine(self, is_async=False, is_split=False, handle=None):
        handle = handle or self.choose.choice(self.handles)
        tensors = [Tensor() for _ in range(2)]
        with low_latency._ordered(self.runtime, tensors[0], is_async, is_split) as ordered:
            _, hook = self.lane.combine(
                *tensors, handle, ordered=ordered, out=Tensor(), is_plain=False, is_split=is_split
            )
        self.hooks.append(hook)
        return ordered.event

    def call_of_normal_mode(self, is_async):
        with self.runtime.streams.ordered(CUDA, None, is_async, False) as ordered:
            self.normal.launch("idle", "idle")
        return ordered.event

    def call_hooks(self):
        hooks, self.hooks = self.hooks, []
        for hook in hooks:
            if hook is not None:
                hook()

    def make_some(self, calls, streams):
        """Makes random calls on random ones of these streams."""
        for _ in range(calls):
            self.gpu.current = self.choose.choice(streams)
            kind, is_async = self.choose.randrange(10), self.choose.random() < 0.3
            options = {"is_async": is_async, "is_split": not is_async and self.choose.random() < 0.5}
            event = None
            with contextlib.suppress(ferry.OrderError):
                if kind < 4:
                    event = self.dispatch(**options)
                elif kind < 7 and self.handles:
                    event = self.combine(**options)
                elif kind == 7:
                    event = self.call_of_normal_mode(is_async)
                elif kind == 8:
                    with pytest.raises(ferry.ArgumentError):
                        self.dispatch(device=torch.device("cpu"))
            if event is not None and event.event is not None:
                event.current_stream_wait()
            self.gpu.current = self.choose.choice(streams)
            if self.choose.random() < 0.6:
                self.call_hooks()

    def make_all(self):
        gpu, callers = self.gpu, self.gpu.streams[:4]
        for _ in range(3):
            self.make_some(CALLS // 4, callers)
            self.call_hooks()
            # Hooks of captured calls may be called in another capture, and not in one.
            for _ in range(self.choose.choice([1, 2])):
                captured = self.choose.sample(callers[1:], 2)
                gpu.current = captured[0]
                with gpu.capture():
                    captured[1].wait_stream(captured[0])
                    self.make_some(CALLS // 12, captured)
        # The last call was captured, or not.
        self.make_some(self.choose.choice([0, CALLS // 12]), callers)
        gpu.current = self.choose.choice(callers)
        self.lane.end()
        assert all(each.round == "idle" and each.is_done for each in self.communicators)


@pytest.mark.filterwarnings("ignore:ferry_ep.deep_ep. a .*combine had")
@pytest.mark.parametrize("seed", range(200))
def test_launches_of_a_communicator_are_in_order(gpu, seed):
    Calls(gpu, seed).make_all()


def test_the_end_on_another_stream_says_what_its_hooks_use(gpu):
    calls = Calls(gpu)
    for _ in range(2):
        calls.dispatch(is_split=True)
    calls.hooks.clear()
    gpu.current = gpu.streams[1]
    calls.lane.end()
    assert len(gpu.current.used) == 2 * (len(TENSORS) - 1) and gpu.streams[0].used == []


@pytest.mark.parametrize("is_captured", [False, True])
def test_the_second_dispatch_has_a_deadline_of_the_first_round_unless_a_graph_keeps_it(gpu, is_captured):
    calls = Calls(gpu)
    gpu.current = gpu.streams[1]
    for number in range(3):
        with gpu.capture() if is_captured and number == 1 else contextlib.nullcontext():
            calls.dispatch()
            calls.combine(handle=calls.handles[-1])
    (communicator,) = calls.communicators
    assert communicator.were_first == [True, True, not is_captured, *[False] * 3]


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_hook_on_another_stream_comes_after_its_call_and_says_what_it_uses(gpu, is_captured):
    calls = Calls(gpu)
    first, second = gpu.streams[1:3]
    gpu.current = first
    with gpu.capture() if is_captured else contextlib.nullcontext():
        calls.dispatch(is_split=True)
        (hook,) = calls.hooks
        gpu.current = second
        for _ in range(2):
            hook()
            assert second.capture == first.capture and second.before[1] == 1
            assert len(second.used) == len(TENSORS) - 1 and first.used == []
        gpu.current = first
        calls.combine(is_split=True)
        assert first.before[2] == 1


def test_a_hook_that_goes_on_on_another_stream_comes_after_what_it_has_done(gpu):
    calls, seen = Calls(gpu), []

    def fails_once(blocks):
        seen.append(gpu.current.before.get(1))
        if len(seen) == 1:
            raise MemoryError

    gpu.current = gpu.streams[1]
    calls.dispatch(is_split=True, finish=fails_once)
    with pytest.raises(MemoryError):
        calls.hooks[0]()
    gpu.current = gpu.streams[2]
    calls.hooks[0]()
    assert seen == [2, 2]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_round_stays_open_if_a_call_cannot_begin(gpu, is_split):
    """No stream can wait for another one: then nothing was given up or sent, and a later call is right."""
    calls = Calls(gpu)
    for _ in range(2):
        calls.dispatch()
    gpu.current, gpu.fails = gpu.streams[1], True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="CUDA error"):
            calls.dispatch(is_split=is_split)
        with pytest.raises(RuntimeError, match="CUDA error"):
            calls.combine(handle=calls.handles[1], is_split=is_split)
        assert [each.round for each in calls.communicators] == ["dispatched"] * 2
    gpu.fails = False
    for handle in calls.handles:
        calls.combine(handle=handle)
    assert [each.round for each in calls.communicators] == ["idle"] * 2


@pytest.fixture
def cuda_world(world, monkeypatch):
    """Groups of ranks that share a GPU, whose waits end soon."""
    monkeypatch.setenv("FERRY_DEEP_EP_DEADLINE", "3")

    def make(ranks):
        made = world(ranks)
        if made.gpu is None:
            pytest.skip("only CUDA has streams: pytest --gpu 0")
        return made

    return make


#: Options of a call, by the name of its form.
FORMS = {"in place": {}, "async": {"async_finish": True}, "hook": {"return_recv_hook": True}}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_comes_after_one_that_is_late_in_another_stream(cuda_world, form):
    of = cuda_world(2)
    late, prompt = (Tokens(seed, of, [6, MOST], hidden=128) for seed in (72, 73))

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        # A call is in place in the stream of the calls before it alone.
        of_late, of_prompt = torch.cuda.current_stream(), torch.cuda.Stream()
        _, ids, weights = late.given(rank)
        rows, (x, other_ids, _) = answers(late, rank), prompt.given(rank)
        handle = send(buffer, late, rank, use_fp8=False)[2]
        of_late.synchronize()
        torch.cuda._sleep(DELAY)
        summed, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, **FORMS[form])
        if hook is not None:
            hook()
        with torch.cuda.stream(of_prompt):
            received, _, handle, _, hook = buffer.low_latency_dispatch(
                x, other_ids, MOST, prompt.experts, use_fp8=False, return_recv_hook=True
            )
            hook()
            assert not of_late.query() and len(buffer.runtime.communicators) == 1
            of_prompt.synchronize()
            check_rows(prompt, rank, received)
            same(summed, sums(late, rank))
            same(back(buffer, prompt, rank, handle)[0], sums(prompt, rank))
        buffer.destroy()

    of.run(run)


def test_graphs_of_calls_on_two_streams(cuda_world):
    of = cuda_world(1)
    batches = [Tokens(74 + seed, of, [MOST], hidden=128) for seed in range(4)]
    experts = batches[0].experts

    def run(rank):
        buffer = of.buffer(rank, low_latency_mode=True)
        given = x, ids, weights = [tensor.clone() for tensor in batches[0].given(rank)]
        factors = 1 + torch.arange(experts, device=of.device)[:, None, None] / 8
        other = torch.cuda.Stream()

        def dispatch(x):
            return buffer.low_latency_dispatch(x, ids, MOST, experts, use_fp8=False, return_recv_hook=True)

        def combine(rows, handle, **options):
            rows = (rows.float() * factors).bfloat16()
            return buffer.low_latency_combine(rows, ids, weights, handle, **options)

        def calls():
            current = torch.cuda.current_stream()
            rows, _, handle, _, hook = dispatch(x)
            with torch.cuda.stream(other):
                hook()
                summed, event, _ = combine(rows, handle, async_finish=True)
            again, _, handle, _, hook = dispatch(x + 1)
            hook()
            summed_again, _, hook = combine(again, handle, return_recv_hook=True)
            hook()
            event.current_stream_wait()
            current.wait_stream(other)
            return summed, summed_again

        def replay(graph, summed):
            for tensor in summed:
                tensor.fill_(99)
            graph.replay()
            return summed

        calls()
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        results = []
        for graph in graphs:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                results.append(calls())
        for batch in batches:
            for tensor, fresh in zip(given, batch.given(rank), strict=True):
                tensor.copy_(fresh)
            wanted = sums(batch, rank), sums(batch, rank, x=[batch.x[rank] + 1])
            for summed in (*map(replay, graphs, results), calls()):
                for tensor, each in zip(summed, wanted, strict=True):
                    same(tensor, each)
        graphs.clear()
        del graph
        buffer.assume_no_graphs()
        buffer.destroy()

    of.run(run)
