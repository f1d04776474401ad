"""Rows that stay as they came, against the oracle, bit for bit; ids of 64 bits."""

from __future__ import annotations

import ferry_ep as ferry
import numpy as np
import pytest
from conftest import in_threads
from oracle import Kept, bf16, bits, blockwise, decode, e4m3, returned_weights, sums_of_kept
from test_tensors import Wrapped

LAYOUTS = ["view", "strided", "compact"]
#: Format, and whether its scales are transposed.
FORMATS = [("bf16", False), ("fp8", False), ("fp8", True)]
#: Byte of outputs before a call.
POISON = 0xA5


def poisoned(shape, dtype):
    array = np.empty(shape, dtype=dtype)
    array.view(np.uint8)[...] = POISON
    return array


def poisoned_outputs(of, capacity="max", id_type="i32"):
    """Returns outputs for each rank, all of whose bytes are poison."""
    outs = [rank.outputs(np.empty(0), capacity, id_type=id_type) for rank in of.ranks]
    for out in outs:
        for layout in of.plan.output_layout(capacity, id_type=id_type):
            getattr(out, layout.name).view(np.uint8)[...] = POISON
    return outs


def kept_rows(of, problem, capacity=None):
    """Returns the rows that each rank receives."""
    is_compact = of.config.receive == "compact"
    rows = (capacity or of.plan.max_rows) if is_compact else None
    return [Kept(problem, rank, of.config.max_tokens_per_rank, rows) for rank in range(len(of.ranks))]


def check_received(of, problem, rank, kept, output, view=None):
    """Checks every output of a dispatch; rows without a token keep their bits."""
    np.testing.assert_array_equal(output.src_info, kept.src_info)
    np.testing.assert_array_equal(output.ids, kept.ids)
    np.testing.assert_array_equal(output.weights.view(np.uint32), kept.weights.view(np.uint32))
    np.testing.assert_array_equal(output.source_counts, kept.source_counts)
    np.testing.assert_array_equal(output.expert_counts, kept.expert_counts)
    rows, sent = kept.tokens(problem)
    absent = np.setdiff1d(np.arange(output.rows), rows)
    codes, scales = output.tokens, output.scales
    if view is not None:
        assert codes is None
        codes = view.tokens.numpy()
        scales = view.scales.numpy() if view.scales else scales
    if scales is not None and of.config.transposed_scales:
        assert scales.shape == (of.config.hidden // 128, output.rows)
        scales = scales.T
    if of.config.format == "bf16":
        assert scales is None
        np.testing.assert_array_equal(codes[rows], bits(sent))
        decoded = sent
    else:
        wanted, factors = blockwise(sent)
        np.testing.assert_array_equal(codes[rows], wanted)
        np.testing.assert_array_equal(scales[rows], factors)
        decoded = e4m3(wanted) * np.repeat(factors, 128, axis=1)
    if view is None:
        poison = poisoned(codes[absent].shape, codes.dtype)
        np.testing.assert_array_equal(codes[absent], poison)
    library = ferry.decode(of.plan, output, view=view)
    assert len(library) == (len(rows) if of.config.receive == "compact" else output.rows)
    np.testing.assert_array_equal(library[rows], decoded)


def random_bf16(random, shape):
    """Returns BF16 numbers so far apart that an f32 sum depends on its order."""
    return bf16(np.ldexp(random.standard_normal(shape), random.integers(-12, 12, shape)))


def random_answers(random, kept, hidden):
    """Returns random rows of experts, BF16 in f32; those without a token are NaN."""
    answers = np.full((len(kept.src_info), hidden), np.nan, dtype=np.float32)
    rows = list(kept.row_of.values())
    answers[rows] = random_bf16(random, (len(rows), hidden))
    return answers


def bits_or_nan(rows):
    return np.where(np.isnan(rows), np.uint16(0x7FC1), bits(rows))


@pytest.mark.parametrize("id_type", ["i32", "i64"])
@pytest.mark.parametrize(("format", "transposed"), FORMATS)
@pytest.mark.parametrize("receive", LAYOUTS)
def test_rounds_of_each_layout(bench, receive, format, transposed, id_type):
    of = bench(
        3,
        receive=receive,
        format=format,
        transposed_scales=transposed,
        combine_weights=True,
        hidden=256,
        experts=12,
        top_k=4,
    )
    random = np.random.default_rng(5)
    for seed in range(2):
        problem = of.problem(seed, tokens=5 - 2 * seed, holes=0.5)
        x, ids, weights = problem.arguments
        ids = [of_rank.astype({"i32": np.int32, "i64": np.int64}[id_type]) for of_rank in ids]
        outs = poisoned_outputs(of, id_type=id_type)
        of.together(ferry.Dispatch, x, ids, weights, out=outs)
        kept = kept_rows(of, problem)
        views = [rank.view() if receive == "view" else None for rank in of.ranks]
        for rank, output in enumerate(outs):
            check_received(of, problem, rank, kept[rank], output, views[rank])
        answers = [random_answers(random, of_rank, 256) for of_rank in kept]
        given = [random.random(of_rank.ids.shape).astype(np.float32) for of_rank in kept]
        start = [[random_bf16(random, rows.shape) for _ in range(2)] for rows in x]
        results = of.together(
            ferry.Combine,
            [bits_or_nan(rows) for rows in answers],
            initial=[tuple(bits(part) for part in parts) for parts in start],
            received_weights=given,
            out=[poisoned(rows.shape, np.float32) for rows in x],
            weights=[poisoned(of_rank.shape, np.float32) for of_rank in ids],
        )
        for rank, (sums, returned) in enumerate(results):
            wanted = sums_of_kept(rank, kept, answers, start[rank])
            np.testing.assert_array_equal(sums.view(np.uint32), wanted.view(np.uint32))
            wanted = returned_weights(problem, rank, kept, given)
            np.testing.assert_array_equal(returned.view(np.uint32), wanted.view(np.uint32))
        assert of.ranks.check() == [None] * 3
    of.ranks.close()


@pytest.mark.parametrize("receive", LAYOUTS)
def test_ranks_as_threads_with_split_calls(bench, receive):
    """Outputs are allocated, ids are i64, and one tensor begins the sums. The weights that came return."""
    of = bench(2, receive=receive, combine_weights=True, max_sms=2)
    problem = of.problem(4)
    x, ids, _ = problem.arguments
    problem.weights = [np.ones_like(of_rank) for of_rank in problem.weights]
    kept = kept_rows(of, problem)
    random = np.random.default_rng(6)
    answers = [random_answers(random, of_rank, 64) for of_rank in kept]
    start = [random_bf16(random, rows.shape) for rows in x]

    def run(number):
        with of.ranks[number] as rank:
            rank.dispatch_async(x[number], ids[number].astype(np.int64))
            rank.limit_sms(1 + number)
            output = rank.dispatch_wait(like=x[number])
            rank.limit_sms(None)
            assert output.ids.dtype == np.int64
            np.testing.assert_array_equal(output.ids, kept[number].ids)
            np.testing.assert_array_equal(output.weights, kept[number].weights)
            given = {"expert_rows": bits_or_nan(answers[number]), "received_weights": output.weights}
            sums, returned = rank.combine_async(**given, initial=bits(start[number]))
            rank.combine_wait()
            np.testing.assert_array_equal(returned, ids[number] >= 0)
            output = rank.dispatch(x[number], ids[number])
            assert output.ids.dtype == np.int32
            again, returned = rank.combine(**given, initial=(bits(start[number]),))
            np.testing.assert_array_equal(sums, again)
            np.testing.assert_array_equal(returned, ids[number] >= 0)
            return sums

    for rank, sums in enumerate(in_threads(run, 2)):
        np.testing.assert_array_equal(sums, bits(bf16(sums_of_kept(rank, kept, answers, [start[rank]]))))


def test_absent_rows_are_cleared(bench):
    of = bench(2, receive="strided", clear_absent=True, format="fp8", hidden=128)
    problem = of.problem(3, tokens=4, holes=0.6)
    x, ids, weights = problem.arguments
    outs = of.together(ferry.Dispatch, x, ids, weights, out=poisoned_outputs(of))
    for output, kept in zip(outs, kept_rows(of, problem), strict=True):
        absent = (kept.src_info[:, 0] < 0).nonzero()[0]
        assert len(absent) >= 2 and len(kept.row_of) >= 2
        assert not output.tokens[absent].any() and not output.scales[absent].any()
        assert output.tokens[list(kept.row_of.values())].any(axis=1).all()
    of.together(ferry.Combine, [np.zeros((output.rows, 128), dtype=np.uint16) for output in outs])


def test_compact_rows_that_do_not_fit(bench):
    of = bench(2, receive="compact", combine_weights=True)
    problem = of.problem(2, holes=0)
    x, ids, weights = problem.arguments
    capacity = 3
    kept = kept_rows(of, problem, capacity)
    outs = of.together(ferry.Dispatch, x, ids, weights, out=poisoned_outputs(of, capacity))
    for rank, output in enumerate(outs):
        check_received(of, problem, rank, kept[rank], output)
        fault = of.ranks[rank].check()
        assert (fault.kind, fault.region) == ("OutputTooSmall", "Output")
        assert (fault.wanted, fault.saw) == (capacity, kept[rank].sent) and fault.saw > capacity
    random = np.random.default_rng(8)
    answers = [random_answers(random, of_rank, 64) for of_rank in kept]
    given = [random.random(of_rank.ids.shape).astype(np.float32) for of_rank in kept]
    results = of.together(ferry.Combine, [bits_or_nan(rows) for rows in answers], received_weights=given)
    nothing = np.zeros((5, 64), dtype=np.float32)
    for rank, (sums, returned) in enumerate(results):
        np.testing.assert_array_equal(sums, bits(bf16(sums_of_kept(rank, kept, answers, [nothing]))))
        np.testing.assert_array_equal(returned, returned_weights(problem, rank, kept, given))


@pytest.mark.parametrize("format", ["mxfp8:row-major", "nvfp4:row-major", "nvfp4-row:row-major"])
def test_rows_of_other_formats_are_those_of_rows_by_expert(bench, format):
    """A row has the codes and scales of the same token by expert, in its outputs and in a view."""
    sizes = {"format": format, "hidden": 256, "experts": 2, "top_k": 1}
    problem = bench(1, **sizes).problem(9, holes=0)
    x, ids, weights = problem.arguments
    by_expert = bench(1, **sizes)
    (output,) = by_expert.together(ferry.Dispatch, x, ids, weights)
    order = [token for _, _, token, _ in problem.rows(0)]
    wanted = np.empty((5, 256), dtype=np.float32)
    wanted[order] = decode(format, output, 256)
    for receive in LAYOUTS:
        of = bench(1, receive=receive, **sizes)
        (output,) = of.together(ferry.Dispatch, x, ids, weights)
        view = of.ranks[0].view() if receive == "view" else None
        np.testing.assert_array_equal(ferry.decode(of.plan, output, view=view), wanted)


def test_wide_ids_by_expert(bench):
    of = bench(2, options=True)
    problem = of.problem(1)
    x, ids, weights = problem.arguments
    wide = [ids[0].astype(np.int64), Wrapped(ids[1].astype(np.int64))]
    outs = of.together(ferry.Dispatch, x, wide, weights)
    sums = of.together(ferry.Combine, [of.answers(rank, output) for rank, output in enumerate(outs)])
    for rank, combined in enumerate(sums):
        np.testing.assert_array_equal(combined, bits(bf16(problem.sums(rank, "reduced"))))


@pytest.mark.parametrize("number", [2**40 + 1, 4, -2, -(2**63)])
@pytest.mark.parametrize("receive", ["by-expert", *LAYOUTS])
def test_a_wide_id_out_of_range_is_a_fault_as_a_value(bench, receive, number):
    of = bench(2, receive=receive, options=True)
    problem = of.problem(1, holes=0)
    x, ids, _ = problem.arguments
    ids = [of_rank.astype(np.int64) for of_rank in ids]
    ids[1][3, 1] = number
    outs = of.together(ferry.Dispatch, x, ids)
    assert of.ranks[0].check() is None
    fault = of.ranks[1].check()
    assert (fault.kind, fault.index, fault.slot, fault.is_input) == ("InvalidExpert", 3, 1, True)
    assert fault.saw == number
    # The slot is not routed.
    problem.ids[1][3, 1] = -1
    if receive != "by-expert":
        for output, kept in zip(outs, kept_rows(of, problem), strict=True):
            np.testing.assert_array_equal(output.ids, kept.ids)


def test_prepared_calls_of_device_memory(bench):
    of = bench(1, receive="strided", combine_weights=True)
    problem = of.problem(7, holes=0)
    rank = of.ranks[0]
    x, ids, weights = problem.arguments

    def on_device(array, kind):
        memory = rank.empty(array.shape, kind)
        memory.copy_from(array)
        return memory

    given = on_device(x[0], "bf16"), on_device(ids[0].astype(np.int64), "i64"), on_device(weights[0], "f32")
    out, combined = rank.outputs(id_type="i64"), rank.combined()
    returned, other = rank.empty((5, 2), "f32"), rank.empty((5, 2), "f32")
    dispatch = rank.prepare_dispatch(*given, out=out)
    combine = rank.prepare_combine(
        out.tokens, out=combined, initial=given[0], received_weights=out.weights, weights=returned
    )
    for into in (returned, other):
        dispatch()
        combine(0, 0, 0, 0, into.address)
        assert rank.synchronize() is None
        np.testing.assert_array_equal(out.ids.numpy(), ids[0])
        np.testing.assert_array_equal(into.numpy(), weights[0])
        np.testing.assert_array_equal(combined.numpy(), bits(bf16(problem.x[0] + problem.x[0])))


def refused(error, call, match):
    with pytest.raises(error, match=match) as raised:
        call()
    return raised.value


def test_wrong_tensors_of_a_dispatch(bench):
    of = bench(1, receive="strided")
    rank = of.ranks[0]
    (x,), (ids,), _ = of.problem(1).arguments
    wide = ids.astype(np.int64)
    error = refused(ferry.TensorError, lambda: rank.dispatch(x, wide, out=rank.outputs(x)), "tensor ids")
    assert (error.name, error.given) == ("ids", "i32") and "i64, as in topk_ids" in error.wanted
    out = rank.outputs(x, id_type="i64")
    error = refused(ferry.TensorError, lambda: rank.dispatch(x, ids, out=out), "tensor ids")
    assert (error.name, error.given) == ("ids", "i64") and "i32, as in topk_ids" in error.wanted
    for name in ("ids", "weights", "src_info", "source_counts", "expert_counts", "tokens"):
        out = rank.outputs(x)
        setattr(out, name, None)
        error = refused(ferry.TensorError, lambda out=out: rank.dispatch(x, ids, out=out), f"tensor {name}")
        assert error.name == name and error.given == "none"
        out = rank.outputs(x)
        setattr(out, name, getattr(out, name)[:-1])
        error = refused(ferry.TensorError, lambda out=out: rank.dispatch(x, ids, out=out), f"tensor {name}")
        assert error.name == name and "shape" in error.wanted
    out = rank.outputs(x)
    out.row_offsets = np.zeros(3, dtype=np.uint32)
    error = refused(ferry.TensorError, lambda: rank.dispatch(x, ids, out=out), "tensor row_offsets")
    assert "receive strided" in error.wanted
    error = refused(ferry.CapacityError, lambda: rank.outputs(x, 4), "rows")
    assert (error.field, error.value) == ("rows", "4") and "receive is strided" in error.rule
    refused(ferry.ArgumentError, lambda: rank.outputs(x, id_type="i8"), 'id_type is "i8"')
    error = refused(ferry.TensorError, lambda: rank.dispatch(x, ids.astype(np.int8)), "tensor topk_ids")
    assert error.given == "int8"
    assert rank.round == "idle"


def test_wrong_tensors_of_a_combine(bench):
    of, by_expert = bench(1, receive="compact", combine_weights=True), bench(1)
    (x,), (ids,), _ = of.problem(1).arguments
    rank = of.ranks[0]
    output = rank.dispatch(x, ids)
    good = {"expert_rows": output.tokens, "received_weights": output.weights, "initial": x}

    def wrong(error, match, of=rank, **changes):
        return refused(error, lambda: of.combine(**(good | changes)), match)

    error = wrong(ferry.TensorError, "tensor received_weights", received_weights=None)
    assert "combine_weights is true" in error.wanted and error.given == "none"
    error = wrong(ferry.TensorError, "tensor received_weights", received_weights=output.weights[:-1])
    assert (error.wanted, error.given) == ("shape [5, 2]", "[4, 2]")
    error = wrong(ferry.TensorError, "tensor weights", weights=np.zeros((5, 3), dtype=np.float32))
    assert (error.wanted, error.given) == ("shape [5, 2]", "[5, 3]")
    error = wrong(ferry.TensorError, r"tensor initial\[0\]", initial=x.astype(np.float32))
    assert error.given == "f32"
    error = wrong(ferry.TensorError, r"tensor initial\[1\]", initial=(x, x[:-1]))
    assert (error.wanted, error.given) == ("shape [5, 64]", "[4, 64]")
    error = wrong(ferry.TensorError, "tensor initial", initial=(x, x, x))
    assert (error.wanted, error.given) == ("at most 2 tensors", "3")
    error = wrong(ferry.TensorError, "tensor row_weights", row_weights=np.ones(5, dtype=np.float32))
    assert "receive is compact" in error.wanted
    assert rank.round == "dispatched"
    rank.combine(**good)
    other = by_expert.ranks[0]
    good = {"expert_rows": other.dispatch(x, ids).tokens}
    error = wrong(ferry.TensorError, "tensor initial", of=other, initial=x)
    assert "receive is by-expert" in error.wanted
    rows = np.zeros((len(good["expert_rows"]), 2), dtype=np.float32)
    error = wrong(ferry.TensorError, "tensor received_weights", of=other, received_weights=rows)
    assert "combine_weights is false" in error.wanted
    other.combine(**good)


def test_a_plan_refuses_what_a_layout_excludes():
    group = ferry.Group.simulated(2)
    sizes = {"experts": 4, "top_k": 2, "hidden": 128, "max_tokens_per_rank": 2}
    for changes, texts in (
        ({"receive": "view", "combine": "exact"}, ("receive is view", "combine is exact")),
        ({"receive": "compact", "skip_a2a": True}, ("receive is compact", "skip_a2a is true")),
        ({"receive": "strided", "shared_expert": True}, ("receive is strided", "shared_expert is true")),
        ({"receive": "view", "format": "mxfp8:tiled"}, ("receive is view", "format is mxfp8:tiled")),
        ({"receive": "compact", "clear_absent": True}, ("receive is compact", "clear_absent is true")),
        ({"combine_weights": True}, ("receive is by-expert", "combine_weights is true")),
        ({"receive": "view", "transposed_scales": True}, ("transposed_scales is true", "format is bf16")),
    ):
        error = refused(
            ferry.PlanError, lambda of=changes: ferry.Plan(group, ferry.Config(**sizes, **of)), "is"
        )
        assert len(error.problems) == 1 and all(text in str(error) for text in texts), error
    refused(
        ferry.ArgumentError,
        lambda: ferry.Plan(group, ferry.Config(**sizes, receive="by-token")),
        "receive is 'by-token', but there are by-expert, ",
    )


def test_layouts_of_outputs(bench):
    of = bench(2, receive="compact", format="fp8", hidden=128)
    names = ["tokens", "scales", "src_info", "ids", "weights", "source_counts", "expert_counts"]
    layouts = of.plan.output_layout(7, id_type="i64")
    assert [layout.name for layout in layouts] == names
    assert layouts[0] == ferry.TensorLayout("tokens", "e4m3", [7, 128], 7 * 128, 16)
    assert layouts[3] == ferry.TensorLayout("ids", "i64", [7, 2], 7 * 2 * 8, 8)
    assert "shape=[7, 2]" in repr(layouts[3])
    assert of.plan.output_layout() == of.plan.output_layout("max", id_type="i32")
    assert of.plan.output_layout()[0].shape == [10, 128]
    view = bench(2, receive="view")
    assert "tokens" not in [layout.name for layout in view.plan.output_layout()]
    assert view.ranks[0].outputs(np.empty(0)).src_info.shape == (10, 2)
