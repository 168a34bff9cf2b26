"""From a scenario to what a simulation and its attacks need: everything is made here, checked, and made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedaudit.attacks import ATTACKS
from fedaudit.data import Dataset, load_dataset
from fedaudit.data.dataset import of_heads
from fedaudit.epsilon.canaries import CanarySpec
from fedaudit.models import (
    BATCH_NORM,
    MODELS,
    build_model,
    has_batch_norm,
    initialise,
    keep_modes,
    layer_groups,
    load_checkpoint,
    of_one_tensor,
    own_copy,
    packing_of,
    packings_in,
    unwrapped,
)
from fedaudit.models.inserted_module import with_inserted_module
from fedaudit.models.trees import MODEL as TREES
from fedaudit.models.trees import TreeEnsemble
from fedaudit.pipeline.choice import choose
from fedaudit.pipeline.pretraining import pretrain
from fedaudit.results import DataRecord, ModelRecord
from fedaudit.scenario.scenario import ModelSpec, Scenario
from fedaudit.simulation.client import Federation
from fedaudit.simulation.local_training import FAILURES, draws_at_random
from fedaudit.simulation.record_draw import draw_records
from fedaudit.simulation.simulator import check, partition_clients
from fedaudit.simulation.spec import FederationSpec
from fedaudit.simulation.trees import check_task
from fedaudit.task.info import TaskInfo
from fedaudit.task.losses import LossOptions, as_called, recognise
from fedaudit.task.training import BCE, Loss, loss_function
from fedaudit.transcript.reading import outputs_of
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.vertical import vertical_module
from fedaudit.utils.bounds import shown
from fedaudit.utils.errors import OWN_MODEL, BadInput, MissingData
from fedaudit.utils.machine import one_thread
from fedaudit.utils.progress import Display, Quiet
from fedaudit.utils.registry import make
from fedaudit.utils.seeds import generator


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

    What can't work is found before anything that takes long. ``dataset``, ``model`` and ``loss`` are a user's own.

    Args:
        scenario: as it was read.
        data_dir: where data sets that aren't embedded lie.
        dataset: instead of the scenario's.
        model: instead of the scenario's; it isn't changed.
        loss: instead of the scenario's; mean over a batch.
        display: shows progress.

    Raises:
        BadInput: a name is unknown, a setting isn't allowed, the data aren't there, parts don't fit together, or a
            user's own is missing.
    """
    module = None if model is None else _copied(model)
    model = None if model is None else unwrapped(model)
    kept = keep_modes(module) if module is not None and scenario.model.batch_norm is None else 0
    scenario, dataset = spell_out(scenario, data_dir=data_dir, dataset=dataset, model=module)
    if dataset is None:
        if scenario.data.name == "custom":
            raise BadInput(
                "the scenario audits a user's own data; run it from Python: fedaudit.audit(scenario, data=…)"
            )
        dataset = _loaded(scenario, data_dir)
    heads = None
    if module is not None:
        module, dataset = of_one_tensor_each(module, dataset)
        heads = packings_in(module)[1]
    spec = scenario.model
    assert spec.batch_norm is not None  # spell_out() saw to it
    loss_name: str = spec.loss
    one_logit = _one_logit(module, dataset, loss_name)
    num_targets = 1 if one_logit else dataset.num_targets
    if loss_name == "auto":
        loss_name = "custom" if loss else dataset.task_kind.fitting_losses(num_targets)[0]
    if loss is None:
        if loss_name == "custom":
            raise BadInput("the scenario trains with a user's own loss; run it from Python: fedaudit.audit(…, loss=…)")
        loss = loss_function(loss_name)
    if heads is not None and len(heads.parts) == 1 and loss_name != "custom":
        raise BadInput(
            f"the model returns its one output in a dictionary or a tuple, {heads}: wrap it in a module that returns "
            "the tensor alone"
        )
    if heads is not None and loss_name != "custom":
        raise BadInput(
            f"the model returns several outputs, {heads}: train it with a loss of your own, "
            "loss=lambda outputs, targets: …, the mean over the batch"
        )
    own = loss_name == "custom" and heads is None
    read = _recognised(loss, dataset, num_targets, spec.spare_outputs) if own else None
    options = read or LossOptions(loss_name)
    task_info = TaskInfo(
        model=spec.name,
        width=spec.width,
        batch_norm=spec.batch_norm,
        loss=options.name,
        kind=dataset.kind,
        input_shape=dataset.input_shape,
        num_classes=dataset.num_classes,
        task=dataset.task,
        num_targets=num_targets,
        mean=dataset.mean,
        std=dataset.std,
        dropout=spec.dropout is not False,
        extra_classes=spec.spare_outputs,
        columns=dataset.columns,
        tokens=dataset.tokens,
        label_smoothing=options.label_smoothing,
        class_weights=options.class_weights,
        summed=options.summed,
        packed_inputs=dataset.packed_inputs,
        heads=heads,
        packed_targets=dataset.packed_targets,
    )
    if read is not None:
        loss = loss_function(*read)
    elif loss_name == "custom":
        loss = as_called(loss, task_info)
    _check_causal(scenario, task_info)
    if module is not None and scenario.federations[0].trees is not None:
        raise BadInput("a federation of trees grows its model itself; leave model out")
    if module is not None and scenario.federations[0].vertical is not None:
        raise BadInput("a vertical federation is made of fedaudit's models, a party's network each; name one of them")
    if module is None:
        if spec.name == "custom":
            raise BadInput("the scenario audits a user's own model; run it from Python: fedaudit.audit(…, model=…)")
        first = scenario.federations[0]  # all have the same model
        if first.trees is not None:
            check_task(task_info)
            module = TreeEnsemble(task_info.outputs)
        elif first.vertical is not None:
            module = vertical_module(first.vertical, first.clients, task_info)
        else:
            module = build_model(
                spec.name,
                input_shape=task_info.input_shape,
                outputs=task_info.outputs,
                width=spec.width,
                tokens=task_info.tokens,
            )
        if first.trees is None:
            initialise(module, spec.initialisation, generator(scenario.seed, "model"))
    if spec.checkpoint is not None:
        load_checkpoint(module, spec.checkpoint)
    _check_outputs(
        module, task_info, dataset, scenario.data.name == "custom"
    )  # what doesn't fit is found before the training
    canaries = next((asked for attack in scenario.attacks if (asked := attack.canary_spec())), None)
    federations = _federations(scenario, dataset, task_info, module, loss, canaries)
    trained = (
        f"checkpoint {spec.checkpoint}" if spec.checkpoint else "untrained" if spec.name != "custom" else "as given"
    )
    if spec.training.epochs:
        trained = pretrain(module, loss, task_info, dataset, scenario, display or Quiet())
    data_record = DataRecord(
        name=dataset.name,
        summary=dataset.summary if dataset.source in dataset.summary else f"{dataset.summary}; {dataset.source}",
        classes=dataset.num_classes,
        class_names=list(dataset.class_names) if dataset.class_names else None,
        kind=dataset.kind,
        input_shape=list(dataset.input_shape),
        words=list(dataset.words) if dataset.words else None,
    )
    sample = task_info.normalise(dataset.test.inputs[:8])
    batch_norm = spec.batch_norm if has_batch_norm(module) else "none"
    dropout = ("on" if task_info.dropout else "off") if draws_at_random(module, sample) else "none"
    model_record = ModelRecord(
        name=spec.name,
        parameters=sum(p.numel() for p in module.parameters()),
        initialisation="given" if spec.name == "custom" else spec.initialisation,
        batch_norm=batch_norm,
        trained=trained,
        dropout=dropout,
        mode=_mode_in_words(batch_norm, dropout, model, kept),
    )
    return ResolvedScenario(scenario, data_record, model_record, federations)


def spell_out(
    scenario: Scenario, *, data_dir: Path | None = None, dataset: Dataset | None = None, model: nn.Module | None = None
) -> tuple[Scenario, Dataset | None]:
    """Return the scenario as :func:`resolve` does, without making its parts, and the data set.

    It is read where attacks are left open only: :func:`resolve` takes it, and needn't read it again.
    """
    _check(scenario)
    if not scenario.attacks and (dataset is not None or scenario.data.name != "custom"):
        dataset = _loaded(scenario, data_dir) if dataset is None else dataset
        chosen = [make(ATTACKS, spec.name, spec.settings()) for spec in choose(scenario, dataset, model)]
        scenario = scenario.model_copy(update={"attacks": chosen})
    module = model if isinstance(model, nn.Module) else None
    return scenario.model_copy(update={"model": _with_modes(scenario.model, module)}), dataset


def of_one_tensor_each(module: nn.Module, dataset: Dataset) -> tuple[nn.Module, Dataset]:
    """Return a user's module, that takes and returns one tensor where it had several, and data with targets for it.

    BadInput: it doesn't take the data set's inputs, or returns something else than tensors.
    """
    if packings_in(module) != (None, None):
        return module, dataset
    inputs, heads = packing_of(module, dataset.packed_inputs, dataset.test.inputs[:2])
    if heads is not None:
        dataset = of_heads(dataset)
    elif dataset.packed_targets is not None:
        raise BadInput(f"the targets are several, {dataset.packed_targets}, and the model returns one tensor; give one")
    return (module if inputs is heads is None else of_one_tensor(module, inputs, heads)), dataset


def check_files(scenario: Scenario) -> None:
    """Raise MissingData if attacks name files that aren't there; in a study such attacks are why a cell is empty."""
    for attack in scenario.attacks:
        for file in attack.files():
            if not file.is_file():
                raise MissingData(f"attack '{attack.name}': there is no file '{shown(str(file))}'")


def _loaded(scenario: Scenario, data_dir: Path | None) -> Dataset:
    spec = scenario.data
    return load_dataset(
        spec.name,
        image_size=spec.image_size,
        data_dir=data_dir,
        limit=spec.limit,
        seed=scenario.seed,
        white=spec.white,
        kind=spec.kind,
    )


def _check(scenario: Scenario) -> None:
    """Refuse what can be seen to be wrong before data are read."""
    name = scenario.model.name
    if ":" in name or name.endswith(".py"):
        raise BadInput(f"model.name is '{shown(name)}': a scenario names models that fedaudit knows; {OWN_MODEL}")
    if name not in ("custom", TREES):
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


def _federations(
    scenario: Scenario,
    dataset: Dataset,
    task_info: TaskInfo,
    model: nn.Module,
    loss: Loss,
    canaries: CanarySpec | None,
) -> list[Federation]:
    """Return every federation under every set of defences, checked; under all of them clients hold the same."""
    names = iter(name for name, _, _ in scenario.runs())
    threat, evaluation = scenario.threat, scenario.evaluation
    split, seed, measured = scenario.data.split, scenario.seed, evaluation.accuracy_every
    federations = []
    for spec in scenario.federations:
        _check_part(threat, spec, canaries is not None)
        client_data = partition_clients(dataset, split, spec, seed=seed)
        info, sent = replace(task_info, batch_norm=spec.batch_norm or task_info.batch_norm), model
        if spec.server is not None:
            info = spec.server.task_info(info, spec.plan)
            sent = with_inserted_module(model, info)
        drawn = draw_records(
            dataset,
            split,
            spec,
            client_data,
            seed=seed,
            records=threat.records or 0,
            public=threat.public_examples or 0,
            hidden=threat.hidden_attribute,
            wanted=threat.client_property,
            own=threat.clients or (),
            pretrained=scenario.model.training.epochs > 0,
            measured=measured is not None,
        )
        for defences in (scenario.defences, *scenario.other_defences):
            federation = Federation(
                name=next(names),
                spec=spec,
                defences=defences,
                seed=seed,
                dataset=dataset,
                split=split,
                task_info=info,
                model=sent,
                loss=loss,
                reveal_labels=threat.knows_labels,
                client_data=client_data,
                drawn=drawn,
                during_training=threat.adversary == "client",
                accuracy_every=measured,
                accuracy_examples=evaluation.accuracy_examples,
                canaries=canaries,
                group_size=threat.group_size if threat.adversary != "client" else 1,
                device=scenario.device,
            )
            check(federation)
            if threat.clients is not None:  # who subtract their own updates from sums, as they observe them
                federation = replace(federation, group_size=1)
            federations.append(federation)
    return federations


def _check_part(threat: ThreatModel, spec: FederationSpec, canaries: bool) -> None:
    """Refuse an adversary that sees a part of a federation of which there is none, before anything is simulated."""
    if not threat.partial:
        return
    try:
        if spec.vertical is not None or spec.trees is not None or canaries:
            what = (
                "an audit of ε" if canaries else "a vertical federation" if spec.vertical else "a federation of trees"
            )
            raise BadInput(f"threat.clients and threat.rounds aren't for {what}; leave them out")
        if threat.clients is not None and spec.malicious is not None:
            raise BadInput("malicious clients are the last ones, and collude: leave threat.clients out")
        everybody = spec.clients_per_round in (None, spec.clients)
        threat.seen_of(spec.record or range(spec.rounds), range(spec.clients), everybody=everybody)
    except BadInput as error:
        raise BadInput(f"federation '{spec.name}': {error}") from None


def _one_logit(module: nn.Module | None, dataset: Dataset, loss: str) -> bool:
    """Whether masks of two classes are one logit a pixel: a user's own model returns that, or the loss asks for it."""
    if not dataset.task_kind.dense or dataset.num_targets > 2:
        return False
    if module is None:
        return loss == BCE
    try:
        return outputs_of(module, dataset.input_shape) == 1
    except BadInput:  # which is said where all models are looked at
        return False


def _recognised(loss: Loss, dataset: Dataset, num_targets: int, extra_classes: int) -> LossOptions | None:
    """Return which registered loss a user's own one is; None: none, or of a form that tasks don't have."""
    if dataset.tokens is not None and dataset.tokens.causal:
        return None
    classes = dataset.num_classes
    outputs = num_targets - dataset.task_kind.fewer_outputs if classes is None else classes + extra_classes
    read = recognise(loss, outputs, classes, dataset.task, len(dataset.input_shape) - 1)
    return None if read is not None and extra_classes and read.class_weights is not None else read


def _check_causal(scenario: Scenario, task_info: TaskInfo) -> None:
    """Refuse what has no meaning where the targets are the examples themselves."""
    for key, value in (("knows_labels", scenario.threat.knows_labels), ("records", scenario.threat.records)):
        if task_info.causal and value:
            raise BadInput(f"threat.{key} isn't for a causal task, whose targets are the sequences; leave it out")


def _copied(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else repr(model)
        raise BadInput(
            f"model is {got}; give a torch.nn.Module that is made, or name one of fedaudit's own in the scenario"
        )
    return own_copy(model)


def _check_outputs(model: nn.Module, task_info: TaskInfo, dataset: Dataset, own: bool) -> None:
    sample = task_info.normalise(dataset.test.inputs[:2])
    parameters = dict(model.named_parameters())
    if len(dict(model.named_parameters(remove_duplicate=False))) > len(parameters):
        raise BadInput("two parameters of the model are one tensor (tied weights), which isn't supported; untie them")
    model.eval()
    try:
        with torch.no_grad():
            outputs: Any = model(sample)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadInput(
            f"the model can't take examples of shape {tuple(sample.shape)}: {_why_not(model, sample, error)}"
        ) from error
    expected = (len(sample), *task_info.output_shape)
    if not isinstance(outputs, Tensor) or tuple(outputs.shape) != expected:
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        more = ""
        if own and isinstance(outputs, Tensor) and outputs.shape[1:] in ((), (1,)) and dataset.num_classes == 2:
            more = (
                f"; a model of one logit returns {(len(sample), 1)} and trains with loss=nn.BCEWithLogitsLoss() "
                f"(model.loss: {BCE})"
            )
        if own and isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] > expected[1]:
            more = _fewer_classes(dataset, outputs.shape[1])
        if own and isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] == expected[1] - 1 > 1:
            least, most = int(dataset.train.targets.min()), int(dataset.train.targets.max())
            more = f"; labels run from {least} to {most}, and classes count from 0: give labels - 1" if least else ""
        raise BadInput(
            f"the model must return a tensor of shape {expected} for {len(sample)} examples, not {got}{more}"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise BadInput("the model has no trainable parameter; nothing would travel in this federation")
    try:
        layer_groups(model, sample)
    except FAILURES as error:
        raise BadInput(
            f"the model can't be looked into ({type(error).__name__}: {str(error)[:200]}); give the module as it is "
            "written in Python"
        ) from error


def _why_not(model: nn.Module, sample: Tensor, error: Exception) -> str:
    """Return on one line why the model fails on examples, and what to do where that is known."""
    embedding = next((n for n, part in model.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)), None)
    if embedding is not None and sample.is_floating_point():
        return (
            f"its layer '{embedding}' is an embedding, which takes whole numbers (tokens, categories), and examples "
            "here are real numbers; give text by Dataset.from_tokens(…), or audit the part of the model behind it, "
            "with its outputs as the inputs"
        )
    kinds = {p.dtype for p in model.parameters()} - {torch.float32}
    if kinds:
        return f"its parameters are {str(kinds.pop()).removeprefix('torch.')} and examples float32; give model.float()"
    return " ".join(str(error).split())


def _fewer_classes(dataset: Dataset, outputs: int) -> str:
    """Return why a user's own data may have fewer classes than the model, and what to do."""
    if dataset.num_classes is None:
        what = dataset.task_kind.targets
        return f"; the targets are taken for {what}, {dataset.num_targets} an example: give classes as whole numbers"
    return (
        f"; '{dataset.name}' has {dataset.num_classes} classes, by default its largest label + 1: where its examples "
        f"don't show every class, say how many there are, Dataset.from_tensors(…, num_classes={outputs})"
    )


# --- the mode in which clients train ----------------------------------------------------------------------------------


def _with_modes(spec: ModelSpec, module: nn.Module | None) -> ModelSpec:
    """Return ``spec`` with BatchNorm's mode and dropout spelled out: as it says, else as the module is, else on.

    Of a module whose BatchNorm layers are in both modes each keeps its own (:func:`fedaudit.models.keep_modes`).
    """
    batch_norm, dropout = spec.batch_norm, spec.dropout
    if batch_norm is None:
        batch_norm = "eval" if module is None else _batch_norm_mode(module) or "train"  # the others keep theirs
    if dropout is None:
        dropout = module is None or _dropout_mode(module) != "eval"
    return spec.model_copy(update={"batch_norm": batch_norm, "dropout": dropout})


def _mode_in_words(batch_norm: str, dropout: str, module: nn.Module | None, kept: int = 0) -> str | None:
    """Return in which mode clients train and whether the module was given so; None where there is no choice."""
    parts = []
    if batch_norm != "none":
        used = f"BatchNorm in {batch_norm} mode" + f", {kept} of its layers in eval mode," * (kept > 0)
        parts.append((used, module is None or kept > 0 or _batch_norm_mode(module) == batch_norm))
    if dropout != "none":
        mode = "train" if dropout == "on" else "eval"
        parts.append((f"dropout {dropout}", module is None or _dropout_mode(module) == mode))
    if not parts:
        return None
    if module is None:
        return f"Clients train with {' and '.join(text for text, _ in parts)}."
    origin = {True: "as the module was given", False: "as set, not as the module was given"}
    if len({as_given for _, as_given in parts}) == 1:
        return f"Clients train with {' and '.join(text for text, _ in parts)}, {origin[parts[0][1]]}."
    return f"Clients train with {' and '.join(f'{text} ({origin[as_given]})' for text, as_given in parts)}."


def _batch_norm_mode(module: nn.Module) -> Literal["eval", "train"] | None:
    """Return the mode of the BatchNorm layers, ``eval`` where there are none; None: not all are in one."""
    modes = {part.training for part in module.modules() if isinstance(part, BATCH_NORM)}
    return None if len(modes) > 1 else "train" if modes == {True} else "eval"


def _dropout_mode(module: nn.Module) -> Literal["eval", "train"]:
    """Return the mode of the dropout layers, ``train`` if any is; of a module without such layers its own."""
    modes = [part.training for part in module.modules() if isinstance(part, _DropoutNd)]
    return "train" if (any(modes) if modes else module.training) else "eval"
