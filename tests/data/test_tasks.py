# SPDX-License-Identifier: Apache-2.0
"""Tasks: from rows of a table to batches, a loss and a score."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isclose, isfinite, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
import zoo
from datasets import ClassLabel, Dataset, Features, Image, List, Value, concatenate_datasets
from PIL import Image as Pictures
from torch import Tensor, nn

from fedplan.data.examples import SeededExamples
from fedplan.data.tables import DataError, label_names, load_table
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.kinds import make_task
from fedplan.errors import FedplanError
from fedplan.language.plan import Role
from fedplan.models.params import Kind, Param
from fedplan.training.fit import Job, TrainArguments, plain_fit

SHARED = Path(__file__).parents[3] / "shared" / "data"
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *["the", "cat", "dog", "sat", "ran", "on", "mat", "a", "un", "##happy"],
]
TEXTS = [
    "the cat sat",
    "a dog ran on the mat",
    "the dog sat",
    "a cat ran",
    "unhappy cat",
    "the mat",
    "dog",
    "ran on",
]
MOODS = ["calm", "wild", "calm", "wild", "sad", "calm", "wild", "sad"]
KINDS = (
    "text-classification",
    "token-classification",
    "image-classification",
    "causal-lm",
    "masked-lm",
)


def shared(path: str) -> str:
    if not (SHARED / path).exists():
        pytest.skip(f"{SHARED / path} is not on this machine")
    return str(SHARED / path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    hf.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return str(folder)


def tagged() -> dict[str, list[list[str]]]:
    words = [text.split() for text in TEXTS]
    return {
        "words": words,
        "tags": [["B-pet" if word in ("cat", "dog") else "O" for word in row] for row in words],
    }


def noise(size: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype="uint8")


def encoded(array: np.ndarray, form: str = "PNG") -> bytes:
    memory = io.BytesIO()
    Pictures.fromarray(array).save(memory, form)
    return memory.getvalue()


def table() -> Dataset:
    pictures = [encoded(noise((16, 16, 3), seed)) for seed in range(8)]
    return Dataset.from_dict({"text": TEXTS, "mood": MOODS, "picture": pictures, **tagged()})


def small(kind: str, tokenizer: str) -> Task:
    where: dict[str, dict[str, Any]] = {
        "text-classification": {"columns": "text", "label": "mood", "labels": MOODS},
        "token-classification": {"columns": "words", "label": "tags", "labels": ["O", "B-pet"]},
        "image-classification": {"columns": ["picture"], "label": "mood", "labels": MOODS},
        "causal-lm": {"columns": "text"},
        "masked-lm": {"columns": "text"},
    }
    return make_task(kind, tokenizer=tokenizer, max_length=8, image_size=16, **where[kind])


def tiny(asked: Task, **settings: Any) -> nn.Module:
    """A tiny model that suits a task, loaded by the class that the task names."""
    torch.manual_seed(0)
    labels = {"num_labels": len(asked.labels)} if asked.labels else {}
    if asked.kind == "image-classification":
        config: Any = hf.ViTConfig(**zoo.VISION, **labels)
    elif asked.kind == "causal-lm":
        config = hf.GPT2Config(**zoo.GPT2)
    else:
        # At width 16 the usual start of 0.02 leaves all rows alike for more steps than we take.
        config = hf.BertConfig(**{**zoo.TEXT, "initializer_range": 0.2, **settings}, **labels)
    return getattr(hf, asked.model_class).from_config(config)


def all_of(rows: Any) -> dict[str, Tensor]:
    return rows.batch(torch.arange(len(rows)))


@pytest.mark.parametrize("kind", KINDS)
def test_eight_rows_are_learnt(kind: str, tokenizer: str) -> None:
    asked = small(kind, tokenizer)
    model, rows = tiny(asked), asked.prepare(table())
    before = asked.score(model, rows, batch_size=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(30):
        optimizer.zero_grad()
        asked.loss(model, all_of(rows)).backward()
        optimizer.step()
    after = asked.score(model, rows, batch_size=3)
    assert after["loss"] < 0.8 * before["loss"], (before, after)
    assert after["examples"] == len(rows) > 0
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_does_not_depend_on_the_batches(kind: str, tokenizer: str) -> None:
    asked = small(kind, tokenizer)
    model, rows = tiny(asked).eval(), asked.prepare(table())
    one, many = (asked.score(model, rows, batch_size=size) for size in (1, 100))
    assert one == pytest.approx(many, rel=1e-4)
    assert asked.score(model, rows, batch_size=100) == many
    assert isclose(asked.loss(model, all_of(rows)).item(), many["loss"], rel_tol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_no_task_touches_the_global_generator(kind: str, tokenizer: str) -> None:
    asked = small(kind, tokenizer)
    model, state = tiny(asked), torch.get_rng_state()
    asked.score(model, asked.prepare(table()), batch_size=4)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_have_no_score(kind: str, tokenizer: str) -> None:
    asked = small(kind, tokenizer)
    rows = asked.prepare(table().select([]))
    assert asked.score(tiny(asked), rows, batch_size=4) == {"examples": 0.0}


class Oracle(nn.Module):
    """Gives the answers it was told, by what it is shown."""

    def __init__(self, asked: Task, rows: Any, classes: int, wrong: bool = False) -> None:
        super().__init__()
        self.answers: dict[tuple[Any, ...], Tensor] = {}
        self.classes = classes
        for number in range(len(rows)):
            batch = rows.batch(torch.tensor([number]))
            labels = batch.pop("labels")[0]
            if asked.kind == "causal-lm":
                labels = labels.roll(-1)
            self.answers[self.key(batch, 0)] = (labels.clamp(min=0) + wrong) % classes

    @staticmethod
    def key(batch: dict[str, Tensor], row: int) -> tuple[Any, ...]:
        if "pixel_values" in batch:
            return tuple(batch["pixel_values"][row].flatten().tolist())
        inside = batch["attention_mask"][row].bool()
        return tuple(batch["input_ids"][row][inside].tolist())

    def forward(self, **batch: Tensor) -> Tensor:
        first = next(iter(batch.values()))
        answers = [self.answers[self.key(batch, row)] for row in range(len(first))]
        if answers[0].ndim:
            answers = [nn.functional.pad(a, (0, first.shape[1] - len(a))) for a in answers]
        return 50.0 * nn.functional.one_hot(torch.stack(answers), self.classes).float()


@pytest.mark.parametrize("kind", KINDS)
def test_who_knows_the_answers_scores_one(kind: str, tokenizer: str) -> None:
    asked = small(kind, tokenizer)
    rows, classes = asked.prepare(table()), len(asked.labels) or len(WORDS)
    right = asked.score(Oracle(asked, rows, classes), rows, batch_size=3)
    wrong = asked.score(Oracle(asked, rows, classes, wrong=True), rows, batch_size=3)
    assert right["accuracy"] == 1.0 and right["loss"] < 1e-6 and right.get("f1", 1.0) == 1.0
    assert wrong["accuracy"] == 0.0 and wrong["loss"] > 1 and wrong.get("f1", 0.0) == 0.0
    if kind.endswith("-lm"):
        assert right["perplexity"] == pytest.approx(1.0) and "f1" not in right
        assert isclose(log(wrong["perplexity"]), wrong["loss"])


def test_batches_are_padded_to_their_longest_row(tokenizer: str) -> None:
    rows = small("text-classification", tokenizer).prepare(table())
    batch = rows.batch(torch.tensor([6, 0]))
    assert batch["input_ids"].tolist() == [[2, 7, 3, 0, 0], [2, 5, 6, 8, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [2, 0]
    assert all_of(rows)["input_ids"].shape == (8, 8)


def test_what_is_cut_off_unread_is_not_missed() -> None:
    source = shared("gte-small")
    rows = load_table(shared("text/20news_bydate.parquet"), split="test").select(range(0, 7000, 70))
    asked = make_task(
        "text-classification",
        tokenizer=source,
        columns="body",
        label="newsgroup",
        labels=label_names([rows], "newsgroup"),
        max_length=64,
    )
    batch = all_of(asked.prepare(rows))
    whole = hf.AutoTokenizer.from_pretrained(source)(
        list(rows["body"]), truncation=True, max_length=64
    )["input_ids"]
    found = [
        ids[inside.bool()].tolist()
        for ids, inside in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert found == whole


def test_a_pair_of_texts_is_told_apart(tokenizer: str) -> None:
    pairs = Dataset.from_dict({"a": ["the cat", "a"], "b": ["sat", "dog ran"], "y": [1, 10]})
    asked = make_task(
        "text-classification", tokenizer=tokenizer, columns=["a", "b"], label="y", labels=[10, 1]
    )
    assert asked.labels == ("1", "10")
    batch = all_of(asked.prepare(pairs))
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert batch["labels"].tolist() == [0, 1]
    assert isfinite(asked.loss(tiny(asked), batch).item())


def test_a_word_has_its_label_at_its_first_token(tokenizer: str) -> None:
    rows = Dataset.from_dict({"w": [["unhappy", "cat"], ["sat"]], "t": [["B-x", "O"], ["I-x"]]})
    asked = make_task(
        "token-classification",
        tokenizer=tokenizer,
        columns="w",
        label="t",
        labels=["B-x", "I-x", "O"],
    )
    batch = all_of(asked.prepare(rows))
    assert batch["input_ids"].tolist() == [[2, 13, 14, 6, 3], [2, 8, 3, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 0, -100, 2, -100], [-100, 1, -100, -100, -100]]


def test_numbered_tags_go_by_their_names(tokenizer: str) -> None:
    names = ["O", "B-pet"]
    features = Features({"w": List(Value("string")), "t": List(ClassLabel(names=names))})
    words = tagged()["words"]
    numbers = [[names.index(tag) for tag in row] for row in tagged()["tags"]]
    named = Dataset.from_dict({"w": words, "t": numbers}, features=features)
    assert label_names([named], "t") == ["B-pet", "O"]
    asked = make_task(
        "token-classification", tokenizer=tokenizer, columns="w", label="t", labels=names
    )
    other = small("token-classification", tokenizer).prepare(table())
    short = all_of(other)["labels"][0][:5].tolist()
    assert asked.prepare(named).batch(torch.tensor([0]))["labels"][0].tolist() == short
    plain = make_task(
        "token-classification", tokenizer=tokenizer, columns="w", label="t", labels=[0, 1]
    )
    rows = plain.prepare(Dataset.from_dict({"w": words, "t": numbers}))
    assert 0 <= plain.score(tiny(plain), rows, batch_size=8)["f1"] <= 1


def test_where_there_is_no_entity_to_find_none_is_right(tokenizer: str) -> None:
    asked = small("token-classification", tokenizer)
    rows = asked.prepare(Dataset.from_dict({"words": [["the", "mat"]], "tags": [["O", "O"]]}))
    assert asked.score(Oracle(asked, rows, 2), rows, batch_size=1)["f1"] == 1.0


def test_texts_become_blocks_of_their_own_and_no_token_is_lost(tokenizer: str) -> None:
    long = Dataset.from_dict({"text": [*TEXTS, " ".join(["cat"] * 19), " ".join(["dog"] * 16)]})
    rows = small("causal-lm", tokenizer).prepare(long)
    batch = all_of(rows)
    sizes = batch["attention_mask"].sum(1).tolist()
    words = [len(text.split()) + 1 for text in TEXTS]
    words[4] += 1  # unhappy is two tokens
    # of 20 tokens 8, 8 and 4; of 17 the last one, alone in its block, has nothing to predict
    assert sizes == [*words, 8, 8, 4, 8, 8]
    labelled = batch["attention_mask"].bool()
    labelled[:, 0] = False  # nothing predicts the first token
    assert torch.equal(batch["labels"] != -100, labelled)
    one = replace(small("causal-lm", tokenizer), one_example_per_row=True).prepare(long)
    assert all_of(one)["attention_mask"].sum(1).tolist() == [*words, 8, 8]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "image" not in kind])
def test_texts_without_a_token_are_refused(kind: str, tokenizer: str) -> None:
    empty = {"text": ["", " \n"], "mood": ["calm"] * 2, "words": [[], [""]], "tags": [[], ["O"]]}
    asked, none = small(kind, tokenizer), Dataset.from_dict(empty)
    rows = concatenate_datasets([table().select_columns(list(empty)), none.cast(FORM)])
    with pytest.raises(DataError, match=r"without tokens in 2 of 10 rows: remove"):
        asked.prepare(rows)


FORM = Features(
    {
        "text": Value("string"),
        "mood": Value("string"),
        "words": List(Value("string")),
        "tags": List(Value("string")),
    }
)


def test_masks_are_as_the_seed_says(tokenizer: str) -> None:
    rows = small("masked-lm", tokenizer).prepare(table())
    indices = torch.arange(len(rows))

    assert isinstance(rows, SeededExamples)

    def drawn(seed: int) -> dict[str, Tensor]:
        return rows.with_seed(seed).batch(indices)

    for seed in (0, 1, 2):
        first, second = drawn(seed), drawn(seed)
        assert all(torch.equal(first[name], second[name]) for name in first)
        asked = first["labels"] != -100
        assert asked.any(1).all() and not asked[first["attention_mask"] == 0].any()
        assert not torch.isin(first["labels"][asked], torch.arange(5)).any()
    assert not torch.equal(drawn(1)["labels"], drawn(2)["labels"])
    for index in indices:
        alone = rows.batch(index[None])["labels"][0]
        assert torch.equal(alone, drawn(0)["labels"][index][: len(alone)])


def test_masks_have_the_shares_of_bert(tokenizer: str) -> None:
    many = Dataset.from_dict({"text": ["cat dog sat ran on mat " * 10] * 400})
    asked = make_task("masked-lm", tokenizer=tokenizer, columns="text", max_length=64)
    rows = asked.prepare(many)
    ids, before = all_of(rows)["input_ids"], all_of(rows.blocks)["input_ids"]  # type: ignore[attr-defined]
    hidden = all_of(rows)["labels"] != -100
    assert hidden.sum() / (before > 4).sum() == pytest.approx(0.15, abs=0.01)
    assert (ids[hidden] == 4).float().mean() == pytest.approx(0.8 + 0.1 / 15, abs=0.02)
    assert (ids[hidden] == before[hidden]).float().mean() == pytest.approx(0.1 + 0.1 / 15, abs=0.02)


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "png": encoded,
    "webp": lambda array: encoded(array, "WEBP"),
    "dict": lambda array: {"bytes": encoded(array), "path": None},
    "array": lambda array: array.tolist(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_picture_may_come_in_any_form(form: str) -> None:
    plain = np.full((4, 4, 3), 51, dtype="uint8")
    rows = Dataset.from_dict({"x": [FORMS[form](plain)], "y": [0]})
    asked = make_task("image-classification", columns="x", label="y", labels=[0], image_size=8)
    pixels = all_of(asked.prepare(rows))["pixel_values"]
    assert pixels.shape == (1, 3, 8, 8)
    assert torch.allclose(pixels, torch.tensor(-0.6))


def test_pictures_keep_their_place_and_gray_is_three_times_the_same() -> None:
    gray = noise((2, 5, 5), 0)
    image = Dataset.from_dict({"x": [Pictures.fromarray(g) for g in gray], "y": [0, 1]})
    array = Dataset.from_dict({"x": gray, "y": [0, 1]})
    assert isinstance(image.features["x"], Image)
    asked = make_task("image-classification", columns="x", label="y", labels=[0, 1], image_size=5)
    for rows in (image, array):
        pixels = all_of(asked.prepare(rows))["pixel_values"]
        expected = torch.from_numpy(gray).float() / 127.5 - 1
        assert torch.allclose(pixels, expected[:, None].expand(2, 3, 5, 5), atol=1e-6)


def test_pictures_are_centred_as_the_processor_says(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_mean": [0, 0, 0], "image_std": [1, 1, 2]}'
    )
    rows = Dataset.from_dict({"x": np.full((1, 2, 2), 255, dtype="uint8"), "y": [0]})
    asked = make_task(
        "image-classification",
        columns="x",
        label="y",
        labels=[0],
        model=str(tmp_path),
        image_size=2,
    )
    assert all_of(asked.prepare(rows))["pixel_values"][0, :, 0, 0].tolist() == [1, 1, 0.5]


def test_a_score_leaves_each_module_in_its_mode(tokenizer: str) -> None:
    asked = small("text-classification", tokenizer)
    model = tiny(asked).train()
    model.bert.eval()  # type: ignore[union-attr,operator]
    modes = [module.training for module in model.modules()]
    score = asked.score(model, asked.prepare(table()), batch_size=4)
    assert [module.training for module in model.modules()] == modes
    assert set(score) == {"loss", "accuracy", "f1", "examples"}


REAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text-classification": (
        "text/20news_bydate.parquet",
        "train",
        {"columns": ["subject", "body"], "label": "newsgroup"},
    ),
    "token-classification": (
        "text/bio_ner.parquet",
        "train",
        {"columns": "tokens", "label": "tags"},
    ),
    "image-classification": (
        "cifar10/cifar10_6k_lossless.parquet",
        "train",
        {"columns": "webp", "label": "label", "image_size": 16},
    ),
    "gray": (
        "fashion-mnist/fashion_mnist_24k.npz",
        "test",
        {"columns": "x", "label": "y", "image_size": 16},
    ),
    "masked-lm": ("text/gutenberg_plays_by_role.parquet", "", {"columns": "text"}),
}
SHAPES = {
    "text-classification": (4, 32),
    "image-classification": (4, 3, 16, 16),
    "gray": (4, 3, 16, 16),
}


@pytest.mark.parametrize("kind", REAL)
def test_real_data_give_a_batch_and_a_loss(kind: str) -> None:
    path, split, columns = REAL[kind]
    rows = load_table(shared(path), split=split)
    rows = rows.select(range(0, len(rows), len(rows) // 60))
    labels = label_names([rows], columns["label"]) if "label" in columns else ()
    name = "image-classification" if kind == "gray" else kind
    source = {} if "image_size" in columns else {"tokenizer": shared("gte-small")}
    asked = make_task(name, labels=labels, max_length=32, **source, **columns)
    prepared = asked.prepare(rows)
    batch = prepared.batch(torch.arange(4))
    first = batch.get("pixel_values", batch.get("input_ids"))
    assert first is not None and first.shape == SHAPES.get(kind, first.shape) and len(first) == 4
    model = tiny(asked, vocab_size=30522)
    loss = asked.loss(model, batch).item()
    assert isfinite(loss) and loss < 2 * log(30522)
    if kind != "masked-lm":
        assert len(prepared) == len(rows) and loss < 2 * log(len(asked.labels))


@pytest.mark.parametrize(
    ("kind", "changed", "words"),
    [
        ("text-clasification", {}, "'text-clasification': did you mean text-classification"),
        ("text-classification", {"columns": "txt"}, "no column 'txt'; there are text, mood"),
        ("text-classification", {"columns": "words"}, "'words' has list cells, not texts"),
        ("text-classification", {"label": "moods"}, "no column 'moods'; there are text, mood"),
        ("text-classification", {"labels": ["calm", "sad"]}, "label 'wild' .*: calm, sad"),
        ("text-classification", {"labels": []}, "all labels"),
        ("text-classification", {"tokenizer": "/nowhere"}, "no tokenizer in '/nowhere'"),
        ("causal-lm", {"columns": ["text", "mood"]}, r"columns \['text', 'mood'\]"),
        ("image-classification", {"columns": "pixels"}, "no column 'pixels'; there are text"),
        ("image-classification", {"columns": "text"}, "row 0 of column 'text' is not an image"),
        (
            "token-classification",
            {"columns": "words", "label": "short"},
            "row 0 has 3 words .* 1 labels",
        ),
    ],
)
def test_what_is_wrong_is_named(
    kind: str, changed: dict[str, Any], words: str, tokenizer: str
) -> None:
    rows = table().add_column("short", [["calm"]] * 8)
    right = {"columns": "text", "label": "mood", "labels": MOODS, "tokenizer": tokenizer}
    right |= {"image_size": 4}
    with pytest.raises(FedplanError, match=words):
        make_task(kind, **{**right, **changed}).prepare(rows)


def test_a_model_of_other_classes_is_refused(tokenizer: str) -> None:
    asked = small("text-classification", tokenizer)
    model = hf.BertForSequenceClassification(hf.BertConfig(**zoo.TEXT, num_labels=5))
    with pytest.raises(DataError, match=r"5 classes, but the task has 3 labels.*num_labels = 3"):
        asked.loss(model, all_of(asked.prepare(table())))


def test_each_turn_of_training_hides_other_tokens(tokenizer: str) -> None:
    asked = small("masked-lm", tokenizer)
    rows, seen = asked.prepare(table()), list[Tensor]()
    model = torch.nn.Linear(1, 1)

    def loss(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        seen.append(batch["labels"])
        return model(torch.ones(1)).sum()

    params = (Param("weight", Kind.HEAD, (1, 1)), Param("bias", Kind.HEAD, (1,)))
    roles = dict.fromkeys(params, Role.SHARE)
    for seed in (1, 1, 2):
        plain_fit(
            Job(model, roles, rows, loss, TrainArguments(batch_size=99, steps=1), seed, start={})
        )
    ordered = [batch[batch.sum(1).argsort()] for batch in seen]
    assert torch.equal(ordered[0], ordered[1]) and not torch.equal(ordered[0], ordered[2])
