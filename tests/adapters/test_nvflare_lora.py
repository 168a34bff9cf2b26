"""Jobs of NVFlare's that fine-tune a language model by peft's adapters, as its own examples do: audited by one call."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

if importlib.util.find_spec("peft") is None:
    pytest.skip("needs peft", allow_module_level=True)
pytestmark = [pytest.mark.peers, pytest.mark.slow]
pytest.importorskip("nvflare", reason="NVFlare isn't installed: pip install 'PATH_OF_THE_CLONE[nvflare]'")

from fedaudit.utils.machine import import_torchvision, own_process  # noqa: E402

own_process()
import_torchvision()  # transformers looks for it

from fedaudit.adapters.nvflare import audit_nvflare  # noqa: E402

ROUNDS, OWN, LENGTH, WORDS = 12, 6, 10, 60

MODEL = f"""
from fedaudit.utils.machine import import_torchvision, own_process

own_process()
import_torchvision()  # as above

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM


def base():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    tokens = dict(vocab_size={WORDS}, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, initializer_range=0.2))


def adapted():
    return get_peft_model(base(), LoraConfig(r=32, lora_alpha=64, task_type="CAUSAL_LM"))


class CausalLMPEFTModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = adapted()

    def forward(self, input_id):
        return self.model(input_ids=input_id, return_dict=False)


class Adapters(CausalLMPEFTModel):
    def state_dict(self, *args, **kwargs):
        return dict(get_peft_model_state_dict(self.model))

    def load_state_dict(self, state, strict=True, assign=False):
        return set_peft_model_state_dict(self.model, state)


def texts(site, count):
    random = torch.Generator().manual_seed(site)
    found = torch.randint(2, {WORDS}, (count, {LENGTH}), generator=random)
    found[:, -1] = 1
    return found
"""

# As in NVFlare's examples/advanced/llm_hf the server's model wraps peft's. Either it sends all of it at first, and
# adapters then, by the wrapper's names; or its state is the adapters, by the names that peft gives them.
SCRIPT = f"""
import nvflare.client as flare
import torch
from hf_peft_model import *

flare.init()
site = int(flare.get_site_name()[-1])
whole = SERVER()
model, own, tested = whole.model, texts(site, {OWN}), texts(100 + site, 12)
while flare.is_running():
    received = flare.receive()
    whole.load_state_dict({{key: torch.as_tensor(value) for key, value in received.params.items()}}, strict=False)
    model.eval()
    with torch.no_grad():
        loss = float(model(input_ids=tested, labels=tested).loss)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0)
    model.train()
    optimiser.zero_grad()
    for part in own.split(2):
        (model(input_ids=part, labels=part).loss / 3).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    sent = {{key: value.cpu().float() for key, value in whole.state_dict().items() if "lora_" in key}}
    flare.send(flare.FLModel(params=sent, metrics={{"eval_loss": loss}}, meta={{"NUM_STEPS_CURRENT_ROUND": 1}}))
"""
API = "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"


def job(folder: Path, server: str) -> Path:
    config, custom = folder / "app" / "config", folder / "app" / "custom"
    config.mkdir(parents=True)
    custom.mkdir()
    (custom / "hf_peft_model.py").write_text(MODEL)
    (custom / "client.py").write_text(SCRIPT.replace("SERVER", server))
    args = {"execution_mode": "in_process", "task_script_path": "client.py", "params_exchange_format": "pytorch"}
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": {"path": API, "args": args}}],
        "components": [],
    }
    workflow = {"id": "controller", "path": "nvflare.app_common.workflows.fedavg.FedAvg",
                "args": {"num_clients": 2, "num_rounds": ROUNDS}}  # fmt: skip
    persistor = {"id": "persistor", "path": "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor",
                 "args": {"model": {"path": f"hf_peft_model.{server}", "args": {}}}}  # fmt: skip
    hub = {"format_version": 2, "workflows": [workflow], "components": [persistor]}
    (config / "config_fed_client.json").write_text(json.dumps(client))
    (config / "config_fed_server.json").write_text(json.dumps(hub))
    meta = {"name": "lora", "resource_spec": {}, "min_clients": 2, "deploy_map": {"app": ["@ALL"]}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize("server", ["CausalLMPEFTModel", "Adapters"])
def test_adapters_that_travel_are_audited_by_one_call(server: str, tmp_path: Path) -> None:
    whole = job(tmp_path / "job", server)
    finished = audit_nvflare(whole, out=tmp_path / "out", controls=False, progress=False, max_minutes=6)
    result = finished.result
    (federation,) = result.federations
    assert federation.recording is not None
    assert federation.recording.facts == "verified"
    assert {replay.round for replay in federation.recording.replays} == {0, ROUNDS - 1}
    verdicts = {summary.attack: summary.verdict for summary in result.summaries}
    assert verdicts["dager"] == verdicts["extraction"] == "recovered"
    # half of the records are what the script tests on: it is seen, though adapters alone travel
    assert {verdicts[name] for name in ("reference-loss", "min-k", "source-inference")} == {"inferred"}
    last = [f for f in result.findings if f.attack == "dager" and f.round == ROUNDS - 1]
    assert [s.found for f in last for s in f.sequences] == [s.true for f in last for s in f.sequences]
    files = [*(tmp_path / "out" / "recording").glob("round-*-client-*.safetensors")]
    sent = [name for file in files for name in load_file(file)]
    assert sent
    assert all(".lora_" in name for name in sent), "the frozen part isn't stored with updates"
