"""Faults of inputs, lost ranks, and ends that are not regular."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import ferry_ep as ferry
import numpy as np
import pytest
from conftest import in_threads


def test_an_input_fault_is_a_value(bench):
    of = bench(2)
    x, ids, _ = of.problem(1, holes=0).arguments
    ids[1][3, 1] = 99
    rows = of.together(ferry.Dispatch, x, ids)
    assert of.ranks[0].check() is None
    fault = of.ranks[1].check()
    assert fault.kind == "InvalidExpert" and fault.is_input
    assert (fault.rank, fault.index, fault.slot, fault.phase, fault.round) == (1, 3, 1, "dispatch", 1)
    assert "99" in str(fault) and "InvalidExpert" in repr(fault)
    assert of.ranks[1].check() is None
    # The round goes on, without that entry.
    of.together(ferry.Combine, [output.tokens for output in rows])
    assert sum(int(output.row_offsets[-1]) for output in rows) == 2 * 5 * 2 - 1


def test_a_fault_of_a_call_is_also_returned_by_synchronize(bench):
    of = bench(1, debug_checks=True)
    x, ids = np.zeros((1, 64), dtype=np.uint16), np.zeros((1, 2), dtype=np.int32)
    rank = of.ranks[0]
    rank.dispatch(x, ids)
    assert rank.synchronize().kind == "DuplicateExpert"
    assert rank.synchronize() is None


def test_outputs_that_are_too_small(bench):
    of = bench(2)
    x, ids, _ = of.problem(2, holes=0).arguments
    of.together(ferry.Dispatch, x, ids, capacity=3)
    kinds = [fault and fault.kind for fault in of.ranks.check()]
    assert "OutputTooSmall" in kinds


def test_a_rank_that_does_not_come_is_a_timeout(bench):
    of = bench(2, patience=0.05, deadline=0.5)
    x, ids, _ = of.problem(3).arguments
    of.ranks[1].release_thread()

    def late():
        time.sleep(0.5)

    # Some other thread might make the call of rank 1.
    thread = threading.Thread(target=late)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(ferry.PeerTimeout) as raised:
        of.ranks[0].dispatch(x[0], ids[0])
    assert time.monotonic() - begin < 1.5
    error = raised.value
    assert (error.rank, error.culprit, error.phase) == (0, 1, "dispatch")
    assert error.fault.kind == "PeerTimeout"
    with pytest.raises(ferry.PoisonedError) as raised:
        of.ranks[0].dispatch(x[0], ids[0])
    assert raised.value.fault == error.fault
    of.ranks[0].close()
    with pytest.raises(ferry.ClosedError):
        of.ranks[0].check()
    thread.join()


def test_a_lost_rank_is_the_culprit_of_all_others(bench):
    group = ferry.Group.simulated(3, lost=(2, 400))
    plan = ferry.Plan(group, ferry.Config(experts=6, top_k=2, hidden=64, max_tokens_per_rank=4, deadline=0.5))
    ranks = ferry.Communicators(group, plan)
    x, ids = np.zeros((4, 64), dtype=np.uint16), np.array([[0, 5]] * 4, dtype=np.int32)

    def run(number):
        try:
            for _ in range(50):
                output = ranks[number].dispatch(x, ids)
                ranks[number].combine(output.tokens)
        except ferry.FerryError as error:
            return error

    errors = in_threads(run, 3)
    assert all(isinstance(error, ferry.PeerTimeout) for error in errors[:2]), errors
    assert [error.culprit for error in errors[:2]] == [2, 2]
    assert isinstance(errors[2], ferry.SimulatorError) and "lost" in str(errors[2])


def test_a_single_call_that_would_wait_for_this_thread_raises(bench):
    of = bench(2)
    x, ids, _ = of.problem(4).arguments
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(ferry.ThreadError, match="rank 0 would wait for rank 1"):
            of.ranks[0].dispatch(x[0], ids[0])
        assert of.ranks[0].round == "idle"
        rows = of.together(ferry.Dispatch, x, ids)
        with pytest.raises(ferry.ThreadError, match="rank 1 would wait for rank 0"):
            of.ranks[1].combine(rows[1].tokens)
        of.together(ferry.Combine, [output.tokens for output in rows])
    # Halves that wait for nobody may be called one by one.
    for number in range(2):
        of.ranks[number].dispatch_async(x[number], ids[number])
    rows = [of.ranks[number].dispatch_wait(like=x[0]) for number in range(2)]
    for number in range(2):
        of.ranks[number].combine_async(rows[number].tokens)
    for number in range(2):
        of.ranks[number].combine_wait()
    assert time.monotonic() - begin < 5


def test_a_thread_for_each_rank_and_step(bench):
    of = bench(4)
    x, ids, _ = of.problem(4).arguments

    def step(number):
        output = of.ranks[number].dispatch(x[number], ids[number])
        of.ranks[number].combine(output.tokens)

    # Ids of ended threads are used again, by threads of other ranks.
    for _ in range(20):
        in_threads(step, 4)


def test_a_thread_drives_a_rank_once_it_made_a_call_of_a_round(bench):
    of = bench(2, deadline=0.3)
    x, ids, _ = of.problem(4).arguments
    of.ranks[1].synchronize()
    of.ranks[1].silu(np.zeros((1, 64), dtype=np.uint16), np.zeros(5, dtype=np.uint32))

    def alone(number):
        of.ranks[0].dispatch(x[0], ids[0])

    with pytest.raises(ferry.PeerTimeout):
        in_threads(alone, 1)
    # No thread is left that could drive rank 1, but rank 0 gave up, and says so.
    with pytest.raises(ferry.PoisonedError):
        of.ranks[0].dispatch(x[0], ids[0])


def test_a_rank_that_moves_to_another_thread(bench):
    of = bench(2)
    x, ids, _ = of.problem(4).arguments
    rows = of.together(ferry.Dispatch, x, ids)
    of.together(ferry.Combine, [output.tokens for output in rows])
    idle = threading.Event()
    other = threading.Thread(target=idle.wait, daemon=True)
    other.start()
    text = r"this thread drives, too.*call its release_thread\(\) first"
    with pytest.raises(ferry.ThreadError, match=text):
        of.ranks[0].dispatch(x[0], ids[0])
    idle.set()
    other.join()
    with pytest.raises(ferry.ThreadError, match="this thread drives, too"):
        of.ranks[0].dispatch(x[0], ids[0])
    of.ranks[1].release_thread()
    with pytest.raises(ferry.ThreadError, match="there is no other thread"):
        of.ranks[0].dispatch(x[0], ids[0])


def test_a_second_thread_is_refused_and_the_first_goes_on(bench):
    of = bench(2, deadline=5.0)
    x, ids, _ = of.problem(5).arguments
    begun = threading.Event()

    def first():
        begun.set()
        return of.ranks[0].dispatch(x[0], ids[0])

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    time.sleep(0.2)
    with pytest.raises(ferry.BusyError, match="rank 0"):
        of.ranks[0].check()
    assert "another thread" in repr(of.ranks[0])
    of.ranks[1].dispatch(x[1], ids[1])
    thread.join()
    assert of.ranks[0].round == "dispatched"


def test_waits_release_the_interpreter(bench):
    of = bench(2, deadline=1.0)
    x, ids, _ = of.problem(6).arguments
    counted = 0

    def alone():
        with pytest.raises(ferry.PeerTimeout):
            of.ranks[0].dispatch(x[0], ids[0])

    thread = threading.Thread(target=alone)
    thread.start()
    begin = time.monotonic()
    while thread.is_alive() and time.monotonic() - begin < 5:
        counted += 1
        time.sleep(0.01)
    assert counted > 20


IMPORTS = "import numpy as np, ferry_ep as ferry, threading, os, sys, time\n"


def run(code: str, seconds: float) -> subprocess.CompletedProcess:
    """Runs a program, and checks that it takes less than this beside what starting one takes."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=60)
    start = time.monotonic() - begin
    code = IMPORTS + textwrap.dedent(code)
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - begin < seconds + 2 * start, done
    return done


OPEN = """
group = ferry.Group.simulated(2)
plan = ferry.Plan(group, ferry.Config(experts=4, top_k=2, hidden=64, max_tokens_per_rank=2, deadline=2.0))
ranks = ferry.Communicators(group, plan)
x, ids = np.zeros((2, 64), dtype=np.uint16), np.array([[0, 3]] * 2, dtype=np.int32)
"""


def test_an_interpreter_with_an_open_round_ends():
    done = run(OPEN + "ranks[0].dispatch_async(x, ids)", 3)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("daemon", [False, True])
def test_an_interpreter_with_a_rank_that_waits_ends_within_the_deadline(daemon):
    wait = f"""
thread = threading.Thread(target=lambda: ranks[0].dispatch(x, ids), daemon={daemon})
thread.start()
time.sleep(0.3)
"""
    begin = time.monotonic()
    done = run(OPEN + wait, 2 + 1 + 0.3 + 1)
    assert done.returncode == 0, done.stderr
    assert ("PeerTimeout" in done.stderr) or daemon
    # Not before the deadline, if the thread must be joined.
    assert daemon or time.monotonic() - begin > 2


def test_a_fork_is_refused():
    child = """
import warnings
warnings.simplefilter("ignore")  # From 3.12 on, a fork with threads is warned of.
pid = os.fork()
if pid == 0:
    for use in (lambda: ranks[0].dispatch(x, ids), lambda: group.ranks, lambda: ranks.close(),
                lambda: ferry.Communicators(group, plan)):
        try:
            use()
        except ferry.ForkError as error:
            print(error)
    del ranks, group, plan
    sys.exit(0)
os.waitpid(pid, 0)
rows = ranks.together([ferry.Dispatch(x, ids)] * 2)
ranks.together([ferry.Combine(output.tokens) for output in rows])
ranks.close()
group.close()
"""
    done = run(OPEN + child, 20)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is a fork of it") == 4, done
    assert done.stderr == ""


INTERRUPT = """
import os, signal, tempfile
# A run in the background may have it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    WAIT
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - begin < 2)
"""


@pytest.mark.parametrize(
    "wait",
    [
        "ranks[0].dispatch(x, ids)",
        "ferry.Group.simulated_at(tempfile.mkdtemp() + '/s', 0, 2)",
        "ferry.Group.simulated_at(tempfile.mkdtemp() + '/s', 1, 2)",
        "ferry.Bootstrap.tcp('127.0.0.1:0', 0, 2)",
    ],
)
def test_a_signal_ends_a_wait(wait):
    # Another thread might drive rank 1.
    code = OPEN.replace("deadline=2.0", "deadline=20.0") + INTERRUPT.replace("WAIT", wait)
    code += """
if ranks[0].round != "idle":
    try:
        ranks[0].close()
    except ferry.OrderError:
        print("open")
    ranks[0]._end.native.drop()
"""
    done = run(code, 5)
    assert done.stdout.startswith("interrupted True"), done
    assert done.returncode == 0 and ("open" in done.stdout) == ("ranks" in wait), done


def test_a_wait_for_another_process_goes_on_after_a_signal(tmp_path):
    path = tmp_path / "s"
    other = f"""
group = ferry.Group.simulated_at({str(path)!r}, RANK, 2)
plan = ferry.Plan(group, ferry.Config(experts=4, top_k=2, hidden=64, max_tokens_per_rank=2, deadline=20.0))
rank = ferry.Communicator(group, plan)
x, ids = np.zeros((2, 64), dtype=np.uint16), np.array([[0, 3]] * 2, dtype=np.int32)
"""
    first = other.replace("RANK", "0") + "time.sleep(1)\nrank.dispatch(x, ids)\ntime.sleep(0.5)\n"
    second = other.replace("RANK", "1") + INTERRUPT.replace("WAIT", "rank.dispatch(x, ids)")
    second += "rank.synchronize()\nprint(rank.round, rank.check())\n"
    started = [
        subprocess.Popen([sys.executable, "-c", IMPORTS + code], stdout=-1, stderr=-1, text=True)
        for code in (first, second)
    ]
    outs = [process.communicate(timeout=20) for process in started]
    assert outs[1][0] == "interrupted True\ndispatched None\n", outs
