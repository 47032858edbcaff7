# SPDX-License-Identifier: Apache-2.0
"""Reached: what a server shows when a site first speaks to it, by the way that a node would go."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from fedplan.errors import FedplanError
from fedplan.runners.site import ServerSection

WITHIN = 10.0
"""Seconds that a server has to answer."""


@dataclass(frozen=True)
class Reached:
    """A server's certificate, and by how many seconds this machine's clock is before its own."""

    days: int | None
    ahead: float | None


def reach_server(server: ServerSection) -> Reached:
    """Speak to a server as a node would: its certificate is proved, and names the address."""
    with _line_to(server) as line:
        days = _days(line.sock.getpeercert()) if isinstance(line.sock, ssl.SSLSocket) else None
        before = datetime.now(UTC)
        line.request("GET", "/")
        return Reached(days, _ahead(line.getresponse().getheader("Date"), before))


def certificate_mark(server: ServerSection) -> str:
    """The digest of the certificate that a server shows; nothing if it shows none."""
    with _line_to(server) as line:
        if not isinstance(line.sock, ssl.SSLSocket):
            return ""
        shown = line.sock.getpeercert(binary_form=True)
        return hashlib.sha256(shown).hexdigest() if shown else ""


@contextmanager
def _line_to(server: ServerSection) -> Generator[HTTPConnection]:
    """A line to a server, through the proxy that the environment names."""
    host, port = address_in(server)
    context = ssl.create_default_context(cafile=server.ca) if server.ca else None
    proxy = proxy_to(server)
    first = (proxy.hostname or "", proxy.port or 80) if proxy else (host, port)
    made = (
        HTTPSConnection(*first, timeout=WITHIN, context=context)
        if context
        else HTTPConnection(*first, timeout=WITHIN)
    )
    with closing(made) as line:
        try:
            if proxy:
                line.set_tunnel(host, port)
            line.connect()
            yield line
        except (OSError, HTTPException) as error:
            raise FedplanError(str(error) or repr(error)) from error


def address_in(server: ServerSection) -> tuple[str, int]:
    """The host and the port of a server's address."""
    host, _, port = server.address.rpartition(":")
    if not host or not port.isdecimal():
        raise FedplanError(f"[server] address is {server.address!r}: say HOST:PORT")
    return host.strip("[]"), int(port)


def proxy_to(server: ServerSection) -> _Proxy | None:
    """The proxy that the environment names on the way to a server."""
    found = getproxies()
    said = found.get("https" if server.ca else "http", "") or found.get("all", "")
    if not said or proxy_bypass(address_in(server)[0]):
        return None
    parts = urlsplit(said if "//" in said else f"http://{said}")
    return _Proxy(said, parts.hostname, parts.port)


@dataclass(frozen=True)
class _Proxy:
    said: str
    hostname: str | None
    port: int | None


def _days(certificate: Mapping[str, object] | None) -> int | None:
    until = (certificate or {}).get("notAfter")
    if not isinstance(until, str):
        return None
    left = ssl.cert_time_to_seconds(until) - datetime.now(UTC).timestamp()
    return int(left // 86400)


def _ahead(date: str | None, before: datetime) -> float | None:
    """The least that explains a date: it is of whole seconds, and of some moment since `before`."""
    try:
        told = parsedate_to_datetime(date or "")
        least, most = (
            (before - told).total_seconds() - 1,
            (datetime.now(UTC) - told).total_seconds(),
        )
    except (ValueError, TypeError):
        return None
    return least if least > 0 else min(most, 0.0)
