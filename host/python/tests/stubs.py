"""Public functions of the package and their parameters, read from its stubs and typed sources."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import NamedTuple

import ferry_ep as ferry

FOLDER = Path(ferry.__file__).parent


class Parameter(NamedTuple):
    """A parameter: its annotation as text, and whether a call may leave it out."""

    name: str
    annotation: str
    has_default: bool
    is_positional: bool


def classes(path: Path) -> dict[str, ast.ClassDef]:
    body = ast.parse(path.read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def parameters(function: ast.FunctionDef) -> list[Parameter]:
    of = function.args
    plain = [*of.posonlyargs, *of.args]
    defaults = len(plain) - len(of.defaults)
    found = [
        (each, at >= defaults, each in of.posonlyargs)
        for at, each in enumerate(plain)
        if each.arg not in ("self", "cls")
    ]
    keywords = zip(of.kwonlyargs, of.kw_defaults, strict=True)
    found += [(each, default is not None, False) for each, default in keywords]
    return [
        Parameter(each.arg, ast.unparse(each.annotation) if each.annotation else "Any", has, positional)
        for each, has, positional in found
    ]


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__new__", "__init__", "__call__")


def methods(body: list[ast.stmt]) -> dict[str, list[Parameter]]:
    """Returns the functions and, without parameters, the properties of a class."""
    found = {}
    for node in body:
        if not isinstance(node, ast.FunctionDef) or not is_public(node.name):
            continue
        if any(ast.unparse(each) == "overload" for each in node.decorator_list):
            continue
        found[node.name] = parameters(node)
    return found


def public() -> dict[str, list[Parameter]]:
    """Returns the parameters of every public function, by its name: "Plan.first_expert", "decode"."""
    native = classes(FOLDER / "core/_ferry.pyi")
    found: dict[str, list[Parameter]] = {}
    for name in ferry.__all__:
        value = getattr(ferry, name)
        if inspect.isfunction(value):
            (node,) = ast.parse(inspect.getsource(value)).body
            found[name] = parameters(node)
        if not inspect.isclass(value) or issubclass(value, Exception):
            continue
        for base in reversed(value.__mro__):
            if not base.__module__.startswith("ferry_ep"):
                continue
            if base.__module__ in ("ferry_ep", "ferry_ep.core._ferry"):
                node = native[base.__name__]
            else:
                node = classes(Path(inspect.getsourcefile(base)))[base.__name__]
            found |= {f"{name}.{of}": given for of, given in methods(node.body).items()}
    return found
