"""BF16 for NumPy, which has none: its bits as ``uint16``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _ferry

if TYPE_CHECKING:
    from ._ferry import Plan
    from .outputs import DispatchOutput

__all__ = ["decode", "from_bf16", "to_bf16"]


def to_bf16(values: Any) -> Any:
    """Returns the BF16 bits, ``uint16``, of an array of numbers, each rounded to nearest, ties to even.

    >>> import numpy
    >>> to_bf16(numpy.array([1.0, -2.0])).tolist()
    [16256, 49152]
    """
    import numpy

    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return numpy.where(is_nan, (bits >> 16) | 0x40, rounded).astype(numpy.uint16)


def from_bf16(bits: Any) -> Any:
    """Returns the numbers, ``float32``, of BF16 bits.

    >>> import numpy
    >>> from_bf16(numpy.array([16256, 49152], dtype=numpy.uint16)).tolist()
    [1.0, -2.0]
    """
    import numpy

    words = numpy.ascontiguousarray(bits, dtype=numpy.uint16).astype(numpy.uint32) << 16
    return words.view(numpy.float32)


def decode(plan: Plan, output: DispatchOutput, input_scale: float | None = None) -> Any:
    """Decodes the rows of NumPy outputs to ``float32``, ``[rows, hidden]``: codes times scales.

    ``input_scale`` is that of the dispatches, ``nvfp4`` only. Values of rows that pad an expert are
    undefined. Raises :class:`ferry_ep.TensorError` for arrays that are not a dispatch's.
    """
    import numpy

    def of_bytes(array: Any, rows: int | None = None) -> bytes:
        return b"" if array is None else numpy.ascontiguousarray(array[:rows]).tobytes()

    rows = int(output.row_offsets[-1])
    layout = _ferry.format_sizes(plan.config.format)[2]
    offsets = [] if output.scale_offsets is None else output.scale_offsets.tolist()
    scales = of_bytes(output.scales, rows if layout == "row-major" else None)
    row_scales = [] if output.row_scales is None else output.row_scales[:rows].tolist()
    codes, starts = of_bytes(output.tokens, rows), output.row_offsets.tolist()
    values = _ferry.decode_rows(plan, codes, scales, offsets, row_scales, starts, input_scale)
    return numpy.frombuffer(values, dtype=numpy.float32).reshape(rows, plan.config.hidden)
