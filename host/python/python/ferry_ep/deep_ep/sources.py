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
    """``src_info``, or int64 of one dimension: ``src_info`` and the numbers of rows behind it."""
    second: Tensor | None
    """Numbers of the rows of each source, if they are apart."""

    def src_info(self, rows: int) -> Tensor:
        """Returns ``src_info``, int32 ``[rows, 2]``."""
        return self.first if self.second is not None else self.first[:rows].view(torch.int32).view(rows, 2)

    def rest(self, rows: int) -> Tensor:
        """Returns the numbers."""
        return self.first[rows:] if self.second is None else self.second
