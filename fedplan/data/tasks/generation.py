# SPDX-License-Identifier: Apache-2.0
"""Answers that a language model generates, beside the true ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import NO_LABEL
from fedplan.data.tasks.definition import pad_token_id
from fedplan.tensors.devices import model_device


def generate_answer(
    model: nn.Module, tokenizer: Any, batch: Mapping[str, Tensor], limit: int
) -> tuple[str, str]:
    """Return (true answer, greedily generated answer) of the one example in a batch.

    Of a conversation it is the last answer, after all that comes before; prompt and answer have at
    most `limit` tokens, of an encoder-decoder the answer alone.
    """
    prompt, labels, is_decoder = batch["input_ids"], batch["labels"][0], True
    if "decoder_attention_mask" in batch:
        is_decoder, labels = False, labels[labels != NO_LABEL]
    else:
        places = torch.nonzero(labels != NO_LABEL).flatten()
        gaps = torch.nonzero(places.diff() > 1).flatten()
        start = int(places[gaps[-1] + 1] if len(gaps) else places[0])
        prompt, labels = prompt[:, :start], labels[start : int(places[-1]) + 1]
        limit -= start
    prompt = prompt.to(model_device(model))
    end = tokenizer.eos_token_id
    tokens = cast("Any", model).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=1,
        max_new_tokens=limit,
        eos_token_id=tokenizer.sep_token_id if end is None else end,
        pad_token_id=pad_token_id(tokenizer),
    )[0]
    sides = labels, tokens[prompt.shape[1] :] if is_decoder else tokens
    truth, text = (tokenizer.decode(each, skip_special_tokens=True).strip() for each in sides)
    return truth, text
