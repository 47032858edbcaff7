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
from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.federation.evaluation import Scores, make_eval_request
from fedplan.federation.ledger.events import ClientChanged, Notice
from fedplan.federation.ledger.faults import describe_code
from fedplan.federation.ledger.records import read_turn
from fedplan.federation.ledger.status import SiteState
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.messages import Request, block_scores_from_json, request_header
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
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
    """Executor that runs clients in a pool of workers, started by the first call and kept running.

    Call `bind` once, then the methods of Executor; `close` stops the workers, and the next call
    restarts them. `transport` connects to the workers, `begin` is the first message to each worker
    (study and folder). `bind` sets `server`, `clients` and `events`. `workers` are the running
    workers by number, `seconds` the durations of the clients' last turns, `lost` the number of
    workers that died in the last call, by cause. Every method raises FedplanError, and stops all
    workers, if a client fails in a worker or over MOST_LOST workers die for the same cause.
    """

    server: Server
    clients: Clients
    events: EventStream

    def __init__(self, transport: WorkerTransport, begin: Mapping[str, Any]) -> None:
        self.transport, self.begin = transport, begin
        self.workers = dict[int, WorkerHandle]()
        self.seconds, self.lost = dict[str, float](), Counter[str]()
        self._batch, self._seconds_per_step, self._shared = 0, 1.0, dict[tuple[str, ...], object]()

    def bind(self, server: Server, clients: Clients, events: EventStream) -> PoolExecutor:
        """Set the server, clients and events to work for, and return this executor."""
        self.server, self.clients, self.events = server, clients, events
        return self

    def start(self) -> None:
        """Start the missing workers, without waiting: workers build the study in the background."""
        for number in range(self.transport.count):
            if number not in self.workers:
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
        """Return the layer scores of the clients `names`, by their requests in `round_state`."""
        layer_scores = dict[str, Mapping[Block, float]]()

        def handle_reply(task: ClientTask, reply: JsonObject) -> ClientTask | None:
            if reply.get("missing"):
                return self._resend_full(round_state, task)
            layer_scores[task.client] = block_scores_from_json(reply["scores"])
            return None

        tasks = [ClientTask("poll", name, round_state.cohort[name]) for name in names]
        self._work(tasks, handle_reply)
        return {name: layer_scores[name] for name in names}

    def run_turns(
        self, round_state: RoundState, names: Sequence[str], late: Collection[str]
    ) -> None:
        """Train the clients `names` by their requests in `round_state`, longest turns first.

        Sets the aggregator, records, rejections, and the responded and aggregated clients (in the
        order of `names`) of `round_state`; updates of `late` clients are recorded only. If partial
        sums overflow, all turns run again in the order of `names`.
        """
        tasks = [
            ClientTask("turn", name, round_state.cohort[name], place, name in late)
            for place, name in enumerate(names)
        ]
        before = round_state.wasted_bytes, dict(round_state.cohort), dict(round_state.rejected)
        try:
            costs = [
                self.seconds.get(name, self._seconds_per_step * self._step_count(name))
                for name in names
            ]
            longest_first = [replace(t, cost=cost) for t, cost in zip(tasks, costs, strict=True)]
            self._run_turns(round_state, longest_first)
        except SumOverflow:
            round_state.wasted_bytes, round_state.cohort, round_state.rejected = before
            self._run_turns(round_state, tasks, in_order=True)
        counted = set(round_state.aggregated)
        round_state.responded = [name for name in names if name in round_state.records]
        round_state.aggregated = [name for name in round_state.responded if name in counted]

    def _run_turns(
        self, round_state: RoundState, tasks: Sequence[ClientTask], *, in_order: bool = False
    ) -> None:
        """Run the turns `tasks` on all workers, and merge the workers' partial sums.

        Sets the aggregator, records and aggregated clients of `round_state`, and adds rejected
        clients. With `in_order` one worker runs all turns in their order, into one sum. Raises
        SumOverflow if partial sums overflow.
        """
        round_state.records, round_state.aggregated = {}, []
        total_sum = round_state.aggregator.empty()

        def handle_reply(task: ClientTask, reply: JsonObject) -> ClientTask | None:
            """Record a turn's seconds; return the task with a full request if state is lost."""
            if reply.get("missing"):
                return self._resend_full(round_state, task)
            if reply["overflow"] and not in_order:
                raise SumOverflow(f"the update of {task.client} overflowed a partial sum")
            self.events.emit(ClientChanged(task.client, SiteState.RESPONDED))
            self.seconds[task.client] = reply["seconds"]
            self._seconds_per_step = reply["seconds"] / max(self._step_count(task.client), 1)
            return None

        def add_sum(results: list[Result], partial_sum: TensorsAndJson) -> None:
            """Merge a worker's partial sum into the round's, and record the turns in it."""
            try:
                total_sum.merge(*partial_sum)
            except SumError as error:
                raise SumOverflow(str(error)) from error
            for task, reply in results:
                if reply["ledger_line"] is not None:
                    round_state.records[task.client] = read_turn(reply["ledger_line"])
                if reply["aggregated"]:
                    round_state.aggregated.append(task.client)
                if reply["rejected"] is not None:
                    round_state.rejected.setdefault(task.client, reply["rejected"])

        self._work(tasks, handle_reply, total_sum.describe(), add_sum, in_order=in_order)
        round_state.aggregator = total_sum

    def evaluate_clients(self, names: Sequence[str]) -> tuple[dict[str, Scores], dict[str, str]]:
        """Evaluate the models of the last round at the clients `names`.

        Returns the scores by client in the order of `names`, and the reason of each refusal.
        """
        scores, refusals = dict[str, Scores](), dict[str, str]()

        def handle_reply(task: ClientTask, reply: JsonObject) -> ClientTask | None:
            """Store scores or refusal; return the task with a full request if state is lost."""
            if reply.get("missing"):
                return replace(task, request=self._eval_request(task.client, full=True))
            if "refused" in reply:
                refusals[task.client] = describe_code("refused", reply["refused"])
            else:
                scores[task.client] = reply["scores"]
            return None

        tasks = [ClientTask("scores", name, self._eval_request(name)) for name in names]
        self._work(tasks, handle_reply)
        return {name: scores[name] for name in names if name in scores}, refusals

    def personal_scores(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the metrics of each client's personal model on the client's own test examples."""
        scores = dict[str, dict[str, float]]()

        def handle_reply(task: ClientTask, reply: JsonObject) -> None:
            scores[task.client] = reply["scores"]

        self._work([ClientTask("personal_scores", name) for name in names], handle_reply)
        return {name: scores[name] for name in names}

    def _eval_request(self, name: str, *, full: bool = False) -> Request:
        state, traits = self.server.global_state, self.server.roster[name]
        return make_eval_request(self.server.agreement, state, name, traits, full=full)

    def _resend_full(self, round_state: RoundState, task: ClientTask) -> ClientTask:
        self.server.resend_all(round_state, task.client)
        return replace(task, request=round_state.cohort[task.client])

    def _step_count(self, name: str) -> int:
        return self.server.agreement.train_arguments.step_count(len(self.clients.examples[name]))

    def _work(
        self,
        tasks: Sequence[ClientTask],
        on_reply: OnReply,
        sum_description: JsonObject | None = None,
        on_sum: OnSum | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        """Run tasks on the workers; return when all have replies and all partial sums are returned.

        `on_reply` handles the reply to a task, and may return a task to run again. With a
        `sum_description` each worker opens a partial sum before the first turn, and `on_sum`
        handles the returned sum. With `in_order` one worker runs all tasks, by `place`. Any
        exception stops all workers.
        """
        self.start()
        self._batch, self._shared = self._batch + 1, {}
        self.lost.clear()
        queue, is_unsorted = list(tasks), True
        try:
            while True:
                if is_unsorted:
                    # Tasks are popped from the end: the longest first, or the first place.
                    queue.sort(key=lambda task: (task.cost, -task.place))
                self._assign(queue, sum_description, 1 if in_order else self.transport.count)
                left = len(queue)
                if not left and not any(w.pending for w in self.workers.values() if w.ready):
                    return
                replies = self.transport.receive(BEAT)
                self.events.heartbeat()
                for number, reply in replies:
                    if reply is None:
                        queue += self._replace_worker(number)
                    elif (task := self._handle_reply(number, reply, on_reply, on_sum)) is not None:
                        queue.append(task)
                is_unsorted = len(queue) > left
        except BaseException:
            self.close()  # else their late replies would be taken for those of another round
            raise

    def _assign(
        self, queue: list[ClientTask], sum_description: JsonObject | None, count: int
    ) -> None:
        """Pop tasks from the end of the queue, and send each to one of the first `count` workers.

        Only workers that are ready get tasks. Before the first task of a batch a worker gets the
        changed global values, and the description of the partial sum to open. When the queue is
        empty, each idle worker with results gets the request to return the partial sum.
        """
        # While many tasks are left, each worker has a second one waiting, so it is never idle.
        ahead = 2 if len(queue) > 2 * count else 1
        for number, worker in self.workers.items():
            if not worker.ready or number >= count:
                continue
            while queue and len(worker.pending) < ahead:
                task = queue.pop()
                if worker.batch != self._batch:
                    self._sync(number, worker)
                if sum_description is not None and not worker.sum_open:
                    self._send(number, None, {"do": "open", "sum": sum_description})
                    worker.sum_open = True
                if task.do == "turn":
                    self.events.emit(ClientChanged(task.client, SiteState.REQUESTED))
                message: JsonObject = {"do": task.do, "client": task.client, "late": task.late}
                if (request := task.request) is not None:
                    versions, state = request.versions, self.server.global_state
                    items, tables = state.versions_of(task.client).items(), worker.tables
                    current = [key for key, version in items if version == state.versions[key]]
                    message |= request_header(request)
                    # Versions and keys that many clients share are sent once, then by number.
                    identity = tuple(versions.items())
                    message["versions"] = table_entry(tables["versions"], identity, versions)
                    message["received"] = table_entry(tables["received"], tuple(current), current)
                self._send(number, task, message)
            if not queue and not worker.pending and worker.results:
                self._send(number, ClientTask("sum", ""), {"do": "sum"})

    def _sync(self, number: int, worker: WorkerHandle) -> None:
        """Send worker `number` the global values that changed since this worker's last `_sync`.

        Workers that need the same values share one copy.
        """
        state, agreement = self.server.global_state, self.server.agreement
        changed = {k: n for k, n in state.versions.items() if worker.versions.get(k, 0) != n}
        message = {"do": "global_state", "run": agreement.run, "agreement": agreement.fingerprint}
        message |= {"round": state.round, "phase": state.phase, "versions": changed}
        keys = tuple(changed)
        if keys and keys not in self._shared:
            self._shared[keys] = self.transport.share({key: state.values[key] for key in keys})
        worker.versions, worker.batch = dict(state.versions), self._batch
        worker.sum_open, worker.tables = False, {"versions": {}, "received": {}}
        self._send(number, None, message, self._shared.get(keys))

    def _send(
        self, number: int, task: ClientTask | None, message: JsonObject, shared: object = None
    ) -> None:
        """Send worker `number` the message of a task (or None), and add the task to `pending`."""
        self.workers[number].pending.append(task)
        self.transport.send(number, message, shared)

    def _handle_reply(
        self, number: int, received: TensorsAndJson, on_reply: OnReply, on_sum: OnSum | None
    ) -> ClientTask | None:
        """Handle the tensors and fields `received` from worker `number` for the oldest message.

        Calls `on_reply` or, for a partial sum, `on_sum` with the results of the turns in the sum.
        Returns a task to run again, or None. Raises FedplanError if the reply is an error.
        """
        worker, (tensors, reply) = self.workers[number], received
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
        """Start a new worker in place of the dead worker `number`; return the tasks to run again.

        These are the pending tasks, and the turns in the lost partial sum. Raises FedplanError
        after more than MOST_LOST deaths for the same cause.
        """
        worker = self.workers.pop(number)
        tasks = [task for task in worker.pending if task is not None and task.client]
        when = f"while it ran client {tasks[0].client!r}" if tasks else SUMMING
        when = when if worker.ready else STARTING
        self.lost[when] += 1
        self.events.emit(Notice("worker died", f"worker {number}, {when}"))
        if self.lost[when] > MOST_LOST:
            raise FedplanError(
                f"a worker died {MOST_LOST + 1} times {when}: see what it wrote to stderr; if "
                "memory ran out, use fewer workers or smaller batches"
            )
        self.start()
        return [*tasks, *(task for task, _ in worker.results)]
