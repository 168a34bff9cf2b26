"""Training that isn't plain SGD: replayed as torch does it, attacked for what it is, refused where nothing works."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.attacks.inversion.engines.guarded import make_engine
from fedaudit.attacks.inversion.engines.reference import reference, unrolled
from fedaudit.attacks.inversion.objectives import Distance, one_sided, soft_signs, squared_l2, weighted_cosine
from fedaudit.attacks.labels.inference import Evidence, infer_labels
from fedaudit.attacks.local_training import TABLE, Way, invert
from fedaudit.attacks.victim import Victim, one_batch_gradient
from fedaudit.task.training import ParameterGroup, Pass, TrainingConfig
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests.attacks.training_cases import HAS, attacked, psnr, trained

SHAPE = (1, 5, 5)
ADAM = TrainingConfig(1e-3, 1, (1,), optimiser="adam")


def small(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Return a smooth network with parameters of several shapes."""
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 6), nn.Softplus(), nn.Linear(6, 4)
    )
    draw = generator(seed, "small")
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=draw))
    return module.to(dtype)


def examples(count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = generator(seed, "examples")
    return torch.randn((count, *SHAPE), generator=draw).to(dtype), torch.randint(4, (count,), generator=draw)


def victim_of(module: nn.Module, training: TrainingConfig) -> Victim:
    """Return the attacker's model; parameters of rate 0 are constants, as ``load_victim`` makes them."""
    frozen = {name for group in training.groups if not group.learning_rate for name in group.parameters}
    state = {name: p.detach().clone() for name, p in module.named_parameters()}
    return Victim(
        module,
        F.cross_entropy,
        {n: p for n, p in state.items() if n not in frozen},
        {n: p for n, p in state.items() if n in frozen},
    )


def replayed(
    victim: Victim, x: Tensor, y: Tensor, training: TrainingConfig, softness: float = 0.0
) -> dict[str, Tensor]:
    start = {name: p.clone().requires_grad_() for name, p in victim.parameters.items()}
    sizes = list(training.batch_sizes)
    found = unrolled(victim, start, x.split(sizes), y.split(sizes), training, softness)
    return {name: -part.detach() for name, part in zip(start, found, strict=True)}


def apart(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Return the relative error of the parameters that were trained; the others must not have moved."""
    assert all(not true[name].any() for name in set(true) - set(found))
    gap = torch.cat([(found[n] - true[n]).flatten() for n in found]).norm()
    return float(gap / torch.cat([true[n].flatten() for n in found]).norm())


@st.composite
def trainings(draw: st.DrawFn, optimisers: tuple[str, ...] = ("sgd",)) -> TrainingConfig:
    steps = draw(st.integers(1, 3))
    passes = []
    for _ in range(steps):
        sizes = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
        passes.append(tuple(Pass(n, draw(st.sampled_from([1.0, 1 / len(sizes), 0.3]))) for n in sizes))
    accumulated = draw(st.booleans())
    optimiser = draw(st.sampled_from(optimisers))
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
    nesterov = momentum > 0 and draw(st.booleans())
    positive = st.sampled_from([0.3, 0.9]) if nesterov else st.sampled_from([0.0, 0.9])
    groups = [
        ParameterGroup(names, draw(st.sampled_from([0.0, 0.1, 2.0])), draw(positive), draw(st.sampled_from([0.0, 0.1])))
        for names in (("0.bias", "3.weight"), ("5.weight",))
    ]
    return TrainingConfig(
        0.05,
        steps,
        tuple(sum(p.examples for p in step) for step in passes),
        momentum=momentum,
        weight_decay=draw(st.sampled_from([0.0, 0.02])),
        optimiser=optimiser,  # type: ignore[arg-type]
        nesterov=nesterov,
        dampening=0.0 if nesterov else draw(st.sampled_from([0.0, 0.3])),
        amsgrad=draw(st.booleans()),
        epsilon=draw(st.sampled_from([1e-8, 1e-2])),
        learning_rates=draw(st.sampled_from([(), (0.05, 0.02, 0.1)[:steps]])),
        groups=tuple(groups[: draw(st.integers(0, 2))]),
        passes=tuple(passes) if accumulated else (),
        clip_norm=draw(st.sampled_from([None, 0.1, 100.0])),
        clip_value=draw(st.sampled_from([None, 0.02])),
    )


@pytest.mark.slow
@given(trainings(("sgd", "adam", "adamw")), st.integers(0, 5))
@settings(max_examples=150)
def test_a_replay_of_the_truth_is_what_torch_does(training, seed):
    module, (x, y) = small(seed=seed), examples(sum(training.batch_sizes), seed=seed)
    true = trained(module, F.cross_entropy, x, y, training)
    assert apart(replayed(victim_of(module, training), x, y, training), true) < 1e-10


@given(trainings(), st.integers(0, 5))
@settings(max_examples=60)
def test_a_replay_in_single_precision_is_what_torch_does(training, seed):
    module = small(torch.float32, seed)
    x, y = examples(sum(training.batch_sizes), torch.float32, seed)
    true = trained(module, F.cross_entropy, x, y, training)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).norm()
    moved = torch.cat([t.flatten() for t in true.values()]).norm()
    rounding = 1e-7 * float(weights / moved)  # torch's ΔW is a difference of rounded weights
    assert apart(replayed(victim_of(module, training), x, y, training), true) < 1e-5 + rounding


ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "weight decay": {"weight_decay": 0.1},
    "proximal term": {"proximal_mu": 0.5},
    "rates": {"learning_rates": (0.1, 0.3)},
    "groups": {"groups": (ParameterGroup(("3.weight", "3.bias"), 3.0, 0.5, 0.2),)},
    "untrained": {"groups": (ParameterGroup(("0.weight", "0.bias"), 0.0),), "clip_norm": 0.3},
    "accumulation": {"passes": ((Pass(1, 0.7), Pass(1, 0.7)), (Pass(2, 1.0),))},
    "clip_norm": {"clip_norm": 0.3},
    "clip_value": {"clip_value": 0.05},
}


def config(**options: Any) -> TrainingConfig:
    return TrainingConfig(0.2, 2, (2, 2), **options)


@pytest.mark.parametrize("word", [word for word in ALONE if word not in ("plain", "proximal term")])
def test_every_option_alone_is_what_torch_does_and_matters(word):
    training, module, (x, y) = config(**ALONE[word]), small(), examples(4)
    true = trained(module, F.cross_entropy, x, y, training)
    victim = victim_of(module, training)
    assert apart(replayed(victim, x, y, training), true) < 1e-10
    assert apart(replayed(victim, x, y, config()), true) > 1e-2


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("word", ALONE)
def test_the_exact_gradient_is_that_of_finite_differences(word, optimiser):
    training = dataclasses.replace(config(**ALONE[word]), optimiser=optimiser)
    module, (x, y) = small(), examples(4)
    victim = victim_of(module, training)
    target = list(replayed(victim, *examples(4, seed=1), training).values())
    step = reference(victim, y, training, squared_l2(target, [1.0] * len(target)), 0.5)
    _, gradient = step(x)
    for seed in range(2):
        way = torch.randn(x.shape, generator=generator(seed, "way"), dtype=x.dtype)
        above, below = (float(step(x + sign * 1e-6 * way)[0]) for sign in (1, -1))
        assert (above - below) / 2e-6 == pytest.approx(float((gradient * way).sum()), rel=1e-5, abs=1e-11)


def test_adams_step_has_a_derivative_where_a_gradient_is_zero():
    training = dataclasses.replace(config(), optimiser="adam")
    module = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    with torch.no_grad():
        module[1].bias.fill_(-100.0)  # type: ignore[operator]
    victim, (x, y) = victim_of(module, training), examples(4)
    target = [torch.ones_like(p) for p in victim.parameters.values()]
    assert torch.isfinite(reference(victim, y, training, squared_l2(target, [1.0] * 4))(x)[1]).all()


def test_the_fast_engine_is_for_plain_sgd_alone():
    module, (x, y) = small(torch.float32), examples(4, torch.float32)
    for options, name in (({"nesterov": True, "momentum": 0.9}, "auto"), ({"clip_norm": 0.1}, "first-order")):
        training, notes = config(**options), list[str]()
        victim = victim_of(module, training)
        target = [torch.ones_like(p) for p in victim.parameters.values()]
        distance = weighted_cosine(target, [1.0] * len(target))
        found = make_engine(name, victim, y, training, distance, 10, notes)(x)
        exact = reference(victim, y, training, distance)(x)
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
        assert len(notes) == (name != "auto")


# Adam: what its update tells of the gradient -------------------------------------------------------------------------


def gradient_at(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))
    return {name: g for (name, _), g in zip(module.named_parameters(), grads, strict=True)}


@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
@pytest.mark.parametrize("rate", [1e-2, 1e-3, 1e-5])
def test_what_an_adam_update_tells_of_the_gradient_is_true(optimiser, rate):
    training = dataclasses.replace(ADAM, optimiser=optimiser, learning_rate=rate, weight_decay=0.01, epsilon=1e-6)
    seen, images, labels = attacked(training, model={"name": "convnet-small"})
    message = seen.messages[0]
    module = seen.module.eval()
    module.load_state_dict(message.weights)
    found = invert(message.update, message.weights)
    true = gradient_at(module, seen.task_info.normalise(images), labels)
    wrong = count = many = 0
    for name, g in true.items():
        g = g + 0.01 * message.weights[name] if optimiser == "adam" else g
        value, known = found.values[name], found.known[name]
        assert bool(((value - g).abs()[known] <= 0.5 * g.abs()[known] + 1e-7 * (value[known] == 0)).all()), name
        assert bool((value.abs()[~known] <= 1.5 * g.abs()[~known]).all()), name
        wrong += int(((value * g) < 0).sum())
        count += int(known.sum())
        many += g.numel()
    assert wrong == 0
    assert count / many > (0.3 if rate > 1e-4 else 0.02)


def test_noise_and_rounding_leave_less_of_the_gradient():
    seen, *_ = attacked(ADAM, model={"name": "convnet-small"})
    message = seen.messages[0]
    sanitised = dataclasses.replace(message.update, sanitised=ClientDefenceInfo("dp", noise=1e-4))
    halves = {n: t.bfloat16().float() for n, t in message.update.tensors.items()}  # nobody says that it was rounded
    known = [
        sum(int(k.sum()) for k in invert(update, message.weights).known.values())
        for update in (message.update, sanitised, dataclasses.replace(message.update, tensors=halves))
    ]
    assert known[0] > known[1]
    assert known[0] > known[2]


def adaptive_distances() -> list[Distance]:
    draw = generator(0, "distances")
    values = [
        torch.randn(4, 3, generator=draw, dtype=torch.float64),
        torch.randn(5, generator=draw, dtype=torch.float64),
    ]
    known = [torch.rand(t.shape, generator=draw) < 0.5 for t in values]
    return [one_sided(values, known, [1.0, 2.0]), soft_signs([t.tanh() for t in values], [1.0, 2.0])]


@pytest.mark.parametrize("distance", adaptive_distances())
def test_the_derivative_of_a_distance_is_that_of_its_value(distance):
    vector = torch.randn(17, generator=generator(1, "v"), dtype=torch.float64, requires_grad=True)
    value = distance.value(vector)
    (expected,) = torch.autograd.grad(value, vector)
    found, derivative = distance.derivative(vector.detach())
    assert found == pytest.approx(float(value.detach()), rel=1e-12)
    assert torch.allclose(derivative, expected, rtol=1e-10, atol=1e-14)


def test_larger_gradients_of_the_right_sign_cost_nothing():
    values = [torch.tensor([1.0, -1.0, 0.5, -0.1])]
    distance = one_sided(values, [torch.tensor([False, False, True, True])], [1.0])
    assert float(distance.value(torch.tensor([7.0, -3.0, 0.5, -0.1]))) == pytest.approx(0, abs=1e-6)
    assert float(distance.value(torch.tensor([-7.0, -3.0, 0.5, -0.1]))) > 0.1
    assert float(distance.value(torch.tensor([7.0, -3.0, 5.0, -0.1]))) > 0.01


def recovered(name: str, training: TrainingConfig, claimed: TrainingConfig, seeds: int = 4, **settings: Any) -> float:
    """Return the mean PSNR over ``seeds`` clients whose update the attack takes for that of ``claimed``."""
    total = 0.0
    for seed in range(seeds):
        seen, images, _ = attacked(training, seed=seed, labels=True)
        update = dataclasses.replace(seen.messages[0].update, training=claimed)
        lied = dataclasses.replace(seen, messages=(dataclasses.replace(seen.messages[0], update=update),))
        found: Any = make_attack(name, settings)(lied, generator=generator(seed, "attack"))
        total += psnr(found.images, images)
    return total / seeds


ADAM_MARGINS: dict[str, tuple[dict[str, Any], float]] = {
    "invg": ({"iterations": 150}, 4.0),
    "agic": ({"iterations": 150}, 4.0),
    "dlg-adam": ({"iterations": 150}, 3.0),
    "idlg": ({"iterations": 30}, 3.0),
    "geng": ({"iterations": 30}, 3.0),
    "gradinversion": ({"iterations": 100, "group": 1}, 3.0),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ADAM_MARGINS)
@pytest.mark.slow
def test_an_attack_that_knows_of_adam_recovers_more(name):
    options, margin = ADAM_MARGINS[name]
    aware = recovered(name, ADAM, ADAM, **options)
    naive = recovered(name, ADAM, TrainingConfig(1e-3, 1, (1,)), **options)
    assert aware > naive + margin, (aware, naive)


@pytest.mark.long
@pytest.mark.slow
def test_several_steps_of_adam_are_replayed():
    training, options = TrainingConfig(1e-3, 3, (1, 1, 1), optimiser="adamw", weight_decay=0.01), {"iterations": 120}
    aware = recovered("invg", training, training, **options)
    naive = recovered("invg", training, TrainingConfig(1e-3, 3, (1, 1, 1)), **options)
    assert aware > naive + 2, (aware, naive)


# Labels --------------------------------------------------------------------------------------------------------------


def test_labels_are_told_by_the_signs_that_adam_leaves():
    training = TrainingConfig(1e-3, 1, (4,), optimiser="adam")
    single: Any = make_attack("labels")(attacked(ADAM)[0], generator=generator(0))
    assert single.labels.equal(attacked(ADAM)[2])
    for seed in range(3):
        seen, _, labels = attacked(training, seed=seed)
        found: Any = make_attack("labels")(seen, generator=generator(0))
        assert found.method == "signs"
        assert set(found.labels.tolist()) == set(labels.tolist())
        assert len(found.labels) == 4
        assert any("not how often" in note for note in found.notes)
        for method in ("geng", "bias-corrected"):
            with pytest.raises(NotApplicable, match="use label_inference=signs"):
                make_attack("labels", {"method": method})(seen, generator=generator(0))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, (1.0, 5.0, 0.5)])
@pytest.mark.parametrize("method", ["bias-corrected", "geng"])
def test_counts_of_labels_are_right_whatever_the_losss_options(smoothing, weights, method):
    features = torch.full((8, 1), 2.0, requires_grad=True)
    layer = nn.Linear(1, 3)
    with torch.no_grad():
        layer.weight.fill_(0.1)
        layer.bias.zero_()
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    loss = nn.CrossEntropyLoss(weight=None if weights is None else torch.tensor(weights))
    targets = F.one_hot(labels, 3) * (1 - smoothing) + smoothing / 3
    if weights is None:  # torch smooths weighted labels by weights that depend on the class, too
        loss = nn.CrossEntropyLoss(label_smoothing=smoothing)
    elif smoothing:
        pytest.skip("with both, counts are an approximation")
    assert bool((targets >= 0).all())
    rows, bias = torch.autograd.grad(loss(layer(features), labels), [layer.weight, layer.bias])

    def probe() -> tuple[Tensor, Tensor]:
        return torch.full((4, 3), 1 / 3), torch.full((4, 1), -2.0 if method == "bias-corrected" else 2.0)

    shown = Evidence(rows, bias, probe, label_smoothing=smoothing, class_weights=weights)
    assert infer_labels(method, shown, 8)[0].tolist() == labels.tolist()


# What is refused, and what is said -----------------------------------------------------------------------------------

ONE = TrainingConfig(0.1, 1, (1,))
SEVERAL = TrainingConfig(0.1, 2, (1, 1))
# word -> a training that has it; the loss's options are the task's.
BY: dict[Way, str] = {
    "one step": "invg",
    "simulation": "invg",
    "one batch": "agic",
    "r-gap": "r-gap",
    "spear": "spear",
    "labels": "labels",
}
ELSEWHERE = {"dropout", "own loss", "batch norm", "label smoothing", "class weights", "rates", "accumulation"} | {
    "sum",
    "steps of a sum",
    "private steps",
    "private noise",
}


def training_with(word: str, way: Way) -> TrainingConfig:
    """Return a training that has ``word``; where nothing is trained, the numbers in the update are SGD's."""
    return dataclasses.replace(SEVERAL if way in ("simulation", "one batch") else ONE, **HAS[word])


def test_every_word_of_training_is_in_the_table_and_tested():
    assert set(TABLE) == set(HAS) | ELSEWHERE
    assert {way for row in TABLE.values() for way in row.answers} <= set(get_args(Way))


@pytest.fixture(scope="module")
def seen_of() -> Any:
    """Return what an attacker sees of one or two examples, whatever it is told of the training."""
    made = {
        steps: attacked(TrainingConfig(0.1, steps, (1,) * steps), model={"name": "leaky-cnn"})[0] for steps in (1, 2)
    }

    def of(training: TrainingConfig) -> Any:
        seen = made[training.local_steps]
        update = dataclasses.replace(seen.messages[0].update, training=training)
        return dataclasses.replace(seen, messages=(dataclasses.replace(seen.messages[0], update=update),))

    return of


@pytest.mark.slow
@pytest.mark.parametrize("way", BY)
@pytest.mark.parametrize("word", HAS)
def test_the_table_is_what_attacks_do(word, way, seen_of):
    seen, attack = seen_of(training_with(word, way)), make_attack(BY[way])
    answer = TABLE[word].answers.get(way)
    if way == "spear" and not (answer and answer.kind == "refuses"):  # this model doesn't begin with a linear layer
        with pytest.raises(NotApplicable, match="fully connected"):
            attack.check(seen)
    elif way == "r-gap" and word == "clip_norm":  # this model has no bias in its last layer
        with pytest.raises(NotApplicable, match="bias in the last layer"):
            attack.check(seen)
    elif answer is not None and answer.kind == "refuses":
        with pytest.raises(NotApplicable) as refused:
            attack.check(seen)
        assert answer.text in str(refused.value)
        assert "\n" not in str(refused.value)
    elif way not in ("r-gap", "labels"):
        attack.check(seen)
        found = make_attack(BY[way], {"iterations": 1})(seen, generator=generator(0))
        said = [note for note in found.notes if note.startswith("approximated: ") and TABLE[word].what in note]
        assert bool(said) is bool(answer or TABLE[word].answers.get("labels"))
        assert answer is None or any(answer.text in note for note in said)


def test_local_models_of_adam_are_learnt_but_not_solved_for():
    for name, refused in (("local-model-exact", True), ("local-model", False)):
        with pytest.raises(NotApplicable) as caught:
            make_attack(name).check(attacked(ADAM)[0])
        assert ("aren't affine" in str(caught.value)) is refused


# Exactness at a single step ------------------------------------------------------------------------------------------

REAL: dict[str, dict[str, Any]] = {
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "groups": {"groups": (ParameterGroup(("fc.weight", "conv1.weight"), 3.0, 0.0, 0.05),)},
    "pass": {"passes": ((Pass(1, 0.25),),)},
}


@pytest.mark.parametrize("word", REAL)
def test_the_gradient_of_one_step_is_taken_out_of_the_update(word):
    training = dataclasses.replace(ONE, **REAL[word])
    seen, images, labels = attacked(training)
    message = seen.messages[0]
    module = seen.module.eval()
    module.load_state_dict(message.weights)
    true = gradient_at(module, seen.task_info.normalise(images), labels)
    found = one_batch_gradient(message.update, weights=message.weights)
    assert apart(found, true) < 1e-3


@pytest.mark.parametrize("word", REAL)
def test_the_closed_form_takes_one_step_of_any_sgd(word):
    seen, images, _ = attacked(dataclasses.replace(ONE, **REAL[word]), model={"name": "leaky-cnn"})
    found: Any = make_attack("r-gap")(seen, generator=generator(0))
    assert psnr(found.images, images) > 40


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.05}, {"clip_value": 1e-3}, {"momentum": 0.9, "nesterov": True}, {"passes": ((Pass(1, 0.1),),)}],
)
@pytest.mark.parametrize("name", ["dlg", "idlg"])
@pytest.mark.slow
def test_single_step_methods_match_what_the_optimiser_made(name, options):
    training = dataclasses.replace(ONE, learning_rate=1.0, **options)
    aware = recovered(name, training, training, seeds=2, iterations=30)
    naive = recovered(name, training, dataclasses.replace(ONE, learning_rate=1.0), seeds=2, iterations=30)
    assert aware > 25
    assert aware > naive + 5, (aware, naive)


def test_a_clipped_gradient_that_is_sent_is_matched_as_one():
    training = dataclasses.replace(ONE, learning_rate=1.0, clip_norm=0.05, optimiser="adamw", weight_decay=0.1)
    seen, images, _ = attacked(dataclasses.replace(training, optimiser="sgd", weight_decay=0.0), labels=True)
    sent = {name: -t for name, t in seen.messages[0].update.tensors.items()}
    update = dataclasses.replace(seen.messages[0].update, kind="gradient", tensors=sent, training=training)
    message = dataclasses.replace(seen.messages[0], update=update)
    seen = dataclasses.replace(seen, messages=(message,))
    found: Any = make_attack("idlg", {"iterations": 30})(seen, generator=generator(0))
    assert psnr(found.images, images) > 25
    assert not any("Adam" in note or "decay" in note for note in found.notes)
