"""The mean of a client's updates over rounds: noise that it adds anew each time averages out."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedaudit
from fedaudit import NotApplicable
from fedaudit.attacks import Averaged
from fedaudit.attacks.mean_update import mean_of
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.update import ClientDefenceInfo

DP: dict[str, Any] = {"name": "dp", "where": "local", "level": "client", "clip": 1.0, "noise": 0.15, "epsilon": None}
NOISY: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "width": 64},
    "federations": [{"name": "f", "clients": 1, "examples": 4, "batch_size": 1, "rounds": 40, "learning_rate": 1e-4}],
    "defences": {
        "client_defence": {
            "name": "dp",
            "where": "local",
            "level": "client",
            "clip": 1.0,
            "noise": 0.15,
            "epsilon": None,
        }
    },
    "threat": {"knows_labels": True},
}


def seen_of(scenario: dict[str, Any]) -> tuple[Observation, fedaudit.Recording]:
    recording = fedaudit.simulate(scenario, progress=False)
    (seen,) = observe(recording.transcript, scenario_from(scenario).threat).split("client")
    return seen, recording


def test_the_mean_of_whole_epochs_is_the_gradient_over_all_examples() -> None:
    seen, recording = seen_of({**NOISY, "defences": {}, "federations": [{**NOISY["federations"][0], "rounds": 9}]})
    single, (note,) = mean_of(seen)
    message = single.single()
    assert (message.update.num_examples, message.update.kind) == (4, "gradient")
    assert note.startswith("the mean of 8 updates")  # the ninth begins another epoch
    first = [recording.truth.inputs[r, 0] for r in range(4)], [recording.truth.labels[r, 0] for r in range(4)]
    inputs, labels = map(torch.cat, first)
    assert message.update.labels is not None
    assert message.update.labels.equal(labels)
    module = seen.module
    module.load_state_dict(message.weights)
    module.zero_grad()
    cross_entropy(module(seen.task_info.normalise(inputs)), labels).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(message.update.tensors[name], parameter.grad, rtol=1e-2, atol=1e-4)


def test_noise_falls_with_the_root_of_the_rounds() -> None:
    seen, _ = seen_of(NOISY)
    single, _ = mean_of(seen)
    known = single.single().update.sanitised
    assert known is not None
    assert known.noise == pytest.approx(0.15 / 40**0.5)
    clean, _ = mean_of(
        seen_of({**NOISY, "defences": {"client_defence": {**NOISY["defences"]["client_defence"], "noise": 1e-9}}})[0]
    )
    apart = torch.cat(
        [(t - clean.single().update.tensors[n]).flatten() for n, t in single.single().update.tensors.items()]
    )
    assert float(apart.std()) == pytest.approx(0.15 / 40**0.5, rel=0.05)


def test_a_number_that_wasn_t_sent_is_left_out_of_its_mean() -> None:
    seen, _ = seen_of(
        {**NOISY, "defences": {}, "federations": [{**NOISY["federations"][0], "examples": 1, "rounds": 2}]}
    )
    first, second = seen.messages
    sparse = ClientDefenceInfo("top-k", sparse=True)
    name = next(iter(first.update.tensors))
    one, other = torch.zeros_like(first.update.tensors[name]), torch.full_like(first.update.tensors[name], 2.0)
    other.view(-1)[0], one.view(-1)[1] = 0.0, 4.0

    def with_tensor(message: Any, tensor: torch.Tensor) -> Any:
        tensors = {**message.update.tensors, name: tensor}
        return dataclasses.replace(
            message, update=dataclasses.replace(message.update, tensors=tensors, sanitised=sparse)
        )

    both = dataclasses.replace(seen, messages=(with_tensor(first, one), with_tensor(second, other)))
    found = mean_of(both)[0].single().update.tensors[name].view(-1)
    assert found[:3].tolist() == [0.0, 3.0, 2.0]


@pytest.mark.slow
def test_it_recovers_what_no_single_update_shows() -> None:
    attacks = [{"name": "invg", "iterations": 200}, {"name": "averaged", "attack": {"name": "invg", "iterations": 200}}]
    changes = {"federations": [{**NOISY["federations"][0], "rounds": 80}], "evaluation": {"max_updates": 4}, "seed": 2}
    done = fedaudit.audit({**NOISY, **changes, "attacks": attacks}, progress=False)
    alone, together = done.result.summaries
    assert alone.verdict == "inconclusive"
    assert any("add the attack averaged" in line for line in alone.advice)
    assert together.verdict in ("recovered", "identifiable")
    assert together.psnr is not None
    assert alone.psnr is not None
    assert together.psnr.mean > alone.psnr.mean + 3


def test_signs_and_several_clients_have_no_mean() -> None:
    seen, _ = seen_of(NOISY)
    signs = ClientDefenceInfo("sign", signs=True)
    messages = [dataclasses.replace(m, update=dataclasses.replace(m.update, sanitised=signs)) for m in seen.messages]
    with pytest.raises(NotApplicable, match="signs alone have no mean"):
        Averaged().check(dataclasses.replace(seen, messages=tuple(messages)))
    second = dataclasses.replace(seen.messages[1], client=1)
    with pytest.raises(NotApplicable, match="one client's updates"):
        mean_of(dataclasses.replace(seen, messages=(seen.messages[0], second)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "status"),
    [({"knows_labels": True, "knows_training": False}, "not applicable"), ({"knows_labels": False}, "done")],
)
def test_a_client_of_unknown_size_or_labels_is_refused_or_attacked(changes: dict[str, Any], status: str) -> None:
    federation = {**NOISY["federations"][0], "rounds": 8}
    attacks = [{"name": "averaged", "attack": {"name": "invg", "iterations": 5}}]
    scenario = {**NOISY, "federations": [federation], "attacks": attacks, "threat": changes}
    (finding,) = fedaudit.audit(scenario, progress=False).result.findings
    assert finding.status == status


def test_local_epochs_over_the_same_examples_are_one_update() -> None:
    federation = {
        "name": "f", "algorithm": "fedavg", "clients": 1, "examples": 4, "batch_size": 4, "local_epochs": 2,
        "rounds": 3, "learning_rate": 0.01,
    }  # fmt: skip
    attacks = [{"name": "averaged", "attack": {"name": "agic", "iterations": 5}}]
    scenario = {**NOISY, "defences": {}, "federations": [federation], "attacks": attacks}
    (finding,) = fedaudit.audit(scenario, progress=False).result.findings
    assert finding.status == "done"
    assert len(finding.images) == 4
