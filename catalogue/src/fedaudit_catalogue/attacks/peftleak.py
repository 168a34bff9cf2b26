"""PEFTLeak (Sami et al. 2025): a frozen vision transformer that leads patches to its adapters, sorted into bins."""

from __future__ import annotations

import copy
from math import ceil, sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedaudit.attacks import (
    ALTERED_MODELS,
    Case,
    ClosedForm,
    Finding,
    Observation,
    Progress,
    one_batch_gradient,
    register,
)
from fedaudit.models import AdaptedBlock, ViT
from fedaudit.simulation import ServerBehaviour, ServerStep
from fedaudit.task import LocalPlan, TaskInfo
from fedaudit.utils import BadInput, NotApplicable, Positive

_FLAG = 4.0  # of a position, in lengths of a patch of standard normal pixels
_CODES = (4, 16)  # entries of embeddings that hold an image's code: at least, at most
_TIE = 0.3  # of a code in what rows measure, so that equal patches of different images have bins of their own
_DRAWN = 512  # images by which edges of bins are set, where there are no public ones
_LIFT = 8.0  # from where on GELU is the identity, in single precision
_APART = 4.0  # how far off patches of other positions are, in ranges of the measurement
_NOTHING = 1e-6  # of the largest row
_ALONE = 1e-4  # of the squared length: what lacks less is one patch, not a mean of several
_SAME = 5e-3  # of a code's size, up to which two are one


class _Entries(NamedTuple):
    """What entries of a token's embedding hold: patch, flags of positions, always 0, what adapters add, code."""

    pixels: slice
    flags: slice
    spare: int
    added: int
    code: slice

    @classmethod
    def of(cls, model: ViT) -> _Entries:
        assert isinstance(model.cut, nn.Conv2d)
        pixels = model.cut.weight[0].numel()
        spare = pixels + model.position.num_embeddings
        code = slice(spare + 2, min(model.token.embedding_dim, spare + 2 + _CODES[1]))
        return cls(slice(0, pixels), slice(pixels, spare), spare, spare + 1, code)


class _Bins(NamedTuple):
    """Where a position's bins are: which block's adapter, and which of its rows."""

    token: int
    block: int
    rows: slice


def _blocks(model: ViT) -> list[AdaptedBlock]:
    return [block for block in model.blocks if isinstance(block, AdaptedBlock)]


def _bins(model: ViT) -> list[_Bins]:
    """Return the bins of all positions, which take turns at the adapters of all blocks but the last.

    The class token alone gives the logits, so what the last block's adapter gets of patches has no gradient.
    """
    blocks = _blocks(model)
    adapters, positions = len(blocks) - 1, model.position.num_embeddings - 1
    each = blocks[0].adapter.down.out_features // ceil(positions / adapters)
    return [
        _Bins(i + 1, i % adapters, slice(i // adapters * each, (i // adapters + 1) * each)) for i in range(positions)
    ]


@register
class PeftLeakServer(ServerBehaviour):
    """Makes a frozen vision transformer lead patches to its adapters, whose rows are bins (Sami et al. 2025).

    Patches are embedded as they are, and every position has a flag of its own. The first attention averages all patches
    and writes a projection of that, the image's code, to all its tokens; later ones add nothing, and fully connected
    layers are the identity, so that adapters get the normalised embedding. An adapter's rows are bins of one position
    each: they measure a patch's brightness, with quantiles for biases, and other positions' flags leave them silent.
    The second half of an adapter has one column for all, so the gradients of two rows that follow each other differ
    by the patches between their edges. The last attention leads what adapters added to the class token.

    Departures. The paper has an adapter behind attention, too, to which attention of each token to itself leads; its
    positions have drawn embeddings, which are the rows themselves, and here flags in entries of their own, so that
    LayerNorm can be taken back exactly; an adapter is for one position, here for several, by its rows. Where adapters
    are narrow the paper spreads bins over rounds; here they are the same in all. Without public examples quantiles
    are those of a normal brightness.

    Args:
        spread: standard deviation of a patch's brightness, in those of the preprocessing; with public examples their
            brightness counts instead.
    """

    name = "peftleak"
    summary = "a frozen ViT that leads patches to adapters whose rows are bins"
    paper = "Sami et al. 2025 (Gradient inversion attacks on parameter-efficient fine-tuning)"

    spread: Positive = 0.8

    def check(self, model: nn.Module, task_info: TaskInfo, plan: LocalPlan) -> None:
        """Refuse other models, too narrow ones, and clients that send weights."""
        if not isinstance(model, ViT) or not _blocks(model) or task_info.num_classes is None:
            raise BadInput("peftleak alters a vision transformer whose adapters are trained; set model: vit-adapters")
        entries = _Entries.of(model)
        least = entries.code.start + _CODES[0]
        if model.token.embedding_dim < least:
            raise BadInput(
                f"peftleak needs room in an embedding for a patch's {entries.pixels.stop} numbers, "
                f"{model.position.num_embeddings} positions and a code; set model.width to {ceil(least / 64) * 64} "
                "or more"
            )
        if not plan.sends_gradient:
            raise BadInput("peftleak reads gradients, and clients send weights; set algorithm: fedsgd")

    def __call__(self, step: ServerStep) -> dict[str, Tensor]:
        """Return the weights, all but the last layer's set, the same in every round but for public examples."""
        model = step.model.cpu()
        assert isinstance(model, ViT)
        model.load_state_dict(step.weights)
        draws = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self._pass_through(model, draws)
            public = step.public if step.public is not None and len(step.public) else self._drawn(model, step, draws)
            self._sort(model, public, draws)
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def _pass_through(self, model: ViT, draws: torch.Generator) -> None:
        """Set all that is frozen."""
        entries, width = _Entries.of(model), model.token.embedding_dim
        numbers, codes = entries.pixels.stop, len(range(*entries.code.indices(width)))
        flag = _FLAG * sqrt(numbers)
        assert isinstance(model.cut, nn.Conv2d)
        for part in (model.cut, model.token, model.position, *_blocks(model)):
            for name, parameter in part.named_parameters():
                if not name.startswith("adapter.down"):
                    parameter.zero_()
        model.cut.weight.view(width, -1)[:numbers] = torch.eye(numbers)
        model.position.weight[:, entries.flags] = flag * torch.eye(model.position.num_embeddings)
        model.norm.reset_parameters()
        lift = sqrt(width) + _LIFT  # normalised entries are at most √width
        for block in _blocks(model):
            block.norm1.reset_parameters()
            block.norm2.reset_parameters()
            block.hidden.weight[:width] = torch.eye(width)
            block.hidden.bias[:width] = lift
            block.out.weight[:, :width] = torch.eye(width)
            block.out.bias.fill_(-lift)
        first, last = _blocks(model)[0].attention, _blocks(model)[-1].attention
        value, output = _weights(first)
        mixing = torch.randn((codes, numbers), generator=draws) / sqrt(numbers)
        value[:codes, entries.pixels] = flag / sqrt(width) * mixing
        output[entries.code, :codes] = torch.eye(codes)
        value, output = _weights(last)
        value[0, entries.added] = 1
        output[entries.added, 0] = 1

    def _drawn(self, model: ViT, step: ServerStep, draws: torch.Generator) -> Tensor:
        """Return images whose patches have one brightness each."""
        assert isinstance(model.cut, nn.Conv2d)
        shape = step.task_info.input_shape
        grid = [side // patch for side, patch in zip(shape[1:], model.cut.kernel_size, strict=True)]
        brightness = self.spread * torch.randn((_DRAWN, 1, *grid), generator=draws)
        return nn.functional.interpolate(brightness, size=shape[1:]).expand(-1, *shape)

    def _sort(self, model: ViT, images: Tensor, draws: torch.Generator) -> None:
        """Set the adapters."""
        entries, width = _Entries.of(model), model.token.embedding_dim
        direction = torch.zeros(width)
        direction[entries.pixels] = 1 / entries.pixels.stop
        tie = torch.randn(len(range(*entries.code.indices(width))), generator=draws)
        direction[entries.code] = _TIE * tie / tie.norm()
        direction[entries.spare] = -direction.sum()  # the mean that LayerNorm takes off doesn't count
        values = (_received(model, images) @ direction).double()
        reach = float(values.max() - values.min())
        off = _APART * reach / sqrt(width)
        for block in _blocks(model)[:-1]:
            block.adapter.down.weight.zero_()
            block.adapter.down.bias.zero_()
            block.adapter.up.weight[entries.added] = 1 / (reach * len(block.adapter.down.bias))
        for token, which, rows in _bins(model):
            own = values[:, token].sort().values
            count = rows.stop - rows.start
            edges = own[(torch.arange(count) * len(own)) // count]
            edges[0] = own[0] - reach
            row = direction.clone()
            row[entries.flags] = -off
            row[entries.flags.start + token] = 0
            row[entries.spare] += off * (model.position.num_embeddings - 1)
            down = _blocks(model)[which].adapter.down
            down.weight[rows] = row
            down.bias[rows] = -edges.float()


def _weights(attention: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the weights of an attention's values and of its output."""
    layers = dict(attention.named_parameters())
    return layers["value.weight"], layers["output.weight"]


def _received(model: ViT, images: Tensor) -> Tensor:
    """Return (n, tokens, width) what the first block's fully connected layers get, and adapters with them."""
    caught: list[Tensor] = []
    handle = _blocks(model)[0].hidden.register_forward_pre_hook(lambda _, args: caught.append(args[0].detach()))
    try:
        model(images)
    finally:
        handle.remove()
    return caught[0]


class _Patches(NamedTuple):
    """Patches that are alone in their bins.

    Attributes:
        tokens: (r,) their positions, from 1.
        pixels: (r, numbers) as the model sees them.
        codes: (r, k) of their images.
        shares: (r,) δ, the loss' derivative by what their rows pass on.
    """

    tokens: Tensor
    pixels: Tensor
    codes: Tensor
    shares: Tensor


@register
class PeftLeak(ClosedForm):
    """Reads patches out of adapters that a server made bins of, and puts images together (Sami et al. 2025).

    The difference of two rows that follow each other, over that of their biases, is what the adapter got of the patch
    between their edges, if it was one alone: what LayerNorm gave is as long as it can be, and a mean of
    several is shorter, and left out. What it took off and divided by is known of entries whose size the server
    chose. Patches with one code are one image's; positions of which nothing was found stay at the mean of the
    preprocessing. The label is the one whose gradient by the rows is most like what was found.

    Departures. The paper groups patches by constrained k-means of the codes; here codes are equal or not, and nothing
    is guessed. How labels are told is ours.
    """

    name = "peftleak"
    summary = "images, patch by patch, from the adapters of a ViT that a malicious server altered"
    paper = "Sami et al. 2025 (Gradient inversion attacks on parameter-efficient fine-tuning)"
    threat_model = "malicious server, active"
    needs = (
        "images, a classifier, and a vision transformer with adapters (vit-adapters)",
        "a server that alters it (federations[].server: peftleak)",
    )
    standards = (*ALTERED_MODELS, "AML.T0018")
    uses = ("one batch",)

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.server == cls.name and case.classifies(cls.examples)

    def _prepare(self, observation: Observation) -> tuple[ViT, dict[str, Tensor]]:
        """Return the model as it was sent, in evaluation mode, and the gradient."""
        message, module = observation.single(), observation.module
        altered = False
        if isinstance(module, ViT) and _blocks(module) and "position.weight" in message.weights:
            flags = message.weights["position.weight"][:, _Entries.of(module).flags]
            altered = torch.equal(flags, flags.diag().diag()) and bool((flags.diag() > 0).all())
        if not altered:
            raise NotApplicable(
                "the server sent no vision transformer that leads patches to its adapters; set threat.adversary: "
                "malicious-server and federations[].server: peftleak"
            )
        update = message.update
        if update.sanitised is not None and update.sanitised.signs:
            raise NotApplicable("peftleak needs the sizes of an update's numbers, and only their signs were sent")
        assert isinstance(module, ViT)
        model = copy.deepcopy(module).cpu().eval()
        model.load_state_dict(message.weights)
        for b in range(len(model.blocks) - 1):
            for part in ("weight", "bias"):
                if (name := f"blocks.{b}.adapter.down.{part}") not in update.tensors:
                    raise NotApplicable(f"the update lacks '{name}', which holds patches")
        return model, one_batch_gradient(update, "cpu", message.weights)

    def _run(self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress) -> Finding:
        model, gradient = self._prepare(observation)
        assert isinstance(model.cut, nn.Conv2d)
        found, hit = _patches(model, gradient)
        if not len(found.tokens):
            raise NotApplicable(f"no patch is alone in its bin: {hit} bins were hit, by several patches each")
        count = observation.single().update.num_examples
        images = _images(found)[:count]
        shape, positions = observation.task_info.input_shape, model.position.num_embeddings - 1
        patches = torch.zeros((len(images), found.pixels.shape[1], positions), dtype=torch.float64)
        for place, members in enumerate(images):
            patches[place, :, found.tokens[members] - 1] = found.pixels[members].T
        sides = model.cut.kernel_size
        inputs = nn.functional.fold(patches, shape[1:], sides, stride=sides)
        progress(1, 2)
        labels = _labels(model, observation, inputs.float(), found, images)
        progress(2, 2)
        held = sum(map(len, images))
        notes = (
            f"{hit} bins were hit, and {len(found.tokens)} hold one patch; {held} of {count * positions} patches are "
            f"in {len(images)} images, and the others stay at the mean",
        )
        return self._returned(observation, inputs.flatten(1), labels, None, notes)


def _patches(model: ViT, gradient: dict[str, Tensor]) -> tuple[_Patches, int]:
    """Return the patches that are alone in their bins, and how many bins were hit."""
    entries, width = _Entries.of(model), model.token.embedding_dim
    flag = float(model.position.weight[0, entries.flags.start])
    parts: list[_Patches] = []
    hits = 0
    for token, block, rows in _bins(model):
        sums, shares = (gradient[f"blocks.{block}.adapter.down.{part}"][rows].double() for part in ("weight", "bias"))
        sums, shares = (torch.cat([of[:-1] - of[1:], of[-1:]]) for of in (sums, shares))
        hit = shares.abs() > _NOTHING * shares.abs().max().clamp(min=1e-300)
        held = sums[hit] / shares[hit, None]
        alone = (held.square().sum(dim=1) / width - 1).abs() < _ALONE
        held, zero = held[alone], held[alone, entries.spare, None]
        size = flag / (held[:, entries.flags.start + token, None] - zero)
        pixels, codes = (size * (held[:, part] - zero) for part in (entries.pixels, entries.code))
        hits += int(hit.sum())
        parts.append(_Patches(torch.full((len(held),), token), pixels, codes, shares[hit][alone]))
    return _Patches(*(torch.cat(part) for part in zip(*parts, strict=True))), hits


def _images(found: _Patches) -> list[list[int]]:
    """Return which patches are one image's, those of most patches first."""
    size = _SAME * float(found.codes.abs().max())
    images: list[list[int]] = []
    for i, code in enumerate(found.codes):
        for members in images:
            fits = float((found.codes[members[0]] - code).abs().max()) <= size
            if fits and int(found.tokens[i]) not in found.tokens[members].tolist():
                members.append(i)
                break
        else:
            images.append([i])
    return sorted(images, key=lambda members: -len(members))


def _labels(model: ViT, observation: Observation, inputs: Tensor, found: _Patches, images: list[list[int]]) -> Tensor:
    """Return (n,) the label with which each image's own δ are most like those of its patches."""
    kept: list[Tensor] = []
    handles = [
        block.adapter.down.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
        for block in _blocks(model)[:-1]
    ]
    bins = {token: (block, rows.start) for token, block, rows in _bins(model)}
    share = len(inputs) / observation.single().update.num_examples
    distances = torch.zeros((observation.task_info.num_classes or 1, len(inputs)), dtype=torch.float64)
    try:
        with torch.enable_grad():
            outputs = model(inputs)
            for label in range(len(distances)):
                value = observation.loss(outputs, torch.full((len(inputs),), label))
                flows = torch.autograd.grad(value, kept, retain_graph=True)
                for place, members in enumerate(images):
                    for i in members:
                        token = int(found.tokens[i])
                        block, row = bins[token]
                        own = share * float(flows[block][place, token, row])
                        distances[label, place] += abs(own - float(found.shares[i]))
    finally:
        for handle in handles:
            handle.remove()
    return distances.argmin(dim=0)
