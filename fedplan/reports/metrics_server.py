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
    """Serve `/metrics` and `/health` of a run's status while the context is open; yield the port.

    Listens on 127.0.0.1 in a daemon thread; port 0 takes any free port. Raises FedplanError if the
    port cannot be bound.
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
    """Return a run's status in Prometheus's text format; `healthy` becomes a metric.

    Metrics without a value are left out; under client-level differential privacy also all metrics
    of single sites.
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
    labels = {"study": status.study, "run": status.run}
    states = _one_hot({}, status.state, tuple(RunState))
    yield "run_info", "gauge", "Study and run id.", [(labels, 1.0)]
    yield "run_state", "gauge", "1 for the current state of the run.", states
    yield "healthy", "gauge", "1 while the run makes progress.", [({}, float(healthy))]
    yield "round", "gauge", "The last closed round.", [({}, float(status.round))]
    yield "rounds", "gauge", "The number of rounds of the run.", [({}, float(status.rounds))]
    yield "loss", "gauge", "The training loss of the last round.", [({}, status.loss)]
    scores: Samples = [({"name": name}, value) for name, value in status.scores.items()]
    yield "score", "gauge", "The last scores by name.", scores
    yield "round_seconds", "gauge", "Seconds per round, recently.", [({}, status.round_seconds)]
    yield "remaining_seconds", "gauge", "Estimated seconds left.", [({}, status.seconds_left)]
    yield "epsilon_spent", "gauge", "Epsilon spent so far.", [({}, status.epsilon_spent)]
    yield "epsilon", "gauge", "Epsilon guaranteed at the end.", [({}, status.epsilon)]
    if status.client_level_dp:
        return
    sites = [({"site": name}, site) for name, site in status.sites.items()]
    states = [s for labels, site in sites for s in _one_hot(labels, site.state, tuple(SiteState))]
    yield "site_state", "gauge", "1 for the current state of each site.", states
    rounds: Samples = [(labels, float(site.round)) for labels, site in sites]
    yield "site_round", "gauge", "The last round that a site has answered.", rounds
    up: Samples = [(labels, float(site.upload_bytes)) for labels, site in sites]
    yield "site_upload_bytes_total", "counter", "Bytes of values uploaded by a site.", up
    down: Samples = [(labels, float(site.download_bytes)) for labels, site in sites]
    yield "site_download_bytes_total", "counter", "Bytes of values downloaded by a site.", down


def _one_hot(labels: Labels, current: str, states: tuple[str, ...]) -> Samples:
    """Return a sample with `labels` for each state: 1 for the current state, 0 for the others."""
    return [({**labels, "state": state}, float(state == current)) for state in states]


def _handler(status: StatusReporter) -> type[BaseHTTPRequestHandler]:
    """Return an HTTP handler class that serves the current status of a run.

    `/health` has HTTP status 200 if the run is healthy and 503 if not; other paths have 404.
    """

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
