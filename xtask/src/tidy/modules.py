"""Reads Python modules for `cargo xtask tidy`: from a JSON object of texts by path, to one of what each imports
from the others, and of the names with an underscore that it defines and uses.
"""

import ast
import json
import sys


def file_of(module, files):
    """Returns the file of a module, given as its path without an ending, if it is one of these."""
    names = (f"{module}.py", f"{module}.pyi", f"{module}/__init__.py")
    return next((name for name in names if name in files), None)


def imported(path, node, files):
    """Yields the file and, if it is no module, the name of each import."""
    if isinstance(node, ast.Import):
        for name in node.names:
            yield file_of(name.name.replace(".", "/"), files), None
        return
    parts = path.split("/")[: -node.level] if node.level else []
    base = "/".join(parts + (node.module.split(".") if node.module else []))
    for name in node.names:
        module = file_of(f"{base}/{name.name}", files)
        yield module or file_of(base, files), None if module else name.name


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def facts_of(path, text, files):
    tree = ast.parse(text)
    imports, defines, uses = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for target, name in imported(path, node, files):
                if target not in (None, path):
                    imports.add(target)
                    if name is not None and is_private(name):
                        uses.add((node.lineno, name))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defines.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defines.add(node.id)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own:
                uses.add((node.lineno, node.attr))
            elif isinstance(node.ctx, ast.Store):
                defines.add(node.attr)
    defines = sorted(filter(is_private, defines))
    return {"imports": sorted(imports), "defines": defines, "uses": sorted(uses)}


files = json.load(sys.stdin)
found = {}
for path, text in files.items():
    try:
        found[path] = facts_of(path, text, files)
    except SyntaxError as error:
        found[path] = {"imports": [], "defines": [], "uses": [], "unread": str(error)}
json.dump(found, sys.stdout)
