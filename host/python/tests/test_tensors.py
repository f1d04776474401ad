"""Tensors of other libraries, device memory, addresses and prepared calls."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import ferry_ep as ferry
import numpy as np
import pytest
from ferry_ep.core._ferry import arguments_of
from oracle import bf16, bits


class Wrapped:
    """An array of a library that has DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnGpu:
    """An array with __cuda_array_interface__."""

    def __init__(self, array):
        interface = array.__array_interface__
        names = ("shape", "typestr", "data", "strides")
        self.__cuda_array_interface__ = {name: interface[name] for name in names} | {"version": 3}


def test_dlpack(bench):
    of = bench(1)
    problem = of.problem(1)
    x, ids, weights = problem.arguments
    (rows,) = of.together(ferry.Dispatch, [Wrapped(x[0])], [Wrapped(ids[0])], [Wrapped(weights[0])])
    (combined,) = of.together(ferry.Combine, [Wrapped(of.answers(0, rows))])
    np.testing.assert_array_equal(combined, bits(bf16(problem.sums(0, "reduced"))))
    with pytest.raises(ferry.TensorError, match="DLPack type"):
        of.together(ferry.Dispatch, [Wrapped(x[0].astype(np.float64))], ids)


def test_memory_of_another_device_is_refused(bench):
    of = bench(1)
    x, ids, _ = of.problem(1).arguments
    with pytest.raises(ferry.TensorError, match="tensor x: wanted memory of the CPU, given memory of cuda:0"):
        of.ranks[0].dispatch(OnGpu(x[0]), ids[0])


class Immutable(Wrapped):
    """An array of a library whose arrays never change, which DLPack does not say."""

    __module__ = "jaxlib._jax"


def test_read_only_memory_is_no_output(bench):
    of = bench(1, receive="view")
    (x,), (ids,), (weights,) = of.problem(1).arguments
    (rank,) = of.ranks
    frozen = np.zeros_like(x)
    frozen.flags.writeable = False
    marked = OnGpu(np.zeros_like(x))
    marked.__cuda_array_interface__["data"] = (marked.__cuda_array_interface__["data"][0], True)
    # Inputs may be read-only.
    rank.dispatch(Wrapped(frozen), ids, weights)
    view = rank.view().tokens
    for out in (frozen, Wrapped(frozen), marked, Immutable(x.copy()), view):
        with pytest.raises(
            ferry.TensorError, match="combined: wanted memory that can be written, given a read"
        ):
            rank.combine(x, out=out)
    assert rank.round == "dispatched"
    rank.combine(x, out=Wrapped(np.zeros_like(x)))


def test_arrays_that_are_no_longer_there_are_refused(bench):
    of = bench(1)
    (x,), (ids,), (weights,) = of.problem(1).arguments
    (rank,) = of.ranks
    stretched = np.lib.stride_tricks.as_strided(x[1:], (5, 64), x.strides)
    owner = x.copy()
    view = owner[:]
    owner.resize((1, 64), refcheck=False)
    masked = np.ma.MaskedArray(weights, weights > 0.5)
    for name, value in (("x", stretched), ("x", view), ("topk_weights", masked)):
        given = {"x": x, "topk_ids": ids, "topk_weights": weights} | {name: value}
        with pytest.raises(ferry.TensorError, match=rf"{name}: wanted (a view that ends|plain values)"):
            rank.dispatch_async(**given)
    # Views within their memory, and masked arrays without a mask, are arrays as others.
    rank.dispatch_async(np.concatenate([x, x])[2:7], ids, np.ma.MaskedArray(weights))
    rank.dispatch_wait(like=x)


def device_round(of, problem):
    """A round of one rank in memory of its device."""
    rank = of.ranks[0]
    x, ids, weights = problem.arguments
    given = []
    for source, kind in ((x[0], "bf16"), (ids[0], "i32"), (weights[0], "f32")):
        array = rank.empty(source.shape, kind)
        array.copy_from(source)
        given.append(array)
    return rank, given, rank.outputs(), rank.combined()


def test_device_memory(bench):
    of = bench(1)
    problem = of.problem(2, holes=0)
    rank, given, out, combined = device_round(of, problem)
    rank.dispatch(*given, out=out)
    # The answers are the rows themselves.
    rank.combine(out.tokens, out=combined)
    assert rank.synchronize() is None
    np.testing.assert_array_equal(out.expert_ids.numpy(), [0, 1])
    x, weights = problem.x[0], problem.weights[0]
    wanted = bf16(x * weights[:, :1] + x * weights[:, 1:])
    np.testing.assert_array_equal(combined.numpy(), bits(wanted))
    assert "bf16 [5, 64]" in repr(combined)


def test_prepared_calls_take_integers(bench):
    of = bench(1)
    problem, other = of.problem(3, holes=0), of.problem(4, holes=0)
    rank, given, out, combined = device_round(of, problem)
    second = rank.empty((5, 64), "bf16")
    second.copy_from(bits(other.x[0]))
    dispatch = rank.prepare_dispatch(*given, out=out)
    combine = rank.prepare_combine(out.tokens, out=combined)
    results = []
    for address in (0, second.address, given[0].address):
        dispatch(0, address)
        combine()
        assert rank.synchronize() is None
        results.append(combined.numpy())
    np.testing.assert_array_equal(results[0], results[2])
    weights = problem.weights[0]
    wanted = bf16(bf16((other.x[0] * weights[:, :1]) + (other.x[0] * weights[:, 1:])))
    np.testing.assert_array_equal(results[1], bits(wanted))
    x, ids, _ = problem.arguments
    with pytest.raises(ferry.ArgumentError, match="memory of the device"):
        rank.prepare_dispatch(x[0], ids[0], out=out)
    rank.close()
    with pytest.raises(ferry.ClosedError):
        dispatch()


def test_addresses(bench):
    of = bench(1)
    rank = of.ranks[0]
    memory = rank.empty((5, 64), "bf16")
    ids = np.zeros((5, 2), dtype=np.int32)
    tensor = ferry.Tensor(memory.address, "bf16", (5, 64), owner=memory)
    assert (tensor.shape, tensor.strides, tensor.nbytes) == ([5, 64], [64, 1], 640)
    assert "bf16 [5, 64]" in repr(tensor)
    rank.dispatch(tensor, ids)
    with pytest.raises(ferry.ArgumentError, match=r"data_type is .int128."):
        ferry.Tensor(0, "int128", (1,))
    with pytest.raises(ferry.TensorError, match="strides"):
        ferry.Tensor(0, "f32", (1, 2), (1,))


def test_device_memory_keeps_its_communicator_alive(bench):
    group = ferry.Group.simulated(1)
    plan = ferry.Plan(group, ferry.Config(experts=1, top_k=1, hidden=8, max_tokens_per_rank=1))
    rank = ferry.Communicator(group, plan)
    array = rank.empty((4,), "f32")
    reference = weakref.ref(rank)
    del rank
    gc.collect()
    assert reference() is array.communicator
    array.copy_from(np.arange(4, dtype=np.float32))
    assert array.numpy().tolist() == [0, 1, 2, 3]
    with pytest.raises(ferry.TensorError, match="shape"):
        array.copy_from(np.zeros(3, dtype=np.float32))
    array.communicator.close()
    with pytest.raises(ferry.ClosedError, match="memory has ended"):
        array.numpy()
    assert "ended" in repr(array)


def test_no_library_is_imported_unless_given():
    code = (
        "import sys, ferry_ep; ferry_ep.Group.simulated(2).close(); "
        "assert not {'numpy', 'torch', 'cupy'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tensors_of_torch_that_are_refused(bench):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    of = bench(1)
    rank, ids = of.ranks[0], torch.tensor([[0, 1]])
    ids = ids.int()
    x, weights = torch.ones(1, 64).bfloat16(), torch.full((1, 2), 0.5)

    def refused(error, match, **changes):
        with pytest.raises(error, match=match):
            rank.dispatch(**({"x": x, "topk_ids": ids, "topk_weights": weights} | changes))
        assert rank.round == "idle"

    # Its memory has the values without the sign.
    refused(ferry.TensorError, r"tensor x: .*resolve_neg\(\)", x=torch._neg_view(x))
    refused(ferry.TensorError, "tensor topk_weights: .*resolve_neg", topk_weights=torch._neg_view(weights))
    refused(ferry.TensorError, "tensor x: wanted a strided tensor", x=x.to_sparse())
    refused(ferry.TensorError, "tensor x: wanted elements of bf16, given f32", x=x.float())
    recorded = x.clone().requires_grad_()
    text = r"requires a gradient.*no_grad\(\), or pass "
    refused(ferry.ArgumentError, rf"tensor x {text}x.detach\(\)", x=recorded)
    refused(ferry.ArgumentError, f"topk_weights {text}", topk_weights=weights.clone().requires_grad_())
    with torch.no_grad():
        rows = rank.dispatch(recorded, ids, weights)
    with pytest.raises(ferry.ArgumentError, match=f"expert_rows {text}"):
        rank.combine(rows.tokens.requires_grad_())
    assert (rank.combine(rows.tokens.detach()) == 1).all()
    for use in (ferry.to_bf16, ferry.from_bf16):
        with pytest.raises(ferry.TensorError, match="Tensor"):
            use(x)


def test_inputs_are_in_the_order_in_which_deep_ep_hands_them_over():
    def names(call: str) -> list[str]:
        return [name for name, _, _ in arguments_of(call, "bf16", False)]

    sent = ["x", "topk_ids", "topk_weights", "input_scale", "tokens_on_device", "x_scales", "kept_ids"]
    assert names("dispatch") == names("dispatch_async") == sent
    answers = ["expert_rows", "topk_weights", "row_weights", "row_scales", "bias", "bias2", "residual"]
    answers += ["initial[0]", "initial[1]", "received_weights"]
    assert names("combine") == names("combine_async") == answers
