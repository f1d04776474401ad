"""Device memory of a rank: until its communicator is closed, or lent and used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import _ferry

__all__ = ["HOST", "Block", "Blocks"]

#: Stands for a stream: memory that the host writes at once, so that no work may still use it.
HOST = -1
#: Sizes of lent memory are multiples of this many bytes, and of a quarter of the next lower power of two, so
#: that arrays of many sizes take at most a quarter more.
_LEAST = 256


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

    def __init__(self, native: _ferry.Communicator) -> None:
        self._native = native
        #: Whether it was freed.
        self.ended = False
        self._addresses: list[int] = []
        #: Addresses of memory that came back, by stream and size.
        self._free: dict[tuple[int, int], list[int]] = {}

    def allocate(self, nbytes: int) -> int:
        """Allocates memory that lives until the end. Synchronizes."""
        address = self._native._alloc(max(nbytes, 1))
        self._addresses.append(address)
        return address

    def lend(self, nbytes: int, stream: int) -> Block:
        """Lends memory for work of one stream, in whose order it is used again; or of the :data:`HOST`, which
        lets go of it once all work on it has ended.
        """
        step = max(_LEAST, 1 << max(nbytes.bit_length() - 3, 0))
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
            self._native._free(address)
