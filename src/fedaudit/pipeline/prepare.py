"""From a scenario to what a simulation and its attacks need: everything is made here, checked, and made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fedaudit.attacks import ATTACKS
from fedaudit.data import Dataset
from fedaudit.models import MODELS, keep_modes, own_copy, unwrapped
from fedaudit.pipeline.choice import choose
from fedaudit.pipeline.parts.data import data_record, loaded, of_one_tensor_each
from fedaudit.pipeline.parts.federations import federations_of
from fedaudit.pipeline.parts.loss import task_of
from fedaudit.pipeline.parts.model import check_outputs, model_record, network_of, with_modes
from fedaudit.pipeline.pretraining import pretrain
from fedaudit.results import DataRecord, ModelRecord
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.client import Federation
from fedaudit.task.training import Loss
from fedaudit.utils.bounds import shown
from fedaudit.utils.errors import OWN_MODEL, BadInput, MissingData
from fedaudit.utils.machine import one_thread
from fedaudit.utils.progress import Display, Quiet
from fedaudit.utils.registry import make


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """What is to be audited, with a user's own parts: what :func:`resolve` and ``run_audit`` take as keywords.

    Attributes:
        scenario: names the parts that aren't a user's own.
        data_dir: where data sets that aren't embedded lie.
        dataset, model, loss: a user's own; the model isn't changed, and the loss is the mean over a batch.
    """

    scenario: Scenario
    data_dir: Path | None = None
    dataset: Dataset | None = None
    model: nn.Module | None = None
    loss: Loss | None = None


@dataclass(frozen=True)
class ResolvedScenario:
    """A scenario with everything that was made from it and checked.

    Attributes:
        scenario: with the attacks that are run, and how its model trains.
        data, model: what a result says of them.
        federations: every federation under every set of defences, none of them simulated yet; empty where they were
            simulated before.
    """

    scenario: Scenario
    data: DataRecord
    model: ModelRecord
    federations: Sequence[Federation] = ()


@one_thread()
def resolve(
    scenario: Scenario,
    *,
    data_dir: Path | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    display: Display | None = None,
) -> ResolvedScenario:
    """Make all parts of ``scenario``, check that they fit together, and train the model if that is wanted.

    What can't work is found before anything that takes long. The keywords are those of an :class:`AuditRequest`.

    Raises:
        BadInput: a name is unknown, a setting isn't allowed, the data aren't there, parts don't fit together, or a
            user's own is missing.
    """
    module = None if model is None else own_copy(model)
    model = None if model is None else unwrapped(model)
    kept = keep_modes(module) if module is not None and scenario.model.batch_norm is None else 0
    spelled = spell_out(AuditRequest(scenario=scenario, data_dir=data_dir, dataset=dataset, model=module))
    scenario, dataset = spelled.scenario, spelled.dataset
    if dataset is None:
        if scenario.data.name == "custom":
            raise BadInput(
                "the scenario audits a user's own data; run it from Python: fedaudit.audit(scenario, data=…)"
            )
        dataset = loaded(scenario, data_dir)
    if module is not None:
        module, dataset = of_one_tensor_each(module, dataset)
    loss, task_info = task_of(scenario, dataset, module, loss)
    network = network_of(scenario, task_info, module)
    check_outputs(network, task_info, dataset, own=scenario.data.name == "custom")  # before the training
    federations = federations_of(scenario, dataset, task_info, network, loss)
    spec = scenario.model
    trained = (
        f"checkpoint {spec.checkpoint}" if spec.checkpoint else "untrained" if spec.name != "custom" else "as given"
    )
    if spec.training.epochs:
        trained = pretrain(network, loss, task_info, dataset, scenario, display or Quiet())
    about = model_record(network, spec, task_info, dataset, trained, given=model, kept=kept)
    return ResolvedScenario(scenario, data_record(dataset), about, federations)


def spell_out(request: AuditRequest) -> AuditRequest:
    """Return the request with the scenario as :func:`resolve` has it, without making its parts.

    It reads the data set only where attacks are left open, and then returns it, too.
    """
    scenario, dataset, model = request.scenario, request.dataset, request.model
    _check(scenario)
    if not scenario.attacks and (dataset is not None or scenario.data.name != "custom"):
        dataset = loaded(scenario, request.data_dir) if dataset is None else dataset
        chosen = [make(ATTACKS, spec.name, spec.settings()) for spec in choose(scenario, dataset, model)]
        scenario = scenario.model_copy(update={"attacks": chosen})
    module = model if isinstance(model, nn.Module) else None
    scenario = scenario.model_copy(update={"model": with_modes(scenario.model, module)})
    return replace(request, scenario=scenario, dataset=dataset)


def check_files(scenario: Scenario) -> None:
    """Raise MissingData if attacks name files that aren't there; in a study such attacks are why a cell is empty."""
    for attack in scenario.attacks:
        for file in attack.files():
            if not file.is_file():
                raise MissingData(f"attack '{attack.name}': there is no file '{shown(str(file))}'")


def _check(scenario: Scenario) -> None:
    """Refuse what can be seen to be wrong before data are read."""
    name = scenario.model.name
    if ":" in name or name.endswith(".py"):
        raise BadInput(f"model.name is '{shown(name)}': a scenario names models that fedaudit knows; {OWN_MODEL}")
    if name not in ("custom", scenario.federations[0].settings.model):
        MODELS[name]
    if scenario.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("device is 'cuda', but torch finds no GPU here; use device: cpu")
    if len(scenario.attacks) > 1 and any(attack.canary_spec() for attack in scenario.attacks):
        raise BadInput(
            "epsilon puts canaries into the federation, so other attacks would see another one: give it a scenario of "
            "its own"
        )
    for _, federation, defences in scenario.runs():
        try:
            defences.check(federation.plan)
        except BadInput as error:
            raise BadInput(f"federation '{federation.name}': {error}") from None
