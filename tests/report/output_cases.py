"""Small finished audits, made by hand, for what is written from results: no attack runs, no picture is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedaudit.attacks.standards import mapping
from fedaudit.results import (
    AdversaryRecord,
    AttackRecord,
    AttackSummary,
    AuditResult,
    DataRecord,
    Evidence,
    FederationRecord,
    FindingResult,
    ImageResult,
    Interval,
    ModelRecord,
    Timing,
    Verdict,
)

CANDIDATES = 100


def image(folder: Path, federation: str, client: int, position: int, attack: str, psnr: float) -> ImageResult:
    """One victim, whose pixels its place decides, and its reconstruction; both files are written."""
    stem = f"images/{federation}-0-{client}-{position}"
    names = (f"{stem}-true.png", f"{stem}-{attack}.png")
    pixels = np.random.default_rng([client, position]).integers(0, 256, (8, 8), dtype=np.uint8)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.fromarray(pixels).save(folder / name)
    return ImageResult(
        true_image=names[0],
        reconstruction=names[1],
        true_label=client % 10,
        label=client % 10,
        mse=10 ** (-psnr / 10),
        psnr=psnr,
        ssim=min(1.0, psnr / 30),
        rank=1 if psnr > 15 else 7,
        candidates=CANDIDATES,
        psnr_mean_image=10 + client / 7 + position / 11,
        psnr_same_class=None,
    )


def interval(values: Sequence[float], half: float = 0.0) -> Interval:
    mean = float(np.mean(values))
    return Interval(mean=mean, median=float(np.median(values)), low=mean - half, high=mean + half, n=len(values))


def images_of(
    folder: Path, attack: str, psnr: Sequence[Sequence[float]], verdict: Verdict, federation: str = "sgd", **rest: Any
) -> tuple[list[FindingResult], AttackSummary]:
    """An attack's findings, one a client with the PSNR of each of its images, and their summary."""
    findings = [
        FindingResult(
            attack=attack,
            federation=federation,
            update_kind="gradient",
            round=0,
            client=client,
            rounds=[0],
            num_examples=len(values),
            status="done",
            kind="images",
            images=[image(folder, federation, client, i, attack, value) for i, value in enumerate(values)],
            timing=Timing(seconds=1.5),
        )
        for client, values in enumerate(psnr)
    ]
    flat = [value for values in psnr for value in values]
    seen = sum(value > 15 for value in flat)
    values: dict[str, Any] = {
        "attack": attack,
        "federation": federation,
        "update_kind": "gradient",
        "updates": len(psnr),
        "images": len(flat),
        "kind": "images",
        "verdict": verdict,
        "verdict_text": f"{seen} of {len(flat)} images came out visibly",
        "headline": f"The server can reconstruct training images: {seen} of {len(flat)} came out visibly."
        if seen
        else "",
        "evidence": Evidence(
            what="images came out visibly",
            value=seen / len(flat),
            low=0.1,
            high=1.0,
            n=len(flat),
            of="images",
            p_value=0.001,
            method="exact binomial interval (Clopper-Pearson)",
        ),
        "psnr": interval(flat, 1.0),
        "psnr_mean_image": 11.0,
        "identification_rate": seen / len(flat),
        "timing": Timing(seconds=1.5 * len(psnr)),
    }
    return findings, AttackSummary.model_validate({**values, **rest})


def result(
    folder: Path,
    parts: Sequence[tuple[list[FindingResult], AttackSummary]] | None = None,
    **rest: Any,
) -> AuditResult:
    """An audit of what :func:`images_of` and others made; by default InvG recovers four images of two clients."""
    parts = [images_of(folder, "invg", [[30.0, 28.0], [25.0, 27.5]], "recovered")] if parts is None else parts
    names = list(dict.fromkeys(s.attack for _, s in parts))
    kinds = {s.attack: s.kind or "images" for _, s in parts}
    values: dict[str, Any] = {
        "fedaudit_version": "0.1.0",
        "name": "small",
        "scenario": {"version": 1, "name": "small", "seed": 0},
        "data": DataRecord(
            name="digits", summary="", classes=10, class_names=None, kind="image", input_shape=[1, 8, 8]
        ),
        "model": ModelRecord(
            name="lenet", parameters=100, initialisation="uniform", batch_norm="none", trained="untrained"
        ),
        "adversary": AdversaryRecord(adversary="server", summary="curious", knows=[], does_not_know=[], acts=False),
        "federations": [
            FederationRecord(
                name=name,
                algorithm="fedsgd",
                update_kind="gradient",
                clients=2,
                rounds=1,
                batch_size=2,
                local_steps=1,
                local_epochs=None,
                learning_rate=0.1,
                updates_observed=2,
                description="Every client sends a gradient.",
            )
            for name in dict.fromkeys(s.federation for _, s in parts)
        ],
        "attacks": [
            AttackRecord(name=name, summary=name, paper="", settings={"iterations": 5}, mapping=mapping(kinds[name]))
            for name in names
        ],
        "findings": [finding for findings, _ in parts for finding in findings],
        "summaries": [summary for _, summary in parts],
        "comparisons": [],
        "verdict_rules": [],
        "out_of_scope": [],
        "lpips_missing": None,
        "thresholds": [],
        "environment": {},
        "timing": Timing(seconds=12.5, started="2026-03-02T09:14:05+00:00", workers=1),
    }
    return AuditResult.model_validate({**values, **rest})
