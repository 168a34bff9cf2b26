"""What scikit-learn fits is watched: the same model in torch, its examples, and what an update is of them."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from sklearn import linear_model
from sklearn.datasets import load_digits
from sklearn.linear_model import LinearRegression, LogisticRegression, Perceptron, Ridge, SGDClassifier, SGDRegressor
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from torch import nn

import fedaudit
from fedaudit import BadInput
from fedaudit.capture import Capture, Estimator, Recorder, module_of
from fedaudit.capture.evaluation import Evaluation

X, Y = load_digits(return_X_y=True)
X, Y = X[:120] / 16, Y[:120]
PAIR = Y % 2 == 0


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


CLASSIFIERS = {
    "multinomial": (LogisticRegression(max_iter=5), Y),
    "binary, of texts": (LogisticRegression(max_iter=5), np.where(PAIR, "even", "odd")),
    "one against all": (SGDClassifier(loss="log_loss", random_state=0), Y),
    "hinge": (SGDClassifier(random_state=0), Y),
    "no intercept": (LogisticRegression(max_iter=5, fit_intercept=False), Y),
    "perceptron": (Perceptron(), PAIR),
    "svm": (LinearSVC(), Y),
    "network": (MLPClassifier((16, 16), activation="tanh", max_iter=3), Y),
    "binary network": (MLPClassifier((8,), max_iter=3), PAIR),
}


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_a_classifier_is_seen_as_a_module_of_the_same_outputs(case):
    estimator, targets = CLASSIFIERS[case]
    with Capture() as seen:
        estimator.fit(X, targets)
    module = module_of(estimator)
    assert type(seen.module) is Estimator
    outputs = module(torch.from_numpy(X)).detach()
    known = outputs.flatten() if outputs.shape[1] == 1 else outputs
    if case.endswith("network"):
        likely = known.softmax(1) if known.ndim > 1 else known.sigmoid()
        own = estimator.predict_proba(X) if known.ndim > 1 else estimator.predict_proba(X)[:, 1]
        np.testing.assert_allclose(likely, own, atol=1e-9)
    else:
        np.testing.assert_allclose(known, estimator.decision_function(X), atol=1e-9)
    (inputs,), (labels,) = seen.inputs, seen.targets
    np.testing.assert_array_equal(inputs, X)
    np.testing.assert_array_equal(estimator.classes_[labels], targets)
    assert seen.training().optimiser == "other"
    assert seen.training().weights == "float64"
    assert f"clients train by {type(estimator).__name__}.fit" in seen.notes[0]


@pytest.mark.parametrize("kind", [LinearRegression, Ridge, SGDRegressor, MLPRegressor])
def test_so_is_one_of_numbers(kind):
    estimator = kind()
    with Capture() as seen:
        estimator.fit(X, Y.astype(float))
    np.testing.assert_allclose(
        module_of(estimator)(torch.from_numpy(X)).detach()[:, 0], estimator.predict(X), atol=1e-9
    )
    assert seen.loss == "mse"
    assert seen.targets[0].shape == (120, 1)


@pytest.mark.parametrize(
    ("kind", "loss"), [("log_loss", "log_loss"), ("hinge", "hinge"), ("modified_huber", "modified_huber")]
)
def test_the_loss_is_the_estimator_s_own(kind, loss):
    """In binary problems it is what scikit-learn's own loss gives, without the penalty."""
    from sklearn.linear_model import _sgd_fast

    estimator = SGDClassifier(loss=kind, random_state=0)
    with Capture() as seen:
        estimator.fit(X, PAIR)
    own = {"log_loss": None, "hinge": _sgd_fast.Hinge(1.0), "modified_huber": _sgd_fast.ModifiedHuber()}[loss]
    outputs = module_of(estimator)(torch.from_numpy(X)).detach()
    if own is None:
        assert seen.loss == "bce-with-logits"
        return
    wanted = np.mean([own.py_loss(p, 2.0 * y - 1) for p, y in zip(outputs.flatten().tolist(), PAIR, strict=True)])
    assert seen.criterion is not None
    assert float(seen.criterion(outputs, torch.from_numpy(PAIR.astype(int)))) == pytest.approx(wanted)


def test_one_step_along_the_gradient_is_one():
    """A network of one batch, without momentum or penalty, trains by plain SGD."""
    estimator = MLPClassifier((8,), solver="sgd", momentum=0, alpha=0, learning_rate_init=0.3, random_state=0)
    estimator.partial_fit(X, Y, classes=range(10))
    with Capture() as seen:
        estimator.partial_fit(X, Y)
    training = seen.training()
    assert (training.optimiser, training.batch_sizes) == ("sgd", (120,))
    assert training.learning_rate == pytest.approx(0.3)
    assert not seen.notes


def test_several_fits_of_one_estimator_are_several_steps_from_where_it_was_set():
    estimator = SGDClassifier(random_state=0)
    with Capture() as seen:
        estimator.partial_fit(np.zeros((10, 64)), np.arange(10), classes=range(10))  # to give it its shapes
        estimator.coef_, estimator.intercept_ = np.ones((10, 64)), np.zeros(10)  # what the server sent
        for rows in np.array_split(np.arange(120), 3):
            estimator.partial_fit(X[rows], Y[rows])
    assert seen.training().batch_sizes == (40, 40, 40)
    np.testing.assert_array_equal(torch.cat(seen.inputs), X)
    assert bool((seen.start["0.weight"] == 1).all())


def test_nothing_is_changed_and_nothing_stays():
    before = dict(vars(linear_model.LogisticRegression)), dict(vars(SGDClassifier))
    once = LogisticRegression(max_iter=5).fit(X, Y)
    hinge, log = SGDClassifier(), SGDClassifier(loss="log_loss")
    with Capture(), Evaluation(None, 10):
        again = LogisticRegression(max_iter=5).fit(X, Y)
        assert (hasattr(hinge, "predict_proba"), hasattr(log, "predict_proba")) == (False, True)
    np.testing.assert_array_equal(once.coef_, again.coef_)
    assert (dict(vars(linear_model.LogisticRegression)), dict(vars(SGDClassifier))) == before


def test_a_network_of_torch_is_what_counts():
    module = nn.Linear(64, 10)
    with Capture() as seen:
        given = torch.from_numpy(StandardScaler().fit_transform(X)).float()
        LogisticRegression(max_iter=2).fit(X, Y)
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        nn.functional.cross_entropy(module(given), torch.from_numpy(Y)).backward()
        optimiser.step()
    assert seen.module is module


@pytest.mark.parametrize(
    "tests",
    [
        lambda m: m.score(X, Y),
        lambda m: accuracy_score(Y, m.predict(X)),
        lambda m: log_loss(Y, m.predict_proba(X)),
    ],
)
def test_what_it_is_tested_on_is_kept(tests):
    estimator = LogisticRegression(max_iter=5).fit(X, Y)
    with Evaluation(module_of(estimator), 200) as seen:
        tests(estimator)
    ((inputs, targets),) = seen.passes
    np.testing.assert_array_equal(inputs, X)
    np.testing.assert_array_equal(targets, Y)


@pytest.mark.parametrize("scores", [lambda m: m.decision_function(X), lambda m: m.predict_proba(X)[:, 1]])
def test_what_its_scores_are_ranked_by_is_kept(scores):
    estimator = LogisticRegression(max_iter=5).fit(X, PAIR)
    with Evaluation(module_of(estimator), 200) as seen:
        roc_auc_score(PAIR, scores(estimator))
    ((inputs, targets),) = seen.passes
    np.testing.assert_array_equal(inputs, X)
    np.testing.assert_array_equal(targets, PAIR)


def test_a_loop_of_one_s_own_is_recorded_and_attacked(tmp_path):
    arrays = [np.zeros((10, 64)), np.zeros(10)]
    estimator = LogisticRegression(max_iter=1, warm_start=True, solver="saga")
    estimator.fit(X, Y)
    with Recorder(tmp_path / "recording", module=module_of(estimator)) as recorder, recorder.round(arrays):
        for client, rows in enumerate(np.array_split(np.arange(120), 2)):
            estimator.coef_, estimator.intercept_ = (value.copy() for value in arrays)
            with recorder.capture() as seen:
                estimator.fit(X[rows], Y[rows])
            recorder.update(client, [estimator.coef_, estimator.intercept_], seen)
    asked = {"attacks": ["labels", "tableak"], "controls": False, "progress": False, "out": tmp_path / "out"}
    done = fedaudit.audit_transcript(tmp_path / "recording", model=module_of(estimator), **asked).result
    assert [(f.attack, f.status) for f in done.findings] == [
        ("labels", "done"), ("labels", "done"), ("tableak", "not applicable"), ("tableak", "not applicable")
    ]  # fmt: skip
    assert done.model.name == "LogisticRegression"
    assert json.loads((tmp_path / "recording/round-00000.json").read_text())["messages"][0]["training"][
        "optimiser"
    ] == ("other")


def test_what_is_no_linear_model_or_network_is_one_line():
    from sklearn.naive_bayes import GaussianNB

    with pytest.raises(BadInput, match="GaussianNB is none of LogisticRegression, "):
        module_of(GaussianNB().fit(X, Y))
    with pytest.raises(BadInput, match="that is fitted"):
        module_of(LogisticRegression())
    with pytest.raises(BadInput, match=r"an array \(3, 3\) travels"):
        module_of(LogisticRegression(max_iter=2).fit(X, Y)).state([np.zeros((3, 3))])
