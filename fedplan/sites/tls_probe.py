# SPDX-License-Identifier: Apache-2.0
"""Test connections from a site to its server: TLS certificate, clock difference and proxy."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from fedplan.errors import FedplanError
from fedplan.runners.site import ServerSection

TIMEOUT = 10.0
"""Seconds that a server has to answer."""


@dataclass(frozen=True)
class ServerProbe:
    """Days until the certificate expires, seconds that this clock is ahead; None if unknown."""

    certificate_days: int | None
    clock_ahead: float | None


@dataclass(frozen=True)
class Proxy:
    """Host name and port of an HTTP proxy; either may be missing from its address."""

    hostname: str | None
    port: int | None


def probe_server(server: ServerSection) -> ServerProbe:
    """Ask a server as a Flower node would, and verify its certificate; FedplanError if it fails."""
    with _connect(server) as connection:
        days = None
        if isinstance(connection.sock, ssl.SSLSocket):
            expiry = (connection.sock.getpeercert() or {}).get("notAfter")
            if isinstance(expiry, str):
                seconds = ssl.cert_time_to_seconds(expiry) - datetime.now(UTC).timestamp()
                days = int(seconds // 86400)
        sent = datetime.now(UTC)
        connection.request("GET", "/")
        return ServerProbe(days, _clock_ahead(connection.getresponse().getheader("Date"), sent))


def certificate_digest(server: ServerSection | None) -> str:
    """Return the SHA-256 of a server's TLS certificate; "" without TLS or an answer."""
    if server is None or not server.ca:
        return ""
    with suppress(FedplanError), _connect(server) as connection:
        tls = connection.sock if isinstance(connection.sock, ssl.SSLSocket) else None
        certificate = tls.getpeercert(binary_form=True) if tls else None
        return hashlib.sha256(certificate).hexdigest() if certificate else ""
    return ""


@contextmanager
def _connect(server: ServerSection) -> Generator[HTTPConnection]:
    """Connect to a server for the body, by the environment's proxy; errors are FedplanError."""
    host, port = server_host_port(server)
    context = ssl.create_default_context(cafile=server.ca) if server.ca else None
    proxy = find_proxy(server)
    address = (proxy.hostname or "", proxy.port or 80) if proxy else (host, port)
    unopened = (
        HTTPSConnection(*address, timeout=TIMEOUT, context=context)
        if context
        else HTTPConnection(*address, timeout=TIMEOUT)
    )
    with closing(unopened) as connection:
        try:
            if proxy:
                connection.set_tunnel(host, port)
            connection.connect()
            yield connection
        except (OSError, HTTPException) as error:
            raise FedplanError(str(error) or repr(error)) from error


def server_host_port(server: ServerSection) -> tuple[str, int]:
    """Return (host, port) of a server's address; FedplanError if the address is not HOST:PORT."""
    host, _, port = server.address.rpartition(":")
    if not host or not port.isdecimal():
        raise FedplanError(f"[server] address is {server.address!r}: write it as HOST:PORT")
    return host.strip("[]"), int(port)


def find_proxy(server: ServerSection) -> Proxy | None:
    """Return the proxy that environment variables set for a server; None if there is none."""
    proxies = getproxies()
    url = proxies.get("https" if server.ca else "http", "") or proxies.get("all", "")
    if not url or proxy_bypass(server_host_port(server)[0]):
        return None
    parts = urlsplit(url if "//" in url else f"http://{url}")
    return Proxy(parts.hostname, parts.port)


def _clock_ahead(date: str | None, sent: datetime) -> float | None:
    """Return the smallest difference in seconds to a Date header, which is of whole seconds.

    Positive if this machine is ahead, 0 if the clocks may be equal, None without a date.
    """
    try:
        server_time = parsedate_to_datetime(date or "")
        lowest = (sent - server_time).total_seconds() - 1
        highest = (datetime.now(UTC) - server_time).total_seconds()
    except (ValueError, TypeError):
        return None
    return lowest if lowest > 0 else min(highest, 0.0)
