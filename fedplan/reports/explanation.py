# SPDX-License-Identifier: Apache-2.0
"""Explain what a plan does with a model before anything runs, as terminal tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.errors import FedplanError, PlanError
from fedplan.federation.wire_cost import WireCost
from fedplan.language.coverage import planned_turns
from fedplan.language.parser import parse
from fedplan.language.plan import Plan, Role
from fedplan.language.resolution import Participants, phase_names
from fedplan.models.catalog import params_of
from fedplan.models.params import Kind, Param, Params
from fedplan.reports.costs import LINE, LORA_RANK, CostRow, cost_rows
from fedplan.reports.figures.drawing import ROLE_STYLES
from fedplan.reports.forecasts import ClientForecast, Forecast, StageForecast, forecast
from fedplan.reports.formats import megabytes, millions, percent
from fedplan.reports.memory import GPU_BYTES, MemoryEstimate, TrainingStep, estimate_memory
from fedplan.reports.plan_warnings import RunWarning, plan_exposure, plan_warnings, warnings_text

if TYPE_CHECKING:
    from torch import nn


ROLE_MEANINGS = {
    Role.SHARE: "clients train it and upload it; the server averages it",
    Role.KEEP: "personal: each client trains its own copy and never uploads it",
    Role.FREEZE: "frozen: not trained, the same for all clients",
    Role.HOLD: "personal and frozen: each client's own copy, never uploaded",
}
"""The legend of the roles."""
MAX_STAGE_COLUMNS = 3
"""The most stages with columns side by side; more stages get one row each."""


@dataclass(frozen=True)
class PartRow:
    """A table row: params (at least one) of one kind with the same role in every stage."""

    part: str
    params: tuple[Param, ...]

    @property
    def numel(self) -> int:
        """The number of values in the row's params."""
        return sum(p.numel for p in self.params)

    @property
    def nbytes(self) -> int:
        """The bytes of the row's params."""
        return sum(p.nbytes for p in self.params)

    def role(self, stage: StageForecast) -> Text:
        """Return the coloured role in a stage; `SHARE 4/12` if scores choose 4 of 12 blocks."""
        role = stage.permitted[self.params[0]]
        best = stage.choosing_step(self.params[0])
        text = role.name
        if best is not None:
            blocks = {p.block_id for p in stage.permitted if p.block_id and best.part.holds(p)}
            text += f" {best.count}/{len(blocks)}"
        return Text(text, style=ROLE_STYLES[role])

    def upload_bytes(self, stage: StageForecast, wire_cost: WireCost) -> int:
        """Return the bytes of the row that a client uploads per round, for the heaviest blocks."""
        shared = (p for p in self.params if stage.heaviest[p] is Role.SHARE)
        return sum(map(wire_cost.upload_bytes, shared))


@dataclass(frozen=True)
class Explanation:
    """A plan explained on a model before a run: print with rich or `str`, or call `json`.

    `forecast` has roles and bytes for each class of clients (clients for which the plan has the
    same roles). With `step`, all outputs include the memory of that training step. `warning` says
    what the server can read from updates; `warnings` are reasons to doubt the plan. `on_gpu`: say
    whether the memory of a GPU suffices.
    """

    forecast: Forecast
    step: TrainingStep | None = None
    warning: str = ""
    warnings: tuple[RunWarning, ...] = ()
    on_gpu: bool = True

    def __str__(self) -> str:
        out = StringIO()
        Console(file=out, width=100, color_system=None).print(self.__rich__())
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())

    def __rich__(self) -> RenderableType:
        f = self.forecast
        numel, tensors = sum(p.numel for p in f.params), len({p.name for p in f.params})
        title = Text(f"{f.plan.text}\n", style="bold").append(
            f"{millions(numel)} params in {tensors} tensors, {megabytes(f.nbytes)} MB; "
            f"plan {f.plan.fingerprint}\n" + (f"{f.wire_cost.text}\n" if f.wire_cost.text else ""),
            style="not bold",
        )
        parts: list[RenderableType] = [title]
        for client in f.clients:
            few = len(client.stages) <= MAX_STAGE_COLUMNS
            table = self._stage_columns(client) if few else self._stage_rows(client)
            parts += [*self._class_heading(client), table, self._total(client)]
        notes = [*f.notes, *([f"\n{self.warning}"] if self.warning else [])]
        memory, doubts = self._memory_tables(), warnings_text(self.warnings)
        tables = (*memory, *self._cost_table())
        return Group(*parts, self._legend(), *map(Text, notes), *tables, *doubts)

    def _class_heading(self, client: ClientForecast) -> list[Text]:
        several = len(self.forecast.clients) > 1
        return [Text(client.client_class, style="bold underline")] if several else []

    def memory(self, client: ClientForecast) -> dict[str, MemoryEstimate]:
        """Return the memory of a training step of a client, by stage name; empty without `step`."""
        if self.step is None:
            return {}
        params = self.forecast.params
        return {s.name: estimate_memory(params, s.heaviest, self.step) for s in client.stages}

    def _memory_tables(self) -> list[RenderableType]:
        """Return a heading, then per class of clients a memory table and whether 24 GB suffice."""
        if self.step is None:
            return []
        parts = list[RenderableType]([Text(f"\nTraining step, memory in MB: {self.step.text}\n")])
        for client in self.forecast.clients:
            stages = self.memory(client)
            largest = max(stages.values(), key=lambda memory: memory.total)
            if len(stages) > MAX_STAGE_COLUMNS:
                stages = {"largest stage": largest}
            table, memories = _columns("", *(f"{name}>" for name in stages)), list(stages.values())
            for dtype in memories[0].weights:
                table.add_row(f"weights, {dtype}", *(megabytes(m.weights[dtype]) for m in memories))
            table.add_row("gradients", *(megabytes(m.gradients) for m in memories))
            table.add_row("optimizer state", *(megabytes(m.optimizer) for m in memories))
            table.add_row("activations, estimated", *(megabytes(m.activations) for m in memories))
            if any(m.logits for m in memories):
                table.add_row("logits, estimated", *(megabytes(m.logits) for m in memories))
            table.add_row("total, estimated", *(megabytes(m.total) for m in memories), style="bold")
            free = GPU_BYTES - largest.total
            fit = f"Does not fit on a GPU of 24 GB: {megabytes(-free)} MB too much."
            if free >= 0:
                fit = f"Fits on a GPU of 24 GB, with {megabytes(free)} MB free."
                # PyTorch's own memory is not part of the estimate.
                fit += " This is close: PyTorch itself takes 1 to 2 GB more." * (free < 3 * 10**9)
            parts += [*self._class_heading(client), table]
            parts += [Text(f"\n{fit}")] if self.on_gpu else []
        return parts

    @property
    def costs(self) -> tuple[CostRow, ...]:
        """What a language model costs by LoRA, QLoRA and as a whole; empty for other models.

        The plan is that of the class of clients and the stage with the most traffic. Without
        `step`, it is the default TrainingStep.
        """
        f = self.forecast
        stages = [stage for client in f.clients for stage in client.stages]
        heaviest = max(stages, key=lambda stage: stage.max_upload + stage.max_download)
        traffic = heaviest.max_upload + heaviest.max_download
        return cost_rows(f.params, heaviest.heaviest, traffic, self.step or TrainingStep())

    def _cost_table(self) -> list[RenderableType]:
        """Return a heading, the table of `costs` and its notes; nothing without costs."""
        if not (rows := self.costs):
            return []
        step = replace(self.step or TrainingStep(), quantized="")
        names = ("", "client GB>", "server GB>", "MB a round>", "at 100 Mbit/s>", "fits on GB")
        table = _columns(*names)
        for row in rows:
            table.add_row(*row.cells)
        lora = any(p.kind is Kind.ADAPTER for p in self.forecast.params)
        assumed = "" if lora else f"LoRA is of rank {LORA_RANK} on query and value. "
        return [
            Text(f"\nCosts, memory estimated: {step.text}\n"),
            table,
            Text(
                f"\n{assumed}MB and seconds are of one client: upload and download, on a line of "
                f"{LINE // 10**6} Mbit/s. The server's memory is without the state of a server "
                "optimizer. A ? marks a GPU that is too small if the estimate is as low as the "
                "lowest one measured; nothing was measured on a GPU."
            ),
        ]

    def rows(self, client: ClientForecast) -> list[PartRow]:
        """Return the table rows of a client: params grouped by stack, kind and roles in all stages.

        If a kind of a stack has several rows, the labels end in block numbers, as "mlp 0-3", or in
        "outside" for params that are in no block.
        """
        several_stacks = len({p.stack for p in self.forecast.params if p.stack}) > 1
        groups: dict[tuple[object, ...], list[Param]] = {}
        for p in sort_params(self.forecast.params):
            roles = tuple((s.certain[p], s.permitted[p]) for s in client.stages)
            groups.setdefault((p.stack if several_stacks else "", p.label, roles), []).append(p)
        named = [(f"{stack} {label}".strip(), ps) for (stack, label, _), ps in groups.items()]
        split = {part for part, _ in named if sum(part == other for other, _ in named) > 1}
        return [
            PartRow(f"{part} {_block_text(ps) or 'outside'}" if part in split else part, tuple(ps))
            for part, ps in named
        ]

    def _stage_columns(self, client: ClientForecast) -> Table:
        """Return a table with columns role and upload per stage, and a row per part and cost."""
        table = _columns("part", "params>", "MB>")
        for stage in client.stages:
            table.add_column(stage.name, no_wrap=True)
            table.add_column("upload", justify="right", no_wrap=True)
        for row in self.rows(client):
            cells = list[RenderableType]()
            for stage in client.stages:
                upload = row.upload_bytes(stage, self.forecast.wire_cost)
                cells += [row.role(stage), megabytes(upload) if upload else "-"]
            table.add_row(row.part, millions(row.numel), megabytes(row.nbytes), *cells)
        table.add_row()
        costs = [self._costs(stage) for stage in client.stages]
        for label in costs[0]:
            cells = [cell for cost in costs for cell in ("", cost[label])]
            table.add_row(label, "", "", *cells, style="bold")
        return table

    def _stage_rows(self, client: ClientForecast) -> Table:
        """Return a table with a row per stage: trained kinds of params, `mlp in 0-3`, and costs."""
        table = _columns("stage", "trained", *(f"{x}>" for x in self._costs(client.stages[0])))
        for stage in client.stages:
            trained = [p for p in stage.permitted if stage.permitted[p].is_trained]
            kinds, blocks = sorted({p.label for p in trained}), _block_text(trained)
            text = ", ".join(kinds) if len(kinds) <= 4 else f"{len(kinds)} kinds"
            text = f"{text} in {blocks}" if blocks else text or "nothing"
            table.add_row(stage.name, text, *self._costs(stage).values())
        return table

    def _costs(self, stage: StageForecast) -> dict[str, str]:
        """Return the costs of a stage per client and round in MB, by label; ≤ is an upper bound."""
        up, down = (
            megabytes(most) if least == most else f"≤ {megabytes(most)}"
            for least, most in (stage.upload_range, stage.download_range)
        )
        saved = percent(1 - stage.max_upload / self.forecast.nbytes)
        state = megabytes(stage.optimizer_bytes)
        return {"upload": up, "download": down, "AdamW state": state, "upload saved": saved}

    def _total(self, client: ClientForecast) -> Text:
        """Return a sentence on the upload and download of a client over all rounds."""
        rounds = sum(len(s.rounds) for s in client.stages)
        saved = 1 - client.max_upload / (self.forecast.nbytes * rounds)
        than = f"{percent(abs(saved))} {'less' if saved >= 0 else 'more'} than share()"
        if client.upload_range[0] < client.upload_range[1]:
            than = f"{'at least' if saved >= 0 else 'at most'} {than}"
        ranges = (map(megabytes, r) for r in (client.upload_range, client.download_range))
        up, down = (most if least == most else f"{least} to {most}" for least, most in ranges)
        return Text(
            f"\nOver {rounds} rounds a client uploads {up} MB, {than}, and downloads {down} MB, "
            f"{megabytes(client.first_download)} MB of it in its first round.\n"
        )

    def _legend(self) -> Text:
        """Return the meanings of the roles in the tables and of the cost columns."""
        stages = [stage for client in self.forecast.clients for stage in client.stages]
        used = {role for stage in stages for role in stage.permitted.values()}
        legend = Text()
        for role in (role for role in Role if role in used):
            legend.append(f"{role.name:7}", style=ROLE_STYLES[role])
            legend.append(f"{ROLE_MEANINGS[role]}\n")
        return legend.append(
            "Upload, download and AdamW state are MB per client and round; upload saved is "
            "relative to share()."
        )

    def json(self) -> dict[str, Any]:
        """Return the explanation as JSON values, sizes in bytes; "memory" only with `step`."""
        f = self.forecast
        return {
            "plan": f.plan.text,
            "fingerprint": f.plan.fingerprint,
            "params": sum(p.numel for p in f.params),
            "bytes": f.nbytes,
            "rounds": f.rounds,
            "clients": [self._client_json(client) for client in f.clients],
            "notes": list(f.notes),
            "warning": self.warning,
            "warnings": [warning.json() for warning in self.warnings],
            "costs": [row.json() for row in self.costs],
        }

    def _client_json(self, client: ClientForecast) -> dict[str, Any]:
        """Return the forecast of a class of clients with stages and rows as JSON values."""
        memory = self.memory(client)
        stages = [
            {
                "name": stage.name,
                "rounds": len(stage.rounds),
                "max_upload_bytes": stage.max_upload,
                "min_upload_bytes": stage.upload_range[0],
                "max_download_bytes": stage.max_download,
                "min_download_bytes": stage.download_range[0],
                "optimizer_bytes": stage.optimizer_bytes,
                "trained_params": stage.trained_params,
                **({"memory": memory[stage.name].json()} if memory else {}),
                "upload_saved": 1 - stage.max_upload / self.forecast.nbytes,
                "parts": [
                    {
                        "part": row.part,
                        "role": row.role(stage).plain,
                        "params": row.numel,
                        "bytes": row.nbytes,
                        "max_upload_bytes": row.upload_bytes(stage, self.forecast.wire_cost),
                    }
                    for row in self.rows(client)
                ],
            }
            for stage in client.stages
        ]
        return {
            "client_class": client.client_class,
            "max_upload_bytes": client.max_upload,
            "min_upload_bytes": client.upload_range[0],
            "max_download_bytes": client.max_download,
            "min_download_bytes": client.download_range[0],
            "first_download_bytes": client.first_download,
            "stages": stages,
        }


def explain(
    plan: Plan,
    model: nn.Module | Params,
    *,
    rounds: int = 100,
    phases: Mapping[str, int] | None = None,
    participants: Participants | None = None,
    wire_cost: WireCost | None = None,
    step: TrainingStep | None = None,
) -> Explanation:
    """Explain a plan on a model: the role of each part in each round, and the costs in bytes.

    The model may be on the meta device. `phases` maps phases of the plan to the round after which
    each begins; other phases get a stage of their own, which the totals leave out. `participants`
    are the clients (default: one of every class that the plan distinguishes), `wire_cost` the
    compression of uploads. With `step`, the memory of a training step is estimated too. Raises
    PlanError if the plan names parts or phases that do not exist, or if `rounds` is below 1.
    """
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"the plan is {plan!r}: give a plan, as fp.parse('share()'), or that of a method, as "
            "fp.methods.fedper().plan"
        )
    if not isinstance(model, tuple):
        from fedplan.models.description import describe

        model = describe(model)
    forecasts = forecast(
        plan, model, rounds=rounds, phases=phases, participants=participants, wire_cost=wire_cost
    )
    unknown = [name for name in phase_names(plan) if name not in (phases or {})]
    turns = planned_turns(plan, rounds, phases or {}, unknown, participants)
    warnings = tuple(plan_warnings(plan, model, turns, phases=phases))
    return Explanation(forecasts, step, plan_exposure(plan, model), warnings)


def parts_table(params: Params) -> Table:
    """Return a table of a model's params by stack and kind: blocks, size and an example's name."""
    table = _columns("stack", "part", "blocks", "params>", "MB>", "of model>", "example")
    groups: dict[tuple[str, Kind], list[Param]] = {}
    for p in sort_params(params):
        groups.setdefault((p.stack, p.kind), []).append(p)
    total = sum(p.numel for p in params)
    for (stack, kind), ps in groups.items():
        numel, nbytes = sum(p.numel for p in ps), sum(p.nbytes for p in ps)
        sizes = (millions(numel), megabytes(nbytes), percent(numel / total))
        example = Text(".".join(ps[0].key.split(".")[-2:]))
        table.add_row(stack, kind, _block_text(ps), *sizes, example)
    return table


def sort_params(params: Params) -> list[Param]:
    """Return params ordered by stack (params without a stack last), then by kind as in a block."""
    kinds, several = list(Kind), len({p.stack for p in params if p.stack}) > 1
    return sorted(params, key=lambda p: (several and (p.stack or "~"), kinds.index(p.kind)))


def _columns(*names: str) -> Table:
    """Return an empty table with these columns; a name that ends in `>` is right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        justify = "right" if name.endswith(">") else "left"
        table.add_column(name.removesuffix(">"), no_wrap=True, justify=justify)
    return table


def _block_text(params: list[Param]) -> str:
    """Return the params' block numbers as ranges, `0-3, 7`; empty if no param is in a block."""
    ranges: list[list[int]] = []
    for number in sorted({p.block for p in params if p.block is not None}):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges)


def explain_plan(
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
    step: TrainingStep | None = None,
) -> Explanation:
    """Explain a plan's text, or a method given by name, on a model; no weights are loaded.

    Give `plan` or `method`, not both. `settings` are texts NAME=VALUE for the method, with a JSON
    value or a plain text; `phases` are texts NAME=ROUND: the phase begins after that round. `task`
    and `labels` replace the model's usual head. Raises FedplanError if the arguments contradict
    each other or a text is malformed, PlanError if the plan names parts that the model lacks.
    """
    if method and plan:
        raise FedplanError(f"the method {method} has its own plan: omit {plan!r}")
    if model.endswith(".toml"):
        raise FedplanError(f"{model} is a study file, which has its own plan: omit {plan!r}")
    if method and (phase_texts := list(phases)):
        raise FedplanError(
            f"the method {method} sets its own phases: omit --phase {phase_texts[0]} and use a "
            "setting of the method, for example --setting warmup=20"
        )
    if method:
        from fedplan.reports.study_explanation import explain_method

        values = dict[str, object]()
        for text in settings:
            name, equals, value = text.partition("=")
            if not name or not equals:
                raise FedplanError(f"--setting takes NAME=VALUE, for example rank=8, not {text!r}")
            try:
                values[name] = json.loads(value)
            except ValueError:
                values[name] = value
        head = (task, labels)
        return explain_method(
            model, method, values, rounds=rounds, dtype=dtype, head=head, step=step
        )
    if not plan:
        raise FedplanError(f"give a plan for {model}, for example 'share()', or name a study.toml")
    phase_rounds = dict[str, int]()
    for text in phases:
        name, _, after = text.partition("=")
        if not name or not after.isdecimal():
            raise FedplanError(f"--phase takes NAME=ROUND, for example frozen=20, not {text!r}")
        phase_rounds[name] = int(after)
    params = params_of(model, task=task, labels=labels, dtype=dtype)
    return explain(parse(plan), params, rounds=rounds, phases=phase_rounds, step=step)
