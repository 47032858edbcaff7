# SPDX-License-Identifier: Apache-2.0
"""Forecast what a plan trains, uploads and downloads over a run, from param shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedplan.errors import PlanError
from fedplan.federation.wire_cost import WireCost
from fedplan.language.client_classes import (
    Participants,
    client_classes,
    phase_names,
    plan_conditions,
)
from fedplan.language.plan import Assign, Best, Plan, Role, Roles, Step
from fedplan.language.resolution import (
    candidate_blocks,
    certain_roles,
    check_plan,
    params_with_roles,
    permitted_roles,
    resolve,
)
from fedplan.language.turn import After, Turn
from fedplan.models.params import Block, Param, Params
from fedplan.reports.forecast_types import ByteRange, ClientForecast, Forecast, StageForecast

ADAM_STATES = 2
"""Values that AdamW stores for each trained value."""

ParamSets = tuple[frozenset[Param], frozenset[Param]]
"""Two sets of params: the certain ones, and all possible ones."""


def forecast(
    plan: Plan,
    params: Params,
    *,
    rounds: int = 100,
    phases: Mapping[str, int] | None = None,
    participants: Participants | None = None,
    wire_cost: WireCost | None = None,
) -> Forecast:
    """Forecast the roles and bytes of every round of a run, without training.

    `phases` maps each phase of the plan to the round after which the server announces it. Without
    `participants`, clients of every class that the plan distinguishes are assumed; without
    `wire_cost`, uploads are uncompressed. Raises PlanError if the plan does not fit the params, if
    `rounds` is below 1, or if the plan has no such phase.
    """
    check_plan(plan, params)
    if rounds < 1:
        raise PlanError(f"rounds is {rounds}: a run has at least 1 round")
    announced = dict(phases or {})
    unknown = set(announced) - set(phase_names(plan))
    if unknown:
        raise PlanError(f"the plan has no phase {sorted(unknown)[0]!r}")
    classes = client_classes(plan, participants)
    cost = wire_cost or WireCost()
    forecaster = _Forecaster(plan, params, rounds, announced, classes, participants, cost)
    clients = _merge_equal(forecaster.client_forecast(name, turn) for name, turn in classes)
    return Forecast(plan, params, rounds, clients, tuple(forecaster.notes()), cost)


@dataclass(frozen=True)
class _TurnRoles:
    """The roles of all params in a turn, by the steps of the plan that are active.

    `certain` are the roles if layer scores choose no block, `permitted` if they choose every one.
    """

    steps: tuple[Step, ...]
    certain: Roles
    permitted: Roles

    @cached_property
    def shared(self) -> ParamSets:
        """The params that are shared for certain, and all that may be shared."""
        return _shared_params(self.certain), _shared_params(self.permitted)

    @cached_property
    def global_params(self) -> frozenset[Param]:
        """The params that are not personal."""
        return frozenset(p for p, role in self.permitted.items() if not role.is_personal)


@dataclass
class _ClientVersions:
    """The round in which a client last received each param and its auxiliary tensors.

    `personal` are the params that the client has as its own; `initial` are the keys of params that
    it has from the start, until the server changes them. A forecast keeps two of these: one assumes
    that the client received all that it may have (least bytes), one only the certain (most bytes).
    """

    last_received: dict[Param, int] = field(default_factory=dict[Param, int])
    last_aux: dict[Param, int] = field(default_factory=dict[Param, int])
    personal: set[Param] = field(default_factory=set[Param])
    initial: frozenset[str] = frozenset()

    def missing_bytes(self, param: Param, role: Role, updated: int, aux_count: int) -> int:
        """Return the bytes to download of a param that was last updated in round `updated`.

        A shared param has `aux_count` auxiliary tensors of the same size.
        """
        received, personal = param in self.last_received, role.is_personal
        first = not personal and not received and param.key not in self.initial
        outdated = updated >= self.last_received.get(param, 1)
        needed = first or (outdated and not (personal and param in self.personal))
        aux_needed = role is Role.SHARE and updated >= self.last_aux.get(param, 1)
        return param.nbytes * (needed + aux_count * aux_needed)

    def record_turn(self, roles: Roles, number: int, updated: Mapping[Param, int]) -> None:
        """Record that the client took part in round `number` with these roles.

        `updated` has the params that the server had updated by then. A param that becomes personal
        counts as received only if it was received before or was ever updated.
        """
        new = (p for p, role in roles.items() if role.is_personal and p not in self.personal)
        received = [p for p in new if p in self.last_received or p in updated]
        received += [p for p, role in roles.items() if not role.is_personal]
        self.last_received |= dict.fromkeys(received, number)
        self.last_aux |= dict.fromkeys((p for p in roles if roles[p] is Role.SHARE), number)
        self.personal |= {p for p, role in roles.items() if role.is_personal}


class _Forecaster:
    """Forecasts a run for each class of clients; the roles of equal turns are resolved once.

    `announced` maps phases to the rounds after which they begin; `classes` are the classes of
    clients by name, each with a turn of one of its clients.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        rounds: int,
        announced: Mapping[str, int],
        classes: list[tuple[str, Turn]],
        participants: Participants | None,
        wire_cost: WireCost,
    ) -> None:
        self.plan, self.params, self.rounds, self.announced = plan, params, rounds, announced
        self.classes, self.participants, self.wire_cost = classes, participants, wire_cost
        shared = set(params_with_roles(plan, params, Role.SHARE))
        self.server_merged = frozenset(p for p in params if p.key in wire_cost.server_merged)
        self.exchanged_params = tuple(p for p in params if p in shared or p in self.server_merged)
        self._roles = dict[tuple[Step, ...], _TurnRoles]()
        self._updated = dict[tuple[int, str], ParamSets]()

    @property
    def _partial(self) -> bool:
        """Whether it is known that clients miss some rounds."""
        return self.participants is not None and not self.participants.full_participation

    def turn_roles(self, turn: Turn) -> _TurnRoles:
        """Return the roles of all params in a turn."""
        steps = self.plan.active_steps(turn)
        if steps not in self._roles:
            certain = certain_roles(self.plan, self.params, turn)
            permitted = permitted_roles(self.plan, self.params, turn)
            self._roles[steps] = _TurnRoles(steps, certain, permitted)
        return self._roles[steps]

    def turns(self, turn: Turn) -> Iterator[tuple[str, Turn]]:
        """Yield ("", turn) of each round, then (stage name, turn) of each phase never announced."""
        for number in range(1, self.rounds + 1):
            yield "", replace(turn, round=number, phase=self._phase(number))
        for phase in phase_names(self.plan):
            if phase not in self.announced:
                yield f'phase "{phase}"', replace(turn, round=self.rounds, phase=phase)

    def _phase(self, number: int) -> str:
        """Return the phase of a round: the last one announced before it, or ""."""
        entered = [(after, name) for name, after in self.announced.items() if after < number]
        return max(entered, default=(0, ""))[1]

    def updated_params(self, turn: Turn) -> ParamSets:
        """Return the params that the server updates in a turn's round: certain, and possible."""
        if (turn.round, turn.phase) not in self._updated:
            others = (replace(turn, client=t.client, traits=t.traits) for _, t in self.classes)
            shared = {self.turn_roles(other).shared for other in others}
            certain, possible = (frozenset[Param]().union(*s) for s in zip(*shared, strict=True))
            possible |= self.server_merged if possible else frozenset()
            self._updated[turn.round, turn.phase] = certain, possible
        certain, possible = self._updated[turn.round, turn.phase]
        if self.participants is None:
            # The other clients are unknown: only the client's own upload is certain.
            return self.turn_roles(turn).shared[0], possible
        return frozenset() if self._partial else certain, possible

    def client_forecast(self, client_class: str, turn: Turn) -> ClientForecast:
        """Return the forecast for a class of clients; `turn` is a turn of one of them."""
        turns_by_stage: dict[tuple[str, tuple[Step, ...]], list[Turn]] = {}
        for name, each in self.turns(turn):
            turns_by_stage.setdefault((name, self.plan.active_steps(each)), []).append(each)
        stages = tuple(self._stage(name, turns) for (name, _), turns in turns_by_stage.items())
        uploads = {number: stage.upload_range for stage in stages for number in stage.rounds}
        rounds = [each for name, each in self.turns(turn) if not name]
        return ClientForecast(
            client_class,
            stages,
            tuple(uploads[t.round] for t in rounds),
            tuple(self._downloads(rounds)),
        )

    def _downloads(self, turns: list[Turn]) -> Iterator[ByteRange]:
        """Yield the bytes that a client downloads in each turn: params updated since its last."""
        last_updates: tuple[dict[Param, int], dict[Param, int]] = ({}, {})
        initial = self.wire_cost.server_merged
        copies = (_ClientVersions(initial=initial), _ClientVersions(initial=initial))
        before = None
        for turn in turns:
            now = self.turn_roles(turn)
            roles = {p: now.permitted[p] for p in self.exchanged_params}
            least, most = (
                sum(
                    copy.missing_bytes(p, roles[p], last.get(p, 0), self.wire_cost.aux_count)
                    for p in roles
                )
                for copy, last in zip(copies, last_updates, strict=True)
            )
            returned = self._returned_bytes(before, now, turn.round - 1, last_updates[0])
            yield least + returned, most
            for copy, last in zip(copies, reversed(last_updates), strict=True):
                copy.record_turn(roles, turn.round, last)
            for last, updated in zip(last_updates, self.updated_params(turn), strict=True):
                last |= dict.fromkeys(updated, turn.round)
            before = now

    def _returned_bytes(
        self, before: _TurnRoles | None, now: _TurnRoles, number: int, certain: Mapping[Param, int]
    ) -> int:
        """Return the least bytes to download of the blocks that the client trained in `number`.

        `before` are its roles in that round, `now` in the next; `certain` has the rounds of the
        last certain updates. It is 0 in the first round and under partial participation.
        """
        if before is None or self._partial:
            return 0
        chosen = (before.shared[1] - before.shared[0]) & now.global_params
        outdated = {p for p in chosen if certain.get(p, 0) < number}
        return self._chosen_range(before.steps, outdated, lambda p: self._download_bytes(now, p))[0]

    def _download_bytes(self, roles: _TurnRoles, param: Param) -> int:
        """Return the bytes to download of an updated param with its auxiliary tensors."""
        return param.nbytes * (
            1 + self.wire_cost.aux_count * (roles.permitted[param] is Role.SHARE)
        )

    def _stage(self, name: str, turns: list[Turn]) -> StageForecast:
        """Return the forecast of turns with the same roles; without a name, of their rounds."""
        roles = self.turn_roles(turns[0])
        rounds = () if name else tuple(t.round for t in turns)
        trained = self._range(roles, lambda role: role.is_trained, lambda p: p.numel)
        states = self._range(roles, lambda role: role.is_trained, lambda p: ADAM_STATES * p.nbytes)
        downloads = [self._stage_download(turn) for turn in turns]
        return StageForecast(
            name=name or _round_text(rounds),
            rounds=rounds,
            steps=roles.steps,
            certain=roles.certain,
            permitted=roles.permitted,
            heaviest=self._largest_roles(roles, turns[0]),
            upload_range=self._range(
                roles, lambda role: role is Role.SHARE, self.wire_cost.upload_bytes
            ),
            download_range=(
                min(least for least, _ in downloads),
                max(most for _, most in downloads),
            ),
            trained_params=trained[1],
            optimizer_bytes=states[1],
        )

    def _stage_download(self, turn: Turn) -> ByteRange:
        """Return the bytes of a turn's global params that its round updates."""
        roles = self.turn_roles(turn)
        least, most = (
            sum(self._download_bytes(roles, p) for p in updated & roles.global_params)
            for updated in self.updated_params(turn)
        )
        return least, most

    def _range(
        self, roles: _TurnRoles, counts: Callable[[Role], bool], size: Callable[[Param], int]
    ) -> ByteRange:
        """Return the summed sizes of params whose role counts, for the least and largest choice."""
        certain = sum(size(p) for p, role in roles.certain.items() if counts(role))
        open_params = {
            p for p in self.params if counts(roles.permitted[p]) and not counts(roles.certain[p])
        }
        least, most = self._chosen_range(roles.steps, open_params, size)
        return certain + least, certain + most

    def _chosen_range(
        self, steps: tuple[Step, ...], params: set[Param], size: Callable[[Param], int]
    ) -> ByteRange:
        """Return the summed sizes of params in the blocks that scores choose, least and most."""
        least, most = 0, 0
        for best, reached in _scored_steps(steps, params):
            sizes = dict.fromkeys(candidate_blocks(best, self.params), 0)
            for p in reached:
                sizes[_block(p)] += size(p)
            order = sorted(sizes.values())
            least = max(least, sum(order[: best.count]))
            most += sum(order[-best.count :])
        return least, min(most, sum(map(size, params)))

    def _largest_roles(self, roles: _TurnRoles, turn: Turn) -> Roles:
        """Return the roles in a turn if scores choose the blocks with the most bytes to upload."""
        sizes = dict.fromkeys((p.block_id for p in self.params if p.block_id), 0.0)
        for p in roles.shared[1] - roles.shared[0]:
            sizes[_block(p)] += self.wire_cost.upload_bytes(p)
        return resolve(self.plan, self.params, replace(turn, scores=sizes))

    def notes(self) -> Iterator[str]:
        """Yield notes for the reader on rounds and phases that the totals leave out."""
        for phase in phase_names(self.plan):
            if phase not in self.announced:
                yield f'the totals leave out phase "{phase}": give the round after which it starts'
        ends = [c.rounds for c in plan_conditions(self.plan) if isinstance(c, After)]
        if any(end >= self.rounds for end in ends):
            yield f"after({max(ends)}) never takes effect: the run has {self.rounds} rounds"
        if self._partial:
            yield "partial participation: the totals are for a client that takes part every round"


def _scored_steps(
    steps: tuple[Step, ...], params: set[Param]
) -> Iterator[tuple[Best, list[Param]]]:
    """Yield each `best` step with the params that it decides, as no later step overrides it."""
    for i, step in enumerate(steps):
        if isinstance(step, Best):
            later = [each.part for each in steps[i + 1 :] if isinstance(each, Assign)]
            matching = [p for p in params if p.block_id is not None and step.part.holds(p)]
            yield step, [p for p in matching if not any(part.holds(p) for part in later)]


def _block(param: Param) -> Block:
    """Return the block of a param that is in one."""
    assert param.block_id is not None
    return param.block_id


def _shared_params(roles: Roles) -> frozenset[Param]:
    """Return the params with the role SHARE."""
    return frozenset(p for p in roles if roles[p] is Role.SHARE)


def _merge_equal(forecasts: Iterable[ClientForecast]) -> tuple[ClientForecast, ...]:
    """Merge forecasts that differ in the name of their class only; the names are joined by `;`."""
    merged: dict[tuple[object, ...], ClientForecast] = {}
    for client in forecasts:
        stages = tuple((s.name, s.steps, s.upload_range, s.download_range) for s in client.stages)
        key = (stages, client.uploads, client.downloads)
        if same := merged.get(key):
            client = replace(client, client_class=f"{same.client_class}; {client.client_class}")
        merged[key] = client
    return tuple(merged.values())


def _round_text(rounds: tuple[int, ...]) -> str:
    """Return round numbers in short: `rounds 1-20`, `round 7`, `rounds 1, 13, 25 ... 97`."""
    if len(rounds) == 1:
        return f"round {rounds[0]}"
    if rounds[-1] - rounds[0] == len(rounds) - 1:
        return f"rounds {rounds[0]}-{rounds[-1]}"
    shown = ", ".join(map(str, rounds[:3]))
    return f"rounds {shown} ... {rounds[-1]}" if len(rounds) > 3 else f"rounds {shown}"
