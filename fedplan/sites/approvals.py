# SPDX-License-Identifier: Apache-2.0
"""Approvals of a site: the inbox of offered studies, and a hash-chained file of decisions."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.messages import RequestRefused
from fedplan.language.predicates import Turn
from fedplan.models.layer_maps import restore_layer_maps
from fedplan.naming import allow_imports
from fedplan.runners.site import INBOX_FOLDER, Site
from fedplan.sites.policy import (
    RULE_APPROVER,
    Policy,
    example_filters,
    policy_violations,
    read_policy,
    site_in_study,
)
from fedplan.sites.review import StudyReview, review_study
from fedplan.storage.append_log import AppendLog, LogHead, timestamp
from fedplan.storage.files import make_folder, write_atomic
from fedplan.studies.experiment import outline_agreement
from fedplan.studies.schema import Study, study_from_dict

APPROVALS_FILE = "approvals.jsonl"
"""File of all decisions on studies, inside the site's state folder."""
OFFERED, APPROVED, REFUSED, WITHDRAWN = "offered", "approved", "refused", "withdrawn"
STARTED, REJOINED = "started", "rejoined"
UNDECIDED = (OFFERED, STARTED, REJOINED)
"""Values of `decision` in entries that record an event, not a decision on the study."""
_MAX_CACHED = 256
"""Policy checks of studies that are cached."""
MAX_STUDIES, MAX_STUDY_BYTES = 200, 1 << 20
"""Limits on the number of studies and on the bytes of one, since a server may offer any number."""


@dataclass(frozen=True)
class Offer:
    """A study as a server, known by the digest of its TLS certificate, offered it at `time`."""

    digest: str
    study: Study
    time: str
    server: str = ""


class Inbox:
    """Studies offered to a site, one JSON file each; their code is of packages in `allow` only."""

    def __init__(self, state_folder: Path, allow: Sequence[str] = ()) -> None:
        self.folder, self.allow = state_folder / INBOX_FOLDER, tuple(allow)

    def digests(self) -> list[str]:
        """Return the full digests of all stored studies, oldest file first."""
        files = self.folder.glob("*.json") if self.folder.exists() else ()
        return [file.stem for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)]

    def add(self, study: Study, *, server: str = "", decided: Container[str] = ()) -> bool:
        """Write a study to the inbox and return True; return False if the study is there already.

        A full inbox first deletes its oldest study that is not in `decided`. Raises RequestRefused
        if the study is too large, or if the inbox is full of decided studies.
        """
        with allow_imports(self.allow):
            file = self._file(study.full_digest)
        if file.exists():
            return False
        time = datetime.now(UTC).isoformat(timespec="seconds")
        offer = {"study": study.model_dump(mode="json"), "time": time, "server": server}
        text = json.dumps(offer, indent=1, sort_keys=True) + "\n"
        present = self.digests()
        removable = [digest for digest in present if digest not in decided]
        if len(text) > MAX_STUDY_BYTES or (len(present) >= MAX_STUDIES and not removable):
            raise RequestRefused(
                f"the inbox {self.folder} holds at most {MAX_STUDIES} studies of at most "
                f"{MAX_STUDY_BYTES} bytes each: delete files of studies that are no longer needed"
            ).with_code("not-approved")
        if len(present) >= MAX_STUDIES:
            self._file(removable[0]).unlink(missing_ok=True)
        make_folder(self.folder)
        write_atomic(file, text)
        return True

    def read_offer(self, digest: str) -> Offer:
        """Load the offered study with this full digest; FedplanError if it or its code changed."""
        file = self._file(digest)
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
            with allow_imports(self.allow):
                study = study_from_dict(fields["study"])
                unchanged = study.full_digest == digest
            offer = Offer(digest, study, str(fields["time"]), str(fields["server"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FedplanError(
                f"{file} cannot be read: {error}; ask the server to offer the study again"
            ) from error
        if not unchanged:
            raise FedplanError(
                f"{file} is no longer the study that was offered, or the code that the study names "
                "has changed: delete the file, and ask the server to offer the study again"
            )
        return offer

    def find_digest(self, prefix: str) -> str:
        """Return the one stored digest that starts with `prefix`; FedplanError if not one does."""
        matches = [digest for digest in self.digests() if prefix and digest.startswith(prefix)]
        if not matches:
            raise FedplanError(
                f"no offered study has a digest that starts with {prefix!r}: `fedplan site inbox` "
                "lists the offered studies"
            )
        if len(matches) > 1:
            examples = ", ".join(digest[:16] for digest in matches[:4])
            raise FedplanError(
                f"{len(matches)} studies have a digest that starts with {prefix!r}: give more "
                f"characters, as in {examples}"
            )
        return matches[0]

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"


@dataclass(frozen=True)
class Approval:
    """A valid approval of a study, at a UTC time, by a user or RULE_APPROVER, and its policy."""

    study_digest: str
    approver: str
    time: str
    policy: str


class Approvals:
    """A site's decisions on the studies that servers offer, in a hash-chained file on disk.

    An approval covers one exact study, by its full digest, and is valid only while the policy in
    `policy_file` allows the study and its approver; the policy is read again on every use. `site`
    is the site's name and traits, by which plans may depend on the client. Code that a study names
    may be imported from the packages in `allow` only.
    """

    def __init__(
        self,
        state_folder: Path,
        policy_file: Path,
        *,
        site: Turn | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        self.inbox = Inbox(state_folder, allow)
        self._policy_file, self._site, self._allow = policy_file, site, allow
        self._state_folder = state_folder
        self._log = AppendLog(state_folder / APPROVALS_FILE, chained=True)
        self._cached_violations = dict[tuple[str, str], list[str]]()

    @property
    def policy(self) -> Policy:
        """The policy as its file is now; raises ConfigError if it cannot be read."""
        return read_policy(self._policy_file)

    @property
    def head(self) -> LogHead:
        """Length and hash of the file of approvals."""
        return self._log.head

    def require_approval(self, study: Study, server: str = "", run: str = "") -> str:
        """Record that the study was offered, and return the name of its approver.

        `server` is the digest of the server's TLS certificate, or "". An approval is valid for one
        run: the first `run` is recorded, and another run of the study needs a new approval. Does
        not wait: raises RequestRefused with the code `policy`, `study-refused` or `not-approved`.
        """
        self.record_offer(study, server=server)
        approval = self.find_approval(study)
        if approval is not None:
            started_run = self._started_run(self._digest(study))
            if run and not started_run:
                self._append(STARTED, study, "", server=server, run=run)
            if not run or not started_run or started_run == run:
                return approval.approver
        digest, violations = self._digest(study)[:12], self.violations(study)
        if violations:
            raise RequestRefused(
                f"the study {digest} violates this site's policy: {'; '.join(violations)}"
            ).with_code("policy")
        if self.last_decision(self._digest(study)) == REFUSED:
            raise RequestRefused(f"the study {digest} was refused at this site").with_code(
                "study-refused"
            )
        raise RequestRefused(
            f"the study {digest} waits for approval: read it with `fedplan site show {digest}`, "
            "then run `fedplan site approve` or `fedplan site refuse`"
        ).with_code("not-approved")

    def find_approval(self, study: Study) -> Approval | None:
        """Return the approval of a study, used or not, if valid under the present policy."""
        digest = self._digest(study)
        entry = self._last_decision_entry(digest)
        if entry is None or entry["decision"] != APPROVED or self.violations(study):
            return None
        policy, approver = self.policy, entry["approver"]
        valid = policy.auto_approve if approver == RULE_APPROVER else policy.may_approve(approver)
        return Approval(digest, approver, entry["time"], entry["policy"]) if valid else None

    def record_offer(self, study: Study, *, server: str = "") -> None:
        """Put an offered study into the inbox, and record the offer if this is the first.

        Also approves it by rule, if the policy does, no person has decided on it, and it does not
        filter the site's examples. RequestRefused if the inbox is full, or for too many studies a
        day.
        """
        digest, log = self._digest(study), self._log.read()
        entries = [entry for entry in log if entry["study"] == digest]
        limit, since = self.policy.limits.studies_per_day, datetime.now(UTC) - timedelta(days=1)
        offers = (entry["time"] for entry in log if entry["decision"] == OFFERED)
        recent = sum(datetime.fromisoformat(time) > since for time in offers)
        if not entries and limit and recent >= limit:
            raise RequestRefused(
                f"{recent} studies were offered within 24 hours, and limits.studies_per_day of "
                f"{self._policy_file} is {limit}"
            ).with_code("too-many-studies")
        # The offer is recorded once; a deleted file of the inbox is written again.
        decided = {entry["study"] for entry in log if entry["decision"] not in UNDECIDED}
        self.inbox.add(study, server=server, decided=decided)
        if not entries:
            self._append(OFFERED, study, "", server=server)
        by_person = any(
            entry["decision"] not in UNDECIDED and entry["approver"] != RULE_APPROVER
            for entry in entries
        )
        by_rule = self.policy.auto_approve and not by_person and not example_filters(study)
        if by_rule and self.find_approval(study) is None and not self.violations(study):
            self._append(APPROVED, study, RULE_APPROVER, server=server)

    def _started_run(self, digest: str) -> str:
        """Return the id of the run that uses a study's last approval; "" if no run has started."""
        run = ""
        for entry in self._log.read():
            if entry["study"] == digest and entry["decision"] in (APPROVED, STARTED):
                run = str(entry.get("run", ""))
        return run

    def approve(self, prefix: str) -> Approval:
        """Record that the current user approves the study with a digest that starts with `prefix`.

        Records nothing if a person has, and no run has started since. Raises FedplanError if the
        study is not in the inbox, or user or policy do not allow it.
        """
        offer = self.inbox.read_offer(self.inbox.find_digest(prefix))
        self._require_approver()
        if violations := self.violations(offer.study):
            raise FedplanError(
                f"the study {offer.digest[:12]} violates this site's policy: "
                f"{'; '.join(violations)}; to allow it, change {self._policy_file}"
            )
        approval = self.find_approval(offer.study)
        if (
            approval is None
            or approval.approver == RULE_APPROVER
            or self._started_run(offer.digest)
        ):
            self._append(APPROVED, offer.study, current_user(), server=offer.server)
        approval = self.find_approval(offer.study)
        assert approval is not None
        return approval

    def refuse(self, prefix: str, reason: str = "") -> None:
        """Record that the current user refuses a study; `reason` is stored, not sent."""
        offer = self.inbox.read_offer(self.inbox.find_digest(prefix))
        self._require_approver()
        self._append(REFUSED, offer.study, current_user(), server=offer.server, reason=reason)

    def withdraw(self, prefix: str) -> None:
        """Record that the current user withdraws the approval of a study."""
        offer = self.inbox.read_offer(self.inbox.find_digest(prefix))
        self._require_approver()
        if self.last_decision(offer.digest) != APPROVED:
            raise FedplanError(
                f"the study {offer.digest[:12]} is not approved, so there is nothing to withdraw"
            )
        self._append(WITHDRAWN, offer.study, current_user(), server=offer.server)

    def record_rejoin(self, run: str, study: Study) -> None:
        """Record that the current user lets a run continue from restored state."""
        self._require_approver()
        self._append(REJOINED, study, current_user(), server="", run=run)

    def last_decision(self, digest: str) -> str:
        """Return the last decision on a study: offered, approved, refused or withdrawn."""
        entry = self._last_decision_entry(digest)
        return str(entry["decision"]) if entry else OFFERED

    def status_text(self, study: Study) -> str:
        """Return the state of a study in a few words, such as "approved by ada for run 0123"."""
        if (approval := self.find_approval(study)) is not None:
            run = self._started_run(approval.study_digest)
            return f"approved by {approval.approver}" + (f" for run {run}" if run else "")
        if self.violations(study):
            return "violates the policy"
        decision = self.last_decision(self._digest(study))
        return "waits for approval" if decision in (OFFERED, APPROVED) else decision

    def inbox_row(self, digest: str) -> dict[str, str]:
        """Return an offered study as a row; if it cannot be read, the state says why."""
        try:
            offer = self.inbox.read_offer(digest)
        except FedplanError as error:
            return {"study": digest, "time": "", "name": "?", "server": "", "state": str(error)}
        row = {"study": digest, "time": offer.time, "name": offer.study.name}
        return {**row, "server": offer.server, "state": self.status_text(offer.study)}

    def review(self, prefix: str) -> StudyReview:
        """Return the review of a study, compared with the last approved, best of its name."""
        study = self.inbox.read_offer(self.inbox.find_digest(prefix)).study
        offers = list[Offer]()
        for entry in reversed(self._log.read()):
            if entry["decision"] == APPROVED and entry["study"] != self._digest(study):
                with suppress(FedplanError):  # its file was deleted, or its code has changed since
                    offers.append(self.inbox.read_offer(entry["study"]))
        same_name = [offer for offer in offers if offer.study.name == study.name]
        last = next(iter(same_name or offers), None)
        with allow_imports(self._allow):
            return review_study(
                study,
                last.study if last else None,
                site=site_in_study(study, self._site),
                policy=self.policy,
                violations=self.violations(study),
            )

    def violations(self, study: Study) -> list[str]:
        """Return how a study violates the present policy (cached), or that it cannot be built."""
        policy = self.policy
        key = self._digest(study), policy.digest
        if key not in self._cached_violations:
            if len(self._cached_violations) >= _MAX_CACHED:
                self._cached_violations.clear()
            try:
                with allow_imports(self._allow), restore_layer_maps():
                    site = site_in_study(study, self._site)
                    violations = policy_violations(policy, study, outline_agreement(study), site)
            except FedplanError as error:
                violations = [f"the study cannot be checked: {error}"]
            self._cached_violations[key] = violations
        return self._cached_violations[key]

    def _digest(self, study: Study) -> str:
        with allow_imports(self._allow):
            return study.full_digest

    def _require_approver(self) -> None:
        policy = self.policy
        if not policy.may_approve(current_user()):
            raise FedplanError(
                f"{current_user()} may not decide on studies: the approvers in "
                f"{self._policy_file} are {', '.join(policy.approvers)}"
            )

    def _last_decision_entry(self, digest: str) -> dict[str, Any] | None:
        entries = (entry for entry in reversed(self._log.read()) if entry["study"] == digest)
        return next((entry for entry in entries if entry["decision"] not in UNDECIDED), None)

    def _append(
        self,
        decision: str,
        study: Study,
        approver: str,
        *,
        server: str,
        reason: str = "",
        run: str = "",
    ) -> None:
        make_folder(self._state_folder)
        self._log.append(
            {
                "decision": decision,
                "study": self._digest(study),
                "name": study.name,
                "approver": approver,
                "policy": self.policy.digest,
                "violations": self.violations(study),
                "server": server,
                "reason": reason,
                "run": run,
                "time": timestamp(),
            }
        )


def site_approvals(site: Site) -> Approvals:
    """Return the approvals of a site, read from its state folder and its policy file."""
    client = Turn(client=site.name, traits=site.traits)
    return Approvals(Path(site.state), Path(site.policy), site=client, allow=site.allow_packages)


def current_user() -> str:
    """Return the name of this process's user, by its id: environment variables can lie."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"
