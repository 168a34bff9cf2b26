"""Record a deployment at the server: a strategy around the federation's own, which sees what a curious server sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedaudit.adapters.flower.messages import MODEL, check_names, has_model, is_training, log, num_examples, state_in
from fedaudit.adapters.flower.privacy import wrapped
from fedaudit.pipeline.ledger import server_noise
from fedaudit.task.training import TrainingConfig
from fedaudit.utils.errors import BadInput, in_words, unknown_name

if TYPE_CHECKING:
    from fedaudit.capture.recorder import Recorder

Training = TrainingConfig | Mapping[str, Any] | Callable[[int], TrainingConfig | dict[str, Any] | None]


class AuditStrategy(Strategy):  # type: ignore[misc]
    """Record every round of training that a strategy configures, for ``fedaudit attack``.

    It must be the outermost: inside another wrapper (differential privacy, say) it sees what that has made of the
    updates. It changes nothing that travels, and no error of its own reaches the federation: it is logged once.

    Args:
        strategy: any strategy of Flower's message API.
        recorder: writes what travelled, round by round; ``Recorder("recording", module=…, loss=…)``.
        training: how clients train, where the server knows it: a TrainingConfig, or a mapping of its fields, in which
            ``batch_size`` and ``epochs`` stand for what they make of a client's number of examples; or a function of
            that number.

    Raises:
        BadInput: ``training`` has a field that there isn't, or a number that no training has.

    >>> facts = {"learning_rate": 0.1, "batch_size": 32, "epochs": 1}
    >>> AuditStrategy(FedAvg(), recorder, training=facts)  # doctest: +SKIP
    """

    def __init__(self, strategy: Strategy, recorder: Recorder, *, training: Training | None = None) -> None:
        self.strategy = strategy
        self.recorder = recorder
        self._training = training
        self._key = str(getattr(strategy, "arrayrecord_key", MODEL))
        self._first: Mapping[str, Tensor] | None = None  # the model that the open round's first client was sent
        self._others: dict[int, RecordDict] = {}  # the messages to those that were sent another, by node id
        self._logged: set[str] = set()
        if not callable(training):
            config_for(training, 1)  # what is wrong with it is said before the federation starts

    def __getattr__(self, name: str) -> Any:
        """Take what isn't its own from the strategy."""
        return getattr(self.__dict__["strategy"], name)

    def start(self, *arguments: Any, **options: Any) -> Result:
        """Run the strategy's own ``start``, with its rounds of training led through here."""
        configure, aggregate = self.strategy.configure_train, self.strategy.aggregate_train
        own = {name: vars(self.strategy).get(name) for name in ("configure_train", "aggregate_train")}
        self.strategy.configure_train = lambda *a, **o: self._configured(configure, *a, **o)
        self.strategy.aggregate_train = lambda *a, **o: self._aggregated(aggregate, *a, **o)
        try:
            result = self.strategy.start(*arguments, **options)
            self._quietly(self._last, result)
            return result
        finally:
            for name, value in own.items():
                if value is None:
                    delattr(self.strategy, name)
                else:
                    setattr(self.strategy, name, value)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Configure the round as the strategy does, and record what is sent."""
        return self._configured(self.strategy.configure_train, server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate as the strategy does, and record what came back."""
        result: tuple[ArrayRecord | None, MetricRecord | None]
        result = self._aggregated(self.strategy.aggregate_train, server_round, replies)
        return result

    def configure_evaluate(self, *arguments: Any, **options: Any) -> list[Message]:
        """Configure an evaluation as the strategy does."""
        return list(self.strategy.configure_evaluate(*arguments, **options))

    def aggregate_evaluate(self, *arguments: Any, **options: Any) -> MetricRecord | None:
        """Aggregate an evaluation as the strategy does."""
        return self.strategy.aggregate_evaluate(*arguments, **options)

    def summary(self) -> None:
        """Log the strategy's own summary."""
        self.strategy.summary()

    def _configured(
        self, configure: Callable[..., Any], server_round: int, *arguments: Any, **options: Any
    ) -> list[Message]:
        messages = list(configure(server_round, *arguments, **options))
        self._quietly(self._begin, server_round, messages)
        return messages

    def _aggregated(
        self, aggregate: Callable[..., Any], server_round: int, replies: Iterable[Message], **options: Any
    ) -> Any:
        replies = list(replies)
        hidden = self._quietly(self._record, replies) or 0
        try:
            result = aggregate(server_round, replies, **options)
            self._quietly(self._total, hidden, replies, result)
        finally:
            self._quietly(self._end)
        return result

    def _begin(self, server_round: int, messages: Sequence[Message]) -> None:
        """Open the round with the model that was sent, which needn't be the one that came in."""
        self._first, self._others = None, {}
        contents = {m.metadata.dst_node_id: m.content for m in messages if is_training(m)}
        if not contents:
            return
        sent, *_ = contents.values()
        state = state_in(sent, self._names(), self._key)
        self._others = {
            node: content
            for node, content in contents.items()
            if content is not sent and content.array_records != sent.array_records
        }
        self.recorder.begin_round(state, server_round - 1)
        self._first = state
        if (noise := server_noise(wrapped(self.strategy))) is not None:
            self.recorder.noise_at_server(noise[0], mean=noise[1])

    def _record(self, replies: Sequence[Message]) -> int:
        """Record what came back; return how many clients sent something that isn't a model."""
        hidden = 0
        for reply in replies:
            if self._first is None or reply.has_error():
                continue
            if not has_model(reply.content, self._key):
                hidden += 1
            else:
                self._quietly(self._update, reply)
        return hidden

    def _update(self, reply: Message) -> None:
        assert self._first is not None
        node, sent = reply.metadata.src_node_id, None
        if node in self._others:
            sent = state_in(self._others[node], self._names(), self._key)
        state = state_in(reply.content, list(self._first), self._key)
        check_names(state, sent or self._first)
        examples = num_examples(reply.content, getattr(self.strategy, "weighted_by_key", None))
        self.recorder.update(
            node, state, num_examples=examples, sent=sent, training=config_for(self._training, examples)
        )

    def _total(self, hidden: int, replies: Sequence[Message], result: Any) -> None:
        """Record the sum alone, where that is all that the server can read."""
        if not hidden or self._first is None:
            return
        answered = [reply for reply in replies if not reply.has_error()]
        arrays = result[0] if isinstance(result, tuple) and result else None
        if hidden < len(answered) or not isinstance(arrays, ArrayRecord):
            raise BadInput(f"{hidden} of {len(answered)} replies hold no readable model; they aren't recorded")
        state = state_in(RecordDict({"arrays": arrays}), list(self._first))
        check_names(state, self._first)
        counts = [num_examples(reply.content, getattr(self.strategy, "weighted_by_key", None)) for reply in answered]
        known = [n for n in counts if n]
        told = [config for n in known if (config := config_for(self._training, n)) is not None]
        self.recorder.total(
            state,
            clients=len(answered),
            num_examples=sum(known) if len(known) == len(answered) else None,
            training=told if len(told) == len(answered) else (),
        )

    def _end(self) -> None:
        if self._first is not None:
            self._first, self._others = None, {}
            self.recorder.end_round()

    def _last(self, result: Any) -> None:
        """Give the recorder the model that the federation ended with, of which canaries are read."""
        arrays = getattr(result, "arrays", None)
        if getattr(self.recorder, "canaries", None) is not None and isinstance(arrays, ArrayRecord) and len(arrays):
            self.recorder.close(state_in(RecordDict({"arrays": arrays}), self._names()))

    def _names(self) -> list[str] | None:
        module = getattr(self.recorder, "module", None)
        return None if module is None else list(module.state_dict())

    def _quietly(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do the work; log what goes wrong with it, each thing once. Return None then."""
        try:
            return work(*arguments)
        except Exception as error:
            text = in_words(error)
            if text not in self._logged:
                self._logged.add(text)
                log.warning("fedaudit doesn't record this; the federation goes on: %s", text)
            return None


def config_for(training: Training | None, examples: int | None) -> TrainingConfig | None:
    """Return how a client trains that has so many examples, as far as the server knows."""
    if training is None or isinstance(training, TrainingConfig):
        return training
    if examples is None:
        return None
    given = training(examples) if callable(training) else dict(training)
    if given is None or isinstance(given, TrainingConfig):
        return given
    size, epochs = given.pop("batch_size", examples), given.pop("epochs", 1)
    if not (isinstance(size, int) and isinstance(epochs, int) and size > 0 and epochs > 0):
        raise BadInput(f"training: batch_size {size!r} and epochs {epochs!r} must be whole numbers from 1")
    sizes = [min(size, examples - start) for start in range(0, examples, size)] * epochs
    whole = {"local_steps": len(sizes), "batch_sizes": tuple(sizes), "data_size": examples, **given}
    names = [field.name for field in dataclasses.fields(TrainingConfig)]
    if unknown := [name for name in whole if name not in names]:
        raise BadInput(f"training: {unknown_name('field', unknown[0], [*names, 'batch_size', 'epochs'])}")
    if "learning_rate" not in whole:
        raise BadInput("training: the learning_rate is missing")
    return TrainingConfig(**whole)
