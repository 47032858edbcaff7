# SPDX-License-Identifier: Apache-2.0
"""Draw the README's terminal: what `explain`, `run` and `report` print for examples/digits.toml.

`python docs/terminal.py` runs the three commands in an empty folder and writes docs/terminal.svg.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
EXPLAIN_COLUMNS, RUN_COLUMNS = 72, 80
"""Characters of a line of the two terminals."""
EXPLAIN = "fedplan explain digits.toml"
RUN = "fedplan run digits.toml"
REPORT = "fedplan report runs/digits -o report.html"
SHOWN_ROUNDS = (1, 10, 11, 12, 20)
LETTER, LINE = 7.0, 15.5
"""Width of a character and height of a line."""
EXPLAIN_WIDTH, RUN_WIDTH = (n * LETTER + 28 for n in (EXPLAIN_COLUMNS, RUN_COLUMNS))
GAP = 12
WIDTH = EXPLAIN_WIDTH + GAP + RUN_WIDTH
COLOURS = {"SHARE": "#56b4e9", "KEEP": "#e69f00", "FREEZE": "#a3acb8"}


def printed(command: str, folder: Path, columns: int) -> list[str]:
    """Run a command of fedplan in a folder and return the lines that it prints."""
    program = "import sys; sys.argv[0] = 'fedplan'; from fedplan.cli import main; main()"
    words = [sys.executable, "-c", program, *command.split()[1:]]
    env = {**os.environ, "COLUMNS": str(columns)}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=True)
    return [line.rstrip() for line in done.stdout.splitlines()]


def explain_lines(lines: list[str]) -> list[str]:
    """The table of roles and the sentence below it."""
    end = next(i for i, line in enumerate(lines) if line.startswith("SHARE"))
    return lines[: end - 1]


def run_lines(lines: list[str]) -> list[str]:
    """The head of a run's output, some of its rounds and its scores; dots stand for the rest."""
    shown = list[str]()
    for line in lines:
        number = re.match(r" +(\d+) ", line)
        if number is None or int(number[1]) in SHOWN_ROUNDS:
            shown.append(line)
        elif shown[-1] != "  ...":
            shown.append("  ...")
    return shown


def pane(command: str, lines: list[str], x: float, width: float, height: float) -> str:
    """A terminal at a horizontal position, with a command and the lines that it printed."""
    rows = [f'<tspan class="prompt">$</tspan> <tspan class="typed">{escape(command)}</tspan>', ""]
    for line in lines:
        text = escape(line)
        for role, colour in COLOURS.items():
            text = re.sub(rf"\b{role}\b", f'<tspan fill="{colour}">{role}</tspan>', text)
        rows.append(text)
    drawn = "".join(
        f'<text x="{x + 14:g}" y="{26 + i * LINE:g}" xml:space="preserve">{row}</text>\n'
        for i, row in enumerate(rows)
    )
    return f'<rect x="{x:g}" y="0" width="{width:g}" height="{height:g}" rx="8" class="pane"/>\n{drawn}'


def figure(page: str, title: str, x: float, y: float, width: float) -> str:
    """A figure of a report at a place, as wide as said."""
    found = re.search(
        rf'<h3>{title}</h3>.*?<svg[^>]*viewBox="0 0 (\d+) (\d+)"[^>]*>(.*?)</svg>', page, re.S
    )
    assert found, title
    height = width * int(found[2]) / int(found[1])
    drawn = re.sub(r"<title>.*?</title>", "", found[3])
    return (
        f'<text x="{x:g}" y="{y - 8:g}" class="head">{title}</text>\n<svg x="{x:g}" y="{y:g}" width="{width:g}" '
        f'height="{height:.0f}" viewBox="0 0 {found[1]} {found[2]}" stroke-linejoin="round">{drawn}</svg>\n'
    )


def report_pane(page: str, top: float, height: float) -> str:
    """The head of a report with two of its figures."""
    tiles = re.findall(r"<dt>([^<(]+?)(?: \([^<]*)?</dt><dd>([^<]+)</dd>", page)[:4]
    title = re.search(r"<h1>(.*?)</h1>", page)
    assert title and len(tiles) == 4
    drawn = (
        f'<rect x="0" y="{top:g}" width="{WIDTH:g}" height="{height:g}" rx="8" class="paper"/>\n'
    )
    drawn += (
        f'<text x="14" y="{top + 24:g}" class="typed"><tspan class="prompt">$</tspan> '
        f'<tspan class="dark">{REPORT}</tspan></text>\n'
        f'<text x="14" y="{top + 62:g}" class="title">{title[1]}</text>\n'
    )
    for number, (name, value) in enumerate(tiles):
        x = 14 + number % 2 * 190
        y = top + 100 + number // 2 * 62
        drawn += f'<text x="{x}" y="{y:g}" class="name">{name}</text>\n'
        drawn += f'<text x="{x}" y="{y + 25:g}" class="value">{value}</text>\n'
    drawn += figure(page, "Roles by part and round", 400, top + 42, 390)
    drawn += figure(page, "Accuracy by round", 808, top + 42, WIDTH - 822)
    return drawn


def drawing(explained: list[str], ran: list[str], page: str) -> str:
    """The whole picture."""
    height = 26 + (2 + max(len(explained), len(ran))) * LINE
    top, below = height + GAP, 218
    colours = "".join(
        re.findall(
            r"^\.f-\w+ \{.*\}\n",
            page.partition("@media screen and (prefers-color-scheme: dark) {\n")[0],
            re.M,
        )
    )
    style = (
        "text { font: 11.6px ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace; "
        "fill: #d7dce2; white-space: pre }\n"
        ".pane { fill: #15191e } .paper { fill: #ffffff; stroke: #dfe3e8 } .prompt { fill: #35c49b } "
        ".typed { fill: #ffffff; font-weight: 700 } .dark { fill: #1b1f24 }\n"
        ".title, .name, .value, .head, svg svg text { font-family: system-ui, 'Segoe UI', 'Helvetica Neue', "
        "'DejaVu Sans', sans-serif; fill: #1b1f24 }\n"
        ".title { font-size: 19px; font-weight: 700 } .value { font-size: 19px; font-weight: 600 } "
        ".name { font-size: 12px; fill: #5d6672 } .head { font-size: 12.5px; font-weight: 600 }\n" + colours
    )  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {top + below:g}" role="img" '
        'aria-label="fedplan explain, run and report on one study">\n'
        f"<style>\n{style}</style>\n{pane(EXPLAIN, explained, 0, EXPLAIN_WIDTH, height)}"
        f"{pane(RUN, ran, EXPLAIN_WIDTH + GAP, RUN_WIDTH, height)}{report_pane(page, top, below)}</svg>\n"
    )


def main() -> None:
    with TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("digits.toml", "digits.py"):
            shutil.copy(ROOT / "examples" / name, folder)
        subprocess.run([sys.executable, "digits.py"], cwd=folder, check=True)
        explained = explain_lines(printed(EXPLAIN, folder, EXPLAIN_COLUMNS))
        ran = run_lines(printed(RUN, folder, RUN_COLUMNS))
        printed(REPORT, folder, RUN_COLUMNS)
        page = (folder / "report.html").read_text(encoding="utf-8")
    (ROOT / "docs" / "terminal.svg").write_text(drawing(explained, ran, page), encoding="utf-8")


if __name__ == "__main__":
    main()
