"""Whose records these are, asked of a recording: drawn from its truth and from what nobody trained on."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import fedaudit
from fedaudit import BadInput, NotApplicable, Recorder, Transcript
from fedaudit.attacks import SourceFinding
from fedaudit.evaluation import evaluate
from fedaudit.pipeline.choice import choose_for
from fedaudit.transcript.queries import NOBODY
from fedaudit.transcript.threat import ThreatModel
from tests.capture.recording_cases import MEAN, STD

CLIENTS, OWN = 2, 40
ASK = [{"name": "loss-threshold"}]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.layers(x)


def digits():
    """Return all digits, shuffled: they come writer by writer, and writers differ without any model."""
    data = fedaudit.load_dataset("digits").train
    order = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(2))
    return (data.inputs[order] - MEAN[0]) / STD[0], data.targets[order]


def record(folder, *, steps=200, given=None, change=lambda x: x, clients=CLIENTS, own=OWN):
    """Record two rounds of clients that learn random labels by heart, so that only members are known."""
    torch.manual_seed(0)
    inputs, _ = digits()
    labels = torch.randint(10, (len(inputs),), generator=torch.Generator().manual_seed(1))
    model = Net()
    with Recorder(folder, mean=MEAN, std=STD) as recorder:
        if given is not None:
            recorder.candidates(inputs[given], labels[given])
        for _ in range(2):
            start, states = copy.deepcopy(model.state_dict()), []
            with recorder.round(start):
                for client in range(clients):
                    model.load_state_dict(start)
                    rows = slice(client * own, (client + 1) * own)
                    optimiser = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
                    with recorder.capture() as seen:
                        for _ in range(steps):
                            optimiser.zero_grad()
                            nn.functional.cross_entropy(model(change(inputs[rows])), labels[rows]).backward()
                            optimiser.step()
                    recorder.update(f"site-{client}", model.state_dict(), seen, num_examples=own)
                    states.append(copy.deepcopy(model.state_dict()))
            model.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in start})
    return inputs, labels


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "recording"
    inputs, labels = record(folder, given=slice(60, 500))  # 20 of them are clients'
    return folder, inputs, labels


def attacked(folder, attacks=ASK, threat=None, records=None, seed=0):
    return fedaudit.attack(
        folder, attacks, threat=threat, seed=seed, model=Net(), rounds=[1], records=records, progress=False
    )


def test_half_are_the_clients_each_with_another_of_its_class(recorded):
    folder, inputs, _ = recorded
    found = attacked(folder)
    records, truth = found.transcript.records, found.truth
    assert records is not None
    member = truth.owners != NOBODY
    assert int(member.sum()) == int((~member).sum()) == len(records) // 2 >= 20
    assert records.labels[truth.matched].equal(records.labels)
    assert not bool((member & member[truth.matched]).any())
    pixels = inputs * STD[0] + MEAN[0]
    for row, owner in enumerate(truth.owners.tolist()):  # whose it is, by the arrays that it was drawn from
        same = (pixels[:500] - records.inputs[row]).abs().amax(dim=(1, 2, 3)) < 1e-6
        places = torch.nonzero(same)[:, 0].tolist()
        assert places
        if owner == NOBODY:
            assert all(place >= CLIENTS * OWN for place in places)
        else:
            assert any(place // OWN == owner for place in places)
    runs = [i for i in range(1, len(member)) if member[i] != member[i - 1]]
    assert len(runs) > len(member) // 4  # shuffled


@pytest.mark.slow
def test_members_that_were_learnt_by_heart_are_found(recorded):
    folder, *_ = recorded
    finished = fedaudit.audit_transcript(folder, ASK, module=Net(), rounds=[1], progress=False)
    (result,) = finished.result.findings
    found = attacked(folder)
    (finding,) = found
    expected = roc_auc_score((found.truth.owners != NOBODY).numpy(), finding.scores.numpy())
    assert next(m.value for m in result.metrics if m.name == "membership_auc") == pytest.approx(expected)
    assert expected > 0.7
    assert finished.result.summaries[0].verdict == "inferred"


def test_a_model_that_learnt_nothing_gives_nothing_away(tmp_path):
    record(tmp_path / "r", steps=1, given=slice(80, 500))
    finished = fedaudit.audit_transcript(tmp_path / "r", ASK, module=Net(), rounds=[0], controls=False, progress=False)
    assert finished.result.summaries[0].verdict != "inferred"


@pytest.mark.slow
def test_a_file_gives_the_same_records_as_candidates(recorded, tmp_path):
    folder, inputs, labels = recorded
    np.savez(tmp_path / "others.npz", inputs=inputs[60:500].numpy(), labels=labels[60:500].numpy())
    own = attacked(folder).transcript.records
    for given in (
        tmp_path / "others.npz",
        (inputs[60:500], labels[60:500]),
        torch.utils.data.TensorDataset(inputs[60:500], labels[60:500]),
    ):
        assert attacked(folder, records=given).transcript.records.inputs.equal(own.inputs)


def test_what_is_asked_of_updates_alone_is_asked_beside(recorded):
    folder, *_ = recorded
    plain = Transcript.load(folder, Net(), rounds=[1])
    before = [spec.name for spec in choose_for(plain, ThreatModel())]
    plain.records = attacked(folder).transcript.records
    after = [spec.name for spec in choose_for(plain, ThreatModel())]
    assert set(before) < set(after)
    assert {"loss-threshold", "source-inference"} <= set(after)


@pytest.mark.slow
def test_of_some_further_records_it_is_known_whose_they_are(recorded):
    folder, inputs, _ = recorded
    found = attacked(folder, ["source-outputs"], {"adversary": "client", "target_records": 40, "known_records": 6})
    records = found.transcript.records
    assert records is not None
    assert records.known_clients.tolist() == [client for client in range(CLIENTS) for _ in range(6)]
    rows = [
        torch.cdist(found.transcript.task_info.normalise(x).flatten(1), inputs.flatten(1)).argmin(dim=1)
        for x in (records.known_inputs, records.inputs)
    ]
    assert (rows[0] // OWN).equal(records.known_clients)
    assert not bool(torch.isin(*rows).any())
    assert found.threat.known_records == 6
    assert isinstance(found.trials[0].outcome, SourceFinding)
    with pytest.raises(BadInput, match="known_records"):
        attacked(folder, ["source-outputs"], {"target_records": 40, "known_records": 500})


def test_an_attack_on_updates_alone_gets_no_records(recorded):
    folder, *_ = recorded
    assert attacked(folder, [{"name": "labels"}]).transcript.records is None


def test_what_another_round_used_is_no_example_that_nobody_trained_on(tmp_path):
    inputs, labels = digits()
    model = Net()
    with Recorder(tmp_path / "r", mean=MEAN, std=STD) as recorder:
        for rows in (slice(0, 100), slice(100, 200)):
            with recorder.round(copy.deepcopy(model.state_dict())):
                with recorder.capture() as seen:
                    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
                    nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
                    optimiser.step()
                recorder.update("site", model.state_dict(), seen, num_examples=100)
    with pytest.raises(BadInput, match="0 can be drawn in pairs"):  # round 1 is attacked, and these are round 0's
        attacked(tmp_path / "r", records=(inputs[:100], labels[:100]))


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ({"inputs": torch.zeros(3, 1, 8, 8)}, "a dict isn't examples"),
        ((np.array([{}, {}], dtype=object), np.zeros(2)), "must be arrays of numbers"),
    ],
)
def test_what_are_no_examples_is_said_in_a_line(recorded, records, said):
    with pytest.raises(BadInput, match=said):
        attacked(recorded[0], records=records)


def test_what_is_missing_is_said_in_a_line(tmp_path, recorded):
    folder, inputs, labels = recorded
    record(tmp_path / "r", steps=1)
    with pytest.raises(BadInput, match=r"give some: records="):
        attacked(tmp_path / "r", threat={"target_records": 40})
    (outcome,) = attacked(tmp_path / "r")
    assert "--records FILE" in str(outcome)
    with pytest.raises(BadInput, match=r"pairs of one class"):
        attacked(tmp_path / "r", records=(inputs[:80], labels[:80]))
    with pytest.raises(BadInput, match=r"set threat\.target_records=\d+, or give more"):
        attacked(folder, threat={"target_records": 2000})
    with pytest.raises(BadInput, match=r"shape \(64,\): the model takes \(1, 8, 8\)"):
        attacked(folder, records=(inputs.flatten(1), labels))


@pytest.mark.parametrize(
    "change", [lambda x: x.flip(3).roll(3, dims=2), lambda x: 0.9 * x + 0.05 * torch.randn_like(x)]
)
def test_records_that_look_different_are_no_membership(tmp_path, change):
    inputs, labels = record(tmp_path / "r", steps=1, change=change)
    finished = fedaudit.audit_transcript(
        tmp_path / "r", ASK, module=Net(), records=(inputs[80:600], labels[80:600]), rounds=[1], controls=False,
        progress=False,
    )  # fmt: skip
    (told,) = finished.result.summaries
    assert told.verdict == "inconclusive"
    assert "the records alone" in told.verdict_text


def test_a_column_of_a_recorded_table_is_hidden_and_asked_for(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 6, generator=generator)
    smokes = torch.randint(2, (300,), generator=generator)
    rows[:, 4:] = nn.functional.one_hot(smokes, 2).float()
    labels = torch.randint(2, (300,), generator=generator)
    columns = [{"name": f"x{i}", "kind": "numeric", "positions": [i]} for i in range(4)]
    columns.append({"name": "smoker", "kind": "categorical", "positions": [4, 5], "categories": ["no", "yes"]})
    model = nn.Linear(6, 2)
    with Recorder(tmp_path / "r", columns=columns) as recorder, recorder.round(copy.deepcopy(model.state_dict())):
        recorder.candidates(rows[100:], labels[100:])
        with recorder.capture() as seen:
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            nn.functional.cross_entropy(model(rows[:100]), labels[:100]).backward()
            optimiser.step()
        recorder.update("site", model.state_dict(), seen, num_examples=100)
    threat = {"target_records": 60, "hidden_attribute": "smoker"}
    found: Any = fedaudit.attack(
        tmp_path / "r", [{"name": "attribute-loss"}], threat=threat, seed=0, model=nn.Linear(6, 2),
    )  # fmt: skip
    records, truth = found.transcript.records, found.truth
    assert records.columns.tolist() == [4, 5]
    assert not bool(records.inputs[:, 4:].any())
    for row, value in zip(records.inputs, truth.values.tolist(), strict=True):  # the row's own, found by its numbers
        place = int((rows[:, :4] - row[:4]).abs().sum(1).argmin())
        assert int(smokes[place]) == value
    assert found[0].kind == "attribute"
    with pytest.raises(BadInput, match=r"'sex'; categorical columns of the recording: smoker"):
        fedaudit.attack(
            tmp_path / "r", [{"name": "attribute-loss"}], threat={**threat, "hidden_attribute": "sex"}, seed=0,
            model=nn.Linear(6, 2),
        )  # fmt: skip


def smokers(folder, *, clients=12, own=24, columns=True):
    """Record a round of clients of which every other one has smokers only, and the others none; labels are alike."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(own * clients + 300, 6, generator=generator)
    smokes = torch.cat([torch.arange(clients).repeat_interleave(own) % 2, torch.arange(300) % 2])
    smokes[::own] = 1 - smokes[::own]  # but one, of each client
    rows[:, 4:] = nn.functional.one_hot(smokes, 2).float()
    labels = torch.arange(len(rows)) // 2 % 2
    told = [{"name": f"x{i}", "kind": "numeric", "positions": [i]} for i in range(4)]
    told.append({"name": "smoker", "kind": "categorical", "positions": [4, 5], "categories": ["no", "yes"]})
    torch.manual_seed(0)
    start = copy.deepcopy(nn.Linear(6, 2).state_dict()) | {"bias": torch.tensor([1.0, -1.0])}  # else classes cancel out
    with Recorder(folder, columns=told if columns else None) as recorder, recorder.round(start):
        recorder.candidates(rows[own * clients :], labels[own * clients :])
        for client in range(clients):
            model = nn.Linear(6, 2)
            model.load_state_dict(start)
            with recorder.capture() as seen:
                optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
                mine = slice(client * own, (client + 1) * own)
                nn.functional.cross_entropy(model(rows[mine]), labels[mine]).backward()
                optimiser.step()
            recorder.update(f"site-{client}", model.state_dict(), seen, num_examples=own)


def asked(folder, attacks, **threat):
    threat = {"client_property": "smoker=yes", "knows_public_data": True, **threat}
    return fedaudit.attack(folder, attacks, threat=threat, seed=0, model=nn.Linear(6, 2))


def test_which_clients_of_a_recording_have_a_property(tmp_path):
    smokers(tmp_path / "r")
    found = asked(tmp_path / "r", [{"name": "property-inference", "updates": 30}])
    records = found.transcript.records
    assert len(records) == 0
    assert len(records.public_inputs) == 299  # one is left
    assert records.public_property.equal(records.public_inputs[:, 5] == 1)
    assert found.truth.shares.tolist() == pytest.approx([1 / 24, 23 / 24] * 6)
    assert found[0].scores[1::2].min() > found[0].scores[::2].max()
    told = fedaudit.audit_transcript(
        tmp_path / "r", [{"name": "property-inference", "updates": 30}], module=nn.Linear(6, 2), progress=False,
        threat={"client_property": "smoker=yes", "knows_public_data": True},
    )  # fmt: skip
    (summary,) = told.result.summaries
    assert summary.verdict == "inferred"
    assert "--set 'threat.client_property=\"smoker=yes\"'" in told.result.repeat


def test_a_property_is_asked_beside_all_others_where_no_attack_is_named(tmp_path):
    smokers(tmp_path / "r")
    found = asked(tmp_path / "r", [{"name": "property-inference", "updates": 10}, {"name": "loss-threshold"}])
    names = {
        spec.name for spec in choose_for(found.transcript, found.threat.model_copy(update={"target_records": None}))
    }
    assert {"property-inference", "projection-residual", "fedmia", "rmia", "labels"} <= names, names
    assert len(found.transcript.records) >= 20
    assert len(found.transcript.records.public_inputs) == 149  # half of what is known


def test_what_a_property_lacks_is_said_in_a_line(tmp_path):
    attack = [{"name": "property-inference"}]
    smokers(tmp_path / "r")
    smokers(tmp_path / "plain", columns=False)
    for folder, threat, said in (
        ("r", {"knows_public_data": False}, r"threat\.knows_public_data: true"),
        ("r", {"client_property": "smoker=maybe"}, r"value 'maybe'"),
        ("r", {"client_property": "sex=f"}, r"of 'sex'; categorical columns of the recording: smoker"),
        ("plain", {}, r"categorical columns of the recording: none: name them, Recorder\(columns=…\)"),
        ("r", {"public_examples": 400}, r"400 are asked for, and 299 are known.*records=…"),
    ):
        with pytest.raises(BadInput, match=said):
            asked(tmp_path / folder, attack, **threat)
    smokers(tmp_path / "one", clients=1)
    (outcome,) = asked(tmp_path / "one", attack)
    assert "updates of one only" in str(outcome)
    assert "threat.client_property" in str(asked(tmp_path / "r", attack, client_property=None)[0])


PUBLIC = {"knows_public_data": True, "target_records": 80, "public_examples": 60}
ANYBODY, READERS, SERVER, MANY = "updates sum client final", "updates sum", "updates", "updates sum client"
WHO = {"updates": {}, "sum": {"sees": "sum"}, "client": {"adversary": "client"}, "final": {"adversary": "client"}}
ATTACKS = {  # who of these can run it
    "loss-threshold": ANYBODY, "gradient-norm": ANYBODY, "shadow-models": ANYBODY, "lira": ANYBODY, "rmia": ANYBODY,
    "range-membership": ANYBODY, "loss-series": MANY, "projection-residual": READERS, "fedmia": SERVER,
    "source-inference": SERVER,
}  # fmt: skip


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three") / "recording"
    record(folder, clients=3, own=18, steps=10, given=slice(54, 500))  # fewer than the first layer is wide
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("who", WHO)
def test_every_observer_of_a_recording_has_its_attacks(three, who):
    """Who has the final model alone sees no round before the last."""
    fewer = {"shadow-models": {"shadows": 4}, "lira": {"shadows": 4}, "rmia": {"shadows": 4}}
    found: Any = fedaudit.attack(
        three, [{"name": name, **fewer.get(name, {})} for name in ATTACKS], threat={**PUBLIC, **WHO[who]}, seed=0,
        model=Net(), rounds=[1] if who == "final" else None,
    )  # fmt: skip
    done = {t.attack.name for t in found.trials if not isinstance(t.outcome, NotApplicable)}
    assert done == {name for name, readers in ATTACKS.items() if who in readers.split()}
    least = {"loss-threshold": 0.6, "loss-series": 0.6, "fedmia": 0.6, "projection-residual": 0.95}
    for trial in found.trials:
        if trial.attack.name in done & least.keys():
            result = evaluate(trial.outcome, trial.observation, found.truth, seed=0).result
            assert result.metrics[0].value > least[trial.attack.name], trial.attack.name
    chosen = {spec.name for spec in choose_for(found.transcript, found.threat)}
    assert {"lira", "rmia"} <= chosen
