# SPDX-License-Identifier: Apache-2.0
"""Serving: a site takes part, with its node beside it, until it is ended."""

from __future__ import annotations

import hashlib
import os
import signal
import ssl
import threading
from pathlib import Path

from fedplan.naming import allow_only
from fedplan.runners.flower.executor import serve
from fedplan.runners.flower.node import noded
from fedplan.runners.site import Site, read_site
from fedplan.sites.desk import Desk, approvals_of
from fedplan.storage.locks import claimed


def serve_site(folder: Path) -> None:
    """Serve the site of a folder until TERM or INT."""
    site, over = read_site(folder), threading.Event()
    os.umask(0o077)
    allow_only(site.allow)
    # What stands on this machine is not asked for by way of a proxy.
    os.environ["NO_PROXY"] = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))

    def end(number: int, frame: object) -> None:
        over.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    home = Path(site.home)
    home.mkdir(parents=True, exist_ok=True)
    claim = claimed(home)
    desk = desk_of(site)
    desk.log.note("site begun", site=site.name)
    with noded(site, over) as door:
        serve(door, desk.answer, over)
    desk.log.note("site ended", site=site.name)
    del claim


def desk_of(site: Site) -> Desk:
    """The desk of a site, by its policy."""
    return Desk(site, approvals_of(site), lambda: certificate_of(site))


def certificate_of(site: Site) -> str:
    """The digest of the certificate that the server shows now; nothing if it shows none."""
    if site.server is None or not site.server.ca:
        return ""
    host, _, port = site.server.address.rpartition(":")
    try:
        shown = ssl.get_server_certificate(
            (host.strip("[]"), int(port)), ca_certs=site.server.ca, timeout=10.0
        )
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(shown)).hexdigest()
