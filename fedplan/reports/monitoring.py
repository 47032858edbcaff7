# SPDX-License-Identifier: Apache-2.0
"""Monitor a run from outside: metrics, webhooks and certificate expiry; training is unaffected."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.federation.status import StatusReporter
from fedplan.reports.metrics_server import serve_metrics
from fedplan.reports.webhooks import CERTIFICATE, Webhooks

CERTIFICATES = ("ca.crt", "server.crt")
"""The certificate files in a federation's folder."""
EXPIRY_NOTICE = timedelta(days=30)
"""The time before its expiry at which a certificate is reported."""
DAY = 86_400.0
"""Seconds between two checks of the certificates."""


@dataclass(frozen=True)
class MonitoringConfig:
    """How a run is monitored: the port of its metrics, webhook URLs, and certificates.

    `metrics_port` None serves no metrics. `certificates` is a federation's folder, whose
    certificates are checked daily; those that expire within 30 days are reported.
    """

    metrics_port: int | None = None
    webhooks: tuple[str, ...] = ()
    certificates: Path | None = None


@contextmanager
def start_monitoring(folder: Path, config: MonitoringConfig) -> Generator[StatusReporter]:
    """Yield the status of the run in a folder; serve, send and check as configured meanwhile.

    Inside of the context, in the main thread, SIGTERM ends the run as Ctrl-C does.
    """
    hooks = Webhooks(config.webhooks)
    status = StatusReporter(folder, [hooks] if config.webhooks else [])
    with _sigterm_as_interrupt(), ExitStack() as stack:
        stack.callback(hooks.close)
        if config.metrics_port is not None:
            stack.enter_context(serve_metrics(status, config.metrics_port))
        if config.certificates is not None:
            stack.enter_context(_check_certificates(status, config.certificates))
        yield status


@contextmanager
def _sigterm_as_interrupt() -> Generator[None]:
    """Make SIGTERM raise KeyboardInterrupt, so that the status shows the stop; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def certificate_expiries(folder: Path) -> dict[str, datetime]:
    """Return when each certificate in a federation's folder expires, without missing files.

    Raises FedplanError if a file cannot be read as a certificate.
    """
    from cryptography import x509

    expiries = dict[str, datetime]()
    for name in CERTIFICATES:
        file = folder / name
        try:
            certificate = x509.load_pem_x509_certificate(file.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise FedplanError(f"cannot read the certificate {file}: {error}; renew it") from error
        expiries[name] = certificate.not_valid_after_utc
    return expiries


@contextmanager
def _check_certificates(status: StatusReporter, folder: Path) -> Generator[None]:
    """Report expiring certificates now and daily, in a thread, while the context is open."""
    ended = threading.Event()

    def check() -> None:
        pause = 1.0  # the run has its id by then
        while not ended.wait(pause):
            report_expiries(status, folder)
            pause = DAY

    thread = threading.Thread(target=check, name="certificates", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)


def report_expiries(status: StatusReporter, folder: Path) -> None:
    """Report each certificate that expires within 30 days, has expired, or cannot be read."""
    try:
        expiries = certificate_expiries(folder)
    except FedplanError as error:
        status.notify(CERTIFICATE, str(error))
        return
    for name, when in expiries.items():
        left = when - datetime.now(UTC)
        if left < EXPIRY_NOTICE:
            expiry = "has expired" if left < timedelta(0) else f"expires in {left.days} days"
            text = f"{name} {expiry}, on {when:%Y-%m-%d}: renew it (docs/how-to/operate.md)"
            status.notify(CERTIFICATE, text)
