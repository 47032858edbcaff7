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
    """How a run is monitored from outside.

    `metrics_port` serves Prometheus metrics on this machine (None: not served). `webhooks` are URLs
    that receive events. `certificates` is a federation's folder: certificates there that expire
    within 30 days are reported daily (None: not checked).
    """

    metrics_port: int | None = None
    webhooks: tuple[str, ...] = ()
    certificates: Path | None = None


@contextmanager
def start_monitoring(folder: Path, config: MonitoringConfig) -> Generator[StatusReporter]:
    """Yield a status reporter for the run in a folder, and monitor the run as `config` says.

    Serving metrics, sending events and checking certificates stop when the context ends. Inside of
    the context, in the main thread, SIGTERM raises KeyboardInterrupt as Ctrl-C does. Raises
    FedplanError if the port cannot be bound or a webhook is no URL.
    """
    hooks = Webhooks(config.webhooks)
    status = StatusReporter(folder, [hooks] if config.webhooks else [])
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, previous)
        stack.callback(hooks.close)
        if config.metrics_port is not None:
            stack.enter_context(serve_metrics(status, config.metrics_port))
        if (certificates := config.certificates) is not None:
            ended = threading.Event()

            def check() -> None:
                pause = 1.0  # the run has its id by then
                while not ended.wait(pause):
                    report_expiries(status, certificates)
                    pause = DAY

            thread = threading.Thread(target=check, name="certificates", daemon=True)
            thread.start()
            stack.callback(thread.join, 1.0)
            stack.callback(ended.set)
        yield status


def certificate_expiries(folder: Path) -> dict[str, datetime]:
    """Return when each certificate file in a federation's folder expires, by file name, in UTC.

    Missing files are left out. Raises FedplanError if a file cannot be read as a certificate.
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


def report_expiries(status: StatusReporter, folder: Path) -> None:
    """Notify `status` of each certificate that has expired or expires within 30 days.

    `folder` is the federation's. If a certificate cannot be read, only that is reported; missing
    files are ignored.
    """
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
