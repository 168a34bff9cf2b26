"""A vertical federation: parties with different features of the same examples, and a server with the labels.

Split learning is one with one party, the client, who holds whole examples and the first layers of a network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedaudit.data.dataset import Split
from fedaudit.models import VerticalModel, has_batch_norm
from fedaudit.simulation.client import Federation
from fedaudit.simulation.history import History
from fedaudit.simulation.local_training import on_device
from fedaudit.simulation.server_behaviour import ServerBehaviour, SplitStep
from fedaudit.simulation.spec import FederationSpec
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.vertical import VerticalRecord
from fedaudit.utils.errors import BadInput
from fedaudit.utils.finite import all_finite
from fedaudit.utils.seeds import generator
from fedaudit.utils.validation import check_memory


def play(federation: Federation, report: Callable[[float], None] | None = None) -> tuple[Transcript, Truth, History]:
    """Run the rounds of a vertical federation that :func:`check_vertical` checked, see :func:`exchange`.

    Returns:
        What travelled; the truth, in which example i is alone under (i, 0); how it went.
    """
    spec, held, info = federation.spec, federation.client_data[0], federation.task_info
    history = History(federation.accuracy_every, federation.accuracy_examples)

    def after(finished: int, module: VerticalModel, sent: int) -> None:
        history.bytes.append(4 * sent)
        history.parameters.append(sent)
        history.measure([module], info, federation.drawn.held_out, [held], finished, finished == spec.rounds)
        if report:
            report(finished * spec.clients)

    assert isinstance(federation.model, VerticalModel)
    draw = generator(federation.seed, spec.name, "batches")
    try:
        server = malicious_server(spec, info, federation.seed, federation.drawn.public)
        record = exchange(federation.model, info, federation.loss, held, spec, draw, after, federation.device, server)
    except BadInput as error:
        raise BadInput(f"federation '{spec.name}': {error}") from None
    module = copy.deepcopy(federation.model)
    log = server.behaviour.adversary_log() if server else {}
    transcript = Transcript(federation.name, info, module, federation.loss, [], log, sent=record)
    return transcript, truth_of(federation, record.used), history


def exchange(
    model: VerticalModel,
    info: TaskInfo,
    loss: Loss,
    held: Split,
    spec: FederationSpec,
    draw: torch.Generator,
    after: Callable[[int, VerticalModel, int], None] | None = None,
    device: str = "cpu",
    server: MaliciousServer | None = None,
) -> VerticalRecord:
    """Return what travels when the parties train ``model``, which isn't changed, together.

    Each round the server draws a batch of the aligned examples, without replacement. The parties send the embeddings of
    their features, the server computes the loss and sends every party its embeddings' gradient, and all take a step of
    SGD. With aggregated gradients the server gets the batch's gradient of every parameter instead. BatchNorm and
    dropout are in evaluation mode.

    Args:
        after: called after every round with how many there were, the model, and how many numbers a party sent.
        device: on which they train; what is recorded lies on the CPU.
        server: who sends other gradients than the loss'; None: an honest one.
    """
    vertical = spec.vertical
    assert vertical is not None
    module = copy.deepcopy(model).eval()
    initial = {name: value.detach().clone() for name, value in module.state_dict().items()}
    parameters = dict(module.to(device).named_parameters())
    inputs, targets, loss = info.normalise(held.inputs).to(device), held.targets.to(device), on_device(loss, device)
    batches, embeddings, gradients = [], [], []
    updates: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for index in range(spec.rounds):
        rows = torch.randperm(len(held), generator=draw)[: spec.batch_size]
        sent = module.embed(module.features(inputs[rows]))
        value = loss(module.merge(sent), targets[rows])
        grads = torch.autograd.grad(value, [*sent, *parameters.values()], retain_graph=server is not None)
        down, own = grads[: len(sent)], grads[len(sent) :]
        if server is not None:
            down = (server.answer(index, sent[0].detach(), down[0], module.parties[0]),)
            clients = [p for name, p in parameters.items() if name.startswith("parties.")]
            own = (*torch.autograd.grad(sent, clients, down), *own[len(clients) :])
        batches.append(rows)
        if vertical.protocol == "split":
            embeddings.append(torch.stack([e.detach() for e in sent]).cpu())
            gradients.append(torch.stack(down).cpu())
        else:
            for name, grad in zip(parameters, own, strict=True):
                updates[name].append(grad.cpu())
        with torch.no_grad():
            for parameter, grad in zip(parameters.values(), own, strict=True):
                parameter.sub_(spec.learning_rate * grad)
        if after:
            split = vertical.protocol == "split"
            after(index + 1, module, sent[0].numel() if split else sum(g.numel() for g in own) // spec.clients)
    if not all_finite(parameters.values()):
        raise BadInput("the training diverged; lower learning_rate")
    return VerticalRecord(
        vertical,
        spec.clients,
        len(held),
        spec.learning_rate,
        initial,
        torch.stack(batches),
        held.targets.clone(),
        torch.stack(embeddings) if embeddings else torch.zeros(0),
        torch.stack(gradients) if gradients else torch.zeros(0),
        {name: torch.stack(each) for name, each in updates.items() if each},
        module.features(inputs)[vertical.observer].cpu() if vertical.known_labels else torch.zeros(0),
    )


@dataclass(frozen=True)
class MaliciousServer:
    """A server that answers embeddings with gradients of its own, and what it draws from.

    Attributes:
        public: (n, ...) public examples, as they stand in the data set.
        seed: of its draws; with the federation's name.
    """

    behaviour: ServerBehaviour
    task_info: TaskInfo
    public: Tensor
    seed: int
    name: str

    def answer(self, index: int, embeddings: Tensor, gradients: Tensor, client: nn.Module) -> Tensor:
        """Return what comes down in round ``index``, checked; see :meth:`ServerBehaviour.answer`."""
        draws = generator(self.seed, self.name, "malicious server", index)
        public = self.task_info.normalise(self.public).to(embeddings.device)
        architecture = copy.deepcopy(client)
        with torch.no_grad():
            for tensor in architecture.state_dict().values():
                tensor.zero_()
        step = SplitStep(index, embeddings, gradients, architecture, self.task_info, draws, public)
        answered = self.behaviour.answer(step)
        if answered.shape != embeddings.shape or not all_finite([answered]):
            raise BadInput(f"what the server answers by '{self.behaviour.name}' in round {index} is no finite gradient")
        return answered.detach()


def malicious_server(spec: FederationSpec, info: TaskInfo, seed: int, public: Split | None) -> MaliciousServer | None:
    """Return the malicious server of ``spec``, which remembers nothing yet; None where it is honest."""
    if spec.server is None or public is None:
        return None
    return MaliciousServer(spec.server.anew(), info, public.inputs, seed, spec.name)


def truth_of(federation: Federation, used: Tensor) -> Truth:
    """Return the truth about the examples ``used``: example i under (i, 0)."""
    held, test = federation.client_data[0], federation.dataset.test
    inputs = {(i, 0): held.inputs[i : i + 1].clone() for i in used.tolist()}
    labels = {(i, 0): held.targets[i : i + 1].clone() for i in used.tolist()}
    candidates, targets = test.inputs, test.targets
    if federation.split != "test":
        candidates = torch.cat([held.inputs[used], candidates])
        targets = torch.cat([held.targets[used], targets])
    rows = {key: torch.zeros(1, dtype=torch.int64) for key in inputs}
    return Truth(inputs, labels, candidates, targets, {}, rows)


def check_vertical(federation: Federation) -> None:
    """Refuse what a vertical federation can't have, before anything is simulated."""
    spec, held, info = federation.spec, len(federation.client_data[0]), federation.task_info
    if spec.server is not None:
        _check_server(federation, spec.server)
    if not federation.defences.undefended:
        raise BadInput(
            "a vertical federation has no updates that client-side defences or aggregators could change; use "
            "client_defence: none and aggregator: mean"
        )
    if federation.group_size > 1:
        raise BadInput("threat.sees: sums of updates are for horizontal federations; leave it at updates")
    if federation.canaries is not None:
        raise BadInput("an audit of ε needs updates of a horizontal federation; use fedsgd, fedavg or fedprox")
    if federation.drawn.records is not None:
        raise BadInput("threat.target_records and client_property are for horizontal federations; leave them out")
    if federation.reveal_labels:
        raise BadInput(
            "in a vertical federation the server has the labels, and a party doesn't: leave threat.knows_labels out"
        )
    if info.tokens is not None or info.num_classes is None:
        raise BadInput("a vertical federation trains a classifier of images or tables here; use other data")
    if has_batch_norm(federation.model) and info.batch_norm == "train":
        raise BadInput("BatchNorm is in evaluation mode in a vertical federation; set model.batch_norm: eval")
    if spec.batch_size > held:
        raise BadInput(f"batch_size is {spec.batch_size}, and the parties hold {held} examples; lower it")
    if spec.vertical is not None and spec.vertical.protocol == "split":
        assert isinstance(federation.model, VerticalModel)
        sample = federation.model.features(info.blank(1)[0])[:1]
        each = copy.deepcopy(federation.model.parties[0]).eval()(*sample).numel()
        numbers = 2 * spec.rounds * spec.clients * spec.batch_size * each
    else:
        numbers = (spec.rounds + 1) * sum(p.numel() for p in federation.model.parameters())
    check_memory(4 * numbers, f"its transcript ({spec.rounds:,} rounds)")


def _check_server(federation: Federation, server: ServerBehaviour) -> None:
    if not server.answers:
        raise BadInput(
            f"the server behaviour '{server.name}' alters models that are sent, and a vertical federation sends none; "
            "with algorithm: split use server: fsha"
        )
    if federation.drawn.public is None:
        raise BadInput(
            f"the server behaviour '{server.name}' needs public examples; set threat.knows_public_data: true and "
            "threat.public_examples, to 1000 for example"
        )
    server.check(federation.model, federation.task_info, federation.spec.plan)
