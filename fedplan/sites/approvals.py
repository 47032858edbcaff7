# SPDX-License-Identifier: Apache-2.0
"""Approvals of a site: the inbox of offered studies, and a hash-chained file of decisions."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.messages import RequestRefused
from fedplan.language.predicates import Turn
from fedplan.models.layer_maps import restore_layer_maps
from fedplan.naming import allow_imports
from fedplan.runners.site import Site
from fedplan.sites.inbox import Inbox, Offer
from fedplan.sites.policy import (
    RULE_APPROVER,
    Policy,
    example_filters,
    policy_violations,
    read_policy,
)
from fedplan.sites.review import StudyReview, review_study
from fedplan.sites.signatures import is_signed
from fedplan.storage.append_log import AppendLog, LogHead, timestamp
from fedplan.storage.files import make_folder
from fedplan.studies.experiment import outline_agreement
from fedplan.studies.schema import Study

APPROVALS_FILE = "approvals.jsonl"
"""File of all decisions on studies, inside the site's state folder."""
UNCHECKED = "the study cannot be checked"
"""Begins the violation of a study that cannot be built here."""
OFFERED, APPROVED, REFUSED, WITHDRAWN = "offered", "approved", "refused", "withdrawn"
STARTED, REJOINED = "started", "rejoined"
UNDECIDED = (OFFERED, STARTED, REJOINED)
"""Values of `decision` in entries that record an event, not a decision on the study."""
_MAX_CACHED = 256
"""Policy checks of studies that are cached."""


@dataclass(frozen=True)
class Approval:
    """The approval of a study by `approver`: a user, RULE_APPROVER, or people joined by ", ".

    `run` is the id of the run that uses it, or ""; `missing` is how many signatures it lacks;
    `ends` is its last day, or "".
    """

    study_digest: str
    approver: str
    run: str = ""
    missing: int = 0
    ends: str = ""


@dataclass(frozen=True)
class Standing:
    """The entries of the approval of a study that stands, and the id of the run that uses it.

    `pending` are the approvals by person since the last start, refusal or withdrawal; `attempt`
    counts those events: each signature names it, so that none counts again after one of them.
    """

    entries: tuple[Mapping[str, Any], ...] = ()
    run: str = ""
    pending: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    attempt: int = 0

    @property
    def approver(self) -> str:
        """The names of all approvers, or ""."""
        return ", ".join(str(entry["approver"]) for entry in self.entries)


def read_standing(
    entries: Iterable[Mapping[str, Any]],
    is_valid: Callable[[Mapping[str, Any], int], bool],
    signatures: int,
) -> Standing:
    """Return the approval that stands after all entries of one study.

    `is_valid` decides whether an approval in an attempt counts, and `signatures` is how many it
    needs.
    """
    standing = Standing()
    for entry in entries:
        decision = entry["decision"]
        if decision == APPROVED and is_valid(entry, standing.attempt):
            if entry["approver"] == RULE_APPROVER:
                standing = replace(standing, entries=(entry,), run="")
                continue
            pending = {**standing.pending, entry["approver"]: entry}
            standing = replace(standing, pending=pending)
            if len(pending) >= signatures:
                standing = replace(standing, entries=tuple(pending.values()), run="")
        elif decision == STARTED:
            # An approval is of the first run that starts with it.
            run = standing.run or str(entry.get("run", ""))
            standing = Standing(standing.entries, run, {}, standing.attempt + 1)
        elif decision in (REFUSED, WITHDRAWN):
            standing = Standing(attempt=standing.attempt + 1)
    return standing


def signed_statement(entry: Mapping[str, Any], attempt: int) -> str:
    """Return the text that a person signs for an entry of the approvals file."""
    fields = {
        "approve study": entry["study"],
        "named": entry["name"],
        "at site": entry.get("site", ""),
        "until": entry.get("ends", ""),
        "by": entry["approver"],
        "starts, refusals and withdrawals before": attempt,
    }
    return json.dumps(fields, indent=1) + "\n"


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
        self._name = site.client if site else ""
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
            if run and not approval.run:
                signed = {"signatures": self.policy.signatures} if self.policy.people else {}
                self._append(STARTED, study, "", server=server, run=run, signed=signed)
            if not run or approval.run in ("", run):
                return approval.approver
        digest, violations = self._digest(study)[:12], self.violations(study)
        if violations:
            raise RequestRefused(
                f"the study {digest} violates this site's policy: {'; '.join(violations)}"
            ).with_code("policy")
        if has_ended(study):
            raise RequestRefused(
                f"the last day of the study {digest}, by its purpose, is over"
            ).with_code("not-approved")
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
        standing = self._standing(study)
        if not standing.entries or has_ended(study) or self.violations(study):
            return None
        ends = min((str(e["ends"]) for e in standing.entries if e.get("ends")), default="")
        return Approval(self._digest(study), standing.approver, standing.run, ends=ends)

    def _standing(self, study: Study) -> Standing:
        policy, digest = self.policy, self._digest(study)

        def is_valid(entry: Mapping[str, Any], attempt: int) -> bool:
            if entry["approver"] == RULE_APPROVER:
                return policy.auto_approve
            ends = entry.get("ends", "")
            if ends < _today() if policy.people else "" < ends < _today():
                return False
            key = policy.people.get(entry["approver"], "")
            statement = signed_statement({**entry, "site": self._name}, attempt)
            return policy.may_approve(entry["approver"]) and (
                not policy.people or is_signed(statement, entry.get("signature", ""), key)
            )

        entries = (entry for entry in self._log.read() if entry["study"] == digest)
        return read_standing(entries, is_valid, policy.signatures)

    def statement(self, prefix: str, person: str, ends: str) -> str:
        """Return the text that a person signs to approve a study until a date, as "2027-01-31"."""
        study = self.inbox.read_offer(self.inbox.find_digest(prefix)).study
        if person not in self.policy.people:
            raise FedplanError(
                f"--person {person!r} has no key in {self._policy_file}: its [people] are "
                f"{', '.join(self.policy.people) or 'none'}"
            )
        fields = {"study": self._digest(study), "name": study.name, "site": self._name}
        fields |= {"approver": person, "ends": _last_day(ends)}
        return signed_statement(fields, self._standing(study).attempt)

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
        by_rule = self.policy.auto_approve and not (
            by_person or example_filters(study) or has_ended(study)
        )
        if by_rule and self.find_approval(study) is None and not self.violations(study):
            self._append(APPROVED, study, RULE_APPROVER, server=server)

    def approve(
        self, prefix: str, *, ends: str = "", person: str = "", signature: str = ""
    ) -> Approval:
        """Record that the current user approves the study with a digest that starts with `prefix`.

        With people in the policy, `person` does, by a `signature` of `statement`. `ends` is the
        last day of the approval. Records nothing twice. Raises FedplanError if the study is not in
        the inbox, user, signature or policy do not allow it, or it waits with another last day.
        """
        offer = self.inbox.read_offer(self.inbox.find_digest(prefix))
        study, policy, ends = offer.study, self.policy, _last_day(ends) if ends else ""
        if violations := self.violations(study):
            raise FedplanError(
                f"the study {offer.digest[:12]} violates this site's policy: "
                f"{'; '.join(violations)}; to allow it, change {self._policy_file}"
            )
        if has_ended(study):
            raise FedplanError(f"the last day of the study {offer.digest[:12]} is over")
        if policy.people:
            self._require_signature(study, person, ends, signature)
        elif person or signature:
            raise FedplanError(f"{self._policy_file} has no [people], whose signatures count")
        approver = person or current_user()
        self._require_approver(approver)
        standing = self._standing(study)
        if earlier := standing.pending.get(approver):
            if (day := earlier.get("ends", "")) != ends:
                last_day = f"until {day}" if day else "without a last day"
                raise FedplanError(
                    f"{approver} has approved the study {offer.digest[:12]} {last_day}: to change "
                    f"that, withdraw it first by `fedplan site withdraw {offer.digest[:12]}`"
                )
        else:
            key = policy.people.get(approver, "")
            signed = {"signature": signature, "key": key, "site": self._name} if key else {}
            self._append(APPROVED, study, approver, server=offer.server, ends=ends, signed=signed)
            standing = self._standing(study)
        missing = 0 if standing.entries and not standing.run else policy.signatures
        missing = max(0, missing - len(standing.pending))
        return Approval(offer.digest, ", ".join(standing.pending), missing=missing)

    def _require_signature(self, study: Study, person: str, ends: str, signature: str) -> None:
        if not ends:
            raise FedplanError(
                f"{self._policy_file} has [people]: a signed approval needs --person, its last day "
                "(--until), and --key or --signature"
            )
        statement = self.statement(self._digest(study), person, ends)
        if not is_signed(statement, signature, self.policy.people[person]):
            raise FedplanError(
                f"this is no signature by {person}'s key in {self._policy_file} of the present "
                "statement: print it with `fedplan site statement`, and sign it"
            )

    def refuse(self, prefix: str, reason: str = "") -> None:
        """Record that the current user refuses a study; `reason` is stored, not sent."""
        offer = self.inbox.read_offer(self.inbox.find_digest(prefix))
        self._append(
            REFUSED, offer.study, self._require_decider(), server=offer.server, reason=reason
        )

    def withdraw(self, prefix: str) -> None:
        """Record that the current user withdraws the approval of a study."""
        offer = self.inbox.read_offer(self.inbox.find_digest(prefix))
        user = self._require_decider()
        if self.last_decision(offer.digest) != APPROVED:
            raise FedplanError(
                f"the study {offer.digest[:12]} is not approved, so there is nothing to withdraw"
            )
        self._append(WITHDRAWN, offer.study, user, server=offer.server)

    def record_rejoin(self, run: str, study: Study) -> None:
        """Record that the current user lets a run continue from restored state."""
        self._append(REJOINED, study, self._require_decider(), server="", run=run)

    def last_decision(self, digest: str) -> str:
        """Return the last decision on a study: offered, approved, refused or withdrawn."""
        of_study = (entry for entry in reversed(self._log.read()) if entry["study"] == digest)
        decisions = (str(entry["decision"]) for entry in of_study)
        return next((each for each in decisions if each not in UNDECIDED), OFFERED)

    def status_text(self, study: Study) -> str:
        """Return the state of a study in a few words, such as "approved by ada for run 0123"."""
        if (approval := self.find_approval(study)) is not None:
            run = f" for run {approval.run}" if approval.run else ""
            until = f" until {approval.ends}" if approval.ends else ""
            return f"approved by {approval.approver}{run}{until}"
        if self.violations(study):
            return "violates the policy"
        if has_ended(study):
            return "has ended"
        if (pending := self._standing(study).pending) and self.policy.people:
            return f"waits for approval: {len(pending)} of {self.policy.signatures} signatures"
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
                site=self._site,
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
                    agreement = outline_agreement(study)
                    violations = policy_violations(policy, study, agreement, self._site)
            except FedplanError as error:
                violations = [f"{UNCHECKED}: {error}"]
            self._cached_violations[key] = violations
        return self._cached_violations[key]

    def _digest(self, study: Study) -> str:
        with allow_imports(self._allow):
            return study.full_digest

    def _require_approver(self, name: str) -> None:
        policy = self.policy
        if not policy.may_approve(name):
            raise FedplanError(
                f"{name} may not decide on studies: the approvers in "
                f"{self._policy_file} are {', '.join(policy.approvers)}"
            )

    def _require_decider(self) -> str:
        """Return the current user, who must be an approver unless the policy has people.

        With people, whoever can write the state folder may stop a study; only approvals are signed.
        """
        if not self.policy.people:
            self._require_approver(current_user())
        return current_user()

    def _append(
        self,
        decision: str,
        study: Study,
        approver: str,
        *,
        server: str,
        reason: str = "",
        run: str = "",
        ends: str = "",
        signed: Mapping[str, Any] | None = None,
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
                **({"ends": ends} if ends else {}),
                **(signed or {}),
            }
        )


def site_approvals(site: Site) -> Approvals:
    """Return the approvals of a site, read from its state folder and its policy file."""
    client = Turn(client=site.name, traits=site.traits)
    return Approvals(Path(site.state), Path(site.policy), site=client, allow=site.allow_packages)


def has_ended(study: Study) -> bool:
    """Whether the last day of a study, by its purpose, is over."""
    return study.purpose is not None and study.purpose.ends < _today()


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _last_day(text: str) -> str:
    """Return a date of today or later, as "2027-01-31"; FedplanError if it is none."""
    try:
        day = date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise FedplanError(
            f"the last day of an approval (--until) is a date such as 2027-01-31, not {text[:40]!r}"
        ) from error
    if day < _today():
        raise FedplanError(f"the last day {day} is in the past")
    return day


def current_user() -> str:
    """Return the name of this process's user, by its id: environment variables can lie."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"
