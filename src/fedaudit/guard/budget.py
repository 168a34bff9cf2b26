"""What a site's updates cost in ε, and the budget that they must not exceed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from fedaudit.defences.client_defences import ClientContext
from fedaudit.epsilon.accounting import PrivacyAccount
from fedaudit.guard.rounds import LEFT, Done, SiteRound, Written
from fedaudit.pipeline.ledger import Filter, chain_account, known_client_defence
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput, in_words

_SAME = 1e-6  # by which an ε may differ that is computed again


@dataclass(frozen=True)
class Budget:
    """The ε that the updates of a site in a job must not exceed, and what they cost.

    Args:
        target: that ε; None: there is no budget.
        delta: δ; None: the mechanism's.
        given: the filters that updates go through, as the site says; None: as the framework does.
        lasting: a site has the same name after a restart; else all updates of a job that stand in its file count.
    """

    target: float | None = None
    delta: float | None = None
    given: list[Filter] | None = None
    lasting: bool = True

    def count(
        self, line: SiteRound, written: Written, through: Sequence[Filter] | None, elements: int | None
    ) -> tuple[SiteRound, str, str]:
        """Return the line with its ε, why its update is stopped, and why ε isn't counted; each empty otherwise."""
        if line.done not in LEFT or not (self.target or self.given):
            return line, "", ""
        why = problem = ""
        try:
            epsilon = self.epsilon(written, line.job, line.site, through, elements)
            why = self.exceeded(epsilon) or ""
        except Exception as error:
            epsilon, problem = math.inf, f"ε isn't counted: {in_words(error)}"
        if problem and self.target is not None:
            why, problem = problem, ""
        done: Done = "stopped" if why else line.done
        told = None if why or epsilon == math.inf else epsilon
        return line.model_copy(update={"done": done, "epsilon": told, "target": self.target}), why, problem

    def epsilon(
        self, written: Written, job: str, site: str, through: Sequence[Filter] | None, elements: int | None
    ) -> float:
        """Return the ε of a site's updates in a job with another one; infinite where nothing bounds it.

        ``through`` are the filters of what leaves, as the framework tells; None: whatever the site says, none works on
        it. ``elements`` are the model's whole state's; None: not known.

        BadInput: it can't be accounted for, or updates left that cost more than what is known now would have.
        """
        if through is None:
            raise BadInput("no defence of updates works on it, so that nothing bounds what it tells")
        account = site_account(through if self.given is None else self.given, elements, self.delta)
        if account is None:
            return math.inf
        who = site if self.lasting else None
        spent, before = written.sent(job, who), [one.epsilon for one in written.left(job, who)]
        if None in before:
            raise BadInput(
                "updates of this job left before ε was counted, and nothing says through which noise; a budget is for "
                "a job from its first update on"
            )
        if max((one for one in before if one is not None), default=0.0) > (1 + _SAME) * account.spent(spent):
            raise BadInput(
                "updates of this job left with less noise than now, or another δ: what they cost together isn't known; "
                "set sanitised and delta as they were"
            )
        return account.spent(spent + 1)

    def exceeded(self, epsilon: float) -> str | None:
        """Return why an ε is too much; None: it isn't."""
        if self.target is None or epsilon <= self.target:
            return None
        if epsilon == math.inf:
            return "nothing that is known of the updates' defence bounds ε: give sanitised"
        return f"with it ε would be {epsilon:.4g}, and target_epsilon is {self.target:g}"


def filters_of(sanitised: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> list[Filter] | None:
    """Return what a site says of its updates' defence, ``{"name": "local-dp", …}`` or several, as filters."""
    if sanitised is None:
        return None
    several = [sanitised] if isinstance(sanitised, Mapping) else list(sanitised)
    if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in several):
        raise BadInput("sanitised is the defence that updates go through: {'name': 'local-dp', …}, or a list of such")
    filters: list[Filter] = [
        (str(one["name"]), {key: value for key, value in one.items() if key != "name"}) for one in several
    ]
    for name, settings in filters:
        if known_client_defence(name, settings) is None:
            raise BadInput(f"sanitised has '{name}', which isn't known; fedaudit list shows the client-side defences")
    return filters


def site_account(filters: Sequence[Filter], elements: int | None, delta: float | None) -> PrivacyAccount | None:
    """Return what a site's updates cost that go through these filters, as ``fedaudit ledger`` counts; None: no bound.

    Arguments are as of :func:`fedaudit.pipeline.ledger.chain_account`; ``delta`` counts in place of the settings'.
    BadInput: it can't be accounted for.
    """
    account = chain_account("the site", filters, elements).account
    if account is None:
        return None
    asked: PrivacyAccount = replace(cast("Any", account), adjacency="replace", delta=delta or account.delta)
    return asked


def known_of(filters: Sequence[Filter], update: Update, context: ClientContext) -> ClientDefenceInfo | None:
    """Return what everybody knows of an update that went through these filters; None: nothing."""
    info = None
    for kind, settings in filters:
        client_defence = known_client_defence(kind, settings)
        if client_defence is not None:
            done = client_defence(update, context, torch.Generator().manual_seed(0))
            info = done.sanitised or info
    return info
