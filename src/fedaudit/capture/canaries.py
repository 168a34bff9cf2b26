"""Canaries of a federation that really runs, clients or planted texts: what they are, and what a recorder reads."""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor, nn

from fedaudit.epsilon.canaries import OBSERVERS, Canaries, Directions, TextCanaries
from fedaudit.modalities import TokenInfo
from fedaudit.models.of_transformers import adapters_names, of_one_input
from fedaudit.simulation.planted_texts import drawn_texts, mean_losses
from fedaudit.transcript.files import CanariesEntry, Writer
from fedaudit.transcript.truth import COINS, FOLDER, save_part
from fedaudit.utils.errors import BadInput, in_words
from fedaudit.utils.seeds import generator

_NOTHING = 1e-4  # clips


def _check(*, claimed: float | None, **whole: object) -> None:
    """BadInput: a count is no whole number, or ε isn't finite and from 0."""
    if wrong := [name for name, value in whole.items() if not isinstance(value, Integral)]:
        raise BadInput(f"canaries: {wrong[0]} is {whole[wrong[0]]!r}; give a whole number")
    if claimed is not None and not 0 <= claimed < math.inf:
        raise BadInput(f"canaries: claimed is {claimed}; give the ε that is promised, from 0, or None where none is")


class CanaryClients:
    """The auditor's canaries: clients beside the real ones, each in or out by a fair coin, that need no training.

    A canary sends what :meth:`update` gives, in each round in which it takes part, through whatever clips and adds
    noise in this federation; absent ones take part, too, and send the model nearly as it was: moved by a ten-thousandth
    of the clip, since some clipping (Flower's) divides by an update's norm. Give the object to the
    :class:`fedaudit.Recorder`, and ``fedaudit attack RECORDING --attack dp-canaries`` has the rest. Keep ``seed`` from
    everybody but the auditor: it gives away directions and coins.

    Args:
        module: that clients train; its parameters are what canaries move.
        count: how many.
        clip: to which an update's norm is clipped.
        claimed: ε that is promised after the last round, for this adjacency; None: nothing is.
        delta: δ of the promise.
        where: who adds the noise: each client (``local``), or whoever aggregates (``central``), who sees all before it.
        gaussian: what is promised adds Gaussian noise to clipped updates. Only say so where it does: then sharper
            bounds count, which would accuse another mechanism that keeps its promise.
        share: of the rounds in which a client takes part, if that is drawn.
        adjacency: absent ones send next to nothing (``add-remove``), or the opposite (``replace``).
        strength: length of what a canary sends before clipping, in units of ``clip``.
        seed: None takes it from the operating system; several processes need the same.

    Raises:
        BadInput: a number can't be used, or the module has no parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        count: int = 1000,
        *,
        clip: float,
        claimed: float | None = None,
        delta: float = 1e-5,
        where: Literal["local", "central"] = "central",
        gaussian: bool = False,
        share: float = 1.0,
        adjacency: Literal["add-remove", "replace"] = "add-remove",
        strength: float = 10.0,
        seed: int | None = None,
    ) -> None:
        _check(count=count, claimed=claimed)
        if count < 2 or not clip > 0 or not strength >= 1 or not 0 < share <= 1 or not 0 < delta < 1:
            raise BadInput("canaries: count from 2, clip above 0, strength from 1, share and delta between 0 and 1")
        if where not in ("local", "central") or adjacency not in ("add-remove", "replace"):
            raise BadInput("canaries: where is local or central, adjacency is add-remove or replace")
        self.module = module
        self.seed = secrets.randbits(63) if seed is None else seed
        self.count, self.clip, self.strength, self.share = count, clip, strength, share
        self.claimed, self.delta, self.where, self.adjacency = claimed, delta, where, adjacency
        self.gaussian = gaussian
        self.shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        self.directions = Directions(self.seed, count, sum(shape.numel() for shape in self.shapes.values()))
        self.coins = torch.rand(count, generator=generator(self.seed, "canary coins")) < 0.5
        self._rows: dict[str, list[Tensor]] = {name: [] for name in OBSERVERS}
        self._before: Tensor | None = None
        self._round: tuple[Tensor, Tensor, bool] | None = None  # readings, sum, and whether all updates were read

    def __repr__(self) -> str:
        return f"CanaryClients({self.count} canaries, {len(self._rows['models'])} rounds read)"

    def update(self, number: int, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model that canary ``number`` answers with.

        Args:
            number: from 0.
            sent: the model that the round began with, parameters and buffers by name; it isn't changed.

        Raises:
            BadInput: there is no such canary, or a parameter is missing.
        """
        if not 0 <= number < self.count:
            raise BadInput(f"there is no canary {number}: they are numbered from 0 to {self.count - 1}")
        if missing := [name for name in self.shapes if name not in sent]:
            raise BadInput(f"the model that was sent lacks '{missing[0]}', a parameter of the module")
        length = self.strength * self.clip
        if not bool(self.coins[number]):
            length = _NOTHING * self.clip if self.adjacency == "add-remove" else -length
        pieces = (length * self.directions.one(number)).split([shape.numel() for shape in self.shapes.values()])
        moved = dict(sent)
        for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True):
            moved[name] = sent[name] + piece.view(shape).to(sent[name])
        return moved

    # --- what the recorder calls ------------------------------------------------------------------------------------

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Note the global model that a round begins with, or that the last one ended with."""
        self.end_round()
        now = self._flat(weights)
        if self._before is not None:
            self._rows["models"].append(self.directions.project(now - self._before) / self.clip)
        self._before = now
        self._rows["final"] = [self.directions.project(now) / self.clip]
        unread = torch.full((self.count,), torch.nan, dtype=torch.float64)
        self._round = unread, torch.zeros(self.directions.size), False

    def read(self, state: Mapping[str, Tensor], canary: int | None, *, difference: bool) -> None:
        """Note an update that came back, of a canary or of another client."""
        if self._round is None or self._before is None:
            return
        readings, total, _ = self._round
        moved = self._flat(state) - (0.0 if difference else self._before)
        total += moved
        if canary is not None:
            readings[canary] = float(self.directions.one(canary) @ moved) / self.clip
        self._round = readings, total, True

    def end_round(self) -> None:
        """Keep what was read in the round, if anything was."""
        if self._round is not None and self._round[2]:
            readings, total, _ = self._round
            if not bool(readings.isnan().all()):
                self._rows["updates"].append(readings)
            self._rows["sum"].append(self.directions.project(total) / self.clip)
        self._round = None

    def save(self, writer: Writer) -> None:
        """Write what was read beside the rounds, and the coins into the truth.

        Raises:
            OSError: a file can't be written.
        """
        if self._rows["models"]:
            seen = self._seen()
            writer.write_part("canaries", seen.readings, CanariesEntry.model_validate(seen))
            save_part(writer.folder / FOLDER / COINS, writer.header.id, {"coins": self.coins})

    def _seen(self) -> Canaries:
        covered: Sequence[str] = tuple(OBSERVERS) if self.where == "local" else ("models", "final")
        return Canaries(
            unit="client",
            adjacency=self.adjacency,
            readings={name: torch.stack(rows) for name, rows in self._rows.items() if rows},
            rates={name: 1.0 if name == "updates" else self.share for name in OBSERVERS},
            covered=tuple(covered) if self.claimed is not None else (),
            claimed=self.claimed,
            delta=self.delta,
            gaussian=self.gaussian,
        )

    def _flat(self, state: Mapping[str, Tensor]) -> Tensor:
        if missing := [name for name in self.shapes if name not in state]:
            raise BadInput(f"canaries: a state lacks '{missing[0]}', a parameter of the module")
        return torch.cat([state[name].detach().float().reshape(-1).cpu() for name in self.shapes])


class CanaryTexts:
    """The auditor's planted texts: each in or out by a fair coin, that clients train on beside their own.

    A client adds what :meth:`of` gives to what it trains on, as tokens. Give the object to the
    :class:`fedaudit.Recorder`, and the first and the last global model tell by how much the mean loss of each text
    fell: ``fedaudit attack RECORDING --attack dp-canaries`` has exposure and a lower bound on ε. Keep ``seed`` from
    everybody but the auditor: it gives away texts and coins.

    Args:
        module: (n, length) tokens to logits (n, vocabulary, length), or a model of transformers, as training begins.
        count: how many texts.
        length: of each, in tokens.
        tokens: of the vocabulary, with what fills up and what ends a text.
        temperature: at which ``module`` draws them as it is now; None: tokens are drawn evenly.
        claimed: ε that is promised of a record after the last round, as by DP-SGD; None: nothing is.
        delta: δ of the promise.
        seed: None takes it from the operating system; several processes need the same, and the same ``module``.

    Raises:
        BadInput: a number can't be used, the tokens aren't causal, or the model can't read such texts or draws equal
            ones.
    """

    def __init__(
        self,
        module: nn.Module,
        count: int = 200,
        *,
        length: int,
        tokens: TokenInfo,
        temperature: float | None = None,
        claimed: float | None = None,
        delta: float = 1e-5,
        seed: int | None = None,
    ) -> None:
        _check(count=count, length=length, claimed=claimed)
        if count < 2 or length < 3 or not 0 < delta < 1 or (temperature is not None and not temperature > 0):
            raise BadInput("planted texts: count from 2, length from 3, temperature above 0, delta between 0 and 1")
        if not tokens.causal:
            raise BadInput("planted texts are for a model that predicts the next token: TokenInfo(…, causal=True)")
        self.module, self.tokens = copy.deepcopy(module).cpu().eval(), tokens
        of_one_input(self.module)
        self.seed = secrets.randbits(63) if seed is None else seed
        self.claimed, self.delta = claimed, delta
        rng, model = generator(self.seed, "planted texts"), None if temperature is None else self.module
        try:
            self.texts = drawn_texts(count, length, tokens, rng, model, temperature or 1.0)
            mean_losses(self.module, self.texts[self.texts.amax(dim=1).topk(2).indices], tokens)
        except BadInput:
            raise
        except Exception as error:  # the user's module may raise anything
            raise BadInput(
                f"planted texts: the module reads no texts of {length} tokens out of {tokens.vocabulary} "
                f"({in_words(error)[:200]}); give one of (n, length) to (n, vocabulary, length), with a length and "
                "tokens that it takes"
            ) from error
        if len(self.texts.unique(dim=0)) < count:
            raise BadInput(f"of {count} planted texts some are equal; raise temperature, or plant fewer")
        self.coins = torch.rand(count, generator=generator(self.seed, "canary coins")) < 0.5
        self._losses: list[Tensor] = []

    def __repr__(self) -> str:
        return f"CanaryTexts({len(self.texts)} texts)"

    def of(self, client: int, clients: int) -> Tensor:
        """Return (k, length) int64: the texts that ``client`` of so many, from 0, trains on beside its own."""
        if not 0 <= client < clients:
            raise BadInput(f"there is no client {client} among {clients}: they are numbered from 0")
        numbers = torch.arange(len(self.texts))[client::clients]
        return self.texts[numbers[self.coins[numbers]]]

    # --- what the recorder calls ------------------------------------------------------------------------------------

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Read the global model that a round begins with, or that the last one ended with: the whole or adapters."""
        names = dict(self.module.state_dict())
        sent = adapters_names(self.module, names)
        own = {sent.get(name, name): value for name, value in weights.items()}
        if unknown := [name for name in own if name not in names]:
            raise BadInput(f"planted texts: the model has no '{unknown[0]}'; give the module whose state travels")
        try:
            self.module.load_state_dict(own, strict=False)
        except RuntimeError as error:  # of other shapes
            raise BadInput(f"planted texts: {str(error)[:200]}; give the module whose state travels") from error
        self._losses = [*self._losses[:1], mean_losses(self.module, self.texts, self.tokens)]

    def read(self, state: Mapping[str, Tensor], canary: int | None, *, difference: bool) -> None:
        """Nothing is read of updates."""

    def save(self, writer: Writer) -> None:
        """Write what was read beside the rounds, and the coins into the truth.

        Raises:
            OSError: a file can't be written.
        """
        if len(self._losses) > 1:
            first, last = self._losses
            fallen = (first - last).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            seen = TextCanaries(
                unit="record",
                adjacency="add-remove",
                readings={"final": fallen[None]},
                covered=("final",) if self.claimed is not None else (),
                claimed=self.claimed,
                delta=self.delta,
            )
            writer.write_part("canaries", seen.readings, CanariesEntry.model_validate(seen))
            save_part(writer.folder / FOLDER / COINS, writer.header.id, {"coins": self.coins})
