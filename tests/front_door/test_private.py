"""The source of a package reads no private attributes of another package."""

import ast
import pathlib

import pycollective

ROOT = pathlib.Path(pycollective.__file__).parent
#: Exceptions: the compiled modules `_core` and `_nn`, and attributes of other libraries. `_seed_seq`
#: is NumPy's before 1.25, `_handle` is that of ctypes, which documents it, and `_actions` is
#: argparse's.
KNOWN = {"_core", "_nn", "_seed_seq", "_handle", "_actions"}
#: PyTorch has no public attributes for these purposes.
KNOWN |= {
    "_register_backend",
    "_swap_data_ptr_",
    "_call_end_callbacks_on_jit_fut",
    "_RecordFunction",
    "_timeout",
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def defined_in(trees):
    """Return the names that the modules of a package define or set."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            names.add(getattr(node, "attr", None) or node.id)
    return names


def reads_of_others(trees):
    """Yield the private attributes that a package reads and does not define."""
    own = defined_in(trees)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in own:
            continue
        if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls"):
            yield ast.unparse(node)


def test_private_attributes_are_read_by_their_own_package():
    packages = {}
    for path in ROOT.glob("**/*.py"):
        packages.setdefault(path.parent, []).append(ast.parse(path.read_text()))
    found = [
        f"{folder.name}: {read}"
        for folder, trees in packages.items()
        for read in reads_of_others(trees)
        if read.rsplit(".", 1)[1] not in KNOWN
    ]
    assert not found
