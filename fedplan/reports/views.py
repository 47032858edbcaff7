# SPDX-License-Identifier: Apache-2.0
"""Views: a run as one kind of client will see it, with its stages and the bytes of its messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fedplan.federation.fare import Fare
from fedplan.language.plan import Best, Plan, Roles, Step
from fedplan.models.params import Param, Params

Span = tuple[int, int]
"""Bytes, the least and the most that they can be: scores and other clients decide."""


@dataclass(frozen=True)
class Segment:
    """Rounds in which a plan says the same to a client.

    `up` is what a client sends in each of them, and `down` what of the federation's they move: it
    comes with the client's next turn. `heaviest` are the roles of the heaviest choice.
    """

    name: str
    rounds: tuple[int, ...]
    steps: tuple[Step, ...]
    certain: Roles
    permitted: Roles
    heaviest: Roles
    up_span: Span
    down_span: Span
    trained: int
    optimiser: int

    @property
    def up(self) -> int:
        """The most that a client sends in a round."""
        return self.up_span[1]

    @property
    def up_least(self) -> int:
        """The least that it sends, whatever blocks are chosen."""
        return self.up_span[0]

    @property
    def down(self) -> int:
        """The most that a round sends back to a client, if all choose differently."""
        return self.down_span[1]

    @property
    def down_least(self) -> int:
        """What surely comes back."""
        return self.down_span[0]

    def choice(self, param: Param) -> Best | None:
        """The `best` that decides whether a param is trained, if one does."""
        if self.certain[param] is self.permitted[param]:
            return None
        chosen = [s for s in self.steps if isinstance(s, Best) and s.part.holds(param)]
        return chosen[-1]


@dataclass(frozen=True)
class View:
    """A run as one kind of client sees it that takes part in all of it.

    `ups` and `downs` are the bytes of its messages, round by round.
    """

    who: str
    stages: tuple[Segment, ...]
    ups: tuple[Span, ...]
    downs: tuple[Span, ...]

    @property
    def first(self) -> int:
        """What comes down at first contact."""
        return self.downs[0][1]

    @cached_property
    def up_span(self) -> Span:
        """What it sends in all."""
        return _sum(self.ups)

    @cached_property
    def down_span(self) -> Span:
        """What it receives in all."""
        return _sum(self.downs)

    @property
    def up(self) -> int:
        """The most that it sends in all."""
        return self.up_span[1]

    @property
    def down(self) -> int:
        """The most that it receives in all."""
        return self.down_span[1]


@dataclass(frozen=True)
class Forecast:
    """What a plan will do with a model over a run."""

    plan: Plan
    params: Params
    rounds: int
    views: tuple[View, ...]
    notes: tuple[str, ...]
    fare: Fare

    @cached_property
    def nbytes(self) -> int:
        """The whole model: what `share()` sends up in each round."""
        return sum(p.nbytes for p in self.params)


def _sum(spans: Iterable[Span]) -> Span:
    least, most = zip(*spans, strict=True)
    return sum(least), sum(most)
