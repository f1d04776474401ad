"""Tensors of torch as the native module reads them, and as they are allocated."""

from __future__ import annotations

import ferry_ep as ferry
import numpy as np
import pytest
from ferry_ep.core import tensors as arrays

torch = pytest.importorskip("torch", reason="torch is not installed")


def test_objects_that_only_say_that_they_are_tensors_are_refused(bench):
    reader = ferry._ferry.Reader.of(torch.Tensor)
    if reader is None:
        pytest.skip("this torch has no exchange API")

    class Claims:
        __class__ = torch.Tensor

    native = bench(2).ranks[0]._end.native
    with pytest.raises(ferry.TensorError, match="tensor x: wanted a tensor of bf16, given Claims"):
        native.enqueue_tensors(reader, "dispatch", (Claims(), Claims()), [])


def odd_tensors(device):
    """Tensors of all kinds, f32 if nothing else is said, and whether a call on a GPU can read them."""
    whole = torch.arange(24.0, device=device).view(2, 3, 4)
    return [
        (whole, True),
        (whole[:, 1:], True),
        (whole.transpose(0, 1), True),
        (whole[:, :1].expand(2, 3, 4), True),
        (whole[:0], True),
        (whole.bfloat16(), True),
        (torch.zeros(3, 0, 4, device=device).transpose(0, 2), True),
        (torch.zeros(1, 3, 4, device=device).as_strided((1, 3, 4), (7, 4, 1)), True),
        (torch.zeros(2, 3, 4, dtype=torch.bool, device=device), True),
        (torch.tensor(1.0, device=device), True),
        (torch.zeros(1, 1, 1, 1, 1, 1, device=device), True),
        (torch.complex(whole, whole).conj().imag, False),
        (torch._neg_view(whole.bfloat16()), False),
        (torch._neg_view(whole.long()), False),
        (whole.clone().requires_grad_(), False),
        (torch.nn.Parameter(whole.clone(), requires_grad=False), False),
        (whole.to_sparse(), False),
        (torch.zeros(2, 3, 4, dtype=torch.uint32, device=device), False),
    ]


def test_native_checks_of_tensors_are_those_of_torch(bench):
    reader = ferry._ferry.Reader.of(torch.Tensor)
    if reader is None:
        pytest.skip("this torch has no exchange API")
    of = bench(1)
    with torch.enable_grad():
        odd = odd_tensors(of.device)
    for tensor, can_read in odd:
        assert reader.takes((tensor,), True) == reader.takes((None, tensor), True)
        assert reader.takes((tensor,), True) == (can_read and of.device != "cpu")
        assert reader.takes((tensor,), False) == ((can_read or tensor.requires_grad) and of.device != "cpu")
    one, none = odd[0][0], None
    assert not reader.takes((one, none), True, (True, True))
    assert not reader.takes((one, one), True, (True, False))
    assert reader.takes((one, none), True, (True, False)) == (of.device != "cpu")


def test_signatures_are_equal_for_tensors_that_checks_cannot_tell_apart(bench):
    reader = ferry._ferry.Reader.of(torch.Tensor)
    if reader is None:
        pytest.skip("this torch has no exchange API")
    device = bench(1).device
    plain = [tensor for tensor, can_read in odd_tensors(device) if can_read and tensor.dim() <= 5]

    def what(tensor):
        return tensor.device, tensor.dtype, tensor.shape, tensor.stride()

    values = [(None,), *((tensor,) for tensor in plain), *((tensor, None) for tensor in plain)]
    values += [(None, tensor) for tensor in plain]
    for one in values:
        for other in values:
            is_same = len(one) == len(other) and all(
                a is b is None or (a is not None and b is not None and what(a) == what(b))
                for a, b in zip(one, other, strict=True)
            )
            copies = tuple(
                each if each is None else each.detach().as_strided(each.shape, each.stride())
                for each in other
            )
            assert (reader.signature(one, True) == reader.signature(copies, True)) == is_same
    with torch.enable_grad():
        for tensor, can_read in odd_tensors(device):
            can_read = can_read and tensor.dim() <= 5
            assert (reader.signature((None, tensor), True) is not None) == can_read
            assert (reader.signature((tensor,), False) is not None) == (can_read or tensor.requires_grad)


def test_arrays_that_are_made_again_have_memory_of_their_own(bench):
    of = bench(1)
    made = arrays.Repeated([("bf16", [3, 8]), ("i64", [5]), ("f32", [0, 2])])
    like = torch.zeros(1, device=of.device)
    wanted = [(torch.bfloat16, (3, 8)), (torch.int64, (5,)), (torch.float32, (0, 2))]
    kept = [made.allocate(like) for _ in range(4)]
    for tensors in kept:
        assert [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == wanted
        assert all(tensor.is_contiguous() and tensor.device == like.device for tensor in tensors)
    places = {tensor.data_ptr() for tensors in kept for tensor in tensors if tensor.numel()}
    assert len(places) == 8
    assert [type(array) for array in made.allocate(np.zeros(1))] == [np.ndarray] * 3
    assert made.allocate(like)[0].untyped_storage().nbytes() == 48
