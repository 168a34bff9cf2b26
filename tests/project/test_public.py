"""The public face suffices: our other packages, the examples and the docs use what is exported, and nothing else."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import textwrap
import tomllib
from collections.abc import Iterator
from types import ModuleType

import pytest

import fedaudit
from fedaudit.utils.distributions import NAMES
from tools.docs.api import PACKAGES
from tools.docs.pages import ROOT, blocks, pages

PUBLIC = ("fedaudit", *PACKAGES)


def of_files(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def of_notebooks() -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "examples").rglob("*.ipynb")):
        for i, cell in enumerate(json.loads(file.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "code":
                yield f"{file.name}, cell {i}", "".join(cell["source"])


def of_pages() -> Iterator[tuple[str, str]]:
    for page in pages():
        for block in blocks(page):
            if block.language == "python":
                yield block.where, textwrap.dedent(block.text)


def inside(code: str) -> list[str]:
    """Return what ``code`` takes from fedaudit that isn't exported."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] == "fedaudit" and a.name not in PUBLIC]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedaudit":
            exported = importlib.import_module(str(node.module)).__all__ if node.module in PUBLIC else ()
            found += [f"{node.module}.{a.name}" for a in node.names if a.name not in exported]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fedaudit":
            public = node.attr in fedaudit.__all__ or f"fedaudit.{node.attr}" in PUBLIC
            found += [] if public else [f"fedaudit.{node.attr}"]
    return found


@pytest.mark.parametrize(
    "sources",
    [
        lambda: of_files("catalogue/src"),
        lambda: of_files("lab/src"),
        lambda: of_files("trees/src"),
        lambda: of_files("examples"),
        of_notebooks,
        of_pages,
    ],
    ids=["catalogue", "laboratory", "trees", "examples", "notebooks", "docs"],
)
def test_nothing_is_taken_from_inside(sources):
    assert {where: names for where, code in sources() if (names := inside(code))} == {}


def test_what_comes_from_inside_is_noticed():
    assert inside("import fedaudit.api\nimport fedaudit.data") == ["fedaudit.api"]
    assert inside("from fedaudit.utils.errors import BadInput") == ["fedaudit.utils.errors.BadInput"]
    assert inside("from fedaudit.task import TaskInfo, info") == ["fedaudit.task.info"]
    assert inside("import fedaudit\nfedaudit.pipelines.run") == ["fedaudit.pipelines"]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_package_has_what_it_exports(name):
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    for exported in package.__all__:
        if importlib.util.find_spec(f"{name}.{exported}"):
            importlib.import_module(f"{name}.{exported}")  # which must not hide it
        if not name.startswith("fedaudit.adapters"):  # those need other libraries
            assert not isinstance(getattr(package, exported), ModuleType)
    with pytest.raises(AttributeError):
        _ = package.nothing_of_that_name


@pytest.mark.parametrize("extra", NAMES)
def test_our_distributions_need_fedaudit_of_their_own_version_and_nothing_else(extra):
    project = tomllib.loads((ROOT / extra / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == [f"fedaudit=={fedaudit.__version__}"]
    assert importlib.import_module(f"fedaudit_{extra}").__version__ == fedaudit.__version__


def test_extras_install_our_distributions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in NAMES:
        assert extras[extra][0] == f"fedaudit-{extra}=={fedaudit.__version__}"
    assert extras["all"] == [f"fedaudit[{','.join(sorted(NAMES))}]"]
