# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation: defences against false weights and values of clients."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fedplan.errors import FedplanError
from fedplan.language.canonical import format_dataclass
from fedplan.methods.method import Method
from fedplan.methods.server_optimizer import Dynamic
from fedplan.privacy.guarantee import Guarantee

MEAN, MEDIAN, TRIMMED, KRUM, MULTI_KRUM = "mean", "median", "trimmed-mean", "krum", "multi-krum"

RULES = (MEAN, MEDIAN, TRIMMED, KRUM, MULTI_KRUM)
"""Aggregation rules that a study can name."""


@dataclass(frozen=True)
class Defence:
    """Settings of the server's defence against false weights and values; 0 turns a limit off.

    `rule`: one of RULES, how updates are aggregated; all rules but "mean" ignore weights.
    `malicious_clients`: number of malicious clients that the rule must tolerate. `max_weight`: cap
    on a client's weight, in examples. `max_weight_fraction`: cap on a client's fraction of the
    total weight of all clients that sent a param. `max_norm_ratio`: updates longer than this
    multiple of the client's reference norm (`robust.reference_norms`) are scaled down. The default
    (mean, no caps) is not `active`. Raises FedplanError if a setting is out of range, or if a
    weight cap is combined with a rule that ignores weights.
    """

    rule: str = MEAN
    malicious_clients: int = 1
    max_weight: int = 0
    max_weight_fraction: float = 0.0
    max_norm_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise FedplanError(f"rule is {self.rule!r}: use one of {', '.join(RULES)}")
        if self.malicious_clients < 1:
            raise FedplanError(
                f"malicious_clients is {self.malicious_clients}: give a number of clients, "
                "1 or more"
            )
        if self.max_weight < 0 or not 0 <= self.max_weight_fraction < 1:
            raise FedplanError(
                f"max_weight is {self.max_weight} and max_weight_fraction "
                f"{self.max_weight_fraction:g}: give a number of examples, and a fraction below 1; "
                "0 is no cap"
            )
        if self.max_norm_ratio and not 1 <= self.max_norm_ratio < inf:
            raise FedplanError(
                f"max_norm_ratio is {self.max_norm_ratio:g}: give a multiple of the reference "
                "norm, 1 or more; 0 is no bound"
            )
        if self.rule != MEAN and (self.max_weight or self.max_weight_fraction):
            raise FedplanError(
                f"the rule {self.rule} counts all clients alike: leave max_weight and "
                "max_weight_fraction out"
            )

    @property
    def active(self) -> bool:
        """Whether any defence is on."""
        return self.buffers_updates or bool(self.max_weight)

    @property
    def buffers_updates(self) -> bool:
        """Whether the server must keep all updates of a round until it closes."""
        return self.rule != MEAN or bool(self.max_weight_fraction or self.max_norm_ratio)

    @property
    def cost_text(self) -> str:
        """The memory cost of buffering, in words."""
        return f"the server keeps all updates of a round until it closes, for {self.text}"

    @property
    def text(self) -> str:
        """All settings in one line; part of the text that server and clients compare."""
        return format_dataclass("defence", self)

    @property
    def min_clients(self) -> int:
        """Clients that must send a param for the rule to tolerate its malicious clients."""
        return 2 * self.malicious_clients + (3 if self.rule in (KRUM, MULTI_KRUM) else 1)

    def trim_count(self, count: int) -> int:
        """Return how many of `count` sorted values the rule removes at each end."""
        middle = (count - 1) // 2  # for an even count, the median is the mean of two
        return {MEDIAN: middle, TRIMMED: min(self.malicious_clients, middle)}.get(self.rule, 0)


def require_defence(defence: Defence, method: Method, guarantee: Guarantee | None) -> None:
    """Raise FedplanError, with a remedy, if a defence cannot be combined with method or guarantee.

    Refused: any defence under client-level DP, weight caps under any DP, rules other than mean with
    LoRA products, rules or norm limits with auxiliary tensors, any defence with FedDyn's server,
    and median or trimmed mean with sparse compression.
    """
    other_rule, compression = defence.rule != MEAN, method.compression.text
    changes_values = other_rule or bool(defence.max_norm_ratio)
    refusals: list[tuple[bool, str]] = [
        (
            guarantee is not None and guarantee.unit == "client" and defence.active,
            "client-level privacy clips each update and weighs all alike, which limits malicious "
            "clients already (privacy.clipping_norm): leave the defence out",
        ),
        (
            guarantee is not None and bool(defence.max_weight or defence.max_weight_fraction),
            "under privacy all clients weigh alike: leave max_weight and max_weight_fraction out",
        ),
        (
            other_rule and not method.lora_aggregation.is_separate,
            f"{method.lora_aggregation.text} needs the mean of the clients' products: use rule = "
            '"mean", with caps and max_norm_ratio, or average the factors separately (fedit)',
        ),
        (
            changes_values and bool(method.aux),
            f"the auxiliary tensors ({', '.join(method.aux)}) are summed without a defence: use "
            'a method without them, or rule = "mean" with caps only',
        ),
        (
            defence.active and isinstance(method.server_optimizer, Dynamic),
            "FedDyn's server adds up the changes that clients made, and a defence alters them: use "
            "another method, such as fedprox, or leave the defence out",
        ),
        (
            defence.rule in (MEDIAN, TRIMMED)
            and ("topk(" in compression or "prune(" in compression),
            f"the wire {compression} leaves most numbers of each client unchanged, so the median "
            "of each number is no change: use krum or multi-krum, or another wire",
        ),
    ]
    for applies, reason in refusals:
        if applies:
            raise FedplanError(f"{defence.text} cannot be combined with this run: {reason}")
