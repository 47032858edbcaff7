# SPDX-License-Identifier: Apache-2.0
"""Recovery: how many of a client's tokens a server reads off each part of its update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from fedplan import seeds
from fedplan.audits.attacks import victims
from fedplan.audits.attacks.inference import fit_in, lone_inputs, named, touched
from fedplan.data.examples import Examples
from fedplan.federation.agreement import Agreement
from fedplan.methods.method import Method
from fedplan.methods.registry import method_named
from fedplan.models.description import describe
from fedplan.models.params import Kind, Param
from fedplan.privacy.accounting.accountant import calibrate
from fedplan.privacy.accounting.events import Steps
from fedplan.privacy.dpsgd.fit import DPSGD, dp_sgd
from fedplan.privacy.mechanisms.noise import Noise
from fedplan.runners.local import Federation
from fedplan.tensors.devices import forked
from fedplan.tensors.modular import Words
from fedplan.tensors.totals import GRID
from fedplan.training.fit import Fit, Pace
from fedplan.training.optimisers import sgd

VOCABULARY, LENGTH, ROWS, WIDTH, BLOCKS = 1000, 16, 7, 128, 4
"""A client has fewer tokens than the model is wide: the server's best case."""
CHANCE = ROWS * (LENGTH - 1) / (VOCABULARY - victims.WORDS)
DELTA = 1e-5
PARTS = tuple(map(Kind, ("embed", "query", "key", "value", "out", "mlp", "head", "prompt")))
METHODS: dict[str, Method] = {
    "fedavg": method_named("fedavg"),
    "fedfrozen, stage one": method_named("fedfrozen", {"warmup": 1}),
    "fedfrozen A, stage two": method_named("fedfrozen", {"warmup": 0}),
    "fedfrozen B, stage two": method_named("fedfrozen", {"warmup": 0, "reading": "B"}),
    "safl, 2 of 4 blocks": method_named("safl", {"k": 2}),
}
PROMPTED: dict[str, Method] = {
    "pfeddc": method_named("pfeddc", {"text": 2, "vision": 2, "width": 16})
}
PLAINEST, MASKED = "one step", "one step, masked"
"""The server's best case, and the same where sums are masked."""
Change = Mapping[Param, Tensor]


@dataclass(frozen=True)
class Way:
    """How clients train; with an epsilon, by DP-SGD that hides each row."""

    name: str
    pace: Pace
    dropout: float = 0.0
    epsilon: float = 0.0

    def changed(self, made: Method) -> Method:
        """A method that is trained in this way."""
        return replace(made, wraps=(_hidden(self.epsilon, self.pace),)) if self.epsilon else made


def _hidden(epsilon: float, pace: Pace) -> Callable[[Fit], Fit]:
    noise = calibrate(epsilon, DELTA, lambda noise: [Steps(noise, 1.0, pace.steps)])
    privately = DPSGD(1.0, noise, expected_batch=ROWS, rate=1.0, steps=pace.steps)
    source = Noise.fresh()
    fit = dp_sgd(privately, normal=partial(source.gaussian, scale=1.0), uniform=source.uniform)
    return lambda _: fit


def ways(epsilon: float) -> tuple[Way, ...]:
    """The server's best case, training as on any day, and the best case under privacy."""
    step = Pace(sgd(), rate=0.1, steps=1, batch=ROWS)
    return (
        Way(PLAINEST, step),
        Way("ten steps", Pace(rate=1e-3, steps=10, batch=4), dropout=0.1),
        Way("DP-SGD", step, epsilon=epsilon),
    )


@dataclass(frozen=True)
class Read:
    """What a server reads off one part of the updates.

    `recovered` is the share of a client's tokens, the mean over clients, None where the part holds
    no tokens to look up; `error` is its standard error. `blocks` are those that were read: of each
    update the first that has the part.
    """

    part: str
    sent: bool
    recovered: float | None = None
    error: float = 0.0
    blocks: tuple[int, ...] = ()

    @property
    def beyond(self) -> float | None:
        """0 is what chance finds, 1 is every token."""
        return None if self.recovered is None else (self.recovered - CHANCE) / (1 - CHANCE)


@dataclass(frozen=True)
class Recovered:
    """What is read off a method's updates, part by part."""

    method: str
    way: str
    parts: tuple[Read, ...]


def recovered(clients: int, epsilon: float) -> Iterator[Recovered]:
    """Each method, trained in each way by so many clients, and read off."""
    texts = [victims.texts(i, ROWS, vocabulary=VOCABULARY, length=LENGTH) for i in range(clients)]
    pictures = [victims.pictures(i, ROWS) for i in range(clients)]
    held, server = [victims.words_in(rows) for rows in texts], CuriousServer(drawn())
    for name, made in METHODS.items():
        for way in ways(epsilon):
            found = updates(way.changed(made), drawn(way.dropout), texts, way.pace)
            yield Recovered(name, way.name, tuple(server.read(part, found, held) for part in PARTS))
            alike = len({frozenset(change) for change in found}) == 1
            if way.name == PLAINEST and alike and clients > 1:  # one alone cannot be masked
                words = masked(found)
                told = tuple(server.read(part, words, held) for part in PARTS)
                yield Recovered(name, MASKED, told)
    for name, made in PROMPTED.items():
        for way in ways(epsilon):
            found = updates(way.changed(made), victims.viewer(), pictures, way.pace)
            sent = {param.kind for change in found for param in change}
            yield Recovered(name, way.name, tuple(Read(part, part in sent) for part in PARTS))


def drawn(dropout: float = 0.0) -> nn.Module:
    """The model that reads texts, as both the clients and the server have it."""
    return victims.reader(
        vocabulary=VOCABULARY,
        width=WIDTH,
        blocks=BLOCKS,
        length=LENGTH,
        spread=0.05,
        dropout=dropout,
    )


def updates(
    made: Method, model: nn.Module, rows: Sequence[Examples], pace: Pace
) -> list[dict[Param, Tensor]]:
    """What each client sends in the first round, as a change of what it began with."""
    if made.adapt is not None:
        with forked(seed=seeds.seed("leaks", "adapt")):
            model = made.adapt(model)
    agreement = Agreement("leaks", describe(model), made, pace)
    clients = {f"client-{i}": each for i, each in enumerate(rows)}
    with TemporaryDirectory() as folder:
        federation = Federation(
            agreement, model, clients, victims.loss, Path(folder), rounds=1, replies=True
        )
        tally = federation.round()
        asked = {name: down.name for name, down in tally.cohort.items()}
        sent = [federation.clients[name].journal.answered(asked[name]) for name in clients]
    values = [answer[0] for answer in sent if answer is not None]
    return [
        {p: each[p.key] - federation.server.start[p.key] for p in agreement.params if p.key in each}
        for each in values
    ]


def masked(changes: Sequence[Change]) -> list[dict[Param, Tensor]]:
    """What a server has of each change where sums are masked: its words, as numbers of the grid.

    All clients send the same params. The words are those that a site sends, letter by letter.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedplan.privacy.masking.ciphers import node_public
    from fedplan.privacy.masking.diary import Unwritten
    from fedplan.privacy.masking.masks import PartWords
    from fedplan.privacy.masking.server import MaskingServer
    from fedplan.privacy.masking.site import MaskingSite
    from fedplan.privacy.masking.terms import Slot, Terms, parts_of

    slots = tuple(Slot(param.key, param.numel) for param in changes[0])
    names = [f"client-{place:04}" for place in range(len(changes))]
    terms = Terms("leaks", "", "", 1, "", len(names) // 2 + 1, 2, slots)
    keys = {name: Ed25519PrivateKey.generate() for name in names}
    known = {name: node_public(key) for name, key in keys.items()}
    sites = {name: MaskingSite(name, keys[name], known, Unwritten()) for name in names}
    server, found = MaskingServer(terms, known), list[dict[Param, Tensor]]()
    for site in sites.values():
        server.advertised(site.advertise(terms, [slot.name for slot in slots]))
    for site in sites.values():
        server.shared(site.share(server.adverts()))
    (part,) = parts_of(terms, {name: [slot.name for slot in slots] for name in names})
    for name, change in zip(names, changes, strict=True):
        steps = {p.key: _in_steps(value) for p, value in change.items()}
        sent = sites[name].mask(server.delivery(name), steps, ROWS).parts[part.name]
        words = PartWords.read(part, sent).numbers(part)
        found.append({p: _as_change(words[p.key]).view(p.shape) for p in change})
    return found


def _in_steps(change: Tensor) -> Words:
    steps = (change.double().flatten() * (ROWS / GRID)).round().to(torch.int64)
    return steps.numpy().view(np.uint64)


def _as_change(words: Words) -> Tensor:
    return torch.from_numpy(words.view(np.int64).copy()).double() * (GRID / ROWS)


class CuriousServer:
    """A server that is honest and curious: it knows the model, and reads tokens off changes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._words = torch.arange(victims.WORDS, VOCABULARY)
        self._inputs: dict[str, Tensor] = {}

    def read(self, part: Kind, changes: Sequence[Change], held: Sequence[set[int]]) -> Read:
        """Name tokens by one part of each update, and see how many are right."""
        shares, blocks = list[float](), set[int]()
        for change, words in zip(changes, held, strict=True):
            param = _first(part, change)
            if param is not None:
                scores = self._scores(param, change[param])
                shares.append(named(scores, {word - victims.WORDS for word in words}))
                blocks |= {param.block or 0}
        if not shares:
            return Read(part, sent=False)
        error = stdev(shares) / sqrt(len(shares)) if len(shares) > 1 else 0.0
        return Read(part, True, fmean(shares), error, tuple(sorted(blocks)))

    def _scores(self, param: Param, change: Tensor) -> Tensor:
        """How much each word looks like one of the client's: at its best place."""
        if param.kind is Kind.EMBED:
            return touched(change)[self._words]
        layer = param.name.rpartition(".")[0]
        if layer not in self._inputs:
            self._inputs |= lone_inputs(self._model, [layer], self._words, LENGTH)
        return fit_in(change, self._inputs[layer]).amax(0)


def _first(part: Kind, change: Change) -> Param | None:
    """The first dense layer of a part that was sent, or the table of the tokens."""
    held = [p for p in change if p.kind is part and len(p.shape) == 2]
    if part is Kind.EMBED:
        held = [p for p in held if p.shape[0] == VOCABULARY]
    return min(held, key=lambda p: p.block or 0, default=None)
