# SPDX-License-Identifier: Apache-2.0
"""examples/qlora.py in Flower, trained by TRL. No folder of the run is left that can be verified."""

from pathlib import Path

import torch
from datasets import Dataset
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    prepare_model_for_kbit_training,
    set_peft_model_state_dict,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

FOLDER = str(Path(__file__).parents[2] / "examples" / "chat")  # examples/chat.py writes it


def as_chat(row):
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["response"]}],
    }


def load_data(partition):
    table = Dataset.from_json(f"{FOLDER}/rows.jsonl").map(as_chat, remove_columns="response")
    shop = table.unique("shop")[partition]
    return table.filter(lambda row: row["shop"] == shop)


def load_model():
    packed = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config=packed)
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(prepare_model_for_kbit_training(model), lora)


client = ClientApp()


@client.train()
def train(message, context):
    model, rows = load_model(), load_data(context.node_config["partition-id"])
    set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
    arguments = SFTConfig(
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=12,
        num_train_epochs=4,
        max_length=64,
        bf16=False,
    )
    done = SFTTrainer(model, arguments, train_dataset=rows).train()
    metrics = MetricRecord({"loss": done.training_loss, "num-examples": len(rows)})
    # TRL trains the adapter in bfloat16, which an ArrayRecord cannot hold.
    arrays = ArrayRecord(get_peft_model_state_dict(model.float()))
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid, context):
    torch.manual_seed(0)
    start = ArrayRecord(get_peft_model_state_dict(load_model()))
    FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=3)


run_simulation(server, client, num_supernodes=3)
