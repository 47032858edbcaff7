# SPDX-License-Identifier: Apache-2.0
"""Names of Flower outside its public API are imported in one module, and this version has them.

`python tests/runners/test_internals.py FOLDER` lists what the flwr unpacked in FOLDER lacks.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "fedplan" / "runners" / "flower"
INTERNALS = FOLDER / "_internals.py"
ATTRIBUTES = {
    "ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL": "the key is registered",
    "ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED": "the key is not registered",
    "ControlHttpClient.ListNodes": "lists the sites",
    "ControlHttpClient.RegisterNode": "registers a site's key",
    "ControlHttpClient.StartRun": "starts a run",
    "ControlHttpClient.UnregisterNode": "revokes a site",
    "ControlHttpClient.from_server_address": "makes the client, with TLS and interceptors",
    "FleetHttpClient.ActivateNode": "asks whether a key is registered",
    "FleetHttpClient.from_server_address": "makes the client, with TLS and interceptors",
    "ErrorCode.MESSAGE_UNAVAILABLE": "the SuperLink has no such request any more",
    "ErrorCode.REPLY_MESSAGE_UNAVAILABLE": "the SuperLink has no such reply any more",
    "ErrorCode.UNKNOWN": "error replies made here for replies that cannot be read",
    "HttpGrid._retry_invoker": "limited: Flower repeats for ever, or interrupts this process",
    "HttpGrid._runtime_client": "pulls replies and their parts",
    "HttpGrid.get_nodes": "registered names of nodes, and when each came online",
    "HttpGrid.node": "the server task, as calls for parts of a message name it",
    "HttpGrid.run": "the run that messages belong to",
    "HttpGrid.set_run": "the run that messages belong to",
    "NoOpControlAuthnPlugin.validate_tokens_in_metadata": "admits the operator alone",
    "RuntimeHttpClient.AcquireTask": "takes a task",
    "RuntimeHttpClient.ConfirmMessageReceived": "lets the SuperLink delete a fetched reply",
    "RuntimeHttpClient.PullMessages": "the replies that have arrived",
    "RuntimeHttpClient.PullObject": "wrapped, to give up a message whose rest never comes",
    "RuntimeHttpClient.PullTaskInput": "the run of a server task",
    "RuntimeHttpClient.PushTaskOutput": "how a server task ended",
    "RuntimeHttpClient.SendTaskHeartbeat": "keeps a task alive",
    "RuntimeHttpClient.from_server_address": "makes the client, with TLS and interceptors",
    "SubStatus.COMPLETED": "a task that ended well",
    "SubStatus.FAILED": "a task that failed",
    "TaskIdentity.node_id": "the server task, as messages of the grid name it",
    "TaskIdentity.run_id": "the server task, as messages of the grid name it",
    "TaskIdentity.task_id": "the server task, as messages of the grid name it",
    "TaskType.CLIENT_APP": "tasks of a site",
    "TaskType.SERVER_APP": "tasks of a server",
    "flwr.superlink.cli.flower_superlink.flower_superlink": "the program flower-superlink",
    "flwr.superlink.cli.flower_superlink.load_control_authn_plugin": "replaced by the operator's",
    "flwr.superlink.extensions.get_middleware": "replaced by the check of node keys",
}
"""Attributes of these names that fedplan uses, with their purposes."""
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy")


def imports(file: Path) -> Iterator[tuple[str, str, str]]:
    """The names of Flower that a module imports: from where, and what its line says of it."""
    lines = file.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            for alias in node.names:
                yield node.module or "", alias.name, lines[alias.lineno - 1].partition("  # ")[2]


def has(owner: Any, name: str) -> bool:
    """Whether there is an attribute, of the class or set by its constructor."""
    made = getattr(getattr(owner, "__init__", None), "__code__", None)
    return name in {*dir(owner), *dir(type(owner))} or (made is not None and name in made.co_names)


def missing() -> list[str]:
    """What the installed Flower lacks of the names and attributes, each with its purpose."""
    found, lacks = dict[str, Any](), list[str]()
    for module, name, purpose in imports(INTERNALS):
        try:
            found[name] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            lacks.append(f"{module}.{name} ({purpose}): {error}")
    for path, purpose in ATTRIBUTES.items():
        owner, _, name = path.rpartition(".")
        if owner.startswith("flwr."):
            try:
                found[owner] = importlib.import_module(owner)
            except ImportError as error:
                lacks.append(f"{owner} ({purpose}): {error}")
        if owner in found and not has(found[owner], name):
            lacks.append(f"{path} ({purpose})")
    source = "".join(p.read_text() for p in flower_programs())
    for module in ("superlink", "supernode"):
        for option in re.findall(r'"(--[a-z-]+)"', (FOLDER / f"{module}.py").read_text()):
            if f'"{option}"' not in source:
                lacks.append(f"{option} (option of flower-{module})")
    return lacks


def flower_programs() -> list[Path]:
    """The modules of Flower that define the options of its programs."""
    import flwr

    place = Path(flwr.__file__).parent
    return [p for p in place.rglob("*.py") if "add_argument" in p.read_text(encoding="utf-8")]


def test_this_flower_has_all_that_is_used() -> None:
    assert missing() == []


def test_every_internal_name_has_a_purpose() -> None:
    names = list(imports(INTERNALS))
    assert len(names) > 35
    assert [name for _, name, purpose in names if len(purpose) < 8] == []
    known = {name for _, name, _ in names}
    for path in ATTRIBUTES:
        assert path.startswith("flwr.") or path.split(".")[0] in known, path


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_other_modules_import_the_public_api_alone(file: Path) -> None:
    if file != INTERNALS:
        assert {module for module, _, _ in imports(file)} <= set(PUBLIC)
        assert not re.search(r'import_module\("flwr', file.read_text())


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    sys.stdout.write("\n".join(missing() or ["nothing is missing"]) + "\n")
