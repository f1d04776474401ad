"""Times of tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["bench", "bench_kineto"]

#: Bytes that are written to empty the GPU's cache.
_FLUSHED = 256_000_000


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Returns the mean, least and largest time of ``fn`` in seconds, by events of CUDA, or of the host
    without a GPU. Synchronizes. The first of ``num_tests`` times is left out; ``post_fn`` runs after each.
    """
    for _ in range(num_warmups):
        fn()
    times = []
    for _ in range(num_tests):
        times.append(_timed(fn, flush_l2) if torch.cuda.is_initialized() else _timed_on_host(fn))
        if post_fn is not None:
            post_fn()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    seconds = [read() for read in times[1:] or times]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


def bench_kineto(
    fn: Callable[[], Any], kernel_names: str | tuple[str, ...], *args: Any, **options: Any
) -> Any:
    """Returns 1 for each name if ``EP_USE_NVIDIA_TOOLS`` is set, as DeepEP does; with
    ``num_kernels_per_period`` above 1 a tuple of as many, as its profile has. Else raises
    ``NotImplementedError``, as Ferry's kernels have other names.
    """
    if int(os.environ.get("EP_USE_NVIDIA_TOOLS", "0")):
        period = options.get("num_kernels_per_period", 1)
        each = 1 if period == 1 else (1,) * period
        return each if isinstance(kernel_names, str) else (each,) * len(kernel_names)
    raise NotImplementedError(
        f"bench_kineto of {kernel_names}: Ferry's kernels have other names; set EP_USE_NVIDIA_TOOLS=1, or "
        "use bench, which times whole calls"
    )


def _timed(fn: Callable[[], Any], flush_l2: bool) -> Callable[[], float]:
    """Enqueues one run, and returns how to read its time after a synchronization."""
    if flush_l2:
        torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda").zero_()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    fn()
    end.record()
    return lambda: float(begin.elapsed_time(end)) / 1e3


def _timed_on_host(fn: Callable[[], Any]) -> Callable[[], float]:
    begin = time.perf_counter()
    fn()
    seconds = time.perf_counter() - begin
    return lambda: seconds
