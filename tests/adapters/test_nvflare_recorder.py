"""NVFlare's recorder filter on its own, and what sites validate on."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

pytestmark = pytest.mark.peers
pytest.importorskip("nvflare", reason="NVFlare isn't installed: pip install 'PATH_OF_THE_CLONE[nvflare]'")

from nvflare.apis.dxo import DXO, DataKind  # noqa: E402
from nvflare.apis.fl_constant import ReturnCode  # noqa: E402
from nvflare.apis.shareable import Shareable, make_reply  # noqa: E402

import fedaudit.adapters.nvflare.site as of_site  # noqa: E402
from fedaudit.adapters.nvflare import GuardFilter  # noqa: E402
from fedaudit.capture.capture import current_mode  # noqa: E402
from tests.adapters.nvflare_cases import NETWORK, STATE, context, others, pair, rounds_of, shareable, trained  # noqa: E402


def rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("round-*.json"))]


def test_weights_and_differences_are_recorded_and_nothing_is_changed(tmp_path):
    received, leaving = pair(str(tmp_path))
    arrays = {name: tensor.numpy() for name, tensor in STATE.items()}
    for index, kind in enumerate((DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)):
        came, goes = shareable(arrays, index=index), shareable({"weight": np.full((2, 3), 7.0, np.float32)}, kind, None)
        before = pickle.dumps(came), pickle.dumps(goes)
        assert received.process(came, context()) is came
        assert leaving.process(goes, context()) is goes
        assert (pickle.dumps(came), pickle.dumps(goes)) == before
    folder = tmp_path / "job-1" / "site-1"
    first, second = rounds(folder)
    assert [r["index"] for r in (first, second)] == [0, 1]
    assert [r["messages"][0]["form"] for r in (first, second)] == ["weights", "difference"]
    assert load_file(folder / second["messages"][0]["file"])["weight"].equal(torch.full((2, 3), 7.0))
    sent = load_file(folder / second["weights"])
    assert all(sent[name].equal(tensor) for name, tensor in STATE.items())


def test_sites_and_runs_have_recordings_of_their_own_and_every_skips(tmp_path):
    received, leaving = pair(str(tmp_path), every=2)
    for index in (0, 1, 2, 0):  # at last the job is run again
        for site in ("site-1", "site-2"):
            if index == 0:
                from fedaudit.adapters.nvflare import recorder

                recorder._recorders.clear()  # a process of its own
            received.process(shareable(STATE, index=index), context(site))
            leaving.process(shareable(STATE, index=index), context(site))
    found = {path.name: [r["index"] for r in rounds(path)] for path in (tmp_path / "job-1").iterdir()}
    assert found == {"site-1": [0, 2], "site-2": [0, 2], "site-1-2": [0], "site-2-2": [0]}


def test_the_recorder_fails_open_and_says_it_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    received, leaving = pair(str(tmp_path / "file"))
    other = pair(str(tmp_path / "fine"))
    with caplog.at_level(logging.WARNING, logger="fedaudit.nvflare"):
        for index in range(2):
            for came, goes in ((received, leaving), other):
                goes_out = shareable({"weight": b"encrypted"}, index=index) if came is other[0] else shareable(STATE)
                came.process(shareable(STATE, index=index), context())
                assert goes.process(goes_out, context()) is goes_out
    assert len(caplog.records) == 2
    assert "'weight' is bytes, no array" in caplog.text
    failed, odd = make_reply(ReturnCode.EXECUTION_EXCEPTION), Shareable()
    several = DXO(DataKind.COLLECTION, {"a": DXO(DataKind.WEIGHTS, STATE)}).to_shareable()
    for thing in (failed, odd, several, shareable({"a": 1.0}, DataKind.METRICS)):
        assert leaving.process(thing, context()) is thing
    with caplog.at_level(logging.WARNING, logger="fedaudit.nvflare"):
        other[1].process(shareable(STATE), context("site-9"))
    assert "add the filter to the task data, too" in caplog.text
    assert not list((tmp_path / "fine").rglob("round-*.json"))


def test_what_a_site_validates_on_is_held_out_for_the_guard_and_recorded_too(tmp_path):
    received, leaving = pair(kind=GuardFilter, attacks=[], share=None)
    came, left = pair(str(tmp_path / "recording"))
    for index in range(3):
        before = dict(NETWORK.state_dict())
        for one in (received, came):
            one.process(shareable(before, index=index), context())
        _, after = trained(4)
        with torch.no_grad():
            nn.functional.cross_entropy(NETWORK(others()[0]), others()[1])
        for one in (leaving, left):
            one.process(shareable(after, index=index), context())
    assert [one.checks["members"].outcome for one in rounds_of()] == 3 * ["alarm"]
    assert (tmp_path / "recording" / "job-1" / "site-1" / "truth" / "candidates.safetensors").is_file()


def test_validation_between_trainings_is_kept_once_and_the_guards_attacks_are_none(tmp_path):
    inputs, targets = torch.rand(30, 1, 8, 8), torch.arange(30) % 10
    path = tmp_path / "job-1" / "site-1" / "truth" / "candidates.safetensors"
    received, leaving = pair(str(tmp_path))
    for index in range(3):
        received.process(shareable(dict(NETWORK.state_dict()), index=index), context())
        _, after = trained(4)
        if index == 1:
            with of_site.no_validation(), torch.no_grad():  # as the guard attacks
                nn.functional.cross_entropy(NETWORK(torch.rand(2, 1, 8, 8)), targets[:2])
            with torch.no_grad():
                nn.functional.cross_entropy(NETWORK(inputs), targets)
        leaving.process(shareable(after, index=index), context())
        assert path.exists() == (index > 0)
    assert load_file(path)["seen/candidates/inputs"].equal(inputs)
    assert load_file(path)["seen/candidates/targets"].equal(targets)
    assert current_mode() is None


SITES = [("job-1", "site-1"), ("job-1", "site-2"), ("job-2", "site-1")]


def held_out(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(number)), torch.arange(20) % 10


def validate(number: int) -> None:
    inputs, targets = held_out(number)
    with torch.no_grad():
        nn.functional.cross_entropy(NETWORK(inputs), targets)


@pytest.mark.parametrize("first", [False, True])
def test_each_of_several_sites_and_jobs_in_one_process_has_what_it_validates_on(tmp_path, first):
    """They take turns, as in the simulator; they validate what they trained, or first of all what came in."""
    chains = [pair(str(tmp_path)) for _ in SITES]
    for index in range(3):
        for number, ((job, site), (received, leaving)) in enumerate(zip(SITES, chains, strict=True)):
            received.process(shareable(dict(NETWORK.state_dict()), index=index), context(site, job))
            if first:
                validate(number)
            _, after = trained(4)
            if not first:
                validate(number)
            leaving.process(shareable(after, index=index), context(site, job))
    for number, (job, site) in enumerate(SITES):
        kept = load_file(tmp_path / job / site / "truth" / "candidates.safetensors")
        inputs, targets = held_out(number)
        assert kept["seen/candidates/inputs"].equal(inputs)
        assert kept["seen/candidates/targets"].equal(targets)
    assert not of_site._validated
    assert not of_site._evaluations
    assert current_mode() is None


def test_sites_that_train_in_threads_of_their_own_have_what_they_validate_on(tmp_path):
    """As scripts do that the Client API runs in process: the filters run in another thread."""
    chains = [pair(str(tmp_path)) for _ in SITES]
    with contextlib.ExitStack() as stack:
        scripts = [stack.enter_context(ThreadPoolExecutor(1)) for _ in SITES]
        for index in range(3):
            for number, ((job, site), (received, leaving)) in enumerate(zip(SITES, chains, strict=True)):
                received.process(shareable(dict(NETWORK.state_dict()), index=index), context(site, job))
                _, after = scripts[number].submit(trained, 4).result()
                scripts[number].submit(validate, number).result()
                leaving.process(shareable(after, index=index), context(site, job))
                validate(9)  # elsewhere
        for number, (job, site) in enumerate(SITES):
            kept = load_file(tmp_path / job / site / "truth" / "candidates.safetensors")
            assert kept["seen/candidates/inputs"].equal(held_out(number)[0])
        assert not of_site._validated
        assert not any(evaluation.passes for evaluation in of_site._evaluations.values())
        for script in scripts:
            script.submit(trained, 4).result()
            assert script.submit(current_mode).result() is None
    assert not of_site._evaluations


def of_site_alone(number: int) -> dict[str, torch.Tensor]:
    """Train a network as :func:`trained` does, on the example of that number, and return it."""
    network, (inputs, targets) = copy.deepcopy(NETWORK), held_out(number)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    with of_site.watch():
        nn.functional.cross_entropy(network(inputs[:1]), targets[number : number + 1]).backward()
        optimiser.step()
    return network.state_dict()


def test_sites_that_train_at_once_in_one_process_have_each_its_own_training(tmp_path):
    """Tasks come in, training is done and results leave in the threads of the sites, all at the same time."""
    guards = [
        pair(kind=GuardFilter, attacks=["exact-linear"], share=None, out=str(tmp_path / f"guard-{number}"))
        for number, _ in enumerate(SITES)
    ]
    recorders, before = [pair(str(tmp_path)) for _ in SITES], dict(NETWORK.state_dict())
    with contextlib.ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in SITES]

        def at_once(work: Callable[[int], Any]) -> list[Any]:
            return [done.result() for done in [thread.submit(work, i) for i, thread in enumerate(threads)]]

        for index in range(2):

            def come(number: int, index: int = index) -> None:
                for came, _ in (guards[number], recorders[number]):
                    came.process(shareable(before, index=index), context(*SITES[number][::-1]))

            at_once(come)
            after = at_once(of_site_alone)

            def leave(number: int, index: int = index, after: list[Any] = after) -> None:
                for _, leaving in (guards[number], recorders[number]):
                    leaving.process(shareable(after[number], index=index), context(*SITES[number][::-1]))

            at_once(leave)
        elsewhere = stack.enter_context(ThreadPoolExecutor(1))
        at_once(come)
        elsewhere.submit(of_site_alone, 7).result()  # nobody knows whose training that is
        at_once(leave)
    for number, (job, site) in enumerate(SITES):
        kept = [load_file(file) for file in sorted((tmp_path / job / site / "truth").glob("round-*.safetensors"))]
        assert [next(t for name, t in k.items() if name.endswith("inputs")).tolist() for k in kept] == [
            held_out(number)[0][:1].tolist()
        ] * 2
        found = [one.checks["exact-linear"].outcome for one in rounds_of(str(tmp_path / f"guard-{number}"))]
        assert found[:2] == ["alarm", "alarm"]
        assert found[2:] != ["alarm"]
