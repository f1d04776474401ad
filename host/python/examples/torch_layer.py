"""A compiled MoE layer of torch: one rank in the simulator, or each rank of a local group's GPUs."""

import sys

import ferry_ep as ferry
import torch
from ferry_ep.torch import Exchange, MoE

on_gpu = "--gpu" in sys.argv
group = ferry.Group.local([0]) if on_gpu else ferry.Group.simulated(1)
plan = ferry.Plan(group, ferry.Config(experts=4, top_k=2, hidden=64, max_tokens_per_rank=8))
torch.manual_seed(0)

with group, ferry.Communicator(group, plan) as communicator, torch.no_grad():
    layer = MoE(Exchange(communicator), intermediate=32)
    for weight in layer.parameters():
        weight.copy_(torch.randn(weight.shape) / weight.shape[-2] ** 0.5)
    x = torch.randn(8, 64, device=layer.router.device).bfloat16()
    eager = layer(x)
    backend = "inductor" if on_gpu else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, backend=backend)(x)
    print(f"output {list(eager.shape)}, largest difference {(eager - compiled).abs().max().item()}")
    torch.testing.assert_close(eager, compiled)
