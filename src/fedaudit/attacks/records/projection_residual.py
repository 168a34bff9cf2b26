"""Membership by spans: whether what a record makes layers receive lies in the span of an update's rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.local_training import Way
from fedaudit.attacks.records.target import MembershipFinding, upper_half, whole
from fedaudit.attacks.victim import distinct_examples, one_batch_gradient
from fedaudit.models import set_training_mode
from fedaudit.simulation.local_training import local_randomness
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable

_CLEAN = 32  # roundings of the largest singular value: what steps leave beyond a span's dimensions is more
_OWN = 1e-5  # the same, of a single record's gradient
_FLOOR = 1e-7  # least residual: below it all is rounding
_USUAL = 1e-3  # least residual of other records, in a layer that tells
_SURE = math.log(30)  # how much less than others' a member's residual is, in an exact span
_LEAST = 0.25  # least share of the examples' dimensions for which a gradient has room
_CANCELS = 1e-4  # of a gradient's norm: outputs whose sum is less sum to zero
_RISES = 1.05  # times noise's largest singular value: what is less is noise
_PROBES = 8  # records by which dimensions are counted, and layers tried
_NORMAL = 0.6745  # quartile of the normal distribution, in standard deviations
_ALIKE = 1e-4  # how far apart what a layer receives may be, to be the same
_SMALL = 64  # examples of an update, up to which a network's layers may be wide enough
_TOKENS = "Conv1D"  # GPT-2's own layers, whose weights are (inputs, outputs)

_REMEDY = "choose loss-threshold or gradient-norm, or audit updates over fewer examples"


@dataclass(frozen=True)
class _Layer:
    """What an update tells of what one layer received.

    Attributes:
        turned: the weight has inputs before outputs.
        basis: (width, r) orthonormal: the span; None: an embedding, of which ``shares`` says what words there were.
        shares: (r,) how much of each direction counts as outside, from 0; of an embedding (words,).
        weight: share of the examples' dimensions for which the gradient has room, up to 1.
        exact: the span holds all that the layer received, but for rounding.
    """

    name: str
    turned: bool
    basis: Tensor | None
    shares: Tensor
    weight: float
    exact: bool

    def residual(self, gradient: Tensor) -> Tensor:
        """Return how much of a record's own gradient of the weight lies outside the span: from 0 to 1, or no number."""
        rows = gradient.to(torch.float64).flatten(1)
        rows = rows.T if self.turned else rows
        energy = rows.square().sum()
        if self.basis is None:
            outside = (rows.square().sum(dim=0) * self.shares).sum()
        else:
            parts = rows @ self.basis
            outside = (rows - parts @ self.basis.T).square().sum() + (parts.square().sum(dim=0) * self.shares).sum()
        return torch.as_tensor((outside / energy).sqrt())


@register
class ProjectionResidual(Attack):
    """Projection residuals (Deng et al. 2026, ProjRes), of layers of any kind.

    The gradient of a layer's weights is a sum over examples, tokens or patches of δ·hᵀ: of what comes back from the
    outputs, and the input h. So where these are fewer than the layer has inputs and outputs, all h lie in the span of
    the gradient's rows, and an example that wasn't in the batch has no reason to. A record's residual is the share of
    its h outside: ‖h − Ph‖/‖h‖. No shadow model is needed, and one update is enough.

    Departures. The paper is known to us by its abstract, so that all but the residual is ours. Where a layer receives
    several vectors of a record, patches or tokens, they count by what comes back to them: the residual is that of the
    rows of the record's own gradient G_r, ‖G_r(I − P)‖/‖G_r‖, which for one vector is the same. (Padding gets nothing
    back, and isn't in the span.) Of an embedding the words count whose rows in the update aren't zero. P is a ridge:
    a direction with singular value s counts as outside by τ²/(s² + τ²), where τ is the first singular value beyond
    the examples' dimensions, the noise that is known, or rounding. The examples' dimensions are their number times the
    rank of a record's own gradient.

    Layers are exact where the update has no noise, nothing lies beyond these dimensions, and no step changed what they
    receive (that of a first layer are the examples); they alone count where there are some. Else those do whose
    gradient has room for all these dimensions, else all that have room for a quarter of them at least, by that share
    (Stouffer's weighted z). Logarithms of residuals are standardised by those of the other records: by their upper
    quartile, which is the median of non-members where half are members, and the spread above it. A record's score is
    its best over all updates. Layers behind BatchNorm with a batch's own statistics, or behind dropout, receive what
    nobody can compute for a record alone, and are left out.

    Where spans are exact, members are those whose residual is below a thirtieth of the others' in most layers of an
    update; else the upper half of the scores.

    Args:
        whose: records of ``anybody`` whose updates are seen; or each ``client``'s by its own updates.
    """

    name = "projection-residual"
    summary = "a record whose hidden vectors lie in the span of an update's rows was trained on"
    paper = "Deng et al. 2026, ProjRes (IEEE S&P; arXiv 2604.21197)"
    threat_model = "server or eavesdropper, passive"
    needs = ("records (threat.target_records)", "updates over fewer examples than a layer has inputs and outputs")
    default_scope = "federation"
    recovers = "membership"
    finds = MembershipFinding
    on_sums = "works: the examples of all clients in the sum are those of one update"

    whose: Literal["anybody", "client"] = "anybody"

    @classmethod
    def fits(cls, case: Case) -> bool:
        small = case.examples <= _SMALL and not case.noisy
        return case.asks_for_members and case.reads_updates and small and case.server is None

    def scope(self) -> str:
        """Return ``client`` where each client is asked for by itself."""
        return "federation" if self.whose == "anybody" else "client"

    def check(self, observation: Observation) -> None:
        """Raise unless there are records, and updates whose numbers weren't taken out or changed one by one."""
        super().check(observation)
        whole(observation)
        observation.need_messages()
        for message in observation.messages:
            done = message.update.sanitised
            if done is not None and (done.sparse or done.signs):
                raise NotApplicable(
                    f"{self.name} needs whole rows of the gradient, and '{done.name}' sends "
                    f"{'signs' if done.signs else 'some numbers'} only; choose loss-threshold or gradient-norm"
                )

    def ways(self, _observation: Observation, message: Message) -> Sequence[Way]:
        """Return the span check, and where an update is of several steps that of one batch."""
        training = message.update.training
        return ("span",) if training is None or training.local_steps == 1 else ("one batch", "span")

    def _run(
        self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress
    ) -> MembershipFinding:
        by_weights: dict[tuple[int, ...], list[Message]] = {}
        for message in observation.messages:
            key = () if _one_step(message) else (len(by_weights),)  # of several steps each has weights of its own
            by_weights.setdefault((*map(id, message.weights.values()), *key), []).append(message)
        found: list[_Judged] = []
        room = 0
        for done, messages in enumerate(by_weights.values()):
            own = _Own(observation, messages[0])
            known = []
            for message in messages:
                layers, most = own.layers(message)
                room = max(room, most)
                known.append(layers)
            found += own.judged(known)
            progress(done + 1, len(by_weights))
        if not found:
            raise NotApplicable(self._nothing(observation, room))
        scores = torch.stack([one.scores for one in found]).amax(dim=0)
        exact = [one for one in found if one.exact]
        members = torch.stack([one.inside for one in exact]).any(dim=0) if exact else upper_half(scores)
        names = list(dict.fromkeys(name for one in found for name in one.names))
        how = f"exact in {len(exact)}" if exact else "exact in none: noise, steps or too many examples blur them"
        note = (
            f"spans of {len(found)} of {len(observation.messages)} updates tell members, {how}; layers: "
            f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        )
        return MembershipFinding(scores=scores, members=members, notes=(note,))

    def _nothing(self, observation: Observation, room: int) -> str:
        fewest = min(distinct_examples(message) for message in observation.messages)
        if room < 1 or fewest <= room:
            return (
                f"{self.name} finds no layer whose inputs an update's rows span only in part: the updates are zero, "
                f"noise hides it, or layers come behind BatchNorm or dropout; {_REMEDY}"
            )
        return (
            f"the updates are over {fewest} examples or more, and no layer's gradient spans more than those of {room} "
            f"exactly: nobody is told by {self.name}; {_REMEDY} ({room} or less)"
        )


@dataclass(frozen=True)
class _Judged:
    """What one update tells of records: standardised scores (n,), which lie in the span (n,), whether that's sure."""

    scores: Tensor
    inside: Tensor
    exact: bool
    names: list[str]


class _Own:
    """The records' own gradients, under the weights that a client was sent; after several steps, under their mean."""

    def __init__(self, observation: Observation, message: Message) -> None:
        self.observation = observation
        records = whole(observation)
        self.module = copy.deepcopy(observation.module)
        self.module.load_state_dict(_within(message, 0.0))
        dtype = next(p.dtype for p in self.module.parameters() if p.is_floating_point())
        inputs, labels = observation.task_info.normalise(records.inputs), records.labels
        self.inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        self.labels = labels.to(dtype) if labels.is_floating_point() else labels
        probes, info = self.inputs[:_PROBES], observation.task_info
        set_training_mode(self.module, "eval", dropout=False)
        alone = _received(self.module, probes)
        set_training_mode(self.module, info.batch_norm, dropout=info.dropout)
        steady = _same(alone, _received(self.module, probes))
        set_training_mode(self.module, "eval", dropout=False)
        self.still, self.alike = steady, steady == set(alone) and _one_step(message)
        if not _one_step(message):
            self.module.load_state_dict(_within(message, 1.0))
            self.still = _same(alone, _received(self.module, probes))
            training = message.update.training
            self.module.load_state_dict(_within(message, 0.5 - (0.5 / training.local_steps if training else 0.0)))
        self.parameters = {
            name: p
            for name, p in self.module.named_parameters()
            if p.requires_grad and p.ndim > 1 and name.rpartition(".")[0] in steady
        }
        self.ranks = self._ranks()

    def gradients(self, many: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield each record's own gradient by name."""
        for example, label in zip(self.inputs[:many].split(1), self.labels[:many].split(1), strict=True):
            value = self.observation.loss(self.module(example), label)
            grads = torch.autograd.grad(value, list(self.parameters.values()), allow_unused=True)
            yield {n: g for n, g in zip(self.parameters, grads, strict=True) if g is not None}

    def _ranks(self) -> dict[str, int]:
        """Return by name the rank of a record's own gradient, at most."""
        ranks: dict[str, int] = {}
        for grads in self.gradients(_PROBES):
            for name, grad in grads.items():
                if not bool(grad.isfinite().all()):
                    continue
                values = torch.linalg.svdvals(grad.flatten(1).double())
                ranks[name] = max(ranks.get(name, 0), int((values > _OWN * values[0]).sum()))
        return {name: rank for name, rank in ranks.items() if rank}

    def layers(self, message: Message) -> tuple[list[_Layer], int]:
        """Return what an update tells of layers, and of how many examples some layer's gradient spans all."""
        update = message.update
        examples = distinct_examples(message)
        gradient = one_batch_gradient(update, weights=message.weights)
        modules = dict(self.module.named_modules())
        found: list[_Layer] = []
        room = 0
        for name, rank in self.ranks.items():
            if name not in gradient or not bool(gradient[name].any()) or not bool(gradient[name].isfinite().all()):
                continue
            sent = gradient[name].double().flatten(1)
            scale = float(sent.norm() / update.tensors[name].double().norm().clamp(min=1e-300))
            noise = scale * update.sanitised.noise if update.sanitised else 0.0
            part = modules[name.rpartition(".")[0]]
            if isinstance(part, nn.Embedding):
                absent = (sent == 0).all(dim=1).double()
                if bool(absent.any()):
                    found.append(_Layer(name, True, None, absent, 1.0, exact=False))
                continue
            turned = type(part).__name__ == _TOKENS
            if not self.alike and rank >= min(sent.shape):
                continue  # its rows hold as much of the inputs as there is room for, and of these what came back weighs
            eps = torch.finfo(update.tensors[name].dtype).eps
            rounded = eps * scale * float(message.weights[name].double().square().mean().sqrt())
            floor = (eps, rounded if update.kind == "weights" else 0.0)
            still = _one_step(message) or name.rpartition(".")[0] in self.still
            layer, most = _layer(name, sent.T if turned else sent, turned, rank, examples, noise, floor, still)
            room = max(room, most)
            if layer is not None:
                found.append(layer)
        sure = [layer for layer in found if layer.exact] or [layer for layer in found if layer.weight == 1]
        return sure or found, room

    def judged(self, known: Sequence[Sequence[_Layer]]) -> Iterator[_Judged]:
        """Yield what each of several updates tells of all records, of those that tell something."""
        rows: list[list[list[Tensor]]] = [[[] for _ in layers] for layers in known]
        for grads in self.gradients():
            for layers, own in zip(known, rows, strict=True):
                for layer, residuals in zip(layers, own, strict=True):
                    residuals.append(layer.residual(grads[layer.name]))
        for layers, own in zip(known, rows, strict=True):
            judged = _judged(layers, [torch.stack(residuals) for residuals in own])
            if judged is not None:
                yield judged


def _one_step(message: Message) -> bool:
    training = message.update.training
    return message.update.kind == "gradient" or (training is not None and training.local_steps == 1)


def _within(message: Message, share: float) -> dict[str, Tensor]:
    """Return the weights that a client was sent, moved by a ``share`` of its update."""
    moved = {name: message.weights[name] + share * t for name, t in message.update.tensors.items()}
    return {**message.weights, **(moved if share else {})}


def _received(module: nn.Module, examples: Tensor) -> dict[str, list[Tensor]]:
    """Return what layers receive of examples (k, ...) as the model sees them, by name, in order of the calls."""
    tried = copy.deepcopy(module)
    calls: dict[str, list[Tensor]] = {}
    for name, part in tried.named_modules():
        if isinstance(part, nn.MultiheadAttention) or not list(part.children()):
            part.register_forward_pre_hook(_noting(calls, name), with_kwargs=True)
    with torch.no_grad(), local_randomness(0):
        tried(examples)
    return calls


def _same(calls: dict[str, list[Tensor]], others: dict[str, list[Tensor]]) -> set[str]:
    """Return the names of layers that received the same."""
    return {
        name
        for name, own in calls.items()
        if all(torch.allclose(a, b, rtol=_ALIKE, atol=_ALIKE) for a, b in zip(own, others[name], strict=True))
    }


def _noting(calls: dict[str, list[Tensor]], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, Tensor):
            calls.setdefault(name, []).append(given.clone())

    return hook


def _layer(
    name: str,
    sent: Tensor,
    turned: bool,
    rank: int,
    examples: int,
    noise: float,
    floor: tuple[float, float],
    still: bool,
) -> tuple[_Layer | None, int]:
    """Return what the (outputs, width) gradient of a layer tells, and how many examples' inputs it could span.

    Args:
        rank: of a single record's gradient.
        noise: standard deviation in each number.
        floor: rounding of the gradient, relative; and what that of the weights leaves in each number.
        still: the layer received the same of an example in each step.
    """
    rows, width = sent.shape
    live = int((sent.abs().amax(dim=1) > 0).sum())
    live -= bool(sent.sum(dim=0).norm() < _CANCELS * sent.norm())  # what comes back through a softmax sums to zero
    most, dimensions = min(live, width), examples * rank
    room = min(live, width - 1) // rank
    share = min(1.0, most / dimensions)
    if share < _LEAST:
        return None, room
    values, directions = torch.linalg.svd(sent, full_matrices=False)[1:]
    largest = math.sqrt(rows) + math.sqrt(width)  # singular value of noise of standard deviation 1
    rounding = floor[0] * float(values[0]) + floor[1] * largest
    beyond = float(values[dimensions]) if dimensions < len(values) else 0.0
    level = max(beyond, noise * largest, rounding)
    kept = values > rounding
    hidden = noise > 0 and float(values[0]) <= _RISES * noise * largest
    if hidden or int((values > level).sum()) >= width:
        return None, room
    clean = beyond <= _CLEAN * floor[0] * float(values[0]) + floor[1] * largest
    exact = not noise and share == 1 and clean and still
    shares = level**2 / (values[kept].square() + level**2)
    return _Layer(name, turned, directions[kept].T.contiguous(), shares, share, exact), room


def _judged(layers: Sequence[_Layer], residuals: Sequence[Tensor]) -> _Judged | None:
    """Return what an update's layers tell of records, by their (n,) residuals in each; None where none tells."""
    square = 0.0
    names: list[str] = []
    nearer: list[Tensor] = []
    score = torch.zeros(0)
    for layer, own in zip(layers, residuals, strict=True):
        near = -own.clamp(min=_FLOOR).log()
        usual, tail = near.nanquantile(0.25), near.nanquantile(0.125)
        if not float(usual) < -math.log(_USUAL):
            continue
        spread = ((usual - tail) / _NORMAL).clamp(min=1e-6)
        standard = ((near - usual) / spread).nan_to_num(0.0)
        score = layer.weight * standard + (score if names else 0)
        square += layer.weight**2
        names.append(layer.name)
        if layer.exact:
            nearer.append((near - usual).nan_to_num(0.0))
    if not names:
        return None
    inside = torch.stack(nearer).median(dim=0).values >= _SURE if nearer else torch.zeros(len(score), dtype=torch.bool)
    return _Judged(score / math.sqrt(square), inside, bool(nearer), names)
