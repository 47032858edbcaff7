# SPDX-License-Identifier: Apache-2.0
"""Write the pages of the reference, `reference/*.md`, from the schemas and the sources.

Beside them, `*.schema.json` has the JSON schema of each file, for editors. Descriptions and defaults of fields come from the classes. Public names of a package are read from its
source without importing it, so that a page is the same with every version of Python. `glossary.md` is
written by hand.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

DOCS = Path(__file__).parent
ROOT = DOCS.parent
MADE = "<!-- Made by docs/reference.py: make reference. -->"
KINDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
}
STUDY = """# The study file

A study is one TOML file. This page lists every field with its type, default and meaning. An unknown
field or an invalid value is an error. `--set train.rounds=30` on the command line replaces a value.

`fedplan explain study.toml` describes a study before it runs. The [glossary](glossary.md) defines the
words. An editor with [Taplo](https://taplo.tamasfe.dev), such as VS Code with Even Better TOML, explains
and checks each field as you type: the first line, `#:schema`, names the [JSON schema](study.schema.json)."""
SITE = """# The files of a site

A [site](../how-to/approve.md) writes two files itself. `site.toml` has its name, its data and its keys;
`policy.toml` has its limits on studies. Both are read again for every request. The operator of the server
has `server.toml`."""


def section_in(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def sections(made: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """A schema and all sections in it, each once, with the name by which a file says it."""
    yield path, made
    for name, field in made.model_fields.items():
        inner = section_in(field)
        if inner is not None and inner is not made:
            yield from sections(inner, f"{path}.{name}".lstrip("."))


def takes(said: Mapping[str, Any]) -> str:
    """What a field takes, in words, from its JSON schema."""
    if options := said.get("anyOf"):
        return " or ".join(dict.fromkeys(takes(o) for o in options if o.get("type") != "null"))
    if "enum" in said or "const" in said:
        return " or ".join(
            f"`{json.dumps(word)}`" for word in said.get("enum", [said.get("const")])
        )
    if "$ref" in said:
        return "section"
    if said.get("type") == "array":
        return f"list of {takes(said['items'])}"
    if said.get("type") == "object":
        inner = said.get("additionalProperties")
        return f"table of {takes(inner)}" if isinstance(inner, dict) and inner else "table"
    return KINDS.get(said.get("type", ""), "value") + bounds(said)


def bounds(said: Mapping[str, Any]) -> str:
    """Where a number begins and ends; the largest whole number is not worth a word."""
    low, above = said.get("minimum"), said.get("exclusiveMinimum")
    most, below = said.get("maximum"), said.get("exclusiveMaximum")
    words = [f"from {low:g}"] if low is not None else []
    words += [f"above {above:g}"] if above is not None else []
    words += [f"to {most:g}"] if most is not None and most < 10**9 else []
    words += [f"below {below:g}"] if below is not None and below < 10**9 else []
    return (" " + " ".join(words)) if words else ""


def default(field: FieldInfo) -> str:
    """What a field is where nothing is said, as TOML says it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if section_in(field) is not None:
        return "none" if value is None else "its defaults"
    return f"`{json.dumps(value)}`"


def cell(text: str) -> str:
    """A text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(path: str, made: type[BaseModel]) -> str:
    """The fields of a section; each has an anchor, as train.lr."""
    schema = made.model_json_schema()
    own = (
        schema["properties"]
        if "properties" in schema
        else schema["$defs"][made.__name__]["properties"]
    )
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in made.model_fields.items():
        inner, said = section_in(field), own[name]
        whole = f"{path}.{name}".lstrip(".")
        kind = takes(said)
        if inner is not None:
            kind = f"[section](#{slug(path if inner is made else whole)})"
        anchor = f'<a id="{whole}"></a>' if inner is None else ""
        cells = (f"{anchor}`{name}`", kind, default(field), field.description or "")
        lines.append(f"| {' | '.join(map(cell, cells))} |")
    return "\n".join(lines)


def slug(path: str) -> str:
    """The anchor of a section's heading."""
    return path.replace(".", "")


def page_of(intro: str, schemas: Mapping[str, type[BaseModel]]) -> str:
    """A page of all fields of one file, or of some."""
    said = [MADE, intro]
    for file, made in schemas.items():
        for path, section in sections(made):
            top = file if not path else f"[{path}]"
            said += [f"## {top}", prose(section.__doc__ or ""), table(path, section)]
    return "\n\n".join(said) + "\n"


def prose(doc: str) -> str:
    """A docstring as Markdown: examples become blocks, all else stays as it is."""
    return "\n\n".join(map(paragraph, re.split(r"\n\s*\n", cleandoc(doc))))


def paragraph(text: str) -> str:
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if text.startswith("    "):
        return f"```py\n{dedent(text)}\n```"
    return text.replace("<", "\\<")


def source(module: str) -> Path:
    """The file of a module."""
    place = ROOT.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def tree_of(module: str) -> ast.Module:
    return ast.parse(source(module).read_text(encoding="utf-8"))


def shown(package: str) -> dict[str, str]:
    """Names that a package has for users, `__all__` of its stub, and the module of each."""
    tree = ast.parse(source(package).with_suffix(".pyi").read_text(encoding="utf-8"))
    listed = next(n.value for n in tree.body if isinstance(n, ast.Assign) and named(n) == "__all__")
    froms = origins(tree)
    return {
        name: f"{package}.{froms[name]}".rstrip(".")
        for name in sorted(ast.literal_eval(listed), key=str.lower)
    }


def origins(tree: ast.Module) -> dict[str, str]:
    """The names that a module imports, and from where."""
    return {
        alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def named(node: ast.stmt) -> str:
    """The name that a statement gives, if it gives one."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    return node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""


def entry(module: str, name: str) -> str:
    """One name of a face: how it is called, and what it says of itself."""
    tree = tree_of(module)
    body = tree.body
    at = next((i for i, node in enumerate(body) if named(node) == name), None)
    if at is None:  # that module has it from another one
        return entry(origins(tree)[name], name)
    node = body[at]
    if isinstance(node, ast.FunctionDef):
        return called(node, f"def {name}")
    if isinstance(node, ast.ClassDef):
        return of_class(node)
    below = body[at + 1] if at + 1 < len(body) else None
    doc = (
        below.value.value
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        else ""
    )
    return f"```py\n{short(node)}\n```\n\n{prose(str(doc))}".strip()


def short(node: ast.stmt) -> str:
    """A name and its value, if that is short enough to be read."""
    text = ast.unparse(node)
    return text if len(text) < 200 else text[:160].rsplit(" ", 1)[0] + " ..."


def called(node: ast.FunctionDef, start: str) -> str:
    """A function: its arguments, a line for each if they are many, and its docstring."""
    given = ast.unparse(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{start}({given}){returns}"
    if len(line) > 88:
        line = f"{start}(\n    " + ",\n    ".join(pieces(given)) + f",\n){returns}"
    return f"```py\n{line}\n```\n\n{prose(ast.get_docstring(node) or '')}".strip()


def pieces(given: str) -> list[str]:
    """Arguments apart: cut at the commas that stand in no bracket and no quotes."""
    found, depth, quoted = [""], 0, ""
    for sign in given:
        quoted = ("" if sign == quoted else quoted) if quoted else (sign if sign in "'\"" else "")
        depth += (sign in "([{") - (sign in ")]}") if not quoted else 0
        if sign == "," and not depth and not quoted:
            found.append("")
        else:
            found[-1] += sign
    return [piece.strip() for piece in found]


def of_class(node: ast.ClassDef) -> str:
    """A class: its fields, its docstring, and the methods that are for others."""
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    fields = [
        f"    {short(n)}"
        for n in node.body
        if isinstance(n, ast.AnnAssign | ast.Assign) and re.match("[a-zA-Z]", named(n))
        if named(n) != "model_config"
    ]
    code = "\n".join([f"class {node.name}{bases}:", *(fields or ["    ..."])])
    rows = [
        f"| `{method.name}` | {cell(first(method))} |"
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
    ]
    methods = "\n".join(["| method | meaning |", "|---|---|", *rows]) if rows else ""
    return f"```py\n{code}\n```\n\n{prose(ast.get_docstring(node) or '')}\n\n{methods}".strip()


def first(node: ast.FunctionDef) -> str:
    """The first paragraph of a docstring, in one line."""
    return prose(ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")


PACKAGES = sorted(
    ".".join(stub.parent.relative_to(ROOT).parts)
    for stub in (ROOT / "fedplan").rglob("__init__.pyi")
    if "__all__" in stub.read_text(encoding="utf-8")
)
"""Packages with names for users: those whose stub has `__all__`."""


def page_of_package(package: str) -> str:
    """The page of a package."""
    said = [MADE, f"# {package}", prose(ast.get_docstring(tree_of(package)) or "")]
    for name, module in shown(package).items():
        place = ROOT.joinpath(*module.split("."), name)
        told = (
            f"The package [`fedplan.{name}`]({name}.md)." if place.is_dir() else entry(module, name)
        )
        said += [f"## {name}", told]
    return "\n\n".join(said) + "\n"


def list_of_packages() -> str:
    """The page that leads to all packages."""
    rows = [
        f"| [`{package}`]({package.split('.')[-1]}.md) | {ast.get_docstring(tree_of(package)) or ''} |"
        for package in PACKAGES
    ]
    head = [
        MADE,
        "# Python, package by package",
        "Each page lists the names that a package has for users. [Architecture](../architecture.md) describes all\n"
        "packages and their dependencies; [Python](../tutorials/python.md) is the tutorial.",
    ]
    return "\n\n".join([*head, "\n".join(["| package | content |", "|---|---|", *rows])]) + "\n"


def files() -> dict[str, type[BaseModel]]:
    """The classes of all TOML files, by the names of the files."""
    from fedplan.runners.flower.superlink import ServerFile
    from fedplan.runners.site import Site
    from fedplan.sites.policy import Policy
    from fedplan.studies.schema import Study

    return {"study": Study, "site": Site, "policy": Policy, "server": ServerFile}


def known_names() -> dict[str, Iterable[str]]:
    """Names for which an editor completes a field; a study may also name an object of its own."""
    from fedplan.data.tasks.kinds import TASK_KINDS
    from fedplan.methods.registry import METHODS, SERVER_OPTIMIZER_REGISTRY
    from fedplan.training.optimizers import OPTIMIZER_NAMES
    from fedplan.training.probes import PROBE_NAMES

    return {
        "MethodSection.name": METHODS,
        "MethodSection.server_optimizer": SERVER_OPTIMIZER_REGISTRY.built_in,
        "MethodSection.probe": PROBE_NAMES.built_in,
        "TaskSection.kind": TASK_KINDS,
        "TrainConfig.optimizer": OPTIMIZER_NAMES.built_in,
    }


def json_schema(name: str, made: type[BaseModel]) -> str:
    """The JSON schema of a file, without the fields that only fedplan itself sets."""
    from fedplan.studies.section import SCHEMA_LINE

    whole = made.model_json_schema()
    for section, said in {made.__name__: whole, **whole.get("$defs", {})}.items():
        properties = said.get("properties", {})
        properties.pop("from_python", None)
        for field, names in known_names().items():
            if field.startswith(f"{section}."):
                text = properties[field.partition(".")[2]]
                text["anyOf"] = [{"enum": sorted(filter(None, names))}, {"type": text.pop("type")}]
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_LINE.format(name).removeprefix("#:schema "),
    }
    return json.dumps(head | whole, indent=1) + "\n"


def pages() -> dict[str, str]:
    """All pages and schemas by their names."""
    study, *others = files().items()
    made = {
        "study.md": page_of(STUDY, {"The whole file": study[1]}),
        "site.md": page_of(SITE, {f"{name}.toml": schema for name, schema in others}),
        "index.md": list_of_packages(),
    }
    made |= {f"{name}.schema.json": json_schema(name, schema) for name, schema in files().items()}
    for package in PACKAGES:
        made[f"{package.split('.')[-1]}.md"] = page_of_package(package)
    return made


def main() -> None:
    """Write all pages, and remove those of packages that no longer exist."""
    place = DOCS / "reference"
    place.mkdir(exist_ok=True)
    made = pages()
    for old in place.glob("*.*"):
        if old.name not in made and old.name != "glossary.md":
            old.unlink()
    for name, text in made.items():
        (place / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
