# SPDX-License-Identifier: Apache-2.0
"""A statement is true of all accounts of a run, and says what epsilon does not cover."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import STUDY, run

from fedplan.errors import PrivacyError
from fedplan.federation.ledger.status import read_status
from fedplan.privacy.accounting.accountant import DPSGDSteps
from fedplan.privacy.accounting.budget import Budget
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.privacy.statement import PRIVACY_FILE, Statement, expenses_from_json
from fedplan.storage.append_log import head_file
from fedplan.studies.model_builder import initial_expenses
from fedplan.studies.run import EARLIER, TASK
from fedplan.studies.schema import read_study
from fedplan.studies.sections import ModelSection
from fedplan.sweeps.sweeping import sweep

GUARANTEE = Guarantee(
    "example", 8.0, 1e-5, 1.0, noise_multiplier=1.0, sampling_rate=0.1, steps=2, batch_size=4
)
PROMISED = DPSGDSteps(1.0, 0.1, 2)
PLAIN = (
    STUDY.replace("dropout_fraction = 0.1", "")
    .replace("attention_examples = 4", "")
    .replace("rounds = 3", "rounds = 2\nsteps = 2")
    .replace("batch_size = 8", "batch_size = 4")
)
EXAMPLE = (
    '[privacy]\nunit = "example"\nepsilon = 90.0\nnoise_multiplier = 1.0\nexamples_per_site = 10\n'
)
CLIENT = '[privacy]\nunit = "client"\nepsilon = 90.0\nnoise_multiplier = 1.0\n'


def played(study: str, name: str = "run") -> Path:
    """Run a study in a folder of a name; return the folder."""
    Path(f"{name}.toml").write_text(study)
    code, told = run("run", f"{name}.toml", "--output", name)
    assert code == 0, told
    return Path(name).absolute()


def account(folder: Path, *events: DPSGDSteps) -> None:
    folder.mkdir(parents=True)
    budget = Budget(folder / CHARGES_FILE, delta=1e-5, unit="example")
    for number, event in enumerate(events, 1):
        budget.charge(event, f"round {number}")


@pytest.mark.parametrize("noise,steps,rate", [(2.0, 2, 0.1), (1.0, 1, 0.1), (1.0, 2, 0.05)])
def test_a_cheaper_charge_in_any_account_is_found(
    noise: float, steps: int, rate: float, tmp_path: Path
) -> None:
    account(tmp_path / "a", PROMISED, PROMISED)
    account(tmp_path / "b", PROMISED)
    assert len(Statement.of(GUARANTEE, 2, tmp_path).charges) == 2
    account(tmp_path / "c", DPSGDSteps(noise, rate, steps))
    with pytest.raises(PrivacyError, match=r"c/charges\.jsonl: round 1 was charged as"):
        Statement.of(GUARANTEE, 2, tmp_path)


def test_verify_names_the_account_with_another_charge_and_claims_nothing(here: Path) -> None:
    out = played(PLAIN + EXAMPLE)
    code, told = run("verify", "run")
    assert code == 0 and "privacy charges are those that the study promises" in " ".join(
        told.split()
    )
    file = sorted(out.rglob(CHARGES_FILE))[-1]
    unpaid = Budget(file, delta=1e-5, unit="example").charges
    file.unlink()
    head_file(file).unlink()
    forged = Budget(file, delta=1e-5, unit="example")
    for charge in unpaid:  # a chain of its own, of steps with more noise than there was
        forged.charge(DPSGDSteps(9.0, 0.4, 2), charge.name, digest=charge.digest)
    code, told = run("verify", "run", "--json")
    found = json.loads(told)
    assert code == 1 and any(
        f"{file.parent.name}/{CHARGES_FILE}: " in fault and "was charged as" in fault
        for fault in found["faults"]
    )
    assert (
        found["summary"].startswith("The run failed the checks") and "bytes" not in found["summary"]
    )


def exported(folder: Path, name: str, *more: str) -> dict[str, Any]:
    """Export the model of a run; return the privacy file of the export."""
    code, told = run("export", str(folder), name, *(more or ("--global",)))
    assert code == 0, told
    return json.loads((Path(name) / PRIVACY_FILE).read_text())


def starting_from(model: str) -> str:
    text = re.sub(r'type = "vit"\nconfig = .*', f'path = "{model}"', PLAIN)
    return text.replace('name = "tiny"', 'name = "later"')


def statement_of(place: str) -> dict[str, Any]:
    code, told = run("privacy", place, "--json")
    assert code == 0, told
    return json.loads(told)


def test_a_run_adds_what_its_initial_model_has_cost(here: Path) -> None:
    first = exported(played(PLAIN + EXAMPLE, "first"), "one")
    (cost,) = first["history"]
    assert cost["unit"] == "example" and cost["epsilon"] == first["epsilon_spent"] > 0
    assert "client-0" not in json.dumps(first) and "charges" not in first
    # Before the run, and after it, though the model is gone by then.
    study = starting_from("one") + EXAMPLE
    Path("second.toml").write_text(study)
    before = statement_of("second.toml")
    assert before["earlier"] == [cost] and before["total"]["epsilon"] == 90 + cost["epsilon"]
    assert "In addition, an earlier run, study" in run("explain", "second.toml")[1]
    folder = played(study, "second")
    (here / "one" / PRIVACY_FILE).unlink()
    said = statement_of("second")
    own = said["epsilon_spent"]
    assert said["earlier"] == [cost] and own > 0
    assert said["total"] == {"epsilon": own + cost["epsilon"], "delta": 2e-5}
    assert run("verify", "second")[0] == 0
    # The third generation carries both, and a run of another unit does not add them.
    second = exported(folder, "two")
    assert [each["epsilon"] for each in second["history"]] == [cost["epsilon"], own]
    Path("third.toml").write_text(starting_from("two") + CLIENT)
    third = statement_of("third.toml")
    assert third["earlier"] == second["history"] and third["total"] is None


def test_a_model_without_a_guarantee_takes_the_total_from_those_after_it(here: Path) -> None:
    played(PLAIN, "plain")
    played(PLAIN + CLIENT, "private")
    for name, more, words in (
        ("plain", (), "no differential privacy"),
        ("private", ("--client", "client-01"), "personal model: no differential privacy"),
    ):
        history = exported(Path(name), f"model-{name}", *more)["history"]
        assert [each["unit"] for each in history] == [""]
        Path("next.toml").write_text(starting_from(f"model-{name}") + CLIENT)
        code, told = run("privacy", "next.toml")
        assert code == 0 and words in " ".join(told.split()) and "In total" not in told


@pytest.mark.parametrize(
    "history",
    [
        *(None, 3, "x", [3], [{}], [{"source": "s", "unit": "other"}]),
        [{"source": "s", "unit": "client", "epsilon": -1.0}],
        [{"source": "s", "unit": "client", "epsilon": math.nan}],
        [{"source": "s\x1b[2J", "unit": "client", "epsilon": 1.0}],
        [{"source": "s", "unit": "client", "epsilon": "1"}],
        [{"source": "s", "unit": ""}] * 1001,
    ],
)
def test_a_history_that_was_changed_is_refused(history: object) -> None:
    with pytest.raises(PrivacyError, match="does not say what the model has cost"):
        expenses_from_json(history, "privacy.json")


def test_a_model_loaded_in_python_is_known_by_its_folder(here: Path) -> None:
    from transformers import AutoModelForImageClassification

    cost = exported(played(PLAIN + CLIENT, "first"), "one")["history"]
    Path("one.toml").write_text(PLAIN + CLIENT)
    study = read_study(Path("one.toml"))
    python = study.model_copy(update={"model": ModelSection(from_python="vit")})
    model = AutoModelForImageClassification.from_pretrained("one")
    assert [asdict(each) for each in initial_expenses(python, model)] == cost
    assert initial_expenses(python, torch.nn.Linear(1, 1)) == ()


def test_whoever_takes_a_run_of_a_sweep_pays_for_all(here: Path) -> None:
    Path("study.toml").write_text(PLAIN.replace("rounds = 2", "rounds = 1") + CLIENT)
    sweep("study.toml", ["train.lr=0.1,0.01"], folder="sweep", seeds=2)
    runs = sorted(each for each in Path("sweep").iterdir() if each.is_dir())
    one = json.loads((runs[0] / PRIVACY_FILE).read_text())["epsilon_spent"]
    said = statement_of(str(runs[0]))
    assert len(runs) == 4 and one == said["epsilon_spent"]
    assert said["total"]["epsilon"] == pytest.approx(4 * one)
    assert said["total"]["delta"] == pytest.approx(4e-5)
    history = exported(runs[0], "winner")["history"]
    assert sum(each["epsilon"] for each in history) == pytest.approx(4 * one)
    assert "3 other runs of the sweep" in Path("winner/README.md").read_text()
    for number, models in enumerate(("ab", "ab", "bc", "")):  # models that the runs start from
        task = json.loads((runs[number] / TASK).read_text())
        task[EARLIER] = [{"source": x, "unit": "client", "epsilon": 1.0} for x in models]
        (runs[number] / TASK).write_text(json.dumps(task))
    said = statement_of(str(runs[0]))
    assert [each["source"] for each in said["earlier"]] == [
        "a",
        "b",
        "c",
        "3 other runs of the sweep",
    ]
    assert said["total"]["epsilon"] == pytest.approx(4 * one + 3)
    code, told = run("compare", "sweep")
    assert (
        code == 0
        and f"4 runs with client-level differential privacy cost epsilon {4 * one:.4g}" in told
    )


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE])
def test_the_same_epsilon_from_the_study_to_the_report(privacy: str, here: Path) -> None:
    # One client in a round, never the same: with example-level each has spent half.
    study = PLAIN.replace("[clients]\n", "[clients]\nfraction = 0.34\n")
    study = "seed = 1\n" + study
    Path("run.toml").write_text(study + privacy)
    forecast = statement_of("run.toml")["epsilon_forecast"]
    assert f"all 2 rounds: {forecast:.4f}" in " ".join(run("explain", "run.toml")[1].split())
    code, told = run("run", "run.toml", "--output", "run")
    said = statement_of("run")
    spent, written = said["epsilon_spent"], json.loads(Path("run", PRIVACY_FILE).read_text())
    assert code == 0 and 0 < spent <= forecast + 1e-9 and said["epsilon_forecast"] == forecast
    assert privacy == CLIENT or spent < forecast - 0.1
    assert written["epsilon_spent"] == spent and read_status(Path("run")).epsilon_spent == spent  # type: ignore[union-attr]
    assert f"epsilon {spent:.4f}" in told and f"Epsilon spent: {spent:.4f}" in told
    assert f"epsilon spent {spent:.4f} of 90" in " ".join(run("status", "run")[1].split())
    assert f"epsilon {spent:.4f} of 90 is spent" in " ".join(run("verify", "run")[1].split())
    run("report", "run", "-o", "report.html")
    page = Path("report.html").read_text()
    assert f"<dt>epsilon spent of 90</dt><dd>{spent:.4f}</dd>" in page
    assert f"Epsilon spent: {spent:.4f}" in page
    assert exported(Path("run"), "model")["history"][0]["epsilon"] == spent
    assert json.loads(run("compare", "run", "--json")[1])["groups"][0]["epsilon_spent"] == spent


def test_the_statement_says_what_is_not_covered() -> None:
    text = Statement.of(GUARANTEE, 2).text().partition("Not covered:")[2]
    for words in (
        "refuses a study or a request",
        "not why",
        "initial model has learned before",
        "copies of the run's folder",
        "choice among several runs",
        "size of messages and the time that an answer takes, which the server",
        "personal models",
        "are public",
        "common test set",
    ):
        assert words in text, words
    hidden = Statement.of(Guarantee("client", 8.0, 1e-5, 1.0, 1.0, 0.5), 2)
    assert "participation" in hidden.text() and "participation" not in text
    shares = replace(hidden, noise_shares="each adds a third")
    assert "which clients take part" in shares.text().partition("Not covered:")[2]
    fast = Statement.of(replace(GUARANTEE, ghost_clipping=True), 2)
    assert "amplify rounding" in fast.text() and "amplify rounding" not in text
