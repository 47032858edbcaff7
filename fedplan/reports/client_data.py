# SPDX-License-Identifier: Apache-2.0
"""Show how a study's examples and labels are distributed over its clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.data.tables import label_sort_key
from fedplan.reports.figures.charts import Bar, bar_chart
from fedplan.reports.figures.drawing import Drawing
from fedplan.reports.figures.grids import bubble_chart
from fedplan.studies.federated_data import compute_split
from fedplan.studies.schema import Study, read_study

BAR_CHARS = " ▁▂▃▄▅▆▇█"
"""Characters for the share of a client's examples that have a label, from none to all."""
BAR_WIDTH, MAX_CLIENTS, MAX_LABELS = 24, 40, 24
"""The width of the bar of examples; the most clients and labels shown in a terminal."""
SKEW_LEVELS = (
    (0.1, "nearly IID: as if examples were assigned at random"),
    (0.3, "mild"),
    (0.6, "strong: methods with personal params may help"),
    (1.1, "extreme: many clients see few labels"),
)
"""Upper bounds of the label skew, each with its description."""


@dataclass(frozen=True)
class ClientData:
    """The number of a client's examples: for training, held out, and of both by label."""

    client: str
    train: int
    held_out: int
    labels: Mapping[str, int]


@dataclass(frozen=True)
class DataDistribution:
    """The distribution of a study's examples over clients; print with rich, or `json`, `figure`.

    `study` is the name, `labels` all labels in order (empty for tasks without labels), and `test`
    the number of examples in the common test set, 0 for none.
    """

    study: str
    clients: tuple[ClientData, ...]
    labels: tuple[str, ...]
    test: int

    @property
    def label_skew(self) -> float | None:
        """The mean total variation distance of a client's labels from all labels.

        Clients are weighted by their number of labels. The skew is 0 if all clients have the same
        distribution, 1 - 1/n for n clients of equal size without a common label, and None without
        labels.
        """
        overall = sum((Counter(client.labels) for client in self.clients), Counter[str]())
        total = overall.total()
        if not total:
            return None
        distances = list[float]()
        for labels in (client.labels for client in self.clients if any(client.labels.values())):
            count = sum(labels.values())
            gaps = (abs(labels.get(k, 0) / count - n / total) for k, n in overall.items())
            distances.append(fsum(gaps) / 2 * count)
        return fsum(distances) / total

    def sentences(self) -> Iterator[str]:
        """Yield sentences on client sizes, label skew and the common test set; may yield ""."""
        sizes = sorted(client.train for client in self.clients)
        yield f"{len(sizes)} clients with {sizes[0]} to {sizes[-1]} training examples each."
        if self.label_skew is not None:
            level = next(text for bound, text in SKEW_LEVELS if self.label_skew < bound)
            yield (
                f"Label skew {self.label_skew:.2f} (0: the same labels at all clients, near 1: no "
                f"label in common), {level}."
            )
            single = sum(len(+Counter(client.labels)) == 1 for client in self.clients)
            yield f"{single} clients have a single label." if single else ""
        test = f"The common test set has {self.test} examples."
        yield test if self.test else "There is no common test set."

    def json(self) -> dict[str, Any]:
        """Return the distribution as JSON values."""
        clients = [
            {"client": c.client, "train": c.train, "held_out": c.held_out, "labels": dict(c.labels)}
            for c in self.clients
        ]
        about = {"study": self.study, "test": self.test, "label_skew": self.label_skew}
        return {**about, "clients": clients}

    def __rich__(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("client", no_wrap=True)
        for name in ("train", "test"):
            table.add_column(name, justify="right")
        table.add_column("training examples")
        if self.labels:
            table.add_column("labels", no_wrap=True)
        largest = max((client.train for client in self.clients), default=1)
        for client in self.clients[:MAX_CLIENTS]:
            bar = "█" * max(1, round(BAR_WIDTH * client.train / max(1, largest)))
            total = sum(client.labels.values()) or 1
            shares = (client.labels.get(label, 0) / total for label in self.labels[:MAX_LABELS])
            # A share above 0 gets a visible bar.
            bars = [BAR_CHARS[max(bool(x), round(x * (len(BAR_CHARS) - 1)))] for x in shares]
            cells = [Text(client.client), str(client.train), str(client.held_out), bar]
            table.add_row(*cells, *(["".join(bars)] if self.labels else []))
        parts: list[RenderableType] = [table]
        if (more := len(self.clients) - MAX_CLIENTS) > 0:
            parts.append(Text(f"and {more} more clients: --json lists all"))
        if self.labels:
            more = len(self.labels) - MAX_LABELS
            names = ", ".join(self.labels[:MAX_LABELS]) + (f" and {more} more" if more > 0 else "")
            parts.append(Text(f"\nlabels, from left to right: {names}"))
        return Group(*parts, Text("\n" + "\n".join(filter(None, self.sentences()))))

    def figure(self) -> Drawing:
        """Return a chart of the examples by client, and by label if there are labels."""
        title = f"{self.study}: examples by client"
        sums = {client.client: client.train + client.held_out for client in self.clients}
        if not self.labels:
            return bar_chart(title, [Bar(*each) for each in sums.items()], unit="examples")
        counts = {client.client: client.labels for client in self.clients}
        return bubble_chart(
            title, counts, columns=self.labels, sums=sums, header=("client", "label")
        )


def data_distribution(study: Study | Path) -> DataDistribution:
    """Load and split the data of a study, or of a study file, as a simulation does; no training.

    Raises ConfigError for an invalid file, DataError without `data.path` or for unusable data.
    """
    study = read_study(study) if isinstance(study, Path) else study
    split, clients = compute_split(study), list[ClientData]()
    for name, (train, *others) in split.clients.items():
        held_out = [row for rows in others for row in rows]
        indices = (*train, *held_out) if split.labels else ()
        counts = Counter(label for index in indices for label in split.labels[index])
        labels = {label: counts[label] for label in sorted(counts, key=label_sort_key)}
        clients.append(ClientData(name, len(train), len(held_out), labels))
    labels = sorted({label for client in clients for label in client.labels}, key=label_sort_key)
    return DataDistribution(study.name, tuple(clients), tuple(labels), split.common_test_size)
