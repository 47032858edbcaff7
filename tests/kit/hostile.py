# SPDX-License-Identifier: Apache-2.0
"""A hostile server: the values, studies, rows and orders of requests that it chooses.

An `Attack` names one choice of each kind, and a seed. To add a choice is to add one line to
`VALUES`, `ROWS`, `SETTINGS` or `ORDERS`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
from neighbours import CANARY, LABELS, METHODS, ODD, TASKS, WORDS, Case, Row, write_table
from torch import Tensor, nn

from fedplan.data.examples import Examples
from fedplan.data.tables import load_table
from fedplan.errors import FedplanError
from fedplan.federation.endpoint import EVALUATE, HELLO, POLL, TRAIN
from fedplan.federation.global_state import GlobalState
from fedplan.federation.messages import Request, request_message
from fedplan.federation.rounds import make_request
from fedplan.models.values import set_values
from fedplan.studies.experiment import Experiment, build_experiment
from fedplan.studies.federated_data import load_federated_data
from fedplan.studies.schema import read_study
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message

SITE, RUN, OTHER_RUN, THIRD_RUN = "north", "0" * 16, "1" * 16, "2" * 16
SECURE = """aggregation.kind = "secure"
aggregation.threshold = 3
aggregation.min_contributors = 3"""
Tensors = dict[str, Tensor]
Move = tuple[str, Message]
"""One request: its kind and the message."""
RESTART: Move = ("restart", Message(b""))
"""No request: the site is killed and starts again."""


@dataclass(frozen=True)
class Attack:
    """One hostile server against two worlds: what it asks for, and how.

    `row`: the row that is in one world alone. `settings`: names in SETTINGS, which the study has.
    """

    task: str
    method: str
    unit: str = "example"
    aggregation: str = "plain"
    values: str = "honest"
    order: str = "in order"
    row: str = "plain"
    settings: tuple[str, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        parts = (self.task, self.method, self.unit, self.aggregation, self.values, self.order)
        return "-".join((*parts, self.row, *self.settings, str(self.seed))).replace(" ", "_")

    @property
    def case(self) -> Case:
        """The study, with a few rounds and the settings."""
        lines = ["train.rounds = 3", "data.holdout_fraction = 0.0"]
        lines += [*([SECURE] if self.aggregation == "secure" else ())]
        lines += [line for name in self.settings if (line := SETTINGS[name](self))]
        return Case(self.task, self.method, self.unit, "\n".join(lines))


# -------------------------------------------------------------------------------- the study

CLASSES = ("text-classification", "token-classification", "image-classification", "multi-label")


def _labels(*labels: str) -> Callable[[Attack], str]:
    return lambda attack: f"task.labels = {json.dumps(labels)}" if attack.task in CLASSES else ""


def _for(text: str, *tasks: str) -> Callable[[Attack], str]:
    """A line of the study, for some tasks or all."""
    return lambda attack: text if not tasks or attack.task in tasks else ""


SETTINGS: dict[str, Callable[[Attack], str]] = {
    "without its label": _labels(*LABELS[:2]),
    "its label alone": _labels(LABELS[2], "none"),
    "more labels": _labels(*LABELS, CANARY),
    "short texts": _for("task.max_length = 3"),
    "long texts": _for("task.max_length = 30"),
    "some held out": _for("data.holdout_fraction = 0.2"),
    "most held out": _for("data.holdout_fraction = 0.9"),
    "few examples": _for("data.max_examples = 5"),
    "a filter": _for(f'data.filter = {{ label = ["{LABELS[2]}"] }}', *CLASSES[::2]),
    "a filter by an absent column": _for('data.filter = { ward = ["a"] }'),
    "an absent column": _for('task.input = "ward"'),
    "two steps": _for("train.steps = 2"),
    "a huge rate": _for("train.lr = 1e30"),
    "no rate": _for("train.lr = 1e-30"),
    "adamw": _for('train.optimizer = "adamw"'),
    "bf16": _for('train.precision = "bf16"'),
    "checkpointing": _for("train.gradient_checkpointing = true"),
    "a tiny clip": _for("privacy.clipping_norm = 1e-6"),
    "a huge clip": _for("privacy.clipping_norm = 1e6"),
    "little noise": _for("privacy.noise_multiplier = 0.4\nprivacy.epsilon = 5000.0"),
    "a small budget": _for("privacy.epsilon = 6.0"),
    "sampled": _for("privacy.examples_per_site = 16"),
    "on clients": _for("evaluate.on_clients = true"),
}
"""What a study says in place of something else."""


# ---------------------------------------------------------------------------- the odd row


def _cell(column: str, value: Any) -> Callable[[Row], Row]:
    return lambda row: {**row, column: value} if column in row else row


ROWS: dict[str, Callable[[Row], Row]] = {
    "plain": lambda row: row,
    "no words": _cell("text", ""),
    "many words": _cell("text", " ".join(WORDS[5:] * 4)),
    "text of another type": _cell("text", 7),
    "an unknown label": _cell("label", CANARY),
    "no label": _cell("label", None),
    "a label of another type": _cell("label", [["x"]]),
    "one more column": lambda row: {**row, "ward": "a"},
    "a cell missing": lambda row: dict(list(row.items())[1:]),
    "a number without end": _cell("label", 1e308),
    "a short image": _cell("image", [[1, 2], [3]]),
}
"""What the row of one world alone is like; rows of an .npz file have one shape and type."""


def odd_row(attack: Attack) -> Row:
    """The row that is in one world alone."""
    row = TASKS[attack.task].row(ODD + attack.seed % 7)
    if TASKS[attack.task].suffix == ".npz" and attack.row != "an unknown label":
        return row
    return ROWS[attack.row](row)


# ------------------------------------------------------------------------------- the values


@dataclass
class Attacker:
    """What a hostile server knows: the study, the model, and the row that it asks about."""

    attack: Attack
    study_file: Path
    experiment: Experiment = field(init=False)
    dice: Random = field(init=False)

    def __post_init__(self) -> None:
        try:
            self.study = read_study(self.study_file)
            self.experiment = build_experiment(self.study)
        except FedplanError:  # such a study is offered all the same, and asked for as another
            plain = replace(self.attack, settings=())
            file = self.study_file.with_name("plain.toml")
            file.write_text(plain.case.study(self.study_file.parent.parent))
            self.study = read_study(file)
            self.experiment = build_experiment(self.study)
        self.dice = Random(self.attack.seed)
        self.generator = torch.Generator().manual_seed(self.attack.seed)

    @cached_property
    def start(self) -> Tensors:
        """The values that the study begins with, as far as a server sends them."""
        agreement = self.experiment.pinned_agreement
        return dict(GlobalState.initial(agreement, self.experiment.initial_values).values)

    @cached_property
    def target(self) -> Examples | None:
        """The row as an example, if the study can use it."""
        file = self.study_file.with_name(f"target{TASKS[self.attack.task].suffix}")
        try:
            write_table([odd_row(self.attack)], file)
            data = load_federated_data(self.study, (SITE, load_table(str(file))))
        except Exception:
            return None
        return data.train[SITE] if len(data.train[SITE]) else None

    def feature(self, values: Tensors) -> tuple[str, Tensor] | None:
        """The last linear layer whose values are sent, and what the target puts into it."""
        model, found = self.experiment.model, list[tuple[str, Tensor]]()
        layers = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, inputs, key=key: found.append((key, inputs[0].detach()))
            )
            for key, layer in layers.items()
            if key in values
        ]
        sent = [p for p in self.experiment.agreement.trainable if p.key in values]
        set_values(model, values, sent)
        try:
            if self.target is not None:
                with torch.no_grad():
                    self.experiment.data.task.loss(
                        model.eval(), self.target.batch(torch.tensor([0]))
                    )
        except Exception:
            return None
        finally:
            for hook in hooks:
                hook.remove()
        if not found or not bool(found[-1][1].isfinite().all()):
            return None
        key, inputs = found[-1]
        return key, inputs.reshape(-1, inputs.shape[-1])[0].double()

    def chosen(self, name: str) -> Tensors:
        """Values by a name in VALUES."""
        return VALUES[name]({k: v.clone() for k, v in self.start.items()}, self)

    # ------------------------------------------------------------------------- messages

    def hello(self, run: str = RUN) -> Move:
        """The offer of the study."""
        study = tomllib.loads(self.study_file.read_text())
        return HELLO, pack_message({}, {"run": run, "study": study})

    def with_settings(self, *settings: str) -> Attacker:
        """The same server with another study, which has these settings, too."""
        attack = replace(self.attack, settings=(*self.attack.settings, *settings))
        file = self.study_file.with_name("-".join(settings).replace(" ", "_") + ".toml")
        file.write_text(attack.case.study(self.study_file.parent.parent))
        return Attacker(attack, file)

    def request(self, round: int, values: Tensors, run: str = RUN) -> Request:
        """A request of a round, with all values and scores of the server's own choice."""
        agreement = replace(self.experiment.pinned_agreement, run=run)
        initial = GlobalState.initial(agreement, self.experiment.initial_values)
        versions = dict.fromkeys(initial.values, max(1, round))
        state = replace(initial, round=round - 1, values=values, versions=versions)
        found = make_request(agreement, state, SITE, {}, full=True)
        if agreement.method.joint_choice:
            odd = self.dice.choice([0.0, 1e300, -1e300, 5e-324])
            scores = {b: odd if i % 2 else float(i) for i, b in enumerate(agreement.blocks)}
            found = replace(found, turn=replace(found.turn, scores=scores))
        return found

    def ask(self, round: int, values: Tensors, run: str = RUN, kind: str = TRAIN) -> Move:
        return kind, request_message(self.request(round, values, run))

    def moves(self) -> list[Move]:
        """All requests, by the attack's order."""
        return list(ORDERS[self.attack.order](self, self.chosen(self.attack.values)))


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Attacker], Tensors]:
    """Change every tensor in the same way."""
    return lambda values, _: {k: change(v).to(v.dtype) for k, v in values.items()}


def _filled(number: float) -> Callable[[Tensors, Attacker], Tensors]:
    return _each(lambda value: torch.full_like(value, number))


def _scales(values: Tensors, attacker: Attacker) -> Tensors:
    """Each tensor on a scale of its own, from 1e-30 to 1e30."""
    return {k: v * 10.0 ** attacker.dice.uniform(-30, 30) for k, v in values.items()}


def _some(number: float) -> Callable[[Tensors, Attacker], Tensors]:
    """One number in one tensor."""

    def changed(values: Tensors, attacker: Attacker) -> Tensors:
        key = attacker.dice.choice(sorted(values))
        values[key].view(-1)[attacker.dice.randrange(values[key].numel())] = number
        return values

    return changed


def _embedded(number: float) -> Callable[[Tensors, Attacker], Tensors]:
    """Another row of the embedding for the word that the target alone has."""

    def changed(values: Tensors, attacker: Attacker) -> Tensors:
        for value in values.values():
            if value.dim() == 2 and len(value) == len(WORDS):
                value[WORDS.index(CANARY)] = number
                return values
        return _some(number)(values, attacker)

    return changed


def _shaken(values: Tensors, attacker: Attacker) -> Tensors:
    """Random weights of a size at which activations are far from zero."""
    return {
        k: torch.randn(v.shape, generator=attacker.generator).to(v.dtype) * 0.3
        if v.dim() == 2
        else v
        for k, v in values.items()
    }


def _orthogonal(values: Tensors, attacker: Attacker) -> Tensors:
    """A last layer that makes the target's outputs nothing but rounding, times 1e8."""
    values = _shaken(values, attacker)
    if (found := attacker.feature(values)) is None:
        return values
    key, feature = found
    weight = torch.randn(values[key].shape, generator=attacker.generator, dtype=torch.float64)
    weight -= (weight @ feature)[:, None] * feature / (feature @ feature)
    values[key] = (1e8 * weight).to(values[key].dtype)
    if (bias := key.replace("weight", "bias")) in values:
        values[bias] = -(values[key].double() @ feature).to(values[bias].dtype)
    return values


def _aligned(scale: float) -> Callable[[Tensors, Attacker], Tensors]:
    """A last layer whose outputs are huge for the target, in other directions for each class."""

    def changed(values: Tensors, attacker: Attacker) -> Tensors:
        if (found := attacker.feature(values)) is None:
            return _filled(scale)(values, attacker)
        key, feature = found
        signs = torch.tensor([(-1.0) ** i for i in range(len(values[key]))]).double()
        weight = signs[:, None] * feature / (feature @ feature).clamp(min=1e-30) * scale
        values[key] = weight.to(values[key].dtype)
        return values

    return changed


VALUES: dict[str, Callable[[Tensors, Attacker], Tensors]] = {
    "honest": lambda values, _: values,
    "zeros": _filled(0.0),
    "negative zeros": _filled(-0.0),
    "ones": _filled(1.0),
    "denormal": _filled(1e-42),
    "huge": _each(lambda value: value * 1e30),
    "tiny": _each(lambda value: value * 1e-30),
    "largest": _filled(3.0e38),
    "NaN": _filled(float("nan")),
    "infinite": _filled(float("inf")),
    "one NaN": _some(float("nan")),
    "one infinite": _some(float("-inf")),
    "one huge": _some(1e38),
    "scales": _scales,
    "random": _shaken,
    "its word is NaN": _embedded(float("nan")),
    "its word is infinite": _embedded(float("inf")),
    "its word is huge": _embedded(1e20),
    "orthogonal to it": _orthogonal,
    "its output overflows": _aligned(1e38),
    "its output is certain": _aligned(1e4),
    "its output is NaN": _aligned(float("inf")),
}


# ------------------------------------------------------------------------------- the orders

Order = Callable[[Attacker, Tensors], Sequence[Move]]


def _malformed(attacker: Attacker, values: Tensors) -> Sequence[Move]:
    """Requests that do not fit: each is refused, whatever the rows are."""
    request, first = attacker.request(1, values), sorted(values)[0]
    wrong = {
        "shape": {**values, first: torch.zeros(3)},
        "type": {**values, first: values[first].double()},
        "more": {**values, "nobody": torch.zeros(1)},
        "less": {k: v for k, v in values.items() if k != first},
    }
    moves = [(TRAIN, request_message(replace(request, values=each))) for each in wrong.values()]
    header = request_message(request)
    moves += [
        (TRAIN, Message(header.header[: len(header.header) // 2], header.blobs)),
        (TRAIN, Message(header.header, header.blobs[:-1])),
        (TRAIN, request_message(replace(request, last_update_round=5))),
        (TRAIN, request_message(replace(request, full=False))),
        ("train.again", header),
        attacker.ask(1, values, kind=EVALUATE),
    ]
    attacker.dice.shuffle(moves)
    return [attacker.hello(), *moves[:5], attacker.ask(1, values), *moves[5:]]


def _rounds(*numbers: int) -> Order:
    def moves(attacker: Attacker, values: Tensors) -> Sequence[Move]:
        return [attacker.hello(), *(attacker.ask(n, values) for n in numbers)]

    return moves


def _other_values(attacker: Attacker, values: Tensors) -> Sequence[Move]:
    """One round with two values: the second has a noise and a charge of its own, or is refused."""
    other = {k: v * 2 for k, v in values.items()}
    asked = [attacker.ask(n, each) for n in (1, 2) for each in (values, other, values)]
    return [attacker.hello(), *asked]


def _restarts(attacker: Attacker, values: Tensors) -> Sequence[Move]:
    """The same round again, and with other values, at a site that was killed between."""
    other = {k: v * 2 for k, v in values.items()}
    asked = [attacker.ask(1, values), attacker.ask(1, other), attacker.ask(2, other)]
    return [attacker.hello(), *(move for each in asked for move in (each, RESTART, each))]


def _two_runs(attacker: Attacker, values: Tensors) -> Sequence[Move]:
    """Two runs of one study, side by side: the same values, the same rounds."""
    return [
        *(attacker.hello(run) for run in (RUN, OTHER_RUN)),
        *(attacker.ask(n, values, run) for n in (1, 2) for run in (RUN, OTHER_RUN)),
        attacker.ask(1, values),
    ]


def _two_studies(attacker: Attacker, values: Tensors) -> Sequence[Move]:
    """Another study between, which selects other rows; and one run with two studies."""
    other = attacker.with_settings("most held out")
    third = attacker.with_settings("without its label")
    known = {k: v for k, v in values.items() if k in other.start}
    return [
        *(attacker.hello(), attacker.ask(1, values)),
        *(other.hello(OTHER_RUN), other.ask(1, known, OTHER_RUN)),
        *(third.hello(RUN), attacker.ask(2, values)),
        *(third.hello(THIRD_RUN), third.ask(1, dict(third.start), THIRD_RUN)),
        attacker.ask(3, values),
    ]


def _polled(attacker: Attacker, values: Tensors) -> Sequence[Move]:
    """Scores asked for out of turn, twice, and with other values."""
    other = {k: v * -3 for k, v in values.items()}
    polls = [attacker.ask(1, each, kind=POLL) for each in (values, values, other)]
    return [attacker.hello(), *polls, attacker.ask(1, values), attacker.ask(1, other, kind=POLL)]


def _random(attacker: Attacker, values: Tensors) -> Sequence[Move]:
    """A few requests of any kind, of any round, with any values, in any order."""
    dice, moves = attacker.dice, [attacker.hello()]
    named = [values, attacker.chosen(dice.choice(sorted(VALUES)))]
    for _ in range(6):
        pick = dice.random()
        if pick < 0.15:
            moves.append(attacker.hello(dice.choice([RUN, OTHER_RUN])))
        elif pick < 0.3 and len(moves) > 1:
            moves.append(dice.choice(moves))
        else:
            kind = dice.choice([TRAIN, TRAIN, TRAIN, POLL, EVALUATE])
            run, number = dice.choice([RUN, RUN, OTHER_RUN]), dice.choice([1, 1, 2, 2, 3, 4])
            moves.append(attacker.ask(number, dice.choice(named), run, kind))
    return moves


ORDERS: dict[str, Order] = {
    "in order": _rounds(1, 2),
    "skips": _rounds(3, 2),
    "backwards": _rounds(2, 1, 3),
    "beyond": _rounds(4, 0, -1, 10**9, 1),
    "again": _rounds(1, 1, 2, 1, 2),
    "unannounced": lambda a, values: [a.ask(1, values), a.hello(), a.ask(1, values)],
    "other values": _other_values,
    "restarts": _restarts,
    "two runs": _two_runs,
    "two studies": _two_studies,
    "polls": _polled,
    "malformed": _malformed,
    "random": _random,
}


def drawn_attack(seed: int, unit: str = "example", aggregation: str = "plain") -> Attack:
    """A random attack; the study may be one that the site refuses."""
    dice = Random(f"{unit} {aggregation} {seed}")
    while True:
        task, method = dice.choice(sorted(TASKS)), dice.choice(sorted(METHODS))
        refused = (method, unit, aggregation) == ("vote", "client", "secure")
        if refused or not Case(task, method, unit).allowed:
            continue
        return Attack(
            *(task, method, unit, aggregation),
            values=dice.choice(sorted(VALUES)),
            order=dice.choice(sorted(ORDERS)),
            row=dice.choice(sorted(ROWS)) if dice.random() < 0.4 else "plain",
            settings=tuple(dice.sample(sorted(SETTINGS), dice.choice([0, 0, 1, 2]))),
            seed=seed,
        )
