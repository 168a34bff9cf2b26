"""GIAS and its generators: training that resumes to the same bits, no victim among the public examples, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fedaudit.attacks import make_attack
from fedaudit.attacks.inversion.objectives import flatten
from fedaudit.data import Dataset, load_dataset
from fedaudit.modalities.image import IMAGE
from fedaudit.models import Generator, GeneratorSpec
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import check_public_examples, record, run_audit
from fedaudit.pipeline.trials import Trial
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.errors import BadInput, MissingData, NotApplicable
from fedaudit.utils.progress import Quiet
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.attacks.generative import from_codes, from_weights, through
from fedaudit_catalogue.generators import TrainedGenerator, trunk
from fedaudit_catalogue.train_generator import TrainingPlan, public_examples, sample_sheet, train_generator
from tests.conftest import Command, refused

OBJECTIVES = ["autoencoder", "gan"]


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_dataset("digits")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, digits: Dataset) -> Path:
    """Return the file of a generator of digits, trained for a second or two."""
    path = tmp_path_factory.mktemp("generator") / "digits.safetensors"
    train_generator(digits, path, latent=16, width=8, plan=TrainingPlan(steps=250))
    return path


def recorded(file: Path | None, **changes: Any) -> tuple[Scenario, Recording]:
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "lenet", "initialisation": "uniform"},
        "federations": [{"name": "fedsgd", "clients": 1, "examples": 2, "batch_size": 2}],
        "threat": {"knows_public_data": True},
        "attacks": [{"name": "gias", "iterations": 20, **({"generator_file": str(file)} if file else {})}],
    }
    made = scenario_from(values | changes)
    (only,) = record(resolve(made))
    return made, only


def observation(file: Path | None, **changes: Any) -> Observation:
    made, only = recorded(file, **changes)
    return observe(only.transcript, made.threat).split()[0]


def run_attack(seen: Observation, file: Path, seed: int = 0, **settings: Any) -> Any:
    settings = {"generator_file": str(file), "iterations": 20, **settings}
    return make_attack("gias", settings)(seen, generator=generator(seed, "gias"))


# Generators ----------------------------------------------------------------------------------------------------------


@given(
    channels=st.sampled_from([1, 3]),
    height=st.integers(4, 40),
    breadth=st.integers(4, 40),
    width=st.sampled_from([4, 8]),
)
def test_a_generator_makes_images_of_any_shape(channels, height, breadth, width):
    spec = GeneratorSpec((channels, height, breadth), 5, width)
    with torch.no_grad():
        images = Generator(spec)(torch.randn(3, 5))
        assert images.shape == (3, channels, height, breadth)
        assert images.min() >= 0
        assert images.max() <= 1
        assert trunk(spec, 7)(images).shape == (3, 7)
        alone = Generator(spec)(torch.randn(1, 5))
    assert alone.shape[0] == 1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_goes_on_where_it_stopped_to_the_same_bits(tmp_path, digits, objective, monkeypatch):
    monkeypatch.setattr("fedaudit.simulation.checkpoint.EVERY", 0.0)
    plan = TrainingPlan(objective, steps=7, batch_size=8)
    whole = train_generator(digits, tmp_path / "whole.safetensors", latent=4, width=4, plan=plan)

    class Interrupted(Exception):
        pass

    class Display(Quiet):
        def stage(self, title: str, total: float) -> Any:
            def report(done: float) -> None:
                if done == 5:
                    raise Interrupted

            return report

    out = tmp_path / "parted.safetensors"
    with pytest.raises(Interrupted):
        train_generator(digits, out, latent=4, width=4, plan=plan, display=Display())
    assert not out.exists()
    steps: list[float] = []

    class Counting(Quiet):
        def stage(self, title: str, total: float) -> Any:
            return steps.append

    torch.rand(5)  # the global generator plays no part
    parted = train_generator(digits, out, latent=4, width=4, plan=plan, display=Counting())
    assert steps == [5, 6, 7]
    for name, value in whole.network.state_dict().items():
        assert value.equal(parted.network.state_dict()[name]), name
    assert [p.name for p in tmp_path.iterdir() if p.stem.startswith("parted")] == ["parted.safetensors"]


def test_training_leaves_the_global_generator_alone(tmp_path, digits):
    before = torch.get_rng_state()
    train_generator(digits, tmp_path / "g.safetensors", latent=4, width=4, plan=TrainingPlan("gan", steps=1))
    assert torch.get_rng_state().equal(before)


def test_a_trained_generator_is_nearer_to_digits_than_an_untrained_one(trained, digits):
    """The best of 500 random codes: a prior that has learnt something comes closer to images it has never seen."""
    learnt = TrainedGenerator.load(trained).network
    codes = torch.randn((500, 16), generator=generator(0, "codes"))
    victims = digits.test.inputs[:20]
    nearest = []
    for network in (learnt, Generator(learnt.spec)):
        with torch.no_grad():
            images = network(codes)
        nearest.append(torch.cdist(victims.flatten(1), images.flatten(1)).amin(dim=1).mean())
    assert nearest[0] < 0.7 * nearest[1]


def test_no_test_example_is_public(digits):
    twice = Dataset.from_tensors(
        torch.cat([digits.train.inputs[:50], digits.test.inputs[:5]]),
        torch.arange(55) % 10,
        test=(digits.test.inputs[:20], torch.arange(20) % 10),
    )
    images = public_examples(twice)
    assert len(images) == 50
    assert not torch.isin(IMAGE.fingerprints(images), IMAGE.fingerprints(twice.test.inputs)).any()


def test_fingerprints_are_those_of_the_pixels():
    images = torch.rand((6, 3, 5, 4), generator=generator(0, "f"))
    prints = IMAGE.fingerprints(images)
    assert len(prints.unique()) == 6
    assert IMAGE.fingerprints((images * 255).round() / 255).equal(prints)
    assert IMAGE.fingerprints(images.flip(0)).equal(prints.flip(0))
    assert not torch.isin(IMAGE.fingerprints(images.reshape(6, 3, 4, 5)), prints).any()
    changed = images.clone()
    changed[:, 0, 0, 0] = 1 - changed[:, 0, 0, 0].round()
    assert not torch.isin(IMAGE.fingerprints(changed), prints).any()


def test_a_generator_survives_the_disk_and_nothing_else_is_taken_for_one(tmp_path, trained):
    again = TrainedGenerator.load(trained)
    assert again.data == "digits"
    assert "autoencoder, 250 steps" in again.training
    assert len(again.examples) == len(load_dataset("digits").train)
    assert again.examples.sort().values.equal(again.examples)
    (tmp_path / "cut").write_bytes(trained.read_bytes()[:1000])
    with pytest.raises(BadInput, match="truncated or not a generator"):
        TrainedGenerator.load(tmp_path / "cut")
    with pytest.raises(MissingData):
        TrainedGenerator.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("shape", "latent", "width"), [((1, 2, 8), 4, 8), ((1, 8, 8), 0, 8), ((1, 8, 8), 4, 6), ((1, 8, 2000), 4, 8)]
)
def test_impossible_generators_are_refused(shape, latent, width):
    with pytest.raises(BadInput):
        GeneratorSpec(shape, latent, width)


# No victim among the public examples ---------------------------------------------------------------------------------


def test_a_victim_among_the_public_examples_is_refused(trained):
    made, only = recorded(trained, data={"name": "digits", "split": "train"})
    attack = make_attack("gias", made.attacks[0].settings())
    with pytest.raises(BadInput, match=r"among the public examples"):
        check_public_examples([only], [attack])
    with pytest.raises(BadInput, match=r"data\.split=test"):
        run_audit(made)


def test_the_other_attacks_have_none(trained):
    made, only = recorded(trained)
    check_public_examples([only], [make_attack("invg"), make_attack("gias", made.attacks[0].settings())])
    assert make_attack("invg").public_examples() is None
    assert make_attack("gias").public_examples() is None


@pytest.mark.slow
def test_a_finding_is_that_of_the_generator_s_content(trained, tmp_path, digits):
    seen = observation(trained)
    file = tmp_path / "g.safetensors"
    keys = []
    for seed in (0, 1):
        train_generator(digits, file, latent=4, width=4, plan=TrainingPlan(steps=1, seed=seed), again=True)
        attack = make_attack("gias", {"generator_file": str(file)})
        keys.append(Trial(attack, seen, 0, "cpu").key())
    assert keys[0] != keys[1]


def test_a_generator_of_another_training_is_not_written_over(tmp_path, digits, monkeypatch):
    file = tmp_path / "g.safetensors"

    def train(seed: int = 0, again: bool = False) -> TrainedGenerator:
        plan = TrainingPlan(steps=1, seed=seed)
        return train_generator(digits, file, latent=4, width=4, plan=plan, again=again)

    first = train()
    written = file.stat().st_mtime_ns
    assert first.computation == TrainedGenerator.load(file).computation
    assert train().network.start.weight.equal(first.network.start.weight)
    with pytest.raises(BadInput, match=r"other data, settings or code made .* again=True"):
        train(seed=1)
    monkeypatch.setattr("fedaudit.utils.fingerprint.code_version", lambda: "another")
    with pytest.raises(BadInput, match="other data, settings or code"):
        train()
    assert file.stat().st_mtime_ns == written
    assert train(again=True).computation != first.computation
    dataclasses.replace(first, computation=None).save(file)  # as files were once
    with pytest.raises(BadInput, match="unknown version"):
        train()
    file.write_bytes(b"something else")
    with pytest.raises(BadInput, match="isn't a generator"):
        train()


# The attack ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "federation",
    [
        {"name": "fedsgd", "clients": 1, "examples": 2, "batch_size": 2},
        {"name": "f", "algorithm": "fedavg", "clients": 1, "examples": 4, "local_steps": 4, "batch_size": 1},
    ],
)
def test_it_lowers_its_objective_in_both_searches(trained, federation):
    found = run_attack(observation(trained, federations=[federation]), trained, iterations=40)
    trace = found.trace
    assert trace.iterations == sorted(set(trace.iterations))
    assert trace.iterations[-1] == found.iterations == 40
    middle = trace.iterations.index(12)  # the codes' share of 0.3
    assert trace.objective[0] > trace.objective[middle] > trace.objective[-1] == found.objective
    assert trace.snapshots.shape == (len(trace.iterations), federation["examples"], 1, 8, 8)
    assert trace.snapshots[-1].equal(found.images)
    assert found.images.min() >= 0
    assert found.images.max() <= 1


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_either_search_can_have_nearly_all(trained, share):
    found = run_attack(observation(trained), trained, latent_share=share)
    assert found.iterations == 20
    assert found.objective < found.trace.objective[0]


def test_the_same_observation_and_seed_give_the_same_finding(trained):
    seen = observation(trained)
    a, b, c = (run_attack(seen, trained, seed=seed) for seed in (0, 0, 1))
    assert a.images.equal(b.images)
    assert a.objective == b.objective
    assert not a.images.equal(c.images)


def test_of_several_restarts_the_best_codes_go_on(trained):
    calls: list[tuple[int, int]] = []
    found: Any = make_attack("gias", {"generator_file": str(trained), "iterations": 20, "restarts": 3})(
        observation(trained), generator=generator(0), progress=lambda done, total: calls.append((done, total))
    )
    assert found.iterations == 3 * 6 + 14
    assert calls[-1] == (28, 32)  # reported every ten iterations of a search
    assert calls == sorted(calls)


def test_granted_labels_and_layer_weights_are_used(trained):
    made, only = recorded(trained, threat={"knows_public_data": True, "knows_labels": True})
    seen = observe(only.transcript, made.threat).split()[0]
    plain = run_attack(seen, trained)
    assert plain.label_source == "given"
    assert plain.labels.equal(only.truth.labels[0, 0])
    assert not run_attack(seen, trained, beta=50.0).images.equal(plain.images)


def test_gradients_go_through_the_generator():
    """Oracle: autograd of the whole composition; weights equal to the generator's own give the generator's images."""
    spec = GeneratorSpec((1, 8, 8), 3, 4)
    network = Generator(spec).requires_grad_(False)
    task_info = recorded(None)[1].transcript.task_info
    codes = torch.randn((2, 3), generator=generator(0, "codes"))
    target = torch.rand((2, 1, 8, 8), generator=generator(0, "target"))

    def objective(images: Tensor) -> tuple[Tensor, Tensor]:
        return (images - target).square().sum(), 2 * (images - target)

    weights = flatten(list(network.parameters())).repeat(2, 1)
    for decode, start in ((from_codes(network, task_info), codes), (from_weights(network, task_info, codes), weights)):
        torch.testing.assert_close(decode(start), task_info.normalise(network(codes)))
        value, slope = through(decode, objective)(start)
        leaf = start.clone().requires_grad_()
        whole = (decode(leaf) - target).square().sum()
        (expected,) = torch.autograd.grad(whole, leaf)
        torch.testing.assert_close(value, whole.detach())
        torch.testing.assert_close(slope, expected)


def test_refusals_have_a_reason(trained, tmp_path):
    def check(file: Path | None, **changes: Any) -> None:
        attack = make_attack("gias", {"generator_file": str(file)} if file else {})
        attack.check(observation(None, **changes))

    with pytest.raises(NotApplicable, match=r"threat\.knows_public_data=true"):
        check(trained, threat={})
    with pytest.raises(NotApplicable, match="fedaudit train-generator --data NAME --out"):
        check(None)
    with pytest.raises(NotApplicable, match=r"no generator at .*fedaudit train-generator"):
        check(tmp_path / "nothing.safetensors")
    with pytest.raises(NotApplicable, match=r"makes images of \(1, 8, 8\).*--image-size 16"):
        check(trained, data={"name": "photos", "image_size": 16})
    with pytest.raises(NotApplicable, match="rows of a table"):
        check(trained, data={"name": "breast-cancer"}, model={"name": "mlp"})
    (tmp_path / "other.safetensors").write_bytes(b"no generator")
    with pytest.raises(BadInput, match="not a generator"):
        check(tmp_path / "other.safetensors")


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_generator_and_a_picture(command: Command, tmp_path):
    out = tmp_path / "new" / "g.safetensors"
    words = ["--data", "digits", "--steps", "3", "--width", "4", "--latent", "4", "--objective", "gan"]
    outcome = command("train-generator", "--out", out, *words)
    assert outcome.code == 0, outcome.err
    assert "gan, 3 steps of 32 on 1442 train examples, seed 0" in outcome.out
    trained = TrainedGenerator.load(out)
    assert trained.network.spec == GeneratorSpec((1, 8, 8), 4, 4)
    with Image.open(out.with_suffix(".png")) as image:
        assert image.size == (80, 80)
    assert sample_sheet(trained, count=16).shape == (1, 20, 80)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--data", "diabetes"], "holds rows of a table"),
        (["--data", "digitts"], "did you mean 'digits'"),
        (["--data", "digits", "--objective", "vae"], "unknown objective 'vae'"),
        (["--data", "digits", "--width", "7"], "a multiple of 4"),
        (["--data", "digits", "--learning-rate", "0"], "learning rate"),
    ],
)
def test_the_command_says_what_is_wrong(command: Command, tmp_path, words, reason):
    outcome = command("train-generator", "--out", tmp_path / "g.safetensors", "--steps", "1", *words)
    refused(outcome, reason)


def test_the_command_wants_a_safetensors_file(command: Command, tmp_path):
    outcome = command("train-generator", "--out", tmp_path / "g.pt", "--data", "digits")
    assert outcome.code == 2
    assert "change the name" in outcome.err


@pytest.mark.long
@pytest.mark.slow
def test_it_wins_where_the_gradient_says_too_little(tmp_path):
    """Eight photographs in one gradient, few iterations: with a generator of public crops it is well above InvG."""
    file = tmp_path / "photos.safetensors"
    photos = load_dataset("photos", image_size=16)
    train_generator(photos, file, latent=64, width=8, plan=TrainingPlan(steps=600))
    federation = {"name": "fedsgd", "clients": 1, "examples": 8, "batch_size": 8}
    made, only = recorded(
        file,
        data={"name": "photos", "image_size": 16},
        model={"name": "convnet-small"},
        federations=[federation],
        threat={"knows_public_data": True, "knows_labels": True},
    )
    seen, victims = observe(only.transcript, made.threat).split()[0], only.truth.inputs[0, 0]
    reached = {}
    for name, settings in (("invg", {}), ("gias", {"generator_file": str(file)})):
        found: Any = make_attack(name, {"iterations": 300, **settings})(seen, generator=generator(0, "won"))
        pairs = (found.images[:, None] - victims[None]).square().flatten(2).mean(dim=2)
        reached[name] = float(-10 * pairs.amin(dim=0).log10().mean())
    assert reached["gias"] > reached["invg"] + 3
