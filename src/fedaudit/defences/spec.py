"""What a scenario says of the defences in place."""

from __future__ import annotations

from pydantic import Field

from fedaudit.defences.aggregation import Aggregator
from fedaudit.defences.averaging import Mean
from fedaudit.defences.client_defences import ClientDefence, NoClientDefence
from fedaudit.task.training import LocalPlan
from fedaudit.utils.registry import PluginField
from fedaudit.utils.validation import Name, Spec


class DefencesSpec(Spec):
    """The defences in place: a registered name, or ``name`` and settings."""

    name: Name | None = Field(default=None, description="for reports; made of the defences' names if null")
    aggregator: PluginField[Aggregator] = Field(default=Mean(), description="the server's rule for merging updates")
    client_defence: PluginField[ClientDefence] = Field(
        default=NoClientDefence(), description="what a client does to its update before it sends it"
    )

    @property
    def undefended(self) -> bool:
        """Whether this is no defence at all, whatever its name."""
        return self.aggregator.averages is not None and not self.client_defence.protects

    @property
    def label(self) -> str:
        """Its name, or that of what differs from no defence at all."""
        others = [
            one.name for one in (self.aggregator, self.client_defence) if not isinstance(one, Mean | NoClientDefence)
        ]
        return self.name or "-".join(others) or "none"

    def check(self, plan: LocalPlan) -> None:
        """Refuse a federation that trains by ``plan`` and that these defences aren't made for."""
        self.client_defence.check(plan, self.aggregator)
        self.aggregator.dry_run(plan.clients)
