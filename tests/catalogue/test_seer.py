"""A server that trains its weights with a secret decoder: of a batch the one bright image comes out."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.transcript.observation import observe
from tests.attacks.server_cases import SERVERS, best_psnr
from tests.build import recorded, seen_in
from tools.measure.seer_share import Batch, table

scenario = SERVERS["seer"]


@pytest.mark.slow
def test_the_image_that_its_decoder_counts_comes_out():
    made = scenario({"clients": 40, "examples": 320})
    recording = recorded(made)
    alone, psnr, brightest = 0, [], 0
    for seen in seen_in(made, recording):
        found = make_attack("seer")(seen)
        assert isinstance(found, ImageFinding)
        inputs = recording.truth.inputs[seen.single().round, seen.single().client]
        count = float(re.findall(r"count (\S+) of", found.notes[0])[0])
        if 0.8 < count < 1.2:
            best = best_psnr(inputs, found.images[:1])
            alone, brightest = alone + 1, brightest + int(best.argmax() == inputs.flatten(1).mean(dim=1).argmax())
            psnr.append(float(best.max()))
    assert alone >= 4  # which batches hold one alone turns on rounding, and on the machine
    assert brightest > 0.8 * alone
    assert sorted(psnr)[len(psnr) // 2] > 20


@pytest.mark.slow
def test_the_decoder_takes_the_sum_of_the_gradients_and_nobody_else_has_it():
    made = scenario({"server": {"name": "seer", "steps": 1}}, threat={"public_examples": 100})
    recording = recorded(made)
    for adversary in ("server", "eavesdropper", "client"):
        other = made.threat.model_copy(update={"adversary": adversary, "public_examples": None})
        assert not observe(recording.transcript, other).adversary_log
    (seen,) = seen_in(made, recording)
    assert set(seen.adversary_log) == {"server/seer/decoder", "server/seer/entries"}
    draws = torch.Generator().manual_seed(0)
    gradient = torch.cat([t.flatten() for t in seen.single().update.tensors.values()])
    kept = torch.randperm(len(gradient), generator=draws)[:50].sort().values
    pixels = torch.rand(64, generator=draws)
    mean, std = (torch.tensor(part) for part in (seen.task_info.mean, seen.task_info.std))
    read = 8 * gradient[kept]  # the sum, of which the update is the mean
    wanted = torch.cat([2 * (pixels - mean) / std, torch.tensor([2 * 3.0])])  # of two examples
    log = {"server/seer/decoder": torch.outer(wanted, read / read.square().sum()), "server/seer/entries": kept}
    found = make_attack("seer")(dataclasses.replace(seen, adversary_log=log))
    assert isinstance(found, ImageFinding)
    assert "count 2 of" in found.notes[0]
    assert found.images.shape == (8, 1, 8, 8)
    assert torch.allclose(found.images, pixels.view(1, 1, 8, 8).expand(8, -1, -1, -1), atol=1e-4)


def test_the_table_of_what_it_reads_goes_by_what_it_counts():
    nothing = torch.zeros(1, 8, 8)
    counted = [(-0.1, 8.0, False), (0.5, 9.0, False), (0.81, 30.0, True), (1.2, 19.0, True), (1.0, 20.5, False)]
    rows = [Batch(*row, nothing, nothing) for row in [*counted, (2.0, 15.0, True)]]
    assert table(rows) == [
        "count up to 0.5: 2, median 8.5 dB, above 20 dB 0.00, brightest 0.00",
        "count 0.5 to 0.8: none",
        "count 0.8 to 1.2: 3, median 20.5 dB, above 20 dB 0.67, brightest 0.67",
        "count above 1.2: 1, median 15.0 dB, above 20 dB 0.00, brightest 1.00",
    ]
