"""AgrEvader: a malicious client pushes its records' loss up, and watches which ones the federation pulls down again."""

from __future__ import annotations

import copy
from dataclasses import field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.attacks import Attack, Case, MembershipFinding, Observation, register, upper_half, whole
from fedaudit.simulation import Behaviour, ClientStep
from fedaudit.task import TaskInfo
from fedaudit.utils import BadInput, NotApplicable, Number, Positive, Whole

_LOSSES = "agrevader/losses"
_SMALL = 1e-6  # loss below which a record counts as fitted to the last
_PAPER = "Zhang et al. 2023 (AgrEvader: Poisoning membership inference against Byzantine-robust federated learning)"


@register(frozen=False)
class AgrEvaderClient(Behaviour):
    """Poisoning membership inference under robust aggregation (Zhang et al. 2023).

    From round ``start`` on, each round: the client trains honestly on its own data, which gives the update Δ that a
    rule would expect of it; takes the direction a in which its records' losses l under the global model rise,
    ∇ Σ log(1 − e⁻ˡ), without its part along Δ, a⊥; and sends ‖Δ‖·``norm``·(c·Δ/‖Δ‖ + √(1 − c²)·a⊥/‖a⊥‖), c being
    ``cosine``. So neither the update's norm nor its direction is out of the ordinary. Honest clients who have a record
    pull its loss down again; nobody does that for one that no client has. The client notes every record's loss under
    the model of each round. (The plain loss of records that the model fits, members above all, has next to no gradient;
    log(1 − e⁻ˡ), for cross-entropy the logarithm of the probability of being wrong, pushes these hardest.)

    Departures: written from the idea as the InferGuard paper's evaluation uses it, not from the paper's code or
    settings. The paper searches, by a copy of the server's rule, for a mix of the gradient that raises the loss and of
    covering ones that passes; here the margin that the client's own honest update leaves is computed, for any rule. The
    settings and the function of the loss that is raised are ours. Several malicious clients share their notes.

    Args:
        start: first round of the attack, from 0; before, the client is honest.
        norm: of the update, relative to the honest one.
        cosine: of the update to the honest one.
    """

    name = "agrevader"
    summary = "pushes the loss of its records up, within what an honest update is"
    paper = _PAPER

    start: Whole = 20
    norm: Positive = 1.0
    cosine: Annotated[Number, Field(ge=0, le=1)] = 0.3

    last: int = field(default=-1, init=False)  # round of the last notes
    losses: list[Tensor] = field(default_factory=list, init=False)

    def __call__(self, step: ClientStep) -> dict[str, Tensor]:
        """Return the honest update, turned towards a higher loss of the records."""
        if step.round < self.start:
            return step.train(step.batches)
        self.check(step.task_info, records=step.records is not None)
        assert step.records is not None
        inputs, labels = step.records
        model = copy.deepcopy(step.model).eval()
        labels = labels.double() if labels.is_floating_point() else labels
        outputs = model(inputs).double()
        losses = torch.stack([step.loss(outputs[i : i + 1], labels[i : i + 1]) for i in range(len(labels))])
        if step.round > self.last:  # colluders who come later in the round find it noted
            self.last = step.round
            self.losses.append(losses.detach().cpu())
        honest = step.train(step.batches)
        parameters = {name: p for name, p in model.named_parameters() if name in honest}
        fitted = (-losses.clamp(min=_SMALL)).exp()
        grads = torch.autograd.grad((1 - fitted).log().sum(), list(parameters.values()), allow_unused=True)
        up = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads, strict=True)}
        if all(p.equal(step.weights[n]) for n, p in step.model.named_parameters()):
            up = {name: -grad for name, grad in up.items()}  # honest training returned a gradient, which is descended
        return turned(honest, up, norm=self.norm, cosine=self.cosine)

    def check(self, task_info: TaskInfo, records: bool) -> None:  # noqa: ARG002 (any model will do)
        """Refuse to begin without records."""
        if not records:
            raise BadInput(
                "the behaviour 'agrevader' needs records to push: set threat.adversary=client and threat.target_records"
            )

    def adversary_log(self) -> dict[str, Tensor]:
        """Return the notes: (r, n) losses under the model of each round of the attack."""
        return {_LOSSES: torch.stack(self.losses)} if self.losses else {}


def turned(honest: dict[str, Tensor], towards: dict[str, Tensor], *, norm: float, cosine: float) -> dict[str, Tensor]:
    """Return ``honest`` turned to a ``cosine`` with itself by ``towards``' orthogonal part; ``norm`` is relative."""
    h, a = (torch.cat([t[name].flatten().double() for name in honest]) for t in (honest, towards))
    length = h.norm()
    unit = h / length.clamp(min=1e-300)
    for _ in range(2):  # once more for what rounding left of it
        a = a - (a @ unit) * unit
    mixed = length * norm * (cosine * unit + (1 - cosine**2) ** 0.5 * a / a.norm().clamp(min=1e-300))
    parts = mixed.split([t.numel() for t in honest.values()])
    return {name: part.view_as(t).to(t.dtype) for (name, t), part in zip(honest.items(), parts, strict=True)}


@register
class AgrEvader(Attack):
    """Which records the federation repaired after a malicious client's pushes (Zhang et al. 2023).

    The pushing is done in the federation, by clients whose behaviour is ``agrevader`` (``federations[].malicious``).
    A record's score is minus its mean loss over the second half of the attack's rounds: what the others repair stays
    low. The upper half is taken for members, because the adversary knows that half are. Departures: this score and
    threshold are ours; see also the behaviour.
    """

    name = "agrevader"
    summary = "a malicious client raises its records' loss; the federation lowers that of members again"
    paper = _PAPER
    threat_model = "client, active"
    needs = (
        "records (threat.target_records)",
        "malicious clients that push them (federations[].malicious: agrevader)",
    )
    default_scope = "federation"
    recovers = "membership"
    finds = MembershipFinding
    standards = ("NISTAML.026", "AML.T0018")  # it pushes the global model

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.malicious == cls.name and case.asks_for_members

    def check(self, observation: Observation) -> None:
        """Refuse where nobody has pushed any record, or only in the last round."""
        observation.need_client(self.name)
        whole(observation)
        losses = observation.adversary_log.get(_LOSSES)
        known = len(observation.records) if observation.records else -1
        if losses is not None and (losses.ndim != 2 or losses.shape[1] != known or not losses.isfinite().all()):
            raise BadInput("what the malicious client recorded are no losses of its records; simulate again")
        if losses is None or len(losses) < 2:
            raise NotApplicable(
                "no client of this federation pushed records in two rounds or more; set malicious: agrevader, and its "
                "start at least two below the number of rounds"
            )

    def _run(self, observation: Observation, *_: object) -> MembershipFinding:
        """Return the scores."""
        losses = observation.adversary_log[_LOSSES][1:]  # the first is from before the first push
        scores = -losses[len(losses) // 2 :].mean(dim=0)
        return MembershipFinding(scores=scores, members=upper_half(scores))
