"""Model completion: a passive party's own network, with a head of its own, trained on few labels to tell the others."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.vertical.labels import ExampleLabelFinding
from fedaudit.models import VerticalModel, initialise
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.vertical import VerticalRecord
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count, Fraction, NonNegative, Positive

_SMALL = 1e-6  # beside a standard deviation
_RUNS = 3  # with other draws: how far runs are apart is what a difference is judged by


class Completed(nn.Module):
    """A party's network, its outputs standardised by ``mean`` and ``std`` (e,), ReLU, and a linear inference head."""

    mean: Tensor
    std: Tensor

    def __init__(self, bottom: nn.Module, mean: Tensor, std: Tensor, classes: int) -> None:
        super().__init__()
        self.bottom, self.head = (
            bottom,
            nn.utils.skip_init(nn.Linear, len(mean), classes),
        )  # whoever makes it draws them
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits (n, classes) of a party's features (n, ...)."""
        own = (self.bottom(features).flatten(1) - self.mean) / (self.std + _SMALL)
        return torch.as_tensor(self.head(torch.relu(own)))


def trained_party(party: nn.Module, record: VerticalRecord) -> nn.Module:
    """Return the party's network after the last round, by its own steps of SGD again.

    With W its weights and g what came down for the embeddings f(W, x) of a batch: W ← W − rate·∂⟨g, f(W, x)⟩/∂W.
    """
    prefix = f"parties.{record.party}."
    party = copy.deepcopy(party).eval()
    party.load_state_dict({n.removeprefix(prefix): t for n, t in record.weights.items() if n.startswith(prefix)})
    parameters = list(party.parameters())
    for rows, gradients in zip(record.batches, record.gradients[:, 0], strict=True):
        steps = torch.autograd.grad(party(record.held[rows]), parameters, gradients)
        with torch.no_grad():
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.sub_(record.learning_rate * step)
    return party


def mixmatch(
    model: nn.Module,
    own: Tensor,
    labels: Tensor,
    others: Tensor,
    *,
    temperature: float,
    weight: float,
    share: float,
    order: Tensor,
) -> Tensor:
    """Return MixMatch's loss of one step (Berthelot et al. 2019).

    Args:
        own: (n, ...) examples with ``labels`` (n, classes).
        others: (m, ...) examples without.
        weight: λ_u of the term on these.
        share: λ' of an example in what is mixed.
        order: (n + m,) with which of all examples each is mixed.
    """
    with torch.no_grad():
        guessed = model(others).softmax(dim=1) ** (1 / temperature)
        targets = torch.cat([labels, guessed / guessed.sum(dim=1, keepdim=True)])
    inputs, n = torch.cat([own, others]), len(own)
    logits = model(share * inputs + (1 - share) * inputs[order])
    mixed = share * targets + (1 - share) * targets[order]
    supervised = -(logits[:n].log_softmax(dim=1) * mixed[:n]).sum(dim=1).mean()
    consistent = (logits[n:].softmax(dim=1) - mixed[n:]).square().mean()
    return torch.as_tensor(supervised + weight * consistent)


@register
class ModelCompletion(Attack):
    """Passive label inference by model completion (Fu et al. 2022).

    Training leaves a party with a bottom model that tells the labels in part. It puts an inference head on it and
    trains both, semi-supervised, on a few labels that it knows (``vertical.known_labels`` of each class) and on all of
    its other examples: MixMatch (Berthelot et al. 2019), as in the published code.

    Each step takes a batch with labels and one without, guesses the latter's (softmax, sharpened: p^(1/T), normalised),
    mixes both batches and their labels with themselves in another order (mixup, λ' = max(λ, 1 − λ), λ ~ Beta(α, α)) and
    minimises cross-entropy on the labelled half plus ``unlabelled_weight`` times the mean of (p − q)² on the other, a
    weight that grows linearly from zero. Labels are told by the average of the weights over the steps.

    Its network after the last round is what its own steps give from the gradients that came down. As in the published
    code guesses are of the examples as they are, where MixMatch averages over augmented ones. Departures: the head's
    BatchNorm is replaced by the mean and spread of what the network puts out for all of the party's examples, once; the
    average forgets faster (``average`` 0.99 for 0.999), as steps are fewer.

    A few labels and the party's own features tell labels by themselves. So the same is done again with its network as
    it was before the first round: only what goes beyond that came out of the federation. How many labels are right
    depends on the draws of head and batches, so both are done three times; the labels are those of the first.

    Args:
        iterations: steps of Adam.
        batch_size: labelled examples in each, and as many others.
        learning_rate: of Adam.
        temperature: T.
        alpha: α of the Beta distribution.
        unlabelled_weight: λ_u, at the end.
        average: how much of the average remains in a step.
    """

    name = "model-completion"
    summary = "labels of all examples, from a party's trained network and a few labels that it knows"
    paper = "Fu et al. 2022 (Label Inference Attacks Against Vertical Federated Learning)"
    threat_model = "client (a party), passive"
    needs = (
        "a vertical federation or split learning, protocol split",
        "a few labels (vertical.known_labels)",
        "a classifier",
    )
    default_scope = "federation"
    recovers = "labels"
    finds = ExampleLabelFinding
    reads = VerticalRecord
    needs_classes = True
    on_sums = "refused: it is for vertical federations, where there are none"

    iterations: Count = 1000
    batch_size: Count = 32
    learning_rate: Positive = 2e-3
    temperature: Positive = 0.8
    alpha: Positive = 0.75
    unlabelled_weight: NonNegative = 50.0
    average: Fraction = 0.99

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.known_labels and case.threat.adversary == "client" and case.num_classes is not None

    def check(self, observation: Observation) -> None:
        """Raise where the adversary is no party, or knows no label."""
        super().check(observation)
        record = observation.sent
        assert isinstance(record, VerticalRecord)
        if record.party is None:
            raise NotApplicable(f"{self.name} is run by a party, who lacks the labels; set threat.adversary=client")
        if record.known is None:
            raise NotApplicable(
                f"{self.name} needs a few labels; set federations[].vertical.known_labels: 4, of each class"
            )
        if not record.gradients.numel():
            raise NotApplicable(
                f"{self.name} needs the party's trained network, and the protocol '{record.spec.protocol}' doesn't "
                "show how it trained; set federations[].vertical.protocol: split"
            )
        if not (record.known[record.used] < 0).any():
            raise NotApplicable(
                f"{self.name} knows every label already; lower vertical.known_labels, or raise examples"
            )

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> ExampleLabelFinding:
        record, module, classes = observation.sent, observation.module, observation.task_info.num_classes
        assert isinstance(record, VerticalRecord)
        assert record.known is not None
        assert record.party is not None
        assert classes is not None
        assert isinstance(module, VerticalModel)
        untrained = dataclasses.replace(record, batches=record.batches[:0], gradients=record.gradients[:0])
        sought = record.used[record.known[record.used] < 0]
        bottoms = [trained_party(module.parties[record.party], seen).to(device) for seen in (record, untrained)]
        done, told = itertools.count(1), list[Tensor]()

        def step() -> None:
            progress(next(done), 2 * _RUNS * self.iterations)

        for bottom in bottoms * _RUNS:
            own = copy.deepcopy(bottom)
            told.append(self._told(own, record, sought, classes, generator, device, step))
        again = torch.stack(told[2:]).view(_RUNS - 1, 2, -1)
        return ExampleLabelFinding(examples=sought, labels=told[0], num_classes=classes, without=told[1], again=again)

    def _told(
        self,
        bottom: nn.Module,
        record: VerticalRecord,
        sought: Tensor,
        classes: int,
        generator: torch.Generator,
        device: str,
        report: Callable[[], None],
    ) -> Tensor:
        """Return the labels of the examples ``sought`` (m,), by a head on ``bottom`` and both trained."""
        assert record.known is not None
        features, known = record.held.to(device), record.known
        with torch.no_grad():
            out = torch.cat([bottom(part).flatten(1) for part in features.split(256)])
        model = Completed(bottom, out.mean(dim=0).cpu(), out.std(dim=0).cpu(), classes)
        initialise(model.head, "default", generator)
        model.to(device)
        average = copy.deepcopy(model)
        labelled = torch.nonzero(known >= 0)[:, 0]
        adam = torch.optim.Adam(model.parameters(), lr=self.learning_rate)
        shares = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))
        for step in range(self.iterations):
            own, others = (
                rows[torch.randint(len(rows), (self.batch_size,), generator=generator)] for rows in (labelled, sought)
            )
            share = float(shares.beta(self.alpha, self.alpha))
            loss = mixmatch(
                model,
                features[own.to(device)],
                one_hot(known[own], classes).to(features),
                features[others.to(device)],
                temperature=self.temperature,
                weight=self.unlabelled_weight * step / self.iterations,
                share=max(share, 1 - share),
                order=torch.randperm(2 * self.batch_size, generator=generator).to(device),
            )
            adam.zero_grad()
            loss.backward()
            adam.step()
            with torch.no_grad():
                for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(now, 1 - self.average)
            report()
        with torch.no_grad():
            return torch.cat([average(part).argmax(dim=1) for part in features[sought.to(device)].split(256)]).cpu()
