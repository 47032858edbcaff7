# SPDX-License-Identifier: Apache-2.0
"""Evaluations: the world, and a client's own model, on rows that the client holds out.

A client is asked once a round is closed. Its answer is scores and nothing else: no turn follows
from it, and what came with the question need not come again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import fsum, isfinite, isnan, nan
from typing import Any, Literal, cast

from torch import Tensor

from fedplan.data.examples import Examples
from fedplan.data.metrics import spread
from fedplan.errors import StoreError
from fedplan.federation.account import Answer
from fedplan.federation.acquaintance import NOBODY
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, admit, own_turn, receive
from fedplan.federation.exams import EXAMPLES, Exam, due
from fedplan.federation.history import Metrics
from fedplan.federation.marks import joint, mark_of, model_mark
from fedplan.federation.messages import Refused, Request
from fedplan.federation.rounds import push
from fedplan.federation.world import World
from fedplan.language.resolution import permitted
from fedplan.models.values import put
from fedplan.storage.files import put_file
from fedplan.tensors.devices import deterministic
from fedplan.tensors.named import Tensors
from fedplan.tensors.serialization import JSON, SerializationError

Scores = dict[str, dict[str, float]]
"""What a client says of each model that it scored: of the world, and of its own."""
WORLD, OWN = "world", "own"
Kept = Literal["", "world", "own"]
"""By whose score the best round is told; without one, none is kept."""
MOST = 64
"""Scores that one model may have, and characters of the name of each."""


@dataclass(frozen=True)
class Scoring:
    """What a run measures, and when: every so many rounds, and after its last one.

    With `sites` each client scores the world and its own model on rows that it holds out.
    `keep_best` has the world of the best round kept: by the score of the `world`, or by that of
    the clients' `own` models. `primary` is the score that a task is known by, and `higher` says
    whether more of it is better.
    """

    every: int = 1
    sites: bool = False
    keep_best: Kept = ""
    primary: str = "loss"
    higher: bool = False

    def due(self, number: int, rounds: int) -> bool:
        """Whether a round is one after which something is measured."""
        return due(number, self.every, rounds)

    def best(self, metrics: Metrics) -> int:
        """The round whose world is to be kept; the first of those that are as good, 0 for none."""
        names = {
            WORLD: (f"world.{self.primary}", f"sites.world.{self.primary}"),
            OWN: (f"sites.own.{self.primary}", "personal.mean"),
        }.get(self.keep_best, ())
        sign, found = 1 if self.higher else -1, dict[int, float]()
        for row in metrics:
            told = [row[name] for name in names if name in row]
            if told and isfinite(told[0]):
                found[int(row["round"])] = sign * told[0]
        return max(found, key=lambda number: (found[number], -number), default=0)


def question(
    agreement: Agreement,
    world: World,
    client: str,
    traits: Mapping[str, str],
    *,
    anew: bool = False,
) -> Request:
    """What a client is asked once a round is closed, with what it lacks of the world that it made.

    It is of the round's own turn. The world is scored as it is, so that what the client has as its
    own comes too, if others have moved it.
    """
    met = world.met.get(client, NOBODY)
    closed = replace(world, round=world.round - 1, met={client: replace(met, settled=0)})
    return push(agreement, closed, client, traits, anew=anew)


def evaluate(agreement: Agreement, client: Client, request: Request) -> Scores:
    """A client's scores: the same for the same request, and of no consequence for any turn."""
    with deterministic(client.deterministic):
        return _evaluate(agreement, client, request)


def _evaluate(agreement: Agreement, client: Client, request: Request) -> Scores:
    exam = _exam(agreement, client, request)
    rows = client.disclosure.require_rows(client.name, exam)
    home = _home(client, request)
    # What is its own is at home, and in the world too: so nothing counts as settled.
    receive(agreement, client, request, {})
    models = _models(agreement, client, request, exam, home)
    content = _content(agreement, client, request, rows, models)
    _require_same(client, request, content)
    size = 8 * MOST * len(models)
    admit(agreement, client, request, Answer("evaluation", request.name, content, size))
    return _scored(agreement, client, partial(exam.score, client.model, rows), models)


def _exam(agreement: Agreement, client: Client, request: Request) -> Exam:
    """What a client's models are tested on, if it agreed to be asked, and nothing is hidden."""
    if agreement.guarantee is not None:
        raise Refused(
            f"{client.name} is asked for scores of its rows, and this study hides its "
            f"{agreement.guarantee.unit}s: nobody pays for scores, so none leave"
        ).coded("uncharged")
    if agreement.masking.active:
        raise Refused(
            f"{client.name} is asked for scores of its rows, and sums of this study are masked: "
            "scores of one site alone are no sum"
        ).coded("unsummed")
    exam, number = client.exam, request.turn.round
    if exam is None or not due(number, exam.every, exam.rounds):
        raise Refused(
            f"{client.name} is asked for scores of round {number}, and the study that it agreed to "
            "asks for none of it: see evaluate.sites and evaluate.every"
        ).coded("unasked")
    return exam


def _home(client: Client, request: Request) -> Tensors:
    """What the client kept when the round was closed; who has gone on since cannot say."""
    number, (home, notes) = request.turn.round, client.journal.home()
    last = max((line["round"] for line in notes.get("lines", ())), default=0)
    newer = any(client.held.get(key, -1) > each for key, each in request.versions.items())
    if last > number or newer:
        raise Refused(
            f"{client.name} is asked for scores of round {number}, and has gone on since"
        ).coded("gone-on")
    return home


def _models(
    agreement: Agreement, client: Client, request: Request, exam: Exam, home: Tensors
) -> dict[str, dict[str, Tensor]]:
    """The values of each model that is scored."""
    roles = permitted(agreement.method.plan, agreement.params, own_turn(client, request))
    keys = [p.key for p in agreement.trainable]
    world = {key: (client.seen if key in client.seen else client.start)[key] for key in keys}
    own = {p.key: home[p.key] for p in agreement.trainable if roles[p].own and p.key in home}
    personal = exam.personal and client.disclosure.own
    return {WORLD: world, **({OWN: world | own} if personal else {})}


def _require_same(client: Client, request: Request, content: str) -> None:
    """Refuse other values under the same question: enough of them would tell what is kept."""
    if not content:
        return  # of a simulation, whose server is itself
    file = client.journal.made().parent / EXAMINED
    try:
        said: Any = json.loads(file.read_text(encoding="utf-8") if file.exists() else "{}")
        known = {str(name): str(mark) for name, mark in cast("dict[Any, Any]", said).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise StoreError(f"{file} cannot be read: {error}; put a copy of it back") from error
    mark = hashlib.sha256(content.encode()).hexdigest()
    if known.setdefault(request.name, mark) != mark:
        raise Refused(
            f"{client.name} has told the scores of {request.name[:80]!r}, of other values"
        ).coded("unasked")
    put_file(file, json.dumps(known), mode=0o600)


def _scored(
    agreement: Agreement,
    client: Client,
    score: Callable[[], Mapping[str, float]],
    models: Mapping[str, Mapping[str, Tensor]],
) -> Scores:
    found = Scores()
    for model, values in models.items():
        same = model == OWN and all(values[k] is v for k, v in models[WORLD].items())
        if same:
            found[OWN] = dict(found[WORLD])
            continue
        put(client.model, values, agreement.trainable)
        shown = client.disclosure.shown(client.name, score())
        # A model that diverged has a score, and that is none.
        found[model] = {k: float(v) if isfinite(v) else nan for k, v in shown.items()}
    return found


def _content(
    agreement: Agreement,
    client: Client,
    request: Request,
    rows: Examples,
    models: Mapping[str, Mapping[str, Tensor]],
) -> str:
    """All that the scores are made of; of a client whom nobody counts, nobody asks."""
    if client.account is None:
        return ""
    made_of = [mark_of(rows), len(rows), model_mark(client.model)]
    held = {
        model: {key: client.digests.whole(value) for key, value in values.items()}
        for model, values in models.items()
    }
    asked = [request.turn.round, request.turn.phase, client.name, client.traits]
    return joint([agreement.experiment, agreement.text], asked, made_of, held)


def scores_said(scores: Scores) -> dict[str, JSON]:
    """Scores as JSON, which has no number that is none."""
    return {
        model: {name: each if isfinite(each) else None for name, each in held.items()}
        for model, held in scores.items()
    }


EXAMINED = "examined.json"
"""Beside the folder of a journal: of what values each question was answered."""
SHARES = ("accuracy", "f1", "precision", "recall", "auc")
"""Scores that are shares, and so within 0 and 1."""


def scores_of(said: Any) -> Scores:
    """Scores from JSON, if they are what a client may say."""
    found = Scores()
    for model, held in _table(said).items():
        if model not in (WORLD, OWN):
            raise SerializationError(f"these are scores of {model[:40]!r}, of which none are asked")
        found[model] = {name: _number(name, each) for name, each in _table(held).items()}
        count = found[model].get(EXAMPLES, 0.0)
        _require_sane(found[model])
        if not (count == int(count) and 0 < count < 2**32):
            raise SerializationError(f"the scores of {model} are of {count} rows")
    if WORLD not in found:
        raise SerializationError("there are no scores of the world")
    return found


def _require_sane(scores: Mapping[str, float]) -> None:
    """Refuse names that are no names, and shares that are none: a site may say anything."""
    for name, value in scores.items():
        share = name.startswith(SHARES) and not isnan(value)
        if not re.fullmatch(r"[\w.@-]+", name, re.ASCII) or (share and not 0 <= value <= 1):
            raise SerializationError(f"these are no scores: {name!r} is {value}")


def _table(said: Any) -> dict[str, Any]:
    table = cast("dict[Any, Any]", said if isinstance(said, dict) else {})
    names = all(type(name) is str and 0 < len(name) <= MOST for name in table)
    if not table or not names or len(table) > MOST:
        raise SerializationError(f"these are no scores: {str(said)[:60]}")
    return table


def _number(name: str, said: Any) -> float:
    if said is None and name != EXAMPLES:
        return nan
    if isinstance(said, bool) or not isinstance(said, int | float) or not isfinite(said):
        raise SerializationError(f"the score {name!r} is {str(said)[:40]!r}, not a number")
    return float(said)


def together(
    answers: Mapping[str, Scores], silent: Mapping[str, str], scoring: Scoring
) -> dict[str, Any]:
    """What all clients say: each score as the mean over all rows, how it lies over the clients,
    and what each said; `silent` are those who told none, with the reason.
    """
    found, spreads = dict[str, Any](), dict[str, Any]()
    for model in (WORLD, OWN):
        held = {name: answers[name][model] for name in sorted(answers) if model in answers[name]}
        told = {name: s[scoring.primary] for name, s in held.items() if scoring.primary in s}
        found |= {model: _weighted(held)} if held else {}
        spreads |= {model: spread(told, higher=scoring.higher)} if told else {}
    by = {name: answers[name] for name in sorted(answers)}
    return {**found, "spread": spreads, "by": by, "silent": dict(sorted(silent.items()))}


def _weighted(held: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean of each score over the rows of the clients that tell it."""
    names = dict.fromkeys(name for scores in held.values() for name in scores if name != EXAMPLES)
    found = dict[str, float]()
    for name in names:
        told = [(each[name], each[EXAMPLES]) for each in held.values() if name in each]
        found[name] = fsum(value * rows for value, rows in told) / fsum(rows for _, rows in told)
    return {**found, EXAMPLES: fsum(each[EXAMPLES] for each in held.values())}
