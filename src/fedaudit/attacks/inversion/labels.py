"""Label inference: which labels a batch had, from the gradient of the last layer alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedaudit.errors import NotApplicable
from fedaudit.models import Layer
from fedaudit.registry import Registry

LabelInference = Callable[[Tensor, int], Tensor]

LABEL_INFERENCES: Registry[LabelInference] = Registry("label inference")


@LABEL_INFERENCES.register("idlg", "sign of the last layer's gradient rows; one example", paper="Zhao et al. 2020")
def idlg(gradient: Tensor, num_examples: int) -> Tensor:
    """Infer the label of a single example (iDLG, Zhao et al. 2020, Eq. 4).

    The gradient's row of class i is (p_i − y_i)·h: with three classes or more the true one is the only class whose
    row points against all others. The row with the least sum of inner products is taken, which needs no sign of the
    features h. With two classes the rows are opposite to each other, and the more negative one is taken: right where
    the features aren't negative on average (after a ReLU or a sigmoid).

    Args:
        gradient: (classes, features) of the last layer's weight.
        num_examples: must be 1.

    Returns:
        (1,) label.

    Raises:
        NotApplicable: there are several examples.
    """
    if num_examples != 1:
        raise NotApplicable(
            f"label inference 'idlg' works for one example, the update has {num_examples}; use label_inference=yin"
        )
    rows = gradient.double()
    if len(rows) == 2:
        return rows.sum(dim=1).argmin().view(1)
    products = rows @ rows.T
    return (products.sum(dim=1) - products.diagonal()).argmin().view(1)


@LABEL_INFERENCES.register(
    "yin", "most negative entries of the last layer's gradient; no label twice", paper="Yin et al. 2021"
)
def yin(gradient: Tensor, num_examples: int) -> Tensor:
    """Infer the labels of a batch without duplicates (GradInversion, Yin et al. 2021, Eq. 8).

    Takes the K classes whose gradient row has the most negative minimum over the features. Exact for K = 1 with
    features that aren't negative (after a ReLU or a sigmoid).

    Args:
        gradient: (classes, features) of the last layer's weight.
        num_examples: K.

    Returns:
        (K,) distinct labels, the surest first.

    Raises:
        NotApplicable: there are more examples than classes.
    """
    if num_examples > len(gradient):
        raise NotApplicable(
            f"label inference 'yin' finds each class at most once: {num_examples} examples, {len(gradient)} classes; "
            "grant the labels (threat.knows_labels=true) or lower batch_size or local_steps"
        )
    return gradient.amin(dim=1).argsort(stable=True)[:num_examples]


def last_layer(layers: Sequence[Layer], gradient: dict[str, Tensor], num_classes: int) -> Tensor:
    """Return the (classes, features) gradient of the classifier.

    Raises:
        NotApplicable: the model doesn't end in a fully connected layer with one row a class.
    """
    for layer in reversed(layers):
        for name in layer.parameters:
            if layer.kind == "linear" and name in gradient and gradient[name].ndim == 2:
                if len(gradient[name]) == num_classes:
                    return gradient[name]
                break
    raise NotApplicable(
        f"labels can't be inferred: the model has no fully connected layer with {num_classes} outputs at its end; "
        "grant the labels (threat.knows_labels=true)"
    )


def infer_labels(
    method: str, layers: Sequence[Layer], gradient: dict[str, Tensor], num_classes: int, num_examples: int
) -> tuple[Tensor, str]:
    """Return labels and the name of the inference; ``auto`` is ``idlg`` for one example and ``yin`` for more.

    Args:
        method: a registered name or ``auto``.
        layers: of the model, in forward order.
        gradient: by parameter name; for a FedAvg update −ΔW, whose signs are the gradient's.
        num_classes: of the model.
        num_examples: in the update.

    Raises:
        NotApplicable: the method can't do it here.
        BadInput: no such method.
    """
    name = ("idlg" if num_examples == 1 else "yin") if method == "auto" else method
    rows = last_layer(layers, gradient, num_classes)
    if not torch.any(rows):
        raise NotApplicable("labels can't be inferred: the last layer's gradient is zero")
    return LABEL_INFERENCES[name].value(rows, num_examples), name
