# SPDX-License-Identifier: Apache-2.0
"""What computes on a device: fits, probes, DP-SGD, scores and messages; and what is caught there."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sites
import torch
from clients import GUARANTEES, few, loss
from crews import Begun, Here, files, study_with
from often import first
from second_device import NAME, Backend, Mixed
from there import PACE, Moves, built, federation, one_turn, played, values_of
from torch import Tensor, nn

import fedplan
from fedplan.errors import FedplanError, PrivacyError
from fedplan.federation import client_round
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.digests import model_digest
from fedplan.language.parser import parse
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.methods.method import Method
from fedplan.methods.published import fedavg
from fedplan.models.attention import attention_shift
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.privacy.dpsgd import fit as private_fit
from fedplan.privacy.dpsgd.fit import DPSGDConfig
from fedplan.privacy.dpsgd.fit import train_dp_sgd as private_train
from fedplan.run import run_study
from fedplan.runners.executors import worker
from fedplan.runners.executors.executor import PoolConfig
from fedplan.runners.executors.worker import Worker
from fedplan.studies.schema import ConfigError, read_study, resolve_paths, study_from_dict
from fedplan.tensors import devices
from fedplan.tensors.devices import (
    CPU,
    DeviceError,
    deterministic,
    fork_rng_state,
    grad_scaler,
    model_device,
    move_model,
    resolve_device,
    to_device,
    worker_device,
)
from fedplan.tensors.named import checksum
from fedplan.training import fit
from fedplan.training.fit import Job, TrainArguments
from fedplan.training.freezing import trainable
from fedplan.training.optimizers import sgd
from fedplan.training.probes import ProbeInput, attention_probe, gradient_probe

pytestmark = pytest.mark.device

SLACK = 1e-4
"""What hardware may differ by; the second device, by nothing."""


def same(one: dict[str, Tensor], other: dict[str, Tensor], device: torch.device) -> bool:
    slack = 0.0 if device.type == NAME else SLACK
    close = (torch.allclose(v, other[k], rtol=slack, atol=slack) for k, v in one.items())
    return one.keys() == other.keys() and all(close)


def near(one: float, other: float, device: torch.device) -> bool:
    return one == other if device.type == NAME else abs(one - other) <= SLACK * max(1, abs(one))


def test_a_turn_moves_each_value_once_each_way(tmp_path: Path, counts: Backend) -> None:
    """By their shapes: nothing but the values and the batches goes there, and one row of losses
    comes back with the values."""
    made = federation("fedavg", "bert", tmp_path, resolve_device(NAME))
    name, turn = one_turn(made)
    rows: Any = made.clients[name].examples
    counts.forget()
    rows.shapes.clear()
    turn()
    values = Counter(tuple(made.server.start[p.key].shape) for p in made.agreement.trainable)
    assert Counter(counts.sent) == values + Counter(rows.shapes)
    assert Counter(counts.fetched) == values + Counter([(PACE.steps,)])


def test_what_rests_stays_there(tmp_path: Path, counts: Backend) -> None:
    """Of a frozen model one number is fetched for each tensor, and no tensor."""
    made = federation("head-only", "bert", tmp_path, resolve_device(NAME))
    _, turn = one_turn(made)
    counts.forget()
    turn()
    resting = len(made.agreement.params) - len(made.agreement.trainable)
    trained = [tuple(made.server.start[p.key].shape) for p in made.agreement.trainable]
    assert Counter(counts.fetched) == Counter([*trained, (resting,), (PACE.steps,)])


@pytest.mark.parametrize("method", ["fedavg", "head-only"])
@pytest.mark.parametrize("architecture", ["bert", "vit"])
def test_a_turn_launches_what_its_steps_need(
    method: str, architecture: str, tmp_path: Path, counts: Backend
) -> None:
    """No more operations than the same steps in plain torch, but for checksums of what rests; and
    none of which the host must know the result to go on."""
    made = federation(method, architecture, tmp_path, resolve_device(NAME))
    name, turn = one_turn(made)
    counts.forget()
    turn()
    launches, waits = counts.launches, counts.waits
    model, rows = made.model, made.clients[name].examples
    trained = {p.name for p in made.agreement.trainable}
    for key, param in model.named_parameters():
        param.requires_grad_(key in trained)
    counts.forget()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(PACE.steps):
        optimizer.zero_grad()
        loss(model.train(), to_device(rows.batch(torch.arange(2)), resolve_device(NAME))).backward()
        optimizer.step()
    resting = len(made.agreement.params) - len(trained)
    assert not waits and launches <= counts.launches + 9 * resting


def test_what_rests_and_moves_is_a_fault_there(tmp_path: Path, device: torch.device) -> None:
    def meddling(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1.0
        return loss(model, batch)

    made = federation("head-only", "bert", tmp_path, device, loss=meddling)
    with pytest.raises(FedplanError, match="trained by no turn of the plan, and changed"):
        made.run_round()


def test_workers_share_out_the_cards(counts: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cards take eight workers; an index, a count or a machine without cards changes that."""
    monkeypatch.setattr(Backend, "device_count", lambda _: 8)
    pool, cores = PoolConfig(), len(os.sched_getaffinity(0))
    assert pool.worker_count(1, NAME) == 8 and PoolConfig(count=9).worker_count(1, NAME) == 9
    assert [worker_device(NAME, number).index for number in range(9)] == [*range(8), 0]
    assert pool.worker_count(1, f"{NAME}:3") == 1 and worker_device(f"{NAME}:3", 5).index == 3
    assert pool.worker_count(1, "cpu") == cores and worker_device("cpu", 5) == CPU


def test_a_worker_builds_its_model_on_its_card(
    here: Path, counts: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Placed(Exception):
        """Where the model was moved to."""

    def place(_: nn.Module, device: torch.device) -> None:
        raise Placed(device)

    monkeypatch.setattr(Backend, "device_count", lambda _: 8)
    monkeypatch.setattr(worker, "move_model", place)
    study = read_study(Path("study.toml")).model_copy(update={"device": NAME})
    fields = resolve_paths(study, here).model_dump(mode="json")
    with pytest.raises(Placed, match=f"{NAME}:3"):
        Worker()._begin({"study": fields, "folder": str(here), "number": 11})


def test_eight_cards_take_a_client_each(
    here: Path, counts: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every round, and with the bits of one card. The workers are in this process, and place
    their models on the toy's only card; each message of a wave is answered before the next wave."""
    taken, cards = list[tuple[str, int]](), list[int | None]()

    class Waves(Here):
        def send(self, number: int, said: Mapping[str, Any], shared: Any = None) -> None:
            if said["do"] == "turn":
                taken.append((said["client"], number))
            super().send(number, said, shared)

        def receive(self, timeout: float) -> Any:
            return [super(Waves, self).receive(timeout)[0] for _ in range(len(self.asked))]

    def place(model: nn.Module, device: torch.device) -> nn.Module:
        cards.append(device.index)
        return move_model(model, torch.device(NAME))

    study = study_with("prox", data={"num_clients": 8, "alpha": 100.0}, train={"rounds": 2})
    begun = Begun(study.model_copy(update={"device": NAME}), here)
    expected = files(begun.alone())
    monkeypatch.setattr(Backend, "device_count", lambda _: 8)
    monkeypatch.setattr(worker, "move_model", place)
    transport = Waves(PoolConfig().worker_count(study.threads, NAME))
    assert files(begun.by(transport, "pool", monkeypatch)) == expected
    assert sorted(cards) == list(range(8))
    for turns in (taken[:8], taken[8:]):
        clients, workers = zip(*turns, strict=True)
        assert len(set(clients)) == 8 and sorted(workers) == list(range(8))


def test_checksums_are_those_of_the_host(device: torch.device) -> None:
    drawn = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        value = (torch.randn(40, 30, generator=drawn) * 50).abs().to(dtype)
        told = int(checksum(value))
        assert int(checksum(value.to(device)).to(CPU)) == told
        other = value.clone()
        other[3, 4], other[3, 5] = value[3, 5] + 1, value[3, 4]
        assert int(checksum(other)) != told


class Planted(Exception):
    """A law that did not hold."""


def _identity(tensors: Any, _: torch.device) -> Any:
    return dict(tensors)


def _unmoved(model: nn.Module, values: Any, params: Any) -> None:
    """Values put by letting the model point at them, where they are."""
    tensors = dict(model.named_parameters())
    for p in params:
        if p.key in values and p.key == p.name:
            tensors[p.name].data = values[p.key].clone()


def _left_there(model: nn.Module, params: Any) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters())
    return {p.key: p.view(tensors[p.name].detach()).clone() for p in params}


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (fit, "to_device", _identity),
        ("fedplan.training.client_hooks", "to_device", _identity),
        ("fedplan.federation.client", "set_values", _unmoved),
        (client_round, "get_values", _left_there),
    ],
    ids=["batch", "anchor", "put", "take"],
)
def test_a_missing_move_is_caught(
    module: Any, name: str, wrong: Any, tmp_path: Path, counts: Backend, monkeypatch: Any
) -> None:
    place = f"{module}.{name}" if isinstance(module, str) else f"{module.__name__}.{name}"
    monkeypatch.setattr(place, wrong)
    made = federation("fedprox", "bert", tmp_path, resolve_device(NAME))
    with pytest.raises((RuntimeError, TypeError)):
        made.run_round()


def _through_the_host(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    weight = next(model.parameters())
    return loss(model, batch) + 0.0 * weight.cpu().to(weight.device).sum()


def _batch_twice(tensors: Any, device: torch.device) -> Any:
    return to_device({k: v.to(device).to(CPU) for k, v in tensors.items()}, device)


def _read_each(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = loss(model, batch)
    return found + 0.0 * sum(each.detach().sum().item() for each in model.parameters())


@pytest.mark.parametrize("planted", ["through the host", "batch twice", "read each"])
def test_a_planted_move_is_counted(
    planted: str, tmp_path: Path, counts: Backend, monkeypatch: Any
) -> None:
    """The bound of `Moves` fails where a tensor goes by the host, or a step waits for numbers."""
    said: dict[str, Any] = {}
    if planted == "through the host":
        said["loss"] = _through_the_host
    elif planted == "read each":
        said["loss"] = _read_each
    else:
        monkeypatch.setattr(fit, "to_device", _batch_twice)
    made = federation("fedavg", "bert", tmp_path, resolve_device(NAME), **said)
    moves = Moves(made)
    played(made, 1)
    with pytest.raises(AssertionError):
        moves.require_bounded()


def test_mixing_raises(counts: Backend) -> None:
    there, here = torch.ones(2, device=NAME), torch.ones(2)
    for mixed in (lambda: there + here, lambda: here + there, lambda: torch.equal(there, here)):
        with pytest.raises((Mixed, RuntimeError)):
            mixed()
    with pytest.raises(Mixed, match="a generator of cpu draws for elsewhere"):
        there.normal_(generator=torch.Generator())
    assert (there * torch.tensor(2.0)).to(CPU).tolist() == [2.0, 2.0]  # as torch's own devices do


def test_random_numbers_are_as_before(device: torch.device) -> None:
    """Of the host and of the device, after a fit and after an error in one."""
    model = built("bert").to(device)
    drawn = torch.rand(3, device=device), torch.rand(3)
    module: Any = torch.get_device_module(device)
    before = module.get_rng_state(), torch.get_rng_state()
    seen = list[Tensor]()
    for _ in range(2):
        with pytest.raises(Planted), fork_rng_state(device, 5):
            seen.append(torch.rand(3, device=device).to(CPU))
            raise Planted
    fit.plain_fit(job_of(model, few("bert")["client-0"]))
    attention_probe(examples=4)(make_probe_input(model, few("bert")["client-0"]))
    assert torch.equal(*seen) and drawn
    assert torch.equal(module.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def job_of(model: nn.Module, rows: Any, plan: str = "share()", **said: Any) -> Job:
    params = describe(model)
    start = said.pop("start", None) or get_values(model, params)
    roles = resolve(parse(plan), params, Turn(1, "north"))
    return Job(model, roles, rows, loss, said.pop("train_arguments", PACE), 7, start, **said)


def make_probe_input(model: nn.Module, rows: Any) -> ProbeInput:
    blocks = tuple(dict.fromkeys(p.block_id for p in describe(model) if p.block_id))
    return ProbeInput(model, rows, blocks, 3, loss)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "vit"])
def test_probes_and_maps_are_the_same_there(architecture: str, device: torch.device) -> None:
    rows = few(architecture)["client-1"]
    found = list[list[float]]()
    for place in (CPU, device):
        model = built(architecture).to(place)
        params = describe(model)
        start = get_values(model, params)
        other = {k: v + 0.1 * v.sin() for k, v in start.items()}
        far = attention_shift(model, params, (start, other), rows.batch(torch.arange(2)))
        scores = [
            probe(examples=4)(make_probe_input(model, rows))
            for probe in (attention_probe, gradient_probe)
        ]
        found.append([v for each in (*scores, far) for v in each.values()])
        assert same(get_values(model, params), start, CPU)
    assert any(found[0]) and all(map(near, *found, [device] * len(found[0])))


@pytest.mark.parametrize("plan", ["share()", "chain(share(), freeze(query | key))"])
@pytest.mark.parametrize("architecture", ["gpt-neox", "phi3"])
def test_fused_rows_are_frozen_there(architecture: str, plan: str, device: torch.device) -> None:
    """Parts of a fused tensor train as on the host, and a model that moves after `mark` is told."""
    ends = list[dict[str, Tensor]]()
    for place in (CPU, device):
        model = built(architecture, chance=False).to(place)
        train_arguments = replace(PACE, optimizer=sgd())
        fit.plain_fit(
            job_of(model, few(architecture)["client-0"], plan, train_arguments=train_arguments)
        )
        ends.append(get_values(model, describe(model)))
    for key, value in ends[0].items():  # strides differ there, and so does the order of sums
        assert torch.allclose(value, ends[1][key], rtol=SLACK, atol=1e-6), key


def test_a_model_moved_after_mark_is_told(device: torch.device) -> None:
    model = built("gpt-neox")
    params = describe(model)
    with trainable(
        model, resolve(parse("chain(share(), freeze(query))"), params, Turn(1))
    ) as marked:
        list(marked.parameters())
        for tensor in model.parameters():
            tensor.data = tensor.data.clone()
        with pytest.raises(FedplanError, match="moved or cast"):
            loss(model, few("gpt-neox")["client-0"].batch(torch.arange(2))).backward()


PRIVATE = DPSGDConfig(
    max_grad_norm=1.0,
    noise_multiplier=1.0,
    expected_batch_size=2,
    sampling_rate=0.9,
    steps=2,
    ghost_clipping=True,
)


LAST = "chain(freeze(), share(last(1)))"


@pytest.mark.parametrize(
    "case",
    first(2, [("bert", "share()"), ("vit", LAST), ("vit", "share()"), ("bert", LAST)]),
)
def test_private_steps_are_the_same_there(case: tuple[str, str], device: torch.device) -> None:
    """In one pass too: the faster way must not be given up in silence for want of a move."""
    architecture, plan = case
    ends, told = list[dict[str, Tensor]](), list[Any]()
    for place in (CPU, device):
        drawn = torch.Generator().manual_seed(0)
        model = built(architecture, chance=device.type == NAME).to(place)
        job = job_of(
            model,
            few(architecture)["client-1"],
            plan,
            train_arguments=TrainArguments(sgd(), lr=0.1),
        )
        _, done = private_train(
            job,
            PRIVATE,
            noise=lambda shape, stddev, _, g=drawn: (
                torch.randn(shape, generator=g, dtype=torch.float64) * stddev
            ),
            uniform=lambda n, g=drawn: torch.rand(n, generator=g, dtype=torch.float64),
        )
        told.append(done)
        ends.append(get_values(model, describe(model)))
    assert same(*ends, device)
    assert told[0] == told[1] and told[1].examples


@pytest.mark.nightly
def test_hidden_rounds_run_there(tmp_path: Path, device: torch.device) -> None:
    for name in ("veiled", "cloaked"):
        plan = parse("chain(freeze(), share(head), best(1))")
        made = Method(plan, probe=attention_probe(examples=2), joint_choice=True)
        agreed = Agreement("there", describe(built("bert")), made, PACE, GUARANTEES[name])
        there = federation(made, "bert", tmp_path / name, device, agreement=agreed)
        assert all(each.isfinite().all() for each in values_of(played(there, 1)).values())


def test_a_device_without_float64_hides_no_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_fit, "sum_dtype", lambda _: torch.float32)
    job = job_of(built("bert"), few("bert")["client-0"])
    with pytest.raises(PrivacyError, match=r'no float64.*use device = "cpu"'):
        private_train(job, PRIVATE, noise=torch.zeros, uniform=torch.zeros)


def test_a_model_that_is_there_is_not_touched(device: torch.device) -> None:
    """Quantized models refuse to be moved, even to where they are."""

    class Heavy(nn.Linear):
        def to(self, *_: Any, **__: Any) -> Any:
            raise Planted

    model = Heavy(2, 2)
    assert move_model(model, CPU) is model
    with pytest.raises(Planted):
        move_model(model, device)


def test_an_answer_of_another_device_is_another_answer(device: torch.device) -> None:
    """Two that round differently must not share their noise: their difference would show through."""
    model = built("bert")
    here = model_digest(model)
    assert model_digest(model.to(device)) != here == model_digest(model.to(CPU))


@pytest.mark.parametrize("method", [sites.SHARE, sites.SAFL])
def test_a_site_answers_messages_from_there(
    method: str, tmp_path: Path, device: torch.device
) -> None:
    """The node's word goes before the study's, and the wire does not know of it."""
    found = list[dict[str, Tensor]]()
    text = 'device = "cpu"\n' + sites.study_text(method=method, privacy="", train="lr = 0.1")
    for place in ("cpu", str(device)):
        (tmp_path / place.replace(":", "-")).mkdir()
        site = sites.site_of(tmp_path / place.replace(":", "-"), text, device=place)
        assert model_device(site.site.setup.model).type == torch.device(place).type
        values, said = sites.asked(site, sites.world_of(site))
        assert values, said
        found.append(values)
    slack = SLACK  # its attention is not eager
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=slack, atol=slack), key


def test_a_study_runs_there_and_goes_on_here(here: Path, device: torch.device) -> None:
    """Worlds and scores; a run may go on on another device, for no two ends agree on one."""
    study, there = read_study(Path("study.toml")), str(device)
    runs = dict[str, Any]()
    for name, places in {
        "host": ["cpu"] * 2,
        "there": [there] * 2,
        "mixed": [there, "cpu"],
    }.items():
        for rounds, place in zip((1, 2), places, strict=True):
            train = study.train.model_copy(update={"rounds": rounds})
            said = study.model_copy(update={"device": place, "train": train})
            runs[name] = run_study(said, here / name, resume=rounds > 1).simulation
            assert model_device(runs[name].federation.model).type == torch.device(place).type
    host = runs["host"].federation
    for name in ("there", "mixed"):
        other = runs[name].federation
        assert other.agreement.text == host.agreement.text
        for key, value in host.global_state.values.items():
            assert torch.allclose(value, other.global_state.values[key], rtol=SLACK, atol=SLACK), (
                key
            )
        scores = runs["host"].evaluate()["global"], runs[name].evaluate()["global"]
        assert scores[0] == pytest.approx(scores[1], rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_smaller_dtypes_are_the_same_there(precision: str, device: torch.device) -> None:
    ends = list[dict[str, Tensor]]()
    for place in (CPU, device):
        model = built("bert", chance=False).to(place)
        train_arguments = TrainArguments(sgd(), lr=1e-2, batch_size=2, steps=2, precision=precision)
        fit.plain_fit(job_of(model, few("bert")["client-0"], train_arguments=train_arguments))
        ends.append(get_values(model, describe(model)))
    for key, value in ends[0].items():
        assert torch.allclose(value, ends[1][key], rtol=1e-2, atol=1e-3), key


def test_a_scaler_changes_nothing_but_of_float16(device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for dtype, enabled in ((None, False), (torch.bfloat16, False), (torch.float16, True)):
        scale = grad_scaler(device, dtype)
        assert scale.is_enabled() is enabled
        optimizer.zero_grad()
        before = weight.detach().to(CPU)
        scale.scale(weight.sum()).backward()
        scale.step(optimizer)
        scale.update()
        assert torch.equal(before - weight.detach().to(CPU), torch.full((2,), 0.5))


def test_determinism_is_a_switch_of_turns(tmp_path: Path, device: torch.device) -> None:
    seen = list[bool]()

    def noting(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return loss(model, batch)

    for said in (True, False):
        made = federation(fedavg(), "bert", tmp_path / str(said), device, loss=noting)
        made.clients.setup = replace(made.clients.setup, deterministic=said)
        made.run_round()
        assert set(seen) == {said} and not torch.are_deterministic_algorithms_enabled()
        seen.clear()
    with pytest.raises(Planted), deterministic():
        raise Planted
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("word", ["gpu", "", "cuda:300", "CPU", "meta", "cpu ", "\x00"])
def test_a_word_that_is_no_device_is_refused(word: str) -> None:
    with pytest.raises(DeviceError, match="device names are auto, cpu, cuda"):
        resolve_device(word)
    with pytest.raises(ConfigError, match="there is no device"):
        study_from_dict({"device": word, "method": {"plan": "share()"}})


def test_a_device_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"xpu": 2, "mps": 1}
    monkeypatch.setattr(devices, "device_count", lambda kind: there.get(kind, 0))
    assert resolve_device("auto") == torch.device("xpu")
    assert resolve_device("xpu:1") == torch.device("xpu", 1)
    with pytest.raises(DeviceError, match="'xpu:2', and this machine has 2 XPU devices"):
        resolve_device("xpu:2")
    with pytest.raises(DeviceError, match="'cuda', and CUDA is not available here"):
        resolve_device("cuda")
    there.clear()
    assert resolve_device("auto") == CPU


def test_no_two_ends_agree_on_a_device(here: Path) -> None:
    study = read_study(Path("study.toml"))
    other = study.model_copy(update={"device": "cuda:1", "deterministic": True})
    assert study.device == "auto" and study.digest == other.digest


def test_outside_of_its_tests_there_is_no_second_device() -> None:
    assert resolve_device("auto").type != NAME
    with pytest.raises(DeviceError):
        resolve_device(NAME)


def test_random_state_is_forked_in_one_place() -> None:
    """Who forks it by himself forgets the device's."""
    for file in Path(fedplan.__file__).parent.rglob("*.py"):
        text = file.read_text()
        own = file.name == "devices.py"
        assert own or not re.search(r"\bfork_rng\b|torch\.manual_seed", text), file
