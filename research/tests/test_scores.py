# SPDX-License-Identifier: Apache-2.0
"""Readings of SAFL's score: what they are, the oracle that they are held against, and their page."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from scipy.stats import spearmanr
from torch import Tensor
from transformers import BertConfig, BertModel

from research.scores.oracle import Encoder, batches, held_out, prefixes, trained
from research.scores.page import PAGE, tables, written
from research.scores.question import Training, read_question
from research.scores.readings import OF_MAPS, of_gradients, of_maps, seen, share, who_of
from research.scores.results import OUT, rank_correlation, read_results
from research.scores.tasks import NONE, Rows, Task, score_of

HOW = Training(12, 6, 7, 4, 2, 1e-2, 3, 3, 1e-3, 1e-3)


def rows(count: int, *, tags: bool = False) -> Rows:
    random = torch.Generator().manual_seed(count)
    ids = torch.randint(1, 20, (count, HOW.tokens), generator=random)
    mask = (torch.arange(HOW.tokens) < 4 + torch.arange(count)[:, None] % 4).long()
    shape = (count, HOW.tokens) if tags else (count,)
    labels = torch.randint(0, 3, shape, generator=random)
    return Rows(ids, mask, labels.masked_fill(mask == 0, NONE) if tags else labels)


@pytest.fixture(scope="module", params=[False, True], ids=["texts", "tags"])
def small(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Encoder, Task]:
    task = Task("small", 3, rows(HOW.rows, tags=request.param), rows(HOW.tests, tags=request.param))
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = BertConfig(vocab_size=20, intermediate_size=32, max_position_embeddings=8, **shape)
    folder = tmp_path_factory.mktemp("bert")
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return Encoder(folder, task), task


def maps_of(rows: Rows, heads: int = 2) -> Tensor:
    held = torch.randn(len(rows), heads, HOW.tokens, HOW.tokens)
    return held.masked_fill(rows.mask[:, None, None, :] == 0, -torch.inf).softmax(-1)


def test_summed_over_all_tokens_the_score_is_a_constant() -> None:
    """Heads times tokens, whatever a block does: the careless reading of formula 1."""
    here = rows(6)
    who = who_of(here)
    for _ in range(3):
        found = seen(maps_of(here), who.real, who.real)
        assert torch.allclose(found, 2.0 * here.mask.sum(1).double(), atol=1e-5)


def test_shares_add_up_and_special_tokens_are_told_apart() -> None:
    here = rows(6)
    who, maps = who_of(here), maps_of(here)
    parts = [share(maps, who.real, each) for each in (who.first, who.words, who.last)]
    assert torch.allclose(torch.stack(parts).sum(0), torch.ones(6).double(), atol=1e-6)
    assert (who.words.sum(1) == here.mask.sum(1) - 2).all()


def test_the_blocks_by_hand_are_those_of_the_model(small: tuple[Encoder, Task]) -> None:
    encoder, task = small
    with torch.no_grad():
        mine = encoder.go(encoder.enter(task.train), task.train.mask)
        whole = encoder.bert(input_ids=task.train.ids, attention_mask=task.train.mask)
    real = task.train.mask.bool()
    assert torch.allclose(mine[real], whole.last_hidden_state[real], atol=1e-5)


def test_features_below_a_block_change_nothing_but_the_time(small: tuple[Encoder, Task]) -> None:
    encoder, task = small
    held = list(prefixes(encoder, task))
    for block in range(3):
        one, other = (
            trained(encoder, frozenset({block}), task, held[at], HOW, 0) for at in (0, block)
        )
        assert held_out(one, task, held[0]) == pytest.approx(
            held_out(other, task, held[block]), abs=1e-5
        )


def test_only_what_is_asked_is_trained(small: tuple[Encoder, Task]) -> None:
    encoder, task = small
    for prefix in prefixes(encoder, task):  # in the loop, as the lab does it
        made = trained(encoder, frozenset({1}), task, prefix, HOW, 0)
        break
    pairs = zip(encoder.named_parameters(), made.named_parameters(), strict=True)
    moved = {name for (name, old), (_, new) in pairs if not torch.equal(old, new)}
    assert moved
    assert all(name.startswith(("head.", "bert.encoder.layer.1.", "blocks.1.")) for name in moved)
    assert not any(w.requires_grad for w in encoder.bert.parameters())


def test_every_run_of_a_seed_sees_the_same_rows_once_in_a_pass() -> None:
    one, other = (torch.cat(list(batches(12, HOW, 5))) for _ in range(2))
    assert torch.equal(one, other)
    assert sorted(one.tolist()) == list(range(12))
    assert len(torch.cat(list(batches(12, replace(HOW, steps=7), 5)))) == 28


def test_a_reading_has_a_number_for_each_block_and_changes_nothing(
    small: tuple[Encoder, Task],
) -> None:
    encoder, task = small
    before = [weight.clone() for weight in encoder.parameters()]
    told = of_maps(encoder, task.train) | of_gradients(encoder, task.train)
    assert {*OF_MAPS, "gradient", "Fisher"} == told.keys()
    assert all(len(each) == 3 for each in told.values())
    assert all(torch.equal(a, b) for a, b in zip(before, encoder.parameters(), strict=True))
    assert not any(w.requires_grad for w in encoder.bert.parameters())


def test_diseases_are_scored_by_the_tokens_that_are_in_one() -> None:
    labels = torch.tensor([[NONE, 1, 2, 0, 0]])
    right = torch.nn.functional.one_hot(torch.tensor([[2, 1, 2, 0, 0]]), 3).float()
    half = torch.nn.functional.one_hot(torch.tensor([[2, 1, 0, 0, 0]]), 3).float()
    assert score_of(right, labels, tags=True) == 1.0
    assert score_of(half, labels, tags=True) == pytest.approx(2 / 3)


numbers = st.lists(st.integers(-5, 5).map(float), min_size=12, max_size=12)


@settings(max_examples=often(100))
@given(numbers, numbers)
def test_ranks_correlate_as_elsewhere(one: list[float], other: list[float]) -> None:
    found = rank_correlation(one, other)
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(float(spearmanr(one, other).statistic), abs=1e-9)
        assert rank_correlation([3 * each + 1 for each in one], other) == found


def _began(file: Path) -> float:
    runs = json.loads(file.read_text())["runs"].values()
    return min((run["began"] for run in runs), default=inf)


def _time_of(commit: str) -> int:
    """When the question was committed; the beginning of time where the log is not at hand."""
    git = ["git", "-C", str(OUT.parent), "show", "-s", "--format=%ct", commit]
    return int(subprocess.run(git, capture_output=True, text=True, check=False).stdout or 0)


def test_the_results_are_those_of_the_question_and_the_page_is_theirs() -> None:
    asked = read_question()
    for file in OUT.glob("*.json"):
        assert json.loads(file.read_text())["question"] == asked.digest, file.name
        assert _began(file) > _time_of(json.loads(file.read_text())["asked at"]), file.name
    assert read_results(asked)
    page = Path(PAGE).read_text()
    assert written(page, tables()) == page, "make it anew: python -m research.scores.page"
