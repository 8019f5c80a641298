"""Imports of the package's modules, read from their source: cycles, and imports in functions."""

import ast
import pathlib

import pytest

import pycollective

ROOT = pathlib.Path(pycollective.__file__).parent
COMPILED = ("_core", "_nn")
#: Modules that import another one in a function because that one needs an extra or OpenSSL at its top.
FOR_EXTRAS = ("keras.callbacks.tensorboard", "launch.description", "launch.peers")


def modules():
    found = {}
    for path in ROOT.glob("**/*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(name, node):
    """Yield the modules that an import statement of a module names, without compiled ones."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            inside = MODULES[name].name == "__init__.py"
            parents = name.split(".")[: None if inside and node.level == 1 else inside - node.level]
            base = ".".join([*parents, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name not in COMPILED:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def statements(body, inner=False):
    """Yield import statements, each with True if it is in a function."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, inner
        function = inner or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for part in ("body", "orelse", "finalbody", "handlers"):
            yield from statements(getattr(node, part, ()), function)


#: The modules that each module imports at its top (for type checkers too), and in functions.
TOP, INNER = {}, {}
for _name, _path in MODULES.items():
    for _node, _inner in statements(ast.parse(_path.read_text()).body):
        _found = (INNER if _inner else TOP).setdefault(_name, set())
        _found |= set(imported(_name, _node)) & set(MODULES) - {_name}


def cycles(edges):
    """Return the sets of modules that import each other, by Tarjan's algorithm."""
    number, low, stack, found = {}, {}, [], []

    def visit(module):
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in edges.get(module, ()):
            if other not in number:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == number[module]:
            begin = stack.index(module)
            found.append(set(stack[begin:]))
            del stack[begin:]

    for module in list(edges):
        if module not in number:
            visit(module)
    return found


def is_among(name, packages):
    return any(f"{name}.".startswith(f"pycollective.{package}.") for package in packages)


def test_import_cycles_have_at_most_three_modules():
    assert not [sorted(cycle) for cycle in cycles(TOP) if len(cycle) > 3]


@pytest.mark.parametrize("names", [("a", "b", "c"), ("a",)])
def test_cycles_of_a_graph_are_found(names):
    ring = {name: {other} for name, other in zip(names, (*names[1:], names[0]), strict=True)}
    assert cycles(ring | {"above": {names[0], "below"}}).count(set(names)) == 1


def test_functions_import_no_module_of_the_package():
    inner = {name: found for name, found in INNER.items() if found}
    assert not {name for name in inner if not is_among(name, FOR_EXTRAS)}
