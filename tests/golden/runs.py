# SPDX-License-Identifier: Apache-2.0
"""Golden runs: small runs of which every bit is known, so that no change of words changes one.

`python tests/golden/runs.py --write` plays all of them and stores what came of them anew; pytest
plays them and compares. Of a run everything is kept that it leaves on the disk, what it prints and,
where there are messages, all of these in their order. Texts are stored as texts; tensors as digests.

What is random is drawn from a fixed stream, and the clock stands still, in the process that plays a
run (`hold_still`): so keys, noise, ids and chains of records have the same bits each time. Little of
the package is named here: `sites_of` and `entry` are all.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STORED = HERE / "stored"
NAMES = ("local", "pool", "dp", "secure", "flower", "link")
SAME = {"pool": "local"}
"""Runs that must leave what another one leaves: nothing is stored of them."""
STEADY = {
    **{"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "PYTHONHASHSEED": "0"},
    **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1"},
    **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    **{"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "TERM": "dumb"},
    **{"TZ": "UTC", "LANG": "C.UTF-8"},
}
"""The environment of every run: other kernels of the same torch may round otherwise."""
# The path of the rows stands in every study, and so in its digest: it is the same in each folder.
CLIENTS = ("client-00", "client-01", "client-02")

STUDY = """name = "golden"
seed = 7
device = "cpu"
[model]
type = "vit"
config = { image_size = 8, patch_size = 4, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, intermediate_size = 16 }
[task]
kind = "image-classification"
input = "image"
label = "digit"
labels = [0, 1, 2]
image_size = 8
[data]
path = "/proc/self/cwd/digits.npz"
split = "train"
test_split = "test"
partition = "dirichlet"
alpha = 0.8
num_clients = 3
"""
METHOD = """[method]
plan = "chain(share(), when(after(1), freeze(query | key)), keep(head))"
compression = "pipe(delta(), bf16())"
"""
TRAIN = """[train]
rounds = 3
batch_size = 8
optimizer = "adamw"
lr = 1e-2
weight_decay = 0.01
"""
EVALUATE = "[evaluate]\nattention_examples = 4\n"
QUICK = "[timeouts]\nsites = 20.0\nupdates = 120.0\nreconnect = 1.0\npoll_interval = 0.01\n"
ROUGH = '[train]\nrounds = 3\nbatch_size = 8\noptimizer = "sgd"\nmomentum = 0.9\nlr = 5e-2\n'
STUDIES = {
    "local": STUDY + METHOD + TRAIN + EVALUATE,
    "dp-client": STUDY
    + METHOD.replace('compression = "pipe(delta(), bf16())"\n', "")
    + ROUGH
    + '[privacy]\nunit = "client"\nepsilon = 200.0\nnoise_multiplier = 0.8\nclipping_norm = 0.5\nclipping_quantile = 0.5\n',
    "dp-example": STUDY.replace('partition = "dirichlet"\nalpha = 0.8', 'partition = "iid"')
    + '[method]\nname = "fedper"\n'
    + ROUGH.replace("batch_size = 8", "batch_size = 4\nsteps = 2")
    + '[privacy]\nunit = "example"\nepsilon = 200.0\nnoise_multiplier = 1.1\nexamples_per_site = 16\n',
    "secure": STUDY
    + METHOD.replace('compression = "pipe(delta(), bf16())"\n', "")
    + ROUGH.replace("rounds = 3", "rounds = 2")
    + QUICK
    + '[aggregation]\nkind = "secure"\nthreshold = 2\nmin_contributors = 2\n',
    "flower": STUDY + METHOD + TRAIN + QUICK,
    "link": STUDY.partition("[data]")[0]
    + "[data]\nholdout_fraction = 0.2\n"
    + f"[clients]\nnames = {list(CLIENTS)}\n"
    + METHOD
    + TRAIN,
}


# ---- in the process that plays a run


def play(name: str, folder: Path) -> None:
    """Play a run in a folder, which then has in `kept` all that is to be compared."""
    hold_still(alike=name in ("local", "pool", "link"))
    os.umask(0o022)
    os.chdir(folder)
    some_digits(folder)
    (folder / "probe.json").write_text(json.dumps(probe()))
    out = folder / "kept"
    out.mkdir()
    if name in ("local", "pool"):
        more = ["--runner", "pool", "--workers", "2"] if name == "pool" else []
        hold_children(folder)
        command_line("local", Path("kept"), more)
    elif name == "dp":
        command_line("dp-client", Path("kept/client"), [])
        command_line("dp-example", Path("kept/example"), [])
    elif name == "link":
        hold_children(folder)
        over_a_link(folder)
    else:
        over_flower(name, folder, out)


def command_line(study: str, out: Path, more: list[str]) -> None:
    """Run a study and verify it, as one types it; what is printed is kept beside the run."""
    out.mkdir(exist_ok=True)
    Path("study.toml").write_text(STUDIES[study])
    typed(out / "run.txt", "run", "study.toml", "--output", str(out / "run"), *more)
    typed(out / "verify.txt", "verify", str(out / "run"))


def typed(file: Path, *args: str) -> None:
    """Give a command, and keep what it prints."""
    told, before = io.StringIO(), sys.argv
    sys.argv = ["fedplan", *args]
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            entry()()
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"{args}: {told.getvalue()}") from error
    finally:
        sys.argv = before
    file.write_text(told.getvalue())


def entry() -> Callable[[], None]:
    """What the command `fedplan` calls."""
    from importlib import import_module

    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["fedplan"]
    module, _, function = said.partition(":")
    return getattr(import_module(module), function)


def over_flower(name: str, folder: Path, out: Path) -> None:
    """Carry a study by Flower's messages in one process, and keep all of them."""
    from flwr.app import Context, RecordDict

    sys.path.insert(0, str(ROOT / "tests" / "kit"))
    from grids import InProcess

    (folder / "study.toml").write_text(STUDIES[name])
    for client in CLIENTS:
        make_site(folder, client)
    messages = list[dict[str, Any]]()

    class Listening(InProcess):
        def _answer(self, message: Any) -> Any:
            where = self.contexts[message.metadata.dst_node_id].node_config["name"]
            answer = super()._answer(message)
            kind = message.metadata.message_type
            for sent, way in ((message, "to"), (answer, "from")):
                said = (
                    records_told(sent, folder) if sent.has_content() else {"error": str(sent.error)}
                )
                messages.append({way: where, "type": kind, **said})
            return answer

    server, client = sites_of(folder)
    grid = Listening(client, [{"name": each} for each in reversed(CLIENTS)])
    state, run = RecordDict(), {"folder": str(out / "run")}
    context = Context(run_id=1, node_id=1, node_config={}, state=state, run_config=run)
    server(grid, context)
    for each in CLIENTS:
        shutil.move(folder / "sites" / each / "state", out / "sites" / each)
        typed(out / f"egress-{each}.txt", "egress", f"kept/sites/{each}")
    typed(out / "verify.txt", "verify", "kept/run")
    (out / "messages.jsonl").write_text("".join(json.dumps(each) + "\n" for each in messages))


def over_a_link(folder: Path) -> None:
    """Carry a study by a real SuperLink and real SuperNodes of this machine."""
    import numpy as np

    sys.path.insert(0, str(ROOT / "tests" / "kit"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "start"), str(ROOT)])
    from deployment import Deployment

    with np.load(folder / "digits.npz") as rows:
        held = {name: rows[f"{name}_train"] for name in ("image", "digit")}
    data = {name: folder / f"{name}.npz" for name in CLIENTS}
    for place, (_, file) in enumerate(data.items()):
        np.savez(file, **{name: values[place::3] for name, values in held.items()})
    with Deployment(folder / "fed", list(CLIENTS), data, insecure=True) as fed:
        shutil.copytree(fed.run(STUDIES["link"]), folder / "kept" / "run")
    for each in ("log.jsonl", "status.json"):  # who came first, and when
        (folder / "kept" / "run" / each).unlink()
    for each in CLIENTS:
        homes = folder / "fed" / "sites" / each / "state" / "golden-7" / each
        shutil.copytree(homes, folder / "kept" / "sites" / each)


def sites_of(folder: Path) -> tuple[Any, Any]:
    """The two ends of a study on Flower: the server's app, and that of sites with folders."""
    from fedplan.runners.flower.apps import client_app, study_server_app
    from fedplan.runners.site import read_site
    from fedplan.runners.site_runtime import SiteRuntime
    from fedplan.studies.schema import read_study

    file = folder / "study.toml"
    sites = {n: SiteRuntime(read_site(folder / "sites" / n), read_study(file)) for n in CLIENTS}

    def answer(context: Any, kind: str, message: Any) -> Any:
        return sites[context.node_config["name"]].answer(kind, message)

    return study_server_app(file), client_app(answer)


def make_site(folder: Path, name: str) -> None:
    """The folder of a site, with a node key that follows from its name."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    place, peers = folder / "sites" / name, folder / "peers"
    for each in (place, peers):
        each.mkdir(parents=True, exist_ok=True)
    key = ec.derive_private_key(int(name[-2:]) + 1000, ec.SECP384R1())
    own = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (place / "node").write_bytes(own)
    (peers / f"{name}.pub").write_bytes(public)
    (place / "site.toml").write_text(
        f'name = "{name}"\npeer_keys = "../../peers"\n[server]\naddress = "here:1"\nnode_key = "node"\n'
    )


def some_digits(folder: Path) -> None:
    """Rows whose label can be seen in them."""
    import numpy as np

    draw, found = np.random.default_rng(0), dict[str, Any]()
    for split, count in {"train": 48, "test": 16}.items():
        label = draw.integers(0, 3, count)
        image = draw.integers(0, 120, (count, 8, 8)) + 60 * label[:, None, None]
        found |= {f"image_{split}": image.astype(np.uint8), f"digit_{split}": label}
    np.savez(folder / "digits.npz", **found)


def probe() -> dict[str, str]:
    """A digest of what this machine's floats give in the steps that a run is made of."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
    model = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), layer, nn.Linear(16, 3))
    model[2] = nn.TransformerEncoderLayer(4, 2, 32, dropout=0.0, batch_first=True)
    model[3] = nn.Linear(4, 3)
    steps = {
        torch.optim.AdamW: {"lr": 1e-2, "weight_decay": 0.01},
        torch.optim.SGD: {"lr": 1e-2, "momentum": 0.9},
    }
    said = hashlib.sha256()
    for made, settings in steps.items():
        optimizer = made(model.parameters(), **settings)
        for _ in range(4):
            loss = nn.functional.cross_entropy(
                model(torch.randn(8, 3, 8, 8)).flatten(0, 1), torch.randint(0, 3, (128,))
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        said.update(loss.detach().numpy().tobytes())
    for value in model.state_dict().values():
        said.update(value.numpy().tobytes())
    wide = torch.randn(37, 64, dtype=torch.float64)
    for each in (torch.softmax(wide @ wide.T, 1), wide.exp(), wide.tanh(), wide.float().erf()):
        said.update(each.numpy().tobytes())
    return {"sha256": said.hexdigest(), "torch": torch.__version__}


def hold_still(alike: bool = False) -> None:
    """Have the package draw from a fixed stream, see a fixed time, and sign without chance.

    Only the package itself is held: other libraries go on as they are. Where several processes draw,
    in an order that nobody knows, all draws are `alike`.
    """
    import builtins
    import datetime
    import importlib.metadata
    import random
    import secrets
    import types

    package, drawn, real = str(ROOT / "fedplan") + os.sep, [0], os.urandom
    between = (random.__file__, secrets.__file__)

    def urandom(size: int, /) -> bytes:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in between:
            frame = frame.f_back
        if frame is None or not frame.f_code.co_filename.startswith(package):
            return real(size)
        # Short ones are ids and names of passing files: how many of these, the clock decides.
        drawn[0] += 1 if size >= 32 and not alike else 0
        if size < 32:
            return hashlib.shake_256(b"golden").digest(size)
        return hashlib.shake_256(f"golden {drawn[0]}".encode()).digest(size)

    os.urandom = random._urandom = urandom  # type: ignore[attr-defined,assignment]
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)

    class Still(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return moment.astimezone(tz)

    # C code of others knows the real class by its size: only the package is given another.
    others = {
        "datetime": (datetime, {"datetime": Still}),
        "importlib.metadata": (importlib.metadata, {"version": lambda name: "0.0.0"}),
    }
    given = {name: types.ModuleType(name) for name in others}
    for name, (module, changed) in others.items():
        vars(given[name]).update(vars(module) | changed)
    importing = builtins.__import__

    def imported(name: str, globals: Any = None, *more: Any, **said: Any) -> Any:
        asks = str((globals or {}).get("__file__", ""))
        if name in given and asks.startswith(package):
            return given[name]
        return importing(name, globals, *more, **said)

    builtins.__import__ = imported
    with contextlib.suppress(ImportError):
        from cryptography.hazmat.primitives.asymmetric import ec

        class Same(ec.ECDSA):
            def __init__(self, hashed: Any, *_: Any, **__: Any) -> None:
                super().__init__(hashed, deterministic_signing=True)

        ec.ECDSA = Same  # type: ignore[misc]


def hold_children(folder: Path) -> None:
    """Have processes that the package starts be held from their first line."""
    (folder / "start").mkdir()
    (folder / "start" / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(HERE)!r})\nimport runs\nruns.hold_still(alike=True)\n"
    )
    sys.path.insert(0, str(folder / "start"))


# ---- what is told of bytes


def records_told(message: Any, folder: Path) -> dict[str, Any]:
    """What a message of Flower's holds, whatever its records are called."""
    found, whole = dict[str, Any](), list[bytes]()
    for name, record in message.content.items():
        fields = found.setdefault(name, {})
        for field, value in record.items():
            data = getattr(value, "data", value)
            if isinstance(data, bytes):
                whole.append(data)
                said = safetensors_told(data) or {"sha256": hashlib.sha256(data).hexdigest()}
                form = [value.dtype, list(value.shape), value.stype] if data is not value else None
                fields[field] = said | ({"array": form} if form else {})
            else:
                fields[field] = value
    told = b"".join(whole)
    if str(folder).encode() in told:  # whose length is that of the folder's name
        return {"records": found, "bytes": "<normalised>"}
    return {"records": found, "bytes": len(told), "sha256": hashlib.sha256(told).hexdigest()}


def safetensors_told(data: bytes) -> dict[str, Any]:
    """The metadata and the tensors of safetensors' bytes, each by a digest; nothing of others."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        return {}
    try:
        head = json.loads(data[8 : 8 + size])
    except ValueError:
        return {}
    meta = {k: opened(v) for k, v in head.pop("__metadata__", {}).items()}
    tensors = {
        name: f"{each['dtype']} {'x'.join(map(str, each['shape'])) or 'one'} "
        + hashlib.sha256(data[8 + size :][slice(*each["data_offsets"])]).hexdigest()
        for name, each in head.items()
    }
    return {"meta": meta, "tensors": tensors}


def opened(text: str) -> Any:
    """JSON within a text; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- what is compared

FIELDS = ("pid", "host", "seconds", "round_seconds", "seconds_left")
"""Fields of a process or of a clock: whose, and how long, differs each time."""
PROCESS = re.compile(r'"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12} \d+"')
"""The start of a machine and that of a process on it."""


def plain(text: str, folder: Path) -> str:
    """A text without what differs between two machines and two moments."""
    text = text.replace(str(folder.resolve()), "<folder>").replace(str(ROOT), "<repo>")
    for name in FIELDS:
        text = re.sub(rf'("{name}": ?)("[^"]*"|[-+0-9.e]+)', rf'\1"<{name}>"', text)
    return PROCESS.sub('"<process>"', text)


def alike_on_all(found: dict[str, str]) -> dict[str, str]:
    """What every runner leaves with the same bits: all but what tells who was asked when."""
    told = ("run/log.jsonl", "run/status.json")
    files = json.loads(found["files.json"])
    kept = {name: said for name, said in files.items() if name not in told}
    whole = {name: text for name, text in found.items() if name.removesuffix(".txt") not in told}
    return whole | {"files.json": json.dumps(kept, indent=1) + "\n"}


def readable(name: str, text: str) -> str:
    """JSON with a line for each word of it, so that a difference is seen; other texts as they are."""
    try:
        if name.endswith(".json"):
            return json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"
        if name.endswith(".jsonl"):
            lines = [json.loads(line) for line in text.splitlines()]
            return "".join(json.dumps(x, indent=1, ensure_ascii=False) + "\n" for x in lines)
    except ValueError:
        pass
    return text


def compared(folder: Path) -> dict[str, str]:
    """All that a run left, as texts by their names: those of its files, and two that tell of all.

    `files.json` has the size and the digest of each file, as it lies there; `tensors.json` what is
    in those of tensors.
    """
    kept, found = folder / "kept", dict[str, str]()
    files, tensors = dict[str, Any](), dict[str, Any]()
    for file in sorted(each for each in kept.rglob("*") if each.is_file()):
        # printed on a screen, whose words may change; versions and a machine
        if file.suffix == ".txt" or file.name.startswith("environment.jsonl"):
            continue
        name, data = str(file.relative_to(kept)), file.read_bytes()
        mode = f"{file.stat().st_mode & 0o777:o}"
        files[name] = f"{mode} {len(data)} {hashlib.sha256(data).hexdigest()}"
        if file.suffix == ".safetensors":
            tensors[name] = safetensors_told(data)
            continue
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if (said := plain(text, folder)) != text:
            files[name] = f"{mode} <normalised>"
        found[name if name.endswith(".txt") else f"{name}.txt"] = readable(name, said)
    found["files.json"] = json.dumps(files, indent=1) + "\n"
    found["tensors.json"] = json.dumps(tensors, indent=1) + "\n"
    return found


def loosely(found: dict[str, str]) -> dict[str, str]:
    """The same with every number and digest replaced: what is left on a machine of other floats."""
    numbers = re.compile(r"\b[0-9a-f]{16,}\b|-?\b\d+(\.\d+)?([eE][-+]?\d+)?\b")
    return {numbers.sub("#", name): numbers.sub("#", text) for name, text in found.items()}


# ---- playing, storing


def played(name: str, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What a run left, and the probe of the machine, from a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--play", name, str(folder)],
        env={**os.environ, **STEADY, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout[-4000:]}{done.stderr[-6000:]}")
    return compared(folder), json.loads((folder / "probe.json").read_text())


def stored(name: str) -> dict[str, str]:
    """What was stored of a run."""
    place = STORED / name
    files = [each for each in sorted(place.rglob("*")) if each.is_file()]
    return {str(each.relative_to(place)): each.read_text(encoding="utf-8") for each in files}


def write(names: list[str]) -> None:
    """Play runs and store what they left."""
    for name in names:
        if name in SAME:
            continue
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            found, seen = played(name, Path(folder))
        shutil.rmtree(STORED / name, ignore_errors=True)
        for file, text in found.items():
            (STORED / name / file).parent.mkdir(parents=True, exist_ok=True)
            (STORED / name / file).write_text(text, encoding="utf-8")
        (STORED / "probe.json").write_text(json.dumps(seen, indent=1) + "\n")


def differences(one: dict[str, str], other: dict[str, str]) -> Iterator[str]:
    """The lines in which two runs differ, some of each file."""
    import difflib

    for name in sorted(one.keys() | other):
        left, right = one.get(name, "").splitlines(), other.get(name, "").splitlines()
        lines = list(
            difflib.unified_diff(left, right, f"stored/{name}", f"now/{name}", "", "", 0, "")
        )
        yield from lines[:12]


def main() -> None:
    """Write what is stored anew, or play one run in a folder."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--write", nargs="*", metavar="RUN", help="store these runs, or all, anew")
    asked.add_argument("--play", nargs=2, metavar=("RUN", "FOLDER"), help="play a run in a folder")
    said = asked.parse_args()
    if said.play:
        play(said.play[0], Path(said.play[1]).resolve())
    elif said.write is not None:
        write(said.write or list(NAMES))
    else:
        asked.print_help()


if __name__ == "__main__":
    main()
