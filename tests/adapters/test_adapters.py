"""Other frameworks stay in their rooms: imported there alone, when they are used; missing, they are one line."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fedaudit
from fedaudit import adapters
from fedaudit.adapters import app_audit
from fedaudit.utils.errors import BadInput

SOURCE = Path(fedaudit.__file__).parent
ROOMS = {"flwr": "adapters/flower", "nvflare": "adapters/nvflare"}


def test_records_of_known_persons_are_taken_of_apps_too(tmp_path, monkeypatch):
    given = np.random.default_rng(0).random((6, 3), dtype=np.float32), np.arange(6) % 2, np.arange(6) // 2
    asked: dict[str, Any] = {"attacks": ["loss-threshold"], "attacked": None, "threat": None, "loss": None}
    asked |= {"mean": None, "std": None, "max_minutes": None, "limits": {}, "controls": False}
    closed: list[Any] = []
    sender: Any = SimpleNamespace(messages=1, notes=[], close=closed.append)
    protocol = SimpleNamespace(value=SimpleNamespace(convert=lambda *_: []))
    monkeypatch.setattr(app_audit, "PROTOCOLS", {"trees": protocol})
    for records in (given, None):
        made = app_audit.AppAudit.of(tmp_path / "out", records=records, **asked)
        made.others = {"trees": sender}
        notes = made.convert()
        assert any("records are counted, not persons" in note for note in notes) == (records is not None)
    (inputs, labels), nothing = closed
    assert nothing is None
    assert np.array_equal(inputs, given[0])
    assert np.array_equal(labels, given[1])
    with pytest.raises(BadInput, match="persons: give a whole number for each of 6"):
        app_audit.AppAudit.of(tmp_path / "out", records=(*given[:2], given[2] / 2), **asked)


def test_without_flower_one_line_says_what_to_install(monkeypatch, command, tmp_path):
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "flwr" else known(name, *a))
    from fedaudit.adapters import flower

    with pytest.raises(BadInput, match=r"pip install 'PATH_OF_THE_CLONE\[flower\]'"):
        _ = flower.Guard
    with pytest.raises(AttributeError):
        _ = flower.nothing  # type: ignore[attr-defined]
    assert {"AuditStrategy", "Guard", "audit_flower"} <= set(dir(flower))
    done = command("audit", "--flower", tmp_path)
    assert done.code == 2
    assert done.error == "fedaudit: error: Flower isn't installed: pip install 'PATH_OF_THE_CLONE[flower]'\n"


@pytest.mark.parametrize(("given", "mean"), [((), None), (("--mean", "0.5", "--std", "0.25"), (0.5,))])
def test_the_command_hands_over_what_it_was_given(monkeypatch, command, tmp_path, given, mean):
    seen: dict[str, Any] = {}

    def audit_flower(app, **options):
        seen.update(options, app=app)
        raise BadInput("far enough")

    room = SimpleNamespace(audit_flower=audit_flower, parse_config=lambda words: list(words))
    monkeypatch.setattr(adapters, "flower", room, raising=False)
    monkeypatch.setitem(sys.modules, "fedaudit.adapters.flower", room)
    done = command("audit", "--flower", tmp_path, "--nodes", "3", "--run-config", "a=1", "--attack", "labels", *given)
    assert done.error.splitlines()[-1] == "fedaudit: error: far enough"
    assert (seen["app"], seen["nodes"], seen["config"], seen["attacks"]) == (tmp_path, 3, ["a=1"], [{"name": "labels"}])
    assert (seen.get("mean"), seen.get("std")) == (mean, (0.25,) if mean else None)


def test_without_nvflare_one_line_says_what_to_install(monkeypatch):
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "nvflare" else known(name, *a))
    from fedaudit.adapters import nvflare

    for name in ("GuardFilter", "RecorderFilter", "watch"):
        with pytest.raises(BadInput, match=r"NVFlare isn't installed: pip install 'PATH_OF_THE_CLONE\[nvflare\]'"):
            getattr(nvflare, name)
        assert name in dir(nvflare)
    with pytest.raises(AttributeError):
        _ = nvflare.nothing  # type: ignore[attr-defined]


def test_only_its_room_imports_a_framework():
    naming = [file for file in SOURCE.rglob("*.py") if any(name in file.read_text() for name in ROOMS)]
    assert len(naming) > 3
    for file in naming:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                room = ROOMS.get(name.split(".")[0])
                assert room is None or file.relative_to(SOURCE).as_posix().startswith(room), f"{file} imports {name}"


@pytest.mark.slow
def test_fedaudit_is_imported_without_them():
    rooms = "fedaudit.adapters.flower, fedaudit.adapters.nvflare"
    words = f"import sys, fedaudit.api, fedaudit.cli, {rooms}; print({{'flwr', 'nvflare'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n"
