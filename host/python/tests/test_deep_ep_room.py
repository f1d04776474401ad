"""Windows of ``ferry_ep.deep_ep`` have room for the most that any rank brings, or is given room for."""

from __future__ import annotations

import dataclasses

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
deep_ep = pytest.importorskip("ferry_ep.deep_ep")
rig = pytest.importorskip("deep_ep_rig")
from deep_ep_rig import Tokens, by_rank, check_received, dispatch, encoded, same  # noqa: E402


def layer(buffer, tokens, rank, **options):
    """A round of a rank's tokens, of which no bit is lost."""
    received = dispatch(buffer, *tokens.given(rank), tokens.experts, **options)
    handle = check_received(tokens, rank, received)
    same(buffer.combine(tokens.answers(rank, received[0]), handle)[0], tokens.sums(rank))
    return handle


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("numbers", [[7, 0], [0, 7]])
def test_ranks_bring_different_numbers_to_a_buffer_without_bytes(world, numbers, has_ids):
    of = world(2)
    first, most, over = Tokens(1, of, numbers), Tokens(2, of, [7, 7]), Tokens(3, of, [8, 8])

    def run(rank):
        buffer = of.buffer(rank, 0)
        if has_ids:
            layer(buffer, first, rank)
        else:
            rows, *_, handle, _ = by_rank(buffer, first, rank)
            buffer.combine(rows, handle)
            return
        layer(buffer, most, rank)
        # An open round is not touched by a call that is refused.
        rows, *_, handle, _ = dispatch(buffer, *most.given(rank), most.experts)
        for _ in range(2):
            with pytest.raises(ferry.ArgumentError) as raised:
                dispatch(buffer, *over.given(rank), over.experts)
            for part in ("x has 8 tokens", "room for 7", "brought 7", "room for 0", "TOKENS is not set"):
                assert part in str(raised.value)
        same(buffer.combine(most.answers(rank, rows), handle)[0], most.sums(rank))
        assert buffer.runtime.communicators[-1].plan.config.max_tokens_per_rank == 7
        buffer.destroy()

    of.run(run)


def test_no_rank_brings_any(world):
    of = world(2)
    none, one = Tokens(1, of, [0, 0]), Tokens(2, of, [1, 0])

    def run(rank):
        buffer = of.buffer(rank, 0)
        for tokens in (none, one):
            layer(buffer, tokens, rank)
        buffer.destroy()

    of.run(run)


def test_a_first_call_without_memory_for_its_window_can_be_made_smaller(world):
    of = world(2)
    small, large = Tokens(1, of, [2, 3]), Tokens(2, of, [9, 9])
    connect = of.connect

    def has_no_memory(config, member):
        if config.max_tokens_per_rank > 8:
            raise ferry.DeviceError("no memory is left")
        return connect(config, member)

    of.connect = has_no_memory

    def run(rank):
        buffer = of.buffer(rank, 0)
        with pytest.raises(ferry.DeviceError):
            dispatch(buffer, *large.given(rank), large.experts)
        layer(buffer, small, rank)
        with pytest.raises(ferry.ArgumentError, match="room for 3"):
            dispatch(buffer, *large.given(rank), large.experts)
        buffer.destroy()

    of.run(run)


@pytest.mark.parametrize("by", ["bytes", "setting"])
def test_one_rank_has_room_for_more(world, by):
    of = world(2)
    first, later = Tokens(1, of, [2, 3]), Tokens(2, of, [9, 9])
    plan = deep_ep.tuning.plan_of(first.experts, first.top_k, 64, 9)
    enough = ferry.Plan(ferry.Group.simulated(2), plan).window_bytes

    def run(rank):
        buffer = of.buffer(rank, enough if by == "bytes" and rank else 0)
        if by == "setting" and rank:
            buffer.runtime._settings = dataclasses.replace(buffer.runtime._settings, max_tokens=9)
        for tokens in (first, later):
            layer(buffer, tokens, rank)
        with pytest.raises(ferry.ArgumentError, match=r"x has 10 tokens, .*brought 3, num_nvl_bytes"):
            given = [torch.cat([each, each[:1]]) for each in later.given(rank)]
            dispatch(buffer, *given, later.experts)
        assert buffer.runtime.communicators[-1].plan.config.max_tokens_per_rank == 9
        buffer.destroy()

    of.run(run)


def test_each_size_and_format_has_room_for_its_first_call(world):
    """A backward pass sends BF16 rows for a handle of FP8 ones, which were the first of their format."""
    of = world(2)
    tokens, wide = Tokens(1, of, [6, 4], hidden=128), Tokens(2, of, [3, 5], hidden=256)

    def run(rank):
        buffer = of.buffer(rank, 0)
        x, ids, weights = tokens.given(rank)
        _, *_, handle, _ = dispatch(buffer, encoded(x, "f32"), ids, weights, tokens.experts)
        for each in (tokens, wide):
            if each is tokens:
                same(buffer.dispatch(x, handle=handle)[0], tokens.received(rank)["x"])
            else:
                layer(buffer, each, rank)
        buffer.destroy()

    of.run(run)
    rooms = {(each.hidden, each.format): each.max_tokens_per_rank for each, _ in of.made if each.top_k == 2}
    assert rooms == {(128, "fp8"): 6, (128, "bf16"): 6, (256, "bf16"): 5}


@pytest.mark.parametrize("worst", [False, True])
def test_the_profile_run_of_vllm(world, worst):
    """As many tokens on each rank as vLLM schedules, for a buffer that has room for a part of them."""
    of = world(2, patience=60)
    most = 16384
    options = {"top_k": 1, "hidden": 8, "experts": 2}
    tokens, decode = Tokens(1, of, [most, most], **options), Tokens(2, of, [3, 0], **options)

    def run(rank):
        buffer = of.buffer(rank)
        bytes_ = {"num_worst_tokens": 2 * most} if worst else {}
        x, ids, weights = tokens.given(rank)
        rows, _, _, _, handle, _ = dispatch(buffer, x, ids, weights, 2, **bytes_)
        sums, *_ = buffer.combine(rows, handle)
        wanted = torch.where(ids >= 0, x, 0)
        same(sums, wanted)
        layer(buffer, decode, rank)
        room = buffer.runtime.communicators[-1].plan.config.max_tokens_per_rank
        assert room == most
        buffer.destroy()

    of.run(run)


def test_a_setting_that_no_plan_has_is_an_error_of_the_plan(world, monkeypatch):
    of = world(1)
    tokens = Tokens(1, of, [3])
    for asked in ("1000000000", "10000000000"):
        monkeypatch.setenv("FERRY_DEEP_EP_MAX_TOKENS", asked)
        buffer = of.buffer(0)
        with pytest.raises(ferry.PlanError, match="max_tokens_per_rank"):
            dispatch(buffer, *tokens.given(0), tokens.experts)
        buffer.destroy()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_hint_of_sglang_counts_one_byte_an_element(ranks):
    hint = deep_ep.Config(20).get_nvl_buffer_size_hint(7168 * 1, ranks)
    for top_k, experts in ((8, 256), (9, 264), (6, 160)):
        plan = deep_ep.tuning.plan_of(experts, top_k, 7168, 1, format="fp8")
        assert deep_ep.tuning.fitting_tokens(hint, ranks, plan) >= 4096


def test_a_graph_cannot_have_the_first_call_of_its_sizes(world):
    of = world(1)
    if of.gpu is None:
        pytest.skip("needs a GPU")
    tokens = Tokens(1, of, [4])

    def run(rank):
        buffer = of.buffer(rank)
        given = tokens.given(rank)
        layout = buffer.get_dispatch_layout(given[1], tokens.experts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(ferry.ArgumentError, match="before the capture"):
            x, ids, weights = given
            per_rank, _, per_expert, is_in_rank, _ = layout
            buffer.dispatch(
                x,
                topk_idx=ids,
                topk_weights=weights,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                num_worst_tokens=4,
            )
        layer(buffer, tokens, rank)
        buffer.destroy()

    of.run(run)
