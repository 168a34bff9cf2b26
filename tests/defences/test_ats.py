"""ATS: transformations against Pillow, the two scores against closed forms, and the search."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit.defences import CLIENT_DEFENCES, OwnExamples
from fedaudit.defences.ats import ATS, accuracy_score, privacy_score, random_policy
from fedaudit.task.info import TaskInfo
from fedaudit.task.transforms import TRANSFORMS, parsed, transformed
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import make
from tests.models.model_cases import generator as rng


def info(shape: tuple[int, ...] = (3, 12, 12)) -> TaskInfo:
    channels = shape[0]
    return TaskInfo("lenet", None, "eval", "cross-entropy", "image", shape, 4, (0.4,) * channels, (0.3,) * channels)


def picture() -> tuple[Tensor, Image.Image]:
    smooth = torch.nn.functional.interpolate(torch.rand(1, 3, 4, 4, generator=rng()), (12, 12), mode="bicubic")
    whole = (255 * smooth.clamp(0, 1)).round().to(torch.uint8)
    return whole / 255, Image.fromarray(whole[0].permute(1, 2, 0).numpy())


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None] / 255


@pytest.mark.parametrize("m", [0, 4, 9])
@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_each_is_pillow_s(name: str, m: int) -> None:
    """But for rounding to 8 bits, and for where a bilinear movement meets the border."""
    x, image = picture()
    found = TRANSFORMS[name](x, m / 9)
    part, grey = m / 9, (128, 128, 128)
    angle = math.radians(30 * part)
    moves = {
        "shear-x": (1, 0.3 * part, -0.3 * part * 6, 0, 1, 0),  # Pillow's are about the corner, ours about the middle
        "shear-y": (1, 0, 0, 0.3 * part, 1, -0.3 * part * 6),
        "translate-x": (1, 0, 150 / 331 * part * 12, 0, 1, 0),
        "translate-y": (1, 0, 0, 0, 1, 150 / 331 * part * 12),
        "rotate": (
            math.cos(angle), -math.sin(angle), 6 - 6 * math.cos(angle) + 6 * math.sin(angle),
            math.sin(angle), math.cos(angle), 6 - 6 * math.sin(angle) - 6 * math.cos(angle),
        ),
    }  # fmt: skip
    enhancers = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "color": ImageEnhance.Color,
        "sharpness": ImageEnhance.Sharpness,
    }
    if name in moves:
        expected = pixels(
            image.transform((12, 12), Image.Transform.AFFINE, moves[name], Image.Resampling.BILINEAR, fillcolor=grey)
        )
        near = (found - expected).abs().amax(dim=1) < 0.03
        assert near.float().mean() > 0.75
        kept = slice(1, 5) if name.startswith("translate") else slice(4, 8)  # far from what comes in
        assert near[0, kept, kept].all()
        return
    if name in enhancers:
        expected = pixels(enhancers[name](image).enhance(1 + 0.9 * part))
    elif name == "solarize":
        expected = pixels(ImageOps.solarize(image, math.ceil(255 * (1 - part) - 1e-9)))
    else:
        expected = pixels({"invert": ImageOps.invert, "autocontrast": ImageOps.autocontrast}[name](image))
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


def test_policies_go_one_after_the_other_in_pixels() -> None:
    task = info()
    x = torch.rand(2, 3, 12, 12, generator=rng())
    found = transformed("invert:0, translate-x:9", task.normalise(x), task)
    by_hand = TRANSFORMS["translate-x"](1 - x, 1.0)
    torch.testing.assert_close(task.denormalise(found), by_hand)
    leaf = task.normalise(x).requires_grad_()
    assert torch.autograd.grad(transformed("rotate:5, sharpness:5", leaf, task).sum(), leaf)[0].any()
    for policy, words in [("invert", "magnitude"), ("rotate:10", "0 to 9"), ("equalise:2", "equalise")]:
        with pytest.raises(BadInput, match=words):
            parsed(policy)
        with pytest.raises(BadInput, match=words):
            make(CLIENT_DEFENCES, "ats", {"policies": [policy]})
    table = TaskInfo("mlp", None, "eval", "cross-entropy", "table", (5,), 4, (0.0,), (1.0,))
    with pytest.raises(BadInput, match="are for images"):
        transformed("invert:0", torch.zeros(1, 5), table)


def test_the_privacy_score_of_a_linear_model_is_known() -> None:
    """Of (w·x − y)²/2 with one output the gradient is (w·x − y)·x: the cosine is ± that of the images."""
    model = nn.Linear(6, 1, bias=False)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs[:, 0] - targets) ** 2).mean() / 2

    x, start, y = torch.randn(2, 6, generator=rng(1)), torch.randn(2, 6, generator=rng(2)), torch.tensor([0.3, -1.0])
    expected = []
    for image, noise, target in zip(x.double(), start.double(), y.double(), strict=True):
        w = model.weight[0].detach().double()
        for j in range(20):
            way = ((20 - j) * noise + j * image) / 20
            sign = ((w @ way - target) * (w @ image - target)).sign()
            expected.append(float(sign * (way @ image) / (way.norm() * image.norm())))
    assert privacy_score(model, loss, x, y, start) == pytest.approx(sum(expected) / 40, abs=1e-5)


def test_the_accuracy_score_is_numpy_s() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        one, other = nn.Linear(12, 9).double(), nn.Linear(9, 3).double()
    x = torch.randn(5, 3, 2, 2, generator=rng(), dtype=torch.float64)
    model = nn.Sequential(nn.Flatten(), one, nn.ReLU(), other)
    active = ((x.flatten(1) @ one.weight.T + one.bias) > 0).double()
    jacobian = (active * other.weight.sum(0)) @ one.weight
    values = np.linalg.eigvalsh(np.corrcoef(jacobian.detach().numpy()))
    expected = -np.sum(np.log(values + 1e-5) + 1 / (values + 1e-5))
    assert accuracy_score(model, x) == pytest.approx(expected, rel=1e-4)
    alike = x[:1].repeat(5, 1, 1, 1)
    assert accuracy_score(model, alike) < accuracy_score(model, x) - 1e4  # images that nobody tells apart


def test_the_search_takes_the_private_half_of_those_that_teach() -> None:
    task = info()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(432, 12), nn.Sigmoid(), nn.Linear(12, 4))
    x, y = task.normalise(torch.rand(6, 3, 12, 12, generator=rng())), torch.tensor([0, 1, 2, 3, 0, 1])
    own = OwnExamples(model, cross_entropy, [(x[:4], y[:4]), (x[4:], y[4:])])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    client_defence = make(CLIENT_DEFENCES, "ats", {"search": 6, "images": 5})
    assert isinstance(client_defence, ATS)
    batches = client_defence.augment(own, task, rng(4))
    draws, scores = rng(4), []
    for policy in [random_policy(draws) for _ in range(6)]:
        seen = transformed(policy, x[:5], task)
        noise = task.normalise(torch.rand(seen.shape, generator=draws))
        scores.append((accuracy_score(model, seen), privacy_score(model, cross_entropy, seen, y[:5], noise), policy))
    half = sorted(scores, reverse=True)[:3]
    expected = [policy for _, _, policy in sorted(half, key=lambda one: one[1])[:2]]
    assert client_defence.found == expected
    assert client_defence.drawn in expected
    for (seen, targets), (inputs, labels) in zip(batches, own.batches, strict=True):
        assert seen.equal(transformed(client_defence.drawn, inputs, task))
        assert targets.equal(labels)
    assert all(model.state_dict()[name].equal(value) for name, value in before.items())
    again = make(CLIENT_DEFENCES, "ats", {"search": 6, "images": 5})
    again.load_state_dict(client_defence.state_dict())
    assert isinstance(again, ATS)
    assert again.found == expected
