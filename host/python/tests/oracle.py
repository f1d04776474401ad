"""Rounds and formats in plain NumPy, which share no code with Ferry."""

from __future__ import annotations

import numpy as np

F32 = np.float32
#: Values of the 3 low bits of E2M1.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=F32)


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounds to BF16, to nearest and ties to even, and returns f32: by halves of the last place."""
    mantissa, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    # 8 bits of significand: np.round is half to even.
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(F32)


def bits(values: np.ndarray) -> np.ndarray:
    """Returns the bits of f32 values that are BF16 already."""
    return (np.asarray(values, dtype=F32).view(np.uint32) >> 16).astype(np.uint16)


def values(bits: np.ndarray) -> np.ndarray:
    """Returns the f32 values of BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(F32)


def expert(rows: np.ndarray, number: int) -> np.ndarray:
    """Returns the output of expert ``number``: BF16 in f32."""
    return bf16(rows * F32(1 + number / 8))


class Problem:
    """Tokens of every rank, their experts and weights."""

    def __init__(self, seed, ranks, tokens, hidden, experts, top_k, *, holes=0.2):
        random = np.random.default_rng(seed)
        self.ranks, self.experts, self.top_k = ranks, experts, top_k
        self.x = [bf16(random.standard_normal((tokens, hidden)).astype(F32)) for _ in range(ranks)]
        self.ids, self.weights = [], []
        for _ in range(ranks):
            ids = np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)] or [[]])
            ids = ids.reshape(tokens, top_k).astype(np.int32)
            ids[random.random(ids.shape) < holes] = -1
            self.ids.append(ids)
            self.weights.append(random.random((tokens, top_k)).astype(F32))

    @property
    def arguments(self):
        """Arguments of a dispatch of all ranks."""
        return [bits(x) for x in self.x], self.ids, self.weights

    def rows(self, rank: int) -> list[tuple[int, int, int, int]]:
        """Returns expert, source, token and slot of each row of ``rank``, in order."""
        local = self.experts // self.ranks
        found = []
        for number in range(rank * local, (rank + 1) * local):
            for source, ids in enumerate(self.ids):
                for token, slot in np.argwhere(ids == number):
                    found.append((number, source, int(token), int(slot)))
        return found

    def sums(self, rank: int, mode: str) -> np.ndarray:
        """Returns the combined tokens of ``rank``: f32 before the last rounding."""
        x, ids, weights = self.x[rank], self.ids[rank], self.weights[rank]
        local = self.experts // self.ranks
        total = np.zeros(x.shape, dtype=F32)
        parts = range(self.ranks) if mode == "reduced" else [None]
        for token in range(len(x)):
            for owner in parts:
                part = np.zeros(x.shape[1], dtype=F32)
                for slot, number in enumerate(ids[token]):
                    if number < 0 or (owner is not None and number // local != owner):
                        continue
                    row = expert(x[token], int(number))
                    part = part + row * weights[token, slot]
                total[token] = total[token] + (bf16(part) if mode == "reduced" else part)
        return total


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Decodes FP8 E4M3 without infinities."""
    codes = codes.astype(np.int32)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    return np.where((codes & 0x7F) == 0x7F, np.nan, sign * value).astype(F32)


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Decodes bytes of two FP4 E2M1 elements, the even one in the low half."""
    both = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return np.where(both & 8, -1, 1).astype(F32) * E2M1[both & 7]


def decode(format: str, output, hidden: int, input_scale: float = 1.0) -> np.ndarray:
    """Decodes the rows of a dispatch's outputs to f32."""
    count = int(output.row_offsets[-1])
    codes = output.tokens[:count]
    name, _, layout = format.partition(":")
    if name == "bf16":
        return values(codes)
    if name == "fp8":
        scales = np.repeat(output.scales[:, :count].T, 128, axis=1)
        return e4m3(codes) * scales
    group = 16 if name.startswith("nvfp4") else 32
    elements = e4m3(codes) if name == "mxfp8" else e2m1(codes)
    if layout == "row-major":
        scales = output.scales[:count]
    else:
        scales = np.zeros((count, hidden // group), dtype=np.uint8)
        for e in range(len(output.row_offsets) - 1):
            first, end = int(output.row_offsets[e]), int(output.row_offsets[e + 1])
            block = first // 128 + int(output.scale_offsets[e])
            for row in range(first, end):
                r = row - first
                for g in range(hidden // group):
                    scales[row, g] = output.scales[block + r // 128, g // 4, r % 32, r % 128 // 32, g % 4]
    powers = name.startswith("mx")
    factors = np.ldexp(F32(1), scales.astype(np.int32) - 127) if powers else e4m3(scales)
    decoded = elements * np.repeat(factors.astype(F32), group, axis=1)
    if name == "nvfp4":
        return decoded / F32(input_scale)
    if name == "nvfp4-row":
        return decoded * values(output.row_scales[:count])[:, None]
    return decoded
