"""Membership inference: who gets which records, what attacks make of them, and how that is judged."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor, nn

from fedaudit.attacks import ATTACKS, Finding, MembershipFinding, make_attack
from fedaudit.attacks.membership.agrevader import turned
from fedaudit.auditing import record, run_audit
from fedaudit.data.dataset import Split
from fedaudit.errors import BadInput, CorruptTranscript, NotApplicable
from fedaudit.evaluation import evaluate
from fedaudit.evaluation.membership import auc, judged, roc, tpr_at
from fedaudit.federation.checkpoint import Checkpoint
from fedaudit.federation.drawing import Drawn, draw
from fedaudit.federation.records import NOBODY, UNUSED, Records, Wanted
from fedaudit.federation.simulator import simulate
from fedaudit.federation.transcript import Transcript
from fedaudit.federation.truth import Truth, check_belongs, save_recording
from fedaudit.preparation import prepare_federation, resolve
from fedaudit.scenario import Scenario, scenario_from
from fedaudit.seeds import generator
from fedaudit.threat import Message, Observation, ThreatModel, observe
from fedaudit.trials import Trial
from fedaudit.update import Setup, Update
from tests.conftest import Command

PASSIVE = ["loss-threshold", "gradient-norm", "shadow-models"]
FEDERATION = {
    "name": "f",
    "algorithm": "fedavg",
    "clients": 4,
    "rounds": 2,
    "examples": 120,
    "batch_size": 10,
    "local_epochs": 1,
    "learning_rate": 0.1,
}
PUBLIC = {"knows_public_data": True, "public_examples": 60}


def scenario(threat: dict[str, Any] | None = None, attacks: Any = ("loss-threshold",), **federation: Any) -> Scenario:
    values = {
        "data": {"name": "digits", "split": "train"},
        "model": {"name": "mlp", "width": 32},
        "federations": [{**FEDERATION, **federation}],
        "threat": {"records": 60, **(threat or {})},
        "attacks": list(attacks),
    }
    return resolve(scenario_from(values))


def recorded(made: Scenario) -> tuple[Transcript, Truth]:
    (only,), _, _ = record(made)
    return only.transcript, only.truth


def play(name: str, seen: Observation, **settings: Any) -> MembershipFinding:
    found = make_attack(name, settings).run(seen, generator=generator(0, "attack"))
    assert isinstance(found, MembershipFinding)
    return found


def metrics(found: Finding, seen: Observation, truth: Truth) -> dict[str, float]:
    return {m.name: m.value for m in evaluate(found, seen, truth, seed=0).result.metrics}


# Records -------------------------------------------------------------------------------------------------------------


def split(rows: list[int], label: int = 3, group: int | None = None) -> Split:
    """Examples that can be told by their number."""
    numbers = torch.tensor(rows, dtype=torch.float32)
    groups = None if group is None else torch.full((len(rows),), group)
    return Split(torch.stack([numbers, -numbers], dim=1), (numbers.long() % label), groups)


def numbers(inputs: Tensor) -> list[int]:
    return [int(x) for x in inputs[:, 0].tolist()]


SHARES = [split([*range(20)]), split([*range(20, 50)]), split([*range(50, 60), 0, 1, 2])]  # the last one is malicious
REST, HELD_OUT = split([*range(80)]), split([*range(100, 200)])


def drawn(records: int = 20, public: int = 30, seed: int = 0) -> Drawn:
    return draw(Wanted(records, public), SHARES, 2, REST, HELD_OUT, generator=generator(seed, "x"))


@given(records=st.integers(1, 47).map(lambda n: 2 * n), public=st.integers(0, 20), seed=st.integers(0, 1000))
def test_half_of_the_records_are_honest_clients_and_half_nobodys(records, public, seed):
    made = drawn(records, public, seed)
    assert made.records is not None
    held = numbers(made.records.inputs)
    assert len(held) == len(set(held)) == records
    theirs = {n: client for client in (0, 1) for n in numbers(SHARES[client].inputs)}
    for number, owner, position in zip(held, made.owners.tolist(), made.positions.tolist(), strict=True):
        assert number not in numbers(SHARES[2].inputs)
        assert owner == theirs.get(number, NOBODY)
        assert owner == NOBODY or numbers(SHARES[owner].inputs)[position] == number
    assert int((made.owners == NOBODY).sum()) == records // 2
    assert made.records.labels.tolist() == [n % 3 for n in held]
    free = numbers(made.records.public_inputs)
    assert len(free) == len(set(free)) == public
    clients = {n for share in SHARES for n in numbers(share.inputs)}
    assert not clients & set(free)
    assert not set(held) & set(free)
    assert not set(numbers(made.held_out.inputs)) & {*held, *free}
    assert set(numbers(made.held_out.inputs)) | {*held, *free} >= set(range(100, 200))


def test_what_nobody_holds_comes_from_the_clients_own_split_first():
    made = drawn(20, 0)
    assert made.records is not None
    strangers = [n for n, o in zip(numbers(made.records.inputs), made.owners.tolist(), strict=True) if o == NOBODY]
    assert all(60 <= n < 80 for n in strangers)
    assert len(made.held_out) == 100


def test_twins_are_of_the_other_sort_and_of_the_same_class_and_group():
    shares = [split([*range(10)], group=0), split([*range(10, 20)], group=1), split([99], group=2)]
    held_out = Split(torch.cat([split([*range(200, 240)]).inputs]), torch.arange(40) % 3, torch.arange(40) // 20)
    made = draw(Wanted(20, 0), shares, 2, split([], group=0), held_out, generator=generator(1, "x"))
    assert made.records is not None
    assert made.twins[made.twins].equal(torch.arange(20))
    assert ((made.owners == NOBODY) != (made.owners[made.twins] == NOBODY)).all()
    assert made.records.labels[made.twins].equal(made.records.labels)
    groups = [
        owner if owner != NOBODY else int(number >= 220)
        for number, owner in zip(numbers(made.records.inputs), made.owners.tolist(), strict=True)
    ]
    assert [groups[i] for i in made.twins.tolist()] == groups


def test_members_stand_at_no_particular_place():
    firsts = [int(drawn(2, 0, seed).owners[0] == NOBODY) for seed in range(200)]
    assert 70 <= sum(firsts) <= 130


@pytest.mark.parametrize(
    ("records", "public", "reason"),
    [(96, 0, "asks for 48 examples of honest clients, and they hold 47"), (20, 111, "ask for 121 .* there are 119")],
)
def test_too_many_records_are_refused(records, public, reason):
    with pytest.raises(BadInput, match=reason):
        drawn(records, public)


def test_records_travel_and_survive_the_disk(tmp_path):
    transcript, truth = recorded(scenario(PUBLIC))
    save_recording(transcript, truth, tmp_path / "t")
    again = Transcript.load(tmp_path / "t")
    assert transcript.records is not None
    assert again.records is not None
    for name, value in vars(transcript.records).items():
        assert getattr(again.records, name).equal(value)
    known = Truth.load(tmp_path / "t" / "truth.safetensors")
    check_belongs(known, again, tmp_path)
    assert known.owners.equal(truth.owners)
    assert known.twins.equal(truth.twins)


@pytest.mark.parametrize("field", ["owners", "twins"])
def test_a_truth_that_contradicts_the_records_is_refused(field, tmp_path):
    transcript, truth = recorded(scenario())
    truth = dataclasses.replace(truth, about={"transcript": transcript.fingerprint()})
    check_belongs(truth, transcript, tmp_path)
    lie = getattr(truth, field).clone()
    lie[0] = -5
    with pytest.raises(CorruptTranscript, match="the adversary's 60 records"):
        check_belongs(dataclasses.replace(truth, **{field: lie}), transcript, tmp_path)


def test_other_records_are_another_transcript(tmp_path):
    transcript, truth = recorded(scenario())
    save_recording(transcript, truth, tmp_path / "t")
    assert transcript.records is not None
    before = transcript.fingerprint()
    transcript.records.inputs[0] = 0
    assert transcript.fingerprint() != before


def test_damaged_records_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    transcript, truth = recorded(scenario())
    save_recording(transcript, truth, tmp_path / "t")
    path = tmp_path / "t" / "records.safetensors"
    for name, wrong in (("inputs", torch.full((60, 1, 8, 8), 2.0)), ("labels", torch.full((60,), 10))):
        shutil.copytree(tmp_path / "t", tmp_path / name)
        save_file({**load_file(path), name: wrong}, tmp_path / name / "records.safetensors")
        with pytest.raises(CorruptTranscript, match=r"records\.safetensors"):
            Transcript.load(tmp_path / name)


def test_an_observation_has_what_the_threat_model_grants():
    transcript, _ = recorded(scenario(PUBLIC))
    assert observe(transcript, ThreatModel()).records is None
    some = observe(transcript, ThreatModel(records=60)).records
    assert some is not None
    assert len(some) == 60
    assert len(some.public_inputs) == 0
    every = observe(transcript, ThreatModel(records=60, knows_public_data=True, public_examples=60)).records
    assert every is not None
    assert len(every.public_inputs) == 60
    knows, ignores = ThreatModel(records=60).knowledge()
    assert "60 records with their labels, half of them honest clients'" in knows
    assert any("which of the records are clients'" in line for line in ignores)


def test_the_same_records_under_every_defence_and_other_ones_with_another_seed():
    values = scenario().model_dump(mode="json")
    values["defences"] = [{"aggregator": "mean"}, {"aggregator": "median"}]
    both, _, _ = record(resolve(scenario_from(values)))
    other, _, _ = record(resolve(scenario_from({**values, "seed": 1})))
    a, b, c = (r.transcript.records for r in (*both, other[0]))
    assert a is not None
    assert b is not None
    assert c is not None
    assert a.inputs.equal(b.inputs)
    assert not a.inputs.equal(c.inputs)


def test_what_no_update_used_is_no_member():
    transcript, truth = recorded(scenario(local_epochs=None, local_steps=1, rounds=1))
    assert transcript.records is not None
    used = {client: inputs for (_, client), inputs in truth.inputs.items()}
    for example, owner in zip(transcript.records.inputs, truth.owners.tolist(), strict=True):
        trained = [c for c, inputs in used.items() if bool((inputs == example).flatten(1).all(1).any())]
        assert trained == ([] if owner in (NOBODY, UNUSED) else [owner])
    assert (truth.owners == UNUSED).any()
    rows = judged(truth, None)
    assert not (truth.owners[rows] == UNUSED).any()
    assert len(rows) == 2 * int((truth.owners >= 0).sum())


def test_a_killed_simulation_remembers_what_was_used(tmp_path):
    made = scenario(local_epochs=None, local_steps=2, rounds=6, clients_per_round=2)
    (run,) = made.runs()

    def simulated(checkpoint: Checkpoint | None, until: int) -> Truth:
        def report(done: float) -> None:
            if done >= until:
                raise KeyboardInterrupt

        federation, _, _ = prepare_federation(made)
        return simulate(federation, run.federation, run.defences, seed=0, report=report, checkpoint=checkpoint)[1]

    whole = simulated(None, 10**9)
    checkpoint = Checkpoint(tmp_path / "f", every=0)
    with pytest.raises(KeyboardInterrupt):
        simulated(checkpoint, 9)
    assert simulated(checkpoint, 10**9).owners.equal(whole.owners)


def test_examples_of_pretraining_pass_for_nobodys_never():
    values = scenario({"records": 40}, examples=355).model_dump(mode="json")
    values["data"]["split"] = "test"
    values["model"]["training"]["epochs"] = 1
    with pytest.raises(BadInput, match="that nobody trains on, and there are 0"):
        record(resolve(scenario_from(values)))


# Attacks -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overfitted() -> tuple[Transcript, Truth]:
    return recorded(scenario(PUBLIC, rounds=60, examples=80, local_epochs=3))


@pytest.mark.parametrize("name", PASSIVE)
def test_an_overfitted_model_gives_its_members_away(name, overfitted):
    transcript, truth = overfitted
    seen = observe(transcript, ThreatModel(records=60, **PUBLIC))
    found = play(name, seen)
    score = metrics(found, seen, truth)
    assert score["membership_auc"] > 0.7
    assert score["membership_accuracy"] > 0.6
    assert evaluate(found, seen, truth, seed=0).result.leak
    member = (truth.owners >= 0).numpy()
    assert score["membership_auc"] == pytest.approx(roc_auc_score(member, found.scores.numpy()))


@pytest.mark.parametrize("name", PASSIVE)
def test_a_model_that_never_saw_the_data_gives_nobody_away(name):
    threat = {"records": 400, "knows_public_data": True, "public_examples": 100}
    transcript, truth = recorded(scenario(threat, rounds=1, examples=400))  # the only global model is the first one
    seen = observe(transcript, ThreatModel.model_validate(threat))
    found = play(name, seen, **({"shadows": 3, "epochs": 10} if name == "shadow-models" else {}))
    assert abs(metrics(found, seen, truth)["membership_auc"] - 0.5) < 0.1
    assert not evaluate(found, seen, truth, seed=0).result.leak


def logistic(n: int = 12, d: int = 5, classes: int = 3) -> Observation:
    """A model and records that nobody simulated."""
    chance = generator(3, "logistic")
    model = nn.Linear(d, classes)
    state = {"weight": torch.randn(classes, d, generator=chance), "bias": torch.randn(classes, generator=chance)}
    model.load_state_dict(state)
    setup = Setup("custom", None, "eval", "cross-entropy", "table", (d,), classes, (0.0,), (1.0,))
    x = torch.randn(n, d, generator=chance)
    y = torch.randint(classes, (n,), generator=chance)
    records = Records(x, y, x[:0], y[:0])
    threat = ThreatModel(records=n)
    moved = {name: torch.randn(t.shape, generator=chance) for name, t in state.items()}
    message = Message(0, 4, state, Update(4, "weights", moved, 5, None))
    loss = nn.functional.cross_entropy
    return Observation("f", threat, setup, model, loss, "weights", (state,), (message,), {}, records)


@pytest.mark.parametrize("which", ["global", "client"])
def test_scores_are_the_loss_and_the_gradient_s_norm(which):
    seen = logistic()
    assert seen.records is not None
    state = seen.weights[0]
    if which == "client":
        state = {name: t + seen.messages[0].update.tensors[name] for name, t in state.items()}
    x, y = seen.records.inputs.double(), seen.records.labels
    p = (x @ state["weight"].double().T + state["bias"].double()).softmax(dim=1)
    losses = -p[torch.arange(len(x)), y].log()
    error = p - nn.functional.one_hot(y, 3)
    norms = error.norm(dim=1) * (x.square().sum(dim=1) + 1).sqrt()  # of the outer product of error and (x, 1)
    by_loss, by_norm = play("loss-threshold", seen, model=which), play("gradient-norm", seen, model=which)
    assert torch.allclose(by_loss.scores, -losses, atol=1e-5)
    assert torch.allclose(by_norm.scores, -norms, atol=1e-5)
    assert by_loss.members.equal(losses < losses.quantile(0.5))
    assert int(by_loss.members.sum()) == 6


def test_public_examples_can_set_the_threshold():
    seen = logistic()
    assert seen.records is not None
    x, y = seen.records.inputs, seen.records.labels
    seen = dataclasses.replace(seen, records=Records(x, y, x[:8] + 1, y[:8]))
    found = play("loss-threshold", seen, false_positives=0.25)
    strangers = play("loss-threshold", dataclasses.replace(seen, records=Records(x[:8] + 1, y[:8], x[:0], y[:0])))
    assert found.members.equal(found.scores > strangers.scores.quantile(0.75))
    assert int((strangers.scores > strangers.scores.quantile(0.75)).sum()) == 2


def test_the_rebuilt_model_is_the_one_that_local_model_rebuilds():
    transcript, _ = recorded(scenario(rounds=6, clients_per_round=2))
    rebuild = {"name": "local-model", "mapping": "linear"}
    (seen, *_) = observe(transcript, ThreatModel(records=60)).split("client")
    found = play("loss-threshold", seen, model="rebuilt", rebuild=rebuild)
    state: Any = make_attack("local-model", {"mapping": "linear"}).run(seen, generator=generator(0, "x"))
    shown = dataclasses.replace(seen, weights=({**seen.weights[-1], **state.state},))
    assert found.scores.equal(play("loss-threshold", shown).scores)
    assert found.notes == state.notes


def test_one_client_s_model_is_judged_by_that_client_s_records():
    finished = run_audit(scenario(attacks=[{"name": "loss-threshold", "model": "client"}], rounds=20, examples=60))
    findings = finished.result.findings
    assert [f.client for f in findings] == [0, 1, 2, 3]
    counted = [int(f.notes[0].split(" over ")[1].split()[0]) for f in findings]
    assert sum(counted) == 30
    assert all(f"{30 - n} pairs of records were left out" in f.notes[1] for f, n in zip(findings, counted, strict=True))


def test_a_client_without_a_record_says_so():
    transcript, truth = recorded(scenario())
    truth = dataclasses.replace(truth, owners=torch.where(truth.owners >= 0, 1, truth.owners))
    seen = observe(transcript, ThreatModel(records=60)).split("client")[0]
    result = evaluate(play("loss-threshold", seen, model="client"), seen, truth, seed=0).result
    assert result.status == "not applicable"
    assert "none of the 60 records is an example of client 0" in (result.reason or "")


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    *((name, {}, {}, r"set threat\.records") for name in PASSIVE),
    ("shadow-models", {"records": 60}, {}, r"threat\.public_examples"),
    ("loss-threshold", {"records": 60}, {"false_positives": 0.1}, r"threat\.public_examples"),
    ("loss-threshold", {"records": 60, "adversary": "client"}, {"model": "client"}, "the adversary sees no update"),
    ("loss-threshold", {"records": 60}, {"model": "rebuilt"}, "needs at least 3 rounds"),
]


@pytest.mark.parametrize(("name", "threat", "settings", "reason"), REFUSED)
def test_attacks_say_why_not(name, threat, settings, reason):
    transcript, _ = recorded(scenario())
    attack = make_attack(name, settings)
    whole = observe(transcript, ThreatModel.model_validate(threat))
    with pytest.raises(NotApplicable, match=reason):
        attack.check((whole.split(attack.scope()) or [whole])[0])


def test_gradients_are_no_model_of_a_client():
    transcript, _ = recorded(scenario(algorithm="fedsgd", local_epochs=None))
    with pytest.raises(NotApplicable, match="use a federation of fedavg"):
        make_attack("loss-threshold", {"model": "client"}).check(
            observe(transcript, ThreatModel(records=60)).split("client")[0]
        )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "locl"}, "model"),
        ({"rebuild": {"name": "invg"}}, "'invg' rebuilds no model"),
        ({"rebuild": {"name": "local-model", "hiden": 3}}, "hiden"),
        ({"rebuild": {}}, "give the name"),
        ({"false_positives": 0}, "false_positives"),
    ],
)
def test_wrong_settings_are_refused(settings, reason):
    with pytest.raises(BadInput, match=reason):
        make_attack("loss-threshold", settings)


@pytest.mark.parametrize("name", PASSIVE)
def test_a_finding_repeats_survives_the_disk_and_knows_no_truth(name, tmp_path):
    transcript, truth = recorded(scenario(PUBLIC))
    seen = observe(transcript, ThreatModel(records=60, **PUBLIC))
    before = torch.get_rng_state()
    a, b = play(name, seen), play(name, seen)
    assert before.equal(torch.get_rng_state())
    assert a.scores.equal(b.scores)
    a.save(tmp_path / "f.safetensors")
    again = Finding.load(tmp_path / "f.safetensors")
    assert isinstance(again, MembershipFinding)
    assert again.scores.equal(a.scores)
    assert again.members.equal(a.members)
    assert seen.records is not None
    assert not any(truth.owners.equal(t) or (truth.owners >= 0).equal(t) for t in vars(seen.records).values())
    lies = dataclasses.replace(truth, owners=torch.where(truth.owners == NOBODY, 0, NOBODY))
    right, wrong = (metrics(a, seen, t)["membership_auc"] for t in (truth, lies))
    assert right == pytest.approx(1 - wrong)


def test_a_trial_is_keyed_by_its_records_and_journal():
    transcript, _ = recorded(scenario())
    seen = observe(transcript, ThreatModel(records=60))
    assert seen.records is not None
    other = dataclasses.replace(seen, records=dataclasses.replace(seen.records, inputs=seen.records.inputs + 1))
    noted = dataclasses.replace(seen, journal={"x": torch.zeros(1)})
    keys = {Trial(make_attack("loss-threshold"), s, 0, "cpu").key() for s in (seen, other, noted)}
    assert len(keys) == 3


def test_a_regression_has_losses_too():
    values = scenario().model_dump(mode="json")
    values["data"] = {"name": "diabetes", "split": "train"}
    values["model"]["loss"] = "mse"
    values["attacks"] = ["loss-threshold", "gradient-norm", "shadow-models"]
    values["threat"] |= PUBLIC
    values["federations"][0] |= {"rounds": 20, "learning_rate": 0.02, "examples": 100}
    done, also, refused = run_audit(resolve(scenario_from(values))).result.findings
    assert done.status == also.status == "done"
    assert "is for classifiers" in (refused.reason or "")


def test_what_a_model_can_t_be_trained_anew_from_is_said():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.fc = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.fc(x.flatten(1)) * self.scale)

    values = scenario(PUBLIC, ["shadow-models"]).model_dump(mode="json")
    values["model"] = {"name": "custom", "initialisation": "given"}
    (only,) = run_audit(resolve(scenario_from(values)), model=Own()).result.findings
    assert "can't train a shadow model: initialisation 'default' does not know the layer" in (only.reason or "")


# Judgement -----------------------------------------------------------------------------------------------------------

SCORES = st.lists(st.integers(-4, 4), min_size=1, max_size=40)


@given(members=SCORES, others=SCORES, share=st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0]))
def test_the_curve_is_scikit_learn_s_and_the_obvious_one(members, others, share):
    a, b = torch.tensor(members).double(), torch.tensor(others).double()
    truth, scores = [1] * len(members) + [0] * len(others), members + others
    false, true = roc(a, b)
    wanted = roc_curve(truth, scores, drop_intermediate=False)
    assert false.tolist() == pytest.approx(wanted[0].tolist())
    assert true.tolist() == pytest.approx(wanted[1].tolist())
    pairs = [(x > y) + 0.5 * (x == y) for x in members for y in others]
    assert auc(a, b) == pytest.approx(sum(pairs) / len(pairs))
    best = 0.0
    for level in [*sorted(set(scores)), 5]:
        if sum(y >= level for y in others) <= share * len(others) + 1e-12:
            best = max(best, sum(x >= level for x in members) / len(members))
    assert tpr_at(a, b, share) == pytest.approx(best)


def test_accuracy_counts_right_decisions():
    transcript, truth = recorded(scenario())
    seen = observe(transcript, ThreatModel(records=60))
    member = truth.owners >= 0
    said = member.clone()
    said[:15] = ~said[:15]
    found = MembershipFinding(attack="loss-threshold", scores=member.double(), members=said)
    score = metrics(found, seen, truth)
    assert score == {"membership_auc": 1.0, "membership_accuracy": 0.75, "membership_tpr": 1.0}


def test_guessing_is_seldom_called_a_leak():
    transcript, truth = recorded(scenario())
    seen = observe(transcript, ThreatModel(records=60))
    chance = generator(0, "guess")
    leaks = 0
    for _ in range(300):
        scores = torch.rand(60, generator=chance).double()
        found = MembershipFinding(attack="loss-threshold", scores=scores, members=scores > 0.5)
        leaks += bool(evaluate(found, seen, truth, seed=0).result.leak)
    assert leaks <= 12  # 1 % of 300, and more only with a chance below 1e-4


def test_the_report_draws_the_curve_and_limits_hold(command: Command, tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(scenario({"adversary": "client"}, rounds=30, examples=60).to_yaml())
    limit = ["--fail-above", "membership_auc=0.55"]
    outcome = command("audit", path, "--out", tmp_path / "out", "--workers", "1", *limit)
    assert outcome.code == 1, outcome
    page = (tmp_path / "out" / "report.html").read_text()
    assert "share of the others taken for members" in page
    assert "60 records with their labels" in page


def test_a_recorded_transcript_can_be_attacked(command: Command, tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(scenario(PUBLIC, rounds=30, examples=60).to_yaml())
    assert command("simulate", path, "--out", tmp_path / "t").code == 0
    words = ["attack", tmp_path / "t", "--attack", "loss-threshold", "--workers", "1"]
    outcome = command(*words, "--out", tmp_path / "a")
    assert outcome.code == 0, outcome
    assert "membership_auc" in outcome.out
    refused = command("attack", tmp_path / "t", "--attack", "shadow-models", "--workers", "1", "--out", tmp_path / "b")
    assert "threat.public_examples" in refused.out + refused.err
    more = ["--attack", "shadow-models", "--knows-public-data", "--set", "shadows=2"]
    known = command("attack", tmp_path / "t", *more, "--workers", "1", "--out", tmp_path / "c")
    assert "membership_auc" in known.out


BAD = [
    ("threat.records=61", "records is 61; half of them are clients' examples: give an even number"),
    ("threat.records=600", "asks for 300 examples of honest clients, and they hold"),
    ("threat.public_examples=5", "public_examples needs knows_public_data: true"),
    ("threat.record=5", "did you mean 'records'?"),
]


@pytest.mark.parametrize(("setting", "reason"), BAD)
def test_wrong_words_are_one_line(setting, reason, command: Command, tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(scenario().to_yaml())
    outcome = command("audit", path, "--out", tmp_path / "out", "--set", setting)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert reason in outcome.err


def test_all_attacks_on_membership_are_tested_here():
    assert {e.name for e in ATTACKS if e.value.recovers == "membership"} == {*PASSIVE, "agrevader"}


# AgrEvader -----------------------------------------------------------------------------------------------------------

CLIENT = {"adversary": "client"}


def pushing(rounds: int = 6, malicious: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    spec = {"name": "agrevader", "start": 2, **(malicious or {})}
    return scenario(CLIENT, ["agrevader"], rounds=rounds, malicious=spec, **changes)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()]).double()


@given(seed=st.integers(0, 1000), norm=st.floats(0.1, 5), cosine=st.floats(0, 1))
def test_an_update_is_turned_by_the_angle_and_to_the_length_that_are_asked_for(seed, norm, cosine):
    chance = generator(seed, "turn")
    honest = {n: torch.randn(s, generator=chance).double() for n, s in (("a", (3, 4)), ("b", (5,)))}
    towards = {n: torch.randn(t.shape, generator=chance).double() for n, t in honest.items()}
    sent = turned(honest, towards, norm=norm, cosine=cosine)
    h, a, s = flat(honest), flat(towards), flat(sent)
    assert {n: t.shape for n, t in sent.items()} == {n: t.shape for n, t in honest.items()}
    assert float(s.norm() / h.norm()) == pytest.approx(norm)
    assert float(s @ h / (s.norm() * h.norm())) == pytest.approx(cosine, abs=1e-6)
    across = a - (a @ h) / (h @ h) * h
    assert float(s @ across) >= -1e-9
    if cosine < 0.99:
        rest = s - (s @ h) / (h @ h) * h
        assert float(rest @ across / (rest.norm() * across.norm())) == pytest.approx(1)


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_before_its_start_it_is_honest_and_then_it_stays_as_long_as_an_honest_update(algorithm):
    steps: dict[str, Any] = {"local_epochs": None} if algorithm == "fedsgd" else {}
    honest, _ = recorded(pushing(malicious={"start": 100}, algorithm=algorithm, **steps))
    pushed, _ = recorded(pushing(malicious={"cosine": 0.5}, algorithm=algorithm, **steps))
    for r in range(2):
        assert flat(honest.rounds[r].updates[3].tensors).equal(flat(pushed.rounds[r].updates[3].tensors))
    a, b = (flat(t.rounds[2].updates[3].tensors) for t in (honest, pushed))
    assert float(b.norm()) == pytest.approx(float(a.norm()), rel=1e-5)
    assert float(a @ b) == pytest.approx(0.5 * float(a.norm() * b.norm()), rel=1e-4)
    assert flat(honest.rounds[2].updates[0].tensors).equal(flat(pushed.rounds[2].updates[0].tensors))


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_a_push_raises_the_loss_of_records_that_the_model_fits(algorithm):
    steps: dict[str, Any] = {"local_epochs": None} if algorithm == "fedsgd" else {}
    transcript, _ = recorded(pushing(60, {"start": 59, "cosine": 0.0}, algorithm=algorithm, **steps))
    assert transcript.records is not None
    last = transcript.rounds[-1]
    step = -0.1 if algorithm == "fedsgd" else 0.1  # a small one: the direction counts

    def chance_of_error(scale: float) -> float:
        moved = {n: t + scale * step * last.updates[3].tensors[n] for n, t in last.weights.items()}
        module = transcript.module.eval()
        module.load_state_dict(moved)
        assert transcript.records is not None
        with torch.no_grad():
            p = module(transcript.setup.normalise(transcript.records.inputs)).double().softmax(dim=1)
        own = p.gather(1, transcript.records.labels[:, None])
        return float((1 - own).log().sum())

    assert chance_of_error(1.0) > chance_of_error(0.0) > chance_of_error(-1.0)


def test_the_journal_has_the_losses_under_every_round_s_model():
    transcript, _ = recorded(pushing(5))
    assert transcript.records is not None
    (notes,) = transcript.journal.values()
    assert notes.shape == (3, 60)
    for round_, losses in zip(transcript.rounds[2:], notes, strict=True):
        module = transcript.module.eval()
        module.load_state_dict(round_.weights)
        with torch.no_grad():
            outputs = module(transcript.setup.normalise(transcript.records.inputs)).double()
        wanted = nn.functional.cross_entropy(outputs, transcript.records.labels, reduction="none")
        assert torch.allclose(losses, wanted)


def test_what_the_federation_repairs_is_a_member():
    losses = torch.tensor([[9.0, 0.0, 0.0], [5.0, 1.0, 2.0], [1.0, 2.0, 3.0], [1.5, 2.0, 4.0]])
    threat = ThreatModel(adversary="client", records=60)
    seen = dataclasses.replace(logistic(), threat=threat, messages=(), journal={"agrevader/losses": losses})
    found = play("agrevader", seen)
    assert found.scores.tolist() == [-1.25, -2.0, -3.5]
    assert found.members.tolist() == [True, False, False]


def test_pushing_is_found_out_by_an_audit_and_colluders_share_notes(tmp_path):
    finished = run_audit(pushing(40, {"start": 10, "clients": 2}, examples=80))
    (finding,) = finished.result.findings
    assert finished.result.adversary.acts
    scores = {m.name: m.value for m in finding.metrics}
    assert scores["membership_auc"] > 0.6
    assert "agrevader" in finished.save(tmp_path).read_text()
    transcript, truth = recorded(pushing(malicious={"clients": 2}))
    assert next(iter(transcript.journal.values())).shape == (4, 60)
    assert not {2, 3} & set(truth.owners.tolist())


def test_a_killed_simulation_goes_on_with_its_notes(tmp_path):
    made = pushing()
    (run,) = made.runs()

    def simulated(checkpoint: Checkpoint | None, until: int) -> Transcript:
        def report(done: float) -> None:
            if done >= until:
                raise KeyboardInterrupt

        federation, _, _ = prepare_federation(made)
        return simulate(federation, run.federation, run.defences, seed=0, report=report, checkpoint=checkpoint)[0]

    whole = simulated(None, 10**9)
    checkpoint = Checkpoint(tmp_path / "f", every=0)
    with pytest.raises(KeyboardInterrupt):
        simulated(checkpoint, 17)  # in the fifth round
    again = simulated(checkpoint, 10**9)
    assert again.fingerprint() == whole.fingerprint()
    assert all(again.journal[n].equal(t) for n, t in whole.journal.items())


def test_pushing_works_for_regressions():
    values = pushing().model_dump(mode="json")
    values["data"] = {"name": "diabetes", "split": "train"}
    values["model"]["loss"] = "mse"
    values["federations"][0] |= {"learning_rate": 0.02, "examples": 100}
    (finding,) = run_audit(resolve(scenario_from(values))).result.findings
    assert finding.status == "done"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (scenario(CLIENT, ["agrevader"]), "set malicious: agrevader"),
        (pushing(3), "start at least two below"),
        (scenario({}, ["agrevader"]), r"set threat\.adversary=client"),
    ],
)
def test_agrevader_says_why_not(made, reason):
    transcript, _ = recorded(made)
    with pytest.raises(NotApplicable, match=reason):
        make_attack("agrevader").check(observe(transcript, made.threat))


@pytest.mark.parametrize("threat", [{"adversary": "client", "records": None}, {"adversary": "server"}])
def test_pushing_without_records_in_hand_is_refused(threat):
    made = scenario(threat, ["loss-threshold"], malicious={"name": "agrevader", "start": 0})
    with pytest.raises(BadInput, match=r"set threat\.adversary=client and threat\.records"):
        recorded(made)
