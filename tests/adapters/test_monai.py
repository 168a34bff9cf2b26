"""MONAI apps as they are: dictionaries of MetaTensors, Dice, U-Nets, recorded and replayed to the same bits."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.adapters.flower_cases import write_app

pytest.importorskip("monai")
pytestmark = pytest.mark.peers

from monai import losses as of_monai  # noqa: E402
from monai.data import DataLoader, Dataset  # noqa: E402
from monai.networks.nets import DynUNet, UNet  # noqa: E402
from monai.transforms import EnsureTyped  # noqa: E402

import fedaudit  # noqa: E402
from fedaudit.utils.errors import BadInput  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "monai"
QUICK: Any = {"controls": False, "progress": False}
TWO_STEPS: list[Any] = [{"name": "dlg-adam", "iterations": 2}]


def errors(recording: Path) -> list[float]:
    return [update["error"] for update in json.loads((recording / "replay.json").read_text())["updates"]]


def test_the_flower_example_is_recorded_unchanged_and_replayed_to_the_same_bits(tmp_path):
    pytest.importorskip("flwr")
    from fedaudit.adapters.flower import audit_flower
    from fedaudit.adapters.flower.in_process import loaded

    finished = audit_flower(EXAMPLE, nodes=2, attacks=TWO_STEPS, attacked=None, out=tmp_path, **QUICK)
    assert errors(tmp_path / "recording") == [0.0] * 4
    result = finished.result
    recording = result.federations[0].recording
    assert recording is not None
    assert recording.facts == "verified"
    (found, *_) = result.findings
    assert found.status == "done"
    assert "volume" in (tmp_path / "report.html").read_text()
    with loaded(EXAMPLE):
        task = sys.modules["monai_app.task"]
        transcript = fedaudit.Transcript.load(tmp_path / "recording", task.Net())
        _, tested = task.load_data(0, 2)
    info = transcript.task_info
    assert (info.loss, info.task, info.kind, info.num_targets) == ("dice-cross-entropy", "segmentation", "volume", 2)
    assert info.input_shape == (1, 16, 16, 16)
    kept = load_file(tmp_path / "recording/truth/candidates.safetensors")["seen/candidates/inputs"]
    own = torch.cat([batch["image"].as_tensor() for batch in tested])
    assert {x.numpy().tobytes() for x in own} <= {x.numpy().tobytes() for x in kept}


CLASSES = """
import numpy as np
import torch
from monai.data import DataLoader, Dataset, create_test_image_2d, list_data_collate
from monai.networks.nets import DenseNet
from monai.transforms import Compose, EnsureChannelFirstd, RandFlipd, RandRotated, ScaleIntensityd


def net():
    torch.manual_seed(0)
    return DenseNet(2, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2))


def data(me):
    random, scans = np.random.RandomState(me), []
    for kind in (0, 1, 2, 0):
        image, _ = create_test_image_2d(32, 32, num_objs=1 + 3 * kind, rad_max=6, rad_min=3, random_state=random)
        scans.append({"image": image, "label": kind})
    turned = RandRotated("image", range_x=np.pi / 12, prob=0.5, keep_size=True)
    first = [EnsureChannelFirstd("image", channel_dim="no_channel"), ScaleIntensityd("image")]
    made = Compose([*first, turned, RandFlipd("image", spatial_axis=0, prob=0.5)])
    return scans, DataLoader(Dataset(scans, made), batch_size=2, shuffle=True, collate_fn=list_data_collate)


def fit(model, x, loader, rate):
    optimizer, criterion = torch.optim.Adam(model.parameters(), 1e-3), torch.nn.CrossEntropyLoss()
    model.train()
    for batch in loader:
        images, labels = batch["image"].to("cpu"), batch["label"].to("cpu")
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
"""


def test_a_flower_app_that_classifies_images_by_adam(tmp_path):
    pytest.importorskip("flwr")
    from fedaudit.adapters.flower import audit_flower

    app = write_app(tmp_path / "app", task=CLASSES)
    finished = audit_flower(app, nodes=2, rounds=1, attacks=["labels"], out=tmp_path / "out", **QUICK)
    assert errors(tmp_path / "out/recording") == pytest.approx([0, 0], abs=1e-6)
    (found, *_) = finished.result.findings
    assert found.status == "done"
    assert finished.result.data.input_shape == [1, 32, 32]
    assert finished.result.data.classes == 3


# --- losses -------------------------------------------------------------------------------------------------------


def unet(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = UNet(2, 1, outputs, channels=(4, 8), strides=(2,))
    return made


def recorded(folder: Path, net: nn.Module, loss: Callable[..., Tensor], classes: int, channels: int = 1) -> Any:
    """Record two steps on MONAI's batches, whose masks have so many classes and channels."""
    torch.manual_seed(1)
    keys = ["image", "label"]
    masks = torch.randint(classes, (4, channels, 16, 16)).float()
    scans = [{"image": torch.rand(1, 16, 16), "label": mask} for mask in masks]
    loader = DataLoader(Dataset(scans, EnsureTyped(keys)), batch_size=2)
    recorder, local = fedaudit.Recorder(folder), copy.deepcopy(net)
    with recorder.round(net.state_dict()):
        with recorder.capture() as seen:
            optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
            for batch in loader:
                optimiser.zero_grad()
                loss(local(batch["image"]), batch["label"]).backward()
                optimiser.step()
        recorder.update("a", local.state_dict(), seen, num_examples=4)
    recorder.close()
    return seen


def audited(folder: Path, net: nn.Module, loss: Any = None) -> Any:
    return fedaudit.audit_transcript(folder, TWO_STEPS, module=net, loss=loss, **QUICK).result


ONE_HOT: Any = {"to_onehot_y": True, "softmax": True}
LOSSES: dict[str, tuple[nn.Module, str]] = {
    "Dice": (of_monai.DiceLoss(**ONE_HOT), "dice"),
    "Dice and cross-entropy": (of_monai.DiceCELoss(**ONE_HOT), "dice-cross-entropy"),
    "Tversky, which is Dice": (of_monai.TverskyLoss(**ONE_HOT), "dice"),
    "without background": (of_monai.DiceLoss(**ONE_HOT, include_background=False), "custom"),
    "squared, over the batch": (of_monai.DiceCELoss(**ONE_HOT, squared_pred=True, batch=True), "custom"),
    "weighed": (of_monai.DiceCELoss(**ONE_HOT, weight=torch.tensor([0.1, 1.0, 1.0])), "custom"),
    "focal": (of_monai.DiceFocalLoss(**ONE_HOT), "custom"),
    "generalised": (of_monai.GeneralizedDiceLoss(**ONE_HOT), "custom"),
}


@pytest.mark.parametrize("which", LOSSES)
def test_a_loss_of_monai_is_recorded_as_what_it_computes(which, tmp_path):
    loss, name = LOSSES[which]
    net = unet(3)
    seen = recorded(tmp_path / "r", net, loss, 3)
    assert seen.loss == name
    assert seen.criterion is loss
    assert all(type(one) is Tensor for one in (*seen.inputs, *seen.targets))
    result = audited(tmp_path / "r", net, loss)
    assert result.federations[0].replay_error == 0
    assert (result.findings[0].status == "done") == (name != "custom")  # masks are sought beside the images
    if name == "custom":
        assert "targets that aren't whole" in result.findings[0].reason
        with pytest.raises(BadInput, match="give it: loss="):
            audited(tmp_path / "r", net)
    else:  # without the user's own it is the same but for the last bits
        shutil.copytree(tmp_path / "r", tmp_path / "s", ignore=shutil.ignore_patterns("replay.json"))
        result = audited(tmp_path / "s", net)
        assert result.federations[0].replay_error == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("loss", [of_monai.DiceLoss(sigmoid=True), nn.BCEWithLogitsLoss()])
def test_masks_of_one_output_by_a_sigmoid_are_repeated(loss, tmp_path):
    net = unet(1)
    recorded(tmp_path / "r", net, loss, 2, 1)
    federation = audited(tmp_path / "r", net, loss).federations[0]
    assert federation.replay_error == pytest.approx(0, abs=1e-5)
    assert federation.recording.facts == "verified"


@pytest.mark.parametrize("loss", [of_monai.DiceLoss(sigmoid=True), of_monai.DiceCELoss(softmax=True)])
def test_masks_of_several_channels_are_refused_with_what_to_train(loss, tmp_path):
    net = unet(3)
    recorded(tmp_path / "r", net, loss, 2, 3)
    with pytest.raises(BadInput, match=r"masks have 3 channels.*DiceCELoss\(to_onehot_y=True") as told:
        audited(tmp_path / "r", net, loss)
    assert "\n" not in str(told.value)


def test_of_several_outputs_of_a_pixel_the_loss_is_asked_for(tmp_path):
    torch.manual_seed(0)
    sizes: Any = {"kernel_size": (3,) * 4, "strides": (1, 2, 2, 2), "upsample_kernel_size": (2,) * 3}
    net = DynUNet(2, 1, 2, filters=(4, 8, 8, 8), deep_supervision=True, deep_supr_num=1, **sizes)
    loss = of_monai.DeepSupervisionLoss(of_monai.DiceCELoss(**ONE_HOT))
    recorded(tmp_path / "r", net, lambda out, masks: loss(list(torch.unbind(out, 1)), masks), 2)
    with pytest.raises(BadInput, match="give it: loss="):
        audited(tmp_path / "r", net)
