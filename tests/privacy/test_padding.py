# SPDX-License-Identifier: Apache-2.0
"""What a row adds is its own, also of values that a server chose so that it were not."""

from __future__ import annotations

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedplan.data.examples import RaggedArray, TokenSequences
from fedplan.privacy.dpsgd.fit import DPSGDConfig, NoisyGradients
from fedplan.privacy.dpsgd.ghost_clipping import why_not_ghost_clipping
from fedplan.privacy.dpsgd.per_example import Objective, TrainedTensor

PAD, ODD = 0, 5
CLIP = 0.1


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    return cross_entropy(model(**inputs).logits, batch["labels"])


def crafted() -> nn.Module:
    """A BERT whose token ODD looks at padding so hard that the score is no number any more."""
    torch.manual_seed(0)
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"intermediate_size": 16, "vocab_size": 12, "max_position_embeddings": 16}
    model = hf.BertForSequenceClassification(hf.BertConfig(num_labels=2, **sizes, **settings))
    first, attention = model.bert.embeddings, model.bert.encoder.layer[0].attention.self
    words = torch.ones(12, 16)
    words[:, :2], words[:, 9:] = 0, -1
    for token, place in ((ODD, 0), (PAD, 1)):
        words[token, place], words[token, 2:4] = 4.0, -1.0
    with torch.no_grad():
        first.word_embeddings.weight.copy_(words)
        for table in (first.position_embeddings.weight, first.token_type_embeddings.weight):
            table.zero_()[-1] = 1.0
        first.LayerNorm.bias[2] = 0.1
        for layer, place in ((attention.query, 0), (attention.key, 1)):
            layer.weight.zero_()[0, place] = 2.5e19
            layer.bias.zero_()[5] = 1e-3
        model.classifier.weight.mul_(1e-8)
    return model.train()


def summed(model: nn.Module, texts: list[list[int]]) -> Tensor:
    """The clipped sum over all texts, without noise, in clips."""
    tensors = tuple(TrainedTensor(name, tensor) for name, tensor in model.named_parameters())
    labels = torch.tensor([int(ODD in text) for text in texts])
    rows = TokenSequences(RaggedArray.from_lists(texts), PAD, labels)
    privately = DPSGDConfig(
        max_grad_norm=CLIP, noise_multiplier=0.0, expected_batch_size=1, sampling_rate=1.0, steps=1
    )
    subject = Objective(model, tensors, rows, loss)
    assert not why_not_ghost_clipping(subject), "the trial sees nothing wrong"

    def silent(shape: tuple[int, ...], *_: float) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    noisy = NoisyGradients(subject, privately, model, silent, "")  # type: ignore[arg-type]
    noisy.write_gradients(torch.arange(len(texts)))
    return torch.cat([tensor.grad.double().flatten() for tensor in model.parameters()]) / CLIP


def test_one_longer_text_does_not_change_what_others_add() -> None:
    """Filled up to its length, all texts with the odd token would add nothing any more."""
    model = crafted()
    texts = [[1, 6, 7, 8], [1, 7, 8, 9], [1, 9, 6, 8]] * 8
    texts += [[1, ODD, 6 + i % 5, 7] for i in range(20)]
    far = (summed(model, texts) - summed(model, [*texts, [1, 6, 7, 8, 9, 10]])).norm()
    assert far <= 1 + 1e-6, f"one row is {far:.3f} clips"
