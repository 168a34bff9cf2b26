"""The same federation on Flower's simulation engine (Ray), for comparison; one worker with one thread."""

from __future__ import annotations

import copy
import logging
import os
import time
from typing import Any

import torch

from fedaudit.models import set_training_mode
from fedaudit.simulation import Federation, train
from fedaudit_lab.bench import import_peer


def import_flower() -> dict[str, Any]:
    """Import Flower's parts, by their names; BadInput where it isn't installed."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    names = ["flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation", "ray"]
    parts = dict(zip(names, import_peer("flower", *names), strict=True))
    logging.getLogger("flwr").setLevel(logging.ERROR)
    return parts


def time_flower(federation: Federation) -> tuple[float, float]:
    """Return the seconds of a FedAvg federation's rounds of ``local_steps``, and those of starting up.

    The pace is taken from the second round on: Flower's workers start during the first.
    """
    flwr = import_flower()
    app, strategies = flwr["flwr.app"], flwr["flwr.serverapp.strategy"]
    spec, client_data = federation.spec, federation.client_data
    ends: list[float] = []
    client, server = flwr["flwr.clientapp"].ClientApp(), flwr["flwr.serverapp"].ServerApp()

    @client.train()  # type: ignore[untyped-decorator]
    def work(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        model = copy.deepcopy(federation.model)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        set_training_mode(model, federation.task_info.batch_norm)
        data = client_data[int(context.node_config["partition-id"])]
        rows = torch.randperm(len(data)).split(spec.batch_size)
        steps = [rows[i % len(rows)] for i in range(spec.local_steps or 1)]
        batches = [(federation.task_info.normalise(data.inputs[r]), data.targets[r]) for r in steps]
        train(model, federation.loss, batches, learning_rate=spec.learning_rate, momentum=spec.momentum)
        metrics = app.MetricRecord({"num-examples": sum(len(r) for r in steps)})
        content = app.RecordDict({"arrays": app.ArrayRecord(model.state_dict()), "metrics": metrics})
        return app.Message(content=content, reply_to=message)

    class Timed(strategies.FedAvg):  # type: ignore[misc, name-defined]
        def aggregate_train(self, *arguments: Any) -> Any:
            result = super().aggregate_train(*arguments)
            ends.append(time.perf_counter())
            return result

    @server.main()  # type: ignore[untyped-decorator]
    def lead(grid: Any, context: Any) -> None:  # noqa: ARG001 (Flower's signature)
        strategy = Timed(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=spec.clients, min_available_nodes=spec.clients
        )
        initial = app.ArrayRecord(federation.model.state_dict())
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=spec.rounds)

    started = time.perf_counter()
    flwr["flwr.simulation"].run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=spec.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 1, "log_to_driver": False, "include_dashboard": False},
        },
    )
    pace = (ends[-1] - ends[0]) / (len(ends) - 1)
    return pace * spec.rounds, ends[0] - started - pace
