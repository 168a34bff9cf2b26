"""The client: trains and tests on its own data."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from monai_app.task import Net, load_data
from monai_app.task import test as test_fn
from monai_app.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model that the server sent."""
    net, run = Net(), context.run_config
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader, _ = load_data(context.node_config["partition-id"], run["batch-size"])
    loss = train_fn(net, loader, run["local-epochs"], run["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the model that the server sent."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = load_data(context.node_config["partition-id"], context.run_config["batch-size"])
    loss, dice = test_fn(net, loader)
    metrics = MetricRecord({"eval_loss": loss, "eval_dice": dice, "num-examples": len(loader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
