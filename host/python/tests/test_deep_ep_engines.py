"""DeepEP's ``Buffer`` over Ferry, called as engines call it: which arguments, which results they read.

Written after vLLM's ``DeepEPHTPrepareAndFinalize``, SGLang's ``_DeepEPDispatcherImplNormal`` and Megatron's
``fused_a2a``, with layers of our own around the calls.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
deep_ep = pytest.importorskip("ferry_ep.deep_ep")
rig = pytest.importorskip("deep_ep_rig")
from deep_ep_rig import Tokens, on_host, same  # noqa: E402
from ferry_ep.deep_ep.utils import EventHandle, EventOverlap  # noqa: E402


def expert(x, number):
    """The output of an expert, in f32."""
    return torch.tanh(x.float() * (1 + number / 8)) + number / 4


def layer(rows, ids, weights, first):
    """The sums of a rank's experts for each row, with the weights applied. ``ids`` are global; others than
    this rank's are not evaluated.
    """
    made = torch.zeros(rows.shape, device=rows.device)
    for slot in range(ids.shape[1]):
        for number in ids[:, slot].unique().tolist():
            if first <= number < first + LOCAL:
                here = ids[:, slot] == number
                made[here] += expert(rows[here], number) * weights[here, slot, None]
    return made.bfloat16()


#: Experts of a rank.
LOCAL = 4


def check_layer(tokens, rank, sums):
    """Compares the sums of a layer with f64, within the roundings to BF16 of each part and of the sum."""
    wanted = torch.zeros(tokens.x[rank].shape, dtype=torch.float64)
    bound = torch.full_like(wanted, 1e-30)
    for token, ids in enumerate(tokens.ids[rank].tolist()):
        for slot, number in enumerate(ids):
            if number >= 0:
                part = expert(tokens.x[rank][token], number).double() * tokens.weights[rank][token, slot]
                wanted[token] += part
                bound[token] += part.abs()
    assert ((on_host(sums).double() - wanted).abs() <= bound * (2 * 2**-8 + 2**-16)).all()


class Vllm:
    """A layer of vLLM: receives with an event, and finalizes into an output of its own."""

    def __init__(self, buffer, rank, experts):
        self.buffer, self.rank, self.experts = buffer, rank, experts
        self.handles = [None, None]

    def prepare(self, batch, x, ids, weights, is_async):
        before = None if is_async else self.buffer.capture()
        per_rank, per_node, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(
            topk_idx=ids,
            num_experts=self.experts,
            previous_event=before,
            async_finish=False,
            allocate_on_comm_stream=False,
        )
        rows, got_ids, got_weights, counts, handle, event = self.buffer.dispatch(
            x=x,
            handle=None,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            expert_alignment=1,
            config=deep_ep.Buffer.get_dispatch_config(2),
            previous_event=before,
            async_finish=is_async,
            allocate_on_comm_stream=False,
        )
        self.handles[batch] = handle
        assert (event.event is not None) == is_async
        if event.event is not None:
            event.current_stream_wait()
        first = self.rank * LOCAL
        elsewhere = self.experts - 1 if first == 0 else 0
        got_ids = torch.where(got_ids == -1, elsewhere, got_ids + first)
        assert torch.tensor(counts, dtype=torch.int32).shape == (LOCAL,)
        return layer(rows, got_ids, got_weights, first), counts

    def finalize(self, batch, answers, output, is_async):
        combined, _, event = self.buffer.combine(
            x=answers,
            handle=self.handles[batch],
            topk_weights=None,
            config=deep_ep.Buffer.get_combine_config(2),
            previous_event=None if is_async else self.buffer.capture(),
            async_finish=is_async,
            allocate_on_comm_stream=False,
        )
        if event.event is not None:
            event.current_stream_wait()
        output.copy_(combined, non_blocking=True)


@pytest.mark.parametrize("is_async", [True, False])
def test_vllm(world, is_async):
    of = world(2)
    batches = [Tokens(70 + at, of, counts, top_k=3) for at, counts in enumerate([[5, 7], [0, 3]])]

    def run(rank):
        engine = Vllm(of.buffer(rank, num_qps_per_rank=1), rank, 2 * LOCAL)
        for order in ([0], [0, 1], [1, 0]):  # alone, then two micro-batches at a time
            answers = {at: engine.prepare(at, *batches[at].given(rank), is_async) for at in order}
            for at in order:
                output = torch.empty(batches[at].x[rank].shape, dtype=torch.bfloat16, device=of.device)
                engine.finalize(at, answers[at][0], output, is_async)
                check_layer(batches[at], rank, output)
                assert answers[at][1] == batches[at].received(rank)["counts"]
        engine.buffer.destroy()

    of.run(run)
    assert of.communicators == 2


@pytest.mark.parametrize("is_async", [True, False])
def test_sglang(world, is_async):
    of = world(2)
    batches = [Tokens(80 + at, of, counts, top_k=3) for at, counts in enumerate([[5, 7], [4, 0], [6, 6]])]

    def run(rank):
        config = deep_ep.Buffer.get_dispatch_config(2)
        size = config.get_nvl_buffer_size_hint(64 * 2, 2)
        buffer = deep_ep.Buffer(
            rig.Member(rank, 2),
            size,
            config.get_rdma_buffer_size_hint(64 * 2, 2),
            low_latency_mode=False,
            num_qps_per_rank=20,
            allow_mnnvl=True,
            connect=of.connect,
        )
        for tokens in batches:
            x, ids, weights = tokens.given(rank)
            before = deep_ep.Buffer.capture() if is_async else None
            per_rank, per_node, per_expert, is_in_rank, before = buffer.get_dispatch_layout(
                ids,
                2 * LOCAL,
                previous_event=before,
                async_finish=is_async,
                allocate_on_comm_stream=before is not None,
            )
            rows, got_ids, got_weights, counts, handle, event = buffer.dispatch(
                x,
                topk_idx=ids,
                topk_weights=weights,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                previous_event=before,
                async_finish=is_async,
                allocate_on_comm_stream=(before is not None) and is_async,
                expert_alignment=128,
                config=None,
            )
            event.current_stream_wait() if is_async else ()
            # What it records for the balance of experts, and what its kernels take.
            same(per_rank, tokens.layout(rank)[0])
            same(per_expert, tokens.layout(rank)[1])
            assert counts == [-(-count // 128) * 128 for count in tokens.received(rank)["counts"]]
            same(got_ids, tokens.received(rank)["ids"])
            first = rank * LOCAL
            answers = layer(rows, torch.where(got_ids < 0, -1, got_ids + first), got_weights, first)
            before = deep_ep.Buffer.capture() if is_async else None
            combined, _, event = buffer.combine(
                answers,
                handle,
                async_finish=is_async,
                previous_event=before,
                allocate_on_comm_stream=before is not None,
                config=None,
            )
            event.current_stream_wait() if is_async else ()
            check_layer(tokens, rank, combined)

    of.run(run)


class Dispatch(torch.autograd.Function):
    """Megatron's dispatch: a combine is its backward pass."""

    @staticmethod
    def forward(ctx, x, ids, weights, experts, buffer, is_async):
        before = EventOverlap(EventHandle()) if is_async else None
        options = {"async_finish": is_async, "allocate_on_comm_stream": is_async}
        *layout, event = buffer.get_dispatch_layout(ids, experts, previous_event=before, **options)
        names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert")
        rows, got_ids, got_weights, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            previous_event=event,
            **dict(zip((*names, "is_token_in_rank"), layout, strict=True)),
            **options,
        )
        if is_async:
            event.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.options = buffer, handle, options
        return rows, got_ids, got_weights, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, rows, ids, weights, counts, handle):
        before = EventOverlap(EventHandle()) if ctx.options["async_finish"] else None
        x, weights, event = ctx.buffer.combine(
            rows.contiguous(), ctx.handle, topk_weights=weights.float(), previous_event=before, **ctx.options
        )
        if event.event is not None:
            event.current_stream_wait()
        return x, None, weights, None, None, None


class Combine(torch.autograd.Function):
    """Megatron's combine: a dispatch with the handle is its backward pass."""

    @staticmethod
    def forward(ctx, rows, handle, buffer, is_async):
        before = EventOverlap(EventHandle()) if is_async else None
        ctx.options = {"async_finish": is_async, "allocate_on_comm_stream": is_async}
        sums, _, event = buffer.combine(rows, handle=handle, previous_event=before, **ctx.options)
        if is_async:
            event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return sums

    @staticmethod
    def backward(ctx, sums):
        before = EventOverlap(EventHandle()) if ctx.options["async_finish"] else None
        rows, *_, event = ctx.buffer.dispatch(
            sums.contiguous(), handle=ctx.handle, previous_event=before, **ctx.options
        )
        if event.event is not None:
            event.current_stream_wait()
        return rows, None, None, None


@pytest.mark.parametrize("is_async", [True, False])
def test_megatron_forward_and_backward(world, is_async):
    """Two layers, so that handles are used again after other rounds; gradients beside those of one rank."""
    of = world(2)
    batches = [Tokens(90 + at, of, [5, 4], top_k=2, hidden=16) for at in range(2)]

    def network(x, weights, route):
        for at, tokens in enumerate(batches):
            x = x + route(at, tokens, x, weights[at])
        return x

    def run(rank):
        config = deep_ep.Buffer.get_dispatch_config(2)
        buffer = deep_ep.Buffer(
            rig.Member(rank, 2), config.get_nvl_buffer_size_hint(32, 2), 0, connect=of.connect
        )

        def through_buffer(at, tokens, x, weights):
            ids = tokens.given(rank)[1]
            rows, got_ids, got_weights, counts, handle = Dispatch.apply(
                x, ids, weights, 2 * LOCAL, buffer, is_async
            )
            assert counts.tolist() == tokens.received(rank)["counts"]
            weight = torch.where(got_ids >= 0, got_weights, 0).sum(1, keepdim=True)
            answers = (torch.tanh(rows.float()) * weight).bfloat16()
            return Combine.apply(answers, handle, buffer, is_async)

        def alone(at, tokens, x, weights):
            parts = []
            for to in range(2):
                is_here = tokens.is_here(rank, to)
                weight = torch.where(is_here, weights, 0).sum(1, keepdim=True)
                part = (torch.tanh(x.float()) * weight).bfloat16()
                parts.append(torch.where(is_here.any(1, keepdim=True), part, 0).float())
            return sum(parts).bfloat16()

        results = []
        for route, device in ((through_buffer, of.device), (alone, "cpu")):
            x = batches[0].x[rank].to(device).requires_grad_()
            weights = [each.weights[rank].to(device).requires_grad_() for each in batches]
            y = network(x, weights, route)
            y.float().square().sum().backward()
            results.append((y.detach(), x.grad, *(each.grad for each in weights)))
        for given, wanted in zip(*results, strict=True):
            assert torch.allclose(on_host(given).float(), wanted.float(), rtol=2**-5, atol=2**-5)

    of.run(run)
