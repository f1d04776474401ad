"""Parts of DeepEP's ``Buffer`` that are not here. Each raises, and says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Absent", "refuse_absent", "refuse_forks", "require_present"]

_BETWEEN_NODES = "ranks are of one node: use a group of one node's ranks"
_MASKS = (
    "a round does not go on without a rank: its peers raise ferry_ep.PeerTimeout, and make a new Buffer of "
    "the ranks that are left"
)


def refuse_absent(name: str, instead: str) -> NoReturn:
    """Raises ``NotImplementedError`` for something that is not here."""
    raise NotImplementedError(f"{name} is not in ferry_ep.deep_ep: {instead}")


#: Arguments of DeepEP's branches and of SGLang's fork, and what to do instead.
_FORKS = {
    "use_nvfp4": "send FP8 (use_fp8=True) or BF16 rows",
    "x_global_scale": "send FP8 (use_fp8=True) or BF16 rows",
    **dict.fromkeys(
        (
            *("overlap", "packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms"),
            *("src_signals", "src_signal_expect_value"),
        ),
        "combine after the experts' kernels (SGLang: without single-batch overlap)",
    ),
}


def refuse_forks(method: str, options: dict[str, Any]) -> None:
    """Raises ``NotImplementedError`` for arguments of forks that are used, ``TypeError`` for unknown ones."""
    for name, value in options.items():
        if name not in _FORKS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False:
            refuse_absent(f"{name} of {method}", _FORKS[name])


class Absent:
    """Methods that raise ``NotImplementedError``. None sends anything."""

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
    if num_rdma_bytes and not low_latency_mode:
        refuse_absent(f"num_rdma_bytes={num_rdma_bytes}", _BETWEEN_NODES)
    if enable_shrink:
        refuse_absent("enable_shrink=True", _MASKS)
    if comm is not None:
        refuse_absent("comm (mpi4py)", "give group, a process group of torch.distributed")
