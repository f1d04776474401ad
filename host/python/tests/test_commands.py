"""The programs of the package end with a sentence where something is missing."""

from __future__ import annotations

import subprocess
import sys

import ferry_ep as ferry
import pytest


def ended(*arguments: str, without: str | None = None) -> tuple[int, str, str]:
    """Runs a program of the package, perhaps without a module."""
    code = f"""
import runpy, sys
sys.modules[{without!r}] = None
sys.argv = {list(arguments)!r}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("program", ["demo", "bench"])
def test_without_numpy(program):
    name = f"python -m ferry_ep.{program}"
    wanted = f"{name} needs NumPy: pip install numpy\n"
    assert ended(f"ferry_ep.{program}", without="numpy") == (1, "", wanted)


@pytest.mark.parametrize("program", ["demo", "bench"])
def test_ranks_that_no_group_has(program):
    wanted = f"python -m ferry_ep.{program}: ranks is 0, but a group has 1 to 64\n"
    assert ended(f"ferry_ep.{program}", "--ranks", "0") == (1, "", wanted)


def test_a_bench_without_a_driver():
    code, out, error = ended("ferry_ep.bench", "--devices", "77")
    assert (code, out) == (1, "") and error.startswith("python -m ferry_ep.bench: ")
    assert error.count("\n") == 1 and "Traceback" not in error


def test_programs_run():
    code, out, error = ended("ferry_ep.demo", "--ranks", "2", "--rounds", "1")
    assert (code, error) == (0, "") and "round 1: rows" in out
    code, out, error = ended("ferry_ep.bench", "--ranks", "2", "--rounds", "1", "--hidden", "64")
    assert (code, error) == (0, "") and "a round with its wait" in out
    code, out, _ = ended("ferry_ep.check", "--ranks", "2", "--experts", "4", "--hidden", "64", "--top-k", "2")
    assert code == 0 and f"ferry_ep {ferry.__version__}" in out
    code, out, error = ended("ferry_ep.check", "--links")
    # With two GPUs or more, and with fewer.
    works, none = code == 0 and "All links work." in out, code == 1 and "no link to check" in error
    assert works or none, (code, out, error)
