# SPDX-License-Identifier: Apache-2.0
"""Methods: a few independent choices, of which the plan is the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from fedplan.fit import Fit, Wrap, plain
from fedplan.plan import Plan
from fedplan.probe import Probe, at_random
from fedplan.serve import Serve
from fedplan.wire import Wire
from fedplan.wire import plain as as_is


@dataclass(frozen=True)
class Method:
    """What is trained and whose it is (plan), how (wraps), how it travels (wire), how it is served.

    `probe` gives the scores that a plan with `best` chooses by; `riders` are the suffixes of what
    travels beside each shared param; `adapt` adds to the model what the method trains, before it is
    described.
    """

    plan: Plan
    wraps: tuple[Wrap, ...] = ()
    probe: Probe = at_random
    riders: tuple[str, ...] = ()
    wire: Wire = field(default_factory=as_is)
    serve: Serve = field(default_factory=Serve)
    adapt: Callable[[nn.Module], nn.Module] | None = None

    @property
    def fit(self) -> Fit:
        """The local fit as the method changes it, the first wrap outermost."""
        fit: Fit = plain
        for wrap in reversed(self.wraps):
            fit = wrap(fit)
        return fit
