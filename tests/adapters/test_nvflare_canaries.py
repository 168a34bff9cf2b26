"""Canary sites in NVFlare: ε of a filter that clips and adds noise; docs/how-to/nvflare.md's job in the simulator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.peers
pytest.importorskip("nvflare", reason="NVFlare isn't installed: pip install 'PATH_OF_THE_CLONE[nvflare]'")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable  # noqa: E402
from nvflare.apis.dxo_filter import DXOFilter  # noqa: E402
from nvflare.apis.event_type import EventType  # noqa: E402
from nvflare.apis.fl_constant import FilterKey, ReservedKey, ReturnCode  # noqa: E402
from nvflare.apis.fl_context import FLContext  # noqa: E402
from nvflare.apis.shareable import ReservedHeaderKey, Shareable  # noqa: E402
from nvflare.apis.signal import Signal  # noqa: E402
from nvflare.apis.utils.task_utils import apply_filters  # noqa: E402
from nvflare.app_common.abstract.model import make_model_learnable  # noqa: E402
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper  # noqa: E402
from nvflare.app_common.app_constant import AppConstants  # noqa: E402
from nvflare.app_common.app_event_type import AppEventType  # noqa: E402

import fedaudit  # noqa: E402
from fedaudit import CanaryClients  # noqa: E402
from fedaudit.adapters.nvflare import CanaryExecutor, CanaryRecorder  # noqa: E402
from fedaudit.transcript.truth import Truth  # noqa: E402
from fedaudit.utils.errors import BadInput  # noqa: E402
from tests.adapters.nvflare_cases import context, python, write_job  # noqa: E402
from tests.capture.recording_cases import Net, held, train  # noqa: E402

COUNT, ROUNDS, CLIP, SIGMA = 200, 4, 0.5, 4.0
CLAIMED = 1.98  # ε of four rounds, each with noise of four clips, at δ = 1e-5: the Gaussian mechanism with μ = 1/2
SITES = [f"site-{number}" for number in range(3, 3 + COUNT)]


class Privacy(DXOFilter):  # type: ignore[misc]
    """A site's filter, as somebody may write it: clips what leaves, and adds Gaussian noise."""

    def __init__(self, noise: float) -> None:
        super().__init__([DataKind.WEIGHT_DIFF], [DataKind.WEIGHT_DIFF])
        self.noise, self.dice = noise, np.random.default_rng(0)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        length = np.sqrt(sum(float((a**2).sum()) for a in dxo.data.values()))
        scale = min(1.0, CLIP / length) if length else 1.0
        dxo.data = {
            name: (scale * a + self.noise * CLIP * self.dice.standard_normal(a.shape)).astype(a.dtype)
            for name, a in dxo.data.items()
        }
        return dxo


def honest(number: int, sent: dict[str, np.ndarray]) -> Shareable:
    model = Net()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in sent.items()})
    train(model, held(number))
    moved = {name: tensor.numpy() - sent[name] for name, tensor in model.state_dict().items()}
    reply: Shareable = DXO(DataKind.WEIGHT_DIFF, moved, {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}).to_shareable()
    return reply


def federate(folder: Path, noise: float) -> CanaryClients:
    """Two honest sites and the canaries, by NVFlare's filters, shareables and averaging."""
    torch.manual_seed(0)
    weights: dict[str, Any] = {name: tensor.numpy() for name, tensor in Net().state_dict().items()}
    canaries = CanaryClients(Net(), COUNT, clip=CLIP, claimed=CLAIMED, where="local", gaussian=True, seed=5)
    theirs = CanaryExecutor(CanaryClients(Net(), COUNT, clip=CLIP, seed=5), SITES, form="difference")  # another process
    recorder = CanaryRecorder(str(folder), canaries, SITES)
    filters = {"train" + FilterKey.DELIMITER + FilterKey.OUT: [Privacy(noise)]}
    server = FLContext()
    server.set_prop(ReservedKey.RUN_NUM, "job")

    def happen(event: str, **props: Any) -> None:
        for name, value in {AppConstants.GLOBAL_MODEL: make_model_learnable(weights, {}), **props}.items():
            server.set_prop(name, value, sticky=False)
        recorder.handle_event(event, server)

    happen(EventType.START_RUN)
    for index in range(ROUNDS):
        happen(AppEventType.ROUND_STARTED, **{AppConstants.CURRENT_ROUND: index})
        total = WeightedAggregationHelper()
        for number, site in enumerate(["site-1", "site-2", *SITES]):
            at = context(site, "job")
            task = DXO(DataKind.WEIGHTS, weights).to_shareable()
            reply = honest(number, weights) if number < 2 else theirs.execute("train", task, at, Signal())
            reply = apply_filters("task_result_filters", reply, at, filters, "train", FilterKey.OUT)
            reply.set_header(ReservedHeaderKey.PEER_PROPS, {ReservedKey.IDENTITY_NAME: site})
            accepted = {AppConstants.TRAINING_RESULT: reply, AppConstants.AGGREGATION_ACCEPTED: True}
            happen(AppEventType.AFTER_CONTRIBUTION_ACCEPT, **accepted)
            total.add(from_shareable(reply).data, 1.0, site, index)
        weights = {name: weights[name] + array for name, array in total.get_result().items()}
    happen(EventType.END_RUN)
    return canaries


@pytest.mark.parametrize("noise", [SIGMA, SIGMA / 8])
def test_a_privacy_filter_is_audited(tmp_path: Path, noise: float) -> None:
    canaries = federate(tmp_path, noise)
    task = {"input_shape": (1, 8, 8), "mean": (0.5,), "std": (0.25,), "loss": "cross-entropy", "batch_norm": "eval"}
    made: Any = fedaudit.audit_transcript(tmp_path / "job", attacks=["dp-canaries"], module=Net(), task=task, seed=0)
    found = made.result.findings[0].epsilon
    assert {one.observer: one.covered for one in found.observers} == dict.fromkeys(
        ("updates", "sum", "models", "final"), True
    )
    transcript = fedaudit.Transcript.load(tmp_path / "job", Net(), task=task)
    seen = transcript.canaries
    assert (transcript.updates, seen is not None) == (2 * ROUNDS, True)
    assert seen is not None
    own = seen.readings["updates"] - canaries.coins.double()
    assert float(own.mean()) == pytest.approx(0, abs=5 * noise / own.numel() ** 0.5)
    assert float(own.std()) == pytest.approx(noise, rel=0.15)
    # the last round is in the global models: the mean is over canaries and sites, each with noise of its own
    shown = (2 + COUNT) * seen.readings["models"]
    assert shown.shape == (ROUNDS, COUNT)
    assert float(shown.std()) == pytest.approx(noise * (2 + COUNT) ** 0.5, rel=0.15)
    if noise < SIGMA:
        assert made.result.summaries[0].verdict == "inferred"
    else:
        assert found.demonstrated < CLAIMED
        assert made.result.summaries[0].verdict != "inferred"


def test_a_canary_site_answers_in_the_form_and_the_arrays_that_it_is_asked_in() -> None:
    canaries = CanaryClients(Net(), 2, clip=0.5, seed=1)
    sent = Net().state_dict()
    for form, kind in (("weights", DataKind.WEIGHTS), ("difference", DataKind.WEIGHT_DIFF)):
        executor = CanaryExecutor(canaries, ["a", "b"], form=form, steps=7)
        for state in (sent, {name: tensor.numpy() for name, tensor in sent.items()}):
            task = DXO(DataKind.WEIGHTS, state).to_shareable()
            dxo = from_shareable(executor.execute("train", task, context("b"), Signal()))
            assert (dxo.data_kind, dxo.get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND)) == (kind, 7)
            want = canaries.update(1, sent)
            for name, value in dxo.data.items():
                assert type(value) is type(state[name])
                base = sent[name] if form == "difference" else torch.zeros(())
                torch.testing.assert_close(torch.as_tensor(value), want[name] - base, rtol=0, atol=1e-6)


def test_what_a_canary_can_t_do_fails_its_task_alone(caplog: pytest.LogCaptureFixture) -> None:
    executor = CanaryExecutor(CanaryClients(Net(), 2, clip=0.5), ["a", "b"])
    task = DXO(DataKind.WEIGHTS, dict(Net().state_dict())).to_shareable()
    metrics = DXO(DataKind.METRICS, {"a": 1.0}).to_shareable()
    codes = [
        executor.execute(name, data, context(site), Signal()).get_return_code()
        for name, data, site in (
            ("validate", task, "a"),
            ("train", metrics, "a"),
            ("train", task, "c"),
            ("train", DXO(DataKind.WEIGHTS, {"x": np.zeros(2)}).to_shareable(), "a"),
        )
    ]
    assert codes == [ReturnCode.TASK_UNKNOWN, *3 * [ReturnCode.BAD_TASK_DATA]]
    for words in ("holds no weights", "'c' isn't among the sites", "lacks"):
        assert words in caplog.text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sites": ["a"]}, "2 canaries and 1 sites"),
        ({"sites": ["a", "a"]}, "2 canaries and 1 sites"),
        ({"form": "gradient"}, "weights"),
        ({"steps": 0}, "1 or more"),
    ],
)
def test_settings_that_cant_work_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        CanaryExecutor(CanaryClients(Net(), 2, clip=0.5), **{"sites": ["a", "b"], **settings})


def test_the_recorder_stops_nothing_and_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = CanaryRecorder(str(tmp_path), CanaryClients(Net(), 2, clip=0.5), ["a", "b"])
    with caplog.at_level(logging.WARNING, logger="fedaudit.nvflare"):
        for _ in range(2):
            recorder.handle_event(AppEventType.ROUND_STARTED, context())
    assert len(caplog.records) == 1
    assert "doesn't say what the global model is" in caplog.text


@pytest.mark.slow
def test_the_page_s_canaries_in_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(tmp_path, canary_job=[("range(3, 103)", "range(3, 5)")])
    said = python(tmp_path, "canary_job.py", timeout=360)
    assert "not recorded" not in said
    (folder,) = (tmp_path / "recordings").iterdir()
    monkeypatch.syspath_prepend(tmp_path)
    from net import Net as Its  # type: ignore[import-not-found]

    transcript = fedaudit.Transcript.load(folder, Its(), task={"input_shape": (1, 8, 8), "loss": "cross-entropy"})
    assert transcript.canaries is not None
    coins = Truth.load(folder / "truth" / "canaries.safetensors").coins
    strength = 10.0  # nobody clips in this job
    for name, rows in (("updates", 2), ("models", 2)):
        readings = transcript.canaries.readings[name] * (1 if name == "updates" else 4)
        assert readings.shape == (rows, 2)
        torch.testing.assert_close(readings, strength * coins.double().expand(rows, -1), rtol=0, atol=0.5)
    assert transcript.updates == 4
