# SPDX-License-Identifier: Apache-2.0
"""Files beside an exported model: its model card, and a golden example to check it with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from fedplan.data.tasks.definition import Task
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.egress import AGREEMENT
from fedplan.language.plan import Role
from fedplan.language.resolution import params_with_roles
from fedplan.models.catalog import is_hub_id, strip_hub_prefix
from fedplan.models.dual_encoder import DualEncoder
from fedplan.models.folder import image_mean_std
from fedplan.models.params import Params
from fedplan.privacy.statement import HISTORY, SPENT, Expense, Statement
from fedplan.studies.run import read_run
from fedplan.studies.run_scores import client_score, score_rules, score_text, untrained_params
from fedplan.studies.schema import Study
from fedplan.tensors.devices import model_device, to_device
from fedplan.tensors.named import Tensors

CARD_FILE = "README.md"
"""Name of the model card in an exported folder."""
PIPELINE_TAGS = {
    "text-classification": "text-classification",
    "multi-label": "text-classification",
    "regression": "text-classification",
    "token-classification": "token-classification",
    "image-classification": "image-classification",
    "image-multi-label": "image-classification",
    "image-text": "zero-shot-image-classification",
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "seq2seq-lm": "text-generation",
    "instruction": "text-generation",
}
"""Hugging Face pipeline tag of each task."""
ROLE_PHRASES = {
    Role.SHARE: "trained by clients and aggregated, in some rounds",
    Role.KEEP: "trained by each client for itself, in some rounds",
}
"""Phrases for the roles that train, for params that the run has changed."""
NEVER_CHANGED = "to be trained by the plan, but as in the initial model: no update changed it"
"""Phrase for params that have a role that trains, and their initial values."""
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
"""A quoted string in a plan."""
REDACTED = '"..."'
"""Replacement of private names in a plan."""


@dataclass(frozen=True)
class ModelCard:
    """Facts about one exported model; `text` returns the model card, which reveals no client names.

    `round`: number of completed rounds; 0 if unknown, as at a client's site. `clients`: their
    number. `adapter`: whether only a peft adapter was exported. `library`: what loads the model.
    `earlier`: what the initial model has cost in privacy. `scores`: metrics of the global model.
    `score_texts`: sentences on the scores of the run, the leading one first, with their examples.
    `train_examples`: number of all clients' training examples; 0 if it is not told.
    `private_names`: client names and traits, redacted in the plan. `changed`: names of the params
    that differ from the initial model.
    """

    study: Study
    agreement: Agreement
    round: int
    clients: int
    personal: bool = False
    adapter: bool = False
    library: str = "transformers"
    statement: Statement | None = None
    earlier: tuple[Expense, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    score_texts: tuple[str, ...] = ()
    train_examples: int = 0
    private_names: frozenset[str] = frozenset()
    changed: tuple[str, ...] = ()

    def text(self, loading_code: str, *, has_golden_example: bool) -> str:
        """Return the card as Markdown with YAML metadata; `loading_code` is Python."""
        check_note = (
            "\n`test_vector.safetensors` has a synthetic input and this model's output for it; "
            "`test_vector.json` shows some of that. To check that you load the model and prepare "
            'its inputs as in the run, call `fedplan.studies.export.check_export(".")`.\n'
        )
        loading = f"## How to load it\n\n```python\n{loading_code}\n```\n"
        loading += check_note if has_golden_example else ""
        limits = (
            "## Limits\n\n- Nobody has seen all of the training data, so its gaps and biases are "
            "unknown.\n- The model was tested only as listed above.\n- Inputs must be prepared as "
            "the files beside the model define.\n"
        )
        about = (self._head(), self._about(), self._plan())
        return "\n".join((*about, loading, self._scores(), self._privacy(), limits))

    def _head(self) -> str:
        model, pipeline = self.study.model.path, PIPELINE_TAGS.get(self.study.task.kind)
        lines = ["---", f"library_name: {'peft' if self.adapter else self.library}"]
        lines += [f"pipeline_tag: {pipeline}"] if pipeline else []
        if model and is_hub_id(model):
            lines.append(f"base_model: {strip_hub_prefix(model).partition('@')[0]}")
        return "\n".join([*lines, "tags:", "- fedplan", "- federated-learning", "---", ""])

    def _about(self) -> str:
        owner = "One client's personal model" if self.personal else "The global model"
        after_rounds = f", after {self.round} rounds" if self.round else ""
        train, count = self.study.train, self.train_examples
        amount = f"{train.steps} steps" if train.steps else f"{train.epochs} epochs"
        examples = f" They have {count:,} training examples in all." if count else ""
        return (
            f"# {self.study.name}\n\n{owner} of a federation, for {self.study.task.kind}"
            f"{after_rounds}. {self.clients} "
            "clients were asked to take part; their data stayed with them. "
            f"The {'adapter' if self.adapter else 'model'} was written by fedplan.\n\n"
            f"In each round a client trains {amount} with learning rate {train.lr:g}, batch size "
            f"{train.batch_size} and {train.optimizer}.{examples}\n\n"
            f"Study `{self.study.digest}`, from the model `{self.agreement.start}`.\n"
        )

    def _plan(self) -> str:
        plan, params = self.agreement.method.plan, self.agreement.params
        changed, initial = set(self.changed), untrained_params(self.agreement)
        initial = () if self.personal else initial
        roles = {role: params_with_roles(plan, params, role) for role in ROLE_PHRASES}
        trained = {p for some in roles.values() for p in some}
        groups = {
            ROLE_PHRASES[role]: [p for p in some if p.name in changed or p in initial]
            for role, some in roles.items()
        }
        as_planned = {p for some in groups.values() for p in some}
        groups[NEVER_CHANGED] = [p for p in trained if p not in as_planned]
        groups["never trained"] = [p for p in params if p not in trained]
        lines = [
            f"- {_list_kinds(params, some)}: {phrase}." for phrase, some in groups.items() if some
        ]
        lines += [f"- {untrained_text(initial)}"] if initial else []
        names = self.private_names
        text = QUOTED.sub(lambda m: REDACTED if m[0][1:-1] in names else m[0], plan.text)
        return "\n".join(("## Which part was trained", "", *lines, "", f"`{text}`", ""))

    def _scores(self) -> str:
        if not self.score_texts:
            return "## Scores\n\nNone measured, or none may leave: test the model before use.\n"
        own = "one of the personal models" if self.personal else "the global model"
        lines = ["## Scores", "", f"Of the last round; this is {own}.", ""]
        lines += [*(f"- {text}" for text in self.score_texts), ""]
        if self.scores:
            rows = [f"| {name} | {value:.4f} |" for name, value in sorted(self.scores.items())]
            header = ("All metrics of this model:", "", "| metric | value |", "|---|---|")
            lines += [*header, *rows, ""]
        return "\n".join(lines)

    def _privacy(self) -> str:
        text = "Differential privacy: off. The model may reveal its training data."
        if statement := self.statement:
            lines = statement.text().splitlines()
            # Without charges here, each site has its own account, and the total is not known.
            shown = (line for line in lines if statement.charges or not line.startswith(SPENT))
            text = "\n".join(shown)
        return f"## Privacy\n\n{text}\n"

    def privacy_json(self) -> dict[str, Any]:
        """Contents of PRIVACY_FILE, without charges, which would tell the names of clients."""
        source, statement = f"an earlier run, study {self.study.digest}", self.statement
        if statement is None or self.personal:
            source += ", a client's personal model" if self.personal else ""
            expenses, fields = (*self.earlier, Expense(source, "")), {}
        else:
            expenses = (*statement.earlier, statement.expense(source))
            fields = statement.json()
            del fields["charges"]
            if not statement.charges:
                del fields["epsilon_spent"]
        return {**fields, HISTORY: [asdict(each) for each in expenses]}


def untrained_text(params: Params) -> str:
    """Return the sentence on params of a global model that have their initial values."""
    kinds = ", ".join(dict.fromkeys(str(p.kind.value) for p in params))
    return (
        f"{kinds}: never trained in this model, since each client has its own; the values are "
        "those that all clients started from."
    )


def describe_export(folder: Path | str, client: str = "", *, best: bool = False) -> list[str]:
    """Return sentences on the score and untrained params of an exported model; none at a site."""
    folder = Path(folder)
    if (folder / AGREEMENT).exists():
        return []
    run = read_run(folder)
    row = run.last_scores
    texts = [f"Caution: {run.failure}. This is no trained model."] if run.failure else []
    if best:
        row = next(row for row in run.metrics if row["round"] == run.best_state.round)
        name = f"{run.study.evaluate.keep_best} {run.primary}"
        value = row.get(f"validation.{name.replace(' ', '.')}")
        by = "validation" if value is None else f"{name} {score_text(value)} on validation examples"
        texts.append(f"Best round: {row['round']:g}, by {by}.")
    score = client_score(run, client) if client else score_rules(run).of_row(row).find("global")
    texts += [f"Score after round {row['round']:g}: {score.text}."] if score else []
    if not client and (untrained := untrained_params(run.agreement)):
        texts.append(untrained_text(untrained))
    return texts


def private_names(study: Study, clients: Iterable[str]) -> frozenset[str]:
    """Return the names of clients, and the trait values in a study: a card must not show them."""
    traits = study.clients.traits.values()
    values = (value for client_traits in traits for value in client_traits.values())
    return frozenset((*clients, *study.clients.names, *values))


def _list_kinds(params: Params, some: Iterable[object]) -> str:
    chosen = set(some)
    return ", ".join(dict.fromkeys(str(p.kind.value) for p in params if p in chosen))


TENSORS_FILE, JSON_FILE = "test_vector.safetensors", "test_vector.json"
"""Files in an exported folder: tensors of input and output; a readable summary."""
SENTENCE = "A federation is a promise that several keep, each in its own house: 1, 2, 3."
"""Input of text models."""
SHOWN_LOGITS = 16
"""Number of logits in the readable summary."""
TOLERANCE = 1e-5
"""Largest accepted deviation of logits, relative to the largest one if that is above 1."""


@dataclass(frozen=True)
class GoldenExample:
    """A synthetic input and the logits that an exported model gives, to check the model elsewhere.

    `loader`: name of the transformers class that loads the model: "AutoModelForCausalLM".
    `inputs`: a batch of one. `logits`: float32. `text`, `image`: the raw input, the image as uint8
    tensor (height, width, RGB). `labels`: the label names of a classifier.
    """

    loader: str
    inputs: Tensors
    logits: Tensor
    text: str = ""
    image: Tensor | None = None
    labels: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write TENSORS_FILE and JSON_FILE into an existing folder; overwrites both."""
        tensors = {**self.inputs, "logits": self.logits}
        tensors |= {"image": self.image} if self.image is not None else {}
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        save_file(tensors, folder / TENSORS_FILE)
        first_logits = cast("list[float]", self.logits.flatten()[:SHOWN_LOGITS].tolist())
        summary = {
            "loader": self.loader,
            "inputs": sorted(self.inputs),
            "text": self.text,
            "labels": list(self.labels),
            "logits_shape": list(self.logits.shape),
            "logits": [round(value, 6) for value in first_logits],
            "tolerance": TOLERANCE,
        }
        (folder / JSON_FILE).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def read_golden_example(folder: Path) -> GoldenExample:
    """Read the golden example of a folder; raise ValueError if a file is missing or damaged."""
    try:
        summary = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS_FILE)
        inputs = {str(name): tensors[name] for name in summary["inputs"]}
        example = GoldenExample(
            str(summary["loader"]),
            inputs,
            tensors["logits"],
            str(summary["text"]),
            tensors.get("image"),
            tuple(map(str, summary["labels"])),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"{folder} has no readable golden example: {error!r}") from error
    if list(example.logits.shape) != summary["logits_shape"]:
        raise ValueError(f"{folder}: {JSON_FILE} does not belong to {TENSORS_FILE}")
    return example


def make_golden_example(model: nn.Module, task: Task) -> GoldenExample | None:
    """Run a model on a synthetic image or sentence, in eval mode; None if it takes neither."""
    is_dual, text, image, size = isinstance(model, DualEncoder), "", None, task.image_size
    input_name = "pixel_values" if is_dual else cast("Any", model).main_input_name
    if input_name == "pixel_values":
        index = torch.arange(size * size * 3, dtype=torch.int64)
        image = (index * 2654435761 % 2**32 // 2**24).to(torch.uint8).reshape(size, size, 3)
        mean, std = image_mean_std(task.source)
        # Channels first, in a batch of one.
        inputs = {input_name: ((image.permute(2, 0, 1).float() / 255 - mean) / std)[None]}
    elif input_name == "input_ids" and task.source:
        text = SENTENCE
        inputs = tokenize_text(task.tokenizer, text, task.max_length, task.model_class)
    else:
        return None
    return GoldenExample(
        task.model_class, inputs, compute_logits(model, inputs), text, image, tuple(task.labels)
    )


@torch.no_grad()
def compute_logits(model: nn.Module, inputs: Tensors) -> Tensor:
    """Return the logits as float32 on the CPU; leaves the model in eval mode."""
    model.eval()
    moved = to_device(inputs, model_device(model))
    output: Any = model(moved["pixel_values"]) if isinstance(model, DualEncoder) else model(**moved)
    logits = output if isinstance(output, Tensor) else output.logits
    return logits.detach().float().cpu()


def tokenize_text(tokenizer: Any, text: str, max_length: int, loader: str) -> dict[str, Tensor]:
    """Return the inputs of a text, of at most `max_length` tokens, for a model of this class."""
    max_length = min(max_length, int(tokenizer.model_max_length))
    encoding = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
    inputs = {name: encoding[name] for name in ("input_ids", "attention_mask")}
    if loader == "AutoModelForSeq2SeqLM":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4].clone()
    return inputs
