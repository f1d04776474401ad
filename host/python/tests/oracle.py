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


class Kept:
    """Rows that ``rank`` receives as they came: of each token with an expert there.

    Strided rows, and a view's, are numbered by source and token, of ``max_tokens`` each; compact ones in
    their order, and those from ``capacity`` on are not there.
    """

    def __init__(self, problem: Problem, rank: int, max_tokens: int, capacity: int | None = None) -> None:
        local = problem.experts // problem.ranks
        is_compact = capacity is not None
        rows = capacity if is_compact else problem.ranks * max_tokens
        #: Row of (source rank, token).
        self.row_of: dict[tuple[int, int], int] = {}
        #: Rows that came, whether they are there or not.
        self.sent = 0
        self.src_info = np.full((rows, 2), -1)
        self.ids = np.full((rows, problem.top_k), -1)
        self.weights = np.zeros((rows, problem.top_k), dtype=F32)
        self.source_counts = np.zeros(problem.ranks, dtype=np.int64)
        for source, ids in enumerate(problem.ids):
            for token in range(len(ids)):
                is_here = ids[token] // local == rank
                if not is_here.any():
                    continue
                row = self.sent if is_compact else source * max_tokens + token
                self.sent += 1
                if row >= rows:
                    continue
                self.row_of[source, token] = row
                self.src_info[row] = source, token
                self.ids[row] = np.where(is_here, ids[token] - rank * local, -1)
                self.weights[row] = np.where(is_here, problem.weights[source][token], 0)
                self.source_counts[source] += 1
        self.expert_counts = np.array([(self.ids == number).sum() for number in range(local)])

    def tokens(self, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the rows with a token, and these tokens: f32."""
        rows = np.array(list(self.row_of.values()), dtype=np.int64)
        found = [problem.x[source][token] for source, token in self.row_of]
        return rows, np.array(found, dtype=F32).reshape(len(rows), -1)


def sums_of_kept(
    rank: int, kept: list[Kept], answers: list[np.ndarray], start: list[np.ndarray]
) -> np.ndarray:
    """Returns the sums of ``rank``'s tokens, f32: 0, then ``start``, then the ranks' rows, by rank."""
    total = np.zeros(start[0].shape, dtype=F32)
    for part in start:
        total = total + part
    for of_rank, rows in zip(kept, answers, strict=True):
        for (source, token), row in of_rank.row_of.items():
            if source == rank:
                total[token] = total[token] + rows[row]
    return total


def returned_weights(problem: Problem, rank: int, kept: list[Kept], given: list[np.ndarray]) -> np.ndarray:
    """Returns the weights that come back to ``rank``: f32 ``[tokens, top_k]``."""
    local = problem.experts // problem.ranks
    result = np.zeros(problem.ids[rank].shape, dtype=F32)
    for (token, slot), number in np.ndenumerate(problem.ids[rank]):
        row = kept[number // local].row_of.get((rank, token)) if number >= 0 else None
        if row is not None:
            result[token, slot] = given[number // local][row, slot]
    return result


def to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """Encodes FP8 E4M3: the nearest code, ties to even, saturated."""
    table = e4m3(np.arange(0x7F)).astype(np.float64)
    size = np.minimum(np.abs(numbers.astype(np.float64)), 448)
    high = np.searchsorted(table, size)
    low = np.maximum(high - 1, 0)
    below, above = size - table[low], table[high] - size
    takes_low = (below < above) | ((below == above) & (low % 2 == 0))
    return (np.where(takes_low, low, high) | np.where(np.signbit(numbers), 0x80, 0)).astype(np.uint8)


def blockwise(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encodes f32 rows as blockwise FP8: codes, and a scale for each 128 elements."""
    groups = rows.reshape(*rows.shape[:-1], -1, 128)
    most = np.maximum(np.abs(groups).max(axis=-1), F32(1e-4))
    scales = (most / F32(448)).astype(F32)
    return to_e4m3(groups / scales[..., None]).reshape(rows.shape), scales


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
