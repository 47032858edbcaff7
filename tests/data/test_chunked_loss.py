# SPDX-License-Identifier: Apache-2.0
"""The loss of language models in chunks: the loss on all logits, which are never made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedplan.data.examples import NO_LABEL, RaggedArray, TokenSequences
from fedplan.data.tasks import chunked_loss
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.language import CausalLanguage, MaskedLanguage, SequenceToSequence

WORDS, ROWS, TOKENS = 211, 3, 20
SHAPE: dict[str, Any] = {
    **{"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GPT2: dict[str, Any] = {
    **{"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def gpt2(**settings: Any) -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, **settings))


def llama(**settings: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, **settings))


def adapted(*targets: str) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    return peft.get_peft_model(llama(), config)  # pyright: ignore[reportArgumentType]


def bert() -> nn.Module:
    still: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {name: SHAPE[name] for name in SHAPE if name not in ("head_dim", "num_key_value_heads")}
    return hf.BertForMaskedLM(hf.BertConfig(**sizes, **still))


def t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    special: dict[str, Any] = {"pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, **sizes, **special))


MODELS: dict[str, tuple[Callable[[], nn.Module], type[Task], bool]] = {
    "gpt2, tied": (gpt2, CausalLanguage, True),
    "gpt2, untied": (lambda: gpt2(tie_word_embeddings=False), CausalLanguage, True),
    "llama, bf16": (lambda: llama().bfloat16(), CausalLanguage, True),
    "lora below the head": (lambda: adapted("q_proj"), CausalLanguage, True),
    "lora on the head": (lambda: adapted("lm_head", "q_proj"), CausalLanguage, True),
    "bert": (bert, MaskedLanguage, True),
    "t5": (t5, SequenceToSequence, True),
    "gemma 2, soft cap": (
        lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SHAPE)),
        CausalLanguage,
        False,
    ),
    "cohere, scaled": (
        lambda: hf.CohereForCausalLM(hf.CohereConfig(**SHAPE)),
        CausalLanguage,
        False,
    ),
}
"""A model, its task, and whether its logits are what its head returns."""


class Largest(TorchDispatchMode):
    """Records the number of values of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(output) if isinstance(each, Tensor)]
        self.numel = max([self.numel, *sizes])
        return output


def task_of(kind: type[Task]) -> Task:
    return kind("language", "none", ("text",), "", ())


def examples(kind: type[Task]) -> TokenSequences:
    """Rows of several lengths; of a task without shifted labels, few tokens have one."""
    drawn = torch.Generator().manual_seed(0)
    ids = RaggedArray(
        torch.randint(3, WORDS, (ROWS * TOKENS - 4,), generator=drawn, dtype=torch.int32),
        torch.tensor([0, TOKENS, 2 * TOKENS, ROWS * TOKENS - 4]),
    )
    few = torch.where(torch.arange(len(ids.flat)) % 5 == 0, ids.flat, NO_LABEL)
    labels = RaggedArray(few, ids.starts) if kind is MaskedLanguage else ids
    return TokenSequences(ids, 0, labels, seq2seq=kind is SequenceToSequence)


def loss_and_gradients(model: nn.Module, kind: type[Task]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = task_of(kind).loss(model, examples(kind).batch(torch.arange(ROWS)))
    (0.5 * loss).backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_scores_are_those_on_all_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    make, kind, plain = MODELS[name]
    model, rows = make().train(), examples(kind)
    loss, gradients = loss_and_gradients(model, kind)
    scores = task_of(kind).predict(model, rows, batch_size=ROWS)
    monkeypatch.setattr(chunked_loss, "CHUNK_LOGITS", 7 * WORDS)
    inputs = {"input_ids": rows.batch(torch.arange(ROWS))["input_ids"]}
    if kind is SequenceToSequence:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    assert (chunked_loss.find_head(model, inputs, torch.Size([ROWS, TOKENS])) is not None) is plain
    again, others = loss_and_gradients(model, kind)
    half = next(model.parameters()).dtype == torch.bfloat16
    assert torch.allclose(loss, again, rtol=1e-3 if half else 1e-6)
    assert gradients.keys() == others.keys()
    whole = max(float(gradient.norm()) for gradient in gradients.values())
    for key, gradient in gradients.items():
        apart = float((gradient - others[key]).float().norm())
        # Gradients that are zero but for rounding, as of a key's bias, are compared with others.
        assert apart <= (2e-2 if half else 1e-5) * max(float(gradient.norm()), whole / 100), key
    fresh = task_of(kind).predict(model, rows, batch_size=ROWS)
    assert abs(scores.losses - fresh.losses).max() < (5e-2 if half else 1e-5)
    assert (scores.predicted == fresh.predicted).all() or half


@pytest.mark.parametrize("name", [name for name, (*_, plain) in MODELS.items() if plain])
def test_logits_of_a_batch_are_never_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, kind, _ = MODELS[name]
    model = make()
    monkeypatch.setattr(chunked_loss, "CHUNK_LOGITS", 7 * WORDS)
    with Largest() as largest:
        loss_and_gradients(model, kind)
        task_of(kind).predict(model, examples(kind), batch_size=ROWS)
    assert largest.numel <= 20 * WORDS < ROWS * TOKENS * WORDS / 2


@pytest.mark.parametrize("autocast", [False, True])
def test_a_batch_of_one_chunk_and_a_watched_head_take_all_logits(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    ids = torch.ones(2, 3, dtype=torch.long)
    monkeypatch.setattr(chunked_loss, "CHUNK_LOGITS", 6 * WORDS - 1)
    model, batch, shape = gpt2(), {"input_ids": ids}, ids.shape
    # The gradients of a trained head would take more than these logits.
    assert chunked_loss.find_head(model, batch, shape) is None
    model.requires_grad_(False)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        head = chunked_loss.find_head(model, batch, shape)
        assert (head is None) is autocast
    hook = model.lm_head.register_forward_hook(lambda *_: None)  # pyright: ignore
    assert chunked_loss.find_head(model, batch, shape) is None
    hook.remove()
    monkeypatch.setattr(chunked_loss, "CHUNK_LOGITS", 6 * WORDS)
    assert chunked_loss.find_head(model, batch, shape) is None


def test_a_batch_without_labels_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "CHUNK_LOGITS", WORDS)
    ids = torch.ones(2, 3, dtype=torch.long)
    loss = task_of(CausalLanguage).loss(gpt2(), {"input_ids": ids, "labels": ids * 0 + NO_LABEL})
    loss.backward()
    assert loss.item() == 0.0
