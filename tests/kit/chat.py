# SPDX-License-Identifier: Apache-2.0
"""Chat: a tiny Llama with a tokenizer and a chat template, and conversations to teach it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, PAD, ROLES = "<|end|>", "<|pad|>", ("system", "user", "assistant")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
THINGS = {
    "sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "sun": "yellow",
    "rose": "red",
    "sea": "blue",
    "leaf": "green",
}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}


def pairs(count: int = 24) -> list[dict[str, str]]:
    """Rows of a prompt and a response."""
    asked = ("What colour is the {}?", "Say the colour of the {}.", "The {} is of which colour?")
    things = list(THINGS)
    return [
        {
            "prompt": asked[i // len(things) % len(asked)].format(things[i % len(things)]),
            "response": f"The {things[i % len(things)]} is {THINGS[things[i % len(things)]]}.",
        }
        for i in range(count)
    ]


def messages(count: int = 24) -> list[dict[str, Any]]:
    """Rows of one column: a system's word, and one, two or three questions with their answers."""
    rows = pairs(count + 2)
    found = list[dict[str, Any]]()
    for i in range(count):
        said = [{"role": "system", "content": "Answer shortly."}] if i % 2 else []
        for row in rows[i : i + 1 + i % 3]:
            said.append({"role": "user", "content": row["prompt"]})
            said.append({"role": "assistant", "content": row["response"]})
        found.append({"messages": said})
    return found


def chat_tokenizer(*, template: str | None = TEMPLATE) -> Any:
    """A byte-level BPE of a few lines, with a token for each role and one that ends a turn."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[PAD, END, *(f"<|{role}|>" for role in ROLES)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [text for row in pairs() for text in row.values()]
    made.train_from_iterator([*lines, "Answer shortly."], trainer)
    found = hf.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=PAD, model_max_length=128
    )
    found.chat_template = template
    return found


def tiny_chat(folder: str | Path, *, template: str | None = TEMPLATE) -> str:
    """A folder with a tiny Llama and its tokenizer, as a chat model of the hub would have them."""
    tokenizer = chat_tokenizer(template=template)
    config = hf.LlamaConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
