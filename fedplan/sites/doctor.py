# SPDX-License-Identifier: Apache-2.0
"""The doctor of a site: what is ready, what is not, and what to do about it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.errors import FedplanError, StoreError
from fedplan.federation.versions import own_versions
from fedplan.naming import allowing
from fedplan.runners.site import ServerSection, Site
from fedplan.runners.worker import table_of
from fedplan.sites.approvals import Approvals
from fedplan.sites.desk import approvals_of
from fedplan.sites.policy import read_policy
from fedplan.sites.reached import proxy_to, reach_server
from fedplan.storage.locks import alone
from fedplan.studies.schema import Study
from fedplan.studies.shares import shares_of
from fedplan.tensors.devices import AUTO, device_named

State = Literal["ok", "warn", "fail"]
STYLES: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
OTHERS = 0o077
SOON, LITTLE, FULL = 30, 5 * 2**30, 2**28
"""Days of a certificate, and bytes of a disk, that are few; with fewer than the last, it stops."""
APART, TOO_FAR = 2.0, 5.0
"""Seconds between two clocks: Flower refuses what comes more than five from the future."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do if it is not well."""

    name: str
    state: State
    said: str
    remedy: str = ""

    def json(self) -> dict[str, str]:
        """It as plain values."""
        return {"name": self.name, "state": self.state, "said": self.said, "remedy": self.remedy}


class Examiner(Protocol):
    """Looks at one side of a site; an error of ours that it raises is a finding too."""

    def __call__(self, site: Site, /) -> Iterator[Finding]: ...


def examine(site: Site) -> list[Finding]:
    """All that can be found out about a site without changing anything, here or at its server."""
    return [finding for name, look in EXAMINERS for finding in _looked(name, look, site)]


def _looked(name: str, look: Examiner, site: Site) -> Iterator[Finding]:
    try:
        yield from look(site)
    except (FedplanError, OSError) as error:
        yield Finding(name, "fail", str(error))


def _policy(site: Site) -> Iterator[Finding]:
    file = Path(site.policy)
    if not file.exists():
        yield Finding(
            "policy", "fail", f"{file} is not there", "write it: every study waits for a person"
        )
        return
    policy = read_policy(file)
    how = "studies within it need no person" if policy.by_rule else "each study waits for a person"
    yield Finding("policy", "ok", f"{file.name} is read; {how}")


def _keys(site: Site) -> Iterator[Finding]:
    server = site.server
    said = {"home.key": site.key, "node": server.node if server else ""}
    for what, place in said.items():
        if not place:
            yield Finding(f"key {what}", "warn", f"site.toml names no {what}", _WITHOUT[what])
            continue
        yield _key(what, Path(place))


_WITHOUT = {
    "home.key": 'what is kept here is not sealed: say key = "home.key", then fedplan site keys',
    "node": "anybody may come as this site: that is for one machine alone",
}


def _key(what: str, file: Path) -> Finding:
    if not file.is_file():
        return Finding(f"key {what}", "fail", f"{file} is not there", "fedplan site keys")
    if file.stat().st_mode & OTHERS:
        remedy = f"chmod 600 {file}; if others have seen it, make another"
        return Finding(f"key {what}", "fail", f"others may read {file}", remedy)
    if not os.access(file, os.R_OK):
        remedy = "run this as the user who serves the site"
        return Finding(f"key {what}", "fail", f"{file} cannot be read", remedy)
    return Finding(f"key {what}", "ok", f"{file.name} is read by its owner alone")


def _server(site: Site) -> Iterator[Finding]:
    server = site.server
    if server is None:
        remedy = '[server] with its address, ca = "ca.crt" and node = "node"'
        yield Finding("server", "fail", "site.toml names no server", remedy)
        return
    yield _proxy(server)
    if server.ca and not Path(server.ca).is_file():
        remedy = "ask the server's operator for it"
        yield Finding("server", "fail", f"{server.ca} is not there", remedy)
        return
    try:
        found = reach_server(server)
    except FedplanError as error:
        yield Finding("server", "fail", f"{server.address}: {error}", _why(str(error)))
        return
    yield _certificate(server, found.days)
    yield _clock(found.ahead)
    if server.ca and server.node and Path(server.node).is_file():
        yield _registered(site, server)


def _why(said: str) -> str:
    """What to do about a line that does not open."""
    if "certificate" in said.lower():
        return (
            "is ca.crt of this server, and does its certificate name this address? ask its operator"
        )
    if "Name or service" in said or "resolution" in said:
        return "the name is not known here: see the address in site.toml, and the DNS"
    return "is the server running, and does the firewall let this machine out to it?"


def _proxy(server: ServerSection) -> Finding:
    proxy = proxy_to(server)
    if proxy is None:
        return Finding("proxy", "ok", "no proxy stands on the way to the server")
    where = f"{proxy.hostname}:{proxy.port or 80}"
    remedy = f"if it is not meant: NO_PROXY={server.address.rpartition(':')[0]} in environment.sh"
    return Finding("proxy", "warn", f"requests to the server go by way of {where}", remedy)


def _certificate(server: ServerSection, days: int | None) -> Finding:
    if days is None:
        remedy = "that is for one machine alone: say ca and node"
        return Finding("server", "warn", f"{server.address} answers, without TLS", remedy)
    said = f"{server.address} answers; its certificate is good for {days} days"
    if days < SOON:
        return Finding("server", "warn", said, "tell the server's operator: it must be made anew")
    return Finding("server", "ok", said)


def _clock(ahead: float | None) -> Finding:
    if ahead is None:
        return Finding("clock", "warn", "the server does not tell its time")
    off = abs(ahead)
    said = f"{off:.0f} s {'before' if ahead > 0 else 'after'} the server's" if off else _SAME
    remedy = "set this machine's clock, or the server's: timedatectl set-ntp true"
    if off > TOO_FAR:
        return Finding("clock", "fail", said, remedy)
    return Finding("clock", "warn", said, remedy) if off > APART else Finding("clock", "ok", said)


_SAME = "the same as the server's, as far as it can be told"


def _registered(site: Site, server: ServerSection) -> Finding:
    from fedplan.runners.flower.known import is_known

    if is_known(server):
        return Finding("registered", "ok", "the server knows this site's key")
    remedy = f"send its operator node.pub: fedplan server register {site.name} node.pub"
    return Finding("registered", "fail", "the server does not know this site's key", remedy)


def _home(site: Site) -> Iterator[Finding]:
    home = Path(site.home)
    there = next(place for place in (home, *home.parents) if place.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        remedy = f"run this as the user who serves the site, or chown {there}"
        yield Finding("home", "fail", f"{there} cannot be written", remedy)
    elif home.exists() and home.stat().st_mode & OTHERS:
        yield Finding("home", "warn", f"others may enter {home}", f"chmod 700 {home}")
    else:
        yield Finding("home", "ok", _served(home))
    yield _disk(there)


def _served(home: Path) -> str:
    if not home.exists():
        return f"{home} is made when the site is first served"
    try:
        with alone(home):
            return f"{home}; nobody serves the site now"
    except StoreError:
        return f"{home}; a process serves the site"


def _disk(there: Path) -> Finding:
    free = shutil.disk_usage(there).free
    said, remedy = f"{free / 2**30:.1f} GiB are free for the home", f"make room on {there}"
    if free < FULL:
        return Finding("disk", "fail", said, remedy)
    return Finding("disk", "warn", said, remedy) if free < LITTLE else Finding("disk", "ok", said)


def _versions(site: Site) -> Iterator[Finding]:
    found = dict(own_versions())
    wire, python = found.pop("wire"), ".".join(map(str, sys.version_info[:3]))
    lacking = [name for name, version in found.items() if not version]
    said = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    said = f"{said}, Python {python}, messages {wire}"
    if lacking:
        remedy = "pip install 'fedplan[flower]'"
        yield Finding("versions", "fail", f"{said}; there is no {', '.join(lacking)}", remedy)
    else:
        yield Finding("versions", "ok", said)


def _device(site: Site) -> Iterator[Finding]:
    device = device_named(site.device or AUTO)
    said = f"{device} trains" if site.device else f"{device} trains, unless a study says another"
    yield Finding("device", "ok", said)


def _data(site: Site) -> Iterator[Finding]:
    """The rows by each study that is approved; with none, whether there is something to read."""
    if not site.data:
        yield Finding("data", "fail", "site.toml names no data", "say data, a table of this site's")
        return
    if not site.rows and not Path(site.data).exists():
        yield Finding("data", "fail", f"{site.data} is not there", "see data in site.toml")
        return
    approvals = approvals_of(site)
    studies = list(_approved(approvals))
    if not studies:
        yield Finding("data", "ok", f"{site.data} is there; no study is approved to read it by")
    for study in studies:
        yield _read(site, study)


def _approved(approvals: Approvals) -> Iterator[Study]:
    for whole in approvals.inbox.wholes():
        study = approvals.inbox.read(whole).study
        if approvals.of(study) is not None:
            yield study


def _read(site: Site, study: Study) -> Finding:
    """Whether a study can take the rows, by taking them: its columns, labels and tokenizer."""
    name = f"data for {study.name}"
    if study.clients.names and site.name not in study.clients.names:
        remedy = "ask the server's operator what this site is called"
        return Finding(name, "fail", f"{site.name} is none of its clients", remedy)
    try:
        with allowing(site.allow):
            rows = shares_of(study, (site.name, table_of(site, study))).train[site.name]
    except FedplanError as error:
        return Finding(name, "fail", str(error), "see data and rows in site.toml")
    return Finding(name, "ok", f"{len(rows)} examples to train on")


EXAMINERS: tuple[tuple[str, Examiner], ...] = (
    ("policy", _policy),
    ("keys", _keys),
    ("server", _server),
    ("home", _home),
    ("versions", _versions),
    ("device", _device),
    ("data", _data),
)


def screen(site: Site, findings: Sequence[Finding]) -> RenderableType:
    """The findings as a person reads them."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in findings:
        said = Text(each.said)
        if each.remedy and each.state != "ok":
            said.append(f"\n→ {each.remedy}", style="bold" if each.state == "fail" else "")
        table.add_row(Text(each.state, style=STYLES[each.state]), each.name, said)
    return Group(Text(f"The site {site.name}\n", style="bold"), table, Text(_summed(findings)))


def _summed(findings: Sequence[Finding]) -> str:
    fails, warns = (sum(each.state == state for each in findings) for state in ("fail", "warn"))
    more = f" {warns} to look at." if warns else ""
    if fails:
        return f"\n{fails} to mend before it can take part.{more}"
    return f"\nIt can take part.{more}"
