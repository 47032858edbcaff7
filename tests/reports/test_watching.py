# SPDX-License-Identifier: Apache-2.0
"""Who watches from outside never delays a run, and hears no row, no value and no hidden client."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from canaries import casts, hits, plant
from commands import STUDY
from heard import Heard
from hypothesis import given
from hypothesis import strategies as st

from fedplan.errors import FedplanError
from fedplan.federation.ledger.events import ClientChanged
from fedplan.federation.ledger.status import RunState, RunStatus, SiteState, SiteStatus
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.participation import Timeouts
from fedplan.reports.monitoring import (
    certificate_expiries,
    prometheus_text,
    report_expiries,
    serve_metrics,
    start_monitoring,
)
from fedplan.run import RunOptions, simulate
from fedplan.runners.flower.keys import make_keys
from fedplan.runners.simulation import Simulation
from fedplan.studies.schema import read_study
from fedplan.studies.sections import TrainConfig

# What leaves ---------------------------------------------------------------------------------


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.roof = torch.nn.Linear(32, 32), torch.nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.roof(torch.relu(self.body(x)))


def test_nothing_of_rows_or_values_is_in_what_is_told(tmp_path: Path) -> None:
    """Not in the log, the status, the metrics or what a subscriber hears."""
    planted = plant({f"rows{n}": torch.ones(16, 32) for n in range(2)}, seed=3)
    rows = {
        f"client-{n}": torch.utils.data.TensorDataset(planted[f"rows{n}"], torch.arange(16) % 2)
        for n in range(2)
    }

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])

    from fedplan.language.plan import share

    folder = tmp_path / "run"
    options = RunOptions(folder=folder, start=False)
    train = TrainConfig(rounds=2)
    made = simulate(share(), Tower(), rows, loss, train=train, options=options).simulation
    assert made is not None
    heard = Heard()
    made.events = made.federation.executor.events = made.federation.events = EventStream(
        folder, [heard]
    )
    made.run()
    values = {k: v for k, v in made.federation.global_values().items()}
    patterns = casts({**planted, **values})
    places = [folder / "log.jsonl", folder / "status.json"]
    page = prometheus_text(made.events.status, healthy=True).encode()
    assert heard and not hits(patterns, [*places, page, repr(heard).encode()])
    losses = {f"{row['loss']:.6f}"[:5] for row in made.metrics}
    assert not any(loss in each.text for each in heard for loss in losses)


CLIENTS = '[privacy]\nunit = "client"\nepsilon = 900.0\ndelta = 1e-5\nclipping_norm = 1.0\nnoise_multiplier = 1.0\n'


def test_where_clients_are_hidden_nobody_outside_hears_of_one(here: Path) -> None:
    study = STUDY[: STUDY.index("[clients]")] + "[evaluate]\npersonal = false\n" + CLIENTS
    Path("study.toml").write_text(study)
    heard = Heard()
    events = EventStream(Path("out"), [heard])
    Simulation(read_study(Path("study.toml")), Path("out"), events=events).run()
    assert [each.event for each in heard][-1] == "run done"
    assert not any(each.site or "client-0" in each.text for each in heard)
    page = prometheus_text(events.status, healthy=True)
    assert "client-0" not in page and "fedplan_epsilon_spent" in page
    assert events.status.epsilon_spent and events.status.epsilon == 900.0


def test_most_of_a_budget_is_told_once_and_all_of_it_once(here: Path) -> None:
    calibrated = CLIENTS.replace("noise_multiplier = 1.0\n", "").replace("900.0", "8.0")
    study = STUDY[: STUDY.index("[clients]")] + "[evaluate]\npersonal = false\n" + calibrated
    Path("study.toml").write_text(study.replace("rounds = 3", "rounds = 6\nsteps = 1"))
    heard = Heard()
    events = EventStream(Path("out"), [heard])
    Simulation(read_study(Path("study.toml")), Path("out"), events=events).run()
    said = [each.text for each in heard if each.event == "budget"]
    assert said == ["80% of epsilon is spent", "100% of epsilon is spent"]


# Metrics and health --------------------------------------------------------------------------

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\[\\"n])*)"')
ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """A page of Prometheus's text format, read by its grammar; what does not fit it fails."""
    found, kinds, last = dict[Any, float](), dict[str, str](), ""
    for line in page.removesuffix("\n").split("\n"):
        if line.startswith("# "):
            _, what, name, text = line.split(" ", 3)
            assert what in ("HELP", "TYPE") and text
            if what == "TYPE":
                assert name not in kinds and text in ("gauge", "counter")
                kinds[name], last = text, name
            continue
        read = SAMPLE.fullmatch(line)
        assert read is not None, line
        assert read[1] == last, "the samples of a name stand together, after its type"
        labels = tuple(
            (name, re.sub(r"\\.", lambda m: ESCAPED[m[0]], value))
            for name, value in LABEL.findall(read[2] or "")
        )
        assert (read[1], labels) not in found
        found[read[1], labels] = float(read[3])
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    return found


@given(
    st.dictionaries(st.text(max_size=12), st.sampled_from(tuple(SiteState)), max_size=4), st.text()
)
def test_what_is_shown_is_read_by_the_grammar_of_prometheus(
    states: dict[str, str], study: str
) -> None:
    sites = {name: SiteStatus(state, upload_bytes=3) for name, state in states.items()}
    told = RunStatus(study=study, state=RunState.RUNNING, round=3, rounds=9, loss=0.25, sites=sites)
    page = prometheus_text(replace(told, scores={"global.accuracy": 0.5}), healthy=True)
    found = samples(page)
    assert found["fedplan_round", ()] == 3 and found["fedplan_loss", ()] == 0.25
    assert found["fedplan_run_info", (("study", study), ("run", ""))] == 1
    for name, state in states.items():
        shown = {
            k[1][1][1]: v
            for k, v in found.items()
            if k[0] == "fedplan_site_state" and k[1][0] == ("site", name)
        }
        assert shown == {each: float(each == state) for each in tuple(SiteState)}
        assert found["fedplan_site_upload_bytes_total", (("site", name),)] == 3
    try:
        from prometheus_client.parser import text_string_to_metric_families  # type: ignore
    except ImportError:
        return
    read = {s.name for family in text_string_to_metric_families(page) for s in family.samples}
    assert read == {name for name, _ in found}


def got(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_and_health_are_answered_while_a_run_goes_on(here: Path) -> None:
    seen = list[tuple[tuple[int, str], tuple[int, str]]]()
    with (
        start_monitoring(Path("out"), metrics_port=0) as events,
        serve_metrics(events, 0) as port,
    ):
        simulation = Simulation(read_study(Path("study.toml")), Path("out"), events=events)
        for _ in simulation.rounds():
            seen.append((got(port, "/health"), got(port, "/metrics")))
        assert got(port, "/health")[0] == 503  # nobody drives it any more
        assert got(port, "/etc/passwd")[0] == 404
        with pytest.raises(FedplanError, match="--metrics-port"), serve_metrics(events, port):
            pass
    assert [health[0] for health, _ in seen] == [200, 200, 200]
    rounds = [samples(page)["fedplan_round", ()] for _, (_, page) in seen]
    assert rounds == [1, 2, 3]
    assert samples(seen[0][1][1])["fedplan_healthy", ()] == 1


def test_a_driver_that_gets_no_further_is_not_well(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, clock = EventStream(Path("out")), [time.monotonic()]
    rounds = Simulation(read_study(Path("study.toml")), Path("out"), events=events).rounds()
    next(rounds)
    assert events.healthy
    patience = Timeouts()
    monkeypatch.setattr("fedplan.federation.ledger.stream.time.monotonic", lambda: clock[0])
    clock[0] += patience.updates + patience.sites + 60
    assert not events.healthy
    events.emit(ClientChanged("client-00", SiteState.AWAY))
    assert not events.healthy
    next(rounds)
    assert events.healthy


# Certificates --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "told"), [(20, ["server.crt"]), (40, []), (2, ["ca.crt", "server.crt"])]
)
def test_a_certificate_that_ends_within_thirty_days_is_told(
    tmp_path: Path, days: int, told: list[str]
) -> None:
    make_keys(tmp_path / "fed", ["localhost"], [], days)
    assert certificate_expiries(tmp_path / "fed").keys() == {"ca.crt", "server.crt"}
    until = certificate_expiries(tmp_path / "fed")["server.crt"]
    assert abs(until - datetime.now(UTC) - timedelta(days=days)) < timedelta(days=1)
    heard = Heard()
    report_expiries(EventStream(None, [heard]), tmp_path / "fed")
    assert [each.text.split()[0] for each in heard] == told
    assert {each.event for each in heard} <= {"certificate"}
    assert certificate_expiries(tmp_path) == {}
    (tmp_path / "fed/ca.crt").write_text("nothing")
    report_expiries(EventStream(None, [heard]), tmp_path / "fed")
    assert "cannot read" in heard[-1].text


def test_a_site_in_trouble_is_told_once(tmp_path: Path) -> None:
    heard = Heard()
    events = EventStream(tmp_path, [heard])
    for _ in range(3):
        events.emit(ClientChanged("north", SiteState.FAILED, "failed: disk"))
    events.emit(ClientChanged("north", SiteState.AWAY))
    assert [(each.event, each.site) for each in heard] == [
        ("site failed", "north"),
        ("site away", "north"),
    ]
    assert events.status.sites["north"].error == "away"
