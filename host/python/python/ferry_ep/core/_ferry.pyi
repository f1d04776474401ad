"""The native module. What ``ferry_ep`` does not hand on is for the Python sources beside it."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, final

from .config import Config, TensorLayout

__all__ = ["Bootstrap", "Call", "Communicator", "Fault", "Group", "LinkReport", "Places", "Plan"]
__all__ += ["Reader", "Tensor"]
__all__ += ["PreparedCombine", "PreparedDispatch", "__version__", "has_cuda", "has_nvshmem"]
__all__ += [
    "arguments_of",
    "capacity_of",
    "decode_rows",
    "describe",
    "dlpack",
    "element_named",
    "format_sizes",
    "layout_of",
]
__all__ += ["require_numpy_memory", "require_plain", "require_storage"]

__version__: str
has_cuda: bool
"""Whether this build has local and node groups."""
has_nvshmem: bool
"""Whether this build has NVSHMEM groups."""

_Ranks = Sequence[Communicator]
_Numbers = Sequence[int]
_Pair = tuple[int, int]
_Strided = tuple[int, str, list[int], list[int]]

@final
class Tensor:
    """A tensor by its address on the rank's device, for memory of any library.

    ``shape`` and ``strides`` count elements, ``strides=None`` has no gaps. ``data_type`` is ``"bf16"``,
    ``"f16"``, ``"f32"``, ``"e4m3"``, ``"e8m0"``, ``"e2m1"``, ``"i32"``, ``"i64"``, ``"u32"``, ``"u16"`` or
    ``"u8"``. ``owner`` is kept alive with the tensor. Nothing checks that the memory is there: it must be the
    device's, and live until the work that uses it has ended.
    """

    def __new__(
        cls,
        address: int,
        data_type: str,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        *,
        owner: object = None,
    ) -> Tensor: ...
    @property
    def address(self) -> int: ...
    @property
    def data_type(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]: ...
    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
    @property
    def owner(self) -> Any: ...

@final
class Fault:
    """Report of a kernel: about an input, or the reason why a rank gave up. ``str`` says all of it."""

    def __new__(cls, words: Sequence[int], gpu_ranks: int | None, /) -> Fault: ...
    @property
    def kind(self) -> str:
        """``"PeerTimeout"``, ``"LocalTimeout"``, ``"InvalidExpert"``, ``"DuplicateExpert"``,
        ``"TooManyOnDevice"``, ``"LostScales"``, ``"OutputTooSmall"``, ``"RowOutOfBounds"``,
        ``"TooManyTokens"``, ``"OutOfTurn"`` or ``"NetworkStalled"``."""
    @property
    def is_input(self) -> bool:
        """Whether the input is at fault, and the round went on."""
    @property
    def kernel(self) -> str:
        """Kernel that reported it."""
    @property
    def phase(self) -> str:
        """``"dispatch"`` or ``"combine"``."""
    @property
    def rank(self) -> int:
        """Rank that reported it."""
    @property
    def peer(self) -> int:
        """Other party to the fault: the rank that was waited for."""
    @property
    def culprit(self) -> int:
        """Rank at which the chain of waits begins."""
    @property
    def region(self) -> str:
        """Data that was awaited or read."""
    @property
    def index(self) -> int:
        """Index of the token, word or row."""
    @property
    def slot(self) -> int | None:
        """Top-k slot of token ``index``, if an expert id is at fault."""
    @property
    def wanted(self) -> int:
        """Expected value."""
    @property
    def saw(self) -> int:
        """Value found instead; an expert id with its sign."""
    @property
    def round(self) -> int:
        """Round, from 1 on for each communicator."""
    def __eq__(self, other: object, /) -> bool: ...

@final
class Bootstrap:
    """The way from this process to the group's other ones, until a group takes it."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
    @property
    def ranks(self) -> int:
        """Number of processes."""
    @staticmethod
    def tcp(
        address: str, rank: int, ranks: int, *, timeout: float = 30.0, key: bytes | None = None
    ) -> Bootstrap:
        """Meets the other processes at ``"host:port"``, where rank 0 listens. Collective.

        ``timeout`` in seconds bounds this call and each round of later ones. ``key`` is a secret that all or
        none have: 32 random bytes. Raises :class:`ferry_ep.BootstrapError`, with ``lost_rank`` if known.
        """
    @staticmethod
    def all_gather(function: Callable[[bytes], Sequence[bytes]], rank: int, ranks: int) -> Bootstrap:
        """Wraps an all-gather of your own: ``function`` takes this rank's bytes, and returns those of every
        rank, by rank.

        It returns only after all ranks have called theirs as often, bounds its wait, and is called in the
        thread that calls Ferry. Ranks share memory by what it returns, so it must not mix calls or ranks. An
        exception becomes :class:`ferry_ep.BootstrapError`; one with an attribute ``lost_rank`` names the lost
        rank.
        """
    def gather(self, bytes: bytes) -> list[bytes]:
        """Returns every rank's bytes, by rank. Collective."""

@final
class Group:
    """The ranks that exchange tokens. ``with`` closes it.

    A handle is of use only in the process that made it: a fork gets :class:`ferry_ep.ForkError`.
    """

    @staticmethod
    def simulated(
        ranks: int,
        seed: int = 0,
        *,
        warps: int = 4,
        stall_one_in: int = 64,
        lost: tuple[int, int] | None = None,
        patience: float | None = None,
    ) -> Group:
        """Makes ``ranks`` ranks without GPUs in this process, which run the same protocol on the CPU.

        ``seed`` decides every choice of the scheduler. ``warps``: of a kernel on each rank; one begins to
        stall in one of ``stall_one_in`` turns (0: never). ``lost=(rank, steps)``: dies after so many turns.
        ``patience``: seconds to wait for a missing rank, instead of the deadline. Not collective. Raises
        :class:`ferry_ep.GroupError` for other than 1 to 64 ranks, :class:`ferry_ep.ArgumentError`.
        """
    @staticmethod
    def simulated_at(
        path: str,
        rank: int,
        ranks: int,
        seed: int = 0,
        *,
        patience: float | None = None,
        timeout: float = 30.0,
        key: bytes | str | None = None,
    ) -> Group:
        """Makes simulated ranks that are processes, for tests and first steps with ``torchrun``.

        Rank 0's process runs the simulation, and the others talk to it over a Unix socket at ``path``, which
        other users cannot open; ``seed`` and ``patience`` are those of rank 0. Collective: returns after all
        have joined; ``timeout`` bounds this and later waits for a rank that does not come, in seconds.

        ``key``, bytes or text, names the job: a process with another one is sent away, and all others go on.
        Without keys, give each job a path of its own, as processes cannot tell whose rank 0 they found.
        Rank 0 replaces no file but a socket at which nobody listens, fails if another rank 0 listens
        there, and so do both jobs then, and removes the socket before this returns.

        A process that ends is a lost rank. If rank 0's ends, calls of the others raise
        :class:`ferry_ep.SimulatorError` at once.
        """
    @staticmethod
    def local(devices: Sequence[int], *, share_gpus: bool = False, check_links: bool = False) -> Group:
        """Makes a group of one rank per GPU, all driven by this process; rank ``r`` is CUDA device
        ``devices[r]``. ``share_gpus`` lets a device be listed twice, to develop and test. ``check_links``
        makes :meth:`check_links`, and refuses a group with a bad link. Not collective. Synchronizes.

        Raises :class:`ferry_ep.DeviceError` without a driver, :class:`ferry_ep.GroupError` for unfit devices.
        """
    @staticmethod
    def node(
        bootstrap: Bootstrap, device: int, *, share_gpus: bool = False, check_links: bool = False
    ) -> Group:
        """Makes a group of one process per GPU of one node, which needs nothing but the driver. ``device`` is
        this process's CUDA device. ``check_links`` as in :meth:`local`. Collective. Synchronizes.

        Raises as :meth:`local`, and :class:`ferry_ep.BootstrapError`, :class:`ferry_ep.PeerFailed`.
        """
    @staticmethod
    def nvshmem(
        bootstrap: Bootstrap,
        device: int,
        *,
        share_gpus: bool = False,
        check_links: bool = False,
        library: str | None = None,
    ) -> Group:
        """Makes a group of one process per GPU of several nodes, in a build with the feature ``nvshmem``;
        ``library`` is the path of NVSHMEM's. Collective. Synchronizes. Raises as :meth:`node`, and
        :class:`ferry_ep.NotBuiltError`.
        """
    @property
    def kind(self) -> str:
        """``"simulated"``, ``"local"``, ``"node"`` or ``"nvshmem"``."""
    @property
    def ranks(self) -> int:
        """Number of ranks of the whole group."""
    @property
    def local_ranks(self) -> list[int]:
        """Ranks that this process drives, ascending."""
    def device(self, rank: int) -> str:
        """Returns the device of a local rank: ``"cuda:0"``, or ``"simulated"``."""
    def check_links(self) -> LinkReport:
        """Stores over every link between ranks, and says which are bad. Collective. Synchronizes."""
    def close(self) -> None:
        """Leaves the group. Collective. Synchronizes. Raises :class:`ferry_ep.InUseError` while it has open
        communicators: nothing was done then.
        """
    def __enter__(self) -> Group: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class LinkReport:
    """Result of :meth:`Group.check_links`. ``str()`` has tables, the bad links, and what to look at."""

    @property
    def is_well(self) -> bool:
        """Whether all links are well, or not tested."""
    @property
    def links(self) -> list[tuple[int, int, str, int, str, float | None]]:
        """Each link in each test: ``(from, to, test, bytes, state, seconds or None)``."""

@final
class Plan:
    """Proof that a :class:`ferry_ep.Config` fits a group, and the sizes that follow from it.

    Raises :class:`ferry_ep.PlanError` with every problem at once. Not collective.
    """

    def __new__(cls, group: Group, config: Config) -> Plan: ...
    @property
    def config(self) -> Config:
        """The configuration that was checked."""
    @property
    def ranks(self) -> int:
        """Ranks of the group."""
    @property
    def max_sms(self) -> int | None:
        """Most multiprocessors that a kernel of this process occupies; ``None`` for all."""
    @property
    def local_experts(self) -> int:
        """Experts on each rank."""
    def first_expert(self, rank: int) -> int:
        """Returns the first expert on ``rank``; the others follow it."""
    @property
    def groups(self) -> int:
        """Groups of rows in a dispatch's outputs: local experts, and a shared expert before these."""
    @property
    def max_rows(self) -> int:
        """Most rows that a dispatch can bring to a rank."""
    @property
    def max_rows_distinct(self) -> int:
        """Most rows if the experts of each token differ."""
    @property
    def row_alignment(self) -> int:
        """Number of which the rows of outputs, and the first row of each group, are a multiple."""
    @property
    def view_row_stride(self) -> int:
        """Bytes from one row of a :class:`ferry_ep.View` to the next, a multiple of 128."""
    @property
    def window_bytes(self) -> int:
        """Bytes of each rank's receive window, in device memory of the library."""
    @property
    def workspace_bytes(self) -> int:
        """Bytes of each rank's workspace, in device memory of the library."""
    def shared_tokens(self, rank: int, tokens: int) -> tuple[int, int]:
        """Returns the range ``(start, end)``, ``end`` excluded, of those of ``tokens`` tokens that the
        shared expert gets on ``rank``; it is empty without a shared expert.
        """
    def output_layout(self, capacity: int | str | None = None, *, id_type: str = "i32") -> list[TensorLayout]:
        """Returns the outputs of a dispatch, in order, to allocate them yourself; not those that the plan's
        format and ``receive`` layout do not have. ``capacity`` (``None`` is ``"max"``) and ``id_type`` are
        those of :meth:`ferry_ep.Communicator.outputs`, and so are the errors. Not collective.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Call:
    def __new__(
        cls,
        communicator: Communicator,
        name: str,
        inputs: Sequence[Tensor | None] = ...,
        outputs: Sequence[Tensor | None] = ...,
    ) -> Call: ...

@final
class PreparedDispatch:
    """A dispatch with arguments that were checked once: a function of handles and addresses."""

    def __new__(cls, communicator: Communicator, call: Call) -> PreparedDispatch: ...
    def __call__(self, stream: int = 0, x: int = 0, topk_ids: int = 0, topk_weights: int = 0, /) -> None:
        """Enqueues it. An address of 0 is the prepared one. Errors are those of a dispatch."""

@final
class PreparedCombine:
    """A combine with arguments that were checked once: a function of handles and addresses."""

    def __new__(cls, communicator: Communicator, call: Call) -> PreparedCombine: ...
    def __call__(
        self,
        stream: int = 0,
        expert_rows: int = 0,
        combined: int = 0,
        received_weights: int = 0,
        weights: int = 0,
        /,
    ) -> None:
        """Enqueues it. An address of 0 is the prepared one. Errors are those of a combine."""

@final
class Reader:
    """Reads tensors of a class, and the current stream of its library, without a Python call."""

    @staticmethod
    def of(class_: type) -> Reader | None: ...
    def takes(
        self, values: tuple[Any, ...], records: bool, present: tuple[bool, ...] | None = None, /
    ) -> bool: ...
    def signature(self, values: tuple[Any, ...], records: bool, /) -> bytes | None: ...

@final
class Places:
    """Places of a dispatch's outputs in a list of tensors, of which callers see all but the last."""

    def __new__(
        cls, plan: Plan, seen: Sequence[str], packed: Sequence[str], rows: int, tokens: int, is_wide: bool, /
    ) -> Places: ...
    @property
    def words(self) -> int: ...
    @property
    def kept_ids(self) -> int: ...

@final
class Communicator:  # ferry_ep.Communicator, which programs use, has the documentation.
    @property
    def rank(self) -> int: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def max_sms(self) -> int | None: ...
    def limit_sms(self, max_sms: int | None) -> None: ...
    @property
    def deadline(self) -> float: ...
    def set_deadline(self, deadline: float | None) -> None: ...
    @property
    def device(self) -> str: ...
    @property
    def round(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @staticmethod
    def create(group: Group, plan: Plan) -> list[Communicator]: ...
    @staticmethod
    def together(ranks: _Ranks, streams: Sequence[int], calls: Sequence[Call]) -> None: ...
    @staticmethod
    def close_all(ranks: _Ranks) -> None: ...
    def received(self, wait: bool) -> tuple[int, int, list[int], list[int]] | None: ...
    def silu(
        self,
        stream: int,
        input: Tensor,
        row_offsets: Tensor,
        output: Tensor,
        *,
        format: str,
        scales: Tensor | None = None,
        scale_offsets: Tensor | None = None,
        input_scales: Tensor | None = None,
        interleaved: bool = False,
        clamp: tuple[float, float] | None = None,
        max_sms: int | None = None,
    ) -> None: ...
    def view(self) -> tuple[_Strided, _Strided | None, _Strided | None]: ...
    def enqueue_tensors(
        self,
        reader: Reader,
        name: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        places: Places | None = None,
        /,
    ) -> bool: ...
    def counts(self) -> tuple[int, int]: ...
    def last(self) -> tuple[int, bool]: ...
    def synchronize(self, stream: int, is_part: bool = False) -> Fault | None: ...
    def check(self) -> Fault | None: ...
    def wait(self, stream: int) -> None: ...
    def capture(self, stream: int) -> int | None: ...
    def close(self) -> None: ...
    def drop(self) -> None: ...
    def assume_no_foreign_graphs(self) -> None: ...
    def alloc(self, bytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def upload(self, to: int, from_: int, bytes: int) -> None: ...
    def download(self, from_: int, to: int, bytes: int) -> None: ...

def arguments_of(name: str, format: str, is_encoded: bool) -> list[tuple[str, str, bool]]: ...
def capacity_of(plan: Plan, capacity: int | str) -> tuple[int, int]: ...
def layout_of(plan: Plan, rows: int, scale_blocks: int, wide_ids: bool) -> list[TensorLayout]: ...
def describe(name: str, value: Any, wanted: str, *, written: bool = False) -> tuple[Tensor, str]: ...
def require_storage(name: str, value: Any) -> None: ...
def require_plain(name: str, value: Any) -> None: ...
def require_numpy_memory(name: str, value: Any) -> None: ...
def dlpack(
    address: int, device: _Pair, element: _Pair, shape: _Numbers, strides: _Numbers | None, owner: object
) -> object: ...
def decode_rows(
    plan: Plan,
    rows: int,
    tokens: bytes,
    scales: tuple[bytes, Sequence[int]],
    offsets: tuple[Sequence[int], Sequence[int]],
    input_scale: float | None = None,
) -> bytes: ...
def element_named(name: str) -> str | None: ...
def format_sizes(format: str) -> tuple[int, int, str | None]: ...
