"""Sample audits with images on disk, as the report is drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
from PIL import Image

from fedaudit.results import (
    AdversaryRecord,
    AttackRecord,
    AttackSummary,
    AuditResult,
    Comparison,
    Curve,
    DataRecord,
    FederationRecord,
    FindingResult,
    ImageResult,
    Interval,
    ModelRecord,
    Threshold,
    Timing,
    Verdict,
)

PHOTOS = ["astronaut", "chelsea", "coffee", "rocket"]
QUALITY = {"invg": 0.09, "agic": 0.05}  # standard deviation of the noise that stands for the attack's error


@cache
def whole_photograph(name: str) -> Image.Image:
    return Image.fromarray(getattr(skimage.data, name)()).reduce(2)


@cache
def photograph(index: int, side: int, grey: bool = False) -> np.ndarray:
    """A crop of a real photograph, (side, side, 3) or (side, side), in [0, 1]."""
    photograph = whole_photograph(PHOTOS[index % 4])
    span = min(photograph.size) * 3 // 4
    left = (index // 4 * 37) % (photograph.size[0] - span + 1)
    crop = photograph.crop((left, 10, left + span, 10 + span)).resize((side, side), Image.Resampling.LANCZOS)
    return np.asarray(crop.convert("L" if grey else "RGB"), dtype=np.float64) / 255


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels.clip(0, 1) * 255).round().astype(np.uint8)).save(path)


def interval(values: list[float]) -> Interval:
    spread = 1.96 * float(np.std(values)) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return Interval(mean=mean, median=float(np.median(values)), low=mean - spread, high=mean + spread, n=len(values))


def sample(
    folder: Path,
    *,
    per_update: tuple[int, int] = (1, 4),
    updates: tuple[int, int] = (4, 1),
    side: int = 32,
    grey: bool = False,
    lpips: bool = False,
    curve: bool = True,
) -> AuditResult:
    """An audit like the default one: two federations, two attacks that ran, one that was refused."""
    generator = np.random.default_rng(7)
    findings, summaries, comparisons = [], [], []
    federations = [
        FederationRecord(
            name="fedsgd",
            algorithm="FedSGD",
            update_kind="gradient",
            clients=4,
            rounds=1,
            batch_size=per_update[0],
            local_steps=1,
            local_epochs=None,
            learning_rate=0.1,
            updates_observed=updates[0],
            description="Every client sends the gradient of one batch.",
        ),
        FederationRecord(
            name="fedavg-4",
            algorithm="FedAvg",
            update_kind="weights",
            clients=4,
            rounds=1,
            batch_size=1,
            local_steps=4,
            local_epochs=None,
            learning_rate=0.0001,
            updates_observed=updates[1],
            description="Every client takes four local steps and sends the change of its weights.",
        ),
    ]
    for f, record in enumerate(federations):
        for attack, noise in QUALITY.items():
            images: list[ImageResult] = []
            for u in range(updates[f]):
                found = []
                for i in range(per_update[f]):
                    n = u * per_update[f] + i
                    true = photograph(n, side, grey)
                    sigma = noise * (1 + 2.2 * f) * (0.6 + 0.3 * (n % 4))
                    reconstructed = (true + generator.normal(0, sigma, true.shape)).clip(0, 1)
                    names = (f"images/{f}-{u}-{i}-true.png", f"images/{f}-{u}-{i}-{attack}.png")
                    save(folder / names[0], true)
                    save(folder / names[1], reconstructed)
                    mse = float(((true - reconstructed) ** 2).mean())
                    psnr = -10 * math.log10(mse)
                    found.append(
                        ImageResult(
                            true_image=names[0],
                            reconstruction=names[1],
                            true_label=n % 4,
                            label=n % 4 if n != 2 or f == 0 else 3,
                            mse=mse,
                            psnr=psnr,
                            ssim=min(0.99, psnr / 32),
                            lpips=0.2 if lpips else None,
                            rank=1 if psnr > 15 else 40 + n,
                            candidates=1024,
                            psnr_mean_image=12.0 + n % 3,
                            psnr_same_class=11.5 if n % 4 else None,
                        )
                    )
                iterations = [0, 100, 300, 600, 1000, 1500]
                end = float(np.mean([x.psnr for x in found]))
                findings.append(
                    FindingResult(
                        attack=attack,
                        federation=record.name,
                        update_kind=record.update_kind,
                        round=0,
                        client=u,
                        num_examples=len(found),
                        status="done",
                        kind="images",
                        images=found,
                        label_source="idlg",
                        label_accuracy=1.0 if f == 0 else 0.75,
                        objective=0.0123,
                        iterations=1500,
                        curve=Curve(
                            iterations=iterations,
                            objective=[0.9 * math.exp(-t / (300 + 20 * u)) + 0.004 * (1 + u) for t in iterations],
                            psnr=[end - (end - 7) * math.exp(-t / 250) for t in iterations],
                        )
                        if curve
                        else None,
                        notes=["one dummy batch stands for four steps"] if f and attack == "agic" else [],
                        timing=Timing(seconds=24.3 + u),
                    )
                )
                images += found
            psnr_values = [x.psnr for x in images]
            verdict: Verdict = "recovered" if f == 0 else "identifiable"
            rate = sum(x.rank == 1 for x in images) / len(images)
            summaries.append(
                AttackSummary(
                    attack=attack,
                    federation=record.name,
                    update_kind=record.update_kind,
                    updates=updates[f],
                    images=len(images),
                    kind="images",
                    verdict=verdict,
                    verdict_text=f"From what travelled, {attack} reconstructed images that a person can recognise."
                    if f == 0
                    else f"The images of {attack} show outlines and colours, not details.",
                    psnr=interval(psnr_values),
                    mse=interval([x.mse for x in images]),
                    ssim=interval([x.ssim for x in images if x.ssim is not None]),
                    lpips=interval([0.2, 0.21]) if lpips else None,
                    identification_rate=rate,
                    label_accuracy=1.0 if f == 0 else 0.75,
                    psnr_mean_image=13.1,
                    psnr_same_class=11.5,
                    timing=Timing(seconds=100.0),
                )
            )
        difference = Interval(mean=3.1, median=3.0, low=1.2 - f * 3, high=4.9, n=4)
        comparisons.append(
            Comparison(
                federation=record.name,
                metric="psnr",
                a="agic",
                b="invg",
                difference=difference,
                outcome="undecided" if f else "a is better",
            )
        )
    reason = "it needs a gradient update and fedavg-4 sends weights; add a federation of FedSGD"
    findings.append(
        FindingResult(
            attack="dlg-adam",
            federation="fedavg-4",
            update_kind="weights",
            round=0,
            client=0,
            num_examples=4,
            status="not applicable",
            reason=reason,
        )
    )
    summaries.append(
        AttackSummary(
            attack="dlg-adam",
            federation="fedavg-4",
            update_kind="weights",
            updates=1,
            images=0,
            verdict="not applicable",
            verdict_text=f"Not run: {reason}.",
        )
    )
    papers = {"invg": "Geiping et al. 2020", "agic": "Xu et al. 2022", "dlg-adam": "Zhu et al. 2019"}
    summary = {
        "invg": "Matches the cosine of the whole gradient, by signed Adam.",
        "agic": "Weighs layers, and stands one batch for several local steps.",
        "dlg-adam": "Matches the gradient in squared distance.",
    }
    settings = {"iterations": 1500, "lr": 0.1, "tv": 0.0001}
    return AuditResult(
        fedaudit_version="0.1.0",
        name="default audit",
        scenario={"name": "default", "seed": 0, "data": {"name": "photos", "size": side}, "attacks": list(papers)},
        data=DataRecord(
            name="photos",
            summary="crops of the photographs in the scikit-image and scikit-learn wheels",
            classes=4,
            class_names=PHOTOS,
            input_shape=[1 if grey else 3, side, side],
        ),
        model=ModelRecord(
            name="convnet-small", parameters=184_210, initialisation="default", batch_norm="eval", trained="untrained"
        ),
        adversary=AdversaryRecord(
            adversary="server",
            summary="An honest-but-curious server that sees every client's update.",
            knows=["the model and its weights", "the number of examples in an update", "the learning rate"],
            does_not_know=["the clients' data", "their labels"],
            acts=False,
        ),
        federations=federations,
        attacks=[AttackRecord(name=n, summary=summary[n], paper=p, settings=settings) for n, p in papers.items()],
        findings=findings,
        summaries=summaries,
        comparisons=comparisons,
        verdict_rules=[
            "Recovered: someone who looks at it sees what was trained on.",
            "Identifiable: it singles out the true example.",
            "Not demonstrated: everything else.",
        ],
        out_of_scope=["Secure aggregation.", "Attacks that change the model on purpose.", "Membership inference."],
        lpips_missing=None if lpips else "the trunk's weights are not on this machine",
        thresholds=[],
        environment={"python": "3.11.2", "torch": "2.13.0", "machine": "2 cores"},
        timing=Timing(seconds=212.4, started="2026-03-02T09:14:05+00:00", workers=2),
    )


def empty(folder: Path) -> AuditResult:
    """Nothing at all: no federation, no attack, no finding."""
    names = ["federations", "attacks", "findings", "summaries", "comparisons", "verdict_rules", "out_of_scope"]
    lists: dict[str, Any] = {name: [] for name in names}
    return sample(folder).model_copy(update=lists | {"environment": {}, "timing": Timing(seconds=0.2)})


def refused(folder: Path) -> AuditResult:
    """Every attack was refused."""
    result = sample(folder)
    kept = result.findings[-1:]
    return result.model_copy(update={"findings": kept, "summaries": result.summaries[-1:], "comparisons": []})


def exceeded(folder: Path) -> AuditResult:
    limits = [
        Threshold(metric="psnr", limit=20, worst=29.41, where="agic on fedsgd", exceeded=True, outcome="fail"),
        Threshold(metric="ssim", limit=0.99, worst=0.95, where="agic on fedsgd", exceeded=False, outcome="pass"),
        Threshold(metric="lpips", limit=0.5, worst=None, where=None, exceeded=False, reason="nothing measures it"),
    ]
    return sample(folder, curve=False).model_copy(update={"thresholds": limits})


def single_curve(folder: Path) -> AuditResult:
    result = sample(folder)
    kept = [f for f in result.findings if f.attack == "agic" and f.federation == "fedsgd"][:1]
    point = Curve(iterations=[10], objective=[0.5], psnr=[11.0])
    return result.model_copy(update={"findings": [kept[0].model_copy(update={"curve": point})]})


def hostile(folder: Path) -> AuditResult:
    evil = "<script>alert('x')</script>"
    result = sample(folder)
    text = result.model_dump_json().replace("agic", evil).replace("astronaut", evil).replace("default audit", evil)
    for old in (folder / "images").glob("*agic*"):
        target = folder / "images" / old.name.replace("agic", evil)
        target.parent.mkdir(parents=True, exist_ok=True)
        old.rename(target)
    return AuditResult.model_validate_json(text)


CASES: dict[str, Callable[[Path], AuditResult]] = {
    "default": sample,
    "empty": empty,
    "refused": refused,
    "exceeded": exceeded,
    "single-curve": single_curve,
    "no-curve": lambda folder: sample(folder, curve=False),
    "lpips": lambda folder: sample(folder, lpips=True, curve=False),
    "many": lambda folder: sample(folder, updates=(200, 1), side=16, curve=False),
    "large": lambda folder: sample(folder, side=224, curve=False),
    "grey": lambda folder: sample(folder, grey=True, side=28, curve=False),
    "tiny": lambda folder: sample(folder, side=8, curve=False),
    "hostile": hostile,
}
