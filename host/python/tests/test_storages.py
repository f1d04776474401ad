"""Tensors of torch that have less memory than their shape says: an exception from every reader, no crash."""

from __future__ import annotations

import ferry_ep as ferry
import numpy as np
import pytest
from ferry_ep.core import tensors as arrays

torch = pytest.importorskip("torch", reason="torch is not installed")


def freed(tensor):
    """Returns it without its memory, as FSDP leaves parameters."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def part(tensor):
    """Returns one that begins within a storage that was freed."""
    whole = torch.cat([tensor, tensor])
    view = whole[len(tensor) :]
    whole.untyped_storage().resize_(0)
    return view


def shrunk(tensor):
    """Returns one whose last byte is missing."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)
    return tensor


def fake(tensor):
    """Returns one of a mode that computes shapes alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


KINDS = (freed, part, shrunk, fake)


@pytest.fixture
def of(bench):
    return bench(1)


def arguments(of) -> dict:
    (x,), (ids,), (weights,) = of.problem(1).arguments
    given = {"x": torch.from_numpy(x).view(torch.bfloat16), "topk_ids": torch.from_numpy(ids)}
    given["topk_weights"] = torch.from_numpy(weights)
    return {name: tensor.to(of.device) for name, tensor in given.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error")
def test_calls_refuse_tensors_without_memory(of, kind):
    (rank,) = of.ranks
    given = arguments(of)
    for name, tensor in given.items():
        with pytest.raises(ferry.TensorError, match=f"tensor {name}: wanted a storage of .* bytes"):
            rank.dispatch(**(given | {name: kind(tensor)}))
        with pytest.raises(ferry.TensorError, match=f"tensor {name}: wanted a storage of .* bytes"):
            rank.dispatch_async(**(given | {name: kind(tensor)}))
    out = rank.outputs(given["x"])
    for name in ("tokens", "row_offsets", "expert_ids", "src_info"):
        kept = getattr(out, name)
        setattr(out, name, kind(kept))
        with pytest.raises(ferry.TensorError, match=f"tensor {name}: wanted a storage of"):
            rank.dispatch(**given, out=out)
        setattr(out, name, kept)
    assert rank.round == "idle"
    rows = rank.dispatch(**given, out=out)
    with pytest.raises(ferry.TensorError, match="tensor expert_rows: wanted a storage of"):
        rank.combine(kind(rows.tokens))
    with pytest.raises(ferry.TensorError, match="tensor combined: wanted a storage of"):
        rank.combine(rows.tokens, out=kind(given["x"]))
    sums = rank.combine(rows.tokens)
    assert sums.shape == given["x"].shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error")
def test_other_readers_refuse_tensors_without_memory(of, kind):
    (rank,) = of.ranks
    numbers = torch.ones(4, 8)
    with pytest.raises(ferry.TensorError, match="tensor array: wanted a storage of"):
        rank.empty((4, 8), "f32").copy_from(kind(numbers))
    with pytest.raises(ferry.TensorError, match="tensor values: wanted a storage of"):
        ferry.to_bf16(kind(numbers))
    with pytest.raises(ferry.TensorError, match="tensor bits: wanted a storage of"):
        ferry.from_bf16(kind(numbers.to(torch.uint16)))
    offsets = torch.tensor([0, 4, 4], dtype=torch.int32, device=of.device)
    given = torch.ones(4, 32, dtype=torch.bfloat16, device=of.device)
    with pytest.raises(ferry.TensorError, match="tensor input: wanted a storage of"):
        rank.silu(kind(given), offsets)
    with pytest.raises(ferry.TensorError, match="tensor row_offsets: wanted a storage of"):
        rank.silu(given, kind(offsets))
    out = ferry.DispatchOutput(row_offsets=kind(offsets))
    with pytest.raises(ferry.TensorError, match="tensor row_offsets: wanted a storage of"):
        out.rows_of(0)


@pytest.mark.parametrize("kind", (freed, part, shrunk))
def test_the_native_reader_refuses_tensors_without_memory(bench, kind):
    """It needs no Python for tensors on GPUs; before it looks at the device it looks at the storage."""
    (rank,) = bench(1, gpu=None).ranks
    reader = arrays.reader_of_torch()
    if reader is None:
        pytest.skip("this torch has no exchange API")
    x, ids = torch.ones(5, 64, dtype=torch.bfloat16), torch.zeros(5, 2, dtype=torch.int32)

    def refused(match, *inputs):
        with pytest.raises(ferry.TensorError, match=match):
            rank._end.native.enqueue_tensors(reader, "dispatch_async", inputs, [])

    refused(r"tensor x: wanted a storage of (640|1280) bytes, for shape .*freed or shrunk", kind(x), ids)
    refused("tensor x: wanted memory of cuda", x, ids)
    refused("tensor x: wanted memory of cuda", x[:0], ids[:0])


def test_tensors_of_transforms_have_no_memory(of):
    (rank,) = of.ranks
    given = arguments(of)

    def send(x):
        rank.dispatch_async(**(given | {"x": x}))
        return x

    with pytest.raises(ferry.TensorError, match="tensor x: wanted a"):
        torch.vmap(send)(given["x"].expand(2, *given["x"].shape))
    assert rank.round == "idle"


def test_tensors_that_a_wait_fills_are_still_there(of):
    (rank,) = of.ranks
    given = arguments(of)
    rows = rank.dispatch(**given)
    sums = rank.combine_async(rows.tokens)
    if of.device != "cpu":
        pytest.skip("a GPU has them from the first half on")
    sums.untyped_storage().resize_(0)
    with pytest.raises(ferry.TensorError, match="tensor combined: wanted a storage of"):
        rank.combine_wait()
    assert rank.round == "combine sent"


def shrunk_array():
    array = np.ones(1 << 12, dtype=np.float32)
    view = array[:]
    array.resize((1,), refcheck=False)
    return view


def reversed_beyond():
    return np.lib.stride_tricks.as_strided(np.ones(4, dtype=np.float32), (3,), (-4,))


def freed_tensor():
    return freed(torch.ones(64))


@pytest.mark.parametrize("make", [shrunk_array, reversed_beyond, freed_tensor])
@pytest.mark.parametrize("nested", [lambda given: given, lambda given: [given], lambda given: ((given,),)])
def test_bits_of_arrays_without_memory(make, nested):
    for convert in (ferry.to_bf16, ferry.from_bf16):
        with pytest.raises(
            ferry.TensorError, match=r"(values|bits): wanted a (storage|view that ends within)"
        ):
            convert(nested(make()))
    assert ferry.to_bf16([np.ones(4)[::-1], torch.ones(4)]).tolist() == [[16256] * 4] * 2
