"""Models: architectures by name, initialisation, BatchNorm mode, layers in forward order, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from fedaudit.modalities import ExampleKind, TokenInfo, example_kind
from fedaudit.models import bottleneck, convnet, densenet, recurrent, resnet, small, transformer, unet, vit  # noqa: F401  (they fill the registry)
from fedaudit.models.bottleneck import VariationalBottleneck, from_bottleneck_on, with_bottleneck
from fedaudit.models.checkpoint import load_checkpoint, read_state, save_checkpoint
from fedaudit.models.families import MODELS, ModelBuilder, inputs_of
from fedaudit.models.generator import Generator, GeneratorNetwork, GeneratorSpec
from fedaudit.models.initialise import BATCH_NORM, INITIALISATIONS, initialise
from fedaudit.models.layers import Layer, layer_groups
from fedaudit.models.of_transformers import (
    adapters_names,
    embedded_words,
    end_of,
    is_of_transformers,
    logits_of,
    padding_of,
)
from fedaudit.models.own import (
    keep_modes,
    keeps_evaluation_mode,
    of_one_tensor,
    own_copy,
    packing_of,
    packings_in,
    twice_differentiable,
    unwrapped,
    without_opacus,
)
from fedaudit.models.vertical import Features, Top, VerticalModel, halves, parts_of, server_network, share_shape
from fedaudit.models.vit import AdaptedBlock, ViT
from fedaudit.utils.errors import BadInput
from fedaudit.utils.validation import check_memory

__all__ = [
    "BATCH_NORM",
    "INITIALISATIONS",
    "MODELS",
    "AdaptedBlock",
    "Generator",
    "GeneratorNetwork",
    "GeneratorSpec",
    "Layer",
    "ModelBuilder",
    "VariationalBottleneck",
    "VerticalModel",
    "ViT",
    "adapters_names",
    "build_model",
    "build_split",
    "build_vertical",
    "embedded_words",
    "end_of",
    "from_bottleneck_on",
    "has_batch_norm",
    "initialise",
    "is_of_transformers",
    "keep_modes",
    "layer_groups",
    "load_checkpoint",
    "logits_of",
    "of_one_tensor",
    "own_copy",
    "packing_of",
    "packings_in",
    "padding_of",
    "read_state",
    "save_checkpoint",
    "set_training_mode",
    "twice_differentiable",
    "unwrapped",
    "with_bottleneck",
    "without_opacus",
]


def build_model(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    width: int | None = None,
    tokens: TokenInfo | None = None,
) -> nn.Module:
    """Return the model ``name`` in training mode, on the CPU, in float32, with a fixed initial state.

    The state is the scheme ``default`` drawn with seed 0 (never from PyTorch's global generator); call
    :func:`initialise` for another scheme or seed.

    Args:
        name: one of ``MODELS.names()``.
        input_shape: of one example, without the batch: (channels, height, width), (features,), or what its kind says.
        outputs: number of classes, or of real-valued targets.
        width: channels of the first stage, or hidden units; None is the model's own.
        tokens: vocabulary and task of text; models of other examples take none.

    Raises:
        BadInput: an unknown name; an input that the model cannot take; an example too small for it; outputs or width
            below 1, or a width for a model that has none.
    """
    entry = MODELS[name]
    shape = tuple(input_shape)
    if not shape or any(n < 1 for n in shape):
        raise BadInput(f"model '{name}': input shape {shape} must be one or more whole numbers above 0")
    if outputs < 1:
        raise BadInput(f"model '{name}': outputs is {outputs}; it must be 1 or more")
    if width is not None and entry.info["width"] is None:
        raise BadInput(f"model '{name}' has no width; leave it out (it is {width})")
    if width is not None and width < 1:
        raise BadInput(f"model '{name}': width is {width}; it must be 1 or more")
    if kinds := [example_kind(kind) for kind in inputs_of(entry)]:
        _check_shape(name, shape, kinds, entry.info.get("min_size", 1))
    discrete = any(kind.discrete for kind in kinds)
    if discrete != (tokens is not None):
        suited = ", ".join(e.name for e in MODELS if any(example_kind(kind).discrete for kind in inputs_of(e)))
        given = "takes tokens, and these examples aren't" if discrete else "takes real values, and tokens are none"
        raise BadInput(f"model '{name}' {given}; models of tokens: {suited}")
    width = entry.info["width"] if width is None else width
    with torch.device("meta"):
        model = entry.value(shape, outputs, width, tokens) if discrete else entry.value(shape, outputs, width)
    check_memory(4 * sum(p.numel() for p in model.parameters()), f"model '{name}'")
    model.to_empty(device="cpu")
    initialise(model, "default", torch.Generator().manual_seed(0))
    return model.train()


def build_vertical(
    name: str,
    *,
    parties: int,
    features: Features,
    top: Top,
    embedding: int,
    input_shape: tuple[int, ...],
    outputs: int,
    width: int | None = None,
) -> VerticalModel:
    """Return the model of a vertical federation, every party's network the model ``name`` on its own features.

    Args:
        name: one of ``MODELS.names()``.
        parties: how many.
        features: which of them each party holds.
        top: the server's network.
        embedding: numbers that a party's network puts out.
        input_shape: of a whole example.
        outputs: of the server.
        width: of the parties' networks.

    Raises:
        BadInput: the features can't be split so, or a party's network can't be made.
    """
    if top == "sum" and embedding != outputs:
        raise BadInput(
            f"vertical.top 'sum' adds embeddings up to the model's {outputs} outputs, and an embedding has {embedding} "
            "numbers; leave vertical.embedding out"
        )
    parts = parts_of(features, parties, input_shape)
    shapes = [share_shape(part, input_shape) for part in parts]
    bodies = [build_model(name, input_shape=shape, outputs=embedding, width=width) for shape in shapes]
    with torch.device("meta"):
        server = server_network(top, parties * embedding, outputs)
    if server is not None:
        server.to_empty(device="cpu")
        initialise(server, "default", torch.Generator().manual_seed(0))
    return VerticalModel(bodies, server, parts).train()


def build_split(
    name: str, *, cut: str | int, input_shape: tuple[int, ...], outputs: int, width: int | None = None
) -> VerticalModel:
    """Return the model of split learning: the model ``name``, whose layers up to ``cut`` are the one party's.

    Raises:
        BadInput: the model can't be made, or not be cut there.
    """
    whole = build_model(name, input_shape=input_shape, outputs=outputs, width=width)
    client, server = halves(whole, cut)
    return VerticalModel([client], server, [(slice(None),)]).train()


def _check_shape(name: str, shape: tuple[int, ...], kinds: Sequence[ExampleKind], min_size: int) -> None:
    fitting = next((kind for kind in kinds if kind.fits(shape)), None)
    if fitting is None:
        flat = ", ".join(entry.name for entry in MODELS if not inputs_of(entry))
        wanted = " or ".join(f"{kind.plural} ({', '.join(kind.axes)})" for kind in kinds)
        raise BadInput(
            f"model '{name}' takes {wanted}, but an example has the shape {shape}; use a model for any input: {flat}"
        )
    if min(shape[1:], default=min_size) < min_size:
        least, own = ("x".join(str(n) for n in size) for size in ([min_size] * len(shape[1:]), shape[1:]))
        raise BadInput(
            f"model '{name}' takes {fitting.plural} of at least {least} {fitting.element}s, not {own}; "
            f"use larger {fitting.plural} or another model"
        )


def has_batch_norm(model: nn.Module) -> bool:
    """Whether any layer of ``model`` normalises over the batch."""
    return any(isinstance(module, BATCH_NORM) for module in model.modules())


def set_training_mode(model: nn.Module, batch_norm: Literal["eval", "train"], *, dropout: bool = True) -> None:
    """Put ``model`` in the mode of a client's training.

    Args:
        model: changed in place.
        batch_norm: with ``eval`` its BatchNorm layers keep to their running statistics; with ``train`` those alone of
            which :func:`keep_modes` said so.
        dropout: False puts everything but BatchNorm in evaluation mode, so that functional dropout, attention and
            recurrent layers draw no masks either.

    Raises:
        BadInput: another value of ``batch_norm``.
    """
    if batch_norm not in ("eval", "train"):
        raise BadInput(f"batch_norm is '{batch_norm}'; it must be 'eval' or 'train'")
    model.train(dropout)
    for module in model.modules():
        if isinstance(module, BATCH_NORM):
            module.train(batch_norm == "train" and not keeps_evaluation_mode(module))
