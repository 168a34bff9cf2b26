"""What models of scikit-learn and Keras fit and are tested on, as torch modules of the same outputs."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedaudit.capture import keras_models
from fedaudit.capture.answers import Answers, Arrays
from fedaudit.capture.keras_models import KerasModel, is_keras
from fedaudit.task.training import LOSSES, Loss, bce_with_logits
from fedaudit.utils.errors import BadInput

_CLASSIFIERS = ["LogisticRegression", "SGDClassifier", "Perceptron", "LinearSVC"]
_LINEAR = [*_CLASSIFIERS, "LinearRegression", "Ridge", "SGDRegressor"]
_NETWORKS = ["MLPClassifier", "MLPRegressor"]
_ANSWERS = ("predict", "predict_proba", "predict_log_proba", "decision_function")
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid, "identity": nn.Identity
}  # fmt: skip
_PLACES = ("linear_model", "svm", "neural_network")


@dataclass(frozen=True, eq=False)
class Fit:
    """One call of ``fit`` or ``partial_fit``: the examples, and the parameters before, if there were any, and after."""

    estimator: Any
    before: Arrays | None
    after: Arrays
    inputs: Tensor
    targets: Tensor
    how: str


@dataclass(frozen=True, eq=False)
class Listener:
    """Whom to tell of fits, before and after, and of examples that a model was tested on: inputs and targets."""

    fits: Callable[[bool], None] = lambda _begins: None
    fitted: Callable[[Fit], None] = lambda _fit: None
    tested: Callable[[Tensor, Tensor], None] = lambda _inputs, _targets: None


_listeners: list[Listener] = []
_replaced: list[tuple[Any, str, Any]] = []
_lock = threading.RLock()
_inside = threading.local()


def listen(listener: Listener) -> None:
    """Tell it, until :func:`forget`, of what is done in any thread; what is called stays as it is."""
    with _lock:
        if not _listeners:
            _replace_all()
        _listeners.append(listener)


def forget(listener: Listener) -> None:
    """Tell it no more."""
    with _lock:
        _listeners.remove(listener)
        while _replaced and not _listeners:
            owner, name, before = _replaced.pop()
            setattr(owner, name, before)


def _replace_all() -> None:
    found = [vars(module) for place in _PLACES if (module := sys.modules.get(f"sklearn.{place}")) is not None]
    for kind in [own[name] for own in found for name in [*_LINEAR, *_NETWORKS] if name in own]:
        for name in ("fit", "partial_fit", "score", *_ANSWERS):
            owner = next((base for base in kind.__mro__ if name in vars(base)), None)
            if owner is not None and not isinstance(before := vars(owner)[name], _Method):
                _replace(owner, name, _Method(before, _fit if name.endswith("fit") else _test))
    keras = getattr(sys.modules.get("keras"), "Model", None)
    for name, instead in {"fit": _fit, "train_on_batch": _fit, "evaluate": _test, "test_on_batch": _test}.items():
        if keras is not None:
            owner = next(base for base in keras.__mro__ if name in vars(base))
            _replace(owner, name, _Method(vars(owner)[name], instead))
    for place in ("_classification", "_ranking", "_regression"):
        if (metrics := sys.modules.get(f"sklearn.metrics.{place}")) is not None:
            _replace(metrics, "check_consistent_length", functools.partial(_compared, metrics.check_consistent_length))


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, vars(owner)[name]))
    setattr(owner, name, value)


@dataclass(frozen=True)
class _Method:
    """A method in whose place another is called, with it; it is there only where the method is."""

    before: Any
    instead: Callable[..., Any]

    def __get__(self, thing: Any, owner: type) -> Any:
        method = self.before.__get__(thing, owner)
        if thing is None or getattr(_inside, "call", False) or _kind(thing) is None:
            return method
        return functools.wraps(method)(functools.partial(self.instead, method, thing))


@contextmanager
def _within() -> Iterator[None]:
    """Let methods that are called inside be as they are."""
    _inside.call = True
    try:
        yield
    finally:
        _inside.call = False


def _given(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """Return inputs and targets of a call, however they were given."""
    inputs = args[0] if args else options.get("X", options.get("x"))
    return inputs, args[1] if len(args) > 1 else options.get("y")


def _fit(method: Any, estimator: Any, *args: Any, **options: Any) -> Any:
    for listener in [*_listeners]:
        listener.fits(True)
    try:
        with _within():
            before = _parameters(estimator)
            result = method(*args, **options)
    finally:
        for listener in [*_listeners]:
            listener.fits(False)
    with suppress(Exception):  # what can't be read isn't seen
        inputs, targets = _given(args, options)
        how, after = _how(estimator, method.__name__, options), _parameters(estimator)
        seen = Fit(estimator, before, after or [], _rows(estimator, inputs), targets_of(estimator, targets), how)
        for listener in [*_listeners] if after else []:
            listener.fitted(seen)
    return result


def _test(method: Any, estimator: Any, *args: Any, **options: Any) -> Any:
    with _within():
        result = method(*args, **options)
    inputs, targets = _given(args, options)
    if method.__name__ in _ANSWERS:
        _inside.answered = estimator, inputs, result
    else:
        _tell_tested(estimator, inputs, targets)
    return result


def _compared(check: Any, *arrays: Any) -> Any:
    """A metric of scikit-learn's is given answers and targets."""
    answered: tuple[Any, Any, Any] = getattr(_inside, "answered", (None, None, None))
    estimator, inputs, result = answered
    given: list[Any] = [array for array in arrays if array is not None]
    # of two classes a score is the second column
    results = [result, result[:, 1]] if np.ndim(result) == 2 and np.shape(result)[1] == 2 else [result]
    own = [any(np.array_equal(array, one) for one in results) for array in given]
    if estimator is not None and any(own) and len(given) == 2:
        _inside.answered = None, None, None
        _tell_tested(estimator, inputs, given[own.index(False)] if False in own else given[0])
    return check(*arrays)


def _tell_tested(estimator: Any, inputs: Any, targets: Any) -> None:
    with suppress(Exception):
        for listener in [*_listeners]:
            listener.tested(_rows(estimator, inputs), targets_of(estimator, targets))


def _kind(estimator: Any) -> str | None:
    """Return as which of scikit-learn's an estimator or a class of the user's own counts, or ``keras``; None: none."""
    if is_keras(estimator):
        return "keras"
    names = (kind.__name__ for kind in type(estimator).__mro__)
    return next((name for name in names if name in [*_LINEAR, *_NETWORKS]), None)


def _parameters(estimator: Any) -> Arrays | None:
    """Return an estimator's parameters, in the order in which apps send them; None: it has none yet."""
    if is_keras(estimator):
        return [np.array(value) for value in estimator.get_weights()] or None
    if hasattr(estimator, "coefs_"):
        return [np.array(value) for value in (*estimator.coefs_, *estimator.intercepts_)]
    if not hasattr(estimator, "coef_"):
        return None
    fitted = getattr(estimator, "fit_intercept", True) and hasattr(estimator, "intercept_")
    return [np.array(estimator.coef_)] + ([np.array(estimator.intercept_)] if fitted else [])


def _how(estimator: Any, name: str, options: dict[str, Any]) -> str:
    solver = getattr(estimator, "solver", None)
    weighs = getattr(estimator, "class_weight", None) is not None or options.get("sample_weight") is not None
    anew = name == "fit" and not getattr(estimator, "warm_start", is_keras(estimator))
    return (
        f"clients train by {type(estimator).__name__}.{name}"
        + (f" (solver {solver})" if isinstance(solver, str) else "")
        + ", whose steps aren't seen: an update is one change of the weights"
        + "; it begins anew each time, whatever the server sent (warm_start)" * anew
        + "; it weighs examples or classes" * weighs
    )


def _rows(estimator: Any, inputs: Any) -> Tensor:
    if is_keras(estimator):
        return keras_models.inputs_of(estimator, inputs)
    whole = inputs.toarray() if hasattr(inputs, "toarray") else np.asarray(inputs)
    return torch.from_numpy(np.array(whole, dtype=np.float64))


def targets_of(estimator: Any, targets: Any) -> Tensor:
    """Return targets as the module's loss takes them: the classes' numbers (n,), or numbers or labels (n, k)."""
    if is_keras(estimator):
        return keras_models.targets_of(estimator, targets)
    given = np.asarray(targets)
    classes = getattr(estimator, "classes_", None)
    if classes is None or given.ndim > 1:
        return torch.from_numpy(np.array(given, dtype=np.float64)).view(len(given), -1)
    return torch.from_numpy(np.searchsorted(classes, given).astype(np.int64))


class Estimator(nn.Sequential):
    """A linear model or network of scikit-learn as torch has it, with logits as outputs, in double precision.

    Args:
        shapes: of its parameters, weights before intercepts, as scikit-learn has them.
        activation: between layers; None: the model is linear.
    """

    def __init__(self, name: str, shapes: Sequence[tuple[int, ...]], activation: str | None) -> None:
        self.called = name
        self.shapes = [tuple(shape) for shape in shapes]
        self.linear = activation is None
        layers: list[nn.Module] = []
        weights = self.shapes[:1] if self.linear else self.shapes[: len(self.shapes) // 2]
        for shape in weights:
            out, into = ((*([1, *shape][-2:]),)) if self.linear else shape[::-1]
            layers += [] if not layers else [_ACTIVATIONS[activation or "identity"]()]
            layers.append(
                nn.utils.skip_init(nn.Linear, into, out, len(self.shapes) > len(weights), dtype=torch.float64)
            )
        super().__init__(*layers)

    def _get_name(self) -> str:
        return self.called

    def state(self, arrays: Sequence[Any]) -> dict[str, Tensor]:
        """Return the module's state of parameters as they travel: each is the next one of its shape.

        BadInput: they aren't this model's.
        """
        names = sorted((name for name, _ in self.named_parameters()), key=lambda name: name.endswith("bias"))
        left, found = dict(zip(names, self.shapes, strict=True)), dict[str, Tensor]()
        for value in map(torch.as_tensor, arrays):
            name = next((name for name, shape in left.items() if shape == tuple(value.shape)), None)
            if name is None:
                raise BadInput(f"an array {tuple(value.shape)} travels, and the estimator's are {self.shapes}")
            del left[name]
            own = self.get_parameter(name)
            turned = value if self.linear or value.ndim < 2 else value.T
            found[name] = turned.reshape(own.shape).to(own.dtype).contiguous()
        return found


FITTED = (Estimator, Answers)  # modules of which a state is made of arrays as they travel


class Margins(nn.Module):
    """The loss of one model a class against all others, on outputs (n, k), or (n, 1) of two classes: the mean."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of int64 (n,) classes."""
        own = targets[:, None] if outputs.shape[1] == 1 else nn.functional.one_hot(targets, outputs.shape[1])
        margins = outputs * (2 * own - 1).to(outputs.dtype)
        if self.loss == "log_loss":
            return nn.functional.softplus(-margins).mean()
        short = float(self.loss != "perceptron") - margins
        if self.loss == "modified_huber":
            return torch.where(margins < -1, -4 * margins, short.relu().square()).mean()
        return (short.relu().square() if self.loss == "squared_hinge" else short.relu()).mean()


def loss_of(estimator: Any) -> Loss | None:
    """Return the loss that an estimator minimises, apart from penalties; None: it isn't one that is known."""
    name = _kind(estimator)
    if name == "keras":
        return LOSSES[KerasModel(estimator, estimator.get_weights()).calls.loss[0]]
    options = estimator.get_params(deep=False)
    if not hasattr(estimator, "classes_"):
        squared = options.get("loss", "squared_error") == "squared_error"
        return nn.functional.mse_loss if squared else None
    if name in _NETWORKS:
        return nn.functional.cross_entropy if estimator.out_activation_ == "softmax" else bce_with_logits
    several = len(estimator.classes_) > 2
    if name == "LogisticRegression":
        apart = options["solver"] == "liblinear" or options.get("multi_class") == "ovr"
        return (Margins("log_loss") if apart else nn.functional.cross_entropy) if several else bce_with_logits
    margin = "perceptron" if name == "Perceptron" else str(options.get("loss"))
    if margin == "log_loss" and not several:
        return bce_with_logits
    return Margins(margin) if margin in ("log_loss", "hinge", "squared_hinge", "perceptron", "modified_huber") else None


def module_of(estimator: Any) -> Estimator | KerasModel:
    """Return a fitted estimator as a torch module with its weights, for ``fedaudit attack --model`` for example.

    Raises:
        BadInput: it isn't one of scikit-learn's linear models or networks or a model of Keras, or isn't fitted.
    """
    arrays = None if _kind(estimator) is None else _parameters(estimator)
    if arrays is not None and is_keras(estimator):
        return KerasModel(estimator, arrays)
    if arrays is None:
        raise BadInput(f"{type(estimator).__name__} is none of {', '.join([*_LINEAR, *_NETWORKS])} that is fitted")
    activation = estimator.activation if hasattr(estimator, "coefs_") else None
    made = Estimator(type(estimator).__name__, [value.shape for value in arrays], activation)
    made.load_state_dict(made.state(arrays))
    return made


def echo(fits: Sequence[Fit]) -> nn.Module:
    """Do with torch what an estimator did, for a Capture that watches: a pass of each fit's examples, and the change.

    Only the last fits count that go on from each other. Return the module. BadInput: the estimator's loss isn't known.
    """
    chain = [fits[-1]]
    for fit in reversed(fits[:-1]):
        begun = chain[0].before
        if begun is None or fit.estimator is not chain[0].estimator or not _equal(fit.after, begun):
            break
        chain.insert(0, fit)
    estimator, before = chain[-1].estimator, chain[0].before
    loss = loss_of(estimator)
    if loss is None:
        raise BadInput(f"the loss of {estimator} isn't known")
    module = module_of(estimator)
    fresh = before is None or [value.shape for value in before] != [value.shape for value in chain[-1].after]
    start = [np.zeros_like(value) for value in chain[-1].after] if fresh or before is None else before
    module.load_state_dict(module.state(list(map(torch.from_numpy, start))))
    for fit in chain:
        replay_change(module, loss, fit.inputs, fit.targets, module.state(list(map(torch.from_numpy, fit.after))))
    return module


def _equal(one: Arrays, other: Arrays) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def replay_change(module: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, after: dict[str, Tensor]) -> None:
    """Pass the examples through a module, and give its parameters the values that they had afterwards."""
    module.zero_grad()
    setattr(module, "watched", True)  # noqa: B010 (by Answers)
    loss(module(inputs), targets).backward()
    setattr(module, "watched", False)  # noqa: B010
    for name, parameter in module.named_parameters():
        parameter.data = after[name].clone()
