"""The client: trains and tests on its own sentences; adapters are all that it sends."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from lora_app.task import load_data, make_model
from lora_app.task import test as test_fn
from lora_app.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the adapters that the server sent."""
    model, run = make_model(), context.run_config
    set_peft_model_state_dict(model, msg.content["arrays"].to_torch_state_dict())
    loader, _ = load_data(context.node_config["partition-id"], run["batch-size"])
    loss = train_fn(model, loader, run["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(get_peft_model_state_dict(model)), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the model with the adapters that the server sent."""
    model = make_model()
    set_peft_model_state_dict(model, msg.content["arrays"].to_torch_state_dict())
    _, loader = load_data(context.node_config["partition-id"], context.run_config["batch-size"])
    metrics = MetricRecord({"eval_loss": test_fn(model, loader), "num-examples": len(loader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
