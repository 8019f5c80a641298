"""Pages of the site that are made from the package: commands, environment variables, coverage.

MkDocs calls the functions ``on_...`` of this file (the ``hooks`` of mkdocs.yml).
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import pycollective
from pycollective.cli import parser
from pycollective.environment import VARIABLES

TENSORFLOW = (
    "distribute", "distribute.experimental", "distribute.cluster_resolver",
    "distribute.coordinator", "data", "data.experimental", "train", "estimator", "feature_column",
    "compat.v1.train", "config", "errors", "math", "nn", "random",
    "types.experimental.distributed",
)  # fmt: skip
KERAS = (
    "layers", "losses", "metrics", "optimizers", "optimizers.schedules", "callbacks",
    "initializers", "regularizers", "constraints", "activations", "datasets", "models", "utils",
)  # fmt: skip


def commands() -> str:
    """Return the help of every command."""
    main = parser()
    action = next(a for a in main._actions if isinstance(a, argparse._SubParsersAction))
    parts = ["# Commands", f"```text\n{main.format_help()}```"]
    for name, command in action.choices.items():
        parts.append(f"## pycollective {name}\n\n```text\n{command.format_help()}```")
    return "\n\n".join(parts) + "\n"


def variables() -> str:
    """Return the table of environment variables."""
    rows = [f"| `{name}` | {text} |" for name, text in VARIABLES.items()]
    intro = (
        "pycollective reads these variables. A name that looks like a misspelt one of the table is an "
        "error. Any other name that begins with `PYCOLLECTIVE_` is logged as a warning. "
        "The variables of other launchers are in [Launchers](launchers.md)."
    )
    head = "| variable | meaning |\n|---|---|"
    return "\n\n".join(["# Environment variables", intro, "\n".join([head, *rows])]) + "\n"


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public names of a module with their values."""
    for name in sorted(getattr(module, "__all__", None) or dir(module), key=str.lower):
        value = getattr(module, name)
        if not name.startswith("_") and not inspect.ismodule(value):
            yield name, value


def state(value: Any) -> str:
    """Return "works", or the reason for which a class of TensorFlow's is only a name here."""
    module = getattr(value, "__module__", "") or ""
    return (
        "name only: making one raises `NotAvailableError`" if "unavailable" in module else "works"
    )


def coverage() -> str:
    """Return the tables of the names of TensorFlow and Keras that the package has."""
    parts = [
        "# Coverage of TensorFlow and Keras",
        "The package has these names at TensorFlow's paths. The list is made from the package. "
        "[Differences](differences_from_tensorflow.md) tells what behaves in another way.",
    ]
    top = [(name, getattr(pycollective, name)) for name in dir(pycollective)]
    functions = sorted(f"`tf.{n}`" for n, v in top if not inspect.ismodule(v) and n[0] != "_")
    parts += ["## tf", ", ".join(functions)]
    paths = [*TENSORFLOW, "keras", *(f"keras.{path}" for path in KERAS)]
    for path in paths:
        rows = list(public(importlib.import_module(f"pycollective.{path}")))
        table = "\n".join(f"| `{name}` | {state(value)} |" for name, value in rows)
        parts.append(f"## tf.{path}\n\n| name | state |\n|---|---|\n{table}")
    return "\n\n".join(parts) + "\n"


PAGES = {
    "reference/commands.md": commands,
    "reference/environment.md": variables,
    "reference/coverage.md": coverage,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files
