"""Canaries of a language model: planted texts of random tokens, each in or out by a fair coin (Carlini et al. 2019)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedaudit.data.dataset import Split
from fedaudit.defences.privacy import DifferentialPrivacy
from fedaudit.epsilon.accounting import Account
from fedaudit.epsilon.canaries import Canaries, CanaryRecords, TextCanaries
from fedaudit.modalities import NOTHING, TokenInfo
from fedaudit.simulation.budget import PrivacyBudget
from fedaudit.simulation.checkpoint import State
from fedaudit.simulation.client import Federation
from fedaudit.simulation.server import CanaryUpdates
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import generator

_AT_ONCE = 250

Model = Callable[[Tensor], Tensor]


def drawn_texts(
    count: int,
    length: int,
    tokens: TokenInfo,
    rng: torch.Generator,
    model: Model | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return (count, length) texts: tokens drawn evenly but for those that fill up and end, and the end behind them.

    With a ``model`` (n, length) -> (n, vocabulary, length) all tokens but the first are what it draws at the
    ``temperature``: from its probabilities to the power of 1 over that, scaled to sum to 1.
    BadInput: there is no other token.
    """
    may = [token for token in range(tokens.vocabulary) if token not in (tokens.padding, tokens.end)]
    if not may:
        raise BadInput("planted texts: no token is left to draw beside those that fill up and end")
    texts = torch.tensor(may)[torch.randint(len(may), (count, length), generator=rng)]
    if model is not None:
        for place, part in itertools.product(range(1, length), texts.split(_AT_ONCE)):
            with torch.no_grad():
                scores = model(part[:, :place])[:, may, -1].double() / temperature
            part[:, place] = torch.tensor(may)[torch.multinomial(scores.softmax(dim=1), 1, generator=rng)[:, 0]]
    if tokens.end is not None:
        texts[:, -1] = tokens.end
    return texts


def planted(federation: Federation) -> tuple[list[Split], Tensor, Tensor]:
    """Return what clients hold with the texts that are in, (m, length) all texts, and (m,) which of them are in.

    A text has as many tokens as the longest example. The honest clients have them in turn. All differ, from each other
    and from what clients hold: one that was drawn again would be in and out.

    Raises:
        BadInput: the model doesn't predict the next token, or draws too few different texts.
    """
    asked, held, info = federation.canaries, federation.client_data, federation.task_info
    spec, seed, tokens = federation.spec, federation.seed, info.tokens
    assert asked is not None
    if tokens is None or not tokens.causal:
        raise BadInput(f"planted texts are for a model that predicts the next token; this one predicts {info.asked}")
    rng, (length,), model = generator(seed, spec.name, "planted texts"), info.input_shape, None
    if asked.temperature is not None:
        first = copy.deepcopy(federation.model).cpu().eval()
        model = lambda texts: first(info.normalise(texts))  # noqa: E731
    texts = drawn_texts(asked.count, length, tokens, rng, model, asked.temperature or 1.0)
    theirs = {tuple(text) for data in held for text in data.inputs.tolist()}
    if len({tuple(text) for text in texts.tolist()} - theirs) < asked.count:
        remedy = "raise attacks.dp-canaries.temperature" if model else "plant fewer (attacks.dp-canaries.canaries)"
        raise BadInput(f"of {asked.count} planted texts some are equal, or are what clients hold; {remedy}")
    coins = torch.rand(asked.count, generator=generator(seed, spec.name, "canary coins")) < 0.5
    whole = list(held)
    for client in range(spec.honest):
        own = torch.arange(asked.count)[client :: spec.honest]
        own = own[coins[own]]
        new = Split(texts[own].to(held[client].inputs.dtype), tokens.following(texts[own]))
        old = whole[client]
        whole[client] = Split(torch.cat([old.inputs, new.inputs]), torch.cat([old.targets, new.targets]))
    return whole, texts, coins


def mean_losses(model: Model, texts: Tensor, tokens: TokenInfo) -> Tensor:
    """Return (m,) float64 the mean loss of each of (m, length) texts under (n, length) -> (n, vocabulary, length)."""
    found = []
    with torch.no_grad():
        for part in texts.split(_AT_ONCE):
            labels = tokens.following(part)
            each = nn.functional.cross_entropy(model(part).double(), labels, reduction="none", ignore_index=NOTHING)
            found.append(each.sum(dim=1) / (labels != NOTHING).sum(dim=1))
    return torch.cat(found)


class PlantedTexts:
    """The planted texts of one simulated federation: they are trained on as any other, and what is read is the loss.

    A reading is how much smaller a text's mean loss is under the final model than under the first.
    """

    def __init__(self, federation: Federation, budget: PrivacyBudget) -> None:
        assert federation.canaries is not None
        assert federation.planted is not None
        self.federation, self.budget = federation, budget
        self.texts, self.coins = federation.planted
        self.last: dict[str, Tensor] = {}

    def state_dict(self) -> State:
        """Return what changes from round to round, for a checkpoint."""
        return {"last": self.last}

    def load_state_dict(self, state: State) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.last = dict(state["last"])

    def records(self) -> list[CanaryRecords | None]:
        """Return that no canary rides along: they are among the clients' examples."""
        return [None] * self.federation.spec.clients

    def join(self, weights: dict[str, Tensor], layers: tuple[tuple[str, ...], ...]) -> CanaryUpdates | None:  # noqa: ARG002
        """Return that no canary is a client."""
        return None

    def look(
        self,
        updates: Sequence[Update],  # noqa: ARG002
        canary_updates: CanaryUpdates | None,  # noqa: ARG002
        before: dict[str, Tensor],  # noqa: ARG002
        after: dict[str, Tensor],
    ) -> None:
        """Note the model at the end of a round."""
        self.last = {name: value.detach().cpu().clone() for name, value in after.items()}

    def end(self) -> Canaries:
        """Return what was read, with what is promised: of single records, so DP-SGD's ε and not that of clients."""
        model = copy.deepcopy(self.federation.model).cpu().eval()
        before = self._losses(model)
        if self.last:
            model.load_state_dict(self.last)
        account, dp = self.budget.account, self.federation.defences.client_defence
        promised = isinstance(dp, DifferentialPrivacy) and dp.level == "sample" and account is not None
        spec = self.federation.spec
        fewest = min(map(len, self.federation.client_data[: spec.honest]))
        rate = min(1.0, spec.batch_size / fewest) if promised else 1.0
        fallen = (before - self._losses(model)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return TextCanaries(
            unit="record",
            adjacency="add-remove",
            readings={"final": fallen[None]},
            rates={"final": rate * (spec.clients_per_round or spec.clients) / spec.clients},
            covered=("final",) if promised else (),
            claimed=self.budget.claimed("add-remove") if promised else None,
            delta=account.delta if account else 1e-5,
            gaussian=isinstance(account, Account),
        )

    def _losses(self, model: nn.Module) -> Tensor:
        """Return (m,) float64 the mean loss of each text."""
        info = self.federation.task_info
        assert info.tokens is not None
        return mean_losses(lambda texts: model(info.normalise(texts)), self.texts, info.tokens)


def with_planted_texts(federation: Federation) -> Federation:
    """Return a federation whose clients hold the texts that its audit plants; the same where it plants none."""
    asked = federation.canaries
    if asked is None or not asked.texts:
        return federation
    held, texts, coins = planted(federation)
    return replace(federation, client_data=held, planted=(texts, coins))
