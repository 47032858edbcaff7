# SPDX-License-Identifier: Apache-2.0
"""Serve a site: start its Flower node and answer the server's requests until stopped."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.runners.flower.superexec import serve_tasks
from fedplan.runners.flower.supernode import run_supernode
from fedplan.runners.site import Site, read_site
from fedplan.sites.gateway import SiteGateway, site_approvals
from fedplan.sites.tls_probe import certificate_digest
from fedplan.storage.locks import acquire_folder_lock


def serve_site(folder: Path) -> None:
    """Serve the site described by site.toml in `folder`; block until SIGTERM or SIGINT.

    Sets the process's umask, signal handlers and NO_PROXY, and locks the site's state folder, which
    is created if missing. Raises StoreError if another process serves the site.
    """
    site, stopped = read_site(folder), threading.Event()
    os.umask(0o077)
    # Connections to this machine must not go through a proxy.
    proxy_exceptions = [
        os.environ[name] for name in ("NO_PROXY", "no_proxy") if os.environ.get(name)
    ]
    for name in ("NO_PROXY", "no_proxy"):  # if both are set, libraries read either
        os.environ[name] = ",".join(dict.fromkeys((*proxy_exceptions, "127.0.0.1")))

    def stop(number: int, frame: object) -> None:
        # In another thread, since this one may hold the event's lock.
        threading.Thread(target=stopped.set).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    state_folder = Path(site.state)
    state_folder.mkdir(parents=True, exist_ok=True)
    lock = acquire_folder_lock(state_folder)
    gateway = make_gateway(site)
    gateway.log.note("site started", site=site.name)
    with run_supernode(site, stopped) as api:
        serve_tasks(api, gateway.answer, stopped)
    gateway.egress.flush()
    gateway.log.note("site stopped", site=site.name)
    del lock


def make_gateway(site: Site) -> SiteGateway:
    """Return a gateway for a site, with the approvals in its state folder."""
    return SiteGateway(site, site_approvals(site), lambda: server_certificate_digest(site))


def server_certificate_digest(site: Site) -> str:
    """Connect to the site's server and return the SHA-256 of the TLS certificate it presents.

    Returns "" without a server, without TLS, and if the server cannot be reached.
    """
    if site.server is None or not site.server.ca:
        return ""
    try:
        return certificate_digest(site.server)
    except FedplanError:
        return ""
