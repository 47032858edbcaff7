# SPDX-License-Identifier: Apache-2.0
"""What fedplan can and cannot do: one table, each row with its tests.

`python docs/capabilities.py` writes docs/limits.md, docs/coming-from.md and the README's table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
START, END = "<!-- capabilities: python docs/capabilities.py -->", "<!-- end -->"
"""The README's table stands between these two lines."""


@dataclass(frozen=True)
class Capability:
    """One thing a user may need.

    `answer` is yes, partly or no. `how` names the command, field or page for yes and partly, and the
    limit for no. `tests` are test functions as `file::name`, below tests/. `refused` is an override
    of a study that fedplan must reject, for answers of no that a study could ask for. `elsewhere`
    names tools that do it. `readme` is the line of the README's table, if it is in it.
    """

    need: str
    answer: str
    how: str
    tests: tuple[str, ...] = ()
    refused: str = ""
    elsewhere: str = ""
    readme: str = ""


CAPABILITIES = (
    Capability(
        "Any `nn.Module`; layer maps for 104 Hugging Face model types",
        "yes",
        "[models](how-to/models.md)",
        ("models/test_description.py::test_each_number_is_in_exactly_one_param_under_lora",),
        readme="models",
    ),
    Capability(
        "Classification of text, images, tokens and image-text pairs; regression; language models; chat",
        "yes",
        "[data and tasks](how-to/data.md)",
        ("studies/test_kinds_run.py::test_a_chat_model_is_tuned_exported_and_answers",),
        readme="tasks",
    ),
    Capability(
        "LoRA and other peft adapters, 4-bit and 8-bit base models",
        "yes",
        "[models](how-to/models.md)",
        ("studies/test_model.py::test_qlora_sends_its_adapter_and_nothing_else",),
        readme="models",
    ),
    Capability(
        "A Hugging Face `Trainer`, TRL's for SFT, DPO, KTO, reward models and GRPO, or your own loop",
        "yes",
        "[your own code](how-to/own-code.md)",
        (
            "training/test_loops.py::test_a_trainer_of_trl_follows_a_plan",
            "training/test_trl.py::test_a_trainer_of_trl_trains_what_the_plan_names_on_rows",
        ),
        readme="training",
    ),
    Capability(
        "Personal models: each client keeps parts of the model",
        "yes",
        "[plans](explanation/plans.md)",
        ("studies/test_export.py::test_an_exported_classifier_is_the_clients_own",),
        readme="methods",
    ),
    Capability(
        "34 published methods, which combine",
        "yes",
        "[methods](explanation/methods.md)",
        (
            "federation/test_masked.py::test_every_method_that_shares_gives_the_bits_of_the_plain_sum",
        ),
        readme="methods",
    ),
    Capability(
        "One process, a process pool or Ray, with the same bits",
        "yes",
        "[workers](how-to/workers.md)",
        ("golden/test_golden.py::test_pool",),
        readme="runners",
    ),
    Capability(
        "Real sites over Flower, with TLS and a key for each site",
        "yes",
        "[three sites](tutorials/three-sites.md)",
        ("runners/test_walkthrough.py::*",),
        readme="runners",
    ),
    Capability(
        "Trees of servers: edges that sum the updates of their sites, with the same bits",
        "yes",
        "[edges](explanation/scale.md#edges)",
        (
            "federation/test_trees.py::test_any_tree_leaves_the_bits_and_the_ledger_of_the_flat_federation",
        ),
    ),
    Capability(
        "Kill any process at any time and resume with the same bits",
        "yes",
        "[the round](explanation/round.md)",
        ("federation/test_resume.py::test_killed_at_a_random_moment",),
        readme="runners",
    ),
    Capability(
        "Each site approves each study and limits what leaves",
        "yes",
        "[approve](how-to/approve.md)",
        ("sites/test_approvals.py::test_a_study_waits_is_approved_and_can_be_withdrawn",),
        readme="privacy",
    ),
    Capability(
        "Check and count the sites' data before training, without small counts",
        "yes",
        "[statistics](how-to/statistics.md): counts by a data dictionary, without noise",
        ("sites/test_statistics.py::test_no_small_cell_can_be_computed_by_one_who_knows_the_rule",),
    ),
    Capability(
        "Client-level and example-level differential privacy with an accountant",
        "yes",
        "[privacy](how-to/privacy.md)",
        ("privacy/test_vote.py::test_no_audit_passes_the_epsilon_of_a_vote",),
        readme="privacy",
    ),
    Capability(
        "Secure aggregation: the server learns sums and no single update",
        "yes",
        "[secure aggregation](how-to/secure-aggregation.md)",
        ("federation/test_masked.py::test_a_masked_sum_closes_as_the_plain_sum_of_what_is_open",),
        readme="privacy",
    ),
    Capability(
        "Robust aggregation: median, trimmed mean, Krum, caps on weights",
        "partly",
        "[defence](how-to/defence.md); not together with secure aggregation or client-level privacy",
        ("federation/test_robust.py::test_krum_takes_nothing_of_who_is_far",),
        readme="limit",
    ),
    Capability(
        "Clients of different size",
        "partly",
        "parts of one model and LoRA ranks per client; all clients share one architecture",
        ("federation/test_products.py::*",),
        elsewhere="HtFLlib",
        readme="limit",
    ),
    Capability(
        "GPUs",
        "partly",
        '`device = "cuda"`; tests ran on a simulated second device, never on a real GPU',
        ("devices/test_devices.py::*",),
        readme="limit",
    ),
    Capability(
        "Several GPUs for one client",
        "partly",
        "[`devices_per_client`](how-to/training.md#several-gpus-for-one-client): each holds the whole "
        "model, none a part of it (FSDP); tested with two processes on a CPU",
        ("training/test_ranks.py::test_two_ranks_train_as_one",),
    ),
    Capability(
        "Hundreds of real sites",
        "partly",
        "computed from unit costs in [scale](explanation/scale.md); not run",
        ("federation/test_many.py::*",),
    ),
    Capability(
        "Pretraining of large models",
        "partly",
        "nothing forbids it; nobody tried",
        elsewhere="Photon",
    ),
    Capability(
        "Homomorphic encryption",
        "no",
        "secure aggregation uses pairwise masks",
        refused='aggregation.kind="homomorphic"',
        elsewhere="NVFlare, FATE",
        readme="limit",
    ),
    Capability(
        "Asynchronous rounds",
        "no",
        "a round closes before the next begins",
        refused="clients.asynchronous=true",
        elsewhere="FLGo, APPFL",
        readme="limit",
    ),
    Capability(
        "Vertical federated learning (features of one person at several parties)",
        "no",
        "each client has whole examples",
        refused='data.partition="vertical"',
        elsewhere="FATE, NVFlare",
        readme="limit",
    ),
    Capability(
        "Trees, SQL, survival models",
        "no",
        "`nn.Module` only",
        refused='task.kind="survival"',
        elsewhere="NVFlare, Flower, Fed-BioMed",
        readme="limit",
    ),
    Capability(
        "Phones and browsers as clients",
        "no",
        "a client runs Python and torch",
        refused='device="android"',
        elsewhere="Flower's SDKs, FedML",
        readme="limit",
    ),
    Capability(
        "Scores of generated text (ROUGE, BLEU)",
        "no",
        "scores compare tokens with the reference; evaluate the exported model",
        refused='evaluate.metrics=["rouge"]',
    ),
)

PEERS = {
    "Flower": (
        ("`Strategy`, such as `FedAvg`", "`method.name`, and `method.server_optimizer`"),
        ("`ClientApp` with `@app.train()`", "not needed; your own loop with `fp.attach`"),
        ("`fraction_train`", "`clients.fraction`"),
        ("`min_available_nodes`", "`clients.min_updates`"),
        ("`num-server-rounds`", "`train.rounds`"),
        ("`run_config`, `--run-config`", "the study file, `--set`"),
        (
            "partitioners of `flwr-datasets`",
            "`data.partition`: iid, dirichlet, pathological, column",
        ),
        ("`context.state`", "`keep(part)`; the values survive the process"),
        ("`requires_grad = False` in your loop", "`freeze(part)`: not trained, not sent, verified"),
        ("mods for clipping and noise", "`[privacy]`, with an accountant"),
        ("SecAgg+", '`aggregation.kind = "secure"`, for partial updates too'),
        ("`flwr run`, `flwr stop`, `flwr log`", "`fedplan run`, `fedplan stop`, `fedplan logs`"),
    ),
    "Hugging Face Trainer": (
        ("`learning_rate`", "`train.lr`"),
        ("`per_device_train_batch_size`", "`train.batch_size`"),
        ("`num_train_epochs`, `max_steps`", "`train.epochs`, `train.steps`, per round and client"),
        ("`lr_scheduler_type`, `warmup_ratio`", "`train.lr_scheduler`, `train.warmup`"),
        ("`bf16`, `fp16`", '`train.precision = "bf16"` or `"fp16"`'),
        ("`load_best_model_at_end`", '`evaluate.keep_best = "global"`'),
        ("`EarlyStoppingCallback`", "`[early_stopping]`"),
        ("`report_to`", "`evaluate.trackers`"),
        ("`output_dir`, `resume_from_checkpoint`", "`--output`, `--resume`"),
        ("a `Trainer` of your own", "`method.loop`, see how-to/own-code.md"),
    ),
    "NVFlare": (
        ("a job, or a recipe such as `FedAvgRecipe`", "a study file"),
        ("`num_rounds`, `min_clients`", "`train.rounds`, `clients.min_updates`"),
        ("`flare.receive()`, `flare.send()`", "not needed; your own loop with `fp.attach`"),
        ("filters such as `ExcludeVars`", "`keep(part)`, `freeze(part)`"),
        ("`nvflare simulator`", "`fedplan run`"),
        ("`nvflare provision`, startup kits", "`fedplan new federation`, `fedplan site keys`"),
        ("admin console", "`fedplan status`, `stop`, `logs`"),
        ("site policies", "`policy.toml`, and a person who approves each study"),
    ),
    "PFLlib": (
        ("`-algo FedPer`", '`method.name = "fedper"`'),
        (
            "`-gr 100`, `-ls 1`, `-lbs 10`, `-lr 0.005`",
            "`train.rounds`, `epochs`, `batch_size`, `lr`",
        ),
        (
            "`-nc 20`, `-jr 0.5`, `-cdr 0.1`",
            "`data.num_clients`, `clients.fraction`, `clients.dropout_fraction`",
        ),
        ("`-eg 1`", "`evaluate.every = 1`"),
        ("`generate_Cifar10.py noniid - dir`", '`data.partition = "dirichlet"`, `data.alpha`'),
        ("`BaseHeadSplit(model, head)`", "`keep(head)`; fedplan finds the head"),
        ("`-t 3`", "`fedplan sweep study.toml --seeds 3`"),
    ),
    "pfl": (
        ("`FederatedAveraging().run(...)`", "`fp.simulate(fp.methods.fedavg(), ...)`"),
        ("`central_num_iterations`, `evaluation_frequency`", "`train.rounds`, `evaluate.every`"),
        ("`train_cohort_size`", "`clients.fraction` (a fraction, not a number)"),
        (
            "`local_num_epochs`, `local_learning_rate`, `local_batch_size`",
            "`train.epochs`, `lr`, `batch_size`",
        ),
        ("`CentralEvaluationCallback`", "`test=` in Python, `data.test_path` or `data.test_split`"),
        (
            "`CentrallyAppliedPrivacyMechanism(GaussianMechanism)`",
            '`[privacy]` with `unit = "client"`',
        ),
        ("`SimulatedBackend` with Horovod", "`--runner pool` or `ray`"),
    ),
    "Opacus": (
        (
            "`noise_multiplier`, `max_grad_norm`",
            "`privacy.noise_multiplier`, `privacy.clipping_norm`",
        ),
        ("`target_epsilon`, `target_delta`", "`privacy.epsilon`, `privacy.delta`"),
        ("`PrivacyEngine.make_private`", '`[privacy]` with `unit = "example"`'),
        ("`engine.get_epsilon`", "`fedplan privacy RUN`: `epsilon_spent`"),
    ),
}
"""What users of other tools type, and the same thing here."""


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(row: Capability, prefix: str = "") -> tuple[str, str, str]:
    how = row.how.replace("](", f"]({prefix}")
    return row.need, row.answer, how + (f"; instead: {row.elsewhere}" if row.elsewhere else "")


def readme_table() -> str:
    """The rows of the README."""
    lines = dict[str, list[str]]()
    for row in CAPABILITIES:
        how = row.how.replace("](", "](docs/")
        if row.readme and row.answer == "yes":
            lines.setdefault(row.readme, []).append(f"{row.need} ({how})")
        elif row.readme:
            limit = f": {how}" if row.answer == "partly" else ""
            lines.setdefault(row.answer, []).append(row.need + limit.replace(";", ","))
    lines["no"][-1] += " ([limits](docs/limits.md))"
    order = [*(name for name in lines if name not in ("partly", "no")), "partly", "no"]
    return table(("", "supported"), [(name, ". ".join(lines[name])) for name in order])


def limits_page() -> str:
    """docs/limits.md."""
    groups = {"no": "Not supported", "partly": "Partly supported", "yes": "Supported"}
    text = (
        "<!-- Made by docs/capabilities.py. -->\n\n# What fedplan can and cannot do\n\n"
        "For everybody who decides whether fedplan fits a project. Each row of the first two tables is a\n"
        "limit; each row of the third has a test behind it.\n"
    )
    for answer, title in groups.items():
        rows = [_row(row) for row in CAPABILITIES if row.answer == answer]
        text += (
            f"\n## {title}\n\n{table(('need', 'how, or the limit'), [(n, h) for n, _, h in rows])}"
        )
    return text + (
        "\n## Not guaranteed\n\n"
        "- **Honest data.** Nobody can check the examples of a client. [Defence](how-to/defence.md) bounds the\n"
        "  effect of a malicious client.\n"
        "- **Privacy by freezing.** A frozen or kept part does not protect the examples. [Differential\n"
        "  privacy](how-to/privacy.md) does.\n"
        "- **A trusted machine.** Whoever controls the machine of a site can read its examples.\n"
        "- **The same bits on other hardware**, or with another version of torch.\n"
    )


def coming_from_page() -> str:
    """docs/coming-from.md."""
    text = (
        "<!-- Made by docs/capabilities.py. -->\n\n# Coming from another tool\n\n"
        "For users of other tools: the words you know and the same thing in fedplan. A study file that has a\n"
        "word of another tool is answered with the field that means the same.\n"
    )
    for peer, rows in PEERS.items():
        text += f"\n## {peer}\n\n{table((peer, 'fedplan'), [*rows])}"
        if lacking := [row.need for row in CAPABILITIES if peer in row.elsewhere]:
            text += f"\n{peer} has, and fedplan has not: {'; '.join(lacking)}.\n"
    return text


def pages() -> dict[Path, str]:
    """Every file that is made from the table, with its text."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = f"{START}\n\n{readme_table()}\n{END}"
    readme = re.sub(f"{re.escape(START)}.*?{re.escape(END)}", lambda _: block, readme, flags=re.S)
    return {
        ROOT / "README.md": readme,
        ROOT / "docs" / "limits.md": limits_page(),
        ROOT / "docs" / "coming-from.md": coming_from_page(),
    }


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
