"""Shadow models: trained on known halves of what the adversary holds, once for all attacks that ask them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from fedaudit.attacks.base import ATTACK_CONFIG, Attack, Case, Progress, register
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.records.membership import MembershipAttack, Score
from fedaudit.attacks.records.target import MembershipFinding, Target, classified, held, public
from fedaudit.models import has_batch_norm, initialise, set_training_mode
from fedaudit.simulation.local_training import local_randomness, on_device, train
from fedaudit.task.training import class_logits
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.threat import Scope
from fedaudit.utils import seeds
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.validation import Count, Positive

_HALVES = 10  # of the shadow models, that scores are computed with again
_TOP = 3  # sorted probabilities that the attack model uses


@dataclass(frozen=True, kw_only=True)
class ShadowFinding(Finding, kind="shadow"):
    """What a shadow model says of all that the adversary holds: of its records, then of its public examples.

    Attributes:
        inside: (n,) bool: on which of them it was trained.
        answers: (n, k) of classes float32 outputs, or (n, 1) float64 losses, in evaluation mode.
    """

    inside: Tensor
    answers: Tensor


@dataclass(frozen=True, kw_only=True)
class ShadowModel(Attack):
    """The training of one shadow model, as a unit of work that is kept and reused like any other.

    It has the federation's architecture, is initialised anew, and is trained by SGD on a random half of the public
    examples. One that predicts the next token begins with the weights of the first model instead, and trains what
    clients train: shadow adapters, where they train adapters. Models 2i and 2i + 1 get the two halves of one draw, so
    that each example is in half of an even number.

    Args:
        index: from 0; two that differ in nothing else are independent but for the halves.
        online: whether the adversary's records are halved and trained on, too.
    """

    name: ClassVar[str] = "shadow model"
    threat_model: ClassVar[str] = "that of the attack"
    needs: ClassVar[tuple[str, ...]] = ()
    default_scope: ClassVar[Scope] = "federation"
    finds: ClassVar[type[Finding]] = ShadowFinding

    index: int
    online: bool
    epochs: int
    learning_rate: float
    batch_size: int

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> ShadowFinding:
        records = held(observation)
        inputs, labels = _all(records)
        known = torch.arange(0 if self.online else len(records), len(inputs))
        seed = int(torch.randint(2**31, (1,), generator=generator))
        order = torch.randperm(len(known), generator=seeds.generator(seed, "half", self.index // 2))
        first, second = order.tensor_split([len(known) // 2])
        chosen = known[second if self.index % 2 else first]
        rng = seeds.generator(seed, "training", self.index)
        model = self._trained(observation, inputs[chosen].to(device), labels[chosen].to(device), rng, progress)
        inside = torch.zeros(len(inputs), dtype=torch.bool).index_fill(0, chosen, True)
        answers = model.answers(inputs.to(device), labels.to(device)).cpu()
        return ShadowFinding(inside=inside, answers=answers.float() if classified(observation.task_info) else answers)

    def _trained(
        self, observation: Observation, inputs: Tensor, labels: Tensor, rng: torch.Generator, progress: Progress
    ) -> Target:
        module = copy.deepcopy(observation.module).cpu()
        task_info = observation.task_info
        batches = [torch.randperm(len(inputs), generator=rng).split(self.batch_size) for _ in range(self.epochs)]
        alone = task_info.batch_norm != "train" or not has_batch_norm(module)  # which one example has no statistics for
        loss = on_device(observation.loss, str(inputs.device))
        try:
            if not task_info.causal:  # whose weights are the ones before training, frozen ones among them
                initialise(module, "default", rng)
            module.load_state_dict(observation.weights[-1], strict=False)
            set_training_mode(module, task_info.batch_norm, dropout=task_info.dropout)
            module.to(inputs.device)
            with local_randomness(int(torch.randint(2**31, (1,), generator=rng))):
                for epoch, rows in enumerate(batches):
                    own = (
                        (task_info.normalise(inputs[chosen]), labels[chosen])
                        for chosen in rows
                        if alone or len(chosen) > 1
                    )
                    train(module, loss, own, learning_rate=self.learning_rate)
                    progress(epoch + 1, self.epochs)
        except BadInput as error:
            raise NotApplicable(f"can't train a shadow model: {error}") from None
        return Target(module.eval(), task_info, observation.loss)


@dataclass(frozen=True)
class Shadows:
    """What shadow models say of all that the adversary holds.

    Attributes:
        answers: (s, n, k) float64 of each model on the n records and public examples, of classes their logits, else (s,
            n, 1) their losses.
        inside: (s, n) bool: which model was trained on which.
        public: where the public examples begin among the n.
    """

    answers: Tensor
    labels: Tensor
    inside: Tensor
    public: int
    _rows: dict[tuple[bytes, bytes], int]

    def rows(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return (m,) where each of these examples, records or public ones with their labels, stands among the n."""
        return torch.tensor([self._rows[example] for example in examples_in(inputs, labels)], dtype=torch.int64)


@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class ShadowAttack(MembershipAttack):
    """What attacks on shadow models share: each model is trained once for all of them, and kept.

    Args:
        shadows: models; attacks with the same ones share them.
        epochs: of each one's training, by SGD.
        learning_rate: of that.
        batch_size: of that.
    """

    needs = (
        "records (threat.target_records)",
        "public data (threat.knows_public_data, threat.public_examples)",
    )

    halved: ClassVar[int] = 4  # pairs of shadow models, of fewer of which no halves are taken

    shadows: Annotated[Count, Field(ge=2, le=1000)] = 16
    epochs: Count = 50
    learning_rate: Positive = 0.1
    batch_size: Count = 16
    online: bool = field(init=False, default=False)  # a setting of those that can train them on the records, too
    known: Any = field(init=False, default=(), repr=False)  # a ShadowFinding each, where they were made before

    @classmethod
    def fits(cls, case: Case) -> bool:
        answers = case.num_classes is not None or not case.task_kind.one_class  # of texts only where it is named
        return case.asks_for_members and case.threat.public_examples is not None and answers

    def check(self, observation: Observation) -> None:
        """Raise unless there are public examples."""
        super().check(observation)
        inputs, _ = public(observation)
        if observation.task_info.causal and self.model == "global" and len(observation.weights) < 2:
            raise NotApplicable(
                f"the models of {self.name} begin with the one before training, and one alone is known; use min-k, or "
                "raise federations[].rounds"
            )
        if len(inputs) < 4:
            raise NotApplicable(f"{self.name} halves {len(inputs)} public examples; raise threat.public_examples to 4")

    def beforehand(self, observation: Observation) -> Sequence[tuple[Attack, Observation]]:
        """Return the training of each shadow model, on what it depends on: what the adversary holds."""
        records = held(observation)
        own = QuerySet(records.inputs, records.labels, records.public_inputs, records.public_labels)
        seen = dataclasses.replace(
            observation,
            federation="shadows",
            weights=(observation.weights[0] if observation.task_info.causal else _fixed(observation),),
            messages=(),
            adversary_log={},
            records=own,
            canaries=None,
        )
        first = ShadowModel(
            index=0,
            online=self.online,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
        )
        return [(dataclasses.replace(first, index=i), seen) for i in range(self.shadows)]

    def prepared(self, found: Sequence[Finding]) -> Self:
        """Return the same with its shadow models, which were trained before."""
        ready = copy.copy(self)
        object.__setattr__(ready, "known", tuple(found))
        return ready

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> MembershipFinding:
        """Return the scores, and those with halves of the shadow models, which tell how much they depend on them."""
        ready = self.prepared(self.shadow_findings(observation, generator, progress))
        found = super(ShadowAttack, ready)._run(observation, generator, device, progress)
        pairs = len(ready.known) // 2
        if pairs < self.halved or self.model == "rebuilt":  # which would be rebuilt each time
            return found
        again = []
        for i in range(_HALVES):
            chosen = torch.randperm(pairs, generator=seeds.generator(i, "half of the shadows"))[: pairs // 2].tolist()
            half = self.prepared([ready.known[2 * pair + side] for pair in chosen for side in range(2)])
            again.append(super(ShadowAttack, half)._run(observation, generator, device, progress).scores)
        return dataclasses.replace(found, again=torch.stack(again))

    def shadow_findings(self, observation: Observation, generator: torch.Generator, progress: Progress) -> list[Any]:
        """Return what each shadow model says; they are trained now if they weren't before."""
        known: list[Any] = list(self.known)
        if not known:
            seed = int(torch.randint(2**31, (1,), generator=generator))
            for model, seen in self.beforehand(observation):
                known.append(model(seen, generator=seeds.generator(seed)))
                progress(len(known), self.shadows)
        return known

    def models(self, observation: Observation, generator: torch.Generator, progress: Progress) -> Shadows:
        """Return the shadow models, trained now if they weren't before."""
        known = self.shadow_findings(observation, generator, progress)
        records = held(observation)
        inputs, labels = _all(records)
        return Shadows(
            torch.stack([found.answers.double() for found in known]),
            labels,
            torch.stack([found.inside for found in known]),
            len(records),
            {example: row for row, example in enumerate(examples_in(inputs, labels))},
        )


def _fixed(observation: Observation) -> dict[str, Tensor]:
    """Return the buffers that everybody was sent and no training moves: a mask, a scale; no running statistics."""
    module, state = observation.module, observation.weights[-1]
    moved = {
        f"{name}.{key}" if name else key
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
        for key, _ in part.named_buffers(recurse=False)
    }
    return {name: state[name] for name, _ in module.named_buffers() if name in state and name not in moved}


@register
class ShadowModels(ShadowAttack):
    """A classifier of the model's outputs, learnt on shadow models whose training data are known (Shokri et al. 2017).

    Each shadow model has the federation's architecture and is trained on a random half of the public examples; an
    attack model learns to tell what it says of that half from what it says of the other. Departures: one attack model
    for all classes instead of one for each, because public examples are few: a logistic regression on the loss, the
    log-odds of the record's own class, the largest log-probabilities and the entropy; of models without classes an
    example the loss alone. How long the federation trained
    on an example isn't known, so that the shadow models' own training is a setting.

    Args:
        shadows: models; attacks with the same ones share them.
        epochs: of each one's training, by SGD.
        learning_rate: of that.
        batch_size: of that.
    """

    name = "shadow-models"
    summary = "an attack model learns on shadow models what members look like"
    paper = "Shokri et al. 2017 (Membership inference attacks against machine learning models)"

    shadows: Annotated[Count, Field(le=1000)] = 8

    def decide(self, scores: Tensor) -> Tensor:
        """Return what the attack model takes for members."""
        return scores > 0

    def score(self, observation: Observation, target: Target, generator: torch.Generator, progress: Progress) -> Score:
        """Return the attack model's log-odds of a member, learnt on the public examples.

        Raises:
            NotApplicable: as :meth:`ShadowAttack.models`.
        """
        shadows = self.models(observation, generator, progress)
        labels = shadows.labels[shadows.public :]
        features = [_features(target, answers[shadows.public :], labels) for answers in shadows.answers]
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        classifier.fit(torch.cat(features).numpy(), shadows.inside[:, shadows.public :].flatten().numpy())

        def score(inputs: Tensor, labels: Tensor) -> Tensor:
            features = _features(target, target.answers(inputs, labels), labels)
            return torch.as_tensor(classifier.decision_function(features.numpy()))

        return score


def _features(target: Target, answers: Tensor, labels: Tensor) -> Tensor:
    """Return (n, d) float64: what a model says of each example by its answers (n, k); without classes the loss."""
    if not classified(target.task_info):
        return answers.clamp(-1e3, 1e3)
    logits = class_logits(answers)
    logs = logits.log_softmax(dim=1)
    own = logs.gather(1, labels[:, None])
    entropy = -(logs.exp() * logs).sum(dim=1, keepdim=True)
    top = logs.sort(dim=1, descending=True).values[:, :_TOP]
    return torch.cat([-own, log_odds(logits, labels)[:, None], top, entropy], dim=1).clamp(-1e3, 1e3)


def confidence(target: Target, answers: Tensor, labels: Tensor) -> Tensor:
    """Return (...) the log-odds φ of each label, of answers (..., n, k); without classes minus the loss."""
    if not classified(target.task_info):
        return -answers[..., 0]
    return log_odds(class_logits(answers), labels)


def chances(target: Target, answers: Tensor, labels: Tensor) -> Tensor:
    """Return (...) the log-probability of each label, of answers (..., n, k); without classes minus the loss."""
    if not classified(target.task_info):
        return -answers[..., 0]
    logs = class_logits(answers).log_softmax(dim=-1)
    return logs.gather(-1, labels.expand(logs.shape[:-1])[..., None])[..., 0]


def _all(records: QuerySet) -> tuple[Tensor, Tensor]:
    """Return the records and the public examples together, with their labels."""
    return torch.cat([records.inputs, records.public_inputs]), torch.cat([records.labels, records.public_labels])


def examples_in(inputs: Tensor, labels: Tensor) -> list[tuple[bytes, bytes]]:
    """Return what tells each example from the others: equal inputs may have different labels."""
    return [(tensor_digest(one), tensor_digest(label)) for one, label in zip(inputs, labels, strict=True)]


def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (...) φ = log(p_y / (1 − p_y)) of the label's probability, for logits (..., classes), without rounding."""
    logs = logits.log_softmax(dim=-1)
    labels = labels.expand(logits.shape[:-1])[..., None]
    others = logs.scatter(-1, labels, -torch.inf).logsumexp(dim=-1)
    return logs.gather(-1, labels)[..., 0] - others
