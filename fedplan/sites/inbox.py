# SPDX-License-Identifier: Apache-2.0
"""Inboxes: the studies that were offered to a site, each as it came, by its whole digest."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.federation.account import private_folder
from fedplan.federation.messages import Refused
from fedplan.naming import allowing
from fedplan.storage.files import put_file
from fedplan.studies.schema import Study, study_of

INBOX = "inbox"
"""In a home: the studies that were offered."""
MOST, LARGEST = 200, 1 << 20
"""Studies that an inbox holds, and the bytes of one: a server may offer without end."""


@dataclass(frozen=True)
class Offer:
    """A study as it came: when, and the digest of the certificate of the server it came from."""

    whole: str
    study: Study
    time: str
    server: str = ""


class Inbox:
    """The inbox of a home. `allow` are packages that a study may name code of."""

    def __init__(self, home: Path, allow: Sequence[str] = ()) -> None:
        self.folder, self.allow = home / INBOX, tuple(allow)

    def wholes(self) -> list[str]:
        """The digests of all studies that were offered, the oldest first."""
        found = self.folder.glob("*.json") if self.folder.exists() else ()
        return [file.stem for file in sorted(found, key=lambda file: file.stat().st_mtime_ns)]

    def put(self, study: Study, *, server: str = "", said: Container[str] = ()) -> bool:
        """Keep a study as it came; whether it is new here.

        A full inbox lets go of the oldest that nobody has `said` anything to.
        """
        with allowing(self.allow):
            file = self._file(study.whole)
        if file.exists():
            return False
        time = datetime.now(UTC).isoformat(timespec="seconds")
        offer = {"study": study.model_dump(mode="json"), "time": time, "server": server}
        text = json.dumps(offer, indent=1, sort_keys=True) + "\n"
        there = self.wholes()
        idle = [whole for whole in there if whole not in said]
        if len(text) > LARGEST or (len(there) >= MOST and not idle):
            raise Refused(
                f"{self.folder} takes {MOST} studies of {LARGEST} bytes at the most: take away "
                "those that nobody needs"
            ).coded("not-approved")
        if len(there) >= MOST:
            self._file(idle[0]).unlink(missing_ok=True)
        private_folder(self.folder)
        put_file(file, text, mode=0o600)
        return True

    def read(self, whole: str) -> Offer:
        """A study as it came, if it is what its digest says."""
        file = self._file(whole)
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
            with allowing(self.allow):
                study = study_of(said["study"])
                same = study.whole == whole
            found = Offer(whole, study, str(said["time"]), str(said["server"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FedplanError(f"{file} cannot be read: {error}; have it offered again") from error
        if not same:
            raise FedplanError(
                f"{file} is no longer the study that came, or the code that it names has changed: "
                "remove the file, and have it offered again"
            )
        return found

    def find(self, prefix: str) -> str:
        """The digest of the one study that begins so."""
        found = [whole for whole in self.wholes() if prefix and whole.startswith(prefix)]
        if not found:
            raise FedplanError(
                f"no study {prefix!r} was offered here: `fedplan site inbox` lists those that were"
            )
        if len(found) > 1:
            some = ", ".join(whole[:16] for whole in found[:4])
            raise FedplanError(f"{prefix!r} begins {len(found)} studies: say more of {some}")
        return found[0]

    def _file(self, whole: str) -> Path:
        return self.folder / f"{whole}.json"
