# SPDX-License-Identifier: Apache-2.0
"""The catalog and its manifests are safe to read from anywhere, and without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedplan.errors import UnknownModel
from fedplan.models.catalog import (
    params_of,
    read_manifest,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(JSON.map(json.dumps), st.text(max_size=30)), st.data())
def test_any_file_is_a_manifest_or_an_error(tmp_path: Path, text: str, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        entry = {"name": "w", "kind": "mlp", "shape": [2]}
        entry[
            data.draw(st.sampled_from(["name", "kind", "shape", "rows", "tags", "on", "dtype"]))
        ] = data.draw(JSON)
        text = json.dumps([entry])
    (tmp_path / "m.json").write_text(text, encoding="utf-8", errors="replace")
    try:
        params = read_manifest(tmp_path / "m.json")
    except UnknownModel as error:
        assert str(tmp_path / "m.json") in str(error)
    else:
        assert all(p.nbytes >= 0 for p in params)


def test_bytes_follow_the_dtype() -> None:
    whole, half = (params_of("gpt2", dtype=d) for d in ("float32", "bfloat16"))
    assert sum(p.nbytes for p in whole) == 2 * sum(p.nbytes for p in half)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: params_of("vit-base"), "did you mean vit-base-16"),
        (lambda: params_of("./nowhere"), "'./nowhere' is not a folder"),
        (lambda: params_of("nobody/nothing"), "'nobody/nothing' is not a folder"),
        (
            lambda: params_of("hub:nobody/nothing"),
            "'hub:nobody/nothing' is not in this machine's cache",
        ),
        (lambda: params_of("gpt2", task="poetry"), "no task 'poetry'"),
        (lambda: params_of("gpt2", dtype="float3"), "no dtype 'float3'"),
        (lambda: params_of("missing.json"), "missing.json is not a manifest"),
    ],
)
def test_a_wrong_name_is_an_error_that_helps(call: object, words: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        call()
    assert words in str(caught.value)
