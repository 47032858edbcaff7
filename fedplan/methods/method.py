# SPDX-License-Identifier: Apache-2.0
"""Methods: a few independent choices, of which the plan is the first."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature

from torch import nn

from fedplan.errors import FedplanError
from fedplan.language.plan import Plan
from fedplan.language.wording import text_of
from fedplan.methods.phases import Announce, Planned
from fedplan.methods.products import ProductRule, apart
from fedplan.methods.server_optimiser import ServerOptimiser, mean
from fedplan.tensors.codecs import PIECES, Wire
from fedplan.tensors.wire import plain as as_is
from fedplan.training.fit import Fit, Wrap, plain
from fedplan.training.probes import Probe, at_random, is_public


@dataclass(frozen=True)
class Method:
    """What is trained and whose it is (plan), how (wraps), how it travels (wire), and what then.

    `loop` is what trains a client's model, inside all `wraps`: ours, or your own (see `attach`).
    `server_optimiser` makes the world's values of the clients' means, by one of the rules of its
    module or a function of your own. `probe` gives the scores that a plan with `best` chooses by,
    each client by its own or all of them `together` by the sum; `announce` names the phases;
    `riders` are the kinds of what travels beside each shared param; `adapt` adds to the model
    what the method trains, before it is described. A param that only some clients sent is the mean
    over its senders, or, if `absent` counts, over all who took part: those who did not send it
    count as not having changed it. `product` says what becomes of LoRA's two sides, whose means are
    not the mean of their products.
    """

    plan: Plan
    wraps: tuple[Wrap, ...] = ()
    probe: Probe = at_random
    together: bool = False
    announce: Announce = field(default_factory=Planned)
    riders: tuple[str, ...] = ()
    wire: Wire = field(default_factory=as_is)
    absent: bool = False
    server_optimiser: ServerOptimiser = field(default_factory=mean)
    adapt: Callable[[nn.Module], nn.Module] | None = None
    product: ProductRule = field(default_factory=apart)
    loop: Fit = plain

    def __post_init__(self) -> None:
        told = all(re.fullmatch("[a-z_]+", kind) for kind in self.riders)
        if type(self.riders) is not tuple or not told:
            raise FedplanError(f"riders are {self.riders!r}: give their kinds, as ('control',)")
        if taken := PIECES & set(self.riders):
            raise FedplanError(f"a codec has a piece called {min(taken)!r}: call the rider another")
        if not self.product.apart:
            _require_exact(self)
        _require_fit(self.loop)

    @property
    def lines(self) -> tuple[str, ...]:
        """It in lines, each a word and what it says, for both ends to compare."""
        said = {
            "plan": f"{self.plan.fingerprint} {self.plan.text}",
            "wire": self.wire.text,
            "riders": text_of(self.riders),
            "together": text_of(self.together),
            "absent": text_of(self.absent),
            "probe": text_of(self.probe) + (" without rows" if is_public(self.probe) else ""),
            "phases": text_of(self.announce),
            "wraps": text_of(self.wraps),
            "loop": text_of(self.loop),
            "server optimiser": text_of(self.server_optimiser),
            "adapt": text_of(self.adapt),
        }
        if not self.product.apart:
            said["product"] = self.product.text
        return tuple(f"{word} {text}" for word, text in said.items())

    @property
    def fit(self) -> Fit:
        """The local fit as the method changes it, the first wrap outermost."""
        fit = self.loop
        for wrap in reversed(self.wraps):
            fit = wrap(fit)
        return fit

    def inside(self, other: Method) -> Method:
        """The same plan, with another method's fit and server: FedFrozen inside SCAFFOLD."""
        return replace(
            self,
            wraps=(*other.wraps, *self.wraps),
            riders=(*other.riders, *self.riders),
            loop=other.loop if self.loop is plain else self.loop,
            server_optimiser=other.server_optimiser,
        )


def _require_exact(method: Method) -> None:
    """Refuse what would undo the product that a rule promises."""
    wrong = {
        f"the wire {method.wire.text} changes what arrives: take plain()": (
            method.wire.text != as_is().text
        ),
        "another server optimiser than mean() moves each side by itself: leave it out": (
            method.server_optimiser != mean()
        ),
        "absent clients would count as sides that have not changed: leave absent out": (
            method.absent
        ),
    }
    for why in (why for why, found in wrong.items() if found):
        raise FedplanError(f"{method.product.text} would not hold, since {why}")


def _require_fit(loop: Fit) -> None:
    """Refuse a loop that takes more than a job: one of a model and rows is to be attached."""
    try:
        takes = signature(loop).parameters.values()
    except (TypeError, ValueError):
        return
    needed = [p for p in takes if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(needed) > 1:
        names = ", ".join(p.name for p in needed)
        raise FedplanError(f"the loop takes {names}: write loop = fedplan.attach(...) of it")
