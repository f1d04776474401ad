"""BF16 for NumPy, which has none: its bits as ``uint16``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import _ferry
from .errors import TensorError, refuse
from .storages import require_storage

if TYPE_CHECKING:
    from ._ferry import Plan
    from .memory import View
    from .outputs import DispatchOutput

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

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        require_storage(name, given)
    try:
        array = None if given is None else numpy.asarray(given)
    except TensorError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise refuse(name, f"an array of {wanted}", f"{type(given).__name__}: {error}") from None
    if array is None or array.dtype == object:
        raise refuse(name, f"an array of {wanted}", f"{type(given).__name__}")
    return array


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

    def numbers(array: Any, rows: int | None = None) -> list[int]:
        return [] if array is None else array[:rows].tolist()

    receive = plan.config.receive
    if (view is not None) != (receive == "view"):
        raise refuse("view", "none" if view else "a view", f"{view}, as the plan's receive is {receive}")
    rows = _rows(output, receive)
    tokens, scales, row_scales = output.tokens, output.scales, output.row_scales
    if view is not None:
        tokens = view.tokens.numpy()
        scales = scales if view.scales is None else view.scales.numpy()
        row_scales = None if view.row_scales is None else view.row_scales.numpy()
    is_row_major = _ferry.format_sizes(plan.config.format)[2] == "row-major" or (
        receive != "by-expert" and not plan.config.transposed_scales
    )
    codes = numpy.ascontiguousarray(tokens[:rows]).tobytes()
    factors = b""
    if scales is not None:
        factors = numpy.ascontiguousarray(scales[:rows] if is_row_major else scales).tobytes()
    offsets = numbers(output.row_offsets), numbers(output.scale_offsets)
    both = factors, numbers(row_scales, rows)
    values = _ferry.decode_rows(plan, rows, codes, both, offsets, input_scale)
    return numpy.frombuffer(values, dtype=numpy.float32).reshape(rows, plan.config.hidden)


def _rows(output: DispatchOutput, receive: str) -> int:
    """Returns the number of rows that a dispatch may have written."""
    if receive == "by-expert":
        return int(output.row_offsets[-1])
    return int(output.source_counts.sum()) if receive == "compact" else output.rows
