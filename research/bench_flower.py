# SPDX-License-Identifier: Apache-2.0
"""Seconds per round over a real federation, against a stock Flower app on the same one.

Three sites behind the written proxy, TLS, node keys; the stock app has SuperNodes of its own on
loopback, without TLS, which favours it. Both train MiniLM (22.7 M params) for two steps of 16 texts
of 64 tokens. They take turns; a round's time is that between two closed rounds. Without a folder it
is the bench's own MiniLM, drawn from its configuration.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "kit")]
from deployment import BIN, Deployment, free_ports, until_open
from study import FACTS, LAB

from fedplan.runners.flower.supernode import FLOWER_ENVIRONMENT
from fedplan.storage.append_log import read_json_lines

SITES = ["north", "south", "east"]
PLANS = {
    "full plan": "share()",
    "FedFrozen, stage two": "chain(share(), freeze(query | key))",
    "the last third": "chain(freeze(), share(last(2)), share(head))",
    "head only": "chain(freeze(), share(head))",
}
STUDY = """
name = "{name}"
[model]
path = "{model}"
[task]
kind = "text-classification"
label = "label"
labels = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
max_length = 64
[data]
holdout_fraction = 0.0
[clients]
names = ["north", "south", "east"]
min_updates = 3
[method]
plan = "{plan}"
[train]
rounds = {rounds}
optimizer = "sgd"
lr = 1e-3
batch_size = 16
steps = 2
"""
STOCK = """
import csv, time
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

MODEL, ROUNDS, TIMES = {model!r}, {rounds}, {times!r}

def built():
    import torch
    from transformers import AutoModelForSequenceClassification
    torch.set_num_threads(1)
    return AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=10)

client = ClientApp()

@client.train()
def train(message: Message, context: Context) -> Message:
    import torch
    from transformers import AutoTokenizer
    model = built()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with open(context.node_config["data"]) as file:
        rows = list(csv.DictReader(file))
    words = AutoTokenizer.from_pretrained(MODEL)([r["text"] for r in rows], truncation=True, max_length=64, padding="max_length", return_tensors="pt")
    labels = torch.tensor([ord(r["label"]) - 97 for r in rows])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    for step in range(2):
        part = slice(16 * step, 16 * step + 16)
        loss = model(input_ids=words["input_ids"][part], attention_mask=words["attention_mask"][part], labels=labels[part]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    content = RecordDict({{"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({{"loss": float(loss), "num-examples": len(rows)}})}})
    return Message(content, reply_to=message)

server = ServerApp()

@server.main()
def main(grid: Grid, context: Context) -> None:
    def note(number, arrays):
        with open(TIMES, "a") as file:
            file.write(f"{{time.time()}}\\n")
        return MetricRecord({{"round": number}})

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(built().state_dict()), num_rounds=ROUNDS, evaluate_fn=note)
"""


def closed(times: Path) -> list[float]:
    """Seconds between one closed round and the next, but for the first."""
    found = [float(line) for line in times.read_text().split()]
    return [after - before for before, after in pairwise(found[1:])]


def ours(fed: Deployment, model: str, plan: str, name: str, rounds: int) -> list[float]:
    times = fed.folder / f"{name}.times"
    begun = fed.begin(STUDY.format(model=model, plan=plan, name=name, rounds=rounds), name)
    ledger, seen = fed.folder / name / "ledger.jsonl", 0
    times.write_text(f"{time.time()}\n")
    while begun.poll() is None:
        try:
            count = (
                sum("changed" in line for line in read_json_lines(ledger)) if ledger.exists() else 0
            )
        except ValueError:
            continue
        for _ in range(count - seen):
            with times.open("a") as file:
                file.write(f"{time.time()}\n")
        seen = count
        time.sleep(0.05)
    if begun.returncode:
        raise RuntimeError(f"{begun.communicate()[0]}\n{fed.logs()}")
    return closed(times)


PROJECT = """[project]
name = "stock"
version = "1.0.0"
description = "A stock Flower app."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "stock"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""


def stock(place: Path, data: Path, model: str, name: str, rounds: int) -> list[float]:
    """The stock app on a SuperLink and three SuperNodes of its own."""
    app, times, (link, *ports) = place / name, place / f"{name}.times", free_ports(4)
    app.mkdir()
    (app / "app.py").write_text(STOCK.format(model=model, rounds=rounds, times=str(times)))
    (app / "pyproject.toml").write_text(PROJECT)
    home = place / f"{name}-flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "l"\n[superlink.l]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    )
    env = {**os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": str(home), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{BIN}:{env['PATH']}"
    here = ("--insecure", "--host", "127.0.0.1", "--port")
    log = (place / f"{name}.log").open("wb")

    def start(program: str, *words: str) -> subprocess.Popen[bytes]:
        command = [BIN / program, *here, *words]
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    begun = [start("flower-superlink", str(link))]
    until_open(link)
    for port in ports:
        words = ("--superlink", f"127.0.0.1:{link}", "--node-config", f'data="{data}"')
        begun.append(start("flower-supernode", str(port), *words))
    try:
        time.sleep(10)
        times.write_text(f"{time.time()}\n")
        subprocess.run([BIN / "flwr", "run", app, "l", "--stream"], env=env, check=True)
    finally:
        for process in begun:
            process.kill()
            process.wait()
        log.close()
    return closed(times)


def rows_in(place: Path) -> Path:
    """A site's table: 32 texts of more than 64 tokens."""
    with (place / "rows.csv").open("w") as file:
        out = csv.writer(file)
        out.writerow(["text", "label"])
        out.writerows([f"{'some words of a report ' * 20}{i}", "ab"[i % 2]] for i in range(32))
    return place / "rows.csv"


def told(found: dict[str, list[float]]) -> str:
    """The median of each, and the ratio to the stock app's."""
    base = statistics.median(found["stock Flower app"]) if "stock Flower app" in found else None
    lines = [f"python research/bench_flower.py  {json.dumps(FACTS)}"]
    for name, seconds in found.items():
        middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
        ratio = f"  ratio {middle / base:.2f}" if base else ""
        spread = f"({low:.1f} to {high:.1f}, {len(seconds)} rounds)"
        lines.append(f"{name:22} {middle:6.1f} s a round {spread}{ratio}")
    return "\n".join(lines) + "\n"


def drawn() -> str:
    """The bench's MiniLM, and its tokenizer."""
    from research.bench.rows import ROWS
    from research.bench.workloads import write_workload

    place = Path(tempfile.gettempdir()) / "fedplan-bench"
    return str(write_workload(ROWS["turn-minilm-1"].workload, place) / "model")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--model", default="", help="a folder with MiniLM and its tokenizer")
    ask.add_argument("--rounds", type=int, default=4, help="the first is not counted")
    ask.add_argument("--turns", type=int, default=1)
    ask.add_argument("--alone", action="store_true", help="without the stock app")
    ask.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    ask.add_argument("--out", type=Path, default=LAB / "results" / "bench_flower.txt")
    asked = ask.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the sites would outlive it
    model, found = asked.model or drawn(), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data = rows_in(place)
        with Deployment(place / "fed", SITES, dict.fromkeys(SITES, data)) as fed:
            for turn in range(asked.turns):
                if not asked.alone:
                    seconds = stock(place, data, model, f"stock{turn}", asked.rounds)
                    found.setdefault("stock Flower app", []).extend(seconds)
                    print("stock Flower app", [round(s, 1) for s in seconds], flush=True)
                for number, name in enumerate(asked.plans):
                    run = f"ours{number}-{turn}"
                    seconds = ours(fed, model, PLANS[name], run, asked.rounds)
                    found.setdefault(name, []).extend(seconds)
                    print(name, [round(s, 1) for s in seconds], flush=True)
                    asked.out.write_text(told(found))
    print(told(found))


if __name__ == "__main__":
    main()
