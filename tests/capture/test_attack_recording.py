"""``fedaudit attack`` on a recording of one's own federation, on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.capture.recording_cases import MEAN, STD, federation
from tests.conftest import Command, refused


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "loop"
    federation(folder, mean=MEAN, std=STD)
    return folder


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_app.py").write_text(
        "from tests.capture.recording_cases import Net\nNUMBER = 3\n\ndef needs(size): ...\n\ndef nothing(): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_app", None)


def test_a_recording_is_attacked_from_the_command_line(recorded: Path, app: None, command: Command) -> None:
    words = "--model own_app:Net --rounds 0 --attack invg --set iterations=2 --set threat.knows_labels=false"
    words += " --no-controls --workers 1 --out out"
    outcome = command("attack", recorded, *words.split())
    assert outcome.code in (0, None), outcome
    result = json.loads(Path("out/results.json").read_text())
    assert [f["round"] for f in result["findings"]] == [0, 0]
    assert result["federations"][0]["recording"]["facts"] == "verified"


def test_without_a_name_the_attacks_that_fit_are_chosen(recorded: Path, app: None, command: Command) -> None:
    words = "--model own_app:Net --rounds 1 --no-controls --set threat.adversary=client --out out"
    outcome = command("attack", recorded, *words.split())
    assert outcome.code in (0, None, 3), outcome
    result = json.loads(Path("out/results.json").read_text())
    assert [a["name"] for a in result["attacks"]] == ["loss-threshold"]


COMMANDS: dict[str, tuple[list[str], str]] = {
    "no model": ([], "--model package.module:factory"),
    "no colon": (["--model", "own_app"], "give package.module:name"),
    "no module": (["--model", "nobody.has:this"], "there is no module 'nobody'"),
    "no such name": (["--model", "own_app:Nett"], "has no 'Nett'"),
    "not a module": (["--model", "own_app:NUMBER"], "is a int"),
    "needs arguments": (["--model", "own_app:needs"], "without arguments"),
    "makes nothing": (["--model", "own_app:nothing"], "returns a NoneType"),
    "mean alone": (["--model", "own_app:Net", "--mean", "0.5"], "--mean and --std together"),
    "words for numbers": (["--model", "own_app:Net", "--mean", "a", "--std", "b"], "give numbers"),
    "a wrong shape": (["--model", "own_app:Net", "--mean", "0,0", "--std", "1,1"], "both must have 1"),
    "rounds in words": (["--model", "own_app:Net", "--rounds", "all"], "give rounds such as 0,5-9"),
    "rounds that aren't there": (["--model", "own_app:Net", "--rounds", "7"], "no closed round among those"),
    "a loss nobody knows": (["--model", "own_app:Net", "--loss", "hinge"], "package.module:function"),
    "a mode nobody knows": (["--model", "own_app:Net", "--batch-norm", "both"], "give train or eval"),
    "no checkpoint": (["--model", "own_app:Net", "--checkpoint", "gone.pt"], "no checkpoint at 'gone.pt'"),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_a_wrong_option_is_one_line(what: str, recorded: Path, app: None, command: Command) -> None:
    options, words = COMMANDS[what]
    refused(command("attack", recorded, "--attack", "invg", *options), words)
