# SPDX-License-Identifier: Apache-2.0
"""Run the notebooks and store what their cells print and draw: `python docs/notebooks.py [NAME ...]`.

A notebook is run without Jupyter: its cells are Python without magics, in one namespace.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import matplotlib.figure

FOLDER = Path(__file__).parents[1] / "notebooks"
Output = dict[str, Any]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of code, in their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells(notebook: dict[str, Any], name: str) -> Iterator[list[Output]]:
    """Run the cells of code one after the other, and yield the outputs of each."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), 1):
        source = "".join(cell["source"])
        file = f"<{name} {number}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        printed, value = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, file, "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), file, "eval"), namespace)
        yield outputs(printed.getvalue(), value, number)


def outputs(printed: str, value: object, number: int) -> list[Output]:
    """What Jupyter stores of a cell: its printed text, and its last value as text or picture."""
    found = list[Output]()
    if printed:
        found.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(True)})
    if isinstance(value, matplotlib.figure.Figure):
        drawn = io.BytesIO()
        value.savefig(drawn, format="png", dpi=80, metadata={"Software": None})
        picture = base64.b64encode(drawn.getvalue()).decode() + "\n"
        mime = {"image/png": picture, "text/plain": ["a figure"]}
        found.append({"output_type": "display_data", "data": mime, "metadata": {}})
    elif value is not None:
        mime = {"text/plain": repr(value).splitlines(True)}
        result = {"output_type": "execute_result", "execution_count": number}
        found.append({**result, "data": mime, "metadata": {}})
    return found


def main(names: list[str]) -> None:
    matplotlib.use("agg")
    for file in sorted(FOLDER.glob("*.ipynb")):
        if names and file.stem not in names:
            continue
        notebook = json.loads(file.read_text(encoding="utf-8"))
        with TemporaryDirectory() as folder, contextlib.chdir(folder):
            cells = zip(code_cells(notebook), run_cells(notebook, file.stem), strict=True)
            for number, (cell, made) in enumerate(cells, 1):
                cell["execution_count"], cell["outputs"] = number, made
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8")
        print(f"{file.name}: {len(text) // 1000} kB, {sum(os.times()[:2]):.0f} s of CPU so far")


if __name__ == "__main__":
    main(sys.argv[1:])
