"""Expert-parallel dispatch and combine for mixture-of-experts models.

A :class:`Group` is the set of ranks, a :class:`Plan` a checked :class:`Config`, and a
:class:`Communicator` one rank's end. The same kernels run on GPUs and, as here, in a simulator:

>>> import numpy
>>> import ferry_ep as ferry
>>> group = ferry.Group.simulated(2)
>>> plan = ferry.Plan(group, ferry.Config(experts=4, top_k=2, hidden=8, max_tokens_per_rank=3))
>>> with ferry.Communicators(group, plan) as ranks:
...     # Each rank has one token, which goes to expert 1 (on rank 0) and expert 2 (on rank 1).
...     x = ferry.to_bf16(numpy.ones((1, 8)))
...     ids = numpy.array([[1, 2]], dtype=numpy.int32)
...     rows = ranks.together([ferry.Dispatch(x, ids)] * 2)
...     # Experts would work here; these return their input.
...     sums = ranks.together([ferry.Combine(received.tokens) for received in rows])
>>> ferry.from_bf16(sums[0])[0].tolist()
[2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
"""

from .core import _ferry as _ferry
from .core import errors as errors
from .core._ferry import (
    Bootstrap,
    Fault,
    Group,
    LinkReport,
    Plan,
    PreparedCombine,
    PreparedDispatch,
    Tensor,
    __version__,
    has_cuda,
    has_nvshmem,
)
from .core.bits import decode, from_bf16, to_bf16
from .core.bootstraps import torch_bootstrap
from .core.communicator import Communicator
from .core.config import Config, TensorLayout
from .core.errors import (
    ArgumentError,
    BootstrapError,
    BusyError,
    CapacityError,
    ClosedError,
    DeviceError,
    FaultError,
    FerryError,
    ForkError,
    GroupError,
    InUseError,
    NotBuiltError,
    OrderError,
    PeerFailed,
    PeerGaveUp,
    PeerTimeout,
    PlanError,
    PoisonedError,
    Problem,
    SimulatorError,
    TensorError,
    ThreadError,
)
from .core.memory import DeviceArray, View, ViewArray
from .core.outputs import DispatchOutput, ReceivedCounts, SiluOutput
from .core.ranks import Communicators
from .core.values import (
    Call,
    Combine,
    CombineAsync,
    CombineWait,
    Dispatch,
    DispatchAsync,
    DispatchCounts,
    DispatchWait,
    GiveUp,
)

__all__ = [
    "ArgumentError",
    "Bootstrap",
    "BootstrapError",
    "BusyError",
    "Call",
    "CapacityError",
    "ClosedError",
    "Combine",
    "CombineAsync",
    "CombineWait",
    "Communicator",
    "Communicators",
    "Config",
    "DeviceArray",
    "DeviceError",
    "Dispatch",
    "DispatchAsync",
    "DispatchCounts",
    "DispatchOutput",
    "DispatchWait",
    "Fault",
    "FaultError",
    "FerryError",
    "ForkError",
    "GiveUp",
    "Group",
    "GroupError",
    "InUseError",
    "LinkReport",
    "NotBuiltError",
    "OrderError",
    "PeerFailed",
    "PeerGaveUp",
    "PeerTimeout",
    "Plan",
    "PlanError",
    "PoisonedError",
    "PreparedCombine",
    "PreparedDispatch",
    "Problem",
    "ReceivedCounts",
    "SiluOutput",
    "SimulatorError",
    "Tensor",
    "TensorError",
    "TensorLayout",
    "ThreadError",
    "View",
    "ViewArray",
    "__version__",
    "decode",
    "from_bf16",
    "has_cuda",
    "has_nvshmem",
    "to_bf16",
    "torch_bootstrap",
]
