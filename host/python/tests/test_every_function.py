"""Every public function with wrong arguments, closed and in a fork: an exception of Ferry, and nothing else.

The functions and their parameters are read from the stubs, so that a new one is missing here until it is
described. Each is in a state in which it would be called, with arguments that are right but for one.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import ferry_ep as ferry
import numpy as np
import pytest
import stubs
import wrong
from conftest import Bench
from oracle import bf16, bits

PUBLIC = stubs.public()
#: Made by the library alone: a wrong argument is an exception of any kind.
MADE = {"View.__init__", "ViewArray.__init__", "DeviceArray.__init__", "Fault.__new__"}
MADE |= {"PreparedCombine.__new__", "PreparedDispatch.__new__"}
#: Its argument is torch's.
UNSWEPT = {"torch_bootstrap"}
#: State of the round before each call; "idle" for all others.
STATES = {
    "dispatch_wait": "dispatch sent",
    "dispatch_counts": "dispatch sent",
    "received": "dispatch sent",
    "combine": "dispatched",
    "combine_async": "dispatched",
    "prepare_combine": "dispatched",
    "give_up": "dispatched",
    "combine_wait": "combine sent",
}
#: Parameters that are written.
WRITTEN = {"out", "weights"}
#: Calls for all ranks, whose fields are the arguments of "Communicators.together.dispatch" and so on.
CALLS = {
    "dispatch": ferry.Dispatch,
    "dispatch_async": ferry.DispatchAsync,
    "dispatch_counts": ferry.DispatchCounts,
    "dispatch_wait": ferry.DispatchWait,
    "combine": ferry.Combine,
    "combine_async": ferry.CombineAsync,
    "combine_wait": ferry.CombineWait,
    "give_up": ferry.GiveUp,
}
PUBLIC |= {
    f"Communicators.together.{name}": [
        stubs.Parameter(field.name, field.type, field.default is not dataclasses.MISSING, False)
        for field in dataclasses.fields(kind)
    ]
    for name, kind in CALLS.items()
}


class Rig:
    """Handles and right arguments."""

    def __init__(self, ranks: int, **config) -> None:
        self.of = Bench(ranks, **config)
        self.problem = self.of.problem(1)
        self.x, self.ids, self.weights = self.problem.arguments
        self.other = Bench(1)
        self.closed_array = self.other.ranks[0].empty((5, 64), "bf16")
        self.other.ranks.close()
        self.other = Bench(1)
        owner = self.of.ranks[0] if ranks > 1 else self.other.ranks[0]
        self.other_array = owner.empty((5, 64), "bf16")
        self.rows = self.sums = None
        self.calls = {}

    def array(self, name: str) -> np.ndarray:
        """Returns an array that is right, or would be with another plan, for a parameter of a rank."""
        rows, tokens = self.of.plan.max_rows, 5
        kinds = {
            "x": (np.uint16, (tokens, 64)),
            "topk_ids": (np.int32, (tokens, 2)),
            "topk_weights": (np.float32, (tokens, 2)),
            "input_scale": (np.float32, (1,)),
            "tokens_on_device": (np.uint32, (1,)),
            "expert_rows": (np.uint16, (rows, 64)),
            "row_weights": (np.float32, (rows,)),
            "row_scales": (np.float32, (tokens,)),
            "bias": (np.uint16, (64,)),
            "bias2": (np.uint16, (64,)),
            "residual": (np.uint16, (tokens, 64)),
            "initial": (np.uint16, (tokens, 64)),
            "received_weights": (np.float32, (rows, 2)),
            "out": (np.uint16, (tokens, 64)),
            "weights": (np.float32, (tokens, 2)),
            "gates_and_ups": (np.uint16, (4, 256)),
            "row_offsets": (np.uint32, (3,)),
            "scale_offsets": (np.uint32, (2,)),
            "input_scales": (np.float32, (2,)),
            "array": (np.float32, (4, 8)),
            "values": (np.float32, (4,)),
            "bits": (np.uint16, (4,)),
        }
        kind, shape = kinds[name]
        return np.zeros(shape, kind)

    def reach(self, state: str) -> None:
        """Leads an idle round there."""
        if state == "dispatch sent":
            self.of.together(ferry.DispatchAsync, self.x, self.ids, self.weights)
        if state in ("dispatched", "combine sent"):
            self.rows = self.of.together(ferry.Dispatch, self.x, self.ids, self.weights)
        if state == "combine sent":
            self.sums = self.of.together(ferry.CombineAsync, self.answers())

    def answers(self) -> list[np.ndarray]:
        return [self.of.answers(rank, output) for rank, output in enumerate(self.rows)]

    def end(self) -> None:
        """Ends the round, whose sums are to be right."""
        state = self.of.ranks[0].round
        if state == "idle":
            self.reach("dispatched")
        if state == "dispatch sent":
            self.rows = self.of.together(ferry.DispatchWait, like=self.x[0])
        if state == "combine sent":
            self.of.together(ferry.CombineWait)
        else:
            self.sums = self.of.together(ferry.Combine, self.answers())
        for rank, given in enumerate(self.sums):
            np.testing.assert_array_equal(given, bits(bf16(self.problem.sums(rank, "reduced"))))

    def drop(self) -> None:
        for rank in [*self.of.ranks, *self.other.ranks]:
            rank._end.native.drop()


def of_one(rig: Rig) -> dict:
    """Returns each function of a rank, of plans and of values, with right arguments."""
    (rank,) = rig.of.ranks
    x, ids, weights = rig.x[0], rig.ids[0], rig.weights[0]
    device = rank.empty((4, 8), "f32")
    x_there, ids_there = rank.empty(x.shape, "bf16"), rank.empty(ids.shape, "i32")
    x_there.copy_from(x)
    ids_there.copy_from(ids)
    outputs, sums = rank.outputs(), rank.combined()
    sent = {"x": x, "topk_ids": ids, "topk_weights": weights}
    rows = rig.array("expert_rows")
    offsets = np.array([0, 2, 4], np.uint32)
    bootstrap = ferry.Bootstrap.all_gather(lambda data: [data], 0, 1)
    host = ferry.DispatchOutput(row_offsets=offsets, tokens=np.zeros((4, 64), np.uint16))
    numbers = np.ones((4, 8), np.float32)
    return {
        "Communicator.__init__": (ferry.Communicator, {"group": rig.of.group, "plan": rig.of.plan}),
        "Communicator.limit_sms": (rank.limit_sms, {"max_sms": None}),
        "Communicator.set_deadline": (rank.set_deadline, {"deadline": 20.0}),
        "Communicator.outputs": (rank.outputs, {"like": x}),
        "Communicator.view": (rank.view, {}),
        "Communicator.combined": (rank.combined, {"like": x}),
        "Communicator.empty": (rank.empty, {"shape": (1,), "data_type": "f32"}),
        "Communicator.synchronize": (rank.synchronize, {}),
        "Communicator.check": (rank.check, {}),
        "Communicator.assume_no_graphs": (rank.assume_no_graphs, {}),
        "Communicator.release_thread": (rank.release_thread, {}),
        "Communicator.close": (rank.close, {}),
        "Communicator.dispatch": (rank.dispatch, sent),
        "Communicator.dispatch_async": (rank.dispatch_async, sent),
        "Communicator.dispatch_counts": (rank.dispatch_counts, {}),
        "Communicator.received": (rank.received, {}),
        "Communicator.dispatch_wait": (rank.dispatch_wait, {"like": x}),
        "Communicator.combine": (rank.combine, {"expert_rows": rows}),
        "Communicator.combine_async": (rank.combine_async, {"expert_rows": rows}),
        "Communicator.combine_wait": (rank.combine_wait, {}),
        "Communicator.give_up": (rank.give_up, {}),
        "Communicator.prepare_dispatch": (
            rank.prepare_dispatch,
            {"x": x_there, "topk_ids": ids_there, "out": outputs},
        ),
        "Communicator.prepare_combine": (rank.prepare_combine, {"expert_rows": outputs.tokens, "out": sums}),
        "Communicator.silu": (
            rank.silu,
            {
                "gates_and_ups": rig.array("gates_and_ups"),
                "row_offsets": offsets,
                "format": "mxfp8:tiled",
                "scale_offsets": rig.array("scale_offsets"),
            },
        ),
        "Bootstrap.tcp": (
            ferry.Bootstrap.tcp,
            {"address": "127.0.0.1:0", "rank": 0, "ranks": 1, "timeout": 1.0},
        ),
        "Bootstrap.all_gather": (ferry.Bootstrap.all_gather, {"function": list, "rank": 0, "ranks": 1}),
        "Bootstrap.gather": (bootstrap.gather, {"bytes": b"x"}),
        "DeviceArray.numpy": (device.numpy, {}),
        "DeviceArray.copy_from": (device.copy_from, {"array": numbers}),
        "DispatchOutput.rows_of": (host.rows_of, {"group": 0}),
        "Group.simulated": (ferry.Group.simulated, {"ranks": 2}),
        "Group.simulated_at": (
            ferry.Group.simulated_at,
            {"path": "/nowhere/ferry", "rank": 1, "ranks": 2, "timeout": 0.01},
        ),
        "Group.local": (ferry.Group.local, {"devices": [99]}),
        "Group.node": (ferry.Group.node, {"bootstrap": bootstrap, "device": 99}),
        "Group.nvshmem": (ferry.Group.nvshmem, {"bootstrap": bootstrap, "device": 99}),
        "Group.check_links": (rig.of.group.check_links, {}),
        "Group.device": (rig.of.group.device, {"rank": 0}),
        "Group.close": (rig.of.group.close, {}),
        "Plan.__new__": (ferry.Plan, {"group": rig.of.group, "config": rig.of.config}),
        "Plan.first_expert": (rig.of.plan.first_expert, {"rank": 0}),
        "Plan.shared_tokens": (rig.of.plan.shared_tokens, {"rank": 0, "tokens": 1}),
        "Plan.output_layout": (rig.of.plan.output_layout, {}),
        "PreparedDispatch.__call__": (rank.prepare_dispatch(x_there, ids_there, out=outputs), {}),
        "PreparedCombine.__call__": (rank.prepare_combine(outputs.tokens, out=sums), {}),
        "Tensor.__new__": (ferry.Tensor, {"address": 1, "data_type": "f32", "shape": (1,)}),
        "ViewArray.numpy": (device.numpy, {}),
        "View.__init__": (ferry.View, {"blocks": rank._end.blocks}),
        "ViewArray.__init__": (
            ferry.ViewArray,
            {"view": None, "address": 1, "data_type": "f32", "shape": [1], "strides": [1]},
        ),
        "DeviceArray.__init__": (
            ferry.DeviceArray,
            {"blocks": rank._end.blocks, "data_type": "f32", "shape": (1,)},
        ),
        "Fault.__new__": (ferry.Fault, {"words": [0] * 13, "gpu_ranks": None}),
        "PreparedDispatch.__new__": (
            ferry.PreparedDispatch,
            {"communicator": rank._end.native, "input": None, "output": None},
        ),
        "PreparedCombine.__new__": (
            ferry.PreparedCombine,
            {"communicator": rank._end.native, "input": None, "output": None},
        ),
        "decode": (ferry.decode, {"plan": rig.of.plan, "output": host}),
        "from_bf16": (ferry.from_bf16, {"bits": rig.array("bits")}),
        "to_bf16": (ferry.to_bf16, {"values": rig.array("values")}),
        "torch_bootstrap": (ferry.torch_bootstrap, {}),
    }


def of_all(rig: Rig) -> dict:
    """Returns each function of all ranks, with right arguments."""
    ranks = rig.of.ranks
    sent = {"x": rig.x[0], "topk_ids": rig.ids[0], "topk_weights": rig.weights[0]}
    rows = {"expert_rows": rig.array("expert_rows")}
    right = {"dispatch": sent, "dispatch_async": sent, "dispatch_wait": {"like": rig.x[0]}}
    right |= {"combine": rows, "combine_async": rows}

    def together(name: str) -> tuple:
        """Returns a function whose arguments are those of the last rank's call."""
        kind, given = CALLS[name], right.get(name, {})
        return lambda **last: ranks.together([kind(**given), kind(**last)]), given

    return {
        **{f"Communicators.together.{name}": together(name) for name in CALLS},
        "Communicators.__init__": (ferry.Communicators, {"group": rig.of.group, "plan": rig.of.plan}),
        "Communicators.together": (ranks.together, {"calls": [ferry.Dispatch(**sent)] * 2}),
        "Communicators.synchronize": (ranks.synchronize, {}),
        "Communicators.check": (ranks.check, {}),
        "Communicators.close": (ranks.close, {}),
    }


def cells(rig: Rig, parameter: stubs.Parameter) -> dict[str, object]:
    """Returns the wrong values of a parameter."""
    name, annotation = parameter.name, parameter.annotation
    if name == "data_type" and annotation == "str":
        return {"a text": "f64", "a number": 7, "True": True, "None": None, "an object": object()}
    if name == "stream" and annotation == "Any":
        return wrong.STREAMS
    if name == "like":
        return wrong.objects()
    if annotation == "Any" or (annotation == "object" and name != "owner"):
        made = wrong.tensors(rig.array(name), rig, name in WRITTEN)
        if name in ("values", "bits"):
            # Numbers of any kind are values; these are read alone, wherever they begin.
            for of in ("a number", "True", "a list", "float64", "another byte order", "backwards"):
                made.pop(of, None)
            for of in ("a dimension more", "no dimension", "a text", "of memory that is gone", "a mock"):
                made.pop(of, None)
            made.pop("beyond its memory")
            made.pop("masked")
        return made
    if annotation.startswith(("Each", "Sequence[Call]")):
        return of_each(rig, parameter)
    if annotation == "DispatchOutput | None":
        return wrong.objects() | {"without tensors": ferry.DispatchOutput(rows=4)}
    if annotation == "object":
        return {}
    return wrong.by_annotation(annotation)


def of_each(rig: Rig, parameter: stubs.Parameter) -> dict[str, object]:
    """Returns the wrong values of a parameter with a value for each rank."""
    name = parameter.name
    count = len(rig.of.ranks)
    if name == "streams":
        right, wrongs = 0, wrong.STREAMS
    else:
        right, wrongs = ferry.Dispatch(rig.x[0], rig.ids[0]), wrong.objects()
        wrongs |= {"another kind": ferry.GiveUp(), "no value": ferry.Dispatch}
    made = {"a number": 7, "an array": np.zeros((2, 2)), "an object": object()}
    made |= {"too few": [right] * (count - 1), "too many": [right] * (count + 1)}
    if name != "streams":
        made["a text"] = "ab"
    return made | {f"one of them {of}": [right] * (count - 1) + [value] for of, value in wrongs.items()}


def called(name: str, call, given: dict) -> object:
    """Makes a call; its positional parameters are those up to the last that is given."""
    order = [each.name for each in PUBLIC[name] if each.is_positional]
    last = max((at for at, each in enumerate(order) if each in given), default=-1)
    listed = [given.get(each, 0) for each in order[: last + 1]]
    return call(*listed, **{of: value for of, value in given.items() if of not in order})


def refusals(rig: Rig, name: str, call, given: dict) -> tuple[int, list[str]]:
    """Calls a function with each wrong value of each parameter. Returns the number of calls, and those that
    were not refused as they should.
    """
    count, found = 0, []
    for parameter in PUBLIC[name]:
        for of, value in cells(rig, parameter).items():
            count += 1
            try:
                called(name, call, given | {parameter.name: value})
            except ferry.FerryError as error:
                assert type(error) is not ferry.FerryError and str(error)
            except Exception as error:
                if name not in MADE:
                    found.append(f"{parameter.name}, {of}: {type(error).__name__}: {error}"[:160])
            else:
                found.append(f"{parameter.name}, {of}: not refused")
    return count, found


def table(rig: Rig) -> dict:
    return of_one(rig) if len(rig.of.ranks) == 1 else of_all(rig)


@pytest.mark.parametrize("name", [name for name, given in PUBLIC.items() if given and name not in UNSWEPT])
def test_a_wrong_argument_is_refused_and_changes_nothing(name):
    rig = Rig(2 if name.startswith("Communicators.") else 1)
    try:
        call, given = table(rig)[name]
        state = STATES.get(name.rpartition(".")[2], "idle") if name.startswith("Communicator") else "idle"
        rig.reach(state)
        count, found = refusals(rig, name, call, given)
        assert not found, "\n".join(found)
        assert rig.of.ranks[0].round == state and (count > 0 or name == "Communicator.view")
        rig.end()
    finally:
        rig.drop()


def test_every_public_function_is_in_the_table():
    rigs = Rig(1), Rig(2)
    known = table(rigs[0]).keys() | table(rigs[1]).keys()
    for rig in rigs:
        rig.drop()
    assert {name for name, given in PUBLIC.items() if given} <= known
    assert known <= PUBLIC.keys()


@pytest.mark.parametrize(
    ("field", "annotation"), [(field.name, field.type) for field in dataclasses.fields(ferry.Config)]
)
def test_a_wrong_field_of_a_configuration_is_a_problem(field, annotation):
    group = ferry.Group.simulated(2)
    sizes = {"experts": 4, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 2}
    for value in wrong.by_annotation(annotation).values():
        with pytest.raises(ferry.PlanError) as raised:
            ferry.Plan(group, ferry.Config(**(sizes | {field: value})))
        assert [problem.field for problem in raised.value.problems] == [field]


#: What works after close and in a fork; all else is a ClosedError, or a ForkError.
ALWAYS = {"Communicator.release_thread", "Communicator.outputs", "Communicator.combined"}
ALWAYS |= {"Plan.first_expert", "Plan.shared_tokens", "Plan.output_layout", "Tensor.__new__"}
ALWAYS |= {"DispatchOutput.rows_of", "decode", "from_bf16", "to_bf16"}
ALWAYS |= {"Bootstrap.all_gather", "Group.simulated", "Fault.__new__"}
#: Nothing to close a second time, and what no communicator belongs to.
CLOSED = ALWAYS | {"Communicator.close", "Communicators.close", "Group.close", "Group.device"}
CLOSED |= {
    "Group.check_links",
    "Plan.__new__",
    "Bootstrap.gather",
    "Communicator.__init__",
    "Communicators.__init__",
}
#: Handles of other kinds: none here, and so errors of their own.
OTHERS = {"Bootstrap.tcp", "Group.simulated_at", "Group.local", "Group.node", "Group.nvshmem"}
OTHERS |= {"Fault.__new__", "torch_bootstrap", "View.__init__", "ViewArray.__init__"}
OTHERS |= {"PreparedCombine.__new__", "PreparedDispatch.__new__"}


def outcomes(calls: dict, excepted: set[str], error: type) -> list[str]:
    """Makes each call. Returns those that neither raise ``error`` nor, if they are excepted, work."""
    found = []
    for name, (call, given) in calls.items():
        if name in OTHERS:
            continue
        try:
            called(name, call, given)
        except error:
            if name in excepted:
                found.append(f"{name}: refused")
        except Exception as other:
            found.append(f"{name}: {type(other).__name__}: {other}"[:160])
        else:
            if name not in excepted:
                found.append(f"{name}: not refused")
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_after_close_say_so(ranks):
    rig = Rig(ranks)
    calls = table(rig)
    rig.of.ranks.close()
    found = outcomes(calls, CLOSED - {"Group.close"}, ferry.ClosedError)
    assert [each for each in found if not each.startswith("Group.close")] == []
    assert "closed" in repr(rig.of.ranks[0]) and "closed" in repr(rig.of.ranks)
    assert repr(rig.of.group) and repr(rig.of.plan) and "ended" in repr(rig.closed_array)


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")  # From 3.12 on, a fork with threads is warned of.
import test_every_function as here
import ferry_ep as ferry
rigs = [here.Rig(1), here.Rig(2)]
calls = [here.table(rig) for rig in rigs]
if os.fork() == 0:
    for rig, table in zip(rigs, calls):
        print(*here.outcomes(table, here.ALWAYS, ferry.ForkError), sep="\\n", end="")
        print(repr(rig.of.group), repr(rig.of.ranks), repr(rig.closed_array), file=sys.stderr)
    sys.stdout.flush()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_calls_in_a_fork_say_so():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done
    assert done.stderr.count("of another process") == 5, done.stderr
