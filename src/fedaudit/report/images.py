"""True and reconstructed images on the report page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fedaudit.evaluation.images import best_tries
from fedaudit.modalities import example_kind
from fedaudit.report.figures import attack_names
from fedaudit.report.panels import PANELS, ImageReader, PageImage, Panel
from fedaudit.report.wording import count, number, place_of
from fedaudit.results import AuditResult, ImageResult, RegisteredResult

SHOWN = 16  # victims whose images are shown, a federation


@dataclass(frozen=True)
class Reconstruction:
    """One attack's reconstruction of one victim."""

    attack: str
    image: PageImage
    scores: ImageResult
    alt: str


@dataclass
class Victim:
    """One row of images: the truth, then the best try of each attack on it (None: it was not run here)."""

    number: int
    label: str
    image: PageImage
    alt: str
    reconstructions: dict[str, Reconstruction | None]
    tries: dict[str, None] = field(default_factory=dict)  # of whose updates in which rounds

    @property
    def where(self) -> str:
        """Whose update it is in, and of which round; where there are several, that each attack's best try is shown."""
        return "best try of: " * (len(self.tries) > 1) + "; ".join(self.tries)


@dataclass(frozen=True)
class Victims:
    """All victims of one federation, and the attacks that reconstructed any."""

    federation: str
    columns: list[str]
    all: list[Victim]

    @property
    def shown(self) -> list[Victim]:
        """Those whose images are on the page."""
        return self.all[:SHOWN]

    @property
    def hidden(self) -> int:
        """How many more there are."""
        return max(0, len(self.all) - SHOWN)

    @property
    def broad(self) -> bool:
        """Whether the pictures need columns that are broader than usual."""
        return any(victim.image.broad for victim in self.shown)

    @property
    def copies(self) -> bool:
        """Whether a true image was so large that the page has a JPEG of it."""
        return any(victim.image.uri.startswith("data:image/jpeg") for victim in self.shown)


def victims_of(result: AuditResult, federation: str, images: ImageReader) -> Victims:
    """Return the victims of one federation, each with what every attack made of it."""
    findings = [f for f in result.findings if f.federation == federation]
    columns = [a for a in attack_names(result) if any(f.images for f in findings if f.attack == a)]
    best = {id(i) for a in columns for i in best_tries([i for f in findings if f.attack == a for i in f.images])}
    victims: dict[Any, Victim] = {}
    for finding in findings:
        seen: Counter[bytes] = Counter()
        for image in finding.images:
            # Where it doesn't say which victim that is, it is known by its update and its pixels, whatever each
            # attack's copy of the file is called; two equal images in one update are told apart by their order.
            truth = images[image.true_image]
            key = image.victim or (finding.round, finding.client, truth.digest, seen[truth.digest])
            seen[truth.digest] += 1
            if key not in victims:
                n, label = len(victims) + 1, label_of(result, image.true_label)
                alt = f"True {finding.example_noun.removesuffix('s')} of victim {n}, {label}."
                victims[key] = Victim(n, label, truth, alt, reconstructions=dict.fromkeys(columns))
            victim = victims[key]
            victim.tries[place_of(finding, result)] = None
            if id(image) not in best:
                continue
            alt = (
                f"Reconstruction of victim {victim.number} by {finding.attack}: PSNR {number(image.psnr, 1)} dB, "
                f"{'' if image.correlation is None else f'correlation {number(image.correlation, 2)}, '}"
                f"{identified(image)}{', certified exact' if image.certified else ''}."
            )
            victim.reconstructions[finding.attack] = Reconstruction(
                finding.attack, images[image.reconstruction], image, alt
            )
    return Victims(federation, columns, list(victims.values()))


def after_move(image: RegisteredResult) -> str:
    """Return what a reconstruction that stands elsewhere scores once it is put right, in words."""
    turns = {0: "", 1: "turned left", 2: "upside down", 3: "turned right"}[image.turns]
    tone = "in negative" if image.contrast < 0 else f"contrast times {image.contrast:.1f}"
    in_time = image.ssim is None
    ways = ((image.right, "in time" if in_time else "sideways"), (image.down, "up or down"), (image.deep, "in depth"))
    shifted = " and ".join(f"{abs(far)} {'points' if in_time else 'px'} {way}" for far, way in ways if far)
    plain = image.contrast == 1.0
    parts = [
        *["reversed" if in_time else "mirrored"] * image.flipped,
        turns,
        f"shifted {shifted}" if shifted else "",
        "" if plain else tone,
    ]
    how = " and ".join(part for part in parts if part)
    hit = ", identified" if image.rank == 1 else ""
    return f"{how}: {number(image.psnr, 1)} dB when put back{hit}"


def identified(image: ImageResult) -> str:
    """Return whether the true image was the nearest of all candidates, in words."""
    verb = "identified" if image.rank == 1 else "not identified"
    return f"{verb}: rank {count(image.rank)} of {count(image.candidates)}"


def label_of(result: AuditResult, label: int | None) -> str:
    """Return a label's name as the page writes it; for examples without classes what they are."""
    if label is None:
        return example_kind(result.data.kind or "image").plural.removesuffix("s")
    names = result.data.class_names
    return f"“{names[label]}”" if names and 0 <= label < len(names) else f"class {label}"


def _panel(result: AuditResult, images: ImageReader) -> list[Victims]:
    return [victims_of(result, federation.name, images) for federation in result.federations]


PANELS["images"] = Panel("Images", "parts/images.html.j2", _panel)
