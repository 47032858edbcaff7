# SPDX-License-Identifier: Apache-2.0
"""Kinds of tasks: each has the loss of transformers, and conversations are learnt by answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
import zoo
from chat import END, TEMPLATE, chat_tokenizer, messages, pairs, tiny_chat
from datasets import Dataset
from second_device import NAME as SECOND
from second_device import Backend
from tables import PETS, WORDS, row, tokenizer
from torch import Tensor, nn

from fedplan.data.custom_task import CustomTask
from fedplan.data.examples import NO_LABEL, PackedSequences
from fedplan.data.metrics import METRICS, Metric, metric_named
from fedplan.data.tables import DataError
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.kinds import TASK_KINDS, make_task
from fedplan.data.tasks.language import PLAIN_TEMPLATE, require_packing_support
from fedplan.errors import FedplanError
from fedplan.tensors.devices import to_device

ROWS = [{n: v for n, v in row(i).items() if n != "picture"} for i in range(12)]
SIZE = len(WORDS) + 5
SMALL: dict[str, Any] = {**zoo.TEXT, "vocab_size": SIZE, "initializer_range": 0.3}
BART: dict[str, Any] = {
    "vocab_size": SIZE,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
    "init_std": 0.3,
}
T5: dict[str, Any] = {
    "vocab_size": SIZE,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
GPT2: dict[str, Any] = {**zoo.GPT2, "vocab_size": SIZE, "n_positions": 32}
COLUMNS: dict[str, dict[str, Any]] = {
    "text-classification": {"columns": "text", "label": "mood", "labels": ["calm", "wild", "sad"]},
    "pairs": {"columns": ["text", "ask"], "label": "mood", "labels": ["calm", "wild", "sad"]},
    "multi-label": {"columns": "text", "label": "pets", "labels": PETS},
    "regression": {"columns": ["text", "ask"], "label": "degree"},
    "token-classification": {"columns": "words", "label": "tags", "labels": ["O", "B-pet"]},
    "causal-lm": {"columns": "text"},
    "masked-lm": {"columns": "text"},
    "seq2seq-lm": {"columns": ["text", "ask"]},
    "bart": {"columns": ["text", "ask"]},
    "instruction": {"columns": ["ask", "text"]},
}
KIND = {"pairs": "text-classification", "bart": "seq2seq-lm"}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_chat(tmp_path_factory.mktemp("chat"))


def asked(name: str, words: str, **more: Any) -> Task:
    said = {"tokenizer": words, "max_length": 16, **COLUMNS[name], **more}
    return make_task(KIND.get(name, name), **said)


def model_for(name: str, made: Task) -> nn.Module:
    torch.manual_seed(0)
    config: Any
    if name == "bart":
        config = hf.BartConfig(**BART, dropout=0.0)
    elif made.kind == "seq2seq-lm":
        config = hf.T5Config(**T5)
    elif made.kind in ("causal-lm", "instruction"):
        config = hf.GPT2Config(**GPT2)
    else:
        config = hf.BertConfig(**SMALL, **made.settings)
    return getattr(hf, made.model_class).from_config(config).eval()


def table() -> Dataset:
    return Dataset.from_list(ROWS)


def whole(rows: Any) -> dict[str, Tensor]:
    return rows.batch(torch.arange(len(rows)))


@pytest.mark.parametrize("name", COLUMNS)
def test_the_loss_is_the_one_that_transformers_computes(name: str, words: str) -> None:
    made = asked(name, words)
    model, rows = model_for(name, made), made.prepare(table())
    batch = whole(rows)
    theirs = model(**batch).loss
    ours = made.loss(model, batch)
    assert torch.allclose(ours, theirs, rtol=1e-6), (ours, theirs)
    again = whole(made.prepare(table()))
    assert all(torch.equal(batch[each], again[each]) for each in batch), "prepared as before"


@pytest.mark.device
@pytest.mark.parametrize("name", COLUMNS)
def test_the_loss_never_waits_for_a_device_to_count_labels(
    name: str, words: str, counts: Backend
) -> None:
    made = asked(name, words)
    model, batch = model_for(name, made), whole(made.prepare(table()))
    expected = made.loss(model, batch).detach()
    model = model.to(SECOND)
    there = to_device(batch, torch.device(SECOND))
    counts.forget()
    model(**there)
    masks = counts.fetched  # transformers asks whether all tokens are attended to
    counts.forget()
    loss = made.loss(model, there)
    loss.backward()
    assert counts.waits == [] and counts.fetched == masks
    assert torch.allclose(loss.cpu(), expected)
    # Labels that have changed on the device are no longer those of the host.
    there["labels"] += 0
    assert torch.allclose(made.loss(model, there).cpu(), expected)
    assert counts.waits


def test_labels_need_a_place_each_in_what_a_model_returns(words: str) -> None:
    made = asked("token-classification", words)
    model, batch = model_for("token-classification", made), whole(made.prepare(table()))
    with pytest.raises(DataError, match=r"values of shape .* for labels of shape"):
        made.loss(model, {**batch, "labels": batch["labels"][:, 1:]})


@pytest.mark.parametrize("name", COLUMNS)
def test_a_score_is_of_all_rows_whatever_the_batches(name: str, words: str) -> None:
    made = asked(name, words)
    model, rows = model_for(name, made), made.prepare(table())
    one, many = (made.score(model, rows, batch_size=size) for size in (1, 100))
    assert one == pytest.approx(many, rel=1e-4)
    assert many["loss"] == pytest.approx(made.loss(model, whole(rows)).item(), rel=1e-4)
    assert made.primary in many and many["examples"] == len(rows)
    assert made.score(model, made.prepare(table().select([])), batch_size=2) == {"examples": 0.0}


@pytest.mark.parametrize("name", COLUMNS)
def test_examples_are_made_up_from_the_settings_alone(name: str, words: str) -> None:
    made = asked(name, words, one_example_per_row=True)
    batch, real = whole(made.made_up_examples()), whole(made.prepare(table()))
    assert {k: (v.dtype, v.dim()) for k, v in batch.items()} == {
        k: (v.dtype, v.dim()) for k, v in real.items()
    }
    lengths = batch["attention_mask"].sum(1)
    assert lengths.tolist() == [16, 16, 16, 15, 2]
    assert made.loss(model_for(name, made), batch).isfinite()
    again = whole(made.made_up_examples())
    assert all(torch.equal(batch[each], again[each]) for each in batch)


def test_no_tokenizer_makes_made_up_texts_short(words: str) -> None:
    """Tokens that no word gives, as a server may put in a tokenizer, shortened them."""
    made = asked("text-classification", words)
    made.tokenizer.add_tokens([f"x {number}" for number in range(5000)])
    lengths = whole(made.made_up_examples())["attention_mask"].sum(1)
    assert lengths.tolist() == [16, 16, 16, 15, 2]


def test_a_task_of_your_own_must_make_up_its_examples() -> None:
    with pytest.raises(DataError, match=r"own makes up no examples.*give.*made_up_examples"):
        CustomTask().made_up_examples()


def test_images_have_a_largest_size() -> None:
    with pytest.raises(DataError, match=r"image_size = 1025.*at most 1024"):
        make_task("image-classification", columns="x", label="y", labels=PETS, image_size=1025)


@pytest.mark.parametrize("name", COLUMNS)
def test_few_rows_are_learnt(name: str, words: str) -> None:
    made = asked(name, words)
    model, rows = model_for(name, made).train(), made.prepare(table())
    before = made.score(model, rows, batch_size=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(25):
        optimizer.zero_grad()
        made.loss(model, whole(rows)).backward()
        optimizer.step()
    assert made.score(model, rows, batch_size=100)["loss"] < 0.8 * before["loss"]


def test_every_kind_says_its_primary_score_and_what_it_answers() -> None:
    for kind, found in TASK_KINDS.items():
        assert found.answer_kind in ("class", "labels", "number", "tokens"), kind
        assert found.higher_is_better == (found.primary not in ("rmse", "perplexity"))


# ------------------------------------------------------------------- labels, numbers and weights


def test_any_of_several_labels_may_be_right_and_none_too(words: str) -> None:
    rows = Dataset.from_dict({"text": ["cat", "dog hen", "mat"], "pets": [["cat"], PETS, []]})
    made = asked("multi-label", words)
    assert whole(made.prepare(rows))["labels"].tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
    model = model_for("multi-label", made)
    assert model.config.problem_type == "multi_label_classification"  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"label 'egg' in column 'pets' is not one"):
        made.prepare(Dataset.from_dict({"text": ["cat"], "pets": [["egg"]]}))
    with pytest.raises(DataError, match="'pets' has 'cat', but multi-label needs a list"):
        made.prepare(Dataset.from_dict({"text": ["cat"], "pets": ["cat"]}))


def test_a_number_may_be_any_and_a_text_is_none(words: str) -> None:
    """-100 marks what is not asked elsewhere; here it is a number as any other."""
    rows = Dataset.from_dict({"text": ["cat", "dog"], "ask": ["a", "a"], "degree": [-100.0, 2.0]})
    made = asked("regression", words)
    batch = whole(made.prepare(rows))
    model = model_for("regression", made)
    guess = model(**{n: t for n, t in batch.items() if n != "labels"}).logits[:, 0]
    assert made.loss(model, batch).item() == pytest.approx(
        ((guess - torch.tensor([-100.0, 2.0])) ** 2).mean().item()
    )
    texts = Dataset.from_dict({"text": ["cat"], "ask": ["a"], "degree": ["1.5"]})
    assert whole(made.prepare(texts))["labels"].tolist() == [1.5]
    with pytest.raises(DataError, match="'degree' has 'warm', but regression needs numbers"):
        made.prepare(Dataset.from_dict({"text": ["cat"], "ask": ["a"], "degree": ["warm"]}))
    with pytest.raises(DataError, match="3 outputs, but regression needs one"):
        made.loss(hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_labels=3)), batch)


@pytest.mark.parametrize("name", ["text-classification", "token-classification", "multi-label"])
def test_a_weight_multiplies_the_loss_of_its_label_whatever_the_batch(
    name: str, words: str
) -> None:
    made = asked(name, words)
    label = made.labels[0]
    heavy = asked(name, words, weights={label: 3.0})
    model, rows = model_for(name, made), made.prepare(table())
    for number in range(len(rows)):
        batch = rows.batch(torch.tensor([number]))
        inputs, labels, places = made._inputs_and_labels(model, batch)
        logits = places.select(made._logits(model, inputs))
        if name == "multi-label":
            each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            weight = torch.tensor([3.0, 1.0, 1.0])
        else:
            each = nn.functional.cross_entropy(logits, labels, reduction="none")
            weight = torch.where(labels == 0, 3.0, 1.0)
        assert torch.allclose(heavy.loss(model, batch), (each * weight).mean())
    equal = asked(name, words, weights=dict.fromkeys(made.labels, 1.0))
    assert torch.allclose(equal.loss(model, whole(rows)), made.loss(model, whole(rows)))


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("text-classification", {"weights": {"glad": 2.0}}, "a weight for 'glad'; its labels are"),
        ("text-classification", {"weights": {"calm": 0.0}}, "weight of 'calm' is 0.0: it must be"),
        ("causal-lm", {"weights": {"calm": 2.0}}, "a weight for 'calm'; its labels are none"),
        ("causal-lm", {"packing": True}, "causal-lm has packing = true: only"),
        (
            "instruction",
            {"packing": True, "one_example_per_row": True},
            "example-level privacy needs one row",
        ),
        ("seq2seq-lm", {"columns": "text"}, r"columns \['text'\]: it takes 2"),
        ("regression", {"label": ""}, "needs the column of its numbers"),
        (
            "regression",
            {"extra_metrics": [METRICS["f1_macro"]]},
            "'f1_macro' does not apply to regress",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    kind: str, changed: dict[str, Any], said: str, words: str
) -> None:
    with pytest.raises(DataError, match=said):
        asked(kind, words, **changed)


def test_metrics_come_by_name_or_as_functions(words: str) -> None:
    def far(truth: Any, guess: Any) -> Any:
        return np.float32(np.abs(truth - guess).max())

    extra = [metric_named("max_error"), Metric("far", far)]
    made = asked("regression", words, extra_metrics=extra)
    found = made.score(model_for("regression", made), made.prepare(table()), batch_size=5)
    assert found["far"] == pytest.approx(found["max_error"]) and "r2" in found
    with pytest.raises(FedplanError, match="no metric 'f2': there are accuracy, auprc, auroc"):
        metric_named("f2")
    with pytest.raises(DataError, match="'accuracy' has the name of a metric of fedplan"):
        asked("regression", words, extra_metrics=[Metric("accuracy", far)])
    odd = asked("regression", words, extra_metrics=[Metric("odd", lambda truth, guess: "high")])  # type: ignore[arg-type,return-value]
    with pytest.raises(FedplanError, match="'odd' returned a str"):
        odd.score(model_for("regression", made), made.prepare(table()), batch_size=5)


def test_one_row_and_a_model_that_diverged_have_scores(words: str) -> None:
    made = asked("regression", words)
    model, rows = model_for("regression", made), made.prepare(table().select([0]))
    found = made.score(model, rows, batch_size=1)
    assert set(found) == {"loss", "mae", "rmse", "examples"}
    with torch.no_grad():
        model.classifier.bias.fill_(float("nan"))  # type: ignore[union-attr,operator]
    assert np.isnan(made.score(model, made.prepare(table()), batch_size=4)["rmse"])


# ------------------------------------------------------------------------------- conversations


def chatting(folder: str, columns: Any = "messages", **more: Any) -> Task:
    return make_task("instruction", columns=columns, model=folder, max_length=128, **more)


def test_every_token_of_an_answer_and_its_end_is_asked_once_and_nothing_else(llama: str) -> None:
    made, tokens = chatting(llama), chat_tokenizer()
    said = messages(9)
    rows = made.prepare(Dataset.from_list(said))
    for number, each in enumerate(said):
        batch = rows.batch(torch.tensor([number]))
        answers = [m["content"] for m in each["messages"] if m["role"] == "assistant"]
        found = batch["labels"][0]
        assert tokens.decode(found[found != NO_LABEL]) == "".join(a + END for a in answers)
        assert torch.equal(found[found != NO_LABEL], batch["input_ids"][0][found != NO_LABEL])
        text = tokens.apply_chat_template(each["messages"], tokenize=False)
        assert tokens.decode(batch["input_ids"][0]) == text


def test_a_prompt_and_its_response_are_a_conversation_of_two(llama: str) -> None:
    rows = pairs(6)
    both = [
        {
            "messages": [
                {"role": "user", "content": each["prompt"]},
                {"role": "assistant", "content": each["response"]},
            ]
        }
        for each in rows
    ]
    one = whole(chatting(llama, ["prompt", "response"]).prepare(Dataset.from_list(rows)))
    other = whole(chatting(llama).prepare(Dataset.from_list(both)))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_no_gradient_comes_from_what_is_asked(llama: str) -> None:
    made = chatting(llama)
    rows = made.prepare(Dataset.from_list(messages(5)))
    batch, held = whole(rows), list[Tensor]()
    model = hf.AutoModelForCausalLM.from_pretrained(llama).eval()

    class Watched(nn.Module):
        def forward(self, **inputs: Tensor) -> Tensor:
            held.append(model(**inputs).logits.detach().requires_grad_())
            return held[0]

    made.loss(Watched(), batch).backward()
    moved = (held[0].grad != 0).any(-1)  # type: ignore[union-attr]
    expected = torch.zeros_like(moved)
    expected[:, :-1] = batch["labels"][:, 1:] != NO_LABEL
    assert torch.equal(moved, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_conversations_are_answered_as_each_alone(
    kind: str, attention: str, llama: str
) -> None:
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_pretrained(llama, attn_implementation=attention)
    if kind == "gpt2":
        sizes = {**zoo.GPT2, "vocab_size": model.config.vocab_size, "n_positions": 128}
        config = hf.GPT2Config(**sizes, initializer_range=0.3, attn_implementation=attention)
        model = hf.GPT2LMHeadModel(config)
    model.eval()
    require_packing_support(model)
    rows = Dataset.from_list(messages(9))
    made, packing = chatting(llama), chatting(llama, packing=True)
    apart, packed = made.prepare(rows), packing.prepare(rows)
    assert isinstance(packed, PackedSequences) and len(packed) < len(apart)
    one, two = (t.score(model, r, batch_size=4) for t, r in ((made, apart), (packing, packed)))
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    with torch.no_grad():
        batch = whole(packed)
        logits = model(**{n: t for n, t in batch.items() if n != "labels"}, use_cache=False).logits
        singly = [model(input_ids=apart.batch(torch.tensor([i]))["input_ids"]) for i in range(9)]
    starts = (batch["position_ids"] == 0) & (batch["input_ids"] != packed.pad)
    found = [logits[r, s:] for r, s in starts.nonzero().tolist()]
    assert len(found) == 9
    for each, alone in zip(found, singly, strict=True):
        length = alone.logits.shape[1]
        assert torch.allclose(each[:length], alone.logits[0], atol=1e-4)


JOINS = ("falcon", "bloom", "mpt")
APART = ("gpt2", "gpt-neox", "phi3", "llama", "mistral", "qwen3", "gemma")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*JOINS, *APART])
def test_a_model_that_cannot_keep_packed_texts_apart_is_refused(
    name: str, dtype: torch.dtype
) -> None:
    """In half precision too, where what leaks in may be as small as rounding."""
    model = zoo.build(name).to(dtype)
    if name in APART:
        return require_packing_support(model)
    with pytest.raises(DataError, match="mixes packed conversations"):
        require_packing_support(model)


def test_a_tokenizer_without_a_template_gets_a_plain_one_and_it_is_said(tmp_path: Path) -> None:
    folder = tiny_chat(tmp_path, template=None)
    made = chatting(folder)
    assert (
        "has no chat template" in made.notes[0] and made.tokenizer.chat_template == PLAIN_TEMPLATE
    )
    found = whole(made.prepare(Dataset.from_list(messages(3))))
    said = [made.tokenizer.decode(each[each != NO_LABEL]) for each in found["labels"]]
    assert said[0] == f"The sky is blue.{END}" and all(each.endswith(END) for each in said)


def test_a_template_of_its_own_is_not_spoken_of(llama: str) -> None:
    assert chatting(llama).notes == () and chat_tokenizer().chat_template == TEMPLATE


FORGETS = (
    "{% for m in messages %}{{ m['role'] }}"
    "{{ m['content'] if loop.last or m['role'] == 'user' else '...' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("messages", [{"role": "user", "content": "hi"}], "have no token of an answer within"),
        ("messages", "hi", "a conversation is a list of messages"),
        ("messages", [{"from": "human", "value": "hi"}], "each with a role and a content"),
        ("prompt", " ", "row 0 of column 'prompt' is ' ', not a text"),
    ],
)
def test_what_is_no_conversation_is_named(column: str, value: Any, said: str, llama: str) -> None:
    columns = "messages" if column == "messages" else ["prompt", "response"]
    rows = Dataset.from_list([{**pairs(1)[0], column: value}])
    with pytest.raises(DataError, match=said):
        chatting(llama, columns).prepare(rows)


def test_answers_that_cannot_be_told_from_questions_are_refused(tmp_path: Path) -> None:
    made = chatting(tiny_chat(tmp_path, template=FORGETS))
    with pytest.raises(DataError, match="row 2: the chat template writes earlier messages"):
        made.prepare(Dataset.from_list(messages(3)[:1] * 2 + messages(3)[2:]))


def test_an_answer_that_is_cut_off_whole_is_refused(llama: str) -> None:
    short = replace(chatting(llama, ["prompt", "response"]), max_length=6)
    with pytest.raises(DataError, match=r"4 of 4 rows .* within max_length = 6: raise max_length"):
        short.prepare(Dataset.from_list(pairs(4)))
