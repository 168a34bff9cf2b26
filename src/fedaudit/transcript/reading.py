"""What a transcript's folder says, read with the module that clients trained: rounds of updates, task and loss.

A recorder writes exactly what travelled, and has no module: only here it shows what is a parameter and what a buffer,
and so what the updates ΔW are. What the recorder didn't see of the task is given, estimated or assumed, and said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fedaudit.modalities import TokenInfo, example_kind, fitting_kind
from fedaudit.modalities.base import DARK
from fedaudit.models import adapters_names
from fedaudit.task.info import TaskInfo
from fedaudit.task.losses import as_called, recognise
from fedaudit.task.targets import task_named, usual_task
from fedaudit.task.training import BCE, DICE, DICE_CROSS_ENTROPY, Loss, loss_function
from fedaudit.transcript.files import MessageEntry, ObservedTask, RoundEntry, SentEntry, round_file
from fedaudit.transcript.rounds import Files, Round, expected, labels_of, read_file
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.finite import all_finite
from fedaudit.utils.validation import explain

_PREFIXES = (
    "module.",
    "_orig_mod.",
    "_module.",
    "model.",
)  # of wrappers: parallelism, torch.compile, Opacus, Lightning


class Reader:
    """Reads rounds, and names what doesn't fit the module.

    Args:
        module: that the clients trained; what doesn't travel (a frozen part) is its own.
        task_info: for labels.
        notes: take what was left out or assumed.
        exact: names and types are the module's own and everything is there, as a simulation has it;
            :meth:`fedaudit.Transcript.check` refuses the rest. Else another framework may have sent it.
        partial: updates hold only some of the parameters, as far as that is known.
    """

    def __init__(
        self,
        folder: Path,
        module: nn.Module,
        task_info: TaskInfo,
        notes: list[str],
        *,
        exact: bool,
        partial: bool = False,
    ) -> None:
        self.folder, self.task_info, self.notes = folder, task_info, notes
        self.exact, self.partial = exact, partial
        self.state, self.parameters, self.buffers = expected(module)
        self.files: Files = {}
        self._adapters = adapters_names(module, self.state)

    def round(self, entry: RoundEntry) -> Round:
        """Return a round; BadInput where it isn't the module's."""
        self.files = entry.files
        own_state = {} if self.exact else {name: value.detach().clone() for name, value in self.state.items()}
        weights = self._weights(entry.weights, own_state)
        updates: list[Update] = []
        client_weights = {client: self._weights(file, weights) for client, file in entry.client_weights.items()}
        for message in entry.messages:
            start = client_weights.get(message.client, weights)
            what = f"round {entry.index}, client {message.name or message.client}"
            update = self._update(message, start, what, entry.index)
            if update is not None:
                updates.append(update)
            else:
                client_weights.pop(message.client, None)
        if entry.total is not None and updates:
            self.notes.append(f"round {entry.index}: the sum is left aside, single updates are known")
        elif entry.total is not None:
            members = tuple(range(entry.total.clients)) if entry.total.clients > 1 else ()
            total = MessageEntry(client=0, members=members, **entry.total.model_dump(exclude={"clients", "training"}))
            total.training = entry.total.training
            update = self._update(total, weights, f"round {entry.index}, the sum", entry.index)
            updates += [] if update is None else [update]
        if not self.exact:
            updates.sort(key=lambda update: update.client)
        return Round(entry.index, weights, updates, entry.rejected, entry.fallback, client_weights, entry.time)

    def _update(self, entry: MessageEntry, start: dict[str, Tensor], what: str, index: int) -> Update | None:
        """Return what was sent as an update; None where it can't be used."""
        tensors, moved = self._changes(entry, start)
        if not self.exact and not all_finite((*tensors.values(), *moved.values())):
            self.notes.append(f"{what}: the update has NaN or infinite values and is left out")
            return None
        number = entry.num_examples or (sum(entry.training.batch_sizes) if entry.training else None)
        if number is None:
            self.notes.append(f"{what}: over how many examples it was made isn't recorded; taken for one a client")
        try:
            return Update(
                client=entry.client,
                kind="gradient" if entry.form == "gradient" else "weights",
                tensors=tensors,
                num_examples=number or max(len(entry.members), 1),
                training=entry.training,
                buffers=moved,
                labels=None if entry.labels is None else labels_of(entry.labels, self.task_info),
                sanitised=entry.sanitised,
                seconds=entry.seconds,
                members=entry.members,
            )
        except BadInput as error:
            raise CorruptTranscript(f"{self.folder / round_file(index)}: {error}") from None

    def _changes(self, entry: SentEntry, start: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return ΔW or the gradient of the parameters that were sent, and the buffers that changed."""
        sent = self._tensors(entry.file)
        own = {name: sent[name] for name in self.parameters if name in sent}
        if not own:
            raise BadInput(
                f"{self.folder / entry.file} holds none of the model's trainable parameters: which module did clients "
                "train?"
            )
        if not self.exact and len(own) < len(self.parameters):
            if not self.partial:
                self.notes.append(f"updates hold {len(own)} of the model's {len(self.parameters)} trainable tensors")
            self.partial = True
        moved = {name: sent[name] for name in self.buffers if name in sent}
        if entry.form == "weights":
            own = {name: value - start[name] for name, value in own.items()}
        if entry.form == "difference":
            moved = {name: start[name] + value for name, value in moved.items()}
        return own, {name: value for name, value in moved.items() if self.exact or not value.equal(start[name])}

    def _weights(self, file: str, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state in the module's order: what isn't in the file is as ``known``."""
        found = {**known, **self._tensors(file)}
        if not all_finite(found.values()):
            raise CorruptTranscript(f"{self.folder / file}: the weights that were sent have NaN or infinite values")
        return {name: found[name] for name in self.state if name in found}

    def _tensors(self, file: str) -> dict[str, Tensor]:
        """Return tensors by the module's own names; refuse what isn't the module's."""
        path = self.folder / file
        tensors = by_own_names(read_file(self.folder, file, self.files), self.state, self._adapters)
        for name, value in tensors.items():
            if name not in self.state:
                raise BadInput(f"{path}: the model has no tensor '{name}'; give the module that the clients trained")
            if value.shape != self.state[name].shape:
                shapes = f"{tuple(value.shape)}, the model needs {tuple(self.state[name].shape)}"
                raise BadInput(
                    f"{path}: tensor '{name}' has shape {shapes}; give the module that the clients trained, so large"
                )
        if self.exact:
            return tensors
        return {name: value.to(self.state[name].dtype) for name, value in tensors.items()}


def by_own_names(
    tensors: Mapping[str, Tensor], state: Collection[str], adapters: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return tensors by the module's own names (``state``), without those of wrappers.

    ``adapters`` is what :func:`~fedaudit.models.adapters_names` returns.
    """
    for prefix in _PREFIXES:
        if tensors and all(name.startswith(prefix) for name in tensors) and not set(tensors) & set(state):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return {adapters.get(name, name): value for name, value in tensors.items()}


# --- the task -------------------------------------------------------------------------------------------------------


def complete_task(
    observed: ObservedTask,
    given: Mapping[str, Any],
    module: nn.Module,
    loss: Loss | None,
    notes: list[str],
    lost: str = "no local training was captured",
) -> tuple[TaskInfo, Loss]:
    """Return what everybody knows, and the loss; what is assumed is added to ``notes``.

    Args:
        given: fields that count in place of what was observed.
        loss: the clients', where it isn't one of fedaudit's.
        lost: why no example was recorded, where none was.

    Raises:
        BadInput: something is needed that was neither observed nor given; the message says how to give it.
    """
    try:
        known = observed.model_dump() | {key: value for key, value in given.items() if value is not None}
        task = ObservedTask.model_validate(known)
    except ValidationError as error:
        raise BadInput(f"the task that was given: {explain(error, ObservedTask)}") from None
    if task.input_shape is None:
        raise BadInput(
            f"the recording doesn't say what an input looks like ({lost}); "
            "if it is known, give task={'input_shape': (3, 32, 32)}, for example"
        )
    shape = tuple(task.input_shape)
    kind = "tokens" if task.tokens else task.kind or fitting_kind(shape, discrete=False).name
    if not example_kind(kind).fits(shape):
        raise BadInput(f"the inputs have the shape {shape}, which {example_kind(kind).plural} don't have")
    if task.columns and (task.tokens or len(shape) != 1):
        raise BadInput(f"only tables have columns; these examples are of the kind '{kind}'")
    if task.tokens and task.kind not in (None, "tokens"):
        raise BadInput(f"a vocabulary belongs to tokens; these examples are of the kind '{task.kind}'")
    if task.kind is None and (taken := example_kind(kind).said(shape, shape)):
        notes.append(f"{taken}; where they are something else, what is said of images is about no picture")
    outputs = task.heads.size if task.heads else task.outputs or outputs_of(module, shape, task.tokens)
    name, options = task.loss, (task.label_smoothing, task.class_weights)
    summed = False
    if loss is not None:
        several = task.task is not None and not task_named(task.task).one_class
        known_classes = None if several or outputs == 1 else outputs
        read = None if task.heads else recognise(loss, outputs, known_classes, task.task, len(shape) - 1)
        name, options = (read.name, read[1:3]) if read is not None else ("custom", (0.0, None))
        if read is not None:
            summed = read.summed and read.name != task.loss  # what was seen as a sum has it in its passes' weights
            loss = loss if read.name in (DICE, DICE_CROSS_ENTROPY) and not summed else None
    elif name is None:
        name = "cross-entropy"
        notes.append("the loss was not recorded: it is taken for cross-entropy")
    elif name == "custom":
        of = f" of several outputs ({task.heads}), as loss(outputs, targets)" if task.heads else ""
        if task.heads is not None and len(task.heads.parts) == 1:
            raise BadInput(
                f"the model returned its one output in a dictionary or a tuple ({task.heads}): wrap it in a module "
                "that returns the tensor alone, and record that"
            )
        raise BadInput(f"clients minimise a user's own loss{of}; give it: loss=…")
    asked = usual_task(name, outputs, task.task)
    classes = (2 if name == BCE else asked.target_values(outputs)) if asked.one_class else None
    classes = task.tokens.vocabulary if task.tokens and task.tokens.causal else classes
    channels = example_kind(kind).channels(shape)
    mean, std = task.mean, task.std
    if mean is None or std is None:
        mean, std = _preprocessing(task.least, task.most, kind, channels, notes)
    info = TaskInfo(
        model="custom",
        width=None,
        batch_norm=task.batch_norm or "train",
        loss=name,
        kind=kind,
        input_shape=shape,
        num_classes=classes,
        task=asked.name,
        num_targets=1
        if classes
        else task.packed_targets.size
        if task.packed_targets
        else outputs + asked.fewer_outputs,
        mean=tuple(mean),
        std=tuple(std),
        dropout=True if task.dropout is None else task.dropout,
        label_smoothing=options[0] if name == "cross-entropy" else 0.0,
        class_weights=options[1] if name == "cross-entropy" or (name == BCE and classes is None) else None,
        columns=task.columns or (),
        tokens=task.tokens,
        summed=summed,
        packed_inputs=task.packed_inputs,
        heads=task.heads,
        packed_targets=task.packed_targets,
    )
    if loss is not None:
        return info, as_called(loss, info)
    return info, loss_function(name, info.label_smoothing, info.class_weights, summed)


_Channels = tuple[float, ...]  # a value for each
_FLAT = 1e-3  # of the widest channel's range: one that is narrower doesn't vary


def _preprocessing(
    least: _Channels | None, most: _Channels | None, kind: str, channels: int, notes: list[str]
) -> tuple[_Channels, _Channels]:
    """Return mean and standard deviation: estimated from the range of what the model saw, where it has bounds.

    In many images some pixel is black and some is white, in each channel: x = (p − mean) / std lies in
    [−mean / std, (1 − mean) / std]. ``notes`` take what was assumed.
    """
    identity = (0.0,) * channels, (1.0,) * channels
    if example_kind(kind).bounds is None:
        return identity
    if least is None or most is None or len(least) != channels or len(most) != channels:
        notes.append("how inputs are normalised was not recorded: they are taken to lie in [0, 1]; give --mean, --std")
        return identity
    if min(least) >= 0 and DARK <= max(most) <= 1:  # darker ones use a part of their depth only
        return identity
    widths = [high - low for low, high in zip(least, most, strict=True)]
    widest = max(widths) or 1.0  # of a channel that doesn't vary nobody knows: it is scaled as the others are
    std = tuple(1 / (width if width > _FLAT * widest else widest) for width in widths)
    mean = tuple(-low * s for low, s in zip(least, std, strict=True))
    words = ", ".join(f"{m:.3g} ± {s:.3g}" for m, s in zip(mean, std, strict=True))
    notes.append(f"how inputs are normalised was estimated from their range ({words}); give --mean and --std if known")
    return mean, std


def outputs_of(module: nn.Module, shape: tuple[int, ...], tokens: TokenInfo | None = None) -> int:
    """Return how many outputs ``module`` has for an input of ``shape``: for one predicted token, one pixel of masks."""
    before = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            found = module(torch.zeros(1, *shape, dtype=torch.int64 if tokens else torch.float32))
    except Exception as error:
        raise BadInput(f"the model can't take an input of shape {shape}: {type(error).__name__}: {error}") from None
    finally:
        for part, training in before:
            part.training = training
    if tokens and tokens.causal and isinstance(found, Tensor) and found.shape == (1, tokens.vocabulary, *shape):
        return tokens.vocabulary
    if isinstance(found, Tensor) and found.ndim > 2 and found.shape[2:] == shape[1:]:  # a mask's pixels
        return found.shape[1]
    if not isinstance(found, Tensor) or found.ndim != 2:
        got = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise BadInput(
            f"the model's output is {got}; fedaudit needs (n, classes) logits, or (n, 1); where each next "
            "token is predicted, (n, vocabulary, length)"
        )
    return int(found.shape[1])
