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
from fedaudit.simulation import horizontal
from fedaudit.simulation.checkpoint import pack, unpack
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.observation import observe
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import NotApplicable
from tests.attacks.server_cases import SERVERS, best_psnr
from tests.build import recorded, seen_in
from tests.conftest import core

scenario = SERVERS["loki"]
AVG: dict[str, Any] = {"algorithm": "fedavg", "batch_size": 4, "local_epochs": 2, "learning_rate": 0.05}
GOAL = 40.0  # dB
KERNELS = {"front.spread.weight", "front.spread.bias"}


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
    "fedsgd, a sum": ({}, "sum"),
    "fedsgd, a sum of two": ({}, "aggregate of 2"),
    "fedsgd, alone": ({}, "updates"),
    "fedavg, a sum": (AVG, "sum"),
    "fedavg, alone": (AVG, "updates"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", core(CASES, "fedsgd, a sum of two", "fedavg, a sum"))
def test_every_image_that_is_alone_in_its_client_s_unit_is_recovered(case):
    spec, sees = CASES[case]
    made, single = (scenario(spec, threat={"sees": what}) for what in (sees, "updates"))
    apart = recorded(single)
    found = []
    for seen in seen_in(made, recorded(made)):
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
    for (_, client), true in apart.truth.inputs.items():
        first = true[:12]  # of two epochs, the first
        lone = alone(hit(apart.transcript, client, first), spec.get("batch_size", 12))
        own = images[clients == client]
        psnr = best_psnr(first, own)
        assert (psnr[lone] >= GOAL).all(), psnr[lone]
        assert (psnr[~lone] < GOAL).float().mean() > 0.7, psnr[~lone]
        out += int(lone.sum())
        if not spec:
            rows = torch.cdist(first[lone].flatten(1).double(), own.flatten(1)).argmin(dim=1)
            right = labels[clients == client][rows] == apart.truth.labels[0, client][:12][lone]
            assert right.float().mean() > 0.7
    assert out > 24  # of 48


def test_a_sum_hides_more_from_a_server_that_sends_all_clients_the_same():
    shares = {}
    for name in ("loki", "imprint"):
        made = scenario({"server": {"name": name, "units": 64, "spread": 0.15}}, attacks=name)
        recording = recorded(made)
        (seen,) = seen_in(made, recording)
        found = make_attack(name)(seen, generator=torch.Generator().manual_seed(0))
        assert isinstance(found, ImageFinding)
        (true,) = recording.truth.inputs.values()
        shares[name] = float((best_psnr(true, found.images) >= GOAL).float().mean())
    assert shares["loki"] > shares["imprint"] + 0.2


def test_clients_are_sent_kernels_of_their_own_and_nothing_else_differs():
    made = scenario({"clients": 5, "clients_per_round": 3, "examples": 60})
    transcript = recorded(made).transcript
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
    recording = recorded(made)
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
    made = scenario()
    recording = recorded(made)
    (seen,) = seen_in(made, recording)
    for name in ("agic", "labels", "fishing", "trap-weights", "imprint"):
        with pytest.raises(NotApplicable, match="sent different weights"):
            make_attack(name).check(seen)
    alone = scenario(threat={"sees": "updates"})
    make_attack("labels").check(seen_in(alone, recorded(alone))[0])


@pytest.mark.slow
@pytest.mark.usefixtures("kept_workers")
def test_clients_in_processes_of_their_own_are_sent_the_same(monkeypatch: pytest.MonkeyPatch):
    (federation,) = resolve(scenario(AVG)).federations
    alone = simulate(federation).transcript
    monkeypatch.setattr(horizontal, "_WORTH", -1.0)  # processes from the first round on
    assert simulate(federation, workers=2).transcript.digest() == alone.digest()
