# SPDX-License-Identifier: Apache-2.0
"""Show how a study's examples and labels are distributed over its clients."""

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

from fedplan.data.tables import label_sort_key
from fedplan.reports.figures.bars import Bar, bar_chart
from fedplan.reports.figures.bubbles import bubble_chart
from fedplan.reports.figures.drawing import Drawing
from fedplan.studies.federated_data import compute_split
from fedplan.studies.schema import Study, read_study

BAR_CHARS = " ▁▂▃▄▅▆▇█"
"""Characters for the share of a client's examples that have a label, from none to all."""
BAR_WIDTH, MAX_CLIENTS, MAX_LABELS = 24, 40, 24
"""The width of the bar of examples; the most clients and labels shown in a terminal."""
SKEW_LEVELS = (
    (0.1, "nearly IID: as if examples were assigned at random"),
    (0.3, "mild label skew"),
    (0.6, "strong label skew: methods with personal params may help"),
    (1.1, "extreme label skew: many clients see few labels"),
)
"""Upper bounds of the label skew, each with its description."""


@dataclass(frozen=True)
class ClientData:
    """A client's numbers of training examples, held-out examples, and examples by label."""

    client: str
    train: int
    held_out: int
    labels: Mapping[str, int]


@dataclass(frozen=True)
class DataDistribution:
    """The data of all clients of a study, all labels in order, and the size of the common test."""

    study: str
    clients: tuple[ClientData, ...]
    labels: tuple[str, ...]
    test: int

    @property
    def label_skew(self) -> float | None:
        """The mean total variation distance between clients' labels and all labels, by examples.

        It is 0 if all clients have the same distribution, near 1 if no two clients share a label,
        and None without labels.
        """
        overall = sum((Counter(client.labels) for client in self.clients), Counter[str]())
        total = overall.total()
        if not total:
            return None
        return (
            fsum(
                _total_variation(client.labels, overall) * sum(client.labels.values())
                for client in self.clients
            )
            / total
        )

    def sentences(self) -> Iterator[str]:
        """Yield sentences on client sizes, label skew and the common test set; some are empty."""
        sizes = sorted(client.train for client in self.clients)
        yield f"{len(sizes)} clients with {sizes[0]} to {sizes[-1]} training examples each."
        if self.label_skew is not None:
            level = next(text for bound, text in SKEW_LEVELS if self.label_skew < bound)
            yield (
                f"Label skew {self.label_skew:.2f} (0: same labels everywhere, 1: no label in "
                f"common): {level}."
            )
            single = sum(len(+Counter(client.labels)) == 1 for client in self.clients)
            yield f"{single} clients have a single label." if single else ""
        yield (
            f"The common test set has {self.test} examples."
            if self.test
            else "There is no common test set."
        )

    def json(self) -> dict[str, Any]:
        """Return the distribution as plain values."""
        clients = [
            {"client": c.client, "train": c.train, "held_out": c.held_out, "labels": dict(c.labels)}
            for c in self.clients
        ]
        return {
            "study": self.study,
            "test": self.test,
            "unlike": self.label_skew,
            "clients": clients,
        }

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
            cells = [Text(client.client), str(client.train), str(client.held_out), bar]
            table.add_row(
                *cells, *([_label_bars(client.labels, self.labels)] if self.labels else [])
            )
        more = len(self.clients) - MAX_CLIENTS
        parts: list[RenderableType] = [table]
        parts += [Text(f"and {more} more clients: --json lists all")] if more > 0 else []
        parts += (
            [Text(f"\nlabels, from left to right: {_label_list(self.labels)}")]
            if self.labels
            else []
        )
        return Group(*parts, Text("\n" + "\n".join(filter(None, self.sentences()))))

    def figure(self) -> Drawing:
        """Return a chart with a dot per client and label, its area the number of examples.

        Without labels it is a bar chart of the examples of each client.
        """
        title = f"{self.study}: examples by client"
        sums = {client.client: client.train + client.held_out for client in self.clients}
        if not self.labels:
            return bar_chart(title, [Bar(*each) for each in sums.items()], unit="examples")
        counts = {client.client: client.labels for client in self.clients}
        return bubble_chart(
            title, counts, columns=self.labels, sums=sums, row="client", column="label"
        )


def data_distribution(study: Study | Path) -> DataDistribution:
    """Read and split the data of a study, or of a study file, without training."""
    study = read_study(study) if isinstance(study, Path) else study
    split = compute_split(study)
    clients = tuple(
        ClientData(
            name,
            len(train),
            len(split.client_tests[name]),
            _count_labels(split.labels, train, split.client_tests[name]),
        )
        for name, train in split.train.items()
    )
    labels = sorted({label for client in clients for label in client.labels}, key=label_sort_key)
    return DataDistribution(study.name, clients, tuple(labels), split.common_test_size)


def _count_labels(labels: Sequence[Sequence[str]], *splits: Sequence[int]) -> dict[str, int]:
    """Return the number of examples by label; `splits` are indices, `labels` are by example."""
    if not labels:
        return {}
    counts = Counter(label for split in splits for index in split for label in labels[index])
    return {label: counts[label] for label in sorted(counts, key=label_sort_key)}


def _total_variation(client: Mapping[str, int], overall: Mapping[str, int]) -> float:
    """Return the total variation distance between two label distributions; 0 without examples."""
    client_sum, overall_sum = sum(client.values()), sum(overall.values())
    if not client_sum:
        return 0.0
    return (
        fsum(abs(client.get(k, 0) / client_sum - n / overall_sum) for k, n in overall.items()) / 2
    )


def _label_bars(counts: Mapping[str, int], labels: Sequence[str]) -> str:
    """Return a bar character per label: the share of the examples that have it."""
    total = sum(counts.values()) or 1
    shares = [counts.get(label, 0) / total for label in labels[:MAX_LABELS]]
    # A share above 0 gets a visible bar.
    top = len(BAR_CHARS) - 1
    return "".join(BAR_CHARS[max(bool(share), round(share * top))] for share in shares)


def _label_list(labels: Sequence[str]) -> str:
    """Return the first labels joined by commas, and the number of further ones."""
    more = f" and {len(labels) - MAX_LABELS} more" if len(labels) > MAX_LABELS else ""
    return ", ".join(labels[:MAX_LABELS]) + more
