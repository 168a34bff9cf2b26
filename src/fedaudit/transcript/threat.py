"""Threat models: who the adversary is, and what it knows."""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedaudit.utils.errors import BadInput
from fedaudit.utils.validation import Count, Share, Spec, Title, Whole

Adversary = Literal["server", "malicious-server", "eavesdropper", "client", "aggregating-client"]


# What one run of an attack receives: one update, all messages of one client, or all that the adversary sees.
Scope = Literal["update", "client", "federation"]


ADVERSARIES: dict[Adversary, str] = {
    "server": "an honest-but-curious server: follows the protocol and reads every update that it receives",
    "malicious-server": "a malicious server: alters the model that it sends in order to learn more, and reads every "
    "update that it receives",
    "eavesdropper": "an eavesdropper who reads the messages between the clients and the server",
    "client": "a client: sees the global model of every round and nothing of what the others send",
    "aggregating-client": "a client that aggregates in some rounds: reads the other clients' updates of these alone, "
    "and sees the global model of every round",
}
_SHOWN = 12  # rounds that are named one by one


class ThreatModel(Spec):
    """Who the adversary is and what it knows. It only looks, unless the server or clients are malicious."""

    adversary: Adversary = Field(
        default="server", description="server, malicious-server, eavesdropper, client or aggregating-client"
    )
    sees: str = Field(
        default="updates",
        pattern=r"^(updates|sum|aggregate of [1-9][0-9]{0,8})$",
        description="updates, each client's; sum, of all clients of a round, or aggregate of 10, of so many clients "
        "together, as secure aggregation yields it",
    )
    clients: Annotated[list[Whole], Field(min_length=1)] | None = Field(
        default=None,
        description="of a client or an aggregating-client: which it is, by number from 0. Several collude, and pool "
        "what each sees. Clients subtract their own updates from how the global model changes, and so read the sum of "
        "the others'",
    )
    rounds: Annotated[list[Whole], Field(min_length=1)] | str | None = Field(
        default=None,
        description="rounds, from 0, that it sees: a list, from 10, or 10 to 19; of an aggregating-client those in "
        "which it aggregates (null: of n clients that take turns, client i has every nth round from round i). All if "
        "null",
    )
    knows_labels: bool = Field(default=False, description="the labels of the examples, in their order of use")
    knows_public_data: bool = Field(
        default=False, description="public data of the clients' kind, none of it theirs, or a generator of them"
    )
    knows_training: bool = Field(
        default=True, description="learning rate, local steps, batch sizes, momentum, weight decay"
    )
    target_records: Count | None = Field(
        default=None,
        description="examples that it holds and asks something of: half are honest clients', half nobody's",
    )
    known_records: Count | None = Field(
        default=None,
        description="further examples of every honest client, each of which it holds and knows whose it is; clients "
        "train on them. In a simulation the records that nobody trained on are then examples that clients keep from "
        "training, where they hold enough, and data name no persons. No other example of a known person is a record",
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
        if self.target_records is not None and self.target_records % 2:
            raise ValueError(
                f"target_records is {self.target_records}; half of them are clients' examples: give an even number"
            )
        if self.known_records is not None and not self.target_records:
            raise ValueError(
                "known_records needs records whose client is asked for; set target_records, to 300 for example"
            )
        if self.public_examples is not None and not self.knows_public_data:
            raise ValueError("public_examples needs knows_public_data: true")
        if self.hidden_attribute is not None and not self.target_records:
            raise ValueError("hidden_attribute needs records that lack it; set target_records to 300, for example")
        self._check_part()
        return self

    def _check_part(self) -> None:
        """Refuse a part of a federation that nobody sees."""
        if self.clients is not None and self.adversary not in ("client", "aggregating-client"):
            raise ValueError(
                f"clients says which clients the adversary is, and this one is the {self.adversary}; set adversary: "
                "client or aggregating-client"
            )
        if self.adversary == "aggregating-client" and self.clients is None:
            raise ValueError("an aggregating-client has a number; set clients: [0]")
        if self.rounds is not None and self.adversary == "malicious-server":
            raise ValueError("rounds is for adversaries that only look: a malicious server alters every model")
        for name, given in (("clients", self.clients), ("rounds", self.rounds)):
            if isinstance(given, list) and len(set(given)) < len(given):
                raise ValueError(f"{name} names one twice; name each once")
        if isinstance(self.rounds, str):
            first, last = self._interval()
            if last < first:
                raise ValueError(f"rounds is '{self.rounds}', and ends before it begins")

    def _interval(self) -> tuple[int, int]:
        """Return the first and the last round of ``from 10`` or ``10 to 19``."""
        found = re.fullmatch(r"(?:from (\d{1,9}))|(?:(\d{1,9}) to (\d{1,9}))", str(self.rounds))
        if found is None:
            raise ValueError(f"rounds is {reprlib.repr(self.rounds)}; give a list as [2, 6], from 10, or 10 to 19")
        return (int(found[1]), sys.maxsize) if found[1] else (int(found[2]), int(found[3]))

    @property
    def partial(self) -> bool:
        """Whether it sees a part of the federation: some rounds, or what certain clients see."""
        return self.clients is not None or self.rounds is not None

    @property
    def reads_updates(self) -> bool:
        """Whether it reads updates, or sums of them."""
        return self.adversary != "client" or self.clients is not None

    @property
    def whole(self) -> ThreatModel:
        """The same knowledge of a federation that it sees all of, as known cases are seen."""
        adversary = "server" if self.clients is not None else self.adversary
        return self.model_copy(update={"adversary": adversary, "clients": None, "rounds": None})

    def seen_of(self, rounds: Sequence[int], clients: Sequence[int], *, everybody: bool = True) -> list[int]:
        """Return of the rounds of a federation those that it sees; of an aggregating client, those that it aggregates.

        Args:
            rounds: that there are, or were recorded.
            clients: their numbers, ascending.
            everybody: whether all of them take part in every round.

        Raises:
            BadInput: it is no client of these, or all of them; it sees none of the rounds, or which it aggregates isn't
                known.
        """
        own = self.clients or []
        if unknown := [client for client in own if client > clients[-1]]:
            raise BadInput(f"threat.clients: there is no client {unknown[0]}; they are 0 to {clients[-1]}")
        if set(clients) <= set(own):
            raise BadInput(
                f"threat.clients names all {len(clients)} clients, which leaves nobody to attack; name fewer"
            )
        if self.adversary == "aggregating-client" and self.rounds is None:
            if not everybody:
                raise BadInput(
                    "who aggregates isn't known where not all clients take part in every round; say in which rounds "
                    "the adversary does: threat.rounds"
                )
            seen = [index for index in rounds if clients[index % len(clients)] in own]
        elif isinstance(self.rounds, str):
            first, last = self._interval()
            seen = [index for index in rounds if first <= index <= last]
        else:
            seen = [index for index in rounds if self.rounds is None or index in self.rounds]
        if not seen:
            there = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
            does = "aggregates" if self.adversary == "aggregating-client" else "sees"
            raise BadInput(f"threat.rounds: the adversary {does} none of the rounds that there are, {there}")
        return seen

    @property
    def summary(self) -> str:
        """One line about the adversary."""
        return self.in_words()

    def in_words(self, rounds: Sequence[int] | None = None, names: Mapping[int, str] | None = None) -> str:
        """Return one line about the adversary.

        Args:
            rounds: of which it reads updates, or sums of them; None: what the settings say.
            names: that clients go by, beside their numbers.
        """
        if not self.partial:
            return ADVERSARIES[self.adversary]
        if self.clients is None:
            return f"{ADVERSARIES[self.adversary]}; it sees {self._told(rounds)} alone"
        each = [f"{n} ({names[n]})" if names and n in names else str(n) for n in sorted(self.clients)]
        several = len(each) > 1
        if self.adversary == "aggregating-client":
            what = "the sum of the other clients' updates" if self.group_size > 1 else "the other clients' updates"
            does = f"collude: they aggregate {self._told(rounds)} and see" if several else None
            does = does or f"aggregates {self._told(rounds)} and sees"
            tail = f"{what} of these alone"
        else:
            does = "collude: they see" if several else "sees"
            left = "which leaves the sum of the others', or where there is one other, its update"
            own = "subtract their own updates" if several else "subtracts its own update"
            tail = f"the global model of {self._told(rounds)} and {own} from how it changes, {left}"
        return f"{_listed('client', each)} {does} {tail}"

    def _told(self, rounds: Sequence[int] | None) -> str:
        """Return rounds in words: those given, or what the settings say of them."""
        if isinstance(self.rounds, str):
            return f"rounds {self.rounds}" if " to " in self.rounds else f"the rounds {self.rounds} on"
        if self.adversary == "client" and self.rounds is None:
            return "every round"
        listed = sorted(self.rounds) if self.rounds is not None else rounds
        if listed is None:
            return "the rounds of its turn" if len(self.clients or ()) == 1 else "the rounds of their turns"
        if len(listed) > _SHOWN:
            return f"{len(listed)} rounds from {listed[0]} to {listed[-1]}"
        return _listed("round", [str(index) for index in listed])

    @property
    def group_size(self) -> int:
        """Of how many clients' updates it reads the sum only: 1, where it reads each by itself."""
        return {"updates": 1, "sum": sys.maxsize}.get(self.sees) or int(self.sees.rpartition(" ")[2])

    def knowledge(self, rounds: Sequence[int] | None = None) -> tuple[list[str], list[str]]:
        """Return what the adversary knows and what it doesn't, in words; ``rounds`` as of :meth:`in_words`."""
        reads, own = self.adversary != "client", self.clients is not None
        part = self.rounds is not None and self.adversary != "aggregating-client"
        models = self._told(None) if part else "every round"
        of_these = f" in {self._told(rounds)}" if self.partial else ""
        each = "every other client's update" if own else "every update"
        each += f"{of_these * reads} as it was sent"
        known = {
            "the model's architecture, the loss, and how examples are normalised": True,
            f"the global model of {models} (with BatchNorm's statistics)"
            + (", and how it altered it" if self.adversary == "malicious-server" else ""): True,
            f"{each}, and over how many examples it was made": reads and self.group_size == 1,
            "how clients train (learning rate, local steps, batch sizes)": self.knows_training,
            "the labels of the examples in the updates": self.knows_labels,
        }
        if self.group_size > 1 or (own and not reads):
            whose = f"{self.group_size} clients at a time"
            if self.sees == "sum" or (own and not reads):
                whose = f"all {'other ' * own}clients{' of a round' * (not self.partial)}"
            subtracted = ", without its own" * (own and reads)
            known[
                f"the sum of the updates of {whose}{of_these}{subtracted}, and over how many examples they were made"
            ] = self.reads_updates
        if own:
            known["its own data and updates" if len(self.clients or ()) == 1 else "their own data and updates"] = True
        if self.partial and reads:
            known["the updates of the other rounds"] = False
        others = "other " * own
        if self.target_records:
            known[f"{self.target_records} records with their labels, half of them honest {others}clients'"] = True
            known[f"which of the records are {others}clients', or anything else of the {others}clients' data"] = False
            if self.known_records:
                known[f"{self.known_records} further records of every honest {others}client, and whose they are"] = True
            if self.hidden_attribute:
                known[f"the records' attribute '{self.hidden_attribute}'"] = False
        else:
            known[f"the {others}clients' data, or any of them"] = False
        if self.client_property:
            known[f"which of its public examples have '{self.client_property}'"] = self.knows_public_data
            known[f"which clients have it: for {100 * self.property_share:g} % of their examples or more"] = False
        public = f"{self.public_examples} public examples" if self.public_examples else "public data"
        known[f"{public} of the same kind, or a generative model of it"] = self.knows_public_data
        return [k for k, v in known.items() if v], [k for k, v in known.items() if not v]


def _listed(what: str, each: Sequence[str]) -> str:
    """Return ``client 2`` or ``clients 0, 1 and 2``."""
    return f"{what} {each[0]}" if len(each) == 1 else f"{what}s {', '.join(each[:-1])} and {each[-1]}"
