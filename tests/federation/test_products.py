# SPDX-License-Identifier: Apache-2.0
"""Exact LoRA: the mean of products, what each rule makes of it, and the error that is told."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
import zoo
from clients import Few, few, loss
from torch import Tensor, nn

from fedplan.audits.ledger import verify_ledger
from fedplan.data.custom_task import CustomTask
from fedplan.errors import FedplanError, PrivacyError
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.protocol import AggregationResult
from fedplan.federation.agreement import Agreement, require_private_method
from fedplan.federation.global_state import GlobalState
from fedplan.language.parser import parse, parse_part
from fedplan.language.plan import share
from fedplan.methods import (
    Method,
    ProductRule,
    adam,
    average_separately,
    by_residual,
    by_svd,
    method_by_name,
)
from fedplan.methods.adapters import add_lora
from fedplan.methods.lora import lora_layers, parse_product_rule
from fedplan.models.description import describe
from fedplan.models.values import get_values, set_values
from fedplan.privacy.guarantee import Guarantee
from fedplan.runners.local import Federation
from fedplan.storage import files
from fedplan.storage.append_log import read_json_lines
from fedplan.studies.model_builder import add_method_adapter as checked
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.named import digests
from fedplan.training import TrainArguments, sgd

RULES = {"apart": average_separately(), "svd": by_svd(), "residual": by_residual()}
ON = "query | value"
PACE = TrainArguments(lr=0.05, batch_size=2, steps=3)


def lora(architecture: str, rank: int = 2, on: str = ON, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return add_lora(zoo.build(architecture), rank=rank, on=parse_part(on))


def agreed(model: nn.Module, rule: ProductRule) -> Agreement:
    plan = parse("chain(freeze(), share(adapter))")
    return Agreement("products", describe(model), Method(plan, lora_aggregation=rule), PACE)


def sent(agreement: Agreement, seed: int) -> dict[str, Tensor]:
    """What a client might send: both sides away from zero."""
    generator = torch.Generator().manual_seed(seed)
    sides = (p for layer in agreement.layers for p in layer.factors)
    return {p.key: torch.randn(p.shape, generator=generator) / 4 for p in sides}


def closed(
    agreement: Agreement, model: nn.Module, updates: list[dict[str, Tensor]]
) -> AggregationResult:
    global_state = GlobalState.initial(agreement, get_values(model, agreement.params))
    total = MeanAggregator(agreement, global_state.values, len(updates))
    for i, update in enumerate(updates):
        total.require(update, {}, i + 1)
        total.add(f"client-{i}", update, {}, i + 1)
    return total.close()


def effective(agreement: Agreement, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weight of each layer with its product added, from the definition."""
    return {
        layer.name: layer.host_weight(values).double()
        + layer.concat_b(values).double() @ values[layer.a.key].double()
        for layer in agreement.layers
    }


def mean_effective(
    agreement: Agreement, start: Mapping[str, Tensor], updates: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    whole = sum(range(1, len(updates) + 1))
    each = [effective(agreement, {**start, **update}) for update in updates]
    return {k: sum((i + 1) * e[k] for i, e in enumerate(each)) / whole for k in each[0]}  # pyright: ignore


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "gpt-neox", "phi3", "llama", "clip"])
def test_folded_residuals_make_the_world_the_mean_of_the_clients(architecture: str) -> None:
    """The effective weight of each layer is the mean of the clients', to rounding, in any layout."""
    model = lora(architecture)
    agreement, start = agreed(model, by_residual()), get_values(model, describe(model))
    updates = [sent(agreement, seed) for seed in range(3)]
    outcome = closed(agreement, model, updates)
    found = effective(agreement, {**start, **outcome.means})
    for name, expected in mean_effective(agreement, start, updates).items():
        assert torch.allclose(found[name], expected, rtol=0, atol=1e-6), name
    assert outcome.products is not None
    plain, made = outcome.products
    assert plain > 0.1 and made < 1e-5


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "gpt-neox"])
def test_a_folded_weight_does_what_the_mean_of_the_clients_would(architecture: str) -> None:
    """Behaviour, not names: with sides at zero the model of folded weights is the merged mean."""
    model = lora(architecture)
    agreement, start = agreed(model, by_residual()), get_values(model, describe(model))
    updates = [sent(agreement, seed) for seed in range(2)]
    outcome = closed(agreement, model, updates)
    set_values(model, {**start, **outcome.means}, agreement.params)
    merged = copy.deepcopy(model).merge_and_unload()  # pyright: ignore
    for update, weight in zip(updates, (1 / 3, 2 / 3), strict=True):
        set_values(model, {**start, **update}, agreement.params)
        one = dict(copy.deepcopy(model).merge_and_unload().named_parameters())  # pyright: ignore
        with torch.no_grad():
            for name, tensor in merged.named_parameters():
                tensor -= weight * one[name]
    for name, left in merged.named_parameters():
        assert left.abs().max() < 1e-6, name


@pytest.mark.parametrize("rule", RULES)
def test_one_client_alone_is_the_plain_rule(rule: str) -> None:
    model = lora("bert")
    agreement = agreed(model, RULES[rule])
    outcome = closed(agreement, model, [sent(agreement, 1)])
    plain = closed(agreed(model, average_separately()), model, [sent(agreement, 1)])
    assert digests(outcome.means) == digests(plain.means) and outcome.products == (0.0, 0.0)


@pytest.mark.parametrize("rule", RULES)
def test_with_equal_input_sides_the_plain_rule_is_exact(rule: str) -> None:
    """FFA-LoRA's law: what all have alike can be drawn out of the mean."""
    model = lora("bert")
    agreement = agreed(model, RULES[rule])
    inputs = {layer.a.key for layer in agreement.layers}
    first = {k: v for k, v in sent(agreement, 0).items() if k in inputs}
    outcome = closed(agreement, model, [{**sent(agreement, s), **first} for s in range(3)])
    assert outcome.products == (0.0, 0.0)


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_clients_changes_no_bit(rule: str) -> None:
    model = lora("gpt-neox")
    agreement = agreed(model, RULES[rule])
    global_state = GlobalState.initial(agreement, get_values(model, agreement.params))
    found = set[str]()
    for order in permutations(range(3)):
        total = MeanAggregator(agreement, global_state.values, 3)
        for i in order:
            total.add(f"client-{i}", sent(agreement, i), {}, i + 1)
        outcome = total.close()
        found.add(str((sorted(digests(outcome.means).items()), outcome.products)))
    assert len(found) == 1


@pytest.mark.parametrize("architecture", ["bert", "gpt-neox"])
def test_svd_at_a_rank_that_holds_all_is_the_mean_product(architecture: str) -> None:
    """Two clients of rank 2 within 8 have a mean product of rank 4: nothing is cut away."""
    model = lora(architecture, rank=8)
    agreement = agreed(model, by_svd())
    updates = [sent(agreement, seed) for seed in range(2)]
    for update in updates:
        for layer in agreement.layers:
            update[layer.a.key][2:] = 0
    outcome = closed(agreement, model, updates)
    assert outcome.products is not None and outcome.products[1] < 1e-6 < outcome.products[0]
    for layer in agreement.layers:
        product = sum(
            (i + 1) / 3 * layer.concat_b(u).double() @ u[layer.a.key].double()
            for i, u in enumerate(updates)
        )
        made = layer.concat_b(outcome.means).double() @ outcome.means[layer.a.key].double()
        assert torch.allclose(made, product, rtol=0, atol=1e-6)  # pyright: ignore
        # Balanced: both sides have the same lengths, and what is dead on one is not on the other.
        rows = outcome.means[layer.a.key].norm(dim=1)
        columns = layer.concat_b(outcome.means).norm(dim=0)
        assert torch.allclose(rows[:4], columns[:4], rtol=1e-4) and bool((rows > 0.1).all())
        assert float(columns[4:].abs().max()) == 0.0


def test_svd_below_that_rank_is_the_nearest_and_is_said_to_be_inexact() -> None:
    model = lora("bert", rank=2)
    updates = [sent(agreed(model, by_svd()), seed) for seed in range(3)]
    made = closed(agreed(model, by_svd()), model, updates).products
    plain = closed(agreed(model, average_separately()), model, updates).products
    assert made is not None and plain is not None
    assert 0 < made[1] < made[0] == plain[0] == plain[1]


def test_one_side_alone_is_rejected_where_a_product_is_needed() -> None:
    model = lora("bert")
    agreement = agreed(model, by_svd())
    global_state = GlobalState.initial(agreement, get_values(model, agreement.params))
    update = sent(agreement, 0)
    del update[agreement.layers[0].a.key]
    total = MeanAggregator(agreement, global_state.values, 2)
    with pytest.raises(FedplanError, match=r"one side of .*query without the other"):
        total.require(update, {}, 1)


def test_a_product_too_large_to_add_leaves_the_sum_as_it_was() -> None:
    model = lora("bert")
    agreement = agreed(model, by_svd())
    global_state = GlobalState.initial(agreement, get_values(model, agreement.params))
    total = MeanAggregator(agreement, global_state.values, 2)
    total.add("a", sent(agreement, 0), {}, 1)
    with pytest.raises(FedplanError):
        total.add("b", {k: v * 2.0**30 for k, v in sent(agreement, 1).items()}, {}, 1)
    alone = closed(agreement, model, [sent(agreement, 0)])
    assert digests(total.close().means) == digests(alone.means)


REFUSED = {
    "compression": {"compression": parse_codec("pipe(delta(), bf16())")},
    "a server optimizer": {"server_optimizer": adam()},
    "absent counts": {"absent": True},
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("name", ["flexlora", "fedex-lora"])
def test_what_would_undo_the_promise_is_refused(why: str, name: str) -> None:
    with pytest.raises(FedplanError, match=f"would not be exact: {why}"):
        replace(method_by_name(name), **REFUSED[why])  # pyright: ignore


def test_clients_are_not_hidden_where_each_is_multiplied() -> None:
    hidden = Guarantee("client", 8.0, 1e-5, 1.0, 1.0)
    require_private_method(hidden, method_by_name("fedit"))
    require_private_method(
        replace(hidden, unit="example", sampling_rate=0.5, steps=2, batch_size=2),
        method_by_name("flexlora"),
    )
    with pytest.raises(PrivacyError, match="multiplies each client's update"):
        require_private_method(hidden, method_by_name("flexlora"))


@pytest.mark.parametrize(
    ("plan", "architecture", "on", "words"),
    [
        ("chain(freeze(), share(head))", "bert", ON, "shares none of them"),
        ("chain(freeze(), share(lora_a))", "bert", ON, "needs both sides of .*lora_B"),
        ("chain(freeze(), share(adapter | value))", "bert", ON, "gives it to the clients"),
        ("chain(freeze(), share(adapter))", "gpt2", "out", "cannot tell the layout"),
    ],
)
def test_a_plan_that_a_rule_cannot_follow_is_refused(
    plan: str, architecture: str, on: str, words: str
) -> None:
    params = describe(lora(architecture, on=on))
    with pytest.raises(FedplanError, match=words):
        Agreement("products", params, Method(parse(plan), lora_aggregation=by_residual()), PACE)


def test_a_weight_that_would_round_the_residual_away_is_refused() -> None:
    model = lora("bert").to(torch.bfloat16)
    with pytest.raises(FedplanError, match=r"bfloat16 and would round them away.*by_svd"):
        agreed(model, by_residual())
    agreed(model, by_svd())


def test_another_scale_than_the_adapters_is_refused() -> None:
    model = lora("bert")
    for rule in (by_residual(), by_svd()):
        checked(model, CustomTask(), Method(share(), lora_aggregation=rule))
    with pytest.raises(FedplanError, match=r"folds LoRA products at another scale .*LoRA .1.0"):
        checked(model, CustomTask(), Method(share(), lora_aggregation=by_residual(2.0)))


def test_a_rule_is_what_its_text_says() -> None:
    for rule in (*RULES.values(), by_residual(0.5)):
        assert parse_product_rule(rule.text) == rule
    with pytest.raises(FedplanError, match="there is no product rule 'by_guess"):
        parse_product_rule("by_guess()")


def test_what_is_more_than_a_product_is_no_low_rank_layer() -> None:
    import peft

    model = zoo.build("bert")
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=["query"])
    assert not lora_layers(describe(peft.get_peft_model(model, config)))  # pyright: ignore


def played(folder: Path, method: Method, *, rounds: int = 3, **more: object) -> Federation:
    torch.manual_seed(0)
    assert method.adapt is not None
    model = method.adapt(zoo.build("bert"))
    agreement = Agreement("products", describe(model), method, PACE)
    folder.mkdir(exist_ok=True)
    federation = Federation(agreement, model, few("bert", 3), loss, folder, rounds=rounds, **more)  # pyright: ignore
    while federation.global_state.round < rounds:
        federation.commit(federation.run_round())
    return federation


@pytest.mark.parametrize("name", ["fedit", "flexlora", "fedex-lora"])
def test_the_ledger_tells_the_error_and_stays_sound(name: str, tmp_path: Path) -> None:
    federation = played(tmp_path, method_by_name(name, {"rank": 2}))
    lines = read_json_lines(tmp_path / "ledger.jsonl")
    assert not verify_ledger(federation.agreement, lines)
    errors = [line["products"] for line in lines if line["kind"] == "round"]
    assert len(errors) == 3 and all(plain > 1e-4 for plain, _ in errors)
    for plain, made in errors:
        assert made == plain if name == "fedit" else made < plain
        assert name != "fedex-lora" or made < 1e-4


@pytest.mark.parametrize("name", ["ffa-lora", "fedsa-lora", "fedavg"])
def test_who_shares_one_side_has_no_error_to_tell(name: str, tmp_path: Path) -> None:
    method = method_by_name(name)
    method = method if method.adapt else replace(method, adapt=zoo_as_it_is)
    played(tmp_path, method, rounds=1)
    lines = read_json_lines(tmp_path / "ledger.jsonl")
    assert not any("products" in line for line in lines)


def zoo_as_it_is(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize("name", ["flexlora", "fedex-lora"])
@pytest.mark.parametrize("point", ["round.pulled", "round.before_close", "round.before_commit"])
def test_a_kill_in_mid_round_changes_no_bit(
    name: str, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_by_name(name, {"rank": 2})
    whole = played(tmp_path / "whole", method)
    files.reset_failpoints()
    monkeypatch.setenv(files.VARIABLE, f"{point}:raise@2")
    with pytest.raises(OSError, match=point):
        played(tmp_path / "killed", method)
    monkeypatch.delenv(files.VARIABLE)
    again = played(tmp_path / "killed", method)
    assert digests(again.global_state.values) == digests(whole.global_state.values)
    texts = [(tmp_path / each / "ledger.jsonl").read_text() for each in ("whole", "killed")]
    assert texts[0] == texts[1]


def test_a_newcomer_gets_the_folded_weights_once_they_moved(tmp_path: Path) -> None:
    """They do not travel at first contact: both ends start with them; then they are counted."""
    federation = played(tmp_path, method_by_name("fedex-lora", {"rank": 2}), rounds=2)
    server_merged = {p.key for p in federation.agreement.server_merged}
    assert server_merged and {federation.global_state.versions[k] for k in server_merged} == {2}
    turns = [x for x in read_json_lines(tmp_path / "ledger.jsonl") if x["kind"] == "turn"]
    sizes = federation.agreement.download_bytes
    sides = sum(n for k, n in sizes.items() if k not in server_merged)
    assert {t["download_bytes"] for t in turns if t["round"] == 1} == {sides}
    assert {t["download_bytes"] for t in turns if t["round"] == 2} == {sum(sizes.values())}


def test_a_client_of_lower_rank_trains_the_first_directions_alone(tmp_path: Path) -> None:
    method = method_by_name("flexlora", {"rank": 4, "trait": "rank"})
    traits = {"client-0": {"rank": "1"}, "client-1": {"rank": "2"}}
    federation = played(tmp_path, method, traits=traits, keep_replies=True)
    layer = federation.agreement.layers[0]
    for name, rank in (("client-0", 1), ("client-1", 2), ("client-2", 4)):
        journal = federation.clients[name].journal
        answered = journal.reply_for(federation.agreement.request_name(3, name))
        assert answered is not None
        values = answered[0]
        product = layer.concat_b(values).double() @ values[layer.a.key].double()
        assert torch.linalg.matrix_rank(product, rtol=1e-5) == rank
        assert not values[layer.a.key][rank:].any() and not layer.concat_b(values)[:, rank:].any()
    assert layer.concat_b(federation.global_state.values)[:, 3].any()
    assert not verify_ledger(federation.agreement, read_json_lines(tmp_path / "ledger.jsonl"))


@pytest.mark.parametrize("said", ["none", "0", "5"])
def test_a_rank_that_is_none_is_an_error_that_helps(said: str, tmp_path: Path) -> None:
    method = method_by_name("flexlora", {"rank": 4, "trait": "rank"})
    with pytest.raises(FedplanError, match="give a rank from 1 to 4"):
        played(tmp_path, method, traits={"client-0": {"rank": said}})


def test_an_optimizer_that_moves_the_rest_is_caught(tmp_path: Path) -> None:
    from fedplan.methods import lora as ranks
    from fedplan.training.fit import FitResult, Job

    def restless(job: Job) -> FitResult:
        with torch.no_grad():
            for p in job.model.parameters():
                p.add_(1.0)
        return FitResult(0.0, 1)

    model = lora("bert", rank=4)
    params = describe(model)
    from fedplan.language.predicates import Turn
    from fedplan.language.resolution import resolve

    roles = resolve(parse("chain(freeze(), share(adapter))"), params, Turn(1, "a"))
    job = Job(
        model, roles, Few("bert", 0), loss, TrainArguments(sgd()), 0, {}, traits={"rank": "2"}
    )
    with pytest.raises(FedplanError, match="trained beyond rank 2"):
        ranks.train_at_client_rank()(restless)(job)
