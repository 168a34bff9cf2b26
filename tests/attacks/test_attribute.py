"""Attribute inference: what is hidden in records, what attacks make of it, and how that is judged."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp
from torch import Tensor, nn

from fedaudit.attacks import ATTACKS, AttributeFinding, Finding, make_attack
from fedaudit.data import Dataset, load_dataset
from fedaudit.data.dataset import with_column
from fedaudit.evaluation import summarise
from fedaudit.evaluation.attribute import most_frequent
from fedaudit.pipeline.run import run_audit
from fedaudit.scenario.scenario import Scenario
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, check_belongs, save_recording
from fedaudit.utils.errors import BadInput, CorruptTranscript, NotApplicable
from fedaudit.utils.seeds import generator
from tests.attacks.membership_cases import result
from tests.build import Scenarios, sent

THREAT = {"target_records": 60, "knows_public_data": True, "public_examples": 60}
TABLE = {"data": {"name": "diabetes", "split": "train"}, "model": {"name": "mlp", "width": 16}}
IMAGES = {"data": {"name": "digits-parity", "split": "train"}, "model": {"name": "mlp", "width": 16}}


_VALUES = Scenarios(
    federation={"algorithm": "fedavg", "clients": 2, "rounds": 3, "examples": 120, "batch_size": 10,
                "local_epochs": 1, "learning_rate": 0.02},
    threat=THREAT,
)  # fmt: skip


def scenario(parts: dict[str, Any], attribute: str | None, attack: Any = "attribute-loss") -> Scenario:
    return _VALUES(**parts, threat={"hidden_attribute": attribute}, attacks=[attack])


def run_attack(name: str, seen: Observation, **settings: Any) -> AttributeFinding:
    found = make_attack(name, settings)(seen, generator=generator(0, "attack"))
    assert isinstance(found, AttributeFinding)
    return found


# What is hidden ------------------------------------------------------------------------------------------------------


def test_the_attribute_is_in_the_truth_and_not_in_the_records(tmp_path):
    transcript, truth = sent(scenario(TABLE, "sex"))
    records = transcript.records
    assert records is not None
    assert records.columns.tolist() == [1]
    assert not records.inputs[:, 1].any()
    table = load_dataset("diabetes")
    rows = torch.cat([table.train.inputs, table.test.inputs])
    sexes = rows[:, 1].unique()
    assert records.codes.flatten().equal(sexes)
    blind = rows.clone()
    blind[:, 1] = 0
    for example, value in zip(records.inputs, truth.values.tolist(), strict=True):
        (matching,) = torch.nonzero((blind == example).all(1))[:, 0].tolist()
        assert rows[matching, 1] == sexes[value]
    assert records.public_inputs[:, 1].equal(sexes[records.public_values])
    save_recording(transcript, truth, tmp_path / "t")
    again, known = Transcript.load(tmp_path / "t"), Truth.load(tmp_path / "t" / "truth.safetensors")
    check_belongs(known, again, tmp_path)
    assert known.values.equal(truth.values)
    with pytest.raises(CorruptTranscript, match="hidden attribute"):
        check_belongs(dataclasses.replace(known, values=known.values + 1), again, tmp_path)


def test_an_attribute_that_is_no_input_leaves_the_records_whole():
    transcript, truth = sent(scenario(IMAGES, "large", "attribute-features"))
    records = transcript.records
    assert records is not None
    assert records.codes.shape == (2, 0)
    digits, parity = load_dataset("digits"), load_dataset("digits-parity")
    for whole, part in ((digits.train, parity.train), (digits.test, parity.test)):
        assert part.inputs.equal(whole.inputs)
        assert part.targets.equal(whole.targets % 2)
        assert part.attributes["large"].equal((whole.targets > 4).long())
    pixels = torch.cat([digits.train.inputs, digits.test.inputs]).flatten(1)
    classes = torch.cat([digits.train.targets, digits.test.targets])
    for example, value in zip(records.inputs.flatten(1), truth.values.tolist(), strict=True):
        assert set((classes[(pixels == example).all(1)] > 4).long().tolist()) == {value}
    make_attack("loss-threshold").check(observe(transcript, ThreatModel(target_records=60)))


def test_a_column_s_values_are_numbered_and_every_example_has_one():
    x = torch.tensor([[0.0, 1, 0, 5], [1, 0, 1, 6], [0, 0, 1, 7], [1, 1, 0, 8]])
    one = Dataset.from_tensors(x.repeat(5, 1), torch.arange(20) % 2)
    block = dataclasses.replace(one, train=dataclasses.replace(one.train, inputs=x.repeat(4, 1)),
                                test=dataclasses.replace(one.test, inputs=x))  # fmt: skip
    two = with_column(with_column(block, "kind", [1, 2], ["a", "b"]), "side", [0], ["left", "right"])
    assert two.test.attributes["kind"].tolist() == [0, 1, 1, 0]
    assert two.test.attributes["side"].tolist() == [0, 1, 0, 1]
    assert two.attributes["kind"].values == ("a", "b")
    with pytest.raises(BadInput, match="values of 'odd'"):
        with_column(block, "odd", [0, 1], ["a", "b"])


def test_what_the_adversary_is_after_it_doesn_t_know():
    knows, ignores = ThreatModel(target_records=60, hidden_attribute="sex").knowledge()
    assert "the records' attribute 'sex'" in ignores
    assert "the records' attribute 'sex'" not in knows


# Attacks -------------------------------------------------------------------------------------------------------------


def logistic(public: bool = False) -> Observation:
    """Records of four columns, of which two say which of two values each has, and a model that nobody trained."""
    rng = generator(1, "logistic")
    state = {"weight": torch.randn(3, 4, generator=rng), "bias": torch.randn(3, generator=rng)}
    x, y = torch.randn(30, 4, generator=rng), torch.randint(3, (30,), generator=rng)
    x[:, 1:3] = 0
    known = torch.randint(2, (40,), generator=rng) if public else torch.zeros(0, dtype=torch.int64)
    more, labels = torch.randn(len(known), 4, generator=rng), torch.randint(3, (len(known),), generator=rng)
    more[:, 1:3] = torch.eye(2)[known]
    records = QuerySet(x, y, more, labels, torch.eye(2), torch.tensor([1, 2]), known)
    task_info = TaskInfo("custom", None, "eval", "cross-entropy", "table", (4,), 3, (0.0,), (1.0,))
    threat = ThreatModel(target_records=30)
    loss = nn.functional.cross_entropy
    return Observation("f", threat, task_info, nn.Linear(4, 3), loss, "weights", (state,), (), {}, records)


def losses(seen: Observation) -> Tensor:
    """The loss with either value, by the obvious loop."""
    assert seen.records is not None
    state = {name: t.double() for name, t in seen.weights[0].items()}
    rows = []
    for x, y in zip(seen.records.inputs.double(), seen.records.labels.tolist(), strict=True):
        row = []
        for value in range(2):
            filled = x.clone()
            filled[1], filled[2] = float(value == 0), float(value == 1)
            row.append(-(state["weight"] @ filled + state["bias"]).log_softmax(0)[y])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def test_the_value_of_least_loss_is_named():
    seen = logistic()
    found = run_attack("attribute-loss", seen)
    assert torch.allclose(found.scores, -losses(seen), atol=1e-5)
    assert found.values.equal(losses(seen).argmin(dim=1))
    assert 0 < int(found.values.sum()) < 30


def test_with_a_prior_frequent_values_are_named_more_often():
    seen = logistic(public=True)
    assert seen.records is not None
    records = seen.records
    scores = run_attack("attribute-loss", seen, prior=True).scores
    for i, y in enumerate(records.labels.tolist()):
        same = records.public_values[records.public_labels == y].tolist()
        wanted = [(same.count(v) + 1) / (len(same) + 2) * float((-losses(seen)[i, v]).exp()) for v in range(2)]
        assert torch.allclose(scores[i].exp(), torch.tensor(wanted).double(), rtol=1e-4)


def test_features_are_what_the_last_linear_layer_receives():
    torch_model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    rng = generator(2, "features")
    state = {n: torch.randn(t.shape, generator=rng) for n, t in torch_model.state_dict().items()}
    seen = dataclasses.replace(logistic(public=True), module=torch_model, weights=(state,))
    attack: Any = make_attack("attribute-features")
    x = torch.randn(7, 4, generator=rng)
    wanted = (x @ state["1.weight"].T + state["1.bias"]).clamp(min=0)
    assert torch.allclose(attack.target(seen, rng).features(x), wanted.double(), atol=1e-6)
    found = run_attack("attribute-features", seen)
    assert torch.allclose(found.scores.exp().sum(dim=1), torch.ones(30).double())


def test_an_attribute_that_the_features_show_is_found_and_one_that_they_hide_is_not():
    """The model passes column 0 on; the attribute is its sign, or noise."""
    seen = logistic(public=True)
    assert seen.records is not None
    rng = generator(5, "signs")
    x, more = torch.randn(60, 4, generator=rng), torch.randn(200, 4, generator=rng)
    noise = torch.randint(2, (60,), generator=rng)
    for shown, least, most in ((True, 0.9, 1.0), (False, 0.2, 0.8)):
        known = (more[:, 0] > 0).long() if shown else torch.randint(2, (200,), generator=rng)
        truth = (x[:, 0] > 0).long() if shown else noise
        records = QuerySet(x, torch.zeros(60).long(), more, torch.zeros(200).long(), torch.zeros(2, 0),
                          torch.zeros(0).long(), known)  # fmt: skip
        found = run_attack("attribute-features", dataclasses.replace(seen, records=records))
        assert least <= float((found.values == truth).double().mean()) <= most


def test_a_value_that_no_public_example_has_is_never_named():
    seen = logistic(public=True)
    assert seen.records is not None
    codes = torch.zeros(3, 0)
    records = dataclasses.replace(seen.records, codes=codes, columns=torch.zeros(0).long())
    found = run_attack("attribute-features", dataclasses.replace(seen, records=records))
    assert found.scores.shape == (30, 3)
    assert bool((found.scores[:, 2] == -torch.inf).all())


class NoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


REFUSED: list[tuple[str, dict[str, Any], Any, str]] = [
    ("attribute-loss", {}, lambda s: dataclasses.replace(s, records=None), r"set threat\.target_records"),
    ("attribute-loss", {"prior": True}, lambda s: s, r"threat\.public_examples"),
    ("attribute-features", {}, lambda s: s, r"threat\.public_examples"),
    ("loss-threshold", {}, lambda s: s, r"leave threat\.hidden_attribute out"),
    ("agrevader", {}, lambda s: dataclasses.replace(s, threat=ThreatModel(adversary="client")), "hidden_attribute"),
    (
        "attribute-loss",
        {},
        lambda s: dataclasses.replace(s, records=dataclasses.replace(s.records, codes=torch.zeros(0, 0))),
        "nothing is hidden",
    ),
    (
        "attribute-loss",
        {},
        lambda s: dataclasses.replace(s, records=dataclasses.replace(s.records, columns=torch.zeros(0).long())),
        "attribute-features is for such",
    ),
    ("attribute-loss", {"model": "client"}, lambda s: s, "sees no update"),
]


@pytest.mark.parametrize(("name", "settings", "change", "reason"), REFUSED)
def test_attacks_say_why_not(name, settings, change, reason):
    with pytest.raises(NotApplicable, match=reason):
        make_attack(name, settings).check(change(logistic()))


def test_public_examples_of_one_value_teach_nothing():
    seen = logistic(public=True)
    assert seen.records is not None
    alike = dataclasses.replace(seen.records, public_values=torch.zeros(40).long())
    with pytest.raises(NotApplicable, match="one value"):
        make_attack("attribute-features").check(dataclasses.replace(seen, records=alike))


def test_a_model_without_a_linear_layer_has_no_features():
    with pytest.raises(NotApplicable, match="no fully connected layer"):
        run_attack("attribute-features", dataclasses.replace(logistic(public=True), module=NoLinear()))


@pytest.mark.parametrize("name", ["attribute-loss", "attribute-features"])
def test_a_finding_repeats_survives_the_disk_and_knows_no_truth(name, tmp_path):
    transcript, truth = sent(scenario(TABLE, "sex"))
    seen = observe(transcript, ThreatModel(**THREAT, hidden_attribute="sex"))
    assert seen.records is not None
    assert not any(truth.values.equal(t) for t in vars(seen.records).values())
    a, b = run_attack(name, seen), run_attack(name, seen)
    assert a.scores.equal(b.scores)
    a.save(tmp_path / "f.safetensors")
    again = Finding.load(tmp_path / "f.safetensors")
    assert isinstance(again, AttributeFinding)
    assert again.values.equal(a.values)
    lies = dataclasses.replace(truth, values=1 - truth.values)
    rates = [result(a, seen, t).metrics[0].value for t in (truth, lies)]
    assert rates[0] == pytest.approx(1 - rates[1])


# Judgement -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=40))
def test_the_most_frequent_value_of_a_class_is_the_one_that_occurs_most(pairs):
    values, labels = torch.tensor([v for v, _ in pairs]), torch.tensor([y for _, y in pairs])
    for (_, y), named in zip(pairs, most_frequent(values, labels).tolist(), strict=True):
        own = [v for v, other in pairs if other == y]
        assert own.count(named) == max(own.count(v) for v in own)
    together = most_frequent(values, labels.float()[:, None]).tolist()
    every = values.tolist()
    assert all(every.count(named) == max(map(every.count, every)) for named in together)


@pytest.mark.parametrize(
    ("wrong", "others_wrong", "leak"),
    [(0, 30, True), (0, 0, False), (30, 0, False), (15, 30, False)],
    ids=["members alone", "everybody: imputation", "others alone", "no more than the frequencies"],
)
def test_only_what_beats_the_frequencies_and_records_that_were_not_used_is_a_leak(wrong, others_wrong, leak):
    transcript, truth = sent(scenario(TABLE, "sex"))
    seen = observe(transcript, ThreatModel(**THREAT, hidden_attribute="sex"))
    members = torch.nonzero(truth.owners >= 0)[:, 0]
    values = truth.values.clone()
    values[members[:wrong]] = 1 - values[members[:wrong]]
    others = torch.nonzero(truth.owners == NOBODY)[:, 0]
    values[others[:others_wrong]] = 1 - values[others[:others_wrong]]
    found = AttributeFinding(attack="attribute-loss", values=values, scores=torch.zeros(60, 2))
    evaluated = result(found, seen, truth)
    by_name = {m.name: (m.value, m.baseline) for m in evaluated.metrics}
    usual = max(int((truth.values == v).sum()) for v in range(2))
    common = int(torch.bincount(truth.values).argmax())
    assert by_name["attribute_accuracy"] == pytest.approx(
        (1 - wrong / 30, float((truth.values[members] == common).double().mean()))
    )
    assert by_name["attribute_advantage"][0] == pytest.approx((others_wrong - wrong) / 30)
    assert usual < 60
    assert evaluated.is_leak is leak


def test_a_record_more_than_the_frequencies_name_is_no_leak():
    transcript, truth = sent(scenario(TABLE, "sex"))
    seen = observe(transcript, ThreatModel(**THREAT, hidden_attribute="sex"))
    members, common = torch.nonzero(truth.owners >= 0)[:, 0], int(torch.bincount(truth.values).argmax())
    usual = truth.values[members] == common
    wrong = members[: int((~usual).sum()) - 1]
    values = truth.values.clone()
    values[wrong] = 1 - values[wrong]
    values[truth.owners == NOBODY] = 1 - values[truth.owners == NOBODY]  # so the frequencies alone decide
    gains = (values[members] == truth.values[members]).int() - usual.int()
    assert int(gains.sum()) == 1
    assert ttest_1samp(gains.numpy(), 0).pvalue > 0.5
    found = AttributeFinding(attack="attribute-loss", values=values, scores=torch.zeros(60, 2))
    assert summarise([result(found, seen, truth)], resamples=100, seed=0)[0].verdict != "inferred"


@pytest.mark.slow
def test_an_audit_says_what_was_found(tmp_path):
    attack = {"name": "attribute-loss", "model": "client"}
    finished = run_audit(scenario(TABLE, "sex", attack))
    assert [f.client for f in finished.result.findings] == [0, 1]
    assert all("beyond the most frequent value" in f.notes[-1] for f in finished.result.findings)
    page = finished.save(tmp_path).read_text()
    assert "attribute accuracy" in page
    assert "attribute &#39;sex&#39;" in page or "attribute 'sex'" in page


def test_all_attacks_on_attributes_are_tested_here():
    assert {e.name for e in ATTACKS if e.value.recovers == "attributes"} == {"attribute-loss", "attribute-features"}
