"""Tokens for which the windows of a plan have room, the same number on all ranks."""

from __future__ import annotations

from typing import NamedTuple

from ..core.errors import ArgumentError

__all__ = ["Room"]


class Room(NamedTuple):
    """Most tokens of a rank: the greatest of these, at least 1. All ranks agree on the greatest of each at
    the first call of its sizes, as they may bring, or be given, other ones.
    """

    brought: int
    """Tokens of the first call."""
    fitting: int
    """Tokens whose window fits into ``num_nvl_bytes``."""
    asked: int
    """``FERRY_DEEP_EP_MAX_TOKENS``, 0 if it is not set."""

    @property
    def tokens(self) -> int:
        """Tokens of a rank for which windows have room."""
        return max(1, *self)

    def require(self, tokens: int) -> None:
        """Raises :class:`ferry_ep.ArgumentError` if a rank brings more."""
        if tokens <= self.tokens:
            return
        asked = self.asked or "not set"
        raise ArgumentError(
            f"x has {tokens} tokens, but windows have room for {self.tokens} of each rank: the first call of "
            f"these sizes brought {self.brought}, num_nvl_bytes has room for {self.fitting}, and "
            f"FERRY_DEEP_EP_MAX_TOKENS is {asked}; set it on any rank, give Buffer more num_nvl_bytes, or "
            "make the largest call first"
        )
