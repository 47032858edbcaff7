# SPDX-License-Identifier: Apache-2.0
"""Agreements: what both ends of a federation know of each other before it starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedplan.federation.defence import Defence, require_defence
from fedplan.federation.fare import Fare
from fedplan.federation.masking import Masking, followed_kinds, require_masking
from fedplan.federation.products import require_layers, shared_layers
from fedplan.language.crowds import kinds_of
from fedplan.language.plan import Best, Role, Roles, Step
from fedplan.language.resolution import certain, permitted, resolve, touched
from fedplan.language.turn import Turn
from fedplan.language.wording import text_of
from fedplan.methods.method import Method
from fedplan.methods.phases import Planned
from fedplan.models.low_rank import LowRank
from fedplan.models.params import ITEMSIZE, Block, Param, Params
from fedplan.models.schema import written
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.guarantee import Guarantee
from fedplan.tensors.riders import param_of, riders_of
from fedplan.tensors.wire import plain
from fedplan.training.fit import Pace
from fedplan.training.fit import plain as plain_fit
from fedplan.training.probes import is_public


@dataclass(frozen=True)
class Agreement:
    """What both ends agree on before a federation starts.

    `study` is the digest of all that a study says, `start` that of the model it starts from. `run`
    is the id of one run of it: it names requests, and nothing that is worked out follows from it.
    """

    experiment: str
    params: Params
    method: Method
    pace: Pace
    guarantee: Guarantee | None = None
    study: str = ""
    start: str = ""
    run: str = ""
    defence: Defence = field(default_factory=Defence)
    masking: Masking = field(default_factory=Masking)

    def __post_init__(self) -> None:
        require_defence(self.defence, self.method, self.guarantee)
        require_masking(self.masking, self.method, self.guarantee, self.defence)
        if not self.method.product.apart:
            plan, params = self.method.plan, self.params
            moving = set(touched(plan, params, Role.SHARE, Role.KEEP, Role.HOLD))
            resting = tuple(p for p in params if p not in moving)
            require_layers(self.method, params, touched(plan, params, Role.SHARE), resting)

    @property
    def in_shares(self) -> bool:
        """Whether clients are hidden from the server too: under masks each adds its own noise."""
        guarantee = self.guarantee
        return self.masking.active and guarantee is not None and guarantee.unit == "client"

    @cached_property
    def text(self) -> str:
        """All that changes what is worked out, a line each: what both ends compare.

        Not in it are the experiment's name, which is in the name of each request; the rows and
        their loss, which a study says and a Python call does not; and what `text_of` does not see
        of a function that somebody wrote for himself.
        """
        said = {
            **({"defence": self.defence.text} if self.defence.active else {}),
            **({"masking": self.masking.text} if self.masking.active else {}),
            "pace": text_of(self.pace),
            "guarantee": text_of(self.guarantee),
            "study": text_of(self.study),
            "start": text_of(self.start),
            "params": hashlib.sha256(written(self.params).encode()).hexdigest(),
        }
        return "\n".join((*self.method.lines, *(f"{word} {text}" for word, text in said.items())))

    @property
    def fingerprint(self) -> str:
        """Tells two ends apart that would work out different things."""
        return self.digest[:16]

    @cached_property
    def digest(self) -> str:
        """The same where somebody may have tried for two that are alike: nothing is cut off."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def movable(self) -> Params:
        """Params that some turn may share, or the server folds into: only these ever travel."""
        found = {*touched(self.method.plan, self.params, Role.SHARE), *self.folded}
        return tuple(p for p in self.params if p in found)

    @cached_property
    def layers(self) -> tuple[LowRank, ...]:
        """The low-rank layers whose products are summed: some turn may share both sides.

        Under masks none is: products would be a second sum of the same changes.
        """
        if self.masking.active:
            return ()
        return shared_layers(
            self.method, self.params, touched(self.method.plan, self.params, Role.SHARE)
        )

    @cached_property
    def squared(self) -> frozenset[str]:
        """Params of which a masked sum tells how far changes lie apart: those phases follow."""
        kinds = followed_kinds(self.method) if self.masking.active else frozenset[str]()
        return frozenset(p.key for p in self.movable if p.kind in kinds)

    @cached_property
    def folded(self) -> Params:
        """Params that nobody trains and the server changes: both ends start with the same."""
        layers = self.layers if self.method.product.folds else ()
        return tuple(host for layer in layers for host in layer.hosts)

    @cached_property
    def trainable(self) -> Params:
        """Params whose values may change: some turn may train them, or the server folds in."""
        found = {*touched(self.method.plan, self.params, Role.SHARE, Role.KEEP), *self.folded}
        return tuple(p for p in self.params if p in found)

    @cached_property
    def resting(self) -> Params:
        """Params that stay as the model has them: all others."""
        changing = {p.key for p in self.trainable}
        return tuple(p for p in self.params if p.key not in changing)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every block of the model."""
        return tuple(dict.fromkeys(p.at for p in self.params if p.at))

    @cached_property
    def most(self) -> int:
        """The most blocks that any `best` of the plan chooses: a ballot names so many."""
        return max((s.count for s in self.method.plan.within() if isinstance(s, Best)), default=0)

    def chooses(self, turn: Turn) -> bool:
        """Whether the plan chooses blocks by scores in a turn."""
        return any(isinstance(step, Best) for step in self.method.plan.settle(turn))

    @cached_property
    def _told(self) -> dict[tuple[bool, tuple[Step, ...]], Roles]:
        """Roles that were worked out, by what the plan says: turns that say the same share them."""
        return {}

    def permitted(self, turn: Turn) -> Roles:
        """`resolution.permitted` of this plan."""
        said = (True, self.method.plan.settle(turn))
        if said not in self._told:
            self._told[said] = permitted(self.method.plan, self.params, turn)
        return self._told[said]

    def certain(self, turn: Turn) -> Roles:
        """`resolution.certain` of this plan."""
        said = (False, self.method.plan.settle(turn))
        if said not in self._told:
            self._told[said] = certain(self.method.plan, self.params, turn)
        return self._told[said]

    def resolved(self, turn: Turn) -> Roles:
        """`resolve` of this plan; where nothing is chosen, that is what is permitted."""
        if not self.chooses(turn):
            return self.permitted(turn)
        return resolve(self.method.plan, self.params, turn)

    def sent(self, turn: Turn, roles: Roles) -> Params:
        """What a client sends of the params in a turn: with noise in shares, what any may share."""
        if self.in_shares:
            return self.public(turn)
        return tuple(p for p in self.params if roles[p] is Role.SHARE)

    def public(self, turn: Turn) -> Params:
        """All that any client may share in a turn's round, whoever there is.

        With noise in shares everyone sends that: who sent less would leave numbers without its
        noise. Of scores those count that all choose by.
        """
        scores = turn.scores if self.method.together else None
        kinds = (kind for _, kind in kinds_of(self.method.plan, None))
        return self.shared_in(
            replace(turn, client=k.client, traits=k.traits, scores=scores) for k in kinds
        )

    def shared_in(self, turns: Iterable[Turn]) -> Params:
        """What may be shared in any of some turns: of scores, by those that a turn has."""
        kinds = {(self.method.plan.settle(turn), bool(turn.scores)): turn for turn in turns}
        every = [self.resolved(t) if t.scores else self.permitted(t) for t in kinds.values()]
        return tuple(p for p in self.params if any(each[p] is Role.SHARE for each in every))

    def owned(self, turn: Turn) -> int:
        """Which movable params are a client's own in a turn: one bit each, in their order."""
        roles = self.permitted(turn)
        return sum(1 << i for i, p in enumerate(self.movable) if roles[p].own)

    def wanted(self, turn: Turn, settled: int = 0) -> dict[str, int]:
        """What a client must have of the world in a turn, and the version that it starts with.

        The federation's params travel at first contact (-1: it has none). A client's own come down
        once, if they have moved by then: those that are `settled` are at home. Riders start at zero
        at both ends, and what is folded into as the model has it.
        """
        roles = self.permitted(turn)
        here = {p.key for p in self.folded}
        firsts = [
            (i, p.key, 0 if roles[p].own or p.key in here else -1)
            for i, p in enumerate(self.movable)
        ]
        found = {key: first for i, key, first in firsts if first or not settled >> i & 1}
        shared = [p.key for p in self.movable if roles[p] is Role.SHARE]
        return found | dict.fromkeys(riders_of(shared, self.method.riders), 0)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The bytes of all that may come down, riders included."""
        whole = {p.key: p.nbytes for p in self.movable}
        beside = riders_of(whole, self.method.riders)
        return whole | {name: whole[param_of(name)] for name in beside}

    def up(self, param: Param) -> int:
        """The bytes that a shared param takes on its way up, its riders included.

        Under masks they are words: of what a client hands over, and where phases follow it, of how
        far that lies.
        """
        if self.masking.active:
            return self.masking.nbytes(param.numel, int(param.key in self.squared))
        coded = self.method.wire.nbytes(param.shape, ITEMSIZE[param.dtype])
        return coded + len(self.method.riders) * param.nbytes

    @cached_property
    def fare(self) -> Fare:
        """What travel costs in this federation."""
        wire, riders = self.method.wire.text, self.method.riders
        words = [f"wire {wire}"] if wire != plain().text else []
        words += [f"beside each shared param rides {', '.join(riders)}"] if riders else []
        folded = frozenset(p.key for p in self.folded)
        words += [f"the server folds into {len(folded)} weights, which come down"] if folded else []
        held = sum(p.nbytes for p in self.movable) * (1 + len(riders)) / 1e6
        words += (
            [f"{self.defence.words} (up to {held:.1f} MB a client)"] if self.defence.holds else []
        )
        words += [self.masking.words] if self.masking.active else []
        return Fare(self.up, len(riders), "; ".join(words), folded)

    @property
    def prefix(self) -> str:
        """How the names of all requests of a run begin."""
        return "".join(f"{word}/" for word in (self.experiment, self.fingerprint, self.run) if word)

    def request(self, number: int, client: str) -> str:
        """The name of what a client is asked for in one round of one run."""
        return f"{self.prefix}{number}/{client}"


def require_sound(guarantee: Guarantee, method: Method) -> None:
    """Refuse a method that does not hold together with a guarantee, and say what would."""
    chooses = any(isinstance(each, Best) for each in method.plan.within())
    private = chooses and not is_public(method.probe)
    refusals: list[tuple[bool, str]] = [
        (
            private and not guarantee.vote,
            "it chooses layers by scores of private rows, which is a release that nobody pays for: "
            "let them vote (privacy.vote), or choose by chance, a fixed list, or the last or "
            "middle layers (probe random, last, middle), or by a plan without best",
        ),
        (
            bool(guarantee.vote) and not private,
            "there is a vote (privacy.vote) and nothing to vote on: its plan has no best, or its "
            "probe looks at no rows; take the vote away, which costs",
        ),
        (
            bool(method.riders),
            "what rides beside its params is not clipped: take a method without riders",
        ),
        (
            guarantee.unit == "client" and not method.product.apart,
            "its server multiplies each client's update, and only sums of clipped ones are hidden: "
            "average the sides apart (fedit), or hide examples (privacy.unit)",
        ),
        (
            type(method.announce) is not Planned,
            "its phases follow what the clients did: plan them (method.phases)",
        ),
        (
            guarantee.unit == "example" and (bool(method.wraps) or method.loop is not plain_fit),
            "its local fit is its own, and only plain steps are known to be hidden: take a method "
            "without one (no wraps, no loop), or hide clients (privacy.unit)",
        ),
    ]
    for wrong, why in refusals:
        if wrong:
            raise PrivacyError(f"this method does not hold together with privacy: {why}")


def basis(versions: Mapping[str, int]) -> str:
    """Tells two copies of the world apart by the versions that they are made of."""
    text = json.dumps(sorted(versions.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
