"""DCGAN's generator; trained generators: the file, fingerprints of their examples, and the mirror network."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import ceil, prod
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedaudit.models import Generator, GeneratorNetwork, GeneratorSpec
from fedaudit.utils import TENSORS, BadInput, MissingData, all_finite, check_file

_FORMAT = 1
_EXAMPLES = "examples"  # the fingerprints' name in the file
_SLOPE = 0.2


class DCGenerator(GeneratorNetwork):
    """DCGAN's generator (Radford et al. 2016): codes (n, latent) to pixels (n, C, H, W) in [0, 1].

    Transposed convolutions of stride 2, batch normalisation and ReLU. Departures: ``spec.width`` channels at half the
    image's size; a sigmoid at the end instead of tanh, whose range is another. Where the image's sides can't be halved
    often enough, larger images are made and cut.
    """

    def __init__(self, spec: GeneratorSpec) -> None:
        super().__init__()
        self.spec = spec
        channels, *sides = spec.input_shape
        halvings = max(1, spec.halvings)
        self.smallest = (spec.width << (halvings - 1), *(ceil(side / (1 << halvings)) for side in sides))
        self.start = nn.Linear(spec.latent, prod(self.smallest))
        layers: list[nn.Module] = [nn.BatchNorm2d(self.smallest[0]), nn.ReLU()]
        for i in reversed(range(1, halvings)):
            inputs, outputs = spec.width << i, spec.width << (i - 1)
            layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.grow = nn.Sequential(*layers, nn.ConvTranspose2d(spec.width, channels, 4, 2, 1), nn.Sigmoid())


def trunk(spec: GeneratorSpec, outputs: int) -> nn.Sequential:
    """Return the mirror image of a generator: pixels (n, C, H, W) to (n, outputs), by convolutions of stride 2."""
    channels, *sides = spec.input_shape
    layers: list[nn.Module] = [nn.Conv2d(channels, spec.width, 3, padding=1), nn.LeakyReLU(_SLOPE)]
    for i in range(spec.halvings):
        layers += [nn.Conv2d(spec.width << i, spec.width << (i + 1), 4, stride=2, padding=1), nn.LeakyReLU(_SLOPE)]
    pixels = prod(side >> spec.halvings for side in sides)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear((spec.width << spec.halvings) * pixels, outputs))


@dataclass(frozen=True, eq=False)
class TrainedGenerator:
    """A generator and where it comes from.

    Attributes:
        network: in evaluation mode.
        data: name of the data set.
        training: in words.
        examples: (n,) int64 sorted fingerprints of what it was trained on.
        computation: fingerprint of its training: plan, examples, code; None where the file is older than that.
    """

    network: Generator
    data: str
    training: str
    examples: Tensor
    computation: str | None = None

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        about = {
            "format": _FORMAT,
            "data": self.data,
            "training": self.training,
            "spec": asdict(self.network.spec),
            "computation": self.computation,
        }
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.network.state_dict().items()}
        draft = path.with_name(f"{path.name}.part")
        try:
            draft.write_bytes(save({**tensors, _EXAMPLES: self.examples}, metadata={"about": json.dumps(about)}))
            draft.replace(path)
        except (OSError, SafetensorError) as error:
            raise BadInput(f"can't write the generator to '{path}': {error}") from None

    @classmethod
    def load(cls, path: Path) -> TrainedGenerator:
        """Read what :meth:`save` wrote; MissingData without such a file, BadInput where it is something else."""
        if not path.is_file():
            raise MissingData(f"no generator at '{path}'")
        try:
            check_file(path, TENSORS)
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["about"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            if about["format"] != _FORMAT:
                raise ValueError(f"format {about['format']}, this version reads {_FORMAT}")
            spec = TypeAdapter(GeneratorSpec).validate_python(about["spec"])
            examples = tensors.pop(_EXAMPLES)
            if examples.dtype != torch.int64 or not all_finite(tensors.values()):
                raise ValueError("a value isn't finite, or the examples are no fingerprints")
            with torch.device("meta"):  # no weights are drawn that are replaced at once
                network = Generator(spec)
            network.load_state_dict(tensors, assign=True)
            computed = about.get("computation")
            return cls(network.eval(), str(about["data"]), str(about["training"]), examples, computed and str(computed))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError, ValidationError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise BadInput(f"'{path}' is truncated or not a generator ({reason}); train it again") from None
