"""The command ``fedaudit train-generator``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli import DataDir, check_data_dir, check_folder
from fedaudit.utils import BadInput


def train_generator(
    out: Annotated[Path, typer.Option(help="File for the generator, .safetensors; samples go beside it, as .png.")],
    data: Annotated[str, typer.Option(help="Public data set; its train split is used.")] = "photos",
    data_dir: DataDir = None,
    image_size: Annotated[
        int | None, typer.Option(help="Side of an image in pixels; default: the data set's own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Load at most this many examples per split.")] = None,
    objective: Annotated[str, typer.Option(help="How to train: autoencoder or gan.")] = "autoencoder",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimiser.")] = 3000,
    batch_size: Annotated[int, typer.Option(min=2, help="Examples per step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Adam's learning rate.")] = 1e-3,
    latent: Annotated[int, typer.Option(help="Size of a latent code.")] = 128,
    width: Annotated[int, typer.Option(help="Channels at full image size.")] = 16,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the training.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Train anew, and write over what the file holds.")] = False,
) -> None:
    """Train a generator of images on public data, for attacks that search among plausible images (gias)."""
    check_data_dir(data_dir)
    if not out.name:
        raise BadInput("--out is empty; give a file, for example generator.safetensors")
    check_folder(out.parent)
    from fedaudit.data import load_dataset
    from fedaudit.utils import live_display
    from fedaudit_catalogue.train_generator import TrainingPlan, save_samples
    from fedaudit_catalogue.train_generator import train_generator as train

    plan = TrainingPlan(objective, steps, batch_size, learning_rate, seed)
    dataset = load_dataset(data, image_size=image_size, data_dir=data_dir, limit=limit)
    with live_display() as display:
        trained = train(dataset, out, latent=latent, width=width, plan=plan, again=again, display=display)
    save_samples(trained, out.with_suffix(".png"))
    print(f"generator: {out} ({trained.data}; {trained.training})")
    print(f"64 of its images: {out.with_suffix('.png')}")
