"""Tables of the algorithms for ``algorithm="auto"``, which ``pycollective bench --tune`` writes.

The file is JSON, with rows of (collective, most bytes, algorithm) for each transport and number of
ranks; the first row that fits counts. The file is read when a group is made. All ranks of a group use
the same rows: threads share them, `pycollective run` passes them on, and over TCP they are rank 0's. The
file also has the size from which on copies bypass the caches; each process reads this size itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycollective import _core
from pycollective.atomic_files import write_atomically

__all__ = [
    "CHOICES",
    "Rows",
    "TUNING",
    "Tables",
    "as_json",
    "candidates",
    "checked",
    "checked_tables",
    "given",
    "path",
    "prepare",
    "rows",
    "save",
    "tables",
    "use_copies",
]

TUNING = "PYCOLLECTIVE_TUNING"
"""Variable with the file's name, instead of the file in the user's cache; "none": no file."""
CHOICES = "PYCOLLECTIVE_CHOICES"
"""Variable in which `pycollective run` gives all ranks of a group the same rows."""
FORMAT = 1
MAX_ROWS = 64
_KEYS = {
    "threads": "thread",
    "shared memory": "shm",
    "TCP": "tcp",
    "shared memory and TCP": "mixed",
}

Rows = list[tuple[_core.Collective, int, str]]
Tables = dict[str, Rows]
"""Rows for each transport, as `Group.transport` names it."""


@dataclass(frozen=True)
class _File:
    """Contents of a file: rows by transport and ranks; size from which copies bypass caches, or 0."""

    tables: dict[str, dict[int, Rows]]
    past_cache_from: int


_NOTHING = _File({}, 0)
_log = logging.getLogger("pycollective")


def path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the table, or None if tables are switched off."""
    named = environment.get(TUNING, "")
    if named == "none":
        return None
    if named:
        return Path(named)
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(cache).expanduser()
    except RuntimeError:  # neither HOME nor an entry for the user
        return None
    return folder / "pycollective" / "tuning.json"


def host() -> dict[str, Any]:
    """Return the properties of this machine on which a table depends."""
    model = ""
    with contextlib.suppress(OSError):
        with open("/proc/cpuinfo") as f:
            models = (line.partition(":")[2].strip() for line in f if line.startswith("model name"))
            model = next(models, "")
    return {
        "machine": platform.machine(),
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
    }


def rows(transport: str, size: int, environment: Mapping[str, str] = os.environ) -> Rows:
    """Return the rows for a group; an empty list if nothing was measured for it.

    A group whose size was not measured gets the rows of the next larger size. ``transport`` is
    ``Group.transport``; ``environment`` replaces ``os.environ``.
    """
    measured = _found(environment).tables.get(_KEYS.get(transport, ""), {})
    fitting = [ranks for ranks in measured if ranks >= size]
    return measured[min(fitting)] if fitting else []


def use_copies() -> None:
    """Set the size from which this process's copies bypass the caches, if the file has one."""
    measured = _found(os.environ).past_cache_from
    if measured:
        _core.set_past_cache_from(measured)


def _found(environment: Mapping[str, str]) -> _File:
    file = path(environment)
    if file is None:
        return _NOTHING
    try:
        found = file.stat()
    except OSError as error:
        if environment.get(TUNING):
            _missing(str(file), str(error))
        return _NOTHING
    return _read(str(file), found.st_mtime_ns, found.st_size)


def given(environment: Mapping[str, str], transport: str, size: int) -> Rows:
    """Return the rows that a launcher passed on, else those of the file."""
    if CHOICES not in environment:
        return rows(transport, size, environment)
    try:
        return checked(json.loads(environment[CHOICES]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CHOICES}={environment[CHOICES]!r}: {error}") from None


def tables(environment: Mapping[str, str], size: int) -> Tables:
    """Return the rows of all transports, for ranks whose transport is not decided yet."""
    return {name: given(environment, name, size) for name in _KEYS if name != "threads"}


def checked_tables(found: Any) -> Tables:
    """Return the tables in parsed JSON; raise ValueError if they are not valid."""
    if not isinstance(found, dict) or not found.keys() <= _KEYS.keys():
        raise ValueError(f"not tables of {', '.join(_KEYS)}")
    return {name: checked(rows) for name, rows in found.items()}


def checked(found: Any) -> Rows:
    """Return the rows in parsed JSON; raise ValueError if they are not valid."""
    if not isinstance(found, list) or len(found) > MAX_ROWS:
        raise ValueError(f"not a list of at most {MAX_ROWS} rows")
    result: Rows = []
    for row in found:
        try:
            name, most_bytes, algorithm = row
            collective = _core.Collective.__members__[name]
        except (TypeError, ValueError, KeyError):
            raise ValueError(f"not a row of collective, most bytes, algorithm: {row!r}") from None
        if type(most_bytes) is not int or not 0 <= most_bytes < 1 << 63:
            raise ValueError(f"not a number of bytes: {most_bytes!r}")
        if algorithm not in candidates(name):
            raise ValueError(f"no {name} algorithm is called {algorithm!r}")
        result.append((collective, most_bytes, algorithm))
    return result


def candidates(collective: str) -> list[str]:
    """Return the algorithms that a row may name, including "hierarchical" for all_reduce."""
    names = _core.algorithm_names(_core.Collective.__members__[collective])
    return [*names, "hierarchical"] if collective == "all_reduce" else names


def as_json(found: Rows) -> list[list[Any]]:
    """Return rows in the form that `checked` reads."""
    return [[collective.name, most_bytes, name] for collective, most_bytes, name in found]


@functools.lru_cache(maxsize=8)
def _missing(file: str, error: str) -> None:
    _log.warning("%s=%s cannot be read (%s): the built-in table is used", TUNING, file, error)


@functools.lru_cache(maxsize=8)
def _read(file: str, changed: int, length: int) -> _File:
    """Return the contents of a file; log one warning if they cannot be used.

    ``changed`` and ``length`` are keys of the cache, so that a changed file is read again.
    """
    try:
        content = json.loads(Path(file).read_bytes())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"not a table of format {FORMAT}")
        if content.get("host") != host():
            raise ValueError(f"measured on another machine, {content.get('host')}")
        copies = content.get("past_cache_from", 0)
        if type(copies) is not int or not 0 <= copies < 1 << 63:
            raise ValueError(f"not a number of bytes: {copies!r}")
        tables = {
            str(transport): {int(ranks): checked(found) for ranks, found in sizes.items()}
            for transport, sizes in content["tables"].items()
        }
        return _File(tables, copies)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning(
            "the table of algorithms in %s is not used, but the built-in one: %s. "
            "'pycollective bench --tune' measures a new one",
            file,
            error,
        )
        return _NOTHING


def save(
    file: Path,
    transport: str,
    size: int,
    found: Rows,
    version: str,
    past_cache_from: int | None = None,
) -> None:
    """Write the measured rows of a group; keep the file's other rows for this machine."""
    kept = _kept(file)
    kept["tables"].setdefault(_KEYS[transport], {})[str(size)] = as_json(found)
    if past_cache_from is not None:
        kept["past_cache_from"] = past_cache_from
    _write(file, kept, version)


def prepare(file: Path, version: str) -> None:
    """Make sure that the file exists and can be written; keep its rows for this machine."""
    _write(file, _kept(file), version)


def _kept(file: Path) -> dict[str, Any]:
    """Return the valid contents of a file for this machine, as JSON."""
    kept: dict[str, Any] = {"tables": {}}
    try:
        content = json.loads(file.read_bytes())
        if content["format"] == FORMAT and content["host"] == host():
            for transport, sizes in content["tables"].items():
                for ranks, found in sizes.items():
                    with contextlib.suppress(ValueError):  # perhaps of another version
                        int(ranks)
                        checked(found)
                        kept["tables"].setdefault(transport, {})[ranks] = found
            copies = content.get("past_cache_from", 0)
            if type(copies) is int and 0 <= copies < 1 << 63:
                kept["past_cache_from"] = copies
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return kept


def _write(file: Path, kept: dict[str, Any], version: str) -> None:
    content = {"format": FORMAT, "version": version, "host": host(), **kept}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(str(file), (json.dumps(content, indent=1) + "\n").encode())
