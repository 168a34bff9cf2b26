"""Decepticons (Fowl et al. 2023): a transformer whose layers sort tokens into bins, and what its gradient holds."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import SequenceFinding
from fedaudit.attacks.standards import ALTERED_MODELS
from fedaudit.attacks.victim import one_batch_gradient
from fedaudit.models.transformer import Block, Transformer
from fedaudit.simulation.server_behaviour import ServerBehaviour, ServerStep
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import BadInput, NotApplicable

_SHARP = 1e5  # what measurements are multiplied by, so that GELU is a step between bins
_ADDED = 1e-5  # of an embedding's size: what all bins together add to it, at most
_FLAG = 3.0  # of the first positions, in standard deviations of embeddings
_ATTENDS = 1e3  # scores, so that attention is at one place alone
_DRAWN = 20_000  # pairs of token and place by which edges of bins are set
_LIKE = 0.9999  # correlation from which what a bin holds is a token at its place
_SAME = 1e-2  # of a code's size, up to which two are one
_NOTHING = 1e-6  # of the largest row


@register
class DecepticonsServer(ServerBehaviour):
    """Lets a transformer write each token, its place and its sequence into rows of its gradient (Fowl et al. 2023).

    The first attention has every token attend to the first places and write what stands there into entries of the
    embeddings that are kept free: the code of its sequence. The first fully connected layer of every block measures
    all embeddings along one random direction, with quantiles of that measurement for biases, and the second gives
    all units one column: so the gradients of two units that follow each other differ by the tokens between their
    edges. Other attentions add nothing, and the fully connected layers next to nothing.

    Departures. Each head attends to another one of the first places, in the paper all to the first one, so that
    sequences that begin with one token are told apart, too. Embeddings of positions carry a flag of these places,
    where the paper uses those that there are. The measurement is sharpened so far that GELU is a step, which leaves
    nothing of differences of weights: clients have to send gradients. The quantiles are those over the vocabulary,
    every token as often; or of public examples.
    """

    name = "decepticons"
    summary = "a transformer whose layers sort tokens into bins, with a code of their sequence"
    paper = "Fowl et al. 2023 (Decepticons)"

    def check(self, model: nn.Module, task_info: TaskInfo, plan: LocalPlan) -> None:
        """Refuse other models, those that are read at one token alone, and clients that send weights."""
        if not isinstance(model, Transformer) or any(not p.requires_grad for p in model.parameters()):
            raise BadInput("decepticons alters a transformer all of which is trained (encoder, decoder); choose one")
        if model.decoder and not task_info.causal:
            raise BadInput(
                "decepticons needs a gradient of every token, and a decoder that tells classes is read at the last one "
                "alone; use an encoder, or next tokens (notes-causal)"
            )
        if not plan.sends_gradient:
            raise BadInput("decepticons reads gradients, and clients send weights; set algorithm: fedsgd")

    def __call__(self, step: ServerStep) -> dict[str, Tensor]:
        """Return the weights with the layers set, anew in every round."""
        model = step.model
        assert isinstance(model, Transformer)
        model.load_state_dict(step.weights)
        draws = torch.Generator().manual_seed(0)
        flags, codes = _parts(model)
        width, own = model.token.embedding_dim, codes.start
        with torch.no_grad():
            size = float(model.token.weight[:, len(range(*flags.indices(width))) : own].std())
            for embedding in (model.token, model.position):
                embedding.weight[:, flags] = 0
                embedding.weight[:, codes] = 0
            heads = min(flags.stop, len(model.position.weight))
            model.position.weight[torch.arange(heads), torch.arange(heads)] = _FLAG * size
            for block in (_block(model, i) for i in range(len(model.blocks))):
                for norm in (block.norm1, block.norm2):
                    norm.reset_parameters()
                nn.init.zeros_(block.attention.output.weight)
                nn.init.zeros_(block.attention.output.bias)
            self._attention(model, draws)
            self._bins(model, step, draws, size)
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def _attention(self, model: Transformer, draws: torch.Generator) -> None:
        """Set the first attention: head j writes what stands at place j to the j-th part of the code."""
        flags, codes = _parts(model)
        attention = _block(model, 0).attention
        width, heads = model.token.embedding_dim, attention.heads
        each, part = width // heads, (codes.stop - codes.start) // heads
        layers = dict(attention.named_parameters())
        for parameter in layers.values():
            parameter.zero_()
        content = slice(flags.stop, codes.start)
        for head in range(heads):
            first = head * each
            layers["query.bias"][first] = _ATTENDS
            layers["key.weight"][first, head] = 1
            mixing = torch.randn((part, content.stop - content.start), generator=draws)
            layers["value.weight"][first : first + part, content] = mixing / mixing.norm(dim=1, keepdim=True)
            places = torch.arange(part)
            layers["output.weight"][codes.start + head * part + places, first + places] = 1

    def _bins(self, model: Transformer, step: ServerStep, draws: torch.Generator, size: float) -> None:
        """Set all fully connected layers of blocks: one direction, edges of bins in order, one column back."""
        length, vocabulary = model.position.num_embeddings, model.token.num_embeddings
        if step.public is not None and len(step.public):
            tokens = step.public[: max(1, _DRAWN // length)]
        else:
            tokens = torch.randint(vocabulary, (max(1, _DRAWN // length), length), generator=draws)
            if model.info.padding is not None:
                tokens = torch.where(tokens == model.info.padding, (tokens + 1) % vocabulary, tokens)
        width = model.token.embedding_dim
        direction = torch.randn(width, generator=draws)
        direction[_parts(model)[1]] = 0  # one token at one place has one bin, whatever its sequence
        direction = direction / direction.norm()
        seen = _measured(model, tokens)
        if model.info.padding is not None:
            seen = seen[tokens != model.info.padding]
        values = (seen.flatten(0, -2) @ direction).double().sort().values
        rows = [_block(model, i).hidden.out_features for i in range(len(model.blocks))]
        bins = sum(rows) - len(rows) + 1
        edges = values[(torch.arange(bins) * len(values)) // bins]
        edges[0] = values[0] - (values[-1] - values[0])
        reach, start = float(values[-1] - edges[0]), 0
        back = torch.randn(width, generator=draws)
        for i, count in enumerate(rows):
            block = _block(model, i)
            block.hidden.weight.copy_(_SHARP * direction.expand(count, -1))
            block.hidden.bias.copy_(-_SHARP * edges[start : start + count])
            block.out.weight.copy_((_ADDED * size / (_SHARP * reach * count) * back)[:, None].expand(-1, count))
            block.out.bias.zero_()
            start += count - 1


def _block(model: Transformer, i: int) -> Block:
    block = model.blocks[i]
    assert isinstance(block, Block)
    return block


def _parts(model: Transformer) -> tuple[slice, slice]:
    """Return which entries of embeddings are flags of the first places, and which hold a sequence's code."""
    heads, width = _block(model, 0).attention.heads, model.token.embedding_dim
    return slice(0, heads), slice(width - heads * max(1, width // (4 * heads)), width)


def _measured(model: Transformer, tokens: Tensor) -> Tensor:
    """Return (n, length, width) what the first block's fully connected layer gets."""
    caught: list[Tensor] = []
    handle = _block(model, 0).hidden.register_forward_pre_hook(lambda _, args: caught.append(args[0].detach()))
    mode = model.training
    try:
        with torch.no_grad():
            model.eval()(tokens)
    finally:
        handle.remove()
        model.train(mode)
    return caught[0]


@register
class Decepticons(Attack):
    """Reads tokens, their places and their sequences out of bins of a transformer (Fowl et al. 2023).

    The difference of two rows that follow each other over that of their biases is what the layer got of the token
    between their edges, if it was one alone: that pair of token and place is named whose embeddings correlate with it,
    by 0.9999 at least. What the normalisation added and divided by follows from the two, and so the code of its
    sequence, which says with which others it goes: equal ones, up to the places that each could see. One that several
    sequences begin with goes to all of them. Places of which nothing was found stay empty (padding).

    Departures. The paper groups codes by k-means of as many sequences as there are, and fills gaps with tokens that
    the last layer's bias gives away; here nothing is guessed.
    """

    name = "decepticons"
    summary = "sequences from the bins that a malicious server made of a transformer's layers"
    paper = "Fowl et al. 2023 (Decepticons)"
    threat_model = "malicious server, active"
    needs = ("text and a transformer of ours", "a server that alters it (federations[].server: decepticons)")
    examples = ("tokens",)
    recovers = "training sequences"
    finds = SequenceFinding
    standards = ALTERED_MODELS
    uses = ("one batch",)

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.server == cls.name and case.kind in cls.examples

    def check(self, observation: Observation) -> None:
        """Raise unless the server made bins of the layers."""
        super().check(observation)
        weights, module = observation.single().weights, observation.module
        rows = weights.get("blocks.0.hidden.weight")
        if not isinstance(module, Transformer) or rows is None or not torch.equal(rows, rows[:1].expand_as(rows)):
            raise NotApplicable(
                "the server sent the transformer as it is, without bins; set threat.adversary: malicious-server and "
                "federations[].server: decepticons"
            )

    def _run(
        self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress
    ) -> SequenceFinding:
        message = observation.single()
        model = copy.deepcopy(observation.module).cpu()
        model.load_state_dict(message.weights)
        assert isinstance(model, Transformer)
        gradient = one_batch_gradient(message.update, "cpu", message.weights)
        held = [_bins_of(gradient, i) for i in range(len(model.blocks)) if f"blocks.{i}.hidden.weight" in gradient]
        if not held or not sum(map(len, held)):
            raise NotApplicable("the blocks' fully connected layers got no gradient: it holds no token")
        tokens, places, codes = _named(model, torch.cat(held))
        progress(1, 2)
        sequences = _sequences(model, tokens, places, codes)[: message.update.num_examples]
        progress(2, 2)
        notes = (f"{sum(map(len, held))} bins were hit, and {len(tokens)} hold one token; {len(sequences)} sequences",)
        return SequenceFinding(sequences=sequences, notes=notes)


def _bins_of(gradient: dict[str, Tensor], block: int) -> Tensor:
    """Return (r, width) what each bin of a block that was hit holds: a token's embedding, or a mean of several."""
    rows, sums = (gradient[f"blocks.{block}.hidden.{name}"].double() for name in ("weight", "bias"))
    rows, sums = rows[:-1] - rows[1:], sums[:-1] - sums[1:]
    hit = sums.abs() > _NOTHING * sums.abs().max().clamp(min=1e-300)
    return rows[hit] / sums[hit, None]


def _named(model: Transformer, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (r,) tokens and places of what bins hold, and codes (r, k), one token at a place and code once.

    The layer gets (x − μ)/σ, of which x is known but for the code: a line through both tells μ and σ.
    """
    codes = _parts(model)[1]
    token, position = (e.weight.detach().double()[:, : codes.start] for e in (model.token, model.position))
    own = held[:, : codes.start]
    apart = nn.functional.normalize(own - own.mean(dim=1, keepdim=True), dim=1)
    best = torch.full((len(held),), -1.0, dtype=torch.float64)
    tokens, places = torch.zeros(len(held), dtype=torch.int64), torch.zeros(len(held), dtype=torch.int64)
    for place, at in enumerate(position):
        known = token + at
        like = apart @ nn.functional.normalize(known - known.mean(dim=1, keepdim=True), dim=1).T
        most = like.max(dim=1)
        better = most.values > best
        best = torch.where(better, most.values, best)
        tokens = torch.where(better, most.indices, tokens)
        places = torch.where(better, torch.tensor(place), places)
    sure = best > _LIKE
    tokens, places, own = tokens[sure], places[sure], own[sure]
    x = token[tokens] + position[places]
    spread = (x - x.mean(dim=1, keepdim=True)).norm(dim=1) / (own - own.mean(dim=1, keepdim=True)).norm(dim=1)
    middle = x.mean(dim=1) - spread * own.mean(dim=1)
    return tokens, places, spread[:, None] * held[sure][:, codes] + middle[:, None]


def _sequences(model: Transformer, tokens: Tensor, places: Tensor, codes: Tensor) -> Tensor:
    """Return (m, length) the sequences: tokens whose codes are equal as far as each could see, the longest first."""
    length, heads = model.position.num_embeddings, _block(model, 0).attention.heads
    part = codes.shape[1] // heads
    size = _SAME * float(codes.abs().max()) if len(codes) else 0.0
    made: list[tuple[int, Tensor, dict[int, int]]] = []
    for i in places.argsort(descending=True, stable=True).tolist():
        place, code = int(places[i]), codes[i]
        joined = False
        for reach, other, taken in made:
            shared = part * (min(reach, place) + 1 if model.decoder else heads)
            same = float((code - other)[:shared].abs().max()) <= size
            if same and taken.get(place, int(tokens[i])) == int(tokens[i]):
                taken[place] = int(tokens[i])
                joined = True
        if not joined:
            made.append((place, code, {place: int(tokens[i])}))
    made.sort(key=lambda one: -len(one[2]))
    found = torch.full((len(made), length), model.info.padding or 0)
    for row, (*_, taken) in enumerate(made):
        for place, word in taken.items():
            found[row, place] = word
    return found
