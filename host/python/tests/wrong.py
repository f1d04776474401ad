"""Wrong arguments, by the annotation of a parameter."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import ferry_ep as ferry
import numpy as np

try:
    import torch
except ImportError:
    torch = None


class Interface:
    """An array with an interface of its own making."""

    def __init__(self, name, **interface):
        setattr(self, name, {"version": 3, "strides": None, **interface})


class Capsule:
    """An array whose ``__dlpack__`` returns something."""

    def __init__(self, returned):
        self.returned = returned

    def __dlpack__(self, **options):
        if isinstance(self.returned, Exception):
            raise self.returned
        return self.returned


def on_gpu(array, **changes):
    given = array.__array_interface__
    names = ("shape", "typestr", "data", "strides")
    return Interface("__cuda_array_interface__", **({name: given[name] for name in names} | changes))


def stretched(array):
    """Returns a view that ends behind its memory."""
    own = array.copy()
    return np.lib.stride_tricks.as_strided(own, (max(len(array), 1) + 9, *array.shape[1:]), own.strides)


def resized(array):
    """Returns a view of memory that was given back."""
    owner = np.concatenate([array.ravel(), np.zeros(4096, array.dtype)])
    view = owner[: array.size].reshape(array.shape)
    owner.resize(0, refcheck=False)
    return view


def masked(array):
    return np.ma.MaskedArray(array, mask=np.ones(array.shape, bool))


def of_torch(array):
    """Returns tensors of torch without all their memory, if torch is there."""
    if torch is None:
        return {}
    kind = torch.bfloat16 if array.dtype == np.uint16 else None
    made = {}
    for name, left in (("freed", 0), ("shrunk", array.nbytes - 1)):
        # uint32 has no name of its own here.
        given = array.view(np.int32) if array.dtype == np.uint32 else array
        made[name] = torch.from_numpy(given).clone()
        made[name] = made[name].view(kind) if kind else made[name]
        made[name].untyped_storage().resize_(left)
    return made


def objects():
    made = {"a number": 7, "a text": "x", "True": True, "a list": [1, 2], "a dict": {}, "an object": object()}
    return made | {"a module": np}


def tensors(array: np.ndarray, rig, written: bool = False) -> dict[str, object]:
    """Returns wrong values for an argument for which ``array`` is right."""
    made = objects() | {
        "float64": array.astype(np.float64),
        "another byte order": array.astype(array.dtype.newbyteorder()),
        "a dimension more": array[None, None],
        "no dimension": np.array(1, array.dtype),
        "beyond its memory": stretched(array),
        "of memory that is gone": resized(array),
        "masked": masked(array),
        "another device": on_gpu(array),
        "no address": on_gpu(array, data=(0, False)),
        "a mock": MagicMock(),
        "a class of arrays": ferry.DeviceArray,
        "a class": dict,
        "no interface": Interface("__cuda_array_interface__"),
        "half an interface": Interface("__cuda_array_interface__", typestr="<f4", shape=(1,)),
        "no capsule": Capsule(7),
        "a failing capsule": Capsule(RuntimeError("no")),
        "a text of objects": np.array([["a"]], dtype=object),
        "a closed array": rig.closed_array,
        "another rank's": rig.other_array,
        "a tensor by address 0": ferry.Tensor(0, "f32", array.shape or (1,)),
    }
    if len(array) > 1:
        made["backwards"] = array[::-1]
    if written:
        frozen = array.copy()
        frozen.flags.writeable = False
        made["read-only"] = frozen
        made["read-only, of a capsule"] = Capsule(frozen.__dlpack__(max_version=(1, 0)))
    return made | of_torch(array)


NUMBERS = {"-1": -1, "True": True, "a fraction": 1.5, "a text": "5", "a list": [1], "huge": 2**70}
NUMBERS |= {f"a {name} tensor": given for name, given in of_torch(np.ones((), np.int32)).items()}
STREAMS = NUMBERS | {"a text": "fast", "an object": object()}
STREAMS |= {"a stream without a handle": SimpleNamespace(cuda_stream="x"), "a class": dict}


def by_annotation(annotation: str) -> dict[str, object]:
    """Returns wrong values for a parameter that is no tensor."""
    kinds = {each.strip() for each in annotation.split("|")}
    optional = "None" in kinds
    kinds.discard("None")
    nothing = {} if optional else {"None": None}
    if kinds == {"int"}:
        return NUMBERS | nothing
    if kinds == {"int", "str"}:
        return NUMBERS | nothing | {"a text": "most"}
    if kinds == {"str"}:
        return nothing | {"a number": 7, "True": True, "an object": object(), "a list": [1]}
    if kinds in ({"bytes"}, {"bytes", "str"}):
        return nothing | {"a number": 7, "an object": object(), "numbers": [1000]}
    if kinds == {"bool"}:
        return nothing | {"a text": "yes", "1": 1, "a list": [True]}
    if kinds == {"float"}:
        return nothing | {"a text": "soon", "True": True, "a list": [1]}
    if kinds in ({"tuple[int, int]"}, {"tuple[float, float]"}):
        return nothing | {
            "a number": 7,
            "one": (1,),
            "three": (1, 2, 3),
            "texts": ("a", "b"),
            "True": (True, 1),
        }
    if kinds in ({"Sequence[int]"}, {"tuple[int, ...]"}, {"list[int]"}):
        return nothing | {"-1": (-1,), "a text": "ab", "fractions": (1.5,), "True": (True,), "huge": (2**70,)}
    return nothing | objects()
