# SPDX-License-Identifier: Apache-2.0
"""Approvals: who said yes or no to which study, as a chain, and whether that holds today."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.account import private_folder
from fedplan.federation.messages import Refused
from fedplan.language.turn import Turn
from fedplan.models.teaching import untaught
from fedplan.naming import allowing
from fedplan.sites.inbox import Inbox, Offer
from fedplan.sites.notice import Notice, shown
from fedplan.sites.policy import RULE, Policy, judged, picked, read_policy
from fedplan.storage.chain import ChainFile, Head, read_chain
from fedplan.studies.schema import Study
from fedplan.studies.stage import outline_of

APPROVALS = "approvals.jsonl"
"""In a home: what was said to each study, by whom."""
OFFERED, APPROVED, REFUSED, WITHDRAWN = "offered", "approved", "refused", "withdrawn"
BEGUN, REJOINED = "begun", "rejoined"
ASIDE = (OFFERED, BEGUN, REJOINED)
"""Words that decide nothing."""
_KEPT = 256
"""Judgements that are remembered."""


@dataclass(frozen=True)
class Approval:
    """That a study was approved: by whom, when, and under which policy."""

    study: str
    approver: str
    time: str
    policy: str


class Approvals:
    """What a site says to the studies that it is offered.

    An approval is of one study by every word in it, and holds only while the policy in `file`
    admits that study and who approved it: the file is read anew whenever it has changed. `site` is
    the site as plans see it, by its name and its traits.
    """

    def __init__(
        self, home: Path, file: Path, *, site: Turn | None = None, allow: Sequence[str] = ()
    ) -> None:
        self.inbox, self._file, self._site, self._allow = Inbox(home, allow), file, site, allow
        self._home, self._chain = home, ChainFile(home / APPROVALS)
        self._said: tuple[Head, list[dict[str, Any]]] = Head(), []
        self._judged = dict[tuple[str, str], list[str]]()

    @property
    def policy(self) -> Policy:
        """The policy, as its file has it now."""
        return read_policy(self._file)

    @property
    def head(self) -> Head:
        """How far the chain of approvals goes."""
        return self._chain.head

    def admit(self, study: Study, server: str = "", run: str = "") -> str:
        """Who approved of a study; if nobody has, or not any more, an error with its code.

        An approval is of one run: the first that asks. Another one takes another word.
        """
        self.offer(study, server=server)
        if (found := self.of(study)) is not None and self._is_for(study, run, server):
            return found.approver
        whole, against = self._whole(study)[:12], self.against(study)
        if against:
            raise Refused(f"the study {whole} is against the policy: {'; '.join(against)}").coded(
                "policy"
            )
        if self.word(self._whole(study)) == REFUSED:
            raise Refused(f"the study {whole} was refused here").coded("refused-here")
        raise Refused(
            f"the study {whole} waits for approval: fedplan site show {whole}, then approve or "
            "refuse"
        ).coded("not-approved")

    def of(self, study: Study) -> Approval | None:
        """The approval of a study, if it has one that holds."""
        whole = self._whole(study)
        line = self._last(whole)
        if line is None or line["word"] != APPROVED or self.against(study):
            return None
        policy, approver = self.policy, line["approver"]
        holds = policy.by_rule if approver == RULE else policy.lets_approve(approver)
        return Approval(whole, approver, line["time"], line["policy"]) if holds else None

    def offer(self, study: Study, *, server: str = "") -> None:
        """Take in a study that a server offers: once, whatever it is called.

        One within the policy is approved by rule where the policy says so, and nobody said no.
        """
        whole = self._whole(study)
        lines = [line for line in self._lines() if line["study"] == whole]
        # What was offered stands in the chain once; a file that was taken away comes back.
        said = {line["study"] for line in self._lines() if line["word"] not in ASIDE}
        self.inbox.put(study, server=server, said=said)
        if not lines:
            self._say(OFFERED, study, "", server=server)
        rule = self.policy.by_rule and not any(_is_persons(line) for line in lines)
        rule = rule and not picked(study)
        if rule and self.of(study) is None and not self.against(study):
            self._say(APPROVED, study, RULE, server=server)

    def _is_for(self, study: Study, run: str, server: str) -> bool:
        """Whether what was last said to a study is of this run, or of none yet: then it is."""
        begun = self._begun(self._whole(study))
        if run and not begun:
            self._say(BEGUN, study, "", server=server, run=run)
        return not run or not begun or begun == run

    def _begun(self, whole: str) -> str:
        """The run that the last approval of a study is of; nothing if none has begun."""
        found = ""
        for line in self._lines():
            if line["study"] == whole and line["word"] in (APPROVED, BEGUN):
                found = str(line.get("run", ""))
        return found

    def approve(self, prefix: str) -> Approval:
        """Say yes to the study whose digest begins so, as the user who runs this."""
        offer = self.inbox.read(self.inbox.find(prefix))
        self._require_approver()
        if against := self.against(offer.study):
            raise FedplanError(
                f"the study {offer.whole[:12]} is against the policy: {'; '.join(against)}; change "
                f"{self._file}, if that is meant"
            )
        found = self.of(offer.study)
        if found is None or found.approver == RULE or self._begun(offer.whole):
            self._say(APPROVED, offer.study, user(), server=offer.server)
        found = self.of(offer.study)
        assert found is not None
        return found

    def refuse(self, prefix: str, why: str = "") -> None:
        """Say no to the study whose digest begins so."""
        offer = self.inbox.read(self.inbox.find(prefix))
        self._require_approver()
        self._say(REFUSED, offer.study, user(), server=offer.server, why=why)

    def withdraw(self, prefix: str) -> None:
        """Take back a yes: nothing is answered from then on, until there is another."""
        offer = self.inbox.read(self.inbox.find(prefix))
        self._require_approver()
        if self.word(offer.whole) != APPROVED:
            raise FedplanError(
                f"the study {offer.whole[:12]} is not approved: there is nothing to withdraw"
            )
        self._say(WITHDRAWN, offer.study, user(), server=offer.server)

    def rejoined(self, run: str, study: Study) -> None:
        """Write down that a person lets a run go on from a home that was put back."""
        self._require_approver()
        self._say(REJOINED, study, user(), server="", run=run)

    def word(self, whole: str) -> str:
        """What was last said to a study: offered, approved, refused or withdrawn."""
        line = self._last(whole)
        return str(line["word"]) if line else OFFERED

    def state(self, study: Study) -> str:
        """How it stands with a study, in words."""
        if (found := self.of(study)) is not None:
            begun = self._begun(found.study)
            return f"approved by {found.approver}" + (f" for run {begun}" if begun else "")
        if self.against(study):
            return "against the policy"
        word = self.word(self._whole(study))
        return "waits for approval" if word in (OFFERED, APPROVED) else word

    def listed(self, whole: str) -> dict[str, str]:
        """A study in the inbox as a row of a list."""
        try:
            offer = self.inbox.read(whole)
        except FedplanError as error:
            return {"study": whole, "time": "", "name": "?", "server": "", "state": str(error)}
        said = {"study": whole, "time": offer.time, "name": offer.study.name}
        return {**said, "server": offer.server, "state": self.state(offer.study)}

    def shown(self, prefix: str) -> Notice:
        """What the study whose digest begins so would let leave."""
        study = self.inbox.read(self.inbox.find(prefix)).study
        last = self.last_approved(study)
        with allowing(self._allow):
            return shown(
                study,
                last.study if last else None,
                site=self._in(study),
                policy=self.policy,
                against=self.against(study),
            )

    def last_approved(self, study: Study) -> Offer | None:
        """The study that was approved last before this one: of its name, or else any."""
        found = list(self._approved_before(self._whole(study)))
        named = [offer for offer in found if offer.study.name == study.name]
        return next(iter(named or found), None)

    def _approved_before(self, whole: str) -> Iterator[Offer]:
        for line in reversed(self._lines()):
            if line["word"] == APPROVED and line["study"] != whole:
                try:
                    yield self.inbox.read(line["study"])
                except FedplanError:
                    continue  # its file was taken away, or its code has changed since

    def against(self, study: Study) -> list[str]:
        """What of a study is against the policy, in sentences."""
        policy = self.policy
        key = self._whole(study), policy.digest
        if key not in self._judged:
            if len(self._judged) >= _KEPT:
                self._judged.clear()
            self._judged[key] = self._judge(policy, study)
        return self._judged[key]

    def _judge(self, policy: Policy, study: Study) -> list[str]:
        try:
            with allowing(self._allow), untaught():
                return judged(policy, study, outline_of(study), self._in(study))
        except FedplanError as error:
            return [f"it cannot be judged: {error}"]

    def _whole(self, study: Study) -> str:
        """The digest of a study; to find the code that it names is to import it."""
        with allowing(self._allow):
            return study.whole

    def _in(self, study: Study) -> Turn | None:
        """The site as the plan of a study sees it: the study may say traits of it too."""
        if self._site is None:
            return None
        said = study.clients.traits.get(self._site.client, {})
        return replace(self._site, traits={**said, **self._site.traits})

    def _require_approver(self) -> None:
        policy = self.policy
        if not policy.lets_approve(user()):
            raise FedplanError(
                f"{user()} is none of the approvers of {self._file}: {', '.join(policy.approvers)}"
            )

    def _last(self, whole: str) -> dict[str, Any] | None:
        """The last line in which somebody decided about a study."""
        said = (line for line in reversed(self._lines()) if line["study"] == whole)
        return next((line for line in said if line["word"] not in ASIDE), None)

    def _lines(self) -> list[dict[str, Any]]:
        """All that was said; read and proved anew if another process has said more."""
        head = self._chain.head
        if head != self._said[0]:
            self._said = head, read_chain(self._chain.file)
        return self._said[1]

    def _say(
        self,
        word: str,
        study: Study,
        approver: str,
        *,
        server: str,
        why: str = "",
        run: str = "",
    ) -> None:
        private_folder(self._home)
        self._chain.append(
            {
                "word": word,
                "study": self._whole(study),
                "name": study.name,
                "approver": approver,
                "policy": self.policy.digest,
                "against": self.against(study),
                "server": server,
                "why": why,
                "run": run,
            }
        )


def user() -> str:
    """The user of this process, by its number: an environment may say any name."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"


def _is_persons(line: dict[str, Any]) -> bool:
    return line["word"] not in ASIDE and line["approver"] != RULE
