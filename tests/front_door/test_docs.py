"""The code of README and of the documentation runs, and links lead to files that exist.

A block with a title is a file. The other Python blocks of a page are one program, in their order. The
block titled "Output" is a part of what the block before it prints. After
``<!-- not run: it needs … -->`` a block is only parsed, because CI lacks what it needs. After
``<!-- needs: module -->`` a block runs in a slow test, if the module is installed. The comment
``<!-- slow: reason -->`` makes the page a slow test.
"""

from __future__ import annotations

import configparser
import contextlib
import itertools
import json
import operator
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

import pycollective
from pycollective import cli, environment

TOP = Path(__file__).resolve().parents[2]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>not run|needs): (?P<module>[^>]+) -->\n[ ]*)?"
    r"```(?P<kind>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)\n[ ]*```(?=\n|$)",
    re.DOTALL,
)


#: Any comment of a page, and the forms that a comment may have.
COMMENT = re.compile(r"<!-- ?(.*?) ?-->", re.DOTALL)
KNOWN_COMMENT = re.compile(
    r"not run: it needs( \S+){2,}|needs: \w+|slow:( \S+){3,}"
    r"|numbers: written by .*|end of numbers"
)
KINDS = {"python", "bash", "yaml", "ini", "text", "mermaid"}


class Block(NamedTuple):
    """A block of code: the language, the title, the text and its first line.

    ``needs`` is the module that the block needs, if any.
    """

    kind: str
    title: str | None
    text: str
    line: int
    runs: bool
    needs: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found["kind"], found["title"], textwrap.dedent(found["text"]),
            text.count("\n", 0, found.start("text")) + 1, found["mark"] != "not run",
            found["module"] if found["mark"] == "needs" else None,
        )
        for found in BLOCK.finditer(text)
    ]  # fmt: skip


def name_of(page: Path) -> str:
    return page.relative_to(TOP).as_posix()


def parameters() -> list:
    found = []
    for page in PAGES:
        code = [b for b in blocks_of(page) if b.runs and b.kind in ("python", "bash")]
        needed = sorted({block.needs for block in code if block.needs})
        if len(code) > sum(block.needs is not None for block in code):
            slow = [pytest.mark.slow] if "<!-- slow: " in page.read_text(encoding="utf-8") else []
            found.append(pytest.param(page, None, id=name_of(page), marks=slow))
        for module in needed:
            name = f"{name_of(page)} with {module}"
            found.append(pytest.param(page, module, id=name, marks=pytest.mark.slow))
    return found


#: MPI's launchers stand beside the interpreter. Open MPI refuses the user root and too many ranks.
_LAUNCHER = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def run(command: list[str], folder: Path, variables: dict[str, str] | None = None) -> str:
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", **_LAUNCHER}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120,
        env=environment | (variables or {}),
    )  # fmt: skip
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def is_known(words: list[str], folder: Path) -> bool:
    """Return True for the commands of `check_command`. Others run as a script."""
    words = [*itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)]
    if words[:1] == ["python"]:
        return (folder / words[1]).exists()
    return words[:2] == ["pip", "install"] or words[:1] in (
        ["pycollective"],
        ["torchrun"],
        ["mpirun"],
    )


def commands_of(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_command(words: list[str], folder: Path) -> str:
    """Run a command that starts a file of the page; parse any other command of pycollective."""
    variables = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words[0] == "python" and (folder / words[1]).exists():
        return run([sys.executable, *words[1:]], folder, variables)
    if words[0] == "pycollective":
        if words[1] == "run" and any((folder / word).exists() for word in words[2:]):
            return run([sys.executable, "-m", *words], folder, variables)
        cli.parser([words[1]] if words[1] in cli._COMMANDS else cli._COMMANDS).parse_args(words[1:])
        return ""
    if words[0] == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        for tries_left in reversed(range(5)):
            try:
                return run(command, folder, variables)
            except AssertionError as error:
                # Gloo itself sometimes ends a process in this way, on a busy machine twice in a row.
                ends = "gloo" in words[-1] and "terminate called without an active exc" in str(
                    error
                )
                if not ends or not tries_left:
                    raise
    if words[0] == "mpirun":
        launcher = shutil.which("mpirun", path=_LAUNCHER["PATH"])
        if launcher is None:
            pytest.skip("no mpirun")
        return run([launcher, *words[1:]], folder, variables)
    return ""  # pip install


@pytest.mark.parametrize("page, module", parameters())
def test_page_code_runs_and_prints_what_the_page_says(page, module, tmp_path, monkeypatch):
    if module:
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)  # where the parser finds the files of the page
    program, printed = "", []
    output: str | None = ""
    for block in blocks_of(page):
        # The test of a module runs the files and programs of the other blocks, but not their commands.
        needs = {module} if block.kind == "bash" else {None, module}
        if block.title == "Output":
            printed.append((block.line, block.text, output))
        elif not block.runs or block.needs not in needs:
            output = None
        elif block.kind == "python" and block.title:
            (tmp_path / block.title).write_text(block.text + "\n", encoding="utf-8")
        elif block.kind == "python":
            program += "\n" * (block.line - 1 - program.count("\n")) + block.text + "\n"
            output = "program"
        elif block.kind == "bash":
            commands = commands_of(block)
            if all(is_known(words, tmp_path) for words in commands):
                output = "".join([check_command(words, tmp_path) for words in commands])
            else:
                output = run(["bash", "-euc", block.text], tmp_path)
    if program:
        (tmp_path / "page.py").write_text(program, encoding="utf-8")
        program = run([sys.executable, "page.py"], tmp_path)
    for line, text, output in printed:
        output = program if output == "program" else output
        if output is None:  # the block did not run
            continue
        assert text in output, f"{name_of(page)}:{line}: the code prints\n{output}"


def faults_of_markers(text: str) -> list[str]:
    """Return comments that are none of the known ones, and those that mark no block."""
    comments = COMMENT.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    marks = [c for c in comments if c.startswith(("not run", "needs"))]
    read = [
        f"{found['mark']}: {found['module']}" for found in BLOCK.finditer(text) if found["mark"]
    ]
    return [c for c in comments if not KNOWN_COMMENT.fullmatch(c)] + [
        c for c in marks if c not in read
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_blocks_have_a_kind_and_those_that_are_not_run_have_a_reason(page):
    assert {block.kind for block in blocks_of(page)} <= KINDS
    assert not faults_of_markers(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("marker", "faults"),
    [
        ("<!-- not run: it needs a GPU -->\n", 0),
        ("<!-- needs: torch -->\n", 0),
        ("<!-- slow: it starts six processes -->\n\n", 0),
        ("<!-- not run -->\n", 2),
        ("<!-- not run: -->\n", 2),
        ("<!--not run: it needs a GPU-->\n", 1),
        ("<!-- not run: it needs -->\n", 1),
        ("<!-- not run: as above -->\n", 1),
        ("<!-- not run: it needs a GPU -->\n\n", 1),
        ("<!-- slow -->\n", 1),
    ],
)
def test_faults_of_markers_are_found(marker, faults):
    assert len(faults_of_markers(f"Text\n\n{marker}```bash\ntrue\n```\n")) == faults


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_blocks_can_be_parsed(page):
    for block in blocks_of(page):
        where = f"{name_of(page)}:{block.line}"
        if block.kind == "python":
            compile(block.text, where, "exec")
        elif block.kind == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
            for words in commands_of(block):
                for word in words:
                    if word.startswith("TF_CONFIG="):
                        assert json.loads(word.partition("=")[2])["task"], where
        elif block.kind == "ini":
            unit = configparser.RawConfigParser(strict=False)
            unit.optionxform = str
            unit.read_string(block.text)
            assert set(unit.sections()) <= {"Unit", "Service"}, where
            program, *words = shlex.split(unit["Service"]["ExecStart"])
            if program.endswith("/pycollective"):
                cli.parser([words[0]]).parse_args(words)
        elif block.kind == "yaml":
            yaml = pytest.importorskip("yaml")
            assert all(list(yaml.safe_load_all(block.text))), where
        if block.kind in ("python", "bash", "ini", "yaml"):
            named = set(re.findall(r"PYCOLLECTIVE_[A-Z_]+", block.text))
            assert named <= environment.VARIABLES.keys(), where


def test_kubernetes_job_has_the_service_and_the_size_that_its_pods_read():
    yaml = pytest.importorskip("yaml")
    (block,) = (b for b in blocks_of(TOP / "docs/how-to/kubernetes.md") if b.kind == "yaml")
    service, job = yaml.safe_load_all(block.text)
    pods, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    variables = {entry["name"]: entry.get("value") for entry in pods["containers"][0]["env"]}
    assert int(variables["PYCOLLECTIVE_SIZE"]) == job["spec"]["completions"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert pods["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}


def test_compose_file_has_all_ranks_and_the_address_of_rank_0():
    yaml = pytest.importorskip("yaml")
    (block,) = (b for b in blocks_of(TOP / "docs/how-to/containers.md") if b.kind == "yaml")
    services = yaml.safe_load(block.text)["services"]
    ranks = {value["environment"]["PYCOLLECTIVE_RANK"]: name for name, value in services.items()}
    for service in services.values():
        variables = service["environment"]
        assert variables["PYCOLLECTIVE_SIZE"] == str(len(ranks))
        assert variables["PYCOLLECTIVE_ADDRESS"].split(":")[0] == ranks["0"]
    assert sorted(ranks) == ["0", "1"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    generated = {"commands.md", "environment.md", "coverage.md"}
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target and Path(target).name not in generated:
            assert (page.parent / target).exists(), target


#: Names that pages mention because the package does not have them.
ABSENT = {"tf.summary"}


def names_in(page):
    """Yield the dotted names of the package in a page's text, such as `tf.keras.Model`."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name in re.findall(r"`((?:tf|pc|pycollective|strategy)(?:\.\w+)+)[(`]", text):
        if name not in ABSENT and not name.endswith((".json", ".torch")):
            yield name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_names_of_the_package_exist(page):
    strategy = pycollective.distribute.MirroredStrategy(["cpu:0"])
    workers = pycollective.distribute.MultiWorkerMirroredStrategy
    roots = {name: [pycollective] for name in ("tf", "pc", "pycollective")}
    roots["strategy"] = [strategy, workers]
    for name in names_in(page):
        root, _, rest = name.partition(".")
        found = []
        for each in roots[root]:
            with contextlib.suppress(AttributeError):
                found.append(operator.attrgetter(rest)(each))
        assert found, f"{name} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_environment_variables_exist(page):
    named = re.findall(r"`(PYCOLLECTIVE_[A-Z_]+)", page.read_text(encoding="utf-8"))
    assert set(named) <= environment.VARIABLES.keys()


def test_pages_have_at_most_1200_words():
    long = {
        page.name: words
        for page in PAGES
        if (words := len(page.read_text(encoding="utf-8").split())) > 1200
    }
    assert not long


def test_explanations_have_a_diagram():
    pages = (TOP / "docs" / "explanation").glob("*.md")
    texts = {page.name: page.read_text(encoding="utf-8") for page in pages}
    assert not [name for name, text in texts.items() if not re.search(r"```mermaid|/images/", text)]


def test_readme_has_at_most_120_lines_and_the_numbers_of_the_newest_results():
    text = (TOP / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    script = TOP / "benchmarks" / "readme_numbers.py"
    code = "import pathlib, readme_numbers as r; print(r.replaced(r.README.read_text('utf-8')), end='')"
    rewritten = run([sys.executable, "-c", code], script.parent)
    assert rewritten == text, "run python benchmarks/readme_numbers.py"
