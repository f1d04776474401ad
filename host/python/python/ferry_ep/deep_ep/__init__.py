"""The interface of DeepEP's ``Buffer`` (version 1, both modes) over Ferry. Importing this imports torch.

``from ferry_ep.deep_ep import Buffer, Config, EventOverlap`` stands for ``from deep_ep import ..``: names,
arguments and results are DeepEP's, the rounds are Ferry's. Written for DeepEP's ``Buffer`` as it was read in
version 2.1.0, where it is called legacy. Ranks are the GPUs of one node.
"""

from ..core._ferry import __version__ as _ferry_version
from .buffer import Buffer
from .events import EventHandle, EventOverlap
from .faults import InputFaultError
from .tuning import Config, topk_idx_t

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "InputFaultError", "topk_idx_t"]

#: A version of DeepEP whose ``Buffer`` is its only one, and Ferry's: from 2 on engines look for more.
__version__ = f"1.2.1+ferry.{_ferry_version}"
