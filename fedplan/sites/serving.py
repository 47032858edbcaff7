# SPDX-License-Identifier: Apache-2.0
"""Serving: a site takes part, with its node beside it, until it is ended."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.runners.flower.executor import serve
from fedplan.runners.flower.node import noded
from fedplan.runners.site import Site, read_site
from fedplan.sites.desk import Desk, approvals_of
from fedplan.sites.reached import certificate_mark
from fedplan.storage.locks import claimed


def serve_site(folder: Path) -> None:
    """Serve the site of a folder until TERM or INT."""
    site, over = read_site(folder), threading.Event()
    os.umask(0o077)
    # What stands on this machine is not asked for by way of a proxy.
    said = [os.environ[name] for name in ("NO_PROXY", "no_proxy") if os.environ.get(name)]
    for name in ("NO_PROXY", "no_proxy"):  # where both are there, libraries take either
        os.environ[name] = ",".join(dict.fromkeys((*said, "127.0.0.1")))

    def end(number: int, frame: object) -> None:
        # From another thread: this one may be within the event's own lock.
        threading.Thread(target=over.set).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    home = Path(site.home)
    home.mkdir(parents=True, exist_ok=True)
    claim = claimed(home)
    desk = desk_of(site)
    desk.log.note("site begun", site=site.name)
    with noded(site, over) as door:
        serve(door, desk.answer, over)
    desk.egress.settle()
    desk.log.note("site ended", site=site.name)
    del claim


def desk_of(site: Site) -> Desk:
    """The desk of a site, by its policy."""
    return Desk(site, approvals_of(site), lambda: certificate_of(site))


def certificate_of(site: Site) -> str:
    """The digest of the certificate that the server shows now; nothing if it shows none."""
    if site.server is None or not site.server.ca:
        return ""
    try:
        return certificate_mark(site.server)
    except FedplanError:
        return ""
