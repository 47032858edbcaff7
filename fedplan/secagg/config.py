# SPDX-License-Identifier: Apache-2.0
"""Configuration of secure aggregation, its limits on clients, and what it is compatible with."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from fedplan.errors import FedplanError
from fedplan.language.canonical import format_dataclass
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases, SettledPhase
from fedplan.models.params import Kind
from fedplan.privacy.guarantee import Guarantee

PLAIN, SECURE = "plain", "secure"
AGGREGATION_KINDS = (PLAIN, SECURE)
"""Values of `SecAggConfig.kind`: no secure aggregation, and secure aggregation."""
SECAGG_STEPS = ("share_keys", "masked_input", "consistency_check", "unmask")
"""The protocol steps after the key adverts, in order: clients send encrypted shares, masked input,
a signature of the survivor list, and unmask shares."""
SHARES_STEP, MASKED_INPUT_STEP, SIGNATURE_STEP, UNMASK_STEP = SECAGG_STEPS
MIN_CONTRIBUTORS_WITH_SQUARES = 4
"""Smallest min_contributors where sums of squares are unmasked and one client subtracts its own:
two numbers follow from their sum and their sum of squares. Each further colluder needs one more."""
NO_DEFENCE = "no defence against bad values, since nobody sees a single update"
"""What secure aggregation costs beside bytes."""
NARROW_BYTES, WIDE_BYTES = 8, 16
"""Bytes of an integer of one word, and of two."""


@dataclass(frozen=True)
class SecAggConfig:
    """How updates are summed: in the clear, or by secure aggregation.

    `kind`: "plain" or "secure". `threshold`: clients needed to unmask a sum; 0 means two thirds of
    the cohort, rounded down, plus one. `min_contributors`: a sum over fewer clients is never
    unmasked. With 2, each of two clients can subtract its own update and learn the other's.
    `wide_integers`: use two 64-bit words per number, if a sum of weighted changes may exceed one.
    `colluders`: clients that may work with the server; under client-level DP the noise of the
    others alone is sufficient. `equal_weights`: all clients weigh 1, so that no sum reveals a
    client's number of examples. The constructor raises FedplanError for an unknown kind, for a
    threshold (other than 0) or `min_contributors` below 2, for `colluders` that reach the
    threshold, and for `colluders` or `equal_weights` with the kind "plain".
    """

    kind: str = PLAIN
    threshold: int = 0
    min_contributors: int = 3
    wide_integers: bool = False
    colluders: int = 0
    equal_weights: bool = False

    def __post_init__(self) -> None:
        if self.kind not in AGGREGATION_KINDS:
            raise FedplanError(f"kind is {self.kind!r}: use one of {', '.join(AGGREGATION_KINDS)}")
        if self.threshold < 0 or self.threshold == 1 or self.min_contributors < 2:
            raise FedplanError(
                f"threshold is {self.threshold} and min_contributors is "
                f"{self.min_contributors}: a sum of one client hides nothing, so both must be 2 or "
                "more; a threshold of 0 means two thirds of the cohort, and one more"
            )
        if self.colluders < 0 or 0 < self.threshold <= self.colluders:
            raise FedplanError(
                f"colluders is {self.colluders} and threshold is {self.threshold}: the colluders "
                "could unmask every sum; take fewer of them than the threshold"
            )
        if self.colluders and not self.active:
            raise FedplanError(
                f"colluders is {self.colluders}, and sums are plain: the server sees each update "
                "in any case; use aggregation.kind = 'secure', or leave colluders out"
            )
        if self.equal_weights and not self.active:
            raise FedplanError(
                "equal_weights is set, and sums are plain: a plain update reveals more than its "
                "number of examples; use aggregation.kind = 'secure', or leave equal_weights out"
            )

    @property
    def active(self) -> bool:
        """Whether secure aggregation is on."""
        return self.kind == SECURE

    @property
    def text(self) -> str:
        """The configuration in one line, which server and clients compare."""
        return format_dataclass("secagg", self)

    @property
    def cost_text(self) -> str:
        """Upload per number, message exchanges per round, and the lack of defences, in words."""
        size = WIDE_BYTES if self.wide_integers else NARROW_BYTES
        cost = f"secure aggregation: upload of {size} bytes a number, 5 message exchanges a round"
        return f"{cost}; {NO_DEFENCE}"

    def nbytes(self, numbers: int, wide: int = 0) -> int:
        """Return the upload bytes of `numbers` numbers and `wide` numbers that are always wide."""
        return numbers * (WIDE_BYTES if self.wide_integers else NARROW_BYTES) + wide * WIDE_BYTES

    def resolve_threshold(self, cohort_size: int) -> int:
        """The threshold of a cohort; FedplanError if no sum, or two of a round, could open."""
        threshold = self.threshold or max(2, 2 * cohort_size // 3 + 1)
        if cohort_size < threshold:
            raise FedplanError(
                f"a round has {cohort_size} clients and secure aggregation takes {threshold}: "
                "raise clients.fraction, or lower aggregation.threshold"
            )
        if cohort_size < self.min_contributors:
            raise FedplanError(
                f"a round has {cohort_size} clients and aggregation.min_contributors is "
                f"{self.min_contributors}: no sum could be unmasked; raise clients.fraction. A "
                "min_contributors of 2 is possible: each of two clients then learns the other's "
                "update"
            )
        if 2 * threshold <= cohort_size:
            raise FedplanError(
                f"aggregation.threshold is {threshold} of {cohort_size} clients, and two halves "
                f"could each unmask a sum: take {cohort_size // 2 + 1} at least"
            )
        if self.colluders >= 2 * threshold - cohort_size:
            raise FedplanError(
                f"aggregation.colluders is {self.colluders}, and {threshold} of {cohort_size} "
                "clients unmask a sum: with colluders in both, two halves could unmask one round "
                f"twice; take {2 * threshold - cohort_size - 1} at most, or a higher "
                "aggregation.threshold"
            )
        return threshold

    def honest_noise_shares(self, cohort_size: int) -> int:
        """Return how many clients' noise remains at least in a sum; colluders subtract theirs."""
        # Every client sees the new global model and knows its own share, so there is always one
        # observer, even without colluders.
        return self.resolve_threshold(cohort_size) - max(1, self.colluders)

    def describe_noise(self, cohort_size: int, noise: float, clip: float) -> str:
        """Return sentences for people on the noise of each client, for a cohort of this size."""
        honest, observers = self.honest_noise_shares(cohort_size), "one curious client"
        if self.colluders:
            observers += f" or {self.colluders} that collude with the server"
        return (
            f"each of {cohort_size} clients adds Gaussian noise of standard deviation "
            f"{noise * clip / sqrt(honest):.3g} to every number; any {honest} shares sum to the "
            "noise of the guarantee. A sum is unmasked only with the shares of "
            f"{self.resolve_threshold(cohort_size)} clients, of which {observers} may subtract "
            f"their own. The cost: a sum of all {cohort_size} clients has "
            f"{sqrt(cohort_size / honest):.3g} times the noise of the guarantee"
        )


def drift_tracked_kinds(method: Method) -> frozenset[str]:
    """Return the kinds of params whose drift the phase rule may read; all for a custom rule."""
    phase_rule = method.phase_rule
    if isinstance(phase_rule, SettledPhase):
        return frozenset(phase_rule.kinds)
    if type(phase_rule) is PlannedPhases:
        return frozenset()
    return frozenset(kind.value for kind in Kind)


def check_secagg_support(
    secagg: SecAggConfig, method: Method, guarantee: Guarantee | None, defence: str
) -> None:
    """Raise FedplanError, with a remedy, if secure aggregation is impossible in this run.

    Checks method, guarantee, `defence` (its text, "" if off), and min_contributors against
    colluders. Does nothing without secure aggregation.
    """
    client_dp = guarantee if guarantee is not None and guarantee.unit == "client" else None
    required = MIN_CONTRIBUTORS_WITH_SQUARES + max(0, secagg.colluders - 1)
    conflicts: list[tuple[bool, str]] = [
        (bool(defence), f"{defence} needs each single update: leave the defence out"),
        (
            client_dp is not None and client_dp.sampling_rate is not None,
            "all clients of a round see its cohort, so random sampling hides nobody: take all "
            "clients (clients.fraction = 1)",
        ),
        (
            client_dp is not None and client_dp.vote_noise_multiplier > 0,
            "the counts of a vote would be unmasked without noise: choose layers by chance, or by "
            "a fixed list, without privacy.vote_noise_multiplier",
        ),
        (
            client_dp is not None and client_dp.clipping_quantile > 0,
            "adaptive clipping needs a count of clients, which would be unmasked without noise: "
            "take a fixed clip, without privacy.clipping_quantile",
        ),
        (
            client_dp is None and secagg.min_contributors < secagg.colluders + 2,
            f"aggregation.colluders is {secagg.colluders} and min_contributors is "
            f"{secagg.min_contributors}: colluders could subtract their own updates and learn a "
            "client's; take a min_contributors of "
            f"{secagg.colluders + 2} at least, or client-level DP (privacy.unit)",
        ),
        (
            bool(method.aux),
            f"{', '.join(method.aux)} would be a second sum of the same changes with other "
            "weights, and two sums of two clients reveal both: take a method without auxiliary "
            "tensors",
        ),
        (
            not method.lora_aggregation.is_separate,
            "its server needs the mean of products beside the means of both sides, which reveals "
            "more of a client than one sum: average the sides apart (fedit)",
        ),
        (
            bool(drift_tracked_kinds(method)) and secagg.min_contributors < required,
            "its phases depend on drift, so a sum of squares is unmasked beside each sum: "
            f"aggregation.min_contributors is {secagg.min_contributors}, take {required} at "
            "least, or plan the phases by rounds",
        ),
    ]
    for conflicting, reason in conflicts if secagg.active else ():
        if conflicting:
            raise FedplanError(f"secure aggregation is not possible in this run: {reason}")
