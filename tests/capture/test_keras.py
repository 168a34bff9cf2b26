"""What Keras fits is watched on any of its backends: with gradients on torch's, by the model's answers on others."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from fedaudit.utils.machine import import_torchvision

X = np.random.default_rng(0).normal(size=(60, 8, 8, 1)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 5, 60)


@pytest.fixture(scope="module")
def keras() -> Any:
    with contextlib.suppress(Exception):
        import_torchvision()
    return pytest.importorskip("keras")


def made(
    keras: Any, loss: Any = "sparse_categorical_crossentropy", outputs: int = 5, end: str | None = "softmax"
) -> Any:
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(3, 3, activation="relu"), layers.Flatten(), layers.Dense(outputs, end)]
    )
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def cases(keras: Any) -> dict[str, tuple[Any, Any]]:
    crossentropy = keras.losses.SparseCategoricalCrossentropy
    return {
        "softmax": (made(keras), Y),
        "logits": (made(keras, crossentropy(from_logits=True), end=None), Y),
        "one hot": (made(keras, "categorical_crossentropy"), np.eye(5)[Y]),
        "binary": (made(keras, "binary_crossentropy", 1, "sigmoid"), Y % 2),
        "numbers": (made(keras, "mse", 1, None), Y.astype(float)),
    }


@pytest.mark.parametrize("case", ["softmax", "logits", "one hot", "binary", "numbers"])
def test_a_model_is_seen_with_its_loss(keras, case):
    from fedaudit.capture import Capture, module_of

    model, targets = cases(keras)[case]
    model.evaluate(X[:2], targets[:2], verbose=0)
    before = model.get_weights()
    with Capture() as seen:
        model.fit(X, targets, batch_size=60, epochs=1, verbose=0)
    after = model.get_weights()
    assert not any(map(np.array_equal, before, after)), "what is watched stays as it is"
    assert all(map(np.array_equal, (seen.start[f"arrays.{i}"].numpy() for i in range(len(before))), before))
    (inputs,), (asked,) = seen.inputs, seen.targets
    assert tuple(inputs.shape) == (60, 1, 8, 8)
    module = module_of(model)
    module.load_state_dict(module.state([torch.from_numpy(array) for array in before]))
    functional = torch.nn.functional
    losses: dict[str, Any] = {"binary": functional.binary_cross_entropy_with_logits, "numbers": functional.mse_loss}
    loss = losses.get(case, functional.cross_entropy)
    wanted = asked.float()[:, None] if case == "binary" else asked
    model.set_weights(before)
    assert loss(module(inputs).float(), wanted).item() == pytest.approx(
        model.evaluate(X, targets, batch_size=60, verbose=0), rel=1e-4
    )
    again = copy.deepcopy(module)
    again.load_state_dict(module.state([torch.from_numpy(array) for array in after]))
    assert not torch.equal(again(inputs), module(inputs))
    if keras.backend.backend() == "torch":  # one step of SGD on one batch is recognised
        assert seen.training().learning_rate == pytest.approx(0.1, rel=1e-3)
        assert seen.training().optimiser == "sgd"
    else:
        assert "no-gradient" in seen.training().unmodelled


def test_what_it_is_tested_on_is_kept_and_nothing_stays(keras):
    from fedaudit.capture import module_of
    from fedaudit.capture.evaluation import Evaluation

    model = made(keras)
    before = {name: getattr(keras.Model, name) for name in ("fit", "evaluate")}
    with Evaluation(module_of(model), 100) as seen:
        model.evaluate(x=X, y=Y, verbose=0)
    ((inputs, targets),) = seen.passes
    np.testing.assert_array_equal(inputs[:, 0], X[..., 0])
    np.testing.assert_array_equal(targets, Y)
    assert {name: getattr(keras.Model, name) for name in before} == before


def test_a_loss_that_isnt_known_is_a_note(keras):
    from fedaudit.capture import Capture

    model = made(keras, "poisson", 1, None)
    with Capture() as seen:
        model.fit(X, Y.astype(float), verbose=0)
    assert seen.module is None or not seen.steps


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_same_on_each_backend(keras, backend, monkeypatch):
    pytest.importorskip(backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
