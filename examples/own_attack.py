"""An attack of your own, checked and run: `python examples/own_attack.py --out my-audit` (11 CPU seconds).

Where a network begins with a fully connected layer and a batch has one example, the gradient of that layer's weights
is the gradient of its bias times the input: so the input is one divided by the other.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, ClassVar

import torch

import fedaudit
from fedaudit import ImageFinding, NotApplicable
from fedaudit.attacks import InvG


@fedaudit.register
class FirstLayer(fedaudit.Attack):
    """Divide the first layer's gradients: exact for one example, and no optimisation."""

    name: ClassVar[str] = "first-layer"
    summary: ClassVar[str] = "the input of a fully connected first layer, by one division"
    paper: ClassVar[str] = "none: linear algebra"
    threat_model: ClassVar[str] = "server or eavesdropper, passive"
    needs: ClassVar[tuple[str, ...]] = ("gradients of single examples", "a fully connected first layer with a bias")
    examples: ClassVar[tuple[str, ...]] = ("image",)

    def check(self, observation: fedaudit.Observation) -> None:
        """Refuse what it isn't for, with the reason and what to do.

        Raises:
            NotApplicable: with the reason and the remedy.
        """
        super().check(observation)
        update = observation.single().update
        if update.kind != "gradient" or update.num_examples != 1:
            raise NotApplicable(f"{self.name} needs the gradient of one example; set algorithm: fedsgd, batch_size: 1")
        weight, bias = list(update.tensors.values())[:2]
        if weight.ndim != 2 or bias.shape != weight.shape[:1]:
            raise NotApplicable(f"{self.name} needs a fully connected first layer with a bias; audit an mlp")

    def _run(self, observation: fedaudit.Observation, *_: Any) -> ImageFinding:
        """Return the one image; the row with the largest gradient of the bias has the least rounding."""
        weight, bias = list(observation.single().update.tensors.values())[:2]
        row = int(bias.abs().argmax())
        if not bias[row]:
            raise NotApplicable("no unit of the first layer passed a gradient; attack another round")
        info = observation.task_info
        image = info.denormalise((weight[row] / bias[row]).reshape(1, *info.input_shape))
        return ImageFinding(images=image.clamp(0, 1), labels=torch.zeros(1, dtype=torch.long), label_source="none")


SCENARIO: dict[str, Any] = {
    "name": "an attack of my own",
    "data": {"name": "digits"},
    "model": {"name": "mlp"},
    "federations": [{"name": "single", "clients": 8, "examples": 8}, {"name": "pairs", "examples": 8, "batch_size": 2}],
}


def main() -> None:
    """Check the attack against what audits rely on, then audit with it beside invg."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("own-attack-audit"))
    out = parser.parse_args().out
    fedaudit.check_attack(FirstLayer())
    finished = fedaudit.audit(SCENARIO, attacks=[FirstLayer(), InvG(iterations=300)], out=out)
    for row in finished.result.summaries:
        print(f"{row.federation:7} {row.attack:12} {row.verdict:15} {row.verdict_text}")


if __name__ == "__main__":
    main()
