# SPDX-License-Identifier: Apache-2.0
"""Write chat/: a small Llama with a chat template, and questions that three shops were asked."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "chat"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHOPS = {
    "baker": {"bread": 3, "roll": 1, "cake": 9, "bun": 2},
    "grocer": {"apple": 1, "melon": 4, "pear": 2, "leek": 3},
    "smith": {"nail": 1, "hinge": 5, "lock": 8, "key": 2},
}
ASKED = ("What does a {} cost?", "How much is the {}?", "Price of one {}, please.")


def rows() -> list[dict[str, str]]:
    return [
        {"shop": shop, "prompt": asked.format(thing), "response": f"A {thing} costs {price} pence."}
        for shop, prices in SHOPS.items()
        for thing, price in prices.items()
        for asked in ASKED
    ]


def main() -> None:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([row[c] for row in rows() for c in ("prompt", "response")], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>", model_max_length=128
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(FOLDER)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(FOLDER)
    (FOLDER / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))


if __name__ == "__main__":
    main()
