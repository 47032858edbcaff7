# SPDX-License-Identifier: Apache-2.0
"""Costs of federations of any size, computed from the unit costs in the result files.

`python research/scale.py` prints the tables of research/pages/scale.md; `--write` puts them there,
and `--sentences` prints texts that docs/explanation/scale.md must contain.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "pages" / "scale.md"
SITE, SERVER = 100e6 / 8, 10e9 / 8
"""Bytes a second of a site's network, and of the server's."""
MEMORY = 64e9
"""Bytes of memory of a server, as assumed."""
POLL = 3.0
"""Seconds between two calls of a node that ask for a message."""
FEW, MANY = "turn-vit-0.2M-1", "turn-minilm-1"


@dataclass(frozen=True)
class Units:
    """Costs of a turn, of a byte, of a client that ever answered, and of a registered client.

    Seconds are CPU seconds of client and server together, without training. Peaks are of memory, as
    multiples of the model: all of it trained in float32 and in bf16, and LoRA. `link` is what the
    SuperLink spends on a turn of about 1 MB, with the calls of nodes that find no message.
    """

    turn: float
    byte: float
    ledger: float
    heard: float
    registered: float
    peaks: tuple[float, float, float]
    link: float


@dataclass(frozen=True)
class Case:
    """A federation: who is registered and asked, and how many params travel, of how many."""

    text: str
    registered: int
    asked: int
    shared: float
    base: float
    width: int = 4

    @property
    def update(self) -> float:
        """Bytes that one client sends."""
        return self.shared * self.width

    def site_line(self) -> float:
        """Seconds of a site's network, down and up."""
        return 2 * self.update / SITE

    def server_line(self) -> float:
        """Seconds of the server's network: all that comes, while as much goes."""
        return self.asked * self.update / SERVER

    def cpu(self, units: Units) -> float:
        """Seconds of one core for the turns of a round."""
        return self.asked * (units.turn + units.byte * self.update)

    def memory(self, units: Units) -> float:
        """Bytes: the peak of such a plan times the model, and those of each registered client."""
        whole, half, lora = units.peaks
        peak = lora if self.shared < self.base else whole if self.width == 4 else half
        return peak * self.base * self.width + units.heard * self.registered

    def limits(self, units: Units) -> dict[str, float]:
        """Seconds of a round by the resource that it waits for."""
        return {
            "a site's network": self.site_line(),
            "the server's network": self.server_line(),
            "the server's CPU": self.cpu(units),
            "the SuperLink's CPU": self.asked * units.link,
        }

    def limit(self, units: Units) -> str:
        """The resource that a round waits for longest; memory, if there is too little."""
        found = self.limits(units)
        return "memory" if self.memory(units) > MEMORY else max(found, key=lambda name: found[name])


LORA = 32 * 2 * 16 * (4096 + 4096)
"""Params of LoRA of rank 16 on query and value: 32 blocks that are 4,096 wide."""
CASES = (
    Case("ten sites, MiniLM", 10, 10, 22.7e6, 22.7e6),
    Case("ten sites, 7 B, LoRA, bf16", 10, 10, LORA, 7e9, 2),
    Case("ten sites, 7 B, all of it, bf16", 10, 10, 7e9, 7e9, 2),
    Case("1,000 sites, MiniLM", 1_000, 1_000, 22.7e6, 22.7e6),
    Case("1,000 sites, 7 B, LoRA, bf16", 1_000, 1_000, LORA, 7e9, 2),
    Case("1,000 sites, 7 B, all of it, bf16", 1_000, 1_000, 7e9, 7e9, 2),
    Case("10 M clients, 10,000 a round, ViT 0.2 M", 10_000_000, 10_000, 0.214e6, 0.214e6),
    Case("10 M clients, 10,000 a round, MiniLM", 10_000_000, 10_000, 22.7e6, 22.7e6),
    Case("10,000 sites, 1 GB", 10_000, 10_000, 0.25e9, 0.25e9),
    Case("10 M devices, all asked, 1 MB", 10_000_000, 10_000_000, 0.25e6, 0.25e6),
)


def read(name: str) -> dict[str, Any]:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def overhead(row: dict[str, Any]) -> float:
    """CPU seconds of a turn beside bare torch's, the median of the repetitions."""
    pairs = zip(row["seconds"]["local"], row["seconds"]["bare"], strict=True)
    return statistics.median((ours["cpu"] - bare["cpu"]) / row["cohort"] for ours, bare in pairs)


def units() -> Units:
    """Unit costs of the committed files: of two models of other sizes, and of many clients."""
    few, many = read(f"bench/{FEW}"), read(f"bench/{MANY}")
    sizes = [4 * row["params"] for row in (few, many)]
    byte = max(0.0, (overhead(many) - overhead(few)) / (sizes[1] - sizes[0]))
    turn = max(0.0, overhead(few) - byte * sizes[0])
    crowd = crowds()
    whole = max(crowd, key=lambda row: row["registered"], default={})
    if whole:  # the server's own part, where it was measured by itself
        parts = (f"{word} ms a client" for word in ("begin", "take", "end", "commit"))
        turn = max(0.0, sum(whole[part] for part in parts) / 1e3 - byte * sizes[0])
    ledger = whole.get("ledger bytes a turn", few["told"]["local"]["ledger"])
    kept = whole.get("checkpoint bytes beside values", 0) / max(whole.get("heard", 1), 1)
    opened = whole.get("reopen s", 0) / whole.get("registered", 1)
    return Units(turn, byte, ledger, kept, opened, peaks(), spent(fleet()[-1])["link"])


def peaks() -> tuple[float, float, float]:
    """The highest peaks of research/memory_peaks.py: all in float32, all in bf16, LoRA."""
    rows = read("memory-peaks")["rows"]
    kinds = ("small-float32", "gpt2-bf16", "small-lora")
    found = [max(row["peak"] for row in rows if row["case"] == kind) for kind in kinds]
    return found[0], found[1], found[2]


def fleet() -> list[dict[str, Any]]:
    """The rows of research/fleet.py with a round after the first, those with most nodes last."""
    rows = (row for row in read("fleet") if len(row.get("after each round", ())) > 1)
    return sorted(rows, key=lambda row: row["nodes"])


def spent(row: dict[str, Any]) -> dict[str, float]:
    """CPU seconds a turn of each process of a fleet, after its first round."""
    first, last = (row["after each round"][place] for place in (0, -1))
    turns = row["nodes"] * (len(row["after each round"]) - 1)
    return {
        name: (last[name]["cpu_seconds"] - first[name]["cpu_seconds"]) / turns
        for name in ("link", "driver", "nodes")
    }


def fleets() -> str:
    """The table of the fleets that were run."""
    lines = [
        "| nodes | update | rounds a minute | CPU of a turn: SuperLink, server, node "
        "| calls of a node in a turn | peak memory: SuperLink, server | updates not aggregated |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in fleet():
        costs, samples = spent(row), row["after each round"]
        link, driver = (samples[-1][name]["peak_mb"] for name in ("link", "driver"))
        turns = row["nodes"] * (len(samples) - 1)
        calls = [each.get("calls", 0) for each in samples]
        each = f"{(calls[-1] - calls[0]) / turns:.0f}" if calls[0] else "-"
        lines.append(
            f"| {row['nodes']} | {row['update_mb']} MB "
            f"| {60 / statistics.mean(row['seconds a round']):.1f} "
            f"| {', '.join(span(costs[name]) for name in ('link', 'driver', 'nodes'))} "
            f"| {each} | {link:.0f} MB, {driver:.0f} MB | {row['not aggregated']} |"
        )
    return "\n".join(lines)


def crowds() -> list[dict[str, Any]]:
    """The rows of research/many_clients.py, if they are there."""
    return read("many-clients")["rows"] if (RESULTS / "many-clients.json").exists() else []


def said(amount: float, steps: tuple[tuple[float, str], ...]) -> str:
    """An amount in its largest unit."""
    size, word = next(((s, w) for s, w in steps if amount >= s), steps[-1])
    return f"{amount / size:.3g} {word}" if amount / size < 1000 else f"{amount / size:,.0f} {word}"


def span(amount: float) -> str:
    """Seconds as text with a unit."""
    return said(
        amount, ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    )


def size(amount: float) -> str:
    """Bytes as text with a unit."""
    return said(amount, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def tables() -> Iterator[str]:
    """The tables of the page, each under its title."""
    found = units()
    where = f"`bench/{FEW}.json`, `bench/{MANY}.json`"
    rest = "`many-clients.json`" if crowds() else f"`bench/{FEW}.json`"
    yield "\n".join([
        "### Unit costs",
        "",
        "| unit | cost | from `research/results/` |",
        "|---|---|---|",
        f"| a turn of a small model, without training | {span(found.turn)} of CPU | {where} |",
        f"| a byte of an update | {span(1e6 * found.byte)} of CPU a MB | the same two |",
        f"| a turn in the ledger | {size(found.ledger)} | {rest} |",
        "| peak memory, all of a model in float32, in bf16, and LoRA "
        f"| {' x, '.join(f'{peak:.2f}' for peak in found.peaks)} x the model | `memory-peaks.json` |",
        *([f"| a client that ever answered, in a checkpoint | {size(found.heard)} | {rest} |",
           f"| a registered client, when a run is opened | {span(found.registered)} of CPU | {rest} |"]
          if crowds() else []),
        f"| a turn of 1 MB at a SuperLink, with the node's calls that find no message | {span(found.link)} of CPU | `fleet.json` |",
    ])  # fmt: skip
    yield "\n".join([
        f"### A round of {len(CASES)} federations",
        "",
        "| | a client sends | a site's network | the server's network | the server's CPU | the SuperLink's CPU, at least | its memory | ledger | limit |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {case.text} | {size(case.update)} | {span(case.site_line())} | {span(case.server_line())} "
            f"| {span(case.cpu(found))} | {span(case.asked * found.link)} | {size(case.memory(found))} | {size(case.asked * found.ledger)} "
            f"| {case.limit(found)} |"
            for case in CASES
        ),
    ])  # fmt: skip


def sentences() -> Iterator[str]:
    """Texts of docs/explanation/scale.md, each with its numbers as the files have them now."""
    found, crowd = units(), max(crowds(), key=lambda row: row["registered"])
    yield f"{round(found.heard)} bytes per client that ever answered"
    yield f"| ledger | `n` \N{MULTIPLICATION SIGN} {found.ledger / 1e3:.1f} kB |"
    yield f"takes about {1e6 * found.registered:.0f} µs when the run is opened"
    slow = next(case for case in CASES if case.text.startswith("ten sites, 7 B, all"))
    yield f"a model of 7 billion parameters takes {slow.site_line() / 60:.0f} minutes over 100 Mbit/s"
    # Of a round with as many clients: these take memory, too.
    few = next(row for row in crowds() if row["asked"] == crowd["asked"])
    more = crowd["registered"] - few["registered"]
    each = 1e3 * (crowd["resident MB"] - few["resident MB"]) / more
    yield f"and {each:.1f} kB of memory"
    names = {
        "small-float32": "GPT-2 of 29 M, float32, all",
        "small-lora": "GPT-2 of 29 M, bf16, LoRA",
        "gpt2-bf16": "GPT-2 (124 M), bf16, all",
        "llama-lora": "Llama-3.2-1B, bf16, LoRA",
    }
    for row in read("memory-peaks")["rows"]:
        if row["case"] in names and (
            row["case"].startswith("small") or row["place"] == "local run"
        ):
            place = row["place"].replace("Flower's", "Flower")
            yield f"| {names[row['case']]} | {place} | {row['peak']:.2f} |"
    lines = (RESULTS / "bench_turn.txt").read_text().partition("\n\n")[0].splitlines()[2:]
    kept = float(next(line for line in lines if "checkpointing" in line).split()[-1])
    ratios = [float(line.split()[-1]) for line in lines if "checkpointing" not in line]
    yield (
        f"the estimate of a whole step is {min(ratios):.2f} to {max(ratios):.2f} of the "
        f"measurement, and {kept:.2f} with gradient"
    )
    yield from soaked()
    yield fleets()
    most = fleet()[-1]
    did, turns = most["nodes did"], most["nodes"] * most["rounds"]
    driver = spent(most)["driver"]
    yield f"spends {span(found.link)} of CPU on a turn, the server {span(driver)}"
    yield f"{1000 * found.link / 60:.0f} minutes of one core for a round of 1,000 sites"
    yield f"{did['answers to train']} answers came for {turns} turns"
    yield f"{did['answers to query.hello']} to the greetings of {most['nodes']} nodes"
    if not any(row["not aggregated"] for row in fleet()):
        yield "All updates were aggregated"
    yield from waited()
    yield from papers()


def waited() -> Iterator[str]:
    """Texts about nodes with nothing to do."""
    row = max((row for row in read("fleet") if "idle" in row), key=lambda row: row["nodes"])
    count, took = row["nodes"], row["idle"]
    each = took["cpu_seconds"] / took["calls"]
    registered = row["link's cpu_seconds to register"]
    yield f"registration of {count:,} nodes takes {registered:.0f} s of its CPU"
    large = max((row for row in read("fleet") if "idle" not in row), key=lambda row: row["nodes"])
    first = large["after each round"][0]["link"]["cpu_seconds"]
    yield f"first round of {large['nodes']} nodes, with registration and greetings, {first:.0f} s"
    yield (
        f"At {span(each)} of CPU a call, {POLL / each:.0f} nodes that only wait fill a core, and "
        f"{count:,} need {count * each / POLL:.1f} cores"
    )


def soaked() -> Iterator[str]:
    """Texts about the long run."""
    long = read("soak")
    growth, rows = long["growth a round, last half"], long["samples"]
    minutes = (rows[-1]["time"] - rows[0]["time"]) / 60
    yield f"has {long['rounds']:,} rounds"
    yield f"the last {rows[-1]['round'] - rows[0]['round']} took {minutes:.0f} minutes"
    yield f"| run folder | {growth['run: bytes'] / 1e3:.1f} kB"
    yield f"| state folder of a site | {growth['site client-00: bytes'] / 1e3:.1f} kB"
    yield f"| memory of the server | {1e3 * growth['driver: mb']:.0f} kB"
    sites = [1e3 * growth[f"site client-0{place}: mb"] for place in range(3)]
    yield f"| memory of a site's process | {statistics.median(sites):.0f} kB"
    yield f"| memory of the SuperLink | {1e3 * growth['superlink: mb']:.0f} kB |"
    nodes = sorted(1e3 * growth[f"node client-0{place}: mb"] for place in range(3))
    yield f"| memory of a SuperNode | {nodes[0]:.0f} to {nodes[-1]:.0f} kB |"
    ends = [long[f"seconds a round, {place} quarter"] for place in ("first", "last")]
    yield f"A round took {ends[0]:.1f} s at the start and {ends[1]:.1f} s at the end"
    cpu = long["CPU seconds a round"]
    both = cpu["site client-00"] + cpu["node client-00"]
    yield (
        f"The SuperLink spends {cpu['superlink']:.1f} s of CPU per round, the server "
        f"{cpu['driver']:.1f} s, and a site with its node {both:.1f} s"
    )


def papers() -> Iterator[str]:
    """Texts about two federations that are too large for fedplan."""
    found, (sites, devices) = units(), CASES[-2:]
    edges = 100
    summed = edges * sites.shared * 8 / SERVER
    yield (
        f"a round takes {span(sites.server_line())} of the server's network, "
        f"{span(sites.cpu(found))} of one core and at least {span(sites.asked * found.link)} of the SuperLink's"
    )
    yield f"With {edges} edges of {sites.asked // edges} sites each, the server's network takes {span(summed)}"
    yield (
        f"{size(devices.asked * devices.update)} in a round, {span(devices.asked * found.link)} of "
        f"the SuperLink's core and {size(devices.asked * found.ledger)} of ledger"
    )


def written(page: str) -> str:
    """The page with new tables."""
    for table in tables():
        title = re.escape(table.splitlines()[0])
        page = re.sub(rf"{title}\n\n(\|.*\n)*", lambda _, t=table: f"{t}\n", page)
    return page


def main() -> None:
    if "--sentences" in sys.argv:
        print("\n".join(sentences()))
        return
    for table in tables():
        print(f"{table}\n")
    if "--write" in sys.argv:
        PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
