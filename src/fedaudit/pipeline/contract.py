"""For authors of attacks: a check, in a test of their own, that an attack keeps to what audits rely on."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from fedaudit.attacks import ATTACKS, Attack, Finding
from fedaudit.data import Dataset, load_dataset
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.queries import NOBODY
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, save_recording
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.folders import temporary_folder
from fedaudit.utils.registry import make
from fedaudit.utils.seeds import generator

_SMALL: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "width": 8},
    "federations": [{"name": "check", "algorithm": "fedsgd", "clients": 2, "examples": 4, "rounds": 2}],
}


def check_attack(attack: Attack, scenario: Mapping[str, Any] | None = None) -> Finding:
    """Check an attack, with quick settings, against the contract that audits rely on.

    It simulates a small federation and runs the attack several times on what its adversary sees. The attack

    - is registered, says what it is, and its settings survive a scenario file;
    - finds the same bits twice, draws from the generator that it is given and from no other, and leaves the observation
      as it was;
    - is blind to the truth: it opens no data set and no truth, and finds the same bits where the truth is

      - *altered*: every value of the examples and of the truth in memory is another;
      - *adversarial*: in memory, and as files in the working folder under the names that fedaudit gives them, lies a
        truth of other, real examples and other labels, in which members of the training data are none;
      - *absent*: the transcript was written to a folder without it, all objects that hold it are gone, and the attack
        sees what is read from there;
    - returns what it declares (``finds``), named after itself, and that survives the disk;
    - where something is missing (updates, records, labels, how the clients train, images) raises
      :class:`~fedaudit.utils.errors.NotApplicable`, in ``check`` or at the latest when it runs, and nothing else.

    Args:
        attack: with settings under which a run takes seconds at most.
        scenario: parts of a scenario, as in YAML, in which the attack can be run; what isn't given is small and quick:
            two clients that send gradients of an MLP on 8x8 digits.

    Returns:
        What the attack found.

    Raises:
        AssertionError: it doesn't; the message says what is wrong.
        BadInput: the scenario can't be used.
    """
    _check_words(attack)
    _check_settings(attack)
    made = _scenario(attack, scenario or {})
    seen, recording, data = _simulated(made, attack)
    before, dice = _bits(seen), _dice()
    try:
        first = _run(attack, seen)
    except TypeError as error:  # the call says that the finding isn't what the class declares, or the attack fails
        raise AssertionError(str(error)) from error
    except NotApplicable as reason:
        raise AssertionError(
            f"{attack.name} refuses the scenario that it is checked in ({reason}); give check_attack a scenario in "
            "which it can be run"
        ) from None
    assert _dice() == dice, (
        f"{attack.name} moves a global random generator (torch's, numpy's or Python's); draw from the one it is given"
    )
    assert _bits(seen) == before, f"{attack.name} changes its observation; copy what it works on"
    assert _bits(_run(attack, seen)) == _bits(first), f"{attack.name} finds something else the second time"
    with temporary_folder() as folder:
        recording.transcript.save(folder / "absent")
        module, loss = recording.transcript.module, recording.transcript.loss
        _alter(_tensors((recording.truth, data)))
        _check_blind(attack, seen, first, "altered")
        _mislead(recording.truth, data)
        save_recording(recording.transcript, recording.truth, folder / "adversarial")
        absolute = all(path.is_absolute() for path in attack.files())
        with chdir(folder / "adversarial") if absolute else nullcontext():
            _check_blind(attack, seen, first, "adversarial")
        del recording, data
        gc.collect()
        read = observe(Transcript.load(folder / "absent", module, loss), made.threat)
        _check_blind(attack, (read.split(attack.scope()) or [read])[0], first, "absent")
    _check_disk(attack, first)
    for what, other in _lacking(attack, seen):
        _check_refusal(attack, what, other)
    return first


def _check_words(attack: Attack) -> None:
    cls = type(attack)
    assert attack.name in ATTACKS, f"{cls.__name__} isn't registered: decorate it with @fedaudit.attacks.register"
    registered = ATTACKS[attack.name].value
    assert registered is cls, f"'{attack.name}' is registered for {registered.__name__}, not for {cls.__name__}"
    for attribute in ("summary", "paper", "threat_model", "needs", "recovers"):
        assert getattr(attack, attribute, None), f"{attack.name} says nothing in its class attribute '{attribute}'"
    assert "\n" not in attack.summary, f"{attack.name}: summary is longer than a line"
    assert isinstance(attack.needs, tuple), f"{attack.name}: needs is no tuple of texts"
    finds: Any = attack.finds
    assert isinstance(finds, type), f"{attack.name}: finds is no class of findings"
    assert issubclass(finds, Finding), f"{attack.name}: finds is no class of findings"
    scope: str = attack.scope()
    assert scope in ("update", "client", "federation"), f"{attack.name}: scope() is '{scope}'"


def _check_settings(attack: Attack) -> None:
    settings = attack.settings()
    try:
        read = yaml.safe_load(yaml.safe_dump(settings))
        again = make(ATTACKS, attack.name, read)
    except (yaml.YAMLError, BadInput) as error:
        raise AssertionError(f"{attack.name}: its settings don't survive a scenario file: {error}") from error
    assert again.settings() == settings, (
        f"{attack.name}: its settings come back from a scenario file as {again.settings()}, not {settings}"
    )
    try:
        make(ATTACKS, attack.name, {**settings, "no_such_setting": 1})
    except BadInput:
        return
    raise AssertionError(f"{attack.name} takes a setting that it doesn't have")


def _scenario(attack: Attack, parts: Mapping[str, Any]) -> Scenario:
    own = {"name": attack.name, **attack.settings()}
    return scenario_from({**_SMALL, **parts, "attacks": [own]})


def _simulated(scenario: Scenario, attack: Attack) -> tuple[Observation, Recording, Dataset]:
    """Return a copy of the first that the attack looks at, what it was made of, and the data of the clients."""
    data = copy.deepcopy(
        load_dataset(
            scenario.data.name,
            image_size=scenario.data.image_size,
            limit=scenario.data.limit,
            seed=scenario.seed,
            kind=scenario.data.kind,
        )
    )
    (recording,) = record(resolve(scenario, dataset=data))
    whole = observe(recording.transcript, scenario.threat)
    seen = copy.deepcopy((whole.split(attack.scope()) or [whole])[0])
    return seen, recording, data


def _alter(tensors: Sequence[Tensor]) -> None:
    for tensor, altered in [(t, ~t if t.dtype == torch.bool else 1 - t) for t in tensors]:  # some are the same
        tensor.copy_(altered)


def _mislead(truth: Truth, data: Dataset) -> None:
    """Turn an altered truth into one that could be believed: every update's examples are others, members are none."""
    _alter(_tensors((truth, data)))  # back to what they were
    others = len(truth.candidates) - 1
    for i, (key, victims) in enumerate(sorted(truth.inputs.items())):
        rows = [(others - i - j) % len(truth.candidates) for j in range(len(victims))]
        victims.copy_(truth.candidates[rows])
        truth.labels[key].copy_(truth.candidate_labels[rows])
    members = truth.owners >= 0
    truth.owners.copy_(torch.where(members, torch.full_like(truth.owners, NOBODY), torch.zeros_like(truth.owners)))
    truth.values.copy_(truth.values.flip(0))
    truth.shares.copy_(truth.shares.flip(0))
    for split in (data.train, data.test):
        split.targets.copy_(split.targets.roll(1, 0))


def _check_blind(attack: Attack, seen: Observation, first: Finding, how: str) -> None:
    try:
        found = _run(attack, seen)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{attack.name} isn't blind: where the truth is {how} it fails with {type(error).__name__}: {error}"
        ) from error
    assert _bits(found) == _bits(first), f"{attack.name} isn't blind: it finds something else where the truth is {how}"


@contextmanager
def _closed() -> Iterator[None]:
    """Let nobody open data or a truth."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an attack opened a data set or the truth; it may use its observation only")

    with patch.object(Dataset, "__init__", refuse), patch.object(Truth, "__init__", refuse):
        yield


def _run(attack: Attack, seen: Observation) -> Finding:
    def progress(done: int, total: int) -> None:
        assert 0 <= done <= total, f"{attack.name} says that {done} of {total} iterations are done"

    with _closed():
        return attack(seen, generator=generator(0, "check"), device="cpu", progress=progress)


def _check_disk(attack: Attack, found: Finding) -> None:
    with temporary_folder() as folder:
        path = folder / "finding.safetensors"
        try:
            found.save(path)
            again = Finding.load(path)
        except Exception as error:
            raise AssertionError(f"{attack.name}: its finding can't be saved and loaded: {error}") from error
    assert _bits(again) == _bits(found), f"{attack.name}: its finding isn't the same when it is saved and loaded"


def _lacking(attack: Attack, seen: Observation) -> Iterator[tuple[str, Observation]]:
    """Yield observations in which something is missing, with what."""
    whole = dataclasses.replace(seen, threat=ThreatModel(adversary="client"), messages=(), adversary_log={})
    yield "updates", whole
    yield "records", dataclasses.replace(seen, records=None)
    blind = [
        dataclasses.replace(m, update=dataclasses.replace(m.update, training=None, labels=None)) for m in seen.messages
    ]
    yield "how the clients train, and labels", dataclasses.replace(seen, messages=tuple(blind))
    silent = [
        dataclasses.replace(
            m,
            update=dataclasses.replace(m.update, tensors={n: torch.zeros_like(t) for n, t in m.update.tensors.items()}),
        )
        for m in seen.messages
    ]
    yield "anything but zeros in the updates", dataclasses.replace(seen, messages=tuple(silent))
    for name, what in (("breast-cancer", "images"), ("diabetes", "classes")):
        federations = [{"name": "check", "clients": 2, "examples": 4, "rounds": 2}]
        table = scenario_from({**_SMALL, "data": {"name": name}, "federations": federations, "attacks": [attack.name]})
        yield what, _simulated(table, attack)[0]


def _check_refusal(attack: Attack, what: str, seen: Observation) -> None:
    try:
        _run(attack, seen)
    except NotApplicable:
        pass
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{attack.name} fails where there is nothing of this: {what}, with {type(error).__name__}: {error}; "
            "raise NotApplicable in check(), with the reason"
        ) from error


def _dice() -> str:
    """Return the state of all global random generators."""
    return repr((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()))  # noqa: NPY002


def _parts(value: Any) -> Iterator[Any]:
    """Yield ``value`` and all that it is made of."""
    yield value
    inside: list[Any] = []
    if isinstance(value, nn.Module):
        inside = [{**value.state_dict(), "training": [part.training for part in value.modules()]}]
    elif isinstance(value, Mapping):
        inside = [part for item in value.items() for part in item]
    elif isinstance(value, list | tuple):
        inside = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, f.name) for f in dataclasses.fields(value) if f.compare]
    for part in inside:
        yield from _parts(part)


def _tensors(value: Any) -> list[Tensor]:
    return [part for part in _parts(value) if isinstance(part, Tensor)]


def _bits(value: Any) -> list[Any]:
    """Return what is to be equal where two values are the same to the bit."""
    plain = (str, bytes, int, float, bool, type(None))
    return [
        (str(part.dtype), tuple(part.shape), part.detach().cpu().contiguous().numpy().tobytes())
        if isinstance(part, Tensor)
        else repr(part)
        for part in _parts(value)
        if isinstance(part, (Tensor, *plain))
    ]
