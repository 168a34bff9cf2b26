"""A user's own model as it is: the mode that it is given in, and losses of one logit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional

import fedaudit
from fedaudit.attacks import make_attack
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.inversion.template import GradientInversion
from fedaudit.results import AuditResult
from fedaudit.simulation.simulator import Recording
from fedaudit.utils.errors import BadInput

FSGD: list[dict[str, Any]] = [{"name": "f", "clients": 1, "examples": 4, "sampling": "first", "batch_size": 4}]
SOME = torch.rand((40, 1, 8, 8), generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(40) % 3
TWO = torch.arange(40) % 2


class Net(nn.Module):
    """With BatchNorm, dropout as a layer (or as a function) and a head."""

    def __init__(self, *, outputs: int = 3, norm: bool = True, drop: bool = True, functional: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.drop = nn.Dropout(0.5) if drop and not functional else nn.Identity()
        self.functional = drop and functional
        self.head = nn.Linear(6 * 64, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.conv(x)).relu()).flatten(1)
        return torch.as_tensor(self.head(functional.dropout(h, 0.5, self.training) if self.functional else h))


def net(*, train: bool = True, **options: bool | int) -> Net:
    torch.manual_seed(0)
    return Net(**options).train(train)  # type: ignore[arg-type]


def audited(model: nn.Module | None, data: Any = (SOME, CLASSES), **options: Any) -> AuditResult:
    options = {"federations": FSGD, "attacks": [{"name": "invg", "iterations": 2}], **options}
    return fedaudit.audit(model=model, data=data, progress=False, **options).result


def simulated(model: nn.Module, data: Any = (SOME, CLASSES), **options: Any) -> Recording:
    return fedaudit.simulate({"federations": FSGD}, model=model, data=data, progress=False, **options)


def gradient_of(recording: Recording, model: nn.Module, loss: Any = functional.cross_entropy) -> dict[str, Tensor]:
    """Return torch's own gradient on what the client held, by ``model`` in its own mode."""
    truth, task_info = recording.truth, recording.transcript.task_info
    ((inputs, labels),) = zip(truth.inputs.values(), truth.labels.values(), strict=True)
    value = loss(model(task_info.normalise(inputs)), labels)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


def sent(recording: Recording) -> dict[str, Tensor]:
    return recording.transcript.rounds[0].updates[0].tensors


# The mode -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False])
def test_clients_train_in_the_mode_that_the_module_is_given_in(train):
    model = net(train=train, drop=False)
    recording = simulated(model)
    wanted = gradient_of(recording, model)
    other = gradient_of(recording, net(train=not train, drop=False))
    for name, tensor in sent(recording).items():
        assert torch.allclose(tensor, wanted[name], atol=1e-6), name
    assert not torch.allclose(sent(recording)["conv.weight"], other["conv.weight"], atol=1e-4)
    assert model.training is train  # it isn't changed


@pytest.mark.parametrize("functional", [True, False])
def test_dropout_is_on_as_the_module_is(functional):
    options = {"norm": False, "functional": functional}
    off, on = (simulated(net(train=train, **options)) for train in (False, True))
    without = gradient_of(off, net(train=False, **options))
    assert all(torch.allclose(t, without[n], atol=1e-6) for n, t in sent(off).items())
    kept = (sent(on)["head.weight"] != 0).any(dim=0)
    assert 0.3 < kept.double().mean() / (sent(off)["head.weight"] != 0).any(dim=0).double().mean() <= 1.0
    assert not torch.allclose(sent(on)["head.weight"], sent(off)["head.weight"], atol=1e-3)


@pytest.mark.parametrize("where", ["argument", "scenario"])
def test_what_is_set_overrides_the_module_s_mode(where):
    wanted = gradient_of(simulated(net(train=False)), net(train=False))
    modes = {"batch_norm": "eval", "dropout": False}
    arguments: dict[str, Any] = modes if where == "argument" else {}
    scenario = {"federations": FSGD, "model": {} if where == "argument" else modes}
    recording = fedaudit.simulate(scenario, model=net(), data=(SOME, CLASSES), progress=False, **arguments)
    assert all(torch.allclose(t, wanted[n], atol=1e-6) for n, t in sent(recording).items())
    task_info = recording.transcript.task_info
    assert (task_info.batch_norm, task_info.dropout) == ("eval", False)


def test_an_argument_overrides_the_scenario():
    scenario = {"federations": FSGD, "model": {"batch_norm": "eval"}}
    recording = fedaudit.simulate(scenario, model=net(), data=(SOME, CLASSES), batch_norm="train", progress=False)
    assert recording.transcript.task_info.batch_norm == "train"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "modes", "words"),
    [
        (net(), {}, ("train", "on"), "BatchNorm in train mode and dropout on, as the module was given."),
        (net(train=False), {}, ("eval", "off"), "BatchNorm in eval mode and dropout off, as the module was given."),
        (net(), {"batch_norm": "eval", "dropout": False}, ("eval", "off"), "off, as set, not as the module was given."),
        (
            net(),
            {"dropout": False},
            ("train", "off"),
            "train mode (as the module was given) and dropout off (as set, not as the module was given).",
        ),
        (net(norm=False, functional=True), {}, ("none", "on"), "train with dropout on, as the module was given."),
        (net(norm=False, drop=False), {}, ("none", "none"), None),
    ],
)
def test_the_result_says_in_which_mode_clients_trained(model, options, modes, words):
    record = audited(model, **options).model
    assert (record.batch_norm, record.dropout) == modes
    assert (words in record.mode) if words and record.mode else (words == record.mode)


def test_fedaudit_s_own_models_stay_as_they_were():
    scenario = {"data": {"name": "digits"}, "model": {"name": "convnet-small", "width": 4}, "federations": FSGD}
    left_open = fedaudit.simulate(scenario, progress=False)
    scenario["model"] = {"name": "convnet-small", "width": 4, "batch_norm": "eval", "dropout": True}
    named = fedaudit.simulate(scenario, progress=False)
    assert left_open.transcript.fingerprint() == named.transcript.fingerprint()
    assert left_open.transcript.task_info.batch_norm == "eval"


def test_frozen_batch_norm_is_followed_and_of_half_frozen_ones_each_keeps_its_mode():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
                          nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 3))  # fmt: skip
    for layer in (model[1], model[4]):
        layer.eval()
    task_info = simulated(model).transcript.task_info
    assert (task_info.batch_norm, task_info.dropout) == ("eval", True)
    model[1].train()
    assert simulated(model).transcript.task_info.batch_norm == "train"
    assert "1 of its layers in eval mode" in (audited(model).model.mode or "")
    assert simulated(model, batch_norm="train").transcript.task_info.batch_norm == "train"


@pytest.mark.slow
@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("attack", ["invg", "geng", "agic", "labels"])
def test_unknown_masks_are_left_out_and_the_finding_says_so(attack, functional):
    model = net(norm=False, functional=functional)
    few = {"iterations": 2} if attack != "labels" else {}
    for data_of in (True, False):
        (finding,) = audited(model.train(data_of), attacks=[{"name": attack, **few}]).findings
        assert finding.status == "done"
        assert any("attacked without dropout" in note for note in finding.notes) is data_of


class TwoHeaded(Net):
    """As torchvision's GoogLeNet: further outputs in training mode."""

    def forward(self, x: Tensor) -> Any:
        outputs = super().forward(x)
        return (outputs, outputs) if self.training else outputs


def test_a_model_that_fails_in_training_mode_only_is_refused_in_one_line():
    with pytest.raises(BadInput, match="several outputs") as refused:
        audited(TwoHeaded(norm=False, drop=False))
    assert "\n" not in str(refused.value)
    assert audited(TwoHeaded(norm=False, drop=False).eval()).findings[0].status == "done"


def test_the_attack_s_model_draws_no_masks():
    recording = simulated(net(norm=False, functional=True))
    found = [make_attack("invg", {"iterations": 1, "learning_rate": 1e-9, "engine": "reference"})(
        fedaudit.observe(recording.transcript, fedaudit.ThreatModel()), generator=torch.Generator().manual_seed(3)
    ) for _ in range(2)]  # fmt: skip
    assert isinstance(found[0], ImageFinding)
    assert isinstance(found[1], ImageFinding)
    task_info = recording.transcript.task_info
    x = task_info.normalise(found[0].images).requires_grad_()
    plain = net(norm=False, functional=True, train=False)
    own = torch.autograd.grad(functional.cross_entropy(plain(x), found[0].labels), list(plain.parameters()))
    target = torch.cat([t.flatten() for t in sent(recording).values()])
    mine = torch.cat([g.flatten() for g in own])
    assert found[1].objective == found[0].objective
    assert found[0].objective == pytest.approx(1 - float(functional.cosine_similarity(mine, target, dim=0)), abs=2e-3)


# BatchNorm's statistics ---------------------------------------------------------------------------------------------


def of(recording: Recording, **settings: Any) -> ImageFinding:
    attack = make_attack("invg", {"engine": "reference", "total_variation": 0.0, **settings})
    threat = fedaudit.ThreatModel(knows_labels=False)
    found = attack(fedaudit.observe(recording.transcript, threat), generator=torch.Generator().manual_seed(0))
    assert isinstance(found, ImageFinding)
    return found


def explained(found: ImageFinding) -> list[str]:
    return [note for note in found.notes if "explained the update better" in note]


def counted_iterations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every optimisation adds its iterations."""
    taken: list[int] = []
    original = GradientInversion.minimise

    def counted(self: Any, *arguments: Any) -> Any:
        taken.append(self.iterations)
        return original(self, *arguments)

    monkeypatch.setattr(GradientInversion, "minimise", counted)
    return taken


@pytest.mark.slow
def test_auto_keeps_the_statistics_that_explain_the_update_better_and_says_which():
    recording = simulated(net(drop=False))
    auto, batch, running = (of(recording, iterations=100, statistics=s) for s in ("auto", "batch", "running"))
    assert len(explained(auto)) == 1
    assert "(statistics: batch)" in explained(auto)[0]
    assert "after 50 iterations" in explained(auto)[0]
    assert torch.equal(auto.images, batch.images)  # the trial takes nothing from the run's randomness
    assert not torch.equal(batch.images, running.images)
    assert batch.objective is not None
    assert running.objective is not None
    assert batch.objective < running.objective
    assert explained(batch) == explained(running) == []


def test_where_the_dummy_batch_s_statistics_lead_nowhere_auto_takes_the_running_ones(monkeypatch):
    recording = simulated(net(drop=False))
    running = of(recording, iterations=100, statistics="running")
    original = GradientInversion.minimise

    def hindered(self: Any, objective: Any, prepared: Any, *rest: Any) -> Any:
        if self.statistics == "batch":
            return [100 * torch.ones(4, 1, 8, 8)], None
        return original(self, objective, prepared, *rest)

    monkeypatch.setattr(GradientInversion, "minimise", hindered)
    auto = of(recording, iterations=100)
    assert "(statistics: running)" in explained(auto)[0]
    assert torch.equal(auto.images, running.images)


@pytest.mark.parametrize("own", [net(train=False), net(norm=False)])
def test_where_there_is_nothing_to_decide_auto_costs_nothing(own, monkeypatch):
    recording = simulated(own)
    taken = counted_iterations(monkeypatch)
    assert explained(of(recording, iterations=2)) == []
    assert taken == [2]


@pytest.mark.slow
def test_auto_costs_at_most_twice_the_iterations(monkeypatch):
    recording = simulated(net(drop=False))
    taken = counted_iterations(monkeypatch)
    for iterations in (2, 40, 200, 600):
        taken.clear()
        of(recording, iterations=iterations)
        assert taken[-1] == iterations
        assert sum(taken) <= 2 * iterations


@pytest.mark.parametrize("name", ["dlg", "gradinversion", "agic-epochs"])
def test_every_method_decides(name):
    rounds = 2 if name == "agic-epochs" else 1
    federations = [{**FSGD[0], "batch_size": 3, "examples": 3, "rounds": rounds}]
    recording = fedaudit.simulate(
        {"federations": federations}, model=net(drop=False), data=(SOME, CLASSES), progress=False
    )
    settings: dict[str, Any] = {"iterations": 4}
    settings |= {"group": 2} if name == "gradinversion" else {"pre_iterations": 2} if rounds == 2 else {}
    observation = fedaudit.observe(recording.transcript, fedaudit.ThreatModel())
    found = make_attack(name, settings)(observation, generator=torch.Generator().manual_seed(0))
    assert isinstance(found, ImageFinding)
    assert len(explained(found)) == 1


# One logit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [TWO, TWO.float(), TWO.float()[:, None], TWO.double().numpy(), TWO.bool()])
@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), functional.binary_cross_entropy_with_logits])
def test_one_logit_with_binary_cross_entropy_is_a_classifier_of_two_classes(targets, loss):
    model = net(outputs=1, norm=False, drop=False)
    recording = simulated(model, data=(SOME, targets), loss=loss)
    task_info = recording.transcript.task_info
    assert (task_info.num_classes, task_info.outputs, task_info.loss) == (2, 1, "bce-with-logits")
    wanted = gradient_of(recording, model, lambda z, y: functional.binary_cross_entropy_with_logits(z[:, 0], y.float()))
    assert all(torch.allclose(t, wanted[n], atol=1e-6) for n, t in sent(recording).items())


@pytest.mark.slow
def test_images_and_labels_of_a_one_logit_model_are_recovered():
    federations = [{"name": "f", "clients": 3, "examples": 3, "batch_size": 1}]
    attacks = [{"name": "invg", "iterations": 300}, "labels", {"name": "idlg", "iterations": 20},
               {"name": "cpl", "iterations": 3}, {"name": "dlg", "iterations": 3}]  # fmt: skip
    result = audited(
        net(outputs=1, norm=False, drop=False), (SOME, TWO.float()), loss=nn.BCEWithLogitsLoss(),
        federations=federations, attacks=attacks,
    )  # fmt: skip
    found = {s.attack: s for s in result.summaries}
    assert result.data.classes == 2
    assert found["invg"].label_accuracy == found["idlg"].label_accuracy == 1.0
    assert found["labels"].metrics[0].value.mean == 1.0
    assert found["invg"].psnr is not None
    assert found["invg"].psnr.mean > (found["invg"].psnr_mean_image or 0) + 3
    assert found["cpl"].images == 3
    reasons = {f.reason for f in result.findings if f.attack == "dlg"}
    assert all(reason and "use idlg" in reason for reason in reasons)


@pytest.mark.parametrize("share", [0, 3, 8])
def test_label_counts_of_a_batch_by_one_logit(share):
    labels = torch.zeros(40, dtype=torch.int64)
    labels[:share] = 1
    data = fedaudit.Dataset.from_tensors(SOME[:8], labels[:8], test=(SOME[:8], labels[:8]), num_classes=2)
    federations = [{"name": "f", "clients": 1, "examples": 8, "batch_size": 8}]
    result = audited(net(outputs=1, norm=False, drop=False), data, federations=federations, attacks=["labels"],
                     loss=nn.BCEWithLogitsLoss())  # fmt: skip
    assert result.summaries[0].metrics[0].value.mean == 1.0


@pytest.mark.slow
def test_membership_and_accuracy_of_a_one_logit_model_are_those_of_its_two_logit_twin():
    """The logits (0, z) with cross-entropy are one logit z with binary cross-entropy: same losses, same AUC."""
    scenario = {
        "data": {"name": "digits-parity", "split": "train"},
        "model": {"name": "mlp", "width": 32, "loss": "bce-with-logits"},
        "federations": [{"name": "f", "algorithm": "fedavg", "clients": 2, "rounds": 15, "examples": 60,
                         "batch_size": 10, "local_epochs": 4, "learning_rate": 0.2}],
        "threat": {"target_records": 60, "knows_public_data": True, "public_examples": 40},
        "attacks": ["loss-threshold", "gradient-norm", {"name": "shadow-models", "shadows": 2, "epochs": 5}],
        "evaluation": {"accuracy_every": 15},
    }  # fmt: skip
    finished = fedaudit.audit(scenario, progress=False)
    course = finished.result.federations[0].history
    assert course is not None
    assert course.accuracy[-1] > 0.8
    assert {f.status for f in finished.result.findings} == {"done"}
    recording = fedaudit.simulate(scenario, progress=False)
    transcript, records = recording.transcript, recording.transcript.records
    assert records is not None
    module = transcript.module
    module.load_state_dict(transcript.rounds[-1].weights)
    with torch.no_grad():
        logits = module(transcript.task_info.normalise(records.inputs))
        losses = functional.cross_entropy(torch.cat([torch.zeros_like(logits), logits], 1), records.labels,
                                          reduction="none")  # fmt: skip
    told = recording.truth.owners != -2
    auc = roc_auc_score((recording.truth.owners >= 0)[told].numpy(), -losses[told].numpy())
    (found,) = [f for f in finished.result.findings if f.attack == "loss-threshold"]
    assert next(m.value for m in found.metrics if "auc" in m.name) == pytest.approx(auc, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)), TWO, "without weight and pos_weight"),
        (nn.BCEWithLogitsLoss(), CLASSES, "two classes 0 and 1"),
        (nn.BCEWithLogitsLoss(), CLASSES.float(), "targets 0 and 1"),
        (nn.BCEWithLogitsLoss(), fedaudit.Dataset.from_tensors(SOME, TWO.float(), task="regression"), r"classes=True"),
        (None, TWO, r"loss=nn.BCEWithLogitsLoss\(\)"),
    ],
)
def test_what_is_no_binary_classifier_is_refused_with_a_remedy(loss, targets, message):
    with pytest.raises(BadInput, match=message) as refused:
        audited(net(outputs=1), targets if isinstance(targets, fedaudit.Dataset) else (SOME, targets), loss=loss)
    assert "\n" not in str(refused.value)


def test_a_transcript_of_a_one_logit_model_is_attacked_from_disk(tmp_path):
    model, loss = net(outputs=1, norm=False, drop=False), nn.BCEWithLogitsLoss()
    recording = simulated(model, (np.asarray(SOME), TWO), loss=loss, out=tmp_path / "t")
    assert recording.transcript.task_info.loss == "bce-with-logits"
    finished = fedaudit.audit_transcript(tmp_path / "t", ["labels"], model=model, loss=loss, progress=False)
    assert finished.result.summaries[0].metrics[0].value.mean == 1.0
