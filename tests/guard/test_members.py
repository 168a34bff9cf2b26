"""A guard watches in every round whether updates and models tell the site's own examples from held-out ones."""

from __future__ import annotations

import copy
import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, mannwhitneyu
from torch import Tensor, nn

from fedaudit.capture.capture import Capture
from fedaudit.guard import MemberWatch, SiteGuard
from fedaudit.guard.members import exact_test, level
from fedaudit.guard.rounds import SiteRound, read_site
from fedaudit.utils.errors import BadInput
from tests.guard.cases import outgoing, trained

WIDTH, CLASSES = 48, 4
PLENTY = 1e6  # share of a round: tests don't depend on the time that anything takes


def examples(many: int, seed: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(many, width, generator=source), torch.arange(many) % CLASSES


def network(seed: int = 0, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 40), nn.ReLU(), nn.Linear(40, CLASSES))


def released(guard: SiteGuard, state: dict[str, Tensor], seen: Capture) -> SiteRound:
    """Let an update over the site's examples pass the guard; return what was written down."""
    decision = guard.decide(("job", "s"), "site 1, round 1", 0, lambda: outgoing(state, seen))
    line = read_site(Path("fedaudit-guard")).rounds[-1]
    assert line.done == decision.done
    return line


def test_a_small_batch_on_a_wide_layer_is_told_and_the_policy_acts(caplog):
    caplog.set_level(logging.INFO, logger="fedaudit.guard")
    state, seen = trained(network(), *examples(8, 1))
    for on_fail, done in (("refuse", "it doesn't leave"), ("warn", "it leaves nevertheless")):
        guard = SiteGuard(attacks=[], on_fail=on_fail, held_out=examples(100, 2), share=PLENTY)
        caplog.clear()
        assert released(guard, state, seen).alarms == ["members"]
        assert (
            "site 1, round 1: which examples were trained on can be told: projection-residual has AUC 1.00 on 8 own"
            in caplog.text
        )
        assert done in caplog.text
    told = MemberWatch(examples(100, 2), PLENTY).look(state, seen).tests[0]
    assert (told.by, told.auc, told.members, told.others) == ("projection-residual", 1.0, 8, 8)
    assert told.p_value == pytest.approx(1 / math.comb(16, 8))


@pytest.mark.parametrize(("batch", "others"), [(2, 40), (3, 9)])
def test_of_few_examples_more_held_out_ones_are_taken_until_a_test_can_be_sure(batch, others):
    state, seen = trained(network(), *examples(batch, 1))
    (told,) = MemberWatch(examples(400, 2), PLENTY).look(state, seen).tests
    assert told.members == batch
    assert 1 / math.comb(told.members + told.others, batch) <= level(1)
    assert 1 / math.comb(told.others, batch) > level(1)  # and not more than that takes, but for one each
    assert told.alarm


def test_an_update_of_other_examples_tells_nothing(caplog):
    caplog.set_level(logging.INFO, logger="fedaudit.guard")
    state, _ = trained(network(), *examples(8, 3))
    _, seen = trained(network(), *examples(8, 1))
    guard = SiteGuard(attacks=[], on_fail="refuse", held_out=examples(100, 2), share=PLENTY)
    assert released(guard, state, seen).done == "left"
    assert "members: projection-residual has AUC 0." in caplog.text


def test_models_that_learn_the_site_s_examples_are_told_by_their_series():
    own, net = examples(96, 1), network()
    watch = MemberWatch(examples(200, 2), PLENTY)
    looks = []
    for _ in range(5):
        state, seen = trained(net, *own, steps=40, rate=0.3)
        looks.append(watch.look(state, seen))
    series = [told for look in looks for told in look.tests if told.by == "loss-series"]
    assert [t.level for t in series] == [level(i + 1) for i in range(4)]  # from the second round on
    assert series[-1].alarm
    assert series[-1].auc > 0.9
    assert all(look.unable is None for look in looks)


def test_slopes_are_those_of_a_fit_whatever_was_kept_in_between():
    net, held_out = network(), examples(60, 2)
    watch = MemberWatch(held_out, PLENTY)
    confidences: list[Any] = []
    for _ in range(4):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        start = copy.deepcopy(net)
        state, seen = trained(net, *examples(24, 1))
        again = MemberWatch(held_out, PLENTY)
        again.load_state_dict(watch.state_dict())
        watch = again
        look = watch.look(state, seen)
        kept = watch.state_dict()["followed"]
        records = torch.cat([kept["own_inputs"], kept["held_inputs"]])
        labels = torch.cat([kept["own_labels"], kept["held_labels"]])
        with torch.no_grad():
            logits = start(records).double()
        confidences.append(logits.softmax(1)[torch.arange(len(labels)), labels].numpy())
    assert kept["own_labels"].sort().values.equal(kept["held_labels"].sort().values)  # matched in class
    first = len(confidences[0]) // 2  # some are followed from the second round on
    pairs = len(labels) // 2
    assert first < pairs
    slopes = np.zeros(2 * pairs)
    for place in range(2 * pairs):
        own, index = divmod(place, pairs)
        late = index >= first
        series = [c[own * (first if r == 0 else pairs) + index] for r, c in enumerate(confidences) if r >= late]
        slopes[place] = np.polyfit(np.arange(len(series)), series, 1)[0]
    told = next(t for t in look.tests if t.by == "loss-series")
    wanted = mannwhitneyu(slopes[:pairs], slopes[pairs:], alternative="greater", method="exact")
    assert told.p_value == pytest.approx(wanted.pvalue)
    assert told.auc == pytest.approx(wanted.statistic / pairs**2)


def test_what_is_kept_doesn_t_grow_with_the_rounds():
    watch, sizes = MemberWatch(examples(400, 2), PLENTY), []
    for seed in range(6):
        state, seen = trained(network(), *examples(200, 10 + seed))
        watch.look(state, seen)
        kept = watch.state_dict()
        sizes.append(sum(t.numel() for t in [*kept["followed"].values(), kept["sums"]]))
    assert sizes[-1] == sizes[2] == 64 * (WIDTH + 1 + 5)


def test_the_test_is_exact_and_ties_never_help():
    source = np.random.default_rng(0)
    for many, more in ((8, 8), (5, 30), (20, 20)):
        one, two = source.normal(size=many) + 0.5, source.normal(size=more)
        wanted = mannwhitneyu(one, two, alternative="greater", method="exact").pvalue
        assert exact_test(torch.tensor(one), torch.tensor(two)) == pytest.approx(wanted)
    assert exact_test(torch.ones(8), torch.ones(8)) == 1.0
    assert exact_test(torch.ones(8), torch.zeros(8)) == pytest.approx(1 / math.comb(16, 8))


def test_levels_of_any_number_of_rounds_sum_to_one_percent():
    assert 2 * sum(map(level, range(1, 10_001))) == pytest.approx(0.01, rel=2e-4)
    assert 2 * sum(map(level, range(1, 10_001))) <= 0.01


def test_a_share_that_pays_for_no_records_is_said():
    watch = MemberWatch(examples(100, 2), 1e-9)
    first, second = [watch.look(*trained(network(), *examples(8, 1))) for _ in range(2)]
    assert first.tests[0].alarm  # the first round measures
    assert first.needs == 0
    assert not second.tests
    assert "raise share" in (second.unable or "")
    assert second.needs > 0


def test_of_more_examples_than_any_layer_has_room_for_span_isn_t_asked():
    look = MemberWatch(examples(100, 2), PLENTY).look(*trained(network(), *examples(400, 1)))
    assert not look.tests
    assert look.unable is None
    assert "a layer has room for 160 at most" in " ".join(look.notes)


def test_held_out_examples_that_are_trained_on_pass_for_none():
    own = examples(8, 1)
    with_them = tuple(torch.cat(parts) for parts in zip(own, examples(40, 2), strict=True))
    (told,) = MemberWatch(with_them, PLENTY).look(*trained(network(), *own)).tests  # type: ignore[arg-type]
    assert told.auc == 1.0
    alone = MemberWatch(own, PLENTY).look(*trained(network(), *own))
    assert "give more held_out" in (alone.unable or "")


def test_an_error_in_one_test_loses_nothing_of_the_other(monkeypatch):
    watch, net, own = MemberWatch(examples(200, 5), PLENTY), network(), examples(24, 4)
    for _ in range(3):
        look = watch.look(*trained(net, *own, steps=40, rate=0.3))
    monkeypatch.setattr("fedaudit.guard.members.ProjectionResidual", lambda: 1 / 0)
    broken = watch.look(*trained(net, *own, steps=40, rate=0.3))
    assert [told.by for told in broken.tests] == ["loss-series"]
    assert look.unable is None
    assert broken.unable == "ZeroDivisionError: division by zero"


def test_held_out_examples_of_another_source_are_no_alarm():
    inputs, labels = examples(32, 1)
    look = MemberWatch(examples(200, 2), PLENTY).look(*trained(network(), 3 * inputs, labels))
    assert not look.tests
    assert "differ without any model" in (look.unable or "")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"attacks": ["projection-residual"]},
            r"attacks has 'projection-residual', .* give held_out=\(inputs, classes\)",
        ),
        ({"attacks": ["labels", "loss-series"]}, r"attacks has 'loss-series', .* give held_out="),
        ({"held_out": (torch.zeros(3, 1), torch.zeros(2))}, "held_out must be two tensors of the same length"),
        ({"held_out": "nowhere:data"}, "held_out"),
        ({"attacks": ["labels", "labels"]}, "names the same attack twice"),
        ({"out": None, "target_epsilon": 1.0}, "counted in a file"),
        ({"out": None, "reports": True}, "reports are written there"),
        ({"target_epsilon": -1.0}, "target_epsilon is -1"),
        ({"clip_norm": 0.0}, "clip_norm is 0"),
        ({"delta": 1.0}, "delta is 1"),
        ({"sanitised": "dp"}, "sanitised is the defence"),
        ({"sanitised": {"name": "pd"}}, "sanitised has 'pd'"),
        ({"sanitised": {"name": "top-k"}, "target_epsilon": 1.0}, "adds no noise"),
        ({"share": 0.0}, "share is 0"),
        ({"share": float("nan")}, "share is nan"),
    ],
)
def test_wrong_settings_say_what_to_give(settings: dict[str, Any], says: str):
    with pytest.raises(BadInput, match=says):
        SiteGuard(**settings)


@pytest.mark.parametrize(
    ("held_out", "says"),
    [
        (examples(40, 2, width=WIDTH + 1), rf"shape \({WIDTH + 1},\), and the site trains on \({WIDTH},\)"),
        ((examples(40, 2)[0], torch.full((40,), 99)), "give more held_out"),
    ],
)
def test_held_out_examples_that_don_t_fit_are_told(held_out, says):
    guard = SiteGuard(attacks=[], held_out=held_out, share=PLENTY, on_fail="refuse")
    line = released(guard, *trained(network(), *examples(8, 1)))
    assert (line.done, line.checks["members"].outcome) == ("refused", "unable")
    assert re.search(says, line.checks["members"].text)


def null_run(seed: int, rounds: int) -> tuple[bool, list[float]]:
    """Watch a federation that never sees the site's examples; return whether there was an alarm, and first p-values."""
    held_out, own = examples(80, 4 * seed + 1, width=24), examples(8, 4 * seed, width=24)
    watch, net, alarm, first = MemberWatch(held_out, PLENTY), network(seed, width=24), False, []
    for index in range(rounds):
        seen = trained(copy.deepcopy(net), *own)[1]  # what is watched isn't what the update is made of
        state, _ = trained(net, *examples(8, 7919 * seed + index, width=24))
        look = watch.look(state, seen)
        assert look.unable is None
        alarm |= any(told.alarm for told in look.tests)
        first += [told.p_value for told in look.tests] if index == 0 else []
    return alarm, first


@pytest.mark.slow
def test_federations_that_tell_nothing_raise_alarms_in_one_of_a_hundred_at_most():
    runs = [null_run(seed, rounds=6) for seed in range(150)]
    alarms = sum(alarm for alarm, _ in runs)
    assert binom.sf(alarms - 1, 150, 0.01) > 0.001  # 7 alarms would be too many
    p_values = np.array([p for _, first in runs for p in first])
    for rate in (0.05, 0.2):  # the single test keeps its level, and uses it
        share = (p_values <= rate).sum()
        assert binom.cdf(share, len(p_values), rate) > 0.001
        assert binom.sf(share - 1, len(p_values), rate) > 0.001
