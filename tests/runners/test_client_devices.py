# SPDX-License-Identifier: Apache-2.0
"""Several devices train one client's model: as one device does, or refused by name."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import run, some_digits
from crews import study_with
from sites import site_of, study_text
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

import fedplan as fp
from fedplan.errors import FedplanError
from fedplan.language.predicates import Turn
from fedplan.methods import Method
from fedplan.runners.executors import ranks as device_ranks
from fedplan.runners.executors.executor import PoolConfig
from fedplan.runners.executors.ranks import ClientDevices
from fedplan.runners.simulation import Simulation
from fedplan.studies.experiment import build_experiment
from fedplan.tensors.devices import CPU, DeviceError, rank_device
from fedplan.training import Job, attach


def test_a_run_on_two_devices_is_that_on_one_and_names_a_rank_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    some_digits(tmp_path)
    study = study_with("phases", train={"rounds": 3, "optimizer": "sgd", "batch_size": 8})
    study = study.model_copy(update={"device": "cpu"})
    one, two = (
        Simulation(study, tmp_path / "one"),
        Simulation(study, tmp_path / "two", devices_per_client=2),
    )
    for _, _, number in zip(one.rounds(), rounds := two.rounds(), range(2), strict=False):
        if number == 1:
            break
    expected, values = one.federation.global_values(), two.federation.global_values()
    assert all(torch.allclose(values[k], v, rtol=0, atol=1e-6) for k, v in expected.items())
    for name in one.federation.clients:
        mine, own = (each.federation.personal_values(name) for each in (two, one))
        assert all(torch.allclose(mine[k], v, rtol=0, atol=1e-6) for k, v in own.items())
    assert two.devices is not None
    os.kill(two.devices._transport.pids[1], signal.SIGKILL)  # pyright: ignore
    with pytest.raises(FedplanError, match="rank 1 of the 2 of devices_per_client died while it"):
        next(rounds)
    assert not torch.distributed.is_initialized()


def test_a_site_trains_on_two_devices(tmp_path: Path) -> None:
    endpoint = site_of(tmp_path, study_text(privacy=""), device="cpu", devices_per_client=2)
    client, agreement = endpoint.site, endpoint.agreement
    setup, roles = client.setup, agreement.resolved(Turn(1, client.name))
    arguments, spread = agreement.train_arguments, setup.spread
    assert isinstance(spread, ClientDevices)
    job = Job(setup.model, roles, client.examples, setup.loss, arguments, 3, setup.start)
    done = spread(agreement.method.fit)(replace(job, client=client.name))
    spread.close()
    assert done.steps == 1


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)


def test_a_study_that_ranks_cannot_share_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    some_digits(tmp_path)
    study = study_with("fedavg")
    experiment = build_experiment(study)
    train = study.train.model_copy(update={"cache_activations": True})
    method = replace(experiment.agreement.method, loop=attach(lambda *_: 0.0))
    agreement = replace(experiment.agreement, method=method)
    data = study.data.model_copy(update={"from_python": True})
    cases: dict[str, tuple[Any, Any]] = {
        "unit": (study_with("rows"), experiment),
        "cache_activations": (study.model_copy(update={"train": train}), experiment),
        "training loop of your own": (study, replace(experiment, agreement=agreement)),
        "batch norms": (study, replace(experiment, model=Normed())),
        "data from Python": (study.model_copy(update={"data": data}), experiment),
    }
    for words, (told, held) in cases.items():
        with pytest.raises(FedplanError, match=f"devices_per_client = 2 .*{words}.*set it to 1"):
            ClientDevices(told, held, 2)
    monkeypatch.setattr(device_ranks, "is_quantized", lambda _: True)
    with pytest.raises(FedplanError, match="quantization"):
        ClientDevices(study, experiment, 2)
    with pytest.raises(FedplanError, match="a worker of runner pool has one device"):
        Simulation(study, tmp_path / "run", pool_config=PoolConfig(), devices_per_client=2)
    assert not (tmp_path / "run").exists()


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])


def test_a_model_that_fsdp_divides_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the run, or in the turn of a loop that divides it; no turn is stored."""

    def simulated(model: nn.Module, loop: Any = None) -> None:
        plan = fp.parse("share()")
        method = replace(Method(plan), loop=loop and attach(loop))
        train = fp.TrainConfig(rounds=1)
        options = fp.RunOptions(folder=tmp_path / "run", device="cpu")
        data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4).long())
        fp.simulate(method, model, {"a": data}, loss, train=train, options=options)

    def trainer(model: Any, dataset: Any, _: Any) -> Any:
        arguments = TrainingArguments(str(tmp_path / "trainer"), use_cpu=True, report_to=[])
        made = Trainer(model, arguments, train_dataset=dataset)
        made.is_fsdp_enabled = True
        return made

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        refused = "FSDP .* divide the tensors .* start fedplan without accelerate launch"
        for words, divided, loop in (
            ("the model is a FSDPSequential", fully_shard(small(), mesh=mesh), None),
            (
                "0 is a FSDPLinear",
                small(),
                lambda m, *_: fully_shard(m[0], mesh=mesh) and 0.0,
            ),
            ("the Trainer has an FSDP plugin", small(), trainer),
        ):
            with pytest.raises(FedplanError, match=f"{words}.*{refused}"):
                simulated(divided, loop)
    finally:
        dist.destroy_process_group()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(FedplanError, match=f"ACCELERATE_USE_FSDP is 'true'.*{refused}"):
        simulated(small())


def test_each_rank_has_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_device("cpu", 1, 2) == CPU
    with pytest.raises(DeviceError, match="'auto' stands for cpu on a machine with 0 cards"):
        rank_device("auto", 0, 2)
    monkeypatch.setattr("fedplan.tensors.devices.device_count", lambda kind: 2 * (kind == "cuda"))
    assert [str(rank_device("auto", i, 2)) for i in range(2)] == ["cuda:0", "cuda:1"]
    for name, count in (("cuda:1", 2), ("cuda", 3)):
        with pytest.raises(DeviceError, match=f"it needs {count} cards"):
            rank_device(name, 0, count)


def test_a_server_leaves_the_devices_to_its_sites(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(study_text(privacy=""))
    words = ("run", str(tmp_path / "study.toml"), "--output", str(tmp_path / "run"))
    code, said = run(*words, "--runner", "flower", "--devices-per-client", "2")
    assert code == 2 and "site.toml" in said
