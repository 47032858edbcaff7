# SPDX-License-Identifier: Apache-2.0
"""The data dictionary of a study: its columns, by which sites check and count their data."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from fedplan.data.column_statistics import MISSING, OTHER, Column, ColumnType
from fedplan.data.tables import label_text
from fedplan.studies.federation_sections import Statement
from fedplan.studies.section import Section

if TYPE_CHECKING:
    from fedplan.studies.schema import Study

MAX_COLUMNS, MAX_EDGES, MAX_CODES = 200, 100, 1000
"""Limits on a dictionary, which a site checks before anybody approves it."""


class ColumnSection(Section):
    """A column that every site has, with the bins or codes in which it is counted."""

    type: ColumnType
    """What its cells hold: "number", "category" (one of `codes`), "text", or "any"."""
    unit: Statement | None = None
    """Unit of its numbers, such as "years", for people: a site's engineer compares it."""
    codes: Annotated[list[Statement | int], Field(max_length=MAX_CODES)] = Field(
        default_factory=list[str | int]
    )
    """The values of a category."""
    edges: Annotated[list[float], Field(max_length=MAX_EDGES)] = Field(default_factory=list[float])
    """Bounds of the bins of numbers or of lengths of texts; each is in the bin above it."""
    minimum: float | None = None
    """The least number that is right."""
    maximum: float | None = None
    """The largest number that is right."""
    required: bool = False
    """Whether a row without a value is a mismatch."""
    in_words: bool = False
    """Count the lengths of texts in words, separated by spaces; default: in characters."""

    @property
    def column(self) -> Column:
        """The column as the counts need it."""
        codes, edges = tuple(map(label_text, self.codes)), tuple(self.edges)
        fields = self.model_dump(exclude={"unit", "codes", "edges"})
        return Column(**fields, codes=codes, edges=edges)

    @model_validator(mode="after")
    def _validate_column(self) -> ColumnSection:
        codes = [label_text(code) for code in self.codes]
        if self.type == "category" and not codes:
            raise ValueError("codes: a category needs the list of its values")
        if codes and self.type != "category":
            raise ValueError(f"codes are for categories, and not for {self.type!r}")
        if used := {OTHER, MISSING} & {*codes}:
            raise ValueError(f"codes: {min(used)} is the name of another cell: rename this code")
        if len(counts := Counter(codes)) < len(codes):
            raise ValueError(f"codes: {counts.most_common(1)[0][0]!r} is listed twice")
        if self.edges and self.type not in ("number", "text"):
            raise ValueError(f"edges are for numbers and texts, and not for {self.type!r}")
        if (self.minimum, self.maximum) != (None, None) and self.type != "number":
            raise ValueError(f"minimum and maximum are for numbers, and not for {self.type!r}")
        if self.in_words and self.type != "text":
            raise ValueError(f"in_words is for texts, and not for {self.type!r}")
        ends = (self.minimum, *self.edges, self.maximum)
        bounds = [bound for bound in ends if bound is not None]
        for low, high in pairwise(bounds):
            if low >= high:
                order = "minimum, edges, maximum: each must be above the one before"
                raise ValueError(f"{order}, and {high:g} follows {low:g}")
        return self


class StatisticsSection(Section):
    """The data dictionary of the sites, and so the statistics that they may send.

    `fedplan site statistics` checks a site's data before it connects.
    """

    columns: Annotated[dict[Statement, ColumnSection], Field(min_length=1, max_length=MAX_COLUMNS)]
    """Columns by name: [statistics.columns.age]."""
    require: bool = False
    """Whether a site trains only if its policy has [statistics], and its counts show no
    difference from the dictionary."""


def statistics_refusal(study: Study) -> str:
    """Return why no site may send counts for a study; "" if it may."""
    if study.statistics is None:
        return "the study has no data dictionary: add [statistics.columns.NAME] for each column"
    if not study.clients.names:
        return "the study names no sites, which would have the data: set clients.names"
    if study.privacy is not None:
        return "statistics have no noise, so they cannot be used with [privacy]"
    if study.aggregation.config.active:
        return "statistics are of single sites, so they cannot be used with secure aggregation"
    if study.clients.edges:
        return "an edge passes on no statistics: leave out clients.edges"
    return ""


def dictionary(study: Study) -> dict[str, Column]:
    """Return the columns of a study's dictionary by name; the label has the task's labels.

    Empty without [statistics].
    """
    if study.statistics is None:
        return {}
    columns = {name: section.column for name, section in study.statistics.columns.items()}
    task = study.task
    if task.label and task.labels and not task.label_separator:
        labels = tuple(dict.fromkeys(map(label_text, task.labels)))
        columns.setdefault(task.label, Column("category", labels))
    return columns
