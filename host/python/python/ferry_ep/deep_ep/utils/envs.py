"""Process groups of tests."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as distributed

__all__ = ["init_dist"]


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """Joins a process group, and returns this rank, the number of ranks, and a group of all. Collective.

    ``MASTER_ADDR`` (127.0.0.1) and ``MASTER_PORT`` (8361) are where the processes meet; ``WORLD_SIZE`` (1)
    and ``RANK`` (0) are number and index of nodes. With a GPU for each rank the backend is NCCL. With fewer,
    ranks share them, the backend is Gloo, and ``FERRY_DEEP_EP_SHARE_GPUS`` is set unless it is; without any,
    Gloo, and tensors are on the CPU. Tensors are BF16 and on the rank's device by default from then on; the
    seeds of torch and ``random`` are ``seed`` plus the rank.
    """
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "8361")
    gpus = torch.cuda.device_count()
    backend = "nccl" if gpus >= num_local_ranks else "gloo"
    if 0 < gpus < num_local_ranks:
        os.environ.setdefault("FERRY_DEEP_EP_SHARE_GPUS", "1")
    if gpus:
        torch.cuda.set_device(local_rank % gpus)
    distributed.init_process_group(
        backend,
        init_method=f"tcp://{address}:{port}",
        world_size=nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if gpus else "cpu")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    return rank, ranks, distributed.new_group(list(range(ranks)))
