# SPDX-License-Identifier: Apache-2.0
"""Differences: what tells two neighbouring worlds apart, measured against what is charged."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from epsilon_bounds import (
    Column,
    Draws,
    gaussian_lower_bound,
    lower_bound,
    release_rows,
    sample_releases,
)
from neighbours import (
    BATCH,
    CANARY,
    CLIP,
    METHODS,
    NOISE,
    ODD,
    RATE,
    TASKS,
    Case,
    K,
    Said,
    Seen,
    World,
    coupled,
    pair,
    secrets_known,
    tables_of,
    write_table,
)
from noisy_means import aggregate
from torch import Tensor

from fedplan.data.examples import Examples
from fedplan.data.tables import load_table
from fedplan.privacy.accounting.accountant import epsilon
from fedplan.privacy.dpsgd.fit import DPSGDConfig, NoisyGradients
from fedplan.privacy.mechanisms.clipping import clip_change
from fedplan.privacy.mechanisms.noise import NoiseStream, grid_step
from fedplan.studies.federated_data import load_federated_data
from fedplan.studies.schema import read_study
from fedplan.tensors.named import digest

DELTA, CONFIDENCE = 1e-5, 0.999
ALIKE = 5.0
"""Two releases of two contents are this many clips apart at least: their noises are two."""

MASKED = {"before", "after", "changed", "drift", "products"}
"""What follows from released values: `told_apart` sees to what the digests are of."""


def blank(said: Any) -> Any:
    """What is said, with every digest of values by its length, and noisy counts by their blocks."""
    if isinstance(said, dict):
        return {
            k: _blanked(k, v) if k in MASKED | {"scores"} else blank(v) for k, v in said.items()
        }
    return [blank(each) for each in said] if isinstance(said, list) else said


def _blanked(key: str, value: Any) -> Any:
    if key == "scores":
        return [each[:2] for each in value] if isinstance(value, list) else value
    return {k: len(v) for k, v in value.items()} if isinstance(value, dict) else len(value or "")


def shape_of(said: Said) -> Any:
    """A message without its noisy values: words, sizes, names, shapes."""
    values, words = said.unpacked()
    kinds = {k: (tuple(v.shape), str(v.dtype)) for k, v in sorted(values.items())}
    sizes = [len(b) for b in said.message.blobs] if said.message is not None else []
    return said.way, said.kind, said.site, blank(words), kinds, sizes, said.error


def shapes(seen: Seen, case: Case) -> dict[str, Any]:
    """All that must be the same to the bit in both worlds."""
    if case.unit == "example":
        lines = {"ledger": blank(seen.ledger), "metrics": seen.metrics}
        return {"messages": [shape_of(s) for s in seen.said], "fault": seen.fault, **lines}
    # Of a federation that hides its clients, the server's folder is no part of what is released.
    others = [s for s in seen.said if s.site != case.roster[-1]]
    worlds = [{k: tuple(v.shape) for k, v in world.items()} for world in seen.worlds]
    told = sorted((s.site, s.kind, str(shape_of(s))) for s in others)
    fault = "" if not seen.fault else "stopped"
    return {"messages": told, "fault": fault, "worlds": worlds, "versions": seen.versions}


@dataclass(frozen=True)
class Finding:
    """What tells two worlds apart though nobody paid for it."""

    what: str
    text: str


def compared(case: Case, one: Seen, other: Seen) -> list[Finding]:
    """Where two coupled worlds differ in more than noisy values."""
    found = list[Finding]()
    left, right = shapes(one, case), shapes(other, case)
    for name in left:
        if left[name] != right[name]:
            found.append(Finding("shape", f"{name}: {_first(left[name], right[name])}"))
    for seen in (one, other):
        found += told_apart(case, seen)
    return found


def _first(one: Any, other: Any) -> str:
    if isinstance(one, list):
        pairs = zip_longest(one, other)
        one, other = next((a, b) for a, b in pairs if a != b)
    return f"{str(one)[:600]} | {str(other)[:600]}"


def told_apart(case: Case, seen: Seen) -> list[Finding]:
    """What of a world is in what leaves it as it is: words of rows, digests of what is kept."""
    leaves = b"".join(s.bytes for s in seen.said if s.way == "up")
    leaves += json.dumps([seen.ledger, seen.metrics, seen.fault]).encode()
    found = [Finding("words", f"{CANARY!r} leaves")] if CANARY.encode() in leaves else []
    for key, value in seen.kept.items():
        if digest(value).encode() in leaves:
            found.append(Finding("digest", f"the plain digest of {key}, which is kept, leaves"))
    return found


def sums_of(seen: Seen, site: str = "north") -> list[dict[str, Tensor]]:
    """What each turn of a site added to where it began, as the sum that its noise is for."""
    found, held = list[dict[str, Tensor]](), dict[str, Tensor]()
    for each in [s for s in seen.said if s.site == site]:
        values, words = each.unpacked()
        if each.way == "down":
            held |= {k: v.double() for k, v in values.items()}
        elif each.kind == "train" and "ledger_line" in words:
            change = {k: held[k] - v.double() for k, v in values.items()}
            found.append({k: v * BATCH / RATE for k, v in change.items()})
    return found


def far(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """How far apart two releases are."""
    if one.keys() != other.keys() or any(one[k].shape != other[k].shape for k in one):
        return float("inf")
    return sqrt(sum(float((one[k].double() - other[k].double()).square().sum()) for k in one))


def sensitive(case: Case, one: Seen, other: Seen) -> list[Finding]:
    """Where two coupled worlds differ by more than is charged for.

    Of what a site keeps, the second turn begins where the first ended, which is another place in
    each world: then only the first is compared.
    """
    keeps, found = METHODS[case.method].keeps, list[Finding]()
    if case.unit == "client":
        over = len(case.roster)
        if one.worlds and other.worlds:
            apart = over * far(one.worlds[0], other.worlds[0])
            found += _beyond("the sum of round 1", apart, CLIP, 1e-3)
        return found
    turns = list(zip_longest(sums_of(one), sums_of(other), fillvalue=dict[str, Tensor]()))
    for number, (a, b) in enumerate(turns[: 1 if keeps else None], start=1):
        found += _beyond(f"the sum of turn {number}", far(a, b), CLIP, 1e-3)
    polls = (seen.answers("query.poll", "north") for seen in (one, other))
    for a, b in zip(*polls, strict=False):
        scores = [{k: torch.tensor(v) for k, v in _scores(each).items()} for each in (a, b)]
        if METHODS[case.method].privacy:
            found += _beyond("the counts of a vote", far(*scores), sqrt(K), 1e-6)
        elif far(*scores):
            found.append(Finding("poll", "scores of rows leave, and nobody pays for them"))
    return found


def _scores(said: Said) -> dict[str, float]:
    return {f"{s} {n}": score for s, n, score in said.unpacked()[1].get("scores") or ()}


def _beyond(what: str, apart: float, bound: float, slack: float) -> list[Finding]:
    text = f"{what} differs by {apart / bound:.3f} times what is charged"
    return [Finding("sensitivity", text)] if not apart <= bound * (1 + slack) else []


def poked(world: World, seen: Seen) -> Seen:
    """The same sites asked out of turn: polled about every turn that they have had."""
    asked = [s for s in seen.said if (s.way, s.kind) == ("down", "train")]
    for each in asked:
        assert each.message is not None
        world.wire.ask(each.site, "query.poll", each.message)
    return replace(seen, said=list(world.wire.said))


@dataclass(frozen=True)
class Audit:
    """What a deterministic audit found, and the two worlds it looked at."""

    findings: list[Finding]
    one: Seen
    other: Seen


def audited(case: Case, here: Path, **more: Any) -> Audit:
    """The deterministic audit of a case."""
    with coupled():
        one, other = pair(case, here, odd=trained_on(case, here), **more)
        first, second = one.play(), other.play()
        found = [Finding("stopped", first.fault)] if first.fault else []
        found += compared(case, poked(one, first), poked(other, second))
        if case.unit == "example":
            second = replace(other, folder=other.folder.parent / "replayed").replay(first)
        return Audit([*found, *sensitive(case, first, second)], first, second)


def trained_on(case: Case, here: Path) -> int:
    """An odd row that is trained on: one that is held out for tests would show nothing."""
    study, file = here / "odd.toml", here / f"odd{TASKS[case.task].suffix}"
    study.write_text(case.study(here))
    for odd in range(ODD, ODD + 50):
        write_table([TASKS[case.task].row(odd)], file)
        if case.unit == "client" or len(_rows(study, file)):
            return odd
    raise AssertionError("no odd row is trained on")


def _rows(study: Path, file: Path) -> Examples:
    return load_federated_data(read_study(study), ("north", load_table(str(file)))).train["north"]


def reused(case: Case, here: Path, more: str = "") -> list[Finding]:
    """Whether one secret puts one noise on two contents: another row, or another study."""
    sums = list[dict[str, Tensor]]()
    with secrets_known():
        for number, text in enumerate(("", more)):
            place = here / f"{case.task}-{case.method}-reused-{number}" / "site"
            tables = tables_of(case)
            tables["north"][1] = TASKS[case.task].row(ODD + 1 if number and not more else 1)
            seen = World(replace(case, more=text), place, tables).play()
            sums += sums_of(seen)[:1]
    apart = far(*sums) / CLIP if len(sums) == 2 else 0.0
    text = f"two contents of one name are {apart:.2f} clips apart: they have one noise"
    return [Finding("noise", text)] if apart < ALIKE else []


class _Drawn(NoisyGradients):
    """The noise that a fit adds to its sum, and nothing else of it."""

    def __init__(self, config: DPSGDConfig, noise: NoiseStream) -> None:
        self._config = config
        self._noise = noise.rounded_gaussian

    def release(self, total: Tensor) -> Tensor:
        stddev = self._config.noise_multiplier * self._config.max_grad_norm
        step = grid_step(stddev)
        return self._noisy(total.div(step).round() * step, stddev, step)


def released(case: Case, seen: Seen, count: int) -> Draws:
    """So many releases of a world's first turn or round, each with noise of its own.

    What was summed is the coupled world's. The noise, its grid and the divisor are put on it by the
    code that ships: of a client's turn by `NoisyGradients._noisy`, of a round by `GaussianMechanism.release`; each
    call from a secret of its own, for as many copies side by side as it is asked for.
    """
    found = list[Draws]()
    for size in [1000] * (count // 1000):
        if case.unit == "client":
            mechanism, changes = seen.mechanisms[0]
            secret = np.random.default_rng().bytes(32)
            once = partial(_once, secret)
            found.append(release_rows(sample_releases(mechanism, changes, size, once)))
        else:
            total = torch.from_numpy(_summed(case, seen))
            private = DPSGDConfig(CLIP, NOISE, BATCH, 1.0, 1)
            drawn = _Drawn(private, NoiseStream(os.urandom(32))).release(total.expand(size, -1))
            found.append(drawn.double().numpy())
    return np.concatenate(found)


def _summed(case: Case, seen: Seen) -> Column:
    """What the noise of a first turn or round is put on, in the order of the names."""
    if case.unit == "example":
        return torch.cat([v.flatten() for _, v in sorted(sums_of(seen)[0].items())]).numpy()
    mechanism, changes = seen.mechanisms[0]
    total = {
        k: torch.zeros(shape).double() for k, (shape, _) in sorted(mechanism.public_shapes.items())
    }
    for change in changes:
        for key, value in clip_change(change, mechanism.clipping_norm).values.items():
            total[key] += value
    return torch.cat([value.flatten() for value in total.values()]).numpy()


def _once(secret: bytes, mechanism: Any, changes: Any) -> dict[str, Tensor]:
    return aggregate(mechanism, changes, secret, "audit")


def claimed(seen: Seen) -> float:
    """The epsilon of the first turn or round, as it was charged."""
    mains = [charge for charge in seen.charges if not charge.name.endswith(": vote")]
    return epsilon([mains[0].event], DELTA) if mains else 0.0


def measured(case: Case, audit: Audit, count: int) -> list[Finding]:
    """The statistical audit: whether many releases prove more than what was charged."""
    worlds = [released(case, seen, count) for seen in (audit.one, audit.other)]
    # The way from one world to the other is known to this adversary, without noise.
    way = _summed(case, audit.one) - _summed(case, audit.other)
    one, other = (np.column_stack([w @ way, np.linalg.norm(w, axis=1)]) for w in worlds)
    bounds = [
        bound(one, other, delta=DELTA, confidence=CONFIDENCE)
        for bound in (lower_bound, gaussian_lower_bound)
    ]
    claim = claimed(audit.one)
    text = f"epsilon is at least {max(bounds):.3f}, and {claim:.3f} is charged"
    return [Finding("epsilon", text)] if max(bounds) > claim else []
