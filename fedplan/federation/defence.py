# SPDX-License-Identifier: Apache-2.0
"""Defences: what a study sets against weights and values that a client may have made up."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fedplan.errors import FedplanError
from fedplan.language.wording import spelled_out
from fedplan.methods.method import Method
from fedplan.privacy.guarantee import Guarantee

MEAN, MEDIAN, TRIMMED, KRUM, MULTI_KRUM = "mean", "median", "trimmed-mean", "krum", "multi-krum"

RULES = (MEAN, MEDIAN, TRIMMED, KRUM, MULTI_KRUM)


@dataclass(frozen=True)
class Defence:
    """What a server does against weights and values that a client may have made up.

    `weight_cap` is the most that a client may weigh, in rows; `share_cap` is the largest share that
    it may have of the weight of all who sent a param. A change longer than `change_bound` times
    what is usual in the round is shortened to that. 0 is no cap and no bound. `rule` makes one
    value of all that came; all but the mean hear no weights, and are told how many `liars` there
    may be.
    """

    rule: str = MEAN
    liars: int = 1
    weight_cap: int = 0
    share_cap: float = 0.0
    change_bound: float = 0.0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise FedplanError(f"rule is {self.rule!r}: it is one of {', '.join(RULES)}")
        if self.liars < 1:
            raise FedplanError(f"liars is {self.liars}: it is a number of clients, 1 or more")
        if self.weight_cap < 0 or not 0 <= self.share_cap < 1:
            raise FedplanError(
                f"weight_cap is {self.weight_cap} and share_cap {self.share_cap:g}: they are a "
                "number of rows, and a share below 1; 0 is none"
            )
        if self.change_bound and not 1 <= self.change_bound < inf:
            raise FedplanError(
                f"change_bound is {self.change_bound:g}: it is how many times what is usual a "
                "change may be, 1 or more; 0 is none"
            )
        if self.rule != MEAN and (self.weight_cap or self.share_cap):
            raise FedplanError(
                f"the rule {self.rule} counts all clients alike: leave weight_cap and share_cap out"
            )

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self.holds or bool(self.weight_cap)

    @property
    def holds(self) -> bool:
        """Whether all updates of a round must be there at once: nothing else can be streamed."""
        return self.rule != MEAN or bool(self.share_cap or self.change_bound)

    @property
    def words(self) -> str:
        """What it costs the server."""
        return f"the server holds all updates of a round until it closes, for {self.text}"

    @property
    def text(self) -> str:
        """It in one line, for both ends to compare."""
        return spelled_out("defence", self)

    @property
    def least(self) -> int:
        """How many must send a param for the rule to bear its liars."""
        return 2 * self.liars + (3 if self.rule in (KRUM, MULTI_KRUM) else 1)

    def trim(self, count: int) -> int:
        """How many of so many are left out at each end, number by number."""
        middle = (count - 1) // 2  # of an even number, the mean of two is the median
        return {MEDIAN: middle, TRIMMED: min(self.liars, middle)}.get(self.rule, 0)


def require_defence(defence: Defence, method: Method, guarantee: Guarantee | None) -> None:
    """Refuse a defence that does not hold together with the rest, and say what would."""
    ruled, wire = defence.rule != MEAN, method.wire.text
    shaping = ruled or bool(defence.change_bound)
    refusals: list[tuple[bool, str]] = [
        (
            guarantee is not None and guarantee.unit == "client" and defence.active,
            "the noise that hides clients is made for a plain sum, in which each change is clipped "
            "and all weigh alike: leave the defence out, privacy.clip is one",
        ),
        (
            guarantee is not None and bool(defence.weight_cap or defence.share_cap),
            "under a guarantee all clients weigh alike: leave weight_cap and share_cap out",
        ),
        (
            ruled and not method.product.apart,
            f"{method.product.text} needs the mean of the clients' products: take rule = "
            '"mean", with caps and change_bound, or average the sides apart (fedit)',
        ),
        (
            shaping and bool(method.riders),
            f"what rides beside the params ({', '.join(method.riders)}) is summed as it came: take "
            'a method without riders, or rule = "mean" with caps alone',
        ),
        (
            defence.rule in (MEDIAN, TRIMMED) and ("topk(" in wire or "prune(" in wire),
            f"the wire {wire} leaves most numbers of each client unchanged, so that number by "
            "number the middle of all is no change: take krum or multi-krum, or another wire",
        ),
    ]
    for wrong, why in refusals:
        if wrong:
            raise FedplanError(f"{defence.text} does not hold together with this run: {why}")
