"""Ranks with a buffer of ``ferry_ep.deep_ep`` each, and their results in plain torch."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading

import ferry_ep as ferry
import torch
from conftest import on_streams
from ferry_ep.deep_ep import Buffer, EventHandle, EventOverlap
from ferry_ep.deep_ep.utils import per_token_cast_to_fp8

#: Bytes of a buffer: windows of some hundred tokens of the tests' sizes.
BYTES = 1 << 20
#: Multiprocessors of a rank's kernels on a GPU that ranks share.
MOST_SMS = 12


class Member:
    """A process group with no processes: one rank of a thread."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


class _Buffer(Buffer):
    """A buffer that is destroyed after the work of all ranks: on a shared GPU, freeing waits for kernels."""

    world: World

    def destroy(self) -> None:
        if self.runtime is not None:
            self.world.meet()
        super().destroy()


class World:
    """A group whose ranks are threads, simulated or sharing a GPU: the first that comes makes all
    communicators of a call.
    """

    def __init__(self, ranks: int, gpu: int | None = None, patience: float = 20) -> None:
        self.ranks, self.gpu = ranks, gpu
        self.device = "cpu" if gpu is None else f"cuda:{gpu}"
        if gpu is None:
            self.group = ferry.Group.simulated(ranks, seed=5, patience=patience)
        else:
            self.group = ferry.Group.local([gpu] * ranks, share_gpus=True)
        self.lock = threading.Lock()
        self.ends = threading.Barrier(ranks, timeout=patience)
        #: Communicators by configuration and number of the call.
        self.made: dict = {}
        self.asked = [{} for _ in range(ranks)]

    def connect(self, config, member):
        rank = member.rank()
        if self.gpu is not None:
            # Kernels of the rounds of a test's worlds wait for peers side by side on the one GPU.
            config = dataclasses.replace(config, max_sms=MOST_SMS)
        with self.lock:
            number = self.asked[rank].get(config, 0)
            self.asked[rank][config] = number + 1
            if (config, number) not in self.made:
                self.made[config, number] = ferry.Communicators(self.group, ferry.Plan(self.group, config))
            return self.made[config, number][rank]

    def buffer(self, rank: int, num_nvl_bytes: int = BYTES, **options) -> Buffer:
        options = {"explicitly_destroy": True} | options
        made = _Buffer(Member(rank, self.ranks), num_nvl_bytes, connect=self.connect, **options)
        made.world = self
        return made

    def meet(self) -> None:
        """Waits on a GPU until all ranks' work is done, or one of them failed."""
        if self.gpu is None:
            return
        torch.cuda.current_stream().synchronize()
        with contextlib.suppress(threading.BrokenBarrierError):
            self.ends.wait()

    def run(self, work) -> list:
        """Runs ``work(rank)`` on all ranks, on a GPU on a stream of each. Returns the results."""

        def guarded(rank):
            try:
                return work(rank)
            except BaseException:
                # The others wait for this rank.
                self.ends.abort()
                for ranks in list(self.made.values()):
                    ranks[rank]._end.native.drop()
                raise

        return on_streams(self.device, guarded, self.ranks)

    def end(self) -> None:
        """Drops what is left."""
        for ranks in self.made.values():
            for rank in ranks:
                rank._end.native.drop()
        if self.gpu is not None:
            # Buffers are garbage with cycles, and keep their group. To free it waits for kernels: so now, and
            # not in a thread that a kernel of a later world waits for.
            self.made.clear()
            gc.collect()

    @property
    def communicators(self) -> int:
        """Communicators of a rank so far, without that of numbers that ranks tell each other."""
        return sum((of.experts, of.top_k) != (self.ranks, 1) for of, _ in self.made)


class Tokens:
    """Tokens of all ranks with their ids and weights, and what DeepEP's calls return for them."""

    def __init__(self, seed, world, counts, *, experts=None, top_k=2, hidden=64, holes=0.2):
        random = torch.Generator().manual_seed(seed)
        self.ranks, self.device = world.ranks, world.device
        self.experts = 4 * self.ranks if experts is None else experts
        self.local, self.top_k = self.experts // self.ranks, top_k
        self.x, self.ids, self.weights = [], [], []
        for tokens in counts:
            scores = torch.rand(tokens, self.experts, generator=random)
            weights, ids = scores.topk(top_k, dim=1)
            ids[torch.rand(ids.shape, generator=random) < holes] = -1
            self.x.append(torch.randn(tokens, hidden, generator=random).bfloat16())
            self.ids.append(ids)
            self.weights.append(weights)

    def given(self, rank):
        """Returns copies of a rank's tokens, ids and weights on its device."""
        return tuple(each[rank].clone().to(self.device) for each in (self.x, self.ids, self.weights))

    def is_here(self, source, rank):
        """Returns which slots of a source's tokens name experts of a rank."""
        return (self.ids[source] >= 0) & (self.ids[source] // self.local == rank)

    def layout(self, rank):
        """Returns tokens for each rank, assignments to each expert, and whether a token goes to a rank."""
        of = torch.stack([self.is_here(rank, to).any(1) for to in range(self.ranks)], dim=1)
        per_expert = [int((self.ids[rank] == expert).sum()) for expert in range(self.experts)]
        return of.sum(0).int(), torch.tensor(per_expert, dtype=torch.int32), of

    def received(self, rank):
        """Returns what a dispatch leaves on a rank: sources, tokens, rows, local ids, weights, counts."""
        found = {"source": [], "token": [], "ids": [], "weights": [], "x": []}
        for source in range(self.ranks):
            is_here = self.is_here(source, rank)
            for token in is_here.any(1).nonzero().flatten().tolist():
                found["source"].append(source)
                found["token"].append(token)
                here = is_here[token]
                found["ids"].append(torch.where(here, self.ids[source][token] - rank * self.local, -1))
                found["weights"].append(torch.where(here, self.weights[source][token], 0))
                found["x"].append(self.x[source][token])
        hidden = self.x[0].shape[1]
        rows = len(found["token"])
        ids = torch.stack(found["ids"]) if rows else torch.empty(0, self.top_k, dtype=torch.int64)
        return {
            "source": torch.tensor(found["source"], dtype=torch.int64),
            "token": torch.tensor(found["token"], dtype=torch.int32),
            "x": torch.stack(found["x"]) if rows else torch.empty(0, hidden, dtype=torch.bfloat16),
            "ids": ids,
            "weights": torch.stack(found["weights"]) if rows else torch.empty(0, self.top_k),
            "counts": [int((ids == expert).sum()) for expert in range(self.local)],
        }

    def answers(self, rank, rows):
        """Returns the rows that a rank's experts make of those that it received: others on each rank."""
        return (rows.float() * (1 + rank / 4)).bfloat16()

    def sums(self, rank, bias=(), x=None):
        """Returns the sums of a combine of :meth:`answers`, bit for bit: f32, by rank, rounded once."""
        x = self.x[rank] if x is None else x
        total = torch.zeros(x.shape)
        for each in bias:
            total = total + each.float()
        for to in range(self.ranks):
            is_sent = self.is_here(rank, to).any(1, keepdim=True)
            total = torch.where(is_sent, total + self.answers(to, x).float(), total)
        return total.bfloat16()


def on_host(tensor):
    """Returns a tensor on the host, after all work of the stream: on a shared GPU a copy behind a kernel that
    waits for a rank can stop that rank's calls.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor.cpu()


def same(given, wanted):
    """Compares two tensors bit for bit."""
    given, wanted = (on_host(each).clone(memory_format=torch.contiguous_format) for each in (given, wanted))
    assert given.dtype == wanted.dtype and given.shape == wanted.shape, (given.shape, wanted.shape)
    assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8))


def check_received(tokens, rank, received, alignment=1):
    """Compares the results of a dispatch with ids, and returns the handle."""
    rows, ids, weights, counts, handle, _ = received
    wanted = tokens.received(rank)
    same(rows, wanted["x"])
    same(ids, wanted["ids"])
    same(weights, wanted["weights"])
    assert counts == [-(-count // alignment) * alignment for count in wanted["counts"]]
    check_handle(tokens, rank, handle, wanted)
    return handle


def check_handle(tokens, rank, handle, wanted):
    """Compares what a handle shows."""
    prefix = on_host(handle[0])
    assert prefix.dtype == torch.int32 and prefix.shape == (tokens.ranks, tokens.ranks)
    ends = [int((wanted["source"] <= source).sum()) for source in range(tokens.ranks)]
    assert prefix[:, rank].tolist() == ends
    others = [other for other in range(tokens.ranks) if other != rank]
    assert (prefix[:, others] == -1).all()
    same(handle[3], wanted["token"])
    same(handle[4], tokens.layout(rank)[2])
    assert isinstance(handle, tuple) and len(handle) == 6 and "rows" in repr(handle)
    unpacked, _, _, sources, is_in_rank, _ = handle
    for given, alike in ((unpacked, prefix), (handle[-6], prefix), (handle[:1][0], prefix)):
        same(given, alike)
    same(sources, wanted["token"])
    assert is_in_rank is handle[4]


def now(options):
    """Returns the options of a call, with an event behind its inputs if they say ``has_event``."""
    options = dict(options)
    if options.pop("has_event", False):
        options["previous_event"] = EventOverlap(EventHandle())
    return options


def dispatch(buffer, x, ids, weights, experts, **options):
    """A dispatch as engines make it: the layout before."""
    per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, experts)
    return buffer.dispatch(
        x,
        topk_idx=ids,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        **now(options),
    )


def encoded(x, encoding):
    """Returns rows as they are, or as FP8 with scales: f32, f32 in columns, or powers of two, packed."""
    if encoding is None:
        return x
    codes, scales = per_token_cast_to_fp8(x)
    if encoding == "columns":
        return codes, scales.T.contiguous().T
    if encoding == "packed":
        # Whatever the codes: they are not multiplied.
        return codes, (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    return codes, scales


def by_rank(buffer, tokens, rank, x=None, **options):
    """A dispatch without ids, of ``x`` or the rank's tokens."""
    x = tokens.given(rank)[0] if x is None else x
    per_rank, per_expert, is_in_rank = (each.to(tokens.device) for each in tokens.layout(rank))
    return buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        **now(options),
    )
