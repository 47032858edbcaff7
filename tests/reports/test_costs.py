# SPDX-License-Identifier: Apache-2.0
"""What a language model costs by LoRA, QLoRA and as a whole: by measured numbers, in two digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run

import fedplan as fp
from fedplan.models.catalog import params_of
from fedplan.models.params import ITEMSIZE
from fedplan.reports.costs import COPIES, LOWEST_RATIO, SUM_BYTES, CostRow, cost_rows
from fedplan.reports.explanation import explain_plan
from fedplan.reports.memory import TrainingStep, estimate_memory

RESULTS = Path(__file__).parents[2] / "research" / "results"
LARGE = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b")


def test_the_servers_memory_is_near_the_measured_peaks() -> None:
    rows = json.loads((RESULTS / "memory-peaks.json").read_text())["rows"]
    servers = [row for row in rows if "server" in row["place"]]
    wholes = [row for row in servers if row["trained_bytes"] == row["model_bytes"]]
    assert len(wholes) >= 2
    for row in wholes:
        itemsize = ITEMSIZE["bfloat16" if "bf16" in row["case"] else "float32"]
        trained = row["trained_bytes"]
        estimated = row["model_bytes"] + COPIES * trained + SUM_BYTES * trained / itemsize
        assert 0.9 < estimated / (row["peak"] * row["model_bytes"]) < 1.1, row


def test_the_lowest_ratio_is_the_one_that_the_documents_report() -> None:
    page = (RESULTS.parent / "pages" / "memory.md").read_text()
    assert f"all of a step, without gradient checkpointing | {LOWEST_RATIO} " in page


@pytest.mark.parametrize("model", LARGE)
def test_lora_that_is_assumed_costs_as_much_as_the_one_of_fedit(model: str) -> None:
    assumed = explain_plan(model, "share()", dtype="bfloat16").costs
    by_method = explain_plan(model, method="fedit", dtype="bfloat16").costs
    assert [row.name for row in assumed] == ["LoRA", "QLoRA", "all of it"]
    assert assumed == by_method


def test_the_rows_are_those_of_explain_by_other_ways() -> None:
    step = TrainingStep(batch_size=4, sequence_length=1024)
    explained = explain_plan("llama-3.2-1b", "share()", dtype="bfloat16", step=step)
    whole = explained.costs[-1]
    (client,) = explained.forecast.clients
    assert whole.client == explained.memory(client)["rounds 1-100"].total
    assert whole.traffic == 2 * explained.forecast.nbytes
    assert whole.seconds == pytest.approx(8 * whole.traffic / 1e8)
    lora, quantized = explained.costs[:2]
    assert lora.traffic == quantized.traffic < whole.traffic / 500
    assert quantized.client < lora.client < whole.client
    assert quantized.server < lora.server < whole.server
    assert explained.json()["costs"][-1] == {
        "name": "all of it",
        "client_bytes_estimated": whole.client,
        "server_bytes_estimated": whole.server,
        "round_bytes": whole.traffic,
        "seconds_at_100_mbit": whole.seconds,
        "fits_gb": {"24": "close", "48": "yes", "80": "yes"},
    }


def test_another_plan_has_a_row_of_its_own_and_a_quantized_model_no_other_than_its() -> None:
    params = params_of("llama-3.2-1b", dtype="bfloat16")
    plan = fp.parse("chain(freeze(), share(last(4)))")
    rows = fp.explain(plan, params).costs
    assert [row.name for row in rows] == ["this plan", "LoRA", "QLoRA", "all of it"]
    roles = fp.resolve(plan, params, fp.Turn())
    assert rows[0].client == estimate_memory(params, roles, TrainingStep()).total
    packed = explain_plan("llama-3.2-1b", method="fedit", dtype="uint8")
    assert [row.name for row in packed.costs] == ["QLoRA"]


def test_only_a_language_model_has_the_table() -> None:
    for model in ("bert-base", "vit-base-16", "clip-vit-base-16"):
        explained = fp.explain(fp.parse("share()"), params_of(model))
        assert explained.costs == () and "Costs" not in str(explained)
    assert cost_rows((), {}, 0, TrainingStep()) == ()


@pytest.mark.parametrize("model", ["vit-base-16", "bert-base"])
def test_a_classifier_of_many_labels_is_no_language_model(model: str) -> None:
    params = params_of(model, task="text-classification" * (model == "bert-base"), labels=1200)
    explained = fp.explain(fp.parse("share()"), params)
    assert explained.costs == ()
    roles = fp.resolve(fp.parse("share()"), params, fp.Turn())
    assert estimate_memory(params, roles, TrainingStep()).logits == 0


def test_a_server_takes_no_step_and_int8_is_not_called_qlora() -> None:
    params = params_of("llama-3.2-1b")
    plan = fp.parse("share()")
    for step in (TrainingStep(autocast=True), TrainingStep(quantized="int8")):
        rows = fp.explain(plan, params, step=step).costs
        plain = fp.explain(plan, params).costs
        assert rows[0].server == plain[0].server and rows[-1].server == plain[-1].server
    assert [row.name for row in rows] == ["LoRA", "LoRA, int8", "all of it"]


def test_a_card_fits_if_the_lowest_measured_estimate_would() -> None:
    assert CostRow("", int(22e9 * LOWEST_RATIO), 0, 0).cards == {24: "yes", 48: "yes", 80: "yes"}
    assert CostRow("", int(22e9), 0, 0).cards == {24: "close", 48: "yes", 80: "yes"}
    assert CostRow("", int(22e9) + 1, 0, 0).cards == {24: "no", 48: "yes", 80: "yes"}
    cells = CostRow("x", 123_456_789_012, 54_321_000, 10**8).cells
    assert cells == ("x", "120", "0.054", "100.0", "8.0 s", "none")


def test_the_command_prints_the_table_last(here: Path) -> None:
    code, out = run("explain", "llama-3.1-8b", "--method", "fedit", "--dtype", "bfloat16")
    assert code == 0
    table = out[out.index("Costs, memory estimated: batch 8, 512 tokens per example, adamw") :]
    assert [line.split()[0] for line in table.splitlines() if line][2:5] == ["LoRA", "QLoRA", "all"]
    assert "nothing was measured on a GPU" in " ".join(table.split())
    code, out = run("explain", "llama-3.1-8b", "--method", "fedit", "--json")
    assert code == 0 and json.loads(out)["costs"][0]["name"] == "LoRA"
