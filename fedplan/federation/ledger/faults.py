# SPDX-License-Identifier: Apache-2.0
"""Errors of a site: the codes that it sends to the server, and its own log with tracebacks.

The text of an error may reveal examples, labels, columns or paths, so it never leaves the site, and
the log is encrypted if the site has a key. The server shows a sentence for each code.
"""

from __future__ import annotations

import json
import traceback
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path

from fedplan.errors import FedplanError, StoreError
from fedplan.storage.append_log import AppendLog
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import make_folder
from fedplan.storage.logs import utc_now

APPROVAL = "not-approved"
"""Code of a study that waits for approval at the site."""
REFUSALS = {
    APPROVAL: "the study waits for approval at the site (fedplan site approve)",
    "study-refused": "the site's operator has refused the study",
    "policy": "the site's policy does not allow the study",
    "too-many-studies": "it was offered too many studies within a day (limits.studies_per_day)",
    "too-many-rounds": "the run has more rounds than the site approved",
    "unknown-run": "the site does not know this run: it received no hello of it",
    "outdated-state": "its client state is older than its last reply (fedplan site rejoin)",
    "past-round": "it has trained a later round: restore a newer copy of the run, or start another",
    "limit-rounds": "its limit of replies is reached (limits.rounds of its policy)",
    "limit-bytes": "its limit of bytes is reached (limits.bytes of its policy)",
    "limit-epsilon": "its limit of epsilon is reached (limits.epsilon of its policy)",
    "unprotected": "it limits epsilon, and this or an earlier study has no differential privacy",
    "another-study": "it agreed to another study: server and site must run the same one",
    "unexpected-values": "it received values that are not in the plan, or of wrong shape or dtype",
    "no-scoring": "this round has no joint choice of layers, or privacy does not cover it",
    "no-evaluation": "its study has no evaluation in this round",
    "few-examples": "it has fewer test examples than its policy requires for metrics",
    "metrics-not-allowed": "its policy allows none of these metrics, or no score counts",
    "metrics-not-private": "the study's differential privacy does not cover metrics: none are sent",
    "later-round": "it has trained a later round than the one to be evaluated",
    "statistics": "its policy allows no counts of its data, or the study asks for none",
    "dictionary": "its data differ from the study's data dictionary (statistics.require)",
    "other-statistics": "it has sent counts of these columns in other cells, of another split, or "
    "by another [statistics] of its policy",
    "secagg": "a step of secure aggregation failed its checks: see the site's log",
    "peer-keys": "it lacks other sites' keys for secure aggregation (peer_keys of its site.toml)",
    "metrics-not-summed": "metrics of a single site are not sent under secure aggregation or "
    "privacy, and this task has no score counts",
    "unknown-name": "its study names code that it does not have or allow (see allow_packages)",
    "unknown-request": "it does not know this request: server and site must run the same fedplan",
    "refused": "it refuses the request",
}
"""Codes of requests that a site refuses."""
FAILURES = {
    "message": "it cannot read the message",
    "epsilon": "the study's epsilon is spent: the run ends here",
    "privacy": "it cannot guarantee the study's privacy",
    "data": "its examples are not what the study expects",
    "model": "its model cannot be loaded, or is not the study's",
    "plan": "the plan does not fit its model",
    "training": "its training changed frozen params, or gave values that are not finite",
    "settings": "its study, or the settings of its node, are invalid",
    "disk": "its disk, or a file on it, cannot be used",
    "memory": "it has too little memory",
    "worker": "its worker did not start, or ended again and again",
    "internal": "an unexpected error",
}
"""Codes of errors at a site."""
MISSING = {"missing-values": "it has lost values that it received before: it needs all of them"}
KINDS = {"refused": REFUSALS, "failed": FAILURES, "missing": MISSING}
"""All codes with their sentences, by the kind of the answer."""


def error_code_of(error: BaseException) -> str:
    """Return the code of an exception: a FedplanError's `code`, else memory, disk or internal."""
    if isinstance(error, FedplanError):
        return error.code if any(error.code in codes for codes in KINDS.values()) else "internal"
    if isinstance(error, MemoryError):
        return "memory"
    return "disk" if isinstance(error, OSError) else "internal"


def error_fields(code: str) -> dict[str, str]:
    """Return the fields of an error answer: the code by its kind, as {"refused": "policy"}."""
    kind = next((kind for kind, codes in KINDS.items() if code in codes), "failed")
    return {kind: code}


def encode_code(code: str) -> str:
    """Return a code as the reason of a Flower error, as "refused: policy"."""
    ((kind, code),) = error_fields(code).items()
    return f"{kind}: {code}"


def describe_code(kind: str, code: str) -> str:
    """Return the server's sentence for a code of a kind (refused, failed, missing).

    An unknown code, as of a newer or malicious client, gives a general sentence without the code.
    """
    if code not in KINDS.get(kind, {}):
        return f"{kind}: for a reason that this server does not know"
    more = "; the site's log says more" if kind == "failed" else ""
    return f"{kind}: {code} ({KINDS[kind][code]}{more})"


def decode_reason(reason: str) -> str:
    """Return the sentence for a reason made by `encode_code`; return any other reason unchanged."""
    kind, _, code = reason.partition(": ")
    return describe_code(kind, code) if code in KINDS.get(kind, {}) else reason


LOG = "faults.log"
MAX_LOG_BYTES = 4 << 20
"""Size after which the log is renamed to .old: a server may cause errors without end."""
_PURPOSE = "fault of a site"
"""Purpose of the encryption, bound to each line."""


class FaultLog:
    """Append-only error log of a site in `folder`/faults.log.

    `encryption`: encrypts each line; None writes plain JSON. The folder is created by the first
    `append`. Above 4 MiB the file is renamed to faults.old, over an earlier one.
    """

    def __init__(self, folder: Path, encryption: Encryption | None = None) -> None:
        self.folder, self._encryption = folder, encryption

    def append(self, error: BaseException) -> str:
        """Append the time, error code and traceback of an error, and return the error code.

        A disk error while writing is ignored, so that the caller can still report the error.
        """
        code = error_code_of(error)
        text = "".join(traceback.format_exception(error))
        line = {"time": utc_now(), "code": code, "text": text}
        if self._encryption is not None:
            encrypted = self._encryption.encrypt(json.dumps(line).encode(), _PURPOSE)
            line = {"encrypted": b64encode(encrypted).decode()}
        with suppress(OSError, StoreError):
            make_folder(self.folder)
            file = self.folder / LOG
            if file.exists() and file.stat().st_size > MAX_LOG_BYTES:
                file.replace(file.with_suffix(".old"))
            AppendLog(file).append(line)
        return code


def read_faults(folder: Path, encryption: Encryption | None = None) -> list[str]:
    """Return the errors in a site folder's log as text (time, code, traceback), oldest first.

    The renamed older log is not read. A line that is damaged, or encrypted while `encryption` is
    None, becomes a remark. Raises FedplanError if there is no log.
    """
    try:
        lines = (folder / LOG).read_bytes().splitlines()
    except OSError as error:
        raise FedplanError(f"{folder} has no error log: {error}") from error
    texts = list[str]()
    for line in lines:
        try:
            fields = json.loads(line)
            if "encrypted" in fields:
                if encryption is None:
                    texts.append("an encrypted line: give the site's key (--key)")
                    continue
                fields = json.loads(encryption.decrypt(b64decode(fields["encrypted"]), _PURPOSE))
            texts.append(f"{fields['time']} {encode_code(fields['code'])}\n{fields['text']}")
        except (FedplanError, ValueError, KeyError, TypeError) as error:
            texts.append(f"a line that cannot be read: {error}")
    return texts
