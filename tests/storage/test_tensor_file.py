# SPDX-License-Identifier: Apache-2.0
"""Tensor files: read once, with the digest of all bytes, and nothing held that nobody wants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save, save_file
from torch import Tensor

from fedplan.storage import checkpoints
from fedplan.storage.checkpoints import all_tensors, no_tensors, parse_tensors, read_tensors

WHOLE = {
    "state/a": torch.arange(3_000_000, dtype=torch.int32).reshape(3, -1),
    "state/b": torch.randn(5).bfloat16(),
    "reply/c": torch.ones(3, 0, 2),
    "reply/d": torch.tensor(True),
}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    alike = (v.dtype == other[k].dtype and torch.equal(v, other[k]) for k, v in one.items())
    return one.keys() == other.keys() and all(alike)


def test_a_file_is_read_as_it_was_saved_and_hashed_whole_whatever_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(WHOLE, file, metadata={"said": "something"})
    content = file.read_bytes()
    digest = blake3(content).hexdigest()
    assert same(read_tensors(file, all_tensors).tensors, WHOLE) and same(
        parse_tensors(content, all_tensors), WHOLE
    )
    home = {k: v for k, v in WHOLE.items() if k.startswith("state/")}
    for names, kept in (
        (all_tensors, WHOLE),
        (no_tensors, {}),
        (lambda name: name.startswith("state/"), home),
    ):
        tensors, read_digest, fault = read_tensors(file, names)
        assert read_digest == digest and not fault and same(tensors, kept)


@pytest.mark.parametrize("count", [0, 5, 8, 60, 300, -1])
def test_what_is_cut_off_has_no_tensors_and_a_digest_still(tmp_path: Path, count: int) -> None:
    file, content = tmp_path / "a.safetensors", save(WHOLE)[:count]
    file.write_bytes(content)
    tensors, read_digest, fault = read_tensors(file, all_tensors)
    assert not tensors and fault and read_digest == blake3(content).hexdigest()
    with pytest.raises(ValueError):
        parse_tensors(content, all_tensors)


def test_a_header_over_the_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1)}, file)
    monkeypatch.setattr(checkpoints, "MAX_HEADER_BYTES", 8)
    tensors, _, fault = read_tensors(file, all_tensors)
    assert not tensors and "its header would take" in fault
