"""Models that are known by what they answer, NumPy's, JAX's, any that can be asked for a loss, as a file says it."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedaudit.models import own_copy
from fedaudit.task.training import LOSSES, Loss
from fedaudit.utils.errors import BadInput, NotApplicable, in_words

Arrays = list[NDArray[Any]]
Examples = tuple[Any, Any]

FILE = "fedaudit_app_model"  # what a file that describes a model is called as a module
_REPEATS, _LONGEST = 200, 20.0  # of an app's own training, and seconds, to learn examples by heart
_BY_HEART = 0.01  # mean loss at which they are


@dataclass(frozen=True, kw_only=True)
class AppModel:
    """What an app's model is, where no training that fedaudit watches is seen; in a file these are the names.

    One of ``predict``, ``losses`` and ``model`` is needed. Arrays are the model as it travels, in that order. Without
    ``model`` there is no gradient, so that membership alone is asked.

    Args:
        examples: of (partition, partitions): what the node trains on, ``(inputs, labels)``, or ``((inputs, labels),
            (inputs, labels))`` with others that nobody trains on.
        predict: of (arrays, inputs): outputs (n, k), logits or probabilities of classes, or numbers.
        losses: of (arrays, inputs, labels): the loss (n,) of each example.
        model: a ``torch.nn.Module`` of the same outputs, or a function that makes it.
        state: of arrays: the ``model``'s state; default: they are its tensors, in its order and form.
        loss: of outputs, a registered name or a function; default: cross-entropy of classes, else the mean square.
        train: of (arrays, inputs, labels): the arrays after a client's training; with it the positive control teaches
            the model examples by heart.
        training: of a ``model`` by plain SGD: learning_rate, epochs (default 1) and batch_size (default: all), for
            examples in their order; default: the training isn't known.

    Raises:
        BadInput: there isn't one of the three, or what must be a function is none.
    """

    examples: Callable[[int, int], Any]
    predict: Callable[[Arrays, NDArray[Any]], Any] | None = None
    losses: Callable[[Arrays, NDArray[Any], NDArray[Any]], Any] | None = None
    model: Any = None
    state: Callable[[Arrays], Any] | None = None
    loss: str | Loss | None = None
    train: Callable[[Arrays, NDArray[Any], NDArray[Any]], Any] | None = None
    training: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.predict, self.losses, self.model)) != 1:
            raise BadInput("an app's model is one of predict(arrays, inputs), losses(arrays, inputs, labels) and model")
        for name in ("examples", "predict", "losses", "state", "train"):
            given = getattr(self, name)
            if not callable(given) and (name == "examples" or given is not None):
                raise BadInput(f"an app's model: {name} is {given!r}; give a function")
        known = {"learning_rate", "epochs", "batch_size"}
        if self.training is not None and not (
            {"learning_rate"} <= {*self.training} <= known and self.model is not None
        ):
            raise BadInput("an app's model: training is of a model, and has learning_rate, epochs and batch_size")
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise BadInput(f"an app's model: loss is '{self.loss}'; give one of {', '.join(LOSSES)}, or a function")

    @classmethod
    def read(cls, file: Path | str) -> AppModel:
        """Return what a Python file says. BadInput: it can't be run, or lacks something."""
        spec = importlib.util.spec_from_file_location(FILE, file)
        try:
            if spec is None or spec.loader is None:
                raise BadInput("it isn't a Python file")
            module = sys.modules[FILE] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            said = {f.name: vars(module)[f.name] for f in dataclasses.fields(cls) if f.name in vars(module)}
            if "examples" not in said:
                raise BadInput("it has no examples(partition, partitions)")
            return cls(**said)
        except BadInput as error:
            raise BadInput(f"{file}: {error}") from None
        except Exception as error:
            raise BadInput(f"{file} can't be run: {in_words(error)}") from error

    def examples_of(self, partition: int, partitions: int) -> tuple[Examples, Examples | None]:
        """Return a node's examples as arrays, and others that nobody trains on, if there are any."""
        given = self.examples(partition, partitions)
        pairs = given if isinstance(given[0], tuple | list) else (given,)
        if not 1 <= len(pairs) <= 2 or any(len(pair) != 2 or len(pair[0]) != len(pair[1]) for pair in pairs):
            raise BadInput("examples(partition, partitions) returns (inputs, labels), or a pair of such pairs")
        own, *others = [(np.asarray(inputs), np.asarray(labels)) for inputs, labels in pairs]
        return own, others[0] if others else None

    def arranged(self, module: nn.Module) -> Callable[[Sequence[Tensor]], dict[str, Tensor]]:
        """Return what makes the module's state of arrays."""
        if isinstance(module, Answers):
            return module.state

        def state(arrays: Sequence[Tensor]) -> dict[str, Tensor]:
            own = module.state_dict()
            if self.state is None and [tuple(a.shape) for a in arrays] != [tuple(v.shape) for v in own.values()]:
                shapes = ", ".join(str(tuple(value.shape)) for value in arrays)
                raise BadInput(f"arrays {shapes} travel, which the model's tensors aren't in turn: say state(arrays)")
            said = (
                dict(zip(own, arrays, strict=True)) if self.state is None else self.state([a.numpy() for a in arrays])
            )
            return {name: torch.as_tensor(np.asarray(value)).clone() for name, value in said.items()}

        return state

    def as_seen(self, examples: Examples) -> tuple[Tensor, Tensor]:
        """Return inputs and targets as the module and its loss take them."""
        inputs, labels = (torch.from_numpy(np.array(part)) for part in examples)
        if self.losses is not None:  # the module's inputs are both, and it returns the loss
            both = [part.double().reshape(len(part), -1) for part in (inputs, labels)]
            return torch.cat(both, dim=1), torch.zeros(len(inputs), 1)
        if labels.is_floating_point():
            return inputs.double(), labels.reshape(len(labels), -1)
        return inputs.double(), labels.long().flatten()

    def loss_of(self, targets: Tensor) -> Loss:
        """Return the loss of outputs and targets."""
        if self.losses is not None:
            return AsReturned()
        if self.loss is None:
            return nn.functional.mse_loss if targets.is_floating_point() else nn.functional.cross_entropy
        return LOSSES[self.loss] if isinstance(self.loss, str) else self.loss

    def made(self, arrays: Sequence[Tensor], own: Examples) -> nn.Module:
        """Return the model as a module; ``own``: examples of its."""
        if self.model is None:
            return Answers(self, arrays, own)
        made = self.model if isinstance(self.model, nn.Module) else self.model()
        return own_copy(made).to(arrays[0].dtype)


class AsReturned(nn.Module):
    """The loss of a module that returns it: the mean."""

    def forward(self, outputs: Tensor, _targets: Tensor) -> Tensor:
        """Return the mean of outputs (n, 1)."""
        return outputs.mean()


class Answers(nn.Module):
    """A model that is known by what it answers: its parameters are arrays as they travel, and have no gradient."""

    by_answers = True  # it has no gradient

    def __init__(self, about: AppModel, arrays: Sequence[Tensor], own: Examples) -> None:
        super().__init__()
        self.about = about
        self.arrays = nn.ParameterList([nn.Parameter(a.clone(), a.is_floating_point()) for a in arrays])
        self.forms = [(part.shape[1:], part.dtype) for part in own]  # of inputs and labels
        self.watched = False  # while a Capture looks for a backward pass

    def _get_name(self) -> str:
        return "the app's own model"

    def state(self, arrays: Sequence[Any]) -> dict[str, Tensor]:
        """Return the state of parameters as they travel. BadInput: there are more or fewer."""
        if len(arrays) != len(self.arrays):
            raise BadInput(f"{len(arrays)} arrays travel, and {len(self.arrays)} did before")
        return {f"arrays.{i}": torch.as_tensor(array).clone() for i, array in enumerate(arrays)}

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs (n, k), or losses (n, 1)."""
        found: Tensor = _Answer.apply(self, inputs, *self.arrays)
        return found

    def answer(self, inputs: Tensor) -> Tensor:
        """Return the same without a graph."""
        arrays, given = self._as_arrays(), self._as_given(inputs)
        if self.about.losses is not None:
            return torch.as_tensor(np.array(self.about.losses(arrays, *given), dtype=np.float64)).reshape(-1, 1)
        assert self.about.predict is not None
        found = torch.as_tensor(np.array(self.about.predict(arrays, given[0]), dtype=np.float64))
        found = found.reshape(len(inputs), -1)
        likely = found.shape[1] > 1 and bool((found >= 0).all() & ((found.sum(1) - 1).abs() < 1e-3).all())
        return found.clamp_min(1e-12).log() if likely else found

    def learn(self, inputs: Tensor, labels: Tensor) -> None:
        """Train on examples as the app does, again and again, until they are known by heart or 20 s are over.

        NotApplicable: how it trains isn't said.
        """
        if self.about.train is None:
            raise NotApplicable(
                "the app's model has no train(arrays, inputs, labels), by which it would learn by heart"
            )
        given = self._as_given(inputs)
        whole = given if len(given) > 1 else (*given, labels.numpy().astype(self.forms[1][1]))
        began, loss = time.monotonic(), self.about.loss_of(labels)
        for _ in range(_REPEATS):
            with torch.no_grad():
                if loss(self(inputs), labels) < _BY_HEART or time.monotonic() - began > _LONGEST:
                    return
            try:
                after = self.about.train(self._as_arrays(), *whole)
            except Exception as error:  # the app's own
                raise NotApplicable(f"the app's train(arrays, inputs, labels) failed: {in_words(error)}") from error
            self.load_state_dict(self.state([torch.from_numpy(np.array(array)) for array in after]))

    def _as_arrays(self) -> Arrays:
        return [array.detach().numpy().copy() for array in self.arrays]

    def _as_given(self, inputs: Tensor) -> tuple[NDArray[Any], ...]:
        """Return inputs, or with ``losses`` inputs and labels, as the app has them."""
        if self.about.losses is None:
            return (inputs.detach().numpy().astype(self.forms[0][1]),)
        first = int(np.prod(self.forms[0][0]))
        parts = zip((inputs[:, :first], inputs[:, first:]), self.forms, strict=True)
        return tuple(part.detach().numpy().reshape(len(part), *shape).astype(kind) for part, (shape, kind) in parts)


class _Answer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: Answers, inputs: Tensor, *arrays: Tensor) -> Tensor:
        ctx.module, ctx.arrays = module, arrays
        with torch.no_grad():
            return module.answer(inputs).to(arrays[0].dtype)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        if not ctx.module.watched:
            raise NotApplicable(NO_GRADIENT)
        return None, None, *[torch.zeros_like(array) for array in ctx.arrays]


NO_GRADIENT = "the model is known by its answers alone, without a gradient: say model, a torch.nn.Module, in its file"
