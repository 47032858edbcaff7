# SPDX-License-Identifier: Apache-2.0
"""No code travels: whoever hands in a run, nothing of its app is imported at a site."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from deployment import Deployment, until_open
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from test_deployment import MORE, SITES, require_same, rows_of, study_from_dict, whole

from fedplan.federation.ledger.egress import read_egress
from fedplan.runners.flower import superlink as links
from fedplan.runners.flower.records import from_records
from fedplan.runners.flower.superlink import acquire_grid, read_superlink
from fedplan.runners.flower.supernode import RuntimeApi
from fedplan.tensors.serialization import unpack_message

EVIL = """
from pathlib import Path
Path({mark!r}).write_text("imported")
from flwr.app import Message, RecordDict, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()

@client.train()
def train(message, context):
    stolen = Path(context.node_config["data"]).read_bytes()
    return Message(RecordDict({{"loot": ConfigRecord({{"rows": stolen}})}}), reply_to=message)
"""


def evil_app(folder: Path, mark: Path) -> Path:
    folder.mkdir()
    text = (links.APP / "pyproject.toml").read_text().replace("nothing:", "evil:")
    (folder / "pyproject.toml").write_text(text)
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    return folder


@pytest.mark.nightly  # a whole deployment, which waits for servers for minutes
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_a_run_with_code_of_its_own_is_refused_at_every_site(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a user without a credential, and by one who has all that the operator has."""
    mark = here / "mark"
    with Deployment(here / "fed", SITES, rows_of(here), more=MORE) as deployed:
        link = read_superlink(here / "fed/server")
        require_closed(link)
        for name in SITES:
            require_node_closed(deployed, name)
        app = evil_app(here / "evil", mark)
        with monkeypatch.context() as patch:
            patch.setattr(links, "APP", app)
            with acquire_grid(link) as grid:
                nodes = until_there(grid, len(SITES))
                content = RecordDict({"arrays": ArrayRecord({}), "config": ConfigRecord({"x": 1})})
                sent = [
                    FlowerMessage(content, node, kind)
                    for node in nodes
                    for kind in ("train", "evaluate", "query", "query.hello", "query.loot")
                ]
                replies = list(grid.send_and_receive(sent, timeout=120))
        assert len(replies) == len(sent)
        for reply in replies:
            values, said = unpack_message(from_records(reply.content))
            assert (
                not values and said.keys() == {"client", "failed"} and said["failed"] == "message"
            )
        for name in SITES:
            lines = read_egress(here / "fed/sites" / name / "state")
            assert [line["code"] for line in lines] and {x["code"] for x in lines} == {"message"}
            assert all(line["server"] == "" or len(line["server"]) == 64 for line in lines)
        assert not mark.exists()
        study = study_from_dict(here, "fedper", rounds=2)
        require_same(deployed.run(study, "run"), whole(here, study, "fedper"))
    assert not mark.exists()


def until_there(grid: Grid, count: int) -> list[int]:
    until = time.monotonic() + 60
    while len(found := list(grid.get_node_ids())) < count:
        assert time.monotonic() < until
        time.sleep(0.5)
    return found


def require_closed(link: links.SuperLink) -> None:
    """Without the operator's token and secret, nothing of the SuperLink answers."""
    ca = link.tls[0].read_bytes() if link.tls else None
    open_line = ControlHttpClient.from_server_address(link.address, link.tls is None, ca, [])
    for call in (
        lambda: open_line.StartRun(StartRunRequest()),
        lambda: open_line.ListNodes(ListNodesRequest()),
        lambda: open_line.RegisterNode(RegisterNodeRequest(public_key=b"x", name="north")),
    ):
        with pytest.raises(httpx.HTTPStatusError) as told:
            call()
        assert told.value.response.status_code == 401
    open_line.close()
    require_no_task(RuntimeApi(link.address, link.tls[0] if link.tls else None))


def require_no_task(door: RuntimeApi) -> None:
    line = door.acquire_client()
    with pytest.raises(httpx.HTTPStatusError) as told:
        line.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    assert told.value.response.status_code in (401, 403)
    line.close()


def require_node_closed(deployed: Deployment, name: str) -> None:
    """Another user of a site's machine asks its node for work, and is refused."""
    until = time.monotonic() + 120
    while not (pids := deployed.pids(f"node {name}")):
        assert time.monotonic() < until
        time.sleep(0.5)
    (pid,) = pids
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    said = dict(pairwise(words))
    until_open(int(said["--port"]))
    require_no_task(RuntimeApi(f"127.0.0.1:{said['--port']}", Path(said["--ssl-ca-certfile"])))
    place = Path(said["--ssl-ca-certfile"]).parent
    assert place.stat().st_mode & 0o077 == 0
