# SPDX-License-Identifier: Apache-2.0
"""Measure the size of the package at a commit: lines, logic, modules, names, signatures.

    python research/house.py COMMIT ...      (the working tree without a commit)

Prints a table in Markdown with a column for each commit.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SILENT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT}


@dataclass(frozen=True)
class Module:
    """A file of the package: its text and its syntax tree."""

    text: str
    tree: ast.Module

    def lines(self) -> int:
        return self.text.count("\n")

    def logic(self) -> int:
        """Lines with code, without docstrings, comments, imports and blanks."""
        skipped = set[int]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom) or (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                skipped |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        code = {
            line
            for token in tokens
            if token.type not in SILENT and token.string.strip()
            for line in range(token.start[0], token.end[0] + 1)
        }
        return len(code - skipped)

    def definitions(self) -> list[Definition]:
        return [n for n in ast.walk(self.tree) if isinstance(n, Definition)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of parameters without self and cls."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([each for each in every if each.arg not in ("self", "cls")])


def measure(package: Path) -> dict[str, str]:
    """Return the rows of a package."""
    texts = {file: file.read_text() for file in sorted(package.rglob("*.py"))}
    modules = [Module(text, ast.parse(text)) for text in texts.values()]
    private, uses, public = list[str](), Counter[str](), 0
    longest = list[int]()
    for module in modules:
        public += sum(
            isinstance(node, Definition) and not node.name.startswith("_")
            for node in module.tree.body
        )
        for node in module.definitions():
            if not isinstance(node, ast.ClassDef):
                longest.append(parameters(node))
                if node.name.startswith("_") and not node.name.startswith("__"):
                    private.append(node.name)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                uses[node.id if isinstance(node, ast.Name) else node.attr] += 1
    folders = Counter[str]()
    for file, module in zip(texts, modules, strict=True):
        folders[file.relative_to(package).parts[0].removesuffix(".py")] += module.lines()
    sizes = [module.lines() for module in modules if module.lines()]
    return {
        "lines": f"{sum(sizes):,}",
        "logic": f"{sum(module.logic() for module in modules):,}",
        "modules, median": f"{len(sizes)}, {statistics.median(sizes):.0f}",
        "largest module": f"{max(sizes)}",
        "public definitions": f"{public:,}",
        "private functions (used once)": f"{len(private)} ({sum(uses[n] <= 1 for n in private)})",
        "ten longest signatures": " ".join(map(str, sorted(longest, reverse=True)[:10])),
        "largest packages": ", ".join(f"{name} {n:,}" for name, n in folders.most_common(5)),
    }


def at(commit: str) -> dict[str, str]:
    """Measure the package at a commit."""
    archive = subprocess.check_output(["git", "-C", str(ROOT), "archive", commit, "fedplan"])
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return measure(Path(folder) / "fedplan")


def main() -> None:
    """Print the table."""
    columns = {commit: at(commit) for commit in sys.argv[1:]} or {"here": measure(ROOT / "fedplan")}
    rows = [["", *columns], ["---"] * (len(columns) + 1)]
    rows += [[name, *(c[name] for c in columns.values())] for name in next(iter(columns.values()))]
    sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in rows))


if __name__ == "__main__":
    main()
