"""A server that sends each client kernels of its own: what a sum of the clients' updates still says of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.attacks.active.loki import Loki
from fedaudit.models.inserted_module import InsertedLayers
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation import horizontal
from fedaudit.simulation.checkpoint import pack, unpack
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.observation import observe
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import BadInput, NotApplicable
from tests.attacks.server_cases import best_psnr, played, seen_in
from tests.conftest import core

SERVER: dict[str, Any] = {"name": "loki", "units": 64, "spread": 0.15}
SGD: dict[str, Any] = {"algorithm": "fedsgd", "clients": 4, "examples": 48, "batch_size": 12}
AVG: dict[str, Any] = {**SGD, "algorithm": "fedavg", "batch_size": 4, "local_epochs": 2, "learning_rate": 0.05}
GOAL = 40.0  # dB
KERNELS = {"front.spread.weight", "front.spread.bias"}


def scenario(spec: dict[str, Any], sees: str = "sum", server: Any = SERVER, **rest: Any) -> Scenario:
    threat = {"adversary": "malicious-server", "sees": sees} | rest.pop("threat", {})
    values = {"data": {"name": "digits"}, "model": {"name": "convnet-small", "width": 4}, "attacks": ["loki"]}
    return scenario_from({**values, "federations": [{"name": "f", "server": server, **spec}], "threat": threat, **rest})


def hit(transcript: Transcript, client: int, pixels: Tensor) -> Tensor:
    """Return (n, units) which units each image hits in the model that the client was sent: the definition."""
    front = transcript.module.get_submodule("front")
    assert isinstance(front, InsertedLayers)
    assert front.limit is not None
    sent = transcript.rounds[0].sent_to(client)
    front.load_state_dict({name.removeprefix("front."): t for name, t in sent.items() if name.startswith("front.")})
    with torch.no_grad():
        units = front.measure(front.spread(transcript.task_info.normalise(pixels)).flatten(1))
    return torch.as_tensor((units > 0) & (units < front.limit))


def alone(inside: Tensor, batch: int) -> Tensor:
    """Return (n,) which images are alone in a unit in the first batch that hits it; later ones don't hit it again."""
    used = torch.zeros(inside.shape[1], dtype=torch.bool)
    single = []
    for part in inside.split(batch):
        once = (part.sum(dim=0) == 1) & ~used
        single.append((part & once).any(dim=1))
        used |= part.any(dim=0)
    return torch.cat(single)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "fedsgd, a sum": (SGD, "sum"),
    "fedsgd, a sum of two": (SGD, "aggregate of 2"),
    "fedsgd, alone": (SGD, "updates"),
    "fedavg, a sum": (AVG, "sum"),
    "fedavg, alone": (AVG, "updates"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", core(CASES, "fedsgd, a sum of two", "fedavg, a sum"))
def test_every_image_that_is_alone_in_its_client_s_unit_is_recovered(case):
    spec, sees = CASES[case]
    made, single = scenario(spec, sees), played(scenario(spec, "updates"))
    found = []
    for seen in seen_in(made, played(made)):
        attack = make_attack("loki")
        assert isinstance(attack, Loki)
        owned = attack.read_out(seen)
        finding = attack(seen, generator=torch.Generator().manual_seed(0))
        assert isinstance(finding, ImageFinding)
        assert len(finding.images) == seen.single().update.num_examples
        images = seen.task_info.denormalise(owned.inputs.view(-1, 1, 8, 8))
        assert best_psnr(images.clamp(0, 1), finding.images).min() > 100
        found.append((images, owned.clients, owned.labels))
    images, clients, labels = (torch.cat(part) for part in zip(*found, strict=True))
    out = 0
    for (_, client), true in single.truth.inputs.items():
        first = true[:12]  # of two epochs, the first
        lone = alone(hit(single.transcript, client, first), spec["batch_size"])
        own = images[clients == client]
        psnr = best_psnr(first, own)
        assert (psnr[lone] >= GOAL).all(), psnr[lone]
        assert (psnr[~lone] < GOAL).float().mean() > 0.7, psnr[~lone]
        out += int(lone.sum())
        if spec == SGD:
            rows = torch.cdist(first[lone].flatten(1).double(), own.flatten(1)).argmin(dim=1)
            right = labels[clients == client][rows] == single.truth.labels[0, client][:12][lone]
            assert right.float().mean() > 0.7
    assert out > 24  # of 48


def test_a_sum_hides_more_from_a_server_that_sends_all_clients_the_same():
    shares = {}
    for name in ("loki", "imprint"):
        made = scenario(SGD, "sum", {**SERVER, "name": name}, attacks=[name])
        recording = played(made)
        (seen,) = seen_in(made, recording)
        found = make_attack(name)(seen, generator=torch.Generator().manual_seed(0))
        assert isinstance(found, ImageFinding)
        (true,) = recording.truth.inputs.values()
        shares[name] = float((best_psnr(true, found.images) >= GOAL).float().mean())
    assert shares["loki"] > shares["imprint"] + 0.2


def test_clients_are_sent_kernels_of_their_own_and_nothing_else_differs():
    made = scenario({**SGD, "clients": 5, "clients_per_round": 3, "examples": 60})
    transcript = played(made).transcript
    (record,) = transcript.rounds
    assert len(record.client_weights) == 3
    pixels = torch.rand(2, 1, 8, 8)
    kernels = nn.Conv2d(1, 3, 3, padding=1)
    for place, (client, sent) in enumerate(sorted(record.client_weights.items())):
        assert {name for name in sent if not sent[name].equal(record.weights[name])} == KERNELS
        kernels.load_state_dict({name.removeprefix("front.spread."): sent[name] for name in KERNELS})
        copies = kernels(transcript.task_info.normalise(pixels))
        expected = torch.zeros(2, 3, 8, 8)
        expected[:, place] = 1000.0 * pixels[:, 0]
        assert torch.allclose(copies, expected, atol=1e-3)
        assert record.sent_to(client) is sent
    assert not any(record.weights[name].any() for name in KERNELS)


def test_what_each_client_was_sent_survives_the_disk(tmp_path: Path):
    made = scenario({**AVG, "rounds": 2})
    recording = played(made)
    recording.transcript.save(tmp_path / "kept")
    read = Transcript.load(tmp_path / "kept")
    assert read.digest() == recording.transcript.digest()
    for before, after in zip(recording.transcript.rounds, read.rounds, strict=True):
        assert after.client_weights.keys() == before.client_weights.keys() == {0, 1, 2, 3}
        for client, sent in before.client_weights.items():
            assert all(sent[name].equal(after.client_weights[client][name]) for name in sent)
    (first, _) = unpack(pack(recording.transcript.rounds))
    assert first.client_weights == recording.transcript.rounds[0].client_weights
    files = sorted((tmp_path / "kept").glob("round-00000-*-sent.safetensors"))
    assert len(files) == 4
    assert all(file.stat().st_size < 2000 for file in files)  # what differs, not the whole model
    attacked = fedaudit.attack(read, ["loki"], progress=False)
    assert isinstance(attacked[0], ImageFinding)
    (direct,) = observe(recording.transcript, made.threat).split()[:1]
    found = make_attack("loki")(direct, generator=torch.Generator())
    assert isinstance(found, ImageFinding)
    assert torch.equal(attacked[0].images, found.images)


def test_other_attacks_refuse_a_sum_of_clients_who_were_sent_unlike_weights():
    made = scenario(SGD)
    recording = played(made)
    (seen,) = seen_in(made, recording)
    for name in ("agic", "labels", "fishing", "trap-weights", "imprint"):
        with pytest.raises(NotApplicable, match="sent different weights"):
            make_attack(name).check(seen)
    alone = scenario(SGD, "updates")
    make_attack("labels").check(seen_in(alone, played(alone))[0])


def test_an_honest_server_s_updates_are_refused():
    made = scenario_from({**scenario(SGD).model_dump(), "federations": [{"name": "f", **SGD}], "threat": {}})
    with pytest.raises(NotApplicable, match="server: loki"):
        make_attack("loki").check(seen_in(made, played(made))[0])


def test_public_examples_tell_where_the_bins_are():
    public = {"knows_public_data": True, "public_examples": 200}
    shares = []
    for threat in ({}, public):
        made = scenario(SGD, "sum", {**SERVER, "spread": 5.0}, threat=threat)
        recording = played(made)
        (seen,) = seen_in(made, recording)
        found = make_attack("loki")(seen, generator=torch.Generator())
        assert isinstance(found, ImageFinding)
        (true,) = recording.truth.inputs.values()
        shares.append(float((best_psnr(true, found.images) >= GOAL).float().mean()))
    assert shares[1] > shares[0] + 0.2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"server": {"name": "loki", "units": 1}}, "2 to"),
        ({"server": {"name": "loki", "scale": 0}}, "scale"),
        ({"data": {"name": "breast-cancer"}, "model": {"name": "mlp"}}, "is for images"),
        ({"threat": {"adversary": "server"}}, "set threat.adversary: malicious-server"),
    ],
)
def test_what_can_not_be_is_refused(changes, says):
    with pytest.raises(BadInput, match=says):
        resolve(scenario({**SGD, "examples": 8, "batch_size": 2}, "sum", changes.pop("server", SERVER), **changes))


def test_it_is_chosen_where_the_server_plays_it():
    made = resolve(scenario(SGD, attacks=None))
    assert "loki" in [attack.name for attack in made.scenario.attacks]
    assert simulate(made.federations[0]).transcript.digest() == simulate(made.federations[0]).transcript.digest()


@pytest.mark.slow
@pytest.mark.usefixtures("kept_workers")
def test_clients_in_processes_of_their_own_are_sent_the_same(monkeypatch: pytest.MonkeyPatch):
    (federation,) = resolve(scenario(AVG)).federations
    alone = simulate(federation).transcript
    monkeypatch.setattr(horizontal, "_WORTH", -1.0)  # processes from the first round on
    assert simulate(federation, workers=2).transcript.digest() == alone.digest()
