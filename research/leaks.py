# SPDX-License-Identifier: Apache-2.0
"""What updates tell a server of a client: tokens, label counts and members, with power and control.

`python -m research.leaks` continues research/results/update-leaks.jsonl, a line for each method and
way of training, on one core; `python -m research.leaks --table` prints the tables of
docs/explanation/privacy.md from that file. Lower bounds: the models are tiny and random, the round
is the first, and stronger attacks exist.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import exp, inf
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))

from attacks import token_recovery as tokens
from attacks import victims
from attacks.label_counts import fit_counts, measure_counts
from attacks.membership import (
    FALSE_POSITIVES,
    Scored,
    measure_membership,
    membership_rates,
    score_members,
)
from attacks.shadows import MAX_EXAMPLES, Cohort, Seen, flatten
from attacks.token_recovery import first_round_changes, train_by_dp_sgd
from noisy_means import aggregate

from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.params import Kind, Param
from fedplan.privacy.accounting.accountant import Release, calibrate
from fedplan.privacy.mechanisms.gaussian import GaussianMechanism
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import sgd
from research.bench.facts import facts_of

RESULTS = Path(__file__).parent / "results" / "update-leaks.jsonl"
CLIENTS, TOKEN_CLIENTS, SEED = 120, 18, 0
SIZES = {"vocabulary": 500, "length": 16, "classes": 4}
"""Of the attacked texts and the model that reads them."""
EPSILON, DELTA, EXPECTED = 8.0, tokens.DELTA, 8
"""Of both kinds of privacy; EXPECTED is the public number of examples of DP-SGD."""
GROUPS = (3, 5)
"""Sizes of the sums that secure aggregation opens; 3 is the smallest by default."""
METHODS: dict[str, Method] = {
    "FedAvg": method_by_name("fedavg"),
    "FedFrozen A, second stage": method_by_name("fedfrozen", {"warmup": 0}),
    "FedFrozen B, second stage": method_by_name("fedfrozen", {"warmup": 0, "reading": "B"}),
    "SAFL, 1 of 2 blocks": method_by_name("safl", {"k": 1}),
    "FedPer (head kept)": method_by_name("fedper"),
    "head only": method_by_name("head-only"),
    "FedIT (LoRA and head)": method_by_name("fedit", {"rank": 4}),
    "FedIT without head": method_by_name("fedit", {"rank": 4, "with_head": False}),
    "pFedDC (prompts)": tokens.PROMPT_METHODS["pfeddc"],
}
ONE, SGD, ADAMW, PRIVATE = "one step", "ten SGD steps", "ten AdamW steps", "DP-SGD"
LR = 0.1
TRAINING = {
    ONE: TrainArguments(sgd(), lr=LR, steps=1, batch_size=MAX_EXAMPLES),
    SGD: TrainArguments(sgd(), lr=0.02, steps=10, batch_size=4),
    ADAMW: TrainArguments(lr=1e-3, steps=10, batch_size=4),
    PRIVATE: TrainArguments(sgd(), lr=LR, steps=1, batch_size=MAX_EXAMPLES),
}
PARTS: dict[str, Callable[[Param], bool]] = {
    **{kind.value: lambda p, kind=kind: p.kind is kind for kind in Kind if kind != Kind.ADAPTER},
    "bias of the last layer": lambda p: p.name.endswith("classifier.bias"),
    "LoRA A": lambda p: "lora_a" in p.tags,
    "LoRA B": lambda p: "lora_b" in p.tags,
}
EVERYTHING = "everything sent"
ONE_UPDATE, NOISY_SUM = "one update", f"noisy sum of {GROUPS[0]}"
Changes = list[dict[Param, Tensor]]


def images(method: str) -> bool:
    return method.startswith("pFedDC")


def classes(method: str) -> int:
    return len(victims.CLASSES) if images(method) else SIZES["classes"]


@cache
def cohort(of_images: bool) -> Cohort:
    """The attacked clients: all methods have the same texts, or the same images."""
    if of_images:
        return Cohort.draw(partial(victims.random_images, SEED), CLIENTS, SEED)
    return Cohort.draw(partial(victims.population_texts, 0, SEED, **SIZES), CLIENTS, SEED)


def make_model(method: str, dropout: float = 0.0) -> nn.Module:
    if images(method):
        return victims.image_classifier()
    return victims.text_classifier(**SIZES, width=32, blocks=2, spread=0.05, dropout=dropout)


def train(name: str, setup: str, data: Sequence[Any], epsilon: float = 0.0) -> Changes:
    """The updates of the first round, for clients that have `data`."""
    method = METHODS[name]
    if epsilon:
        method = train_by_dp_sgd(method, epsilon, 1, EXPECTED)
    model = make_model(name, 0.1 if setup == ADAMW else 0.0)
    return first_round_changes(method, model, data, TRAINING[setup])


Parts = Mapping[str, Seen]
"""What the server sees, by part."""


def attack(
    folds: Sequence[tuple[Parts, Parts]],
    directions: Sequence[Mapping[str, Tensor]],
    *,
    variance: float = 0.0,
    group: int = 1,
) -> dict[str, Any]:
    """Attack each part, and all parts together, of what the server sees; by part.

    folds: what is attacked, which is sums over `group` clients, and single shadow clients;
    directions: candidates alone, by part; variance: of known noise on the attacked. Of all parts
    the server takes the one that does best on shadows.
    """
    scored, counted = dict[str, list[Scored]](), dict[str, list[tuple[Tensor, float]]]()
    for attacked, shadows in folds:
        for part in attacked:
            lines = [each[part] for each in directions]
            sums = shadows[part].random_groups(group, 60) if group > 1 else shadows[part]
            scores = score_members(attacked[part], sums, lines, variance)
            scored.setdefault(part, []).append(scores)
            counts = fit_counts(attacked[part], shadows[part], variance, group)
            counted.setdefault(part, []).append(counts)
    numbers = range(len(folds))
    scored[EVERYTHING] = [
        max((each[i] for each in scored.values()), key=lambda x: x.shadow_auc) for i in numbers
    ]
    counted[EVERYTHING] = [
        min((each[i] for each in counted.values()), key=lambda x: x[1]) for i in numbers
    ]
    members = torch.cat([fold[0][EVERYTHING].members for fold in folds])
    truth = torch.cat([fold[0][EVERYTHING].counts for fold in folds])
    measured = dict[str, Any]()
    for part in scored:
        filtered = _standardized([each.filtered for each in scored[part]])
        ratios = torch.cat([each.ratios for each in scored[part]])
        counts = torch.cat([each for each, _ in counted[part]])
        measured[part] = {
            "membership": asdict(measure_membership(filtered, members)),
            "likelihood ratio": membership_rates(ratios, members),
            "label counts": asdict(measure_counts(counts, truth)),
        }
    return measured


def _standardized(folds: Sequence[Tensor]) -> Tensor:
    """Scores of several folds on one scale: each fold has its own filter."""
    return torch.cat([(scores - scores.median()) / (scores.std() + 1e-300) for scores in folds])


@dataclass(frozen=True)
class Federation:
    """A method's clients, and the params that any of them sends."""

    name: str
    truth: Cohort
    params: tuple[Param, ...]

    def by_part(self, changes: Changes) -> dict[str, Tensor]:
        """Rows of numbers of each part that is sent, and of all together."""
        parts = {part: tuple(filter(select, self.params)) for part, select in PARTS.items()}
        return {
            part: flatten(changes, params)
            for part, params in {**parts, EVERYTHING: self.params}.items()
            if params
        }

    def seen(self, changes: Changes, first: int = 0, *, weighted: bool = True) -> dict[str, Seen]:
        """What the server sees of clients from number `first` on: by default, weighted.

        Weights are numbers of examples, which clients send without privacy.
        """
        rows = slice(first, first + len(changes))
        counts, members = self.truth.counts(classes(self.name))[rows], self.truth.members[rows]
        weights = counts.sum(1, keepdim=True).double() if weighted else 1.0
        return {
            part: Seen(weights * numbers, members, counts)
            for part, numbers in self.by_part(changes).items()
        }


def views(name: str, setup: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train the clients of a method, and attack each view that a server may have of them."""
    truth, half = cohort(images(name)), CLIENTS // 2
    clients, candidates = truth.clients, len(truth.alone)
    if setup == PRIVATE:
        # Half of the clients are attacked; the others are shadows, without noise.
        quiet = train(name, PRIVATE, [*truth.alone, *clients[half:]], inf)
        noisy = train(name, PRIVATE, clients[:half], EPSILON)
        federation = Federation(name, truth, _params([*quiet, *noisy]))
        shadows = federation.seen(quiet[candidates:], half, weighted=False)
        fold = (federation.seen(noisy, weighted=False), shadows)
        stddev = LR * noise_multiplier() / EXPECTED
        yield (
            ONE_UPDATE,
            attack([fold], [federation.by_part(quiet[:candidates])], variance=stddev**2),
        )
        return
    changes, one_step = train(name, setup, [*truth.alone, *clients]), Changes()
    if setup != ONE:
        one_step = train(name, ONE, truth.alone)
    federation = Federation(name, truth, _params([*changes, *one_step]))
    alone, changes = changes[:candidates], changes[candidates:]
    directions = [federation.by_part(each) for each in (alone, one_step) if each]
    halves = [federation.seen(changes[:half]), federation.seen(changes[half:], half)]
    yield ONE_UPDATE, attack([(halves[0], halves[1]), (halves[1], halves[0])], directions)
    for size in GROUPS if name == "FedAvg" else GROUPS[:1]:
        groups = [{p: s.groups(size) for p, s in each.items()} for each in halves]
        folds = list(zip(groups, halves[::-1], strict=True))
        yield f"sum of {size}", attack(folds, directions, group=size)
    if setup == ONE:
        yield NOISY_SUM, attack_noisy_sum(federation, changes, directions)


def _params(changes: Changes) -> tuple[Param, ...]:
    return tuple({param: None for change in changes for param in change})


def attack_noisy_sum(
    federation: Federation, changes: Changes, directions: Sequence[Mapping[str, Tensor]]
) -> dict[str, Any]:
    """Attack the release of client-level privacy, over the smallest group.

    The clipping norm is the median of the clients' norms; noise is by the shipped mechanism.
    """
    size, half = GROUPS[0], CLIENTS // 2
    norms = [float(sum(v.double().square().sum() for v in c.values())) ** 0.5 for c in changes]
    clip, secret = median(norms), os.urandom(32)
    clipped = [
        {p: v.double() * min(1.0, clip / max(norm, 1e-300)) for p, v in change.items()}
        for change, norm in zip(changes, norms, strict=True)
    ]
    shapes = {p.key: (p.shape, torch.float64) for p in federation.params}
    mechanism = GaussianMechanism(shapes, clip, noise_multiplier(), 1.0)
    halves = [
        federation.seen(clipped[first : first + half], first, weighted=False) for first in (0, half)
    ]
    attacked = list[dict[str, Seen]]()
    for number, parts in enumerate(halves):
        released = Changes()
        for i in range(number * half, number * half + half // size * size, size):
            group = [{p.key: v for p, v in change.items()} for change in changes[i : i + size]]
            total = aggregate(mechanism, group, secret, f"leaks {i}")
            released.append({p: total[p.key] for p in federation.params})
        numbers, truth = federation.by_part(released), parts[EVERYTHING].groups(size)
        attacked.append({p: replace(truth, updates=rows) for p, rows in numbers.items()})
    folds = list(zip(attacked, halves[::-1], strict=True))
    return attack(folds, directions, variance=mechanism.stddev**2, group=size)


@cache
def noise_multiplier() -> float:
    return calibrate(EPSILON, DELTA, lambda noise: [Release(noise)])


def bounds() -> dict[str, float]:
    """The most that any attack can reach on one release: by epsilon, and by the Gaussian noise."""
    normal, distance = NormalDist(), 1 / noise_multiplier()
    return {
        "epsilon": EPSILON,
        "delta": DELTA,
        "noise_multiplier": noise_multiplier(),
        "true_positives_by_epsilon": min(1.0, exp(EPSILON) * FALSE_POSITIVES + DELTA),
        "true_positives": normal.cdf(normal.inv_cdf(FALSE_POSITIVES) + distance),
        "auc": normal.cdf(distance / 2**0.5),
    }


def token_views() -> Iterator[tuple[str, dict[str, Any]]]:
    """Recover tokens from one update of FedAvg, and from sums, by part and training."""
    texts = [
        victims.random_texts(i, tokens.EXAMPLES, vocabulary=tokens.VOCABULARY, length=tokens.LENGTH)
        for i in range(TOKEN_CLIENTS)
    ]
    words = [victims.distinct_words(each) for each in texts]
    server, method = tokens.CuriousServer(tokens.make_text_model()), METHODS["FedAvg"]
    parts = [part for part in tokens.PARTS if part is not Kind.PROMPT]
    for setup in tokens.training_setups(EPSILON):
        model = tokens.make_text_model(setup.dropout)
        changes = first_round_changes(setup.apply(method), model, texts, setup.train_arguments)
        for size in (1, *GROUPS) if not setup.epsilon else (1,):
            groups = range(0, TOKEN_CLIENTS - size + 1, size)
            sums = [
                {p: sum(c[p] for c in changes[i : i + size]) for p in changes[0]} for i in groups
            ]
            held = [set[int]().union(*words[i : i + size]) for i in groups]
            chance = fmean(map(len, held)) / (tokens.VOCABULARY - victims.FIRST_WORD)
            found = dict[str, Any]()
            for part in parts:
                leak = server.recover_tokens(part, sums, held)
                assert leak.recovered is not None
                found[str(part)] = {
                    "tokens": (leak.recovered - chance) / (1 - chance),
                    "error": leak.error / (1 - chance),
                    "clients": len(sums),
                }
            yield f"{setup.name}, {'one update' if size == 1 else f'sum of {size}'}", found


def first_stage_is_fedavg() -> bool:
    """Whether FedFrozen's first stage sends the same bits as FedAvg."""
    data = cohort(False).clients[:2]
    frozen = method_by_name("fedfrozen", {"warmup": 1})
    pair = [
        first_round_changes(method, make_model("FedAvg"), data, TRAINING[ONE])
        for method in (METHODS["FedAvg"], frozen)
    ]
    return all(
        one.keys() == other.keys() and all(torch.equal(one[p], other[p]) for p in one)
        for one, other in zip(*pair, strict=True)
    )


def main() -> None:
    """Run what the result file lacks, or print the tables."""
    if sys.argv[1:] == ["--table"]:
        print(*tables(), sep="\n\n")
        return
    torch.set_num_threads(1)
    if not RESULTS.exists():
        facts = {"command": "python -m research.leaks", **facts_of(Path(__file__).parents[1])}
        facts |= {"clients": CLIENTS, "seed": SEED, "token_clients": TOKEN_CLIENTS}
        facts |= {"bounds": bounds(), "first_stage_is_fedavg": first_stage_is_fedavg()}
        _append(facts)
    done = {(line.get("method"), line.get("training")) for line in read_lines()}
    work: dict[tuple[str, str], Callable[[], Iterator[tuple[str, dict[str, Any]]]]] = {
        (name, setup): partial(views, name, setup)
        for name in METHODS
        for setup in (ONE, ADAMW, PRIVATE, SGD)
        if setup != SGD or name in SGD_METHODS
    }
    for (name, setup), run in {**work, ("FedAvg", "tokens"): token_views}.items():
        if (name, setup) not in done:
            start, found = time.process_time(), dict(run())
            seconds = round(time.process_time() - start, 1)
            line = {"method": name, "training": setup, "cpu_seconds": seconds}
            _append({**line, "views": found})


SGD_METHODS = ("FedAvg", "FedPer (head kept)", "head only")


def read_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def _append(line: Mapping[str, Any]) -> None:
    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, Mapping):
            return {key: short(each) for key, each in value.items()}
        return [short(each) for each in value] if isinstance(value, (list, tuple)) else value

    with RESULTS.open("a") as file:
        file.write(json.dumps(short(line)) + "\n")
    print(line.get("method", ""), line.get("training", ""), line.get("cpu_seconds", ""), flush=True)


def tables() -> tuple[str, str]:
    """The tables of docs/explanation/privacy.md: by part of FedAvg's update, and by method."""
    lines = read_lines()[1:]
    views = {(line["method"], line["training"]): line["views"] for line in lines}
    recovered = views["FedAvg", "tokens"]

    def counts(view: Mapping[str, Any], part: str) -> str:
        return f"{view[part]['label counts']['exact'][0]:.0%}" if part in view else "not sent"

    def members(view: Mapping[str, Any], part: str) -> str:
        leak = view[part]["membership"]
        return f"{leak['auc'][0]:.2f} ({leak['true_positives'][0]:.0%})"

    def words(view: str, part: str) -> str:
        found = recovered[view].get(part)
        return f"{max(0, round(100 * found['tokens']))} %" if found else "-"

    fedavg, lora = (
        {setup: views[method, setup] for setup in (ONE, ADAMW, PRIVATE)}
        for method in ("FedAvg", "FedIT (LoRA and head)")
    )
    by_part = [
        "| part | tokens: 1, 10 steps | label counts: 1, 10 steps | members: 1 step | 10 steps "
        "| sum of 3, 1 step: label counts | members |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in PARTS:
        of = lora if part.startswith("LoRA") else fedavg
        one, ten, three = of[ONE][ONE_UPDATE], of[ADAMW][ONE_UPDATE], of[ONE]["sum of 3"]
        if part in one:
            texts = ", ".join(words(f"{each}, one update", part) for each in (ONE, "ten steps"))
            numbers = f"{counts(one, part)}, {counts(ten, part)}"
            cells = (texts, numbers, *(members(each, part) for each in (one, ten)))
            cells = (*cells, counts(three, part), members(three, part))
            by_part.append(f"| {part} | {' | '.join(cells)} |")
    by_method = [
        "| all that a method sends | 1 step: label counts | members | 10 steps: label counts "
        "| members | sum of 3, 10 steps: label counts | members | DP-SGD: label counts | members "
        "| client-level: label counts | members |",
        "|---" * 11 + "|",
    ]
    for method in METHODS:
        one, ten, private = (views[method, setup] for setup in (ONE, ADAMW, PRIVATE))
        seen = (one[ONE_UPDATE], ten[ONE_UPDATE], ten["sum of 3"], private[ONE_UPDATE])
        cells = [f(v, EVERYTHING) for v in (*seen, one[NOISY_SUM]) for f in (counts, members)]
        by_method.append(f"| {method} | {' | '.join(cells)} |")
    return _markdown(by_part), _markdown(by_method)


def _markdown(rows: Sequence[str]) -> str:
    return "\n".join(rows).replace("%", " %").replace("  %", " %")


if __name__ == "__main__":
    main()
