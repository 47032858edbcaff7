# SPDX-License-Identifier: Apache-2.0
"""Model card (README.md) of an exported model; it reveals no client names and no data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fedplan.federation.agreement import Agreement
from fedplan.language.plan import Role
from fedplan.language.resolution import params_with_roles
from fedplan.models.catalog import is_hub_id, strip_hub_prefix
from fedplan.models.params import Params
from fedplan.privacy.statement import SPENT, Statement
from fedplan.studies.schema import Study

CARD_FILE = "README.md"
"""Name of the model card in an exported folder."""
PIPELINE_TAGS = {
    "text-classification": "text-classification",
    "multi-label": "text-classification",
    "regression": "text-classification",
    "token-classification": "token-classification",
    "image-classification": "image-classification",
    "image-text": "zero-shot-image-classification",
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "seq2seq-lm": "text-generation",
    "instruction": "text-generation",
}
"""Hugging Face pipeline tag of each task."""
ROLE_PHRASES = {
    Role.SHARE: "trained by all clients and aggregated, in some rounds",
    Role.KEEP: "trained by each client for itself, in some rounds",
}
"""Phrases for the roles that train."""
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
"""A quoted string in a plan."""
REDACTED = '"..."'
"""Replacement of private names in a plan."""


@dataclass(frozen=True)
class ModelCard:
    """Facts about one exported model; `text` returns the model card, which reveals no client names.

    `study`: the study of the run. `agreement`: the run's plan, params and initial-model digest.
    `round`: number of completed rounds; 0 if unknown, as at a client's site.
    `clients`: number of clients of the federation.
    `personal`: whether this is one client's personal model.
    `adapter`: whether only a peft adapter was exported.
    `statement`: the differential-privacy statement (guarantee and spent budget), or None without
    DP.
    `scores`: metrics of the global model on the common test set, by name.
    `private_names`: client names and traits, which are redacted in the plan.
    """

    study: Study
    agreement: Agreement
    round: int
    clients: int
    personal: bool = False
    adapter: bool = False
    statement: Statement | None = None
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    private_names: frozenset[str] = frozenset()

    def text(self, loading_code: str, *, has_golden_example: bool) -> str:
        """Return the card as Markdown with YAML metadata.

        `loading_code`: Python code that loads the model. `has_golden_example`: whether the folder
        has a golden example; the card then explains how to check the model with it.
        """
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
        parts = (
            self._head(),
            self._about(),
            self._plan(),
            loading,
            self._scores(),
            self._privacy(),
        )
        return "\n".join((*parts, limits))

    def _head(self) -> str:
        """Return the YAML metadata: library, pipeline tag, base model and tags."""
        model, pipeline = self.study.model.path, PIPELINE_TAGS.get(self.study.task.kind)
        lines = ["---", f"library_name: {'peft' if self.adapter else 'transformers'}"]
        lines += [f"pipeline_tag: {pipeline}"] if pipeline else []
        if model and is_hub_id(model):
            lines.append(f"base_model: {strip_hub_prefix(model).partition('@')[0]}")
        return "\n".join([*lines, "tags:", "- fedplan", "- federated-learning", "---", ""])

    def _about(self) -> str:
        """Return the title and a paragraph on the model's origin."""
        owner = "One client's personal model" if self.personal else "The global model"
        after_rounds = f", after {self.round} rounds" if self.round else ""
        return (
            f"# {self.study.name}\n\n{owner} of a federation, for {self.study.task.kind}"
            f"{after_rounds}. {self.clients} "
            "clients were asked to take part; their data stayed with them. "
            f"The {'adapter' if self.adapter else 'model'} was written by fedplan.\n\n"
            f"Study `{self.study.digest}`, from the model `{self.agreement.start}`.\n"
        )

    def _plan(self) -> str:
        """Return the section on trained, personal and frozen parts, with the redacted plan."""
        plan, params = self.agreement.method.plan, self.agreement.params
        lines = [
            f"- {_list_kinds(params, params_of_role)}: {phrase}."
            for role, phrase in ROLE_PHRASES.items()
            if (params_of_role := params_with_roles(plan, params, role))
        ]
        trained = {p.name for p in params_with_roles(plan, params, *ROLE_PHRASES)}
        if untrained := [p for p in params if p.name not in trained]:
            lines.append(f"- {_list_kinds(params, untrained)}: never trained.")
        if not self.personal and params_with_roles(plan, params, Role.KEEP):
            lines.append("- For parts that each client keeps, this model has their initial values.")
        names = self.private_names
        text = QUOTED.sub(lambda m: REDACTED if m[0][1:-1] in names else m[0], plan.text)
        return "\n".join(("## Which part was trained", "", *lines, "", f"`{text}`", ""))

    def _scores(self) -> str:
        """Return the section with a table of metrics, or a note that there are none."""
        if not self.scores:
            return "## Scores\n\nNone measured, or none may leave: test the model before use.\n"
        rows = [f"| {name} | {value:.4f} |" for name, value in sorted(self.scores.items())]
        head = "## Scores\n\nOn the study's common test set.\n\n| metric | value |\n|---|---|"
        return "\n".join((head, *rows, ""))

    def _privacy(self) -> str:
        """Return the section on differential privacy."""
        text = "Differential privacy: off. The model may reveal its training data."
        if statement := self.statement:
            lines = statement.text().splitlines()
            # Without charges here, each site has its own account, and the total is not known.
            text = "\n".join(
                line for line in lines if statement.charges or not line.startswith(SPENT)
            )
        return f"## Privacy\n\n{text}\n"


def private_names(study: Study, clients: Iterable[str]) -> frozenset[str]:
    """Return the names of clients and the trait values in a study, which a card must not show.

    `clients`: further client names, as of a partition by column.
    """
    traits = study.clients.traits.values()
    values = (value for client_traits in traits for value in client_traits.values())
    return frozenset((*clients, *study.clients.names, *values))


def _list_kinds(params: Params, some: Iterable[object]) -> str:
    """Return the kinds of some of the params, in model order, separated by commas."""
    chosen = set(some)
    return ", ".join(dict.fromkeys(str(p.kind.value) for p in params if p in chosen))
