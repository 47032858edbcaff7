# SPDX-License-Identifier: Apache-2.0
"""Serve a run's Prometheus metrics and health over HTTP on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedplan.errors import FedplanError
from fedplan.federation.run_states import RunState, RunStatus, SiteState
from fedplan.federation.status import StatusReporter

HOST = "127.0.0.1"
"""Only this machine can connect; use a proxy to monitor from elsewhere."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus's text format."""

Labels = Mapping[str, str]
Samples = list[tuple[Labels, float | None]]
"""The samples of a metric, each with its labels; None is left out."""


@contextmanager
def serve_metrics(status: StatusReporter, port: int) -> Generator[int]:
    """Serve `/metrics` and `/health` in a thread while the context is open; yield the port.

    Port 0 takes any free port. Raises FedplanError if the port cannot be bound.
    """
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(status))
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
    """Return a run's status in Prometheus's text format.

    Under client-level differential privacy there are no metrics of single sites.
    """
    return "".join(_format_metric(*metric) for metric in _metrics(status, healthy=healthy))


def _metrics(status: RunStatus, *, healthy: bool) -> Iterator[tuple[str, str, str, Samples]]:
    """Yield the metrics of a run: name, type, help text and samples."""
    labels = {"study": status.study, "run": status.run}
    states = tuple(RunState)
    yield "run_info", "gauge", "Study and run id.", [(labels, 1.0)]
    yield (
        "run_state",
        "gauge",
        "1 for the current state of the run.",
        _one_hot({}, status.state, states),
    )
    yield "healthy", "gauge", "1 while the run makes progress.", [({}, float(healthy))]
    yield "round", "gauge", "The last closed round.", [({}, float(status.round))]
    yield "rounds", "gauge", "The number of rounds of the run.", [({}, float(status.rounds))]
    yield "loss", "gauge", "The training loss of the last round.", [({}, status.loss)]
    scores: Samples = [({"name": name}, value) for name, value in status.scores.items()]
    yield "score", "gauge", "The last scores by name.", scores
    yield "round_seconds", "gauge", "Seconds per round, recently.", [({}, status.seconds)]
    yield "left_seconds", "gauge", "Estimated seconds left.", [({}, status.left)]
    yield "epsilon_spent", "gauge", "Epsilon spent so far.", [({}, status.spent)]
    yield "epsilon_promised", "gauge", "Epsilon guaranteed at the end.", [({}, status.promised)]
    if not status.hidden:
        yield from _site_metrics(status)


def _site_metrics(status: RunStatus) -> Iterator[tuple[str, str, str, Samples]]:
    """Yield the metrics of each site: name, type, help text and samples."""
    sites = [({"site": name}, site) for name, site in status.sites.items()]
    states = [s for labels, site in sites for s in _one_hot(labels, site.state, tuple(SiteState))]
    yield "site_state", "gauge", "1 for the current state of each site.", states
    rounds: Samples = [(labels, float(site.round)) for labels, site in sites]
    yield "site_round", "gauge", "The last round that a site has answered.", rounds
    up: Samples = [(labels, float(site.up)) for labels, site in sites]
    yield "site_up_bytes_total", "counter", "Bytes of values uploaded by a site.", up
    down: Samples = [(labels, float(site.down)) for labels, site in sites]
    yield "site_down_bytes_total", "counter", "Bytes of values downloaded by a site.", down


def _one_hot(labels: Labels, current: str, states: tuple[str, ...]) -> Samples:
    """Return a sample for each state: 1 for the current one, 0 for the others."""
    return [({**labels, "state": state}, float(state == current)) for state in states]


def _format_metric(name: str, kind: str, text: str, samples: Samples) -> str:
    """Return the lines of a metric; empty if no sample has a value."""
    present = [(labels, value) for labels, value in samples if value is not None]
    if not present:
        return ""
    lines = [f"# HELP fedplan_{name} {text}", f"# TYPE fedplan_{name} {kind}"]
    lines += [f"fedplan_{name}{_labels(labels)} {value!r}" for labels, value in present]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    """Return labels in braces, or an empty text."""
    pairs = ",".join(f'{name}="{_escape_label(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape_label(value: str) -> str:
    """Escape backslashes, quotes and newlines of a label's value."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _handler(status: StatusReporter) -> type[BaseHTTPRequestHandler]:
    """Return a handler class that answers from a run's status."""

    class StatusHandler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, TEXT, prometheus_text(status.current, healthy=status.healthy))
            elif self.path == "/health":
                now, healthy = status.current, status.healthy
                health = {"healthy": healthy, "state": now.state, "round": now.round}
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
