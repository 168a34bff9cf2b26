"""The frameworks' filters: against the frameworks themselves (peers), slow loops and closed forms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, pld
from torch import Tensor

import fedaudit
from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.attacks.inversion.objectives import DISTANCES, distance_to
from fedaudit.defences import CLIENT_DEFENCES, ClientContext, ClientDefence, ClientDefenceInfo, Update
from fedaudit.epsilon.accounting import SparseVectorAccount, TakingPart
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import simulate
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import make
from tests.models.model_cases import generator as rng

State = dict[str, Tensor]
PARAMETERS = ("conv.weight", "conv.bias", "head.weight")


def state(seed: int, scale: float = 0.01) -> State:
    """A state dict as of a network with BatchNorm; the names aren't in the alphabet's order."""
    draws = rng(seed)
    shapes = {"head.weight": (10, 36), "conv.weight": (4, 3, 3, 3), "conv.bias": (4,), "bn.running_mean": (4,)}
    made = {name: scale * torch.randn(shape, generator=draws) for name, shape in shapes.items()}
    return made | {"bn.num_batches_tracked": torch.tensor(5 * seed)}


def trained(before: State, after: State, steps: int) -> tuple[Update, ClientContext]:
    training = TrainingConfig(learning_rate=0.1, local_steps=steps, batch_sizes=(4,) * steps)
    moved = {name: after[name] - before[name] for name in before if name in PARAMETERS}
    buffers = {name: after[name] for name in before if name not in PARAMETERS}
    return Update(0, "weights", moved, 4 * steps, training, buffers), ClientContext(before, (), 1)


def seed_of(generator: torch.Generator) -> int:
    """The seed that a client-side defence takes for NumPy."""
    return int(torch.randint(2**32, (), generator=generator))


def moved(sent: Update, before: State) -> dict[str, np.ndarray[Any, Any]]:
    """What a server reads as the difference of the state dicts."""
    return {
        name: (sent.tensors[name] if name in sent.tensors else sent.buffers.get(name, old) - old).numpy()
        for name, old in before.items()
    }


# --- against the frameworks ----------------------------------------------------------------------------------------


def nvflare(filter_: Any, before: State, after: State, steps: int) -> dict[str, Any]:
    pytest.importorskip("nvflare")
    from nvflare.apis.dxo import DXO, DataKind, MetaKey

    pytest.importorskip("nvflare")
    from nvflare.apis.fl_context import FLContext

    pytest.importorskip("nvflare")
    from nvflare.apis.shareable import Shareable

    data = {name: (after[name] - before[name]).numpy() for name in before}
    dxo = DXO(DataKind.WEIGHT_DIFF, data, {MetaKey.NUM_STEPS_CURRENT_ROUND: steps})
    found = filter_.process_dxo(dxo, Shareable(), FLContext())
    return dict(found.data)


def equal_bits(
    client_defence: ClientDefence, expected: dict[str, Any], before: State, after: State, steps: int
) -> None:
    update, context = trained(before, after, steps)
    found = moved(client_defence(update, context, rng(7)), before)
    for name, array in expected.items():
        ours = found[name]
        if name.startswith("bn.running"):  # the mean is what travels, and adding to it rounds
            np.testing.assert_allclose(ours, array, atol=1e-8)
        else:
            np.testing.assert_array_equal(ours, np.asarray(array).astype(ours.dtype), err_msg=name)


@pytest.mark.peers
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("percentile", "gamma"), [(10, 0.01), (75.5, 0.003), (100, 0.01), (0, 1.0)])
def test_percentile_privacy_gives_nvflare_s_bits(percentile: float, gamma: float, steps: int) -> None:
    pytest.importorskip("nvflare")
    from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy

    before, after = state(0), state(1)
    expected = nvflare(PercentilePrivacy(percentile, gamma), before, after, steps)
    ours = make(CLIENT_DEFENCES, "percentile-privacy", {"percentile": percentile, "gamma": gamma})
    equal_bits(ours, expected, before, after, steps)


@pytest.mark.peers
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"replace": False},
        {"fraction": 0.5, "epsilon": 40.0, "noise_var": 30.0, "gamma": 0.01, "tau": 0.005},
        {"epsilon": 3.0, "epsilon_threshold": 1.0, "epsilon_release": 2.0},
        {"epsilon": 3.0, "epsilon_query": 1.0, "fraction": 1.0, "replace": False},
    ],
)
@pytest.mark.parametrize("chunk", [1_000_000, 50])
def test_svt_privacy_gives_nvflare_s_bits(
    settings: dict[str, Any], steps: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nvflare")
    from nvflare.app_common.filters import svt_privacy

    monkeypatch.setattr(svt_privacy, "_SVT_CHUNK_SIZE", chunk)
    monkeypatch.setattr("fedaudit.defences.filters._CHUNK", chunk)
    before, after = state(0), state(1)
    np.random.seed(seed_of(rng(7)))  # noqa: NPY002
    expected = nvflare(svt_privacy.SVTPrivacy(**settings), before, after, steps)
    equal_bits(make(CLIENT_DEFENCES, "svt-privacy", settings), expected, before, after, steps)


@pytest.mark.peers
def test_of_whole_weights_svt_privacy_leaves_no_model_which_is_noticed_and_of_differences_it_does() -> None:
    pytest.importorskip("nvflare")
    from nvflare.app_common.filters.svt_privacy import SVTPrivacy

    cried = {"whole": 0, "differences": 0}
    for seed in range(40):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        net = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 10))
        now = net.state_dict()
        for kind in cried:
            before = {name: torch.zeros_like(old) if kind == "whole" else old for name, old in now.items()}
            clients = [{name: old + 0.01 * torch.randn_like(old) for name, old in now.items()} for _ in range(2)]
            sent = [nvflare(SVTPrivacy(), before, after, 1) for after in clients]
            received = {
                name: before[name] + torch.as_tensor(sum(one[name] for one in sent) / 2).float() for name in before
            }
            alarms = {check.name for check in fedaudit.check_model(received, net) if check.alarm}
            assert alarms <= {"bare kernels"}
            cried[kind] += bool(alarms)
    assert cried["differences"] == 0
    assert 5 <= cried["whole"] <= 30


@pytest.mark.peers
@pytest.mark.parametrize("names", [["conv.bias", "bn.running_mean", "other"], r"^(conv|bn)\.", "weight"])
def test_exclude_vars_sends_what_nvflare_sends(names: list[str] | str) -> None:
    pytest.importorskip("nvflare")
    from nvflare.app_common.filters.exclude_vars import ExcludeVars

    before, after = state(0), state(1)
    expected = nvflare(ExcludeVars(names), before, after, 1)
    update, context = trained(before, after, 1)
    sent = make(CLIENT_DEFENCES, "exclude-vars", {"exclude_vars": names})(update, context, rng())
    assert {*sent.tensors, *sent.buffers} == set(expected)
    assert all(sent.tensors[name].equal(update.tensors[name]) for name in sent.tensors)


@pytest.mark.peers
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_local_dp_gives_flower_s_bits(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From weights of zero, where the mod's sums have no rounding."""
    pytest.importorskip("flwr")
    from flwr.app import ArrayRecord, Context, Message, RecordDict

    pytest.importorskip("flwr")
    from flwr.clientapp.mod import LocalDpMod

    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    for part in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, part, 1)
    after = state(1)  # with a count of batches among the arrays that get noise
    after = {"bn.num_batches_tracked": after["bn.num_batches_tracked"], **after}
    before = {name: torch.zeros_like(tensor) for name, tensor in after.items()}
    message = Message(RecordDict({"arrays": ArrayRecord(before)}), 7, "train")

    def app(asked: Message, _: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord(after)}), reply_to=asked)

    np.random.seed(seed_of(rng(7)))  # noqa: NPY002
    mod = LocalDpMod(clipping_norm=clip, sensitivity=0.5, epsilon=2.0, delta=1e-4)
    reply = mod(message, Context(1, 7, {}, RecordDict(), {}), app)
    expected = {name: array.numpy() for name, array in next(iter(reply.content.array_records.values())).items()}
    settings = {"clipping_norm": clip, "sensitivity": 0.5, "epsilon": 2.0, "delta": 1e-4}
    update, context = trained(before, after, 1)
    found = moved(make(CLIENT_DEFENCES, "local-dp", settings)(update, context, rng(7)), before)
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


# --- what is sent, by loops -----------------------------------------------------------------------------------------


def test_percentile_privacy_clips_what_is_large_and_keeps_back_what_is_small() -> None:
    values = torch.tensor([0.5, -0.01, 0.03, -0.2, 0.001, 0.02, -0.04, 0.002, 0.3, 0.1])
    update = Update(0, "gradient", {"w": values}, 4, None)
    settings = {"percentile": 50, "gamma": 0.05}
    sent = make(CLIENT_DEFENCES, "percentile-privacy", settings)(update, ClientContext({"w": values}, (), 1), rng())
    middle = sorted(abs(v) for v in values.tolist())
    cutoff = (middle[4] + middle[5]) / 2
    expected = [0.0 if abs(v) < cutoff else math.copysign(min(abs(v), 0.05), v) for v in values.tolist()]
    assert sent.tensors["w"].tolist() == pytest.approx(expected)
    assert sent.sanitised == ClientDefenceInfo("percentile-privacy", sparse=True, bound=0.05)


def test_what_svt_privacy_sends_is_noisy_as_it_says() -> None:
    values = torch.full((100_000,), 0.5)
    update = Update(0, "gradient", {"w": values}, 4, None)
    settings = {"fraction": 0.3, "gamma": 0.01, "noise_var": 2.0, "tau": 0.0}
    sent = make(CLIENT_DEFENCES, "svt-privacy", settings)(update, ClientContext({"w": values}, (), 1), rng())
    there = sent.tensors["w"][sent.tensors["w"] != 0]
    assert 0.2 * len(values) < len(there) <= 0.3 * len(values)  # some are drawn twice
    scale = 2 * 0.01 / 2.0
    assert sent.sanitised is not None
    assert sent.sanitised.noise == pytest.approx(math.sqrt(2) * scale)
    assert sent.sanitised.bound == 0.01
    assert float(there.std()) == pytest.approx(sent.sanitised.noise, rel=0.03)
    assert float(there.mean()) == pytest.approx(0.01, abs=4 * sent.sanitised.noise / math.sqrt(len(there)))


def test_without_a_generator_nobody_knows_the_draws() -> None:
    values = torch.randn(5000, generator=rng())
    update, context = Update(0, "gradient", {"w": values}, 4, None), ClientContext({"w": values}, (), 1)
    for name in ("svt-privacy", "local-dp"):
        one, other = (make(CLIENT_DEFENCES, name)(update, context, None).tensors["w"] for _ in range(2))  # type: ignore[arg-type]
        assert not one.equal(other)


def test_what_can_t_work_is_refused() -> None:
    before, after = state(0), state(1)
    update, context = trained(before, after, 1)
    names: list[tuple[Any, str]] = [(["no.such"], "is the name of no tensor"), (".", "leaves nothing to send")]
    for asked, words in names:
        with pytest.raises(BadInput, match=words):
            make(CLIENT_DEFENCES, "exclude-vars", {"exclude_vars": asked})(update, context, rng())
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("exclude-vars", {"exclude_vars": "("}, "no regular expression"),
        ("svt-privacy", {"epsilon_threshold": 0.05, "epsilon_query": 0.01}, "must add up to epsilon"),
        ("svt-privacy", {"epsilon_query": 0.2}, "must add up to epsilon"),
        ("percentile-privacy", {"percentile": 101}, "less than or equal to 100"),
    ]
    for name, settings, words in wrong:
        with pytest.raises(BadInput, match=words):
            make(CLIENT_DEFENCES, name, settings)
    with pytest.raises(BadInput, match="clipping_norm, sensitivity, delta"):
        make(CLIENT_DEFENCES, "local-dp").check_alone({"epsilon"}, None)
    never = {"epsilon": 1e6, "tau": 1.0, "gamma": 1e-5}
    with pytest.raises(BadInput, match="lower tau"):
        make(CLIENT_DEFENCES, "svt-privacy", never)(update, context, rng())


# --- what is promised -----------------------------------------------------------------------------------------------

ONE = TakingPart(examples=(10, 10), per_round=1, steps=1, batch=4, epoch=None, elements=1000)


def test_local_dp_s_account_is_that_of_a_replaced_client() -> None:
    settings = {"clipping_norm": 2.0, "sensitivity": 4.0, "epsilon": 1.0, "delta": 1e-5}
    account = make(CLIENT_DEFENCES, "local-dp", settings).account(ONE)
    assert account is not None
    sigma = 4.0 * math.sqrt(2 * math.log(1.25e5))
    for rounds in (1, 7):
        oracle = pld.PLDAccountant().compose(GaussianDpEvent(sigma / 4.0), rounds)  # 4 = twice the clip
        assert account.spent(rounds, "pld") == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-3)
    assert account.spent(1, "pld") < 1  # where the sensitivity is twice the clip, the mod's own ε holds
    half = make(CLIENT_DEFENCES, "local-dp", {**settings, "sensitivity": 2.0}).account(ONE)
    assert half is not None
    assert half.spent(1, "pld") > 1.5  # where it is the clip, it doesn't
    assert make(CLIENT_DEFENCES, "local-dp", {**settings, "sensitivity": 0.0}).account(ONE) is None


def test_svt_privacy_s_account_is_for_all_that_may_be_accepted() -> None:
    made = make(
        CLIENT_DEFENCES, "svt-privacy", {"fraction": 0.1, "epsilon": 3.0, "epsilon_threshold": 1.0, "noise_var": 0.2}
    )
    account = made.account(ONE)
    assert account == SparseVectorAccount(1.0 + 2.0 * 10, 0.2, 100, 1e-5)
    sent = pld.PLDAccountant().compose(LaplaceDpEvent(1 / 0.2), 300)
    assert account.spent(3, "pld") == pytest.approx(3 * 21 + sent.get_epsilon(1e-5), rel=0.01)
    assert account.spent(3) >= account.spent(3, "pld")
    few = SparseVectorAccount(1.0, 0.5, 2, 1e-5)
    assert few.spent(1) == pytest.approx(1.0 + 2 * 0.5)  # where adding up is less
    assert few.by("add-remove").spent(1) == pytest.approx(1.0 + 2 * 0.25)


def test_svt_privacy_accepts_more_than_it_pays_for() -> None:
    """Why NVFlare's own account is too small."""
    from fedaudit.defences.filters import SVTPrivacy

    values, client_defence = np.zeros(10_000), SVTPrivacy(fraction=0.1, epsilon=1.0)
    draws = np.random.RandomState(0)
    (mask,) = client_defence._accepted([values], 1.0, 1000, client_defence.tau, 2 * 1000 * client_defence.gamma, draws)
    assert mask.sum() > 4 * 1000


@pytest.mark.parametrize("name", ["percentile-privacy", "exclude-vars"])
def test_what_draws_nothing_promises_nothing(name: str) -> None:
    assert make(CLIENT_DEFENCES, name).account(ONE) is None
    assert "promises no ε" in CLIENT_DEFENCES[name].summary


# --- what an attacker makes of it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(DISTANCES))
def test_the_bounded_distance_s_derivative(name: str) -> None:
    """Within the bound by finite differences; an agreeing element at the bound has none, a contrary one is driven."""
    draws = rng(3)
    whole = torch.randn(40, generator=draws, dtype=torch.float64)
    sent = {"w": whole.clamp(-0.5, 0.5)}
    update = Update(0, "gradient", sent, 4, None, sanitised=ClientDefenceInfo("percentile-privacy", bound=0.5))
    scale = 3.0  # as where a pseudo-gradient is the update times a number
    target = {"w": scale * sent["w"]}
    distance = distance_to(name, update, ["w"], target, {"w": 1.0})
    vector = scale * torch.randn(40, generator=draws, dtype=torch.float64)
    value, derivative = distance.derivative(vector)
    inside = vector.abs() < 1.49
    for i in torch.nonzero(inside).flatten().tolist():
        step = torch.zeros(40, dtype=torch.float64)
        step[i] = 1e-6
        rise = (distance.value(vector + step) - distance.value(vector - step)) / 2e-6
        assert float(derivative[i]) == pytest.approx(float(rise), rel=1e-4, abs=1e-7)
    at_bound = (target["w"].abs() >= 1.49999) & (vector * target["w"].sign() >= 1.5)
    assert at_bound.any()
    assert not derivative[at_bound].any()
    contrary = (vector * target["w"] < 0) & ~inside
    assert contrary.any()
    assert (derivative[contrary] * vector[contrary] > 0).all()  # descent leads back
    followed = vector.clone().requires_grad_()
    found = distance.value(followed)
    (expected,) = torch.autograd.grad(found, followed)
    torch.testing.assert_close(derivative, expected)
    torch.testing.assert_close(value, found.detach())
    torch.testing.assert_close(value, DISTANCES[name]([target["w"]], [1.0]).value(vector.clamp(-1.5, 1.5)))


def test_whatever_is_beyond_the_bound_is_no_distance() -> None:
    whole = {"w": 2 * torch.randn(40, generator=rng(1))}
    sent = {"w": whole["w"].clamp(-0.5, 0.5)}
    known = ClientDefenceInfo("percentile-privacy", sparse=True, bound=0.5)
    update = Update(0, "gradient", sent, 4, None, sanitised=known)
    value, derivative = distance_to("squared-l2", update, ["w"], sent, {"w": 1.0}).derivative(whole["w"])
    assert float(value) == 0
    assert not derivative.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "percentile-privacy", "percentile": 10, "gamma": 0.001},
        {"name": "svt-privacy", "fraction": 0.2, "epsilon": 1e9, "noise_var": 1e4, "gamma": 0.01, "tau": 1e-4},
    ],
    ids=lambda settings: str(settings["name"]),
)
def test_who_knows_the_filter_recovers_more(settings: dict[str, Any]) -> None:
    values = {
        "data": {"name": "digits"},
        "model": {"name": "lenet", "initialisation": "uniform"},
        "federations": [{"name": "fed", "clients": 2, "examples": 2, "rounds": 1, "batch_size": 1}],
        "defences": {"client_defence": settings},
    }
    (federation,) = resolve(scenario_from(values)).federations
    recording = simulate(federation)
    assert recording.truth is not None
    gains = []
    for seen in observe(recording.transcript, ThreatModel(knows_labels=True)).split():
        (original,) = (inputs for key, inputs in recording.truth.inputs.items() if key[1] == seen.messages[0].client)
        found = []
        for aware in (True, False):
            finding = make_attack("invg", {"iterations": 80, "aware": aware})(seen, generator=rng())
            assert isinstance(finding, ImageFinding)
            found.append(-10 * math.log10(float((finding.images[0] - original).square().mean())))
        gains.append(found[0] - found[1])
    assert min(gains) > 3


@pytest.mark.slow
def test_a_report_says_by_which_adjacency_epsilon_is_reckoned(tmp_path: Path) -> None:
    values = {
        "data": {"name": "digits"},
        "model": {"name": "lenet", "initialisation": "uniform"},
        "federations": [{"name": "fed", "clients": 2, "examples": 8, "rounds": 2, "batch_size": 4}],
        "attacks": ["labels"],
        "defences": [
            {"client_defence": {"name": "local-dp", "sensitivity": 2.0}},
            {"client_defence": {"name": "percentile-privacy"}},
            {"client_defence": {"name": "dp", "noise": 5.0, "delta": 1e-4}},
            {"name": "sample", "client_defence": {"name": "dp", "noise": 5.0, "level": "sample", "epsilon": None}},
        ],
    }
    done = fedaudit.audit(values, progress=False)
    *courses, sample = [f.history for f in done.result.federations]
    expected = pld.PLDAccountant().compose(GaussianDpEvent(math.sqrt(2 * math.log(1.25e5))), 2)
    local, nothing, dp = courses
    assert local is not None
    assert local.epsilon_pld == pytest.approx(expected.get_epsilon(1e-5), rel=1e-3)
    assert nothing is not None
    assert not nothing.epsilon
    assert dp is not None
    assert (local.epsilon_adjacency, dp.epsilon_adjacency) == ("replace", "add-remove")
    assert sample is not None
    assert [c.epsilon_delta for c in (local, nothing, dp, sample)] == [1e-5, None, 1e-4, 1e-5]
    assert [c.epsilon_unit for c in (local, nothing, dp, sample)] == ["client", None, "client", "record"]
    done.save(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Of fed-local-dp it is by replacement." in page
    assert "of a privacy budget at δ = 1e-05, or at 0.0001, by add/remove adjacency" in page
    assert "promises no ε" in page
