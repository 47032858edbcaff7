# SPDX-License-Identifier: Apache-2.0
"""The command line as a person meets it: what it prints, and what it says when it is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedplan.cli import app


def run(*args: str, width: int = 80) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, list(args))
    return result.exit_code, result.stdout, result.stderr


def test_explain_fits_a_terminal_and_says_it_all() -> None:
    code, out, _ = run(
        "explain", "vit-base-16", "chain(share(), when(after(20), freeze(query | key)))"
    )
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    for word in ("rounds 1-20", "rounds 21-100", "FREEZE", "16.5 %", "286.5", "not trained"):
        assert word in out


def test_parts_lists_every_part_within_the_terminal() -> None:
    code, out, _ = run("parts", "clip-vit-base-16")
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    for word in ("text", "vision", "query", "0-11", "logit_scale", "visual_projection.weight"):
        assert word in out


def test_rows_of_a_fused_tensor_are_named_by_their_kind() -> None:
    assert "c_attn.weight[query]" in run("parts", "gpt2")[1]


def test_parts_as_json_is_a_manifest_that_explain_reads(tmp_path: Path) -> None:
    manifest = tmp_path / "mine.json"
    manifest.write_text(run("parts", "gpt2", "--json")[1])
    ours = json.loads(run("explain", str(manifest), "share()", "--json")[1])
    assert ours == json.loads(run("explain", "gpt2", "share()", "--json")[1])


def test_draw_writes_a_picture(tmp_path: Path) -> None:
    code, _, err = run("draw", "vit-tiny-16", "chain(share(), keep(head))", str(tmp_path / "p.png"))
    assert (code, err) == (0, "")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["explain", "vit-base-16", "frezze()"], ["did you mean freeze?", "^"]),
        (["explain", "vit-base-16", "keep(prompt)"], ["prompt matches no parameter"]),
        (["explain", "gpt2", "keep(head)"], ["tied to 'transformer.wte.weight'"]),
        (["explain", "vit-bse-16", "share()"], ["did you mean vit-base-16"]),
        (["explain", "gpt2", "share()", "--phase", "frozen"], ["NAME=ROUND", "'frozen'"]),
        (["explain", "gpt2", "share()", "--phase", "frozen=3"], ["no phase 'frozen'"]),
        (["explain", "gpt2", "share()", "--dtype", "f"], ["no dtype 'f'", "bfloat16"]),
        (["parts", "gpt2", "--task", "x"], ["no task 'x'", "causal-lm"]),
        (["draw", "vit-tiny-16", "share()", "no/where.png"], ["no/where.png cannot be written"]),
        (["draw", "vit-tiny-16", "share()", "picture.doc"], ["cannot write picture.doc", "png"]),
    ],
)
def test_a_wrong_value_is_one_message_that_names_it(args: list[str], words: list[str]) -> None:
    code, out, err = run(*args, width=200)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    for word in words:
        assert word in err


def test_a_command_that_computes_nothing_loads_neither_torch_nor_transformers(here: Path) -> None:
    assert run("run", "study.toml", "--set", "train.rounds=1", "--output", "out")[0] == 0
    commands = [
        ["--version"],
        ["explain", "bert-base", "share()", "--json"],
        *(["status", "out", *more] for more in ([], ["--json"], ["--watch"])),
        ["stop", "out"],
        ["logs", "out"],
        ["site", "inbox"],
    ]
    Path("site.toml").write_text('name = "north"')
    program = (
        "import json, sys; from fedplan.cli import app\n"
        "try: app(json.loads(sys.argv[1]))\n"
        "except SystemExit: pass\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers')))"
    )
    for each in commands:
        words = [sys.executable, "-c", program, json.dumps(each)]
        done = subprocess.run(words, capture_output=True, check=False)
        assert done.returncode == 0, (each, done.stderr)
