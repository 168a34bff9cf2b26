"""The model of a scenario, or a user's own, and the mode in which clients train it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedaudit.data import Dataset
from fedaudit.models import BATCH_NORM, has_batch_norm, initialise, layer_groups, load_checkpoint
from fedaudit.results import ModelRecord
from fedaudit.scenario.scenario import ModelSpec, Scenario
from fedaudit.simulation.local_training import FAILURES, draws_at_random
from fedaudit.simulation.protocols import protocol_of
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import BCE
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import generator


def network_of(scenario: Scenario, task_info: TaskInfo, module: nn.Module | None) -> nn.Module:
    """Return the model with its first weights: a user's ``module``, or the scenario's; BadInput: there is none."""
    spec = scenario.model
    first = scenario.federations[0]  # all have the same model
    protocol = protocol_of(first)
    if module is not None and protocol.own_model:
        raise BadInput(protocol.own_model)
    if module is None:
        if spec.name == "custom":
            raise BadInput("the scenario audits a user's own model; run it from Python: fedaudit.audit(…, model=…)")
        module = protocol.model(first, spec.name, spec.width, task_info)
        if not protocol.sent.grown:
            initialise(module, spec.initialisation, generator(scenario.seed, "model"))
    if spec.checkpoint is not None:
        load_checkpoint(module, spec.checkpoint)
    return module


def check_outputs(model: nn.Module, task_info: TaskInfo, dataset: Dataset, *, own: bool) -> None:
    """Refuse a model that doesn't fit the task, or has nothing that can travel; ``own``: the data are a user's."""
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


def model_record(
    module: nn.Module,
    spec: ModelSpec,
    task_info: TaskInfo,
    dataset: Dataset,
    trained: str,
    *,
    given: nn.Module | None,
    kept: int,
) -> ModelRecord:
    """Return what a result says of the model: a user's own as it was ``given``, of which ``kept`` layers stay so."""
    sample = task_info.normalise(dataset.test.inputs[:8])
    batch_norm = spec.batch_norm if spec.batch_norm and has_batch_norm(module) else "none"
    dropout = ("on" if task_info.dropout else "off") if draws_at_random(module, sample) else "none"
    return ModelRecord(
        name=spec.name,
        parameters=sum(p.numel() for p in module.parameters()),
        initialisation="given" if spec.name == "custom" else spec.initialisation,
        batch_norm=batch_norm,
        trained=trained,
        dropout=dropout,
        mode=_mode_in_words(batch_norm, dropout, given, kept),
    )


# --- the mode in which clients train ----------------------------------------------------------------------------------


def with_modes(spec: ModelSpec, module: nn.Module | None) -> ModelSpec:
    """Return ``spec`` with BatchNorm's mode and dropout spelled out: as it says, else as the module is, else on.

    Where a module's BatchNorm layers are in both modes, each keeps its own (:func:`fedaudit.models.keep_modes`).
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
    """Return the mode of the dropout layers, ``train`` if any is; without such layers the module's own."""
    modes = [part.training for part in module.modules() if isinstance(part, _DropoutNd)]
    return "train" if (any(modes) if modes else module.training) else "eval"
