# SPDX-License-Identifier: Apache-2.0
"""The inbox of a site: the studies that servers have offered to it."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.federation.messages import RequestRefused
from fedplan.naming import allow_imports
from fedplan.runners.site import INBOX_FOLDER
from fedplan.storage.files import make_folder, write_atomic
from fedplan.studies.schema import Study, study_from_dict

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
