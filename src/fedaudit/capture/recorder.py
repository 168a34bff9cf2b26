"""Records a real federation, round by round: what travelled and, where local training was captured, its truth."""

from __future__ import annotations

import copy
import dataclasses
import logging
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from fedaudit.capture.estimators import FITTED
from fedaudit.defences.privacy import of_private_steps
from fedaudit.modalities import fitting_kind
from fedaudit.modalities.packed import PACKED, packed_alone
from fedaudit.modalities.tokens import of_one_length
from fedaudit.models import (
    adapters_names,
    embedded_words,
    end_of,
    has_batch_norm,
    is_of_transformers,
    of_one_tensor,
    padding_of,
)
from fedaudit.models.of_transformers import FEW_BITS, of_few_bits
from fedaudit.models.own import InOrder
from fedaudit.task.targets import NEXT_TOKEN, REGRESSION, observed_task, task_named, usual_task
from fedaudit.task.training import BCE, LOSSES, MSE, TOLD, UNMODELLED, TrainingConfig
from fedaudit.transcript.files import (
    INDEX,
    Form,
    Header,
    MessageEntry,
    ObservedTask,
    RoundEntry,
    TotalEntry,
    Writer,
    read_header,
    read_rounds,
)
from fedaudit.transcript.reading import by_own_names, outputs_of
from fedaudit.transcript.rounds import check_new
from fedaudit.transcript.secure_sum import training_of_sum
from fedaudit.transcript.truth import CANDIDATES, FOLDER, save_part, seen_tensors, truth_file
from fedaudit.utils.errors import BadInput
from fedaudit.utils.integrity import blank
from fedaudit.utils.plain_tensors import plain
from fedaudit.utils.validation import explain

if TYPE_CHECKING:
    from fedaudit.capture.canaries import CanaryClients, CanaryTexts
    from fedaudit.capture.capture import Capture
    from fedaudit.defences.clipping import Clipping
    from fedaudit.modalities import TokenInfo
    from fedaudit.modalities.columns import Column
    from fedaudit.transcript.update import ClientDefenceInfo

# Name to a tensor, or to an array that torch takes; or these alone, in the order of the state or of an estimator.
State = Mapping[str, Any] | Sequence[Any]

_LONGEST_NAME = 200
_CONFIG = TypeAdapter(TrainingConfig)  # takes ten milliseconds to make
_OTHER_OUTPUTS = (
    "in training the model returns {heads}, and in evaluation mode other outputs: make it without the auxiliary ones "
    "(aux_logits=False), or wrap it in a module that returns one"
)


class Recorder:
    """Writes what travels in a federation to a folder that ``fedaudit attack`` takes; see docs/how-to/your-own-loop.md.

    A round is readable as soon as it is closed, whatever happens later, and sealed: its index lists the digests of its
    files and the round's before (:mod:`fedaudit.utils.integrity`). In memory is one round's global model, one
    update, and the inputs of the client that is being captured.

    Args:
        folder: new or empty; with ``append`` a recording that goes on.
        name: of the federation.
        module: that clients train; without it the one that :meth:`capture` sees.
        mean, std: of the preprocessing, per channel; without them they are estimated from the range of the inputs.
        loss: registered name, where it isn't captured: cross-entropy, bce-with-logits or mse.
        task: what the model is asked for, one of :data:`fedaudit.task.TASKS`; without it the loss and the
            targets of all batches say.
        tokens: of text, what everybody knows of it (:class:`fedaudit.modalities.TokenInfo`, or its fields): vocabulary,
            padding, end, whether the next token is learnt. Without it the vocabulary is the embedding's.
        columns: of a table, their names, types, positions and categories as the model sees them
            (:class:`fedaudit.modalities.columns.Column`, or its fields).
        every: only every so many rounds are recorded; the others cost nothing.
        canaries: of an audit of ε: clients, or planted texts.
        append: go on with the recording in ``folder``, for a federation that goes on, too.

    Raises:
        BadInput: the folder is in use or can't be written, or a setting can't be used.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        name: str = "federation",
        module: nn.Module | None = None,
        mean: tuple[float, ...] | list[float] | None = None,
        std: tuple[float, ...] | list[float] | None = None,
        loss: str | None = None,
        task: str | None = None,
        tokens: TokenInfo | Mapping[str, Any] | None = None,
        columns: Sequence[Column | Mapping[str, Any]] | None = None,
        every: int = 1,
        canaries: CanaryClients | CanaryTexts | None = None,
        append: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.module = module
        self.canaries = canaries
        self._ended = False  # with the last global model
        if canaries is not None and (append or every > 1):
            raise BadInput("canaries are read in every round of one recording: leave out append and every")
        if every < 1:
            raise BadInput(f"every is {every}; it must be 1 or more")
        if loss is not None and loss not in LOSSES:
            raise BadInput(f"loss is '{loss}'; give one of {', '.join(LOSSES)}, or none and give it to the attack")
        if (mean is None) != (std is None):
            raise BadInput("give mean and std together, or neither")
        self.every = every
        self._clients: dict[str, int] = {}
        self._next = 0
        self._open: RoundEntry | None = None
        self._weights: dict[str, Tensor] = {}
        self._personal: set[str] = set()  # what clients train and nobody sends
        given: dict[str, Any] = {"mean": mean, "std": std, "loss": loss, "tokens": tokens}
        given["columns"] = None if columns is None else tuple(columns)
        before = None  # digest of the last closed round
        if append and (self.folder / INDEX).is_file():
            self._header = read_header(self.folder)
            if self._header.source != "captured":
                raise BadInput(f"'{self.folder}' holds a simulation's transcript; record to a new folder")
            for entry in read_rounds(self.folder, self._header):
                before = entry.digest
                self._next = entry.index + 1
                self._clients |= {m.name: m.client for m in entry.messages if m.name is not None}
        else:
            with suppress(OSError):  # of a recorder that was killed before it had written anything else
                (self.folder / f".{INDEX}.draft").unlink()
            check_new(self.folder)
            known = Header(source="captured", name=_printable(name), id=secrets.token_hex(16), digest=blank())
            self._header = known
        self._learn(**given)
        self._said, self._loss = task, loss
        if task is not None:
            self._header.observed = self._observed(task=task)
        try:
            self._writer = Writer(self.folder, self._header, before)
        except OSError as error:
            raise self._full(error) from None

    def __repr__(self) -> str:
        return f"Recorder('{self.folder}': {self._next} rounds, {len(self._clients)} clients)"

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.end_round()

    # --- rounds -----------------------------------------------------------------------------------------------------

    @contextmanager
    def round(self, weights: State, index: int | None = None) -> Iterator[None]:
        """Record one round: ``with recorder.round(global_model.state_dict()): …``.

        It is closed however the block ends.

        Args:
            weights: the global model's state, as it was sent; of a part of the model where only that travels.
            index: from 0; default: the one after the last.

        Raises:
            BadInput: the folder can't be written, or the round was recorded already.
        """
        self.begin_round(weights, index)
        try:
            yield
        finally:
            self.end_round()

    def begin_round(self, weights: State, index: int | None = None) -> None:
        """Begin a round, as :meth:`round` does; one that is still open is closed."""
        self.end_round()
        index = self._next if index is None else index
        if index < self._next:
            raise BadInput(f"round {index} comes after round {self._next - 1}; rounds are recorded in order, each once")
        self._next = index + 1
        if index % self.every:
            return
        # whoever trains changes theirs
        self._weights = {key: value.clone() for key, value in self._tensors(weights).items()}
        file = f"round-{index:05d}-global.safetensors"
        if self.canaries is not None:
            self.canaries.begin(self._weights)
        entry = RoundEntry(index=index, weights=file, client_weights={}, messages=[], digest=blank())
        self._save(file, self._weights)
        self._open = entry

    def end_round(self) -> None:
        """Close the round: from now on it is readable. Nothing happens where none is open."""
        entry, self._open, self._weights = self._open, None, {}
        if entry is None or not (entry.messages or entry.total):
            self._writer.close_round(None)
            return
        entry.time = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            self._writer.close_round(entry)
            self._save_canaries()
        except OSError as error:
            raise self._full(error) from None

    def close(self, weights: State | None = None) -> None:
        """Close the round that is open, if one is; with canaries give the last global model's ``weights``, too."""
        self.end_round()
        if self.canaries is not None and weights is None and self._next and not self._ended:
            logging.getLogger("fedaudit").warning(
                "fedaudit: warning: canaries are read of the last global model, too; give it: Recorder.close(weights)"
            )
        if self.canaries is not None and weights is not None:
            self._ended = True
            self.canaries.begin(self._tensors(weights))
            try:
                self._save_canaries()
            except OSError as error:
                raise self._full(error) from None

    # --- clients ----------------------------------------------------------------------------------------------------

    def capture(self, module: nn.Module | None = None) -> AbstractContextManager[Capture | None]:
        """Watch one client's local training: ``with recorder.capture() as captured: train(model, …)``.

        The training stays as it is. Between recorded rounds nothing is watched, and ``captured`` is None.

        Args:
            module: that is trained; default: the recorder's, else the first that is called with gradients on.
        """
        if self._open is None:
            return nullcontext(None)
        from fedaudit.capture.capture import Capture

        return Capture(module or self.module, self._weights)

    def update(
        self,
        client: str | int,
        state: State,
        captured: Capture | None = None,
        *,
        form: Form = "weights",
        training: TrainingConfig | Mapping[str, Any] | None = None,
        num_examples: int | None = None,
        seconds: float | None = None,
        sent: State | None = None,
        canary: int | None = None,
        sanitised: ClientDefenceInfo | None = None,
    ) -> None:
        """Record what one client sends; of a canary only what is read of it.

        Args:
            client: its name in the framework.
            state: what it sends: parameters and buffers by name, of the whole model or of a part (adapters, layers).
            captured: of its local training; with it the truth is recorded, too.
            form: what ``state`` is: the ``weights`` after training, their ``difference`` to what was sent, or a
                ``gradient``.
            training: how it trained, where it isn't captured; of a mapping, what counts in place of what was captured,
                ``{"proximal_mu": 0.01}`` for example.
            num_examples: that it holds, as it tells the server.
            seconds: that it trained; default: as captured.
            sent: what this client was sent, where that isn't the round's global model.
            canary: its number, where it is one of the recorder's ``canaries``.
            sanitised: what everybody knows of the defence that ``state`` went through; default: as captured (Opacus).

        Raises:
            BadInput: the folder can't be written, the client sent an update already, or something can't be read.
        """
        entry = self._open
        if entry is None:
            return
        if self.canaries is not None and form != "gradient":
            self.canaries.read(self._tensors(state), canary, difference=form == "difference")
        if canary is not None:
            return
        tensors = self._tensors(state)
        if captured is not None:
            captured.choose(tensors, difference=None if form == "gradient" else form == "difference")
        name = _printable(str(client))
        number = self._clients.setdefault(name, len(self._clients))
        if any(m.client == number for m in entry.messages):
            raise BadInput(f"client {name} sent an update of round {entry.index} already; it sends one")
        notes = list(captured.notes) if captured is not None else []
        config = self._training(captured, training, num_examples, notes)
        if sanitised is None and captured is not None and (private := captured.private) is not None:
            sanitised = of_private_steps(private, config, "gradient" if form == "gradient" else "weights")
        stem = f"round-{entry.index:05d}-client-{number:05d}"
        file = f"{stem}.safetensors"
        message = MessageEntry(client=number, name=name, form=form, file=file, training=config, sanitised=sanitised)
        self._save(message.file, tensors)
        start = captured.start if captured is not None else {}
        received = self._weights if sent is None else self._weights | self._tensors(sent)
        if sent is None and _another_model(start, received):
            received = {key: start.get(key, value) for key, value in received.items()}
            notes.append("clients don't train from the global model that the round began with")
        if any(_differs(value, self._weights.get(key, value)) for key, value in received.items()):
            entry.client_weights[number] = f"{stem}-sent.safetensors"
            own = {key: value for key, value in received.items() if key in self._weights}
            self._save(entry.client_weights[number], own)
        message.num_examples = sum(config.batch_sizes) if config else num_examples
        message.seconds = seconds if seconds is not None or captured is None else captured.seconds
        if captured is not None and (config is not None or not captured.private):
            self._keep_truth(captured, entry.index, number, config, received, notes)
        message.notes = list(dict.fromkeys(notes))
        entry.messages.append(message)

    def total(
        self,
        state: State,
        *,
        clients: int,
        num_examples: int | None = None,
        form: Form = "weights",
        training: Sequence[TrainingConfig | Mapping[str, Any]] = (),
    ) -> None:
        """Record what several clients sent together, where secure aggregation lets nobody read single updates.

        Args:
            state: their mean: of weights, differences or gradients, as ``form`` says.
            clients: how many.
            num_examples: of all of them together; default: as ``training`` says.
            form: as of :meth:`update`.
            training: how each of them trained, where that is known; the mean is weighted by their examples.

        Raises:
            BadInput: the folder can't be written, the round has a total already, or ``training`` can't be used.
        """
        entry = self._open
        if entry is None:
            return
        if entry.total is not None:
            raise BadInput(f"round {entry.index} has a total already")
        if training and len(training) != clients:
            raise BadInput(f"training tells of {len(training)} clients, and the total is of {clients}")
        each = [config for one in training if (config := self._training(None, one, None, [])) is not None]
        sizes = [sum(config.batch_sizes) for config in each]
        if each and num_examples not in (None, sum(sizes)):
            raise BadInput(f"training tells of {sum(sizes)} examples, num_examples of {num_examples}")
        alone = self.module is not None and has_batch_norm(self.module)
        config = training_of_sum(each, [n / sum(sizes) for n in sizes], alone) if each else None
        file, number = f"round-{entry.index:05d}-total.safetensors", num_examples or (sum(sizes) or None)
        try:
            made = TotalEntry(clients=clients, form=form, file=file, num_examples=number, training=config)
        except ValidationError as error:
            raise BadInput(explain(error)) from None
        self._save(file, self._tensors(state))
        entry.total = made

    def noise_at_server(self, aggregator: Clipping, *, mean: bool) -> str:
        """Say which noise the server adds to what it averages, for the ledger and readers, and return that in words.

        ``mean``: it is the clients' mean; of another rule no ε is known.
        """
        said = aggregator.in_words() + "; of what it averages no ε is known, for it isn't FedAvg's mean" * (not mean)
        if said not in self._header.notes:
            self._header.central = aggregator.written() if mean else None
            self.note(said)
        return said

    def note(self, *notes: str) -> None:
        """Say what readers must know of the whole recording, a line each; it is written with the next round."""
        self._header.notes += [note for note in notes if note not in self._header.notes]

    def candidates(self, inputs: Any, labels: Any) -> None:
        """Give other examples of the same kind, normalised as the model sees them: victims are looked for among them.

        Those that no update uses are the records that nobody trained on, for attacks that ask who was in.

        Args:
            inputs: (n, ...); of a model of several a tuple or a dictionary of such, as it takes them.
            labels: (n,), of a causal task (n, length); of a model of several outputs as its loss takes them.

        Raises:
            BadInput: there are none, they have another shape than what clients trained on, or the folder can't be
                written.
        """
        inputs, labels = packed_alone(inputs, "candidates"), packed_alone(labels, "labels of candidates", whole=True)
        inputs, labels = (plain(one) if isinstance(one, Tensor) else one for one in (inputs, labels))
        if not len(inputs) or len(inputs) != len(labels):
            raise BadInput(f"{len(inputs)} inputs and {len(labels)} labels are no candidates")
        known = self._header.observed.input_shape
        if known is not None and not inputs.is_floating_point() and inputs.ndim == 2:
            labels = of_one_length([labels], known[0]) if labels.shape == inputs.shape else labels
            inputs = of_one_length([inputs], known[0])
        if known is not None and known != tuple(inputs.shape[1:]):
            raise BadInput(f"candidates of shape {tuple(inputs.shape[1:])}: clients' examples have {known}")
        path = self.folder / FOLDER / CANDIDATES
        try:
            kept = inputs.float() if inputs.is_floating_point() else inputs.long()
            tensors = {"seen/candidates/inputs": kept, "seen/candidates/targets": labels}
            save_part(path, self._header.id, tensors)
        except (OSError, ValueError) as error:
            raise self._full(error) from None

    def without_personal(self, module: nn.Module) -> nn.Module:
        """Return a copy of a client's module as others have it: layers that stay with the clients are drawn anew."""
        if not self._personal:
            return module
        made = copy.deepcopy(module)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            for place, part in made.named_modules():
                own = dict(part.named_parameters(place, recurse=False))
                if callable(reset := getattr(part, "reset_parameters", None)) and self._personal & own.keys():
                    reset()
                    continue
                for name in self._personal & own.keys():
                    nn.init.normal_(own[name], std=0.02)
                kept = dict(part.named_buffers(place, recurse=False))
                if callable(reset := getattr(part, "reset_running_stats", None)) and self._personal & kept.keys():
                    reset()
                    continue
                for name in self._personal & kept.keys():
                    kept[name].zero_()
        return made

    # --- what is known ----------------------------------------------------------------------------------------------

    def _training(
        self,
        captured: Capture | None,
        given: TrainingConfig | Mapping[str, Any] | None,
        data_size: int | None,
        notes: list[str],
    ) -> TrainingConfig | None:
        try:
            config = captured.training() if captured is not None else None
        except BadInput as error:
            notes.append(str(error))
            config = None
        if isinstance(given, TrainingConfig) or (given is None and config is None):
            return _told(config, given, notes)
        values = _CONFIG.dump_python(config) if config else {}
        if config is not None and data_size is not None and data_size >= max(config.batch_sizes):
            values["data_size"] = data_size
        try:
            return _told(config, _CONFIG.validate_python(values | dict(given or {})), notes)
        except ValidationError as error:
            raise BadInput(f"training: {explain(error)}") from None

    def _keep_truth(
        self,
        captured: Capture,
        index: int,
        client: int,
        config: TrainingConfig | None,
        received: Mapping[str, Tensor],
        notes: list[str],
    ) -> None:
        """Write what the client trained on, if it is of a form that can be attacked; else say why not."""
        why = unusable(captured, config)
        if why:
            notes.append(f"what clients trained on isn't recorded: {why}")
            return
        inputs, targets = self._joined(captured)
        known = self._header.observed.input_shape
        if inputs.is_floating_point() and known is not None and known != tuple(inputs.shape[1:]):
            shapes = f"{tuple(inputs.shape[1:])}, others' {known}"
            notes.append(f"what a client trained on isn't recorded: its inputs have the shape {shapes}; use one shape")
            return
        own = captured.packed_inputs, captured.heads, captured.packed_targets
        first = tuple(getattr(self._header.observed, key) for key in ("packed_inputs", "heads", "packed_targets"))
        if known is not None and own != first:
            notes.append("what a client trained on isn't recorded: its inputs or outputs have other parts than others'")
            return
        randomness = torch.stack(list(captured.randomness)) if captured.randomness else None
        start, sent = _at_home(captured, config, received)
        self._personal |= start.keys() - sent
        tensors = seen_tensors(index, client, inputs, targets, randomness, start)
        before, why = self._header.observed, self._learn_from(captured, inputs, targets, notes)
        if why is not None:
            self._header.observed = before
            notes.append(f"what a client trained on isn't recorded: {why}")
            return
        try:
            save_part(self.folder / FOLDER / truth_file(index, client), self._header.id, tensors)
        except (OSError, ValueError) as error:
            raise self._full(error) from None

    def _joined(self, captured: Capture) -> tuple[Tensor, Tensor]:
        """Return all that a client trained on as one; texts as long as the longest that any client had."""
        inputs, targets = captured.inputs, captured.targets
        if inputs[0].is_floating_point():
            asked = torch.cat(targets)
            flat = captured.loss == MSE and captured.maps
            return torch.cat([x.float() for x in inputs]), asked.flatten(1) if flat else asked
        known = self._header.observed.input_shape
        causal = all(y.shape == x.shape and not y.is_floating_point() for x, y in zip(inputs, targets, strict=True))
        texts = of_one_length([x.long() for x in inputs], known[0] if known else 0)
        return texts, of_one_length(targets, texts.shape[1]) if causal else torch.cat(targets)

    def _learn_from(self, captured: Capture, inputs: Tensor, targets: Tensor, notes: list[str]) -> str | None:
        """Learn of the task what a client's training says; return why it can't be one that is known, if so."""
        task = self._header.observed
        shape, texts = tuple(inputs.shape[1:]), not inputs.is_floating_point()
        if texts and task.tokens is None:
            words = vocabulary_of(captured.module)
            assert words is not None
            causal = targets.shape == inputs.shape and not targets.is_floating_point() and captured.loss != BCE
            padding = padding_of(captured.module)
            padding = captured.filling if padding is None else padding
            end = end_of(captured.module, inputs, padding)
            self._learn(tokens={"vocabulary": words, "padding": padding, "end": end, "causal": causal})
            fills = "none of them fills up" if padding is None else f"token {padding} fills up"
            ends = "none ends a sequence" if end is None else f"token {end} ends each sequence"
            both = "none of them fills up or ends a sequence" if padding is end is None else f"{fills}, {ends}"
            notes.append(
                f"the vocabulary is taken for the embedding's {words} tokens, and {both}; tell more: Recorder(tokens=…)"
            )
        if texts and task.input_shape is not None and task.input_shape < shape:
            self._header.observed = self._observed(input_shape=shape)
        lengths = {x.shape[1] for x in captured.inputs} | set(task.input_shape or ()) if texts else set()
        told = self._header.observed.tokens
        if len(lengths) > 1 and (told is None or told.padding is None):
            return (
                f"its texts have {min(lengths)} to {max(lengths)} tokens, and none is known that fills up: say "
                "config.pad_token_id, or Recorder(tokens={'vocabulary': …, 'padding': …})"
            )
        parts, heads, asked = captured.packed_inputs, captured.heads, captured.packed_targets
        flat = captured.loss == MSE and captured.maps
        order = captured.module.order if isinstance(captured.module, InOrder) else None
        self._learn(packed_inputs=parts, heads=heads, packed_targets=asked, order=order, flat=flat or None)
        if task.outputs is None and captured.module is not None:
            try:
                plain = {p.dtype for p in captured.module.parameters()} == {torch.float32}
                as_it_is = parts is heads is None and plain and not flat and not is_of_transformers(captured.module)
                module = captured.module
                if not as_it_is:
                    module = of_one_tensor(module, parts, heads, flat=flat).float()
                self._learn(outputs=outputs_of(module, shape, self._header.observed.tokens))
            except BadInput as error:
                return str(error) if heads is None else _OTHER_OUTPUTS.format(heads=heads)
        kind = PACKED if parts else fitting_kind(shape, discrete=not inputs.is_floating_point())
        if why := self._learn_task(captured, inputs, targets):
            return why
        self._learn(
            kind=kind.name,
            input_shape=shape,
            loss=captured.loss or "custom",
            batch_norm=captured.batch_norm,
            dropout=captured.dropout,
        )
        options = {"label_smoothing": captured.label_smoothing, "class_weights": captured.class_weights}
        if task.input_shape is None:
            self._header.observed = self._header.observed.model_copy(update=options)
        elif any(getattr(self._header.observed, key) != value for key, value in options.items()):
            notes.append("clients minimise the loss with different options")
        if kind.bounds is not None and len(shape) > 1:
            # in two steps: four times as fast
            low, high = inputs.flatten(2).amin(dim=2).amin(0), inputs.flatten(2).amax(dim=2).amax(0)
            least = torch.minimum(low, torch.tensor(task.least)) if task.least else low
            most = torch.maximum(high, torch.tensor(task.most)) if task.most else high
            self._header.observed = self._header.observed.model_copy(
                update={"least": tuple(least.tolist()), "most": tuple(most.tolist())}
            )
        return None

    def _learn_task(self, captured: Capture, inputs: Tensor, targets: Tensor) -> str | None:
        """Learn what the model is asked for; return why these targets can't be of it, if so.

        Numbers that happen to be 0 and 1 look like labels. So every client's targets are looked at, and a guess, unlike
        what the user said, is corrected.
        """
        known = self._header.observed
        shape, loss, outputs = tuple(inputs.shape[1:]), self._loss or captured.loss or "custom", known.outputs
        if captured.heads:
            self._learn(task=REGRESSION.name)
            return None
        if known.tokens is not None and known.tokens.causal:
            words = known.tokens.vocabulary
            if targets.shape != inputs.shape or targets.is_floating_point() or outputs not in (None, words):
                return (
                    f"its targets {tuple(targets.shape)} aren't the token that follows each of {tuple(inputs.shape)}, "
                    f"of {words}; models of text are asked for that, or for classes, labels or numbers of a whole text"
                )
            return NEXT_TOKEN.value_fault(targets, words)
        found = observed_task(targets, shape, loss, outputs)
        before = None if known.task is None else task_named(known.task)
        if self._said is None and found is not None and found is not before:
            if before is not None and torch.int64 in (before.dtype, found.dtype):
                return f"its targets are {found.name}, others' {before.name}; say which: Recorder(task=…)"
            if before is None or not before.real:  # numbers may be 0 and 1
                self._header.observed = self._observed(task=found.name)
        if outputs is None:
            return None
        task = usual_task(loss, outputs, self._header.observed.task)
        count = task.target_values(outputs + task.fewer_outputs)
        wanted = task.target_shape(count, shape)
        try:
            fault = task.fault(task.as_given(targets, wanted).cpu(), count, wanted)
        except BadInput as error:
            fault = str(error)
        if fault and self._said is not None:
            return f"{fault}; Recorder(task='{task.name}') said so"
        return fault and f"{fault}; where they are something else, say what: Recorder(task=…)"

    def _observed(self, **values: Any) -> ObservedTask:
        """Return what is known, with these values in its place."""
        try:
            return ObservedTask.model_validate(self._header.observed.model_dump() | values)
        except ValidationError as error:
            raise BadInput(explain(error, ObservedTask)) from None

    def _learn(self, **values: Any) -> None:
        """Keep what isn't known yet."""
        known = self._header.observed.model_dump()
        self._header.observed = self._observed(
            **{key: value for key, value in values.items() if value is not None and known[key] is None}
        )

    def _tensors(self, state: State) -> dict[str, Tensor]:
        """Return a state as tensors by name; a list's names are the global model's, or the module's."""
        if isinstance(state, Mapping):
            return tensors_of(state)
        if isinstance(self.module, FITTED):
            return tensors_of(self.module.state(state))
        names = list(self._weights) or ([] if self.module is None else list(self.module.state_dict()))
        if not isinstance(state, Sequence) or len(state) != len(names):
            what = f"a list of {len(state)}" if isinstance(state, Sequence) else f"a {type(state).__name__}"
            raise BadInput(
                f"the state is {what}, and the model has {len(names) or 'unknown'} tensors: give state_dict(), or all "
                "of its values in their order, and the module: Recorder(…, module=…)"
            )
        return tensors_of(dict(zip(names, state, strict=True)))

    # --- files ------------------------------------------------------------------------------------------------------

    def _save(self, file: str, tensors: dict[str, Tensor]) -> None:
        if not tensors:
            raise BadInput("the state is empty: give the model's state_dict(), or the part of it that travels")
        try:
            self._writer.write_tensors(file, tensors)
        except (OSError, ValueError) as error:
            raise self._full(error) from None

    def _save_canaries(self) -> None:
        if self.canaries is not None:
            self.canaries.save(self._writer)
            self._writer.write_header()

    def _full(self, error: Exception) -> BadInput:
        return BadInput(f"can't write the recording to '{self.folder}': {getattr(error, 'strerror', None) or error}")


def _told(seen: TrainingConfig | None, told: TrainingConfig | None, notes: list[str]) -> TrainingConfig | None:
    """Return what was told, and note what of it isn't as it was seen (FedProx's term and a client's size never are)."""
    fields = [f.name for f in dataclasses.fields(TrainingConfig) if f.name not in ("proximal_mu", "data_size")]
    other = [name for name in fields if seen and told and getattr(seen, name) != getattr(told, name)]
    notes += [f"{name} {TOLD}" for name in other]
    return told


def _differs(value: Tensor, other: Tensor) -> bool:
    return value is not other and not value.cpu().equal(other.cpu().to(value.dtype))


def _another_model(start: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> bool:
    """Whether a client trains from another model than the round's as a whole, not only from layers of its own.

    A constant tensor tells nothing: norms and biases begin so. What was sent may be rounded at home.
    """
    varied = {key: value for key, value in received.items() if (value != value.flatten()[:1]).any()}
    told = {key: start[key] for key in varied if key in start}
    halves = (torch.float16, torch.bfloat16)
    rounded = any(all(v.equal(received[key].to(kind).to(v.dtype)) for key, v in told.items()) for kind in halves)
    return bool(told) and not rounded and all(_differs(value, received[key]) for key, value in told.items())


def _at_home(
    captured: Capture, config: TrainingConfig | None, received: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], set[str]]:
    """Return what training began with and the client wasn't sent, and the names of what it was.

    What isn't trained and never travels (a frozen part) is left out: everybody has it.
    """
    if captured.module is None:
        return {}, set()
    sent = by_own_names(received, captured.start, adapters_names(captured.module, captured.start))
    still = {
        name for group in (config.groups if config else ()) if not group.learning_rate for name in group.parameters
    }
    start = captured.start.items()
    still -= captured.elsewhere
    own = {name: v for name, v in start if (_differs(v, sent[name]) if name in sent else name not in still)}
    return own, {*sent}


def _printable(name: str) -> str:
    kept = "".join(c if c.isprintable() else "?" for c in name).encode("utf-8", "replace").decode("utf-8")
    return kept[:_LONGEST_NAME] or "?"


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a state's arrays as tensors on the CPU that share no memory with each other."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        try:
            tensor = plain(value) if isinstance(value, Tensor) else _from_array(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"the state's '{name}' is no tensor or array of numbers: {error}") from None
        found[name] = tensor.cpu().contiguous()
    shared: set[int] = set()
    for name, tensor in found.items():  # tied weights: safetensors takes each memory once
        place = tensor.untyped_storage().data_ptr()
        if place in shared and tensor.numel():
            found[name] = tensor.clone()
        shared.add(place)
    return found


def _from_array(value: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arrays that can't be written to: nobody does
        return torch.as_tensor(value)


def unusable(captured: Capture, config: TrainingConfig | None) -> str | None:
    """Return why what a client trained on can't be recorded, if so."""
    inputs, targets = captured.inputs, captured.targets
    if config is None or not inputs:
        return "no training step was seen"
    if of_few_bits(captured.module):
        return FEW_BITS
    if "several-inputs" in config.unmodelled:
        return next((note for note in captured.notes if note.startswith(UNMODELLED["several-inputs"])), "its inputs")
    if captured.varies:
        return "the model's inputs or outputs differ in their parts from batch to batch"
    if len(targets) != len(inputs):
        return (
            f"{len(inputs)} passes have {len(targets)} targets: they are seen where a loss of torch's is called, so "
            "make yours of one, such as cross_entropy(outputs, targets, reduction='none'), or a torch.nn.Module "
            "that is called with outputs and targets; parts of a model count as one where each takes what the one "
            "before returned, and a loss without targets (self-supervision) can't be repeated"
        )
    whole = not inputs[0].is_floating_point()
    if inputs[0].ndim not in ((2,) if whole else (2, 3, 4, 5)):
        shape = tuple(inputs[0].shape)
        if whole:
            return (
                f"the inputs are whole numbers of shape {shape}; attacks take them as tokens (n, length) only; "
                "give the model floats: convert before it, not in it"
            )
        said = (
            f"the inputs have the shape {shape}; attacks are on images (n, C, H, W), volumes (n, C, D, H, W), signals "
            "(n, C, T), tables (n, d), tokens (n, length)"
        )
        if len(shape) < 3:
            return said
        return f"{said}; give a table, inputs.flatten(1), to a model that begins with nn.Unflatten(1, {shape[1:]})"
    if whole and (inputs[0].dtype == torch.bool or vocabulary_of(captured.module) is None):
        return (
            "the inputs are whole numbers, but the model has no embedding; attacks are on images, volumes, signals, "
            "tables and tokens"
        )
    channels = (*targets[0].shape, 1)[1]
    maps = targets[0].ndim == inputs[0].ndim > 2 and targets[0].shape[2:] == inputs[0].shape[2:]
    if maps and captured.loss != MSE and channels > 1:
        return (
            f"the masks have {channels} channels; audits take masks of one class a pixel, (n, 1, ...) or (n, ...), and "
            f"a model of at least {max(captured.outputs, channels)} outputs a pixel, the background's among them, by a "
            "softmax, as of monai.losses.DiceCELoss(to_onehot_y=True, softmax=True)"
        )
    if len({tuple(x.shape[1:]) for x in inputs}) > 1 and not whole:
        return "the inputs differ in shape from batch to batch"
    if len({(y.ndim, y.is_floating_point() and captured.loss != BCE) for y in targets}) > 1:
        return "the targets differ in form from batch to batch"
    if sum(map(len, inputs)) != sum(config.batch_sizes):
        return f"{sum(map(len, inputs))} inputs were seen, of batches with {sum(config.batch_sizes)}"
    return None


def vocabulary_of(module: nn.Module | None) -> int | None:
    """Return how many tokens a model's embedding has, of several the largest one; None where it has none."""
    if module is not None and (words := embedded_words(module)) is not None:
        return words
    parts = module.modules() if module is not None else []
    return max((part.num_embeddings for part in parts if isinstance(part, nn.Embedding)), default=None)
