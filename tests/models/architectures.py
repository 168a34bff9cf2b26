"""Twenty architectures of other libraries, as their users make them, and what comes of each when it is audited.

``python -m tests.models.architectures`` writes the table of docs/how-to/own-model.md again, in the peers' environment.
"""

from __future__ import annotations

import importlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedaudit

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-model.md"
HEADER = (
    "| architecture | examples | parameters | simulated | own loop, recorded | attack on images |",
    "|---|---|---|---|---|---|",
)
FEDERATION = {"name": "f", "clients": 1, "examples": 2, "batch_size": 2}
SCENARIO = {"federations": [FEDERATION]}
ATTACK: list[Any] = [{"name": "invg", "iterations": 2}]

THREE, TWO = {"num_classes": 3}, {"in_channels": 1, "out_channels": 2}
STAGES = {"channels": (8, 16, 32), "strides": (2, 2)}
VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 48, "mlp_dim": 96}
THIN = {"spatial_dims": 3, "init_features": 16, "growth_rate": 8}  # a quarter of the usual width
UNETR = {"img_size": (16, 16, 16), "feature_size": 4, "hidden_size": 48, "mlp_dim": 96, "num_heads": 4}
TV, MONAI, SMP = "torchvision.models", "monai.networks.nets", "segmentation_models_pytorch"
BARE = {"encoder_weights": None, "classes": 2}


@dataclass(frozen=True)
class Architecture:
    """How one is made, and of what its examples are.

    Attributes:
        module: from which it is imported.
        name: of the class or function that makes it.
        settings: with which it is called.
        shape: of one example: (C, H, W) or (C, D, H, W).
        masks: whether it segments into two classes; otherwise it tells three classes.
    """

    module: str
    name: str
    settings: dict[str, Any]
    shape: tuple[int, ...] = (3, 32, 32)
    masks: bool = False

    def make(self) -> nn.Module:
        """Return it as its library makes it: in training mode, with random weights."""
        torch.manual_seed(0)
        made: nn.Module = getattr(importlib.import_module(self.module), self.name)(**self.settings)
        return made.train()

    def data(self) -> tuple[Tensor, Tensor]:
        """Return twenty examples of noise in [0, 1], and their classes (n,) or masks (n, ...)."""
        inputs = torch.rand(20, *self.shape, generator=torch.Generator().manual_seed(0))
        return inputs, (inputs[:, 0] > 0.5).long() if self.masks else torch.arange(20) % 3

    @property
    def title(self) -> str:
        """The library's and its own name."""
        return f"{self.module.split('.')[0]} `{self.settings.get('model_name', self.name)}`"

    @property
    def examples(self) -> str:
        """What it takes and is asked for, in words."""
        size = "x".join(map(str, self.shape[1:]))
        return f"{self.shape[0]} x {size}, {'masks' if self.masks else 'classes'}"


TABLE: tuple[Architecture, ...] = (
    Architecture(TV, "resnet18", THREE),
    Architecture(TV, "mobilenet_v3_small", THREE),
    Architecture(TV, "swin_t", THREE),
    Architecture(TV, "VisionTransformer", THREE | VIT),
    Architecture(TV, "googlenet", THREE | {"init_weights": False}, (3, 64, 64)),
    Architecture(
        "torchvision.models.segmentation",
        "lraspp_mobilenet_v3_large",
        {"weights_backbone": None, "num_classes": 2},
        masks=True,
    ),
    Architecture(MONAI, "DenseNet121", THIN | {"in_channels": 1, "out_channels": 3}, (1, 32, 32, 32)),
    Architecture(MONAI, "UNet", {"spatial_dims": 3} | TWO | STAGES, (1, 16, 16, 16), masks=True),
    Architecture(MONAI, "SegResNet", {"spatial_dims": 3, "init_filters": 8} | TWO, (1, 16, 16, 16), masks=True),
    Architecture(MONAI, "UNETR", TWO | UNETR, (1, 16, 16, 16), masks=True),
    Architecture(MONAI, "SwinUNETR", {"spatial_dims": 2, "feature_size": 12} | TWO, (1, 64, 64), masks=True),
    Architecture(MONAI, "AttentionUnet", {"spatial_dims": 2} | TWO | STAGES, (1, 32, 32), masks=True),
    Architecture("timm", "create_model", {"model_name": "vit_tiny_patch16_224", "img_size": 32} | THREE),
    Architecture("timm", "create_model", {"model_name": "convnext_atto"} | THREE),
    Architecture("timm", "create_model", {"model_name": "regnety_002"} | THREE),
    Architecture("timm", "create_model", {"model_name": "mixer_s32_224", "img_size": 64} | THREE, (3, 64, 64)),
    Architecture(SMP, "Unet", {"encoder_name": "resnet18"} | BARE, masks=True),
    Architecture(SMP, "FPN", {"encoder_name": "resnet18"} | BARE, masks=True),
    Architecture(SMP, "DeepLabV3Plus", {"encoder_name": "resnet18"} | BARE, masks=True),
    Architecture(SMP, "Segformer", {"encoder_name": "mit_b0"} | BARE, masks=True),
)


def own_loop(one: Architecture, folder: Path) -> None:
    """Train as somebody does who uses the library, two steps of SGD on batches of two, and record it."""
    model, (inputs, targets) = one.make(), one.data()
    channels = one.shape[0]
    with fedaudit.Recorder(folder, mean=[0.5] * channels, std=[0.25] * channels) as recorder:
        recorder.begin_round(model.state_dict())
        with recorder.capture() as seen:
            optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            for rows in (slice(0, 2), slice(2, 4)):
                optimiser.zero_grad()
                outputs: Any = model((inputs[rows] - 0.5) / 0.25)
                if isinstance(outputs, dict):
                    outputs = outputs["out"]
                parts = outputs if isinstance(outputs, tuple) else (outputs,)
                torch.stack([functional.cross_entropy(part, targets[rows]) for part in parts]).sum().backward()
                optimiser.step()
        recorder.update("hospital", model.state_dict(), seen, num_examples=4)
        recorder.end_round()


@dataclass
class Outcome:
    """What came of an architecture, each way: the recording and the audits, or the line that refuses.

    Attributes:
        simulated: the simulation, dropout off.
        audits: of the simulation and of the own loop's recording.
        refusals: by ``simulated`` and ``recorded``.
    """

    parameters: int
    simulated: fedaudit.Recording | None
    audits: dict[str, fedaudit.Audit]
    refusals: dict[str, str]


def played(one: Architecture, folder: Path) -> Outcome:
    """Simulate, record, attack; whatever else than a refusal of ours is raised goes on."""
    model = one.make()
    outcome = Outcome(sum(p.numel() for p in model.parameters()), None, {}, {})
    quiet: dict[str, Any] = {"controls": False, "progress": False}
    try:
        outcome.simulated = fedaudit.simulate(SCENARIO, model=model, data=one.data(), dropout=False, progress=False)
        outcome.audits["simulated"] = fedaudit.audit_transcript(outcome.simulated, ATTACK, **quiet)
    except fedaudit.FedAuditError as error:
        outcome.refusals["simulated"] = str(error)
    own_loop(one, folder)
    try:
        outcome.audits["recorded"] = fedaudit.audit_transcript(folder, ATTACK, module=one.make(), **quiet)
    except fedaudit.FedAuditError as error:
        outcome.refusals["recorded"] = str(error)
    return outcome


def row(one: Architecture, outcome: Outcome) -> str:
    """Return the line of the page's table."""
    audits, refusals = outcome.audits, outcome.refusals
    simulated = "yes" if "simulated" in audits else refusals["simulated"]
    if "recorded" in audits:
        (federation,) = audits["recorded"].result.federations
        assert federation.recording is not None
        recorded = f"yes, {federation.recording.facts}"
    else:
        recorded = refusals["recorded"]
    ran = [way for way in audits if all(f.status == "done" for f in audits[way].result.findings)]
    attacked = " and ".join({"simulated": "gradient", "recorded": "two steps"}[way] for way in ran) or "–"
    size = f"{outcome.parameters / 1e6:.2f} M"
    return f"| {one.title} | {one.examples} | {size} | {simulated} | {recorded} | {attacked} |"


def main() -> None:
    """Write the table."""
    from fedaudit.utils.machine import import_torchvision, own_process

    own_process()
    import_torchvision()
    rows = []
    for one in TABLE:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(one, played(one, Path(folder) / "recording")))
        print(rows[-1], flush=True)
    before, _, rest = PAGE.read_text().partition(HEADER[0])
    after = rest.partition("\n\n")[2]
    PAGE.write_text(before + "\n".join([*HEADER, *rows]) + "\n\n" + after)


if __name__ == "__main__":
    main()
