# SPDX-License-Identifier: Apache-2.0
"""Run the examples, draw the curve of each, and write docs/gallery.md: `python docs/gallery.py [NAME ...]`.

The numbers stay in research/results/gallery.json; without a name only the page is written.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "research" / "results" / "gallery.json"
PICTURES = ROOT / "docs" / "gallery"


@dataclass(frozen=True)
class Example:
    """A script of examples/, with the column of its printed table that its curve shows."""

    name: str
    task: str
    plan: str
    score: str
    needs: str = ""


EXAMPLES = (
    Example(
        "entities",
        "Drugs and complaints in clinical notes: named entities at three wards",
        "`chain(share(), keep(head))`",
        "personal.f1",
        "tokens",
    ),
    Example(
        "chest",
        "Findings in chest images, several in each: two hospitals with two devices",
        "`chain(share(), keep(norm))`",
        "personal.f1_micro",
    ),
    Example(
        "series",
        "The next value of a pulse: four wearers, a Transformer and layer map of one's own",
        "`chain(share(), when(after(3), freeze(query \\| key)), keep(head \\| embed))`",
        "personal.mae",
    ),
    Example(
        "own_model",
        "Digits, with an own module, loss and metric",
        "`chain(share(), keep(head))`",
        "personal.accuracy",
    ),
    Example(
        "trainer",
        "A Hugging Face `Trainer` at each client",
        "`chain(share(), when(after(1), freeze(query \\| key)), keep(head))`",
        "global.loss",
        "trainer",
    ),
)
OTHERS = (
    ("instruct.py", "LoRA for chats: three shops tune a small Llama (after `chat.py`)"),
    ("own_method.py", "FedDyn, a method written in the script"),
    ("qlora.py", "QLoRA: the shops of `instruct.py` on a base of four bits"),
    ("digits.toml", "the study of the README: a Vision Transformer, ten clients"),
    ("safl.toml", "SAFL: each client trains the two blocks that its attention chooses"),
    ("prompts.toml", "pFedDC: common and personal prompts of a model of images and texts"),
)


def column(printed: str, name: str) -> list[float]:
    """The numbers of a column of the last table that a script printed."""
    lines = printed.splitlines()
    start = max(i for i, line in enumerate(lines) if name in line.split())
    place = lines[start].split().index(name) + 1  # a row begins with its index
    rows = (line.split() for line in lines[start + 1 :])
    found = list[float]()
    for row in rows:
        if len(row) != len(lines[start].split()) + 1:
            break
        found.append(float(row[place]))
    return found


def cpu_of_children() -> float:
    """Seconds of CPU of all processes that this one has run."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def output_of(*command: str, folder: Path) -> str:
    """Run a command in a folder and return what it prints."""
    return subprocess.run([*command], cwd=folder, capture_output=True, text=True, check=True).stdout


def run_example(example: Example) -> dict[str, object]:
    """Run a script in an empty folder; return its curve and the seconds of CPU that it took."""
    script, before = ROOT / "examples" / f"{example.name}.py", cpu_of_children()
    with TemporaryDirectory() as folder:
        printed = output_of(sys.executable, str(script), folder=Path(folder))
    return {
        "score": example.score,
        "curve": column(printed, example.score),
        "seconds": round(cpu_of_children() - before, 1),
        "commit": output_of("git", "rev-parse", "--short=9", "HEAD", folder=ROOT).strip(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def curve_picture(curve: list[float]) -> str:
    """A curve over rounds, with its first and last value."""
    low, high = min(curve), max(curve)
    places = [
        (14 + 150 * i / max(1, len(curve) - 1), 52 - 36 * (value - low) / (high - low or 1))
        for i, value in enumerate(curve)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="220" height="70" viewBox="0 0 220 70" '
        'font-family="system-ui, DejaVu Sans, sans-serif" font-size="12" fill="#0072b2">\n'
        '<rect width="220" height="70" rx="6" fill="#ffffff"/>\n'
        f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="1.8"/>\n{dots}\n'
        f'<text x="{places[-1][0] + 8:.0f}" y="{places[-1][1] + 4:.0f}">{curve[-1]:.2f}</text>\n'
        f'<text x="14" y="66" fill="#5d6672" font-size="10">round 1: {curve[0]:.2f}</text>\n</svg>\n'
    )


def page(results: dict[str, dict[str, object]]) -> str:
    """docs/gallery.md."""
    text = (
        "<!-- Made by docs/gallery.py. -->\n\n# Gallery\n\n"
        "For everybody who looks for a script like their own job. Each is complete, runs offline on a CPU "
        "with made-up or bundled data, and\nprints its curve. Copy it, and put your model and data in.\n\n"
        "| curve | task | plan | lines | CPU |\n| --- | --- | --- | --- | --- |\n"
    )
    for example in EXAMPLES:
        if example.name not in results:
            continue
        result = results[example.name]
        lines = len((ROOT / "examples" / f"{example.name}.py").read_text().splitlines())
        extra = f"; extra `{example.needs}`" if example.needs else ""
        text += (
            f"| ![{result['score']} by round](gallery/{example.name}.svg) "
            f"| [{example.name}.py](../examples/{example.name}.py): {example.task}; `{result['score']}`{extra} "
            f"| {example.plan} | {lines} | {result['seconds']} s |\n"
        )
    text += (
        "\nOne run of each, without a second seed: the curves show that a script works, and compare "
        "nothing. CPU is of the whole\nscript, with its imports (`research/results/gallery.json`; "
        "`python docs/gallery.py NAME` runs one again).\n\n## More\n\n"
    )
    text += "".join(f"- [{file}](../examples/{file}): {about}\n" for file, about in OTHERS)
    return text + (
        "\n[Notebooks](../README.md), linked from the README, explain each step. [Python](tutorials/python.md) has the arguments, "
        "[your own code](how-to/own-code.md) methods, loops and codecs.\n"
    )


def main(names: list[str]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    PICTURES.mkdir(exist_ok=True)
    for example in (each for each in EXAMPLES if each.name in names):
        results[example.name] = run_example(example)
        picture = curve_picture(results[example.name]["curve"])
        (PICTURES / f"{example.name}.svg").write_text(picture, encoding="utf-8")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (ROOT / "docs" / "gallery.md").write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
