# SPDX-License-Identifier: Apache-2.0
"""Neighbours: two worlds that differ in one row or one client, and all that an observer sees.

A world begins with files: a study, and a table for each site. The real apps of Flower carry it in
one process: what the sites' app is asked and answers is recorded as bytes, and the server's folder
is read afterwards. To add a task, a method or a unit is to add one line to `TASKS`, `METHODS` or
`UNITS`.

Two worlds are *coupled*: in both, noise is zero, every row and client is drawn, and a vote has the
same winners. What they release may then differ by the sensitivity that is charged for, and by
nothing else; all that is not a noisy value is the same to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers as hf
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from grids import InProcess
from sites import Anybody
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from zoo import TEXT, VISION

from fedplan.errors import FedplanError
from fedplan.federation import identity
from fedplan.federation.server import Server
from fedplan.privacy import guard
from fedplan.privacy.accounting.accountant import Charge
from fedplan.privacy.accounting.budget import Budget, read_budget_unit
from fedplan.privacy.mechanisms.gaussian import Change, GaussianMechanism
from fedplan.privacy.mechanisms.noise import NoiseStream, derive_key
from fedplan.runners.flower.apps import client_app, run_server
from fedplan.runners.flower.records import from_records, to_records
from fedplan.runners.site import Site
from fedplan.sites.gateway import SiteGateway
from fedplan.storage.append_log import read_json_lines
from fedplan.storage.journal import Journal
from fedplan.studies.schema import read_study
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import unpack_message

CLIP, RATE, BATCH, NOISE, K, ROUNDS = 0.05, 1.0, 8, 1.0, 1, 2
SECRET = b"the same secret in both worlds".ljust(32, b".")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40)), "canary"]
CANARY = "canary"
"""A word of the one row that is in one world alone: it is in no message."""
LABELS = ("red", "green", "blue")
TINY = "hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, intermediate_size = 16"
BERT = f"""type = "bert"
config = {{ {TINY}, vocab_size = {len(WORDS)}, max_position_embeddings = 32, hidden_dropout_prob = 0.0, attention_probs_dropout_prob = 0.0 }}"""
GPT2 = f"""type = "gpt2"
config = {{ n_embd = 16, n_layer = 2, n_head = 2, vocab_size = {len(WORDS)}, n_positions = 32, bos_token_id = 2, eos_token_id = 3, attn_pdrop = 0.0, resid_pdrop = 0.0, embd_pdrop = 0.0 }}"""
BART = f"""type = "bart"
config = {{ d_model = 16, encoder_layers = 2, decoder_layers = 2, encoder_attention_heads = 2, decoder_attention_heads = 2, encoder_ffn_dim = 16, decoder_ffn_dim = 16, vocab_size = {len(WORDS)}, max_position_embeddings = 32, dropout = 0.0, pad_token_id = 0, bos_token_id = 2, eos_token_id = 3, decoder_start_token_id = 3, forced_eos_token_id = 3 }}"""
VIT = f"""type = "vit"
config = {{ image_size = 8, patch_size = 4, {TINY}, hidden_dropout_prob = 0.0, attention_probs_dropout_prob = 0.0 }}"""
Row = dict[str, Any]


def words_of(i: int) -> list[str]:
    """A text whose length and words follow from its number; the odd ones have the canary."""
    drawn = np.random.default_rng(i)
    found = [f"w{n}" for n in drawn.integers(0, 40, int(drawn.integers(5, 12)))]
    return [*found, CANARY] if i >= ODD else found


ROWS, ODD = 14, 10_000
"""The rows that are in both worlds, and the number of the first that is in one alone."""


def picture(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 255, (8, 8), dtype=np.uint8)


@dataclass(frozen=True)
class Recipe:
    """A task: its model, what is asked of it, and its rows by their numbers."""

    model: str
    asked: str
    row: Callable[[int], Row]
    headless: bool = False
    suffix: str = ".jsonl"


def _labelled(**columns: Callable[[int], Any]) -> Callable[[int], Row]:
    return lambda i: {name: made(i) for name, made in columns.items()}


def _text(i: int) -> str:
    return " ".join(words_of(i))


def _ask(i: int) -> str:
    return words_of(i)[-1]


def _label(i: int) -> str:
    """The third label is that of the odd rows alone."""
    return LABELS[2 if i >= ODD else i % 2]


CLASSES = f'label = "label"\nlabels = {json.dumps(LABELS)}'
TOWERS = 'vision = "{here}/eye"\ntext = "{here}/ear"'
TASKS: dict[str, Recipe] = {
    "text-classification": Recipe(BERT, CLASSES, _labelled(text=_text, label=_label)),
    "token-classification": Recipe(
        BERT,
        CLASSES,
        _labelled(text=words_of, label=lambda i: [LABELS[len(w) % 3] for w in words_of(i)]),
    ),
    "image-classification": Recipe(
        VIT,
        f'{CLASSES}\nimage_size = 8\ninput = "image"',
        _labelled(image=picture, label=_label),
        suffix=".npz",
    ),
    "image-text": Recipe(
        TOWERS,
        f'{CLASSES}\nimage_size = 16\ninput = "image"',
        _labelled(image=picture, label=_label),
        suffix=".npz",
    ),
    "causal-lm": Recipe(GPT2, "", _labelled(text=_text), headless=True),
    "masked-lm": Recipe(BERT, "", _labelled(text=_text), headless=True),
    "multi-label": Recipe(
        BERT, CLASSES, _labelled(text=_text, label=lambda i: [_label(i), *LABELS[: i % 2]])
    ),
    "regression": Recipe(
        BERT, 'label = "label"', _labelled(text=_text, label=lambda i: 100.0 if i >= ODD else i % 7)
    ),
    "seq2seq-lm": Recipe(
        BART, 'input = "text ask"', _labelled(text=_text, ask=_ask), headless=True
    ),
    "instruction": Recipe(
        GPT2, 'input = "ask text"', _labelled(text=_text, ask=_ask), headless=True
    ),
}


@dataclass(frozen=True)
class Asked:
    """A method as a study says it, with what its privacy needs; `keeps` says that some is kept."""

    said: str
    privacy: str = ""
    keeps: bool = False
    head: bool = False
    units: tuple[str, ...] = ("example", "client")
    rounds: int = 1


def _safl(probe: str, together: bool = False) -> str:
    more = f', probe = "{probe}"' if probe else ""
    joint = ", joint_choice = true" if together else ""
    return f'name = "safl"\nsettings = {{ k = {K}, with_head = HEAD{more}{joint} }}'


METHODS: dict[str, Asked] = {
    "fedavg": Asked('name = "fedavg"'),
    "fedfrozen": Asked('name = "fedfrozen"\nsettings = { warmup = 1 }', rounds=ROUNDS),
    "fedper": Asked('name = "fedper"', keeps=True, head=True),
    "fedbn": Asked('name = "fedbn"', keeps=True),
    "head-only": Asked('name = "head-only"', head=True),
    "bitfit": Asked('plan = "chain(freeze(), share(bias))"'),
    "lora": Asked('name = "fedit"\nsettings = { rank = 2 }', head=True),
    "fedprox": Asked('name = "fedprox"', units=("client",)),
    "fedadam": Asked('name = "fedadam"', units=("example",)),
    "random": Asked(_safl("random")),
    "random, together": Asked(_safl("random", together=True)),
    "last": Asked(_safl("last")),
    "traits": Asked(
        """plan = 'chain(freeze(), by("ward", {"a": share(blocks(0))}, share(blocks(1))))'""",
        units=("client",),
    ),
    "vote": Asked(_safl(""), "vote_noise_multiplier = 2.0\nvote_every = 1"),
}
UNITS = {"example": ("north",), "client": ("north", "south", "east")}
"""The roster of each unit. Of examples, north's last row is what worlds differ in; of clients,
whether east ever comes."""


@dataclass(frozen=True)
class Case:
    """What is audited: a task, a method and a unit."""

    task: str
    method: str
    unit: str
    more: str = ""

    @property
    def roster(self) -> tuple[str, ...]:
        return UNITS[self.unit]

    @property
    def allowed(self) -> bool:
        """Whether there is such a study at all."""
        asked = METHODS[self.method]
        if self.task == "image-text" and self.method in ("lora", "vote", "fedper", "head-only"):
            return False
        return self.unit in asked.units and not (asked.head and TASKS[self.task].headless)

    def study(self, here: Path) -> str:
        """The study's text."""
        recipe, asked = TASKS[self.task], METHODS[self.method]
        head = str(not recipe.headless and self.task != "image-text").lower()
        size = f"examples_per_site = {BATCH}\n" if self.unit == "example" else ""
        text = f"""
name = "audit"
[model]
{recipe.model.replace("{here}", str(here))}
[task]
kind = "{self.task}"
{recipe.asked}
{"" if self.task.startswith("image") else f'tokenizer = "{here}/words"'}
max_length = 16
[data]
holdout_fraction = 0.2
[clients]
names = {json.dumps(self.roster)}
[method]
{asked.said.replace("HEAD", head)}
[train]
rounds = {asked.rounds}
optimizer = "sgd"
lr = {RATE}
batch_size = {BATCH}
steps = 1
[timeouts]
sites = 0.2
updates = 30.0
reconnect = 0.1
poll_interval = 0.005
[privacy]
unit = "{self.unit}"
epsilon = 500.0
noise_multiplier = {NOISE}
clipping_norm = {CLIP}
{size}{asked.privacy}
"""
        return _over(text, self.more)


def _over(text: str, more: str) -> str:
    """A study with some lines put in place of others: `section.field = value` each."""
    for line in more.splitlines():
        where, _, value = line.partition(" = ")
        section, _, name = where.partition(".")
        head, _, rest = text.partition(f"[{section}]\n")
        own, bracket, tail = rest.partition("\n[")
        kept = [each for each in own.splitlines() if not each.startswith(f"{name} = ")]
        lines = "\n".join([f"[{section}]", *kept, f"{name} = {value}", ""])
        text = head + lines + bracket + tail
    return text


def prepare(here: Path) -> None:
    """The tokenizer and the towers that studies speak of."""
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    named = {f"{name}_token": token for name, token in special.items()}
    words = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="[SEP]", model_max_length=32, **named
    )
    words.save_pretrained(here / "words")
    torch.manual_seed(0)
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    hf.ViTModel(hf.ViTConfig(**{**VISION, **calm})).save_pretrained(here / "eye")
    hf.BertModel(hf.BertConfig(**{**TEXT, **calm, "hidden_size": 12})).save_pretrained(here / "ear")
    words.save_pretrained(here / "ear")


def write_table(rows: Iterable[Row], file: Path) -> None:
    """A site's table."""
    held = list(rows)
    if file.suffix == ".npz":
        columns: dict[str, Any] = {k: np.array([row[k] for row in held]) for k in held[0]}
        np.savez(file, **columns)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in held))


@dataclass
class Said:
    """One message: who says it to whom, as bytes; or an error, as text."""

    way: str
    kind: str
    site: str
    message: Message | None = None
    error: str = ""

    def unpacked(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return unpack_message(self.message) if self.message is not None else ({}, {})

    @property
    def bytes(self) -> bytes:
        held = (self.message.header, *self.message.blobs) if self.message is not None else ()
        return b"".join((*held, self.error.encode()))


class Wire(InProcess):
    """A grid that writes down all that goes over it."""

    def __init__(self, app: ClientApp, configs: list[dict[str, Any]]) -> None:
        super().__init__(app, configs)
        self.said = list[Said]()

    def _answer(self, envelope: FlowerMessage) -> FlowerMessage:
        kind = envelope.metadata.message_type
        site = str(self.contexts[envelope.metadata.dst_node_id].node_config["name"])
        self.said.append(Said("down", kind, site, from_records(envelope.content)))
        reply = super()._answer(envelope)
        if reply.has_error():
            self.said.append(Said("up", kind, site, error=str(reply.error.reason)))
        else:
            self.said.append(Said("up", kind, site, from_records(reply.content)))
        return reply

    def ask(self, site: str, kind: str, message: Message) -> Said:
        """Ask a site what its server would not."""
        nodes = {str(c.node_config["name"]): n for n, c in self.contexts.items()}
        envelope = FlowerMessage(to_records(message), nodes[site], kind)
        envelope.metadata.__dict__["_message_id"] = "poke"
        self._answer(envelope)
        return self.said[-1]


@dataclass
class Seen:
    """Everything that an observer sees of a world."""

    said: list[Said] = field(default_factory=list[Said])
    ledger: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    metrics: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    fault: str = ""
    worlds: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    versions: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    charges: list[Charge] = field(default_factory=list[Charge])
    mechanisms: list[tuple[GaussianMechanism, list[Change]]] = field(default_factory=list[Any])

    def answers(self, kind: str, site: str) -> list[Said]:
        return [s for s in self.said if (s.way, s.kind, s.site) == ("up", kind, site)]


@dataclass
class World:
    """A study, and the tables of the sites that come."""

    case: Case
    folder: Path
    tables: Mapping[str, list[Row]]
    traits: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    def __post_init__(self) -> None:
        self.file = self.folder.parent / "study.toml"
        recipe, desks = TASKS[self.case.task], dict[str, SiteGateway]()
        self.folder.mkdir(parents=True)
        if not self.file.exists():
            self.file.write_text(self.case.study(self.folder.parent.parent))
        for name, rows in self.tables.items():
            table = self.folder / f"{name}{recipe.suffix}"
            write_table(rows, table)
            said = {"name": name, "state": str(self.folder / "state" / name), "data": str(table)}
            desks[name] = SiteGateway(
                Site(**said, traits=dict(self.traits.get(name, {}))), Anybody()
            )
        self.wire = Wire(
            client_app(
                lambda context, *asked: desks[str(context.node_config["name"])].answer(*asked)
            ),
            [{"name": name} for name in desks],
        )

    def play(self) -> Seen:
        """Carry the study to its end, and see."""
        seen = Seen()
        with _watched(seen):
            try:
                run_server(self.wire, read_study(self.file), self.folder / "server")
            except FedplanError as error:
                seen.fault = str(error)
        return self._read(seen)

    def replay(self, other: Seen) -> Seen:
        """Ask the sites here what those of another world were asked, to the byte."""
        for each in [s for s in other.said if s.way == "down" and s.site in self.tables]:
            assert each.message is not None
            self.wire.ask(each.site, each.kind, each.message)
        return self._read(Seen())

    def _read(self, seen: Seen) -> Seen:
        seen.said = self.wire.said
        for name in ("ledger", "metrics"):
            file = self.folder / "server" / f"{name}.jsonl"
            setattr(seen, name, read_json_lines(file) if file.exists() else [])
        for state in (self.folder / "state").rglob("state"):
            seen.kept |= Journal(state, keep_replies=True).client_state()[0]
        for file in sorted(self.folder.rglob(guard.CHARGES_FILE)):
            seen.charges += Budget(file, delta=1e-5, unit=read_budget_unit(file)).charges
        return seen


@contextmanager
def _watched(seen: Seen) -> Generator[None]:
    """Note what is summed and what a round makes of the world."""
    add, commit = GaussianMechanism.add, Server.commit

    def adding(self: GaussianMechanism, total: Any, change: Change, **more: Any) -> bool:
        if not seen.mechanisms or seen.mechanisms[-1][0] is not self:
            seen.mechanisms.append((self, []))
        seen.mechanisms[-1][1].append({k: v.detach().clone() for k, v in change.items()})
        return add(self, total, change, **more)

    def committing(self: Server, *args: Any, **more: Any) -> Any:
        seen.worlds.append({k: v.clone() for k, v in self.global_state.values.items()})
        seen.versions.append(dict(self.global_state.versions))
        return commit(self, *args, **more)

    with patch.object(GaussianMechanism, "add", adding), patch.object(Server, "commit", committing):
        yield


@contextmanager
def secrets_known() -> Generator[None]:
    """Every guard has one secret, and draws as it always does."""
    with patch.object(guard, "load_or_create_secret", lambda *_, **__: SECRET):
        yield


@contextmanager
def coupled() -> Generator[None]:
    """No noise, the same draws whatever is drawn for, votes with the same winners, one run's id."""
    choose = Server.choose_blocks

    def silent(self: NoiseStream, shape: tuple[int, ...], stddev: float, step: float) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    def source(secret: bytes, about: str, *_: str | int | bytes) -> NoiseStream:
        return NoiseStream(derive_key(SECRET, "noise", about))

    def chosen(self: Server, round_state: Any, polled: Mapping[str, Any]) -> None:
        last = {b: float(i < K) for i, b in enumerate(self.agreement.blocks)}
        choose(self, round_state, dict.fromkeys(polled, last))

    with (
        secrets_known(),
        patch.object(NoiseStream, "rounded_gaussian", silent),
        patch.object(NoiseStream, "for_release", staticmethod(source)),
        patch.object(Server, "choose_blocks", chosen),
        patch.object(identity, "token_hex", lambda size: "ab" * size),
    ):
        yield


def tables_of(case: Case, *, without: bool = False, odd: int = ODD) -> dict[str, list[Row]]:
    """The tables of all sites: of examples, `without` north's first row; of clients, the last."""
    made = TASKS[case.task].row
    tables = {name: [made(100 * n + i) for i in range(ROWS)] for n, name in enumerate(case.roster)}
    if case.unit == "example" and not without:
        tables["north"].insert(0, made(odd))
    if case.unit == "client" and without:
        del tables[case.roster[-1]]
    return tables


def pair(
    case: Case, here: Path, *, odd: int = ODD, traits: Mapping[str, Mapping[str, str]] | None = None
) -> tuple[World, World]:
    """Two neighbours; `here` was prepared."""
    place = here / f"{case.task}-{case.method}-{case.unit}-{odd}".replace(", ", "-")
    made = [
        World(case, place / name, tables_of(case, without=gone, odd=odd), traits or {})
        for name, gone in (("with", False), ("without", True))
    ]
    return made[0], made[1]
