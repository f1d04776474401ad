"""Low-latency mode of ``ferry_ep.deep_ep`` in plain torch: blocks of rows, and sums."""

from __future__ import annotations

import numpy as np
import torch
from deep_ep_rig import on_host, same
from oracle import blockwise, to_e4m3

#: Most tokens of a rank.
MOST = 10


def rows_of(tokens, rank):
    """Returns ``(source, token)`` of each row of each expert of a rank, in order."""
    found = []
    for expert in range(rank * tokens.local, (rank + 1) * tokens.local):
        found.append(
            [
                (source, token)
                for source, ids in enumerate(tokens.ids)
                for token in (ids == expert).any(1).nonzero().flatten().tolist()
            ]
        )
    return found


def answer(x, expert):
    """Returns the rows that an expert makes of ``x``: others for each."""
    return (x.float() * (1 + expert / 8)).bfloat16()


def answers(tokens, rank, most=MOST, x=None):
    """Returns the rows that a rank's experts make of ``x``, or the tokens; those of no token are NaN."""
    x = tokens.x if x is None else x
    hidden = tokens.x[0].shape[1]
    made = torch.full((tokens.local, tokens.ranks * most, hidden), float("nan"), dtype=torch.bfloat16)
    for local, rows in enumerate(rows_of(tokens, rank)):
        for row, (source, token) in enumerate(rows):
            made[local, row] = answer(x[source][token], rank * tokens.local + local)
    return made.to(tokens.device)


def sums(tokens, rank, x=None):
    """Returns the sums of a rank's tokens: in f32, in the order of the slots, rounded once."""
    x = tokens.x[rank] if x is None else x[rank]
    ids, weights = tokens.ids[rank], tokens.weights[rank]
    total = torch.zeros(x.shape)
    for token in range(len(x)):
        for slot, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                total[token] += answer(x[token], expert).float() * weights[token, slot]
    return total.bfloat16()


def powers_of_two(x):
    """Encodes f32 rows as FP8 with the least scales of a power of two, by NumPy."""
    groups = x.reshape(len(x), -1, 128)
    most = np.maximum(np.abs(groups).max(axis=-1), np.float32(1e-4))
    mantissa, exponent = np.frexp((most / np.float32(448)).astype(np.float32))
    scales = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
    return to_e4m3(groups / scales[..., None]).reshape(x.shape), scales


def check_rows(tokens, rank, given, encode=None, most=MOST):
    """Compares the rows of a dispatch, and their scales."""
    codes, scales = given if encode else (given, None)
    hidden, block = tokens.x[0].shape[1], tokens.ranks * most
    assert codes.shape == (tokens.local, block, hidden) and codes.is_contiguous()
    if scales is not None:
        width = hidden // (512 if scales.dtype == torch.int32 else 128)
        assert scales.shape == (tokens.local, block, width)
        assert scales.stride() == (width * block, 1, block)
    for local, rows in enumerate(rows_of(tokens, rank)):
        if not rows:
            continue
        wanted = torch.stack([tokens.x[source][token] for source, token in rows])
        if encode is None:
            same(codes[local, : len(rows)], wanted)
            continue
        wanted_codes, wanted_scales = encode(wanted.float().numpy())
        same(codes[local, : len(rows)].view(torch.uint8), torch.from_numpy(wanted_codes))
        scaled = on_host(scales[local, : len(rows)]).clone(memory_format=torch.contiguous_format)
        if scales.dtype == torch.int32:
            scaled = np.ldexp(np.float32(1), scaled.view(torch.uint8).int().numpy() - 127)
            scaled = torch.from_numpy(scaled)
        same(scaled, torch.from_numpy(wanted_scales))


def check_numbers(tokens, rank, count, handle, most=MOST):
    """Compares the rows of each expert, and the handle."""
    rows = rows_of(tokens, rank)
    same(count, torch.tensor([len(each) for each in rows], dtype=torch.int32))
    assert isinstance(handle, tuple) and len(handle) == 5
    assert handle[2:] == (most, tokens.x[0].shape[1], tokens.experts)
    info, ranges = on_host(handle[0]), on_host(handle[1])
    assert info.dtype == torch.int32 and info.shape == (tokens.local, tokens.ranks * most)
    assert ranges.dtype == torch.int64 and ranges.shape == (tokens.local, tokens.ranks)
    for local, each in enumerate(rows):
        assert info[local, : len(each)].tolist() == [token for _, token in each]
        sources = [source for source, _ in each]
        for source in range(tokens.ranks):
            begin, number = int(ranges[local, source]) >> 32, int(ranges[local, source]) & 0xFFFFFFFF
            assert number == sources.count(source)
            assert sources[begin : begin + number] == [source] * number


def send(buffer, tokens, rank, **options):
    """A dispatch of a rank's tokens; with a hook it is not called."""
    x, ids, _ = tokens.given(rank)
    return buffer.low_latency_dispatch(x, ids, MOST, tokens.experts, **options)


def back(buffer, tokens, rank, handle, x=None, **options):
    """A combine of a rank's answers; with a hook it is not called."""
    _, ids, weights = tokens.given(rank)
    return buffer.low_latency_combine(answers(tokens, rank, x=x), ids, weights, handle, **options)


#: Arguments of a dispatch, and how to encode its rows, by name.
ENCODINGS = {
    "bf16": ({"use_fp8": False}, None),
    "fp8": ({}, blockwise),
    "round_scale": ({"round_scale": True}, powers_of_two),
    "ue8m0": ({"round_scale": True, "use_ue8m0": True}, powers_of_two),
}
