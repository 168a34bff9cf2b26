"""Optimisers of torch, read: kind, settings, parameter groups."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedaudit.capture.gradients import rounded
from fedaudit.task.training import Optimiser, ParameterGroup

# AdamW first: newer torch derives it from Adam.
_KINDS: tuple[tuple[type[Optimizer], Optimiser], ...] = (
    (torch.optim.AdamW, "adamw"),
    (torch.optim.Adam, "adam"),
    (torch.optim.SGD, "sgd"),
)
_HOW = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


@dataclass(frozen=True)
class Group:
    """One parameter group as it was at a step: its parameters (by id) and settings other than the rate."""

    parameters: tuple[int, ...]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How an optimiser was set at its first step."""

    kind: Optimiser
    groups: tuple[Group, ...]


def read_settings(optimiser: Optimizer) -> Settings:
    """Return the optimiser's kind and groups."""
    kind: Optimiser = "other"
    for base, name in _KINDS:
        # a subclass with a step of its own is another optimiser
        if isinstance(optimiser, base) and getattr(type(optimiser), "step", None) is base.step:
            kind = name
            break
    groups = [
        Group(tuple(map(id, g["params"])), {k: _plain(v) for k, v in g.items() if k not in _HOW})
        for g in optimiser.param_groups
    ]
    if kind == "adam" and all(g.get("decoupled_weight_decay") for g in optimiser.param_groups):
        kind = "adamw"
    if any(g.get("maximize") for g in optimiser.param_groups):
        kind = "other"
    return Settings(kind, tuple(groups))


def joined(several: Collection[Settings]) -> Settings | None:
    """Return optimisers of one kind that step together as one; None: there are none."""
    groups = tuple(group for settings in several for group in settings.groups)
    return Settings(next(iter(several)).kind, groups) if several else None


def rates(optimiser: Optimizer) -> tuple[float, ...]:
    """Return each group's learning rate."""
    return tuple(float(g.get("lr", 0.0)) for g in optimiser.param_groups)


def has_state(optimiser: Optimizer, parameters: set[int]) -> bool:
    """Whether the optimiser holds momentum or moments of any of these parameters (by id)."""
    return any(
        id(p) in parameters and any(v is not None for v in state.values()) for p, state in optimiser.state.items()
    )


def step_by_hand(
    before: dict[str, Tensor], now: dict[str, nn.Parameter], gradients: list[Tensor | None]
) -> tuple[Settings, float] | None:
    """Return what step of SGD a change of weights is, and its rate; of kind ``other`` where it is another; None: none.

    The parameters before are on the CPU; ``gradients``, one a parameter, made the step.
    """
    changes = {name: p.detach().cpu().double() - before[name].double() for name, p in now.items() if name in before}
    moved = {name: p for name, p in now.items() if name in changes and bool(changes[name].any())}
    if not moved:
        return None
    known = dict(zip(now, gradients, strict=True))
    change = torch.cat([changes[name].flatten() for name in moved])
    slopes = [torch.zeros_like(changes[name]) if (g := known[name]) is None else g.cpu().double() for name in moved]
    slope = torch.cat([g.flatten() for g in slopes])
    rate = -float(change @ slope) / max(float(slope @ slope), 1e-300)
    rounding = (
        2 * torch.finfo(next(iter(moved.values())).dtype).eps * sum(float(p.detach().norm()) for p in moved.values())
    )
    plain = rate > 0 and float((change + rate * slope).norm()) <= 1e-4 * float(change.norm()) + rounding
    group = Group(tuple(map(id, moved.values())), {"momentum": 0.0, "nesterov": False, "dampening": 0.0})
    return Settings("sgd" if plain else "other", (group,)), rounded(rate) if plain else abs(rate) or 1.0


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step is given a function that makes the passes (``args`` begins with the optimiser)."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None) is not None


def configured(
    settings: Settings, steps: list[tuple[float, ...]], named: dict[str, nn.Parameter], frozen: set[str]
) -> tuple[dict[str, Any], bool]:
    """Return a training's optimiser settings, and whether they tell all; ``steps``: each step's rates, one a group."""
    names = {id(p): name for name, p in named.items()}
    held = [tuple(names[i] for i in g.parameters if i in names and names[i] not in frozen) for g in settings.groups]
    used = [i for i, own in enumerate(held) if own]
    # the first group that is trained at all gives the rates
    first = next((i for i in used if any(step[i] > 0 for step in steps)), used[0] if used else 0)
    trained = next((step for step in steps if step[first] > 0), steps[0])
    reference = settings.groups[first].settings
    ratio = {i: trained[i] / trained[first] if trained[first] > 0 else 0.0 for i in used}
    whole = all(abs(step[i] - ratio[i] * step[first]) <= 1e-9 * max(step[i], 1e-30) for step in steps for i in used)
    groups = []
    for i in used:
        own = settings.groups[i].settings
        whole &= all(own.get(k) == v for k, v in reference.items() if k not in ("momentum", "weight_decay"))
        listed = ParameterGroup(
            held[i], ratio[i], float(own.get("momentum", 0.0) or 0.0), float(own.get("weight_decay", 0.0) or 0.0)
        )
        alike = ("momentum", "weight_decay")
        if ratio[i] != 1 or any(own.get(k) != reference.get(k) for k in alike):
            groups.append(listed)
    if rest := tuple(name for name in named if not any(name in own for own in held)):
        groups.append(ParameterGroup(rest, 0.0))
    sequence = tuple(step[first] for step in steps)
    config: dict[str, Any] = {
        "optimiser": settings.kind,
        "learning_rate": trained[first],
        "learning_rates": sequence if len(set(sequence)) > 1 else (),
        "groups": tuple(groups),
        "weight_decay": float(reference.get("weight_decay", 0.0) or 0.0),
    }
    if settings.kind == "sgd":
        config |= {k: reference[k] for k in ("momentum", "nesterov", "dampening")}
    elif settings.kind in ("adam", "adamw"):
        config |= {"betas": reference["betas"], "epsilon": reference["eps"], "amsgrad": reference["amsgrad"]}
    elif 0 <= (momentum := float(reference.get("momentum", 0.0) or 0.0)) < 1:
        config["momentum"] = momentum
    return config, whole


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.flatten().tolist())
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
