"""Docstrings, examples and programs."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import pydoc
import re
import runpy
import subprocess
import sys
from pathlib import Path

import ferry_ep as ferry
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
READMES = [Path(__file__).parents[levels] / "README.md" for levels in (3, 1)]
GUIDE = Path(__file__).parent.parent.parent / "docs" / "python.md"


@pytest.mark.parametrize("module", ["ferry_ep", "ferry_ep.core.bits", "ferry_ep.core.config"])
def test_docstrings(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_examples(example):
    if example.startswith("torch"):
        pytest.importorskip("torch", reason="torch is not installed")
    subprocess.run([sys.executable, str(EXAMPLES / example)], check=True, timeout=120)


def test_the_guide(tmp_path, monkeypatch):
    """The guide's blocks of Python run, in order; some say in their first line what they need."""
    monkeypatch.chdir(tmp_path)
    blocks = [block.split("```")[0] for block in GUIDE.read_text().split("```python\n")[1:]]
    names: dict = {}
    ran = 0
    for block in blocks:
        first = block.splitlines()[0]
        if first.startswith("# With"):
            compile(block, str(GUIDE), "exec")
            continue
        exec(compile(block, str(GUIDE), "exec"), names)
        ran += 1
    assert ran >= 3


@pytest.mark.parametrize("readme", READMES, ids=["project", "package"])
def test_the_readme(readme):
    """README's block of Python runs as it stands."""
    (block,) = [part.split("```")[0] for part in readme.read_text().split("```python\n")[1:]]
    names: dict = {}
    exec(compile(block, str(readme), "exec"), names)
    assert [ferry.from_bf16(of).tolist() for of in names["sums"]] == [[[2.0] * 64]] * 2


@pytest.mark.parametrize(
    ("module", "arguments", "wanted"),
    [
        ("ferry_ep.demo", ["--ranks", "2", "--rounds", "1"], "largest relative error"),
        ("ferry_ep.check", [], "simulated group: works"),
        ("ferry_ep.check", [], "deep_ep: "),
        ("ferry_ep.bench", ["--rounds", "2", "--hidden", "64"], "no measure of a GPU"),
    ],
)
def test_programs(module, arguments, wanted, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    runpy.run_module(module, run_name="__main__")
    assert wanted in capsys.readouterr().out


def test_everything_public_says_what_it_is():
    for name in ferry.__all__:
        public = getattr(ferry, name)
        if isinstance(public, type):
            assert public.__doc__ and public.__doc__.strip(), name
            for method, value in vars(public).items():
                if not method.startswith("_") and callable(value):
                    assert value.__doc__, f"{name}.{method}"


def test_help_shows_fields():
    for public, names in (
        (ferry.Config, [field.name for field in dataclasses.fields(ferry.Config)]),
        (ferry.DispatchOutput, [field.name for field in dataclasses.fields(ferry.DispatchOutput)]),
    ):
        text = pydoc.render_doc(public, renderer=pydoc.plaintext)
        for name in names:
            assert re.search(rf"\b{name}: .*\n.* {{5}}\S", text), name
    assert "Longest wait of a kernel in seconds" in pydoc.render_doc(ferry.Config)


def test_docstrings_of_the_native_module_are_those_of_its_stub():
    stub = ast.parse((Path(ferry.__file__).parent / "core/_ferry.pyi").read_text())
    compared = 0
    for found in stub.body:
        public = getattr(ferry, found.name, None) if isinstance(found, ast.ClassDef) else None
        if public is None or public is not getattr(ferry._ferry, found.name):
            continue
        pairs = [(found, public)]
        for member in found.body:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("__"):
                pairs.append((member, getattr(public, member.name)))
        for node, value in pairs:
            wanted = ast.get_docstring(node)
            if wanted is not None:
                assert inspect.cleandoc(value.__doc__ or "") == wanted, f"{found.name}: {node.name}"
                compared += 1
    assert compared > 40
