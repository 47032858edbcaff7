# SPDX-License-Identifier: Apache-2.0
"""Privacy statements: the guarantee of a study file, and the epsilon that a run has spent."""

from __future__ import annotations

import json
from pathlib import Path

from fedplan.federation.agreement import require_private_method
from fedplan.federation.endpoint import only_run_folder
from fedplan.federation.ledger.egress import AGREEMENT, read_agreement
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.privacy.statement import Statement
from fedplan.storage.files import write_atomic
from fedplan.studies.experiment import make_method, privacy_guarantee, privacy_statement
from fedplan.studies.run import read_run
from fedplan.studies.run_folder import read_run_study
from fedplan.studies.schema import ConfigError, Study, read_study


def read_privacy_statement(path: Path) -> Statement:
    """Return the privacy statement (guarantee and epsilon spent) of a study or of a run.

    `path` is a study file, for which nothing is spent yet, a run folder, or a site's folder of a
    run. Raises ConfigError if the study has no [privacy] section, if only the sites have the
    accounts of spent epsilon, or if entries are missing in the run's file of spent epsilon.
    """
    if not path.is_dir():
        return _require_statement(read_study(path), path)
    if (path / AGREEMENT).exists():
        folder = only_run_folder(path)
        agreement = read_agreement(folder)
        account, prefix = Path(agreement["account"]), agreement["prefix"]
        return _require_statement(read_run_study(folder), path, account, prefix)
    run = read_run(path)
    guarantee = privacy_guarantee(run.study)
    if guarantee is not None and guarantee.unit == "example" and not run.study.has_central_data:
        raise ConfigError(
            f"{path}: each site keeps the privacy account of its own examples; run `fedplan "
            "privacy` at the site, on the site's folder of this run"
        )
    for name, fault in (run.file_faults() if run.round else {}).items():
        if name.endswith(CHARGES_FILE):
            raise ConfigError(f"{fault}: the spent epsilon is unknown; restore the file")
    return _require_statement(run.study, path, run.folder)


def write_privacy_statement(folder: Path) -> Statement:
    """Write the privacy statement of a run folder to `privacy.json` there; return the statement.

    An old file is replaced. Raises as `read_privacy_statement`.
    """
    statement = read_privacy_statement(folder)
    write_atomic(folder / "privacy.json", json.dumps(statement.json(), indent=1) + "\n")
    return statement


def _require_statement(
    study: Study, path: Path, account: Path | None = None, run: str = ""
) -> Statement:
    """Return the privacy statement of a study, with the epsilon spent in an account folder.

    `run`: counts only charges with names that start with it. Without `account`, the statement says
    that nothing is spent. Writes nothing. Raises ConfigError, naming `path`, if the study has no
    [privacy] section, and PrivacyError if a file of `account` is damaged or has a charge that the
    study does not promise, or if the study's method breaks the guarantee.
    """
    statement = privacy_statement(study, account, run=run)
    if statement is None:
        raise ConfigError(f"{path}: differential privacy is off: the study has no [privacy]")
    require_private_method(statement.guarantee, make_method(study))
    return statement
