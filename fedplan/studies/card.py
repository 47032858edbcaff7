# SPDX-License-Identifier: Apache-2.0
"""Model cards: what a person must know of an exported model, without a word of rows or sites."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fedplan.federation.agreement import Agreement
from fedplan.language.plan import Role
from fedplan.language.resolution import touched
from fedplan.models.hub import bare, is_hub_id
from fedplan.models.params import Params
from fedplan.privacy.statement import Statement
from fedplan.studies.schema import Study

CARD = "README.md"
PIPELINES = {
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
"""What Hugging Face calls each task."""
TRAINED = {
    Role.SHARE: "trained by all and added up in some rounds",
    Role.KEEP: "trained by each client for itself in some rounds",
}
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
HIDDEN = '"..."'


@dataclass(frozen=True)
class Card:
    """A model of a run: of which study, after which round, of how many clients.

    Of a model that a site has, the round is not told. `own` says that it is one client's, `scores`
    are those of the world on the common test. Whose a model is, who took part and how many rows
    there were is not told.
    """

    study: Study
    agreement: Agreement
    round: int
    clients: int
    own: bool = False
    adapter: bool = False
    statement: Statement | None = None
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    secret: frozenset[str] = frozenset()
    """Names that no card says: a plan may speak of clients and of what they say of themselves."""

    def text(self, how: str, *, vector: bool) -> str:
        """The card of a folder that is loaded so."""
        parts = (self._head(), self._about(), self._plan(), self._load(how, vector=vector))
        return "\n".join((*parts, self._scores(), self._privacy(), self._limits()))

    def _head(self) -> str:
        study, model = self.study, self.study.model.path
        lines = [f"library_name: {'peft' if self.adapter else 'transformers'}"]
        if pipeline := PIPELINES.get(study.task.kind):
            lines.append(f"pipeline_tag: {pipeline}")
        if model and is_hub_id(model):
            lines.append(f"base_model: {bare(model).partition('@')[0]}")
        lines += ["tags:", "- fedplan", "- federated-learning"]
        return "\n".join(("---", *lines, "---", ""))

    def _about(self) -> str:
        whose = "One client's own model" if self.own else "The common model"
        what = "adapter" if self.adapter else "model"
        when = f", as it was after {self.round} rounds"
        return (
            f"# {self.study.name}\n\n{whose} of a federation, for {self.study.task.kind}"
            f"{when if self.round else ''}. {self.clients} clients were asked to take part; their "
            f"rows stayed where they were. The {what} was written by fedplan.\n\n"
            f"Study `{self.study.digest}`, from the model `{self.agreement.start}`.\n"
        )

    def _plan(self) -> str:
        plan, params = self.agreement.method.plan, self.agreement.params
        lines = [
            f"- {_listed(params, found)}: {words}."
            for role, words in TRAINED.items()
            if (found := touched(plan, params, role))
        ]
        trained = {p.name for p in touched(plan, params, *TRAINED)}
        if rest := [p for p in params if p.name not in trained]:
            lines.append(f"- {_listed(params, rest)}: never trained.")
        if not self.own and touched(plan, params, Role.KEEP):
            lines.append("- Of what each client keeps, this is the value that all started from.")
        text = QUOTED.sub(self._shown, plan.text)
        return "\n".join(("## Which part was trained", "", *lines, "", f"`{text}`", ""))

    def _shown(self, quoted: re.Match[str]) -> str:
        return HIDDEN if quoted[0][1:-1] in self.secret else quoted[0]

    def _load(self, how: str, *, vector: bool) -> str:
        words = (
            "`test_vector.safetensors` has an input that was made up, and what this model said to "
            "it; `test_vector.json` shows some of that. A model that was loaded otherwise, or fed "
            'otherwise, says something else: `fedplan.studies.export.check_export(".")` tells.'
        )
        return f"## How to load it\n\n```python\n{how}\n```\n" + (f"\n{words}\n" if vector else "")

    def _scores(self) -> str:
        if not self.scores:
            return "## Scores\n\nNone was taken, or none may leave: test it before you use it.\n"
        rows = [f"| {name} | {value:.4f} |" for name, value in sorted(self.scores.items())]
        head = [
            "## Scores",
            "",
            "On the study's common test.",
            "",
            "| score | value |",
            "|---|---|",
        ]
        return "\n".join((*head, *rows, ""))

    def _privacy(self) -> str:
        statement = self.statement
        if statement is None:
            said = "Nothing was promised: who has this model may learn of rows it was trained on."
        else:
            lines = statement.text().splitlines()
            # Where each site has an account of its own, nobody else knows what was spent.
            known = [each for each in lines if statement.charges or not each.startswith("Spent")]
            said = "\n".join(known)
        return f"## Privacy\n\n{said}\n"

    def _limits(self) -> str:
        return (
            "## Limits\n\n- Nobody has seen all rows that it was trained on: what they lack, it "
            "lacks.\n- It was not tested on anything but what is said above.\n- Inputs must be "
            "made ready as the files beside it say.\n"
        )


def secrets_of(study: Study, clients: Iterable[str]) -> frozenset[str]:
    """Names of clients, and what the study says of each."""
    traits = study.clients.traits.values()
    return frozenset(
        (*clients, *study.clients.names, *(v for each in traits for v in each.values()))
    )


def _listed(params: Params, found: Iterable[object]) -> str:
    """The kinds of some params, in the order of the model."""
    chosen = set(found)
    kinds = dict.fromkeys(str(p.kind.value) for p in params if p in chosen)
    return ", ".join(kinds)
