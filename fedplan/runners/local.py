# SPDX-License-Identifier: Apache-2.0
"""The local runner: a whole federation in one process, one client after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from fedplan.agreement import Setup
from fedplan.attendance import Attendance
from fedplan.failpoints import reach
from fedplan.fit import Examples, Loss
from fedplan.journal import Journal, home_of
from fedplan.ledger import digests
from fedplan.resolution import permitted
from fedplan.rounds import Tally
from fedplan.server import Server
from fedplan.site import Site, cloak_of, local, poll
from fedplan.state import take
from fedplan.turn import Turn


class Federation(Server):
    """A server and its sites in one process."""

    def __init__(
        self,
        setup: Setup,
        model: nn.Module,
        rows: Mapping[str, Examples],
        loss: Loss,
        folder: Path,
        *,
        rounds: int,
        attendance: Attendance | None = None,
        traits: Mapping[str, Mapping[str, str]] | None = None,
        replies: bool = False,
    ) -> None:
        self.model, start = model, take(model, setup.params)
        roster = {name: dict((traits or {}).get(name, {})) for name in rows}
        super().__init__(setup, start, folder, rounds=rounds, roster=roster, attendance=attendance)
        marks = digests(start)
        self.sites = {
            name: Site(
                name=name,
                rows=held,
                journal=Journal(home_of(folder, name), replies=replies),
                model=model,
                start=start,
                marks=marks,
                loss=loss,
                digests=self.digests,
                traits=roster[name],
                cloak=cloak_of(setup, folder / "privacy" / home_of(folder, name).name),
            )
            for name, held in rows.items()
        }
        for name, known in self.world.known.items():
            current = {k: n for k, n in known.items() if n == self.world.versions[k]}
            self.sites[name].seen = {k: self.world.values[k] for k in current}
            self.sites[name].held = current

    def round(self) -> Tally:
        """Play the next round up to its end; `commit` makes it last."""
        tally = self.begin()
        self.ask(tally)
        for name, down in tally.cohort.items():
            update = local(self.setup, self.sites[name], down)
            reach("round.answered")
            self.take(tally, update)
        self.end(tally)
        return tally

    def ask(self, tally: Tally) -> None:
        """Where all choose together, hear first what each one would choose."""
        voters = self.voters(tally)
        if voters is not None:
            sites, downs = self.sites, tally.cohort
            self.choose(tally, {n: poll(self.setup, sites[n], downs[n]) for n in voters})

    @property
    def spent(self) -> float | None:
        """The epsilon of whoever has spent most, if anything was promised."""
        guards = [self.veil, *(site.cloak for site in self.sites.values())]
        return max((guard.spent for guard in guards if guard), default=None)

    def personal_values(self, name: str) -> dict[str, Tensor]:
        """One client's model: its own values over the federation's."""
        home, _ = self.sites[name].journal.home()
        turn = Turn(self.world.round, name, self.world.phase, self.sites[name].traits)
        roles = permitted(self.setup.method.plan, self.setup.params, turn)
        own = {p.key for p in self.setup.trainable if roles[p].own}
        return self.world_values() | {k: v for k, v in home.items() if k in own}
