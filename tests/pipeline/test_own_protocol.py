"""A protocol of another package: its settings in scenarios, its simulation, its file in transcripts, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.test_plugins import command, install, python

pytestmark = pytest.mark.slow

PROTOCOL = '''
"""Clients send the sums of their examples, and nothing else."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import ConfigDict

from fedaudit.models import build_model
from fedaudit.simulation import Recording
from fedaudit.simulation.protocols import Protocol, register
from fedaudit.transcript import ProtocolSpec, Sent, SentEntry, Transcript, Truth
from fedaudit.utils import Positive


class SumsSpec(ProtocolSpec):
    kind: ClassVar[str] = "sums"
    algorithms: ClassVar[tuple[str, ...]] = ("sums",)
    lacks: ClassVar[tuple[str, ...]] = ("momentum",)
    lacks_why: ClassVar[str] = "a federation of sums, where nobody trains"

    scale: Positive = 1.0


class SumsEntry(SentEntry):
    model_config = ConfigDict(extra="forbid")
    spec: SumsSpec

    def module(self, task_info):
        return build_model("linear", input_shape=task_info.input_shape, outputs=task_info.outputs)

    def record(self, tensors, module, task_info, path):
        return Sums(self.spec, tensors)


@dataclass(frozen=True, eq=False)
class Sums(Sent):
    kind: ClassVar[str] = "sums"
    specified: ClassVar = SumsSpec
    entry: ClassVar = SumsEntry
    federations: ClassVar[str] = "federations of sums"
    no_updates: ClassVar[str] = "clients send sums"

    spec: SumsSpec
    sums: dict

    @property
    def settings(self):
        return self.spec

    def extent(self, rounds):
        return f"{len(self.sums)} sums"

    def parts(self):
        return {"sums": (self.sums, SumsEntry(spec=self.spec))}


@register
class OfSums(Protocol):
    sent = Sums
    described = "a federation of sums"

    def model(self, spec, name, width, task_info):
        return build_model("linear", input_shape=task_info.input_shape, outputs=task_info.outputs)

    def check(self, federation):
        pass

    def simulate(self, federation, options):
        spec, held = federation.spec.settings, federation.client_data
        sent = Sums(spec, {str(c): spec.scale * split.inputs.sum(dim=0) for c, split in enumerate(held)})
        about = federation.name, federation.task_info, federation.model, federation.loss
        inputs, labels = ({(0, c): getattr(s, part) for c, s in enumerate(held)} for part in ("inputs", "targets"))
        test = federation.dataset.test
        return Recording(Transcript(*about, [], sent=sent), Truth(inputs, labels, test.inputs, test.targets, {}))
'''
SCENARIO = """
data: {name: digits}
model: {name: linear}
federations: [{name: f, algorithm: sums, clients: 2, examples: 4, sums: {scale: 2}}]
"""
READ = """
import sys, torch
from fedaudit import Transcript, load_scenario
found = Transcript.load(sys.argv[1])
scenario = load_scenario(sys.argv[2])
(federation,) = scenario.federations
assert federation.settings == found.sent.settings and federation.settings.scale == 2
assert {name: tuple(value.shape) for name, value in found.sent.sums.items()} == {"0": (1, 8, 8), "1": (1, 8, 8)}
assert federation.model_dump(mode="json")["sums"] == {"scale": 2.0}
assert "trees" not in federation.model_dump() and federation.trees is None
again = found.sent.parts()["sums"][1].model_dump_json()
from fedaudit.utils import fingerprint_of
other = federation.model_copy(update={"sums": type(federation.settings)(scale=3)})
assert len({fingerprint_of(federation), fingerprint_of(other)}) == 2
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install(folder, "sums-protocol", "[fedaudit.protocols]\nsums = sums_protocol.protocol\n", protocol=PROTOCOL)
    (folder / "scenario.yaml").write_text(SCENARIO)
    return folder


def test_it_is_simulated_recorded_and_read_again(site: Path, tmp_path: Path) -> None:
    done = command(site, "simulate", site / "scenario.yaml", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 sums: ")
    read = python(site, "-c", READ, tmp_path / "out", site / "scenario.yaml")
    assert (read.returncode, read.stderr) == (0, "")


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ("sums.scal=2", "federations.0.sums: unknown key 'scal'; did you mean 'scale'?"),
        ("sums.scale=-1", "federations.0.sums.scale: -1 isn't allowed"),
        ("sum.scale=1", "federations.0: unknown key 'sum'; did you mean 'sums'?"),
        ("algorithm=sum", "federations.0.algorithm: unknown algorithm 'sum'; did you mean 'sums'?"),
        ("algorithm=fedsgd", "sums is for algorithm: sums, not fedsgd"),
        ("momentum=0.5", "momentum isn't for a federation of sums, where nobody trains"),
    ],
)
def test_what_is_wrong_with_its_settings_is_a_line(site: Path, tmp_path: Path, change: str, fragment: str) -> None:
    setting = f"federations.f.{change}"
    done = command(site, "simulate", site / "scenario.yaml", "--set", setting, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert fragment in done.stderr


def test_its_recording_without_the_package_is_a_line(site: Path, tmp_path: Path) -> None:
    command(site, "simulate", site / "scenario.yaml", "--out", tmp_path / "out")
    done = command(tmp_path, "attack", tmp_path / "out", "--out", tmp_path / "found")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "parts: 'sums' is none of queries" in done.stderr
