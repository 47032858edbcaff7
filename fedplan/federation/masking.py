# SPDX-License-Identifier: Apache-2.0
"""Masking: whether the server sees sums alone, how many sites open one, and what that excludes."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from fedplan.errors import FedplanError
from fedplan.federation.defence import Defence
from fedplan.language.wording import spelled_out
from fedplan.methods.method import Method
from fedplan.methods.phases import Planned, Settled
from fedplan.models.params import Kind
from fedplan.privacy.guarantee import Guarantee

PLAIN, MASKED = "plain", "masked"
SUMS = (PLAIN, MASKED)
SHARE, WORDS, CONSENT, UNMASK = STEPS = ("share", "words", "consent", "unmask")
"""What a site is asked in a masked sum, one after the other, after the turn that begins it."""
SQUARES = 4
"""The least floor where squares are opened, with one who takes his own off: the sum of two numbers
and that of their squares tell both. Each colluder beyond him asks for one more."""
NARROW, WIDE = 8, 16
"""Bytes of a number of one word, and of two."""


@dataclass(frozen=True)
class Masking:
    """How updates are summed: as they come, or under masks that only their sum can lose.

    It takes `threshold` clients to open a sum; 0 is two thirds of those who are asked, and one
    more. What fewer than `floor` clients send stays closed: each of two could take its own away
    and have the other's, so 2 must be said. Numbers are `wide` where a sum of weighted changes may
    pass one word. Up to `colluders` of the clients may tell the server all they have: where clients
    are hidden, each adds so much noise that the others' is enough. Where all count `alike`, and
    not by their rows, no sum tells how many rows a client has.
    """

    kind: str = PLAIN
    threshold: int = 0
    floor: int = 3
    wide: bool = False
    colluders: int = 0
    alike: bool = False

    def __post_init__(self) -> None:
        if self.kind not in SUMS:
            raise FedplanError(f"kind is {self.kind!r}: it is one of {', '.join(SUMS)}")
        if self.threshold < 0 or self.threshold == 1 or self.floor < 2:
            raise FedplanError(
                f"threshold is {self.threshold} and floor {self.floor}: a sum of one hides "
                "nothing, so both are 2 or more; a threshold of 0 is two thirds and one more"
            )
        if self.colluders < 0 or 0 < self.threshold <= self.colluders:
            raise FedplanError(
                f"colluders is {self.colluders} and threshold {self.threshold}: those who collude "
                "could open every sum; take fewer of them than the threshold"
            )
        if self.colluders and not self.active:
            raise FedplanError(
                f"colluders is {self.colluders}, and sums are plain: the server sees each update, "
                "whoever works with it; say aggregation.kind = 'masked', or leave colluders out"
            )
        if self.alike and not self.active:
            raise FedplanError(
                "all count alike, and sums are plain: a plain update tells more than its rows; say "
                "aggregation.kind = 'masked', or leave alike out"
            )

    @property
    def active(self) -> bool:
        """Whether anything is masked."""
        return self.kind == MASKED

    @property
    def text(self) -> str:
        """It in one line, for both ends to compare."""
        return spelled_out("masking", self)

    @property
    def words(self) -> str:
        """What it costs."""
        size = WIDE if self.wide else NARROW
        return f"masked: {size} bytes a number go up, and a round takes 5 exchanges of messages"

    def nbytes(self, numbers: int, wide: int = 0) -> int:
        """The bytes of so many numbers, and of others that are wide in any case."""
        return numbers * (WIDE if self.wide else NARROW) + wide * WIDE

    def least(self, asked: int) -> int:
        """The threshold among so many who are asked, if it is one that holds."""
        least = self.threshold or max(2, 2 * asked // 3 + 1)
        if asked < least:
            raise FedplanError(
                f"{asked} clients are asked and a masked sum takes {least}: ask more of them "
                "(clients.share), or lower aggregation.threshold"
            )
        if asked < self.floor:
            raise FedplanError(
                f"{asked} clients are asked and aggregation.floor is {self.floor}: no sum could be "
                "opened; ask more of them (clients.share). A floor of 2 can be said: each of two "
                "then learns what the other sent"
            )
        if 2 * least <= asked:
            raise FedplanError(
                f"aggregation.threshold is {least} of {asked} clients, and two halves could each "
                f"open a sum: take {asked // 2 + 1} at least"
            )
        if self.colluders >= 2 * least - asked:
            raise FedplanError(
                f"aggregation.colluders is {self.colluders}, and {least} of {asked} clients open a "
                "sum: with these in both, two halves could open one round twice; take "
                f"{2 * least - asked - 1} at most, or a higher aggregation.threshold"
            )
        return least

    def honest(self, asked: int) -> int:
        """How many shares nobody who looks can take off, of those in a sum, at the least.

        Everyone is sent what the sum makes of the world, and knows its own share: so one other
        site is there that looks, also where nobody works with the server.
        """
        return self.least(asked) - max(1, self.colluders)

    def shares(self, asked: int, noise: float, clip: float) -> str:
        """The noise that each client adds, and its price, in words."""
        honest, looks = self.honest(asked), "one other site"
        if self.colluders:
            looks = f"{self.colluders} that work with the server, or {looks},"
        return (
            f"each of {asked} sites adds its share, {noise * clip / sqrt(honest):.3g} on every "
            f"number: any {honest} shares are the noise that is promised, for a sum takes "
            f"{self.least(asked)} sites to open, and {looks} may take what it knows off. The "
            f"price: a sum of all {asked} has {sqrt(asked / honest):.3g} times that noise"
        )


def followed_kinds(method: Method) -> frozenset[str]:
    """The kinds of params whose drift phases may follow: a plan of rounds looks at none.

    A rule that somebody wrote for himself may look at all.
    """
    announce = method.announce
    if isinstance(announce, Settled):
        return frozenset(announce.kinds)
    return frozenset() if type(announce) is Planned else frozenset(kind.value for kind in Kind)


def require_masking(
    masking: Masking, method: Method, guarantee: Guarantee | None, defence: Defence
) -> None:
    """Refuse what a server cannot do that sees one sum of each change, and say what would do."""
    hidden = guarantee if guarantee is not None and guarantee.unit == "client" else None
    squares = SQUARES + max(0, masking.colluders - 1)
    refusals: list[tuple[bool, str]] = [
        (
            defence.active,
            f"{defence.text} looks at each update: leave the defence out",
        ),
        (
            hidden is not None and hidden.rate is not None,
            "all sites of a round see who is in it, so a chance of being drawn hides nobody: ask "
            "all clients (clients.share = 1)",
        ),
        (
            hidden is not None and hidden.vote > 0,
            "the counts of a vote would be opened before anybody adds noise to them: choose by "
            "chance, or by a fixed list, without privacy.vote",
        ),
        (
            hidden is not None and hidden.quantile > 0,
            "a clip that follows the clients' lengths needs a count of them, which would be opened "
            "without noise: take a fixed clip, without privacy.quantile",
        ),
        (
            hidden is None and masking.floor < masking.colluders + 2,
            f"aggregation.colluders is {masking.colluders} and floor {masking.floor}: they could "
            "take their own from a sum and have one site's update; take a floor of "
            f"{masking.colluders + 2} at least, or hide clients (privacy.unit)",
        ),
        (
            bool(method.riders),
            f"{', '.join(method.riders)} would be a second sum of the same changes, weighted "
            "otherwise, and two sums of two sites are both of them: take a method without riders",
        ),
        (
            not method.product.apart,
            "its server needs the mean of products beside the means of both sides, and that tells "
            "more of a site than a sum does: average the sides apart (fedit)",
        ),
        (
            bool(followed_kinds(method)) and masking.floor < squares,
            "its phases follow how far changes lie apart, so a square is opened beside each sum: "
            f"aggregation.floor is {masking.floor}, take {squares} at least, or plan the phases "
            "by rounds",
        ),
    ]
    for wrong, why in refusals if masking.active else ():
        if wrong:
            raise FedplanError(f"a masked sum does not hold together with this run: {why}")
