"""Helpers under the names that DeepEP's tests and engines import, written for Ferry."""

from ..events import EventHandle, EventOverlap
from .envs import init_dist
from .math import (
    calc_diff,
    create_grouped_scores,
    hash_tensor,
    inplace_unique,
    per_token_cast_back,
    per_token_cast_to_fp8,
)
from .testing import bench, bench_kineto

__all__ = [
    "EventHandle",
    "EventOverlap",
    "bench",
    "bench_kineto",
    "calc_diff",
    "create_grouped_scores",
    "hash_tensor",
    "init_dist",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
]
