"""Ordinary loops whose updates aren't what the recorded training gives: each is explained by what it does, and a wrong
fact by nothing."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedaudit
from fedaudit.capture.capture import Capture
from fedaudit.pipeline.recordings import check_replay, facts_in_words, facts_of
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import load_truth, truth_beside
from fedaudit.utils.progress import Quiet

State = dict[str, Tensor]
Loader = list[tuple[Tensor, Tensor]]
SIZE = 64


class Net(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(SIZE, width), nn.Tanh())
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.body(x))
        return made


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body.insert(2, nn.BatchNorm1d(24))


def new(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return kind()


def loader(client: int, steps: int = 3, size: int = 8) -> Loader:
    dice = torch.Generator().manual_seed(100 + client)
    x = torch.rand(steps * size, 1, 8, 8, generator=dice) * 2 - 0.5
    y = torch.randint(0, 4, (steps * size,), generator=dice)
    return list(zip(x.split(size), y.split(size), strict=True))


def descend(model: nn.Module, batches: Loader, opt: torch.optim.Optimizer | None = None, **other: Any) -> None:
    opt = opt or torch.optim.SGD(model.parameters(), lr=other.get("lr", 0.05))
    for x, y in batches:
        opt.zero_grad()
        other.get("loss", cross_entropy)(model(x), y).backward()
        other.get("before", lambda: None)()
        opt.step()
        other.get("after", lambda: None)()


class Loop(NamedTuple):
    """One loop: what it trains, what is received and sent of it, and what is said of it.

    ``train(model, batches)``; ``receive(model, sent, client)`` loads what the server sent; ``send(trained, sent)``
    makes the message, in that form; ``facts`` are what the user says instead of what was seen.
    """

    says: str
    train: Callable[..., None] = descend
    kind: Callable[[], nn.Module] = Net
    server: Callable[[State], State] = dict
    receive: Callable[[nn.Module, State, int], Any] = lambda model, sent, _: model.load_state_dict(sent, strict=False)
    send: Callable[[State, State], State] = lambda trained, _: trained
    form: Any = "weights"
    facts: Any = None
    state: str = "verified"


def cast(kind: torch.dtype) -> Callable[..., State]:
    return lambda state, *_: {k: v.to(kind) if v.is_floating_point() else v for k, v in state.items()}


def without(part: str) -> Callable[..., State]:
    return lambda state, *_: {k: v for k, v in state.items() if part not in k}


def moved(change: Callable[[State], State]) -> Callable[[State, State], State]:
    return lambda trained, sent: change({k: trained[k] - sent[k] for k in sent})


def length(state: State) -> float:
    return math.sqrt(sum(float(v.square().sum()) for v in state.values()))


def to_norm(bound: float) -> Callable[[State], State]:
    return lambda state: {k: v * min(1.0, bound / length(state)) for k, v in state.items()}


def noisy(deviation: float) -> Callable[[State], State]:
    def change(state: State) -> State:
        dice = torch.Generator().manual_seed(len(state))
        return {k: v + deviation * torch.randn(v.shape, generator=dice) for k, v in state.items()}

    return change


def as_integers(state: State) -> State:
    scales = {k: float(v.abs().max()) / 127 for k, v in state.items()}
    return {k: (v / scales[k]).round().to(torch.int8).float() * scales[k] for k, v in state.items()}


def own_head(model: nn.Module, sent: State, client: int, part: str = "head") -> None:
    own = {k: v for k, v in new(type(model), 50 + client).state_dict().items() if part in k}
    own = {k: v + 0.1 if v.is_floating_point() else v for k, v in own.items()}  # trained in earlier rounds
    model.load_state_dict({**{k: v.float() for k, v in sent.items()}, **own}, strict=False)


def two_optimisers(model: Any, batches: Loader, other: Any = torch.optim.SGD) -> None:
    first, second = torch.optim.SGD(model.body.parameters(), lr=0.05), other(model.head.parameters(), lr=0.01)
    for x, y in batches:
        first.zero_grad()
        second.zero_grad()
        cross_entropy(model(x), y).backward()
        first.step()
        second.step()


def in_turn(model: Any, batches: Loader) -> None:
    for part in (model.head, model.body):
        descend(model, batches, torch.optim.SGD(part.parameters(), lr=0.05))


def frozen_in_turn(model: Any, batches: Loader) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for head in (True, False):
        for name, value in model.named_parameters():
            value.requires_grad_(name.startswith("head") == head)
        descend(model, batches, opt)
    model.requires_grad_(True)


def probed(model: Any, batches: Loader) -> None:
    with torch.no_grad():
        features = [(model.body(x), y) for x, y in batches]
    descend(model.head, features, torch.optim.SGD(model.head.parameters(), lr=0.05))
    descend(model, batches, torch.optim.SGD(model.body.parameters(), lr=0.05))


def near(model: Any, batches: Loader, to: Any) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.03)
    for x, y in batches:
        opt.zero_grad()
        apart = sum(((p - q.detach()) ** 2).sum() for p, q in zip(model.parameters(), to.parameters(), strict=True))
        (cross_entropy(model(x), y) + 0.1 * apart).backward()
        opt.step()


def personal_first(model: Any, batches: Loader) -> None:
    near(new(type(model), 5), batches, copy.deepcopy(model))
    descend(model, batches)


def personal_after(model: Any, batches: Loader) -> None:
    start = copy.deepcopy(model)
    descend(model, batches)
    near(new(type(model), 5), batches, start)


def personal_within(model: Any, batches: Loader) -> None:
    start = copy.deepcopy(model)
    descend(model, batches)
    shared = copy.deepcopy(model.state_dict())
    model.load_state_dict(new(type(model), 5).state_dict())
    near(model, batches, start)
    model.load_state_dict(shared)


def grouped(model: Any, batches: Loader) -> None:
    model.body[1].bias.requires_grad_(False)
    groups = [{"params": model.body.parameters(), "lr": 0.01}, {"params": model.head.parameters(), "momentum": 0.9}]
    descend(model, batches, torch.optim.SGD(groups, lr=0.05))


def scaled(model: nn.Module, batches: Loader) -> None:
    opt, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=256.0)
    for x, y in batches:
        opt.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()


def accumulated(model: nn.Module, batches: Loader) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in batches:
        (cross_entropy(model(x), y) / len(batches)).backward()
    opt.step()


def averaged(model: nn.Module, batches: Loader) -> None:
    shadow = copy.deepcopy(model)

    def after() -> None:
        with torch.no_grad():
            for slow, fast in zip(shadow.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.3)

    descend(model, batches, after=after)
    model.load_state_dict(shadow.state_dict())


def scheduled(model: nn.Module, batches: Loader) -> None:
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    descend(model, batches, opt, after=torch.optim.lr_scheduler.CosineAnnealingLR(opt, 3).step)


def clipped(model: nn.Module, batches: Loader, how: Any = nn.utils.clip_grad_norm_, bound: float = 0.2) -> None:
    descend(model, batches, before=lambda: how(model.parameters(), bound))


def drawn_again(model: nn.Module, batches: Loader) -> None:
    dice = torch.Generator().manual_seed(3)
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    for _ in range(3):
        rows = torch.randint(0, len(x), (8,), generator=dice)
        descend(model, [(x[rows].flip(-1) + 0.1 * torch.randn(8, 1, 8, 8, generator=dice), y[rows])])


def kept_momentum(model: nn.Module, batches: Loader) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for p in model.parameters():
        opt.state[p]["momentum_buffer"] = torch.full_like(p, 0.1)
    descend(model, batches, opt)


def pruned(trained: State, _: State) -> State:
    bound = torch.cat([v.abs().flatten() for v in trained.values()]).quantile(0.3)
    return {k: torch.where(v.abs() < bound, 0.0, v) for k, v in trained.items()}


def largest(state: State) -> State:
    bound = torch.cat([v.abs().flatten() for v in state.values()]).quantile(0.8)
    return {k: torch.where(v.abs() < bound, 0.0, v) for k, v in state.items()}


def without_norms_memory(trained: State, _: State) -> State:
    return {k: torch.zeros_like(v) if "running" in k else v for k, v in trained.items()}


half, brain = cast(torch.float16), cast(torch.bfloat16)
LOOPS = {
    "float16 both ways": Loop("messages travel in float16, which alone", server=half, send=half),
    "float16, sent back as float32": Loop(
        "messages travel in float16", send=lambda t, _: {k: v.half().float() for k, v in t.items()}, server=half
    ),
    "float16 at a small rate": Loop(
        "messages travel in float16", lambda m, b: descend(m, b, lr=1e-4), server=half, send=half
    ),
    "bfloat16 upwards": Loop("messages travel in bfloat16", send=brain),
    "received, then rounded": Loop(
        "clients round what they receive to bfloat16", receive=lambda m, sent, _: m.load_state_dict(brain(sent))
    ),
    "differences of 8 bits": Loop("messages travel as integers of 8 bits", send=moved(as_integers), form="difference"),
    "differences in float16": Loop(
        "messages travel in float16", lambda m, b: descend(m, b, lr=1e-5), send=moved(half), form="difference"
    ),
    "a head at home": Loop(
        "head.weight, head.bias stay with each client", receive=own_head, server=without("head"), send=without("head")
    ),
    "a head at home that is sent": Loop("head.weight, head.bias stay with each client", receive=own_head),
    "norms at home": Loop(
        "body.2.weight, body.2.bias, body.2.running_mean, body.2.running_var stay with each client",
        kind=Normed,
        receive=lambda m, sent, c: own_head(m, sent, c, "body.2"),
        server=without("body.2"),
        send=without("body.2"),
    ),
    "gradients clipped by norm": Loop("The facts are verified", clipped),
    "gradients clipped by value": Loop(
        "The facts are verified", lambda m, b: clipped(m, b, nn.utils.clip_grad_value_, 0.003)
    ),
    "an update clipped to a norm": Loop(
        "updates are clipped to a norm of 0.02", send=moved(to_norm(0.02)), form="difference"
    ),
    "an update clipped by value": Loop(
        "updates are clipped to ±0.001 in each element",
        send=moved(lambda state: {k: v.clamp(-0.001, 0.001) for k, v in state.items()}),
        form="difference",
    ),
    "noise": Loop("noise of standard deviation 0.0001 is added", send=moved(noisy(1e-4)), form="difference"),
    "noise that drowns": Loop(
        "noise of standard deviation 0.05", send=moved(noisy(0.05)), form="difference", state="unverified"
    ),
    "clipped, with noise": Loop(
        "noise of standard deviation 0.0001, after clipping by a factor",
        send=moved(lambda state: noisy(1e-4)(to_norm(0.05)(state))),
        form="difference",
    ),
    "drawn with replacement, augmented": Loop("The facts are verified", drawn_again),
    "two optimisers of a kind": Loop("The facts are verified", two_optimisers),
    "two optimisers of two kinds": Loop(
        "or by several", lambda m, b: two_optimisers(m, b, torch.optim.Adam), state="unverified"
    ),
    "groups, one frozen": Loop("The facts are verified", grouped),
    "GradScaler": Loop("The facts are verified", scaled),
    "accumulated": Loop("The facts are verified", accumulated),
    "EMA": Loop("an average of the weights along the training is sent", averaged),
    "mixed with the received": Loop(
        "what is sent lies 70% of the way from the received model",
        send=lambda trained, sent: {k: 0.7 * trained[k] + 0.3 * sent[k] for k in sent},
    ),
    "pruned": Loop("30% of the weights are set to zero before they are sent", send=pruned),
    "the largest changes": Loop("80% of the numbers stay as received", send=moved(largest), form="difference"),
    "pruned, in float16": Loop(
        "30% of the weights are set to zero before they are sent; messages travel in float16, which alone",
        server=half,
        send=lambda trained, sent: half(pruned(trained, sent)),
    ),
    "decimals": Loop(
        "messages are rounded to 4 decimal places",
        lambda m, b: descend(m, b, lr=0.001),
        send=lambda trained, _: {k: (1e4 * v).round() / 1e4 for k, v in trained.items()},
    ),
    "a head that is sent as received": Loop(
        "head.weight, head.bias stay as received in what is sent",
        send=lambda trained, sent: {**trained, **{k: v for k, v in sent.items() if "head" in k}},
    ),
    "a head, then a body": Loop(
        "head.weight, head.bias stay with each", in_turn, receive=own_head, server=without("head"), send=without("head")
    ),
    "a head, then a body, by one optimiser": Loop(
        "head.weight, head.bias stay", frozen_in_turn, receive=own_head, server=without("head"), send=without("head")
    ),
    "a head on ready features, then a body": Loop(
        "head.weight, head.bias stay", probed, receive=own_head, server=without("head"), send=without("head")
    ),
    "a head, then a body, both sent": Loop("or by several", in_turn, state="unverified"),
    "a personal model first": Loop("The facts are verified", personal_first),
    "a personal model after": Loop("The facts are verified", personal_after),
    "a personal model in the same module": Loop("The facts are verified", personal_within),
    "a personal model first, differences": Loop(
        "The facts are verified", personal_first, send=moved(lambda state: state), form="difference"
    ),
    "norms reset": Loop("The facts are verified", kind=Normed, send=without_norms_memory),
    "norms' memory not sent": Loop("The facts are verified", kind=Normed, send=without("running")),
    "a rate for each batch": Loop("The facts are verified", scheduled),
    "momentum kept": Loop("kept its state", kept_momentum, state="unverified"),
    "float16, and a head at home": Loop(
        "head.weight, head.bias stay with each client, and the replay has its own; messages travel in float16",
        lambda m, b: descend(m, b, lr=0.001),
        receive=own_head,
        server=lambda state: half(without("head")(state)),
        send=lambda trained, _: half(without("head")(trained)),
    ),
}


def further(state: State, batches: Loader) -> State:
    model = new(Net)
    model.load_state_dict(state)
    descend(model, batches)
    return model.state_dict()


WRONG = {
    "a smaller rate": Loop("", facts={"learning_rate": 0.1}),
    "a smaller rate, in float16": Loop(
        "", server=half, send=half, facts={"learning_rate": 0.1}, train=lambda m, b: descend(m, b, lr=0.001)
    ),
    "a larger rate": Loop("", facts={"learning_rate": 0.03}),
    "a rate, beside noise": Loop("", facts={"learning_rate": 0.1}, send=moved(noisy(1e-4)), form="difference"),
    "momentum": Loop("", facts={"momentum": 0.9}),
    "decay": Loop("", facts={"weight_decay": 0.5}),
    "another client's update": Loop("", send=lambda *_: further(new(Net).state_dict(), loader(9))),
    "another model": Loop("", send=lambda *_: new(Net, 7).state_dict()),
    "a step more": Loop("", send=lambda trained, _: further(trained, loader(8, 1))),
    "decayed after training": Loop("", send=lambda trained, _: {k: 0.99 * v for k, v in trained.items()}),
    "one layer sent thrice": Loop(
        "", send=moved(lambda s: {k: v * (3 if "head" in k else 1) for k, v in s.items()}), form="difference"
    ),
    "the sign": Loop("", send=moved(lambda state: {k: -v for k, v in state.items()}), form="difference"),
    "another head than at home": Loop(
        "",
        receive=own_head,
        server=without("head"),
        send=lambda _, sent: {k: v + 0.01 * torch.randn_like(v).sign() for k, v in sent.items()},
    ),
}


def recorded(folder: Path, loop: Loop, clients: int = 2) -> tuple[Transcript, Any]:
    start = loop.server(new(loop.kind).state_dict())
    with fedaudit.Recorder(folder) as recorder, recorder.round(start):
        for client in range(clients):
            model = new(loop.kind, 1)
            loop.receive(model, start, client)
            with recorder.capture() as seen:
                loop.train(model, loader(client))
            state = loop.send(copy.deepcopy(model.state_dict()), start)
            recorder.update(client, state, seen, form=loop.form, training=loop.facts)
    transcript = Transcript.load(folder, new(loop.kind, 30))
    where = truth_beside(folder)
    assert where is not None
    truth = load_truth(where, transcript)
    return check_replay(transcript, truth, folder, Quiet()), truth


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_done_to_an_update_explains_it(name: str, tmp_path: Path) -> None:
    checked, _ = recorded(tmp_path / "r", LOOPS[name])
    said = facts_in_words(checked)
    assert LOOPS[name].says in said
    assert facts_of(checked) == LOOPS[name].state


@pytest.mark.parametrize("name", WRONG)
def test_nothing_explains_a_wrong_fact(name: str, tmp_path: Path) -> None:
    checked, _ = recorded(tmp_path / "r", WRONG[name])
    assert facts_of(checked) == "contradicted", facts_in_words(checked)
    assert "nothing ordinary" in facts_in_words(checked)


@pytest.mark.parametrize("name", ["a head at home", "a head at home that is sent"])
def test_what_stays_at_home_is_in_the_truth_alone(name: str, tmp_path: Path) -> None:
    checked, truth = recorded(tmp_path, LOOPS[name])
    for client in range(2):
        model = new(Net)
        own_head(model, checked.rounds[0].weights, client)
        assert truth.starts[0, client].keys() == {"head.weight", "head.bias"}
        assert truth.starts[0, client]["head.weight"].equal(model.state_dict()["head.weight"])
        sent = checked.rounds[0].sent_to(client)["head.weight"]
        assert sent.equal(new(Net, 0 if name.endswith("sent") else 30).state_dict()["head.weight"])
    assert not list(tmp_path.glob("*-sent.safetensors"))


def test_others_have_a_clients_module_without_its_own_layers(tmp_path: Path) -> None:
    model = new(Net, 1)
    with fedaudit.Recorder(tmp_path) as recorder, recorder.round(without("head")(new(Net).state_dict())):
        with recorder.capture() as seen:
            descend(model, loader(0))
        recorder.update("a", without("head")(model.state_dict()), seen)
    others, own = recorder.without_personal(model).state_dict(), model.state_dict()
    assert others["body.1.weight"].equal(own["body.1.weight"])
    assert not any(torch.isclose(others[name], own[name]).any() for name in ("head.weight", "head.bias"))


def test_layers_that_are_trained_in_turn_again_and_again_arent_modelled() -> None:
    model = new(Net, 1)
    with Capture() as seen:
        in_turn(model, loader(0))
        in_turn(model, loader(0))
    seen.choose(without("head")(model.state_dict()))
    assert seen.elsewhere == {"head.weight", "head.bias"}
    assert "optimiser" in seen.training().unmodelled


@pytest.mark.parametrize("train", [in_turn, frozen_in_turn, probed])
def test_a_head_that_is_trained_first_is_in_the_truth_alone(train: Any, tmp_path: Path) -> None:
    loop = Loop("", train, receive=own_head, server=without("head"), send=without("head"))
    checked, truth = recorded(tmp_path, loop)
    assert checked.replays[0, 0].error == 0
    for client in range(2):
        model = new(Net, 1)
        own_head(model, checked.rounds[0].weights, client)
        assert truth.starts[0, client].keys() == {"head.weight", "head.bias"}
        assert not truth.starts[0, client]["head.weight"].equal(model.state_dict()["head.weight"])  # trained by then
    with fedaudit.Recorder(tmp_path / "again") as recorder, recorder.round(without("head")(new(Net).state_dict())):
        with recorder.capture() as seen:
            train(model, loader(0))
        recorder.update("a", without("head")(model.state_dict()), seen)
    others = recorder.without_personal(model).state_dict()
    assert not torch.isclose(others["head.weight"], model.state_dict()["head.weight"]).any()


def test_norms_memory_that_stays_at_home_is_nobody_elses(tmp_path: Path) -> None:
    model = new(Normed, 1)
    with fedaudit.Recorder(tmp_path) as recorder, recorder.round(without("running")(new(Normed).state_dict())):
        descend(model, loader(1))  # of rounds before
        with recorder.capture() as seen:
            descend(model, loader(0))
        recorder.update("a", without("running")(model.state_dict()), seen)
    others = recorder.without_personal(model).state_dict()
    assert not any(others["body.2.running_mean"])
    assert others["body.2.weight"].equal(model.state_dict()["body.2.weight"])


def test_labels_are_granted_to_a_recording_whose_head_stays_at_home(tmp_path: Path) -> None:
    recorded(tmp_path, LOOPS["a head at home"])
    attacks: list[Any] = [{"name": "invg", "iterations": 1}]
    known: Any = {"module": new(Net, 30), "progress": False}
    (blind, *_) = fedaudit.attack(tmp_path, attacks, **known)
    assert "the last layer ('head') isn't in the update" in str(blind)
    found = fedaudit.attack(tmp_path, attacks, threat={"knows_labels": True}, **known)
    asked = [torch.cat([y for _, y in loader(client)]) for client in range(2)]
    assert all(one.labels.equal(y) for one, y in zip(found, asked, strict=True))  # type: ignore[union-attr]
    (tmp_path / "truth").rename(tmp_path / "elsewhere")
    with pytest.raises(fedaudit.BadInput, match="ground truth"):
        fedaudit.attack(tmp_path, attacks, threat={"knows_labels": True}, **known)


def test_the_report_says_it_first(tmp_path: Path) -> None:
    recorded(tmp_path / "r", LOOPS["float16, and a head at home"])
    known: Any = {"module": new(Net, 30), "controls": False, "progress": False}
    done = fedaudit.audit_transcript(tmp_path / "r", ["exact-linear"], out=tmp_path / "o", **known)
    (federation,) = done.result.federations
    assert federation.recording is not None
    assert federation.replay_error is not None
    assert federation.replay_error > 0.1
    assert federation.recording.facts == "verified"
    page = (tmp_path / "o" / "report.html").read_text()
    assert "<dt>Replay check</dt><dd>The facts hold: head.weight, head.bias stay with each client" in page
    assert f"messages travel in float16, which alone explains a difference of {federation.replay_error:.2g}." in page


class Sharp(Net):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.body(x).relu())
        return made


@pytest.mark.parametrize(
    ("module", "loss"),
    [
        (Sharp, None),
        (Net, nn.CrossEntropyLoss(label_smoothing=0.4)),
        (Net, lambda outputs, targets: 3 * cross_entropy(outputs, targets)),
        (Net, None),
    ],
)
def test_another_module_loss_or_example_is_a_contradiction(module: Any, loss: Any, tmp_path: Path) -> None:
    _, truth = recorded(tmp_path, Loop(""))
    (tmp_path / "replay.json").unlink()
    transcript = Transcript.load(tmp_path, new(module, 30), loss)
    if loss is None and module is Net:
        seen = {(0, client): truth.seen[0, 1 - client] for client in (0, 1)}
        truth = dataclasses.replace(truth, seen=seen)
    assert facts_of(check_replay(transcript, truth, None, Quiet())) == "contradicted"


def test_a_model_that_is_sent_back_untouched_is_a_contradiction(tmp_path: Path) -> None:
    checked, _ = recorded(tmp_path, Loop("", send=lambda _, sent: sent))
    assert facts_of(checked) == "contradicted"
