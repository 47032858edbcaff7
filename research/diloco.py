# SPDX-License-Identifier: Apache-2.0
"""DiLoCo against FedAvg at equal bytes: the test loss of a tiny language model, round by round.

python research/diloco.py [--told]

Four clients write sequences of a Markov chain, half of it common to all and half their own. Each
method has six settings of its learning rates, chosen by the last loss on validation sequences over
two seeds of their own; five other seeds are reported. Writes research/results/diloco.json; --told
prints its table.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as hf
from study import FACTS, LAB
from torch import Tensor, nn

from fedplan.federation.agreement import Agreement
from fedplan.methods import Method, diloco, fedavg
from fedplan.models.description import describe
from fedplan.models.values import set_values
from fedplan.runners.local import Federation
from fedplan.training import TrainArguments

WORDS, LENGTH, CLIENTS, ROWS, ROUNDS, STEPS = 24, 24, 4, 1024, 12, 20
SIZE = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SETTINGS: dict[str, list[dict[str, float]]] = {
    "fedavg": [{"lr": lr} for lr in (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)],
    "diloco": [{"lr": lr, "outer": outer} for lr in (2e-3, 4e-3, 8e-3) for outer in (0.4, 0.7)],
}
TUNED, REPORTED = (101, 102), (1, 2, 3, 4, 5)


class Sequences:
    """Sequences of a Markov chain, as examples of a language model."""

    def __init__(self, chain: Tensor, rows: int, draw: torch.Generator) -> None:
        words = [torch.randint(WORDS, (rows,), generator=draw)]
        while len(words) < LENGTH:
            words.append(torch.multinomial(chain[words[-1]], 1, generator=draw)[:, 0])
        self.words = torch.stack(words, 1)

    def __len__(self) -> int:
        return len(self.words)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"input_ids": self.words[indices], "labels": self.words[indices]}


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(**batch).loss


def play(method: Method, lr: float, seed: int, kind: str) -> dict[str, Any]:
    """Return the losses after each round on the sequences of a kind, and the uploaded bytes."""
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, num_attention_heads=2))
    common, *own = (3 * torch.randn(CLIENTS + 1, WORDS, WORDS, generator=draw)).softmax(-1)
    chains = [(common + each) / 2 for each in own]
    rows = {str(i): Sequences(chain, ROWS, draw) for i, chain in enumerate(chains)}
    held = {k: [Sequences(chain, 64, draw) for chain in chains] for k in ("validation", "test")}
    batches = [each.batch(torch.arange(64)) for each in held[kind]]
    arguments = TrainArguments(lr=lr, batch_size=16, steps=STEPS)
    agreement = Agreement(f"diloco {seed}", describe(model), method, arguments)
    losses = list[float]()
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        fed = Federation(agreement, model, rows, loss, Path(folder), rounds=ROUNDS)
        for _ in range(ROUNDS):
            fed.commit(fed.run_round())
            set_values(model, fed.global_values(), agreement.trainable)
            with torch.no_grad():
                losses.append(mean(float(loss(model.eval(), batch)) for batch in batches))
        lines = (Path(folder) / "ledger.jsonl").read_text().splitlines()
    sent = sum(json.loads(line).get("upload_bytes", 0) for line in lines)
    return {"losses": [round(each, 4) for each in losses], "upload_bytes": sent}


def made(name: str, setting: Mapping[str, float]) -> Method:
    return fedavg() if name == "fedavg" else diloco(lr=setting["outer"])


def told(arms: Mapping[str, Any]) -> str:
    """Return the table of a result: test losses by round, and who is better on each seed."""
    shown = [1, 2, 3, 4, 6, 8, 10, 12]
    lines = ["| method | " + " | ".join(f"round {number}" for number in shown) + " |"]
    lines.append("|---" * (len(shown) + 1) + "|")
    for name, arm in arms.items():
        curves = [run["losses"] for run in arm["runs"].values()]
        cells = [[curve[number - 1] for curve in curves] for number in shown]
        texts = [f"{mean(cell):.3f} ± {stdev(cell):.3f}" for cell in cells]
        lines.append(f"| `{name}` | {' | '.join(texts)} |")
    ends = [[run["losses"][-1] for run in arm["runs"].values()] for arm in arms.values()]
    gains = [one - other for one, other in zip(*ends, strict=True)]
    first, second = arms
    lines.append(
        f"\n{first} minus {second} after the last round, by seed: "
        f"{', '.join(f'{gain:+.3f}' for gain in gains)}; mean {mean(gains):+.3f}."
    )
    for name, arm in arms.items():
        setting = {key: value for key, value in arm["chosen"].items() if key != "validation"}
        sent = {run["upload_bytes"] for run in arm["runs"].values()}
        texts = ", ".join(f"{key} {value:g}" for key, value in setting.items())
        lines.append(f"- `{name}`: {texts}; {min(sent) / 1e6:.1f} MB uploaded in a run.")
    return "\n".join(lines)


def main() -> None:
    """Tune both methods, run them on the reported seeds, and write the result."""
    torch.set_num_threads(1)
    begun, arms = time.process_time(), dict[str, Any]()
    for name, settings in SETTINGS.items():
        tried = list[dict[str, Any]]()
        for setting in settings:
            ends = [
                play(made(name, setting), setting["lr"], seed, "validation")["losses"][-1]
                for seed in TUNED
            ]
            tried.append({**setting, "validation": round(mean(ends), 4)})
            print(name, tried[-1], flush=True)
        best = min(tried, key=lambda row: row["validation"])
        runs = {seed: play(made(name, best), best["lr"], seed, "test") for seed in REPORTED}
        arms[name] = {"tried": tried, "chosen": best, "runs": runs}
        print(name, best, [run["losses"][-1] for run in runs.values()], flush=True)
    result = {"command": "python research/diloco.py", "facts": FACTS, "arms": arms}
    result["cpu_seconds"] = round(time.process_time() - begun)
    (LAB / "results" / "diloco.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if "--told" in sys.argv:
        print(told(json.loads((LAB / "results" / "diloco.json").read_text())["arms"]))
    else:
        main()
