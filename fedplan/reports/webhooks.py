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
from functools import partial
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
    """Sends events of a run to `urls`; call an instance with a log entry to queue the entry.

    Each URL has a daemon thread and a queue of MAX_QUEUED entries. `timeout` is in seconds per
    request, `tries` the most requests per entry. Call `close` at the end. Raises FedplanError if a
    URL is not http or https.
    """

    def __init__(self, urls: Sequence[str], *, timeout: float = 5.0, tries: int = 3) -> None:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise FedplanError(f"--webhook is {url!r}: use a URL with http:// or https://")
        self._senders = list[tuple[str, Queue[LogEntry | None], threading.Thread]]()
        for url in urls:
            queue = Queue[LogEntry | None](MAX_QUEUED)
            work = partial(_send_all, url, queue, timeout, tries)
            thread = threading.Thread(target=work, name="webhook", daemon=True)
            thread.start()
            self._senders.append((url, queue, thread))

    def __call__(self, entry: LogEntry) -> None:
        """Queue an entry for all URLs if its event is in SENT_EVENTS; else ignore the entry.

        A full queue drops the entry and logs a warning.
        """
        for url, queue, _ in self._senders if entry.event in SENT_EVENTS else ():
            try:
                queue.put_nowait(entry)
            except Full:
                log.warning("webhook %s is too slow: an event was dropped", url)

    def close(self, within: float = 5.0) -> None:
        """Wait until the queued events are sent, `within` seconds at most for all URLs together."""
        until = time.monotonic() + within
        for _, queue, thread in self._senders:
            with suppress(Full):
                queue.put_nowait(None)
            thread.join(max(0.0, until - time.monotonic()))


def _send_all(url: str, queue: Queue[LogEntry | None], timeout: float, tries: int) -> None:
    """Post queued entries to a URL as JSON until None is queued.

    A failed request, also after `timeout` seconds, is repeated after RETRY_SECONDS, with `tries`
    requests in all; then the entry is dropped and a warning logged.
    """
    while (entry := queue.get()) is not None:
        request = Request(  # noqa: S310 - only http and https URLs are accepted
            url,
            data=json.dumps({"source": "fedplan", **asdict(entry)}).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "fedplan"},
        )
        for left in reversed(range(tries)):
            try:
                with urlopen(request, timeout=timeout):  # noqa: S310
                    break
            except (OSError, HTTPException, ValueError):
                if left:
                    time.sleep(RETRY_SECONDS)
        else:
            log.warning("webhook %s did not receive the event: %s", url, entry.event)
