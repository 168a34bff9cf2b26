"""The server: sends the model round by round and averages what comes back."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from monai_app.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation."""
    initial = ArrayRecord(Net().state_dict())
    FedAvg().start(grid=grid, initial_arrays=initial, num_rounds=context.run_config["num-server-rounds"])
