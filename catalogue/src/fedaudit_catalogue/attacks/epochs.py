"""Several epochs: match the updates that saw the same examples, then reconstruct from all of them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import torch
from pydantic import Field
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from fedaudit.attacks import (
    AGIC,
    Attack,
    ImageFinding,
    InvG,
    Message,
    NotApplicable,
    Observation,
    Progress,
    Trace,
    Way,
    register,
)
from fedaudit.attacks.inversion import (
    Composed,
    GradientInversion,
    Objective,
    Prepared,
    agreed,
    to_pixels,
    with_priors,
)
from fedaudit.utils import Count, NonNegative
from fedaudit_catalogue.attacks.classics import DLGAdam

_POOL = 2  # side and stride of the average pooling before images are compared (Section V-A)
_WHOLE_EPOCHS = "all updates of a client over two or more epochs"


@register
class Epochs(Composed):
    """Any method that optimises images, over all updates of a client in several epochs (Xu et al. 2022, Section IV-B).

    Step 1 reconstructs every update on its own for a few iterations and pairs the images of consecutive epochs
    greedily, the most similar ones first, each image once; more than two epochs by chaining. Step 2 minimises
    Σ_k γ_k·Dist_k plus the priors (Eq. 5), one shared image in all of its batches. Departures: the distance is the
    method's (in the paper AGIC's, the layer-weighted cosine); images whose updates hang together are reconstructed at
    once, not one at a time, which for a batch size of 1 is the same; the label filter compares the labels of the two
    images, not those of their whole batches, and where no partner of the same label is left the most similar image is
    taken. Where an epoch is a single update there is nothing to match.

    Args:
        attack: the method: its name and settings.
        epochs: how many complete epochs the observed updates are; each has the same number of updates.
        pre_iterations: of the reconstructions that are matched.
        pooling: average 2×2 pixels before images are compared.
        label_filter: pair images of equal label first.
        gamma_first: γ of the first epoch; 0 leaves it out.
        gamma: γ of the epochs after it; 0 leaves them out.
    """

    name = "epochs"
    summary = "any method over a client's updates in several epochs: matched, then reconstructed jointly"
    paper = "Xu et al. 2022 (AGIC), Section IV-B"
    threat_model = GradientInversion.threat_model
    needs = ("what the method needs (attack)", _WHOLE_EPOCHS)
    default_scope = "client"
    over = "several epochs"
    several = True
    averages = True
    inverts = False  # of several updates, an inverter answers one

    epochs: Annotated[int, Field(ge=1, strict=True)] = 2
    pre_iterations: Count = 2_000
    pooling: bool = True
    label_filter: bool = True
    gamma_first: NonNegative = 1.0
    gamma: NonNegative = 0.1

    def check(self, observation: Observation) -> None:
        """Refuse what any single update makes impossible, or updates that aren't whole epochs."""
        super().check(observation)
        observation.need_messages()
        singles = observation.split()
        for single in singles:
            self.method.check(single)
        if len({message.client for message in observation.messages}) > 1:
            raise NotApplicable(f"{self.name} follows one client, and these updates are of several")
        count = len(singles)
        if count % self.epochs:
            raise NotApplicable(
                f"{count} updates aren't {self.epochs} epochs of equal length; set epochs, or rounds, accordingly"
            )
        sizes = [sum(s.single().update.num_examples for s in epoch) for epoch in self._cut(singles)]
        if len(set(sizes)) > 1:
            raise NotApplicable(f"epochs have the same number of examples, but these have {sizes}")
        if not self.gamma_first and not self.gamma:
            raise NotApplicable("gamma_first and gamma are both 0: no epoch is left")

    def ways(self, observation: Observation, message: Message) -> Sequence[Way]:
        """Return those of the method."""
        return self.method.ways(observation, message)

    def _cut(self, singles: Sequence[Observation]) -> list[Sequence[Observation]]:
        length = len(singles) // self.epochs
        return [singles[i : i + length] for i in range(0, len(singles), length)]

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> ImageFinding:
        method, decided = self.method.decided(observation.split()[0], generator, device)
        gammas, epochs = self._prepare(method, observation, device)
        updates = [p for epoch in epochs for p in epoch]
        uses, *others = {p.update.num_examples // len(p.labels) for p in updates}  # of an image in an update
        if others:
            raise NotApplicable(f"{self.name} needs updates of equally many local epochs")
        distances = {p: method.make_engine(p) for p in updates}
        matching = len(epochs) > 1 and len(epochs[0]) > 1
        done, total = 0, matching * len(updates) * self.pre_iterations * method.restarts

        def minimise(
            method: GradientInversion, distance: Objective, prepared: Prepared, count: int
        ) -> tuple[Tensor, Trace]:
            nonlocal done
            before, done = done, done + method.iterations * method.restarts
            objective = with_priors(distance, method.priors(prepared))
            (images,), trace = method.minimise(
                objective, prepared, count, generator, lambda own, _: progress(before + own, max(total, done))
            )
            return images, trace

        chains = torch.arange(sum(len(p.labels) for p in epochs[0])).repeat(len(epochs), 1)
        separate: tuple[tuple[Tensor, Tensor], ...] = ()
        if matching:
            short = dataclasses.replace(method, iterations=self.pre_iterations)
            alone = [[minimise(short, distances[p], p, len(p.labels))[0] for p in epoch] for epoch in epochs]
            images = [torch.cat(epoch) for epoch in alone]
            labels = [torch.cat([p.labels for p in epoch]) for epoch in epochs]
            filtered = labels if self.label_filter else [None] * len(epochs)
            partners = [
                match(a, b, x, y, self.pooling)
                for a, b, x, y in zip(images, images[1:], filtered, filtered[1:], strict=False)
            ]
            chains = chain(partners, len(images[0]))
            separate = tuple(
                (to_pixels(own[None, places], observation.task_info)[0], classes[places].cpu())
                for own, classes, places in zip(images, labels, chains, strict=True)
            )
        places = [_places(epoch, column) for epoch, column in zip(epochs, chains, strict=True)]
        parts = _components(places)
        total += len(parts) * method.iterations * method.restarts
        runs = []
        for part in parts:
            shared = [
                (gamma, prepared, rows)
                for gamma, place in zip(gammas, places, strict=True)
                for prepared, rows in place
                if rows[0] in part
            ]
            terms = [(1.0 if len(shared) == 1 else gamma, distances[p], rows) for gamma, p, rows in shared]
            runs.append(minimise(method, joint(terms, part, updates[0].labels.device), shared[0][1], len(part)))
        order = torch.cat(parts).argsort()
        normalised = torch.cat([torch.cat([images[None], trace.snapshots]) for images, trace in runs], dim=1)
        cut = normalised[:, order].split([len(p.labels) for p in epochs[0]], dim=1)
        found = [agreed(own, p.labels, p.epochs) for own, p in zip(cut, epochs[0], strict=True)]
        used = torch.arange(len(order)).repeat(uses)
        pixels = to_pixels(torch.cat(found, dim=1)[:, used], observation.task_info)
        objective = torch.tensor([trace.objective for _, trace in runs]).sum(dim=0).tolist()
        rounds: list[list[int]] = [[] for _ in order]
        for prepared, rows in (pair for place in places for pair in place):
            for row in rows.tolist():
                rounds[row].append(prepared.message.round)
        return ImageFinding(
            images=pixels[0],
            labels=torch.cat([p.labels for p in epochs[0]]).cpu()[used],
            label_source=updates[0].label_source,
            objective=objective[-1],
            iterations=method.iterations * method.restarts * len(runs),
            trace=Trace(runs[0][1].iterations, objective, pixels[1:]),
            notes=(*decided, *method.notes(updates[0]), *(note for p in updates for note in p.notes)),
            rounds=tuple(map(tuple, rounds)) * uses,
            separate=tuple((own[used], classes[used]) for own, classes in separate),
        )

    def _prepare(
        self, method: GradientInversion, observation: Observation, device: str
    ) -> tuple[list[float], list[list[Prepared]]]:
        """Return γ and the updates made ready of every epoch that isn't left out."""
        gammas: list[float] = []
        epochs: list[list[Prepared]] = []
        for number, epoch in enumerate(self._cut(observation.split())):
            gamma = self.gamma if number else self.gamma_first
            if not gamma:
                continue
            made = [method.prepare(single, device) for single in epoch]
            if epochs and len(epoch) == 1:  # the same examples as its only counterpart's in the first epoch
                made = [dataclasses.replace(made[0], labels=epochs[0][0].labels)]
            gammas.append(gamma)
            epochs.append(made)
        return gammas, epochs


def joint(terms: Sequence[tuple[float, Objective, Tensor]], part: Tensor, device: torch.device) -> Objective:
    """Return Σ_k γ_k·Dist_k of the shared images (Xu et al. 2022, Eq. 5).

    ``terms``: γ, an update's distance, and which images are its batch, in the order of its labels. ``part``: (n,) those
    images that are optimised here, ascending.
    """
    position = {int(image): i for i, image in enumerate(part)}
    placed = [
        (gamma, distance, torch.tensor([position[int(row)] for row in rows], device=device))
        for gamma, distance, rows in terms
    ]

    def total(images: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = images.new_zeros(()), torch.zeros_like(images)
        for gamma, distance, rows in placed:
            own, slope = distance(images[rows])
            value = value + gamma * own
            gradient.index_add_(0, rows, slope, alpha=gamma)
        return value, gradient

    return total


def match(first: Tensor, second: Tensor, labels: Tensor | None, other_labels: Tensor | None, pooling: bool) -> Tensor:
    """Return (n,) the partners in ``second`` of each in ``first``, paired greedily, the most similar first.

    Xu et al. 2022, Section IV-B, step 1: mean squared error after 2×2 average pooling, pairs of equal label first.
    """
    a, b = (nn.functional.avg_pool2d(x, min(_POOL, *x.shape[2:])) if pooling else x for x in (first, second))
    cost = torch.cdist(a.flatten(1).double(), b.flatten(1).double()).square() / a[0].numel()
    if labels is not None and other_labels is not None:
        cost = cost + (labels[:, None] != other_labels[None]) * (1 + cost.max())
    partner = torch.full((len(first),), -1)
    taken = torch.zeros(len(second), dtype=torch.bool)
    for pair in cost.cpu().flatten().argsort(stable=True).tolist():
        row, column = divmod(pair, len(second))
        if partner[row] < 0 and not taken[column]:
            partner[row], taken[column] = column, True
    return partner


def chain(partners: Sequence[Tensor], count: int) -> Tensor:
    """Return (epochs, count), the place of each of the first epoch's images in each, by :func:`match`'s pairs."""
    places = [torch.arange(count)]
    for partner in partners:
        places.append(partner[places[-1]])
    return torch.stack(places)


def _places(epoch: Sequence[Prepared], column: Tensor) -> list[tuple[Prepared, Tensor]]:
    """Return, for every update of an epoch, which images are its examples, in the order of its labels."""
    image_at = torch.empty_like(column)
    image_at[column] = torch.arange(len(column))
    sizes = [len(p.labels) for p in epoch]
    return list(zip(epoch, image_at.split(sizes), strict=True))


def _components(places: Sequence[Sequence[tuple[Prepared, Tensor]]]) -> list[Tensor]:
    """Return the images that hang together through shared updates, group by group, each ascending."""
    pairs = [(int(rows[0]), int(row)) for place in places for _, rows in place for row in rows]
    count = 1 + max(column for _, column in pairs)
    ends = tuple(zip(*pairs, strict=True))
    graph = coo_array(([1] * len(pairs), ends), shape=(count, count))
    _, group = connected_components(graph, directed=False)
    return [torch.nonzero(torch.as_tensor(group) == g).flatten() for g in range(group.max() + 1)]


class _Preset(Attack):
    """:class:`Epochs` over one method under a name of its own, with the settings of both side by side."""

    default_scope = "client"
    examples = GradientInversion.examples
    averages = True
    method: ClassVar[type[GradientInversion]]

    @cached_property
    def composed(self) -> Epochs:
        """The composition that the name stands for."""
        settings = self.settings()
        own = {f.name: settings.pop(f.name) for f in dataclasses.fields(Epochs) if f.name in settings}
        return Epochs(attack={"name": self.method.name, **settings}, **own)

    def check(self, observation: Observation) -> None:
        """Refuse what the composition refuses."""
        super().check(observation)
        self.composed.check(observation)

    def ways(self, observation: Observation, message: Message) -> Sequence[Way]:
        """Return those of the composition."""
        return self.composed.ways(observation, message)

    def calibration(self, observation: Observation) -> tuple[Attack, Observation] | None:
        """Return that of the composition."""
        return self.composed.calibration(observation)

    def with_settings(self, settings: Mapping[str, Any], inverter: Any = None) -> Self:  # noqa: ARG002
        """Return the attack with other settings, which isn't to be calibrated any more."""
        return dataclasses.replace(self, **{**settings, "calibrate": False})  # type: ignore[type-var]

    def _run(self, *arguments: Any) -> ImageFinding:
        return self.composed._run(*arguments)


def _preset(name: str, method: type[GradientInversion], summary: str, paper: str) -> type[Attack]:
    """Register :class:`Epochs` over ``method`` as the attack METHOD-epochs, a class of that ``name``."""
    fields = {f.name: f for kind in (method, Epochs) for f in dataclasses.fields(kind) if f.init and f.name != "attack"}
    types = get_type_hints(method, include_extras=True) | get_type_hints(Epochs, include_extras=True)
    content: dict[str, Any] = {field: settings.default for field, settings in fields.items()}
    content |= {
        "__module__": __name__,
        "__doc__": f"{summary} ({paper}).",
        "__annotations__": {field: types[field] for field in fields},
        "name": f"{method.name}-epochs",
        "summary": summary,
        "paper": paper,
        "threat_model": method.threat_model,
        "needs": (*method.needs, _WHOLE_EPOCHS),
        "method": method,
    }
    made: type[Attack] = type(name, (_Preset,), content)
    return register(made)


AGICEpochs = _preset(
    *("AGICEpochs", AGIC),
    "AGIC over all updates of a client in several epochs: matched, then reconstructed jointly",
    AGIC.paper,
)
InvGEpochs = _preset(
    *("InvGEpochs", InvG),
    "InvG over all updates of a client in several epochs: matched, then reconstructed jointly",
    "Geiping et al. 2020, with Xu et al. 2022, Section IV-B",
)
DLGAdamEpochs = _preset(
    *("DLGAdamEpochs", DLGAdam),
    "DLG-Adam over a client's updates in several epochs: matched, then reconstructed jointly",
    "Zhu et al. 2019 (DLG), with Xu et al. 2022, Section IV-B",
)
