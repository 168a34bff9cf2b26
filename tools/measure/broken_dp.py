"""Broken implementations of differential privacy, and a sound one beside each kind: what an audit of ε must tell.

A breakage is the simulator's own ``dp`` with one thing wrong: what a client sends (a client-side defence), how the
server aggregates or adds noise, who takes part, or what is claimed of it all. The claim is that of the sound one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fedaudit.attacks.dp_canaries import DPCanaries, EpsilonFinding
from fedaudit.defences.aggregation import Aggregate, Cohort
from fedaudit.defences.averaging import Mean
from fedaudit.defences.client_defences import CLIENT_DEFENCES, ClientContext, changed, norm
from fedaudit.defences.privacy import DifferentialPrivacy, account, central_noise
from fedaudit.epsilon.accounting import Account
from fedaudit.evaluation.epsilon import evaluate_epsilon
from fedaudit.pipeline.prepare import resolve
from fedaudit.results import EpsilonResult
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation import canary_play
from fedaudit.simulation.client import Federation
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.seeds import generator as seeded

Tensors = Mapping[str, Tensor]
ROUNDS = 5
STRENGTH = 1000.0  # of a canary before it is clipped, in units of the clip


# --- What clients do ------------------------------------------------------------------------------------------------


class Sound(DifferentialPrivacy):
    """The client's level as the simulator has it, in parts that can be broken one by one."""

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator | None) -> Update:
        assert generator is not None
        tensors = dict(self.send(update, context, generator))
        return dataclasses.replace(changed(update, tensors, ClientDefenceInfo("dp")), buffers={})

    def send(self, update: Update, context: ClientContext, generator: torch.Generator) -> Tensors:
        return self.noisy(self.clipped(update.tensors), generator)

    def clipped(self, tensors: Tensors) -> Tensors:
        return self.shrunk(tensors, self.clip)

    def shrunk(self, tensors: Tensors, clip: float) -> Tensors:
        length = norm(tensors.values())
        return {name: tensor * min(1.0, clip / length) if length else tensor for name, tensor in tensors.items()}

    def noisy(self, tensors: Tensors, generator: torch.Generator, share: float = 1.0) -> Tensors:
        scale = share * self.noise * self.clip if self.where == "local" else 0.0
        return {n: t + scale * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}


class HalfNoise(Sound):
    def noisy(self, tensors: Tensors, generator: torch.Generator, share: float = 0.5) -> Tensors:
        return super().noisy(tensors, generator, share)


class ShareOfNoise(Sound):
    """What would do for the sum of all, where nobody sees less: but the server sees each."""

    def send(self, update: Update, context: ClientContext, generator: torch.Generator) -> Tensors:
        return self.noisy(self.clipped(update.tensors), generator, context.clients**-0.5)


class UniformNoise(Sound):
    """Uniform in ± σ·S, as if that were its standard deviation."""

    def noisy(self, tensors: Tensors, generator: torch.Generator, share: float = 1.0) -> Tensors:
        return {
            n: t + self.noise * self.clip * (2 * torch.rand(t.shape, generator=generator) - 1)
            for n, t in tensors.items()
        }


class ByLayer(Sound):
    def clipped(self, tensors: Tensors) -> Tensors:
        return {name: self.shrunk({name: tensor}, self.clip)[name] for name, tensor in tensors.items()}


class MaximumNorm(Sound):
    def clipped(self, tensors: Tensors) -> Tensors:
        return {name: tensor.clamp(-self.clip, self.clip) for name, tensor in tensors.items()}


class TwiceTheClip(Sound):
    def clipped(self, tensors: Tensors) -> Tensors:
        return self.shrunk(tensors, 2 * self.clip)


class NoiseBeforeClipping(Sound):
    def send(self, update: Update, context: ClientContext, generator: torch.Generator) -> Tensors:
        return self.clipped(self.noisy(update.tensors, generator))


class NormalisationLeftOut(Sound):
    """What belongs to BatchNorm is neither clipped nor gets noise."""

    def send(self, update: Update, context: ClientContext, generator: torch.Generator) -> Tensors:
        norms = {layer[0] for layer in context.layers if any(name.endswith("running_mean") for name in layer)}
        layers = {name for layer in context.layers if layer[0] in norms for name in layer}
        rest = {name: tensor for name, tensor in update.tensors.items() if name not in layers}
        return {**update.tensors, **self.noisy(self.clipped(rest), generator)}


class NoiseOnTheLastLayer(Sound):
    def noisy(self, tensors: Tensors, generator: torch.Generator, share: float = 1.0) -> Tensors:
        *_, weight, bias = tensors
        return {**tensors, **super().noisy({n: tensors[n] for n in (weight, bias)}, generator)}


class Weighted(Sound):
    """Clipped, then multiplied by the number of examples, which nothing bounds."""

    def clipped(self, tensors: Tensors) -> Tensors:
        return {name: 10 * tensor for name, tensor in super().clipped(tensors).items()}


class SentTwice(Sound):
    """Each time with noise of its own; the server takes the mean of both."""

    def noisy(self, tensors: Tensors, generator: torch.Generator, share: float = 1.0) -> Tensors:
        first, second = (super(SentTwice, self).noisy(tensors, generator) for _ in range(2))
        return {name: (first[name] + second[name]) / 2 for name in tensors}


ROUND: defaultdict[int, int] = defaultdict(int)  # by the seed of whoever sends: which round it is in


def _round(generator: torch.Generator) -> tuple[int, int]:
    seed = generator.initial_seed()
    ROUND[seed] += 1
    return seed, ROUND[seed] - 1


class SameSeed(Sound):
    def noisy(self, tensors: Tensors, generator: torch.Generator, share: float = 1.0) -> Tensors:
        return super().noisy(tensors, torch.Generator().manual_seed(_round(generator)[0]))


class TwoSeeds(Sound):
    def noisy(self, tensors: Tensors, generator: torch.Generator, share: float = 1.0) -> Tensors:
        seed, index = _round(generator)
        return super().noisy(tensors, torch.Generator().manual_seed(seed % 10_007 + index % 2))


class Cancelled(Sound):
    """What a round adds, the next takes away."""

    def noisy(self, tensors: Tensors, generator: torch.Generator, share: float = 1.0) -> Tensors:
        seed, index = _round(generator)
        sign = 1.0 - 2 * (index % 2)
        return super().noisy(tensors, torch.Generator().manual_seed(seed % 10_007 + index // 2), sign)


class FirstRoundOnly(Sound):
    def noisy(self, tensors: Tensors, generator: torch.Generator, share: float = 1.0) -> Tensors:
        return super().noisy(tensors, generator, float(_round(generator)[1] == 0))


class Unclipped(Sound):
    def clipped(self, tensors: Tensors) -> Tensors:
        return tensors


def sends(broken: type[Sound]) -> Callable[[pytest.MonkeyPatch], None]:
    """Let every client send as ``broken`` does."""

    def patch(patched: pytest.MonkeyPatch) -> None:
        ROUND.clear()
        patched.setitem(CLIENT_DEFENCES._entries, "dp", dataclasses.replace(CLIENT_DEFENCES["dp"], value=broken))

    return patch


# --- What the server does, who takes part, and what is claimed ------------------------------------------------------


def clipped_afterwards(patched: pytest.MonkeyPatch) -> None:
    """Clip the mean of what wasn't clipped."""
    plain = Mean.__call__

    def mean(self: Mean, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:
        made = plain(self, updates, cohort)
        return dataclasses.replace(made, vector=made.vector / max(1.0, float(made.vector.norm())))

    sends(Unclipped)(patched)
    patched.setattr(Mean, "__call__", mean)


def divided_again(patched: pytest.MonkeyPatch) -> None:
    def once_too_often(dp: DifferentialPrivacy, clients: int, batch: int) -> float:
        return central_noise(dp, clients, batch) / 4  # of the four clients, beside canaries

    patched.setattr("fedaudit.simulation.budget.central_noise", once_too_often)


def batch_divided_again(patched: pytest.MonkeyPatch) -> None:
    """At the sample's level: the noise is divided by the batch, and then again."""
    plain = DifferentialPrivacy.gradients

    def once_too_often(self: DifferentialPrivacy, model: Any, loss: Any, batch: Any, *rest: Any) -> list[Tensor]:
        quiet = dataclasses.replace(self, noise=self.noise / len(batch[0]))
        return plain(quiet, model, loss, batch, *rest)

    patched.setattr(DifferentialPrivacy, "gradients", once_too_often)


def always_the_same(patched: pytest.MonkeyPatch) -> None:
    """Drawn once instead of every round."""
    plain = canary_play.CanaryPlay.join

    def join(self: canary_play.CanaryPlay, *rest: Any) -> Any:
        self.sampler = seeded(0, "always the same")
        return plain(self, *rest)

    patched.setattr(canary_play.CanaryPlay, "join", join)


def wrong_rate(patched: pytest.MonkeyPatch) -> None:
    def rare(dp: DifferentialPrivacy, **settings: Any) -> Account:
        return dataclasses.replace(account(dp, **settings), rate=0.1)

    patched.setattr("fedaudit.defences.privacy.account", rare)


def one_round_counted(patched: pytest.MonkeyPatch) -> None:
    plain = Account.spent
    patched.setattr(Account, "spent", lambda self, rounds, how="rdp": plain(self, min(rounds, 1), how))


def counted_as_add_remove(patched: pytest.MonkeyPatch) -> None:
    plain = Account.spent
    patched.setattr(
        Account, "spent", lambda self, *rest: plain(dataclasses.replace(self, adjacency="add-remove"), *rest)
    )


# --- The suite ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An implementation, sound or broken.

    Attributes:
        patch: what is wrong with it.
        dp: settings of the defence, beside the usual ones.
        federation: settings of the federation, likewise.
        attack: of the audit, likewise.
        model: that is trained.
    """

    patch: Callable[[pytest.MonkeyPatch], None] = lambda patched: None
    dp: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    attack: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: {"name": "mlp", "width": 64})


CENTRAL: dict[str, Any] = {"where": "central"}
PAIRED: dict[str, Any] = {"signs": "paired"}
SAMPLE: dict[str, Any] = {"level": "sample"}
DRAWN: dict[str, Any] = {
    "dp": {**CENTRAL, "sampling": "poisson", "noise": 2.0},
    "federation": {"clients": 10, "clients_per_round": 1, "rounds": 60, "examples": 100},
    "attack": {"canaries": 3000},
}
RESNET = {"name": "resnet20", "width": 4}

SOUND = {
    "local": Case(sends(Sound)),
    "local, paired": Case(sends(Sound), attack=PAIRED),
    "central": Case(dp=CENTRAL),
    "replaced": Case(dp=CENTRAL, attack={"adjacency": "replace"}),
    "drawn": Case(**DRAWN),
    "sample": Case(dp=SAMPLE),
}
BROKEN = {
    "noise of half the size": Case(sends(HalfNoise)),
    "a share of the noise from each": Case(sends(ShareOfNoise)),
    "noise divided by the clients once too often": Case(divided_again, CENTRAL),
    "noise divided by the batch once too often": Case(batch_divided_again, SAMPLE),
    "uniform noise": Case(sends(UniformNoise)),
    "clipped by layer": Case(sends(ByLayer)),
    "clipped by the maximum norm": Case(sends(MaximumNorm)),
    "clipped to twice the clip": Case(sends(TwiceTheClip)),
    "clipped after averaging": Case(clipped_afterwards, CENTRAL),
    "noise before clipping": Case(sends(NoiseBeforeClipping)),
    "BatchNorm neither clipped nor noisy": Case(sends(NormalisationLeftOut), model=RESNET),
    "noise on the last layer only": Case(sends(NoiseOnTheLastLayer)),
    "weights that nobody bounds": Case(sends(Weighted)),
    "sent twice": Case(sends(SentTwice)),
    "the same seed in every round": Case(sends(SameSeed), attack=PAIRED),
    "two seeds": Case(sends(TwoSeeds), attack=PAIRED),
    "noise that the next round cancels": Case(sends(Cancelled), attack=PAIRED),
    "noise in the first round only": Case(sends(FirstRoundOnly)),
    "always the same clients": Case(always_the_same, **DRAWN),
    "the wrong rate": Case(wrong_rate, CENTRAL),
    "one round counted": Case(one_round_counted),
    "replacement counted as add/remove": Case(
        counted_as_add_remove, CENTRAL, attack={"adjacency": "replace", "canaries": 3000}
    ),
}


def federation_of(case: Case, seed: int) -> Federation:
    """Return the federation of ``case``; the claim is an ε of about 4."""
    sigma = math.sqrt(ROUNDS) / 0.925
    values = {
        "seed": seed,
        "data": {"name": "digits", "split": "train"},
        "model": case.model,
        "federations": [
            {
                "name": "f",
                "algorithm": "fedsgd",
                "clients": 4,
                "rounds": ROUNDS,
                "examples": 40,
                "batch_size": 10,
                "learning_rate": 0.1,
                **case.federation,
            }
        ],
        "defences": {"client_defence": {"name": "dp", "where": "local", "noise": sigma, "epsilon": None, **case.dp}},
        "attacks": [{"name": "dp-canaries", **_attack(case)}],
    }
    (federation,) = resolve(scenario_from(values)).federations
    return federation


def _attack(case: Case) -> dict[str, Any]:
    return {"canaries": 1000, "strength": STRENGTH, **case.attack}


def audited(case: Case, seed: int) -> EpsilonResult:
    """Return what an audit of ``case`` finds."""
    with pytest.MonkeyPatch.context() as patched:
        case.patch(patched)
        made = simulate(federation_of(case, seed))
        observation = observe(made.transcript, ThreatModel())
        finding = DPCanaries(**_attack(case))(observation, generator=torch.Generator())
        assert isinstance(finding, EpsilonFinding)
        found = evaluate_epsilon(finding, observation, made.truth, seed=0).result.epsilon
    assert found is not None
    return found
