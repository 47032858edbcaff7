# SPDX-License-Identifier: Apache-2.0
"""Count the lines of five scripts and of the same jobs in Flower, which stand beside this file."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULT = ROOT / "research" / "results" / "peers.json"
SCRIPTS = ("own_model", "own_method", "instruct", "qlora", "trainer")
FOLDERS = {"fedplan": ROOT / "examples", "flower": HERE}
RULE = (
    "code: lines that are neither blank, nor comment, nor docstring; imports count. "
    "file: all lines. Both after ruff format with lines of 100."
)
_BLANK = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)


def counted(text: str) -> dict[str, int]:
    """The lines of a file by the rule."""
    return {"code": len(_written(text) - _told(text)), "file": len(text.splitlines())}


def _written(text: str) -> set[int]:
    """The lines on which some token stands that is no comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    written = [t for t in tokens if t.type not in _BLANK]
    return {line for t in written for line in range(t.start[0], t.end[0] + 1)}


def _told(text: str) -> set[int]:
    """The lines of docstrings."""
    lines = set[int]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case (
                ast.Module(body=[first, *_])
                | ast.ClassDef(body=[first, *_])
                | ast.FunctionDef(body=[first, *_])
            ) if ast.get_docstring(node) is not None:
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def counts() -> dict[str, dict[str, dict[str, int]]]:
    """The lines of each script, in fedplan and in Flower."""
    return {
        name: {of: counted((at / f"{name}.py").read_text()) for of, at in FOLDERS.items()}
        for name in SCRIPTS
    }


def main() -> None:
    """Write the counts of files that are formatted and committed."""
    files = [str(at / f"{name}.py") for at in FOLDERS.values() for name in SCRIPTS]
    subprocess.run(["ruff", "format", "--check", *files], check=True)
    subprocess.run(
        ["git", "-C", str(ROOT), "diff", "--exit-code", "HEAD", "--", *files], check=True
    )
    sys.path.insert(0, str(ROOT / "research"))
    from study import FACTS

    used = ("flwr", "ray", "peft", "trl", "bitsandbytes", "ruff")
    found = {
        "command": "python research/peers/count.py",
        **FACTS,
        **{name: version(name) for name in used},
        "rule": RULE,
        "scripts": counts(),
    }
    RESULT.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
