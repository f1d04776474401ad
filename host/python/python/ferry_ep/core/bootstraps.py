"""A bootstrap over ``torch.distributed``."""

from __future__ import annotations

from typing import Any

from ._ferry import Bootstrap
from .errors import ArgumentError

__all__ = ["torch_bootstrap"]


def torch_bootstrap(process_group: Any = None) -> Bootstrap:
    """Returns a bootstrap over an initialized process group of ``torch.distributed``; ``None``: the default.

    Its ranks are those of the process group. Only ``all_gather_object`` is used, so that a Gloo group does.
    Collective when the Ferry group is made, and when groups and communicators begin and end. Raises
    :class:`ferry_ep.ArgumentError` if ``torch.distributed`` was not initialized.
    """
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise ArgumentError("torch.distributed was not initialized: call init_process_group first")

    ranks = distributed.get_world_size(process_group)

    def gather(data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * ranks
        distributed.all_gather_object(gathered, data, group=process_group)
        return gathered

    return Bootstrap.all_gather(gather, distributed.get_rank(process_group), ranks)
