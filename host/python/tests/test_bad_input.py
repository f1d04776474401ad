"""Bad input: an exception names argument and value, and nothing was sent."""

from __future__ import annotations

import pickle

import ferry_ep as ferry
import numpy as np
import pytest
from ferry_ep.core import _ferry


@pytest.fixture
def of(bench):
    return bench(2)


def refused(of, error, match, **changes):
    """Checks that a dispatch of rank 0 with these arguments is refused, and that the round stays idle."""
    x, ids, weights = of.problem(1).arguments
    arguments = {"x": x[0], "topk_ids": ids[0], "topk_weights": weights[0]} | changes
    with pytest.raises(error, match=match) as raised:
        of.ranks[0].dispatch_async(**arguments)
    assert of.ranks[0].round == "idle"
    return raised.value


def test_tensors_are_named(of):
    x, ids, weights = of.problem(1).arguments
    error = refused(of, ferry.TensorError, "tensor x", x=x[0].astype(np.float64))
    assert (error.name, error.given) == ("x", "float64")
    assert all(word in error.wanted for word in ("torch.bfloat16", "uint16", "to_bf16"))
    error = refused(of, ferry.TensorError, "to_bf16", x=x[0].astype(np.float32))
    assert (error.name, error.given) == ("x", "f32")
    for name, given in (("x", x[0]), ("topk_ids", ids[0]), ("topk_weights", weights[0])):
        swapped = given.astype(given.dtype.newbyteorder())
        error = refused(of, ferry.TensorError, f"tensor {name}: .*byte order", **{name: swapped})
        assert error.given == f"type {swapped.dtype.str}"
    error = refused(of, ferry.TensorError, "tensor topk_ids", topk_ids=ids[0].astype(np.uint32))
    assert (error.wanted, error.given) == ("elements of i32 or i64", "u32")
    error = refused(of, ferry.TensorError, "tensor topk_ids", topk_ids=ids[0].astype(np.int64))
    assert (error.name, error.given) == (
        "topk_ids",
        "i64",
    ) and "pass i32, or set options to true" in error.wanted
    error = refused(of, ferry.TensorError, "tensor topk_ids", topk_ids=ids[0][:, :1])
    assert error.wanted == "shape [5, 2]"
    error = refused(of, ferry.TensorError, "tensor topk_weights", topk_weights=weights[0].T)
    assert error.name == "topk_weights"
    error = refused(of, ferry.TensorError, "tensor topk_weights", topk_weights=weights[0][::-1])
    assert "contiguous" in error.wanted
    error = refused(of, ferry.TensorError, "tensor x", x=x[0][0])
    assert error.wanted == "2 dimensions"
    error = refused(of, ferry.TensorError, "tensor x", x=[[1.0]])
    assert error.given == "list"
    many = np.zeros((6, 64), dtype=np.uint16), np.zeros((6, 2), dtype=np.int32)
    error = refused(of, ferry.TensorError, "6 tokens", x=many[0], topk_ids=many[1], topk_weights=None)
    assert "max_tokens_per_rank" in error.wanted and error.given == "6"
    refused(of, ferry.ArgumentError, "takes no input scale", input_scale=np.ones(1, dtype=np.float32))
    refused(of, ferry.ArgumentError, "options", tokens_on_device=np.ones(1, dtype=np.uint32))
    refused(of, ferry.ArgumentError, "stream is 'fast'", stream="fast")


def test_outputs_are_checked(of):
    x, ids, _ = of.problem(1).arguments
    rank = of.ranks[0]
    out = rank.outputs(x[0])
    out.tokens = out.tokens[:-1]
    with pytest.raises(ferry.TensorError, match="tensor tokens: wanted shape"):
        rank.dispatch(x[0], ids[0], out=out)
    out = rank.outputs(x[0])
    out.row_offsets = None
    with pytest.raises(ferry.TensorError, match="tensor row_offsets"):
        rank.dispatch(x[0], ids[0], out=out)
    out = rank.outputs(x[0])
    out.src_info.flags.writeable = False
    with pytest.raises(ferry.TensorError, match=r"src_info: .*read-only"):
        rank.dispatch(x[0], ids[0], out=out)
    for capacity in ("most", -1, 2**40):
        with pytest.raises(ferry.ArgumentError, match=r"capacity|rows"):
            rank.outputs(x[0], capacity)
    assert rank.round == "idle"


def test_a_plan_names_all_problems():
    group = ferry.Group.simulated(2)
    with pytest.raises(ferry.PlanError) as raised:
        ferry.Plan(group, ferry.Config(experts=3, top_k=4, hidden=12, max_tokens_per_rank=0, max_sms=0))
    error = raised.value
    fields = {problem.field for problem in error.problems}
    assert fields == {"experts", "top_k", "hidden", "max_tokens_per_rank", "max_sms"}
    assert all(problem.value and problem.rule for problem in error.problems)
    assert isinstance(error, ValueError) and isinstance(error, ferry.FerryError)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": "fp9"}, "format is 'fp9', but there are bf16, "),
        ({"combine": "sum"}, "combine is 'sum', but there are reduced and exact"),
        ({"receive": "by_expert"}, "receive is 'by_expert', but there are by-expert, "),
        ({"deadline": -1.0}, "deadline is -1.0, but it must be"),
        ({"deadline": 0}, "deadline is 0 s, but it must be above zero"),
        ({"deadline": "soon"}, "deadline is 'soon', but it must be a number of seconds"),
        ({"hidden": "wide"}, "hidden is 'wide', but it must be a whole number"),
        ({"experts": "6"}, "experts is '6', but"),
        ({"experts": -2}, "experts is -2"),
        ({"options": "yes"}, "options is 'yes', but it must be True or False"),
        ({"max_sms": 1.5}, "max_sms is 1.5, but it must be a whole number"),
    ],
)
def test_words_of_a_configuration(changes, match):
    group = ferry.Group.simulated(2)
    sizes = {"experts": 4, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 2}
    with pytest.raises(ferry.PlanError, match=match) as raised:
        ferry.Plan(group, ferry.Config(**(sizes | changes)))
    assert [problem.field for problem in raised.value.problems] == list(changes)


def test_words_and_sizes_are_refused_together():
    sizes = {"experts": 3, "top_k": 2, "hidden": 12, "max_tokens_per_rank": 2}
    config = ferry.Config(**sizes, format="fp9", receive="rows", deadline=0)
    with pytest.raises(ferry.PlanError) as raised:
        ferry.Plan(ferry.Group.simulated(2), config)
    fields = {problem.field for problem in raised.value.problems}
    assert fields == {"format", "receive", "experts", "hidden", "deadline"}


def test_multiprocessors_of_later_calls():
    group = ferry.Group.simulated(2)
    config = ferry.Config(experts=4, top_k=2, hidden=64, max_tokens_per_rank=2, receive="view", max_sms=4)
    with ferry.Communicators(group, ferry.Plan(group, config)) as ranks:
        ranks[0].limit_sms(3)
        assert [rank.max_sms for rank in ranks] == [3, 4]
        for refused in (0, 5):
            with pytest.raises(ferry.ArgumentError, match=f"max_sms is {refused}, but"):
                ranks[0].limit_sms(refused)
        for refused in (-1, 2**32, "3", 1.5):
            with pytest.raises(ferry.ArgumentError, match=f"max_sms is {refused!r}, but"):
                ranks[0].limit_sms(refused)
        assert ranks[0].max_sms == 3
        ranks[0].limit_sms(None)
        assert ranks[0].max_sms == 4
    config = ferry.Config(experts=4, top_k=2, hidden=64, max_tokens_per_rank=2)
    with ferry.Communicators(group, ferry.Plan(group, config)) as ranks:
        ranks[0].limit_sms(None)
        with pytest.raises(ferry.ArgumentError, match="receive is by-expert"):
            ranks[0].limit_sms(1)


def test_calls_out_of_order(of):
    x, ids, _ = of.problem(1).arguments
    with pytest.raises(ferry.OrderError, match="combine is out of order"):
        of.together(ferry.Combine, [np.zeros((40, 64), dtype=np.uint16)] * 2)
    of.together(ferry.Dispatch, x, ids)
    with pytest.raises(ferry.OrderError, match="nothing was launched"):
        of.together(ferry.Dispatch, x, ids)
    with pytest.raises(ferry.OrderError, match="cannot be closed"):
        of.ranks[0].close()
    with pytest.raises(ferry.OrderError, match=r"cannot be closed: .*`del` it"):
        of.ranks.close()
    assert not of.ranks[0].closed and not of.ranks[1].closed
    with pytest.raises(ferry.InUseError):
        of.group.close()


def test_sequences_have_a_value_for_each_rank(of):
    x, ids, _ = of.problem(1).arguments
    call = ferry.Dispatch(x[0], ids[0])
    with pytest.raises(ferry.ArgumentError, match="1 calls were given, but the call is for 2 ranks"):
        of.ranks.together([call])
    with pytest.raises(ferry.ArgumentError, match=r"calls is one Dispatch, .*one value for each rank"):
        of.ranks.together(call)
    with pytest.raises(ferry.ArgumentError, match=r"calls is one ndarray, .*one value for each rank"):
        of.ranks.together(np.stack(x))
    with pytest.raises(ferry.ArgumentError, match="3 streams were given"):
        of.ranks.together([call, call], streams=[0, 0, 0])
    with pytest.raises(ferry.ArgumentError, match=r"calls\[1\] is .*but it is a Dispatch or another"):
        of.ranks.together([call, ferry.Dispatch])


def test_calls_together_are_of_one_kind(of):
    x, ids, _ = of.problem(1).arguments
    calls = [ferry.Dispatch(x[0], ids[0]), ferry.DispatchAsync(x[1], ids[1])]
    with pytest.raises(ferry.ArgumentError, match="rank 1 is dispatch_async, and that of the first rank is"):
        of.ranks.together(calls)
    assert [rank.round for rank in of.ranks] == ["idle", "idle"]
    native = of.ranks[0]._end.native
    with pytest.raises(ferry.ArgumentError, match="no call combine_all takes these arguments"):
        _ferry.Call(native, "combine_all")
    x, _ = _ferry.describe("x", x[0], "bf16")
    for name in ("dispatch_counts", "dispatch_wait", "combine_wait", "give_up"):
        with pytest.raises(ferry.ArgumentError, match=f"no call {name} takes these arguments"):
            _ferry.Call(native, name, [x])
    with pytest.raises(ferry.ArgumentError, match="8 tensors were given, and there are 7 arguments"):
        _ferry.Call(native, "dispatch", [x] * 8)
    with pytest.raises(ferry.TensorError, match="tensor topk_ids: wanted 2 dimensions, given none"):
        _ferry.Call(native, "dispatch", [x])


def test_names_of_data_types(of):
    rank = of.ranks[0]
    for given in ("f32", "float32", np.float32, np.dtype("float32")):
        assert rank.empty((2,), given).data_type == "f32"
        assert rank.combined(of.problem(1).arguments[0][0], data_type=given).dtype == np.float32
    x, ids, _ = of.problem(1).arguments
    rows = of.together(ferry.Dispatch, x, ids)
    for given in ("f64", "double", None, 7):
        for use in (
            lambda given=given: rank.empty((2,), given),
            lambda given=given: rank.combined(x[0], data_type=given),
            lambda given=given: of.together(ferry.Combine, [of.tokens for of in rows], data_type=given),
        ):
            with pytest.raises(ferry.ArgumentError, match=r"data_type is .*, but there are bf16, f16"):
                use()
    for shape in ((-1,), "ab", (1.5,), None):
        with pytest.raises(ferry.ArgumentError, match="shape is"):
            rank.empty(shape, "f32")
    assert rank.empty(3, "f32").shape == (3,)


def test_rows_of_a_group(of):
    x, ids, _ = of.problem(1).arguments
    rows = of.together(ferry.Dispatch, x, ids)
    assert rows[0].rows_of(0).start == 0 and rows[0].rows_of(1).stop == rows[0].row_offsets[-1]
    for group in (2, 5, -1):
        with pytest.raises(ferry.ArgumentError, match=f"group is {group}, but there are 2 groups"):
            rows[0].rows_of(group)
    of.together(ferry.Combine, [of.tokens for of in rows])
    # Memory of the device, too.
    assert of.ranks[0].outputs().row_offsets.shape == (3,)
    outputs = [rank.outputs() for rank in of.ranks]
    of.together(ferry.Dispatch, x, ids, out=outputs)
    assert outputs[0].rows_of(1) == rows[0].rows_of(1)


def test_groups_are_of_rows_by_expert(bench):
    of = bench(1, receive="compact")
    with pytest.raises(ferry.ArgumentError, match=r"group is 0, .*only rows by expert"):
        of.ranks[0].outputs().rows_of(0)


def test_bits_and_numbers_are_told_apart(bench):
    bits = ferry.to_bf16(np.ones(2))
    with pytest.raises(ferry.TensorError, match=r"values: wanted numbers.*from_bf16"):
        ferry.to_bf16(bits)
    for given in (np.ones(2), [1.0], [16256], bits.astype(np.int16)):
        with pytest.raises(ferry.TensorError, match="bits: wanted uint16"):
            ferry.from_bf16(given)
    for use in (ferry.to_bf16, ferry.from_bf16):
        for given in (None, "text", object()):
            with pytest.raises(ferry.TensorError, match=r"values|bits"):
                use(given)
    assert ferry.to_bf16([1, 2.0]).tolist() == [16256, 16384] and ferry.to_bf16(True) == 16256
    array = bench(1).ranks[0].empty((2,), "bf16")
    array.copy_from(bits)
    assert ferry.from_bf16(array.numpy()).tolist() == [1.0, 1.0]
    for use in (ferry.to_bf16, ferry.from_bf16):
        with pytest.raises(ferry.TensorError, match=r"\.numpy\(\) copies it, given a DeviceArray"):
            use(array)


def test_weights_and_modes(of):
    x, ids, weights = of.problem(1).arguments
    rows = of.together(ferry.Dispatch, x, ids)
    tokens = [output.tokens for output in rows]
    with pytest.raises(ferry.ArgumentError, match="reduced mode"):
        of.together(ferry.Combine, tokens, topk_weights=weights)
    with pytest.raises(ferry.TensorError, match="expert_rows"):
        of.together(ferry.Combine, [tokens[0][:-1], tokens[1]])
    with pytest.raises(ferry.TensorError, match="combined"):
        of.together(ferry.Combine, tokens, out=[np.zeros((5, 64), dtype=np.int32)] * 2)
    with pytest.raises(ferry.ArgumentError, match="options"):
        of.together(ferry.Combine, tokens, data_type="f32")
    of.together(ferry.Combine, tokens)


def test_use_after_close(of):
    x, ids, _ = of.problem(1).arguments
    rank = of.ranks[0]
    array = rank.empty((4,), "f32")
    of.ranks.close()
    of.ranks.close()
    assert rank.closed and "closed" in repr(rank)
    for use in (
        lambda: rank.dispatch(x[0], ids[0]),
        lambda: rank.round,
        lambda: rank.synchronize(),
        lambda: of.together(ferry.Dispatch, x, ids),
        lambda: array.address,
        lambda: array.numpy(),
        lambda: rank.empty((4,), "f32"),
    ):
        with pytest.raises(ferry.ClosedError):
            use()
    of.group.close()
    with pytest.raises(ferry.ClosedError):
        ferry.Communicators(of.group, of.plan)


def test_groups_are_checked():
    for ranks in (0, 65):
        with pytest.raises(ferry.GroupError, match=f"ranks is {ranks}"):
            ferry.Group.simulated(ranks)
    group, other = ferry.Group.simulated(2), ferry.Group.simulated(4)
    plan = ferry.Plan(group, ferry.Config(experts=4, top_k=2, hidden=64, max_tokens_per_rank=2))
    with pytest.raises(ferry.ArgumentError, match="made for 2 ranks"):
        ferry.Communicators(other, plan)
    with pytest.raises(ferry.ArgumentError, match="has the ranks"):
        ferry.Communicator(group, plan)
    with pytest.raises(ferry.GroupError, match="rank 7"):
        group.device(7)


def test_a_machine_without_a_gpu_or_a_build_without_a_feature():
    bootstrap = ferry.Bootstrap.all_gather(lambda data: [data], 0, 1)
    error = ferry.DeviceError if ferry.has_cuda else ferry.NotBuiltError
    # With a GPU and a driver there is nothing to refuse here.
    try:
        group = ferry.Group.local([0])
    except error:
        pass
    else:
        group.close()
        return
    with pytest.raises(error):
        ferry.Group.node(bootstrap, 0)
    if not ferry.has_nvshmem:
        with pytest.raises(ferry.NotBuiltError, match="nvshmem"):
            ferry.Group.nvshmem(bootstrap, 0)


def test_silu_is_checked(of):
    rank = of.ranks[0]
    offsets = np.array([0, 2], dtype=np.uint32)
    with pytest.raises(ferry.ArgumentError, match="columns"):
        rank.silu(np.zeros((2, 6), dtype=np.uint16), offsets)
    with pytest.raises(ferry.TensorError, match="row_offsets"):
        rank.silu(np.zeros((2, 64), dtype=np.uint16), offsets.astype(np.float32))
    with pytest.raises(ferry.ArgumentError, match="limit"):
        rank.silu(np.zeros((2, 64), dtype=np.uint16), offsets, clamp=(1.0, -1.0))


def test_exceptions_can_be_pickled_as_values():
    problem = ferry.Problem("hidden", "7", "it must be even")
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert str(ferry.PlanError("text", [("hidden", "7", "rule")])) == "text"
