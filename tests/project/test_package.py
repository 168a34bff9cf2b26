"""The wheel and the sdist: built as anybody builds them, installed into an empty environment, used outside of here."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from fedaudit.utils.distributions import NAMES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow]
SOURCE = (
    *("src", "catalogue", "lab", "trees", "docs", "tests", "tools", "examples", "contrib"),
    *("pyproject.toml", "README.md", "LICENSE", "Makefile"),
)
KEPT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def run(*words: str | Path, where: Path) -> str:
    own = ("PYTHONPATH", "PYTHONHOME", "FEDAUDIT_DATA", "FEDAUDIT_KEY")
    surroundings = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run([*map(str, words)], cwd=where, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def install(python: Path, *what: str | Path) -> None:
    flags: list[str | Path] = ["--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    run(python, "-m", "pip", "install", *flags, *what, where=python.parent)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the build backend, and the schemas of GitHub's files."""
    python = environment(tmp_path_factory.mktemp("builder"))
    install(python, "hatchling", "check-jsonschema>=0.30")
    return python


def build(builder: Path, folder: Path) -> Path:
    """Return a folder with a wheel and an sdist, built from a copy of the sources in ``folder``."""
    for name in SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "source" / name, ignore=KEPT_OUT)
        else:
            shutil.copy(ROOT / name, folder / "source" / name)
    run(builder, "-m", "hatchling", "build", "-d", folder / "dist", where=folder / "source")
    return folder / "dist"


@pytest.fixture(scope="module")
def built(builder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(builder, tmp_path_factory.mktemp("built"))


def test_both_are_the_same_bytes_whenever_and_wherever_they_are_built(builder, built, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in built.iterdir()}
    shutil.copytree(built.parent / "source", tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
        if path.is_file():
            path.chmod(0o600)
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    run(builder, "-m", "hatchling", "build", "-d", tmp_path / "again", where=tmp_path / "elsewhere")
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == before
    assert len(before) == 2
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")  # 2023-11-14
    run(builder, "-m", "hatchling", "build", "-d", tmp_path / "dated", where=tmp_path / "elsewhere")
    (wheel,) = (tmp_path / "dated").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {entry.date_time[:3] for entry in archive.infolist()} == {(2023, 11, 14)}


def test_github_s_files_fit_their_schemas(builder, tmp_path):
    action = ROOT / "contrib/github-action"
    for schema, file in (("actions", "action.yml"), ("workflows", "example-workflow.yml")):
        check = [builder, "-m", "check_jsonschema", "--builtin-schema", f"vendor.github-{schema}"]
        run(*check, action / file, where=tmp_path)
        broken = tmp_path / file
        broken.write_text((action / file).read_text().replace("uses:", "using:"))
        with pytest.raises(AssertionError, match="Schema validation errors"):
            run(*check, broken, where=tmp_path)


def names(wheel: Path) -> set[str]:
    """Return the files of a wheel, without its metadata and without what a compiler made."""
    with zipfile.ZipFile(wheel) as archive:
        found = archive.namelist()
    return {name for name in found if ".dist-info/" not in name and not name.endswith(".so")}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/fedaudit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert names(wheel) == sources
    assert not any(name.startswith(("fedaudit_lab", "fedaudit_catalogue", "fedaudit_trees")) for name in sources)
    for needed in ("py.typed", "scenario/default.yaml", "report/templates/report.html.j2"):
        assert f"fedaudit/{needed}" in sources
    assert any(name.endswith("winograd.cpp") for name in sources)
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(about))
        licence = archive.read(about.replace("METADATA", "licenses/LICENSE")).decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The fedaudit developers"
    assert "Version 2.0, January 2004" in licence
    assert licence == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("extra", NAMES)
def test_the_wheels_of_our_other_packages_hold_these_and_nothing_else(builder, built, tmp_path, extra):
    run(builder, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, where=built.parent / "source" / extra)
    (wheel,) = tmp_path.glob(f"fedaudit_{extra}-*.whl")
    sources = {
        path.relative_to(ROOT / extra / "src").as_posix()
        for path in (ROOT / extra / "src" / f"fedaudit_{extra}").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names(wheel) == sources
    if extra != "lab":
        return
    assert any(name.endswith("studies/builtin/inferguard/table-1.yaml") for name in sources)
    assert "fedaudit_lab/templates/study.html.j2" in sources


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        top = {Path(name).parts[1] for name in archive.getnames()}
    folders = {"src", "catalogue", "lab", "trees", "tests", "tools", "docs", "contrib"}
    assert {*folders, "LICENSE", "pyproject.toml", "README.md"} <= top
    assert not [name for name in top if name.startswith(".venv") or name in {".git", "audit", "bench"}]
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, sdist, where=tmp_path)
    (wheel,), (again,) = built.glob("*.whl"), tmp_path.glob("*.whl")
    assert names(again) == names(wheel)


@pytest.mark.long  # an environment of its own with torch; `make first-hour` has one, too
def test_the_wheel_works_in_an_empty_environment(built, tmp_path):
    python = environment(tmp_path / "venv")
    install(python, next(built.glob("*.whl")))
    fedaudit, outside = python.with_name("fedaudit"), tmp_path / "outside"
    outside.mkdir()
    assert "audit" in run(fedaudit, "--help", where=outside)
    listed = json.loads(run(fedaudit, "list", "--json", where=outside))
    assert {"attacks", "defences", "models", "datasets", "studies"} <= set(listed)
    assert not listed["studies"]
    missing = {
        "lab": (
            ["study", "run", "agic/table-4"],
            ["bench", "all"],
            ["list", "studies"],
            ["init", "--data", "notes", "-y"],
        ),
        "catalogue": (["rank", "lenet"], ["audit", "--set", "attacks=[r-gap]", "--out", "none"]),
        "trees": (["audit", "--set", "federations.fedsgd.algorithm=trees", "--out", "none"],),
    }
    for extra, words in ((extra, words) for extra, every in missing.items() for words in every):
        done = subprocess.run([fedaudit, *words], cwd=outside, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert f"pip install PATH_OF_THE_CLONE/{extra}" in done.stderr
    small = [
        "attacks=[{name: invg, iterations: 2}]",
        "evaluation.max_updates=1",
        "data.name=digits",
        "model.name=lenet",
    ]
    run(fedaudit, "audit", *(f"--set={change}" for change in small), "--out", "audit", "--workers", "1", where=outside)
    result = json.loads((outside / "audit/results.json").read_text())
    assert {finding["status"] for finding in result["findings"]} == {"done"}
    assert "<html" in (outside / "audit/report.html").read_text()
    where = run(python, "-c", "import fedaudit; print(fedaudit.__file__, fedaudit.__version__)", where=outside).split()
    assert Path(where[0]).is_relative_to(tmp_path / "venv")
    assert where[1] == result["fedaudit_version"]
    run(python, "-m", "pip", "check", where=outside)
