# SPDX-License-Identifier: Apache-2.0
"""Audit of the data that left a site, against its approvals, plans and privacy accounts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.egress_log import RECORD, UPDATE, bytes_by_part
from fedplan.language.plan import Role
from fedplan.language.resolution import params_with_roles
from fedplan.naming import allow_imports
from fedplan.reports.egress_report import DatasetAccount, SiteRecord
from fedplan.sites.approvals import APPROVALS_FILE, APPROVED, STARTED, UNDECIDED
from fedplan.sites.inbox import Inbox
from fedplan.storage.chain import BrokenChain, head_file, read_chain
from fedplan.studies.run_folder import read_run_agreement, read_run_study

DECISION_FIELDS = ("word", "time", "study", "name", "approver", "run")
"""Text fields that every entry of the approvals file has."""


@dataclass(frozen=True)
class RunEgress:
    """The answers that left a site in one run, with the records to check them against.

    `record` are the entries of the egress log, and `decisions` the entries of the approvals file
    about the run's study. `folder` is the site's folder of the run, None if it is gone. `accounts`
    are those of all datasets, and `approved_studies` the digests of all studies ever approved.
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
        """The agreement of the run, or the reason why it cannot be read.

        The inbox is opened without allowed packages: code that a study names is not run here.
        """
        if self.folder is None:
            return f"{self.state_folder} has no folder of the run"
        try:
            study = Inbox(self.state_folder).read_offer(self.record.study).study
            return read_run_agreement(self.folder, study)
        except FedplanError as error:
            return str(error)

    def _has_approved_study(self) -> bool:
        """Whether the last study in the run's folder is one of the approved ones."""
        try:
            with allow_imports(()):
                return (
                    self.folder is not None
                    and read_run_study(self.folder).full_digest in self.approved_studies
                )
        except FedplanError:
            return False

    def faults(self) -> Iterator[str]:
        """Yield a sentence for each fault: no approval, no account, or parts the plan keeps."""
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
        if not self._has_approved_study():
            yield f"{self.name}: the study in the run's folder was not approved at this site"
        plan, params = self.agreement.method.plan, self.agreement.params
        if self.record.agreement["plan"] != plan.text:
            yield f"{self.name}: the run's folder has another plan than the approved study"
        shared = {str(param.kind) for param in params_with_roles(plan, params, Role.SHARE)}
        for part in bytes_by_part(self.record.entries):
            if part not in shared:
                yield f"{self.name}: values of {part} left, but the plan does not share it"

    def unapproved(self) -> Iterator[str]:
        """Yield a sentence for each update that left without a valid approval of this run."""
        for entry in self.updates:
            if not self._is_approved(entry):
                yield (
                    f"{self.name}, round {entry['round']}: an update left, approved by "
                    f"{entry['approver'] or 'nobody'} according to the log, but {APPROVALS_FILE} "
                    "had no such approval at that time"
                )

    def _account_faults(self) -> Iterator[str]:
        """Yield a sentence for each update that is in no account, or noised but not charged."""
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

    def _is_approved(self, update: Mapping[str, Any]) -> bool:
        """Whether an update's approver had approved the study for this run when the update left.

        An approval is valid for one run: the first that started after it.
        """
        earlier = [entry for entry in self.decisions if entry["time"] <= update["time"]]
        decided = [entry for entry in earlier if entry["word"] not in UNDECIDED]
        last = decided[-1] if decided else {"word": "", "approver": ""}
        if last["word"] != APPROVED or last["approver"] != update["approver"]:
            return False
        runs = [
            entry["run"] for entry in earlier[earlier.index(last) :] if entry["word"] == STARTED
        ]
        return runs[:1] == [self.record.run]


def is_site_state(folder: Path) -> bool:
    """Whether a folder is the state folder of a site: it has an egress log."""
    return (folder / RECORD).exists() or head_file(folder / RECORD).exists()


def read_decisions(state_folder: Path) -> list[dict[str, Any]]:
    """Return all entries of a site's approvals file, after checking its hash chain.

    Returns none if there is no file. Raises BrokenChain if an entry was changed.
    """
    file = state_folder / APPROVALS_FILE
    entries = read_chain(file) if file.exists() or head_file(file).exists() else []
    for number, entry in enumerate(entries, 1):
        missing = [name for name in DECISION_FIELDS if not isinstance(entry.get(name), str)]
        if missing:
            raise BrokenChain(f"line {number} of {file} has no {missing[0]}: it was changed")
    return entries
