"""What a scenario says of a vertical federation alone."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedaudit.models.vertical import Features, Top
from fedaudit.utils.validation import Count, Spec, Whole


class VerticalSpec(Spec):
    """How features, model and messages of a vertical federation are split over its parties."""

    features: Features = Field(
        default="strips",
        description="which of them a party holds: strips, columns of a table or an image that stand side by side; "
        "quadrants, a quarter of an image each (4 parties)",
    )
    protocol: Literal["split", "aggregated-gradients"] = Field(
        default="split",
        description="split: embeddings go up, their gradients come down; aggregated-gradients: the server reads the "
        "model, and the gradient of a whole batch for every parameter, as CAFE assumes",
    )
    embedding: Count | None = Field(
        default=None, description="numbers that a party's network puts out for an example; the model's outputs if null"
    )
    top: Top = Field(
        default="linear",
        description="the server's network on all embeddings: one linear layer; mlp, a hidden one more; sum, none: the "
        "outputs are the embeddings' sum",
    )
    observer: Whole = Field(default=0, description="which party looks, where the adversary is a client")
