"""``python -m ferry_ep.check``: what this machine has for each kind of group, and what it lacks."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
from collections.abc import Callable

from . import Bootstrap, Config, FerryError, Group, Plan, __version__, has_cuda, has_nvshmem


def _try(name: str, make: Callable[[], Group]) -> bool:
    """Makes a group and closes it; prints whether that works, and why not."""
    try:
        group = make()
        text = f"works ({', '.join(group.device(rank) for rank in group.local_ranks)})"
        group.close()
    except FerryError as error:
        print(f"{name}: no: {error}")
        return False
    print(f"{name}: {text}")
    return True


def _devices() -> int:
    """Counts the GPUs that a group can be made of, and prints each."""
    count = 0
    while _try(f"  GPU {count}", lambda number=count: Group.local([number])):  # type: ignore[misc]
        count += 1
    return count


def _mps() -> str:
    """Says whether a daemon of MPS can be seen, which processes that share a GPU need to run side by side."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    there = (pathlib.Path(folder) / "control").exists()
    return (
        f"a daemon at {folder}"
        if there
        else f"no daemon at {folder}; only processes that share a GPU need one"
    )


def _links(gpus: int) -> str:
    """Prints what links between these GPUs carry, and returns what is wrong."""
    if gpus < 2:
        return f"no link to check: {gpus} GPUs were found"
    with Group.local(range(gpus)) as group:
        report = group.check_links()
    print(report, end="")
    return "" if report.is_well else "links between GPUs are bad"


def owners_of_deep_ep() -> list[str]:
    """Returns name and version of each distribution that installed ``deep_ep``."""
    names = importlib.metadata.packages_distributions().get("deep_ep", [])
    return [f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names))]


def _deep_ep() -> str:
    """Says who owns the name ``deep_ep``."""
    owners = owners_of_deep_ep()
    if len(owners) > 1:
        return f"{', '.join(owners)}: uninstall all of them, then install one"
    return ", ".join(owners) or "not installed; ferry-ep-deep-ep installs it for ferry_ep.deep_ep"


def main(arguments: list[str] | None = None) -> None:
    """Runs the checks with these arguments, by default the program's."""
    parser = argparse.ArgumentParser(prog="python -m ferry_ep.check", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the plan (default: 8)")
    parser.add_argument("--experts", type=int, default=256, help="default: 256")
    parser.add_argument("--top-k", type=int, default=8, help="default: 8")
    parser.add_argument("--hidden", type=int, default=7168, help="default: 7168")
    parser.add_argument("--tokens", type=int, default=128, help="max_tokens_per_rank (default: 128)")
    parser.add_argument("--format", default="bf16", help="format of tokens (default: bf16)")
    parser.add_argument(
        "--links",
        action="store_true",
        help="check what one GPU stores into the memory of another; fail if a link is bad, or there is none",
    )
    given = parser.parse_args(arguments)
    print(f"ferry_ep {__version__}, features: cuda {has_cuda}, nvshmem {has_nvshmem}")
    config = Config(
        experts=given.experts,
        top_k=given.top_k,
        hidden=given.hidden,
        max_tokens_per_rank=given.tokens,
        format=given.format,
    )
    try:
        plan = Plan(Group.simulated(given.ranks), config)
    except FerryError as error:
        raise SystemExit(f"the plan: {error}") from None
    outputs = sum(layout[3] for layout in plan.output_layout("distinct"))
    print(
        f"memory of a rank, {given.ranks} ranks, {config}:\n  window {plan.window_bytes:,} bytes, workspace "
        f'{plan.workspace_bytes:,} bytes, outputs of a dispatch (capacity "distinct") {outputs:,} bytes'
    )
    _try("simulated group", lambda: Group.simulated(2))
    print("local group, of a process with several GPUs:")
    count = _devices()
    for one in range(count):
        for other in range(one + 1, count):
            _try(f"  GPUs {one} and {other}, peer access", lambda pair=(one, other): Group.local(pair))  # type: ignore[misc]
    alone = Bootstrap.all_gather(lambda data: [data], 0, 1)
    _try("node group, of a process for each GPU (CUDA IPC, with itself)", lambda: Group.node(alone, 0))
    print(f"MPS: {_mps()}")
    if has_nvshmem:
        alone = Bootstrap.all_gather(lambda data: [data], 0, 1)
        _try("nvshmem group", lambda: Group.nvshmem(alone, 0))
    else:
        print("nvshmem group: not in this build")
    print(f"deep_ep: {_deep_ep()}")
    if given.links and (wrong := _links(count)):
        raise SystemExit(wrong)


if __name__ == "__main__":
    main()
