# SPDX-License-Identifier: Apache-2.0
"""Five scripts, and their lines beside Flower's as the files have them."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT = runpy.run_path(str(ROOT / "research" / "peers" / "count.py"))
KEPT = json.loads((ROOT / "research" / "results" / "peers.json").read_text())


def test_the_kept_counts_are_those_of_the_files() -> None:
    assert KEPT["scripts"] == COUNT["counts"](), "count anew: python research/peers/count.py"
    assert KEPT["rule"] == COUNT["RULE"]


def test_the_rule_leaves_out_blanks_comments_and_docstrings() -> None:
    text = '"""Said\n\nhere."""\n\n# why\nimport os\n\n\ndef f():\n    """Said."""\n    return """a\n\nb"""  # c\n'
    assert COUNT["counted"](text) == {"code": 5, "file": 13}


def test_the_table_of_the_document_has_these_numbers() -> None:
    told = (ROOT / "research" / "pages" / "peers.md").read_text()
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


def test_both_do_the_same_job_by_their_losses() -> None:
    told = (ROOT / "research" / "pages" / "peers.md").read_text()
    bound = re.search(r"losses differ by at most ([\d.]+)", told)
    losses = json.loads((ROOT / "research" / "results" / "peers_losses.json").read_text())["losses"]
    assert bound is not None
    assert list(losses) == list(COUNT["SCRIPTS"])
    for each in losses.values():
        pairs = zip(each["fedplan"], each["flower"], strict=True)
        assert max(abs(ours - theirs) for ours, theirs in pairs) <= float(bound[1])
