# SPDX-License-Identifier: Apache-2.0
"""Worker process of a sweep: reads trials as JSON lines, and writes results as JSON lines."""

from __future__ import annotations

import os
import signal
import sys
import threading
from queue import Queue

from fedplan.sweeps.trial_runner import run_trial_request


def run_trial_process() -> None:
    """Run the trials that arrive on stdin until it is closed; SIGTERM interrupts a trial.

    Results go to the original stdout; everything else that is printed goes to stderr.
    """
    # Ctrl-C goes to the sweep, which then ends its worker processes in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests = Queue[str]()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    try:
        while True:
            results.write(run_trial_request(requests.get()) + "\n")
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)


def _read_requests(requests: Queue[str]) -> None:
    """Put the lines of stdin into a queue; end the process at once when stdin is closed."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    run_trial_process()
