"""Bad input: an exception names argument and value, and nothing was sent."""

from __future__ import annotations

import pickle

import ferry_ep as ferry
import numpy as np
import pytest


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
    assert (error.name, error.wanted, error.given) == ("x", "elements of bf16", "float64")
    error = refused(of, ferry.TensorError, "tensor topk_ids", topk_ids=ids[0].astype(np.int64))
    assert (error.name, error.given) == ("topk_ids", "i64") and "options is false" in error.wanted
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
        ({"format": "fp9"}, "no such token format"),
        ({"combine": "sum"}, "no such mode"),
        ({"deadline": -1.0}, "deadline is -1"),
        ({"hidden": "wide"}, "hidden is wide"),
        ({"experts": -2}, "experts is -2"),
    ],
)
def test_words_of_a_configuration(changes, match):
    group = ferry.Group.simulated(2)
    sizes = {"experts": 4, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 2}
    with pytest.raises(ferry.ArgumentError, match=match):
        ferry.Plan(group, ferry.Config(**(sizes | changes)))


def test_multiprocessors_of_later_calls():
    group = ferry.Group.simulated(2)
    config = ferry.Config(experts=4, top_k=2, hidden=64, max_tokens_per_rank=2, receive="view", max_sms=4)
    with ferry.Communicators(group, ferry.Plan(group, config)) as ranks:
        ranks[0].limit_sms(3)
        assert [rank.max_sms for rank in ranks] == [3, 4]
        for refused in (0, 5):
            with pytest.raises(ferry.ArgumentError, match=f"max_sms is {refused}, but"):
                ranks[0].limit_sms(refused)
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
        of.ranks.combine([np.zeros((40, 64), dtype=np.uint16)] * 2)
    of.ranks.dispatch(x, ids)
    with pytest.raises(ferry.OrderError, match="nothing was launched"):
        of.ranks.dispatch(x, ids)
    with pytest.raises(ferry.OrderError, match="cannot be closed"):
        of.ranks[0].close()
    with pytest.raises(ferry.OrderError, match="cannot be closed"):
        of.ranks.close()
    assert not of.ranks[0].closed and not of.ranks[1].closed
    with pytest.raises(ferry.InUseError):
        of.group.close()


def test_sequences_have_a_value_for_each_rank(of):
    x, ids, _ = of.problem(1).arguments
    with pytest.raises(ferry.ArgumentError, match="1 topk_ids were given"):
        of.ranks.dispatch(x, ids[:1])


def test_weights_and_modes(of):
    x, ids, weights = of.problem(1).arguments
    rows = of.ranks.dispatch(x, ids)
    tokens = [output.tokens for output in rows]
    with pytest.raises(ferry.ArgumentError, match="reduced mode"):
        of.ranks.combine(tokens, topk_weights=weights)
    with pytest.raises(ferry.TensorError, match="expert_rows"):
        of.ranks.combine([tokens[0][:-1], tokens[1]])
    with pytest.raises(ferry.TensorError, match="combined"):
        of.ranks.combine(tokens, out=[np.zeros((5, 64), dtype=np.int32)] * 2)
    with pytest.raises(ferry.ArgumentError, match="options"):
        of.ranks.combine(tokens, data_type="f32")
    of.ranks.combine(tokens)


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
        lambda: of.ranks.dispatch(x, ids),
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
