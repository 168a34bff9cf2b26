"""Source inference from the model alone: of a record, which client's it is, by what the finished model says of it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor
from torch.nn.functional import one_hot

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.records.rounds import log_odds
from fedaudit.attacks.records.source import SourceFinding
from fedaudit.attacks.records.target import classified, target_of, whole
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable

_FEWEST = 5  # known records of a client: classifiers are chosen by five folds of them
_TOKENS = 500
_MOST = 50  # models that are asked, evenly spread


@register
class SourceOutputs(Attack):
    """A classifier of what the model says of records whose client is known names that of others (Xu and Li 2022).

    It takes no update: whoever has the finished model, and some records of every client that it knows to be that
    client's (``threat.known_records``), asks the model about them, and learns to tell the clients by its answers. These
    are the record's confidence e^-loss and its log-odds under each model, and where an example has one class, the last
    model's outputs, too. With earlier global models a client's records show in which rounds it took part.

    Beside it stands what the same adversary tells without any model: the same classifiers of the record alone, its
    inputs, its label, and of the inputs mean, deviation, least and largest value. Only what the model adds to that is a
    leak, and only beyond matched records that the same client kept from training: any other may be like another
    client's, and a model that learnt others of these clients gives it away without having seen the record (see the
    evaluation; where there are none, as in recordings, the verdict is at most inconclusive). On either side five-fold
    cross-validation on the known records chooses between a logistic regression and a support vector machine with a
    Gaussian kernel; with the model also whether the record itself is put beside the answers.

    Departures: Xu and Li tell the origin of sets of examples by the embeddings of a model, with shadow models for what
    was trained on; here it is that of single records by a model's outputs, without shadows. Source inference in the
    words of Hu et al. (2021) takes the clients' own models; this is their question without these.

    Args:
        models: ``last``, the finished model alone: the last one that every participant received; ``all``, the
            earlier ones, too, 50 at most, evenly spread.
    """

    name = "source-outputs"
    summary = "names the client of a record by what the finished model says of it"
    paper = "Xu & Li 2022 (Data origin inference in machine learning)"
    threat_model = "whoever has the global model: server, eavesdropper or client, passive"
    needs = ("records (threat.target_records)", "records of two clients or more, known to be theirs "
             "(threat.known_records)")  # fmt: skip
    default_scope = "federation"
    recovers = "whose records are"
    finds = SourceFinding
    control = "one source"

    models: Literal["last", "all"] = "last"

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.asks_for_members and case.threat.known_records is not None

    def check(self, observation: Observation) -> None:
        """Raise unless there are records, and known ones of two clients at least."""
        super().check(observation)
        clients, counts = whole(observation).known_clients.unique(return_counts=True)
        if len(clients) < 2 or int(counts.min()) < _FEWEST:
            raise NotApplicable(
                f"{self.name} learns from records whose client the adversary knows, {_FEWEST} or more of each of two "
                "clients or more; set threat.known_records=30"
            )

    def _run(
        self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress
    ) -> SourceFinding:
        records = whole(observation)
        clients, own = records.known_clients.unique(return_inverse=True)
        inputs, labels = (
            torch.cat(pair) for pair in ((records.known_inputs, records.inputs), (records.known_labels, records.labels))
        )
        alone = _alone(observation, inputs, labels)
        states = observation.weights[-1:] if self.models == "last" else _spread(observation.weights)
        told: list[Tensor] = []
        outputs = alone[:, :0]
        for done, state in enumerate(states):
            target = target_of(observation, state)
            losses = target.losses(inputs, labels).nan_to_num(nan=1e30, posinf=1e30)
            told.append(torch.stack([(-losses).exp(), log_odds(losses).clamp(-1e3, 1e3)], dim=1))
            if state is states[-1] and classified(observation.task_info):
                outputs = target.outputs(inputs).nan_to_num(nan=0.0, posinf=1e6, neginf=-1e6)
            progress(done + 1, len(states))
        said = torch.cat(told, dim=1)
        with_outputs = torch.cat([said, outputs], dim=1)
        scores = _classified([said, with_outputs, torch.cat([with_outputs, alone], dim=1)], own)
        blind = clients[_classified([alone], own).argmax(dim=1)]
        asked = "1 model" if len(states) == 1 else f"{len(states)} models"
        note = f"it knows {len(own)} records of {len(clients)} clients, and asks {asked}"
        sources = clients[scores.argmax(dim=1)]
        return SourceFinding(clients=clients, scores=scores, sources=sources, blind=blind, notes=(note,))


def _spread(states: tuple[dict[str, Tensor], ...]) -> list[dict[str, Tensor]]:
    number = min(_MOST, len(states))
    return [states[(i + 1) * len(states) // number - 1] for i in range(number)]


def _alone(observation: Observation, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return (n, d) float64, what can be told of records without a model."""
    rows = observation.task_info.example_kind.vectors(inputs).flatten(1).double()
    if not inputs.is_floating_point():  # how often each of the most frequent tokens occurs
        tokens, counts = inputs.unique(return_counts=True)
        often = tokens[counts.argsort(descending=True, stable=True)[:_TOKENS]]
        rows = torch.stack([(inputs.flatten(1) == token).sum(dim=1) for token in often], dim=1).double()
    ways = [rows.mean(1), rows.std(1, correction=0), rows.amin(1), rows.amax(1)]
    own = labels.reshape(len(labels), -1)
    if not own.is_floating_point() and own.shape[1] == 1:
        own = one_hot(own[:, 0].unique(return_inverse=True)[1])
    return torch.cat([rows, torch.stack(ways, dim=1), own.double()], dim=1)


def _classified(candidates: list[Tensor], own: Tensor) -> Tensor:
    """Return (n, k) scores of what follows the m known records in each (m + n, d), whose clients are ``own`` (m,)."""
    folds, y = StratifiedKFold(min(_FEWEST, int(own.unique(return_counts=True)[1].min()))), own.numpy()
    best: tuple[float, Any, np.ndarray] | None = None
    for candidate in candidates:
        x = candidate.numpy()
        for kind in (LogisticRegression(max_iter=2000), SVC(random_state=0)):
            made = make_pipeline(StandardScaler(), kind)
            right = float(cross_val_score(made, x[: len(y)], y, cv=folds).mean())
            if best is None or right > best[0]:
                best = right, made, x
    assert best is not None
    _, made, x = best
    scores = made.fit(x[: len(y)], y).decision_function(x[len(y) :])
    return torch.as_tensor(np.stack([-scores, scores], axis=1) if scores.ndim == 1 else scores, dtype=torch.float64)
