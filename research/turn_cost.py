# SPDX-License-Identifier: Apache-2.0
"""What a round of the local runner costs in CPU time, beside bare torch that does the same.

    python research/turn_cost.py            # every row of the table, five repetitions each
    python research/turn_cost.py vit 1      # one row
    python research/turn_cost.py vit 1 --profile
    python research/turn_cost.py --shown    # results/turn-cost.json: syncs of a turn, and commands

Rounds of the two are taken in turns, so that what else the machine does meets both.
"""

from __future__ import annotations

import copy
import cProfile
import json
import os
import platform
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from study import FACTS
from torch import Tensor, nn

from fedplan import seeds
from fedplan.federation.agreement import Agreement
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.runners.site import read_site
from fedplan.sites.approvals import site_approvals
from fedplan.studies.schema import read_study
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import sgd

OUT = Path(__file__).parent / "results" / "turn_cost.txt"
SHOWN = Path(__file__).parent / "results" / "turn-cost.json"
STUDY = """
name = "digits"
threads = 1
[model]
type = "vit"
config = {{ image_size = 16, patch_size = 8, hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 4, intermediate_size = 64 }}
[task]
kind = "image-classification"
input = "image"
label = "digit"
image_size = 16
labels = [0, 1, 2]
[data]
path = "{folder}/digits.npz"
partition = "column"
partition_column = "site"
num_clients = 4
[method]
name = "fedper"
[train]
rounds = 5
optimizer = "sgd"
lr = 0.01
steps = 2
batch_size = 8
"""
ROWS = (("vit", 1), ("vit", 4), ("minilm", 1), ("minilm", 4))
RATE = 0.01


@dataclass(frozen=True)
class Rows:
    """Rows that a model takes: what is timed does not depend on what they show."""

    held: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.held["labels"])

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some of them."""
        return {name: values[indices] for name, values in self.held.items()}


@dataclass(frozen=True)
class Work:
    """A model, the rows of a client, how many clients there are, and rows of a step."""

    model: Callable[[], nn.Module]
    rows: Callable[[int, torch.Generator], Rows]
    clients: int
    batch: int
    rounds: int = 1


def vit() -> nn.Module:
    """0.2 million params in 72 tensors."""
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def minilm() -> nn.Module:
    """The shape of MiniLM-L6: 22.7 million params, half of them in one table."""
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        num_labels=6, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def pictures(count: int, generator: torch.Generator) -> Rows:
    """Noise with labels."""
    pixels = torch.randn(count, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return Rows({"pixel_values": pixels, "labels": labels})


def texts(count: int, generator: torch.Generator) -> Rows:
    """Texts of 64 tokens, with labels."""
    ids = torch.randint(5, 30000, (count, 64), generator=generator)
    return Rows({"input_ids": ids, "labels": torch.randint(6, (count,), generator=generator)})


WORKS = {
    "vit": Work(vit, pictures, clients=10, batch=4, rounds=8),
    "minilm": Work(minilm, texts, clients=4, batch=16),
}


@dataclass
class Cost:
    """CPU seconds of a turn, ours and bare, of each repetition."""

    name: str
    steps: int
    ours: list[float] = field(default_factory=list[float])
    bare: list[float] = field(default_factory=list[float])

    @property
    def ratios(self) -> list[float]:
        """Ours over bare, of each repetition, in order."""
        return sorted(one / other for one, other in zip(self.ours, self.bare, strict=True))

    def __str__(self) -> str:
        ours, bare = statistics.median(self.ours), statistics.median(self.bare)
        found = self.ratios
        return (
            f"{self.name:7} {self.steps:5} {statistics.median(found):6.2f} "
            f"{found[0]:6.2f} {found[-1]:6.2f} {1e3 * ours:9.1f} {1e3 * bare:9.1f} "
            f"{1e3 * (ours - bare):9.1f}"
        )


HEAD = f"{'model':7} {'steps':>5} {'ratio':>6} {'least':>6} {'most':>6} {'ours ms':>9} {'bare ms':>9} {'over ms':>9}"


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss that a model of transformers works out itself."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    return nn.functional.cross_entropy(model(**inputs).logits, batch["labels"])


def bare_round(
    model: nn.Module,
    world: dict[str, Tensor],
    rows: dict[str, Rows],
    train_arguments: TrainArguments,
    number: int,
) -> None:
    """One round without fedplan: load, train, average."""
    total = sum(map(len, rows.values()))
    mean = {key: torch.zeros_like(value) for key, value in world.items()}
    for name, held in rows.items():
        model.load_state_dict(world)
        seed = seeds.seed("bench", "fit", number, name)
        torch.manual_seed(seed)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=train_arguments.lr)
        for indices in train_arguments.draw_steps(held, seed):
            found = loss(model, held.batch(indices))
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.item()
        for key, value in model.state_dict().items():
            mean[key].add_(value, alpha=len(held) / total)
    world |= mean


def rounds_of(
    name: str, steps: int, folder: Path
) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """A round of ours, and one of bare torch, again and again."""
    work, generator = WORKS[name], torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    train_arguments = TrainArguments(sgd(), lr=RATE, batch_size=work.batch, steps=steps)
    model = work.model()
    twin = copy.deepcopy(model)
    world = {key: value.clone() for key, value in twin.state_dict().items()}
    count = work.batch * steps
    rows = {f"client-{i}": work.rows(count, generator) for i in range(work.clients)}
    agreement = Agreement("bench", describe(model), method_by_name("fedavg"), train_arguments)
    federation = Federation(agreement, model, rows, loss, folder, rounds=10**6)
    number = 0

    def ours() -> None:
        federation.commit(federation.run_round())

    def bare() -> None:
        bare_round(twin, world, rows, train_arguments, number)

    while True:
        number += 1
        yield ours, bare


def seconds(step: Callable[[], None]) -> float:
    """CPU seconds of a step."""
    started = time.process_time()
    step()
    return time.process_time() - started


def measured(name: str, steps: int, repetitions: int = 5) -> Cost:
    """The cost of a turn of some steps; the first round of each warms up."""
    cost, work = Cost(name, steps), WORKS[name]
    with tempfile.TemporaryDirectory() as folder:
        pairs = rounds_of(name, steps, Path(folder))
        for each in next(pairs):
            each()
        for _ in range(repetitions):
            spent = [0.0, 0.0]
            for _ in range(work.rounds):
                for at, each in enumerate(next(pairs)):
                    spent[at] += seconds(each)
            cost.ours.append(spent[0] / work.clients / work.rounds)
            cost.bare.append(spent[1] / work.clients / work.rounds)
    return cost


def profiled(name: str, steps: int, rounds: int = 10) -> None:
    """Where the time of our rounds goes."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = rounds_of(name, steps, Path(folder))
        next(pairs)[0]()
        profile = cProfile.Profile(time.process_time)
        for _ in range(rounds):
            profile.runcall(next(pairs)[0])
        pstats.Stats(profile).sort_stats("cumtime").print_stats(60)


def turns(name: str, steps: int) -> dict[str, Any]:
    """Syncs, wall and CPU milliseconds of a turn, the commit of its round counted in."""
    work, counts, times = WORKS[name], [0], list[tuple[float, float]]()
    count = {each: counted(getattr(os, each), counts) for each in ("fsync", "fdatasync", "sync")}
    with tempfile.TemporaryDirectory() as folder, patch.multiple(os, **count):
        pairs = rounds_of(name, steps, Path(folder))
        next(pairs)[0]()
        counts[0] = 0
        for _ in range(2 * work.rounds):
            began = time.monotonic(), time.process_time()
            next(pairs)[0]()
            times.append((time.monotonic() - began[0], time.process_time() - began[1]))
    wall, cpu = (1e3 * statistics.median(each) / work.clients for each in zip(*times, strict=True))
    fsyncs = counts[0] / len(times) / work.clients
    what = f"a turn, {name}, steps: {steps}, clients: {work.clients}"
    print(what, f"{cpu:.1f} ms", flush=True)
    return {
        "what": what,
        "fsyncs": round(fsyncs, 2),
        "wall ms": round(wall, 1),
        "CPU ms": round(cpu, 1),
    }


def counted(call: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    """The call, which counts how often it is made."""

    def counting(*arguments: Any) -> Any:
        counts[0] += 1
        return call(*arguments)

    return counting


def command(what: str, words: list[str], folder: Path) -> dict[str, Any]:
    """Wall and CPU milliseconds of a command, the least of three; of the first alone if it says so."""
    found = list[tuple[float, float]]()
    for _ in range(1 if "first" in what else 3):
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [Path(sys.executable).with_name("fedplan"), *words], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.append((time.monotonic() - began, cpu))
    wall, cpu = (1e3 * min(each) for each in zip(*found, strict=True))
    print(what, f"{cpu:.0f} ms", flush=True)
    return {"what": what, "wall ms": round(wall), "CPU ms": round(cpu)}


def commands(folder: Path) -> Iterator[dict[str, Any]]:
    """What commands cost that compute nothing, on a run that has ended and a study to decide on."""
    count = 240
    images = np.random.default_rng(0).integers(0, 255, (count, 16, 16), dtype=np.uint8)
    sites = [f"site-{place % 4}" for place in range(count)]
    np.savez(folder / "digits.npz", image=images, digit=np.arange(count) // 4 % 3, site=sites)
    (folder / "study.toml").write_text(STUDY.format(folder=folder))
    (folder / "site.toml").write_text('name = "site-0"\nstate = "state"\npolicy = "policy.toml"\n')
    (folder / "policy.toml").write_text('never_share = ["head"]\n')
    site_approvals(read_site(folder)).record_offer(read_study(folder / "study.toml"))
    yield command("--version", ["--version"], folder)
    yield command("explain bert-base", ["explain", "bert-base", "share()"], folder)
    command("first run", ["run", "study.toml", "--output", "run"], folder)
    yield command("status", ["status", "run"], folder)
    yield command("site inbox, a study, first time", ["site", "inbox"], folder)
    yield command("site inbox, a study, again", ["site", "inbox"], folder)
    yield command("report", ["report", "run", "-o", "report.html"], folder)


def show() -> None:
    """Write the syncs, wall and CPU time of turns and of commands."""
    rows = [turns(name, steps) for name, steps in (("vit", 1), ("vit", 4), ("minilm", 1))]
    with tempfile.TemporaryDirectory() as folder:
        rows += commands(Path(folder))
    found = {"command": "python research/turn_cost.py --shown", "facts": FACTS, "rows": rows}
    found["facts"] = {**FACTS, "load": round(os.getloadavg()[0], 1)}
    SHOWN.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Write the table."""
    torch.set_num_threads(1)
    if "--shown" in sys.argv:
        return show()
    asked = [(sys.argv[1], int(sys.argv[2]))] if len(sys.argv) > 2 else ROWS
    if "--profile" in sys.argv:
        profiled(*asked[0])
        return
    where = f"commit {FACTS['commit']}, torch {torch.__version__}, {platform.machine()}, one thread"
    lines = [f"# python research/turn_cost.py: {where}; CPU time, alternated", HEAD]
    print("\n".join(lines), flush=True)
    for row in asked:
        lines.append(str(measured(*row)))
        print(lines[-1], flush=True)
    if "--write" in sys.argv:
        OUT.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
