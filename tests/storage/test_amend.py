# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's meta can be given anew, whole or not at all, and its tensors are let be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedplan.errors import StoreError
from fedplan.storage import files
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import VARIABLE
from fedplan.storage.store import Store

TENSORS = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}


@pytest.fixture(params=["open", "sealed"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    encryption = Encryption(b"k" * 32) if request.param == "sealed" else None
    made = Store(tmp_path / "store", encryption=encryption)
    made.write(TENSORS, {"n": 1}, number=1)
    made.write(TENSORS, {"n": 2}, number=2)
    return made


def tensor_files(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("*.safetensors")}


def test_the_meta_is_new_and_the_tensors_are_not_written(store: Store, tmp_path: Path) -> None:
    before = tensor_files(tmp_path / "store")
    store.replace_meta({"n": 3}, number=2)
    found = store.read_newest()
    assert found is not None and (found.number, found.meta) == (2, {"n": 3})
    assert all(torch.equal(found.tensors[name], each) for name, each in TENSORS.items())
    assert tensor_files(tmp_path / "store") == before and store.find_damage() == []


@pytest.mark.parametrize("point", ["store.manifest_written", "store.manifest_renamed"])
def test_a_disk_that_fails_leaves_one_meta_or_the_other(
    point: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.reset_failpoints()
    monkeypatch.setenv(VARIABLE, f"{point}:enospc@1")
    with pytest.raises(StoreError, match="the meta of checkpoint 2 was not finished"):
        store.replace_meta({"n": 3}, number=2)
    monkeypatch.delenv(VARIABLE)
    found = store.read_newest()
    assert found is not None and found.meta == {"n": 2 if point.endswith("written") else 3}


def test_what_is_not_there_cannot_be_amended(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"checkpoint 7 of .*store"):
        store.replace_meta({"n": 3}, number=7)
    with pytest.raises(StoreError, match="opened for reading"):
        Store(tmp_path / "store", read_only=True).replace_meta({"n": 3}, number=2)
