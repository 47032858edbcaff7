# SPDX-License-Identifier: Apache-2.0
"""A process that plays runs of a sweep: a line in says which, a line out how it ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
from queue import Queue

from fedplan.sweeps.hands import answered


def main() -> None:
    """Play run after run, until whoever asks for them is gone."""
    # Ctrl-C is meant for the sweep, which then ends its processes in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Answers have a pipe of their own: whatever else is printed must not run into them.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asked = Queue[str]()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    try:
        while True:
            answers.write(answered(asked.get()) + "\n")
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)


def _listen(asked: Queue[str]) -> None:
    """Take lines as they come; without a sender this process ends, in whatever it is at."""
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
