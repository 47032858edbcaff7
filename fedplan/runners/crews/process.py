# SPDX-License-Identifier: Apache-2.0
"""Worker processes of a pool: what each of them runs, from its first message to its last."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from queue import Queue
from typing import IO

from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from fedplan.federation.partial import Sent
from fedplan.runners.crews.player import Hand, Words, apart, read_words, worded
from fedplan.runners.crews.pool import read, write


def main() -> None:
    """Answer message after message, until whoever sends them is gone."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    # Ctrl-C is meant for the run: its own process then ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Answers have a pipe of their own: whatever else is printed must not run into them.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    asked = Queue[Words]()
    listened = (sys.stdin.buffer, asked, folder, os.getppid())
    threading.Thread(target=_listen, args=listened, daemon=True).start()
    hand = Hand()
    while True:
        message = asked.get()
        file = message["file"]
        answer = hand.answer(message["said"], lambda file=file: load_file(file) if file else {})
        write(answers, worded(_kept(folder / f"answer-{number}", answer)))


def _kept(file: Path, answer: Sent) -> Words:
    """An answer whose tensors lie in a file; one that found no room there is an error."""
    tensors, said = answer
    try:
        if tensors:
            save_file(apart(tensors), file)
    except Exception as error:
        traceback.print_exc()
        return {"said": {"error": f"{type(error).__name__}: {error}", "code": ""}, "file": None}
    return {"said": said, "file": str(file) if tensors else None}


def _listen(pipe: IO[bytes], asked: Queue[Words], folder: Path, sender: int) -> None:
    """Take messages as they come; without a sender this process ends, in whatever it is at.

    A sender that was killed left its folder, which may lie in memory.
    """
    while (data := read(pipe)) is not None:
        asked.put(read_words(data))
    if os.getppid() != sender:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
