"""One round of a site, as the tests of membership ask about it: its examples, held-out ones beside them, the update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedaudit.attacks.records.target import Target
from fedaudit.capture.capture import Capture
from fedaudit.capture.recorder import unusable, vocabulary_of
from fedaudit.guard.given import Examples
from fedaudit.modalities import NOTHING, TokenInfo, fitting_kind
from fedaudit.modalities.packed import PACKED
from fedaudit.modalities.tokens import of_one_length
from fedaudit.models import of_one_tensor, padding_of
from fedaudit.task.info import TaskInfo
from fedaudit.task.targets import observed_task
from fedaudit.task.training import Loss
from fedaudit.transcript.files import Form, ObservedTask
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.reading import complete_task, outputs_of
from fedaudit.transcript.rounds import expected
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.fingerprint import tensor_bytes

# of an observed task, as the training's capture has them
_SEEN = ("batch_norm", "dropout", "label_smoothing", "class_weights", "packed_inputs", "heads", "packed_targets")


class WatchedRound:
    """What the site trained on in a round, and what it is about to send; BadInput: that can't be asked about.

    Attributes:
        inputs, labels: of the training, as the model saw them, with repetitions.
        distinct: how many different examples it was over.
        widest: how many of them projection-residual finds room for in a layer, at most.
        target: the model that the site was sent.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        seen: Capture,
        form: Form,
        loss: str | Loss | None,
        held_out: Examples,
        sanitised: ClientDefenceInfo | None = None,
    ) -> None:
        config = seen.training()
        if (why := unusable(seen, config)) is not None or seen.module is None:
            raise BadInput(f"what the site trained on can't be asked about: {why}")
        self.seconds = seen.seconds
        *own, others = _equally_long([*seen.inputs, held_out[0]], padding_of(seen.module))
        self.inputs, self.labels = torch.cat(own), torch.cat(seen.targets)
        self.held_out = others.to(self.inputs.dtype), held_out[1].to(self.labels.dtype)
        shapes = tuple(others.shape[1:]), tuple(self.inputs.shape[1:])
        if shapes[0] != shapes[1] or held_out[1].shape[1:] != self.labels.shape[1:]:
            raise BadInput(f"held_out has examples of shape {shapes[0]}, and the site trains on {shapes[1]}: give such")
        self._marks = [mark(example) for example in self.inputs]
        self._trained = set(self._marks)
        self.distinct = len(self._trained)
        _, parameters, _ = expected(seen.module)
        self._start = seen.start
        change = {name: state[name].detach().cpu() for name in parameters if name in state}
        if not change:
            raise BadInput("what leaves holds none of the parameters that were trained")
        if form == "weights":
            change = {name: value - self._start[name] for name, value in change.items()}
        if not all(bool(value.isfinite().all()) for value in change.values()):
            raise BadInput("the update has NaN or infinite values")
        room = [4 * min(value.flatten(1).shape) for value in change.values() if value.ndim > 1]  # at rank one a record
        words = any(isinstance(part, nn.Embedding) for part in seen.module.modules())  # told of any number of examples
        self.widest = math.inf if words else max(room, default=0)
        if config.data_size is None and self.distinct >= max(config.batch_sizes):
            config = dataclasses.replace(config, data_size=self.distinct)
        self._update = Update(
            client=0,
            kind="gradient" if form == "gradient" else "weights",
            tensors=change,
            num_examples=sum(config.batch_sizes),
            training=config,
            sanitised=sanitised,
        )
        module = of_one_tensor(seen.module, seen.packed_inputs, seen.heads).cpu().eval()
        module.load_state_dict(self._start)
        self.target = Target(module, *_task(seen, module, loss, self.inputs, self.labels))

    def observation(self, inputs: Tensor, labels: Tensor) -> Observation:
        """Return what a curious server sees of the round, who asks about these records."""
        return Observation(
            federation="site",
            threat=ThreatModel(),
            task_info=self.target.task_info,
            module=self.target.module,
            loss=self.target.loss,
            update_kind=self._update.kind,
            weights=(self._start,),
            messages=(Message(0, 0, self._start, self._update),),
            records=QuerySet(inputs, labels, inputs[:0], labels[:0]),
        )

    def drawn(
        self, many: int, ratio: int, source: torch.Generator, known: set[int] | None = None
    ) -> tuple[Examples, Examples]:
        """Return up to ``many`` examples of the training, and ``ratio`` times as many held-out ones, as many a class.

        No example of the site passes for a held-out one, none occurs twice, and none is ``known``.
        """
        taken = set(known or ())
        inputs, labels = self.held_out
        free: dict[int, list[int]] = {}
        for row, label in zip(*_shuffled(labels, source), strict=True):
            free.setdefault(label, []).append(row)
        own: list[int] = []
        held: list[int] = []
        for row, label in zip(*_shuffled(self.labels, source), strict=True):
            if len(own) == many:
                break
            if self._marks[row] in taken:
                continue
            found: list[int] = []
            while len(found) < ratio and free.get(label):
                other = free[label].pop()
                known_by = mark(inputs[other])
                if known_by not in taken and known_by not in self._trained:
                    taken.add(known_by)
                    found.append(other)
            if len(found) == ratio:
                taken.add(self._marks[row])
                own.append(row)
                held += found
        held = [held[i * ratio + k] for k in range(ratio) for i in range(len(own))]  # each own one's first, then …
        return (self.inputs[own], self.labels[own]), (inputs[held], labels[held])


def _equally_long(texts: list[Tensor], padding: int | None) -> list[Tensor]:
    """Return texts (n, length), shorter ones filled up, and all else as it is."""
    if any(text.ndim != 2 or text.is_floating_point() for text in texts) or padding is None:
        return texts
    longest = max(text.shape[1] for text in texts)
    same = [of_one_length([text], longest) for text in texts]
    return [text.where(text != NOTHING, padding) for text in same]


def mark(example: Tensor) -> int:
    """Return a hash of an example, the same in this process: ten times as fast as a digest."""
    return hash(tensor_bytes(example).tobytes())


def _shuffled(labels: Tensor, source: torch.Generator) -> tuple[list[int], list[int]]:
    """Return rows in a random order, and their classes; other targets are all of one class."""
    order = torch.randperm(len(labels), generator=source)
    classes = torch.zeros(len(labels)) if labels.is_floating_point() or labels.numel() > len(labels) else labels
    return order.tolist(), [int(label) for label in classes.flatten()[order]]


def _task(
    seen: Capture, module: nn.Module, loss: str | Loss | None, inputs: Tensor, labels: Tensor
) -> tuple[TaskInfo, Loss]:
    """Return what everybody knows, for examples as the model sees them."""
    shape, tokens = tuple(inputs.shape[1:]), None
    if not inputs.is_floating_point():
        words = vocabulary_of(module)
        if words is None or (labels.shape == inputs.shape and not labels.is_floating_point()):
            raise BadInput("the model predicts the next token, and records have labels")
        tokens = TokenInfo(vocabulary=words, causal=False)
    kind = PACKED if seen.packed_inputs else fitting_kind(shape, discrete=tokens is not None)
    channels = kind.channels(shape)
    outputs = None if seen.heads else outputs_of(module, shape, tokens)
    asked = None if seen.heads else observed_task(labels, shape, seen.loss, outputs)
    observed = ObservedTask(
        kind=kind.name,
        outputs=outputs,
        task=asked.name if asked else None,
        input_shape=shape,
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        loss=loss if isinstance(loss, str) else seen.loss,
        tokens=tokens,
        **{name: getattr(seen, name) for name in _SEEN},
    )
    own = None if isinstance(loss, str) else loss or seen.criterion
    return complete_task(observed, {}, module, own, [])
