"""What one client sends as a function of its examples, and how exactly its numbers can be known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedaudit.attacks.inversion.engines.reference import one_gradient, unrolled
from fedaudit.attacks.inversion.own_updates import own_update
from fedaudit.attacks.local_training import before_optimiser
from fedaudit.attacks.victim import Victim, load_victim
from fedaudit.ceiling.derivative import Sent
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.errors import NotApplicable

_OFF = 1e-3  # relative error of an update without a defence, above which the facts aren't those of this training
_ROUNDED = 0.1  # the same, up to which a deep network's rounding may explain it
_UNEXPLAINED = 0.7  # the same of one with a defence that declares no noise: what is left of it isn't noise
_NOISE_OFF = 2.0  # times as far off as declared noise makes it
_HALF_STEP = 2.0**-25  # of a float32 beside its size
_OF_A_STEP, _RATE = 1.5e-3, 2e10  # seconds that a step's calls take; operations a second, of one core
_PRODUCT = 4  # times as many operations as what is sent takes


@dataclass(frozen=True)
class Message:
    """What is sent of some examples.

    Attributes:
        sent: of examples (k, ...) float64, in the units in which they are compared; what is sent.
        examples: (k, ...) the true ones, each once.
        uses: (n,) of each example in the order of use, which of them it is.
        noise: (m,) standard deviation of every number that is sent; infinite: it isn't.
        why: what limits the numbers' precision, in words.
        relative: the noise's length beside the update's.
        sure: whether what isn't modelled is known to be noise: if not, more may be told of the examples.
        seconds: what a product with J and Jᵀ takes, about: by counting, so that nothing depends on a clock.
    """

    sent: Sent
    examples: Tensor
    uses: Tensor
    noise: Tensor
    why: str
    relative: float
    sure: bool = True
    seconds: float = 0.0

    @property
    def numbers(self) -> int:
        """How many are sent."""
        return int(self.noise.isfinite().sum())


def message_of(observation: Observation, inputs: Tensor, labels: Tensor) -> Message:
    """Return what the client of one update sent, as a function of its examples.

    What the training gives is computed in float64 at the truth. How far what travelled is from it says how exact it
    is: rounding of whatever kind, taken for even noise. Of a defence, what it declares is modelled
    (clipping, noise, which numbers are sent);
    what else it does counts as rounding.

    Args:
        observation: of one update (of one sum of updates).
        inputs: (n, ...) the true examples, in the order of use.
        labels: (n, ...) their labels or targets, which whoever attacks is taken to know.

    Raises:
        NotApplicable: the update isn't a function of examples that can be differentiated, or isn't one of these.
    """
    update, info = observation.single().update, observation.task_info
    kind, known = info.example_kind, update.sanitised
    if not inputs.is_floating_point():
        raise NotApplicable(f"{kind.plural} aren't numbers that change little by little: there is no derivative")
    if update.kind == "weights" and (update.training is None or update.training.optimiser == "other"):
        raise NotApplicable("how the client trained isn't known, so nobody can say what its update is a function of")
    if known is not None and known.signs:
        raise NotApplicable("signs alone are sent: they don't change with the examples, but where they jump")
    if known is not None and known.private is not None:
        raise NotApplicable("each example's gradient was clipped and noise added in every step: its certificate tells")
    if info.inserted is not None:
        raise NotApplicable("the server altered the model so that updates give examples away: its own attack tells")
    if load_victim(observation, observation.single(), "cpu")[0].dropout:
        raise NotApplicable("clients train with dropout, whose masks nobody else knows")
    first, uses = _once(kind.fingerprints(inputs))
    examples = inputs[first].double()
    sent = _function(observation, labels, uses)
    try:
        with FlopCounterMode(display=False) as counted:
            parts = [part.detach() for part in sent(examples)]
    except (RuntimeError, TypeError, ValueError) as error:
        raise NotApplicable(f"the model can't be computed in float64: {str(error).splitlines()[0]}") from None
    names = names_of(observation)
    sent_values = {name: update.tensors[name].double() for name in names}
    again = partial(_repeated, observation, inputs[first], labels[first], uses)
    noise, why, relative, sure = _precision(sent_values, parts, known, again)
    if update.training is not None and update.training.optimiser != "sgd" and update.training.local_steps == 1:
        sure = False  # nearly signs, which tell more than their derivative
    steps = update.training.local_steps if update.training else 1
    seconds = _OF_A_STEP * steps + _PRODUCT * counted.get_total_flops() / _RATE
    return Message(sent, examples, uses, noise, why, relative, sure, seconds)


def _repeated(observation: Observation, inputs: Tensor, labels: Tensor, uses: Tensor) -> bool:
    """Return whether the same training in the client's own precision gives the update: then all else is rounding."""
    sent = observation.single().update.tensors
    try:
        made = own_update(observation, inputs, labels, uses, torch.Generator()).single().update.tensors
    except NotApplicable:
        return False
    apart, length = (sum(float(one.double().square().sum()) for one in ones)
                     for ones in ([made[name] - sent[name] for name in sent], sent.values()))  # fmt: skip
    return math.sqrt(apart) <= _OFF * math.sqrt(length)


def _once(prints: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first place of each different one, in their order, and of all which one they are."""
    places: dict[int, int] = {}
    uses = torch.tensor([places.setdefault(int(one), len(places)) for one in prints])
    first = [next(i for i, use in enumerate(uses.tolist()) if use == k) for k in range(len(places))]
    return torch.tensor(first), uses


def names_of(observation: Observation) -> list[str]:
    """Return which tensors of an update depend on its examples, in the model's order."""
    return [*load_victim(observation, observation.single(), "cpu")[0].parameters]


def _function(observation: Observation, labels: Tensor, uses: Tensor) -> Sent:
    update, info = observation.single().update, observation.task_info
    victim = _double(load_victim(observation, observation.single(), "cpu")[0])
    training = one_gradient(update.num_examples)
    if update.training is not None:
        training = update.training if update.kind == "weights" else before_optimiser(update.training, update.kind)
    start = {name: p.detach().clone().requires_grad_() for name, p in victim.parameters.items()}
    targets = labels.double() if labels.is_floating_point() else labels
    known, weights = update.sanitised, update.kind == "weights"

    def sent(examples: Tensor) -> Sequence[Tensor]:
        given = info.normalise(examples)[uses].split(list(training.batch_sizes))
        found = unrolled(victim, start, given, targets.split(list(training.batch_sizes)), training)
        return _declared([-part for part in found] if weights else found, known)

    return sent


def _double(victim: Victim) -> Victim:
    return replace(
        victim,
        module=victim.module.double(),
        parameters={name: value.double() for name, value in victim.parameters.items()},
        constants={
            name: value.double() if value.is_floating_point() else value for name, value in victim.constants.items()
        },
    )


def _declared(parts: Sequence[Tensor], known: ClientDefenceInfo | None) -> list[Tensor]:
    """Return an update as its defence, without noise, leaves it, as far as it says how."""
    found = list(parts)
    if known is not None and known.clip is not None:
        length = torch.stack([part.square().sum() for part in found]).sum().sqrt()
        found = [part * (known.clip / length).clamp(max=1.0) for part in found]
    if known is not None and known.bound is not None:
        found = [part.clamp(-known.bound, known.bound) for part in found]
    return found


def _precision(
    travelled: Mapping[str, Tensor],
    made: Sequence[Tensor],
    known: ClientDefenceInfo | None,
    again: Callable[[], bool],
) -> tuple[Tensor, str, float, bool]:
    """Return the noise of every number, why, its length beside the update's, and whether it is known to be noise."""
    sent = [*travelled.values()]
    arrives = [value != 0 if known is not None and known.sparse else torch.ones_like(value, dtype=torch.bool)
               for value in sent]  # fmt: skip
    if known is not None:  # whole tensors and numbers that defences leave out
        arrives = [a & ((s != 0) | (m == 0)) for a, s, m in zip(arrives, sent, made, strict=True)]
    length = math.sqrt(sum(float(s[a].square().sum()) for s, a in zip(sent, arrives, strict=True)))
    if not length:
        raise NotApplicable("the update is zero throughout: it doesn't depend on the examples")
    off = [(s - m)[a] for s, m, a in zip(sent, made, arrives, strict=True)]
    error = math.sqrt(sum(float(one.square().sum()) for one in off))
    declared = dict(known.noises) if known is not None else {}
    noises = [declared.get(name, known.noise if known is not None else 0.0) for name in travelled]
    if any(noises):
        expected = math.sqrt(sum(n**2 * int(a.sum()) for n, a in zip(noises, arrives, strict=True)))
        if not expected / _NOISE_OFF < error < expected * _NOISE_OFF:
            raise NotApplicable(
                f"the update is {error / expected:.2g} times as far from its training as the declared noise makes it"
            )
        why = "the noise that the defence adds"
    elif known is None and error > _OFF * length and not (_ROUNDED * length > error and again()):
        raise NotApplicable(f"the training that is known doesn't give this update: it is {error / length:.1%} off")
    elif error > _UNEXPLAINED * length:
        raise NotApplicable(f"what {known.name if known else 'the defence'} makes of the update isn't known closely")
    else:
        why = "rounding, of what travels and of the client's arithmetic"
    if known is not None and not any(noises) and error > _OFF * length:
        why = f"what {known.name} changes, taken for noise of that size"
    count = sum(int(a.sum()) for a in arrives)
    even = max(error, _HALF_STEP * length) / math.sqrt(count)  # as attacks see it: of a tensor's size they know nothing
    levels = [added or even for added in noises]
    every = torch.cat(
        [torch.where(arrived, level, math.inf).flatten() for arrived, level in zip(arrives, levels, strict=True)]
    )
    sure = any(noises) or known is None or error <= _OFF * length
    return every, why, float(every[every.isfinite()].square().sum().sqrt()) / length, sure
