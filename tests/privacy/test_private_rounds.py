# SPDX-License-Identifier: Apache-2.0
"""A run that promises privacy: what it charges, what it hides, and where it stops."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import STUDY, run

from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.language.resolution import permitted_roles
from fedplan.privacy.accounting.accountant import DPSGDSteps, epsilon
from fedplan.privacy.accounting.budget import Budget
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.runners.simulation import Simulation
from fedplan.storage.append_log import read_json_lines
from fedplan.studies.experiment import build_experiment, privacy_guarantee
from fedplan.studies.schema import read_study

CLIENT = '[privacy]\nunit = "client"\nepsilon = 50.0\n'
EXAMPLE = '[privacy]\nunit = "example"\nepsilon = 8.0\nexamples_per_site = 20\n'
VOTE = "vote_noise_multiplier = 2.0\nvote_every = 2\n"
SAFL = 'name = "safl"\nsettings = { k = 1 }'
RUNS = {
    "client": (CLIENT, ""),
    "example": (EXAMPLE, ""),
    "client and vote": (CLIENT + VOTE, SAFL),
    "example and vote": (EXAMPLE + VOTE, SAFL),
    "client, a moving clip, weights": (CLIENT + "clipping_quantile = 0.5\nmax_weight = 300\n", ""),
}


def private_study(privacy: str, *, plan: str = "", rounds: int = 3) -> str:
    study = STUDY.replace("dropout_fraction = 0.1", "fraction = 0.7" if "client" in privacy else "")
    study = study.replace("rounds = 3", f"rounds = {rounds}\nsteps = 2").replace(
        "attention_examples = 4", ""
    )
    if plan:
        study = re.sub('plan = ".*"', plan, study)
    return study + privacy


def played(here: Path, study: str, name: str) -> Path:
    Path(f"{name}.toml").write_text(study)
    code, told = run("run", f"{name}.toml", "--output", name)
    assert code == 0, told
    rounds = [line.split() for line in told.splitlines() if " epsilon " in line]
    assert all(words[1] == "-" for words in rounds if words[0].isdigit()), "a loss is told"
    return here / name


def spent(folder: Path, unit: str) -> float:
    study = read_study(folder.with_suffix(".toml"))
    files = sorted(folder.rglob(CHARGES_FILE))
    assert study.privacy and files
    return max(
        Budget(file, delta=study.privacy.delta, unit=unit).epsilon_spent()  # type: ignore[arg-type]
        for file in files
    )


@pytest.mark.parametrize("name", RUNS)
def test_the_forecast_is_the_sum_of_the_charges(here: Path, name: str) -> None:
    privacy, plan = RUNS[name]
    unit = name.split()[0].strip(",")
    out = played(here, private_study(privacy, plan=plan), unit)
    guarantee = privacy_guarantee(read_study(here / f"{unit}.toml"))
    assert guarantee is not None
    assert abs(guarantee.forecast_epsilon(3) - spent(out, unit)) < 1e-9
    assert spent(out, unit) <= guarantee.epsilon
    assert run("verify", str(out))[0] == 0
    said = json.loads((out / "privacy.json").read_text())
    assert abs(said["epsilon_forecast"] - said["epsilon_spent"]) < 1e-9 and len(said) == 20
    votes = [charge for charge in said["charges"] if charge["request"].endswith("vote")]
    assert len(said["charges"]) == 3 + len(votes) and len(votes) == (2 if "vote" in name else 0)
    code, told = run("privacy", f"{unit}.toml")
    assert code == 0 and "Not covered" in told
    assert f"{unit.capitalize()}-level differential privacy" in told


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE])
def test_a_vote_holds_until_the_next_and_all_choose_by_it(here: Path, privacy: str) -> None:
    out = played(here, private_study(privacy + VOTE, plan=SAFL), "run")
    lines = [line for line in read_json_lines(out / "ledger.jsonl") if "changed" not in line]
    scores = {
        number: {str(x["scores"]) for x in lines if x["round"] == number} for number in (1, 2, 3)
    }
    assert all(len(found) <= 1 for found in scores.values())
    assert scores[1] == scores[2] or not scores[1] or not scores[2]
    assert scores[3] != scores[2]


def test_a_run_of_another_promise_is_not_stated(here: Path) -> None:
    out = played(here, private_study(CLIENT), "run")
    study = (out / "study.json").read_text()
    assert run("privacy", str(out))[0] == 0
    (out / "study.json").write_text(study.replace('"fraction": 0.7', '"fraction": 0.6'))
    code, told = run("privacy", str(out))
    assert code == 2 and "the folder of another study" in " ".join(told.split()), told


def test_example_level_goes_on_over_ten_rounds_other_parts_and_restarts(here: Path) -> None:
    rotating = 'plan = "chain(freeze(), cycle(share(blocks(0)), share(blocks(1))), share(head))"'
    study = private_study(EXAMPLE, plan=rotating, rounds=10)
    Path("run.toml").write_text(study)
    guarantee = privacy_guarantee(read_study(here / "run.toml"))
    assert guarantee is not None
    for _ in range(3):
        simulation = Simulation(read_study(here / "run.toml"), here / "run")
        until = simulation.federation.global_state.round + 4
        while simulation.federation.global_state.round < min(until, 10):
            simulation.federation.commit(simulation.federation.run_round())
        del simulation
    steps = DPSGDSteps(
        guarantee.noise_multiplier, guarantee.sampling_rate or 1.0, 10 * guarantee.steps
    )
    assert abs(spent(here / "run", "example") - epsilon([steps], guarantee.delta)) < 1e-9


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE])
def test_neither_rows_nor_losses_nor_drift_are_told(here: Path, privacy: str) -> None:
    out = played(here, private_study(privacy), "run")
    for line in read_json_lines(out / "ledger.jsonl"):
        if "changed" in line:
            assert line["drift"] == {} if "client" in privacy else True
        else:
            assert line["weight"] == 1 and line["loss"] is None


def test_every_shared_value_moves_whoever_was_drawn(here: Path) -> None:
    out = played(here, private_study(CLIENT), "run")
    study = read_study(here / "run.toml")
    agreement = build_experiment(study).agreement
    for line in read_json_lines(out / "ledger.jsonl"):
        if "changed" in line:
            roles = permitted_roles(agreement.method.plan, agreement.params, Turn(line["round"]))
            assert set(line["changed"]) == {
                p.key for p in agreement.params if roles[p] is Role.SHARE
            }


def test_a_run_stops_before_its_budget_would_be_passed(here: Path) -> None:
    study = private_study(CLIENT.replace("50.0", "6.0") + "noise_multiplier = 2.0\n", rounds=40)
    Path("run.toml").write_text(study)
    code, told = run("run", "run.toml", "--output", "run")
    assert code == 2 and "was promised: the run ends here" in " ".join(told.split())
    assert spent(here / "run", "client") <= 6.0
    rounds = [line for line in read_json_lines(here / "run/ledger.jsonl") if "changed" in line]
    assert 1 <= len(rounds) < 40 and run("verify", "run")[0] == 0


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE])
def test_a_run_that_is_played_twice_is_hidden_by_another_noise(here: Path, privacy: str) -> None:
    runs = [played(here, private_study(privacy), name) for name in "ab"]
    marks = [
        {
            mark
            for line in read_json_lines(out / "ledger.jsonl")
            for mark in line.get("changed", {}).values()
        }
        for out in runs
    ]
    assert marks[0] and not marks[0] & marks[1]


@pytest.mark.parametrize(
    ("plan", "privacy", "words"),
    [
        (SAFL, CLIENT, "the privacy budget does not cover"),
        (SAFL, EXAMPLE, "let clients vote (privacy.vote_noise_multiplier)"),
        ("", CLIENT + VOTE, "nothing to vote on"),
        (
            'name = "safl"\nsettings = { k = 1, probe = "random" }',
            EXAMPLE + VOTE,
            "nothing to vote on",
        ),
        ('name = "scaffold"', CLIENT, "are not clipped"),
        ('name = "fedprox"', EXAMPLE, "DP-SGD covers only the built-in one"),
        ("", CLIENT + "[clients]\nlate_fraction = 0.1\n", "draws its own participants"),
        ("", CLIENT + "[clients]\ndropout_fraction = 0.1\n", "draws its own participants"),
        (
            "",
            EXAMPLE.replace("examples_per_site = 20", ""),
            "needs train.steps and privacy.examples_per_site",
        ),
        (
            "",
            EXAMPLE.replace("examples_per_site = 20", "examples_per_site = 4"),
            "below train.batch_size",
        ),
        ("", EXAMPLE + "clipping_quantile = 0.5", 'need unit = "client"'),
        ("", EXAMPLE + "max_weight = 20", 'need unit = "client"'),
        ("", CLIENT.replace("50.0", "-1.0"), "privacy.epsilon"),
        ("", CLIENT + "delta = 2.0", "privacy.delta"),
        ("", CLIENT + "sampler = 'fixed'", "privacy.sampler"),
    ],
)
def test_what_does_not_hold_together_is_refused(
    here: Path, plan: str, privacy: str, words: str
) -> None:
    study = private_study(privacy, plan=plan)
    if "[clients]\nlate" in privacy or "[clients]\ndropout" in privacy:
        study = study.replace("[clients]\nfraction = 0.7\n", "", 1)
    Path("run.toml").write_text(study)
    code, told = run("run", "run.toml", "--output", "run")
    assert code == 2 and words in " ".join(told.split()), told


def test_the_ledger_and_the_world_hold_no_count_of_rows(here: Path) -> None:
    out = played(here, private_study(CLIENT), "run")
    counts = {
        len(rows) for rows in build_experiment(read_study(here / "run.toml")).data.train.values()
    }
    for line in read_json_lines(out / "ledger.jsonl"):
        assert not counts & {v for v in line.values() if type(v) is int} - {line["round"]}


@pytest.mark.parametrize("unit", ["client", "example"])
def test_explain_forecasts_what_a_run_then_charges(here: Path, unit: str) -> None:
    privacy, plan = RUNS[f"{unit} and vote"]
    out = played(here, private_study(privacy, plan=plan), unit)
    code, told = run("explain", f"{unit}.toml", "--json")
    assert code == 0, told
    assert abs(json.loads(told)["privacy"]["epsilon_forecast"] - spent(out, unit)) < 1e-9
    code, told = run("explain", f"{unit}.toml")
    assert code == 0 and "chain(freeze(), share(head), best(1))" in told
    assert f"{unit.capitalize()}-level differential privacy" in told
