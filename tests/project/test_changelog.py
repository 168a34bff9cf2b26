"""CHANGELOG.md is in the form of Keep a Changelog 1.1.0."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from fedaudit.utils.version import __version__

TEXT = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_versions_are_dated_and_the_newest_comes_first():
    headings = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    versions, dates = [], []
    for heading in headings[1:]:
        match = re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d{2}-\d{2})", heading)
        assert match, heading
        versions.append(tuple(int(part) for part in match.groups()[:3]))
        dates.append(datetime.date.fromisoformat(match[4]))
    assert versions == sorted(versions, reverse=True)
    assert dates == sorted(dates, reverse=True)
    assert ".".join(map(str, versions[0])) == __version__


def test_changes_are_of_the_six_kinds_each_once_a_version():
    for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert set(kinds) <= KINDS, part[:40]
        assert len(set(kinds)) == len(kinds), part[:40]


def test_every_version_has_a_link():
    linked = re.findall(r"^\[(.+?)\]: (\S+)$", TEXT, re.MULTILINE)
    assert [name for name, _ in linked] == re.findall(r"^## \[(.*?)\]", TEXT, re.MULTILINE)
