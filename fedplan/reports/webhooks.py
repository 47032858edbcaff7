# SPDX-License-Identifier: Apache-2.0
"""Send events of a run to webhooks in the background.

An event has a run, a round, a site and a text of fedplan: no values, losses or scores.
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
from fedplan.federation.run_states import SEVERITY, RunState
from fedplan.storage.logs import LogEntry

log = logging.getLogger("fedplan")
BUDGET, CERTIFICATE = "budget", "certificate"
SENT_EVENTS = {
    *(f"site {state}" for state in SEVERITY),
    *(f"run {state}" for state in (RunState.FAILED, RunState.DONE, RunState.STOPPED)),
    BUDGET,
    CERTIFICATE,
}
"""The events that are sent."""
MAX_QUEUED = 100
"""The most events queued for one URL; further ones are dropped."""
RETRY_SECONDS = 1.0
"""Seconds until a failed request is sent again."""


class Webhooks:
    """URLs that receive events, each from a thread of its own; call it with a log entry to send.

    `timeout` is in seconds per request, `tries` the most requests per event. Raises FedplanError if
    a URL is not http or https.
    """

    def __init__(self, urls: Sequence[str], *, timeout: float = 5.0, tries: int = 3) -> None:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise FedplanError(f"--webhook is {url!r}: use a URL with http:// or https://")
        self._queues = [_WebhookQueue(url, timeout, tries) for url in urls]

    def __call__(self, entry: LogEntry) -> None:
        """Queue an entry for all URLs if its event is one of SENT_EVENTS."""
        if entry.event in SENT_EVENTS:
            for queue in self._queues:
                queue.put(entry)

    def close(self, within: float = 5.0) -> None:
        """Wait until queued events are sent, for `within` seconds at most."""
        until = time.monotonic() + within
        for queue in self._queues:
            queue.close(max(0.0, until - time.monotonic()))


class _WebhookQueue:
    """The events queued for one URL, and the thread that sends them."""

    def __init__(self, url: str, timeout: float, tries: int) -> None:
        self._url, self._timeout, self._tries = url, timeout, tries
        self._queue = Queue[LogEntry | None](MAX_QUEUED)
        self._thread = threading.Thread(target=self._send_all, name="webhook", daemon=True)
        self._thread.start()

    def put(self, entry: LogEntry) -> None:
        """Queue an entry; with a full queue, drop it and log a warning."""
        try:
            self._queue.put_nowait(entry)
        except Full:
            log.warning("webhook %s is too slow: an event was dropped", self._url)

    def close(self, within: float) -> None:
        """Let the thread end after the queued events; wait `within` seconds for it."""
        with suppress(Full):
            self._queue.put_nowait(None)
        self._thread.join(within)

    def _send_all(self) -> None:
        """Send queued entries until None comes; log a warning if all tries of one fail."""
        while (entry := self._queue.get()) is not None:
            for left in reversed(range(self._tries)):
                if self._send(entry):
                    break
                if left:
                    time.sleep(RETRY_SECONDS)
            else:
                log.warning("webhook %s did not receive the event: %s", self._url, entry.event)

    def _send(self, entry: LogEntry) -> bool:
        """Post an entry as JSON once; return whether it succeeded."""
        event = {"source": "fedplan", **asdict(entry)}
        request = Request(  # noqa: S310 - only http and https URLs are accepted
            self._url,
            data=json.dumps(event).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "fedplan"},
        )
        try:
            with urlopen(request, timeout=self._timeout):  # noqa: S310
                return True
        except (OSError, HTTPException, ValueError):
            return False
