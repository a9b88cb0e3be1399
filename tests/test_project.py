"""Files around the library are correct: sdist and wheel, citation, changelog, CI, templates, and SECURITY.md."""

import ast
import datetime
import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml
from twine.commands.check import check

from kfs import __version__

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(file for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build sdist and wheel in the same way as `make dist`; hatchling writes no file outside the folder."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder / f"kfs-{__version__}.tar.gz", folder / f"kfs-{__version__}-py3-none-any.whl"


def sources() -> set[str]:
    """All files of the package except for byte code, and the plugin of pytest, relative to the repository."""
    files = (file for file in (ROOT / "kfs").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(ROOT).as_posix() for file in files} | {"kfs_pytest.py"}


def test_wheel_has_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
    information = f"kfs-{__version__}.dist-info/"
    assert {name for name in names if not name.startswith(information)} == sources()
    assert {"kfs/py.typed", "kfs/tour/assets/play.js", f"{information}licenses/LICENSE"} <= names


def test_sdist_has_the_sources_of_the_wheel(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    documents = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md"}
    # Hatchling adds the last two: metadata, and the list of files that it left out.
    assert names == sources() | documents | {"pyproject.toml", "PKG-INFO", ".gitignore"}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        return email.message_from_bytes(file.read(f"kfs-{__version__}.dist-info/METADATA"))


def test_metadata(built: tuple[Path, Path]) -> None:
    assert not check([str(file) for file in built], strict=True)  # whether a check failed
    found = metadata(built[1])
    assert (found["Name"], found["Version"], found["License-Expression"]) == ("kfs", __version__, "MIT")
    assert found["Author"] == "The kfs authors"
    assert str(found.get_payload()).startswith("# kfs: KFAC from scratch")
    assert any(url.endswith("https://arxiv.org/abs/2507.05127") for url in found.get_all("Project-URL", []))
    classifiers = found.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert not [name for name in classifiers if name.startswith("License ::")]  # PyPI refuses both


def test_twine_finds_mistakes(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Without a long description, the check above would fail."""
    broken = tmp_path / built[1].name
    with zipfile.ZipFile(built[1]) as wheel, zipfile.ZipFile(broken, "w") as copy:
        for name in wheel.namelist():
            content = wheel.read(name)
            if name.endswith("METADATA"):
                content = content.split(b"\nDescription-Content-Type", 1)[0] + b"\n"
            copy.writestr(name, content)
    assert check([str(broken)], strict=True)


def test_citation() -> None:
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys()  # those that the format requires
    assert CITATION["version"] == __version__
    assert CITATION["license"] == SETTINGS["project"]["license"]
    assert [author["name"] for author in CITATION["authors"]] == [a["name"] for a in SETTINGS["project"]["authors"]]
    paper, code = CITATION["references"]
    for reference in (paper, code):
        assert {"type", "title", "authors"} <= reference.keys()
        names = [author["family-names"] for author in reference["authors"]]
        assert names == ["Dangel", "Mucsányi", "Weber", "Eschenhagen"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert code["repository-code"] in readme.partition("## Install")[0]  # the first screen
    assert "independent" in CITATION["message"]
    assert paper["title"].replace("KFAC", "{KFAC}") in readme
    assert paper["url"] in readme
    assert f"version = {{{__version__}}}" in readme


def test_newest_release_of_the_changelog_is_this_version() -> None:
    """A section `Unreleased` may be above it. Released versions have dates; one that was not published says so."""
    titles = re.findall(r"^## (.*)$", CHANGELOG, flags=re.MULTILINE)
    released = [title for title in titles if title != "Unreleased"]
    assert titles in (released, ["Unreleased", *released])
    newest, date = re.fullmatch(r"(\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)", released[0]).groups()  # type: ignore[union-attr]
    assert newest == __version__
    assert datetime.date.fromisoformat(date) == CITATION["date-released"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \((not published|\d{4}-\d\d-\d\d)\)", title) for title in released)


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert workflow[True]  # the key that YAML 1.1 reads for `on`
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    commands = "\n".join(step.get("run", "") for step in steps(workflow))
    assert {"lint", "test", "docs", "dist"} <= set(re.findall(r"\bmake ([a-z]+)", commands)) <= targets
    assert all(("run" in step) != ("uses" in step) for step in steps(workflow))


def test_ci_runs_the_versions_that_are_promised() -> None:
    matrix = yaml.safe_load(WORKFLOWS[0].read_text(encoding="utf-8"))["jobs"]["tests"]["strategy"]["matrix"]
    named = re.findall(r":: (3\.\d+)$", "\n".join(SETTINGS["project"]["classifiers"]), flags=re.MULTILINE)
    assert matrix["python"] == named
    assert SETTINGS["project"]["requires-python"] == f">={named[0]}"
    (torch,) = [need for need in SETTINGS["project"]["dependencies"] if need.startswith("torch")]
    tested = [pair["torch"] for pair in matrix["include"]]
    assert torch == f"torch>={min(tested, key=lambda version: int(version.split('.')[1]))}"
    assert "newest" in matrix["torch"]
    assert {pair["python"] for pair in matrix["include"]} <= set(named)


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.name)
def test_issue_templates(file: Path) -> None:
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields = form["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["type"] in {"input", "textarea"} and field["attributes"]["label"] for field in fields)


def test_no_pickle() -> None:
    """SECURITY.md says that loading a file executes no code from it."""
    forbidden = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    files = {*(ROOT / "kfs").rglob("*.py"), ROOT / "kfs_pytest.py"}
    files.remove(ROOT / "kfs" / "distributed" / "ranks.py")  # messages between processes of one program, not files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not forbidden & {alias.name.partition(".")[0] for alias in node.names}, file
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in forbidden, file
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in {"load", "save"}, file


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_between_documents(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text(encoding="utf-8")):
        assert "://" in target or (ROOT / target).exists(), target
