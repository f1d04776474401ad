"""Views of received rows: their ends, their owners, and other libraries."""

from __future__ import annotations

import gc
import weakref

import ferry_ep as ferry
import numpy as np
import pytest
from ferry_ep import _ferry
from ferry_ep.core._ferry import describe
from test_tensors import Wrapped


def test_a_view_ends_with_its_round(bench):
    of = bench(2, receive="view", hidden=128, format="fp8")
    problem = of.problem(5)
    x, ids, _ = problem.arguments
    with pytest.raises(ferry.OrderError, match="view is out of order"):
        of.ranks[0].view()
    answers = [np.zeros((10, 128), dtype=np.uint16)] * 2
    of.together(ferry.Dispatch, x, ids)
    first = of.ranks[0].view()
    assert first.tokens.shape == (10, 128) and first.tokens.strides == (first.row_stride, 1)
    assert first.scales.shape == (10, 1) and first.scales.strides == (first.row_stride // 4, 1)
    assert first.row_scales is None and first.row_stride == of.plan.view_row_stride
    assert "e4m3 [10, 128] at 0x" in repr(first.tokens) and "rank 0" in repr(first)
    assert not hasattr(first.tokens, "__cuda_array_interface__")
    with pytest.raises(BufferError, match="simulated rank"):
        np.from_dlpack(first.tokens)
    with pytest.raises(ferry.TensorError, match=r"synchronize\(\), \.numpy\(\) copies it, given a ViewArray"):
        np.asarray(first.tokens)
    of.together(ferry.CombineAsync, answers)
    for use in (lambda: first.tokens.address, first.tokens.numpy, first.scales.numpy):
        with pytest.raises(ferry.OrderError, match="the view has ended"):
            use()
    of.together(ferry.CombineWait)
    of.together(ferry.Dispatch, x, ids)
    second = of.ranks[0].view()
    with pytest.raises(ferry.OrderError, match="the view has ended"):
        of.ranks[0].empty((1,), "u8") and first.tokens.numpy()
    assert second.tokens.numpy().shape == (10, 128)
    of.together(ferry.Combine, answers)
    assert "ended" in repr(second.tokens)
    of.ranks.close()
    with pytest.raises(ferry.ClosedError, match="the view has ended"):
        second.tokens.numpy()
    with pytest.raises(ferry.ClosedError):
        of.ranks[0].view()
    other = bench(1, receive="strided")
    with pytest.raises(ferry.ArgumentError, match="whose receive is view, and this one's is strided"):
        other.ranks[0].view()


def test_a_view_ends_with_a_round_that_is_given_up(bench):
    of = bench(2, receive="view")
    x, ids, _ = of.problem(9).arguments
    for give_up in (lambda: of.together(ferry.GiveUp), lambda: [rank.give_up() for rank in of.ranks]):
        of.together(ferry.Dispatch, x, ids)
        view = of.ranks[0].view()
        assert view.tokens.numpy().shape == (10, 64)
        give_up()
        with pytest.raises(ferry.OrderError, match="the view has ended"):
            view.tokens.numpy()


def test_rows_of_a_view_can_be_sent_on(bench):
    """A view goes in as x of another communicator's dispatch on the same device."""
    of = bench(1, receive="view")
    second = ferry.Communicators(of.group, of.plan)
    x, ids, _ = of.problem(6, holes=0).arguments
    of.together(ferry.Dispatch, x, ids)
    tokens = of.ranks[0].view().tokens
    second[0].dispatch(tokens, ids[0])
    np.testing.assert_array_equal(second[0].view().tokens.numpy(), x[0])
    for ranks in (second, of.ranks):
        ranks[0].combine(np.zeros((5, 64), dtype=np.uint16))


def test_a_view_keeps_its_communicator_alive():
    group = ferry.Group.simulated(1)
    config = ferry.Config(experts=1, top_k=1, hidden=8, max_tokens_per_rank=1, receive="view")
    rank = ferry.Communicator(group, ferry.Plan(group, config))
    rank.dispatch(np.full((1, 8), 0x4000, dtype=np.uint16), np.zeros((1, 1), dtype=np.int64))
    tokens, reference = rank.view().tokens, weakref.ref(rank)
    del rank
    gc.collect()
    assert tokens.numpy().tolist() == [[0x4000] * 8]
    tokens.communicator.combine(np.zeros((1, 8), dtype=np.uint16))
    tokens.communicator.close()
    del tokens
    gc.collect()
    assert reference() is None


def test_capsules_of_dlpack_keep_their_owner():
    """NumPy takes one, and the memory lives; one that is not taken lets go, too."""
    memory = np.arange(24, dtype=np.int32)
    owners = [type("Owner", (), {})() for _ in range(2)]
    ends = [weakref.ref(owner) for owner in owners]

    class Exported:
        def __init__(self, owner):
            self.given = memory.ctypes.data, (1, 0), (0, 32), [3, 2], [8, 1], owner

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **options):
            return _ferry.dlpack(*self.given)

    taken, kept = np.from_dlpack(Exported(owners[0])), Exported(owners[1]).__dlpack__()
    owners.clear()
    gc.collect()
    assert ends[0]() is not None and ends[1]() is not None
    assert taken.tolist() == [[0, 1], [8, 9], [16, 17]]
    del taken, kept
    gc.collect()
    assert ends[0]() is None and ends[1]() is None


class OnGpu:
    """What a view asks of a rank's memory, with a window on a GPU."""

    device = "cuda:1"
    numbers = (1, 0)
    closed = False
    rank = 0

    def view(self):
        return (4096, "e2m1", [6, 64], [512, 1]), (4128, "e4m3", [6, 4], [256, 1]), (4132, "bf16", [6], [128])

    def counts(self):
        return self.numbers

    @property
    def native(self):
        return self

    def owner(self):
        return self


def told(array, wanted):
    """Returns what calls read of an array."""
    tensor, place = describe("x", array, wanted)
    return tensor.address, tensor.data_type, tensor.shape, tensor.strides, place


def test_a_view_on_a_gpu_has_an_array_interface():
    rank = OnGpu()
    view = ferry.View(rank)
    found = [of.__cuda_array_interface__ for of in (view.tokens, view.scales, view.row_scales)]
    assert [of["data"][0] for of in found] == [4096, 4128, 4132]
    assert [of["typestr"] for of in found] == ["|u1", "|u1", "<u2"]
    assert [of["shape"] for of in found] == [(6, 32), (6, 4), (6,)]
    assert [of["strides"] for of in found] == [(256, 1), (256, 1), (256,)]
    # Ferry's own calls take the elements as they are, on the device that they are on.
    assert told(view.tokens, "e2m1") == (4096, "e2m1", [6, 64], [512, 1], "rank")
    assert told(Wrapped(view.tokens), "u8") == (4096, "u8", [6, 32], [256, 1], "cuda:1")
    assert told(Wrapped(view.row_scales), "bf16") == (4132, "bf16", [6], [128], "cuda:1")
    with pytest.raises(BufferError, match="without a copy"):
        view.tokens.__dlpack__(copy=True)
    rank.numbers = (1, 1)
    for use in (lambda: view.tokens.__cuda_array_interface__, view.tokens.__dlpack__):
        with pytest.raises(ferry.OrderError, match="the view has ended"):
            use()
