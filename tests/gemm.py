#!/usr/bin/env python3
"""Rows that Ferry's dispatch wrote, read by matrix multiplications.

Makes tokens, has `ferry-tests replay --format F` carry them to their experts, and multiplies each expert's rows by
a random matrix:

  bf16             torch._grouped_mm, which takes the ends row_offsets[1:]
  fp8              torch._scaled_mm, an expert at a time: scales 1 x 128 of rows, 128 x 128 of weights
  mxfp8, mxfp4,    dequantised on the GPU by the rule that the guide states (code * scale), then
  nvfp4, nvfp4-row torch._grouped_mm; both layouts of scales

Two errors of each, |y - f64| / |f64| over all rows: against the rows as this file decodes them, which shows that
the multiplication found each code and scale, and against the tokens before they were encoded, which also has the
format's own error. Needs torch 2.11 and a GPU from sm_90 on.

With --check-dequant nothing is multiplied: numpy alone decodes what the simulator wrote and compares it, element by
element, with the bounds that the guide states. Exit code 1 if an error exceeds its bar.
"""

import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy as np

FORMATS = [("bf16", None), ("fp8", None)] + [
    (name, scales) for name in ("mxfp8", "mxfp4", "nvfp4", "nvfp4-row") for scales in ("tiled", "row-major")
]
GROUP = {"fp8": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "nvfp4-row": 16}
# Against the decoded rows: BF16 results, and FP8 sums that are partly kept in fewer bits than f32's.
READ_BAR = {"bf16": 2**-7, "fp8": 2**-7}
# Against the tokens: half a step of a code, on average over a row a third of that.
TOKEN_BAR = {"bf16": 2**-7, "fp8": 2**-4, "mxfp8": 2**-4, "mxfp4": 2**-2, "nvfp4": 2**-2.5, "nvfp4-row": 2**-2.5}
DTYPES = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32, "U32": np.uint32, "U8": np.uint8}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3_table():
    """Value of each code of e4m3: bias 7, no infinities, 0x7f and 0xff are NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude)


E4M3 = e4m3_table()


def to_bf16(values):
    """f32 to the bits of the nearest BF16, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def write_safetensors(path, tensors):
    """`tensors`: name to (type, array)."""
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blocks = [np.ascontiguousarray(array).tobytes() for _, array in tensors.values()]
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blocks))


def read_safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(body[start:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


class Problem:
    """Tokens of all ranks, and where the router sends them."""

    def __init__(self, args):
        random = np.random.default_rng(args.seed)
        self.ranks, self.experts, self.hidden, self.top_k = args.ranks, args.experts, args.hidden, args.top_k
        # An uneven number of tokens on each rank, with magnitudes that differ by token.
        self.tokens = [max(args.tokens - 3 * rank, 1) for rank in range(args.ranks)]
        self.x, self.ids = [], []
        for tokens in self.tokens:
            magnitude = 2.0 ** random.uniform(-3, 3, (tokens, 1))
            self.x.append(to_bf16(random.standard_normal((tokens, args.hidden)) * magnitude))
            ids = [random.permutation(args.experts)[: args.top_k] for _ in range(tokens)]
            self.ids.append(np.array(ids, np.int32).reshape(tokens, args.top_k))
        largest = max(np.abs(from_bf16(x)).max() for x in self.x)
        self.input_scale = np.float32(448 * 6 / largest)

    def write(self, path):
        tensors = {
            "expert_scale": ("F32", np.ones(self.experts, np.float32)),
            "input_scale": ("F32", np.array([self.input_scale], np.float32)),
        }
        for rank in range(self.ranks):
            tensors[f"x.{rank}"] = ("BF16", self.x[rank])
            tensors[f"topk_ids.{rank}"] = ("I32", self.ids[rank])
        write_safetensors(path, tensors)

    def sources(self, rank, expert):
        """Source rank, token and slot of each row of a rank's local expert, in their order."""
        number = rank * (self.experts // self.ranks) + expert
        of = [(source, *where) for source in range(self.ranks) for where in np.argwhere(self.ids[source] == number)]
        return [tuple(int(part) for part in row) for row in of]


class Received:
    """Output of dispatch on one rank."""

    def __init__(self, problem, tensors, rank, name, layout):
        self.name, self.layout, self.rank = name, layout, rank
        self.tokens, self.offsets = tensors[f"tokens.{rank}"], tensors[f"row_offsets.{rank}"]
        self.scales = tensors.get(f"scales.{rank}")
        self.scales_offsets = tensors.get(f"scales_offsets.{rank}")
        self.row_scales = tensors.get(f"row_scales.{rank}")
        self.input_scale = float(problem.input_scale) if name == "nvfp4" else 1.0
        self.experts = [self.of_expert(problem, tensors, expert) for expert in range(len(self.offsets) - 1)]

    def of_expert(self, problem, tensors, expert):
        """Rows of an expert: the first, their number without padding, and the tokens they came from."""
        sources, first = problem.sources(self.rank, expert), int(self.offsets[expert])
        info = tensors[f"src_info.{self.rank}"][first : first + len(sources)]
        if [tuple(row) for row in info] != [row[1:] for row in sources]:
            raise SystemExit(f"{self.name}: rank {self.rank}, expert {expert}: src_info is not in order")
        x = [from_bf16(problem.x[source][token]) for source, token, _ in sources]
        return first, len(sources), np.array(x).reshape(len(sources), problem.hidden)

    def scales_of(self, expert):
        """The scales of an expert's rows as they are stored, [rows, groups]."""
        first, rows, _ = self.experts[expert]
        if self.name == "fp8":
            return self.scales[:, first : first + rows].T
        if self.layout == "row-major":
            return self.scales[first : first + rows]
        r, g = np.arange(rows)[:, None], np.arange(self.scales.shape[1] * 4)[None, :]
        block = first // 128 + int(self.scales_offsets[expert]) + r // 128
        return self.scales[block, g // 4, r % 32, r % 128 // 32, g % 4]

    def decode(self, expert):
        """An expert's rows by the guide's rule, code * scale, and the scale of each element."""
        first, rows, x = self.experts[expert]
        stored = self.tokens[first : first + rows]
        if self.name == "bf16":
            return from_bf16(stored), np.zeros_like(x)
        if "4" in self.name:
            codes = E2M1[np.stack([stored & 15, stored >> 4], axis=-1).reshape(rows, -1)]
        else:
            codes = E4M3[stored]
        scales = self.scales_of(expert)
        if self.name.startswith("mx"):
            scales = 2.0 ** (scales.astype(np.float64) - 127)
        elif self.name.startswith("nv"):
            scales = E4M3[scales] / self.input_scale
        scales = np.asarray(scales, np.float64)
        if self.row_scales is not None:
            scales = scales * from_bf16(self.row_scales[first : first + rows])[:, None]
        scales = np.repeat(scales, GROUP[self.name], axis=1)
        return codes * scales, scales


def bound(name, x, scale):
    """Largest error of an element that the guide states, and a little for f32's rounding."""
    relative, absolute = (2**-4, 2**-10) if name in ("fp8", "mxfp8") else (2**-2, 2**-2)
    if name == "bf16":
        return np.zeros_like(x)
    return np.maximum(relative * np.abs(x), absolute * np.abs(scale)) * (1 + 2**-19)


def replay(args, problem, name, layout):
    """Output of `replay` on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        given, taken = pathlib.Path(folder, "in.safetensors"), pathlib.Path(folder, "out.safetensors")
        problem.write(given)
        command = [args.ferry_tests, "replay", given, taken, "--group", args.group, "--format", name]
        command += ["--scales", layout] if layout else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        tensors = read_safetensors(taken)
    return [Received(problem, tensors, rank, name, layout) for rank in range(problem.ranks)]


def distance(y, wanted):
    return float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted))


def check_dequant(args, problem):
    """Decodes every format and compares each element with its bound."""
    print(f"{'format':<10} {'scales':<10} {'rows':>6} {'outside':>8} {'worst/bound':>12}   |x - decoded| / |x|")
    good = True
    for name, layout in FORMATS:
        rows, outside, worst, errors, tokens = 0, 0, 0.0, [], []
        for received in replay(args, problem, name, layout):
            for expert, (_, count, x) in enumerate(received.experts):
                decoded, scale = received.decode(expert)
                error, most = np.abs(decoded - x), bound(name, x, scale)
                outside += int(np.count_nonzero(~(error <= most)))
                share = np.divide(error, most, out=np.where(error > 0, np.inf, 0.0), where=most > 0)
                worst, rows = max(worst, float(share.max(initial=0))), rows + count
                errors.append(decoded)
                tokens.append(x)
        apart = distance(np.concatenate(errors), np.concatenate(tokens))
        good &= outside == 0 and rows > 0 and apart <= TOKEN_BAR[name]
        print(f"{name:<10} {layout or '-':<10} {rows:>6} {outside:>8} {worst:>12.3f}   {apart:.2e}")
    return good


def dequantise(torch, received):
    """All rows on the GPU as BF16, which holds code * scale exactly, and each row's factor after the product."""
    rows, width = received.tokens.shape
    tokens = torch.from_numpy(received.tokens.copy()).cuda()
    if received.name == "mxfp8":
        codes = tokens.view(torch.float8_e4m3fn).to(torch.float32)
    else:
        table = torch.tensor(E2M1, dtype=torch.float32, device="cuda")
        codes = table[torch.stack([tokens & 15, tokens >> 4], dim=-1).long()].reshape(rows, 2 * width)
    stored = np.zeros((rows, codes.shape[1] // GROUP[received.name]), np.uint8)
    for expert, (first, count, _) in enumerate(received.experts):
        stored[first : first + count] = received.scales_of(expert)
    scales = torch.from_numpy(stored).cuda()
    if received.name.startswith("mx"):
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    else:
        scales = scales.view(torch.float8_e4m3fn).to(torch.float32)
    after = torch.full((rows, 1), 1 / received.input_scale, dtype=torch.float32, device="cuda")
    if received.row_scales is not None:
        after = torch.from_numpy(from_bf16(received.row_scales).astype(np.float32)).cuda()[:, None]
    return (codes * scales.repeat_interleave(GROUP[received.name], dim=1)).to(torch.bfloat16), after


def grouped(torch, rows, offsets, weights):
    """[rows, columns] of BF16: each expert's rows times its weights [experts, columns, hidden]."""
    ends = torch.from_numpy(offsets[1:].astype(np.int32)).cuda()
    return torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends, out_dtype=torch.bfloat16)


def scaled(torch, received, codes, scales):
    """[rows, columns] of BF16: FP8 rows times FP8 weights, an expert at a time, padding rows included."""
    tokens = received.tokens.copy()
    row_scales = received.scales.copy()
    for expert, (first, count, _) in enumerate(received.experts):
        # Nothing writes the rows that pad an expert, so they are cleared, as the guide says of outputs.
        tokens[first + count : received.offsets[expert + 1]] = 0
        row_scales[:, first + count : received.offsets[expert + 1]] = 0
    tokens = torch.from_numpy(tokens).cuda().view(torch.float8_e4m3fn)
    row_scales = torch.from_numpy(row_scales).cuda()
    y = torch.zeros((tokens.shape[0], codes.shape[1]), dtype=torch.bfloat16, device="cuda")
    for expert in range(len(received.experts)):
        first, end = int(received.offsets[expert]), int(received.offsets[expert + 1])
        if first == end:
            continue
        of_rows = row_scales[:, first:end].contiguous().t()
        y[first:end] = torch._scaled_mm(
            tokens[first:end], codes[expert].t(), of_rows, scales[expert].t(), out_dtype=torch.bfloat16
        )
    return y


class Weights:
    """[experts, columns, hidden] of a rank, in BF16 and FP8, and as f64."""

    def __init__(self, torch, problem, columns, seed):
        local = problem.experts // problem.ranks
        random = torch.Generator(device="cuda").manual_seed(seed)
        shape = (local, columns, problem.hidden)
        self.bf16 = torch.randn(shape, generator=random, device="cuda").to(torch.bfloat16)
        self.codes = torch.randn(shape, generator=random, device="cuda").mul(64).clamp(-448, 448)
        self.codes = self.codes.to(torch.float8_e4m3fn)
        blocks, groups = -(-columns // 128), -(-problem.hidden // 128)
        # Rows of scales are padded to a multiple of 4, as cuBLASLt requires.
        scales = torch.rand((local, blocks, groups + -groups % 4), generator=random, device="cuda") + 0.5
        self.scales = scales / 64

    def exact(self, torch, expert, fp8):
        if not fp8:
            return self.bf16[expert].double()
        codes = self.codes[expert].double()
        scales = self.scales[expert].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes * scales[: codes.shape[0], : codes.shape[1]]


def multiply(torch, received, weights):
    """The rank's result, f64 on the GPU."""
    if received.name == "fp8":
        return scaled(torch, received, weights.codes, weights.scales).double()
    if received.name == "bf16":
        rows = torch.from_numpy(received.tokens.view(np.int16).copy()).cuda().view(torch.bfloat16)
        return grouped(torch, rows, received.offsets, weights.bf16).double()
    rows, after = dequantise(torch, received)
    return grouped(torch, rows, received.offsets, weights.bf16).double() * after.double()


def check_gemms(args, problem):
    import torch

    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {args.columns} columns")
    print(f"{'format':<10} {'scales':<10} {'rows':>6} {'of rows':>10} {'bar':>9} {'of tokens':>10} {'bar':>9}")
    weights = [Weights(torch, problem, args.columns, args.seed + rank) for rank in range(problem.ranks)]
    good = True
    for name, layout in FORMATS:
        sums, rows = np.zeros(4), 0
        try:
            for received in replay(args, problem, name, layout):
                y = multiply(torch, received, weights[received.rank])
                for expert, (first, count, x) in enumerate(received.experts):
                    matrix = weights[received.rank].exact(torch, expert, name == "fp8").t()
                    for index, source in enumerate([received.decode(expert)[0], x]):
                        wanted = torch.from_numpy(source).cuda() @ matrix
                        apart = y[first : first + count] - wanted
                        sums[2 * index :][:2] += [float(apart.square().sum()), float(wanted.square().sum())]
                    rows += count
        except (RuntimeError, ValueError) as error:
            print(f"{name:<10} {layout or '-':<10} FAILED: {str(error).splitlines()[0]}")
            good = False
            continue
        of_rows, of_tokens = np.sqrt(sums[0] / sums[1]), np.sqrt(sums[2] / sums[3])
        bars = READ_BAR.get(name, 2**-7), TOKEN_BAR[name]
        passed = of_rows <= bars[0] and of_tokens <= bars[1]
        good &= bool(passed)
        figures = f"{of_rows:>10.2e} {bars[0]:>9.2e} {of_tokens:>10.2e} {bars[1]:>9.2e}"
        print(f"{name:<10} {layout or '-':<10} {rows:>6} {figures} {'' if passed else ' FAILED'}")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ferry-tests", default="target/release/ferry-tests", metavar="FILE", help="the program")
    parser.add_argument("--group", default=None, help="kind of group [local; simulated with --check-dequant]")
    parser.add_argument("--check-dequant", action="store_true", help="only decode, with numpy")
    for flag, value in [("ranks", 2), ("tokens", 256), ("experts", 8), ("top-k", 4), ("hidden", 1024)]:
        parser.add_argument(f"--{flag}", type=int, default=value, metavar="N", help=f"[{value}]")
    parser.add_argument("--columns", type=int, default=512, metavar="N", help="columns of the weights [512]")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="[1]")
    args = parser.parse_args()
    args.group = args.group or ("simulated" if args.check_dequant else "local")
    problem = Problem(args)
    good = check_dequant(args, problem) if args.check_dequant else check_gemms(args, problem)
    print("all within their bars" if good else "NOT within their bars")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
