"""Parts of DeepEP's ``Buffer`` that are not here. Each raises, and says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Absent"]

_NORMAL = "use normal mode (vLLM: deepep_high_throughput, SGLang: --deepep-mode normal)"
_BETWEEN_NODES = "ranks are of one node: use a group of one node's ranks"
_MASKS = (
    "a round does not go on without a rank: its peers raise ferry_ep.PeerTimeout, and make a new Buffer of "
    "the ranks that are left"
)


def refuse_absent(name: str, instead: str) -> NoReturn:
    """Raises ``NotImplementedError`` for something that is not here."""
    raise NotImplementedError(f"{name} is not in ferry_ep.deep_ep: {instead}")


class Absent:
    """Methods that raise ``NotImplementedError``. None sends anything."""

    @staticmethod
    def get_low_latency_rdma_size_hint(*args: Any, **options: Any) -> int:
        """Raises ``NotImplementedError``: low-latency mode is not here."""
        refuse_absent("get_low_latency_rdma_size_hint", _NORMAL)

    def clean_low_latency_buffer(self, *args: Any, **options: Any) -> None:
        """Raises ``NotImplementedError``: low-latency mode is not here."""
        refuse_absent("clean_low_latency_buffer", _NORMAL)

    def low_latency_dispatch(self, *args: Any, **options: Any) -> Any:
        """Raises ``NotImplementedError``: low-latency mode is not here."""
        refuse_absent("low_latency_dispatch", _NORMAL)

    def low_latency_combine(self, *args: Any, **options: Any) -> Any:
        """Raises ``NotImplementedError``: low-latency mode is not here."""
        refuse_absent("low_latency_combine", _NORMAL)

    def get_next_low_latency_combine_buffer(self, handle: Any) -> Any:
        """Raises ``NotImplementedError``: low-latency mode is not here."""
        refuse_absent("get_next_low_latency_combine_buffer", _NORMAL)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Raises ``NotImplementedError``: there are no masks of ranks."""
        refuse_absent("low_latency_update_mask_buffer", _MASKS)

    def low_latency_query_mask_buffer(self, mask_status: Any) -> None:
        """Raises ``NotImplementedError``: there are no masks of ranks."""
        refuse_absent("low_latency_query_mask_buffer", _MASKS)

    def low_latency_clean_mask_buffer(self) -> None:
        """Raises ``NotImplementedError``: there are no masks of ranks."""
        refuse_absent("low_latency_clean_mask_buffer", _MASKS)

    def get_local_buffer_tensor(self, *args: Any, **options: Any) -> Any:
        """Raises ``NotImplementedError``: windows are the library's."""
        refuse_absent("get_local_buffer_tensor", "rows arrive in tensors that dispatch returns")

    def internode_dispatch(self, *args: Any, **options: Any) -> Any:
        """Raises ``NotImplementedError``: ranks are of one node."""
        refuse_absent("internode_dispatch", _BETWEEN_NODES)

    def internode_combine(self, *args: Any, **options: Any) -> Any:
        """Raises ``NotImplementedError``: ranks are of one node."""
        refuse_absent("internode_combine", _BETWEEN_NODES)


def require_present(num_rdma_bytes: int, low_latency_mode: bool, enable_shrink: bool, comm: Any) -> None:
    """Raises ``NotImplementedError`` for arguments of the constructor that ask for what is not here."""
    if low_latency_mode:
        refuse_absent("low_latency_mode=True", _NORMAL)
    if num_rdma_bytes:
        refuse_absent(f"num_rdma_bytes={num_rdma_bytes}", _BETWEEN_NODES)
    if enable_shrink:
        refuse_absent("enable_shrink=True", _MASKS)
    if comm is not None:
        refuse_absent("comm (mpi4py)", "give group, a process group of torch.distributed")
