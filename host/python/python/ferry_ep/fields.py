"""Docstrings of fields, which Python drops, in the docstring of their class, which ``help`` shows."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import TypeVar

__all__ = ["with_fields"]

Class = TypeVar("Class", bound=type)


def with_fields(cls: Class) -> Class:
    """Adds the texts that follow the fields of ``cls`` to its docstring, if its source is there."""
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, SyntaxError):
        return cls
    lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Fields:"]
    body = found.body if isinstance(found, ast.ClassDef) else []
    for field, text in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
            continue
        lines += ["", ast.unparse(field)]
        if isinstance(text.value, ast.Constant):
            lines.append(textwrap.indent(inspect.cleandoc(str(text.value.value)), "    "))
    cls.__doc__ = "\n".join(lines)
    return cls
