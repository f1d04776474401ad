"""Buffers under the names that DeepEP 2 gives them."""

from ..buffer import Buffer

__all__ = ["Buffer"]
