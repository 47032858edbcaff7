# SPDX-License-Identifier: Apache-2.0
"""Asked: what a plan, or a published method, will do with a model that is only named."""

from __future__ import annotations

import json
from collections.abc import Iterable

from fedplan.errors import FedplanError
from fedplan.language.parser import parse
from fedplan.models.catalog import params_of
from fedplan.reports.explanation import Explanation, explain
from fedplan.reports.memory import Load


def asked(
    model: str,
    plan: str = "",
    *,
    method: str = "",
    settings: Iterable[str] = (),
    rounds: int = 100,
    phases: Iterable[str] = (),
    task: str = "",
    labels: int = 0,
    dtype: str = "float32",
    load: Load | None = None,
) -> Explanation:
    """The explanation of a plan in words, or of a method by name; a plan takes no torch."""
    if method and plan:
        raise FedplanError(f"{method} has a plan of its own: leave out {plan!r}")
    if model.endswith(".toml"):
        raise FedplanError(f"{model} is a study, with a plan of its own: leave out {plan!r}")
    if method and (said := list(phases)):
        raise FedplanError(
            f"{method} says its phases itself: leave out --phase {said[0]}, and say a setting of "
            "the method, as in --setting warmup=20"
        )
    if method:
        from fedplan.reports.preview import foreseen

        own, head = dict(map(_set, settings)), (task, labels)
        return foreseen(model, method, own, rounds=rounds, dtype=dtype, head=head, step=load)
    if not plan:
        raise FedplanError(f"say what to do with {model}, as in 'share()', or name a study.toml")
    said, after = parse(plan), dict(map(_announced, phases))
    params = params_of(model, task=task, labels=labels, dtype=dtype)
    return explain(said, params, rounds=rounds, phases=after, step=load)


def _set(text: str) -> tuple[str, object]:
    """A setting of a method: a number, true or false, or else a word."""
    name, is_one, value = text.partition("=")
    if not name or not is_one:
        raise FedplanError(f"--setting takes NAME=VALUE, as in rank=8, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _announced(text: str) -> tuple[str, int]:
    name, _, after = text.partition("=")
    if not name or not after.isdecimal():
        raise FedplanError(f"--phase takes NAME=ROUND, as in frozen=20, not {text!r}")
    return name, int(after)
