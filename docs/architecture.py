# SPDX-License-Identifier: Apache-2.0
"""Make the map of the packages, `architecture.svg`, from their own imports and sentences.

Low floors are below: a package stands over all that it imports. Of the arrows only those stay that
no longer way says already; the width of an arrow is the number of imports along it.
"""

from __future__ import annotations

import ast
from collections import Counter
from html import escape
from pathlib import Path
from textwrap import wrap

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "fedplan"
GROUND, ROOF = "ground", "roof"
WIDTH, BOX, HIGH, GAP, EDGE = 860, 350, 64, 40, 44
STYLE = """
  .paper { fill: #ffffff } .box { fill: #f3f6fa; stroke: #8296ad }
  .wide { fill: #fbf7ee; stroke: #b39f74 } .arrow { stroke: #4f7cac; fill: none } .tip { fill: #4f7cac }
  text { fill: #3a4654; font: 13px system-ui, "DejaVu Sans", sans-serif; text-anchor: middle }
  .name { fill: #14202c; font-weight: 600; font-size: 16px } .count { fill: #4f7cac; font-size: 12px }
  .after { text-anchor: start } .before { text-anchor: end }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0e1319 } .box { fill: #18212c; stroke: #54687f }
    .wide { fill: #221f17; stroke: #7d6f4f } .arrow { stroke: #6ea0d6 } .tip { fill: #6ea0d6 }
    text { fill: #b9c6d3 } .name { fill: #f0f5fa } .count { fill: #8fb8e4 }
  }
"""  # noqa: E501

Pair = tuple[str, str]


def imports() -> Counter[Pair]:
    """How often a package, or a module of the root, imports another one."""
    found = Counter[Pair]()
    for file in sorted(PACKAGE.rglob("*.py")):
        own = file.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedplan"):
                inner = (node.module or "").split(".")[1:] or [node.names[0].name]
                if inner[0] != own:
                    found[own, inner[0]] += 1
    return found


def gathered(found: Counter[Pair]) -> Counter[Pair]:
    """The same with the root's modules in two: the ground imports no package, the roof does."""
    packages = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    roof = {a for a, b in found if a not in packages and b in packages}

    def place(name: str) -> str:
        return name if name in packages else ROOF if name in roof else GROUND

    counts = Counter[Pair]()
    for (a, b), count in found.items():
        if place(a) != place(b):
            counts[place(a), place(b)] += count
    return counts


def reduced(counts: Counter[Pair]) -> dict[Pair, int]:
    """The arrows between packages that no longer way says already."""
    used = {a: {d for c, d in counts if c == a} for a, _ in counts}

    def reach(start: str) -> set[str]:
        return {start}.union(*(reach(each) for each in used.get(start, ())))

    return {
        (a, b): count
        for (a, b), count in sorted(counts.items())
        if b != GROUND and not any(b in reach(other) for other in used[a] - {b})
    }


def floors(arrows: dict[Pair, int]) -> list[list[str]]:
    """The packages of each floor from the lowest; who has an arrow past a floor stands right."""
    names = {name for pair in arrows for name in pair}
    below = {name: [b for a, b in arrows if a == name] for name in names}

    def height(name: str) -> int:
        return max((1 + height(each) for each in below[name]), default=0)

    far = {name for pair in arrows if height(pair[0]) - height(pair[1]) > 1 for name in pair}
    rows: list[list[str]] = [[] for _ in range(1 + max(map(height, names)))]
    for name in sorted(names, key=lambda each: (each in far, each)):
        rows[height(name)].append(name)
    return [[GROUND], *rows]


def places(rows: list[list[str]]) -> dict[str, tuple[int, int, int]]:
    """The left, top and width of each box."""
    found = dict[str, tuple[int, int, int]]()
    for level, row in enumerate(reversed(rows)):
        top = EDGE // 2 + level * (HIGH + GAP)
        wide = WIDTH - 2 * EDGE if row[0] in (GROUND, ROOF) else BOX
        step = WIDTH - 2 * EDGE - BOX
        for index, name in enumerate(row):
            left = EDGE + index * step if len(row) > 1 else (WIDTH - wide) // 2
            found[name] = (left, top, wide)
    return found


def sentence(name: str) -> str:
    tree = ast.parse((PACKAGE / name / "__init__.py").read_text())
    return (ast.get_docstring(tree) or "").removesuffix(".")


def modules(found: Counter[Pair], roof: bool) -> str:
    """The root's modules that import a package, or those that do not."""
    names = sorted(p.stem for p in PACKAGE.glob("*.py"))
    packages = {p.name for p in PACKAGE.iterdir() if p.is_dir()}
    above = {a for a, b in found if b in packages}
    return "  ·  ".join(n.replace("__init__", "fedplan") for n in names if (n in above) == roof)


def balanced(text: str) -> list[str]:
    """One line, or lines of about the same length."""
    count = len(wrap(text, 50))
    return next(made for width in range(20, 51) if len(made := wrap(text, width)) == count)


def box(name: str, place: tuple[int, int, int], found: Counter[Pair]) -> str:
    left, top, wide = place
    words = {GROUND: "what everything above may use", ROOF: "what a person imports or types"}
    title = modules(found, name == ROOF) if name in words else name
    lines = balanced(words.get(name) or sentence(name))
    kind = "wide" if name in words else "box"
    middle, first = left + wide // 2, top + (28 if len(lines) == 1 else 22)
    text = [f'<text class="name" x="{middle}" y="{first}">{escape(title)}</text>']
    for index, line in enumerate(lines):
        text.append(f'<text x="{middle}" y="{first + 19 + 16 * index}">{escape(line)}</text>')
    frame = f'<rect class="{kind}" x="{left}" y="{top}" width="{wide}" height="{HIGH}" rx="8"/>'
    return "\n".join([frame, *text])


def arrow(start: tuple[int, int], end: tuple[int, int], count: int, margin: bool) -> str:
    """A line with its tip and number: down from floor to floor, or along the right margin."""
    (x, y), (u, v) = start, end
    thick, tip = 1 + count / 5, 6 + count / 5
    if margin:
        far = WIDTH - EDGE // 2
        down = f"{far},{y} {far},{y} {far},{y + 40} V{v - 40} C{far},{v} {far},{v}"
        path = f"M{x},{y} C{down} {u + 9},{v}"
        head = f"M{u},{v} l12,{-tip:.1f} v{2 * tip:.1f} z"
        number = (far - 6, (y + v) // 2)
    else:
        path = f"M{x},{y} C{x},{y + 20} {u},{v - 24} {u},{v - 9}"
        head = f"M{u},{v} l{-tip:.1f},-12 h{2 * tip:.1f} z"
        aside = 4 + int(tip)  # on the side of the tip that the line does not come from
        number = (u + aside if x <= u else u - aside, v - 3)
    side = "after" if x <= u and not margin else "before"
    return (
        f'<path class="arrow" stroke-width="{thick:.1f}" d="{path}"/><path class="tip" d="{head}"/>'
        f'<text class="count {side}" x="{number[0]}" y="{number[1]}">{count}</text>'
    )


def lines(arrows: dict[Pair, int], at: dict[str, tuple[int, int, int]]) -> list[str]:
    """Every arrow, those of one box side by side."""

    def middle(name: str) -> int:
        return at[name][0] + at[name][2] // 2

    def spread(pair: Pair, end: int) -> int:
        others = [p for p in arrows if p[end] == pair[end] and not margin(p)]
        others.sort(key=lambda p: middle(p[1 - end]))
        step = BOX + 72 if pair[end] == ROOF else 110
        return middle(pair[end]) + int(step * (others.index(pair) - (len(others) - 1) / 2))

    def margin(pair: Pair) -> bool:
        return at[pair[1]][1] - at[pair[0]][1] > HIGH + GAP

    drawn = list[str]()
    for (a, b), count in arrows.items():
        (left, top, wide), (other, low, broad) = at[a], at[b]
        if margin((a, b)):
            ends = (left + wide, top + HIGH // 2), (other + broad, low + HIGH // 2)
        else:
            ends = (spread((a, b), 0), top + HIGH), (spread((a, b), 1), low)
        drawn.append(arrow(*ends, count, margin((a, b))))
    return drawn


def drawn() -> str:
    """The whole picture."""
    found = imports()
    arrows = reduced(gathered(found))
    rows = floors(arrows)
    at, high = places(rows), len(rows) * (HIGH + GAP) - GAP + EDGE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" role="img">',
            "<title>The packages of fedplan; each imports only those below it</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{high}" rx="10"/>',
            *lines(arrows, at),
            *(box(name, place, found) for name, place in at.items()),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (DOCS / "architecture.svg").write_text(drawn())
