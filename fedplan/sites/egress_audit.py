# SPDX-License-Identifier: Apache-2.0
"""Audit of the data that left a site, against its approvals, plans and privacy accounts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.egress import EGRESS_LOG, UPDATE, bytes_by_part
from fedplan.language.plan import Role
from fedplan.language.resolution import params_with_roles
from fedplan.naming import allow_imports
from fedplan.reports.egress_report import DatasetAccount, SiteRecord
from fedplan.sites.approvals import APPROVALS_FILE, APPROVED, STARTED, UNDECIDED
from fedplan.sites.inbox import Inbox
from fedplan.storage.append_log import AppendLog, DamagedLog, head_file
from fedplan.studies.run_folder import read_run_agreement, read_run_study

DECISION_FIELDS = ("decision", "time", "study", "name", "approver", "run")
"""Text fields that every entry of the approvals file has."""


@dataclass(frozen=True)
class RunEgress:
    """All answers that left a site in one run, and an audit of the answers by the site's records.

    `record` has the run's entries of the egress log, `decisions` the entries of the approvals file
    about the run's study. `state_folder` is the site's; `folder` is the run's folder in there, None
    if deleted. `accounts` are the privacy accounts of all datasets, `approved_studies` the digests
    of all studies ever approved. `faults()` runs the audit; nothing is written.
    """

    record: SiteRecord
    decisions: tuple[dict[str, Any], ...]
    state_folder: Path
    folder: Path | None
    accounts: tuple[DatasetAccount, ...] = ()
    approved_studies: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The study's name, or "no study" if the site agreed to none."""
        return str(self.record.agreement.get("experiment") or "no study")

    @cached_property
    def updates(self) -> list[dict[str, Any]]:
        """The log entries of updates: answers with values of the model."""
        return [entry for entry in self.record.entries if entry["kind"] == UPDATE]

    @property
    def agreement(self) -> Agreement | None:
        """The agreement of the run, from the study in the inbox; None if it cannot be read."""
        return None if isinstance(self._agreement_or_error, str) else self._agreement_or_error

    @cached_property
    def _agreement_or_error(self) -> Agreement | str:
        """The agreement of the run, or the reason (a text) why the agreement cannot be read.

        No code that the study names is run: the inbox is opened without allowed packages.
        """
        if self.folder is None:
            return f"{self.state_folder} has no folder of the run"
        try:
            study = Inbox(self.state_folder).read_offer(self.record.study).study
            return read_run_agreement(self.folder, study)
        except FedplanError as error:
            return str(error)

    def faults(self) -> Iterator[str]:
        """Yield a sentence for each fault of the run; nothing if the audit finds none.

        Faults are updates without approval or without an entry in a privacy account, values of
        parts that the plan does not share, and a study or plan that is missing or differs from the
        approved.
        """
        yield from self.unapproved()
        if not self.updates:
            return
        yield from self._account_faults()
        if self.agreement is None:
            yield (
                f"{self.name}: it cannot be checked which parts the plan shares: "
                f"{self._agreement_or_error}"
            )
            return
        try:
            with allow_imports(()):
                study_digest = read_run_study(self.folder).full_digest if self.folder else ""
        except FedplanError:
            study_digest = ""
        if study_digest not in self.approved_studies:
            yield f"{self.name}: the study in the run's folder was not approved at this site"
        plan, params = self.agreement.method.plan, self.agreement.params
        if self.record.agreement["plan"] != plan.text:
            yield f"{self.name}: the run's folder has another plan than the approved study"
        shared = {str(param.kind) for param in params_with_roles(plan, params, Role.SHARE)}
        for part in bytes_by_part(self.record.entries):
            if part not in shared:
                yield f"{self.name}: values of {part} left, but the plan does not share it"

    def unapproved(self) -> Iterator[str]:
        """Yield a sentence for each update that left without a valid approval of this run.

        The last decision on the study before the update must be an approval, by the approver that
        the egress log names. This run must be the first run that started after the approval.
        """
        for update in self.updates:
            earlier = [entry for entry in self.decisions if entry["time"] <= update["time"]]
            decided = [entry for entry in earlier if entry["decision"] not in UNDECIDED]
            last = decided[-1] if decided else {"decision": "", "approver": ""}
            if last["decision"] == APPROVED and last["approver"] == update["approver"]:
                since = earlier[earlier.index(last) :]
                runs = [entry["run"] for entry in since if entry["decision"] == STARTED]
                if runs[:1] == [self.record.run]:
                    continue
            yield (
                f"{self.name}, round {update['round']}: an update left, approved by "
                f"{update['approver'] or 'nobody'} according to the log, but {APPROVALS_FILE} "
                "had no such approval at that time"
            )

    def _account_faults(self) -> Iterator[str]:
        """Yield a sentence for each update that the privacy accounts do not explain.

        The update is in no account, or an account has noise for it but no charge of epsilon.
        """
        noised = {
            request: has_noise
            for account in self.accounts
            for request, has_noise in account.updates_noised.items()
        }
        charged = {request for account in self.accounts for request in account.charged_requests}
        private = self.agreement is not None and self.agreement.guarantee is not None
        for entry in self.updates:
            place, request = f"{self.name}, round {entry['round']}", entry["request"]
            if request not in noised:
                yield f"{place}: the update is missing from the accounts of this site's datasets"
            elif noised[request] and not (private and request in charged):
                yield (
                    f"{place}: the account says that noise was added to the update, but no epsilon "
                    "was charged"
                )


def is_site_state(folder: Path) -> bool:
    """Whether a folder is the state folder of a site: it has an egress log."""
    return (folder / EGRESS_LOG).exists() or head_file(folder / EGRESS_LOG).exists()


def read_decisions(state_folder: Path) -> list[dict[str, Any]]:
    """Return all entries of the approvals file in a site's state folder, oldest first.

    Empty without a file. Raises DamagedLog if the hash chain is broken or an entry lacks a field.
    """
    file = state_folder / APPROVALS_FILE
    entries = AppendLog(file, chained=True).read()
    for number, entry in enumerate(entries, 1):
        missing = [name for name in DECISION_FIELDS if not isinstance(entry.get(name), str)]
        if missing:
            raise DamagedLog(f"line {number} of {file} has no {missing[0]}: it was changed")
    return entries
