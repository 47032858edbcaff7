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
    """Run the trials that arrive on stdin as JSON lines; never returns.

    Writes one JSON line for each to the original stdout; everything else that is printed goes to
    stderr. Ends the process at once with code 0 when stdin is closed, and with code 1 on SIGTERM
    (the trial can be resumed) or if nobody reads the results.
    """
    # Ctrl-C goes to the sweep, which then ends its worker processes in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests = Queue[str]()

    def read_requests() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)

    threading.Thread(target=read_requests, daemon=True).start()
    try:
        while True:
            results.write(run_trial_request(requests.get()) + "\n")
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)


if __name__ == "__main__":
    run_trial_process()
