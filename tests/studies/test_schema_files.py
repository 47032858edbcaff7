# SPDX-License-Identifier: Apache-2.0
"""What an editor reads: schemas that take every valid file, and errors that name field and line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from transformers import BertConfig

from fedplan.errors import FedplanError
from fedplan.runners.flower.starter import new_federation
from fedplan.runners.flower.superlink import read_superlink
from fedplan.runners.site import read_site
from fedplan.sites.policy import read_policy
from fedplan.studies.schema import read_study
from fedplan.studies.starter import new_study

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    file.name.partition(".")[0]: Draft202012Validator(json.loads(file.read_text()))
    for file in sorted((ROOT / "docs/reference").glob("*.schema.json"))
}
READERS: dict[str, Callable[[Path], object]] = {
    "study": read_study,
    "site": read_site,
    "policy": read_policy,
    "server": lambda file: read_superlink(file.parent),
}
STUDY = """# A comment stands before all.
name = "whole"
seed = 7
threads = 2
device = "cpu"

[model]
type = "vit"
config = { image_size = 8, hidden_size = 64 } # of transformers
freeze_batch_norm = true
dtype = "bfloat16"

[task] # in images
kind = "image-classification"
input = "image"
label = "digit"
labels = [
  "0",
  "1",
]
image_size = 8

[data]
path = "digits.npz"
partition = "dirichlet"
alpha = 0.3
num_clients = 10
holdout_fraction = 0.4
filter = { ward = ["a", "b"] }

[method]
name = "fedprox"
plan = \"\"\"
chain(share(),
  keep(head))\"\"\"
settings = { mu = 0.1 }
compression = "pipe(delta(), bf16())"
base_method.name = "scaffold"

[train]
rounds = 20
optimizer = "sgd"
lr = 1e-3
momentum = 0.9
lr_by_part = { head = 1e-2 }
precision = "bf16"

[clients]
fraction = 0.5
min_updates = 2

[evaluate]
every = 2
metrics = ["auroc"]

[defence]
rule = "median"
malicious_clients = 1
"""
WRONG_VALUES = (
    # line of STUDY, field, and whether a schema can say that it is wrong
    ("seed = -1", "seed", True),
    ("threads = 0", "threads", True),
    ('device = "gpu"', "device", False),
    ('dtype = "float8"', "model.dtype", True),
    ("image_size = -8", "task.image_size", True),
    ('kind = "image-classifcation"', "task.kind", False),
    ("labels = [ # cut\n  {},\n", "task.labels", True),
    ('partition = "dirchlet"', "data.partition", True),
    ("alpha = -0.3", "data.alpha", True),
    ("num_clients = 10.5", "data.num_clients", True),
    ("holdout_fraction = 1.0", "data.holdout_fraction", True),
    ('filter = { ward = "a" }', "data.filter.ward", True),
    ('name = "fedprocks"', "method.name", False),
    ("settings = { mue = 0.1 }", "method.settings", False),
    ("settings = { mu = [0.1] }", "method.settings.mu", True),
    ('compression = "pipe(dleta(), bf16())"', "method.compression", False),
    ('base_method.name = "scafold"', "method.base_method.name", False),
    ("rounds = 0", "train.rounds", True),
    ("rounds = 20_000_000_000", "train.rounds", True),
    ('optimizer = "sdg"', "train.optimizer", False),
    ("lr = 0.0", "train.lr", True),
    ("lr = 2026-11-19", "train.lr", True),
    ("lr = inf", "train.lr", False),
    ("momentum = 1.0", "train.momentum", True),
    ("lr_by_part = { haed = 1e-2 }", "train.lr_by_part.haed", False),
    ('precision = "bf61"', "train", True),
    ("fraction = 1.5", "clients.fraction", True),
    ("min_updates = 0", "clients.min_updates", True),
    ("every = 0", "evaluate.every", True),
    ('metrics = ["aurok"]', "evaluate.metrics.0", False),
    ('rule = "medain"', "defence.rule", True),
    ("malicious_clients = -1", "defence.malicious_clients", True),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each TOML file that fedplan writes, by kind and origin."""
    place = tmp_path_factory.mktemp("written")
    rows = [f"some words {i},{'bad' if i % 9 else 'good'},w{i % 4}\n" for i in range(200)]
    (place / "rows.csv").write_text("text,label,ward\n" + "".join(rows))
    BertConfig(vocab_size=99, hidden_size=8, num_attention_heads=2).save_pretrained(place / "model")
    made = dict[str, Path]()
    for folder, insecure in (("open", True), ("closed", False)):
        new_federation(place / folder, ["north", "south"], insecure=insecure, keys=False)
        for file in sorted((place / folder).rglob("*.toml")):
            made[f"{file.stem} {folder}/{file.parent.name}"] = file
    new_study(str(place / "rows.csv"), str(place / "model"), place / "new.toml")
    return made | {"study new": place / "new.toml"}


def test_every_file_that_fedplan_writes_names_its_schema_and_fits_it(
    written: dict[str, Path],
) -> None:
    assert len(written) == 13 and {name.split()[0] for name in written} == set(SCHEMAS)
    for name, file in written.items():
        kind, text = name.split()[0], file.read_text()
        assert text.splitlines()[0] == f"#:schema {SCHEMAS[kind].schema['$id']}", file
        SCHEMAS[kind].validate(tomllib.loads(text))


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda f: f.stem)
def test_the_examples_name_the_schema_and_fit_it(file: Path) -> None:
    named = re.match(r"#:schema (.+)\n", file.read_text())
    assert named and (file.parent / named[1]).resolve() in (ROOT / "docs/reference").iterdir()
    SCHEMAS["study"].validate(tomllib.loads(file.read_text()))


def faults(kind: str, text: str, folder: Path) -> list[str]:
    """The lines of the message with which a file is refused; none if it is taken."""
    file = folder / f"{kind}.toml"
    file.write_text(text)
    try:
        READERS[kind](file)
    except FedplanError as error:
        return [line.strip() for line in str(error).splitlines()]
    return []


def is_named(lines: list[str], number: int, field: str) -> bool:
    return any(line.startswith(f"line {number}: {field}") for line in lines)


def test_the_study_is_valid(tmp_path: Path) -> None:
    assert not faults("study", STUDY, tmp_path)
    SCHEMAS["study"].validate(tomllib.loads(STUDY))


@pytest.mark.parametrize(("line", "field", "is_expressible"), WRONG_VALUES)
def test_a_wrong_value_is_named_at_its_line(
    line: str, field: str, is_expressible: bool, tmp_path: Path
) -> None:
    key = line.split(" = ")[0]
    section = field.split(".")[0] if "." in field or field == "train" else ""
    at = STUDY.index(f"[{section}]") if section else 0
    start = STUDY.index(f"\n{key} = ", at) + 1
    end = start + len(line) if "\n" in line else STUDY.index("\n", start)
    end = STUDY.index('"0",', start) if "\n" in line else end
    text = STUDY[:start] + line + STUDY[end:]
    assert is_named(faults("study", text, tmp_path), STUDY[:start].count("\n") + 1, field)
    assert SCHEMAS["study"].is_valid(tomllib.loads(text)) == (not is_expressible)


def assignments(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, section and key of each field, read without a parser of TOML."""
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\[(\w+)\]", line):
            section = f"{header[1]}."
        elif key := re.match(r"([\w.]+) = (?!\[$|\"\"\"$)", line):
            yield number, section, key[1]


def test_any_field_misspelt_or_of_another_type_is_named_at_its_line(
    written: dict[str, Path], tmp_path: Path
) -> None:
    bases = [("study", STUDY)] + [(n.split()[0], f.read_text()) for n, f in written.items()]
    count = 0
    for kind, base in bases:
        for number, section, key in assignments(base):
            lines = base.splitlines()
            value = "3" if re.match(r"\w+ = [\"{\[]", lines[number - 1]) else "{}"
            for changed, field in (
                (f"{key}s_ = {value}", f"{section}{key}s_"),
                (f"{key} = {value}", f"{section}{key}"),
            ):
                text = "\n".join([*lines[: number - 1], changed, *lines[number:]])
                assert is_named(faults(kind, text, tmp_path), number, field), text
                assert not SCHEMAS[kind].is_valid(tomllib.loads(text)), (number, changed)
                count += 1
    assert count + len(WRONG_VALUES) > 50


def test_a_value_of_the_command_line_is_on_no_line(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    with pytest.raises(FedplanError, match=r"\n  train\.rounds: "):
        read_study(tmp_path / "study.toml", ["train.rounds=0"])


def test_a_rule_for_several_fields_is_named_where_one_of_them_stands(tmp_path: Path) -> None:
    private = '\n[privacy]\nunit = "client"\nepsilon = 1.0\n'
    lines = faults("study", STUDY + private, tmp_path)
    number = STUDY.splitlines().index("min_updates = 2") + 1
    assert is_named(lines, number, "study: clients.min_updates is 2")
