"""Arguments of the exchange and the layers of torch, and copies of them; skipped without torch."""

from __future__ import annotations

import copy
import pickle

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
ferry_torch = pytest.importorskip("ferry_ep.torch")


def given_of(of):
    (x,), (ids,), (weights,) = of.problem(1).arguments
    return {
        "x": torch.from_numpy(x).view(torch.bfloat16).to(of.device),
        "topk_ids": torch.from_numpy(ids).to(of.device),
        "topk_weights": torch.from_numpy(weights).to(of.device),
    }


def test_a_layer_can_be_copied(bench):
    of = bench(1)
    exchange = ferry_torch.Exchange(of.ranks[0])
    layer = ferry_torch.MoE(exchange, 32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.1)
    again = copy.deepcopy(layer)
    assert again.experts.exchange is exchange and copy.copy(exchange) is exchange
    assert again.router.data_ptr() != layer.router.data_ptr()
    x = given_of(of)["x"]
    assert torch.equal(layer(x), again(x))
    with pytest.raises(TypeError, match="an exchange belongs to its process"):
        pickle.dumps(layer)


def test_arguments_are_named(bench):
    of = bench(1)
    given = given_of(of)
    for wrong in (None, 7, of.group):
        with pytest.raises(ferry.ArgumentError, match="communicator is"):
            ferry_torch.Exchange(wrong)
    for wrong in ("most", -1, True, 1.5):
        with pytest.raises(ferry.ArgumentError, match="capacity is"):
            ferry_torch.Exchange(of.ranks[0], capacity=wrong)
    exchange = ferry_torch.Exchange(of.ranks[0])
    for name in given:
        with pytest.raises(ferry.TensorError, match=f"tensor {name}: wanted a tensor of torch, given list"):
            exchange.dispatch(**(given | {name: [1]}))
    for name in ("x", "topk_ids"):
        with pytest.raises(ferry.TensorError, match=f"tensor {name}: wanted a tensor of torch, given none"):
            exchange.dispatch(**(given | {name: None}))
    with pytest.raises(ferry.TensorError, match="tensor out: wanted a DispatchOutput, given list"):
        exchange.dispatch(**given, out=[1, 2])
    out = of.ranks[0].outputs(given["x"])
    out.tokens = [1]
    with pytest.raises(ferry.TensorError, match=r"tensor tokens: wanted a tensor, .* given list"):
        exchange.dispatch(**given, out=out)
    some = [getattr(of.ranks[0].outputs(given["x"]), name) for name in ("tokens", "expert_ids", "src_info")]
    for outputs in ([], some, [*some, *some]):
        inputs = (exchange.handle, exchange._state, *given.values(), outputs)
        with pytest.raises(ferry.ArgumentError, match=f"{len(outputs)} outputs were given, and there are 4"):
            torch.ops.ferry.dispatch(*inputs)
    rows = exchange.dispatch(**given)
    for wrong in (-1, True, 1.5, "5", None):
        with pytest.raises(ferry.ArgumentError, match="tokens is"):
            exchange.combine(rows.tokens, wrong)
    with pytest.raises(ferry.TensorError, match="tensor expert_rows: wanted a tensor of torch"):
        exchange.combine([1], 5)
    with pytest.raises(ferry.TensorError, match="tensor combined: wanted a tensor of torch"):
        exchange.combine(rows.tokens, 5, out=[1])
    exchange.combine(rows.tokens, 5)
