"""The filters that frameworks bring along, as client-side defences: NVFlare's, and Flower's mod for local DP.

They give the bits that the frameworks' own give: of the same difference of state dicts, by the same draws of NumPy's
``RandomState``, in the same order. They see the whole state, BatchNorm's statistics included, as the frameworks do;
of a gradient, the gradient in place of the difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedaudit.defences.aggregation import Aggregator
from fedaudit.defences.client_defences import ClientContext, ClientDefence, changed
from fedaudit.defences.draws import numpy_draws
from fedaudit.epsilon.accounting import Account, SparseVectorAccount, TakingPart
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import register
from fedaudit.utils.validation import NonNegative, Number, Positive

Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 1_000_000  # numbers that are asked at a time; it decides the draws
_IDLE = 100  # passes in which nothing was accepted, after which nothing will be
_DELTA = 1e-5  # at which what is sent with Laplace noise is composed


@register
class PercentilePrivacy(ClientDefence):
    """Sends the largest elements, clipped to ±``gamma`` (Shokri & Shmatikov 2015; NVFlare's ``PercentilePrivacy``).

    The difference of the state dicts is divided by the local steps (NVFlare: ``NUM_STEPS_CURRENT_ROUND``, 1 where
    nobody says), what is smaller than the ``percentile``-th percentile of all magnitudes becomes zero, the rest is
    clipped to ±``gamma`` and multiplied by the steps again. Scalars pass as they are, and count in the percentile.
    Nothing is random: no differential privacy is promised.

    Args:
        percentile: of the magnitudes, below which nothing is sent, 0 to 100.
        gamma: the size to which an element's change by one step is clipped.
    """

    name = "percentile-privacy"
    summary = "NVFlare's PercentilePrivacy: the largest elements, clipped one by one; promises no ε"
    paper = "Shokri & Shmatikov 2015; NVFlare"
    unsent = 0.3

    percentile: Annotated[Number, Field(ge=0, le=100)] = 10
    gamma: Positive = 0.01

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return the update with zeros in place of what isn't sent."""
        steps = _steps(update)
        moved = {name: array / steps for name, array in difference(update, context).items()}
        sizes = np.concatenate([np.abs(array.ravel()) for array in moved.values()])
        cutoff = np.percentile(sizes, self.percentile)
        sent = {}
        for name, array in moved.items():
            if array.ndim:
                array[(array > -cutoff) & (array < cutoff)] = 0
                sent[name] = np.clip(array, -self.gamma, self.gamma) * steps
        how = ClientDefenceInfo(self.name, sparse=True, bound=self.gamma * steps)
        return _changed(update, context, sent, how)


@register
class SVTPrivacy(ClientDefence):
    """Sends some elements above a noisy threshold, clipped, with Laplace noise (NVFlare's ``SVTPrivacy``).

    The sparse vector technique (Lyu, Su & Li 2017, Algorithm 7) on the magnitudes of the difference of the state
    dicts, divided by the local steps and clipped to ``gamma``: the threshold is ``tau`` with noise of gamma/ε₁, every
    magnitude gets noise of 2·gamma·c/ε₂, c being ⌈``fraction``·d⌉, and what isn't below is accepted. NVFlare finishes
    its passes, and makes further ones, until c or more are accepted, and draws c of them, which are sent with noise of
    2·gamma·c/ε₃ each. With the defaults that is 20 times the clip, 28 in standard deviation.

    *What is promised.* NVFlare's account is ε₁ + ε₂ + ε₃ a round, composed by adding up. The technique pays ε₂/c for
    every acceptance, and more than c are accepted; so ε₁ + ε₂·d/c + ε₃ is what holds whatever happens, and is the
    account here. What is sent is c numbers with Laplace noise, which compose to less at δ = 1e-5. It protects all that
    a client sends in a round against whoever sees it (replacement), scalars excepted, which pass as they are.

    Args:
        fraction: of all elements that is sent at most; those drawn twice count twice.
        epsilon: ε₁ + ε₂, of the choice.
        noise_var: ε₃ is c times this, where ``epsilon_release`` isn't given.
        gamma: the size to which an element's change by one step is clipped.
        tau: the threshold.
        replace: draw with replacement.
        epsilon_threshold: ε₁; null: ε₁ : ε₂ = 1 : (2c)^⅔.
        epsilon_query: ε₂; null: what ε₁ leaves of ``epsilon``.
        epsilon_release: ε₃.

    Raises:
        BadInput: ε₁ and ε₂ don't add up to ``epsilon``.
    """

    name = "svt-privacy"
    summary = "NVFlare's SVTPrivacy: some elements above a noisy threshold, clipped, with Laplace noise"
    paper = "Lyu et al. 2017 (SVT); NVFlare"
    secret = True

    fraction: Annotated[Number, Field(gt=0, le=1)] = 0.1
    epsilon: Positive = 0.1
    noise_var: Positive = 0.1
    gamma: Positive = 1e-5
    tau: NonNegative = 1e-6
    replace: bool = True
    epsilon_threshold: Positive | None = None
    epsilon_query: Positive | None = None
    epsilon_release: Positive | None = None

    def __post_init__(self) -> None:
        given = [part for part in (self.epsilon_threshold, self.epsilon_query) if part is not None]
        if sum(given) >= self.epsilon if len(given) == 1 else given and not np.isclose(sum(given), self.epsilon):
            raise BadInput(
                f"svt-privacy: epsilon_threshold and epsilon_query must add up to epsilon, {self.epsilon:g}; "
                "leave one of them out"
            )

    def _parts(self, numbers: int) -> tuple[float, float, float]:
        """Return ε₁, ε₂ and ε₃ where so many numbers are sent."""
        first, second = self.epsilon_threshold, self.epsilon_query
        if first is None and second is None:
            first = self.epsilon / (1 + (2.0 * numbers) ** (2 / 3))
        first = self.epsilon - (second or 0) if first is None else first
        second = self.epsilon - first if second is None else second
        return first, second, numbers * self.noise_var if self.epsilon_release is None else self.epsilon_release

    def account(self, who: TakingPart) -> SparseVectorAccount:
        """Return what is proven, see above."""
        numbers = self._sent(who.elements)
        first, second, third = self._parts(numbers)
        return SparseVectorAccount(first + second * who.elements / numbers, third / numbers, numbers, _DELTA)

    def adds_noise(self) -> bool:
        """Return True."""
        return True

    def _sent(self, elements: int) -> int:
        return int(min(np.ceil(float(elements) * self.fraction), float(elements)))

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator | None) -> Update:
        """Return the update, zeros in place of what isn't sent; BadInput where nothing could ever be accepted."""
        draws, steps = numpy_draws(generator), float(_steps(update))
        moved = dict(sorted(difference(update, context).items()))
        flat = [array.reshape(-1) for array in moved.values()]
        wanted = self._sent(sum(map(len, flat)))
        first, second, third = self._parts(wanted)
        threshold = self.tau + draws.laplace(scale=self.gamma / first)
        masks = self._accepted(flat, steps, wanted, threshold, self.gamma * 2 * wanted / second, draws)
        scale = self.gamma * 2 * wanted / third
        shares = list(_shares([int(mask.sum()) for mask in masks], wanted, self.replace, draws))
        sent = {}
        for (name, array), mask, share in zip(moved.items(), masks, shares, strict=True):
            if not array.ndim:
                continue
            values = array.reshape(-1)
            sent[name] = np.zeros(array.shape, array.dtype)
            pieces = [slice(at, at + _CHUNK) for at in range(0, len(values), _CHUNK)]
            counts = [int(mask[piece].sum()) for piece in pieces]
            for piece, count in zip(pieces, _shares(counts, share, self.replace, draws), strict=True):
                if count:
                    chosen = draws.choice(np.flatnonzero(mask[piece]), size=count, replace=self.replace)
                    noise = draws.laplace(scale=scale, size=count)
                    clipped = np.clip(values[piece][chosen].astype(np.float64) / steps, -self.gamma, self.gamma)
                    sent[name].reshape(-1)[piece][chosen] = (clipped + noise) * steps
        how = ClientDefenceInfo(self.name, sparse=True, noise=math.sqrt(2) * scale * steps, bound=self.gamma * steps)
        return _changed(update, context, sent, how)

    def _accepted(
        self,
        flat: Sequence[Array],
        steps: float,
        wanted: int,
        threshold: float,
        scale: float,
        draws: np.random.RandomState,
    ) -> list[Array]:
        """Return a mask of each vector: what was accepted, in as many passes as it takes."""
        masks, total, idle = [np.zeros(len(values), np.bool_) for values in flat], 0, 0
        while total < wanted:
            before = total
            for values, mask in zip(flat, masks, strict=True):
                for at in range(0, len(values), _CHUNK):
                    left = np.flatnonzero(~mask[at : at + _CHUNK])
                    if not len(left):
                        continue
                    asked = np.abs(np.clip(values[at + left].astype(np.float64) / steps, -self.gamma, self.gamma))
                    above = left[asked + draws.laplace(scale=scale, size=len(left)) >= threshold]
                    mask[at + above] = True
                    total += len(above)
            idle = idle + 1 if total == before else 0
            if idle == _IDLE:
                raise BadInput(
                    f"svt-privacy: {total} of {wanted} numbers were accepted, and no more in {_IDLE} passes: the "
                    "threshold is above the clip and the noise is small (NVFlare's own goes on for ever); lower tau"
                )
        return masks


@register
class ExcludeVars(ClientDefence):
    """Sends no tensor whose name is excluded (NVFlare's ``ExcludeVars``).

    Names are those of the model's state dict. What is sent is sent as it is: no differential privacy is promised.
    Departure: where nothing is excluded, NVFlare goes on without a word (of a list), or with a warning.

    With ``keep`` it is a federation with personal layers: FedPer (the head), FedBN (the norms), LG-FedAvg (the body).
    NVFlare has no such setting: its clients decide that.

    Args:
        exclude_vars: the names, or a regular expression that is searched for in them.
        keep: what isn't sent stays with the client, which trains it on from round to round; false: clients begin each
            round with what the server has.

    Raises:
        BadInput: it isn't a regular expression.
    """

    name = "exclude-vars"
    summary = "NVFlare's ExcludeVars: tensors of some names don't travel; promises no ε"
    paper = "NVFlare"

    exclude_vars: list[str] | str | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.exclude_vars, str):
            try:
                re.compile(self.exclude_vars)
            except re.error as error:
                raise BadInput(
                    f"exclude-vars: '{self.exclude_vars}' is no regular expression ({error}); a list of names is taken "
                    "as it stands"
                ) from None

    def at_home(self, names: Collection[str]) -> set[str]:
        """Return what isn't sent, where it is kept."""
        return self._excluded(names) if self.keep else set()

    def check(self, plan: LocalPlan, aggregator: Aggregator) -> None:  # noqa: ARG002
        """Refuse to be used without names, and to keep what no local training changes."""
        self._check_names()
        if self.keep and plan.sends_gradient:
            raise BadInput("exclude-vars: what clients keep is trained by them (fedavg or fedprox); leave keep out")

    def check_alone(self, given: Collection[str], clients: int | None) -> int | None:  # noqa: ARG002
        """Refuse to be used without names.

        Raises:
            BadInput: there are none.
        """
        self._check_names()
        return None

    def _check_names(self) -> None:
        if not self.exclude_vars:
            raise BadInput("exclude-vars excludes nothing: give exclude_vars, names or a regular expression")

    def _excluded(self, names: Collection[str]) -> set[str]:
        asked = self.exclude_vars or []
        return {name for name in names if (re.search(asked, name) if isinstance(asked, str) else name in asked)}

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return the update without the excluded tensors; BadInput where none has such a name, or none is left."""
        asked, names = self.exclude_vars, dict.fromkeys([*context.weights, *update.tensors])
        if not asked:  # check() refuses it
            return update
        found = self._excluded(names)
        tensors = {name: tensor for name, tensor in update.tensors.items() if name not in found}
        if not found or not tensors:
            what = "leaves nothing to send" if found else "is the name of no tensor"
            raise BadInput(f"exclude-vars: {asked!r} {what}; this model has {', '.join(list(names)[:20])}")
        buffers = {name: tensor for name, tensor in update.buffers.items() if name not in found}
        return replace(changed(update, tensors, ClientDefenceInfo(self.name)), buffers=buffers)


@register
class LocalDp(ClientDefence):
    """Clips the whole change of the model and adds Gaussian noise (Flower's ``LocalDpMod``).

    The change of all tensors together, BatchNorm's statistics included, is clipped to ``clipping_norm``, and every
    number gets noise of σ = sensitivity·√(2·ln(1.25/δ))/ε (Dwork & Roth 2014, Theorem A.1). Scalars pass as they are,
    as under Flower's mod, and count in the length: BatchNorm's number of batches, too, so that the update of 30
    batches in training mode is multiplied by ``clipping_norm``/30 or less. A noisy variance may be negative: use
    BatchNorm in eval mode, or none.

    *What is promised.* The theorem is for ε below 1 and a sensitivity of which ``clipping_norm`` is half: two clients'
    updates are up to twice the clip apart. The mod checks neither. The account here is of the noise that is added
    (σ/clipping_norm), by replacement, over all rounds in which a client takes part; nobody stops.

    Args:
        clipping_norm: C.
        sensitivity: as Flower's users give it.
        epsilon: the mod's, of a round.
        delta: δ.
    """

    name = "local-dp"
    summary = "Flower's LocalDpMod: clips, adds noise; its own epsilon holds only below 1, with sensitivity 2·clip"
    paper = "Dwork & Roth 2014, Theorem A.1; Flower"
    secret = True

    clipping_norm: Positive = 1.0
    sensitivity: NonNegative = 1.0
    epsilon: Positive = 1.0
    delta: Annotated[Number, Field(gt=0, lt=1)] = 1e-5

    def check_alone(self, given: Collection[str], clients: int | None) -> int | None:  # noqa: ARG002
        """Refuse settings that nobody chose, as Flower's mod does.

        Raises:
            BadInput: one was left as it is.
        """
        if missing := [name for name in self.settings() if name not in given]:
            raise BadInput(f"local-dp needs {', '.join(missing)}, which nobody can choose for you")
        return None

    @property
    def scale(self) -> float:
        """σ, the standard deviation of the noise."""
        return float(self.sensitivity * np.sqrt(2 * np.log(1.25 / self.delta)) / self.epsilon)

    def account(self, who: TakingPart) -> Account | None:  # noqa: ARG002
        """Return that of the noise which is added; None where there is none."""
        if not self.scale:
            return None
        return Account(self.scale / self.clipping_norm, self.delta, 1.0, 1, adjacency="replace")

    def adds_noise(self) -> bool:
        """Return whether there is any."""
        return self.scale > 0

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator | None) -> Update:
        """Return the update clipped and with noise."""
        draws = numpy_draws(generator)
        moved = difference(update, context)
        length = float(np.sqrt(sum(np.linalg.norm(array.reshape(-1)) ** 2 for array in moved.values())))
        shrink = min(1.0, self.clipping_norm / length) if length else 1.0
        sent = {}
        for name, array in moved.items():
            noise = np.asarray(draws.normal(0, self.scale, array.shape))  # of scalars, too, which don't get it
            if array.ndim and np.issubdtype(array.dtype, np.floating):
                sent[name] = array * shrink + np.asarray(noise).astype(array.dtype)
        return _changed(update, context, sent, ClientDefenceInfo(self.name, noise=self.scale, clip=self.clipping_norm))


def difference(update: Update, context: ClientContext) -> dict[str, Array]:
    """Return what training changed of each tensor, in the state dict's order, or the gradient; not to be written to."""
    found = {}
    for name in dict.fromkeys([*context.weights, *update.tensors]):
        if name in update.tensors:
            tensor = update.tensors[name]
        elif name in update.buffers:
            tensor = update.buffers[name] - context.weights[name]
        else:
            tensor = torch.zeros_like(context.weights[name])
        found[name] = np.asarray(tensor.detach().cpu().numpy())
    return found


def _changed(update: Update, context: ClientContext, sent: Mapping[str, Array], how: ClientDefenceInfo) -> Update:
    """Return ``update`` with the differences in ``sent``; what isn't in it passes."""

    def tensor(name: str, like: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(sent[name])).to(like).view_as(like)

    tensors = {name: tensor(name, old) if name in sent else old for name, old in update.tensors.items()}
    buffers = dict(update.buffers)
    for name, array in sent.items():
        if name not in tensors and (name in buffers or array.any()):
            start = context.weights[name]
            buffers[name] = start + tensor(name, start)
    return replace(changed(update, tensors, how), buffers=buffers)


def _steps(update: Update) -> int:
    """Return the local steps; 1 where they aren't known."""
    return update.training.local_steps if update.training else 1


def _shares(counts: Sequence[int], total: int, replaced: bool, draws: np.random.RandomState) -> Iterator[int]:
    """Yield how many of ``total`` draws fall on each group of ``counts`` members; the last takes what is left."""
    members = sum(counts)
    for place, count in enumerate(counts):
        share = 0
        if place == len(counts) - 1:
            share = total
        elif total and count and replaced:
            share = int(draws.binomial(total, float(count) / float(members)))
        elif total and count:
            share = int(draws.hypergeometric(ngood=count, nbad=members - count, nsample=total))
        yield share
        members -= count
        total -= share
