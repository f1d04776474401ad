"""FlashInfer's own layer over Ferry, with kernels of torch that take BF16 and quantized rows; and its own
tests, not edited: `FLASHINFER_TESTS` names their folder, `tests/moe_ep` of its repository.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
moe_ep = pytest.importorskip("flashinfer.moe_ep", reason="FlashInfer is not installed")
base = pytest.importorskip("flashinfer.moe_ep.core.kernel.base")
registry = pytest.importorskip("flashinfer.moe_ep.core.kernel.registry")
formats = pytest.importorskip("flashinfer.fused_moe.api").QuantFormat
rig = pytest.importorskip("flashinfer_rig")

from torch.overrides import TorchFunctionMode  # noqa: E402

RANKS, EXPERTS, TOKENS = rig.RANKS, rig.EXPERTS, rig.TOKENS
HIDDEN = 256
OWN = "test_moe_ep_communication_multirank.py"


@dataclass
class Weighing:
    """A kernel whose expert ``e`` multiplies by ``e + 1``: its rank, and whether tokens come as FP8."""

    rank: int
    is_fp8: bool
    kernel_name: str = "ferry_test_weighing"


def encode(x):
    """Returns codes and scales of blocks of 128, as bytes, as FlashInfer's kernels give them."""
    blocks = x.float().unflatten(1, (-1, 128))
    scales = blocks.abs().amax(dim=2, keepdim=True).clamp(min=1e-4) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn).flatten(1)
    return codes.view(torch.uint8), scales.squeeze(2).view(torch.uint8)


def decode(codes, scales):
    """Returns the f32 values of what :func:`encode` returns."""
    blocks = codes.view(torch.float8_e4m3fn).float().unflatten(1, (-1, 128))
    return (blocks * scales.view(torch.float32)[:, :, None]).flatten(1)


def weigh(x, ids, weights, rank):
    """Returns BF16 sums over a rank's experts, and which rows have one."""
    first = rank * EXPERTS // RANKS
    is_local = (ids >= first) & (ids < first + EXPERTS // RANKS)
    factors = torch.where(is_local, weights * (ids + 1), 0).sum(dim=1, keepdim=True)
    is_here = is_local.any(dim=1, keepdim=True)
    return torch.where(is_here, (x.float() * factors), float("nan")).bfloat16(), is_here


@registry.register_split_kernel("ferry_test_weighing")
class WeighingKernel(base.SplitKernelBackend):
    """The kernel of :class:`Weighing`."""

    @classmethod
    def kernel_name(cls):
        return "ferry_test_weighing"

    @classmethod
    def requires_weights(cls):
        return False

    def dispatch_format(self):
        return formats.DeepSeekFp8 if self._config.is_fp8 else None

    def quantize_for_dispatch(self, x):
        return encode(x)

    def compute(self, ctx):
        assert ctx.recv_topk_idx_global
        rows = ctx.expert_tensors.flatten(0, 1)
        if self._config.is_fp8:
            rows = decode(rows, ctx.expert_tensors_scale)
        return weigh(rows, ctx.recv_topk_idx, ctx.recv_topk_weights, self._config.rank)[0]


@pytest.mark.parametrize("is_fp8", [False, True])
def test_flashinfers_layer_takes_tokens_as_its_kernel_does(meet, monkeypatch, is_fp8):
    meeting = meet()
    monkeypatch.setenv("LOCAL_RANK", str(torch.device(meeting.device).index or 0))

    def run(rank):
        layer = moe_ep.MoEEpSplitLayer(
            bootstrap=moe_ep.BootstrapConfig(world_size=RANKS, rank=rank),
            fleet_params=moe_ep.FleetParams(
                num_experts=EXPERTS,
                max_tokens_per_rank=TOKENS,
                token_hidden_size=HIDDEN,
                layout=moe_ep.EpLayout.RANK_MAJOR,
            ),
            weights=moe_ep.dummy_moe_weights(num_local_experts=EXPERTS // RANKS, hidden=HIDDEN),
            backend=moe_ep.SplitConfig(
                comm=rig.adapter.FerryCommConfig(connect=meeting.connect), kernel=Weighing(rank, is_fp8)
            ),
        )
        for seed in range(3):
            tokens = (rank + seed) % TOKENS
            _, ids, weights = rig.problem(seed, rank, tokens, torch.int64, meeting.device)
            random = torch.Generator().manual_seed(70 * seed + rank)
            x = torch.randn(tokens, HIDDEN, generator=random).bfloat16().to(meeting.device)
            sums = layer(moe_ep.MoEEpTensors(hidden_states=x, topk_ids=ids, topk_weights=weights))
            given = decode(*encode(x)) if is_fp8 else x
            wanted = torch.zeros(tokens, HIDDEN, device=meeting.device)
            for of in range(RANKS):
                part, is_here = weigh(given, ids, weights, of)
                wanted = torch.where(is_here, wanted + part.float(), wanted)
            assert torch.equal(sums, wanted.bfloat16())
        layer.destroy()

    meeting.run(run)


class OnCpu(TorchFunctionMode):
    """Puts what a function of torch asks a GPU for on the CPU, in this thread."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        args = ["cpu" if isinstance(each, str) and each == "cuda" else each for each in args]
        kwargs = {name: "cpu" if name == "device" else each for name, each in (kwargs or {}).items()}
        return function(*args, **kwargs)


class Processes:
    """What FlashInfer's tests call of `torch.distributed`, between threads."""

    def __init__(self, count: int) -> None:
        self.barrier_of_all = threading.Barrier(count, timeout=60)
        self.values: list = []

    def barrier(self) -> None:
        self.barrier_of_all.wait()

    def all_reduce(self, tensor, op) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        self.values.append(int(tensor))
        self.barrier()
        tensor.fill_(max(self.values))
        self.barrier()


@pytest.mark.parametrize("top_k", [4, 8])
@pytest.mark.parametrize(
    "name",
    [
        "test_dispatch_combine_matches_local_reference",
        "test_split_layer_identity_round_trip_over_nvlink_one_sided",
    ],
)
def test_flashinfers_own_tests(meet, monkeypatch, name, top_k):
    """They ask for a rank and a backend; the rest of them is as it stands there."""
    folder = os.environ.get("FLASHINFER_TESTS")
    if folder is None:
        pytest.skip("FLASHINFER_TESTS is not set")
    spec = importlib.util.spec_from_file_location("flashinfer_own", Path(folder) / OWN)
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    test = getattr(own, name)
    named = {"backend": "ferry", "top_k": top_k}
    arguments = {each: named[each] for each in inspect.signature(test).parameters}
    if "top_k" not in arguments and top_k == 8:
        pytest.skip("it has one top-k")
    meeting, processes, local = meet(), Processes(RANKS), threading.local()
    monkeypatch.setenv("LOCAL_RANK", str(torch.device(meeting.device).index or 0))
    monkeypatch.setattr(torch.distributed, "barrier", processes.barrier)
    monkeypatch.setattr(torch.distributed, "all_reduce", processes.all_reduce)
    own._init_dist = lambda: (local.rank, RANKS)
    own._backend_config = lambda *_, **__: rig.adapter.FerryCommConfig(connect=meeting.connect)

    def run(rank):
        local.rank = rank
        if meeting.device != "cpu":
            return test(**arguments)
        with OnCpu():
            return test(**arguments)

    meeting.run(run)
