"""NVFlare's guard filter on its own: what is blocked, clipped, let in or told of, and its budget."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.peers
pytest.importorskip("nvflare", reason="NVFlare isn't installed: pip install 'PATH_OF_THE_CLONE[nvflare]'")

from nvflare.apis.dxo import DXO, DataKind, from_shareable  # noqa: E402
from nvflare.apis.filter import ContentBlockedException  # noqa: E402
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey, ReturnCode  # noqa: E402
from nvflare.apis.fl_context import FLContext  # noqa: E402
from nvflare.apis.shareable import Shareable, make_reply  # noqa: E402
from nvflare.apis.utils.task_utils import apply_filters  # noqa: E402
from nvflare.apis.workspace import Workspace  # noqa: E402
from nvflare.private.fed.app.fl_conf import create_privacy_manager  # noqa: E402

import fedaudit.adapters.nvflare.site as of_site  # noqa: E402
from fedaudit.adapters.nvflare import GuardFilter, RecorderFilter  # noqa: E402
from fedaudit.guard.budget import site_account  # noqa: E402
from fedaudit.utils.errors import BadInput  # noqa: E402
from tests.adapters.nvflare_cases import (  # noqa: E402
    NETWORK,
    STATE,
    context,
    pair,
    rounds_of,
    shareable,
    snippets,
    trained,
)


def site_policy(folder: Path) -> Any:
    """Return the scope that NVFlare makes of the page's privacy.json."""
    (text,) = snippets("json")
    (folder / "local").mkdir()
    (folder / "startup").mkdir()
    (folder / "local" / "privacy.json").write_text(text)
    from nvflare.apis.workspace import Workspace

    manager = create_privacy_manager(Workspace(str(folder), site_name="site-1"), names_only=False)
    assert manager.get_scope("anything else") is None
    return manager.get_scope(None)


def test_the_page_s_site_policy_guards_every_job_and_runs_first(tmp_path, caplog):
    scope, seen = site_policy(tmp_path), []

    class OfTheJob(RecorderFilter):
        def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
            seen.append(shareable)
            return shareable

    guarded = context()
    guarded.set_prop(FLContextKey.SCOPE_OBJECT, scope)
    of_job = {"train" + FilterKey.DELIMITER + FilterKey.OUT: [OfTheJob(str(tmp_path))]}
    came, goes = shareable(STATE), shareable(STATE)
    assert apply_filters("task_data_filters", came, guarded, {}, "train", FilterKey.IN) is came
    for unreadable in (goes, Shareable({"a": [0.5] * 101}), DXO(DataKind.APP_DEFINED, {"a": 1}).to_shareable()):
        with pytest.raises(ContentBlockedException, match="let this update leave"):
            apply_filters("task_result_filters", unreadable, guarded, of_job, "train", FilterKey.OUT)
    assert not seen
    metrics = shareable({"accuracy": 0.5}, DataKind.METRICS)
    assert apply_filters("task_result_filters", metrics, guarded, of_job, "validate", FilterKey.OUT) is metrics
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    assert apply_filters("task_result_filters", failed, guarded, of_job, "train", FilterKey.OUT) is failed


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_the_guard_blocks_what_it_could_rebuild_and_changes_nothing(kind, tmp_path, caplog):
    """One example through a fully connected layer: its gradient is the example."""
    caplog.set_level(logging.INFO, logger="fedaudit.nvflare")
    for on_fail in ("warn", "refuse"):
        settings = {
            "attacks": [{"name": "invg", "iterations": 150}],
            "on_fail": on_fail,
            "out": str(tmp_path / "reports"),
            "reports": True,
            "share": None,
        }
        received, leaving = pair(kind=GuardFilter, **settings)
        before, after = trained(1)
        sent = after if kind == DataKind.WEIGHTS else {name: after[name] - before[name] for name in after}
        goes, state = shareable(sent, kind), torch.get_rng_state()
        received.process(shareable(before), context())
        bits = pickle.dumps(goes)
        if on_fail == "warn":
            assert leaving.process(goes, context()) is goes
            assert "it leaves nevertheless" in caplog.text
        else:
            with pytest.raises(ContentBlockedException):
                leaving.process(goes, context())
            assert "it doesn't leave" in caplog.text
        assert pickle.dumps(goes) == bits
        assert torch.get_rng_state().equal(state)
    assert (tmp_path / "reports" / "job-1" / "site-1-round-0" / "report.html").is_file()


def test_a_received_model_that_looks_manipulated_is_told_of_or_blocked(caplog):
    caplog.set_level(logging.INFO, logger="fedaudit.nvflare")
    before, _ = trained(1)
    name = [n for n, tensor in before.items() if tensor.ndim == 2][-1]
    altered = {**before, name: before[name].clone()}
    altered[name][1:] = 0.0
    for policy in ("warn", "refuse", "ignore"):
        received, _ = pair(kind=GuardFilter, on_received=policy)
        came = shareable(before)
        assert received.process(came, context()) is came
        assert not caplog.text
        goes = shareable(altered)
        if policy == "refuse":
            with pytest.raises(ContentBlockedException, match="this model in"):
                received.process(goes, context())
        else:
            assert received.process(goes, context()) is goes
        assert ("suspicious: silent outputs" in caplog.text) == (policy != "ignore")
        caplog.clear()


def agreed() -> nn.Module:
    """Return the network that the sites agreed on."""
    return NETWORK


def held() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a site's examples."""
    return torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(32, dtype=torch.int64)


def test_the_agreed_network_and_own_examples_tell_more_of_a_received_model(caplog):
    caplog.set_level(logging.INFO, logger="fedaudit.nvflare")
    before, _ = trained(1)
    names = [name for name, tensor in before.items() if tensor.ndim == 1]
    wrong = {**before, names[-1]: torch.tensor([-100.0] + [0.0] * 9)}
    both = {"agreed": f"{__name__}:agreed", "examples": f"{__name__}:held"}
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        ({}, {**before, "more": torch.zeros(3)}, ""),
        (both, {**before, "more": torch.zeros(3)}, "architecture"),
        ({"agreed": agreed()}, wrong, ""),
        ({"agreed": agreed(), "examples": held()}, wrong, "loss"),
        (both, wrong, "loss"),
        (both, before, ""),
    ]
    for settings, state, says in cases:
        caplog.clear()
        received, _ = pair(kind=GuardFilter, on_received="refuse", **settings)
        came = shareable(state)
        if says:
            with pytest.raises(ContentBlockedException):
                received.process(came, context())
            assert f"suspicious: {says}" in caplog.text
        else:
            assert received.process(came, context()) is came
            assert not caplog.text
    received, _ = pair(kind=GuardFilter, on_received="refuse", **both)
    changes = {name: 0.01 * torch.randn_like(tensor) for name, tensor in wrong.items()}
    difference = shareable(changes, DataKind.WEIGHT_DIFF)
    assert received.process(difference, context()) is difference  # no model to try on examples
    with pytest.raises(BadInput, match="agreed"):
        GuardFilter(agreed="nowhere:Net")


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_own_examples_that_an_update_tells_are_warned_of_or_blocked(kind, caplog):
    caplog.set_level(logging.INFO, logger="fedaudit.nvflare")
    settings: dict[str, Any] = {
        "attacks": [],
        "held_out": "tests.adapters.nvflare_cases:others",
        "share": None,
        "every": 2,
    }
    for on_fail in ("warn", "refuse"):
        caplog.clear()
        received, leaving = pair(kind=GuardFilter, on_fail=on_fail, **settings)
        for index in range(2):
            before, after = trained(4)
            sent = after if kind == DataKind.WEIGHTS else {name: after[name] - before[name] for name in after}
            received.process(shareable(before, index=index), context())
            goes, state = shareable(sent, kind, index), torch.get_rng_state()
            bits = pickle.dumps(goes)
            if on_fail == "warn":
                assert leaving.process(goes, context()) is goes
            else:
                with pytest.raises(ContentBlockedException):
                    leaving.process(goes, context())
            assert pickle.dumps(goes) == bits
            assert torch.get_rng_state().equal(state)
            assert (
                f"site-1, round {index}: which examples were trained on can be told: projection-residual has AUC"
                in caplog.text
            )
    with pytest.raises(BadInput, match="give held_out="):
        GuardFilter(attacks=["loss-series"])


def test_what_the_guard_doesn_t_audit_leaves_or_not_as_the_site_says(caplog):
    caplog.set_level(logging.INFO, logger="fedaudit.nvflare")
    received, leaving = pair(kind=GuardFilter, share=None, out=None, largest=3)
    before, after = trained(4)
    received.process(shareable(before), context())
    goes = shareable(after)
    assert leaving.process(goes, context()) is goes
    assert "not audited, and leaves: the update is over 4 examples, and largest is 3" in caplog.text
    received, closed = pair(kind=GuardFilter, share=None, out=None, largest=3, on_fail="refuse")
    trained(4)
    received.process(shareable(before), context())
    with pytest.raises(ContentBlockedException):  # who refuses lets nothing leave that wasn't looked into
        closed.process(goes, context())
    received, unmeasured = pair(kind=GuardFilter, share=None, out=None, on_fail="refuse", attacks=["labels"])
    start, end = trained(1)
    received.process(shareable(start), context())
    with pytest.raises(ContentBlockedException):
        unmeasured.process(shareable(end), context())
    assert "fail_on can't be exceeded by what ran" in caplog.text
    received, leaving = pair(kind=GuardFilter, share=None, out=None, largest=3)
    trained(4)
    received.process(shareable(before), context())
    assert leaving.process(goes, context()) is goes
    received.process(shareable(before), context())
    assert leaving.process(goes, context()) is goes  # the training that was watched is another round's
    assert "not audited, and leaves: no training was seen" in caplog.text
    _, second = pair(kind=GuardFilter, share=None, out=None, unaudited="refuse", every=2)
    for index in range(4):  # whatever the server calls the round
        if index % 2:
            assert second.process(goes, context()) is goes
        else:
            with pytest.raises(ContentBlockedException):
                second.process(goes, context())
    _, strict = pair(kind=GuardFilter, share=None, out=None, unaudited="refuse", attacks=["r-gap"])
    trained(1)
    with pytest.raises(ContentBlockedException):
        strict.process(shareable(after), context())
    assert "none of the attacks" in caplog.text
    _, strict = pair(
        kind=GuardFilter, share=None, out=None, unaudited="refuse", attacks=[{"name": "invg", "iterations": 1}]
    )
    trained(1)
    with pytest.raises(ContentBlockedException):  # what leaves isn't what was watched
        strict.process(shareable({name: tensor + 1 for name, tensor in after.items()}), context())
    assert "training that was watched" in caplog.text
    wrong_words: list[dict[str, Any]] = [{"attacks": ["invgg"]}, {"fail_on": "revealed"}, {"fail_above": {"x": 1}}]
    wrong_words += [{"on_received": "stop"}, {"on_fail": "stop"}, {"unaudited": "no"}, {"every": 0}, {"largest": 0}]
    for wrong in wrong_words:
        with pytest.raises(BadInput):
            GuardFilter(**wrong)


def as_failure(made: Shareable) -> Shareable:
    made.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    return made


def test_what_leaves_under_another_name_is_held_to_the_policy(caplog):
    """Weights of a failed task are read by whoever receives them; so are weights that are called metrics."""
    settings: dict[str, Any] = {"attacks": [{"name": "invg", "iterations": 150}], "on_fail": "refuse", "share": None}
    received, leaving = pair(kind=GuardFilter, **settings)
    before, after = trained(1)
    received.process(shareable(before), context())
    with pytest.raises(ContentBlockedException, match="let this update leave"):
        leaving.process(as_failure(shareable(after)), context())
    assert rounds_of()[-1].alarms == ["invg"]  # it was attacked
    histogram = {"a": {"histogram": [float(n) for n in range(101)]}}
    weights = {name: value.numpy() for name, value in after.items()}
    for kind, data in (
        (DataKind.METRICS, weights),
        (DataKind.STATISTICS, histogram),
        (DataKind.PSI, {"items": b"x" * 1000}),
        (DataKind.APP_DEFINED, {"a": 1}),
    ):
        with pytest.raises(ContentBlockedException):
            leaving.process(shareable(data, kind), context())
        assert rounds_of()[-1].done == "refused"
        assert rounds_of()[-1].checks["result"].text == f"{kind.value}: no weights in plain sight"
    lines = len(rounds_of())
    metrics = shareable({"accuracy": np.float64(0.5), "by_class": [0.5] * 90}, DataKind.METRICS)
    bare = Shareable()  # what a task of control answers
    for passes in (metrics, as_failure(Shareable()), as_failure(shareable({"accuracy": 0.5}, DataKind.METRICS)), bare):
        assert leaving.process(passes, context()) is passes
    assert len(rounds_of()) == lines
    headed = as_failure(Shareable())
    headed.set_header("weights", weights)
    with pytest.raises(ContentBlockedException):
        leaving.process(headed, context())
    _, open_ = pair(kind=GuardFilter)
    goes = shareable(histogram, DataKind.STATISTICS)
    assert open_.process(goes, context()) is goes
    assert "not audited, and leaves: STATISTICS: no weights in plain sight" in caplog.text


def test_a_budget_stops_what_no_filter_adds_noise_to():
    """NVFlare's filters of weights pass over failures and other kinds, whatever the site says of its updates."""
    noise = {"name": "dp", "clip": 1.0, "noise": 8.0, "epsilon": None}
    received, leaving = pair(
        kind=GuardFilter, attacks=["labels"], unaudited="pass", sanitised=noise, target_epsilon=100.0
    )
    before, after = trained(1)
    for goes, done in (
        (shareable(after), "left"),
        (as_failure(shareable(after)), "stopped"),
        (shareable(after, DataKind.METRICS), "stopped"),
        (shareable({"a": DXO(DataKind.METRICS, dict(after))}, DataKind.COLLECTION), "stopped"),
    ):
        received.process(shareable(before), context())
        with contextlib.suppress(ContentBlockedException):
            leaving.process(goes, context())
        assert rounds_of()[-1].done == done


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_clipping_scales_the_change_of_what_raised_an_alarm(kind):
    bound = 1e-3
    received, leaving = pair(
        kind=GuardFilter, attacks=["labels"], fail_above={"label_accuracy": 0.01}, on_fail="clip", clip_norm=bound
    )
    before, after = trained(4)
    sent = {name: (after[name] if kind == DataKind.WEIGHTS else after[name] - before[name]).numpy() for name in after}
    received.process(shareable(before), context())
    goes = shareable(sent, kind)
    bits = pickle.dumps(goes)
    left = from_shareable(leaving.process(goes, context())).data
    assert pickle.dumps(goes) == bits  # what the training made stays as it is
    assert [type(value) for value in left.values()] == [type(value) for value in sent.values()]
    begin = {name: before[name].numpy() if kind == DataKind.WEIGHTS else 0.0 for name in left}
    change = torch.cat([torch.as_tensor(left[name] - begin[name]).flatten() for name in left])
    was = torch.cat([(after[name] - before[name]).flatten() for name in left])
    assert change.norm() == pytest.approx(bound, rel=1e-2)
    assert torch.cosine_similarity(change, was, dim=0) > 0.999
    (line,) = rounds_of()
    assert (line.done, line.alarms) == ("clipped", ["labels"])
    assert line.norm == pytest.approx(float(was.norm()), rel=1e-5)


def test_a_budget_outlasts_the_process_and_stops_before_the_round_that_would_exceed_it(caplog):
    noise = {"name": "dp", "clip": 1.0, "noise": 5.0, "epsilon": None}
    account = site_account([("dp", {key: value for key, value in noise.items() if key != "name"})], 1, None)
    assert account is not None
    before, after = trained(1)
    for index in range(4):  # each with filters of its own, as a process has that begins anew
        received, leaving = pair(
            kind=GuardFilter, attacks=["labels"], unaudited="pass", sanitised=noise, target_epsilon=account.spent(2)
        )
        received.process(shareable(before, index=index), context())
        if index < 2:
            leaving.process(shareable(after, index=index), context())
        else:
            with pytest.raises(ContentBlockedException, match="privacy budget"):
                leaving.process(shareable(after, index=index), context())
    assert [one.done for one in rounds_of()] == ["left", "left", "stopped", "stopped"]
    assert [one.epsilon for one in rounds_of()] == [account.spent(1), account.spent(2), None, None]


NOISE = {"path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy", "args": {"fraction": 0.2}}


def configured(folder: Path, scope: list[dict[str, Any]], filters: list[dict[str, Any]], job: str) -> FLContext:
    """Return the context of a site whose privacy.json and whose job have these filters of results."""
    for part in ("startup", "local"):
        (folder / part).mkdir(parents=True)
    workspace = Workspace(str(folder), site_name="site-1")
    policy = Path(workspace.get_site_config_dir()) / "privacy.json"
    policy.parent.mkdir(parents=True, exist_ok=True)
    scopes = [{"name": "a", "task_result_filters": scope}, {"name": "b", "task_result_filters": []}]
    policy.write_text(json.dumps({"scopes": scopes, "default_scope": "a"}))
    config = Path(workspace.get_app_config_dir(job)) / "config_fed_client.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"task_result_filters": [{"tasks": ["train"], "filters": filters}]}))

    class Engine:
        def get_workspace(self) -> Workspace:
            return workspace

    class Scope:
        name = "a"

    here = context(job=job)
    here.set_prop(ReservedKey.ENGINE, Engine(), private=True, sticky=False)
    here.set_prop(FLContextKey.SCOPE_OBJECT, Scope())
    return here


def test_filters_around_the_guard_are_read_of_the_site_and_of_the_job(tmp_path):
    guard = {"path": "fedaudit.adapters.nvflare.GuardFilter", "args": {}}
    largest = {"path": "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy", "args": {}}
    here = configured(tmp_path, [largest, guard], [NOISE], "job-1")
    before, after = of_site.filters_around(here, "GuardFilter")
    assert [kind for kind, _ in before] == ["PercentilePrivacy"]
    assert after == [("SVTPrivacy", {"fraction": 0.2})]
    assert of_site.filters_around(context(), "GuardFilter") == ([], [])


@pytest.mark.parametrize("kind", [GuardFilter, RecorderFilter])
@pytest.mark.parametrize("by", ["the site", "the job"])
def test_whole_weights_of_which_a_filter_leaves_nothing_are_told_once_a_job(tmp_path, caplog, kind, by):
    filters: tuple[Any, Any] = ([NOISE], []) if by == "the site" else ([], [NOISE])
    words = () if kind is GuardFilter else (str(tmp_path / "recordings"),)
    before, after = trained(1)
    moved = {name: after[name] - before[name] for name in after}
    told = []
    for job, sent, form in (("a", after, DataKind.WEIGHTS), ("b", moved, DataKind.WEIGHT_DIFF)):
        here = configured(tmp_path / job, *filters, job)
        received, leaving = pair(*words, kind=kind)
        for index in range(2):
            received.process(shareable(before, index=index), here)
            leaving.process(shareable(sent, form, index=index), here)
        told += [line for line in caplog.messages if "TransferType.DIFF" in line]
        caplog.clear()
    (line,) = told
    assert line.startswith("fedaudit: a: SVTPrivacy clips each number at 1e-05 a local step: of whole weights")
