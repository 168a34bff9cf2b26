"""What comes with another distribution of ours is found, and named where that isn't installed or doesn't fit."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest

from fedaudit import __version__
from fedaudit.data import DATASETS
from fedaudit.utils import distributions
from fedaudit.utils import registry as registry_module
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import Registry

EVERY = [
    (extra, group, name)
    for extra, groups in distributions.NAMES.items()
    for group, names in groups.items()
    for name in names
]


class Distribution:
    name = "fedaudit-lab"


class Point:
    """An entry point whose thing must not be loaded."""

    name, value, module, dist = "drawn", "fedaudit_lab.drawn", "fedaudit_lab.drawn", Distribution()

    def load(self) -> None:
        raise AssertionError("was loaded")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Our other distributions are installed in the version that the test names; None: they aren't."""
    version = request.param
    monkeypatch.setattr(distributions, "_installed", lambda extra: version)
    points = () if version is None else (Point(),)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: points)


@pytest.mark.parametrize(("extra", "group", "name"), EVERY)
@pytest.mark.parametrize("installed", [None], indirect=True)
@pytest.mark.usefixtures("installed")
def test_what_is_not_installed_says_in_one_line_how_to_get_it(extra: str, group: str, name: str) -> None:
    with pytest.raises(BadInput) as error:
        Registry("thing", group)[name]
    said = str(error.value)
    assert said.startswith(f"thing '{name}' comes with fedaudit-{extra}, which isn't installed: ")
    assert f"pip install 'fedaudit[{extra}]'" in said
    assert f"PATH_OF_THE_CLONE/{extra}" in said
    assert "\n" not in said


@pytest.mark.parametrize("installed", ["0.1.0"], indirect=True)
@pytest.mark.usefixtures("installed")
def test_another_version_is_not_loaded_and_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    registry_module._warn.cache_clear()
    registry: Registry[object] = Registry("data set", "fedaudit.datasets")
    assert registry.names() == []
    assert Registry("model", "fedaudit.models").names() == []  # and it is said once
    (record,) = caplog.records
    assert f"fedaudit-lab 0.1.0 doesn't fit fedaudit {__version__}: pip install 'fedaudit[lab]'" in record.getMessage()
    with pytest.raises(BadInput, match=r"'notes' comes with fedaudit-lab, which is 0\.1\.0 and doesn't fit fedaudit"):
        registry["notes"]


@pytest.mark.parametrize("installed", [None], indirect=True)
@pytest.mark.usefixtures("installed")
def test_a_name_that_is_nobodys_is_unknown() -> None:
    with pytest.raises(BadInput, match="unknown data set 'note'"):
        Registry("data set", "fedaudit.datasets")["note"]


def test_a_thing_says_where_it_comes_from() -> None:
    homes = {entry.name: DATASETS.distribution(entry) for entry in DATASETS}
    lab = distributions.NAMES["lab"]["fedaudit.datasets"]
    assert {name for name, home in homes.items() if home == "fedaudit-lab"} == {*lab}
    assert {home for name, home in homes.items() if name not in lab} == {"fedaudit"}


@pytest.mark.parametrize(
    ("package", "name", "home"), [(p, n, home) for p, names in distributions.MOVED.items() for n, home in names.items()]
)
def test_a_name_that_moved_is_still_found_where_it_was(package: str, name: str, home: str) -> None:
    module, _, now = home.partition(":")
    moved = getattr(importlib.import_module(package), name)
    assert moved is getattr(importlib.import_module(module), now or name)
