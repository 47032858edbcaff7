# SPDX-License-Identifier: Apache-2.0
"""Instruction tuning with LoRA: three shops teach a small Llama, and none shows its questions."""

from pathlib import Path

import datasets
import peft
from transformers import AutoModelForCausalLM, AutoTokenizer

import fedplan as fp

folder = str(Path(__file__).parent / "chat")  # examples/chat.py writes it
table = datasets.Dataset.from_json(f"{folder}/rows.jsonl")
shops = {
    shop: table.filter(lambda row, shop=shop: row["shop"] == shop) for shop in table.unique("shop")
}
task = fp.data.make_task("instruction", columns=["prompt", "response"], model=folder, max_length=64)
lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)

plan = fp.parse("chain(freeze(), share(adapter))")
train = fp.TrainConfig(rounds=5, lr=2e-2, batch_size=12, epochs=12, lr_scheduler="cosine")
run = fp.simulate(plan, model, shops, task=task, test=table, train=train)
print(run.metrics.to_pandas()[["round", "loss", "global.accuracy", "upload_bytes"]])

tokenizer = AutoTokenizer.from_pretrained(folder)
chat = [{"role": "user", "content": "How much is the melon?"}]
asked = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
said = run.global_model().generate(**asked, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(said[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
