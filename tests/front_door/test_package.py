"""The package as it is built: its version, and builds without a compiler or Python's headers."""

import json
import os
import re
import shutil
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

#: The build backend's own hook, as pip calls it.
METADATA = """
import sys
from scikit_build_core import build
print(build.prepare_metadata_for_build_wheel(sys.argv[1]))
"""


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def metadata(sources, folder):
    """Return the metadata of the wheel that would be built from a folder of sources."""
    pytest.importorskip("scikit_build_core")
    pytest.importorskip("setuptools_scm")
    done = subprocess.run(
        [sys.executable, "-c", METADATA, folder],
        cwd=sources, capture_output=True, text=True, check=True,
    )  # fmt: skip
    name = done.stdout.split()[-1]
    return HeaderParser().parsestr((folder / name / "METADATA").read_text())


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "pypi_readme.py", folder / "docs")
    return folder


def test_version_is_the_last_tag_and_the_commits_since(sources, tmp_path):
    git(sources, "init", "-q")
    git(sources, "add", "-A")
    git(sources, "commit", "-q", "-m", "first")
    assert metadata(sources, tmp_path)["Version"].startswith("0.1.0.dev1+g")
    git(sources, "tag", "v1.2.3")
    assert metadata(sources, tmp_path)["Version"] == "1.2.3"
    git(sources, "commit", "-q", "--allow-empty", "-m", "second")
    assert metadata(sources, tmp_path)["Version"].startswith("1.2.4.dev1+g")


def test_version_without_git_is_the_fallback_or_that_of_the_sdist(sources, tmp_path):
    assert metadata(sources, tmp_path)["Version"] == "0.1.0.dev0"
    (sources / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: pycollective\nVersion: 4.5.6\n")
    assert metadata(sources, tmp_path)["Version"] == "4.5.6"


def test_metadata_has_addresses_and_the_readme_whose_links_lead_to_the_repository(
    sources, tmp_path
):
    found = metadata(sources, tmp_path)
    urls = dict(url.split(", ") for url in found.get_all("Project-URL"))
    assert urls.keys() == {"Repository", "Documentation", "Issues", "Changelog"}
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    assert found["Description-Content-Type"] == "text/markdown"
    shown, readme = found.get_payload(), (ROOT / "README.md").read_text()
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", shown)
    assert len(links) == readme.count("](") > 5
    for image, link in links:
        assert link.startswith(f"{urls['Repository']}/{'raw' if image else 'blob'}/HEAD/")
        assert (ROOT / link.split("/HEAD/")[1]).exists()
    for way in ("raw", "blob"):
        shown = shown.replace(f"{urls['Repository']}/{way}/HEAD/", "")
    assert shown == readme


def test_address_of_the_project_is_in_one_file_and_the_citation_has_the_fallback_version():
    pyproject = (ROOT / "pyproject.toml").read_text()
    (address,) = re.findall(r'^Repository = "https://(.*)"$', pyproject, re.M)
    named = subprocess.run(
        ["git", "grep", "-lF", address, "--", ":!CONTRIBUTING.md", ":!.github/workflows/wheels.yml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if named.returncode == 128:
        pytest.skip("no git repository")
    assert named.stdout.split() == ["pyproject.toml"]
    (version,) = re.findall(r'^fallback_version = "(.*)"$', pyproject, re.M)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def configured(tmp_path, *options, path=os.environ["PATH"]):
    """Configure a build that must fail, and return its error."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
    hidden = {"CC", "CXX", "CMAKE_GENERATOR"}
    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path / "build", "-G", generator, *options],
        env={key: value for key, value in os.environ.items() if key not in hidden} | {"PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_build_without_compiler_or_headers_names_the_packages_in_one_line(tmp_path, missing):
    if missing == "compiler":
        (tmp_path / "bin").mkdir()
        maker = shutil.which("ninja") or shutil.which("make")
        (tmp_path / "bin" / Path(maker).name).symlink_to(maker)
        said = configured(tmp_path, path=str(tmp_path / "bin"))
    else:
        said = configured(tmp_path, f"-DPython_INCLUDE_DIR={tmp_path}/nowhere")
    (line,) = (line for line in said.splitlines() if "C++20 compiler" in line)
    for command in (
        "apt-get install g++ python3-dev",
        "dnf install gcc-c++ python3-devel",
        "apk add g++ python3-dev linux-headers",
        "xcode-select --install",
    ):
        assert command in line


def test_dockerfile_and_devcontainer_run_both_commands_of_the_readme():
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == 2
    assert re.findall(r"^RUN (python3 .*)$", (ROOT / "Dockerfile").read_text(), re.M) == commands
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert [container["onCreateCommand"], container["updateContentCommand"]] == commands
