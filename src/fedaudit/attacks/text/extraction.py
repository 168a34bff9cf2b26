"""What a model of text recites: how it goes on where texts begin, and how probable their rest is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.attacks.base import Case, Progress, register
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.records.target import RecordsAttack, Target, held, target_of, whole
from fedaudit.modalities import NOTHING
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count, Positive, Whole


@dataclass(frozen=True, kw_only=True)
class ExtractionFinding(Finding, kind="extraction"):
    """How a model that predicts the next token goes on with each of the adversary's records.

    Attributes:
        begins: (n,) int64: how many of the record's tokens the model is given.
        continued: (n, 1 + draws, length) int64: those, and behind them what the model says, as many tokens as the
            record has; the likeliest token each time, then drawn. ``NOTHING`` elsewhere.
        logs: (m, n) float64 the log-probability that one draw is the record's own rest, word for word, under each
            model that travelled, the last one being that which is asked.
        greedy: (m, n) bool: whether the likeliest tokens are the record's own rest.
        rounds: (m,) int64: in which round each model was sent; that which a client returned has the number of its last
            round, and one.
        before: as ``continued``, by the model that was sent before the first round; None: it isn't known, or is the one
            that is asked.
    """

    begins: Tensor
    continued: Tensor
    logs: Tensor
    greedy: Tensor
    rounds: Tensor
    before: Tensor | None = None


@register
class Extraction(RecordsAttack):
    """The model is given how a text begins, and says how it goes on (Carlini et al. 2021; Carlini et al. 2023).

    The likeliest token is taken each time, and further continuations are drawn. How probable it is that one draw is
    the text's own rest is computed from the model's probabilities, not counted over draws: the product of those of its
    tokens under the same temperature and the same k likeliest tokens. So (n, p)-discoverable extraction (Hayes et al.
    2025) is known for every number of draws n, under every model that travelled. Only this uses more of a record than
    its beginning; it is what an auditor knows, and who has the beginning alone finds out by drawing. Departures: a
    continuation has as many tokens as the record's rest; beginnings are of texts, not of parts of documents.

    Args:
        prefix: tokens of each text that the model is given; None: half of each one's.
        draws: continuations that are drawn, beside that of the likeliest tokens.
        temperature: of the draws; below 1 likely tokens become likelier.
        top_k: a draw takes one of the so many likeliest tokens.
    """

    name = "extraction"
    summary = "what a model of text recites: how it goes on where training texts begin"
    paper = "Carlini et al. 2021 (Extracting training data from large language models); Hayes et al. 2025"
    needs = ("records (threat.target_records)", "a model that predicts the next token")
    examples = ("tokens",)
    recovers = "what the model recites"
    finds = ExtractionFinding

    prefix: Count | None = None
    draws: Annotated[Whole, Field(le=1000)] = 4
    temperature: Positive = 1.0
    top_k: Count = 40

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.asks_for_members and case.next_token and case.rounds > 1

    def check(self, observation: Observation) -> None:
        """Raise unless there are texts to ask about, and the model predicts the next token."""
        super().check(observation)
        whole(observation)
        if not observation.task_info.causal:
            asked = observation.task_info.asked
            raise NotApplicable(f"{self.name} needs a model that predicts the next token; this one predicts {asked}")
        if not bool((self._begins(observation)[1] > 0).any()):
            raise NotApplicable(f"{self.name}: no text is longer than its beginning; lower attacks.{self.name}.prefix")

    def _begins(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return (n,) how many tokens the model is given of each record, and how many then follow; 0: too short.

        Of the labels ``NOTHING`` stands where the loss counts none: so of an answer to a question the question is
        always given, and so is what fills up on the left.
        """
        records, tokens = held(observation), observation.task_info.tokens
        labels, filled = records.labels, torch.zeros(len(records), dtype=torch.int64)
        if tokens is not None and tokens.padding is not None:
            filled = (records.inputs == tokens.padding).cumprod(dim=1).sum(dim=1)
        asked = labels != NOTHING
        places = torch.arange(labels.shape[1])
        first = torch.where(asked, places, labels.shape[1]).amin(dim=1) + 1
        end = torch.where(asked, places + 2, 0).amax(dim=1)
        length = (end - first).clamp(min=0)
        begins = first + length // 2 if self.prefix is None else first.maximum(filled + self.prefix)
        return begins, torch.where(length > 0, end - begins, 0).clamp(min=0)

    def _run(
        self, observation: Observation, generator: torch.Generator, _device: str, progress: Progress
    ) -> ExtractionFinding:
        records = held(observation)
        begins, following = self._begins(observation)
        target = self.target(observation, generator)
        chosen = torch.nonzero(following)[:, 0]
        texts, begins_of, ends = records.inputs[chosen].clamp(min=0), begins[chosen], (begins + following)[chosen]
        earlier = [target_of(observation, state) for state in observation.weights]
        models = earlier if self.model == "global" else [*earlier, target]
        logs = torch.full((len(models), len(records)), -torch.inf, dtype=torch.float64)
        greedy = torch.zeros(len(models), len(records), dtype=torch.bool)
        for own, likeliest, model in zip(logs, greedy, models, strict=True):
            own[chosen], likeliest[chosen] = self._probabilities(model, texts, begins_of, ends)
        rounds = _rounds(observation, len(models))
        asked = [target, *([models[0]] if int(rounds[0]) == 0 and len(models) > 1 else [])]
        said = []
        for number, model in enumerate(asked):
            continued = torch.full((len(records), 1 + self.draws, texts.shape[1]), NOTHING)
            for i in range(1 + self.draws):
                continued[chosen, i] = self._continued(model, texts, begins_of, ends, generator if i else None)
                progress(number * (1 + self.draws) + i + 1, len(asked) * (1 + self.draws))
            said.append(continued)
        short = len(records) - len(chosen)
        notes = (f"{short} of {len(records)} texts are no longer than their beginning, and count for nothing",)
        return ExtractionFinding(
            begins=begins.where(following > 0, 0),
            continued=said[0],
            logs=logs,
            greedy=greedy,
            rounds=rounds,
            before=said[1] if len(said) > 1 else None,
            notes=(*target.notes, *notes[: int(short > 0)]),
        )

    def _probabilities(self, model: Target, texts: Tensor, begins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Return (n,) the log-probability of each text's rest in one draw, and whether it has the likeliest tokens."""
        logs, greedy = [], []
        where = torch.stack([begins, ends], dim=1)
        for outputs, (part, span) in model.in_parts(texts, texts, where):
            scores = outputs.double()[:, :, :-1]  # of the tokens from the second on
            own = part[:, None, 1:]
            places = torch.arange(1, part.shape[1])
            rest = (places >= span[:, :1]) & (places < span[:, 1:])
            drawn = self._kept(scores).log_softmax(dim=1).gather(1, own)[:, 0]
            logs.append(drawn.where(rest, 0.0).sum(dim=1))
            greedy.append(((scores.argmax(dim=1) == own[:, 0]) | ~rest).all(dim=1))
        return torch.cat(logs), torch.cat(greedy)

    def _kept(self, scores: Tensor) -> Tensor:
        """Return scores (n, vocabulary, ...) over the temperature, and -inf for all but the likeliest tokens."""
        if self.top_k < scores.shape[1]:
            least = scores.topk(self.top_k, dim=1).values[:, -1:]
            scores = scores.where(scores >= least, -torch.inf)
        return scores / self.temperature

    def _continued(
        self, model: Target, texts: Tensor, begins: Tensor, ends: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Return (n, length) the texts' beginnings and what the model says behind them; without generator, greedily."""
        places = torch.arange(texts.shape[1])
        found = texts.where(places < begins[:, None], 0)
        for place in range(int(begins.min()), int(ends.max())):
            rows = torch.nonzero((begins <= place) & (place < ends))[:, 0]
            if not len(rows):
                continue
            before = found[rows, :place]
            scores = torch.cat([part[:, :, -1].double() for part, _ in model.in_parts(before)]).nan_to_num()
            if generator is None:
                found[rows, place] = scores.argmax(dim=1)
            else:
                chances = self._kept(scores).softmax(dim=1)
                found[rows, place] = torch.multinomial(chances, 1, generator=generator)[:, 0]
        return found.where(places < ends[:, None], NOTHING)


def _rounds(observation: Observation, models: int) -> Tensor:
    """Return (models,) in which round each was sent; by their order where that isn't known."""
    known = {id(message.weights): message.round for message in observation.messages}
    sent = [known.get(id(state), -1) for state in observation.weights]
    sent = sent if len(set(sent) - {-1}) == len(sent) else list(range(len(sent)))
    return torch.tensor([*sent, *[sent[-1] + 1] * (models - len(sent))])
