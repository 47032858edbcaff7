# SPDX-License-Identifier: Apache-2.0
"""Trackers, against the real libraries: each has every number of metrics.jsonl, once a round."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedplan.federation.ledger.callbacks import (
    PER_CLIENT_PREFIXES,
    TRACKERS,
    Tracker,
    WeightsAndBiases,
    make_tracker,
    tracked_metrics,
)
from fedplan.federation.ledger.events import CommittedRound
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.ledger.records import RoundRecord
from fedplan.federation.ledger.stream import EventStream
from fedplan.naming import UnknownName
from fedplan.runners.simulation import Simulation
from fedplan.studies.schema import read_study

Series = dict[str, dict[int, float]]
"""Of each number its values by round."""


def of_tensorboard(run: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "trackers/tensorboard"))
    found.Reload()
    names = found.Tags()["scalars"]
    return {n.replace("/", ".", 1): {e.step: e.value for e in found.Scalars(n)} for n in names}


def of_mlflow(run: Path) -> Series:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run / 'trackers/mlflow/mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert found.info.status == "FINISHED"
    held = {n: client.get_metric_history(found.info.run_id, n) for n in found.data.metrics}
    assert all(len({e.step for e in each}) == len(each) for each in held.values()), "told twice"
    return {n: {e.step: e.value for e in each} for n, each in held.items()}


def of_wandb(run: Path) -> Series:
    from wandb.proto import wandb_internal_pb2 as protocol

    series: Series = {}
    for file in sorted(run.glob("trackers/wandb/wandb/offline-run-*/*.wandb")):
        found = list[Any]()
        until = time.monotonic() + 60  # W&B's own process closes the file after `finish` returns
        while not (found and found[-1].HasField("exit")) and time.monotonic() < until:
            found = [protocol.Record.FromString(each) for each in records(file.read_bytes())]
            time.sleep(0.02)
        for record in found:
            items = record.history.item
            row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
            step = record.history.step.num
            for name, value in row.items():
                if not name.startswith("_"):
                    series.setdefault(name, {})[step] = value
    return series


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file of W&B, which is a log of LevelDB behind a head of seven bytes."""
    block, head = 32_768, 7
    at, whole = head, b""
    while at + head <= len(data):
        if block - at % block < head:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + head : at + head + length]
        at += head + length
        if kind in (1, 4):  # whole, or its last piece
            yield whole
            whole = b""


READ: dict[str, Callable[[Path], Series]] = {
    "tensorboard": of_tensorboard,
    "mlflow": of_mlflow,
    "wandb": of_wandb,
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_every_number_of_every_round_once(here: Path, name: str) -> None:
    """Of a run that stops after two rounds, and goes on."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'fedplan[{name}]'")
    study = read_study(here / "study.toml", [f'evaluate.trackers=["{name}"]', "train.rounds=2"])
    run = Simulation(study, here / "out").run()
    run.resume(3)
    found = READ[name](here / "out")
    wanted = {
        key: {int(row["round"]): row[key] for row in run.metrics if key in row}
        for key in {k for row in run.metrics for k in row if not k.startswith(PER_CLIENT_PREFIXES)}
    }
    assert (
        found.keys() == wanted.keys()
        and {"loss", "global.accuracy", "upload_bytes"} <= wanted.keys()
    )
    for key, rounds in wanted.items():
        assert found[key] == pytest.approx(rounds, rel=1e-6), key
    assert len((here / "out/metrics.jsonl").read_text().splitlines()) == 3


def test_a_round_is_written_when_it_is_told_and_not_with_the_next() -> None:
    """W&B holds a step back unless it is told that nothing more comes of it."""
    if find_spec("wandb") is None:
        pytest.skip("wandb is not installed: pip install 'fedplan[wandb]'")
    mine, told = WeightsAndBiases(), list[tuple[Any, Any]]()
    log = lambda row, step, commit=None: told.append((step, commit))  # noqa: E731
    mine._run = SimpleNamespace(log=log)  # pyright: ignore[reportPrivateUsage]
    whole = RoundRecord(1, "", (), {}, {}, {}, 0, 0)
    mine(CommittedRound(1, whole, (), {}, Metrics([{"round": 1, "loss": 0.5}])))
    assert told == [(1, True)]


def test_a_tracker_of_ones_own_is_made_for_each_run_and_closed() -> None:
    with pytest.raises(UnknownName, match="did you mean wandb"):
        make_tracker("wandbb")


class Remembered(Tracker):
    """A tracker that keeps what it was told."""

    made: list[Remembered] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.rounds, self.closed = list[int](), 0
        self.made.append(self)

    def __call__(self, closed: CommittedRound) -> str | None:
        assert closed.folder is not None and closed.run and closed.experiment == "tiny/0"
        assert closed.primary == "accuracy" and closed.higher_is_better
        self.rounds.append(closed.round)
        return "enough" if closed.round == 2 else None

    def close(self) -> None:
        self.closed += 1


def test_it_is_closed_however_the_run_ends(here: Path) -> None:
    mine = Remembered()
    run = Simulation(read_study(here / "study.toml"), here / "out", callbacks=[mine])
    rounds = run.rounds()
    next(rounds)
    rounds.close()
    assert (mine.rounds, mine.closed) == ([1], 1), "nobody asked for more"
    run.run()
    assert (mine.rounds, mine.closed) == ([1, 1, 2], 2), "it stopped the run itself"


def test_single_clients_are_told_to_no_tracker() -> None:
    row = {"round": 1, "loss": 0.5, "clients.a.accuracy": 1.0, "sites.by.a.personal.loss": 2.0}
    whole = RoundRecord(1, "", (), {}, {}, {}, 0, 0)
    assert tracked_metrics(CommittedRound(1, whole, (), {}, Metrics([row]))) == {
        "round": 1.0,
        "loss": 0.5,
    }


class Unreachable(Tracker):
    """A tracker whose server is gone when the run ends."""

    def __call__(self, closed: CommittedRound) -> str | None:
        return None

    def close(self) -> None:
        raise ConnectionError("the tracking server does not answer")


def test_a_run_is_done_though_a_tracker_cannot_be_closed(here: Path) -> None:
    study, folder = read_study(here / "study.toml"), here / "out"
    run = Simulation(study, folder, callbacks=[Unreachable()], events=EventStream(folder))
    with pytest.raises(ConnectionError):
        run.run()
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
