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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplan.errors import FedplanError, needs_extra
from fedplan.federation.aggregation.protocol import Aggregator, TensorsAndJson
from fedplan.federation.evaluation import Scores, SiteScores, make_eval_request
from fedplan.federation.ledger.events import ClientChanged, Notice
from fedplan.federation.ledger.faults import describe_code
from fedplan.federation.ledger.records import read_turn
from fedplan.federation.ledger.status import SiteState
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.messages import Request, block_scores_from_json, request_header
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.models.params import Block
from fedplan.runners.executors.executor import RAY, PoolConfig, SerialExecutor
from fedplan.runners.executors.processes import JsonObject, ProcessTransport, WorkerTransport
from fedplan.runners.executors.worker import Worker
from fedplan.studies.schema import ConfigError, Study, resolve_paths
from fedplan.tensors.sums import SumError

if TYPE_CHECKING:
    from fedplan.runners.local import Clients

BEAT = 1.0
"""Longest wait for replies, in seconds: the run's status gets a heartbeat after each."""
MOST_LOST = 5
"""How often workers may die at one client, or in a row while starting."""
STARTING, SUMMING = "while it started", "before it returned its sum"
"""When a worker died, if not while it ran a client."""


class SumOverflow(FedplanError):
    """A partial sum overflowed; the round must be summed in the order of its clients."""


@dataclass
class WorkerTask:
    """A worker's work; `do` is its action, as in `Worker.reply`.

    `make_full` returns the request to send if the client has lost its state.
    """

    do: str
    client: str = ""
    request: Request | None = None
    make_full: Callable[[], Request] | None = None
    late: bool = False
    steps: int = 0


@dataclass
class WorkerHandle:
    """The pool's record of one worker, with its unanswered task.

    `batch`: number of the last batch of tasks for which the worker got the global state, then of
    these `versions`. `turns`: the tasks whose updates are in its partial sum.
    """

    task: WorkerTask | None
    batch: int = 0
    versions: dict[str, int] = field(default_factory=dict[str, int])
    turns: list[WorkerTask] = field(default_factory=list[WorkerTask])


class PoolExecutor:
    """Executor that runs clients in a pool of workers, started by the first call and kept running.

    Call `bind` once, then the methods of Executor. `begin` is the first message to each worker
    (study and folder). `workers` are the running workers by number, `lost` counts those that died
    in the last call, by cause. Every method raises FedplanError, and stops all workers, if a client
    fails in a worker or over MOST_LOST workers die for the same cause.
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
                self.workers[number] = WorkerHandle(WorkerTask("begin"))
                self.transport.start(number, {"do": "begin", "number": number, **self.begin})

    def close(self) -> None:
        """Stop all workers; the next call restarts them."""
        self.workers.clear()
        self._shared.clear()
        self.transport.close()

    def poll_layer_scores(
        self, round_state: RoundState, names: Sequence[str]
    ) -> dict[str, Mapping[Block, float]]:
        replies = self._work([self._make_task("poll", round_state, name) for name in names])
        return {name: block_scores_from_json(replies[name]["scores"]) for name in names}

    def run_turns(
        self, round_state: RoundState, names: Sequence[str], late: Collection[str]
    ) -> None:
        """Train `names`, longest turns first, into `round_state` in the order of `names`.

        Updates of `late` clients are recorded only. If partial sums overflow, all turns run again
        in this process.
        """
        step_count, tasks = self.server.agreement.train_arguments.step_count, list[WorkerTask]()
        for name in names:
            task = self._make_task("turn", round_state, name)
            steps = step_count(len(self.clients.examples[name]))
            tasks.append(replace(task, late=name in late, steps=steps))
        before = round_state.wasted_bytes, dict(round_state.cohort)
        total_sum = round_state.aggregator.empty()
        try:
            replies = self._work(tasks, total_sum)
        except SumOverflow:
            round_state.wasted_bytes, round_state.cohort = before
            serial = SerialExecutor(self.server, self.clients, self.events)
            serial.run_turns(round_state, names, late)
            return
        round_state.aggregator = total_sum
        for name in names:
            reply = replies[name]
            if reply["ledger_line"] is not None:
                round_state.records[name] = read_turn(reply["ledger_line"])
                round_state.responded.append(name)
            if reply["aggregated"]:
                round_state.aggregated.append(name)
            if reply["rejected"] is not None:
                round_state.rejected.setdefault(name, reply["rejected"])

    def evaluate_clients(
        self, names: Sequence[str]
    ) -> tuple[dict[str, SiteScores], dict[str, str]]:
        tasks, server = list[WorkerTask](), self.server
        for name in names:
            state, traits = server.global_state, server.roster[name]
            make = partial(make_eval_request, server.agreement, state, name, traits)
            tasks.append(WorkerTask("scores", name, make(), partial(make, full=True)))
        replies = self._work(tasks)
        refused = {name: replies[name]["refused"] for name in names if "refused" in replies[name]}
        scores = {name: replies[name]["scores"] for name in names if name not in refused}
        return scores, {name: describe_code("refused", code) for name, code in refused.items()}

    def personal_scores(self, names: Sequence[str]) -> dict[str, Scores]:
        """Return the metrics of personal models on "test" and "validation" examples, by client."""
        replies = self._work([WorkerTask("personal_scores", name) for name in names])
        return {name: replies[name]["scores"] for name in names}

    def _make_task(self, do: str, round_state: RoundState, name: str) -> WorkerTask:

        def make_full() -> Request:
            self.server.resend_all(round_state, name)
            return round_state.cohort[name]

        return WorkerTask(do, name, round_state.cohort[name], make_full)

    def _work(
        self, tasks: Sequence[WorkerTask], total_sum: Aggregator | None = None
    ) -> dict[str, JsonObject]:
        """Run tasks on the workers; return the replies by client.

        Workers return the sums of their turns, for `total_sum`, when no task is left. Raises
        SumOverflow; any exception stops all workers.
        """
        self.start()
        self._batch, self._shared = self._batch + 1, {}
        self.lost.clear()
        # Tasks are popped from the end: the longest first, else in the given order.
        queue = sorted(reversed(tasks), key=lambda task: task.steps)
        replies = dict[str, JsonObject]()
        try:
            while True:
                for number, worker in self.workers.items():
                    if worker.task is None and queue:
                        self._send(number, queue.pop(), total_sum)
                    elif worker.task is None and worker.turns:
                        self._send(number, WorkerTask("sum"), None)
                running = [each.task.do for each in self.workers.values() if each.task is not None]
                if not queue and set(running) <= {"begin"}:
                    return replies
                received = self.transport.receive(BEAT)
                self.events.heartbeat()
                for number, reply in received:
                    if reply is None:
                        queue += self._replace_worker(number)
                        queue.sort(key=lambda task: task.steps)
                    else:
                        queue += self._handle_reply(number, reply, replies, total_sum)
        except BaseException:
            self.close()  # else their late replies would be taken for those of another round
            raise

    def _send(self, number: int, task: WorkerTask, total_sum: Aggregator | None) -> None:
        """Send a task to worker `number`.

        The first task of a batch comes with the global values that changed since the worker's last
        one, a copy for all workers with the same changes; the first turn with the sum to open.
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
        if total_sum is not None and not worker.turns:
            message["open"] = total_sum.describe()
        if task.do == "turn":
            self.events.emit(ClientChanged(task.client, SiteState.REQUESTED))
        message["answered_round"] = state.last_round_of(task.client)
        if task.request is not None:
            versions = state.versions_of(task.client).items()
            message["received"] = [key for key, n in versions if n == state.versions[key]]
            message["request"] = request_header(task.request)
        worker.task = task
        self.transport.send(number, message, shared)

    def _handle_reply(
        self,
        number: int,
        received: TensorsAndJson,
        replies: dict[str, JsonObject],
        total_sum: Aggregator | None,
    ) -> list[WorkerTask]:
        """Keep a worker's reply, or merge its sum; return a task that must run again in full."""
        worker, reply = self.workers[number], received[1]
        task, worker.task = worker.task, None
        assert task is not None
        if "error" in reply and not ("refused" in reply and task.do == "scores"):
            client = reply.get("client", task.client)
            who = f"client {client!r}: " if client else ""
            code = reply.get("code") or reply.get("refused")
            error = FedplanError(f"{who}{reply['error']}")
            raise error.with_code(code) if code else error
        if reply.get("missing") and task.make_full is not None:
            return [replace(task, request=task.make_full())]
        if task.do == "begin":
            del self.lost[STARTING]  # workers do start: earlier deaths had another cause
        elif task.do == "sum" and total_sum is not None:
            try:
                total_sum.merge(*received)
            except SumError as error:
                raise SumOverflow(str(error)) from error
            worker.turns = []
        elif task.do == "turn":
            if reply["overflow"]:
                raise SumOverflow(f"the update of {task.client} overflowed a partial sum")
            self.events.emit(ClientChanged(task.client, SiteState.RESPONDED))
            worker.turns.append(task)
        if task.client:
            replies[task.client] = reply
        return []

    def _replace_worker(self, number: int) -> list[WorkerTask]:
        """Replace a dead worker; return its lost tasks. FedplanError after too many deaths."""
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
        return tasks + worker.turns


@contextmanager
def start_pool(
    config: PoolConfig | None, study: Study, folder: Path
) -> Generator[PoolExecutor | None]:
    """Start a worker pool for a study that runs in `folder`; yield the pool, None without a config.

    The workers build the study in the background, and are stopped if the body raises. Raises
    ConfigError for a study of Python objects, which other processes cannot build.
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
    # The main process can sync what the workers of its machine have written.
    begin = {"study": values, "folder": str(folder.resolve()), "synced": config.runner == RAY}
    pool = PoolExecutor(
        make_transport(config, config.worker_count(study.threads, study.device)), begin
    )
    try:
        pool.start()
        yield pool
    except BaseException:
        pool.close()
        raise


def make_transport(config: PoolConfig, count: int) -> WorkerTransport:
    """Return the transport of the config's runner; MissingExtra if Ray is not installed."""
    if config.runner != RAY:
        return ProcessTransport(count, Worker)
    with needs_extra('runner = "ray"'):
        from fedplan.runners.executors.ray_actors import RayTransport
    return RayTransport(count, gpus=config.gpus, address=config.address)
