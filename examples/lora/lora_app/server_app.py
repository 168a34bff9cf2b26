"""The server: sends the adapters round by round and averages what comes back."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict

from lora_app.task import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation."""
    initial = ArrayRecord(get_peft_model_state_dict(make_model()))
    FedAvg().start(grid=grid, initial_arrays=initial, num_rounds=context.run_config["num-server-rounds"])
