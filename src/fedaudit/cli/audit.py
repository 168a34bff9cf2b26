"""The commands that audit: ``fedaudit audit``, ``simulate`` and ``attack``. Heavy imports happen inside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedaudit.cli import options
from fedaudit.utils.errors import OWN_MODEL, BadInput, NotApplicable, unknown_name

if TYPE_CHECKING:
    from fedaudit.pipeline.run import Audit


def audit(
    scenario: options.Scenario = None,
    settings: options.Settings = None,
    seed: options.Seed = None,
    data_dir: options.DataDir = None,
    out: Annotated[
        Path,
        typer.Option(
            parser=options.folder, metavar="FOLDER", help="Folder for report.html, results.json and scenario.yaml."
        ),
    ] = Path("audit"),
    overwrite: options.Overwrite = False,
    workers: options.Workers = None,
    fail_above: options.FailAbove = None,
    fail_on: options.FailOn = None,
    fail_below: options.FailBelow = None,
    policy: options.Policy = None,
    no_controls: options.NoControls = False,
    compare_defences: Annotated[
        bool, typer.Option("--compare-defences", help="Repeat the audit under three suitable defences, and compare.")
    ] = False,
    write: options.Write = None,
    flower: options.App = None,
    nvflare: options.NVFlareJob = None,
    nodes: options.Nodes = None,
    run_config: options.RunConfig = None,
    attacks: options.AppAttacks = None,
    rounds: options.Rounds = None,
    records: options.Records = None,
    words: options.Words = None,
    clients: options.Clients = None,
    keep_rounds: options.KeepRounds = None,
    keep_clients: options.KeepClients = None,
    max_minutes: options.MaxMinutes = None,
    model: options.AppModel = None,
    loss: options.OwnLoss = None,
    mean: options.Mean = None,
    std: options.Std = None,
) -> None:
    """Simulate a federation, or run a Flower app or NVFlare job; attack what the adversary sees, and write a report."""
    formats = options.formats_of(write)
    if model is not None and flower is None:
        raise BadInput(f"--model is a file that describes a Flower app's model (--flower APP); {OWN_MODEL}")
    of_flower = {
        "--run-config": run_config,
        "--keep-rounds": keep_rounds,
        "--keep-clients": keep_clients,
        "--model": model,
    }
    options.check_alone(
        flower or nvflare,
        {"SCENARIO": scenario, "--compare-defences": compare_defences}
        | ({} if nvflare is None else {"--flower": flower, **of_flower}),
        {
            "--nodes": nodes,
            "--attack": attacks,
            "--rounds": rounds,
            "--records": records,
            "--words": words,
            "--clients": clients,
            "--max-minutes": max_minutes,
            **of_flower,
            "--loss": loss,
            "--mean": mean,
            "--std": std,
        },
        "--flower" if nvflare is None else "--nvflare",
    )
    app = flower or nvflare
    if app is not None:
        task, limits = options.task_of(mean, std), options.limits_of(fail_above, fail_on, policy, fail_below)
        audited: Any
        if nvflare is None:
            from fedaudit.adapters import flower as adapter

            audited = partial(
                adapter.audit_flower,
                nodes=nodes,
                config=adapter.parse_config(run_config or []),
                keep_rounds="all" if keep_rounds == "all" else options.rounds_of(keep_rounds, "--keep-rounds"),
                keep_clients=keep_clients,
                model=model,
            )
        else:
            from fedaudit.adapters.nvflare import audit_nvflare

            audited = partial(audit_nvflare, sites=nodes)
        finished = audited(
            app,
            attacked=options.rounds_of(rounds) or "last",
            records=records,
            words=words,
            clients=clients,
            max_minutes=options.minutes_of(max_minutes),
            **_asked(attacks or [], {}, settings or []),
            loss=None if loss is None else options.loss_of(loss),
            **task,
            seed=seed or 0,
            out=out,
            workers=options.number_of_workers(workers),
            **limits,
            controls=not no_controls,
            overwrite=overwrite,
        )
        _conclude(finished, out, formats)
        return
    loaded = options.scenario_of(scenario, [*(settings or []), *["evaluation.controls=false"] * no_controls], seed)
    from fedaudit import api

    limits = options.limits_of(fail_above, fail_on, policy, fail_below)
    options.check_data_dir(data_dir)
    processes = options.number_of_workers(workers)
    chosen: dict[str, Any] = {**limits, "compare_defences": compare_defences, "overwrite": overwrite}
    finished = api.audit(loaded, data_dir=data_dir, out=out, workers=processes, **chosen)
    _conclude(finished, out, formats, scenario=_from_here(scenario))


def simulate(
    scenario: options.Scenario = None,
    out: Annotated[
        Path,
        typer.Option(
            parser=options.folder,
            metavar="FOLDER",
            help="New folder for the transcript; of several federations, one folder each.",
        ),
    ] = Path("transcript"),
    federation: Annotated[str | None, typer.Option(help="Simulate only this federation; default: all.")] = None,
    settings: options.Settings = None,
    seed: options.Seed = None,
    data_dir: options.DataDir = None,
    workers: options.Workers = None,
) -> None:
    """Simulate federations and write transcripts; the ground truth goes to a separate file."""
    loaded = options.scenario_of(scenario, settings, seed)
    from fedaudit import api
    from fedaudit.pipeline.transcripts import simulate_all
    from fedaudit.transcript.truth import FILE
    from fedaudit.utils.progress import live_display

    options.check_data_dir(data_dir)
    processes = options.number_of_workers(workers)
    if federation is not None or len(loaded.runs()) == 1:
        found = {out: api.simulate(loaded, federation=federation, data_dir=data_dir, out=out, workers=processes)}
    else:
        with live_display() as display:
            recordings = simulate_all(loaded, out, data_dir=data_dir, workers=processes, display=display)
        found = {out / recording.transcript.name: recording for recording in recordings}
    for where, recording in found.items():
        made = recording.transcript
        print(f"{made.sent.extent(made.rounds)}: {where}")
        print(f"ground truth, for the evaluation only: {where / FILE}")


def attack(
    transcript: Annotated[Path, typer.Argument(help="Folder written by 'fedaudit simulate' or a fedaudit.Recorder.")],
    attacks: Annotated[
        list[str] | None, typer.Option("--attack", help="Attack to run; repeatable; default: all that fit.")
    ] = None,
    model: options.OwnModel = None,
    checkpoint: options.OwnCheckpoint = None,
    loss: options.OwnLoss = None,
    mean: options.Mean = None,
    std: options.Std = None,
    input_shape: options.InputShape = None,
    batch_norm: options.BatchNorm = None,
    task_file: options.Task = None,
    rounds: options.Rounds = None,
    records: options.Records = None,
    words: options.Words = None,
    clients: options.Clients = None,
    max_minutes: options.MaxMinutes = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="attacks.NAME.key=value or threat.key=value, as in a scenario; or key=value for every attack named "
            "here that has it; repeatable.",
        ),
    ] = None,
    adversary: Annotated[
        str, typer.Option(help="Who attacks: server, malicious-server, eavesdropper, client or aggregating-client.")
    ] = "server",
    knows_labels: Annotated[
        bool, typer.Option(help="The adversary knows the labels, if the transcript has them.")
    ] = False,
    knows_training: Annotated[bool, typer.Option(help="The adversary knows how clients train.")] = True,
    knows_public_data: Annotated[bool, typer.Option(help="The adversary has public data like the clients'.")] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the attacks; default: the simulation's.", min=0, max=2**63 - 1)
    ] = None,
    out: Annotated[
        Path,
        typer.Option(parser=options.folder, metavar="FOLDER", help="Folder for the report and what was recovered."),
    ] = Path("audit"),
    overwrite: options.Overwrite = False,
    workers: options.Workers = None,
    device: Annotated[str, typer.Option(help="Run attacks on cpu or cuda.")] = "cpu",
    truth: Annotated[
        Path | None, typer.Option(help="File with the ground truth; default: the transcript's own, if there is one.")
    ] = None,
    fail_above: options.FailAbove = None,
    fail_on: options.FailOn = None,
    fail_below: options.FailBelow = None,
    policy: options.Policy = None,
    no_controls: options.NoControls = False,
    write: options.Write = None,
) -> None:
    """Attack a transcript on disk; with the ground truth, measure what was recovered."""
    formats = options.formats_of(write)
    task = options.task_of(mean, std, input_shape, batch_norm, task_file)
    own = options.own_parts(model, checkpoint, loss, task, rounds)
    from fedaudit.evaluation import Limits
    from fedaudit.pipeline import offline
    from fedaudit.pipeline.transcripts import check_single
    from fedaudit.transcript.truth import truth_beside

    limits = options.limits_of(fail_above, fail_on, policy, fail_below)
    check_single(transcript)
    threat = {
        "adversary": adversary,
        "knows_labels": knows_labels,
        "knows_training": knows_training,
        "knows_public_data": knows_public_data,
    }
    request = offline.AttackRequest(
        transcript=transcript,
        **own,
        **_asked(attacks or [], threat, settings or []),
        records=records,
        words=words,
        clients=clients,
        max_minutes=options.minutes_of(max_minutes),
        seed=seed,
        device=device,
        truth=truth,
        out=out,
        workers=options.number_of_workers(workers),
        overwrite=overwrite,
    )
    if not any(limits.values()) and truth is None and truth_beside(transcript) is None:
        found = offline.attacked(request)
        refused = [(t.attack.name, str(t.outcome)) for t in found.trials if isinstance(t.outcome, NotApplicable)]
        for name, reason in dict.fromkeys(refused):
            print(f"{name} could not be run: {reason}")
        unwritten = ", so nothing is written for --write" if formats else ""
        what = "no attack could be run, see" if len(refused) == len(found) else "what was recovered is listed in"
        print(f"not evaluated: no ground truth{unwritten}; {what} {out / 'findings.json'}")
        return
    finished = offline.audited(request, Limits(**limits), controls=not no_controls)
    _conclude(finished, out, formats)


def _from_here(scenario: Path | None) -> str:
    """Return the scenario's path as code scanning wants it: from the working directory, which CI makes the sources'."""
    if scenario is None or not scenario.resolve().is_relative_to(Path.cwd()):
        return "scenario.yaml"
    return scenario.resolve().relative_to(Path.cwd()).as_posix()


def _asked(attacks: Sequence[str], threat: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return attacks (None: those that fit) and threat as ``--set`` changes them; an attack's own settings win."""
    from fedaudit.scenario.yaml import apply_override, parse_setting

    asked: dict[str, Any] = {"attacks": [{"name": name} for name in attacks], "threat": threat}
    dotted = [text for text in settings if parse_setting(text)[0].split(".")[0] in asked]
    short = [long for text in settings if text not in dotted for long in _for_attacks(text, attacks)]
    for text in [*short, *dotted]:
        changed = apply_override(asked, text)
        listed = isinstance(changed["attacks"], list)  # a text, too, is a sequence
        if not listed or not isinstance(changed["threat"], dict) or _names(changed) != _names(asked):
            raise BadInput(
                f"--set {text}: give attacks.NAME.key=value or threat.key=value; --attack says which attacks"
            )
        asked = changed
    return {**asked, "attacks": asked["attacks"] or None}


def _names(asked: dict[str, Any]) -> list[Any]:
    return [one.get("name") if isinstance(one, dict) else None for one in asked["attacks"]]


def _for_attacks(text: str, names: Sequence[str]) -> list[str]:
    """Return ``key=value`` as it is written in a scenario, once for every attack of ``names`` that has it."""
    from fedaudit.pipeline.catalogue import settings_of_attack
    from fedaudit.scenario.yaml import parse_setting

    key = parse_setting(text)[0]
    takes = "here --set takes attacks.NAME.key=value, threat.key=value, or a setting of an attack named here"
    if key in ("seed", "device"):
        raise BadInput(f"--set {text}: give --{key}; {takes}")
    if key.split(".")[0] in ("data", "model", "federations", "defences", "evaluation"):
        raise BadInput(f"--set {text}: the transcript fixes that; set it in 'fedaudit simulate'; {takes}")
    known = {name: settings_of_attack(name) for name in names}
    having = [name for name, settings in known.items() if key.split(".")[0] in settings]
    if not having:
        every = list(dict.fromkeys(setting for settings in known.values() for setting in settings))
        raise BadInput(f"--set {text}: {unknown_name('setting', key, every)}; {takes}")
    return [f"attacks.{name}.{text}" for name in having]


def _conclude(finished: Audit, out: Path, formats: Sequence[str], *, scenario: str = "scenario.yaml") -> None:
    """Write what is wanted beside the report, say what came of the audit, and end with its exit code."""
    from fedaudit.report.terminal import deployed_step, next_step, print_summary
    from fedaudit.report.write import write_outputs

    write_outputs(finished.result, out, formats, scenario=scenario)
    report = out / "report.html"
    print_summary(finished.result)
    if deployed := deployed_step(finished.result, report):
        print(deployed)
    print(f"report: {report}")
    print(next_step(finished.result, report))
    if code := options.exit_code(finished.result):
        raise typer.Exit(code)
