# SPDX-License-Identifier: Apache-2.0
"""A base on this disk is digested once; what changed since, in its file or in memory, is again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

from fedplan.federation import origin
from fedplan.federation.origin import Base, base_of
from fedplan.models.description import describe
from fedplan.models.values import take
from fedplan.studies import bases


class Hashing:
    """A model that was saved, and how many of its tensors a base of it takes to hash."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.folder, self.model, self.count = folder / "model", zoo.build("bert"), 0
        self.save()
        self.params, self.hash = describe(self.model), origin.whole_digest
        self.head = [p for p in self.params if p.kind == "head"]
        monkeypatch.setattr(origin, "whole_digest", self.counted)
        monkeypatch.setattr(bases, "LEAST", 1)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    def save(self) -> None:
        held: Any = self.model
        held.save_pretrained(self.folder)

    def counted(self, tensor: Tensor) -> str:
        self.count += 1
        return self.hash(tensor)

    def base(self) -> tuple[Base, int]:
        self.count = 0
        start = take(self.model, self.head)
        return bases.base_in(self.folder, self.model, self.params, start), self.count

    def right(self, found: Base) -> bool:
        return found == base_of(self.model, self.params, take(self.model, self.head))


@pytest.fixture
def hashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hashing:
    return Hashing(tmp_path, monkeypatch)


def first(model: nn.Module) -> Tensor:
    return next(model.parameters()).data.view(-1)


def test_a_base_is_hashed_once_and_what_may_change_each_time(hashing: Hashing) -> None:
    found, count = hashing.base()
    assert count == len(hashing.params) and hashing.right(found)
    again, count = hashing.base()
    assert count == len(hashing.head) and again == found


def test_a_value_that_is_not_what_it_was_is_hashed_again(hashing: Hashing) -> None:
    hashing.base()
    first(hashing.model)[-1] += 1
    found, count = hashing.base()
    assert count == len(hashing.head) + 1 and hashing.right(found)


def test_a_file_that_was_written_again_is_hashed_again(hashing: Hashing) -> None:
    hashing.base()
    (file,) = hashing.folder.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content)
    found, count = hashing.base()
    assert count == len(hashing.params) and hashing.right(found)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": ["x", "y"]}'])
def test_a_memory_that_cannot_be_read_is_none(hashing: Hashing, tmp_path: Path, text: str) -> None:
    hashing.base()
    (file,) = (tmp_path / "cache").rglob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(text)
    found, count = hashing.base()
    assert count == len(hashing.params) and hashing.right(found)


def test_small_bases_leave_no_file(
    hashing: Hashing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bases, "LEAST", 2**28)
    assert hashing.base()[1] == len(hashing.params) and not (tmp_path / "cache").exists()
