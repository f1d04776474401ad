"""Gradients of dispatch and combine against plain torch in f64; skipped without torch."""

from __future__ import annotations

import copy
import importlib

import ferry_ep as ferry
import pytest
from conftest import on_streams

torch = pytest.importorskip("torch", reason="torch is not installed")
autograd = importlib.import_module("ferry_ep.autograd")

#: Half a unit in the last place of BF16, relative.
ROUNDING = 2**-8


class Layer:
    """Experts with a matrix and a tanh each, of all ranks of a bench."""

    def __init__(self, of, seed, id_type=torch.int32):
        problem = of.problem(seed, holes=0.2)
        torch.manual_seed(seed)
        self.plan, config = of.plan, of.config
        hidden = config.hidden
        device = of.device
        self.x = [torch.from_numpy(x).to(device, torch.bfloat16).requires_grad_() for x in problem.x]
        self.ids = [torch.from_numpy(ids).to(device, id_type) for ids in problem.ids]
        self.weights = [torch.from_numpy(given).to(device).requires_grad_() for given in problem.weights]
        self.matrices = [
            (torch.randn(self.plan.local_experts, hidden, hidden) / 8).to(device).requires_grad_()
            for _ in problem.x
        ]
        #: Gradients of the sums, exact in BF16.
        self.factors = [torch.randn(x.shape).to(device, torch.bfloat16) for x in self.x]
        self.leaves = [*self.x, *self.weights, *self.matrices]

    def rows(self, rank, received):
        """Returns the rows of a rank's experts: their sum for each token, with the weights applied."""
        tokens, result = received.tokens.float(), 0
        for number, matrix in enumerate(self.matrices[rank]):
            weight = (received.weights * (received.ids == number)).sum(dim=1, keepdim=True)
            result = result + weight * torch.tanh(tokens @ matrix)
        return result.bfloat16()

    def sums(self, exchange, rank):
        """Makes a round."""
        received = exchange.dispatch(self.x[rank], self.ids[rank], self.weights[rank])
        return exchange.combine(self.rows(rank, received), received)

    def take(self):
        """Returns the gradients of all leaves, and clears them."""
        found = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return found

    def reference(self):
        """Returns the gradients of all leaves in f64, and sizes that bound what rounds in those of ``x``."""
        local = self.plan.local_experts
        copies = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        ranks = len(self.x)
        xs, weights, matrices = (copies[at * ranks : (at + 1) * ranks] for at in range(3))
        sizes = []
        for rank in range(ranks):
            here = []
            for owner in range(ranks):
                total = 0
                for number in range(local):
                    is_here = self.ids[rank] == owner * local + number
                    weight = (weights[rank] * is_here).sum(dim=1, keepdim=True)
                    total = total + weight * torch.tanh(xs[rank] @ matrices[owner][number])
                loss = (total * self.factors[rank].double()).sum()
                before = torch.zeros_like(xs[rank]) if xs[rank].grad is None else xs[rank].grad.clone()
                loss.backward()
                here.append((xs[rank].grad - before).abs())
            # Each rank's row is rounded to BF16, and then the sum.
            sizes.append(ROUNDING * (sum(here) + xs[rank].grad.abs()))
        return [copy.grad for copy in copies], sizes

    def check(self):
        """Compares the gradients of all leaves: those of x are BF16, all others f32."""
        gradients = self.take()
        wanted, sizes = self.reference()
        for at, (given, exact) in enumerate(zip(gradients, wanted, strict=True)):
            assert given.dtype == self.leaves[at].dtype and exact.abs().max() > 0.1
            difference = (given.double() - exact).abs()
            if at < len(sizes):
                # The second term is the f32 arithmetic between the roundings.
                assert (difference <= 1.01 * sizes[at] + 1e-5).all()
            else:
                torch.testing.assert_close(given.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("receive", ["strided", "compact"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_those_of_plain_torch(bench, ranks, receive, id_type):
    of = bench(ranks, receive=receive, combine_weights=True, experts=6, top_k=3)
    layer = Layer(of, 1, id_type)
    exchanges = [autograd.RowExchange(rank) for rank in of.ranks]

    def run(rank):
        sums = layer.sums(exchanges[rank], rank)
        (sums.float() * layer.factors[rank]).sum().backward()
        of.ranks[rank].release_thread()

    for _ in range(2):
        on_streams(of.device, run, ranks)
        layer.check()
        # Forward and backward are a round each.
        assert all(rank.round == "idle" and rank.check() is None for rank in of.ranks)
    assert of.ranks[0]._end.native.counts() == (4, 4)


def test_two_layers_and_a_leaf_in_both(bench):
    """Gradients through two layers are those of plain torch, with the first layer's sums as they were."""
    of = bench(2, receive="compact", combine_weights=True)
    first, second = Layer(of, 2), Layer(of, 3)
    exchanges = [autograd.RowExchange(rank) for rank in of.ranks]
    middle = [None, None]

    def run(rank):
        middle[rank] = first.sums(exchanges[rank], rank)
        middle[rank].retain_grad()
        second.x[rank] = middle[rank]
        sums = second.sums(exchanges[rank], rank)
        (sums.float() * second.factors[rank]).sum().backward()

    on_streams(of.device, run, 2)
    second.leaves[:2] = middle
    gradients = [of_rank.grad.clone() for of_rank in middle]
    second.check()
    first.factors = gradients
    first.check()


@pytest.mark.parametrize("needs", ["x", "weights", "matrices", "rows of dispatch"])
def test_parts_that_need_no_gradient(bench, needs):
    """A backward pass is one round, whatever needs a gradient, and whatever the loss reads."""
    of = bench(2, receive="strided", combine_weights=True)
    layer = Layer(of, 4)
    wanted = layer.reference()[0]
    for name in ("x", "weights", "matrices"):
        for leaf in getattr(layer, name):
            leaf.requires_grad_(name == needs or needs.startswith("rows"))
    exchanges = [autograd.RowExchange(rank) for rank in of.ranks]
    kept = [None, None]

    def run(rank):
        received = exchanges[rank].dispatch(layer.x[rank], layer.ids[rank], layer.weights[rank])
        rows = layer.rows(rank, received)
        sums = exchanges[rank].combine(rows, received)
        if needs.startswith("rows"):
            kept[rank] = received
            (2 * received.tokens.float()).sum().backward()
        else:
            (sums.float() * layer.factors[rank]).sum().backward()

    on_streams(of.device, run, 2)
    assert of.ranks[0]._end.native.counts() == (2, 2) and of.ranks[0].round == "idle"
    gradients = layer.take()
    if needs.startswith("rows"):
        for rank in range(2):
            local = of.plan.local_experts
            came = [len({n // local for n in ids if n >= 0}) for ids in layer.ids[rank].tolist()]
            assert gradients[rank][:, 0].tolist() == [2 * count for count in came]
        return
    first = 2 * ("x", "weights", "matrices").index(needs)
    for at, (given, exact) in enumerate(zip(gradients, wanted, strict=True)):
        assert (given is not None) == (at in (first, first + 1))
        if given is not None:
            torch.testing.assert_close(given.double(), exact, rtol=0.02, atol=0.02)


def test_returned_weights(bench):
    """A weight of a row returns to its slot, and so does its gradient to the row."""
    of = bench(2, receive="compact", combine_weights=True)
    layer = Layer(of, 5)
    exchanges = [autograd.RowExchange(rank) for rank in of.ranks]
    factors = [torch.rand(given.shape).to(of.device) for given in layer.weights]

    def run(rank):
        received = exchanges[rank].dispatch(layer.x[rank], layer.ids[rank], layer.weights[rank])
        _, returned = exchanges[rank].combine(received.tokens, received, 3 * received.weights)
        (returned * factors[rank]).sum().backward()
        return returned

    for rank, returned in enumerate(on_streams(of.device, run, 2)):
        is_routed = layer.ids[rank] >= 0
        assert torch.equal(returned, 3 * layer.weights[rank] * is_routed)
        assert torch.equal(layer.weights[rank].grad, 3 * factors[rank] * is_routed)
        assert not layer.x[rank].grad.any()


def test_an_open_round_needs_a_second_communicator(bench):
    of, other = (bench(1, receive="compact", combine_weights=True, gpu=None) for _ in range(2))
    layer = Layer(of, 6)
    for backward, is_possible in ((None, False), (other.ranks[0], True)):
        exchange = autograd.RowExchange(of.ranks[0], backward=backward)
        sums = layer.sums(exchange, 0)
        loss = (sums.float() * layer.factors[0]).sum()
        received = exchange.dispatch(layer.x[0], layer.ids[0])
        if is_possible:
            loss.backward()
            layer.check()
        else:
            with pytest.raises(ferry.OrderError, match=r"one is open \(dispatched\)"):
                loss.backward()
            with pytest.raises(ferry.OrderError, match=r"one is open \(dispatched\)"):
                received.tokens.float().sum().backward()
        exchange.combine(received.tokens, received)
    assert other.ranks[0]._end.native.counts() == (1, 1)


def test_a_round_that_a_backward_pass_left_open_is_no_others(bench):
    of, other = (bench(1, receive="compact", combine_weights=True, gpu=None) for _ in range(2))
    layer = Layer(of, 7)
    exchange = autograd.RowExchange(of.ranks[0], backward=other.ranks[0])
    torch.autograd.grad(layer.sums(exchange, 0).float().sum(), layer.matrices[:1])
    assert other.ranks[0].round == "dispatched"
    loss = (layer.sums(exchange, 0).float() * layer.factors[0]).sum()
    received = exchange.dispatch(layer.x[0], layer.ids[0])
    exchange.combine(received.tokens, received)
    for of_tokens in (loss, received.tokens.float().sum()):
        with pytest.raises(ferry.OrderError, match=r"or abandon\(\) what"):
            of_tokens.backward(retain_graph=True)
    exchange.abandon()
    exchange.abandon()
    layer.take()
    loss.backward()
    layer.check()


def test_weights_return_of_tokens_without_any(bench):
    of = bench(1, receive="strided", combine_weights=True, gpu=None)
    layer = Layer(of, 8)
    exchange = autograd.RowExchange(of.ranks[0])
    received = exchange.dispatch(layer.x[0], layer.ids[0])
    exchange.combine(received.tokens, received).float().sum().backward()
    routed = (layer.ids[0] >= 0).any(dim=1, keepdim=True)
    assert torch.equal(layer.x[0].grad, routed.expand_as(layer.x[0]).bfloat16())


def test_plans_and_tensors_without_a_backward_pass(bench):
    def refused(match, **config):
        with pytest.raises(ferry.ArgumentError, match=match):
            autograd.RowExchange(bench(1, gpu=None, **config).ranks[0])

    refused("receive is by-expert, but only rows of strided and compact")
    refused("receive is view", receive="view")
    refused("format is fp8", receive="compact", format="fp8", hidden=128)
    of = bench(1, receive="compact", gpu=None)
    other = bench(1, receive="compact", hidden=128, gpu=None)
    with pytest.raises(ferry.ArgumentError, match="hidden of backward is 128, but the communicator's is 64"):
        autograd.RowExchange(of.ranks[0], backward=other.ranks[0])
    two = bench(2, receive="compact", gpu=None).ranks
    with pytest.raises(
        ferry.ArgumentError, match="backward is rank 1 of 2, but the communicator is rank 0 of 2"
    ):
        autograd.RowExchange(two[0], backward=two[1])
    more = bench(2, receive="compact", experts=2, gpu=None).ranks[0]
    with pytest.raises(
        ferry.ArgumentError, match="backward is rank 0 of 2, but the communicator is rank 0 of 1"
    ):
        autograd.RowExchange(of.ranks[0], backward=more)
    layer, exchange = Layer(of, 7), autograd.RowExchange(of.ranks[0])
    with pytest.raises(ferry.ArgumentError, match="combine_weights is false"):
        layer.sums(exchange, 0)
    # Without weights that need a gradient, the plan has all that is needed.
    layer.weights[0].requires_grad_(False)
    sums = layer.sums(exchange, 0)
    (sums.float() * layer.factors[0]).sum().backward()
    wanted, sizes = layer.reference()
    assert ((layer.x[0].grad.double() - wanted[0]).abs() <= 1.01 * sizes[0] + 1e-5).all()
    with torch.no_grad():
        assert not layer.sums(exchange, 0).requires_grad
    assert of.ranks[0].round == "idle"


def test_a_checkpoint_holds_dispatch_and_combine(bench):
    of = bench(1, receive="compact", combine_weights=True)
    layer, exchange = Layer(of, 5), autograd.RowExchange(of.ranks[0])
    layer.sums(exchange, 0).backward(layer.factors[0])
    wanted = layer.take()

    def again(function, *arguments):
        return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)

    again(layer.sums, exchange, 0).backward(layer.factors[0])
    for given, right in zip(layer.take(), wanted, strict=True):
        assert torch.equal(given, right)

    def half():
        received = exchange.dispatch(layer.x[0], layer.ids[0], layer.weights[0])
        return layer.rows(0, received), received

    # The backward pass of combine opens a round, in which dispatch would be made again.
    rows, received = again(half)
    sums = exchange.combine(rows, received)
    with pytest.raises(ferry.OrderError, match="a checkpoint that ends between dispatch and combine"):
        sums.backward(layer.factors[0])
    exchange.abandon()
    layer.take()
    layer.sums(exchange, 0).backward(layer.factors[0])
    for given, right in zip(layer.take(), wanted, strict=True):
        assert torch.equal(given, right)


def test_arguments_of_an_exchange_are_checked(bench):
    of = bench(1, receive="compact", combine_weights=True)
    layer = Layer(of, 6)
    with pytest.raises(ferry.ArgumentError, match="communicator is 7"):
        autograd.RowExchange(7)
    with pytest.raises(ferry.ArgumentError, match="backward is 7"):
        autograd.RowExchange(of.ranks[0], backward=7)
    exchange = autograd.RowExchange(of.ranks[0])
    assert copy.deepcopy(exchange) is exchange
    for name in ("x", "topk_ids", "topk_weights"):
        given = {"x": layer.x[0], "topk_ids": layer.ids[0], "topk_weights": layer.weights[0]}
        with pytest.raises(ferry.TensorError, match=f"tensor {name}: wanted a tensor of torch, given list"):
            exchange.dispatch(**(given | {name: [1]}))
    received = exchange.dispatch(layer.x[0], layer.ids[0], layer.weights[0])
    with pytest.raises(ferry.ArgumentError, match="received is None"):
        exchange.combine(received.tokens, None)
    with pytest.raises(ferry.TensorError, match="tensor expert_rows: wanted a tensor of torch"):
        exchange.combine([1], received)
    exchange.combine(received.tokens, received)
