"""Ranks of a group whose communications are FlashInfer's, simulated or sharing a GPU."""

from __future__ import annotations

import dataclasses
import inspect
import threading

import ferry_ep as ferry
import torch
from conftest import on_streams
from ferry_ep import flashinfer as adapter
from flashinfer import moe_ep

RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 8, 3, 64, 5
INVALID = EXPERTS + 3
#: Name of the most tokens of a call, which changed in 0.7.4.
NAMES = inspect.signature(adapter.MoEEpCommunication.dispatch).parameters
MOST = next(name for name in NAMES if name.endswith("max_tokens_per_rank"))


class Meeting:
    """Ranks as threads: the first that comes makes the communicators of a configuration."""

    def __init__(self, gpu: int | None = None, ranks: int = RANKS) -> None:
        self.device = "cpu" if gpu is None else f"cuda:{gpu}"
        self.size = ranks
        if gpu is None:
            self.group = ferry.Group.simulated(ranks, seed=3)
        else:
            self.group = ferry.Group.local([gpu] * ranks, share_gpus=True)
        self.lock = threading.Lock()
        self.made: dict[ferry.Config, ferry.Communicators] = {}

    def connect(self, config: ferry.Config, bootstrap: moe_ep.BootstrapConfig) -> ferry.Communicator:
        with self.lock:
            if config not in self.made:
                # On one GPU the kernels of two meetings must fit at a time.
                small = dataclasses.replace(config, max_sms=16)
                self.made[config] = ferry.Communicators(self.group, ferry.Plan(self.group, small))
        return self.made[config][bootstrap.rank]

    def communication(self, rank: int, statistics: int = 0, **params) -> adapter.FerryCommunication:
        """Returns a rank's communication. ``params`` are FlashInfer's."""
        bootstrap = moe_ep.BootstrapConfig(world_size=self.size, rank=rank, auto_bootstrap=False)
        sizes = {
            "num_experts": EXPERTS,
            "top_k": TOP_K,
            "max_tokens_per_rank": TOKENS,
            "hidden_size": HIDDEN,
            "invalid_expert_id": INVALID,
        }
        params = moe_ep.MoEEpCommParams(**(sizes | params))
        config = adapter.FerryCommConfig(connect=self.connect, eplb_stats_num_experts=statistics)
        return moe_ep.create_communication(bootstrap, params, config)

    def run(self, work) -> list:
        """Runs ``work(rank)`` in a thread for each rank."""
        return on_streams(self.device, work, self.size)

    def end(self) -> None:
        for ranks in self.made.values():
            for rank in ranks:
                rank._end.native.drop()


def problem(seed, rank, tokens, id_type, device="cpu"):
    random = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(tokens, HIDDEN, generator=random).bfloat16()
    scores = torch.rand(tokens, EXPERTS, generator=random)
    weights, ids = torch.topk(torch.softmax(scores, dim=-1), TOP_K, dim=-1)
    ids[scores[:, :TOP_K] < 0.1] = -1
    return x.to(device), ids.to(device, id_type), weights.to(device)
