"""Where the rows of a dispatch came from, which handles keep."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Sources"]


class Sources(NamedTuple):
    """Outputs of a dispatch that its handle keeps, and not the rows: engines keep handles until their
    backward pass.
    """

    first: Tensor
    """``src_info``, or int64 of one dimension: ``src_info``, the numbers behind it, and more."""
    second: Tensor | None
    """Numbers of the rows of each source, if they are apart."""

    def src_info(self, rows: int) -> Tensor:
        """Returns ``src_info``, int32 ``[rows, 2]``."""
        return self.first if self.second is not None else self.first[:rows].view(torch.int32).view(rows, 2)

    def numbers(self, rows: int, words: int) -> Tensor:
        """Returns the numbers, as they are, or as so many int64 of one dimension."""
        return self.first[rows : rows + words] if self.second is None else self.second
