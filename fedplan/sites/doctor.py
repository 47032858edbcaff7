# SPDX-License-Identifier: Apache-2.0
"""Self-checks of a site: whether it can take part in a federation, and how to fix problems."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.errors import FedplanError, StoreError
from fedplan.federation.messages import local_versions
from fedplan.naming import allow_imports
from fedplan.runners.site import ServerSection, Site
from fedplan.runners.site_runtime import load_site_table
from fedplan.sites.approvals import site_approvals
from fedplan.sites.policy import read_policy
from fedplan.sites.statistics import site_statistics
from fedplan.sites.tls_probe import find_proxy, probe_server
from fedplan.storage.locks import NoLocks, locked_folder
from fedplan.studies.federated_data import load_federated_data
from fedplan.studies.schema import Study
from fedplan.tensors.devices import AUTO, rank_device, resolve_device

CheckState = Literal["ok", "warn", "fail"]
STYLES: dict[CheckState, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
OTHER_USERS = 0o077
"""Permission bits of all users but the owner."""
FEW_DAYS = 30
"""A certificate that expires in fewer days gives a warning."""
LITTLE_SPACE, NO_SPACE = 5 * 2**30, 2**28
"""Free bytes of a disk below which the check warns, and fails."""
CLOCK_WARNING, CLOCK_FAILURE = 2.0, 5.0
"""Seconds of clock difference above which the check warns, and fails as Flower would."""


@dataclass(frozen=True)
class Finding:
    """Result of one check of a site; `remedy` says how to fix a warning or failure, if known."""

    name: str
    state: CheckState
    message: str
    remedy: str = ""

    def json(self) -> dict[str, str]:
        """Return the finding as plain values."""
        return asdict(self)


def check_site(site: Site) -> list[Finding]:
    """Run all checks of a site, and return their findings in the order of CHECKS.

    Reads the site's data, and changes nothing. An error becomes a finding with state "fail".
    """
    findings = list[Finding]()
    for name, check in CHECKS:
        try:
            for finding in check(site):
                findings.append(finding)  # one by one: those before an error stay
        except (FedplanError, OSError) as error:
            findings.append(Finding(name, "fail", str(error)))
    return findings


def _check_policy(site: Site) -> Iterator[Finding]:
    file = Path(site.policy)
    if not file.exists():
        remedy = "write it; with an empty file, each study needs the approval of a person"
        yield Finding("policy", "fail", f"{file} does not exist", remedy)
        return
    policy = read_policy(file)
    approval = (
        "studies that it allows are approved automatically"
        if policy.auto_approve
        else "each study needs the approval of a person"
    )
    yield Finding("policy", "ok", f"{file.name} is valid; {approval}")
    # Whoever can change site.toml can name another policy.
    owned = {each: None for own in (file, site.file) if own for each in (own, own.parent)}
    if policy.people and (names := [str(each) for each in owned if os.access(each, os.W_OK)]):
        message = f"this user can change {' and '.join(names)}, and so the keys of the people"
        remedy = "if this user serves the site, give these files and folders to another user"
        yield Finding("policy", "warn", message, remedy)
    if policy.people and shutil.which("ssh-keygen") is None:
        message = "ssh-keygen is not installed, so no signature can be checked"
        yield Finding("policy", "fail", message, "install OpenSSH's client")


def _check_keys(site: Site) -> Iterator[Finding]:
    server, state = site.server, site.encryption_key
    for name, named in {"state.key": state, "node": server.node_key if server else ""}.items():
        check, file = f"key {name}", Path(named)
        if not named:
            yield Finding(check, "warn", f"site.toml names no {name}", _WITHOUT_KEY[name])
        elif not file.is_file():
            yield Finding(check, "fail", f"{file} does not exist", "run `fedplan site keys`")
        elif file.stat().st_mode & OTHER_USERS:
            remedy = f"run `chmod 600 {file}`; if others may have read the key, make a new one"
            yield Finding(check, "fail", f"other users can read {file}", remedy)
        elif not os.access(file, os.R_OK):
            remedy = "run this command as the user who serves the site"
            yield Finding(check, "fail", f"{file} cannot be read", remedy)
        else:
            yield Finding(check, "ok", f"only its owner can read {file.name}")


_WITHOUT_KEY = {
    "state.key": "the files of this site are not encrypted: set encryption_key to "
    '"state.key" in site.toml, then run `fedplan site keys`',
    "node": "any machine may pose as this site: use this for tests on one machine only",
}


def _check_server(site: Site) -> Iterator[Finding]:
    server = site.server
    if server is None:
        remedy = 'add [server] with address, ca = "ca.crt" and node_key = "node"'
        yield Finding("server", "fail", "site.toml names no server", remedy)
        return
    if (proxy := find_proxy(server)) is None:
        yield Finding("proxy", "ok", "the connection to the server uses no proxy")
    else:
        host = server.address.rpartition(":")[0]
        remedy = f"if this is not intended, set NO_PROXY={host} in environment.sh"
        message = f"the connection to the server uses the proxy {proxy.hostname}:{proxy.port or 80}"
        yield Finding("proxy", "warn", message, remedy)
    if server.ca and not Path(server.ca).is_file():
        remedy = "ask the server's operator for this file"
        yield Finding("server", "fail", f"{server.ca} does not exist", remedy)
        return
    try:
        probe = probe_server(server)
    except FedplanError as error:
        remedy = _connection_remedy(str(error))
        yield Finding("server", "fail", f"{server.address}: {error}", remedy)
        return
    if (days := probe.certificate_days) is None:
        remedy = "use this for tests on one machine only; otherwise set ca and node_key in [server]"
        yield Finding("server", "warn", f"{server.address} answers without TLS", remedy)
    else:
        message = f"{server.address} answers; its certificate is valid for {days} days"
        remedy = "ask the server's operator to renew the certificate" if days < FEW_DAYS else ""
        yield Finding("server", "warn" if remedy else "ok", message, remedy)
    yield _check_clock(probe.clock_ahead)
    if server.ca and server.node_key and Path(server.node_key).is_file():
        yield _check_registration(site, server)


def _connection_remedy(error_message: str) -> str:
    if "certificate" in error_message.lower():
        return (
            "check with the server's operator that ca.crt belongs to this server, and that the "
            "server's certificate contains this address"
        )
    if "Name or service" in error_message or "resolution" in error_message:
        return "the host name is unknown: check the address in site.toml, and the DNS"
    return "check that the server is running, and that the firewall lets this machine connect"


def _check_clock(ahead: float | None) -> Finding:
    if ahead is None:
        return Finding("clock", "warn", "the server does not send its time")
    seconds = abs(ahead)
    message = (
        f"{seconds:.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's clock"
        if seconds
        else "agrees with the server's clock"
    )
    remedy = "synchronize this machine's clock, or the server's: timedatectl set-ntp true"
    if seconds > CLOCK_WARNING:
        return Finding("clock", "fail" if seconds > CLOCK_FAILURE else "warn", message, remedy)
    return Finding("clock", "ok", message)


def _check_registration(site: Site, server: ServerSection) -> Finding:
    from fedplan.runners.flower.supernode import is_key_registered

    if is_key_registered(server):
        return Finding("registered", "ok", "the server knows this site's key")
    remedy = (
        "send node.pub to the server's operator, who runs "
        f"`fedplan server register {site.name} node.pub`"
    )
    return Finding("registered", "fail", "the server does not know this site's key", remedy)


def _check_state_folder(site: Site) -> Iterator[Finding]:
    folder = Path(site.state)
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        remedy = f"run this command as the user who serves the site, or run `chown` on {existing}"
        yield Finding("state", "fail", f"{existing} is not writable", remedy)
    elif folder.exists() and folder.stat().st_mode & OTHER_USERS:
        message = f"other users can open {folder}"
        yield Finding("state", "warn", message, f"chmod 700 {folder}")
    else:
        message, no_locks = f"{folder} will be created when the site is first served", ""
        if folder.exists():
            try:
                with locked_folder(folder):
                    message = f"{folder}; the site is not being served now"
            except NoLocks as error:
                no_locks = str(error)
            except StoreError:
                message = f"{folder}; the site is being served"
        if no_locks:
            yield Finding("state", "fail", no_locks, "set another `state` in site.toml")
        else:
            yield Finding("state", "ok", message)
    free = shutil.disk_usage(existing).free
    message, remedy = f"{free / 2**30:.1f} GiB free", f"free some space on the disk of {existing}"
    if free < LITTLE_SPACE:
        yield Finding("disk", "fail" if free < NO_SPACE else "warn", message, remedy)
    else:
        yield Finding("disk", "ok", message)


def _check_versions(site: Site) -> Iterator[Finding]:
    versions = dict(local_versions())
    message_format, python = versions.pop("protocol"), ".".join(map(str, sys.version_info[:3]))
    missing = [name for name, version in versions.items() if not version]
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    message = f"{installed}, Python {python}, message format {message_format}"
    if missing:
        message = f"{message}; not installed: {', '.join(missing)}"
        yield Finding("versions", "fail", message, "pip install 'fedplan[flower]'")
    else:
        yield Finding("versions", "ok", message)


def _check_device(site: Site) -> Iterator[Finding]:
    device, count = resolve_device(site.device or AUTO), site.devices_per_client
    together = f", {count} cards together" if count > 1 else ""
    if together:
        rank_device(site.device or AUTO, count - 1, count)
    default = "" if site.device else ", unless a study sets another device"
    yield Finding("device", "ok", f"trains on {device}{together}{default}")


def _check_data(site: Site) -> Iterator[Finding]:
    """Check that the site's data exist, and load the data for each approved study."""
    if not site.data:
        remedy = "set data to this site's table"
        yield Finding("data", "fail", "site.toml names no data", remedy)
        return
    if not site.reader and not Path(site.data).exists():
        yield Finding("data", "fail", f"{site.data} does not exist", "check data in site.toml")
        return
    approvals = site_approvals(site)
    offered = (approvals.inbox.read_offer(digest).study for digest in approvals.inbox.digests())
    studies = [study for study in offered if approvals.find_approval(study) is not None]
    if not studies:
        message = f"{site.data} exists; it is not read, because no study is approved"
        yield Finding("data", "ok", message)
    for study in studies:
        name = f"data for {study.name}"
        if study.clients.names and site.name not in study.clients.names:
            remedy = "ask the server's operator for the name of this site"
            message = f"{site.name} is not one of the study's clients"
            yield Finding(name, "fail", message, remedy)
            continue
        try:
            with allow_imports(site.allow_packages):
                table = load_site_table(site, study)
                yield from _check_dictionary(site, study)
                data = load_federated_data(study, (site.name, table))
        except FedplanError as error:
            yield Finding(name, "fail", str(error), "check data and reader in site.toml")
        else:
            message = f"{len(data.train[site.name])} examples to train on"
            if data.left_out:
                remedy = "correct these rows, or ask for a study that they fit"
                yield Finding(name, "warn", f"{message}; {data.left_out}", remedy)
            else:
                yield Finding(name, "ok", message)


def _check_dictionary(site: Site, study: Study) -> Iterator[Finding]:
    if study.statistics is not None and (report := site_statistics(site, study)).mismatches:
        remedy = "correct the data, or ask for another dictionary: see `fedplan site statistics`"
        message = f"differs from the dictionary: {'; '.join(report.mismatch_lines())}"
        yield Finding(f"dictionary of {study.name}", "warn", message, remedy)


CHECKS: tuple[tuple[str, Callable[[Site], Iterator[Finding]]], ...] = (
    ("policy", _check_policy),
    ("keys", _check_keys),
    ("server", _check_server),
    ("state", _check_state_folder),
    ("versions", _check_versions),
    ("device", _check_device),
    ("data", _check_data),
)
"""All checks in the order of the table; the name is used if a check raises."""


def doctor_table(site: Site, findings: Sequence[Finding]) -> RenderableType:
    """Return the findings of `check_site` as a rich table, with a heading and a summary line."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.message)
        if finding.remedy and finding.state != "ok":
            text.append(f"\n→ {finding.remedy}", style="bold" if finding.state == "fail" else "")
        table.add_row(Text(finding.state, style=STYLES[finding.state]), finding.name, text)
    failures, warnings = (
        sum(finding.state == state for finding in findings) for state in ("fail", "warn")
    )
    summary = "\nThis site can take part."
    if failures:
        summary = f"\nThis site cannot take part yet. Failed checks: {failures}."
    if warnings:
        summary += f" Warnings: {warnings}."
    return Group(Text(f"Site {site.name}\n", style="bold"), table, Text(summary))
