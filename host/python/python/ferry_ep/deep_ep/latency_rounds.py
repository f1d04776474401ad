"""Rounds of low-latency mode: padded blocks, in one call or in two, of which the second is a hook."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..communicator import Communicator
from ..errors import FaultError, OrderError, PeerGaveUp, PoisonedError
from ..outputs import TENSORS, DispatchOutput
from ..torch import _retain
from .events import Halves, current_handle
from .rounds import MOST_OPEN, Rounds

__all__ = ["LatencyHandle", "LatencyLane"]

#: Outputs of padded blocks that follow from the plan, or from others.
_UNSEEN = ("row_offsets", "expert_ids", "row_ends")


class LatencyHandle(tuple[Any, ...]):
    """What a low-latency dispatch returns for its combine: a tuple of five.

    0: int32 ``[local_experts, ranks * num_max_dispatch_tokens_per_rank]``, the token of each row on its
    source. 1: int64 ``[local_experts, ranks]``, the rows of each source: begin in the upper 32 bits, number
    in the lower ones. 2: ``num_max_dispatch_tokens_per_rank``. 3: hidden size. 4: number of experts.
    """

    lane: LatencyLane
    """Rounds of its plan."""
    topk: tuple[int, int]
    """Tokens and top-k slots of the dispatch."""
    scratch: Tensor | None
    """Memory of a combine with ``zero_copy``, once it was asked for."""

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of the rows: local experts, rows of each, hidden size."""
        experts, rows = self[0].shape
        return experts, rows, self[3]

    def __repr__(self) -> str:
        return f"<ferry_ep.deep_ep low-latency handle of {self.topk[0]} tokens>"


class _Round:
    """A communicator, and the handle of its open round."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.handle: LatencyHandle | None = None
        #: Hook that was not called yet, of a dispatch or of a combine.
        self.hook: Callable[[], None] | None = None
        #: Stream of the last call.
        self.halves = Halves(None)
        #: Outputs of every dispatch that no caller sees, and those that are allocated for each.
        self._unseen: dict[str, Tensor] = {}
        self._seen: list[tuple[str, torch.Size, torch.dtype]] = []
        self._rows = 0
        #: Handle of the stream that was current when these were made.
        self._made_on = -1

    def outputs(self, like: Tensor, *, is_captured: bool) -> DispatchOutput:
        """Returns outputs on the device of ``like``, not cleared."""
        made_on = current_handle(like.device)
        if self._made_on != made_on or is_captured:
            out = self.communicator.outputs(like, id_type="i64")
            if not is_captured:
                # Those of a graph belong to it, and those of another stream are freed by its order.
                self._keep(out, made_on)
            return out
        device = like.device
        seen = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in self._seen}
        return DispatchOutput(**seen, **self._unseen, rows=self._rows)

    def _keep(self, out: DispatchOutput, made_on: int) -> None:
        """Keeps the outputs of the next dispatches that no caller sees."""
        given = {name: tensor for name in TENSORS if (tensor := getattr(out, name)) is not None}
        self._unseen = {name: tensor for name, tensor in given.items() if name in _UNSEEN}
        self._seen = [(name, of.shape, of.dtype) for name, of in given.items() if name not in _UNSEEN]
        self._rows, self._made_on = out.rows, made_on

    def hook_of(
        self,
        wait: Callable[[], Any],
        used: tuple[Tensor | None, ...],
        finish: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        """Returns the hook that calls ``wait``, then ``finish``, on the current stream: once, later calls do
        nothing. One that failed goes on where it ended. It holds the tensors that its work reads or writes.
        """
        pending = finish

        def hook() -> None:
            nonlocal pending
            if self.hook is hook:
                self.halves.follow(*used)
                wait()
                self.hook = None
                self.retain()
            if pending is not None:
                pending()
                pending = None

        self.hook = hook
        return hook

    def retain(self) -> None:
        """Lets a graph that is captured keep the communicator alive."""
        if self.halves.is_captured:
            _retain(self.communicator)


class LatencyLane(Rounds[_Round]):
    """Rounds of low-latency mode. Hooks are collective calls, too. A round is open from when it was sent."""

    def dispatch(
        self,
        x: Any,
        ids: Tensor,
        *,
        is_split: bool,
        handle_of: Callable[[DispatchOutput], LatencyHandle],
        finish: Callable[[DispatchOutput], None],
        written: tuple[Tensor | None, ...] = (),
    ) -> tuple[DispatchOutput, LatencyHandle, Callable[[], None] | None]:
        """Opens a round of ``x``: rows, or a tuple of FP8 rows and scales. ``finish`` enqueues what follows
        the receipt, and writes ``written``. ``is_split``: sends alone, and returns the hook that does
        the rest.
        """
        opened = self._acquire()
        communicator = opened.communicator
        halves = Halves(ids)
        out = opened.outputs(ids, is_captured=halves.is_captured)
        opened.handle, opened.halves = handle_of(out), halves
        handle, hook = opened.handle, None
        try:
            if is_split:
                communicator.dispatch_async(x, ids)
                returned = (*(getattr(out, name) for name in TENSORS), *written)
                hook = opened.hook_of(
                    lambda: communicator.dispatch_wait(out=out), returned, lambda: finish(out)
                )
            else:
                communicator.dispatch(x, ids, out=out)
                finish(out)
        except BaseException:
            opened.handle = None
            raise
        finally:
            if communicator.round in ("dispatch sent", "dispatched"):
                self._open.append(opened)
        opened.retain()
        return out, handle, hook

    def combine(
        self, rows: Tensor, ids: Tensor, weights: Tensor, handle: LatencyHandle, *, out: Any, is_split: bool
    ) -> tuple[Tensor, Callable[[], None] | None]:
        """Ends the round of ``handle``; repeats its dispatch first if it is not open any more."""
        opened = self._find(handle)
        if opened is None:
            self._repeat(ids, handle)
            opened = self._find(handle)
            assert opened is not None
        if opened.hook is not None:
            raise OrderError("the hook of the dispatch of handle was not called: call it before the combine")
        communicator, hook = opened.communicator, None
        opened.halves = Halves(rows)
        self._open.remove(opened)
        try:
            if is_split:
                sums = communicator.combine_async(rows, topk_weights=weights, out=out)
                hook = opened.hook_of(communicator.combine_wait, (sums, rows, weights))
            else:
                sums = communicator.combine(rows, topk_weights=weights, out=out)
        except BaseException:
            if communicator.round == "dispatched":
                self._open.append(opened)
            raise
        opened.handle = None
        opened.retain()
        return sums, hook

    def end(self) -> None:
        """Calls hooks that were not called, and gives up all open rounds. Collective."""
        for each in self._all:
            if each.communicator.closed:
                continue
            stream = each.halves.stream
            # A communicator that gave up waits for nobody, and is closed as it is.
            with suppress(FaultError, PeerGaveUp, PoisonedError), each.halves.entered():
                if each.hook is not None:
                    each.hook()
                if each.communicator.round == "dispatched":
                    each.communicator.give_up(stream=stream)
                each.communicator.synchronize(stream=stream)
            each.handle = None
        self._open.clear()

    def _find(self, handle: LatencyHandle) -> _Round | None:
        """Returns the newest open round of a handle."""
        return next((each for each in reversed(self._open) if each.handle is handle), None)

    def _acquire(self) -> _Round:
        """Returns a round that is not open: an idle one, a new one, or the oldest open one, given up."""
        for each in self._all:
            # A call that failed on its way left a half: the communicator says why.
            if each not in self._open and each.hook is None:
                return each
        if len(self._all) < MOST_OPEN:
            self._all.append(_Round(self._connect()))
            return self._all[-1]
        oldest = self._open[0] if self._open else self._all[0]
        if oldest.hook is not None:
            raise OrderError(
                f"{MOST_OPEN} low-latency rounds are under way, and the hook of the oldest was not called: "
                "call it before this dispatch"
            )
        # A call that failed after it was sent returned no handle: nobody will combine its round.
        if oldest.handle is not None:
            self._require_room()
        oldest.communicator.give_up()
        self._open.remove(oldest)
        oldest.handle = None
        return oldest

    def _repeat(self, ids: Tensor, handle: LatencyHandle) -> None:
        """Opens a round of ``handle``, whose ids are ``ids``, with rows of zeros."""
        self._say_repeat("low-latency combine")
        x = torch.zeros(len(ids), handle[3], dtype=torch.bfloat16, device=ids.device)
        self.dispatch(x, ids, is_split=False, handle_of=lambda out: handle, finish=lambda out: None)
