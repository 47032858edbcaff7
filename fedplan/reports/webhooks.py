# SPDX-License-Identifier: Apache-2.0
"""Webhooks: addresses that are told what an operator should hear of, while no round waits for it.

What is sent is an event, a run, a round, a site and words of our own: no values, losses or scores.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from http.client import HTTPException
from queue import Full, Queue
from urllib.request import Request, urlopen

from fedplan.errors import FedplanError
from fedplan.federation.states import GRAVE, RunState
from fedplan.storage.logs import Entry

log = logging.getLogger("fedplan")
BUDGET, CERTIFICATE = "budget", "certificate"
TOLD = {
    *(f"site {state}" for state in GRAVE),
    *(f"run {state}" for state in (RunState.FAILED, RunState.DONE, RunState.STOPPED)),
    BUDGET,
    CERTIFICATE,
}
"""The events that are sent."""
MOST = 100
"""Events that may wait for one address; what comes beside them is left out."""
AGAIN = 1.0
"""Seconds until an address that did not answer is tried again."""


class Webhooks:
    """Addresses that are told, each by a thread of its own: one that hangs delays no other."""

    def __init__(self, urls: Sequence[str], *, timeout: float = 5.0, tries: int = 3) -> None:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise FedplanError(
                    f"--webhook is {url!r}: give an address with http:// or https://"
                )
        self._lines = [_Line(url, timeout, tries) for url in urls]

    def __call__(self, entry: Entry) -> None:
        """Put an event in line, if it is one that is sent."""
        if entry.event in TOLD:
            for line in self._lines:
                line.put(entry)

    def close(self, within: float = 5.0) -> None:
        """Wait for what is in line, but not for long."""
        until = time.monotonic() + within
        for line in self._lines:
            line.close(max(0.0, until - time.monotonic()))


class _Line:
    """The events that wait for one address."""

    def __init__(self, url: str, timeout: float, tries: int) -> None:
        self._url, self._timeout, self._tries = url, timeout, tries
        self._queue = Queue[Entry | None](MOST)
        self._thread = threading.Thread(target=self._send_all, name="webhook", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        try:
            self._queue.put_nowait(entry)
        except Full:
            log.warning("%s does not keep up: an event is left out", self._url)

    def close(self, within: float) -> None:
        with suppress(Full):
            self._queue.put_nowait(None)
        self._thread.join(within)

    def _send_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            for left in reversed(range(self._tries)):
                if self._sent(entry):
                    break
                if left:
                    time.sleep(AGAIN)
            else:
                log.warning("%s was not told: %s", self._url, entry.event)

    def _sent(self, entry: Entry) -> bool:
        said = {"source": "fedplan", **asdict(entry)}
        asked = Request(  # noqa: S310 - only http and https are let in
            self._url,
            data=json.dumps(said).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "fedplan"},
        )
        try:
            with urlopen(asked, timeout=self._timeout):  # noqa: S310
                return True
        except (OSError, HTTPException, ValueError):
            return False
