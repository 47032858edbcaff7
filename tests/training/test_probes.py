# SPDX-License-Identifier: Apache-2.0
"""Laws of the probes: formula (1) to the letter, the gradient as it is, and nothing touched."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import clients
import pytest
import torch
import zoo
from attention import fresh, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from torch import Tensor, nn

from fedplan import seeds
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement, require_private_method
from fedplan.language.parser import parse
from fedplan.methods.method import Method
from fedplan.models.description import block_modules, describe
from fedplan.models.params import Block
from fedplan.privacy.guarantee import Guarantee
from fedplan.runners.local import Federation
from fedplan.training import probes
from fedplan.training.fit import TrainArguments
from fedplan.training.probes import Probe, ProbeInput

built = cache(fresh)
judge = cache(zoo.build)

STACK = {"vit": "vision", "deit": "vision"}
STACK |= dict.fromkeys(("llama", "gpt2", "mistral"), "decoder")
PAIRS = ("t5", "bart")
TEXTS = ("bert", "modernbert", "llama", "gpt2", *PAIRS)
TO = ("first", "last", "content", "labelled", "entities")
BY = ("all", "first", "last")


class Padded:
    """Rows of tokens of these lengths, filled up on one side, with label 0 or 1 on some tokens."""

    def __init__(self, lengths: list[int], side: str, pairs: bool = False) -> None:
        size, generator = max(lengths), torch.Generator().manual_seed(sum(lengths))
        steps = torch.arange(size).expand(len(lengths), -1)
        real = steps < torch.tensor(lengths)[:, None]
        real = real if side == "right" else real.flip(1)
        ids = torch.randint(3, 60, real.shape, generator=generator) * real
        labels = torch.where(torch.rand(real.shape, generator=generator) < 0.5, ids % 2, -100)
        self.rows = {"input_ids": ids, "attention_mask": real.long(), "labels": labels}
        if pairs:
            self.rows["decoder_input_ids"] = ids.flip(0)
            self.rows["decoder_attention_mask"] = real.long().flip(0)

    def __len__(self) -> int:
        return len(self.rows["input_ids"])

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {k: v[indices] for k, v in self.rows.items()}


def looking(model: nn.Module, rows: Any, seed: int = 5) -> ProbeInput:
    return ProbeInput(model, rows, tuple(block_modules(model)), seed, clients.loss)


@torch.no_grad()
def returned(name: str, batch: dict[str, Tensor]) -> dict[Block, list[Tensor]]:
    """What the model itself says of its attention: each run of each block."""
    out = judge(name)(**{k: v for k, v in batch.items() if k != "labels"}, output_attentions=True)
    if name in PAIRS:
        stacks = {s: out[f"{s}_attentions"] for s in ("encoder", "decoder")}
    else:
        stacks = {STACK.get(name, "encoder"): out["attentions"]}
    if name == "albert":
        return {Block("encoder", 0): list(stacks["encoder"])}
    return {Block(s, i): [seen] for s, found in stacks.items() for i, seen in enumerate(found)}


def literal(
    seen: Tensor, real: list[bool], labels: list[int], to: str, by: str
) -> tuple[float, int]:
    """Formula (1) on one example, as it is written; and how many rows of probabilities it read."""
    places = [i for i, each in enumerate(real) if each]
    queries = {"all": places, "first": places[:1], "last": places[-1:]}[by]
    keys = {"first": places[:1], "last": places[-1:], "content": places[1:-1]}
    keys["labelled"] = [i for i in places if labels and labels[i] != -100]
    keys["entities"] = [i for i in places if labels and labels[i] == 1]
    alpha, total = seen.tolist(), 0.0
    for head in range(len(alpha)):
        for i in range(len(alpha[head])):
            for j in range(len(alpha[head][i])):
                if i in queries and j in keys[to]:
                    total += alpha[head][i][j]
    return total, len(alpha) * len(queries)


def slow(
    name: str, batch: dict[str, Tensor], to: str, by: str, bounded: bool
) -> dict[Block, float]:
    """The mean of formula (1) over a batch."""
    scores: dict[Block, float] = {}
    for block, runs in returned(name, batch).items():
        rows, causal = len(runs[0]), block.stack == "decoder"
        word = "decoder_attention_mask" if causal and name in PAIRS else "attention_mask"
        mask = batch.get(word, torch.ones(rows, runs[0].shape[2])).bool().tolist()
        labels = batch["labels"].tolist() if "labels" in batch else [[]] * rows
        way = (to or ("content" if causal else "first"), by or ("last" if causal else "all"))
        scores[block] = 0.0
        for row in range(rows):
            found = [literal(seen[row], mask[row], labels[row], *way) for seen in runs]
            total, count = (sum(each) for each in zip(*found, strict=True))
            scores[block] += (total / count if bounded else total) / rows
    return scores


def require_formula(name: str, rows: Any, to: str, by: str, bounded: bool) -> None:
    built(name).config.label2id = {"O": 0, "B": 1}
    found = probes.attention_probe(to, by, bounded=bounded)(looking(built(name), rows))
    truth = slow(name, rows.batch(torch.arange(len(rows))), to, by, bounded)
    assert found == {
        block: pytest.approx(score, abs=1e-6, rel=1e-6) for block, score in truth.items()
    }
    order = sorted(truth, key=truth.__getitem__)
    if all(truth[b] - truth[a] > 1e-5 for a, b in pairwise(order)):
        assert sorted(found, key=found.__getitem__) == order
    assert not bounded or all(0 <= score <= 1 + 1e-6 for score in found.values())


@settings(max_examples=often(60))
@given(
    st.sampled_from(TEXTS),
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["", *TO]),
    st.sampled_from(["", *BY]),
    st.booleans(),
)
def test_attention_is_the_formula(
    name: str, lengths: list[int], side: str, to: str, by: str, bounded: bool
) -> None:
    require_formula(name, Padded(lengths, side, name in PAIRS), to, by, bounded)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("name", ["vit", "deit", "albert", "mistral"])
def test_attention_is_the_formula_without_a_mask(name: str, bounded: bool) -> None:
    for to in ("", "first", "last", "content"):
        for by in ("", *BY):
            require_formula(name, clients.Few(name, 3), to, by, bounded)


def test_a_window_is_a_part_of_its_image() -> None:
    rows = clients.Few("swin", 1, count=3)
    found = probes.attention_probe()(looking(built("swin"), rows))
    with torch.no_grad():
        out = judge("swin")(**rows.batch(torch.arange(3)), output_attentions=True)
    for stage, seen in enumerate(out.attentions):
        truth = seen[..., 0].double().sum().item() / 3
        assert found[Block("vision", 2 * stage + 1)] == pytest.approx(truth, rel=1e-6)
    shares = probes.attention_probe(bounded=True)(looking(built("swin"), rows))
    assert all(0 < score < 1 for score in shares.values())


def test_texts_of_the_model_itself_belong_to_each_example() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = built("clip")
            self.config = self.backbone.config
            self.texts = torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(1))

        def forward(self, pixel_values: Tensor) -> Any:
            return self.backbone(input_ids=self.texts, pixel_values=pixel_values)

    model, rows = Classes(), clients.Few("vit", 1)
    before = trace(model)
    found = probes.attention_probe()(looking(model, rows))
    with torch.no_grad():
        out = judge("clip")(input_ids=model.texts, **rows.rows, output_attentions=True)
    for i, seen in enumerate(out.text_model_output.attentions):
        assert found[Block("text", i)] == pytest.approx(seen[..., 0].sum().item(), rel=1e-5)
    for i, seen in enumerate(out.vision_model_output.attentions):
        assert found[Block("vision", i)] == pytest.approx(seen[..., 0].sum().item() / 4, rel=1e-5)
    assert trace(model) == before


@pytest.mark.parametrize("name", TEXTS)
def test_padding_changes_no_score(name: str) -> None:
    """A row alone, without any padding, has the score that it has among longer ones."""
    lengths = [3, 8, 5]
    rows = Padded(lengths, "right", pairs=False)
    if name in PAIRS:
        rows.rows["decoder_input_ids"] = rows.rows["input_ids"][:, :4] + 1
    alone = []
    for i, length in enumerate(lengths):
        cut = Padded([length], "right")
        cut.rows = {k: v[[i]] for k, v in rows.rows.items()}
        words = ("input_ids", "attention_mask", "labels")
        cut.rows |= {k: cut.rows[k][:, :length] for k in words}
        alone.append(probes.attention_probe()(looking(built(name), cut)))
    found = probes.attention_probe()(looking(built(name), rows))
    for block, score in found.items():
        assert score == pytest.approx(sum(each[block] for each in alone) / 3, rel=1e-5)


@pytest.mark.parametrize("make", [probes.attention_probe, probes.gradient_probe])
def test_in_parts_is_as_at_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Padded([3, 8, 5, 6, 2, 8, 4, 7, 3, 1, 8], "right")
    del rows.rows["labels"]
    look = ProbeInput(built("bert"), rows, tuple(block_modules(built("bert"))), 5, mean_loss)
    scores = []
    for at_once in (64, 8, 3, 1):
        monkeypatch.setattr(probes, "PROBE_BATCH_SIZE", at_once)
        scores.append(make()(look))
    for other in scores[1:]:
        assert other == {b: pytest.approx(s, rel=1e-5) for b, s in scores[0].items()}


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).logits.square().sum(1).mean()


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "t5", "torch", "albert"])
def test_the_gradient_is_that_of_autograd(name: str) -> None:
    rows, model = clients.Few(name, 2, count=5), built(name)
    look = looking(model, rows, seed=9)
    found = probes.gradient_probe(examples=4)(look)
    chosen = torch.randperm(5, generator=seeds.generator("probe", 9))[:4]
    other = fresh(name)
    clients.loss(other, rows.batch(chosen)).backward()
    for block, module in block_modules(other).items():
        every = torch.cat([w.grad.flatten() for w in module.parameters() if w.grad is not None])
        assert found[block] == pytest.approx(every.double().norm().item(), rel=1e-5)
        assert found[block] > 0


ALL: dict[str, Probe] = dict(probes.PROBES)
ALL |= {"fixed": probes.fixed_probe(0), "bounded": probes.attention_probe(bounded=True, examples=2)}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2", "falcon", "clip", "t5", "swin", "torch"])
@pytest.mark.parametrize("which", ALL)
def test_a_probe_touches_nothing_and_says_the_same_again(which: str, name: str, lora: bool) -> None:
    model = (zoo.with_lora(name) if lora else fresh(name)).train()
    next(model.children()).eval()
    next(model.parameters()).requires_grad_(False)
    weight = next(w for w in model.parameters() if w.requires_grad)
    weight.grad = torch.ones_like(weight)
    before, look = trace(model), looking(model, clients.Few(name, 1, count=3))
    scores = ALL[which](look)
    assert trace(model) == before
    assert list(scores) == list(look.blocks)
    torch.manual_seed(77)
    assert ALL[which](look) == scores


def test_an_error_in_the_loss_touches_nothing() -> None:
    model = fresh("bert").train()
    before = trace(model)

    def fails(model: nn.Module, batch: Any) -> Tensor:
        raise ZeroDivisionError

    look = ProbeInput(model, clients.Few("bert", 1), tuple(block_modules(model)), 5, fails)
    with pytest.raises(ZeroDivisionError):
        probes.gradient_probe()(look)
    assert trace(model) == before


def test_the_gradient_needs_no_flag_and_no_mode_of_the_caller() -> None:
    rows, model = clients.Few("bert", 1), fresh("bert")
    scores = probes.gradient_probe()(looking(model, rows))
    model.requires_grad_(False).train()
    with torch.no_grad():
        assert probes.gradient_probe()(looking(model, rows)) == scores


def test_the_rows_looked_at_are_drawn_by_the_seed() -> None:
    rows = clients.Few("bert", 1, count=20)
    looks = [looking(built("bert"), rows, seed) for seed in (1, 2)]
    first, second = (torch.cat(list(look.sample_batches(10))) for look in looks)
    assert len(set(first.tolist())) == 10 and first.tolist() != second.tolist()
    assert [len(each) for each in looks[0].sample_batches(64)] == [8, 8, 4]
    few = probes.attention_probe(examples=2)
    assert few(looks[0]) == few(looks[0]) != few(looks[1])


def test_fixed_are_those_blocks() -> None:
    look = looking(built("t5"), clients.Few("t5", 1))
    assert probes.fixed_probe(1)(look) == {block: float(block.number) for block in look.blocks}
    first, *_ = sorted(look.blocks, key=lambda b: -probes.fixed_probe(1, 0)(look)[b])
    assert first.number == 1
    with pytest.raises(FedplanError, match="no block 7"):
        probes.fixed_probe(0, 7)(look)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_middle_is_that_of_each_stack(count: int) -> None:
    """Four of twelve are blocks 5 to 8 or 4 to 7, whatever other stacks there are."""
    model, rows = built("bert"), clients.Few("bert", 1)
    blocks = tuple(Block(stack, n) for stack in ("encoder", "decoder") for n in range(count))
    found = probes.middle_probe(replace(looking(model, rows), blocks=blocks))
    for stack in ("encoder", "decoder"):
        order = sorted(range(count), key=lambda n: -found[Block(stack, n)])
        assert order[0] == count // 2
        for k in range(1, count + 1):
            assert max(order[:k]) - min(order[:k]) == k - 1


def test_probes_have_names() -> None:
    look = looking(built("bert"), clients.Few("bert", 1))
    assert probes.get_probe("last")(look) == probes.last_probe(look)
    assert probes.get_probe("middle")(look) == probes.middle_probe(look)
    assert probes.get_probe("random")(look) == probes.random_probe(look)
    assert probes.get_probe("attention")(look) == probes.attention_probe()(look)
    with pytest.raises(FedplanError, match="did you mean attention"):
        probes.get_probe("attentoin")


def test_what_cannot_be_scored_is_an_error() -> None:
    model, rows = fresh("bert"), clients.Few("bert", 1)
    with pytest.raises(FedplanError, match="use first, last, content, labelled"):
        probes.attention_probe(to="cls")
    with pytest.raises(FedplanError, match="use all, first, last"):
        probes.attention_probe(by="everyone")
    with pytest.raises(FedplanError, match="a label for each token"):
        probes.attention_probe(to="labelled")(looking(model, rows))
    with pytest.raises(FedplanError, match='needs a model with the label "O"'):
        probes.attention_probe(to="entities")(looking(fresh("bert"), Padded([3], "right")))
    with pytest.raises(FedplanError, match="the client has none"):
        probes.attention_probe()(looking(model, clients.Few("bert", 1, count=0)))
    attend = model.bert.encoder.layer[1].attention
    attend.register_forward_hook(lambda _, __, out: (out[0], None))
    with pytest.raises(FedplanError, match="encoder block 1 gives no attention"):
        probes.attention_probe()(looking(model, rows))


def test_who_does_not_say_that_he_is_public_looks_at_rows() -> None:
    """A closed list once said who is: a probe of the user could not be."""
    said = {name for name, probe in ALL.items() if probes.is_data_independent(probe)}
    assert said == {"random", "last", "middle", "fixed"}

    def own(look: ProbeInput) -> dict[Block, float]:
        return dict.fromkeys(look.blocks, 1.0)

    assert not probes.is_data_independent(own) and not probes.is_data_independent(
        lambda look: own(look)
    )
    assert probes.is_data_independent(probes.data_independent(own))


def test_a_public_probe_is_given_no_rows_whatever_it_says_of_itself(tmp_path: Path) -> None:
    @probes.data_independent
    def honest(look: ProbeInput) -> dict[Block, float]:
        return {block: -float(block.number) for block in look.blocks}

    @probes.data_independent
    def lying(look: ProbeInput) -> dict[Block, float]:
        return {block: float(look.examples.batch(torch.tensor([0]))["x"]) for block in look.blocks}

    def asked(probe: Probe, together: bool) -> None:
        model, place = fresh("bert"), tmp_path / f"{probe.__name__}-{together}"
        method = Method(parse("chain(freeze(), best(1))"), probe=probe, joint_choice=together)
        require_private_method(Guarantee("client", 9.0, 1e-5, 1.0, 1.0), method)
        agreement = Agreement(
            "public", describe(model), method, TrainArguments(batch_size=2, steps=1)
        )
        Federation(agreement, model, clients.few("bert"), clients.loss, place, rounds=1).run_round()

    for together in (False, True):
        asked(honest, together)
        with pytest.raises(FedplanError, match="marked as data_independent loaded examples"):
            asked(lying, together)
