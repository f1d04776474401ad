"""Exceptions and values: they pickle, copy and compare; handles say that they do not pickle."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle

import ferry_ep as ferry
import numpy as np
import pytest
from ferry_ep import errors


def a_fault() -> ferry.Fault:
    group = ferry.Group.simulated(1)
    config = ferry.Config(experts=2, top_k=1, hidden=8, max_tokens_per_rank=1)
    with ferry.Communicators(group, ferry.Plan(group, config)) as ranks:
        ranks[0].dispatch(np.zeros((1, 8), dtype=np.uint16), np.array([[-7]], dtype=np.int32))
        ranks[0].give_up()
        (fault,) = ranks.check()
    return fault


FAULT = a_fault()
#: What the exceptions with fields are made of.
FIELDS = {
    "PlanError": {"problems": [("hidden", "7", "it must be even")]},
    "CapacityError": {"field": "rows", "value": "7", "rule": "it must be even"},
    "TensorError": {"name": "x", "wanted": "memory", "given": "none"},
    "FaultError": {"fault": FAULT},
    "PeerTimeout": {"fault": FAULT},
    "PoisonedError": {"fault": FAULT},
    "PeerGaveUp": {"rank": 1, "peer": 2},
    "PeerFailed": {"rank": 1, "step": "windows"},
    "BootstrapError": {"lost_rank": 3},
}
CLASSES = [
    found for _, found in inspect.getmembers(ferry, inspect.isclass) if issubclass(found, ferry.FerryError)
]


def made(cls: type) -> ferry.FerryError:
    error = cls("the text", **FIELDS.get(cls.__name__, {}))
    error.note = ["of a user"]
    return error


def copies(value):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(value, protocol))
    yield copy.copy(value)
    yield copy.deepcopy(value)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_exceptions_pickle_copy_and_compare(cls):
    error = made(cls)
    # Fields of every exception are annotated.
    annotated = {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
    assert set(FIELDS.get(cls.__name__, {})) == annotated
    for again in copies(error):
        assert type(again) is cls and str(again) == "the text" and again.args == error.args
        assert vars(again) == vars(error) and again.note == ["of a user"]
        assert again == error and hash(again) == hash(error) and not again != error
    assert error != made(ferry.GroupError if cls is not ferry.GroupError else ferry.FerryError)
    assert error != cls("another text", **FIELDS.get(cls.__name__, {}))
    for name in FIELDS.get(cls.__name__, {}):
        other = made(cls)
        setattr(other, name, None)
        assert other != error


def test_every_exception_is_here():
    assert {cls.__name__ for cls in CLASSES} == {name for name in errors.__all__ if name != "Problem"}


def a_config() -> ferry.Config:
    return ferry.Config(experts=2, top_k=1, hidden=8, max_tokens_per_rank=1)


@pytest.mark.parametrize(
    "value",
    [
        FAULT,
        ferry.Problem("hidden", "7", "rule"),
        ferry.TensorLayout("x", "bf16", [1, 2], 4, 16),
        ferry.ReceivedCounts(1, 0, [1], [0]),
        a_config(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_pickle_copy_and_compare(value):
    for again in copies(value):
        assert again == value and not again != value and repr(again) == repr(value)
    assert value != object() and value is not None


def test_a_fault_keeps_all_of_its_record():
    names = [name for name in dir(ferry.Fault) if not name.startswith("_")]
    for again in copies(FAULT):
        assert {name: getattr(again, name) for name in names} == {
            name: getattr(FAULT, name) for name in names
        }
        assert str(again) == str(FAULT) and hash(again) == hash(FAULT)
    assert {FAULT} == {pickle.loads(pickle.dumps(FAULT))}
    with pytest.raises(ferry.ArgumentError):
        ferry.Fault([10**6] * 13, None)


def test_outputs_pickle_and_copy():
    out = ferry.DispatchOutput(tokens=np.arange(3), rows=3)
    for again in copies(out):
        assert again.rows == 3 and again.tokens.tolist() == [0, 1, 2] and again.scales is None
    for again in copies(ferry.SiluOutput(np.arange(2))):
        assert again.rows.tolist() == [0, 1]


def test_handles_copy_to_themselves_and_refuse_to_pickle(bench):
    of = bench(1, receive="view")
    (x,), (ids,), (weights,) = of.problem(1).arguments
    (rank,) = of.ranks
    rank.dispatch(x, ids, weights)
    array = rank.empty((2,), "f32")
    tensor = ferry.Tensor(array.address, "f32", (2,), owner=array)
    handles = [of.group, of.plan, of.ranks, rank, array, tensor, rank.view(), rank.view().tokens]
    handles.append(ferry.Bootstrap.all_gather(lambda data: [data], 0, 1))
    for handle in handles:
        assert copy.copy(handle) is handle and copy.deepcopy(handle) is handle
        with pytest.raises(TypeError, match=r"pickle"):
            pickle.dumps(handle)
        assert handle == copy.copy(handle)


def refuse(number: int):
    """Fails as a worker of a pool does."""
    group = ferry.Group.simulated(2)
    if number == 0:
        ferry.Plan(group, ferry.Config(experts=3, top_k=1, hidden=8, max_tokens_per_rank=1))
    if number == 1:
        raise ferry.PeerTimeout("late", FAULT)
    config = ferry.Config(experts=2, top_k=1, hidden=8, max_tokens_per_rank=1)
    with ferry.Communicators(group, ferry.Plan(group, config)) as ranks:
        ranks.together([ferry.Dispatch(1, 3), ferry.Dispatch(2, 4)])


def test_a_pool_brings_exceptions_back():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for number, cls in enumerate((ferry.PlanError, ferry.PeerTimeout, ferry.TensorError)):
            # It never answered where an exception could not be unpickled.
            with pytest.raises(cls) as raised:
                pool.apply_async(refuse, (number,)).get(timeout=60)
            if number == 0:
                assert raised.value.problems[0].field == "experts"
            if number == 1:
                assert raised.value.fault == FAULT
