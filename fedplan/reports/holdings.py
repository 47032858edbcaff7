# SPDX-License-Identifier: Apache-2.0
"""Holdings: who holds what of a study's rows, drawn, and how unlike the clients are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.data.tables import label_order
from fedplan.reports.figures.bars import Bar, bar_chart
from fedplan.reports.figures.bubbles import bubble_chart
from fedplan.reports.figures.drawing import Drawing
from fedplan.studies.schema import Study, read_study
from fedplan.studies.shares import division_of

BARS = " ▁▂▃▄▅▆▇█"
"""How much of a client's rows have a label, from none to all."""
WIDE, MOST, MANY = 24, 40, 24
"""How wide the bar of rows is; clients and labels that a screen shows."""
DEGREES = (
    (0.1, "nearly alike: as if rows had been dealt out by chance"),
    (0.3, "somewhat unlike"),
    (0.6, "unlike: methods that keep a part at the client may pay"),
    (1.1, "very unlike: many clients see few labels"),
)


@dataclass(frozen=True)
class Holding:
    """One client: its rows to train on, those held out, and how many it has of each label."""

    client: str
    train: int
    own: int
    labels: Mapping[str, int]


@dataclass(frozen=True)
class Holdings:
    """All clients of a study, and the labels that there are, in order."""

    study: str
    clients: tuple[Holding, ...]
    labels: tuple[str, ...]
    test: int

    @property
    def unlike(self) -> float | None:
        """How far clients' labels are from those of all together, the mean over rows.

        It is the total variation: 0 if all are alike, and near 1 if no two share a label. Where
        there are no labels, there is none.
        """
        whole = sum((Counter(each.labels) for each in self.clients), Counter[str]())
        total = whole.total()
        if not total:
            return None
        far = [_apart(each.labels, whole) * sum(each.labels.values()) for each in self.clients]
        return fsum(far) / total

    def words(self) -> Iterator[str]:
        """How heterogeneous it is, in sentences."""
        sizes = sorted(each.train for each in self.clients)
        yield f"{len(sizes)} clients with {sizes[0]} to {sizes[-1]} rows to train on."
        if self.unlike is not None:
            degree = next(words for most, words in DEGREES if self.unlike < most)
            yield (
                f"Labels differ by {self.unlike:.2f} (0: alike, 1: nothing in common): {degree}."
            )
            alone = sum(len(+Counter(each.labels)) == 1 for each in self.clients)
            yield f"{alone} clients have one label only." if alone else ""
        yield f"The common test has {self.test} rows." if self.test else "There is no common test."

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        clients = [
            {"client": c.client, "train": c.train, "own": c.own, "labels": dict(c.labels)}
            for c in self.clients
        ]
        return {"study": self.study, "test": self.test, "unlike": self.unlike, "clients": clients}

    def __rich__(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("client", no_wrap=True)
        for name in ("train", "own test"):
            table.add_column(name, justify="right")
        table.add_column("rows")
        if self.labels:
            table.add_column("labels", no_wrap=True)
        largest = max((each.train for each in self.clients), default=1)
        for each in self.clients[:MOST]:
            bar = "█" * max(1, round(WIDE * each.train / max(1, largest)))
            cells = [Text(each.client), str(each.train), str(each.own), bar]
            table.add_row(*cells, *([_sparks(each.labels, self.labels)] if self.labels else []))
        more = len(self.clients) - MOST
        parts: list[RenderableType] = [table]
        parts += [Text(f"and {more} clients more: --json has all")] if more > 0 else []
        parts += (
            [Text(f"\nlabels, from left to right: {_some(self.labels)}")] if self.labels else []
        )
        return Group(*parts, Text("\n" + "\n".join(filter(None, self.words()))))

    def drawn(self) -> Drawing:
        """A figure of the same: a dot for each label of each client, as large as its rows are many.

        Where there are no labels, a bar for each client.
        """
        title = f"{self.study}: who holds what"
        sums = {each.client: each.train + each.own for each in self.clients}
        if not self.labels:
            return bar_chart(title, [Bar(*each) for each in sums.items()], unit="rows")
        counts = {each.client: each.labels for each in self.clients}
        return bubble_chart(
            title, counts, columns=self.labels, sums=sums, row="client", column="label"
        )


def holdings_of(study: Study | Path) -> Holdings:
    """Who holds what of a study; the rows are read and divided, and nothing is trained."""
    said = read_study(study) if isinstance(study, Path) else study
    found = division_of(said)
    clients = tuple(
        Holding(
            name, len(rows), len(found.own[name]), _counted(found.labels, rows, found.own[name])
        )
        for name, rows in found.train.items()
    )
    labels = sorted({label for each in clients for label in each.labels}, key=label_order)
    return Holdings(said.name, clients, tuple(labels), found.test)


def _counted(labels: Sequence[Sequence[str]], *sides: Sequence[int]) -> dict[str, int]:
    if not labels:
        return {}
    found = Counter(label for rows in sides for row in rows for label in labels[row])
    return {label: found[label] for label in sorted(found, key=label_order)}


def _apart(own: Mapping[str, int], whole: Mapping[str, int]) -> float:
    """The total variation between a client's labels and those of all."""
    mine, all_ = sum(own.values()), sum(whole.values())
    if not mine:
        return 0.0
    return fsum(abs(own.get(k, 0) / mine - n / all_) for k, n in whole.items()) / 2


def _sparks(own: Mapping[str, int], labels: Sequence[str]) -> str:
    """A bar for each label, as high as its share of the client's rows."""
    total = sum(own.values()) or 1
    shares = [own.get(label, 0) / total for label in labels[:MANY]]
    # What is there at all is seen.
    return "".join(BARS[max(bool(each), round(each * (len(BARS) - 1)))] for each in shares)


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - MANY} more" if len(labels) > MANY else ""
    return ", ".join(labels[:MANY]) + more
