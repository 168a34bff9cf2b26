"""Inversion of models of several labels, several numbers or masks: granted, and sought beside the images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import make_attack
from fedaudit.simulation.local_training import gradient
from fedaudit.task.targets import task_named
from fedaudit.task.training import loss_function
from fedaudit.utils.errors import NotApplicable


def dice(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


IMAGES = nn.functional.avg_pool2d(torch.rand(40, 1, 10, 10, generator=dice(1)), 3, stride=1)
TARGETS: dict[str, Tensor] = {
    "multi-label": (torch.rand(40, 6, generator=dice(2)) < 0.4).float(),
    "regression": torch.randn(40, 3, generator=dice(3)),
    "segmentation": (IMAGES[:, 0] > IMAGES.median()).long(),
}


def net(task: str) -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid()]
    if task == "segmentation":
        return nn.Sequential(*body, nn.Conv2d(8, 2, 3, padding=1))
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8 * 64, TARGETS[task].shape[1]))


def one_logit() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, 1, 3, padding=1))


def audited(
    task: str, attacks: list[Any], *, granted: bool, federation: dict[str, Any] | None = None, **more: Any
) -> Any:
    spec = {"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 1, "batch_size": 1, **(federation or {})}
    scenario = {"federations": [spec], "threat": {"knows_labels": granted}, "evaluation": {"controls": False}}
    done = fedaudit.audit(
        scenario,
        attacks=attacks,
        **{"data": (IMAGES, TARGETS[task]), "model": net(task), "progress": False, **more},
    )
    return done.result


@pytest.mark.slow
@pytest.mark.parametrize("task", ["multi-label", "regression"])
@pytest.mark.parametrize("granted", [False, True])
def test_images_come_out_whether_targets_are_granted_or_sought(task: str, granted: bool) -> None:
    result = audited(task, [{"name": "invg", "iterations": 300, "total_variation": 1e-3}], granted=granted)
    (finding,) = result.findings
    (image,) = finding.images
    assert image.psnr > 18
    assert (image.true_label, image.label) == (None, None)
    assert finding.label_source == ("given" if granted else "optimised")
    assert result.federations[0].name == "f"


def test_masks_that_are_granted_give_the_image() -> None:
    result = audited("segmentation", [{"name": "dlg-adam", "iterations": 300}], granted=True)
    assert result.findings[0].images[0].psnr > 18


def soft_dice(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of the batch, as many write it for masks (n, 1, height, width)."""
    likely = outputs.sigmoid()
    return 1 - (2 * (likely * targets).sum() + 1) / (likely.sum() + targets.sum() + 1)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, nn.BCEWithLogitsLoss(), soft_dice])
@pytest.mark.parametrize("granted", [False, True])
def test_masks_of_one_logit_give_the_image(loss: Any, granted: bool) -> None:
    attack = {"name": "dlg-adam", "iterations": 300}
    (finding,) = audited("segmentation", [attack], granted=granted, model=one_logit(), loss=loss).findings
    if loss is soft_dice and not granted:
        assert finding.status == "not applicable"
        assert "threat.knows_labels=true" in (finding.reason or "")
        return
    assert finding.images[0].psnr > (15 if granted else 10)
    assert finding.label_source == ("given" if granted else "optimised")


@pytest.mark.parametrize("own", [soft_dice, lambda z, y: soft_dice(z.squeeze(1), y)])
def test_a_loss_of_one_logit_gets_masks_in_the_form_that_it_takes(own: Any) -> None:
    _, recording = seen_of("segmentation", {"examples": 6, "batch_size": 6}, model=one_logit(), loss=own)
    inputs, masks = recording.truth.inputs[0, 0], recording.truth.labels[0, 0]
    model = one_logit()
    images = recording.transcript.task_info.normalise(inputs)
    wanted = torch.autograd.grad(soft_dice(model(images), masks[:, None].float()), list(model.parameters()))
    for sent, oracle in zip(recording.transcript.rounds[0].updates[0].tensors.values(), wanted, strict=True):
        torch.testing.assert_close(sent, oracle)


def test_a_model_of_one_logit_is_said_by_the_loss_of_a_named_one() -> None:
    scenario = {"model": {"name": "unet", "loss": "bce-with-logits"}, "federations": [{"name": "f", "clients": 1}]}
    recording = fedaudit.simulate(
        scenario, data=(torch.rand(9, 1, 16, 16), torch.ones(9, 16, 16).long()), progress=False
    )
    assert recording.transcript.task_info.output_shape == (1, 16, 16)
    assert recording.history is not None
    with pytest.raises(fedaudit.BadInput, match=r"\(2, 1, 8, 8\)|one logit a pixel"):
        seen_of("segmentation", loss=nn.BCEWithLogitsLoss())


def test_ignored_pixels_of_a_simulation_count_nothing() -> None:
    masks = TARGETS["segmentation"].clone()
    masks[:, :, :3] = -100
    for model, loss in (
        (net("segmentation"), "cross-entropy"),
        (one_logit(), "bce-with-logits"),
        (one_logit(), "dice"),
    ):
        recording = fedaudit.simulate(
            {
                "federations": [{"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 4, "batch_size": 4}],
                "model": {"loss": loss},
            },
            data=(IMAGES, masks), model=model, progress=False,
        )  # fmt: skip
        seen, wanted = recording.truth.inputs[0, 0], recording.truth.labels[0, 0]
        outputs = model(recording.transcript.task_info.normalise(seen))[..., 3:]
        true = wanted[..., 3:]
        if loss == "cross-entropy":
            value = nn.functional.cross_entropy(outputs, true)
        elif loss == "dice":
            likely = outputs[:, 0].sigmoid().flatten(1)
            both, either = (likely * true.flatten(1)).sum(1), likely.sum(1) + true.flatten(1).sum(1)
            value = (1 - (2 * both + 1e-5) / (either + 1e-5)).mean()
        else:
            value = nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], true.float())
        oracle = torch.autograd.grad(value, list(model.parameters()))
        for sent, gradient_of_it in zip(
            recording.transcript.rounds[0].updates[0].tensors.values(), oracle, strict=True
        ):
            torch.testing.assert_close(sent, gradient_of_it)
    with pytest.raises(fedaudit.BadInput, match="ignored pixels are -100"):
        fedaudit.simulate({}, data=(IMAGES, masks.clamp(min=-1)), model=net("segmentation"), progress=False)


def seen_of(task: str, federation: dict[str, Any] | None = None, **more: Any) -> Any:
    spec = {"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 1, "batch_size": 1, **(federation or {})}
    recording = fedaudit.simulate(
        {"federations": [spec]},
        **{"data": (IMAGES, TARGETS[task]), "model": net(task), "progress": False, **more},
    )
    return fedaudit.observe(recording.transcript, fedaudit.load_scenario(None).threat).split()[0], recording


def test_labels_that_are_sought_are_the_true_ones() -> None:
    seen, recording = seen_of("multi-label")
    found: Any = make_attack("dlg-adam", {"iterations": 400})(seen, seed=0)
    assert found.labels.equal(recording.truth.labels[0, 0])


def test_what_cannot_be_sought_beside_images_is_refused() -> None:
    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.sigmoid() - targets).square().mean()

    own, _ = seen_of("multi-label", loss=squared)
    with pytest.raises(NotApplicable, match="targets that aren't whole"):
        make_attack("invg").check(own)
    epochs = {"algorithm": "fedavg", "examples": 4, "batch_size": 2, "local_epochs": 2}
    several, _ = seen_of("regression", epochs)
    with pytest.raises(NotApplicable, match="several epochs"):
        make_attack("invg").check(several)
    with pytest.raises(NotApplicable, match="known labels"):
        make_attack("idlg").check(seen_of("regression")[0])


def test_soft_targets_become_hard_ones() -> None:
    logits = torch.tensor([[50.0, -50.0, 50.0]])
    labels, segmentation = task_named("multi-label"), task_named("segmentation")
    torch.testing.assert_close(labels.soft(logits), torch.tensor([[1.0, 0.0, 1.0]]))
    assert labels.hard(torch.tensor([[0.2, -0.1]])).tolist() == [[1, 0]]
    assert task_named("regression").soft(logits) is logits
    masks = torch.randn(2, 3, 4, 4, generator=dice(4))
    assert segmentation.soft(masks).sum(dim=1).allclose(torch.ones(2, 4, 4))
    assert segmentation.hard(masks).equal(masks.argmax(dim=1))


def test_a_mask_as_probabilities_has_the_loss_of_the_mask() -> None:
    module, masks = net("segmentation"), TARGETS["segmentation"][:2]
    sure = nn.functional.one_hot(masks, 2).movedim(-1, 1).float()
    for name in ("cross-entropy", "dice", "dice-cross-entropy"):
        loss = loss_function(name)
        for one, other in zip(
            gradient(module, loss, (IMAGES[:2], masks)).values(),
            gradient(module, loss, (IMAGES[:2], sure)).values(),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
