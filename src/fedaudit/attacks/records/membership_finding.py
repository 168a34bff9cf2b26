"""What attacks on membership recover, and how they come to a decision without knowing the answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedaudit.attacks.findings import Finding


@dataclass(frozen=True, kw_only=True)
class MembershipFinding(Finding, kind="membership"):
    """Of each of the adversary's records, how much it looks like a member, and whether the attack says it is one.

    Attributes:
        scores: (n,) float64; the higher, the more like an example that was trained on.
        members: (n,) bool: the attack's own decision.
    """

    scores: Tensor
    members: Tensor


def upper_half(scores: Tensor) -> Tensor:
    """Return a mask (n,) of the scores above their median: the adversary knows that half of its records are members."""
    return scores > scores.quantile(0.5)


def above(scores: Tensor, non_members: Tensor, share: float) -> Tensor:
    """Return a mask (n,) of the scores above all but ``share`` of those of examples that nobody trained on."""
    return scores > non_members.quantile(1 - share)
