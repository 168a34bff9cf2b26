"""Canaries of a language model: planted texts of random tokens, each in or out by a fair coin (Carlini et al. 2019)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedaudit.data.dataset import Split
from fedaudit.defences.privacy import DifferentialPrivacy
from fedaudit.epsilon.accounting import Account
from fedaudit.epsilon.canaries import Canaries, CanaryRecords, CanarySpec, TextCanaries
from fedaudit.modalities import NOTHING
from fedaudit.simulation.budget import PrivacyBudget
from fedaudit.simulation.checkpoint import State
from fedaudit.simulation.client import Federation
from fedaudit.simulation.server import CanaryUpdates
from fedaudit.simulation.spec import FederationSpec
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import generator

_AT_ONCE = 250


def planted(
    asked: CanarySpec, held: Sequence[Split], spec: FederationSpec, info: TaskInfo, seed: int
) -> tuple[list[Split], Tensor, Tensor]:
    """Return what clients hold with the texts that are in, (m, length) all texts, and (m,) which of them are in.

    A text has as many tokens as the longest example, each drawn evenly from the vocabulary but for those that fill up
    and end, and the end behind them. The honest clients have them in turn.

    Raises:
        BadInput: the model doesn't predict the next token.
    """
    tokens = info.tokens
    if tokens is None or not tokens.causal:
        raise BadInput(f"planted texts are for a model that predicts the next token; this one predicts {info.asked}")
    drawn = [token for token in range(tokens.vocabulary) if token not in (tokens.padding, tokens.end)]
    rng = generator(seed, spec.name, "planted texts")
    texts = torch.tensor(drawn)[torch.randint(len(drawn), (asked.count, *info.input_shape), generator=rng)]
    if tokens.end is not None:
        texts[:, -1] = tokens.end
    coins = torch.rand(asked.count, generator=generator(seed, spec.name, "canary coins")) < 0.5
    whole = list(held)
    for client in range(spec.honest):
        own = torch.arange(client, asked.count, spec.honest)
        own = own[coins[own]]
        new = Split(texts[own].to(held[client].inputs.dtype), tokens.following(texts[own]))
        old = whole[client]
        whole[client] = Split(torch.cat([old.inputs, new.inputs]), torch.cat([old.targets, new.targets]))
    return whole, texts, coins


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
        tokens = self.federation.task_info.tokens
        assert tokens is not None
        found = []
        with torch.no_grad():
            for texts in self.texts.split(_AT_ONCE):
                labels = tokens.following(texts)
                outputs = model(self.federation.task_info.normalise(texts)).double()
                each = nn.functional.cross_entropy(outputs, labels, reduction="none", ignore_index=NOTHING)
                found.append(each.sum(dim=1) / (labels != NOTHING).sum(dim=1))
        return torch.cat(found)


def with_planted_texts(federation: Federation) -> Federation:
    """Return a federation whose clients hold the texts that its audit plants; the same where it plants none."""
    asked = federation.canaries
    if asked is None or not asked.texts:
        return federation
    held, texts, coins = planted(asked, federation.client_data, federation.spec, federation.task_info, federation.seed)
    return replace(federation, client_data=held, planted=(texts, coins))
