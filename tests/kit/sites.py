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

from fedplan.federation.endpoint import TRAIN, Endpoint
from fedplan.federation.global_state import GlobalState
from fedplan.federation.ledger.egress import Limits
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import make_request
from fedplan.naming import allow_imports
from fedplan.runners.site import Site
from fedplan.runners.site_runtime import SiteRuntime
from fedplan.sites.gateway import SiteGateway
from fedplan.sites.policy import Policy
from fedplan.studies.schema import Study, read_study
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message, unpack_message

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
PRIVATE = 'unit = "example"\nepsilon = 900.0\nnoise_multiplier = 20.0\nexamples_per_site = 24\n'
VOTE = "vote_noise_multiplier = 2.0\nvote_every = 2\n"
SAFL = 'name = "safl"\nsettings = { k = 1, joint_choice = true }'
SHARE = 'plan = "share()"'


def study_text(
    *,
    name: str = "federation",
    seed: int = 0,
    method: str = SHARE,
    train: str = "lr = 1.0",
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
config = {{ {settings} }}
[task]
kind = "image-classification"
input = "image"
label = "digit"
labels = {labels}
image_size = 8
[data]
holdout_fraction = 0.0
{data}
[clients]
names = ["{NAME}"]
[method]
{method}
[train]
rounds = {rounds}
optimizer = "sgd"
steps = 1
batch_size = 12
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
    words = {"name": NAME, "state": str(folder / "state"), "data": str(folder / "rows.npz")}
    words |= {"policy": str(folder / "policy.toml")}
    return Site.model_validate({**words, **said}), Limits(**limits)


def site_of(folder: Path, study: str, **said: Any) -> Endpoint:
    """The endpoint of a site with the rows and the home of a folder."""
    (folder / "study.toml").write_text(study)
    site, limits = words_of(folder, **said)
    with allow_imports(site.allow_packages):
        found = read_study(folder / "study.toml")
    return SiteRuntime(site, found, limits).endpoint(RUN)


class Anybody:
    """Approves of every study, within some limits."""

    def __init__(self, limits: Limits | None = None) -> None:
        said = asdict(limits) if limits else {}
        self.policy = Policy.model_validate({"limits": said, "metrics": ["loss"]})

    def require_approval(self, study: Study, server: str = "", run: str = "") -> str:
        return "anybody"


def make_gateway(folder: Path, **said: Any) -> SiteGateway:
    """The desk of such a site, where every study is approved."""
    site, limits = words_of(folder, **said)
    return SiteGateway(site, Anybody(limits))


def hello(study: str, run: str = RUN) -> Message:
    """A server's first request: it offers a study, as the text of a file tells it."""
    return pack_message({}, {"run": run, "study": tomllib.loads(study)})


def world_of(
    endpoint: Endpoint, *, round: int = 1, scale: float = 1.0, version: int = 0
) -> GlobalState:
    """A world that a server may send: that of the start, or values of its own choice."""
    global_state = GlobalState.initial(endpoint.agreement, endpoint.site.setup.start)
    values = {key: value * scale for key, value in global_state.values.items()}
    versions = dict.fromkeys(values, version)
    return replace(global_state, round=round - 1, values=values, versions=versions)


def asked(
    endpoint: Endpoint, global_state: GlobalState, kind: str = TRAIN
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a site answers: the tensors, and what it says."""
    down = make_request(endpoint.agreement, global_state, NAME, {}, full=True)
    if endpoint.agreement.method.joint_choice and kind == TRAIN:
        scores = {block: float(block.number) for block in endpoint.agreement.blocks}
        down = replace(down, turn=replace(down.turn, scores=scores))
    return unpack_message(endpoint.answer(kind, request_message(down)))


def change_of(endpoint: Endpoint, global_state: GlobalState, rate: float = 1.0) -> Tensor:
    """How an update differs from what was sent, in steps of one."""
    values, said = asked(endpoint, global_state)
    assert values, said
    parts = [((values[k] - global_state.values[k]) / rate).flatten() for k in sorted(values)]
    return torch.cat(parts).double()


def charges(folder: Path, dataset: str = "examples") -> int:
    """The charges on a site's account."""
    file = folder / "state" / "account" / dataset / "charges.jsonl"
    return len(file.read_bytes().splitlines()) - 1 if file.exists() else 0
