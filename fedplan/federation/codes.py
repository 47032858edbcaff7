# SPDX-License-Identifier: Apache-2.0
"""Codes: the few words that leave a site when something goes wrong, and what each of them means.

The text of an error may tell of rows, labels, columns or paths: it stays in the site's own log. The
server makes a sentence of the code.
"""

from __future__ import annotations

from fedplan.errors import FedplanError

APPROVAL = "not-approved"
"""The code of a site where a study waits for a person's approval."""
REFUSALS = {
    APPROVAL: "the study waits there for a person's approval (fedplan site approve)",
    "refused-here": "a person there has refused the study",
    "policy": "the study is against the site's policy",
    "rounds": "more rounds are asked for than were approved",
    "unknown-run": "it does not know this run: it was not greeted in it",
    "restored": "its home is older than its last answer (fedplan site rejoin, if that is meant)",
    "past-round": "it has taken a later turn: put a newer copy of the run back, or begin another",
    "limit-rounds": "it has answered as often as it allows (limits.rounds of its policy)",
    "limit-bytes": "more would pass the bytes that it allows to leave (limits.bytes of its policy)",
    "limit-epsilon": "more would pass the epsilon that it allows (limits.epsilon of its policy)",
    "unhidden": "it has set a limit of epsilon, and a study, this or one before, hides nobody",
    "another-study": "it agreed to something else: both ends must run the same study",
    "values": "it was sent values that its plan does not have come down, or of another kind",
    "poll": "its plan chooses nothing together in this turn, or nobody pays for the choice",
    "unasked": "the study that it agreed to asks for no scores of this round",
    "few-rows": "it holds out no rows to test on, or fewer than it lets scores leave of",
    "undisclosed": "it lets none of these scores leave",
    "uncharged": "the study promises privacy, and nobody pays for scores: none leave",
    "gone-on": "it has gone on since the round that it is asked to score",
    "masked": "a step of the masked sum was not as it must be: its own log says why",
    "peers": "sums are masked, and it does not have the keys of all sites (peers of its site.toml)",
    "unsummed": "sums are masked, and scores of one site alone would tell of it: none leave",
    "unknown-name": "its study names what it does not have or allow (allow of its site.toml)",
    "request": "it knows no such request: both ends must run the same fedplan",
    "refused": "it does not do what it was asked for",
}
FAILURES = {
    "message": "it cannot read the message",
    "promise": "what the study promises of privacy is spent: the run ends here",
    "privacy": "it cannot keep what the study promises of privacy",
    "data": "its rows are not what the study asks for",
    "model": "its model cannot be loaded, or is not what the study asks for",
    "plan": "the plan does not fit its model",
    "training": "its training broke the plan, or left numbers that are not finite",
    "settings": "its study, or what its node was started with, cannot be used",
    "disk": "its disk, or what lies on it, cannot be used",
    "memory": "it has too little memory",
    "trainer": "its worker did not start, or ended again and again",
    "fault": "something that nobody foresaw",
}
LACKING = {"lacking": "it does not have what it was sent before: it needs all of it"}
KINDS = {"refused": REFUSALS, "failed": FAILURES, "lacking": LACKING}


def code_of(error: BaseException) -> str:
    """The code of an error, whatever it is."""
    if isinstance(error, FedplanError):
        return error.code if any(error.code in known for known in KINDS.values()) else "fault"
    if isinstance(error, MemoryError):
        return "memory"
    return "disk" if isinstance(error, OSError) else "fault"


def said_of(code: str) -> dict[str, str]:
    """A code as an answer says it: that it was refused, or failed, or that something is lacking."""
    kind = next((kind for kind, known in KINDS.items() if code in known), "failed")
    return {kind: code}


def told(code: str) -> str:
    """A code as an error of Flower's says it."""
    ((kind, word),) = said_of(code).items()
    return f"{kind}: {word}"


def meant(kind: str, code: str) -> str:
    """What a server makes of a code, in words of its own."""
    if code not in KINDS.get(kind, {}):
        return f"{kind}: for a reason that this server does not know"
    more = "; the site's own log says more" if kind == "failed" else ""
    return f"{kind}: {code} ({KINDS[kind][code]}{more})"


def understood(reason: str) -> str:
    """An error of Flower's, if a site of fedplan made it: in words of the server's own."""
    kind, _, code = reason.partition(": ")
    return meant(kind, code) if code in KINDS.get(kind, {}) else reason
