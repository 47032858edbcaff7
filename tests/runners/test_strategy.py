# SPDX-License-Identifier: Apache-2.0
"""An existing Flower app follows a plan after three of its lines have changed."""

from __future__ import annotations

import contextlib
import difflib
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial as partial_of
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import zoo
from clients import few, loss
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from grids import InProcess
from torch import Tensor, nn

from fedplan import describe
from fedplan.errors import FedplanError, PlanError
from fedplan.models.values import get_values
from fedplan.runners.flower.records import ARRAYS, HEADER, from_records, to_records
from fedplan.runners.flower.strategy import Partial, partial
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.tensors.named import digests
from fedplan.tensors.serialization import pack_message, unpack_message

STOCK = """
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import load_data, make_model, test, train

client = ClientApp()
server = ServerApp()


@client.train()
def fit(msg: Message, context: Context) -> Message:
    model, data = make_model(), load_data(context.node_config["partition-id"])
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss = train(model, data, msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@client.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model, data = make_model(), load_data(context.node_config["partition-id"])
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    metrics = MetricRecord({"eval_loss": test(model, data), "num-examples": len(data)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)


@server.main()
def main(grid: Grid, context: Context) -> None:
    model = make_model()
    strategy = FedAvg(fraction_train=1.0, min_train_nodes=3, min_available_nodes=3)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": 0.01}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result, "result.pt")
"""

THREE = {
    "from flwr.serverapp.strategy import FedAvg": (
        "from fedplan.runners.flower.strategy import Partial, partial"
    ),
    "client = ClientApp()": 'client = ClientApp(mods=[partial("PLAN", make_model, "clients")])',
    "    strategy = FedAvg(fraction_train=1.0,": (
        '    strategy = Partial("PLAN", model, fraction_train=1.0,'
    ),
}
PLAN = "chain(share(), when(after(1), freeze(query | key)), keep(head))"
ROUNDS = 4
NODES: list[dict[str, Any]] = [{"partition-id": i, "num-partitions": 3} for i in range(3)]


def changed(plan: str) -> str:
    """The stock app with three other lines."""
    text = STOCK
    for old, new in THREE.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text.replace('"PLAN"', repr(plan))


def test_three_lines_change() -> None:
    lines = list(difflib.ndiff(STOCK.splitlines(), changed(PLAN).splitlines()))
    assert sum(line.startswith("- ") for line in lines) == 3
    assert sum(line.startswith("+ ") for line in lines) == 3


class Spied(InProcess):
    """A grid that remembers every message, and may change replies on their way."""

    def __init__(self, app: Any, configs: list[dict[str, Any]]) -> None:
        super().__init__(app, configs)
        self.asked, self.replies = list[Message](), list[Message]()
        self.change: Callable[[Message], Message] = lambda reply: reply

    def _answer(self, message: Message) -> Message:
        self.asked.append(message)
        reply = super()._answer(message)
        self.replies.append(reply)
        return self.change(reply)

    def errors(self) -> list[str]:
        return [reply.error.reason for reply in self.replies if reply.has_error()]

    def downs(self) -> list[dict[str, Tensor]]:
        """What came down in each message that asked to train."""
        asked = [m.content for m in self.asked if m.metadata.message_type == "train"]
        parts = [{ARRAYS: c["arrays"], HEADER: c["config"]} for c in asked]
        return [unpack_message(from_records(RecordDict(each)))[0] for each in parts]

    def updates(self) -> list[tuple[dict[str, Tensor], Any]]:
        """What went up in each reply to one that asked to train."""
        found = [r for r in self.replies if r.metadata.message_type == "train"]
        return [unpack_message(from_records(r.content)) for r in found if not r.has_error()]


@dataclass
class Task:
    """The user's own module: a model, data and loops; and what the loops were handed."""

    model: Callable[[], nn.Module] = lambda: zoo.build("bert")
    rows: str = "bert"
    after: Callable[[nn.Module, int], None] = lambda model, count: None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    trained: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)
    tested: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)

    def module(self) -> ModuleType:
        module = ModuleType("task")
        module.__dict__.update(
            load_data=lambda i: few(self.rows, 3)[f"client-{i}"],
            make_model=self.model,
            train=self.train,
            test=self.test,
        )
        return module

    def train(self, model: nn.Module, data: Any, lr: float) -> float:
        self.trained.append((len(data) - 3, {k: v.clone() for k, v in model.state_dict().items()}))
        optimizer = self.optimizer(model.parameters(), lr=lr, weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            found = loss(model, data.rows)
            found.backward()
            optimizer.step()
        self.after(model, len(data))
        return float(found.detach())

    def test(self, model: nn.Module, data: Any) -> float:
        self.tested.append((len(data) - 3, {k: v.clone() for k, v in model.state_dict().items()}))
        return float(loss(model, data.rows).detach())


def run(
    folder: Path,
    text: str,
    task: Task | None = None,
    rounds: int = ROUNDS,
    nodes: list[dict[str, Any]] = NODES,
    change: Callable[[Message], Message] = lambda reply: reply,
) -> tuple[Any, Spied]:
    """Run an app in a folder, as a new process would."""
    app = dict[str, Any]()
    module = (task or Task()).module()
    with contextlib.chdir(folder), mock.patch.dict(sys.modules, task=module):
        exec(compile(text, "app.py", "exec"), app)
        grid = Spied(app["client"], nodes)
        grid.change = change
        app["server"](grid, Context(1, 1, {}, RecordDict(), {"num-server-rounds": rounds}))
        return torch.load("result.pt", weights_only=False), grid


Run = Callable[..., tuple[Any, Spied]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs apps one after the other, all in one folder."""
    monkeypatch.chdir(tmp_path)
    return partial_of(run, tmp_path)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The warnings, which Flower's logger does not hand on."""
    logger = logging.getLogger("flwr.fedplan")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def kept(client: int) -> dict[str, Tensor]:
    return Journal(client_state_folder(Path("clients"), str(client))).client_state()[0]


def keys(*kinds: str, model: str = "bert") -> set[str]:
    return {p.key for p in describe(zoo.build(model)) if p.kind in kinds}


def test_to_share_all_is_fedavg(start: Run) -> None:
    # Not AdamW: where a gradient is zero but for rounding it makes whole steps of the rounding.
    stock, _ = start(STOCK, Task(optimizer=torch.optim.SGD))
    ours, _ = start(changed("share()"), Task(optimizer=torch.optim.SGD))
    one, other = stock.arrays.to_torch_state_dict(), ours.arrays.to_torch_state_dict()
    assert list(one) == list(other)
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-6), name
    for found, wanted in (
        (ours.train_metrics_clientapp, stock.train_metrics_clientapp),
        (ours.evaluate_metrics_clientapp, stock.evaluate_metrics_clientapp),
    ):
        assert found.keys() == wanted.keys() == set(range(1, ROUNDS + 1))
        for number in wanted:
            assert dict(found[number]) == pytest.approx(dict(wanted[number]), rel=1e-4)


def test_what_is_frozen_stands_still_and_what_is_kept_stays(start: Run) -> None:
    task = Task()
    result, grid = start(changed(PLAN), task)
    assert not grid.errors()
    frozen, head = keys("query", "key"), keys("head")
    downs = grid.downs()[::3]
    later = [digests({k: down[k] for k in frozen}) for down in downs[1:]]
    first = digests({k: downs[0][k] for k in frozen})
    assert later[0] == later[1] == later[2]
    assert not first.items() & later[0].items()
    end = result.arrays.to_torch_state_dict()
    assert digests({k: end[k] for k in frozen}) == later[0]
    # The user's loop did move them: each turn starts from where they were.
    assert all(digests({k: s[k] for k in frozen}) == later[0] for _, s in task.trained[3:])
    started = zoo.build("bert").state_dict()
    assert all(torch.equal(end[k], started[k]) for k in head)
    assert (
        not digests({k: kept(0)[k] for k in head}).items()
        & digests({k: kept(1)[k] for k in head}).items()
    )


def test_what_is_kept_is_in_no_reply(start: Run) -> None:
    heads = list[bytes]()
    text = changed(PLAN)

    def note(model: nn.Module, count: int) -> None:
        found = dict(model.named_parameters())
        heads.extend(found[k].detach().numpy().tobytes() for k in keys("head"))

    _, grid = start(text, Task(after=note))
    replies = grid.updates()
    whole = {p.key for p in describe(zoo.build("bert"))} - keys("head")
    for i, (values, _) in enumerate(replies):
        assert values.keys() == (whole if i < 3 else whole - keys("query", "key"))
    sent = b"".join(
        array.data
        for reply in grid.replies
        for record in reply.content.array_records.values()
        for array in record.values()
    )
    assert heads and not any(head in sent for head in heads)
    assert all(not r.content.array_records for r in grid.replies[3::6])  # to evaluate


def test_what_is_held_rests_even_if_the_app_shares_its_model(start: Run) -> None:
    only = zoo.build("bert")
    task = Task(lambda: only)
    _, grid = start(changed("chain(share(), keep(head), when(after(1), hold(head)))"), task)
    assert not grid.errors()
    for client in range(3):
        heads = [digests({k: s[k] for k in keys("head")}) for i, s in task.trained if i == client]
        assert not heads[0].items() & heads[1].items()
        assert heads[1] == heads[2] == heads[3]
        assert heads[1] == digests({k: kept(client)[k] for k in keys("head")})


def test_what_is_kept_waits_while_it_is_shared(start: Run) -> None:
    task = Task()
    result, _ = start(changed("chain(share(), cycle(keep(head), share(head)))"), task, rounds=3)
    heads = [digests({k: s[k] for k in keys("head")}) for i, s in task.trained if i == 1]
    after = [digests({k: s[k] for k in keys("head")}) for i, s in task.tested if i == 1]
    assert heads[0] == heads[1] == digests({k: build().state_dict()[k] for k in keys("head")})
    assert heads[2] == after[0] != heads[0]
    end = result.arrays.to_torch_state_dict()
    assert after[1] == digests({k: end[k] for k in keys("head")})


def test_what_is_kept_outlives_the_process(start: Run) -> None:
    start(changed(PLAN))
    before = [digests({k: kept(i)[k] for k in keys("head")}) for i in range(3)]
    task = Task()
    start(changed(PLAN), task, rounds=1)
    for client, state in task.trained:
        assert digests({k: state[k] for k in keys("head")}) == before[client]
    for client, state in task.tested:
        home = kept(client)
        assert all(torch.equal(state[k], home[k]) for k in keys("head"))


def test_clients_train_parts_of_their_own(start: Run) -> None:
    plan = (
        'chain(freeze(), by("site", {"a": share(blocks(0) & mlp)}, share(blocks(1) & mlp)), '
        'when(client_in("2"), keep(norm)), share(head))'
    )
    nodes = [{**node, "site": "ab"[i > 0], "secret": "x"} for i, node in enumerate(NODES)]
    result, grid = start(changed(plan), rounds=1, nodes=nodes)
    assert not grid.errors()
    params = describe(zoo.build("bert"))
    mlp = [{p.key for p in params if p.kind == "mlp" and p.block == b} for b in (0, 1)]
    replies = grid.updates()
    by_name = {header["client"]: (values, header) for values, header in replies}
    assert by_name["0"][0].keys() == mlp[0] | keys("head")
    assert by_name["1"][0].keys() == by_name["2"][0].keys() == mlp[1] | keys("head")
    assert by_name["0"][1]["traits"] == {"site": "a"}
    end = result.arrays.to_torch_state_dict()
    assert all(torch.equal(end[k], by_name["0"][0][k]) for k in mlp[0])
    one, two = by_name["1"][0], by_name["2"][0]
    for k in mlp[1]:
        assert torch.allclose(end[k], (4 * one[k] + 5 * two[k]) / 9)
    assert keys("norm") == kept(2).keys() and not kept(1)


def tampered(reply: Message, change: Callable[[dict[str, Tensor], dict[str, Any]], Any]) -> Message:
    values, header = unpack_message(from_records(reply.content))
    change(values, header)
    metrics = dict(reply.content.metric_records)
    return Message(
        RecordDict({**metrics, **to_records(pack_message(values, header))}), reply_to=reply
    )


NORM = "bert.embeddings.LayerNorm.weight"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], Any], str]] = {
    "nan": (lambda v, h: v[NORM].fill_(torch.nan), f"{NORM} holds nan"),
    "endless": (lambda v, h: v[NORM].fill_(torch.inf), f"{NORM} holds inf"),
    "shape": (lambda v, h: v.update({NORM: v[NORM][:3]}), f"{NORM!r} of 1 is not what"),
    "dtype": (lambda v, h: v.update({NORM: v[NORM].double()}), f"{NORM!r} of 1 is not what"),
    "kept": (lambda v, h: v.update({"classifier.bias": torch.zeros(2)}), "'classifier.bias' of 1"),
    "strange": (lambda v, h: v.update({"x": torch.zeros(2)}), "'x' of 1 is not what"),
    "missing": (lambda v, h: v.pop(NORM), f"{NORM!r} of 1 is not what"),
    "late": (lambda v, h: h.update(request="else/1"), "another request"),
    "other plan": (lambda v, h: h.update(agreement="0"), "another plan"),
    "nameless": (lambda v, h: h.pop("client"), "no client"),
    "traits": (lambda v, h: h.update(traits=[1]), "no client with traits"),
}


def of_client(client: int, change: Callable[[Message], Message]) -> Callable[[Message], Message]:
    def changed_(reply: Message) -> Message:
        mine = reply.metadata.src_node_id == 100 + client
        return change(reply) if mine and reply.metadata.message_type == "train" else reply

    return changed_


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The world after two rounds in which the second client is not heard."""

    def fail(reply: Message) -> Message:
        return Message(RecordDict(), reply_to=reply)

    folder = tmp_path_factory.mktemp("without")
    result, _ = run(folder, changed(PLAN), rounds=2, change=of_client(1, fail))
    return digests(result.arrays.to_torch_state_dict())


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_update_is_left_out_singly(
    name: str, start: Run, without: dict[str, str], said: pytest.LogCaptureFixture
) -> None:
    change, why = WRONG[name]
    tamper = of_client(1, lambda reply: tampered(reply, change))
    result, _ = start(changed(PLAN), rounds=2, change=tamper)
    assert digests(result.arrays.to_torch_state_dict()) == without
    assert len(result.train_metrics_clientapp) == 2
    warned = {r.getMessage() for r in said.records if "update is left out" in r.getMessage()}
    assert len(warned) == 2 and all(why in each for each in warned), warned


def test_of_two_with_one_name_one_is_counted(start: Run, said: pytest.LogCaptureFixture) -> None:
    nodes = [{**node, "name": "ab"[i > 0]} for i, node in enumerate(NODES)]
    result, _ = start(changed("share()"), rounds=1, nodes=nodes)
    assert len(result.train_metrics_clientapp) == 1
    assert "'b' is no client with traits, or has an update already" in said.text


METRICS: dict[str, list[MetricRecord]] = {
    "none": [],
    "two": [MetricRecord({"num-examples": 4})] * 2,
    "no weight": [MetricRecord({"train_loss": 1.0})],
    "half": [MetricRecord({"train_loss": 1.0, "num-examples": 1.5})],
    "list": [MetricRecord({"train_loss": 1.0, "num-examples": [4]})],
    "nothing": [MetricRecord({"train_loss": 1.0, "num-examples": 0})],
    "less": [MetricRecord({"train_loss": 1.0, "num-examples": -4})],
    "endless": [MetricRecord({"train_loss": 1.0, "num-examples": float("inf")})],
    "huge": [MetricRecord({"train_loss": 1.0, "num-examples": 2**60})],
}


@pytest.mark.parametrize("name", METRICS)
def test_a_weight_that_is_none_is_left_out_singly(
    name: str, start: Run, without: dict[str, str]
) -> None:
    def change(reply: Message) -> Message:
        rest = {k: r for k, r in reply.content.items() if not isinstance(r, MetricRecord)}
        found = {f"m{i}": record for i, record in enumerate(METRICS[name])}
        return Message(RecordDict({**rest, **found}), reply_to=reply)

    result, _ = start(changed(PLAN), rounds=2, change=of_client(1, change))
    assert digests(result.arrays.to_torch_state_dict()) == without


def test_clients_may_measure_different_things(start: Run, said: pytest.LogCaptureFixture) -> None:
    def change(reply: Message) -> Message:
        if reply.metadata.src_node_id == 101:
            (metrics,) = reply.content.metric_records.values()
            metrics["more"] = [1.0, 2.0]
        return reply

    result, _ = start(changed("share()"), rounds=2, change=change)
    assert set(result.train_metrics_clientapp[2]) == {"train_loss"}
    assert set(result.evaluate_metrics_clientapp[2]) == {"eval_loss"}
    assert "the metrics of 1 clients are left out" in said.text


class Unmeasured(Task):
    def train(self, model: nn.Module, data: Any, lr: float) -> float:
        super().train(model, data, lr)
        return float("nan")


@pytest.mark.parametrize("task", [Task(), Unmeasured()])
def test_the_same_request_twice_is_answered_from_the_journal(task: Task, start: Run) -> None:
    _, grid = start(changed(PLAN), task, rounds=1)
    before, count = digests(kept(0)), len(task.trained)
    message = next(m for m in grid.asked if m.metadata.dst_node_id == 100)
    again = InProcess._answer(grid, message)
    first = next(r for r in grid.replies if r.metadata.src_node_id == 100)
    assert len(task.trained) == count and digests(kept(0)) == before
    assert list(again.content) == list(first.content)
    for name, record in first.content.items():
        assert again.content[name].object_id == record.object_id


def build() -> nn.Module:
    return zoo.build("bert")


def test_the_mod_can_be_sent_to_another_process(tmp_path: Path) -> None:
    # Flower's simulation pickles the client's app for each message.
    mod = partial(PLAN, build, tmp_path)
    assert pickle.loads(pickle.dumps(mod)) == mod


def test_records_may_be_called_otherwise(start: Run) -> None:
    text = changed(PLAN).replace('msg.content["arrays"]', 'msg.content["model"]')
    text = text.replace('msg.content["config"]', 'msg.content["pace"]').replace(
        "min_available", 'arrayrecord_key="model", configrecord_key="pace", min_available'
    )
    result, grid = start(text, rounds=1)
    assert not grid.errors() and len(result.train_metrics_clientapp) == 1


def test_a_new_start_is_a_new_request(start: Run) -> None:
    task = Task()
    again = "strategy.start(grid, ArrayRecord(model.state_dict()), 1, train_config=config)"
    text = changed(PLAN).replace(
        "    torch.save(",
        f'    config = ConfigRecord({{"lr": 0.01}})\n    {again}\n    torch.save(',
    )
    for _ in range(2):
        start(text, task, rounds=1)
    assert len(task.trained) == 12


def test_bfloat16_travels_as_it_is(start: Run) -> None:
    def model() -> nn.Module:
        return zoo.build("bert").bfloat16()

    wide = "{k: v.float() for k, v in model.state_dict().items()}"
    text = changed(PLAN).replace("ArrayRecord(model.state_dict())", f"ArrayRecord({wide})")
    result, grid = start(text, Task(model))
    assert not grid.errors()
    for values in [*(values for values, _ in grid.updates()), *grid.downs()]:
        assert values and {v.dtype for v in values.values()} == {torch.bfloat16}
    assert {v.dtype for v in kept(0).values()} == {torch.bfloat16}
    downs = grid.downs()[::3]
    end = result.arrays.to_torch_state_dict()
    for name, value in end.items():
        assert torch.equal(value, value.bfloat16().float())
        if name in keys("query", "key"):
            assert torch.equal(value, downs[1][name].float())
        elif name not in keys("head"):
            assert not torch.equal(value, downs[0][name].float()), name


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox"])
def test_rows_of_fused_tensors_rest_and_are_kept(name: str, start: Run) -> None:
    task = Task(lambda: zoo.build(name), name)
    plan = "chain(share(), when(after(1), freeze(query)), keep(key))"
    result, grid = start(changed(plan), task, rounds=3)
    assert not grid.errors()
    params = describe(zoo.build(name))
    fused = [p for p in params if p.rows and p.kind in ("query", "key", "value")]
    assert fused
    replies = grid.updates()
    for values, _ in replies[3:]:
        assert not values.keys() & keys("query", "key", model=name)
        assert keys("value", model=name) <= values.keys()
    end = result.arrays.to_torch_state_dict()
    second = grid.downs()[3]
    started = zoo.build(name).state_dict()
    for p in fused:
        found = p.view(end[p.name])
        if p.kind == "query":
            assert torch.equal(found, second[p.key])
        if p.kind == "key":
            assert torch.equal(found, p.view(started[p.name]))
            mine = [p.view(state[p.name]) for client, state in task.tested if client == 1]
            assert torch.equal(mine[-1], kept(1)[p.key]) and not torch.equal(mine[-1], found)
    for p in params:
        assert all(torch.equal(end[p.name], end[other]) for other in p.tied)


def test_buffers_stay_at_home(start: Run) -> None:
    def count(model: nn.Module, rows: int) -> None:
        model.get_buffer("final_logits_bias").add_(rows)

    task = Task(lambda: zoo.build("bart"), "bart", after=count)
    result, grid = start(changed("share()"), task, rounds=2)
    assert not grid.errors()
    for client, state in task.tested[3:]:
        assert state["final_logits_bias"].unique().tolist() == [2 * (3 + client)]
    assert result.arrays.to_torch_state_dict()["final_logits_bias"].unique().tolist() == [0]
    for values in [*(values for values, _ in grid.updates()), *grid.downs()]:
        assert "final_logits_bias" not in values


def test_what_is_not_finite_is_neither_kept_nor_sent(start: Run) -> None:
    def spoil(model: nn.Module, rows: int) -> None:
        if rows == 4:
            model.get_parameter("classifier.bias").data.fill_(torch.nan)

    _, grid = start(changed(PLAN), Task(after=spoil), rounds=2)
    assert all(error == "failed: training" for error in grid.errors())
    assert len(grid.errors()) == 2 and not kept(1) and kept(0)


def test_frozen_parts_that_differ_are_refused(start: Run) -> None:
    seeds = iter(range(100))
    task = Task(lambda: zoo.build("bert", next(seeds)))
    _, grid = start(changed("chain(freeze(), share(head))"), task, rounds=1)
    assert all(error == "failed: model" for error in grid.errors()[:3])
    assert len(grid.errors()) == 6 and not task.trained


def test_two_plans_are_told_apart(start: Run) -> None:
    text = changed(PLAN).replace(f"Partial({PLAN!r}", "Partial('share()'")
    result, grid = start(text, rounds=1)
    assert all(error == "refused: another-study" for error in grid.errors())
    assert digests(result.arrays.to_torch_state_dict()) == digests(zoo.build("bert").state_dict())


def test_a_stock_server_and_a_node_without_a_name_are_told(start: Run) -> None:
    _, grid = start(changed(PLAN), rounds=1)
    message = grid.asked[0]
    message.content = RecordDict(
        {"arrays": ArrayRecord(zoo.build("bert").state_dict()), "config": ConfigRecord()}
    )
    assert InProcess._answer(grid, message).error.reason == "failed: message"
    _, grid = start(changed(PLAN), rounds=1, nodes=[{}, {}, {}])
    assert all(error == "failed: settings" for error in grid.errors())


@pytest.mark.parametrize(
    "plan", ["chain(freeze(), best(1))", 'chain(share(), when(~phase("x") & after(1), freeze()))']
)
def test_what_this_mode_lacks_is_refused(plan: str) -> None:
    with pytest.raises(PlanError, match="fedplan's own apps"):
        Partial(plan, zoo.build("bert"))
    with pytest.raises(PlanError, match="matches no parameter"):
        Partial("keep(adapter)", zoo.build("bert"))


def test_the_callers_model_and_random_numbers_are_untouched(tmp_path: Path) -> None:
    model = zoo.build("bert")
    before = digests(get_values(model, describe(model)))
    torch.manual_seed(5)
    wanted = torch.get_rng_state()

    def model_of() -> nn.Module:
        torch.rand(3)
        return model

    mod = partial("share()", model_of, tmp_path)
    theirs = build()
    strategy = Partial("share()", theirs, min_train_nodes=1, min_available_nodes=1)
    torch.set_rng_state(wanted)
    seen = list[Tensor]()

    def app(message: Message, context: Context) -> Message:
        seen.append(torch.get_rng_state())
        assert set(message.content["config"]) == {"server-round"}
        raise FedplanError("seen")

    grid = InProcess(lambda message, context: mod(message, context, app), [{"name": "a"}])  # type: ignore[arg-type]
    other = ArrayRecord(zoo.build("bert", 1).state_dict())
    torch.set_rng_state(wanted)
    (message,) = strategy.configure_train(1, other, ConfigRecord(), grid)
    (reply,) = grid.send_and_receive([message])
    assert reply.error.reason == "failed: internal" and torch.equal(seen[0], wanted)
    for each in (model, theirs):
        assert digests(get_values(each, describe(each))) == before
