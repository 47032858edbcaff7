# SPDX-License-Identifier: Apache-2.0
"""Clients of a simulation: each is made when it is asked for, and let go after its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, guard_of
from fedplan.federation.exams import Exam
from fedplan.federation.origin import Base
from fedplan.federation.world import World
from fedplan.privacy.guard import CHARGES, ClientGuard
from fedplan.storage.journal import Journal, home_of
from fedplan.tensors.named import Digests, Tensors
from fedplan.training.features import Features


@dataclass
class Clients(MutableMapping[str, Client]):
    """All clients by name, none of which is there before somebody asks for it.

    What a client has seen of the world is the world's own tensors, as far as they are still the
    ones that it has: so no older world stays alive, and a million names cost no more than their
    rows. Who is put here by hand stays. `marks` are digests of what the model starts with, as
    `base` has them, and `rows_marks` those of clients' rows, where they are known.
    """

    agreement: Agreement
    model: nn.Module
    rows: dict[str, Examples]
    loss: Loss
    folder: Path
    start: dict[str, Tensor]
    marks: dict[str, str]
    digests: Digests
    world: Callable[[], World]
    traits: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    exams: Mapping[str, Exam | None] = field(default_factory=dict[str, "Exam | None"])
    rows_marks: Mapping[str, str] = field(default_factory=dict[str, str])
    replies: bool = False
    deterministic: bool = Client.deterministic
    base: Base | None = None
    features: Features | None = None
    kept: dict[str, Client] = field(default_factory=dict[str, Client])

    def __getitem__(self, name: str) -> Client:
        """The client of that name, as the world knows it."""
        if name in self.kept:
            return self.kept[name]
        world = self.world()
        known = world.known_by(name)
        held = {key: number for key, number in known.items() if number == world.versions[key]}
        return self.made(name, {key: world.values[key] for key in held}, held)

    def made(self, name: str, seen: Tensors, held: Mapping[str, int]) -> Client:
        """A client that has seen these values, of these versions."""
        rows = self.rows[name]
        mark = self.rows_marks.get(name)
        return Client(
            name=name,
            rows=rows,
            journal=self.journal(name),
            model=self.model,
            start=self.start,
            marks=self.marks,
            loss=self.loss,
            traits=dict(self.traits.get(name, {})),
            seen=dict(seen),
            held=dict(held),
            digests=self.digests,
            guard=guard_of(self.agreement, self._budget(name)),
            deterministic=self.deterministic,
            exam=self.exams.get(name),
            marked=(rows, mark) if mark else None,
            base=self.base,
            features=self.features,
        )

    def journal(self, name: str) -> Journal:
        """What a client keeps."""
        if name in self.kept:
            return self.kept[name].journal
        return Journal(home_of(self.folder, name), replies=self.replies)

    def _budget(self, name: str) -> Path:
        return self.folder / "privacy" / home_of(self.folder, name).name

    def spent(self) -> float | None:
        """The epsilon of the client that has spent most, if each hides its own rows."""
        guarantee = self.agreement.guarantee
        if guarantee is None or guarantee.unit != "example":
            return None
        paid = (self._budget(n) for n in self if (self._budget(n) / CHARGES).exists())
        return max((ClientGuard(guarantee, folder).spent for folder in paid), default=0.0)

    def __setitem__(self, name: str, client: Client) -> None:
        self.kept[name], self.rows[name] = client, client.rows

    def __delitem__(self, name: str) -> None:
        del self.rows[name]
        self.kept.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, name: object) -> bool:
        return name in self.rows
