# SPDX-License-Identifier: Apache-2.0
"""A statement is true of all accounts of a run, and says what epsilon does not cover."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import STUDY, run

from fedplan.errors import PrivacyError
from fedplan.privacy.accounting.accountant import DPSGDSteps
from fedplan.privacy.accounting.budget import Budget
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.privacy.statement import Statement
from fedplan.storage.append_log import head_file

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
