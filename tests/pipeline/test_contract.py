"""Every attack keeps the contract, checked by the helper that others use for theirs; and what the helper catches."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from safetensors.torch import load_file

from fedaudit.attacks import ATTACKS, Attack, Finding, ImageFinding, LocalModelFinding, make_attack, register
from fedaudit.data import load_dataset
from fedaudit.pipeline.contract import check_attack
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.registry import SETTINGS
from tests.attacks.attack_cases import SCENARIOS, quick_attack
from tests.conftest import core

# Slow ones, and attacks that share their loop with a quicker one.
LONG = {
    "cafe",
    "dp-canaries",
    "property-inference",
    "local-model-exact",
    "source-inference",
    "r-gap",
    "dager",
    "dlg",
    "idlg",
    "cpl",
    "geng",
    "gias",
    "dlg-adam",
    "agic-epochs",
    "dlg-adam-epochs",
    "invg-epochs",
    "somp",
    "lamp",
    "source-outputs",
    "extraction",
    "min-k",
    "zlib-ratio",
    "stacked",
    "decepticons",
    "gradinversion",
}


WITHOUT_PEERS = [name for name in ATTACKS.names() if name != "timberstrike"]


@pytest.mark.parametrize("name", core(WITHOUT_PEERS, *(name for name in WITHOUT_PEERS if name not in LONG)))
def test_every_attack_keeps_it(name: str, tmp_path: Path) -> None:
    found = check_attack(quick_attack(name, tmp_path), SCENARIOS.get(name))
    assert isinstance(found, ATTACKS[name].value.finds)


@pytest.mark.peers
def test_an_attack_on_trees_keeps_it_too(tmp_path: Path) -> None:
    pytest.importorskip("xgboost")
    found = check_attack(quick_attack("timberstrike", tmp_path), SCENARIOS["timberstrike"])
    assert isinstance(found, ATTACKS["timberstrike"].value.finds)


# --- what it catches ------------------------------------------------------------------------------------------------


@checked_dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Honest(Attack):
    """Guesses grey images: nothing that the contract forbids."""

    name: ClassVar[str] = "grey"
    summary: ClassVar[str] = "grey images"
    paper: ClassVar[str] = "none"
    threat_model: ClassVar[str] = "server or eavesdropper, passive"
    needs: ClassVar[tuple[str, ...]] = ("images",)

    shade: float = 0.5

    def check(self, observation: Observation) -> None:
        observation.single()
        if observation.task_info.kind != "image":
            raise NotApplicable("grey rows of a table say nothing; give it images")

    def _run(self, observation: Observation, generator: torch.Generator, device: str, progress: Any, /) -> Any:
        n = observation.single().update.num_examples
        noise = 0.1 * torch.rand((n, *observation.task_info.input_shape), generator=generator)
        return ImageFinding(
            attack=self.name, images=self.shade + noise, labels=torch.zeros(n, dtype=torch.int64), label_source="none"
        )


class Dicing(Honest):
    def _run(self, observation: Observation, *rest: Any) -> Any:
        random.random()
        return super()._run(observation, *rest)


class Forgetful(Honest):
    runs: ClassVar[list[int]] = []

    def _run(self, observation: Observation, generator: torch.Generator, *rest: Any) -> Any:
        self.runs.append(1)
        own = torch.Generator().manual_seed(len(self.runs))
        return super()._run(observation, own, *rest)


class Scribbling(Honest):
    def _run(self, observation: Observation, *rest: Any) -> Any:
        next(iter(observation.single().update.tensors.values())).add_(1)
        return super()._run(observation, *rest)


OLD: set[int] = set()  # truths that other tests left in memory


def truths() -> list[Truth]:
    return [thing for thing in gc.get_objects() if type(thing) is Truth and id(thing) not in OLD]


class Peeping(Honest):
    """Looks for the truth among all objects of the process."""

    def _run(self, observation: Observation, *rest: Any) -> Any:
        found = super()._run(observation, *rest)
        key = observation.single().round, observation.single().client
        there = [truth for truth in truths() if key in truth.inputs]
        return dataclasses.replace(found, images=there[-1].inputs[key].clone())


class Opening(Honest):
    """Opens the truth where it lies, past the classes that the helper watches."""

    def _run(self, observation: Observation, *rest: Any) -> Any:
        found = super()._run(observation, *rest)
        if Path("truth.safetensors").is_file():
            seen = observation.single()
            return dataclasses.replace(
                found, images=load_file("truth.safetensors")[f"inputs/{seen.round}/{seen.client}"]
            )
        return found


class Clinging(Honest):
    """Knows by the truth's presence alone, whatever it says, that it is checked on a simulation."""

    known: ClassVar[list[Any]] = []

    def _run(self, observation: Observation, *rest: Any) -> Any:
        found = super()._run(observation, *rest)
        if not self.known:
            self.known.append(weakref.ref(truths()[-1]))
        return found if self.known[0]() is not None else dataclasses.replace(found, images=1 - found.images)


class Loading(Honest):
    def _run(self, observation: Observation, *rest: Any) -> Any:
        found = super()._run(observation, *rest)
        return dataclasses.replace(found, images=load_dataset("digits").test.inputs[: len(found.images)])


class Other(Honest):
    finds: ClassVar[type[Finding]] = LocalModelFinding


class Reckless(Honest):
    def check(self, observation: Observation) -> None:
        pass

    def _run(self, observation: Observation, *_: Any) -> Any:
        n = observation.messages[0].update.num_examples
        images = torch.zeros(n, *observation.task_info.input_shape)
        return ImageFinding(attack=self.name, images=images, labels=torch.zeros(n), label_source="none")


class Unsaved(Honest):
    def _run(self, observation: Observation, *rest: Any) -> Any:
        return dataclasses.replace(super()._run(observation, *rest), label_source=b"\x00")


class Unwritable(Honest):
    shade: Any = dataclasses.field(default_factory=lambda: torch.tensor(0.5))


class Silent(Honest):
    paper: ClassVar[str] = ""


class Impatient(Honest):
    def _run(self, observation: Observation, *rest: Any) -> Any:
        rest[-1](3, 2)
        return super()._run(observation, *rest)


CAUGHT = [
    (Dicing, "moves a global random generator"),
    (Forgetful, "finds something else the second time"),
    (Scribbling, "changes its observation"),
    (Peeping, "isn't blind: it finds something else where the truth is altered"),
    (Opening, "isn't blind: it finds something else where the truth is adversarial"),
    (Clinging, "isn't blind: it finds something else where the truth is absent"),
    (Loading, "opened a data set or the truth"),
    (Other, "returned a ImageFinding, not a LocalModelFinding"),
    (Reckless, "fails where there is nothing of this: updates, with IndexError"),
    (Unsaved, "can't be saved and loaded"),
    (Unwritable, "don't survive a scenario file"),
    (Silent, "says nothing in its class attribute 'paper'"),
    (Impatient, "says that 3 of 2 iterations are done"),
]


def registered(cls: type[Attack], monkeypatch: pytest.MonkeyPatch) -> Attack:
    """Return an instance of ``cls``, which has its name until the test is over."""
    monkeypatch.setattr(ATTACKS, "_entries", dict(ATTACKS._entries))
    return register(cls)()


def test_who_keeps_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_attack(registered(Honest, monkeypatch))
    assert isinstance(found, ImageFinding)
    assert found.images.shape == (1, 1, 8, 8)


@pytest.mark.parametrize(("cls", "words"), CAUGHT)
def test_who_does_not_is_told_what_is_wrong(cls: type[Attack], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OLD.update(map(id, truths()))
    with pytest.raises(AssertionError, match=words):
        check_attack(registered(cls, monkeypatch))


def test_who_is_not_registered_or_refuses_the_scenario_is_told() -> None:
    with pytest.raises(AssertionError, match="isn't registered"):
        check_attack(Honest())
    with pytest.raises(AssertionError, match=r"refuses the scenario .* give check_attack a scenario"):
        check_attack(make_attack("loss-threshold"))
