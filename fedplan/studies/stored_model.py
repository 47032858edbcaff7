# SPDX-License-Identifier: Apache-2.0
"""The initial model of a run from Python, stored so that a process without its code can load it.

Models of transformers, with or without peft adapters, and dual encoders are built again from their
configurations. Of any other module the values alone are stored: nothing is pickled, and no code is
imported by name except that of transformers and peft.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from fedplan.data.custom_task import CustomTask
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.kinds import make_task
from fedplan.models.adapters import import_peft, read_adapter_config
from fedplan.models.catalog import load_pretrained, no_progress_bars
from fedplan.models.dual_encoder import DualEncoder
from fedplan.models.folder import Preprocessing, image_mean_std, load_folder, save_folder
from fedplan.models.values import is_packed, is_quantized, pin_packed_layout
from fedplan.storage.files import PRIVATE, make_folder, wrap_disk_errors, write_atomic
from fedplan.studies.schema import ConfigError
from fedplan.tensors.devices import CPU, fork_rng_state
from fedplan.tensors.named import Tensors

MODEL_FOLDER = "model"
"""Folder of the initial model in the folder of a run from Python."""
PROCESSOR_FILE = "preprocessor_config.json"
"""File of a Hugging Face image processor."""
STORED_FILE, VALUES_FILE = "model.json", "values.safetensors"
"""Files of a stored model: what it is, written last; values of params and buffers by name."""
DUAL_ENCODER, TRANSFORMERS, VALUES = "dual-encoder", "transformers", "values"
"""Kinds of stored models; of the last kind only the values are known."""
TASK_FIELDS = ("kind", "columns", "label", "labels", "max_length", "image_size", "template")
"""Fields of a task that an export needs."""


@final
class ModelValues(nn.Module):
    """The values of a model whose code is not here, by the names that they have in the model.

    `state_dict` has all of them; there is no `forward`.
    """

    def __init__(self, values: Tensors, params: Mapping[str, str]) -> None:
        """Take the params of `params`, which maps each name to that of the value; else buffers."""
        super().__init__()
        shared = {name: nn.Parameter(values[name], requires_grad=False) for name in params.values()}
        for name in [*params, *(name for name in values if name not in shared)]:
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    setattr(module, part, nn.Module())
                module = module.get_submodule(part)
            if name in params:
                module.register_parameter(leaf, shared[params[name]])
            else:
                module.register_buffer(leaf, values[name])


def store_model(model: nn.Module, task: Task, folder: Path) -> None:
    """Store a model in a folder of its own, which is created or replaced, with its task.

    The tokenizer or image processor of the task is stored, too; of a CustomTask nothing is. Of
    packed (quantized) weights only the origin is stored: the folder or Hub id from which
    transformers loaded the model. Raises StoreError if the folder cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    content: dict[str, Any] = {"kind": DUAL_ENCODER}
    with (
        no_progress_bars(),
        wrap_disk_errors(f"{folder} cannot be written", "free space, then start again"),
    ):
        if isinstance(model, DualEncoder):
            save_folder(model, folder, preprocessing=image_preprocessing(task, model))
        else:
            # Tied params have several names and one value.
            owners = {id(tensor): name for name, tensor in model.named_parameters()}
            named = dict(model.named_parameters(remove_duplicate=False))
            params = {name: owners[id(tensor)] for name, tensor in named.items()}
            content = {"kind": VALUES, "params": params, **_configuration(model, folder)}
            save_file(_stored_values(model), folder / VALUES_FILE)
        if not isinstance(task, CustomTask):
            content["task"] = {name: getattr(task, name) for name in TASK_FIELDS}
            write_processor(task, folder)
        for path in folder.rglob("*"):
            path.chmod(0o700 if path.is_dir() else PRIVATE)
        content["sha256"] = _file_digests(folder)
    write_atomic(folder / STORED_FILE, json.dumps(content, indent=1) + "\n")


def load_stored_model(folder: Path) -> tuple[nn.Module, Task]:
    """Load the model that `store_model` wrote, on the CPU, and its task.

    The model is a ModelValues if its code is unknown, the task a CustomTask without functions if it
    was one. Raises ConfigError if a file is missing or changed, or if quantized weights are not
    found.
    """
    try:
        content = json.loads((folder / STORED_FILE).read_text(encoding="utf-8"))
        if content["sha256"] != _file_digests(folder):
            raise ValueError("its files have changed")
        task = CustomTask()
        if stored := content.get("task"):
            task = make_task(model=str(folder), **stored)
        if content["kind"] == DUAL_ENCODER:
            return load_folder(folder), task
        values = load_file(folder / VALUES_FILE)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} has no readable initial model: {error}; restore it from a backup"
        ) from error
    if content["kind"] == VALUES:
        return ModelValues(values, content["params"]), task
    try:
        with no_progress_bars(), fork_rng_state():
            model = _build(folder, content)
    except (OSError, ValueError, AttributeError) as error:
        origin = content["origin"] or "its configuration"
        raise ConfigError(
            f"the model in {folder} cannot be built from {origin}: {error}"
        ) from error
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name, value in values.items():
        tensors[name].data = value
    return model, task


def stored_model_faults(folder: Path) -> list[str]:
    """Return a sentence if a file of a stored model is missing or has changed; else nothing."""
    if not (folder / STORED_FILE).is_file():
        return []
    try:
        content = json.loads((folder / STORED_FILE).read_text(encoding="utf-8"))
        if content["sha256"] == _file_digests(folder):
            return []
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return [f"the initial model in {folder} has changed"]


def _stored_values(model: nn.Module) -> dict[str, Tensor]:
    """Return all params, each once, and all persistent buffers by name, without packed weights."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: t for name, t in model.named_buffers() if name in persistent}
    params = {name: t for name, t in model.named_parameters() if not is_packed(t)}
    return {n: t.detach().to(CPU).contiguous() for n, t in {**params, **buffers}.items()}


def _configuration(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Write the configurations of a transformers model and its adapters; return how to build it.

    Returns {} and leaves no file for a model that these configurations do not define.
    """
    adapters = dict[str, Any](getattr(model, "peft_config", {}))
    base: Any = cast("Any", model).get_base_model() if adapters else model
    content: dict[str, Any] = {
        "kind": TRANSFORMERS,
        "class": type(base).__name__,
        "adapters": list(adapters),
        "active": list(getattr(model, "active_adapters", [])) if adapters else [],
        "origin": str(base.config._name_or_path) if is_quantized(model) else "",
        "dtype": str(getattr(base, "dtype", "")).removeprefix("torch."),
    }
    # A class of another module, or a changed one, has other params, or cannot be built at all.
    with suppress(Exception):
        base.config.save_pretrained(folder)
        for name, config in adapters.items():
            config.save_pretrained(folder / "adapters" / name)
        if content["origin"]:
            return content
        with torch.device("meta"):
            built = _build(folder, content)
        shapes = ({n: t.shape for n, t in m.state_dict().items()} for m in (model, built))
        if next(shapes) == next(shapes):
            return content
    shutil.rmtree(folder / "adapters", ignore_errors=True)
    (folder / "config.json").unlink(missing_ok=True)
    return {}


def _build(folder: Path, content: Mapping[str, Any]) -> nn.Module:
    """Build a model from the configurations in a folder; its values are new, or those of origin."""
    import transformers

    config = load_pretrained(transformers.AutoConfig, str(folder))
    loader: Any = getattr(transformers, content["class"])
    if content["origin"]:
        dtype = getattr(torch, content["dtype"])
        settings: dict[str, Any] = {"config": config, "dtype": dtype, "device_map": {"": "cpu"}}
        model = pin_packed_layout(load_pretrained(loader, content["origin"], **settings))
    else:
        model = loader(config)
    adapted: Any = model
    for number, name in enumerate(content["adapters"]):
        adapter = read_adapter_config(folder / "adapters" / name)
        if number:
            adapted.add_adapter(name, adapter)
        else:
            adapted = import_peft().get_peft_model(model, adapter, adapter_name=name)
    if content["active"] and len(content["adapters"]) > 1:
        adapted.set_adapter(content["active"][0])
    return adapted


def _file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file with values in a folder."""
    digests = dict[str, str]()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            digests[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return digests


def write_processor(task: Task, folder: Path) -> None:
    """Write the tokenizer or image processor of a task into a folder; nothing without one."""
    if not task.kind.startswith("image"):
        if task.source:
            task.tokenizer.save_pretrained(folder)
        return
    image = image_preprocessing(task)
    config = {
        # PIL, as in the run: torchvision resizes slightly differently.
        "image_processor_type": "ViTImageProcessorPil",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": image.size, "width": image.size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": image.mean,
        "image_std": image.std,
    }
    (folder / PROCESSOR_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def image_preprocessing(task: Task, model: DualEncoder | None = None) -> Preprocessing:
    """Return the size, mean and standard deviation of a task's images.

    The size that a CustomTask does not know is that of the `model`.
    """
    mean, std = (tuple(map(float, value.flatten())) for value in image_mean_std(task.source))
    size = task.image_size
    if not size and model is not None:
        size = int(cast("Any", model.backbone).config.vision_config.image_size)
    return Preprocessing(size, mean, std)
