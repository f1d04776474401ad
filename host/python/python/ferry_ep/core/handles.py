"""Handles of things that belong to their process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Handle"]


class Handle:
    """A handle, which cannot be pickled. A copy of it, or of a layer that has it, has the handle itself."""

    _unpicklable: ClassVar[str]
    """Why it cannot."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(self._unpicklable)
