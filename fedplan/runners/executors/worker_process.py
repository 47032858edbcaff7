# SPDX-License-Identifier: Apache-2.0
"""Main program of a worker process of ProcessTransport."""

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

from fedplan.runners.executors.process_transport import read_frame, write_frame
from fedplan.runners.executors.worker import (
    JsonObject,
    MessageHandler,
    decode_json,
    encode_json,
    unshared_tensors,
)


def run_worker_process() -> None:
    """Reply to the messages on stdin, one after the other, until stdin is closed; then exit.

    `sys.argv` has the folder for tensor files and the worker's number. Replies go to stdout; prints
    are redirected to stderr. Never returns, and ignores Ctrl-C.
    """
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    # Ctrl-C is meant for the parent, which then stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Replies have a pipe of their own: prints must not mix with them.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    messages = Queue[JsonObject]()
    arguments = (sys.stdin.buffer, messages, folder, os.getppid())
    threading.Thread(target=_read_messages, args=arguments, daemon=True).start()
    handler = MessageHandler()
    while True:
        message = messages.get()
        file = message["file"]
        reply = handler.reply(message["fields"], lambda file=file: load_file(file) if file else {})
        try:
            target = str(folder / f"answer-{number}") if reply[0] else None
            if target is not None:
                save_file(unshared_tensors(reply[0]), target)
            answer: JsonObject = {"fields": reply[1], "file": target}
        except Exception as error:
            traceback.print_exc()
            fields = {"error": f"{type(error).__name__}: {error}", "code": ""}
            answer = {"fields": fields, "file": None}
        write_frame(replies, encode_json(answer))


def _read_messages(pipe: IO[bytes], messages: Queue[JsonObject], folder: Path, parent: int) -> None:
    """Put the messages of a pipe into a queue; exit this process when the pipe is closed.

    `parent` is the process id that started this process; if the parent was killed, `folder` with
    tensor files, which may be in memory, is removed first.
    """
    while (data := read_frame(pipe)) is not None:
        messages.put(decode_json(data))
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    run_worker_process()
