# SPDX-License-Identifier: Apache-2.0
"""Manifests and configs are true to their models."""

from __future__ import annotations

from pathlib import Path

import pytest
import zoo

import fedplan as fp
from fedplan.models.catalog import (
    MANIFEST_FOLDER,
    SHORT_NAMES,
    manifest_json,
    meta_model,
    params_of,
    read_manifest,
)


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_a_manifest_is_the_description_of_its_model(name: str) -> None:
    # After a change of the architectures: `make manifests`, and read the difference.
    assert (
        manifest_json(fp.describe(meta_model(name)))
        == (MANIFEST_FOLDER / f"{name}.json").read_text()
    )


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_what_is_written_reads_back(name: str, tmp_path: Path) -> None:
    for model in (zoo.build(name), zoo.with_lora(name)):
        params = fp.describe(model)
        (tmp_path / "m.json").write_text(manifest_json(params))
        assert read_manifest(tmp_path / "m.json") == params


def test_a_folder_gives_the_same_as_its_model(tmp_path: Path) -> None:
    model = zoo.build("bert")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    assert params_of(str(tmp_path)) == fp.describe(model)
    backbone = params_of(str(tmp_path), task="backbone")
    assert {p.kind for p in params_of(str(tmp_path))} == {p.kind for p in backbone}
    wide = params_of(str(tmp_path), task="token-classification", labels=7)
    assert wide[-1].shape == (7,)
