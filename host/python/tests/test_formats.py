"""Formats, decoded by NumPy."""

from __future__ import annotations

import ferry_ep as ferry
import numpy as np
import pytest
from oracle import decode

FORMATS = [
    "bf16",
    "fp8",
    "mxfp8:tiled",
    "mxfp8:row-major",
    "mxfp4:tiled",
    "mxfp4:row-major",
    "nvfp4:tiled",
    "nvfp4:row-major",
    "nvfp4-row:tiled",
    "nvfp4-row:row-major",
]
#: Largest error of an element, as a part of the largest magnitude of its scale's group. Half the distance of
#: the two largest codes over the largest one: fp8 32/448/2, nvfp4 2/6/2 and 1/16 for the scale's rounding. MX
#: scales are powers of two, so that values above the largest code saturate: mxfp8 (512 - 448) / 512, mxfp4
#: (8 - 6) / 8.
BOUNDS = {"bf16": 0, "fp8": 0.036, "mxfp8": 0.126, "mxfp4": 0.26, "nvfp4": 0.24, "nvfp4-row": 0.24}


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_what_was_sent(bench, format):
    hidden = 256
    of = bench(2, format=format, hidden=hidden, max_tokens_per_rank=70, experts=4)
    problem = of.problem(11, tokens=70, holes=0)
    x, ids, weights = problem.arguments
    name = format.partition(":")[0]
    scale = [np.array([2.0], dtype=np.float32)] * 2 if name == "nvfp4" else None
    rows = of.together(ferry.Dispatch, x, ids, weights, input_scale=scale)
    for rank, output in enumerate(rows):
        decoded = decode(format, output, hidden, 2.0)
        library = ferry.decode(of.plan, output, 2.0 if scale else None)
        order = problem.rows(rank)
        # Rows that pad an expert, which blockwise FP8 has, are undefined.
        places = []
        for group in range(of.plan.local_experts):
            of_expert = sum(number == rank * of.plan.local_experts + group for number, *_ in order)
            first = output.rows_of(group).start
            places.extend(range(first, first + of_expert))
        sent = np.stack([problem.x[source][token] for _, source, token, _ in order])
        np.testing.assert_array_equal(decoded[places], library[places])
        group = {"bf16": hidden, "fp8": 128}.get(name, 16 if name.startswith("nvfp4") else 32)
        most = np.abs(sent).reshape(len(sent), -1, group).max(axis=2).repeat(group, axis=1)
        error = np.abs(decoded[places] - sent)
        assert (error <= BOUNDS[name] * most).all(), (error / most).max()
        if name != "bf16":
            assert error.any()
    of.together(ferry.Combine, [np.zeros((output.rows, hidden), dtype=np.uint16) for output in rows])


def test_outputs_are_those_of_the_plan(bench):
    """Every output that a plan can have is a field of DispatchOutput, and every array field is an output."""
    names = set()
    plans = [{"format": format} for format in FORMATS]
    plans += [{"receive": receive} for receive in ("view", "strided", "compact", "padded")]
    plans += [{"m_indices": True}]
    for changes in plans:
        of = bench(1, hidden=128, **changes)
        layout = of.plan.output_layout()
        output = of.ranks[0].outputs(np.empty(0))
        for name, _, shape, nbytes, _ in layout:
            array = getattr(output, name)
            assert array.nbytes == nbytes
            assert list(array.shape[:-1]) == list(shape[:-1])
        names |= {layout[0] for layout in layout}
    fields = set(ferry.DispatchOutput.__dataclass_fields__) - {"rows", "scale_blocks"}
    assert names == fields
