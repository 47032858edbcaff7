# SPDX-License-Identifier: Apache-2.0
"""A real site for tests: a tiny study, rows on disk, an endpoint, and what a server asks of it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedplan.federation.account import Limits
from fedplan.federation.endpoint import TRAIN, Endpoint
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import push
from fedplan.federation.world import World
from fedplan.naming import allowing
from fedplan.runners.site import Site
from fedplan.runners.site import site_of as site_from
from fedplan.runners.worker import Worker
from fedplan.sites.desk import Desk
from fedplan.sites.policy import policy_of
from fedplan.studies.schema import Study, read_study
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import packed, unpacked

NAME = "north"
RUN = "0" * 16
SETTINGS = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
PRIVATE = 'unit = "example"\nepsilon = 900.0\nnoise = 20.0\nsize = 24\n'
VOTE = "vote = 2.0\nperiod = 2\n"
SAFL = 'name = "safl"\nsettings = { k = 1, together = true }'
SHARE = 'plan = "share()"'


def study_text(
    *,
    name: str = "federation",
    seed: int = 0,
    method: str = SHARE,
    train: str = "rate = 1.0",
    privacy: str = PRIVATE,
    data: str = "",
    labels: str = "[0, 1, 2]",
    model: Mapping[str, Any] | None = None,
    rounds: int = 50,
) -> str:
    """The text of a study whose sites bring their own rows."""
    settings = ", ".join(f"{k} = {v}" for k, v in {**SETTINGS, **(model or {})}.items())
    return f"""
name = "{name}"
seed = {seed}
[model]
type = "vit"
settings = {{ {settings} }}
[task]
kind = "image-classification"
input = "image"
label = "digit"
labels = {labels}
image_size = 8
[data]
own_test = 0.0
{data}
[clients]
names = ["{NAME}"]
[method]
{method}
[train]
rounds = {rounds}
optimiser = "sgd"
steps = 1
batch = 12
{train}
{f"[privacy]{chr(10)}{privacy}" if privacy else ""}
"""


def write_rows(file: Path, *, count: int = 24, seed: int = 0, **change: Any) -> None:
    """Rows of a site: pictures, their labels, and whose they are. `change` puts other columns."""
    draw = np.random.default_rng(seed)
    found = {
        "image": draw.integers(0, 255, (count, 8, 8), dtype=np.uint8),
        "digit": draw.integers(0, 3, count),
        "patient": np.arange(count),
    }
    np.savez(file, **{**found, **change})


LIMITS = ("limit_rounds", "limit_bytes", "limit_epsilon", "limit_delta")


def words_of(folder: Path, **said: Any) -> tuple[Site, Limits]:
    """A site with the rows and the home of a folder, and its limits; `limit_rounds` is one."""
    limits = {word.removeprefix("limit_"): said.pop(word) for word in LIMITS if word in said}
    if not (folder / "rows.npz").exists():
        write_rows(folder / "rows.npz")
    (folder / "policy.toml").touch()
    words = {"name": NAME, "home": str(folder / "home"), "data": str(folder / "rows.npz")}
    words |= {"policy": str(folder / "policy.toml")}
    return site_from({**words, **said}), Limits(**limits)


def site_of(folder: Path, study: str, **said: Any) -> Endpoint:
    """The endpoint of a site with the rows and the home of a folder."""
    (folder / "study.toml").write_text(study)
    site, limits = words_of(folder, **said)
    with allowing(site.allow):
        found = read_study(folder / "study.toml")
    return Worker(site, found, limits).endpoint(RUN)


class Anybody:
    """Approves of every study, within some limits."""

    def __init__(self, limits: Limits | None = None) -> None:
        said = asdict(limits) if limits else {}
        self.policy = policy_of({"limits": said, "metrics": ["loss"]})

    def admit(self, study: Study, server: str = "", run: str = "") -> str:
        return "anybody"


def desk_of(folder: Path, **said: Any) -> Desk:
    """The desk of such a site, where every study is approved."""
    site, limits = words_of(folder, **said)
    return Desk(site, Anybody(limits))


def hello(study: str, run: str = RUN) -> Message:
    """A server's first request: it offers a study, as the text of a file tells it."""
    return packed({}, {"run": run, "study": tomllib.loads(study)})


def world_of(endpoint: Endpoint, *, round: int = 1, scale: float = 1.0, version: int = 0) -> World:
    """A world that a server may send: that of the start, or values of its own choice."""
    world = World.start(endpoint.agreement, endpoint.site.start)
    values = {key: value * scale for key, value in world.values.items()}
    versions = dict.fromkeys(values, version)
    return replace(world, round=round - 1, values=values, versions=versions)


def asked(
    endpoint: Endpoint, world: World, kind: str = TRAIN
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a site answers: the tensors, and what it says."""
    down = push(endpoint.agreement, world, NAME, {}, anew=True)
    if endpoint.agreement.method.together and kind == TRAIN:
        scores = {block: float(block.number) for block in endpoint.agreement.blocks}
        down = replace(down, turn=replace(down.turn, scores=scores))
    return unpacked(endpoint.answer(kind, request_message(down)))


def change_of(endpoint: Endpoint, world: World, rate: float = 1.0) -> Tensor:
    """How an update differs from what was sent, in steps of one."""
    values, said = asked(endpoint, world)
    assert values, said
    parts = [((values[k] - world.values[k]) / rate).flatten() for k in sorted(values)]
    return torch.cat(parts).double()


def charges(folder: Path, dataset: str = "rows") -> int:
    """The charges on a site's account."""
    file = folder / "home" / "account" / dataset / "charges.jsonl"
    return len(file.read_bytes().splitlines()) - 1 if file.exists() else 0
