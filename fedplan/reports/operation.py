# SPDX-License-Identifier: Apache-2.0
"""Operation: how a run is watched from outside. None of it changes a turn."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.federation.status import Status
from fedplan.reports.monitoring import served
from fedplan.reports.webhooks import CERTIFICATE, Webhooks

CERTIFICATES = ("ca.crt", "server.crt")
SOON = timedelta(days=30)
DAY = 86_400.0


@dataclass(frozen=True)
class Operation:
    """Where a run is watched: a port of this machine, addresses that are told, certificates.

    `certificates` is the folder of a federation: what expires there soon is told, each day.
    """

    metrics_port: int | None = None
    webhooks: tuple[str, ...] = ()
    certificates: Path | None = None


@contextmanager
def operated(folder: Path, operation: Operation) -> Generator[Status]:
    """A status for the run in a folder, and those who watch it, until it ends."""
    hooks = Webhooks(operation.webhooks)
    status = Status(folder, [hooks] if operation.webhooks else [])
    with _ended_by_term(), ExitStack() as open_:
        open_.callback(hooks.close)
        if operation.metrics_port is not None:
            open_.enter_context(served(status, operation.metrics_port))
        if operation.certificates is not None:
            open_.enter_context(_expiring(status, operation.certificates))
        yield status


@contextmanager
def _ended_by_term() -> Generator[None]:
    """Let TERM end a run as Ctrl-C does, so that its status says so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def expiries(folder: Path) -> dict[str, datetime]:
    """When each certificate in a federation's folder ends; one that is not there is left out."""
    from cryptography import x509

    found = dict[str, datetime]()
    for name in CERTIFICATES:
        file = folder / name
        try:
            read = x509.load_pem_x509_certificate(file.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise FedplanError(f"{file} cannot be read: {error}; make it anew") from error
        found[name] = read.not_valid_after_utc
    return found


@contextmanager
def _expiring(status: Status, folder: Path) -> Generator[None]:
    """Look at the certificates now and each day, in a thread of its own."""
    over = threading.Event()

    def look() -> None:
        pause = 1.0  # by then the run is begun, and its id is known
        while not over.wait(pause):
            tell_expiries(status, folder)
            pause = DAY

    thread = threading.Thread(target=look, name="certificates", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1.0)


def tell_expiries(status: Status, folder: Path) -> None:
    """Tell of each certificate that ends within 30 days, or has ended."""
    try:
        found = expiries(folder)
    except FedplanError as error:
        status.tell(CERTIFICATE, str(error))
        return
    for name, when in found.items():
        left = when - datetime.now(UTC)
        if left < SOON:
            ended = "has ended" if left < timedelta(0) else f"ends in {left.days} days"
            text = f"{name} {ended}, at {when:%Y-%m-%d}: make it anew (docs/operations.md)"
            status.tell(CERTIFICATE, text)
