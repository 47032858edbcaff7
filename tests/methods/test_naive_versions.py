# SPDX-License-Identifier: Apache-2.0
"""Every method equals a naive version of a few lines, written from its paper, in float64.

The mean weighs clients by their examples, also for methods whose papers weigh clients alike:
SCAFFOLD, FedAdam and FedYogi.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from duals import build
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedplan.federation.agreement import Agreement
from fedplan.federation.participation import Participation
from fedplan.methods import METHODS, Method, method_by_name
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.training import TrainArguments, adamw, sgd

SIZES = {"a": 3, "b": 5, "c": 8}
COHORTS = ("abc", "b", "ac")
"""The clients of each round; some miss a round."""
STEPS, LR, ADAMW_LR, DECAY = 2, 0.1, 0.01, 0.1
SGD: dict[str, Any] = {"optimizer": sgd(), "lr": LR, "epochs": STEPS, "batch_size": 100}
"""Whole batches, so that the order of examples does not matter."""
ADAMW: dict[str, Any] = {**SGD, "optimizer": adamw(weight_decay=DECAY), "lr": ADAMW_LR}
EXACT = 1e-12
"""Largest difference of two values: exact sums are rounded to multiples of 2**-47."""
BY_ADAMW = 1e-10
"""The gradient of a bias of keys is only rounding, which AdamW divides by its eps of 1e-8."""
FLOAT32 = 1e-8
"""The state of the server optimizer is float32."""

Values = dict[str, Tensor]
Result = tuple[Values, dict[str, Values]]
"""The global model, and the personal model of each client."""


class Rows:
    """Examples of one client; texts have padding."""

    def __init__(self, seed: int, count: int, images: bool) -> None:
        draw = torch.Generator().manual_seed(seed)
        if images:
            self.inputs = {"pixel_values": torch.randn(count, 3, 16, 16, generator=draw).double()}
        else:
            ids = torch.randint(1, 30, (count, 6), generator=draw)
            mask = torch.arange(6) < torch.randint(4, 7, (count, 1), generator=draw)
            self.inputs = {"input_ids": ids, "attention_mask": mask.long()}
        self.inputs["labels"] = torch.randint(3, (count,), generator=draw)

    def __len__(self) -> int:
        return len(self.inputs["labels"])

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {name: each[indices] for name, each in self.inputs.items()}


def rows_of(images: bool) -> dict[str, Rows]:
    return {name: Rows(i, count, images) for i, (name, count) in enumerate(SIZES.items())}


# Two models: fedplan trains `module`; `loss` is the same function of values by name.


class Texts:
    """A BERT of two blocks; `loss` adds the product of LoRA factors to their weight."""

    rows = rows_of(images=False)

    def __init__(self, method: Method) -> None:
        self.plain, module = self.bert("eager"), self.bert("sdpa")
        self.module = (method.adapt(module) if method.adapt else module).double()
        with torch.no_grad():  # B is 0 at first, so that A would have no gradient
            for name, parameter in self.module.named_parameters():
                if "lora" in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))

    @staticmethod
    def bert(attention: str) -> nn.Module:
        torch.manual_seed(8)
        sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 12, "num_labels": 3}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
        still: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = hf.BertConfig(**sizes, **still, attn_implementation=attention)
        model = hf.BertForSequenceClassification(config).double()
        with torch.no_grad():  # without this, attention is nearly uniform
            for parameter in model.bert.encoder.parameters():
                parameter.add_(0.5 * torch.randn_like(parameter))
        return model

    def answer(self, values: Values, client: str, **options: Any) -> Any:
        bare = {n.removeprefix("base_model.model."): value for n, value in values.items()}
        weights = {n.replace(".base_layer", ""): v for n, v in bare.items() if "lora" not in n}
        for a in (name for name in bare if "lora_A" in name):
            host = a.partition(".lora_A")[0] + ".weight"
            weights[host] = weights[host] + bare[a.replace("lora_A", "lora_B")] @ bare[a]
        return functional_call(self.plain, weights, (), {**self.rows[client].inputs, **options})

    def loss(self, values: Values, client: str) -> Tensor:
        return self.answer(values, client).loss

    @torch.no_grad()
    def attention(self, values: Values, client: str) -> Tensor:
        """By block, attention to [CLS] summed over heads and tokens, and averaged over examples."""
        real = self.rows[client].inputs["attention_mask"][:, None]
        maps = self.answer(values, client, output_attentions=True).attentions
        return torch.stack([(each[..., 0] * real).sum() / len(real) for each in maps])


class Images:
    """A CLIP with prompts after its first token: they replace words, and are added to patches."""

    rows = rows_of(images=True)

    def __init__(self, method: Method) -> None:
        assert method.adapt is not None
        self.module, self.clip = method.adapt(build("clip")).double(), build("clip").backbone
        self.clip.double()
        self.prompts = Values()
        for tower in ("text", "vision"):
            embeddings = self.clip.get_submodule(f"{tower}_model.embeddings")
            embeddings.register_forward_hook(partial(self.insert, tower))

    def insert(self, tower: str, _: nn.Module, __: object, tokens: Tensor) -> Tensor:
        prompt = self.prompts[tower]
        rest = tokens[:, 1 + (len(prompt) if tower == "text" else 0) :]
        return torch.cat([tokens[:, :1], prompt.expand(len(tokens), *prompt.shape), rest], 1)

    @staticmethod
    def prompt(values: Values, tower: str) -> Tensor:
        """Own + common + gate * attention of the own prompt to the common one."""
        own, common = (values.get(f"prompts.{tower}.{level}") for level in ("own", "common"))
        if own is None or common is None:
            return next(each for each in (own, common, torch.zeros(0, 16)) if each is not None)
        fusion = {n.split(".")[2]: v for n, v in values.items() if f"fusion.{tower}." in n}
        if not fusion:
            return own + common
        key, value = common @ fusion["key"].T, common @ fusion["value"].T
        scores = own @ fusion["query"].T @ key.T / len(key.T) ** 0.5
        fused = scores.softmax(-1) @ value @ fusion["out"].T
        return own + common + fusion["gate"] * fused if "gate" in fusion else fused

    def loss(self, values: Values, client: str) -> Tensor:
        self.prompts = {tower: self.prompt(values, tower) for tower in ("text", "vision")}
        module: Any = self.module
        texts = {"input_ids": module.ids, "attention_mask": module.mask}
        batch = self.rows[client].inputs
        output = self.clip(**texts, pixel_values=batch["pixel_values"])
        return cross_entropy(output.logits_per_image, batch["labels"])


def fedplan_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of the module that fedplan trains."""
    if "pixel_values" in batch:
        return cross_entropy(model(batch["pixel_values"]), batch["labels"])
    return model(**batch).loss


# The naive federation.


@dataclass
class Turn:
    """One client in one round, with its initial values."""

    model: Any
    number: int
    client: str
    cohort: str
    start: Values


Names = Callable[[Turn], Collection[str]]
"""The names of the values that a client shares, or keeps, in a turn."""
Local = Callable[[Turn, list[str]], Values]
"""Trains the values of these names, and returns all values."""
Serve = Callable[[Values, dict[str, Values]], Values]
"""Returns new global values from the global values and the values that each client sent."""


def start_of(model: Any) -> Values:
    return {name: each.detach().clone() for name, each in model.module.named_parameters()}


def named(*words: str, but: Iterable[str] = ()) -> Names:
    """All names with one of the words and none of `but`."""

    def names(turn: Turn) -> list[str]:
        hits = [name for name in turn.start if any(word in name for word in words)]
        return [name for name in hits if not any(word in name for word in but)]

    return names


def descend(
    turn: Turn,
    trained: Iterable[str],
    steps: int = STEPS,
    pull: Callable[[str, Tensor], Tensor | float] = lambda name, value: 0.0,
    clip: float = 0.0,
) -> Values:
    """SGD on the whole batch. `pull` is added to the gradient; `clip` is its largest norm."""
    values = dict(turn.start)
    for _ in range(steps):
        free = {name: values[name].detach().requires_grad_() for name in trained}
        loss = turn.model.loss({**values, **free}, turn.client)
        slopes = torch.autograd.grad(loss, [*free.values()])
        norm = float(torch.stack([slope.norm() for slope in slopes]).norm())
        scale = clip / (norm + 1e-6) if 0 < clip < norm else 1.0
        for name, slope in zip(free, slopes, strict=True):
            values[name] = values[name] - LR * (scale * slope + pull(name, values[name]))
    return values


def mean(sent: Mapping[str, Values]) -> Values:
    """By name, the mean over the clients that sent it, weighted by their examples."""
    means = Values()
    for name in {name for values in sent.values() for name in values}:
        senders = [client for client in sent if name in sent[client]]
        weights = torch.tensor([SIZES[client] for client in senders]).double()
        stacked = torch.stack([sent[client][name] for client in senders])
        means[name] = torch.tensordot(weights / weights.sum(), stacked, 1)
    return means


def federate(
    model: Any,
    share: Names | None = None,
    keep: Names | None = None,
    local: Local = descend,
    serve: Serve = lambda common, sent: mean(sent),
) -> Result:
    """Run all rounds. By default clients train and share everything, and the server averages."""
    common, own = start_of(model), {client: Values() for client in SIZES}
    for number, cohort in enumerate(COHORTS, 1):
        sent = dict[str, Values]()
        for client in cohort:
            turn = Turn(model, number, client, cohort, common | own[client])
            shared, personal = (share or named(""))(turn), (keep or named())(turn)
            trained = local(turn, [*shared, *personal])
            own[client] |= {name: trained[name] for name in personal}
            sent[client] = {name: trained[name] for name in shared}
        common |= serve(common, sent)
    return common, {client: common | own[client] for client in SIZES}


# The methods.

HEADS, KERNEL = ("pooler", "classifier"), (".query.", ".key.")
MU = 0.5
BASE = named("", but=HEADS)


def proximal(turn: Turn, trained: list[str]) -> Values:
    """FedProx: the gradient pulls to the global model."""
    return descend(turn, trained, pull=lambda n, value: MU * (value - turn.start[n]))


def scaffold(model: Any) -> Result:
    """Option II. The server's control variate is the mean over all clients."""
    zero = {name: 0 * value for name, value in start_of(model).items()}
    control, controls, changes = dict(zero), dict.fromkeys(SIZES, zero), list[Values]()

    def local(turn: Turn, trained: list[str]) -> Values:
        old = controls[turn.client]
        after = descend(turn, trained, pull=lambda n, value: control[n] - old[n])
        new = {n: old[n] - control[n] + (turn.start[n] - after[n]) / (STEPS * LR) for n in old}
        changes.append({n: new[n] - old[n] for n in old})
        controls[turn.client] = new
        return after

    def serve(common: Values, sent: dict[str, Values]) -> Values:
        control.update({n: c + sum(each[n] for each in changes) / 3 for n, c in control.items()})
        changes.clear()
        return mean(sent)

    return federate(model, local=local, serve=serve)


def serve_by(rule: Callable[..., Tensor]) -> Callable[..., Result]:
    """The server adds a function of the mean change and of its state of each value."""

    def version(model: Any) -> Result:
        memory: dict[str, dict[str, Any]] = {name: {} for name in start_of(model)}

        def serve(common: Values, sent: dict[str, Values]) -> Values:
            changes = {n: value - common[n] for n, value in mean(sent).items()}
            return {n: common[n] + rule(each, memory[n]) for n, each in changes.items()}

        return federate(model, serve=serve)

    return version


def heavy_ball(change: Tensor, memory: dict[str, Any]) -> Tensor:
    memory["v"] = 0.9 * memory.get("v", 0.0) + change
    return 0.8 * memory["v"]


def adaptive(change: Tensor, memory: dict[str, Any], yogi: bool = False) -> Tensor:
    memory["m"] = 0.9 * memory.get("m", 0.0) + 0.1 * change
    v, square = memory.get("v", 1e-6 + 0 * change), change**2
    memory["v"] = v - 0.01 * square * (v - square).sign() if yogi else 0.99 * v + 0.01 * square
    return 0.01 * memory["m"] / (memory["v"].sqrt() + 1e-3)


def head_first(turn: Turn, trained: list[str]) -> Values:
    """FedRep: three epochs of the head, then the base."""
    return descend(replace(turn, start=descend(turn, named(*HEADS)(turn), steps=3)), BASE(turn))


def later(first: Names, then: Names, rounds: int = 2) -> Names:
    return lambda turn: (first if turn.number <= rounds else then)(turn)


def one_block(turn: Turn) -> Collection[str]:
    """FedPart: one block in each round, and the head."""
    return named(f"layer.{(turn.number - 1) % 2}.", *HEADS)(turn)


def best(
    k: int, *also: str, joint: bool = False, part: str = "", but: Any = (), whole: int = -1
) -> Names:
    """SAFL: the `k` blocks with the most attention (`joint`: of all clients), and `also`.

    Of these blocks only names with `part` and none of `but`, and the MLP only of the first `whole`.
    """

    def names(turn: Turn) -> list[str]:
        clients = turn.cohort if joint else turn.client
        scores = torch.stack([turn.model.attention(turn.start, each) for each in clients]).sum(0)
        chosen, left = list[str](), [*but]
        for place, block in enumerate(scores.argsort(descending=True)[:k].tolist()):
            left += [".intermediate.", f"{block}.output.dense"] if place >= whole >= 0 else []
            chosen += [n for n in named(f"layer.{block}.", but=left)(turn) if part in n]
        return [*chosen, *named(*also)(turn)]

    return names


def as_unchanged(common: Values, sent: dict[str, Values]) -> Values:
    """SAFL's other mean: a client that did not send a value counts with the global value."""
    names = {name for values in sent.values() for name in values}
    return mean({c: {n: each.get(n, common[n]) for n in names} for c, each in sent.items()})


def by_product(rule: Callable[..., Values]) -> Serve:
    """Means; for LoRA factors A and B a function of the mean of their products."""

    def serve(common: Values, sent: dict[str, Values]) -> Values:
        means = mean(sent)
        pairs = {a: a.replace("lora_A", "lora_B") for a in common if "lora_A" in a}
        products = {c: {a: each[b] @ each[a] for a, b in pairs.items()} for c, each in sent.items()}
        for a, product in mean(products).items():
            means |= rule(common, means, product, a, pairs[a])
        return means

    return serve


def truncated(common: Values, means: Values, product: Tensor, a: str, b: str) -> Values:
    """FlexLoRA: the SVD of the mean. In fedplan both factors get the root of each singular value.

    Signs are arbitrary. Factors whose product is the mean, as after one client's round, are kept.
    """
    if torch.allclose(product, means[b] @ means[a], rtol=0, atol=EXACT):
        return {}
    left, values, right = torch.linalg.svd(product)
    left, roots = left[:, :2], values[:2].sqrt()
    signs = left.gather(0, left.abs().argmax(0, keepdim=True))[0].sign()
    return {b: left * signs * roots, a: (signs * roots)[:, None] * right[:2]}


def residual(common: Values, means: Values, product: Tensor, a: str, b: str) -> Values:
    """FedEx-LoRA adds mean of products minus product of means to the frozen weight."""
    host = a.partition(".lora_A")[0] + ".base_layer.weight"
    return {host: common[host] + product - means[b] @ means[a]}


def adamw_steps(turn: Turn, trained: list[str]) -> Values:
    free = {name: turn.start[name].clone().requires_grad_() for name in trained}
    optimizer = torch.optim.AdamW(free.values(), ADAMW_LR, weight_decay=DECAY)
    for _ in range(STEPS):
        optimizer.zero_grad()
        turn.model.loss({**turn.start, **free}, turn.client).backward()
        optimizer.step()
    return {name: value.detach() for name, value in free.items()}


def case(name: str, *roles: Names, near: float = EXACT, train: Any = SGD, **more: Any) -> Any:
    """A method, its naive version (or `local` and `serve` of `federate`), and its settings."""
    how = {key: more.pop(key) for key in ("local", "serve") if key in more}
    version = more.pop("version", lambda model: federate(model, *roles, **how))
    label = ",".join([name, *(f"{key}={value}" for key, value in more.items())])
    return pytest.param(name, version, near, train, more, id=label)


ALL, NONE, LORA = named(""), named(), named("lora", *HEADS)
HEAD, UNFROZEN, VALUES = named(*HEADS), named("", but=KERNEL), named(".value.", *HEADS)
COMMON, OWN, PROMPTS = named("common"), named(".own", "fusion"), {"text": 2, "vision": 2}
OWN_THEN_HELD = later(OWN, named(".own", "fusion", but=KERNEL))
CLIPPED = {**SGD, "max_grad_norm": 0.5}
CASES = [
    case("fedavg"),
    case("fedprox", local=proximal, mu=MU),
    case("scaffold", version=scaffold),
    case("fedavgm", version=serve_by(heavy_ball), near=FLOAT32, lr=0.8),
    case("fedadam", version=serve_by(adaptive), near=FLOAT32),
    case("fedyogi", version=serve_by(partial(adaptive, yogi=True)), near=FLOAT32),
    case("local-only", NONE, ALL),
    case("fedper", BASE, HEAD),
    case("fedrep", BASE, HEAD, local=head_first, head_epochs=3),
    case("lg-fedavg", HEAD, BASE),
    case("fedbabu", later(BASE, NONE), later(NONE, HEAD), rounds=2),
    case("fedbn", named("", but=["LayerNorm"]), named("LayerNorm")),
    case("fedfrozen", later(ALL, UNFROZEN), warmup=2),
    case("fedfrozen", later(ALL, VALUES), warmup=2, reading="B"),
    case(
        "fedfrozen", later(ALL, UNFROZEN), local=adamw_steps, near=BY_ADAMW, train=ADAMW, warmup=2
    ),
    case("safl", best(1, *HEADS), k=1),
    case("safl", best(1, *HEADS), serve=as_unchanged, k=1, absent=True),
    case("safl", best(1, *HEADS, joint=True), k=1, joint_choice=True),
    case("safl", best(2, *HEADS, whole=1), k=2, whole=1),
    case("safl", best(1, *HEADS), local=partial(descend, clip=0.5), train=CLIPPED, k=1),
    case("bitfit", named(".bias", *HEADS)),
    case("fedpart", one_block, depth=2),
    case("head-only", HEAD),
    case("fedit", LORA, rank=2),
    case("ffa-lora", named("lora_B", *HEADS), rank=2),
    case("fedsa-lora", named("lora_A", *HEADS), named("lora_B"), rank=2),
    case("flexlora", LORA, serve=by_product(truncated), rank=2),
    case("fedex-lora", LORA, serve=by_product(residual), rank=2),
    case("feddpa", named("common", *HEADS), named(".own"), rank=2, own_rank=1),
    case("pfeddc", COMMON, OWN, **PROMPTS, gate=0.5, width=6),
    case("pfeddc", COMMON, OWN, **PROMPTS, fusion="replace"),
    case("pfeddc", COMMON, OWN, **PROMPTS, fusion="sum"),
    case("promptfl", COMMON, text=2),
    case("local-prompts", NONE, OWN, **PROMPTS),
    case("safl-frozen", later(best(1, *HEADS), best(1, *HEADS, but=KERNEL)), k=1, warmup=2),
    case("pfeddc-held", COMMON, OWN_THEN_HELD, **PROMPTS, warmup=2),
    case("fedper-safl", best(1), HEAD, k=1),
    case("safl-lora", best(1, *HEADS, part="lora"), k=1, rank=2),
]
"""Each method with its naive version, tolerance, training arguments and settings."""


class Given(Participation):
    """The clients of COHORTS, round by round."""

    def cohort(self, experiment: str, number: int, roster: list[str]) -> list[str]:
        return [*COHORTS[number - 1]]


def max_difference(ours: Mapping[str, Tensor], naive: Values) -> float:
    return max(float((value - naive[name]).abs().max()) for name, value in ours.items())


@pytest.mark.parametrize(("name", "version", "near", "train", "settings"), CASES)
def test_a_method_is_its_naive_version(
    name: str, version: Any, near: float, train: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    method = method_by_name(name, settings)
    make = Images if "text" in settings else Texts
    model = make(method)
    start, (common, personal) = start_of(model), version(model)

    method, params = replace(method, adapt=None), describe(model.module)
    agreement = Agreement("naive", params, method, TrainArguments(**train))
    how: dict[str, Any] = {"rounds": len(COHORTS), "participation": Given()}
    fed = Federation(agreement, model.module, model.rows, fedplan_loss, tmp_path, **how)
    for _ in COHORTS:
        round_state = fed.run_round()
        assert not round_state.rejected
        fed.commit(round_state)
    assert max_difference(fed.global_values(), common) < near
    for client in SIZES:
        ours, naive = fed.personal_values(client), personal[client]
        assert max_difference(ours, naive) < near < 1e-3 < max_difference(ours, start)
        assert all(n in ours or torch.equal(naive[n], start[n]) for n in naive)


def test_every_method_has_a_naive_version() -> None:
    """In this file, or as a test of its own in test_drift_and_copies.py."""
    beside = (Path(__file__).parent / "test_drift_and_copies.py").read_text()
    there = {name for name in METHODS if f"def test_{name}_is_the_loop_of_the_paper(" in beside}
    assert there | {each.values[0] for each in CASES} == METHODS.keys()


def test_clients_choose_different_blocks() -> None:
    """Otherwise the test of a joint choice would pass with separate choices."""
    model = Texts(method_by_name("safl"))
    scores = torch.stack([model.attention(start_of(model), client) for client in SIZES])
    leads = scores[:, 0] - scores[:, 1]
    assert leads.min() < -1e-3 and leads.max() > 1e-3
