# SPDX-License-Identifier: Apache-2.0
"""An executor with resident workers, each with a queue of clients and a partial sum.

The longest turns are started first. A worker that dies is replaced, and the clients whose updates
were in its partial sum run again: that gives the same bits, and commits no client state twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.error_codes import describe_code
from fedplan.federation.evaluation import Scores, make_eval_request
from fedplan.federation.messages import Request, block_scores_from_json, request_header
from fedplan.federation.partial_sums import (
    TensorsAndJson,
    describe_sum,
    empty_copy,
    merge_partial_sum,
)
from fedplan.federation.record import read_turn
from fedplan.federation.rounds import RoundState
from fedplan.federation.run_states import SiteState
from fedplan.federation.server import Server
from fedplan.federation.status import StatusReporter
from fedplan.models.params import Block
from fedplan.runners.clients import Clients
from fedplan.runners.executors.tasks import (
    ClientTask,
    OnReply,
    OnSum,
    Result,
    WorkerHandle,
    table_entry,
)
from fedplan.runners.executors.transport import WorkerTransport
from fedplan.runners.executors.worker import JsonObject
from fedplan.tensors.sums import SumError

BEAT = 1.0
"""Longest wait for replies, in seconds: the run's status gets a heartbeat after each."""
MOST_LOST = 5
"""How often workers may die at one client, or in a row while starting."""

STARTING, SUMMING = "while it started", "before it returned its sum"
"""When a worker died, if not while it ran a client."""


class SumOverflow(FedplanError):
    """A partial sum overflowed; the round must be summed in the order of its clients."""


class PoolExecutor:
    """Executor that runs clients in a pool of workers.

    `begin` is the first message to each worker. Call `bind` before the methods of Executor.
    `seconds` are the durations of the clients' last turns, `lost` counts workers that died.
    """

    server: Server
    clients: Clients
    status: StatusReporter

    def __init__(self, transport: WorkerTransport, begin: Mapping[str, Any]) -> None:
        self.transport, self.begin = transport, begin
        self.workers = dict[int, WorkerHandle]()
        self.seconds, self.lost = dict[str, float](), Counter[str]()
        self._batch, self._seconds_per_step, self._shared = 0, 1.0, dict[tuple[str, ...], object]()

    def bind(self, server: Server, clients: Clients, status: StatusReporter) -> PoolExecutor:
        """Set the server, clients and status to work for, and return this executor."""
        self.server, self.clients, self.status = server, clients, status
        return self

    def start(self) -> None:
        """Start the missing workers; they build the study in the background."""
        for number in range(self.transport.count):
            if number not in self.workers:
                self._start(number)

    def _start(self, number: int) -> None:
        self.workers[number] = WorkerHandle(pending=[None])
        self.transport.start(number, self.begin)

    def close(self) -> None:
        """Stop all workers; the next call restarts them."""
        self.workers.clear()
        self._shared.clear()
        self.transport.close()

    def poll_layer_scores(
        self, round_state: RoundState, names: Sequence[str]
    ) -> dict[str, Mapping[Block, float]]:
        """Return each client's layer scores; see Executor."""
        layer_scores = dict[str, Mapping[Block, float]]()

        def handle_reply(task: ClientTask, reply: JsonObject) -> ClientTask | None:
            if reply.get("lacking"):
                return self._resend_full(round_state, task)
            layer_scores[task.client] = block_scores_from_json(reply["scores"])
            return None

        self._work(
            [ClientTask("poll", name, round_state.cohort[name]) for name in names], handle_reply
        )
        return {name: layer_scores[name] for name in names}

    def run_turns(
        self, round_state: RoundState, names: Sequence[str], late: Collection[str]
    ) -> None:
        """Train the clients, longest turns first; results are in the order of `names`."""
        tasks = [
            ClientTask("turn", name, round_state.cohort[name], place, name in late)
            for place, name in enumerate(names)
        ]
        before = round_state.wasted_bytes, dict(round_state.cohort), dict(round_state.rejected)
        try:
            self._run_turns(
                round_state, [replace(task, cost=self._cost(task.client)) for task in tasks]
            )
        except SumOverflow:
            round_state.wasted_bytes, round_state.cohort, round_state.rejected = before
            self._run_turns(round_state, tasks, in_order=True)
        counted = set(round_state.aggregated)
        round_state.responded = [name for name in names if name in round_state.records]
        round_state.aggregated = [name for name in round_state.responded if name in counted]

    def _run_turns(
        self, round_state: RoundState, tasks: Sequence[ClientTask], *, in_order: bool = False
    ) -> None:
        """Run turns on all workers, and set the round's aggregator, lines and counted clients.

        With `in_order` one worker runs them in their order, into one sum. Raises SumOverflow if
        partial sums overflow.
        """
        round_state.records, round_state.aggregated = {}, []
        total_sum = empty_copy(round_state.aggregator)

        def handle_reply(task: ClientTask, reply: JsonObject) -> ClientTask | None:
            if reply.get("lacking"):
                return self._resend_full(round_state, task)
            if reply["crowded"] and not in_order:
                raise SumOverflow(f"the update of {task.client} overflowed a partial sum")
            self.status.set_site_state(task.client, SiteState.ANSWERED)
            self._record_seconds(task.client, reply["seconds"])
            return None

        def add_sum(results: list[Result], partial_sum: TensorsAndJson) -> None:
            try:
                merge_partial_sum(total_sum, *partial_sum)
            except SumError as error:
                raise SumOverflow(str(error)) from error
            for task, reply in results:
                _record_reply(round_state, task.client, reply)

        self._work(
            tasks, handle_reply, total=describe_sum(total_sum), on_sum=add_sum, in_order=in_order
        )
        round_state.aggregator = total_sum

    def evaluate_clients(self, names: Sequence[str]) -> tuple[dict[str, Scores], dict[str, str]]:
        """Return scores and refusals of these clients; see Executor."""
        scores, refusals = dict[str, Scores](), dict[str, str]()

        def handle_reply(task: ClientTask, reply: JsonObject) -> ClientTask | None:
            if reply.get("lacking"):
                return replace(task, request=self._eval_request(task.client, full=True))
            if "refused" in reply:
                refusals[task.client] = describe_code("refused", reply["refused"])
            else:
                scores[task.client] = reply["scores"]
            return None

        self._work(
            [ClientTask("scores", name, self._eval_request(name)) for name in names], handle_reply
        )
        order = [name for name in names if name in scores]
        return {name: scores[name] for name in order}, refusals

    def personal_scores(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Evaluate each client's personal model on its own test examples."""
        scores = dict[str, dict[str, float]]()

        def handle_reply(task: ClientTask, reply: JsonObject) -> None:
            scores[task.client] = reply["scores"]

        self._work([ClientTask("own", name) for name in names], handle_reply)
        return {name: scores[name] for name in names}

    def _eval_request(self, name: str, *, full: bool = False) -> Request:
        traits = self.server.roster[name]
        return make_eval_request(
            self.server.agreement, self.server.global_state, name, traits, full=full
        )

    def _resend_full(self, round_state: RoundState, task: ClientTask) -> ClientTask:
        self.server.resend_all(round_state, task.client)
        return replace(task, request=round_state.cohort[task.client])

    def _cost(self, name: str) -> float:
        """Estimate the seconds of a turn: those of the client's last turn, or by its steps."""
        return self.seconds.get(name, self._seconds_per_step * self._step_count(name))

    def _record_seconds(self, name: str, seconds: float) -> None:
        self.seconds[name] = seconds
        self._seconds_per_step = seconds / max(self._step_count(name), 1)

    def _step_count(self, name: str) -> int:
        return self.server.agreement.train_config.step_count(len(self.clients.examples[name]))

    def _work(
        self,
        tasks: Sequence[ClientTask],
        on_reply: OnReply,
        *,
        total: JsonObject | None = None,
        on_sum: OnSum | None = None,
        in_order: bool = False,
    ) -> None:
        """Run tasks on the workers until all have replies and all partial sums are here.

        `total` describes the sum that each worker opens before its first turn. With `in_order` one
        worker runs all tasks. On any exception the workers are stopped.
        """
        self.start()
        self._batch, self._shared = self._batch + 1, {}
        self.lost.clear()
        try:
            self._run_queue(list(tasks), on_reply, total, on_sum, in_order=in_order)
        except BaseException:
            self.close()  # else their late replies would be taken for those of another round
            raise

    def _run_queue(
        self,
        queue: list[ClientTask],
        on_reply: OnReply,
        total: JsonObject | None,
        on_sum: OnSum | None,
        *,
        in_order: bool,
    ) -> None:
        """Send tasks and handle replies until the queue is empty and no message is pending."""
        is_unsorted = True
        while True:
            if is_unsorted:
                # Tasks are popped from the end: the longest first, or the first place.
                queue.sort(key=lambda task: (task.cost, -task.place))
            self._assign(queue, total, 1 if in_order else self.transport.count)
            left = len(queue)
            if not left and not any(w.pending for w in self.workers.values() if w.ready):
                return
            replies = self.transport.receive(BEAT)
            self.status.heartbeat()
            for number, reply in replies:
                if reply is None:
                    queue += self._replace_worker(number)
                elif (task := self._handle_reply(number, reply, on_reply, on_sum)) is not None:
                    queue.append(task)
            is_unsorted = len(queue) > left

    def _assign(self, queue: list[ClientTask], total: JsonObject | None, count: int) -> None:
        """Send tasks from the end of the queue to the first `count` workers that are ready.

        A worker without tasks is asked for its partial sum.
        """
        # While many tasks are left, each worker has a second one waiting, so it is never idle.
        ahead = 2 if len(queue) > 2 * count else 1
        for number, worker in self.workers.items():
            if not worker.ready or number >= count:
                continue
            while queue and len(worker.pending) < ahead:
                self._send_task(number, worker, queue.pop(), total)
            if not queue and not worker.pending and worker.results:
                worker.pending.append(ClientTask("sum", ""))
                self.transport.send(number, {"do": "sum"})

    def _send_task(
        self, number: int, worker: WorkerHandle, task: ClientTask, total: JsonObject | None
    ) -> None:
        """Send a task, after the global state and the sum that the worker needs for it."""
        if worker.batch != self._batch:
            self._sync(number, worker)
        if total is not None and not worker.sum_open:
            self._send(number, worker, {"do": "open", "total": total})
            worker.sum_open = True
        if task.do == "turn":
            self.status.set_site_state(task.client, SiteState.ASKED)
        worker.pending.append(task)
        self.transport.send(number, self._task_message(worker, task))

    def _sync(self, number: int, worker: WorkerHandle) -> None:
        """Send a worker the global values that changed since its last synchronization."""
        state, agreement = self.server.global_state, self.server.agreement
        changed = {k: n for k, n in state.versions.items() if worker.versions.get(k, 0) != n}
        message = {"do": "world", "run": agreement.run, "agreed": agreement.fingerprint}
        message |= {"round": state.round, "phase": state.phase, "versions": changed}
        keys = tuple(changed)
        if keys and keys not in self._shared:
            self._shared[keys] = self.transport.share({key: state.values[key] for key in keys})
        worker.versions, worker.batch = dict(state.versions), self._batch
        worker.sum_open, worker.tables = False, {"versions": {}, "held": {}}
        self._send(number, worker, message, self._shared.get(keys))

    def _send(
        self, number: int, worker: WorkerHandle, message: JsonObject, shared: object = None
    ) -> None:
        worker.pending.append(None)
        self.transport.send(number, message, shared)

    def _task_message(self, worker: WorkerHandle, task: ClientTask) -> JsonObject:
        """Return the message of a task; values that many clients share are sent once."""
        message: JsonObject = {"do": task.do, "client": task.client, "late": task.late}
        if task.request is None:
            return message
        state, versions = self.server.global_state, task.request.versions
        client_versions = state.versions_of(task.client).items()
        current = [key for key, version in client_versions if version == state.versions[key]]
        message |= request_header(task.request)
        message["versions"] = table_entry(
            worker.tables["versions"], tuple(versions.items()), versions
        )
        message["held"] = table_entry(worker.tables["held"], tuple(current), current)
        return message

    def _handle_reply(
        self, number: int, answer: TensorsAndJson, on_reply: OnReply, on_sum: OnSum | None
    ) -> ClientTask | None:
        """Handle a worker's reply to its oldest pending message; return a task to run again.

        Raises FedplanError if the reply is an error.
        """
        worker, (tensors, reply) = self.workers[number], answer
        task = worker.pending.pop(0)
        if not worker.ready:
            worker.ready = True
            del self.lost[STARTING]  # workers do start: earlier deaths had another cause
        if "error" in reply and not ("refused" in reply and task and task.do == "scores"):
            who = f"client {task.client!r}: " if task and task.client else ""
            code = reply.get("code") or reply.get("refused")
            error = FedplanError(f"{who}{reply['error']}")
            raise error.with_code(code) if code else error
        if task is None:
            return None
        if task.do == "sum":
            results, worker.results, worker.sum_open = worker.results, [], False
            if on_sum is not None:
                on_sum(results, (tensors, reply))
            return None
        again = on_reply(task, reply)
        if again is None and task.do == "turn":
            worker.results.append((task, reply))
        return again

    def _replace_worker(self, number: int) -> list[ClientTask]:
        """Start a worker in place of a dead one; return the tasks to run again.

        Raises FedplanError after too many deaths for the same reason.
        """
        worker = self.workers.pop(number)
        tasks = [task for task in worker.pending if task is not None and task.client]
        when = f"while it ran client {tasks[0].client!r}" if tasks else SUMMING
        when = when if worker.ready else STARTING
        self.lost[when] += 1
        self.status.notify("worker died", f"worker {number}, {when}")
        if self.lost[when] > MOST_LOST:
            raise FedplanError(
                f"a worker died {MOST_LOST + 1} times {when}: see what it wrote to stderr; if "
                "memory ran out, use fewer workers or smaller batches"
            )
        self._start(number)
        return [*tasks, *(task for task, _ in worker.results)]


def _record_reply(round_state: RoundState, client: str, reply: JsonObject) -> None:
    """Add the ledger line, rejection and counting of a client's turn to the round's state."""
    if reply["line"] is not None:
        round_state.records[client] = read_turn(reply["line"])
    if reply["counted"]:
        round_state.aggregated.append(client)
    if reply["rejected"] is not None:
        round_state.rejected.setdefault(client, reply["rejected"])
