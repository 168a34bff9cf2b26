"""Threat models: who the adversary is, and what it knows."""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedaudit.utils.validation import Count, Share, Title

Adversary = Literal["server", "malicious-server", "eavesdropper", "client"]


# What one run of an attack receives: one update, all messages of one client, or all that the adversary sees.
Scope = Literal["update", "client", "federation"]


ADVERSARIES: dict[Adversary, str] = {
    "server": "an honest-but-curious server: follows the protocol and reads every update that it receives",
    "malicious-server": "a malicious server: alters the model that it sends in order to learn more, and reads every "
    "update that it receives",
    "eavesdropper": "an eavesdropper who reads the messages between the clients and the server",
    "client": "a client: sees the global model of every round and nothing of what the others send",
}


class ThreatModel(BaseModel):
    """Who the adversary is and what it knows. It only looks, unless the server or clients are malicious."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    adversary: Adversary = Field(default="server", description="server, malicious-server, eavesdropper or client")
    sees: str = Field(
        default="updates",
        pattern=r"^(updates|sum|aggregate of [1-9][0-9]{0,8})$",
        description="updates, each client's; sum, of all clients of a round, or aggregate of 10, of so many clients "
        "together, as secure aggregation yields it",
    )
    knows_labels: bool = Field(default=False, description="the labels of the examples, in their order of use")
    knows_public_data: bool = Field(
        default=False, description="public data of the clients' kind, none of it theirs, or a generator of them"
    )
    knows_training: bool = Field(
        default=True, description="learning rate, local steps, batch sizes, momentum, weight decay"
    )
    records: Count | None = Field(
        default=None,
        description="examples that it holds and asks something of: half are honest clients', half nobody's",
    )
    public_examples: Count | None = Field(
        default=None,
        description="further examples that it holds, none of them a client's or a record",
    )
    hidden_attribute: str | None = Field(
        default=None, description="attribute of the data set that the records lack, and that the adversary is after"
    )
    client_property: Title | None = Field(
        default=None,
        description="property of clients that the adversary is after: an attribute of the data set and its value, as "
        "sex=Female; of its public examples it knows it",
    )
    property_share: Share = Field(
        default=0.5, description="a client has that property where at least this share of its examples does"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> ThreatModel:
        if self.records is not None and self.records % 2:
            raise ValueError(f"records is {self.records}; half of them are clients' examples: give an even number")
        used = self.records or self.client_property or self.adversary == "malicious-server"
        if self.public_examples is not None and not (self.knows_public_data and used):
            raise ValueError(
                "public_examples needs knows_public_data: true, and records or a client_property to use them on"
            )
        if self.hidden_attribute is not None and not self.records:
            raise ValueError("hidden_attribute needs records that lack it; set records to 300, for example")
        return self

    @property
    def summary(self) -> str:
        """One line about the adversary."""
        return ADVERSARIES[self.adversary]

    @property
    def group_size(self) -> int:
        """Of how many clients' updates it reads the sum only: 1, where it reads each by itself."""
        return {"updates": 1, "sum": sys.maxsize}.get(self.sees) or int(self.sees.rpartition(" ")[2])

    def knowledge(self) -> tuple[list[str], list[str]]:
        """Return what the adversary knows and what it doesn't, in words."""
        reads = self.adversary != "client"
        known = {
            "the model's architecture, the loss, and how examples are normalised": True,
            "the global model of every round (with BatchNorm's statistics)"
            + (", and how it altered it" if self.adversary == "malicious-server" else ""): True,
            "every update as it was sent, and over how many examples it was made": reads and self.group_size == 1,
            "how clients train (learning rate, local steps, batch sizes)": self.knows_training,
            "the labels of the examples in the updates": self.knows_labels,
        }
        if self.group_size > 1:
            whose = "all clients of a round" if self.sees == "sum" else f"{self.group_size} clients at a time"
            known[f"the sum of the updates of {whose}, and over how many examples they were made"] = reads
        if self.records:
            known[f"{self.records} records with their labels, half of them honest clients'"] = True
            known["which of the records are clients', or anything else of the clients' data"] = False
            if self.hidden_attribute:
                known[f"the records' attribute '{self.hidden_attribute}'"] = False
        else:
            known["the clients' data, or any of them"] = False
        if self.client_property:
            known[f"which of its public examples have '{self.client_property}'"] = self.knows_public_data
            known[f"which clients have it: for {100 * self.property_share:g} % of their examples or more"] = False
        public = f"{self.public_examples} public examples" if self.public_examples else "public data"
        known[f"{public} of the same kind, or a generative model of it"] = self.knows_public_data
        return [k for k, v in known.items() if v], [k for k, v in known.items() if not v]
