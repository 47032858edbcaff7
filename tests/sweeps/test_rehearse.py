# SPDX-License-Identifier: Apache-2.0
"""An estimate has the cost of the whole run: bytes and epsilon exactly, time by its formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run
from sweeps import small_study

from fedplan.errors import FedplanError
from fedplan.federation.record import TurnRecord
from fedplan.reports.privacy_statements import read_privacy_statement
from fedplan.studies.run import open_run
from fedplan.sweeps.cost_estimate import estimate
from fedplan.sweeps.cost_table import CostForecast, MeasuredCost, MethodCost, parse_line_speed
from fedplan.sweeps.sweeping import Sweep


def test_bytes_are_those_of_the_whole_run_and_the_score_that_of_its_round(swept: Sweep) -> None:
    """Two rounds of two are the run itself; of one, bytes are still those of both."""
    file = swept.folder.parent / "study.toml"
    found = estimate(file, "fedavg,fedper", rounds=2)
    assert estimate(file, ["fedper"], rounds=1).costs[0].forecast == found.costs[1].forecast
    for price in found.costs:
        whole = open_run(swept.folder / f"method.name={price.method},seed=0")
        turns = [r for r in whole.records if isinstance(r, TurnRecord) and r.client == "client-00"]
        assert price.forecast is not None and price.measured is not None
        assert price.forecast.upload_bytes == sum(turn.upload_bytes for turn in turns)
        assert price.forecast.download_bytes == sum(turn.download_bytes for turn in turns)
        assert price.measured.score == whole.metrics[-1][found.score]
        assert price.measured.max_steps == max(
            t.steps for t in whole.records if isinstance(t, TurnRecord)
        )
        assert price.forecast.memory_bytes and price.measured.step_seconds > 0


def test_epsilon_is_that_of_all_rounds_and_a_method_that_fails_is_said(tmp_path: Path) -> None:
    file = small_study(tmp_path)
    private = '[privacy]\nunit = "client"\nepsilon = 8.0\n'
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 30") + private)
    code, out = run(
        "estimate", str(file), "--methods", "promptfl,fedavg", "--rounds", "1", "--json"
    )
    told = json.loads(out)
    failed, price = told["methods"]
    assert code == 1 and "prompt" in failed["error"] and failed["forecast"] is None
    promised = read_privacy_statement(file)
    assert price["forecast"]["epsilon"] == promised.guarantee.forecast_epsilon(30) <= 8.0
    assert price["measured"]["rounds_run"] == 1 and price["forecast"]["rounds"] == 30
    assert any("promptfl failed" in note for note in told["notes"])
    assert any(
        "fedavg: the study's privacy hides a client's number of training steps" in note
        for note in told["notes"]
    )
    assert {each.name for each in tmp_path.iterdir()} == {"study.toml", "digits.npz"}


def test_time_is_computing_and_travel(tmp_path: Path) -> None:
    price = MethodCost(
        "m",
        CostForecast("share()", 10, 3_000_000, 2_000_000, None, None, 1),
        MeasuredCost(2, 0.5, 0.2, 6, steps_reported=True),
    )
    assert price.compute_seconds == pytest.approx(10 * 6 * 0.2)
    assert price.transfer_seconds(parse_line_speed("8Mbit")) == pytest.approx(5.0)
    assert price.total_seconds(parse_line_speed("8Mbit")) == pytest.approx(17.0)


@pytest.mark.parametrize("line", ["fast", "100", "0Mbit", "100MB", "-1Mbit"])
def test_a_line_that_is_none_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(FedplanError, match="--line is"):
        estimate(small_study(tmp_path), line=line)
