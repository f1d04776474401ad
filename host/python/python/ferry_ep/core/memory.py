"""Device memory of a rank, until its communicator is closed or lent, and arrays in it; rows of its window."""

from __future__ import annotations

import math
import weakref
from typing import Any

from ._ferry import Communicator, Group, Tensor, describe, dlpack
from .errors import ArgumentError, ClosedError, ForkError, OrderError, refuse
from .handles import Handle
from .scalars import shape_of
from .tensors import NUMPY, element

__all__ = ["HOST", "PLAIN", "Block", "Blocks", "DeviceArray", "Memory", "View", "ViewArray"]
__all__ += ["lend", "note_use", "require_own"]

#: Kinds of groups whose ranks have no GPU.
SIMULATED = ("simulated",)

_BITS = {"f32": 32, "i32": 32, "i64": 64, "u32": 32, "bf16": 16, "f16": 16, "e4m3": 8, "e8m0": 8}
_BITS |= {"e2m1": 4, "u8": 8}
#: Type strings of NumPy's array interface.
_TYPESTRS = {"uint16": "<u2", "uint8": "|u1", "float16": "<f2", "float32": "<f4", "int32": "<i4"}
_TYPESTRS |= {"int64": "<i8", "uint32": "<u4"}
#: Code and bits of dlpack.h. FP8 and 4-bit elements are plain bytes, as not every library has them.
_ELEMENTS = {"bf16": (4, 16), "f16": (2, 16), "f32": (2, 32), "i32": (0, 32), "i64": (0, 64), "u32": (1, 32)}
#: Plain bits for elements that libraries have no name for.
PLAIN = {"bf16": "u16", "e4m3": "u8", "e8m0": "u8", "e2m1": "u8"}
#: Most elements of an array.
_MOST = 2**48
#: kDLCUDA of dlpack.h.
_ON_CUDA = 2

#: Stands for a stream: memory that the host writes at once, so that no work may still use it.
HOST = -1
#: Sizes of lent memory are multiples of this many bytes, and of a quarter of the next lower power of two, so
#: that arrays of many sizes take at most a quarter more.
_LEAST_LENT = 256


class Block:
    """Lent memory, which goes back once nobody has the block any more."""

    __slots__ = ("_home", "address")

    def __init__(self, address: int, home: list[int]) -> None:
        self.address = address
        self._home = home

    def keep(self) -> None:
        """Lets the memory stay until the end instead: who uses it, and how long, is not known."""
        self._home = []

    def __del__(self) -> None:
        self._home.append(self.address)


class Blocks:
    """All device memory of a rank."""

    def __init__(self, owner: Any, native: Communicator, group: Group) -> None:
        """Takes the public communicator, which it does not keep."""
        self.owner, self.native, self.group = weakref.ref(owner), native, group
        #: Whether the rank has no GPU, so that CPU arrays are copied in and out.
        self.copies = group.kind in SIMULATED
        #: Whether it was freed.
        self.ended = False
        self._addresses: list[int] = []
        #: Addresses of memory that came back, by stream and size.
        self._free: dict[tuple[int, int], list[int]] = {}

    def allocate(self, nbytes: int) -> int:
        """Allocates memory that lives until the end. Synchronizes."""
        address = self.native.alloc(max(nbytes, 1))
        self._addresses.append(address)
        return address

    def lend(self, nbytes: int, stream: int) -> Block:
        """Lends memory for work of one stream, in whose order it is used again; or of the :data:`HOST`, which
        lets go of it once all work on it has ended.
        """
        step = max(_LEAST_LENT, 1 << max(nbytes.bit_length() - 3, 0))
        size = max(-(-nbytes // step), 1) * step
        free = self._free.setdefault((stream, size), [])
        # One operation, as other threads lend, too.
        try:
            address = free.pop()
        except IndexError:
            address = self.allocate(size)
        return Block(address, free)

    def end(self) -> None:
        """Frees all of it, which nothing uses any more."""
        self.ended = True
        addresses, self._addresses = self._addresses, []
        self._free = {}
        for address in addresses:
            self.native.free(address)


class Memory(Handle):
    """An array in memory of a rank's device, which the library owns."""

    _unpicklable = "memory of this process cannot be pickled: pickle what numpy() returns"
    #: Whether calls may write it.
    _is_writable = True

    def __init__(
        self,
        blocks: Blocks,
        address: int,
        data_type: str,
        shape: tuple[int, ...],
        strides: Any = None,
    ) -> None:
        self.data_type = data_type
        self.shape = shape
        self._communicator, self._blocks = blocks.owner(), blocks
        self._address = address
        #: In elements; None without gaps.
        self._strides: tuple[int, ...] | None = strides

    @property
    def address(self) -> int:
        """Address on the device. Raises as every use after the end does."""
        return self._live()

    @property
    def communicator(self) -> Any:
        """Communicator whose memory this is."""
        return self._communicator

    def _require(self) -> None:
        raise NotImplementedError

    def _live(self) -> int:
        """Returns the address for a use that keeps the array."""
        self._require()
        return self._address

    def _is_live(self) -> bool:
        try:
            self._require()
        except (ClosedError, OrderError, ForkError):
            return False
        return True

    def numpy(self) -> Any:
        """Returns a copy as a NumPy array; two 4-bit elements are a byte. Synchronizes with the device alone:
        call :meth:`ferry_ep.Communicator.synchronize` first."""
        import numpy

        tensor = self._tensor()
        data_type, shape = numpy.dtype(NUMPY.get(self.data_type, "uint8")), self._bytes_shape()
        copy = numpy.empty(tensor.nbytes, dtype="uint8")
        self._blocks.native.download(tensor.address, copy.ctypes.data, copy.nbytes)
        return numpy.ndarray(shape, data_type, copy.data, strides=self._bytes_strides()).copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Raises :class:`ferry_ep.TensorError`: the work that writes it may not have ended."""
        given = f"a {type(self).__name__}, memory of a device"
        raise refuse("array", "a NumPy array: after synchronize(), .numpy() copies it", given)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns type and number of its device, a GPU. Raises :class:`BufferError` in a simulated group."""
        device = self._blocks.native.device
        if not device.startswith("cuda:"):
            raise BufferError(f"memory of a {device} rank: copy it with numpy()")
        return _ON_CUDA, int(device[5:])

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> object:
        """Returns a DLPack capsule, which keeps the memory's communicator alive. Reads no device memory, and
        orders no streams: that is up to the caller. Raises as every use, and :class:`BufferError` in a
        simulated group, and for a copy or another device.
        """
        device = self.__dlpack_device__()
        if options.get("copy") or options.get("dl_device") not in (None, device):
            raise BufferError(f"only without a copy, and on device {device}")
        element, strides = _ELEMENTS.get(self.data_type, (1, 8)), self._bytes_strides()
        if strides is not None:
            strides = tuple(8 * stride // element[1] for stride in strides)
        return dlpack(self._live(), device, element, self._bytes_shape(), strides, self)

    def __getattr__(self, name: str) -> Any:
        if name == "__cuda_array_interface__":
            device = self.__dict__["_blocks"].native.device
            if device.startswith("cuda"):
                return {
                    "version": 3,
                    # torch takes no memory that is marked as read-only, such as a view's.
                    "data": (self._live(), False),
                    "shape": self._bytes_shape(),
                    "typestr": _TYPESTRS[NUMPY.get(self.data_type, "uint8")],
                    "strides": self._bytes_strides(),
                }
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        state = f"at {self._address:#x}" if self._is_live() else "ended"
        return f"<ferry_ep.{type(self).__name__} {self.data_type} {list(self.shape)} {state}>"

    def _bytes_shape(self) -> tuple[int, ...]:
        if self.data_type == "e2m1":
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    def _bytes_strides(self) -> tuple[int, ...] | None:
        if self._strides is None:
            return None
        bits = _BITS[self.data_type]
        strides = tuple(stride * bits // 8 for stride in self._strides)
        return (*strides[:-1], 1) if bits < 8 else strides

    def _tensor(self) -> Tensor:
        return Tensor(self._live(), self.data_type, self.shape, self._strides, owner=self)

    def __ferry_tensor__(self) -> tuple[Tensor, bool]:
        """Returns it as a tensor, and whether calls may write it."""
        return self._tensor(), self._is_writable


class DeviceArray(Memory):
    """An array in memory of a rank's device, which lives until its communicator is closed.

    :meth:`ferry_ep.Communicator.empty` makes one. It goes in wherever a tensor goes. It keeps its
    communicator alive, and raises :class:`ferry_ep.ClosedError` once that was closed. On a GPU,
    ``torch.from_dlpack`` takes it (FP8 as plain bytes), and ``torch.as_tensor`` and others read its
    ``__cuda_array_interface__``, as plain bits for BF16 and FP8.

    Calls without ``out`` return arrays whose memory is used again once nobody has them any more, by later
    calls on the same stream. Calls of Ferry on another stream, and ``address``, end that: the memory then
    stays until close. Where another library works on such an array on another stream, keep it meanwhile.
    """

    def __init__(self, blocks: Blocks, data_type: str, shape: tuple[int, ...]) -> None:
        """Makes :meth:`ferry_ep.Communicator.empty`. Synchronizes."""
        name = "u8" if data_type == "u8" else element(data_type)
        sizes = shape_of(shape)
        if name == "e2m1" and (not sizes or sizes[-1] % 2):
            raise ArgumentError(f"shape is {sizes}, but two elements of e2m1 are a byte: the last is even")
        if math.prod(sizes) > _MOST:
            raise ArgumentError(f"shape is {sizes}, but an array has at most {_MOST} elements")
        self._begin(blocks, name, sizes, None)

    def _begin(self, blocks: Blocks, data_type: str, shape: tuple[int, ...], stream: int | None) -> None:
        self.nbytes = -(-math.prod(shape) * _BITS[data_type] // 8)
        self._stream = stream
        self._block: Block | None = None
        if stream is None:
            address = blocks.allocate(self.nbytes)
        else:
            self._block = blocks.lend(self.nbytes, stream)
            address = self._block.address
        super().__init__(blocks, address, data_type, shape)

    @property
    def address(self) -> int:
        """Address on the device. Raises as every use after the end does."""
        self._keep()
        return self._live()

    def _keep(self) -> None:
        """Lets the memory stay until close: it is used where nobody sees how long."""
        if self._block is not None:
            self._block.keep()

    def copy_from(self, array: Any) -> None:
        """Copies a CPU array of the same shape and type into it. Synchronizes."""
        self._require()
        given, place = describe("array", array, self.data_type)
        is_type = given.data_type in (self.data_type, PLAIN.get(self.data_type))
        is_dense = tuple(given.shape) == self.shape and given.nbytes == self.nbytes
        if place != "cpu" or not is_type or not is_dense:
            wanted = f"a CPU array of {self.data_type} without gaps, shape {list(self.shape)}"
            raise refuse("array", wanted, f"{given.data_type} {given.shape} on {place}")
        self._blocks.native.upload(self._address, given.address, self.nbytes)

    def _require(self) -> None:
        # Raises in a fork.
        _ = self._blocks.native.closed
        if self._blocks.ended:
            rank = self._blocks.native.rank
            raise ClosedError(f"the array's memory has ended: rank {rank}'s communicator was closed")


def lend(blocks: Blocks, data_type: str, shape: tuple[int, ...], stream: int) -> DeviceArray:
    """Allocates an array for work of one stream alone, whose memory others use after it."""
    array = DeviceArray.__new__(DeviceArray)
    array._begin(blocks, data_type, shape, stream)
    return array


def note_use(array: DeviceArray, stream: int) -> None:
    """Notes a call on ``stream``, on which an array may still be in use when nobody has it any more."""
    if array._block is None or array._blocks.copies:
        return
    if stream != array._stream or array._blocks.native.capture(stream) is not None:
        array._keep()


def require_own(name: str, owner: Any, blocks: Blocks) -> None:
    """Raises :class:`ferry_ep.TensorError` for an array of another rank's device."""
    if not isinstance(owner, Memory) or owner._blocks is blocks:
        return
    here, there = blocks.native, owner._blocks.native
    # Simulated ranks of a group, and ranks of other groups, have memory of their own.
    is_apart = blocks.copies and (there.rank, owner._blocks.group) != (here.rank, blocks.group)
    if there.device != here.device or is_apart:
        wanted, given = (f"memory of rank {of.rank} on {of.device}" for of in (here, there))
        raise refuse(name, wanted, given)


class ViewArray(Memory):
    """An array of a :class:`ferry_ep.View`: rows in the library's window, which lie apart. Read-only.

    It goes in as ``x`` of a dispatch. It keeps the communicator alive. Once the view has ended, every use
    raises :class:`ferry_ep.OrderError`, or :class:`ferry_ep.ClosedError` if the communicator was closed; an
    array that another library made of it is not told: it finds another round's rows, and freed memory after
    :meth:`ferry_ep.Communicator.close`. On a GPU, ``torch.from_dlpack`` takes it (FP8 as
    plain bytes: ``torch.from_dlpack(view.tokens).view(torch.float8_e4m3fn)``), and others read its
    ``__cuda_array_interface__``, as plain bits for BF16, too.
    """

    _is_writable = False

    def __init__(
        self, view: View, address: int, data_type: str, shape: list[int], strides: list[int]
    ) -> None:
        """Made by :meth:`ferry_ep.Communicator.view` alone."""
        super().__init__(view._blocks, address, data_type, tuple(shape), tuple(strides))
        self._view = view

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, in each dimension."""
        return self._strides or ()

    def _require(self) -> None:
        self._view._require()


class View(Handle):
    """Rows that a rank received in a dispatch, and that stay in its window.

    :meth:`ferry_ep.Communicator.view` makes one. Row ``source * max_tokens_per_rank + token`` is that of each
    source rank and token. It may be read by work that the streams order after the dispatch (or its wait) and
    before the combine (or ``combine_async``, or ``give_up``), whose call ends the view. Rows without a token,
    where ``DispatchOutput.ids`` are -1, hold old bits, NaNs among them: leave such rows out, as 0 times NaN
    is NaN. Addresses and strides are those of every round until the communicator is closed, so that a
    captured graph can have them.
    """

    tokens: ViewArray
    """``[ranks * max_tokens_per_rank, hidden]`` in the plan's format, 128-byte aligned."""
    scales: ViewArray | None
    """``[ranks * max_tokens_per_rank, hidden / group]``, scales of each row, f32 in ``fp8``; ``None`` for
    BF16, and with ``transposed_scales``, which are an output of the dispatch."""
    row_scales: ViewArray | None
    """BF16 ``[ranks * max_tokens_per_rank]``, ``nvfp4-row`` only."""

    _unpicklable = "a View is memory of this process: pickle what numpy() of its arrays returns"

    def __init__(self, blocks: Blocks) -> None:
        """Made by :meth:`ferry_ep.Communicator.view` alone."""
        native = blocks.native
        tokens, scales, row_scales = native.view()
        self._communicator, self._blocks = blocks.owner(), blocks
        #: Dispatches and combines until now: with the next one of either it ends.
        self._counts = native.counts()
        self.tokens = ViewArray(self, *tokens)
        self.scales = None if scales is None else ViewArray(self, *scales)
        self.row_scales = None if row_scales is None else ViewArray(self, *row_scales)

    @property
    def communicator(self) -> Any:
        """Communicator whose window this is."""
        return self._communicator

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next."""
        return self._blocks.native.plan.view_row_stride

    def __repr__(self) -> str:
        return f"<ferry_ep.View of rank {self._blocks.native.rank}: {self.tokens!r}>"

    def _require(self) -> None:
        native = self._blocks.native
        if native.closed:
            raise ClosedError(f"the view has ended: rank {native.rank}'s communicator was closed")
        if native.counts() != self._counts:
            raise OrderError(f"the view has ended: rank {native.rank} has ended its round")
