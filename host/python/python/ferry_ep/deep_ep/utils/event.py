"""Events, where DeepEP 2 has them."""

from ..events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
