"""The feature-space hijacking attack: a server of split learning draws the client into a space that it can read."""

from __future__ import annotations

import copy
import math
from dataclasses import field

import torch
from torch import Tensor, nn

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.vertical.unsplit import need_split, split_images
from fedaudit.models import VerticalModel, initialise
from fedaudit.simulation.server_behaviour import SERVER_LOG, ServerBehaviour, SplitStep
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.vertical import VerticalRecord
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.validation import Count, Positive

_PAPER = "Pasquini et al. 2021 (Unleashing the Tiger: Inference Attacks on Split Learning)"
_DECODER = f"{SERVER_LOG}fsha/decoder."
_WIDTH = 32  # channels of decoder and discriminator
_ALPHA = 0.2


def decoder(embedding: tuple[int, ...], image: tuple[int, ...]) -> nn.Sequential:
    """Return a network from embeddings (K, *embedding) to images (K, *image) in [0, 1], its weights not yet drawn.

    Nearest neighbours and convolutions double maps until they are as large as the image; for vectors a fully connected
    layer first makes maps of a quarter of its size.
    """
    with torch.device("meta"):  # whose weights nobody draws
        network = _decoder(embedding, image)
    network.to_empty(device="cpu")
    return network


def _decoder(embedding: tuple[int, ...], image: tuple[int, ...]) -> nn.Sequential:
    channels, height, width = image
    layers: list[nn.Module] = []
    if len(embedding) == 3:
        maps, side = embedding[0], embedding[1]
    else:
        maps, side = _WIDTH, math.ceil(height / 4)
        layers += [nn.Flatten(), nn.Linear(math.prod(embedding), maps * side * math.ceil(width / 4)), nn.ReLU()]
        layers.append(nn.Unflatten(1, (maps, side, math.ceil(width / 4))))
    layers += [nn.Conv2d(maps, _WIDTH, 3, padding=1), nn.ReLU()]
    for _ in range(max(0, math.ceil(math.log2(height / side)))):
        layers += [nn.Upsample(scale_factor=2), nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1), nn.ReLU()]
    layers += [nn.Upsample(size=(height, width)), nn.Conv2d(_WIDTH, channels, 3, padding=1), nn.Sigmoid()]
    return nn.Sequential(*layers)


def discriminator(embedding: tuple[int, ...]) -> nn.Sequential:
    """Return a network, its weights still to be drawn, from embeddings (K, *embedding) to a number each (K, 1)."""
    with torch.device("meta"):
        network = _discriminator(embedding)
    network.to_empty(device="cpu")
    return network


def _discriminator(embedding: tuple[int, ...]) -> nn.Sequential:
    if len(embedding) == 3:
        channels, height, width = embedding
        pixels = math.ceil(height / 2) * math.ceil(width / 2)
        body: list[nn.Module] = [
            nn.Conv2d(channels, _WIDTH, 3, padding=1),
            nn.LeakyReLU(_ALPHA),
            nn.Conv2d(_WIDTH, 2 * _WIDTH, 3, stride=2, padding=1),
        ]
        return nn.Sequential(*body, nn.LeakyReLU(_ALPHA), nn.Flatten(), nn.Linear(2 * _WIDTH * pixels, 1))
    first = nn.Linear(math.prod(embedding), 4 * _WIDTH)
    hidden = [first, nn.LeakyReLU(_ALPHA), nn.Linear(4 * _WIDTH, 4 * _WIDTH), nn.LeakyReLU(_ALPHA)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(4 * _WIDTH, 1))


def gradient_penalty(critic: nn.Module, own: Tensor, sent: Tensor, shares: Tensor) -> Tensor:
    """Return the mean of (‖∇D(ẑ)‖ − 1)² (Gulrajani et al. 2017, Eq. 3).

    ẑ lies between ``own`` and ``sent`` (K, ...), at the share ``shares`` (K,) of the latter.
    """
    weights = shares.view(-1, *(1,) * (own.ndim - 1))
    between = (weights * sent + (1 - weights) * own).detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return torch.as_tensor((slope.flatten(1).norm(dim=1) - 1).square().mean())


@register(frozen=False)
class HijackServer(ServerBehaviour):
    """Trains the client's part for another task than the agreed one (Pasquini et al. 2021).

    The server has public images and three networks: a pilot f̃ of the client's architecture, a decoder f̃⁻¹ and a
    discriminator D on embeddings. In each round

    - f̃ and f̃⁻¹ are trained on public images to minimise MSE(f̃⁻¹(f̃(x)), x);
    - D learns to tell what the client sent, z = f(x), from f̃(x): here as a Wasserstein critic with
      gradient penalty, as in the published code, which minimises mean D(f̃(x)) − mean D(z) + ``penalty``·GP;
    - the client is sent the gradient of mean D(z) by z, times ``strength``, in place of the
      loss'.

    So f comes to map into the space that f̃⁻¹ reads. Departures: the client goes by the federation's plain SGD, where
    the published code gives it Adam at a rate of 1e-5: ``strength`` stands for that, which the server may choose;
    pilot and decoder take ``steps`` steps a round, and the critic as many, which the client doesn't notice, where the
    paper takes one; networks are smaller. The label loss is never sent.

    Args:
        steps: of pilot, decoder and critic in each round.
        batch_size: public images in each.
        learning_rate: of pilot and decoder, by Adam.
        critic_rate: of the critic, by Adam.
        penalty: of the critic's gradient.
        strength: factor of the gradients that are sent.
    """

    name = "fsha"
    summary = "sends gradients that draw a split-learning client into a feature space that the server can invert"
    paper = _PAPER
    answers = True

    steps: Count = 2
    batch_size: Count = 64
    learning_rate: Positive = 1e-3
    critic_rate: Positive = 1e-3
    penalty: Positive = 10.0
    strength: Positive = 1.0

    pilot: nn.Module | None = field(default=None, init=False)
    inverse: nn.Module | None = field(default=None, init=False)
    critic: nn.Module | None = field(default=None, init=False)
    optimisers: list[torch.optim.Optimizer] = field(default_factory=list, init=False)

    def check(self, model: nn.Module, task_info: TaskInfo, plan: LocalPlan) -> None:  # noqa: ARG002
        """Refuse what isn't split learning of images."""
        if not isinstance(model, VerticalModel) or len(model.parties) != 1:
            raise BadInput("fsha hijacks split learning; set federations[].algorithm: split and vertical.cut")
        if task_info.kind not in FSHA.examples:
            raise BadInput(f"fsha is for images; these are {task_info.example_kind.described}: leave server out")

    def answer(self, step: SplitStep) -> Tensor:
        """Return ``strength`` times the gradient of the critic's mean on what the client sent."""
        if self.pilot is None:
            self._begin(step)
        pilot, inverse, critic = self.pilot, self.inverse, self.critic
        assert pilot is not None
        assert inverse is not None
        assert critic is not None
        sent = step.embeddings
        of_pair, of_critic = self.optimisers
        for _ in range(self.steps):
            rows = torch.randint(len(step.public), (self.batch_size,), generator=step.generator).to(sent.device)
            public = step.public[rows]
            of_pair.zero_grad()
            own = pilot(public)
            (inverse(own) - step.task_info.denormalise(public)).square().mean().backward()
            of_pair.step()
            own = own.detach()
            pairs = torch.randint(len(own), (len(sent),), generator=step.generator).to(sent.device)
            shares = torch.rand(len(sent), generator=step.generator).to(sent.device)
            of_critic.zero_grad()
            value = critic(own).mean() - critic(sent).mean()
            (value + self.penalty * gradient_penalty(critic, own[pairs], sent, shares)).backward()
            of_critic.step()
        (down,) = torch.autograd.grad(critic(given := sent.clone().requires_grad_()).mean(), given)
        return self.strength * down

    def adversary_log(self) -> dict[str, Tensor]:
        """Return the decoder's weights."""
        state = self.inverse.state_dict() if self.inverse is not None else {}
        return {f"{_DECODER}{name}": tensor.detach().cpu().clone() for name, tensor in state.items()}

    def _begin(self, step: SplitStep) -> None:
        shape = tuple(step.embeddings.shape[1:])
        self.pilot = copy.deepcopy(step.client)
        self.inverse, self.critic = decoder(shape, step.task_info.input_shape), discriminator(shape)
        for network in (self.pilot, self.inverse, self.critic):
            initialise(network.cpu(), "default", step.generator)
            network.to(step.embeddings.device)
        pair = [*self.pilot.parameters(), *self.inverse.parameters()]
        self.optimisers = [
            torch.optim.Adam(pair, lr=self.learning_rate),
            torch.optim.Adam(self.critic.parameters(), lr=self.critic_rate, betas=(0.5, 0.9)),
        ]


@register
class FSHA(Attack):
    """Reads the images out of what a hijacked client sent (Pasquini et al. 2021): x̃ = f̃⁻¹(f(x)).

    Of each example what was sent last is decoded, by the decoder as it was after the last round; a server of behaviour
    ``fsha`` trained it (:class:`HijackServer`). Departure: the paper decodes in a phase of its own after the hijacking;
    here an example that was in no late batch is decoded as the client was then.
    """

    name = "fsha"
    summary = "images of a split-learning client, by the decoder of a server that hijacked its training"
    paper = _PAPER
    threat_model = "malicious server, active"
    needs = (
        "split learning (algorithm: split) of images",
        "a server that hijacks it (federations[].server: fsha)",
        "public images (threat.public_examples)",
    )
    default_scope = "federation"
    examples = ("image",)
    finds = ImageFinding
    reads = VerticalRecord
    on_sums = "refused: it is for vertical federations, where there are none"

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.server == cls.name and case.kind in cls.examples

    def check(self, observation: Observation) -> None:
        """Raise where there is no decoder."""
        super().check(observation)
        need_split(self.name, observation)
        if not any(name.startswith(_DECODER) for name in observation.adversary_log):
            raise NotApplicable(
                f"{self.name} reads by a decoder that a malicious server trained; set threat.adversary=malicious-server"
                " and federations[].server: fsha"
            )

    def _run(
        self,
        observation: Observation,
        generator: torch.Generator,  # noqa: ARG002
        device: str,
        progress: Progress,  # noqa: ARG002
    ) -> ImageFinding:
        record = observation.sent
        assert isinstance(record, VerticalRecord)
        sent = record.last_embeddings()
        inverse = decoder(tuple(sent.shape[1:]), observation.task_info.input_shape)
        log = observation.adversary_log
        inverse.load_state_dict(
            {name.removeprefix(_DECODER): t for name, t in log.items() if name.startswith(_DECODER)}
        )
        with torch.no_grad():
            images = torch.cat([inverse.to(device)(part.to(device)) for part in sent.split(256)])
        return split_images(observation, images, 0.0, len(record.batches))
