"""The loss of a scenario, or a user's own, and what everybody in its federations knows of their task."""

from __future__ import annotations

from torch import nn

from fedaudit.data import Dataset
from fedaudit.models import packings_in
from fedaudit.scenario.scenario import Scenario
from fedaudit.task.info import TaskInfo
from fedaudit.task.losses import LossOptions, as_called, recognise
from fedaudit.task.training import BCE, Loss, loss_function
from fedaudit.transcript.reading import outputs_of
from fedaudit.utils.errors import BadInput


def task_of(scenario: Scenario, dataset: Dataset, module: nn.Module | None, loss: Loss | None) -> tuple[Loss, TaskInfo]:
    """Return the loss that clients minimise, and the task; BadInput: it isn't for such a model, or is missing."""
    spec, heads = scenario.model, None if module is None else packings_in(module)[1]
    assert spec.batch_norm is not None  # it is spelled out
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
    read = _recognised(loss, dataset, num_targets, spec.extra_classes) if own else None
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
        extra_classes=spec.extra_classes,
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
    return loss, task_info


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
    if task_info.causal and scenario.threat.knows_labels:
        raise BadInput("threat.knows_labels isn't for a causal task, whose targets are the sequences; leave it out")
