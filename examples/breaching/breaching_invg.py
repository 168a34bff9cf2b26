"""Another library's attack in an audit: breaching's `invertinggradients`, with its own loop, objective and settings."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

import fedaudit
from fedaudit import ImageFinding, NotApplicable, Progress
from fedaudit.attacks.inversion import prepare
from fedaudit.utils import Count, NonNegative
from fedaudit_lab.bench import import_peer


@fedaudit.register
class BreachingInvG(fedaudit.Attack):
    """InvG (Geiping et al. 2020) as breaching 0.1.2 implements it, by its ``reconstruct`` and with its own settings.

    Args:
        iterations: of Adam on the gradient's signs, whose rate falls by steps.
        total_variation: weight of its prior.
        restarts: from new noise; the image of least cosine distance is kept.
    """

    name: ClassVar[str] = "breaching-invg"
    summary: ClassVar[str] = "breaching's invertinggradients"
    paper: ClassVar[str] = "Geiping et al. 2020 (InvG)"
    threat_model: ClassVar[str] = "server or eavesdropper, passive"
    needs: ClassVar[tuple[str, ...]] = ("images and a classifier", "gradients", "breaching 0.1.2")
    examples: ClassVar[tuple[str, ...]] = ("image",)

    iterations: Count = 24_000
    total_variation: NonNegative = 0.2
    restarts: Count = 1

    def check(self, observation: fedaudit.Observation) -> None:
        """Refuse what it isn't for, with the reason and what to do.

        Raises:
            NotApplicable: with the reason and the remedy.
        """
        super().check(observation)
        message = observation.single()
        if message.update.kind != "gradient" or observation.task_info.loss != "cross-entropy":
            raise NotApplicable(f"{self.name} is set up for gradients and cross-entropy here; set algorithm: fedsgd")
        if observation.task_info.input_shape[0] != 3:
            raise NotApplicable(f"{self.name} has a total variation of three channels; audit colour images")
        if message.update.tensors.keys() != dict(observation.module.named_parameters()).keys():
            raise NotApplicable(f"{self.name} needs the gradient of every parameter; audit without that defence")

    def _run(
        self, observation: fedaudit.Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> ImageFinding:
        ready = prepare(observation, "auto", device)
        info, module, labels = observation.task_info, ready.victim.module, ready.labels
        (breaching,) = import_peer("breaching", "breaching")
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints what it loads
            warnings.simplefilter("ignore")
            settings = breaching.get_attack_config("invertinggradients")
        settings.optim.max_iterations = self.iterations
        settings.regularization.total_variation.scale = self.total_variation
        settings.restarts.num_trials = self.restarts
        setup = {"device": torch.device(device), "dtype": torch.float}
        attacker = breaching.attacks.prepare_attack(module, torch.nn.CrossEntropyLoss(), settings, setup)
        metadata = SimpleNamespace(shape=info.input_shape, mean=info.mean, std=info.std, modality="vision")
        payload = {
            "parameters": list(ready.victim.parameters.values()),
            "buffers": list(module.buffers()),
            "metadata": metadata,
        }
        about = {"num_data_points": len(labels), "labels": labels, "local_hyperparams": None}
        gradients = [ready.gradient[name] for name in ready.victim.parameters]
        shared = {"gradients": gradients, "buffers": None, "metadata": about}
        with torch.random.fork_rng(), _reported(attacker, self.iterations * self.restarts, progress):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))  # it draws from the global generator
            found, stats = attacker.reconstruct([payload], [shared], {})
        return ImageFinding(
            images=info.denormalise(found["data"]).clamp(0, 1).cpu(),
            labels=labels.cpu(),
            label_source=ready.label_source,
            objective=float(stats["opt_value"]),
            iterations=self.iterations * self.restarts,
        )


@contextlib.contextmanager
def _reported(attacker: Any, total: int, progress: Progress) -> Iterator[None]:
    """Tell ``progress`` of every iteration: breaching itself tells nobody but its log."""
    original, done = attacker._compute_objective, 0

    def told(*args: Any) -> Any:
        nonlocal done
        progress(done, total)
        done += 1
        return original(*args)

    attacker._compute_objective = told
    try:
        yield
    finally:
        del attacker._compute_objective
