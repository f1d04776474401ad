"""``Buffer`` of version 1, where DeepEP 2 has it."""

from ..buffer import Buffer
from ..events import EventHandle, EventOverlap
from ..tuning import Config

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
