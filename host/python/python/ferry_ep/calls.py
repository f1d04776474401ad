"""One call of one rank: its arguments, copies of CPU arrays, and its wait."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _ferry
from ._ferry import Tensor
from .errors import ArgumentError
from .outputs import TENSORS, DispatchOutput, SiluOutput
from .tensors import Described, allocate, describe, refuse, stream_of

if TYPE_CHECKING:
    from .rank import Rank

__all__ = ["Answers", "Call", "codes_and_scales"]


class Answers(NamedTuple):
    """Inputs of a combine: arrays of one rank, or a sequence with an array for each rank."""

    expert_rows: Any
    topk_weights: Any
    row_weights: Any
    row_scales: Any
    bias: Any
    bias2: Any
    residual: Any
    initial: Any
    received_weights: Any


def codes_and_scales(x: Any) -> tuple[Any, Any]:
    """Returns the tokens of a dispatch, and their scales if they are encoded: a pair."""
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2:
        raise refuse("x", "an array, or a pair of codes and scales", f"a tuple of {len(x)}")
    codes, scales = x
    return codes, scales


class Call:
    """A call of one rank.

    With CPU arrays (simulated groups alone) inputs are copied to the rank's memory before the call; outputs,
    too, so that what a kernel does not write stays as it is; and back after the wait.
    """

    def __init__(self, communicator: Rank, stream: Any) -> None:
        self.communicator = communicator
        self.stream = communicator._stream(stream)
        #: Whether an argument is a CPU array.
        self.copies = False
        #: CPU arrays that the call fills, and where their contents are.
        self.filled: list[tuple[int, Described]] = []

    def take(self, name: str, value: Any, wanted: str) -> Tensor:
        """Returns an argument that is read, of elements ``wanted``."""
        return self._place(name, describe(name, value, wanted))[0]

    def maybe(self, name: str, value: Any, wanted: str) -> Tensor | None:
        """Returns an argument that is read, if it was given."""
        return None if value is None else self.take(name, value, wanted)

    def give(self, name: str, value: Any, wanted: str) -> Tensor:
        """Returns an argument that is written."""
        described = describe(name, value, wanted, written=True)
        tensor, at = self._place(name, described)
        if at is not None:
            self.filled.append((at, described))
        return tensor

    def outputs(self, out: DispatchOutput) -> _ferry.DispatchOutput:
        """Returns the outputs of a dispatch."""
        tensors = {}
        plan = self.communicator.plan
        wide_ids = out.ids is not None and describe("ids", out.ids, "i32").data_type == "i64"
        for name, data_type, shape, _, _ in plan._output_layout(out.rows, out.scale_blocks, wide_ids):
            value = getattr(out, name)
            if value is None:
                raise refuse(name, f"a tensor of {data_type}, shape {shape}", "none")
            tensor = self.give(name, value, data_type)
            if tensor.shape != shape:
                raise refuse(name, f"shape {shape}", f"{tensor.shape}")
            tensors[name] = tensor
        for name in TENSORS:
            if name not in tensors and getattr(out, name) is not None:
                config = plan.config
                raise refuse(name, f"none (format {config.format}, receive {config.receive})", "a tensor")
        return _ferry.DispatchOutput(plan, out.rows, out.scale_blocks, wide_ids, tensors)

    def answers(self, given: Answers) -> _ferry.CombineInput:
        """Returns the inputs of a combine."""
        initial = given.initial if isinstance(given.initial, (tuple, list)) else [given.initial]
        if len(initial) > 2:
            raise refuse("initial", "at most 2 tensors", str(len(initial)))
        first, second = (*initial, None, None)[:2]
        return _ferry.CombineInput(
            self.take("expert_rows", given.expert_rows, "bf16"),
            self.maybe("topk_weights", given.topk_weights, "f32"),
            self.maybe("row_weights", given.row_weights, "f32"),
            [
                self.maybe("row_scales", given.row_scales, "f32"),
                self.maybe("bias", given.bias, "bf16"),
                self.maybe("bias2", given.bias2, "bf16"),
                self.maybe("residual", given.residual, "bf16"),
            ],
            [self.maybe("initial[0]", first, "bf16"), self.maybe("initial[1]", second, "bf16")],
            self.maybe("received_weights", given.received_weights, "f32"),
        )

    def sums(self, out: Any, weights: Any) -> _ferry.CombineOutput:
        """Returns the output of a combine."""
        returned = None if weights is None else self.give("weights", weights, "f32")
        return _ferry.CombineOutput(self.give("combined", out, "bf16"), returned)

    def silu_output(self, like: Any, format: str) -> SiluOutput:
        """Allocates the outputs of a fused SiLU of ``like``."""
        shape = describe("input", like, "bf16").shape
        if len(shape) != 2:
            raise refuse("input", "2 dimensions", f"shape {list(shape)}")
        rows, columns = shape[0], shape[1] // 2
        _, group, layout = _ferry.format_sizes(format)
        made = self._allocate(like, self.element_of(format), [rows, columns])
        if group == 0:
            return SiluOutput(made)
        if layout is None:
            scales = [columns // group, rows]
        elif layout == "row-major":
            scales = [rows, columns // group]
        else:
            blocks = self.communicator.plan._capacity(rows)[1]
            scales = [blocks, columns // (4 * group), 32, 4, 4]
        return SiluOutput(made, self._allocate(like, self.scale_of(format), scales))

    def element_of(self, format: str) -> str:
        """Returns the type of a format's elements."""
        return {16: "bf16", 8: "e4m3", 4: "e2m1"}[_ferry.format_sizes(format)[0]]

    def scale_of(self, format: str) -> str:
        """Returns the type of a format's scales."""
        if format == "fp8":
            return "f32"
        return "e4m3" if format.startswith("nvfp4") else "e8m0"

    def require_peers(self, *, sent: int = 0, returned: int = 0) -> None:
        """Raises if the call would wait on the host for another rank of this thread."""
        if self.copies:
            self.communicator._require_peers(sent, returned)

    def require_device_memory(self) -> None:
        """Raises if an argument is a CPU array."""
        if self.copies:
            raise ArgumentError("a prepared call takes memory of the device, and an array is on the CPU")

    def finish(self, *, of_round: bool = True) -> None:
        """Waits, and copies what the call filled, if an argument is a CPU array."""
        if of_round:
            self.communicator._drive()
        if not self.copies:
            return
        native = self.communicator._native
        if of_round:
            self.communicator._note(native._synchronize(self.stream))
        else:
            native._wait(self.stream)
        for at, described in self.filled:
            native._download(at, described.address, described.tensor().nbytes)

    def _allocate(self, like: Any, data_type: str, shape: list[int]) -> Any:
        if isinstance(like, Tensor) or hasattr(like, "_ferry_tensor"):
            return self.communicator.empty(tuple(shape), data_type)
        return allocate(like, data_type, shape)

    def _place(self, name: str, described: Described) -> tuple[Tensor, int | None]:
        """Returns the tensor on the rank's device, and the address of its copy if it is one."""
        communicator = self.communicator
        if described.device in ("rank", communicator.device):
            self._record(described.owner)
            return described.tensor(), None
        if described.device != "cpu" or not communicator._copies:
            wanted = "the CPU" if communicator._copies else communicator.device
            raise refuse(name, f"memory of {wanted}", f"memory of {described.device}")
        self.copies = True
        return self._copy(name, described)

    def _record(self, owner: Any) -> None:
        """Tells torch that a tensor of it is used on another stream than its current one."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(owner, torch.Tensor) or not owner.is_cuda:
            return
        if self.stream == self.communicator._stream(None) or torch.cuda.is_current_stream_capturing():
            return
        owner.record_stream(stream_of(self.stream, owner.device))

    def _copy(self, name: str, described: Described) -> tuple[Tensor, int]:
        """Copies a CPU array to memory that serves every call for this argument."""
        communicator = self.communicator
        nbytes = described.tensor().nbytes
        staged = communicator._staged.get(name)
        if staged is None or staged.nbytes < nbytes:
            staged = communicator.empty((max(nbytes, 1),), "u8")
            communicator._staged[name] = staged
        at = staged.address
        communicator._native._upload(at, described.address, nbytes)
        return described.tensor(at), at
