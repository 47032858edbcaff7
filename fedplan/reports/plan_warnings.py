# SPDX-License-Identifier: Apache-2.0
"""Warnings of a plan: of what it does not do, and of what the server can read from its updates.

Apart from `study_warnings`, which imports torch: `explain` of a plan does without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from rich.text import Text

from fedplan.language.coverage import overridden_steps, unreached_branches
from fedplan.language.plan import Chain, Plan, Role, Step, chain
from fedplan.language.predicates import Turn
from fedplan.language.resolution import params_with_roles, permitted_roles
from fedplan.models.params import Kind, Params

if TYPE_CHECKING:
    from fedplan.federation.agreement import Agreement

FOLDER = "{folder}"
"""Stands for the folder of a run in a remedy, since a folder may be moved."""


@dataclass(frozen=True)
class RunWarning:
    """A reason to doubt the result of a run, which nothing refuses, by its code, and a remedy."""

    code: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text} {self.remedy}"

    def json(self) -> dict[str, str]:
        """Return code, text and remedy by name."""
        return asdict(self)

    def of_run(self, folder: Path) -> RunWarning:
        """Return the warning with the folder of the run in place of FOLDER in its remedy."""
        return replace(self, remedy=self.remedy.replace(FOLDER, str(folder)))


PLAN_WARNINGS = {
    "nothing-trained": "no client trains any param",
    "idle-rounds": "in some rounds no client trains any param",
    "phase-not-reached": "a phase never begins: the warm-up is as long as the run",
    "branch-not-reached": "no turn reaches a branch of a when, cycle or by",
    "step-overridden": "a later step of the plan replaces an earlier one for all its params",
}
"""The codes of warnings of a plan, with their meaning."""

SettingText = Callable[[str, object], str]
"""Returns the text by which a user sets a field of a study, given as "train.rounds", to a value."""
_PYTHON_SECTIONS = {"train": "TrainConfig", "participation": "ClientsConfig"}


def file_setting(field: str, value: object) -> str:
    """Return the option of `fedplan run` that sets a field.

    >>> file_setting("train.rounds", 5)
    '--set train.rounds=5'
    """
    text = json.dumps(value) if isinstance(value, list) else value
    return f"--set {quote(f'{field}={text}')}"


def python_setting(field: str, value: object) -> str:
    """Return the argument of `simulate` that sets a field.

    >>> python_setting("train.rounds", 5)
    'train=fp.TrainConfig(rounds=5)'
    """
    section, _, name = field.partition(".")
    section = "participation" if section == "clients" else section
    if section == "method":
        return f"fp.parse({json.dumps(value)})" if name == "plan" else f"{name}={value}"
    config = _PYTHON_SECTIONS.get(section, f"{section.capitalize()}Config")
    return f"{section}=fp.{config}({name}={json.dumps(value)})"


def explain_setting(field: str, value: object) -> str:
    """Return the argument of `fedplan explain MODEL PLAN` that sets a field."""
    return f"--rounds {value}" if field == "train.rounds" else quote(str(value))


def plan_warnings(
    plan: Plan,
    params: Params,
    turns: Sequence[Turn],
    *,
    phases: Mapping[str, int] | None = None,
    setting: SettingText = explain_setting,
    phase_fields: Mapping[str, str] | None = None,
) -> Iterator[RunWarning]:
    """Yield the warnings of a plan over the turns of a run, planned or recorded.

    `phases` maps phases to the round after which each begins, if that is planned. `setting` writes
    the remedies; `phase_fields` has the field that sets the begin of a phase, by phase.
    """
    trained = dict[int, bool]()
    trains = dict[tuple[Step, ...], bool]()
    for turn in turns:
        steps = plan.active_steps(turn)
        if steps not in trains:
            roles = permitted_roles(plan, params, turn)
            trains[steps] = any(role.is_trained for role in roles.values())
        trained[turn.round] = trained.get(turn.round, False) or trains[steps]
    rounds, idle = len(trained), sorted(n for n, any_trained in trained.items() if not any_trained)
    if idle and len(idle) == rounds:
        yield RunWarning(
            "nothing-trained",
            f"Nothing is trained: the plan {plan.text} gives no param the role SHARE or KEEP.",
            f"Share or keep a part, as {setting('method.plan', 'share()')}",
        )
    elif idle:
        last = max(trained.keys() - set(idle))
        yield RunWarning(
            "idle-rounds",
            f"In {len(idle)} of {rounds} rounds nothing is trained, first in round {idle[0]}.",
            f"End the run sooner: {setting('train.rounds', last)}"
            if idle[0] > last
            else f"Share or keep a part in each round, as {setting('method.plan', 'share()')}",
        )
    for branch in unreached_branches(plan, turns):
        after = max([branch.after, *((phases or {}).get(name, 0) for name in branch.phases)])
        longer = setting("train.rounds", 2 * max(after, rounds)) if after or branch.phases else ""
        if branch.phases:
            name, fields = branch.phases[0], phase_fields or {}
            sooner = setting(fields[name], rounds // 2) if name in fields else ""
            yield RunWarning(
                "phase-not-reached",
                f"The phase {name!r} does not begin within {rounds} rounds, so "
                f"{branch.plan.text} never applies.",
                f"Run longer: {longer}" + (f"; or begin it sooner: {sooner}" if sooner else ""),
            )
        else:
            yield RunWarning(
                "branch-not-reached",
                f"{branch.plan.text} never applies in {rounds} rounds: {branch.condition}.",
                "Correct the plan, or leave this out of it"
                + (f"; or run longer: {longer}" if longer else ""),
            )
    for step in overridden_steps(plan, params, turns):
        others = [
            each for each in (plan.steps if isinstance(plan, Chain) else (plan,)) if each != step
        ]
        yield RunWarning(
            "step-overridden",
            f"{step.text} has no effect: later steps of the plan replace it for all its params.",
            f"Put it last: {setting('method.plan', chain(*others, step).text)}",
        )


def warnings_text(warnings: Sequence[RunWarning]) -> list[Text]:
    """Return lines on all warnings, each with its remedy; none without warnings."""
    if not warnings:
        return []
    count = f"{len(warnings)} {'warning' if len(warnings) == 1 else 'warnings'}:"
    lines = [Text(count, style="bold yellow")]
    for each in warnings:
        lines.append(Text(f"- {each.text} ({each.code})", style="yellow"))
        lines.append(Text(f"  {each.remedy}"))
    return [Text(), *lines]


NO_NOISE = "Without differential privacy"
"""Start of the warning, unless the server adds the noise."""


def plan_exposure(
    plan: Plan, params: Params, *, why: str = NO_NOISE, seen: str = "each update"
) -> str:
    """Return a sentence on what a server learns from the shared parts; "" if nothing is shared."""
    shared = params_with_roles(plan, params, Role.SHARE)
    if not shared:
        return ""
    parts = ", ".join(kind for kind in Kind if any(p.kind is kind for p in shared))
    has_tokens = any(p.kind is Kind.EMBED and len(p.shape) == 2 for p in shared)
    tokens = ", and from embed every token" * has_tokens
    return (
        f"{why}, {seen} ({parts}) lets the server infer how many examples of each label a site "
        f"has, and whether an example that it knows is among them{tokens}. Freezing or keeping "
        "other parts does not hide this."
    )


def study_exposure(agreement: Agreement) -> str:
    """Return `plan_exposure` of a study; "" if all that the server sees has noise."""
    guarantee, secagg = agreement.guarantee, agreement.secagg
    if guarantee is not None and (guarantee.unit == "example" or agreement.distributed_dp):
        return ""
    why = "Before the server adds its noise" if guarantee else NO_NOISE
    seen = f"each sum of {secagg.min_contributors} or more sites"
    sums = {"seen": seen} if secagg.active else {}
    return plan_exposure(agreement.method.plan, agreement.params, why=why, **sums)
