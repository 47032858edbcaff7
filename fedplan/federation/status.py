# SPDX-License-Identifier: Apache-2.0
"""Statuses: how a run stands while somebody drives it, in a small file that anybody may read.

The driver of a run tells it: who it is, which round is open, and how each site does. No bit of a
run follows from any of this, but that an operator may ask it to stop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from weakref import ref

from fedplan.errors import FedplanError
from fedplan.federation.callbacks import Closed
from fedplan.federation.codes import code_of, told
from fedplan.federation.patience import Patience
from fedplan.federation.record import TurnRecord
from fedplan.federation.segments import read_segment
from fedplan.federation.states import (
    ASKED,
    AT_ONCE,
    GRAVE,
    LIVE,
    STATUS,
    RunState,
    RunStatus,
    SiteState,
    SiteStatus,
    read_asked,
)
from fedplan.storage.files import put_file
from fedplan.storage.logs import Entry, Log, now
from fedplan.storage.processes import this_process

if TYPE_CHECKING:
    from fedplan.federation.server import Server

PAUSE, BEAT = 0.5, 10.0
"""Seconds between two writings of what single sites do, a round being written at once; and between
two of the same, which say that the driver is there."""
LISTED = 2000
"""Sites of a federation that are told of one by one; of a larger one only faults, in the log."""
LATELY = 20
"""Rounds that the seconds of a round are the median of."""
ENDS = (SiteState.ANSWERED, SiteState.FAILED, SiteState.REFUSED)
"""States of a site that is done with the open round."""
SHARES = (0.8, 1.0)
"""Shares of what was promised of privacy whose passing is told."""


class StopNow(FedplanError):
    """An operator asked that the run end without its open round."""


Listener = Callable[[Entry], None]
"""Who is told of what happens, as it is written into the log."""


class Status:
    """What the driver of a run tells of it; without a folder, nobody.

    `listeners` stand outside: where clients are hidden, they are told of no single site.
    """

    def __init__(self, folder: Path | None = None, listeners: Sequence[Listener] = ()) -> None:
        self.folder, self.listeners = folder, tuple(listeners)
        self.now = RunStatus()
        self.stopped = ""
        self._log = Log(folder) if folder else None
        # Told of and not held: a screen may outlive the run, and would keep its folder locked.
        self._server: ref[Server] | None = None
        self._patience = Patience()
        self._written, self._progress, self._since = 0.0, time.monotonic(), time.monotonic()
        self._dirty = False
        self._took: list[float] = []
        self._done = set[str]()
        self._passed = 0.0
        self._listed = True

    @contextmanager
    def driving(
        self,
        server: Server,
        study: str,
        patience: Patience | None = None,
        *,
        rows: bool = True,
        passing: type[Exception] | tuple[()] = (),
    ) -> Generator[None]:
        """Tell of a run while it is driven, and how it ended.

        Where there are `rows` on this machine, of an error only its code is told; where there are
        none, warnings are in the log too. What is `passing` ends nothing: whoever drives begins
        again.
        """
        self._begin(server, study, patience or Patience())
        try:
            with nullcontext() if rows or self._log is None else self._log.heard(self.now.run):
                yield
        except StopNow as asked:
            self.stopped = str(asked)
        except Exception as error:
            if not isinstance(error, passing):
                self._end(
                    server, RunState.FAILED, told(code_of(error)) if rows else _first_line(error)
                )
            raise
        except BaseException as error:
            left = isinstance(error, GeneratorExit)
            self._end(
                server,
                RunState.STOPPED,
                "nobody asks for its next round" if left else "interrupted",
            )
            raise
        done = server.world.round >= server.rounds
        self._end(server, RunState.DONE if done else RunState.STOPPED, "" if done else self.stopped)

    def become(self, state: str) -> None:
        """Say that the run waits for its sites, or goes on."""
        if self.now.state not in (state, RunState.STOPPING):
            self._since = time.monotonic()
            self._happened(f"run {state}")
            self._put(state=state)
            self._write()

    def opened(self, asked: int) -> None:
        """Say that a round is open, of which so many are asked for their turns."""
        self._done = set[str]()
        self._put(asked=asked, answered=0)
        self._dirty = True
        self._flush()

    def _answered(self, name: str) -> None:
        """Count who is done with the open round; one is enough to say when the run will end."""
        self._done.add(name)
        done, asked = len(self._done), max(len(self._done), self.now.asked)
        seconds = (time.monotonic() - self._since) / done
        # Before the first round is closed, one is as long as its clients so far say.
        each = median(self._took[-LATELY:]) if self._took else seconds * asked
        later = each * max(0, self.now.rounds - self.now.round - 1)
        self._put(answered=done, asked=asked, left=seconds * (asked - done) + later)

    def trouble(self, why: str) -> None:
        """Say what keeps a run that is driven from going on, or that nothing does any more."""
        if self.now.why != why and self.now.state in LIVE:
            self._put(why=why)
            self._write()

    def site(self, name: str, state: str, why: str = "") -> None:
        """Say what a site does; the same again is nothing new."""
        if state in ENDS and self.now.asked:
            self._answered(name)
        if not self._listed:
            return self._unlisted(name, state, why)
        before = self.now.sites.get(name, SiteStatus())
        if (before.state, before.why) == (state, why):
            return
        changed = replace(before, state=state, why=why, since=now())
        if state in (SiteState.ASKED, SiteState.ANSWERED):
            self._progress = time.monotonic()
        if state == SiteState.ANSWERED:
            changed = replace(changed, round=self.now.round + 1)
        if state in GRAVE:
            changed = replace(changed, fault=why or state, fault_at=changed.since)
        self._happened(f"site {state}", why, level=GRAVE.get(state, "info"), site=name)
        if name not in self.now.sites:  # whoever reads it meanwhile never finds it growing
            self._put(sites=dict(self.now.sites))
        self.now.sites[name] = changed
        self._dirty = True
        self._flush()

    def _unlisted(self, name: str, state: str, why: str) -> None:
        """What is told of one of very many sites: that there is progress, and faults."""
        if state in (SiteState.ASKED, SiteState.ANSWERED):
            self._progress = time.monotonic()
        if state in GRAVE:
            self._happened(f"site {state}", why, level=GRAVE[state], site=name)

    def round(self, closed: Closed) -> None:
        """Say that a round was committed."""
        self._took.append(time.monotonic() - self._since)
        self._since = self._progress = time.monotonic()
        seconds = median(self._took[-LATELY:])
        whole, row = closed.whole, closed.row
        scores = {k: v for k, v in row.items() if _of_all(k) and isfinite(v)}
        loss = row.get("loss")
        self._happened(
            "round closed",
            f"{len(whole.counted)} counted, {len(whole.rejected)} not, "
            f"{whole.up} bytes up, {whole.down} down",
            round=closed.round,
        )
        self._put(
            round=closed.round,
            rounds=closed.rounds,
            asked=0,
            answered=0,
            primary=closed.primary,
            loss=loss if loss is not None and isfinite(loss) else None,
            scores=scores or self.now.scores,
            seconds=seconds,
            left=seconds * (closed.rounds - closed.round),
            sites=_after(self.now.sites, closed) if self._listed else {},
        )
        self._spend(closed.round)
        self._write()

    def beat(self) -> None:
        """Say that the driver is there; raises if it is asked to end at once."""
        if self.now.state in (RunState.WAITING, RunState.STOPPING):
            self._progress = time.monotonic()
        if (when := self._asked()) and self.now.state != RunState.STOPPING:
            self._happened("run stopping", f"asked to: {when}")
            self._put(state=RunState.STOPPING)
            self._write()
        if when == AT_ONCE:
            raise StopNow("an operator asked for it: fedplan stop --now")
        self._flush()

    def halted(self, reason: str = "") -> str:
        """Why the run stops after this round, if it does: as was said, or as an operator asked."""
        asked = self.now.round < self.now.rounds and self._asked()
        self.stopped = reason or ("an operator asked for it: fedplan stop" if asked else "")
        self._put(ruled=bool(reason))
        return self.stopped

    def tell(self, event: str, text: str, *, level: str = "warning", site: str = "") -> None:
        """Tell all listeners of something that is no state of the run."""
        self._happened(event, text, level=level, site=site)

    @property
    def healthy(self) -> bool:
        """Whether somebody drives the run, and got further within the run's patience."""
        limit = self._patience.answers + self._patience.sites
        return self.now.state in LIVE and time.monotonic() - self._progress < limit

    @property
    def _heard(self) -> bool:
        """Whether anybody is told: else nothing is worked out for it."""
        return self.folder is not None or bool(self.listeners)

    def _begin(self, server: Server, study: str, patience: Patience) -> None:
        again, self._server = self._server is not None, ref(server)
        self._patience, self.stopped = patience, ""
        self._took, self._since, self._progress = [], time.monotonic(), time.monotonic()
        if self.folder is not None and not again:  # what was asked of this driver still holds
            (self.folder / ASKED).unlink(missing_ok=True)
        last, guarantee = server.last(), server.agreement.guarantee
        self._listed, since = len(server.roster) <= LISTED, now()
        known = {name: SiteStatus(since=since) for name in server.roster} if self._listed else {}
        # Bytes of sites are those that the open segment of the ledger tells of.
        _, records = read_segment(server.ledger.file) if self._heard and known else (None, [])
        turns = [record for record in records if isinstance(record, TurnRecord)]
        self.now = RunStatus(
            study=study,
            run=server.identity.id,
            driver=this_process(),
            began=now(),
            state=RunState.RUNNING,
            round=server.world.round,
            rounds=server.rounds,
            loss=_loss(last.row if last else {}),
            promised=guarantee.epsilon if guarantee else None,
            hidden=server.aggregation.hides,
            sites=_counted(known, turns),
        )
        self._happened("run begun", f"round {server.world.round} of {server.rounds} is closed")
        self._write()

    def _end(self, server: Server, state: str, why: str) -> None:
        if self._server is None or server is not self._server():
            return  # the run was resumed meanwhile: the end of its earlier driver is no end
        level = "error" if state == RunState.FAILED else "info"
        self._happened(f"run {state}", why, level=level)
        self._put(state=state, why=why, left=None)
        self._write()

    def _spend(self, number: int) -> None:
        """Say what was spent of what was promised, and tell when most of it, and all of it, is."""
        server = self._server() if self._server else None
        guarantee = server.agreement.guarantee if server else None
        if server is None or guarantee is None or not self.now.promised or not self._heard:
            return
        guard = server.aggregation.guard
        spent = guard.spent if guard else guarantee.forecast(number)
        share, before = spent / self.now.promised, self._passed
        self._put(spent=spent)
        self._passed = max((each for each in SHARES if share > each - 1e-3), default=0.0)
        if self._passed > before:
            self._happened("budget", f"{self._passed:.0%} of epsilon is spent", level="warning")

    def _asked(self) -> str:
        """When an operator has asked the run to stop, if one has."""
        return read_asked(self.folder) if self.folder is not None else ""

    def _put(self, **change: Any) -> None:
        self.now = replace(self.now, **change)

    def _happened(
        self, event: str, text: str = "", *, level: str = "info", site: str = "", round: int = 0
    ) -> None:
        number = round or self.now.round + bool(site)
        entry = Entry(now(), level, self.now.run, number, site, event, text)
        if self._log is not None:
            self._log.note(event, text, level=level, run=entry.run, round=number, site=site)
        if not (site and self.now.hidden):
            for listener in self.listeners:
                listener(entry)

    def _flush(self) -> None:
        if time.monotonic() - self._written > (PAUSE if self._dirty else BEAT):
            self._write()

    def _write(self) -> None:
        """Put it all into the file. A disk that is full ends a run when a round cannot be kept."""
        self._put(changed=now())
        self._dirty, self._written = False, time.monotonic()
        if self.folder is not None:
            with suppress(FedplanError):
                put_file(self.folder / STATUS, json.dumps(self.now.json(), indent=1) + "\n")


def _loss(row: Mapping[str, float]) -> float | None:
    return row["loss"] if isfinite(row.get("loss", float("nan"))) else None


def _of_all(name: str) -> bool:
    """Whether a number of a round is a score of all clients together."""
    head, *rest = name.split(".")
    depth = 2 if head == "sites" and rest[0] in ("world", "own") else 1
    return len(rest) == depth and rest[-1] != "examples"


def _first_line(error: Exception) -> str:
    """An error in words of ours; of others' only its name, since nobody knows what they tell."""
    words = str(error) if isinstance(error, FedplanError) else type(error).__name__
    return words.partition("\n")[0][:500]


def _counted(sites: Mapping[str, SiteStatus], turns: Sequence[TurnRecord]) -> dict[str, SiteStatus]:
    """Sites with the bytes and the last round that turns tell of."""
    found = dict(sites)
    for turn in turns:
        if (site := found.get(turn.client)) is not None:
            up, down = site.up + turn.up, site.down + turn.down
            found[turn.client] = replace(site, up=up, down=down, round=turn.round)
    return found


def _after(sites: Mapping[str, SiteStatus], closed: Closed) -> dict[str, SiteStatus]:
    """Sites as a round has left them: who was counted, and who was not and why."""
    found = _counted(sites, closed.turns)
    for name in closed.whole.counted:
        site = found.get(name, SiteStatus())
        since = site.since if site.state == SiteState.ANSWERED else now()
        found[name] = replace(site, state=SiteState.ANSWERED, why="", since=since)
    for name, why in closed.whole.rejected.items():
        site = found.get(name, SiteStatus())
        found[name] = replace(site, fault=why[:300], fault_at=now())
        if site.state in (SiteState.ASKED, SiteState.ANSWERED, SiteState.THERE):
            found[name] = replace(found[name], state=SiteState.LEFT_OUT, why=why[:300], since=now())
    part = {*closed.whole.counted, *closed.whole.rejected}
    for name, site in found.items():
        if site.state == SiteState.ASKED and name not in part:  # for its scores alone
            found[name] = replace(site, state=SiteState.THERE, since=now())
    return found
