"""What a ledger says: the ε that each client's messages cost, and what a target takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fedaudit.results.record import Adjacency


@dataclass(frozen=True)
class ClientLedger:
    """What one client's messages cost.

    Attributes:
        rounds: in which it sends.
        epsilon: after the last of them, by Rényi accounting or the privacy loss distribution, whichever is tighter;
            None: nothing bounds it.
        curve: (round, ε) by Rényi accounting after rounds in which it sends, counted from 1; of many rounds only some,
            always the first and the last.
        success: how often, at most, anybody picks the right one of the ledger's candidates; None: nothing bounds it.
        why: nothing bounds it; else empty.
    """

    client: str
    rounds: int
    epsilon: float | None
    curve: tuple[tuple[int, float], ...] = ()
    success: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Target:
    """What staying below an ε takes, by Rényi accounting.

    Attributes:
        epsilon: that is wanted.
        rounds: in which a client sends.
        allowed: of such rounds, with the noise that there is.
        noise: of ``dp``, with which all of ``rounds`` stay below; None: what is added has no such setting, or no noise
            is enough.
    """

    epsilon: float
    rounds: int
    allowed: int
    noise: float | None


@dataclass(frozen=True)
class Ledger:
    """The account of one federation, or of those of its sites that send through the same filters.

    Attributes:
        mechanism: what a message goes through.
        protects: whose presence the ε is about: ``client`` or ``sample``.
        adjacency: what neighbours differ by: ``replace``, one that sends anything else, or ``add-remove``, nothing.
        sampling: what the account supposes of drawing, in words.
        target: what was asked for; None: nothing was.
        notes: what else a reader must know.
        candidates: for what was protected, equally likely without the messages, among which the right one is picked.
    """

    federation: str
    mechanism: str
    protects: str
    adjacency: Adjacency
    sampling: str
    delta: float
    clients: tuple[ClientLedger, ...]
    target: Target | None = None
    notes: tuple[str, ...] = ()
    candidates: int = 100

    @property
    def epsilon(self) -> float | None:
        """The largest of all clients; None where nothing bounds one of them."""
        spent = [one.epsilon for one in self.clients]
        return None if None in spent else max((e for e in spent if e is not None), default=0.0)

    @property
    def success(self) -> float | None:
        """The largest of all clients; None where nothing bounds one of them."""
        shares = [one.success for one in self.clients]
        return None if None in shares else max((s for s in shares if s is not None), default=1 / self.candidates)

    def for_programs(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self) | {"epsilon": self.epsilon, "success": self.success}
