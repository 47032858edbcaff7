# SPDX-License-Identifier: Apache-2.0
"""Forecast what a plan trains, uploads and downloads over a run, from param shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from fedplan.errors import PlanError
from fedplan.federation.wire_cost import WireCost
from fedplan.language.plan import Assign, Best, Plan, Role, Roles, Step
from fedplan.language.predicates import After, Turn
from fedplan.language.resolution import (
    Participants,
    candidate_blocks,
    certain_roles,
    check_plan,
    client_classes,
    params_with_roles,
    permitted_roles,
    phase_names,
    plan_conditions,
    resolve,
)
from fedplan.models.params import Param, Params

ADAM_STATES = 2
"""Values that AdamW stores for each trained value."""

ParamSets = tuple[frozenset[Param], frozenset[Param]]
"""Two sets of params: the certain ones, and all possible ones."""
ByteRange = tuple[int, int]
"""The least and the most bytes; layer scores and other clients decide between them."""


@dataclass(frozen=True)
class StageForecast:
    """The rounds in which the same steps of a plan apply to a client, with roles and bytes.

    `rounds` is empty for a phase whose start is not known. The roles of all params: `certain` if
    layer scores choose no block, `permitted` if they choose every block, `heaviest` if they choose
    the blocks with the most bytes to upload. `upload_range` is the upload of a client per round;
    `download_range` the global params that one round updates. `trained_params` and
    `optimizer_bytes` (AdamW) are maxima over the choices of blocks.
    """

    name: str
    rounds: tuple[int, ...]
    steps: tuple[Step, ...]
    certain: Roles
    permitted: Roles
    heaviest: Roles
    upload_range: ByteRange
    download_range: ByteRange
    trained_params: int
    optimizer_bytes: int

    @property
    def max_upload(self) -> int:
        """The most bytes that a client uploads in a round."""
        return self.upload_range[1]

    @property
    def max_download(self) -> int:
        """The most bytes of global params that one round updates."""
        return self.download_range[1]

    def choosing_step(self, param: Param) -> Best | None:
        """Return the `best` step whose layer scores decide a param's role; None if no step does."""
        if self.certain[param] is self.permitted[param]:
            return None
        deciding = [s for s in self.steps if isinstance(s, Best) and s.part.holds(param)]
        return deciding[-1]


@dataclass(frozen=True)
class ClientForecast:
    """The forecast for a class of clients, for a client that takes part in every round.

    `stages` cover all rounds of the run, then the phases whose start is not known. `uploads` and
    `downloads` have (least, most) bytes of each round, in order.
    """

    client_class: str
    stages: tuple[StageForecast, ...]
    uploads: tuple[ByteRange, ...]
    downloads: tuple[ByteRange, ...]

    @property
    def first_download(self) -> int:
        """The most bytes of the download in the first round."""
        return self.downloads[0][1]

    @cached_property
    def upload_range(self) -> ByteRange:
        """The bytes that the client uploads in the whole run."""
        return _sum(self.uploads)

    @cached_property
    def download_range(self) -> ByteRange:
        """The bytes that the client downloads in the whole run."""
        return _sum(self.downloads)

    @property
    def max_upload(self) -> int:
        """The most bytes that the client uploads in the whole run."""
        return self.upload_range[1]

    @property
    def max_download(self) -> int:
        """The most bytes that the client downloads in the whole run."""
        return self.download_range[1]


@dataclass(frozen=True)
class Forecast:
    """The forecast of a plan on a model over a run, with `notes` on its limits."""

    plan: Plan
    params: Params
    rounds: int
    clients: tuple[ClientForecast, ...]
    notes: tuple[str, ...]
    wire_cost: WireCost

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the whole model: the upload of `share()` per round."""
        return sum(p.nbytes for p in self.params)


def _sum(ranges: Iterable[ByteRange]) -> ByteRange:
    least, most = zip(*ranges, strict=True)
    return sum(least), sum(most)


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

    `phases` maps phases of the plan to the round after which each begins; the totals leave out all
    other phases. Without `participants`, a client of every class that the plan distinguishes is
    assumed; without `wire_cost`, uploads are uncompressed. Classes of clients with equal forecasts
    are merged. Raises PlanError if the plan names parts or phases that do not exist, or if `rounds`
    is below 1.
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
    merged: dict[tuple[object, ...], ClientForecast] = {}
    for name, turn in classes:
        client = forecaster.client_forecast(name, turn)
        stages = tuple((s.name, s.steps, s.upload_range, s.download_range) for s in client.stages)
        key = (stages, client.uploads, client.downloads)
        if same := merged.get(key):
            client = replace(client, client_class=f"{same.client_class}; {name}")
        merged[key] = client
    clients = tuple(merged.values())
    return Forecast(plan, params, rounds, clients, tuple(forecaster.notes()), cost)


@dataclass(frozen=True)
class _TurnRoles:
    """The active steps of the plan in a client's turn, and the roles of all params.

    `certain` are the roles if layer scores choose no block, `permitted` if every block.
    """

    steps: tuple[Step, ...]
    certain: Roles
    permitted: Roles

    @cached_property
    def shared(self) -> ParamSets:
        """The params that are shared for certain, and all that may be shared."""
        certain = frozenset(p for p, role in self.certain.items() if role is Role.SHARE)
        return certain, frozenset(p for p, role in self.permitted.items() if role is Role.SHARE)

    @cached_property
    def global_params(self) -> frozenset[Param]:
        """The params that are not personal."""
        return frozenset(p for p, role in self.permitted.items() if not role.is_personal)


@dataclass
class _ClientVersions:
    """The params that a simulated client has, and the round in which each was last received.

    `last_aux` is the round of a param's auxiliary tensors (for example control variates). `initial`
    are the keys of params that every client has from the start. Per round, sum `missing_bytes` over
    the params, then call `record_turn`.
    """

    last_received: dict[Param, int] = field(default_factory=dict[Param, int])
    last_aux: dict[Param, int] = field(default_factory=dict[Param, int])
    personal: set[Param] = field(default_factory=set[Param])
    initial: frozenset[str] = frozenset()

    def missing_bytes(self, param: Param, role: Role, updated: int, aux_count: int) -> int:
        """Return the bytes of a param and its auxiliary tensors to download in a turn of this role.

        `updated` is the round of the param's last update by the server, 0 for none.
        """
        received, personal = param in self.last_received, role.is_personal
        first = not personal and not received and param.key not in self.initial
        outdated = updated >= self.last_received.get(param, 1)
        needed = first or (outdated and not (personal and param in self.personal))
        aux_needed = role is Role.SHARE and updated >= self.last_aux.get(param, 1)
        return param.nbytes * (needed + aux_count * aux_needed)

    def record_turn(self, roles: Roles, number: int, updated: Mapping[Param, int]) -> None:
        """Record that the client took part in round `number` with these roles.

        A param that is personal for the first time counts as received only if the client received
        it before, or if it is in `updated`, the params that the server updated before the round.
        """
        new = (p for p, role in roles.items() if role.is_personal and p not in self.personal)
        received = [p for p in new if p in self.last_received or p in updated]
        received += [p for p, role in roles.items() if not role.is_personal]
        self.last_received |= dict.fromkeys(received, number)
        self.last_aux |= dict.fromkeys((p for p in roles if roles[p] is Role.SHARE), number)
        self.personal |= {p for p, role in roles.items() if role.is_personal}


class _Forecaster:
    """Computes the forecast of a run; call `client_forecast` per class of clients, then `notes`.

    `announced` maps each phase of known start to the round after which it begins.
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
        """Return the roles of all params in a turn; cached by the active steps of the plan."""
        steps = self.plan.active_steps(turn)
        if steps not in self._roles:
            certain = certain_roles(self.plan, self.params, turn)
            permitted = permitted_roles(self.plan, self.params, turn)
            self._roles[steps] = _TurnRoles(steps, certain, permitted)
        return self._roles[steps]

    def turns(self, turn: Turn) -> Iterator[tuple[str, Turn]]:
        """Yield (label, turn) of a client per round, with the label "", then per unknown phase."""
        for number in range(1, self.rounds + 1):
            entered = [(after, name) for name, after in self.announced.items() if after < number]
            yield "", replace(turn, round=number, phase=max(entered, default=(0, ""))[1])
        for phase in phase_names(self.plan):
            if phase not in self.announced:
                yield f'phase "{phase}"', replace(turn, round=self.rounds, phase=phase)

    def updated_params(self, turn: Turn) -> ParamSets:
        """Return the params that the server certainly updates in a round, and all that it may."""
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
        """Return the forecast for a class of clients, given a turn of one client of the class."""
        turns_by_stage: dict[tuple[str, tuple[Step, ...]], list[Turn]] = {}
        for name, each in self.turns(turn):
            turns_by_stage.setdefault((name, self.plan.active_steps(each)), []).append(each)
        stages = tuple(self._stage(name, turns) for (name, _), turns in turns_by_stage.items())
        uploads = {number: stage.upload_range for stage in stages for number in stage.rounds}
        rounds = [each for name, each in self.turns(turn) if not name]
        by_round = tuple(uploads[t.round] for t in rounds)
        return ClientForecast(client_class, stages, by_round, tuple(self._downloads(rounds)))

    def _downloads(self, turns: list[Turn]) -> Iterator[ByteRange]:
        """Yield the least and most bytes that a client downloads in each turn, by round."""
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
            if before is not None and not self._partial:
                # The blocks that scores chose in the last round come back, changed by the server.
                chosen = (before.shared[1] - before.shared[0]) & now.global_params
                outdated = {p for p in chosen if last_updates[0].get(p, 0) < turn.round - 1}
                size = partial(self._download_bytes, now)
                least += self._chosen_range(before.steps, outdated, size)[0]
            yield least, most
            for copy, last in zip(copies, reversed(last_updates), strict=True):
                copy.record_turn(roles, turn.round, last)
            for last, updated in zip(last_updates, self.updated_params(turn), strict=True):
                last |= dict.fromkeys(updated, turn.round)
            before = now

    def _download_bytes(self, roles: _TurnRoles, param: Param) -> int:
        """Return the bytes of an updated param; auxiliary tensors count if it may be shared."""
        aux_count = self.wire_cost.aux_count * (roles.permitted[param] is Role.SHARE)
        return param.nbytes * (1 + aux_count)

    def _stage(self, name: str, turns: list[Turn]) -> StageForecast:
        """Return the forecast of a stage, given its turns, which have equal active steps."""
        roles = self.turn_roles(turns[0])
        rounds = () if name else tuple(t.round for t in turns)
        trained = self._range(roles, lambda role: role.is_trained, lambda p: p.numel)
        states = self._range(roles, lambda role: role.is_trained, lambda p: ADAM_STATES * p.nbytes)
        upload = self._range(roles, lambda role: role is Role.SHARE, self.wire_cost.upload_bytes)

        def nbytes(updated: frozenset[Param]) -> int:
            return sum(self._download_bytes(roles, p) for p in updated & roles.global_params)

        downloads = [tuple(map(nbytes, self.updated_params(turn))) for turn in turns]
        # If scores choose the blocks with the most bytes to upload, the roles are the heaviest.
        sizes = dict.fromkeys((p.block_id for p in self.params if p.block_id), 0.0)
        for p in roles.shared[1] - roles.shared[0]:
            assert p.block_id is not None  # layer scores choose blocks
            sizes[p.block_id] += self.wire_cost.upload_bytes(p)
        return StageForecast(
            name=name or _round_text(rounds),
            rounds=rounds,
            steps=roles.steps,
            certain=roles.certain,
            permitted=roles.permitted,
            heaviest=resolve(self.plan, self.params, replace(turns[0], scores=sizes)),
            upload_range=upload,
            download_range=(min(low for low, _ in downloads), max(high for _, high in downloads)),
            trained_params=trained[1],
            optimizer_bytes=states[1],
        )

    def _range(
        self, roles: _TurnRoles, counts: Callable[[Role], bool], size: Callable[[Param], int]
    ) -> ByteRange:
        """Return the least and largest sum of `size(param)` over all choices of layer scores."""
        certain = sum(size(p) for p, role in roles.certain.items() if counts(role))
        open_params = {
            p for p in self.params if counts(roles.permitted[p]) and not counts(roles.certain[p])
        }
        least, most = self._chosen_range(roles.steps, open_params, size)
        return certain + least, certain + most

    def _chosen_range(
        self, steps: tuple[Step, ...], params: set[Param], size: Callable[[Param], int]
    ) -> ByteRange:
        """Return the least and largest sum of `size(param)` in blocks that scores choose."""
        least, most = 0, 0
        for i, best in enumerate(steps):
            if not isinstance(best, Best):
                continue
            later = [each.part for each in steps[i + 1 :] if isinstance(each, Assign)]
            sizes = dict.fromkeys(candidate_blocks(best, self.params), 0)
            for p in params:
                overridden = any(part.holds(p) for part in later)
                if p.block_id is not None and best.part.holds(p) and not overridden:
                    sizes[p.block_id] += size(p)
            order = sorted(sizes.values())
            least = max(least, sum(order[: best.count]))
            most += sum(order[-best.count :])
        return least, min(most, sum(map(size, params)))

    def notes(self) -> Iterator[str]:
        """Yield sentences on limits of the forecast."""
        for phase in phase_names(self.plan):
            if phase not in self.announced:
                yield f'the totals leave out phase "{phase}": give the round after which it starts'
        ends = [c.rounds for c in plan_conditions(self.plan) if isinstance(c, After)]
        if any(end >= self.rounds for end in ends):
            yield f"after({max(ends)}) never takes effect: the run has {self.rounds} rounds"
        if self._partial:
            yield "partial participation: the totals are for a client that takes part every round"


def _round_text(rounds: tuple[int, ...]) -> str:
    """Return round numbers (at least one) in short: `rounds 1-20`, `rounds 1, 13, 25 ... 97`."""
    if len(rounds) == 1:
        return f"round {rounds[0]}"
    if rounds[-1] - rounds[0] == len(rounds) - 1:
        return f"rounds {rounds[0]}-{rounds[-1]}"
    shown = ", ".join(map(str, rounds[:3]))
    return f"rounds {shown} ... {rounds[-1]}" if len(rounds) > 3 else f"rounds {shown}"
