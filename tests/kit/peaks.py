# SPDX-License-Identifier: Apache-2.0
"""Peak memory of the ends of a federation, each in a process of its own, as multiples of its model.

`python peaks.py local gpt2-bf16` plays two rounds and prints what the process held at most. A model
is made at random in memory; what stood there before it is taken off. Rows are few and short, so
that activations do not count. `server` starts a process for each of its sites and tells their peaks
too: a message goes through a pipe, so that no end holds what is another's.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FLOWER_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""So that what is let go is given back: else a peak would tell of the allocator."""
ROUNDS, CLIENTS, TOKENS = 2, 3, 2


@dataclass(frozen=True)
class Case:
    """A model by its type and settings, its dtype, and the method that trains it."""

    type: str
    settings: dict[str, Any]
    dtype: str
    method: str
    options: dict[str, Any]
    sites: int = 2
    plan: str = ""


TINY = Case(
    "gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}, "float32", "fedavg", {}
)
SMALL = {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 8192, "n_positions": 64}
LLAMA = {
    **{"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256},
    **{"tie_word_embeddings": True, "head_dim": 64},
}
CASES = {
    "small-float32": Case("gpt2", SMALL, "float32", "fedavg", {}),
    "small-bf16": Case("gpt2", SMALL, "bfloat16", "fedavg", {}),
    "small-lora": Case("gpt2", SMALL, "bfloat16", "fedit", {"rank": 4, "with_head": False}),
    "gpt2-float32": Case("gpt2", {}, "float32", "fedavg", {}),
    "gpt2-bf16": Case("gpt2", {}, "bfloat16", "fedavg", {}),
    "llama-lora": Case(
        "llama", LLAMA, "bfloat16", "fedit", {"rank": 8, "with_head": False}, sites=1
    ),
    "llama-safl": Case(
        # Its head is its embedding, which stays frozen: half of the blocks are what is trained.
        *("llama", LLAMA, "bfloat16", "safl", {"k": 8}),
        sites=1,
        plan="chain(freeze(), best(8))",
    ),
}


class Words:
    """A few short rows of words."""

    def __init__(self, seed: int) -> None:
        import torch

        drawn = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(3, 90, (1, TOKENS), generator=drawn)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Any) -> dict[str, Any]:
        return {"input_ids": self.rows[indices], "labels": self.rows[indices]}


def loss(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def held() -> int:
    """The bytes of this process that are in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """The bytes of this process that were in memory at most."""
    return _status("VmHWM")


def _status(word: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(word))


def made(case: Case) -> tuple[Any, Any]:
    """A model at random, and what is agreed on with it."""
    import torch
    import transformers

    from fedplan.federation.agreement import Agreement
    from fedplan.language.parser import parse
    from fedplan.methods.registry import method_by_name
    from fedplan.models.description import describe
    from fedplan.training.fit import TrainArguments
    from fedplan.training.optimizers import sgd

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.type, **case.settings)
    torch.set_default_dtype(getattr(torch, case.dtype))
    model = transformers.AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    method = method_by_name(case.method, case.options)
    if case.plan:
        method = replace(method, plan=parse(case.plan))
    model = method.adapt(model) if method.adapt is not None else model
    train_arguments = TrainArguments(optimizer=sgd(), lr=1e-4, batch_size=1, steps=1)
    return model, Agreement("peaks", describe(model), method, train_arguments)


def measured(case: Case, play: Callable[[Any, Any], None]) -> dict[str, Any]:
    """What an end held at most over what it had without a model."""
    import torch

    torch.set_num_threads(1)
    _undrawn()
    import peft
    import transformers
    from transformers.models.gpt2 import modeling_gpt2
    from transformers.models.llama import modeling_llama

    import fedplan.federation.endpoint
    import fedplan.runners.flower.server
    import fedplan.runners.local  # noqa: F401

    _ = peft, transformers, modeling_gpt2, modeling_llama
    # What is loaded when it is first used is no part of what a run holds.
    _play(*made(TINY))
    gc.collect()
    before = held()
    model, agreement = made(case)
    gc.collect()
    # Whatever it took to make a model is over: the peak starts from what is now there.
    Path("/proc/self/clear_refs").write_text("5")
    base = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.nbytes for p in agreement.trainable)
    whole, given = held() - before, [model]
    del model
    # The only reference: an end that needs no model may let it go.
    play(given.pop(), agreement)
    most = peak() - before
    return {
        "model_bytes": base,
        "trained_bytes": trained,
        "made": round(whole / base, 2),
        "peak": round(most / base, 2),
        "limit": round((4 * trained + 1.1 * base) / base, 2),
    }


def _undrawn() -> None:
    """Have new weights filled and not drawn: a billion random numbers take a minute."""
    from torch.nn import init

    def filled(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor.data.fill_(0.01)

    for name in ("kaiming_uniform_", "uniform_", "normal_", "trunc_normal_"):
        setattr(init, name, filled)


def local(case: Case) -> dict[str, Any]:
    return measured(case, _play)


def _play(model: Any, agreement: Any) -> None:
    from fedplan.runners.local import Federation

    rows = {f"client-{n}": Words(n) for n in range(CLIENTS)}
    with tempfile.TemporaryDirectory(dir=room()) as folder:
        fed = Federation(agreement, model, rows, loss, Path(folder), rounds=ROUNDS)
        for _ in range(ROUNDS):
            fed.commit(fed.run_round())


def server(case: Case, name: str) -> dict[str, Any]:
    from flwr.app import Context

    found = dict[str, Any]()

    def play(model: Any, agreement: Any) -> None:
        from grids import InProcess

        from fedplan.federation.ledger.digests import digest_initial_model
        from fedplan.federation.participation import Timeouts
        from fedplan.federation.server import Server
        from fedplan.models.values import get_values
        from fedplan.runners.flower.apps import client_app
        from fedplan.runners.flower.server import ServerLoop
        from fedplan.tensors.message import Message

        with tempfile.TemporaryDirectory(dir=room()) as folder:
            names = [f"client-{n}" for n in range(case.sites)]
            start = get_values(model, agreement.trainable)
            marks = digest_initial_model(model, agreement.params, start).short_digests
            made = Server(
                agreement,
                start,
                Path(folder),
                rounds=ROUNDS,
                roster={each: {} for each in names},
                start_digests=marks,
            )
            del start, model
            sites = {
                each: Far([name, each, made.agreement.run, f"{folder}/{each}"]) for each in names
            }

            def answer(context: Context, kind: str, message: Message) -> Message:
                return sites[str(context.node_config["name"])].answer(kind, message)

            grid = InProcess(client_app(answer), [{"name": each} for each in names])
            ServerLoop(grid, made, Timeouts(poll_interval=0.01), quorum=case.sites).run()
            found["sites"] = [each.end() for each in sites.values()]

    return measured(case, play) | found


class Far:
    """A site in a process of its own, asked through a pipe."""

    def __init__(self, words: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "site", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def answer(self, kind: str, message: Any) -> Any:
        from fedplan.tensors.message import Message

        pipe: Any = self.process.stdin
        pipe.write(kind.ljust(16).encode())
        message.write(pipe)
        return Message.read(self.process.stdout)  # pyright: ignore[reportArgumentType]

    def end(self) -> dict[str, Any]:
        out, _ = self.process.communicate(b"over".ljust(16))
        return json.loads(out)


def site(case: Case, client: str, run: str, folder: str) -> dict[str, Any]:
    # What is printed by others must not stand among the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def play(model: Any, agreement: Any) -> None:
        from fedplan.federation.client import Client, TrainSetup
        from fedplan.federation.endpoint import Endpoint, open_journal, site_run_folder
        from fedplan.federation.ledger.digests import digest_initial_model
        from fedplan.models.values import get_values
        from fedplan.tensors.message import Message

        agreement, place = replace(agreement, run=run), Path(folder)
        start = get_values(model, agreement.trainable)
        base = digest_initial_model(model, agreement.params, start)
        made = Endpoint(
            agreement,
            Client(
                name=client,
                examples=Words(1),
                journal=open_journal(site_run_folder(place, run)),
                setup=TrainSetup(model, loss, start, base),
            ),
            place,
        )
        while (kind := sys.stdin.buffer.read(16).decode().strip()) not in ("", "over"):
            answer = made.answer(kind, Message.read(sys.stdin.buffer))  # pyright: ignore
            answer.write(out)  # pyright: ignore[reportArgumentType]
            del answer

    found = measured(case, play)
    out.write(json.dumps(found).encode())
    out.flush()
    return found


def room() -> str | None:
    """Where a run may be kept: on a disk, for what is in memory counts."""
    return os.environ.get("PEAKS_FOLDER")


def peaks(place: str, name: str) -> dict[str, Any]:
    """The peaks of a case at one place, played in a process of its own."""
    kit = Path(__file__)
    path = os.pathsep.join(
        [
            str(kit.parent),
            str(kit.parent.parent.parent),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    said = {**os.environ, **FLOWER_ENVIRONMENT, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(kit), place, name], env=said, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    word, name, *more = sys.argv[1:]
    case = CASES[name]
    if word == "site":
        site(case, *more)
    else:
        sys.stdout.write(json.dumps(server(case, name) if word == "server" else local(case)) + "\n")
