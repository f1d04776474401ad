"""Device memory of the library."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ._ferry import Tensor
from .errors import ClosedError
from .tensors import _NUMPY, describe, refuse

if TYPE_CHECKING:
    from .rank import Rank

__all__ = ["DeviceArray"]

_BITS = {"f32": 32, "i32": 32, "u32": 32, "bf16": 16, "f16": 16, "e4m3": 8, "e8m0": 8, "e2m1": 4, "u8": 8}


class DeviceArray:
    """An array in memory of a rank's device, which lives until its communicator is closed.

    :meth:`ferry_ep.Communicator.empty` makes one. It goes in wherever a tensor goes. It keeps its
    communicator alive, and raises :class:`ferry_ep.ClosedError` once that was closed. On a GPU,
    ``torch.as_tensor`` and others read its ``__cuda_array_interface__``, as plain bits for BF16 and FP8.
    """

    def __init__(self, communicator: Rank, data_type: str, shape: tuple[int, ...]) -> None:
        """Allocates ``shape`` elements. Synchronizes."""
        bits = _BITS.get(data_type)
        if bits is None:
            raise refuse("data_type", f"one of {', '.join(_BITS)}", data_type)
        self.data_type = data_type
        self.shape = shape
        self.nbytes = -(-math.prod(shape) * bits // 8)
        self._communicator = communicator
        self._address = communicator._native._alloc(max(self.nbytes, 1))
        self._ended = False

    @property
    def address(self) -> int:
        """Address on the device. Raises :class:`ferry_ep.ClosedError` after the end."""
        self._require()
        return self._address

    @property
    def communicator(self) -> Rank:
        """Communicator whose memory this is."""
        return self._communicator

    def numpy(self) -> Any:
        """Returns a copy as a NumPy array; two 4-bit elements are a byte. Synchronizes with the device alone:
        call :meth:`ferry_ep.Communicator.synchronize` first."""
        import numpy

        self._require()
        copy = numpy.empty(self._bytes_shape(), dtype=_NUMPY.get(self.data_type, "uint8"))
        self._communicator._native._download(self._address, copy.ctypes.data, copy.nbytes)
        return copy

    def copy_from(self, array: Any) -> None:
        """Copies a CPU array of the same shape and type into it. Synchronizes."""
        self._require()
        given = describe("array", array, self.data_type)
        tensor = given.tensor()
        if given.device != "cpu" or given.shape != self.shape or tensor.nbytes != self.nbytes:
            wanted = f"a CPU array of {self.data_type} without gaps, shape {list(self.shape)}"
            raise refuse("array", wanted, f"{given.data_type} {list(given.shape)} on {given.device}")
        self._communicator._native._upload(self._address, given.address, self.nbytes)

    def __getattr__(self, name: str) -> Any:
        if name == "__cuda_array_interface__":
            device = self.__dict__["_communicator"].device
            if device.startswith("cuda"):
                self._require()
                kinds = {"uint16": "<u2", "uint8": "|u1", "float16": "<f2", "float32": "<f4"}
                kinds |= {"int32": "<i4", "uint32": "<u4"}
                return {
                    "version": 3,
                    "data": (self._address, False),
                    "shape": self._bytes_shape(),
                    "typestr": kinds[_NUMPY.get(self.data_type, "uint8")],
                    "strides": None,
                }
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"at {self._address:#x}"
        return f"<ferry_ep.DeviceArray {self.data_type} {list(self.shape)} {state}>"

    def _bytes_shape(self) -> tuple[int, ...]:
        if self.data_type == "e2m1":
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    def _ferry_tensor(self) -> Tensor:
        return Tensor(self.address, self.data_type, self.shape, owner=self)

    def _require(self) -> None:
        if self._ended:
            rank = self._communicator.rank
            raise ClosedError(f"the array's memory has ended: rank {rank}'s communicator was closed")
