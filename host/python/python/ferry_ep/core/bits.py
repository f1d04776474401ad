"""BF16 for NumPy, which has none: its bits as ``uint16``."""

from __future__ import annotations

import sys
from typing import Any

from ._ferry import Plan, decode_rows, describe, format_sizes, require_numpy_memory, require_storage
from .errors import ArgumentError, TensorError, refuse
from .memory import PLAIN, View
from .outputs import DispatchOutput
from .scalars import number, shown, whole
from .tensors import elements_of, scales_of

__all__ = ["decode", "from_bf16", "to_bf16"]


def to_bf16(values: Any) -> Any:
    """Returns the BF16 bits, ``uint16``, of an array of numbers, each rounded to nearest, ties to even.

    Raises :class:`ferry_ep.TensorError` for ``uint16``, which are bits already.

    >>> import numpy
    >>> to_bf16(numpy.array([1.0, -2.0])).tolist()
    [16256, 49152]
    """
    import numpy

    given = _array("values", values, "numbers")
    if given.dtype == numpy.uint16:
        raise refuse(
            "values", "numbers, such as float32", "uint16, which are BF16's bits: from_bf16 decodes them"
        )
    if given.dtype.kind not in "biuf":
        raise refuse("values", "numbers, such as float32", str(given.dtype))
    bits = numpy.ascontiguousarray(given, dtype=numpy.float32).view(numpy.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return numpy.where(is_nan, (bits >> 16) | 0x40, rounded).astype(numpy.uint16)


def from_bf16(bits: Any) -> Any:
    """Returns the numbers, ``float32``, of BF16 bits, ``uint16``.

    Raises :class:`ferry_ep.TensorError` for other elements.

    >>> import numpy
    >>> from_bf16(numpy.array([16256, 49152], dtype=numpy.uint16)).tolist()
    [1.0, -2.0]
    """
    import numpy

    given = _array("bits", bits, "uint16")
    if given.dtype != numpy.uint16:
        raise refuse("bits", "uint16, the bits of BF16, as to_bf16 makes them of numbers", str(given.dtype))
    words = numpy.ascontiguousarray(given, dtype=numpy.uint16).astype(numpy.uint32) << 16
    return words.view(numpy.float32)


def _array(name: str, given: Any, wanted: str) -> Any:
    """Returns an array of NumPy of a CPU array."""
    import numpy

    _require_memory(name, given)
    try:
        array = None if given is None else numpy.asarray(given)
    except TensorError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise refuse(name, f"an array of {wanted}", f"{type(given).__name__}: {error}") from None
    if array is None or array.dtype == object:
        raise refuse(name, f"an array of {wanted}", f"{type(given).__name__}")
    return array


def _require_memory(name: str, given: Any) -> None:
    """Raises :class:`ferry_ep.TensorError` if an array of torch or NumPy, or one in a list, has less memory
    than its shape says.
    """
    import numpy

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        require_storage(name, given)
    elif isinstance(given, numpy.ndarray):
        require_numpy_memory(name, given)
    elif isinstance(given, (list, tuple)):
        for each in given:
            _require_memory(name, each)


def decode(
    plan: Plan, output: DispatchOutput, input_scale: float | None = None, *, view: View | None = None
) -> Any:
    """Decodes the rows of NumPy outputs to ``float32``, ``[rows, hidden]``: codes times scales.

    ``input_scale`` is that of the dispatches, ``nvfp4`` only. ``view`` is the dispatch's
    :meth:`ferry_ep.Communicator.view`, if the plan's ``receive`` is ``"view"`` and only then. Values of rows
    that pad an expert or have no token are undefined. Raises :class:`ferry_ep.TensorError` for arrays that
    are not a dispatch's.
    """
    import numpy

    if not isinstance(plan, Plan):
        raise ArgumentError(f"plan is {shown(plan)}, but it is a ferry_ep.Plan")
    receive = plan.config.receive
    if (view is not None) != (receive == "view"):
        kind = "none" if view is None else f"of type {type(view).__name__}"
        raise refuse("view", "none" if view else "a view", f"{kind}, as the plan's receive is {receive}")
    given = _Received(plan, output, view)
    rows = given.rows
    is_row_major = format_sizes(plan.config.format)[2] == "row-major" or (
        receive != "by-expert" and not plan.config.transposed_scales
    )
    codes = numpy.ascontiguousarray(given.tokens[:rows]).tobytes()
    factors = b""
    if given.scales is not None:
        factors = numpy.ascontiguousarray(given.scales[:rows] if is_row_major else given.scales).tobytes()
    offsets = given.numbers("row_offsets", "u32"), given.numbers("scale_offsets", "u32")
    row_scales = [] if given.row_scales is None else given.row_scales[:rows].tolist()
    scale = None if input_scale is None else number("input_scale", input_scale)
    values = decode_rows(plan, rows, codes, (factors, row_scales), offsets, scale)
    return numpy.frombuffer(values, dtype=numpy.float32).reshape(rows, plan.config.hidden)


class _Received:
    """Arrays of a dispatch, each of NumPy and of its type."""

    def __init__(self, plan: Plan, output: DispatchOutput, view: View | None) -> None:
        if not isinstance(output, DispatchOutput):
            raise refuse("output", "a DispatchOutput", type(output).__name__)
        if view is not None and not isinstance(view, View):
            raise refuse("view", "a View", type(view).__name__)
        self.output = output
        receive, format = plan.config.receive, plan.config.format
        self.rows = whole("output.rows", output.rows)
        if receive == "by-expert":
            (*_, self.rows) = self.numbers("row_offsets", "u32") or [0]
        if receive == "compact":
            self.rows = sum(self.numbers("source_counts", "i32"))
        if self.rows < 0:
            raise refuse("source_counts", "numbers of at least 0", f"a sum of {self.rows}")
        if view is not None:
            self.tokens = view.tokens.numpy()
        else:
            self.tokens = self.array("tokens", elements_of(format), 2)
            if self.tokens is None:
                raise refuse("tokens", "an array of NumPy", "none")
        self.scales: Any = self.array("scales", scales_of(format))
        self.row_scales: Any = self.array("row_scales", "bf16", 1)
        if view is not None and view.scales is not None:
            self.scales = view.scales.numpy()
        if view is not None and view.row_scales is not None:
            self.row_scales = view.row_scales.numpy()

    def array(self, name: str, wanted: str, dimensions: int | None = None) -> Any:
        """Returns an output, if it is there."""
        import numpy

        value = getattr(self.output, name)
        if value is None:
            return None
        if not isinstance(value, numpy.ndarray):
            raise refuse(name, f"an array of NumPy, of {wanted}", type(value).__name__)
        found, _ = describe(name, value, wanted)
        if found.data_type not in (wanted, PLAIN.get(wanted)):
            raise refuse(name, f"elements of {wanted}", found.data_type)
        if dimensions is not None and value.ndim != dimensions:
            raise refuse(name, f"{dimensions} dimensions", f"shape {list(value.shape)}")
        return value

    def numbers(self, name: str, wanted: str) -> list[int]:
        """Returns an output's numbers; none if it is not there."""
        array = self.array(name, wanted, 1)
        return [] if array is None else array.tolist()
