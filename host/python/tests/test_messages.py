"""Messages of the library go to Python's logging."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import ferry_ep as ferry
import pytest

DROPPED = """
import gc, logging, os, sys
import ferry_ep as ferry
import numpy as np
group = ferry.Group.simulated(1)
config = ferry.Config(experts=1, top_k=1, hidden=8, max_tokens_per_rank=1)
rank = ferry.Communicator(group, ferry.Plan(group, config))
rank.dispatch_async(np.zeros((1, 8), np.uint16), np.zeros((1, 1), np.int32))
{first}
del rank
{last}
"""


def dropped(first: str = "", last: str = "") -> subprocess.CompletedProcess:
    """Runs a program that drops a communicator with an open round."""
    code = DROPPED.format(first=first, last=last)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_a_warning_is_a_record(caplog):
    group = ferry.Group.simulated(1)
    config = ferry.Config(experts=1, top_k=1, hidden=8, max_tokens_per_rank=1)
    rank = ferry.Communicator(group, ferry.Plan(group, config))
    rank.dispatch_async(*ones())
    with caplog.at_level(logging.WARNING, "ferry_ep"):
        rank._end.native.drop()
        until = time.monotonic() + 10
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
    record = caplog.records[0]
    assert (record.name, record.levelname) == ("ferry_ep", "WARNING")
    assert record.getMessage() == "dropped without close: its memory is leaked (rank 0)"


def ones():
    import numpy

    return numpy.zeros((1, 8), numpy.uint16), numpy.zeros((1, 1), numpy.int32)


def test_a_program_without_handlers_sees_warnings():
    done = dropped()
    assert done.returncode == 0 and done.stderr.startswith("dropped without close"), done


def test_a_program_can_silence_them():
    done = dropped("logging.getLogger('ferry_ep').setLevel(logging.CRITICAL)")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_handler_may_call_the_library():
    handler = """
class Handler(logging.Handler):
    def emit(self, record):
        with ferry.Group.simulated(2) as other:
            print(other.ranks, record.getMessage())
logging.getLogger("ferry_ep").addHandler(Handler())
logging.getLogger("ferry_ep").propagate = False
"""
    done = dropped(handler)
    assert done.returncode == 0 and done.stdout.startswith("2 dropped without close"), done


def test_the_thread_of_messages_drives_no_rank(caplog):
    group = ferry.Group.simulated(2)
    config = ferry.Config(experts=2, top_k=1, hidden=8, max_tokens_per_rank=1)
    ranks = ferry.Communicators(group, ferry.Plan(group, config))
    test_a_warning_is_a_record(caplog)
    with pytest.raises(ferry.ThreadError, match="there is no other thread"):
        ranks[0].dispatch(*ones())
    ranks.close()


def test_a_fork_has_messages_of_its_own():
    fork = """
import warnings
warnings.simplefilter("ignore")  # From 3.12 on, a fork with threads is warned of.
for thread in (0, 1):
    if os.fork() == 0:
        group = ferry.Group.simulated(1)
        rank = ferry.Communicator(group, ferry.Plan(group, config))
        rank.dispatch_async(np.zeros((1, 8), np.uint16), np.zeros((1, 1), np.int32))
        del rank
        sys.exit(0)
    assert os.wait()[1] == 0
"""
    done = dropped(last=fork)
    assert done.returncode == 0 and done.stderr.count("dropped without close: its memory") == 3, done
