# SPDX-License-Identifier: Apache-2.0
"""The local runner: a whole federation in one process, one client after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from fedplan.agreement import Setup
from fedplan.attendance import Attendance
from fedplan.exchange import Down, Lacking
from fedplan.failpoints import reach
from fedplan.fit import Examples, Loss
from fedplan.journal import Journal, home_of
from fedplan.rounds import Tally
from fedplan.server import Server, personal_values
from fedplan.site import Site, cloak_of, local, poll
from fedplan.state import take
from fedplan.turn import Turn

Said = TypeVar("Said")


class Federation(Server):
    """A server and its sites in one process; `marks` are the digests of the clients' rows.

    `names` are all who may take part; those without rows never answer.
    """

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
        names: Iterable[str] = (),
        replies: bool = False,
        marks: Mapping[str, str] | None = None,
    ) -> None:
        self.model, start = model.eval(), take(model, setup.params)
        roster = {name: dict((traits or {}).get(name, {})) for name in names or rows}
        super().__init__(
            setup,
            start,
            folder,
            rounds=rounds,
            roster=roster,
            attendance=attendance,
            rows=marks,
        )
        setup = self.setup
        self.sites = {
            name: Site(
                name=name,
                rows=held,
                journal=Journal(home_of(folder, name), replies=replies),
                model=model,
                start=start,
                marks=self.marks,
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
        absent = tally.cohort.keys() - self.sites.keys()
        tally.rejected |= {name: "no answer" for name in absent}
        for name in self._there(tally):
            update = self._asked(local, tally, name)
            reach("round.answered")
            self.take(tally, update)
        self.end(tally)
        return tally

    def ask(self, tally: Tally) -> None:
        """Where all choose together, hear first what each one would choose."""
        voters = self.voters(tally)
        if voters is not None:
            there = [name for name in voters if name in self.sites]
            self.choose(tally, {name: self._asked(poll, tally, name) for name in there})

    def _asked(self, turn: Callable[[Setup, Site, Down], Said], tally: Tally, name: str) -> Said:
        """What a site says; one that has lost what it had is asked anew."""
        try:
            return turn(self.setup, self.sites[name], tally.cohort[name])
        except Lacking:
            self.anew(tally, name)
            return turn(self.setup, self.sites[name], tally.cohort[name])

    def _there(self, tally: Tally) -> dict[str, Down]:
        return {name: down for name, down in tally.cohort.items() if name in self.sites}

    @property
    def spent(self) -> float | None:
        """The epsilon of whoever has spent most, if anything was promised."""
        guards = [self.veil, *(site.cloak for site in self.sites.values())]
        return max((guard.spent for guard in guards if guard), default=None)

    def personal_values(self, name: str) -> dict[str, Tensor]:
        """One client's model: its own values over the federation's."""
        home, _ = self.sites[name].journal.home()
        turn = Turn(self.world.round, name, self.world.phase, self.sites[name].traits)
        return personal_values(self.setup, self.world, self.start, turn, home)
