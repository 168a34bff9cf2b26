"""The client: trains and tests on its own data."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import Loader, Net, load_data
from digits_app.task import test as test_fn
from digits_app.task import train as train_fn

app = ClientApp()


def data_of(msg: Message, context: Context) -> tuple[Loader, Loader]:
    """Return the node's data, in an order of its own in every round."""
    node, run = context.node_config, context.run_config
    seed = run["seed"] + 1000 * msg.content["config"]["server-round"] + node["partition-id"]
    return load_data(node["partition-id"], node["num-partitions"], run["examples"], run["batch-size"], seed)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model that the server sent."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader, _ = data_of(msg, context)
    loss = train_fn(model, loader, context.run_config["local-epochs"], msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the model that the server sent."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = data_of(msg, context)
    loss, accuracy = test_fn(model, loader)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
