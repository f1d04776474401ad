"""The order of streams in calls of ``ferry_ep.deep_ep``, on streams that write down what they are asked."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import ferry_ep as ferry
import pytest
from ferry_ep.core.tensors import stream_of

torch = pytest.importorskip("torch", reason="torch is not installed")
events = pytest.importorskip("ferry_ep.deep_ep.events")


class Stream:
    device = "cuda:0"

    def __init__(self, name, log):
        self.name, self.log, self.cuda_stream, self.stream_id = name, log, hash(name), 1

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for an event of {event.of}")


class Recorded:
    """A tensor that notes on which streams it is used."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_stream(self, stream):
        self.log.append(f"{self.name} is used on {stream.name}")


@pytest.fixture
def cuda(monkeypatch):
    """Puts streams in the place of CUDA's: the current one is "caller", the buffer's "buffer"."""
    log: list = []
    now = [Stream("caller", log)]
    capturing = [False]
    streams = events.Streams()
    streams._own = Stream("buffer", log)

    class Event:
        def record(self, stream):
            self.of = stream.name
            log.append(f"event on {stream.name}")

    @contextlib.contextmanager
    def stream(given):
        now.append(given)
        yield
        now.pop()

    for name, value in (
        ("is_initialized", lambda: True),
        ("current_stream", lambda device=None: now[-1]),
        ("stream", stream),
        ("Event", Event),
        ("is_current_stream_capturing", lambda: capturing[0]),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: now[-1].cuda_stream, raising=False
    )

    def work(previous=None, is_async=False, allocate=False, fails=False):
        log.clear()
        caller = now[-1]
        with streams.ordered(OnDevice.device, previous, is_async, allocate) as ordered:
            ordered.reads(Recorded("input", log), None)
            log.append(f"work on {now[-1].name}")
            if fails:
                raise KeyError
            ordered.returns(Recorded("result", log), None)
        assert now[-1] is caller
        return ordered.event

    work.log, work.capturing, work.stream, work.streams = log, capturing, stream, streams
    return work


def through_buffer(name):
    """Steps of a call from the stream ``name`` in the buffer's own stream."""
    return [
        f"buffer waits for {name}",
        "work on buffer",
        f"result is used on {name}",
        f"{name} waits for buffer",
    ]


def test_calls_of_one_stream_are_in_it(cuda):
    for _ in range(3):
        assert cuda().event is None
        assert cuda.log == ["work on caller"]
        assert cuda.streams.last.name == "caller"


def test_a_call_comes_after_those_of_other_streams(cuda):
    cuda()
    second = Stream("second", cuda.log)
    with cuda.stream(second):
        cuda()
        assert cuda.log == ["buffer waits for caller", *through_buffer("second")]
        assert cuda.streams.last.name == "buffer"
        cuda()
        assert cuda.log == ["work on second"]
    cuda()
    assert cuda.log == ["buffer waits for second", *through_buffer("caller")]
    with cuda.stream(second):
        cuda()
        # All calls are in the buffer's stream already.
        assert cuda.log == through_buffer("second")


def test_a_call_comes_after_one_that_was_async(cuda):
    cuda()
    cuda(None, True)
    assert cuda.log[:2] == ["buffer waits for caller", "input is used on buffer"]
    assert cuda.streams.last.name == "buffer"
    cuda()
    assert cuda.log == through_buffer("caller")
    cuda()
    assert cuda.log == ["work on caller"]


def test_captured_calls_wait_for_no_others_and_are_none_until_they_are_launched(cuda):
    cuda()
    cuda.capturing[0] = True
    with cuda.stream(Stream("second", cuda.log)):
        for _ in range(2):
            cuda()
            assert cuda.log == [step for step in through_buffer("second") if "is used" not in step]
    cuda.capturing[0] = False
    with cuda.stream(Stream("third", cuda.log)):
        cuda()
        assert cuda.log == ["buffer waits for caller", *through_buffer("third")]
        cuda(None, True)
        cuda.capturing[0] = True
        cuda()
        cuda.capturing[0] = False
        cuda()
        assert cuda.log == through_buffer("third")


def test_a_call_that_is_not_async_comes_after_its_event_and_the_calls_before(cuda):
    cuda()
    cuda(events.EventOverlap(events.EventHandle()))
    assert cuda.log == [
        "buffer waits for caller",
        "buffer waits for an event of caller",
        *through_buffer("caller")[1:],
    ]


def test_streams_that_are_not_torchs_own_hold_no_calls(cuda):
    foreign = Stream("foreign", cuda.log)
    foreign.stream_id = foreign.cuda_stream
    with cuda.stream(foreign):
        for _ in range(2):
            cuda()
            assert cuda.log == through_buffer("foreign")
    cuda()
    assert cuda.log == through_buffer("caller")


def test_the_buffers_stream_is_made_by_the_first_call_and_goes_before_others(cuda, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: asked.append((device, priority)))
    cuda.streams._own = None
    cuda()
    assert cuda.log == ["work on caller"] and asked == [(OnDevice.device, -1)]


def test_calls_work_on_a_buffers_stream_that_the_caller_uses(cuda):
    cuda()
    assert cuda.streams.lend(OnDevice.device).name == "buffer"
    assert cuda.log[-1] == "buffer waits for caller"
    for _ in range(2):
        cuda()
        assert cuda.log == through_buffer("caller")


def test_what_another_stream_made_is_marked_as_used(cuda):
    ids = Recorded("ids", cuda.log)
    for is_async, made_on, wanted in ((False, "caller", []), (True, "caller", ["ids is used on buffer"])):
        with cuda.streams.ordered(OnDevice.device, None, is_async, False) as ordered:
            cuda.log.clear()
            ordered.keeps(SimpleNamespace(made_on=hash(made_on), tensors=(ids,)))
            assert cuda.log == wanted
    cuda()
    with cuda.streams.ordered(OnDevice.device, None, False, False) as ordered:
        cuda.log.clear()
        ordered.keeps(SimpleNamespace(made_on=hash("buffer"), tensors=(ids,)))
        assert cuda.log == ["ids is used on caller"]


@pytest.mark.parametrize("is_captured", [False, True])
def test_memory_is_marked_as_used(cuda, is_captured):
    cuda.capturing[0] = is_captured
    events.mark_used(OnDevice.device, Recorded("memory", cuda.log), None)
    events.mark_used(torch.device("cpu"), torch.zeros(1))
    assert cuda.log == ["memory is used on caller"]


@pytest.mark.parametrize("allocate", [False, True])
def test_a_call_after_an_event_that_ends_with_one(cuda, allocate):
    before = events.EventOverlap(events.EventHandle())
    event = cuda(before, True, allocate)
    assert cuda.log == [
        "buffer waits for an event of caller",
        "input is used on buffer",
        "work on buffer",
        "result is used on caller",
        "event on buffer",
    ]
    cuda.log.clear()
    event.current_stream_wait()
    with event:
        assert cuda.log == ["caller waits for an event of buffer"]
    assert cuda.log == ["caller waits for an event of buffer"] * 2
    assert event.extra_tensors is None


def test_an_event_of_a_call_that_was_not_async_is_none(cuda):
    cuda(events.EventOverlap())
    assert cuda.log == ["work on caller"]
    cuda(None, True)
    assert cuda.log[0] == "buffer waits for caller" and cuda.log[-1] == "event on buffer"


def test_a_capture_keeps_tensors_instead(cuda):
    cuda.capturing[0] = True
    event = cuda(None, True)
    assert [each.name for each in event.extra_tensors] == ["input", "result"]
    assert not any("is used" in line for line in cuda.log)
    assert cuda().extra_tensors is None


def test_after_a_failure_the_current_stream_waits(cuda):
    with pytest.raises(KeyError):
        cuda(None, True, fails=True)
    assert cuda.log[-1] == "caller waits for buffer"


def test_allocations_on_the_buffers_stream_need_an_event(cuda):
    before = events.EventOverlap(events.EventHandle())
    for previous, is_async in ((None, True), (before, False), (events.EventOverlap(), True)):
        with pytest.raises(ferry.ArgumentError, match="allocate_on_comm_stream is True"):
            cuda(previous, is_async, True)


class OnDevice:
    """A tensor of a CUDA device, by what is asked of it."""

    is_cuda, device = True, torch.device("cuda", 0)


def test_the_default_stream_is_found_by_its_handle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    assert [stream_of(handle, OnDevice.device) for handle in (0, 5)] == ["default", 5]
