"""Groups, and rounds of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import ferry_ep as ferry
import numpy as np
import pytest
from oracle import Problem, bits, expert, values

#: Arguments that are the same for all ranks.
SAME = {"like", "capacity", "data_type"}


def pytest_addoption(parser):
    parser.addoption("--gpu", type=int, help="CUDA device that all ranks share, for the tests with torch")


def pytest_configure(config):
    if config.getoption("--gpu") is not None:
        # Ranks are threads of one process: a kernel that is loaded at its first launch would wait for
        # kernels of ranks that wait for it, and so would streams that share a hardware queue.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def together(ranks: ferry.Communicators, kind: type, *each, streams=None, **named) -> list:
    """Makes a call of a kind on all ranks. Its arguments have a value for each rank, but for those of
    ``SAME``.
    """
    of_all = {name: value for name, value in named.items() if name in SAME}
    names = [name for name, value in named.items() if name not in SAME and value is not None]
    columns = [*each, *(named[name] for name in names)]
    rows = zip(*columns, strict=True) if columns else [()] * len(ranks)
    first = len(each)
    calls = [kind(*row[:first], **dict(zip(names, row[first:], strict=True)), **of_all) for row in rows]
    return ranks.together(calls, streams=streams)


class Bench:
    """A group, simulated or of ranks that share a GPU, and its communicators."""

    def __init__(self, ranks: int, patience: float | None = None, gpu: int | None = None, **config) -> None:
        sizes = {"experts": 2 * ranks, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 5}
        self.device = "cpu" if gpu is None else f"cuda:{gpu}"
        if gpu is None:
            self.group = ferry.Group.simulated(ranks, seed=7, patience=patience)
        else:
            self.group = ferry.Group.local([gpu] * ranks, share_gpus=True)
        self.config = ferry.Config(**(sizes | config))
        self.plan = ferry.Plan(self.group, self.config)
        self.ranks = ferry.Communicators(self.group, self.plan)

    def together(self, kind: type, *each, **named) -> list:
        """Makes a call of a kind on all ranks: see :func:`together`."""
        return together(self.ranks, kind, *each, **named)

    def problem(self, seed: int, tokens: int | None = None, **options) -> Problem:
        """Returns random tokens for every rank."""
        of = self.config
        tokens = of.max_tokens_per_rank if tokens is None else tokens
        return Problem(seed, len(self.ranks), tokens, of.hidden, of.experts, of.top_k, **options)

    def answers(self, rank: int, output: ferry.DispatchOutput) -> np.ndarray:
        """Returns the rows of a rank's experts; rows of no token are poisoned."""
        answers = np.full(output.tokens.shape, 0x7FC0, dtype=np.uint16)
        for group in range(self.plan.local_experts):
            rows = output.rows_of(group)
            number = self.plan.first_expert(rank) + group
            answers[rows] = bits(expert(values(output.tokens[rows]), number))
        return answers


@pytest.fixture
def bench(request):
    """Makes benches, and ends them."""
    # A GPU does not reach NumPy's arrays: tests without torch are simulated in any case.
    gpu = request.config.getoption("--gpu") if hasattr(request.module, "torch") else None
    with contextlib.ExitStack() as stack:

        def make(ranks: int = 2, **options) -> Bench:
            made = Bench(ranks, **({"gpu": gpu} | options))
            stack.callback(lambda: [rank._end.native.drop() for rank in made.ranks])
            return made

        yield make


@pytest.fixture
def world(request):
    """Makes groups whose ranks have a buffer of ferry_ep.deep_ep each, and ends them."""
    rig = pytest.importorskip("deep_ep_rig", reason="torch is not installed")
    gpu = request.config.getoption("--gpu")
    made = []

    def make(ranks: int = 2, **options):
        made.append(rig.World(ranks, gpu, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.fixture
def meet(request):
    """Makes groups whose ranks are communications of FlashInfer, and ends them."""
    rig = pytest.importorskip("flashinfer_rig", reason="FlashInfer is not installed")
    made = []

    def make(**options):
        made.append(rig.Meeting(**({"gpu": request.config.getoption("--gpu")} | options)))
        return made[-1]

    yield make
    for each in made:
        each.end()


def on_streams(device: str, work, count: int) -> list:
    """Runs ``work(rank)`` in a thread for each rank; on a GPU with a stream of torch of its own."""
    if device == "cpu":
        return in_threads(work, count)
    torch = importlib.import_module("torch")
    torch.cuda.synchronize()

    def run(rank: int):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            result = work(rank)
            torch.cuda.current_stream().synchronize()
            return result

    return in_threads(run, count)


def in_threads(work, count: int) -> list:
    """Runs ``work(rank)`` in a thread for each rank. Returns the results, or raises the first exception."""
    results: list = [None] * count
    errors: list = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def in_processes(code: str, ranks: int, *arguments: object, patience: float = 120) -> None:
    """Runs ``code`` in a process for each rank; its arguments are its number, ``ranks`` and these. Fails with
    the errors of the first that did not end well.
    """
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, (rank, ranks, *arguments))],
            env=os.environ | {"PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in started:
            _, error = process.communicate(timeout=patience)
            assert process.returncode == 0, error
    finally:
        for process in started:
            process.kill()
