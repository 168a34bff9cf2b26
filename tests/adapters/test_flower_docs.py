"""What docs/how-to/flower.md and docs/how-to/guard.md show runs, as it stands there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.adapters.flower_cases import audited, example

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

DOCS = Path(__file__).parents[2] / "docs" / "how-to"


def blocks(name: str, language: str) -> list[str]:
    """Return the blocks of a page in that language; ``sh``: the indented ones."""
    text = (DOCS / name).read_text()
    if language != "sh":
        return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^    (\w.*)$", plain, re.MULTILINE)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Attacks of two iterations and no controls: what is tested is that it runs."""
    from fedaudit import api
    from fedaudit.attacks.inversion import template

    monkeypatch.setitem(template.QUICK, "iterations", 2)
    whole = api.audit_transcript
    monkeypatch.setattr(api, "audit_transcript", lambda *a, **o: whole(*a, **{**o, "controls": False}))


@pytest.mark.long
def test_flower_on_the_desk_and_in_deployment(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    example(tmp_path / "my-app")
    install, audit, _, attack = blocks("flower.md", "sh")  # tests/adapters/test_monai.py has that of MONAI
    assert install.startswith("pip install 'PATH_OF_THE_CLONE[flower]'")
    done = command(*shlex.split(audit)[1:])
    assert done.code in (0, None), done
    assert (tmp_path / "audit/report.html").is_file()
    (python,) = blocks("flower.md", "python")
    exec(python, {})
    assert (tmp_path / "audit-2/report.html").is_file()

    from fedaudit.adapters.flower import run_app

    app = audited(tmp_path / "app", client_app={'Guard(on_fail="refuse")': ""})
    run_app(app, nodes=2, config={"num-server-rounds": 1})
    monkeypatch.syspath_prepend(str(app))
    done = command(*shlex.split(attack)[1:])
    assert done.code in (0, None), done
    assert (tmp_path / "attacked/findings.json").is_file()
    for name in [name for name in sys.modules if name.split(".")[0] == "digits_app"]:
        del sys.modules[name]


def test_the_tutorial(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    example(tmp_path / "my-app")
    (audit,) = (line for line in blocks("../tutorials/flower-app.md", "sh") if line.startswith("fedaudit"))
    done = command(*shlex.split(audit)[1:], "--max-minutes", "1")
    assert done.code in (0, None), done
    assert "4 updates in 1 round(s) recorded in flower-audit/recording" in done.err + done.out
    (python,) = blocks("../tutorials/flower-app.md", "python excerpt")
    exec(python, {})
    assert (tmp_path / "flower-audit-2/report.html").is_file()


def test_the_guard(tmp_path):
    app, *guards = blocks("guard.md", "python")
    space: dict[str, object] = {}
    exec(app, space)
    for guard in guards:
        exec(guard, space)
        space["guard"]._check()  # type: ignore[attr-defined]
    assert len(vars(space["app"])["_mods"]) == 1
    from inspect import signature

    from fedaudit.adapters.flower import Guard

    shown = (DOCS / "guard.md").read_text()
    assert all(f"`{name}`" in shown for name in signature(Guard).parameters if name != "loss")
