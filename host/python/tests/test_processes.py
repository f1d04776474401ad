"""Simulated ranks as processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import ferry_ep as ferry
import pytest

START = """
import sys, time, os, signal
import numpy as np
import ferry_ep as ferry
from oracle import Problem, bf16, bits, expert, values
path, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
group = ferry.Group.simulated_at(path, rank, ranks, timeout=10)
config = ferry.Config(experts=2 * ranks, top_k=2, hidden=64, max_tokens_per_rank=5, deadline=DEADLINE)
plan = ferry.Plan(group, config)
comm = ferry.Communicator(group, plan)
problem = Problem(5, ranks, 5, 64, 2 * ranks, 2)
x, ids, weights = (each[rank] for each in problem.arguments)

def answers(output):
    rows = np.zeros(output.tokens.shape, dtype=np.uint16)
    for group in range(plan.local_experts):
        at = output.rows_of(group)
        rows[at] = bits(expert(values(output.tokens[at]), plan.first_expert(rank) + group))
    return rows

def round():
    return comm.combine(answers(comm.dispatch(x, ids, weights)))
"""


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


@contextlib.contextmanager
def processes(path: Path, code: str, ranks: int, deadline: float = 5.0):
    """Starts a process for each rank, and kills those that are left."""
    source = START.replace("DEADLINE", str(deadline)) + textwrap.dedent(code)
    started = []
    try:
        for rank in range(ranks):
            command = [sys.executable, "-c", source, str(path), str(rank), str(ranks)]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT))
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ends(process: subprocess.Popen, seconds: float = 30) -> str:
    """Waits until a process has ended well, and returns its output."""
    out, error = process.communicate(timeout=seconds)
    assert process.returncode == 0, error
    return out


def until(process: subprocess.Popen, line: str) -> None:
    """Waits until a process has written a line."""
    assert process.stdout.readline().strip() == line, process.communicate()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ranks"


def test_rounds(path):
    code = """
    for _ in range(3):
        np.testing.assert_array_equal(round(), bits(bf16(problem.sums(rank, "reduced"))))
    assert comm.check() is None and group.local_ranks == [rank]
    comm.close()
    group.close()
    """
    with processes(path, code, 3) as started:
        for process in started:
            ends(process)
    assert not path.exists()


def test_a_process_that_dies_is_a_lost_rank(path):
    code = """
    round()
    print("ready", flush=True)
    if rank == 1:
        time.sleep(60)
    try:
        while True:
            round()
    except ferry.PeerTimeout as error:
        print(error.culprit, error.phase)
        assert "deadline" not in str(error)
    comm.close()
    try:
        group.close()
    except ferry.SimulatorError as error:
        print(error)
    """
    with processes(path, code, 3) as started:
        for process in started:
            until(process, "ready")
        started[1].kill()
        begin = time.monotonic()
        for rank in (2, 0):
            out = ends(started[rank])
            assert out.startswith("1 dispatch"), out
            assert "rank 1 was lost: its process ended" in out
        assert time.monotonic() - begin < 5 + 1


def test_the_death_of_rank_0_is_an_error_within_2_seconds(path):
    code = """
    round()
    print("ready", flush=True)
    if rank == 0:
        time.sleep(60)
    try:
        round()
    except ferry.SimulatorError as error:
        print(error)
    """
    with processes(path, code, 2, deadline=60.0) as started:
        for process in started:
            until(process, "ready")
        time.sleep(0.2)
        started[0].send_signal(signal.SIGKILL)
        assert ends(started[1], 2) == "the process of rank 0 ended\n"


def test_processes_that_disagree(path):
    code = """
    """
    start = START.index("plan =")
    source = START[:start].replace("hidden=64", "hidden=64 * (1 + rank)") + START[start:]
    source = source.replace("comm =", "try:\n    comm =").split("problem =")[0]
    source += "except ferry.GroupError as error:\n    print(error)\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "START", source)
        with processes(path, code, 2) as started:
            for process in started:
                assert "configured differently" in ends(process)


def test_a_rank_that_does_not_come(path):
    begin = time.monotonic()
    with pytest.raises(ferry.SimulatorError, match=r"rank 1 did not come within 0\.3 s"):
        ferry.Group.simulated_at(path, 0, 2, timeout=0.3)
    with pytest.raises(ferry.SimulatorError, match=r"no rank 0 at .*/ranks"):
        ferry.Group.simulated_at(path, 1, 2, timeout=0.3)
    assert time.monotonic() - begin < 2
    assert not path.exists()
    with pytest.raises(ferry.SimulatorError, match="rank 2 is not among 2"):
        ferry.Group.simulated_at(path, 2, 2)
    with pytest.raises(ferry.SimulatorError, match="cannot listen"):
        ferry.Group.simulated_at("/proc/none/socket", 0, 2)


def test_a_file_is_never_replaced(path):
    path.write_text("data")
    with pytest.raises(ferry.SimulatorError, match=rf"cannot listen at {path}: .*no socket"):
        ferry.Group.simulated_at(path, 0, 1)
    assert path.read_text() == "data"
    path.unlink()
    # A socket at which nobody listens any more.
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    ferry.Group.simulated_at(path, 0, 1).close()
    assert list(path.parent.iterdir()) == []
    with pytest.raises(ferry.SimulatorError, match="its folder does not exist"):
        ferry.Group.simulated_at(path / "none" / "s", 0, 1)
    long = path.parent / ("a" * 200)
    for rank in range(2):
        with pytest.raises(ferry.SimulatorError, match=r"path is .* has at most 97"):
            ferry.Group.simulated_at(long, rank, 2, timeout=1)


def test_the_file_of_the_socket_goes_with_a_short_program(path):
    code = f"import ferry_ep as ferry; ferry.Group.simulated_at({str(path)!r}, 0, 1)"
    for _ in range(5):
        subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)
        assert not path.exists()


def test_processes_of_another_job_are_sent_away(path):
    groups: list = [None] * 2

    def join(rank):
        groups[rank] = ferry.Group.simulated_at(path, rank, 2, timeout=10, key="one")

    first = threading.Thread(target=join, args=(0,))
    first.start()
    while not path.exists():
        time.sleep(0.01)
    for key in ("two", b"", None, "ones"):
        with pytest.raises(ferry.SimulatorError, match="rank 1 has another key than rank 0"):
            ferry.Group.simulated_at(path, 1, 2, timeout=10, key=key)
    with pytest.raises(ferry.SimulatorError, match="in use by another job"):
        ferry.Group.simulated_at(path, 0, 2, timeout=10, key="two")
    join(1)
    first.join()
    assert [group.local_ranks for group in groups] == [[0], [1]]


def test_two_jobs_at_a_path_are_not_mixed(path):
    texts: list = []

    def join(rank):
        with pytest.raises(ferry.SimulatorError) as raised:
            ferry.Group.simulated_at(path, rank, 3, timeout=10)
        texts.append(str(raised.value))

    # Rank 0 of one job, then a rank of the other one, and its rank 0: it may take part in neither.
    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
        while not path.exists():
            time.sleep(0.01)
    time.sleep(0.3)
    begin = time.monotonic()
    with pytest.raises(ferry.SimulatorError, match="in use by another job"):
        ferry.Group.simulated_at(path, 0, 3, timeout=10)
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < 2 and not path.exists()
    assert len(texts) == 2 and all("another rank 0 came" in text for text in texts), texts


def test_rank_0_hears_why_a_rank_did_not_come(path):
    def sent_away():
        while not path.exists():
            time.sleep(0.01)
        with pytest.raises(ferry.SimulatorError, match="rank 1 expects 4 ranks, and rank 0 2"):
            ferry.Group.simulated_at(path, 1, 4, timeout=1)

    other = threading.Thread(target=sent_away)
    other.start()
    with pytest.raises(ferry.SimulatorError, match=r"rank 1 did not come .*rank 1 expects 4 ranks"):
        ferry.Group.simulated_at(path, 0, 2, timeout=1)
    other.join()


def test_a_block_that_an_exception_leaves_waits_for_nobody(path):
    code = """
    round()
    print("ready", flush=True)
    begin = time.monotonic()
    try:
        with group, comm:
            if rank == 1:
                raise RuntimeError("bug")
            round()
    except (RuntimeError, ferry.PeerTimeout) as error:
        print(type(error).__name__)
    assert rank == 0 or time.monotonic() - begin < 1, time.monotonic() - begin
    if rank == 1:
        try:
            group.ranks
        except ferry.ClosedError as error:
            print(error)
    """
    with processes(path, code, 2, deadline=4.0) as started:
        out = ends(started[1], 10)
        assert "RuntimeError" in out and "the group was left" in out
        assert "PeerTimeout" in ends(started[0], 10)


def hello(path: Path, payload: bytes, version: int | None = None, length: int | None = None) -> bytes:
    """Sends a hello of another program, and returns the answer; empty if the connection just ended."""
    version = version_of(path) if version is None else version
    length = len(payload) if length is None else length
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(struct.pack("<QQQ", 0, version, length) + payload)
        answer = connection.recv(4096)
        return answer[16:] if answer[:1] == b"\1" else answer


def version_of(path: Path) -> int:
    """Returns the version that rank 0 names to those of another one."""
    refused = hello(path, b"\1\2\0", version=1)
    assert b"version 0x1, and rank 0 has" in refused
    return int(refused.split()[-1], 16)


def test_strangers_are_sent_away_and_the_ranks_go_on(path):
    groups: list = [None, None]

    def join(rank):
        groups[rank] = ferry.Group.simulated_at(path, rank, 2, timeout=20)

    first = threading.Thread(target=join, args=(0,))
    first.start()
    while not path.exists():
        time.sleep(0.01)
    found = path.stat()
    assert stat.S_ISSOCK(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert hello(path, bytes(3), length=2**40) != b"\0" * 16
    assert b"expects 7 ranks" in hello(path, b"\1\7\0")
    assert b"does not exist" in hello(path, b"\2\2\0")
    assert b"does not exist" in hello(path, b"\0\2\xff")
    # One that says nothing.
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(str(path))
    join(1)
    first.join()
    # One thread after the other: a group of processes closes when all have come.
    closing = threading.Thread(target=groups[0].close)
    closing.start()
    groups[1].close()
    closing.join()
    silent.close()


def test_requests_are_bounded(path):
    """A rank that sends more than there may be, or nonsense, gets an error, and memory stays whole."""
    first = threading.Thread(target=lambda: ferry.Group.simulated_at(path, 0, 2, timeout=5))
    first.start()
    while not path.exists():
        time.sleep(0.01)
    lanes, version = [], version_of(path)
    for lane in range(2):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(struct.pack("<QQQ", 0, version, 3) + bytes([1, 2, lane]))
        assert connection.recv(4096) == bytes(16)
        lanes.append(connection)

    def ask(operation, argument, payload=b"", length=None):
        length = len(payload) if length is None else length
        lanes[0].sendall(struct.pack("<QQQ", operation, argument, length) + payload)
        return lanes[0].recv(4096)

    assert ask(7, 0)[:1] == b"\0"
    first.join()
    assert b"outside every allocation" in ask(3, 12345, b"bytes")
    assert b"outside every allocation" in ask(4, 12345, struct.pack("<Q", 8))
    assert b"operation 4" in ask(4, 12345, struct.pack("<Q", 2**40))
    assert b"kernel 0, 3 bytes" in ask(5, 0, b"abc")
    assert b"kernel 99" in ask(5, 99)
    assert b"operation 77" in ask(77, 0)
    assert b"no memory" in ask(1, 2**50)
    assert ask(1, 64)[:1] == b"\0"
    # The connection ends, and nothing was allocated for the payload.
    assert ask(3, 0, length=2**60) == b""


LATE = """
import os, signal, sys, time
import ferry_ep as ferry
group = ferry.Group.simulated_at(sys.argv[1], int(sys.argv[2]), 2, timeout=10)
config = ferry.Config(experts=4, top_k=2, hidden=64, max_tokens_per_rank=5, deadline=5)
plan = ferry.Plan(group, config)
first = ferry.Communicator(group, plan)
memory = first.empty((4,), "f32")
if first.rank == 1:
    sys.stdin.read()
    os._exit(0)
def within(*_):
    for call in (memory.numpy, first.check, group.close, lambda: ferry.Communicator(group, plan)):
        try:
            call()
        except ferry.BusyError:
            print("busy")
    raise KeyboardInterrupt("ours")
signal.signal(signal.SIGALRM, within)
signal.setitimer(signal.ITIMER_REAL, 0.3)
begin = time.monotonic()
try:
    with group, first:
        try:
            ferry.Communicator(group, plan)
        finally:
            try:
                first.check()
            except ferry.BusyError:
                print("owed")
except KeyboardInterrupt as error:
    print(error, time.monotonic() - begin < 2)
"""


def test_a_handler_within_a_wait_and_calls_after_it_do_not_wait(path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    commands = [[sys.executable, "-c", LATE, str(path), str(rank)] for rank in range(2)]
    started = [subprocess.Popen(command, **pipes, text=True, env=ENVIRONMENT) for command in commands]
    try:
        out, _ = started[0].communicate(timeout=20)
        assert out.split("\n") == ["busy"] * 4 + ["owed", "ours True", ""]
    finally:
        for process in started:
            process.kill()
            process.communicate()
