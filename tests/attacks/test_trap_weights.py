"""A server that draws the first layer so that few examples activate a neuron: who is alone in one comes out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.simulation.simulator import Recording
from fedaudit.utils.errors import NotApplicable
from tests.attacks.server_cases import SERVERS, best_psnr, examples
from tests.build import recorded, seen_in

scenario = SERVERS["trap-weights"]


def first(recording: Recording) -> tuple[Tensor, Tensor]:
    weights = recording.transcript.rounds[0].weights
    name = next(n for n, tensor in weights.items() if tensor.ndim == 2)
    return weights[name].double(), weights[name.replace("weight", "bias")].double()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "threat"),
    [({}, {}), ({"algorithm": "fedavg", "local_steps": 1}, {}), ({"clients": 4, "batch_size": 4}, {"sees": "sum"})],
)
def test_every_image_that_is_alone_in_a_neuron_comes_out(spec, threat):
    made = scenario(spec, threat=threat)
    recording = recorded(made)
    inputs, labels = examples(recording)
    weight, bias = first(recording)
    active = recording.transcript.task_info.normalise(inputs).flatten(1).double() @ weight.T + bias > 0
    alone = active[:, active.sum(dim=0) == 1].any(dim=1)
    assert alone.sum() >= 6
    (seen,) = seen_in(made, recording)
    found = make_attack("trap-weights")(seen, generator=torch.Generator())
    assert isinstance(found, ImageFinding)
    assert len(found.images) == len(inputs)
    psnr = best_psnr(inputs, found.images)
    least = 1.0 if made.federations[0].algorithm == "fedsgd" else 0.9  # differences of weights are rounded
    assert (psnr[alone] > 40).float().mean() >= least, psnr[alone]
    if not spec:
        nearest = torch.cdist(inputs.flatten(1), found.images.flatten(1)).argmin(dim=1)
        assert (found.labels[nearest] == labels)[alone].float().mean() > 0.9


def test_half_of_the_weights_are_negative_and_the_others_smaller():
    recording = recorded(scenario({"server": {"name": "trap-weights", "scale": 0.5, "spread": 2.0}}))
    weight, bias = first(recording)
    std = torch.tensor(recording.transcript.task_info.std).double().repeat_interleave(weight.shape[1] // 3)
    mean = torch.tensor(recording.transcript.task_info.mean).double().repeat_interleave(weight.shape[1] // 3)
    of_pixels = weight / std  # what a pixel from 0 to 1 is multiplied by
    assert ((of_pixels < 0).sum(dim=1) == weight.shape[1] // 2).all()
    normal = 2.0 * (2 / torch.pi) ** 0.5  # mean of |N(0, 2²)|
    assert -of_pixels[of_pixels < 0].mean() == pytest.approx(normal, rel=0.01)
    assert of_pixels[of_pixels > 0].mean() == pytest.approx(0.5 * normal, rel=0.01)
    black = -mean / std
    assert torch.allclose(weight @ black + bias, torch.zeros_like(bias), atol=1e-3 * float(weight.abs().sum(1).max()))


def test_an_update_without_a_lone_example_is_refused():
    made = scenario({"server": {"name": "trap-weights", "scale": 0.0}})  # nothing is active, or next to nothing
    (seen,) = seen_in(made, recorded(made))
    with pytest.raises(NotApplicable, match="zero throughout"):
        make_attack("trap-weights")(seen, generator=torch.Generator())
