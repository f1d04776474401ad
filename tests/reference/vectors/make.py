"""Writes block-scaled.txt and wide.txt: BF16 and f32 rows and what the formats with scales make of them.

The casts to e4m3, e2m1 and e8m0 are those of ml_dtypes, the arithmetic is numpy's in f32; no code
of Ferry takes part. Needs numpy and ml_dtypes from PyPI; the versions used stand in the files.

    python make.py

Where ml_dtypes differs from `cvt.rn.satfinite` of PTX, which Ferry follows, the difference is made
up for here, in `e4m3`, `e2m1` and `e8m0_up` and nowhere else:

- float8_e4m3fn makes NaN of what is too large. It is clipped to 448 before the cast.
- float8_e4m3fn keeps the sign of NaN. It becomes 0x7f.
- float4_e2m1fn has no NaN and makes -0 of NaN, +0 of -NaN. It becomes 7, which is 6.
- float8_e8m0fnu rounds to nearest and makes NaN of 0. Only exact powers are cast.

Lines of the files, numbers in hex:

- `values FORMAT` and the f32 of each code from 0 on, `nan` for NaN;
- `cast FORMAT` and `BF16:CODE` for the codes of all BF16s, 0 to ffff: where the code changes;
- `row` and its BF16s, or `row-f32` and its f32s; then what it becomes, until the next of them:
- `fp8`: payload bytes, scales (f32);
- `mxfp8`, `mxfp4`: payload bytes, scale bytes;
- `nvfp4`: global scale (f32), payload bytes, scale bytes;
- `nvfp4-by-row`: inverse of the row's global scale (BF16), payload bytes, scale bytes.
"""

import pathlib

import ml_dtypes
import numpy as np
from ml_dtypes import bfloat16, float4_e2m1fn, float8_e4m3fn, float8_e8m0fnu

HIDDEN = 64
WIDE = 2 * HIDDEN
RANDOM_ROWS = 40
RANDOM_F32_ROWS = 8
SEED = 20
# Global scales.
OTHERS = [0.037, 300.0, 2.0**-126, 2.0**126, 1 / 3]
F32 = np.float32


def e4m3(x):
    codes = np.clip(x, F32(-448), F32(448)).astype(float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def e2m1(x):
    codes = x.astype(float4_e2m1fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(7), codes)


def e8m0_up(x):
    mantissa, exponent = np.frexp(x.astype(np.float64))
    power = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    power = np.where(x > 2.0**-127, power, 2.0**-127)
    power = np.where(np.isfinite(x), power, np.nan)
    return power.astype(float8_e8m0fnu).view(np.uint8)


def value_of_e8m0(codes):
    return codes.view(float8_e8m0fnu).astype(F32)


def packed(codes):
    codes = codes.reshape(-1, 2)
    return codes[:, 0] | codes[:, 1] << 4


def groups_of(row, size):
    groups = row.astype(F32).reshape(-1, size)
    magnitudes = np.abs(groups)
    return groups, np.max(np.where(np.isnan(magnitudes), F32(0), magnitudes), axis=1)


def blockwise_fp8(row):
    groups, amax = groups_of(row, 128)
    scales = np.maximum(amax, F32(1e-4)) / F32(448)
    return e4m3(groups / scales[:, None]).ravel(), scales


def mxfp8(row):
    groups, amax = groups_of(row, 32)
    scales = e8m0_up(amax * F32(1 / 448))
    multiplier = np.where(amax == 0, F32(0), F32(1) / value_of_e8m0(scales))
    return e4m3(groups * multiplier[:, None]).ravel(), scales


def mxfp4(row):
    groups, amax = groups_of(row, 32)
    exponent = (amax.view(np.uint32) + np.uint32(1 << 21) >> 23).astype(np.int32) - 2
    scales = np.clip(exponent, 0, 254).astype(np.uint8)
    return packed(e2m1(groups / value_of_e8m0(scales)[:, None])), scales


def nvfp4(row, gs):
    groups, amax = groups_of(row, 16)
    scales = e4m3(gs * (amax * F32(1 / 6)))
    multiplier = F32(1) / (scales.view(float8_e4m3fn).astype(F32) * (F32(1) / gs))
    multiplier = np.where(np.isfinite(multiplier), multiplier, F32(0))
    return packed(e2m1(groups * multiplier[:, None])), scales


def inverse_global(row):
    _, (row_max,) = groups_of(row, HIDDEN)
    inverse = np.maximum(row_max / F32(2688), F32(2.0**-126)) if row_max > 0 else F32(1)
    return bfloat16(inverse)


def adversarial_rows():
    """Rows made by hand, each of a fault that a conversion could have."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 7.0, 6.5]
    step = np.arange(HIDDEN)
    signs = np.where(step % 2 == 0, 1.0, -1.0)
    inf, nan = np.inf, np.nan
    rows = {
        "zeros": np.zeros(HIDDEN),
        "negative zeros": -np.zeros(HIDDEN),
        "one nan among ones": np.where(step == 5, nan, 1.0),
        "all nan": np.full(HIDDEN, nan),
        "nan among zeros": np.where(step % 7 == 3, nan, 0.0),
        "negative nan": np.where(step % 9 == 4, np.copysign(nan, -1.0), 3.0),
        "one infinity": np.where(step == 40, inf, signs),
        "both infinities and a nan": np.where(step < 32, np.tile([inf, -inf, nan, 2.0], 16), 2.0),
        "largest": np.full(HIDDEN, 2.0**128 * (1 - 2.0**-8)) * signs,
        "largest and least": np.where(step % 3 == 0, 2.0**127, 2.0**-133) * signs,
        "least subnormal": np.full(HIDDEN, 2.0**-133) * signs,
        "subnormals": step * 2.0**-133,
        "around 2^-126": (step - 32.0) * 2.0**-129,
        "around the least scale": (step + 1.0) * 2.0**-121,
        "ties": np.tile(ties, 4) * signs,
        "ties, larger": np.tile(ties, 4) * 2.0**10,
        "ties, smaller": np.tile(ties, 4) * 2.0**-120,
        "powers up": 2.0 ** (step - 32.0),
        "powers down": 2.0 ** (31.0 - 4 * step) * signs,
        "448 exactly": np.where(step % 32 == 0, 448.0, step),
        "just above 448": np.where(step % 32 == 0, 450.0, step),
        "1.75": np.where(step % 32 == 0, 1.75, step / 64.0),
        "just below 1.75": np.where(step % 32 == 0, 1.7421875, step / 64.0),
        "scales that round to 0": np.where(step < 16, 2688.0, 6 * 2.0**-11),
        "scales that are subnormal": np.where(step < 16, 2688.0, 6 * 2.0**-9 * (step / 16)),
        "far above the global scale": 1e6 * signs * (1 + step),
    }
    return [row.astype(bfloat16) for row in rows.values()]


def random_rows(random):
    for index in range(RANDOM_ROWS):
        match index % 4:
            case 0:
                row = random.standard_normal(HIDDEN)
            case 1:
                row = random.standard_normal(HIDDEN) * 2.0 ** random.integers(-120, 120)
            case 2:
                row = random.standard_normal(HIDDEN) * 2.0 ** random.integers(-12, 12, HIDDEN)
            case _:
                bits = random.integers(0, 1 << 16, HIDDEN).astype(np.uint16)
                row = bits.view(bfloat16)
                # Infinities would leave nothing to see.
                row = np.where(np.isinf(row.astype(F32)), bfloat16(1), row)
        yield row.astype(bfloat16)


# Global scale, largest element, another one (f32 and BF16 bits), found by trying many: which of
# NVFP4's operations comes first, and that each is rounded, can be seen in the result.
ASSOCIATIONS = [
    # global · (amax · 1/6) is not (global · amax) · 1/6, nor with a division by 6.
    (0x3E172E5D, 0x3FFE, 0),
    (0x4040E49C, 0x3F57, 0),
    (0x43B0DF6A, 0x3D25, 0),
    (0x434AAAAA, 0x3F10, 0),
    # 1 / (scale · (1 / global)) is not global / scale.
    (0x3C421F8D, 0x45FD, 0x44D3),
    (0x423162C6, 0x403E, 0x3DFE),
    (0x414C2BFA, 0x3DC4, 0x3CA3),
    # scale / global is 2^-128 or less, whose reciprocal is infinite, and what is next to it.
    (0x7E800000, 0x0080, 0x0060),
    (0x7E800000, 0x00C0, 0x0060),
    (0x7E800000, 0x00E0, 0x0060),
    # 1 / global is not the row's BF16 inverse, although global is the inverse's reciprocal.
    (0x40124925, 0x4493, 0x4244),
]


def association_rows():
    for gs, amax, other in ASSOCIATIONS:
        row = np.zeros(HIDDEN, np.uint16)
        row[[3, 8]] = amax, other
        yield np.uint32(gs).view(F32), row.view(bfloat16)


def wide_rows(adversarial, random_ones):
    """BF16 rows of a group of blockwise FP8 each, of the rows above."""
    floor = np.full(HIDDEN, 1e-4)
    for amax in [9.97e-5, 1e-4, 1.004e-4]:
        floor[7] = amax
        yield np.concatenate([floor * 0.9, floor]).astype(bfloat16)
    for row in adversarial:
        yield np.concatenate([row, row[::-1]])
    for first, second in zip(random_ones[::2], random_ones[1::2]):
        yield np.concatenate([first, second])


def neighbours(row):
    """A row, and those whose f32s are next to its own on either side, all but the first of 16, `amax`."""
    for to in [-np.inf, None, np.inf]:
        moved = row if to is None else np.nextafter(row, F32(to))
        yield np.where(np.arange(row.size) % 16 == 0, row, moved)


def f32_rows(random):
    """What a fused activation encodes: f32s between BF16s, next to ties and to the ends of scales."""
    positive = np.arange(0x7F, dtype=np.uint8).view(float8_e4m3fn).astype(F32)
    e4m3_ties = np.append((positive[:-1] + positive[1:]) / 2, [448, 448]).astype(F32)
    e2m1_ties = np.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F32)
    signs = np.where(np.arange(WIDE) % 3 == 0, F32(-1), F32(1))
    for amax in [F32(448), F32(3.3), F32(1e-4)]:
        row = e4m3_ties * (amax / F32(448)) * signs
        row[::16] = amax
        yield from neighbours(row)
    for scale in [F32(1), F32(1.375), F32(2.0**-100)]:
        powers = 2.0 ** (np.arange(WIDE) // 32 * 5 - 8)
        yield from neighbours((np.tile(e2m1_ties, 16) * powers).astype(F32) * scale * signs)
    # The largest of each group of 32, around where a scale changes.
    ends = [448.0, 1.75, 6.0, 1.75 * 2.0**-119, 1.75 * 2.0**-125, 2.0**-126, 2.0**127, 1e-4]
    for first, second in zip(ends[::2], ends[1::2]):
        row = np.linspace(-1, 1, WIDE).astype(F32)
        row *= np.repeat(np.array([first, first, second, second], F32), 32)
        row[[0, 32]] = np.nextafter(F32(first), F32(0)), np.nextafter(F32(first), F32(np.inf))
        row[[64, 96]] = np.nextafter(F32(second), F32(0)), np.nextafter(F32(second), F32(np.inf))
        yield row
    yield np.where(np.arange(WIDE) % 5 == 0, np.finfo(F32).max, F32(1)) * signs
    yield np.arange(WIDE, dtype=np.uint32).view(F32) * signs
    special = np.ones(WIDE, F32)
    special[[3, 40, 41, 70]] = np.inf, np.nan, -np.nan, -np.inf
    yield special
    for index in range(RANDOM_F32_ROWS):
        match index % 4:
            case 0:
                yield random.standard_normal(WIDE).astype(F32)
            case 1:
                yield (random.standard_normal(WIDE) * 2.0 ** random.integers(-120, 120)).astype(F32)
            case 2:
                yield (random.standard_normal(WIDE) * 2.0 ** random.integers(-12, 12, WIDE)).astype(F32)
            case _:
                row = random.integers(0, 1 << 32, WIDE).astype(np.uint32).view(F32)
                yield np.where(np.isinf(row), F32(1), row)


def hexed(array):
    array = np.atleast_1d(array)
    unsigned = array.view(f"u{array.itemsize}")
    return "".join(f"{number:0{2 * array.itemsize}x}" for number in unsigned)


def value_lines():
    for name, dtype, count in [
        ("e2m1", float4_e2m1fn, 16),
        ("e4m3", float8_e4m3fn, 256),
        ("e8m0", float8_e8m0fnu, 256),
    ]:
        values = np.arange(count, dtype=np.uint8).view(dtype).astype(F32)
        words = ("nan" if np.isnan(value) else hexed(value) for value in values)
        yield f"values {name} {' '.join(words)}"


def cast_lines():
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(bfloat16).astype(F32)
    for name, codes in [("e2m1", e2m1(every)), ("e4m3", e4m3(every)), ("e8m0", e8m0_up(np.abs(every)))]:
        starts = [0, *(np.flatnonzero(np.diff(codes)) + 1)]
        yield f"cast {name} {' '.join(f'{start:x}:{codes[start]:x}' for start in starts)}"


def row_lines(rows):
    cases = [(F32(OTHERS[index % len(OTHERS)]), row) for index, row in enumerate(rows)]
    for other, row in [*cases, *association_rows()]:
        yield f"row {hexed(row)}"
        yield " ".join(["mxfp8", *map(hexed, mxfp8(row))])
        yield " ".join(["mxfp4", *map(hexed, mxfp4(row))])
        for gs in [F32(1), other]:
            yield " ".join(["nvfp4", hexed(gs), *map(hexed, nvfp4(row, gs))])
        inverse = inverse_global(row)
        gs = F32(1) / F32(inverse)
        yield " ".join(["nvfp4-by-row", hexed(np.array(inverse)), *map(hexed, nvfp4(row, gs))])


def wide_lines(adversarial, random_ones, random):
    for row in wide_rows(adversarial, random_ones):
        yield f"row {hexed(row)}"
        yield " ".join(["fp8", *map(hexed, blockwise_fp8(row))])
    for index, row in enumerate(f32_rows(random)):
        yield f"row-f32 {hexed(row)}"
        yield " ".join(["fp8", *map(hexed, blockwise_fp8(row))])
        yield " ".join(["mxfp8", *map(hexed, mxfp8(row))])
        yield " ".join(["mxfp4", *map(hexed, mxfp4(row))])
        for gs in [F32(1), F32(OTHERS[index % len(OTHERS)])]:
            yield " ".join(["nvfp4", hexed(gs), *map(hexed, nvfp4(row, gs))])


def write(name, lines):
    first = f"# By make.py, with ml_dtypes {ml_dtypes.__version__} and numpy {np.__version__}."
    path = pathlib.Path(__file__).with_name(name)
    path.write_text("\n".join([first, *lines]) + "\n")


def main():
    random = np.random.Generator(np.random.PCG64(SEED))
    adversarial, random_ones = adversarial_rows(), [*random_rows(random)]
    with np.errstate(all="ignore"):
        rows = row_lines([*adversarial, *random_ones])
        write("block-scaled.txt", [*value_lines(), *cast_lines(), *rows])
        write("wide.txt", wide_lines(adversarial, random_ones, random))


if __name__ == "__main__":
    main()
