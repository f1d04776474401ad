"""Matrix multiplications of torch, which has them for GPUs alone, of rows as a dispatch wrote them."""

from __future__ import annotations

import pytest
from conftest import on_streams

torch = pytest.importorskip("torch", reason="torch is not installed")
tensors = pytest.importorskip("test_torch").tensors


@pytest.mark.parametrize("layout", ["aligned", "padded"])
def test_matrix_products_read_rows_as_they_are(bench, layout):
    """BF16 rows aligned to 128, and FP8 rows in padded blocks, beside products in f64."""
    options = {"expert_alignment": 128, "clear_padding": True}
    if layout == "padded":
        options = {"format": "fp8", "receive": "padded", "transposed_scales": True}
    of = bench(2, experts=8, hidden=512, max_tokens_per_rank=64, **options)
    if of.device == "cpu":
        pytest.skip("needs --gpu")
    problem = of.problem(3)
    # [experts, columns, hidden]
    weights = torch.randn(4, 256, 512, device=of.device, generator=torch.Generator(of.device).manual_seed(5))

    def aligned(out):
        products = torch._grouped_mm(out.tokens, weights.bfloat16().transpose(1, 2), offs=out.row_offsets[1:])
        return products, out.tokens.double(), weights.bfloat16()

    def padded(out):
        codes, ones = weights.to(torch.float8_e4m3fn), torch.ones(2, 4, device=of.device)
        rows, scales = out.tokens.view(4, -1, 512), out.scales.view(4, 512 // 128, -1).transpose(1, 2)
        products = [
            torch._scaled_mm(*pair, scale, ones.t(), out_dtype=torch.bfloat16)
            for *pair, scale in zip(rows, codes.transpose(1, 2), scales, strict=True)
        ]
        decoded = rows.double() * scales.double().repeat_interleave(128, 2)
        return torch.cat(products), decoded.flatten(0, 1), codes

    def round_of(number):
        rank = of.ranks[number]
        out = rank.dispatch(*tensors(of, problem, number), out=rank.outputs(weights))
        products, rows, factors = (padded if layout == "padded" else aligned)(out)
        torch.cuda.current_stream().synchronize()
        for group, end in enumerate(out.row_ends.tolist()):
            here = slice(int(out.row_offsets[group]), end)
            exact = rows[here] @ factors[group].double().t()
            error = (products[here].double() - exact).norm() / exact.norm()
            assert here.start < end and error < 2**-7, (number, group, error)
        rank.give_up()

    on_streams(of.device, round_of, 2)
