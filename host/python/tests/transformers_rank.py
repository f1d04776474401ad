"""A process for each rank of a group that transformers divides models between: for test_transformers.py."""

from __future__ import annotations

import collections
import importlib
import os
import sys
from pathlib import Path

import ferry_ep as ferry

#: Tokens that are generated.
NEW_TOKENS = 4


class Rank:
    """This process: its place, and what it records of the experts of models that it loads."""

    def __init__(self, rank: int, ranks: int, folder: str, gpu: int) -> None:
        self.torch = importlib.import_module("torch")
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        self.rank, self.ranks, self.folder = rank, ranks, Path(folder)
        self.torch.set_num_threads(1)
        if gpu >= 0:
            self.torch.cuda.set_device(gpu)
        self.device = self.torch.device("cpu" if gpu < 0 else f"cuda:{gpu}")
        self.torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
        )
        self.parallel = importlib.import_module("ferry_ep.transformers")
        self.transformers = importlib.import_module("transformers")
        self.groups: list = []
        #: Pairs of a row and an expert of this rank that its experts evaluated.
        self.pairs = 0
        #: Collectives of torch that layers of experts called.
        self.collectives: collections.Counter = collections.Counter()

    def connect(self, config, ep_mesh):
        """Makes a simulated group of the mesh's processes, whose names are those of its ranks."""
        group = ep_mesh.get_group()
        members = "-".join(map(str, self.torch.distributed.get_process_group_ranks(group)))
        path = self.folder / f"group {members} {len(self.groups)}"
        made = ferry.Group.simulated_at(str(path), ep_mesh.get_local_rank(), ep_mesh.size(), timeout=100)
        self.groups.append((made, ferry.Communicator(made, ferry.Plan(made, config))))
        return self.groups[-1][1]

    def register(self, **options):
        """Registers Ferry: simulated, or on the GPU that all ranks share."""
        where = {"connect": self.connect} if self.device.type == "cpu" else {"share_gpus": True}
        wanted = {"max_tokens_per_rank": 16, "deadline": 60.0} | where | options
        self.registration = self.parallel.register(**wanted)
        return self.registration

    def load(self, path: Path, implementation: str, *, experts: str = "grouped_mm", **sizes):
        """Loads this rank's part of a model."""
        config = self.transformers.DistributedConfig(ep_implementation=implementation, **sizes)
        kinds = self.transformers.AutoModelForCausalLM
        model = kinds.from_pretrained(
            path,
            dtype=self.torch.bfloat16,
            distributed_config=config,
            attn_implementation="eager",
            experts_implementation=experts,
        )
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                self._watch(module)
        return model

    def _watch(self, experts) -> None:
        """Lets a layer record the pairs and, in eager passes, torch's collectives."""
        debug = importlib.import_module("torch.distributed.tensor.debug")
        gate, forward = experts._apply_gate, experts.forward

        def apply_gate(rows):
            self.pairs += int((rows != 0).any(dim=-1).sum())
            return gate(rows)

        def counted(*arguments):
            if self.torch.is_grad_enabled():
                return forward(*arguments)
            with debug.CommDebugMode() as mode:
                sums = forward(*arguments)
            for kind, count in mode.get_comm_counts().items():
                self.collectives[str(kind).rpartition(".")[2]] += count
            return sums

        experts._apply_gate, experts.forward = apply_gate, counted

    def generated(self, model, prompt) -> list:
        """Returns greedy tokens."""
        with self.torch.no_grad():
            tokens = model.generate(
                prompt.to(self.device),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        return tokens.tolist()

    def calls(self, model, tokens) -> dict:
        """Returns what the experts of a pass call: torch's collectives by name, Ferry's calls, and the pairs
        that they evaluate.
        """
        before = self._counts()
        self.pairs, self.collectives = 0, collections.Counter()
        with self.torch.no_grad():
            model(tokens.to(self.device))
        return {"collectives": dict(self.collectives), "ferry": self._counts() - before, "pairs": self.pairs}

    def _counts(self) -> int:
        return sum(sum(communicator._end.native.counts()) for communicator in self.registration.communicators)


def prompt_of(torch, number: int, length: int = 4):
    """Returns a prompt of one sequence."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randint(0, 24, (1, length), generator=generator)


def gradients(me: Rank, model, tokens) -> dict:
    """Returns the loss of a pass, and gradients by parameter: those of experts are of this rank's."""
    tokens = tokens.to(me.device)
    loss = model.train()(tokens, labels=tokens).loss
    loss.backward()
    found = {"loss": loss.item()}
    for name, parameter in model.named_parameters():
        of = parameter.grad
        if hasattr(of, "to_local"):
            of = of.to_local() if ".experts." in name else of.full_tensor()
        if of is not None:
            found[name] = of.float().cpu()
    return found


def main(sizes: dict, implementations: list) -> None:
    """Loads, runs and trains each model of the folder with each implementation, and writes what came of it.
    Arguments of the process: this rank, their number, the folder, and a GPU or -1.
    """
    rank, ranks, folder, gpu = sys.argv[1:]
    me = Rank(int(rank), int(ranks), folder, int(gpu))
    registration = me.register()
    shared = sizes.get("tp_size", 1)
    # Ranks of other batches have one of another length.
    batch = me.rank // shared
    prompt = prompt_of(me.torch, batch, 5 - batch % 2)
    results = {}
    for path in sorted(me.folder.glob("*Config")):
        for implementation in implementations:
            model = me.load(path, implementation, **sizes)
            results[path.name, implementation] = {
                "tokens": me.generated(model, prompt),
                **me.calls(model, prompt),
                "gradients": gradients(me, model, prompt_of(me.torch, batch, 6)),
            }
    registration.close()
    me.torch.save(results, me.folder / f"{rank}.pt")
    for group, communicator in me.groups:
        communicator.close()
        group.close()
    me.torch.distributed.barrier()
    me.torch.distributed.destroy_process_group()
