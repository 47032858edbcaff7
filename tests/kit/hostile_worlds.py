# SPDX-License-Identifier: Apache-2.0
"""Two worlds under one hostile server: everything that it sees, compared to the bit.

In both worlds every release of noisy values *comes out the same*: the sum that the noise was for is
noted, and the release in its place follows from its number alone. What a server sees is then the
same in both worlds to the bit if it follows from releases and public things, as epsilon takes for
granted; and the two sums of each release differ by no more than its sensitivity.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from math import sqrt
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from differences import Finding
from hostile import RESTART, SITE, Attack, Attacker, Move, odd_row
from neighbours import CANARY, SECRET, TASKS, Row, tables_of, write_table
from sites import Anybody
from torch import Tensor

from fedplan.federation import client as client_module
from fedplan.federation.ledger import egress
from fedplan.privacy import guard
from fedplan.privacy.accounting.accountant import Charge, DPSGDSteps
from fedplan.privacy.accounting.budget import Budget, read_budget_unit
from fedplan.privacy.dpsgd.fit import NoisyGradients
from fedplan.privacy.guard import ClientGuard
from fedplan.privacy.mechanisms.gaussian import GaussianMechanism
from fedplan.privacy.mechanisms.noise import derive_key
from fedplan.privacy.mechanisms.vote import NoisyVote
from fedplan.runners.site import Site
from fedplan.sites.gateway import SiteGateway
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import unpack_message
from fedplan.tensors.sums import ExactSum


@dataclass(frozen=True)
class Release:
    """One release: the sum that its noise is for, what decides the noise, and what it may hide."""

    sums: Mapping[str, Tensor]
    noise: tuple[Any, ...]
    sensitivity: float
    stddev: float

    def far(self, other: Release) -> float:
        """The L2 distance of two sums; a name that one lacks counts as zeros."""
        names = self.sums.keys() | other.sums.keys()
        zero = torch.zeros((), dtype=torch.float64)
        apart = [self.sums.get(n, zero) - other.sums.get(n, zero) for n in names]
        return sqrt(sum(float(each.square().sum()) for each in apart))

    def same(self, other: Release) -> bool:
        return self.far(other) == 0.0


@contextmanager
def alike(releases: list[Release]) -> Generator[None]:
    """Note what is released, and release in its place what follows from the number alone.

    Every row is drawn, every secret is the same, and no clock runs.
    """
    write, drawn = NoisyGradients.write_gradients, dict[str, Tensor]()

    def made(shape: Sequence[int], stddev: float) -> Tensor:
        number = 1000 * len(releases) + len(drawn)
        source = torch.Generator().manual_seed(number)
        return torch.randn(tuple(shape), generator=source, dtype=torch.float64) * stddev

    def write_gradients(self: NoisyGradients, indices: Tensor) -> None:
        drawn.clear()
        write(self, indices)
        config, stream = self._config, self._noise.__self__  # type: ignore[attr-defined]
        clip = config.max_grad_norm
        noise = ("turn", stream._key, self.stats.steps)
        releases.append(Release(dict(drawn), noise, clip, config.noise_multiplier * clip))
        drawn.clear()

    def noisy(self: NoisyGradients, total: Tensor, stddev: float, step: float) -> Tensor:
        assert torch.equal(total.div(step).round() * step, total), "a sum is no number of steps"
        found = made(total.shape, stddev) / self._config.expected_batch_size
        drawn[f"{len(drawn)}"] = total.clone()
        return found

    def vote(
        self: NoisyVote, counts: Mapping[Any, int], secret: bytes, name: str, content: str = ""
    ) -> dict[Any, float]:
        noisy = made((len(counts),), self.stddev)
        sums = {repr(k): torch.tensor(v, dtype=torch.float64) for k, v in counts.items()}
        key = derive_key(secret, "noise", name, content, *self._words(counts))
        releases.append(Release(sums, ("vote", key), sqrt(self.k), self.stddev))
        return {k: float(n) for k, n in zip(counts, noisy, strict=True)}

    def add_noise(
        self: GaussianMechanism, total: ExactSum, secret: bytes, name: str, *content: bytes
    ) -> ExactSum:
        sums = {k: v.double() for k, v in total.mean(dict.fromkeys(self.public_shapes, 1)).items()}
        step, found = self._grid_step, ExactSum()
        noise = {
            k: made(shape, self.share_stddev).div(step).round().mul(step) + len(k)
            for k, (shape, _) in sorted(self.public_shapes.items())
        }
        found.add(noise, 1)
        key = derive_key(secret, "noise", name, *content, self._digest(total))
        # A share alone hides nothing: with those of the other honest sites it has this stddev.
        releases.append(Release(sums, ("sum", key), self.clipping_norm, self.stddev))
        return found

    def uniform(noise: Any) -> Any:
        return lambda count: torch.zeros(count, dtype=torch.float64)

    patches = [
        patch.object(NoisyGradients, "write_gradients", write_gradients),
        patch.object(NoisyGradients, "_noisy", noisy),
        patch.object(NoisyVote, "release", vote),
        patch.object(GaussianMechanism, "add_noise", add_noise),
        patch.object(ClientGuard, "_uniform", staticmethod(uniform)),
        patch.object(guard, "load_or_create_secret", lambda *_, **__: SECRET),
        patch.object(client_module, "load_or_create_secret", lambda *_, **__: SECRET),
        patch.object(egress, "timestamp", lambda: "2026-01-01T00:00:00.000+00:00"),
    ]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


@dataclass
class Transcript:
    """All that a server gets of one world, and what stays there: releases and charges."""

    answers: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    releases: list[Release] = field(default_factory=list[Release])
    charges: list[Charge] = field(default_factory=list[Charge])
    bytes: bytes = b""

    @property
    def codes(self) -> list[str]:
        """The code of each answer; "" for one without."""
        kinds = ("refused", "failed", "missing")
        words = (answer[1] for _, answer in self.answers)
        return [next((str(w[k]) for k in kinds if k in w), "") for w in words]


def site_world(attack: Attack, folder: Path, rows: list[Row], moves: list[Move]) -> Transcript:
    """Ask a site with these rows all that a hostile server asks."""
    folder.mkdir(parents=True)
    table = folder / f"{SITE}{TASKS[attack.task].suffix}"
    write_table(rows, table)
    site = Site(name=SITE, state=str(folder / "state"), data=str(table))
    gateway, seen = SiteGateway(site, Anybody()), Transcript()
    with alike(seen.releases):
        for kind, message in moves:
            if (kind, message) == RESTART:
                gateway = SiteGateway(site, Anybody())
                continue
            answer = gateway.answer(kind, message)
            seen.answers.append((kind, plain(answer)))
            seen.bytes += b"".join((answer.header, *answer.blobs))
    seen.charges = charges_in(folder)
    return seen


def plain(answer: Message) -> Any:
    """An answer as things to compare: its sizes, its words, and the bits of its tensors."""
    values, words = unpack_message(answer)
    sizes = len(answer.header), [len(blob) for blob in answer.blobs]
    bits = {k: (str(v.dtype), tuple(v.shape), _bits(v)) for k, v in sorted(values.items())}
    return sizes, words, bits


def _bits(value: Tensor) -> bytes:
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def charges_in(folder: Path) -> list[Charge]:
    """All charges below a folder."""
    found = list[Charge]()
    for file in sorted(folder.rglob(guard.CHARGES_FILE)):
        found += Budget(file, delta=1e-5, unit=read_budget_unit(file)).charges
    return found


def differing(one: Any, other: Any, where: str = "") -> str:
    """The first place where two answers differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}, key=str):
            if one.get(key) != other.get(key):
                return differing(one.get(key), other.get(key), f"{where}.{key}")
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        for number, (a, b) in enumerate(zip_longest(one, other)):
            if a != b:
                return differing(a, b, f"{where}[{number}]")
    return f"{where}: {str(one)[:200]} | {str(other)[:200]}"


def same(one: Any, other: Any) -> bool:
    """Whether two things are the same; a NaN is the same as itself."""
    return one == other or json.dumps(one, default=repr) == json.dumps(other, default=repr)


def compared(one: Transcript, other: Transcript) -> list[Finding]:
    """Where two worlds differ in more than is charged for, and where a charge is too small."""
    found = list[Finding]()
    for number, (a, b) in enumerate(zip_longest(one.answers, other.answers)):
        if not same(a, b):
            found.append(Finding("answer", f"answer {number}: {differing(a, b)}"))
    paid = [[(each.name, each.event) for each in seen.charges] for seen in (one, other)]
    if paid[0] != paid[1]:
        found.append(Finding("charge", differing(*paid)))
    if len(one.releases) != len(other.releases):
        counts = f"{len(one.releases)} | {len(other.releases)}"
        found.append(Finding("releases", f"another number of releases: {counts}"))
    for number, (a, b) in enumerate(zip(one.releases, other.releases, strict=False)):
        if not (apart := a.far(b)) <= a.sensitivity:
            text = f"release {number} differs by {apart / a.sensitivity:.4f} times what is charged"
            found.append(Finding("sensitivity", text))
    for seen in (one, other):
        found += accounted(seen)
        if CANARY.encode() in seen.bytes:
            found.append(Finding("words", f"{CANARY!r} leaves"))
    return [*found, *one_noise_each([*one.releases, *other.releases])]


def accounted(seen: Transcript) -> list[Finding]:
    """Whether more was released than was charged: Gaussians add up by their 1 / sigma^2."""
    different = {each.noise: each for each in seen.releases}.values()
    spent = sum((each.sensitivity / each.stddev) ** 2 for each in different)
    paid = 0.0
    for charge in seen.charges:
        steps = charge.event.steps if isinstance(charge.event, DPSGDSteps) else 1
        paid += steps / charge.event.noise_multiplier**2
    text = f"releases of {spent:.6f} in all, and {paid:.6f} is charged"
    return [Finding("account", text)] if spent > paid * (1 + 1e-9) else []


def one_noise_each(releases: Sequence[Release]) -> list[Finding]:
    """Whether one noise is on two sums, in one world or across both, which have one secret."""
    known, found = dict[tuple[Any, ...], Release](), list[Finding]()
    for each in releases:
        if not known.setdefault(each.noise, each).same(each):
            found.append(Finding("noise", "two sums have one noise"))
    return found


@dataclass(frozen=True)
class Outcome:
    """What an attack came to.

    `releases`: how many there were. `reached`: by how much of its sensitivity a release differed at
    most. `codes`: those of all answers.
    """

    findings: list[Finding]
    releases: int
    reached: float
    codes: list[str]


def outcome(one: Transcript, other: Transcript) -> Outcome:
    """Compare two worlds."""
    pairs = zip(one.releases, other.releases, strict=False)
    reached = max((a.far(b) / a.sensitivity for a, b in pairs), default=0.0)
    return Outcome(compared(one, other), len(one.releases), reached, one.codes)


def attacked(attack: Attack, here: Path) -> Outcome:
    """Carry an attack on one site against both worlds; `here` was prepared."""
    place = here / f"attack-{len(list(here.iterdir()))}"
    place.mkdir()
    study = place / "study.toml"
    study.write_text(attack.case.study(here))
    with patch.object(guard, "load_or_create_secret", lambda *_, **__: SECRET):
        moves = Attacker(attack, study).moves()
    rows = tables_of(attack.case, without=True)[SITE]
    worlds = [
        site_world(attack, place / name, table, moves)
        for name, table in (("with", [odd_row(attack), *rows]), ("without", rows))
    ]
    shutil.rmtree(place)
    return outcome(*worlds)
