# SPDX-License-Identifier: Apache-2.0
"""examples/instruct.py in Flower, trained by TRL. That the base stayed still is not proven."""

import math
from pathlib import Path

import torch
from datasets import Dataset
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

FOLDER = str(Path(__file__).parents[2] / "examples" / "chat")  # examples/chat.py writes it
ROUNDS = 5


def as_chat(row):
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["response"]}],
    }


def load_data():
    return Dataset.from_json(f"{FOLDER}/rows.jsonl").map(as_chat, remove_columns="response")


def load_model(arrays=None):
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(FOLDER), lora)
    if arrays is not None:
        set_peft_model_state_dict(model, arrays.to_torch_state_dict())
    return model


def trainer_of(model, rows, rate=0.0):
    arguments = SFTConfig(
        learning_rate=rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=12,
        num_train_epochs=12,
        max_length=64,
        bf16=False,
    )
    return SFTTrainer(model, arguments, train_dataset=rows, eval_dataset=rows)


client = ClientApp()


@client.train()
def train(message, context):
    model, table = load_model(message.content["arrays"]), load_data()
    shop = table.unique("shop")[context.node_config["partition-id"]]
    rows = table.filter(lambda row: row["shop"] == shop)
    passed = (message.content["config"]["server-round"] - 1) / ROUNDS
    rate = 2e-2 * (1 + math.cos(math.pi * passed)) / 2
    done = trainer_of(model, rows, rate).train()
    metrics = MetricRecord({"loss": done.training_loss, "num-examples": len(rows)})
    arrays = ArrayRecord(get_peft_model_state_dict(model))
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def evaluate(server_round, arrays):
    scores = trainer_of(load_model(arrays), load_data()).evaluate()
    return MetricRecord({"accuracy": scores["eval_mean_token_accuracy"]})


server = ServerApp()


@server.main()
def main(grid, context):
    torch.manual_seed(0)
    start = ArrayRecord(get_peft_model_state_dict(load_model()))
    strategy = FedAvg(fraction_evaluate=0.0)
    result = strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=evaluate)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    chat = [{"role": "user", "content": "How much is the melon?"}]
    asked = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = load_model(result.arrays).generate(**asked, max_new_tokens=20, do_sample=False)
    print(tokenizer.decode(said[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


run_simulation(server, client, num_supernodes=3)
