# SPDX-License-Identifier: Apache-2.0
"""Five scripts of at most forty lines, and their lines beside Flower's as the files have them."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COUNT = runpy.run_path(str(ROOT / "lab" / "peers" / "count.py"))
KEPT = json.loads((ROOT / "lab" / "results" / "peers.json").read_text())


@pytest.mark.parametrize("name", COUNT["SCRIPTS"])
def test_a_script_has_at_most_forty_lines(name: str) -> None:
    assert COUNT["counts"]()[name]["fedplan"]["file"] <= 40


def test_the_kept_counts_are_those_of_the_files() -> None:
    assert KEPT["scripts"] == COUNT["counts"](), "count anew: python lab/peers/count.py"
    assert KEPT["rule"] == COUNT["RULE"]


def test_the_rule_leaves_out_blanks_comments_and_docstrings() -> None:
    text = '"""Said\n\nhere."""\n\n# why\nimport os\n\n\ndef f():\n    """Said."""\n    return """a\n\nb"""  # c\n'
    assert COUNT["counted"](text) == {"code": 5, "file": 13}


def test_the_table_of_the_document_has_these_numbers() -> None:
    told = (ROOT / "lab" / "pages" / "peers.md").read_text()
    rows = re.findall(
        r"^\| \[`(\w+)\.py`\]\(\.\./\.\./examples/\1\.py\) \| .+ \| (\d+) \((\d+)\) "
        r"\| \[(\d+) \((\d+)\)\]\(\.\./peers/\1\.py\) \|",
        told,
        flags=re.M,
    )
    found = {
        name: {
            "fedplan": {"code": int(ours), "file": int(our_file)},
            "flower": {"code": int(theirs), "file": int(their_file)},
        }
        for name, ours, our_file, theirs, their_file in rows
    }
    assert found == KEPT["scripts"]


def test_the_gate_runs_each_script() -> None:
    gate = (ROOT / "Makefile").read_text()
    listed = re.search(r"for script in ([\w ]+);", gate)
    assert listed is not None
    assert set(COUNT["SCRIPTS"]) <= set(listed[1].split())


def test_both_do_the_same_job_by_their_losses() -> None:
    told = (ROOT / "lab" / "pages" / "peers.md").read_text()
    bound = re.search(r"losses differ by at most ([\d.]+)", told)
    losses = json.loads((ROOT / "lab" / "results" / "peers_losses.json").read_text())["losses"]
    assert bound is not None
    assert list(losses) == list(COUNT["SCRIPTS"])
    for each in losses.values():
        pairs = zip(each["fedplan"], each["flower"], strict=True)
        assert max(abs(ours - theirs) for ours, theirs in pairs) <= float(bound[1])
