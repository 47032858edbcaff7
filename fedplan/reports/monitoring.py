# SPDX-License-Identifier: Apache-2.0
"""Monitoring: a run as machines watch it, over HTTP on this machine: `/metrics` and `/health`."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedplan.errors import FedplanError
from fedplan.federation.states import RunState, RunStatus, SiteState
from fedplan.federation.status import Status

HOST = "127.0.0.1"
"""Only this machine is answered: who watches from elsewhere comes through a proxy of their own."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The type of Prometheus's text format."""

Labels = Mapping[str, str]
Samples = list[tuple[Labels, float | None]]


@contextmanager
def served(status: Status, port: int) -> Generator[int]:
    """Answer on a port of this machine while the run goes on; 0 takes any that is free."""
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(status))
    except OSError as error:
        raise FedplanError(f"--metrics-port is {port}: {error.strerror}; give another") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def exposition(told: RunStatus, *, healthy: bool) -> str:
    """A run in Prometheus's text format. Where clients are hidden, no single site is in it."""
    return "".join(_family(*each) for each in _families(told, healthy=healthy))


def _families(told: RunStatus, *, healthy: bool) -> Iterator[tuple[str, str, str, Samples]]:
    who = {"study": told.study, "run": told.run}
    states = tuple(RunState)
    yield "run_info", "gauge", "The run that is driven.", [(who, 1.0)]
    yield "run_state", "gauge", "1 for the state of the run.", _state({}, told.state, states)
    yield "healthy", "gauge", "1 while the driver gets further.", [({}, float(healthy))]
    yield "round", "gauge", "The last round that was closed.", [({}, float(told.round))]
    yield "rounds", "gauge", "All rounds of the run.", [({}, float(told.rounds))]
    yield "loss", "gauge", "The loss of the last round.", [({}, told.loss)]
    scores: Samples = [({"name": name}, value) for name, value in told.scores.items()]
    yield "score", "gauge", "The last scores by name.", scores
    yield "round_seconds", "gauge", "Seconds a round, lately.", [({}, told.seconds)]
    yield "left_seconds", "gauge", "Seconds until the end at that pace.", [({}, told.left)]
    yield "epsilon_spent", "gauge", "What was spent of privacy.", [({}, told.spent)]
    yield "epsilon_promised", "gauge", "What was promised of it.", [({}, told.promised)]
    if not told.hidden:
        yield from _sites(told)


def _sites(told: RunStatus) -> Iterator[tuple[str, str, str, Samples]]:
    named = [({"site": name}, site) for name, site in told.sites.items()]
    states = [each for who, site in named for each in _state(who, site.state, tuple(SiteState))]
    yield "site_state", "gauge", "1 for the state of each site.", states
    rounds: Samples = [(who, float(site.round)) for who, site in named]
    yield "site_round", "gauge", "The last round that a site answered.", rounds
    up: Samples = [(who, float(site.up)) for who, site in named]
    yield "site_up_bytes_total", "counter", "Bytes of values from a site.", up
    down: Samples = [(who, float(site.down)) for who, site in named]
    yield "site_down_bytes_total", "counter", "Bytes of values to a site.", down


def _state(who: Labels, now: str, states: tuple[str, ...]) -> Samples:
    return [({**who, "state": state}, float(state == now)) for state in states]


def _family(name: str, kind: str, text: str, samples: Samples) -> str:
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return ""
    lines = [f"# HELP fedplan_{name} {text}", f"# TYPE fedplan_{name} {kind}"]
    lines += [f"fedplan_{name}{_labels(labels)} {value!r}" for labels, value in known]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    said = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{said}}}" if said else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _handler(status: Status) -> type[BaseHTTPRequestHandler]:
    class Answers(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, TEXT, exposition(status.now, healthy=status.healthy))
            elif self.path == "/health":
                told, healthy = status.now, status.healthy
                said = {"healthy": healthy, "state": told.state, "round": told.round}
                self._answer(200 if healthy else 503, "application/json", json.dumps(said) + "\n")
            else:
                self._answer(404, "text/plain", "there are /metrics and /health\n")

        def _answer(self, code: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Keep what is asked out of the terminal of the run."""

    return Answers
