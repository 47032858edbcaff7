# SPDX-License-Identifier: Apache-2.0
"""An executor with resident workers, each of which runs clients and keeps a partial sum.

The longest turns are started first. A worker that dies is replaced, and the clients whose updates
were in its partial sum run again: that gives the same bits, and commits no client state twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from fedplan.runners.executors.executor import RAY, PoolConfig, SerialExecutor
from fedplan.runners.executors.processes import JsonObject, ProcessTransport, WorkerTransport
from fedplan.runners.executors.worker import Worker
from fedplan.studies.schema import ConfigError, Study, resolve_paths
from fedplan.tensors.sums import SumError

BEAT = 1.0
"""Longest wait for replies, in seconds: the run's status gets a heartbeat after each."""
MOST_LOST = 5
"""How often workers may die at one client, or in a row while starting."""
STARTING, SUMMING = "while it started", "before it returned its sum"
"""When a worker died, if not while it ran a client."""


class SumOverflow(FedplanError):
    """A partial sum overflowed; the round must be summed in the order of its clients."""


@dataclass
class Task:
    """A worker's work; `do` is its action, as in `Worker.reply`.

    `client` and `request` (the server's request to the client) are empty for actions without them.
    `late`: whether the update comes too late to be aggregated. `steps`: number of training steps.
    """

    do: str
    client: str = ""
    request: Request | None = None
    late: bool = False
    steps: int = 0


OnReply = Callable[[Task, JsonObject], Task | None]
"""Handles a reply; returns a task to run again, with another request, or None."""
OnSum = Callable[[list[tuple[Task, JsonObject]], TensorsAndJson], None]
"""Handles a worker's partial sum, and the tasks and replies of the turns in it."""


@dataclass
class WorkerHandle:
    """The pool's record of one worker.

    `task`: the task without a reply, or None. `batch`: number of the last batch of tasks for which
    the worker got the global state; `versions`: the versions of the global values then. `results`:
    the turns in the worker's partial sum, with their replies.
    """

    task: Task | None
    batch: int = 0
    versions: dict[str, int] = field(default_factory=dict[str, int])
    results: list[tuple[Task, JsonObject]] = field(default_factory=list[tuple[Task, JsonObject]])


class PoolExecutor:
    """Executor that runs clients in a pool of workers, started by the first call and kept running.

    Call `bind` once, then the methods of Executor; `close` stops the workers, and the next call
    restarts them. `transport` connects to the workers, `begin` is the first message to each worker
    (study and folder). `bind` sets `server`, `clients` and `events`. `workers` are the running
    workers by number, `lost` the number of workers that died in the last call, by cause. Every
    method raises FedplanError, and stops all workers, if a client fails in a worker or over
    MOST_LOST workers die for the same cause.
    """

    server: Server
    clients: Clients
    events: EventStream

    def __init__(self, transport: WorkerTransport, begin: Mapping[str, Any]) -> None:
        self.transport, self.begin = transport, begin
        self.workers, self.lost = dict[int, WorkerHandle](), Counter[str]()
        self._batch, self._shared = 0, dict[tuple[str, ...], object]()

    def bind(self, server: Server, clients: Clients, events: EventStream) -> PoolExecutor:
        """Set the server, clients and events to work for, and return this executor."""
        self.server, self.clients, self.events = server, clients, events
        return self

    def start(self) -> None:
        """Start the missing workers, without waiting: workers build the study in the background."""
        for number in range(self.transport.count):
            if number not in self.workers:
                self.workers[number] = WorkerHandle(Task("begin"))
                self.transport.start(number, {"do": "begin", **self.begin})

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

        def handle_reply(task: Task, reply: JsonObject) -> Task | None:
            if reply.get("missing"):
                return self._resend_full(round_state, task)
            layer_scores[task.client] = block_scores_from_json(reply["scores"])
            return None

        self._work([Task("poll", name, round_state.cohort[name]) for name in names], handle_reply)
        return {name: layer_scores[name] for name in names}

    def run_turns(
        self, round_state: RoundState, names: Sequence[str], late: Collection[str]
    ) -> None:
        """Train the clients `names` by their requests in `round_state`, longest turns first.

        Sets the aggregator, records, rejections, and the responded and aggregated clients (in the
        order of `names`) of `round_state`; updates of `late` clients are recorded only. If partial
        sums overflow, all turns run again in this process, in the order of `names`.
        """
        before = round_state.wasted_bytes, dict(round_state.cohort), dict(round_state.rejected)
        total_sum, aggregated = round_state.aggregator.empty(), set[str]()

        def handle_reply(task: Task, reply: JsonObject) -> Task | None:
            if reply.get("missing"):
                return self._resend_full(round_state, task)
            if reply["overflow"]:
                raise SumOverflow(f"the update of {task.client} overflowed a partial sum")
            self.events.emit(ClientChanged(task.client, SiteState.RESPONDED))
            return None

        def add_sum(results: list[tuple[Task, JsonObject]], partial_sum: TensorsAndJson) -> None:
            try:
                total_sum.merge(*partial_sum)
            except SumError as error:
                raise SumOverflow(str(error)) from error
            for task, reply in results:
                if reply["ledger_line"] is not None:
                    round_state.records[task.client] = read_turn(reply["ledger_line"])
                if reply["aggregated"]:
                    aggregated.add(task.client)
                if reply["rejected"] is not None:
                    round_state.rejected.setdefault(task.client, reply["rejected"])

        step_count, tasks = self.server.agreement.train_arguments.step_count, list[Task]()
        for name in names:
            steps = step_count(len(self.clients.examples[name]))
            tasks.append(Task("turn", name, round_state.cohort[name], name in late, steps))
        try:
            self._work(tasks, handle_reply, total_sum.describe(), add_sum)
        except SumOverflow:
            round_state.wasted_bytes, round_state.cohort, round_state.rejected = before
            round_state.records = {}
            serial = SerialExecutor(self.server, self.clients, self.events)
            serial.run_turns(round_state, names, late)
            return
        round_state.aggregator = total_sum
        round_state.responded = [name for name in names if name in round_state.records]
        round_state.aggregated = [name for name in round_state.responded if name in aggregated]

    def evaluate_clients(self, names: Sequence[str]) -> tuple[dict[str, Scores], dict[str, str]]:
        """Evaluate the models of the last round at the clients `names`.

        Returns the scores by client in the order of `names`, and the reason of each refusal.
        """
        scores, refusals = dict[str, Scores](), dict[str, str]()

        def make_task(name: str, *, full: bool = False) -> Task:
            state, traits = self.server.global_state, self.server.roster[name]
            request = make_eval_request(self.server.agreement, state, name, traits, full=full)
            return Task("scores", name, request)

        def handle_reply(task: Task, reply: JsonObject) -> Task | None:
            if reply.get("missing"):
                return make_task(task.client, full=True)
            if "refused" in reply:
                refusals[task.client] = describe_code("refused", reply["refused"])
            else:
                scores[task.client] = reply["scores"]
            return None

        self._work([make_task(name) for name in names], handle_reply)
        return {name: scores[name] for name in names if name in scores}, refusals

    def personal_scores(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the metrics of each client's personal model on the client's own test examples."""
        scores = dict[str, dict[str, float]]()

        def handle_reply(task: Task, reply: JsonObject) -> None:
            scores[task.client] = reply["scores"]

        self._work([Task("personal_scores", name) for name in names], handle_reply)
        return {name: scores[name] for name in names}

    def _resend_full(self, round_state: RoundState, task: Task) -> Task:
        self.server.resend_all(round_state, task.client)
        return replace(task, request=round_state.cohort[task.client])

    def _work(
        self,
        tasks: Sequence[Task],
        on_reply: OnReply,
        sum_description: JsonObject | None = None,
        on_sum: OnSum | None = None,
    ) -> None:
        """Run tasks on the workers; return when all have replies and all partial sums are returned.

        `on_reply` handles the reply to a task, and may return a task to run again. With a
        `sum_description` each worker opens a partial sum before the first turn, and `on_sum`
        handles the returned sum. Any exception stops all workers.
        """
        self.start()
        self._batch, self._shared = self._batch + 1, {}
        self.lost.clear()
        # Tasks are popped from the end: the longest first, else in the given order.
        queue = sorted(reversed(tasks), key=lambda task: task.steps)
        try:
            while True:
                for number, worker in self.workers.items():
                    if worker.task is None and queue:
                        self._send(number, queue.pop(), sum_description)
                    elif worker.task is None and worker.results:
                        self._send(number, Task("sum"), None)
                running = [each.task.do for each in self.workers.values() if each.task is not None]
                if not queue and set(running) <= {"begin"}:
                    return
                replies = self.transport.receive(BEAT)
                self.events.heartbeat()
                for number, reply in replies:
                    if reply is None:
                        queue += self._replace_worker(number)
                        queue.sort(key=lambda task: task.steps)
                    elif (task := self._handle_reply(number, reply, on_reply, on_sum)) is not None:
                        queue.append(task)
        except BaseException:
            self.close()  # else their late replies would be taken for those of another round
            raise

    def _send(self, number: int, task: Task, sum_description: JsonObject | None) -> None:
        """Send a task to worker `number`.

        The first task of a batch comes with the global values that changed since the worker's last
        batch; workers that need the same values share one copy. The first turn of a partial sum
        comes with the description of the sum to open.
        """
        worker, state, shared = self.workers[number], self.server.global_state, None
        message: JsonObject = {"do": task.do, "client": task.client, "late": task.late}
        if worker.batch != self._batch:
            agreement = self.server.agreement
            changed = {k: n for k, n in state.versions.items() if worker.versions.get(k, 0) != n}
            message["state"] = {
                "run": agreement.run,
                "agreement": agreement.fingerprint,
                "round": state.round,
                "phase": state.phase,
                "versions": changed,
            }
            if keys := tuple(changed):
                if keys not in self._shared:
                    values = {key: state.values[key] for key in keys}
                    self._shared[keys] = self.transport.share(values)
                shared = self._shared[keys]
            worker.versions, worker.batch = dict(state.versions), self._batch
        if sum_description is not None and not worker.results:
            message["open"] = sum_description
        if task.do == "turn":
            self.events.emit(ClientChanged(task.client, SiteState.REQUESTED))
        if task.request is not None:
            versions = state.versions_of(task.client).items()
            message["received"] = [key for key, n in versions if n == state.versions[key]]
            message["request"] = request_header(task.request)
        worker.task = task
        self.transport.send(number, message, shared)

    def _handle_reply(
        self, number: int, received: TensorsAndJson, on_reply: OnReply, on_sum: OnSum | None
    ) -> Task | None:
        """Handle the tensors and fields `received` from worker `number`.

        Calls `on_reply` or, for a partial sum, `on_sum` with the results of the turns in the sum.
        Returns a task to run again, or None. Raises FedplanError if the reply is an error.
        """
        worker, reply = self.workers[number], received[1]
        task, worker.task = worker.task, None
        assert task is not None
        if "error" in reply and not ("refused" in reply and task.do == "scores"):
            client = reply.get("client", task.client)
            who = f"client {client!r}: " if client else ""
            code = reply.get("code") or reply.get("refused")
            error = FedplanError(f"{who}{reply['error']}")
            raise error.with_code(code) if code else error
        if task.do == "begin":
            del self.lost[STARTING]  # workers do start: earlier deaths had another cause
            return None
        if task.do == "sum":
            results, worker.results = worker.results, []
            if on_sum is not None:
                on_sum(results, received)
            return None
        again = on_reply(task, reply)
        if again is None and task.do == "turn":
            worker.results.append((task, reply))
        return again

    def _replace_worker(self, number: int) -> list[Task]:
        """Start a new worker in place of the dead worker `number`; return the tasks to run again.

        These are the worker's task, and the turns in the lost partial sum. Raises FedplanError
        after more than MOST_LOST deaths for the same cause.
        """
        worker = self.workers.pop(number)
        tasks = [worker.task] if worker.task is not None and worker.task.client else []
        when = f"while it ran client {tasks[0].client!r}" if tasks else SUMMING
        if worker.task is not None and worker.task.do == "begin":
            when = STARTING
        self.lost[when] += 1
        self.events.emit(Notice("worker died", f"worker {number}, {when}"))
        if self.lost[when] > MOST_LOST:
            raise FedplanError(
                f"a worker died {MOST_LOST + 1} times {when}: see what it wrote to stderr; if "
                "memory ran out, use fewer workers or smaller batches"
            )
        self.start()
        return [*tasks, *(task for task, _ in worker.results)]


@contextmanager
def start_pool(
    config: PoolConfig | None, study: Study, folder: Path
) -> Generator[PoolExecutor | None]:
    """Start a worker pool for a study that runs in `folder`; yield the pool, None without a config.

    The workers build the study in the background, and keep running after the body; the workers are
    stopped if the body raises. Raises ConfigError for a study of Python objects, which other
    processes cannot build, and FedplanError if Ray is needed and not installed.
    """
    if config is None:
        yield None
        return
    if study.data.from_python:
        raise ConfigError(
            f"the runner {config.runner} has workers that build a study from its files, and this "
            "one was given Python objects, which only this process has: write it as a study file "
            'for fp.run_study, or use runner="local"'
        )
    values = resolve_paths(study, Path.cwd()).model_dump(mode="json")
    begin = {"study": values, "folder": str(folder.resolve())}
    pool = PoolExecutor(make_transport(config, config.worker_count(study.threads)), begin)
    try:
        pool.start()
        yield pool
    except BaseException:
        pool.close()
        raise


def make_transport(config: PoolConfig, count: int) -> WorkerTransport:
    """Return the transport of the config's runner for `count` workers, without starting a worker.

    Raises FedplanError if Ray is needed and not installed.
    """
    if config.runner != RAY:
        return ProcessTransport(count, Worker)
    try:
        from fedplan.runners.executors.ray_actors import RayTransport
    except ModuleNotFoundError as error:
        raise FedplanError(
            f"{error.name} is not installed: `pip install fedplan[ray]`, or use the runner pool"
        ) from error
    return RayTransport(count, gpus=config.gpus, address=config.address)
