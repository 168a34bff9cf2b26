"""Models of Keras as torch modules: with gradients where its backend is torch, else by their answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.capture.answers import Answers, AppModel, Arrays
from fedaudit.task.training import BCE, CROSS_ENTROPY, MSE
from fedaudit.utils.errors import BadInput

_LOSSES = {
    "sparse_categorical_crossentropy": CROSS_ENTROPY,
    "categorical_crossentropy": CROSS_ENTROPY,
    "binary_crossentropy": BCE,
    "mean_squared_error": MSE,
    "mse": MSE,
}
_LEAST = 1e-7  # Keras' own: below, a probability counts as this


def is_keras(thing: Any) -> bool:
    """Whether it is a model of Keras."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(thing, getattr(keras, "Model", ()))


class KerasModel(Answers):
    """A model of Keras in evaluation mode: its arrays are ``get_weights()``, its outputs logits, or numbers.

    It takes images (n, C, H, W), wherever Keras has their channels.
    """

    def __init__(self, model: Any, arrays: Arrays) -> None:
        self.calls = _Calls(model)
        name, _ = self.calls.loss
        self.by_answers = not self.calls.on_torch
        about = AppModel(examples=_unasked, predict=self.calls.predict, train=self.calls.train, loss=name)
        labels = np.zeros(1, np.float32 if name == MSE else np.int64)
        example = np.zeros((1, *model.input_shape[1:]), np.float32)
        super().__init__(about, [torch.from_numpy(array) for array in arrays], (example, labels))
        trained = {id(variable) for variable in model.trainable_weights}
        for array, variable in zip(self.arrays, model.weights, strict=True):
            array.requires_grad_(id(variable) in trained)

    def _get_name(self) -> str:
        return f"{type(self.calls.model).__name__} of Keras"

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits or numbers (n, k)."""
        return self.calls.outputs([*self.arrays], inputs) if self.calls.on_torch else super().forward(inputs)


def channels_last(model: Any) -> bool:
    """Whether it takes images, with their channels last."""
    return len(model.input_shape) > 3 and sys.modules["keras"].config.image_data_format() == "channels_last"


def inputs_of(model: Any, inputs: Any) -> Tensor:
    """Return inputs as the module takes them."""
    given = torch.from_numpy(np.array(inputs, dtype=np.float32))
    return given.movedim(-1, 1).contiguous() if channels_last(model) else given


def targets_of(model: Any, targets: Any) -> Tensor:
    """Return targets as the module's loss takes them: classes (n,), or numbers or labels (n, k)."""
    given, (name, _) = np.asarray(targets), _Calls(model).loss
    if name == CROSS_ENTROPY:
        classes = given.argmax(-1) if given.ndim > 1 and given.shape[-1] > 1 else given.reshape(len(given))
        return torch.from_numpy(classes.astype(np.int64))
    numbers = torch.from_numpy(given.astype(np.float32)).reshape(len(given), -1)
    return numbers.flatten().long() if name == BCE and numbers.shape[1] == 1 else numbers


def _unasked(_partition: int, _partitions: int) -> Any:
    raise BadInput("what a Keras model trains on is seen")


class _Calls:
    """Calls of one model, which isn't copied: each call says the weights."""

    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model

    def __repr__(self) -> str:
        """Return what tells models apart in fingerprints."""
        weights = [(variable.path, tuple(variable.shape)) for variable in self.model.weights]
        return f"Keras model {self.model.to_json()} {weights}"

    def __deepcopy__(self, _memo: Any) -> _Calls:
        return self

    @property
    def on_torch(self) -> bool:
        return bool(sys.modules["keras"].backend.backend() == "torch")

    @property
    def loss(self) -> tuple[str, bool]:
        """The registered name of the loss, and whether it is of logits."""
        given = getattr(self.model, "loss", None)
        name = given if isinstance(given, str) else getattr(given, "name", getattr(given, "__name__", ""))
        if name not in _LOSSES:
            raise BadInput(f"the loss {name or given!r} of a Keras model isn't one of {', '.join(_LOSSES)}")
        return _LOSSES[name], _LOSSES[name] == MSE or bool(getattr(given, "_fn_kwargs", {}).get("from_logits"))

    def outputs(self, arrays: Sequence[Any], inputs: Any) -> Tensor:
        """Return the outputs (n, k) with these weights, in a graph where the backend is torch; the model's own stay."""
        own = {id(variable): array for variable, array in zip(self.model.weights, arrays, strict=True)}
        values = [
            [own.get(id(variable), variable.value) for variable in variables]
            for variables in (self.model.trainable_variables, self.model.non_trainable_variables)
        ]
        made = self.model.stateless_call(*values, self._as_keras(inputs), training=False)[0]
        made = made if isinstance(made, Tensor) else torch.from_numpy(np.array(made, dtype=np.float64))
        made = made.reshape(len(inputs), -1)
        return made if self.loss[1] else _logits(made, self.loss[0])

    def predict(self, arrays: Arrays, inputs: Any) -> Any:
        """Return the same as arrays, on any backend."""
        convert = sys.modules["keras"].ops.convert_to_tensor
        return self.outputs([*map(convert, arrays)], convert(inputs)).detach().numpy()

    def train(self, arrays: Arrays, inputs: Any, labels: Any) -> Any:
        """Return the weights after an epoch; the model's own stay."""
        own, loss = self.model.get_weights(), self.model.loss
        self.model.set_weights(arrays)
        try:
            if str(getattr(loss, "name", loss)).startswith("categorical"):
                labels = np.eye(self.model.output_shape[-1], dtype=np.float32)[labels]
            self.model.fit(self._as_keras(inputs), labels, verbose=0)
            return self.model.get_weights()
        finally:
            self.model.set_weights(own)

    def _as_keras(self, inputs: Any) -> Any:
        return sys.modules["keras"].ops.moveaxis(inputs, 1, -1) if channels_last(self.model) else inputs


def _logits(likely: Tensor, loss: str) -> Tensor:
    """Return logits of probabilities, by which the loss is the same."""
    kept = likely.clamp(_LEAST, 1 - _LEAST)
    return kept.logit() if loss == BCE else kept.log()
