# SPDX-License-Identifier: Apache-2.0
"""Monitor a run from outside: Prometheus metrics, health, certificate expiry.

Training is unaffected. An alert rule of Prometheus tells of runs that fail or stand still.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedplan.errors import FedplanError, import_extra
from fedplan.federation.ledger.events import Notice
from fedplan.federation.ledger.status import RunState, RunStatus, SiteState
from fedplan.federation.ledger.stream import EventStream

HOST = "127.0.0.1"
"""Only this machine can connect; use a proxy to monitor from elsewhere."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus's text format."""

CERTIFICATES = ("ca.crt", "server.crt")
"""The certificate files in a federation's folder."""
EXPIRY_NOTICE = timedelta(days=30)
"""The time before its expiry at which a certificate is reported."""
DAY = 86_400.0
"""Seconds between two checks of the certificates."""
CERTIFICATE = "certificate"
"""Kind of the notice of a certificate."""

Labels = Mapping[str, str]
Samples = list[tuple[Labels, float | None]]
"""The samples of a metric, each with its labels; None is left out."""


@contextmanager
def start_monitoring(
    folder: Path, metrics_port: int | None = None, certificates: Path | None = None
) -> Generator[EventStream]:
    """Yield an event stream for the run in a folder, and monitor the run until the context ends.

    `metrics_port` serves Prometheus metrics on this machine. `certificates` is a federation's
    folder: certificates there that expire within 30 days are reported daily. None turns either off.
    Inside of the context, in the main thread, SIGTERM raises KeyboardInterrupt as Ctrl-C does.
    Raises FedplanError if the port cannot be bound.
    """
    events = EventStream(folder)
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, previous)
        if metrics_port is not None:
            stack.enter_context(serve_metrics(events, metrics_port))
        if certificates is not None:
            ended = threading.Event()

            def check() -> None:
                pause = 1.0  # the run has its id by then
                while not ended.wait(pause):
                    report_expiries(events, certificates)
                    pause = DAY

            thread = threading.Thread(target=check, name="certificates", daemon=True)
            thread.start()
            stack.callback(thread.join, 1.0)
            stack.callback(ended.set)
        yield events


def certificate_expiries(folder: Path) -> dict[str, datetime]:
    """Return when each certificate file in a federation's folder expires, by file name, in UTC.

    Missing files are left out. Raises FedplanError if a file cannot be read as a certificate.
    """
    x509 = import_extra("cryptography.x509", "reading certificates")
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


def report_expiries(events: EventStream, folder: Path) -> None:
    """Emit a notice of each certificate that cannot be read or expires within 30 days."""
    try:
        expiries = certificate_expiries(folder)
    except FedplanError as error:
        return events.emit(Notice(CERTIFICATE, str(error)))
    for name, when in expiries.items():
        left = when - datetime.now(UTC)
        if left < EXPIRY_NOTICE:
            expiry = "has expired" if left < timedelta(0) else f"expires in {left.days} days"
            text = f"{name} {expiry}, on {when:%Y-%m-%d}: renew it (docs/how-to/operate.md)"
            events.emit(Notice(CERTIFICATE, text))


@contextmanager
def serve_metrics(events: EventStream, port: int) -> Generator[int]:
    """Serve `/metrics` and `/health` of a run's status on 127.0.0.1 in the body; yield the port.

    Port 0 takes any free port. Raises FedplanError if the port cannot be bound.
    """
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(events))
    except OSError as error:
        raise FedplanError(
            f"cannot listen on --metrics-port {port} ({error.strerror}); use another port"
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def prometheus_text(status: RunStatus, *, healthy: bool) -> str:
    """Return a run's status in Prometheus's text format, without metrics that have no value.

    Under client-level differential privacy all metrics of single sites are left out, too.
    """
    lines = list[str]()
    for name, kind, text, samples in _metrics(status, healthy=healthy):
        present = [(labels, value) for labels, value in samples if value is not None]
        if present:
            lines += [f"# HELP fedplan_{name} {text}", f"# TYPE fedplan_{name} {kind}"]
        for labels, value in present:
            pairs = ",".join(
                '{}="{}"'.format(
                    label, each.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                )
                for label, each in labels.items()
            )
            lines.append(f"fedplan_{name}{f'{{{pairs}}}' if pairs else ''} {value!r}")
    return "".join(f"{line}\n" for line in lines)


def _metrics(status: RunStatus, *, healthy: bool) -> Iterator[tuple[str, str, str, Samples]]:
    """Yield (name, type, help text, samples) of each metric of a run's status."""

    def one_hot(labels: Labels, current: str, states: Iterable[str]) -> Samples:
        return [({**labels, "state": state}, float(state == current)) for state in states]

    labels, states = {"study": status.study, "run": status.run}, one_hot({}, status.state, RunState)
    yield "run_info", "gauge", "Study and run id.", [(labels, 1.0)]
    yield "run_state", "gauge", "1 for the current state of the run.", states
    for name, text, value in (
        ("healthy", "1 while the run makes progress.", float(healthy)),
        ("round", "The last closed round.", float(status.round)),
        ("rounds", "The number of rounds of the run.", float(status.rounds)),
        ("loss", "The training loss of the last round.", status.loss),
        ("round_seconds", "Seconds per round, recently.", status.round_seconds),
        ("remaining_seconds", "Estimated seconds left.", status.seconds_left),
        ("epsilon_spent", "Epsilon spent so far.", status.epsilon_spent),
        ("epsilon", "Epsilon guaranteed at the end.", status.epsilon),
    ):
        yield name, "gauge", text, [({}, value)]
    scores: Samples = [({"name": name}, value) for name, value in status.scores.items()]
    yield "score", "gauge", "The last scores by name.", scores
    if status.client_level_dp:
        return
    sites = [({"site": name}, site) for name, site in status.sites.items()]
    states = [s for labels, site in sites for s in one_hot(labels, site.state, SiteState)]
    yield "site_state", "gauge", "1 for the current state of each site.", states
    rounds: Samples = [(labels, float(site.round)) for labels, site in sites]
    yield "site_round", "gauge", "The last round that a site has answered.", rounds
    up: Samples = [(labels, float(site.upload_bytes)) for labels, site in sites]
    yield "site_upload_bytes_total", "counter", "Bytes of values uploaded by a site.", up
    down: Samples = [(labels, float(site.download_bytes)) for labels, site in sites]
    yield "site_download_bytes_total", "counter", "Bytes of values downloaded by a site.", down


def _handler(events: EventStream) -> type[BaseHTTPRequestHandler]:
    """Return an HTTP handler class for a run's `/metrics`, and `/health` with status 200 or 503."""

    class StatusHandler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, TEXT, prometheus_text(events.status, healthy=events.healthy))
            elif self.path == "/health":
                now, healthy = events.status, events.healthy
                health = {"healthy": healthy, "state": now.state, "round": now.round}
                health |= {"reason": now.reason} if now.reason else {}
                text = json.dumps(health) + "\n"
                self._answer(200 if healthy else 503, "application/json", text)
            else:
                self._answer(404, "text/plain", "not found; use /metrics or /health\n")

        def _answer(self, code: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Do not print requests to the terminal of the run."""

    return StatusHandler
