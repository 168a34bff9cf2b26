"""Kept findings that somebody changed, and names that lead elsewhere: refused, and nothing is written outside."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import fedaudit
from fedaudit.attacks import Finding, ImageFinding, LocalModelFinding
from fedaudit.pipeline.run import Audit, run_audit
from fedaudit.scenario.scenario import scenario_from
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import inside
from tests.conftest import Command, Outcome, refused
from tests.data.data_cases import one_line

pytestmark = pytest.mark.usefixtures("no_secret")

SCENARIO: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "logistic"},
    "federations": [{"name": "f", "clients": 2, "examples": 2}],
    "attacks": [{"name": "invg", "iterations": 3}],
}


def audit(out: Path) -> Audit:
    return run_audit(scenario_from(SCENARIO), store=out / "findings")


def kept(out: Path) -> list[Path]:
    return sorted((out / "findings").glob("*.safetensors"))


def content(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def digest_of(path: Path) -> str:
    return str(json.loads(content(path)[1]["about"])["digest"])


def brighter(path: Path) -> None:
    tensors, written = content(path)
    save_file({**tensors, "images": tensors["images"] * 0.5}, path, metadata=written)


def reshaped(path: Path) -> None:
    tensors, written = content(path)
    save_file({**tensors, "labels": tensors["labels"].view(torch.int32)}, path, metadata=written)  # the same bytes


def renamed(path: Path) -> None:
    tensors, written = content(path)
    save_file({f"{name}2": t for name, t in tensors.items()}, path, metadata=written)


def told(path: Path) -> None:
    tensors, written = content(path)
    save_file(
        tensors, path, metadata={**written, "about": written["about"].replace('"iterations": 3', '"iterations": 4')}
    )


def stripped(path: Path) -> None:
    tensors, written = content(path)
    values = json.loads(written["about"])
    save_file(tensors, path, metadata={"about": json.dumps({"kind": values["kind"], "fields": values["fields"]})})


def swapped(path: Path) -> None:
    one, two = kept(path.parent.parent)
    path.write_bytes((two if path == one else one).read_bytes())


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a scenario and its audit; copy it before changing anything."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "s.yaml").write_text(json.dumps(SCENARIO))
    fedaudit.audit({**SCENARIO, "evaluation": {"controls": False}}, out=folder / "out", progress=False)
    return folder


def again(command: Command, folder: Path) -> Outcome:
    return command("audit", folder / "s.yaml", "--out", folder / "out", "--workers", "1", "--no-controls")


@pytest.mark.parametrize("change", [brighter, reshaped, renamed, told, stripped, swapped])
def test_a_changed_finding_is_refused(
    change: Callable[[Path], None], command: Command, audited: Path, tmp_path: Path
) -> None:
    shutil.copytree(audited, tmp_path, dirs_exist_ok=True)
    changed = kept(tmp_path / "out")[0]
    change(changed)
    outcome = again(command, tmp_path)
    refused(outcome, "changed or damaged")
    for part in (str(changed), "delete it and run again"):
        assert part in outcome.err


def test_a_finding_that_was_deleted_is_found_again(command: Command, audited: Path, tmp_path: Path) -> None:
    shutil.copytree(audited, tmp_path, dirs_exist_ok=True)
    kept(tmp_path / "out")[0].unlink()
    assert again(command, tmp_path).code == 0
    before, after = (json.loads((folder / "out/results.json").read_text()) for folder in (audited, tmp_path))
    assert after["summaries"][0]["psnr"] == before["summaries"][0]["psnr"]


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    found = ImageFinding(attack="invg", images=torch.rand(1, 1, 2, 2), labels=torch.tensor([3]), label_source="given")
    path = tmp_path / "f.safetensors"
    found.save(path, "key")
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :])
        with pytest.raises(BadInput):
            Finding.load(path, "key")


def test_the_digest_is_over_every_byte_under_the_key(tmp_path: Path) -> None:
    """Worked out here again, from the description alone."""
    finding = ImageFinding(attack="invg", images=torch.rand(1, 1, 2, 2), labels=torch.tensor([3]), label_source="given")
    finding.save(tmp_path / "f.safetensors", "of a trial")
    digest = digest_of(tmp_path / "f.safetensors").removeprefix("sha256:").encode()
    zeroed = (tmp_path / "f.safetensors").read_bytes().replace(digest, b"0" * 64)
    assert digest.decode() == hashlib.sha256(b"10 of a trial" + zeroed).hexdigest()
    with pytest.raises(BadInput, match="digest doesn't fit"):
        Finding.load(tmp_path / "f.safetensors", "of another")


FOREIGN: dict[str, Callable[[Finding], Finding]] = {
    "name": lambda f: dataclasses.replace(f, attack="x/../../../evil"),
    "other attack": lambda f: dataclasses.replace(f, attack="agic"),
    "other kind": lambda f: LocalModelFinding(attack=f.attack, state={"w": torch.ones(1)}, rounds_used=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", FOREIGN)
def test_a_finding_of_another_attack_is_refused_even_if_its_digest_fits(change: str, tmp_path: Path) -> None:
    out = tmp_path / "a/out"
    audit(out)
    path = kept(out)[0]
    FOREIGN[change](Finding.load(path, path.stem)).save(path, path.stem)
    with pytest.raises(BadInput) as error:
        audit(out)
    one_line(error, str(path), "another attack than invg", "delete it and run again")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert [p.name for p in out.iterdir()] == ["findings"]


def test_with_a_secret_nobody_without_it_can_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUDIT_KEY", "a secret")
    first = audit(tmp_path).result.findings
    path = kept(tmp_path)[0]
    assert digest_of(path).startswith("hmac-sha256:")
    written = path.stat().st_mtime_ns
    assert [f.images for f in audit(tmp_path).result.findings] == [f.images for f in first]
    assert path.stat().st_mtime_ns == written  # it was reused
    whole = Finding.load(path, path.stem)
    for secret, words in (("another", "another FEDAUDIT_KEY"), ("", "made without a key, and FEDAUDIT_KEY is set")):
        monkeypatch.setenv("FEDAUDIT_KEY", secret)
        whole.save(path, path.stem)
        monkeypatch.setenv("FEDAUDIT_KEY", "a secret")
        with pytest.raises(BadInput, match=words):
            audit(tmp_path)


def test_an_attack_that_returns_something_else_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedaudit.attacks.inversion.template import GradientInversion

    other = LocalModelFinding(state={"w": torch.ones(1)}, rounds_used=1)
    monkeypatch.setattr(GradientInversion, "_run", lambda *_: other)
    with pytest.raises(TypeError, match="LocalModelFinding, not a ImageFinding"):
        audit(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../x.png", "images/../../x.png", "/x.png", "images/link.png", "loop/x", "a\0b"])
def test_nothing_is_written_outside(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "images").mkdir(parents=True)
    (out / "images/link.png").symlink_to(tmp_path / "x.png")
    (out / "loop").symlink_to(out / "loop")
    with pytest.raises(BadInput) as error:
        inside(out, name)
    one_line(error, "lies outside")
    finished = audit(tmp_path / "store")
    finished = dataclasses.replace(finished, image_files={name: torch.zeros(1, 2, 2)})
    with pytest.raises(BadInput):
        finished.save(out)
    assert {p.name for p in tmp_path.iterdir()} == {"out", "store"}


@pytest.mark.parametrize("name", ["results.json", "report.html", "scenario.yaml"])
def test_a_link_in_the_folder_is_not_written_through(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "mine").write_text("mine")
    (out / name).symlink_to(tmp_path / "mine")
    with pytest.raises(BadInput, match="lies outside"):
        audit(tmp_path / "store").save(out)
    assert (tmp_path / "mine").read_text() == "mine"
    assert inside(out, "images/fine.png") == out / "images/fine.png"
