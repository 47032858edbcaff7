# SPDX-License-Identifier: Apache-2.0
"""The initial model of a run from Python, stored so that a process without its code can load it.

Models of transformers, with or without peft adapters, and dual encoders are built again from their
configurations. Of any other module the values alone are stored: nothing is pickled, no code is
imported by name except that of transformers and peft, and of files outside the folder only the
weights of a quantized model are read. The digests of all files are in the run's checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, cast, final

import torch
from pydantic import AfterValidator, Field
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from fedplan.data.custom_task import CustomTask
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.kinds import TASK_KINDS, make_task
from fedplan.models.adapters import import_peft, read_adapter_config
from fedplan.models.catalog import load_pretrained, no_progress_bars
from fedplan.models.dual_encoder import DualEncoder
from fedplan.models.folder import Preprocessing, image_mean_std, load_folder, save_folder
from fedplan.models.values import is_packed, is_quantized, pin_packed_layout
from fedplan.storage.files import PRIVATE, make_folder, wrap_disk_errors, write_atomic
from fedplan.studies.section import ConfigError, Section
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


def _require_built_in(kind: str) -> str:
    if kind not in TASK_KINDS:
        raise ValueError(f"{kind!r} is not a built-in task")
    return kind


def _require_plain_name(name: str) -> str:
    if not name or name.startswith(".") or set(name) & set("/\\"):
        raise ValueError(f"{name!r} is not the name of an adapter")
    return name


class StoredTask(Section):
    """The fields of a built-in task that an export needs."""

    kind: Annotated[str, AfterValidator(_require_built_in)]
    columns: list[str]
    label: str
    labels: list[str]
    max_length: int
    image_size: int
    template: str


class StoredModel(Section):
    """The content of STORED_FILE: how to build a model again.

    `params`: name of the stored value by name of each param. `class_name`: a class of transformers.
    `adapters`: names of peft adapters, each with a folder; `active`: those in use. `origin`: only
    of quantized models, the folder or Hub id with the weights, of type `dtype`.
    """

    kind: Literal["dual-encoder", "transformers", "values"]
    params: dict[str, str] = Field(default_factory=dict[str, str])
    class_name: str = Field(default="", alias="class")
    adapters: list[Annotated[str, AfterValidator(_require_plain_name)]] = Field(
        default_factory=list[str]
    )
    active: list[str] = Field(default_factory=list[str])
    origin: str = ""
    dtype: str = ""
    task: StoredTask | None = None
    sha256: dict[str, str] = Field(default_factory=dict[str, str], exclude=True)  # older versions


@final
class ModelValues(nn.Module):
    """The values of a model whose code is not here, by their names in it; without `forward`."""

    def __init__(self, values: Tensors, params: Mapping[str, str]) -> None:
        """Take the params of `params`, which maps each name to that of the value; else buffers."""
        super().__init__()
        shared = {name: nn.Parameter(values[name], requires_grad=False) for name in params.values()}
        for name in [*params, *(name for name in values if name not in shared)]:
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            if name in params:
                module.register_parameter(leaf, shared[params[name]])
            else:
                module.register_buffer(leaf, values[name])


def store_model(model: nn.Module, task: Task, folder: Path) -> None:
    """Store a model with its task in a folder of its own, which is created or replaced.

    The tokenizer or image processor of the task is stored, too; of packed (quantized) weights only
    the origin: the folder or Hub id that they were loaded from. Raises StoreError if the folder
    cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    stored = StoredModel(kind=DUAL_ENCODER)
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
            stored = _configuration(model, folder) or StoredModel(kind=VALUES)
            stored = stored.model_copy(update={"params": params})
            save_file(_stored_values(model), folder / VALUES_FILE)
        if task.kind in TASK_KINDS:
            fields: dict[str, Any] = {n: getattr(task, n) for n in StoredTask.model_fields}
            fields |= {"columns": list(task.columns), "labels": list(task.labels)}
            stored = stored.model_copy(update={"task": StoredTask(**fields)})
            write_processor(task, folder)
        for path in folder.rglob("*"):
            path.chmod(0o700 if path.is_dir() else PRIVATE)
    write_atomic(folder / STORED_FILE, stored.model_dump_json(indent=1, by_alias=True) + "\n")


def load_stored_model(folder: Path) -> tuple[nn.Module, Task]:
    """Load the model that `store_model` wrote, on the CPU, and its task.

    The model is a ModelValues if its code is unknown, the task a CustomTask without functions if it
    was not a built-in one. Raises ConfigError if a file is missing or does not fit the others, or
    if quantized weights are not found.
    """
    origin = "its folder"
    # transformers, peft and torch raise errors of any type for files that do not fit.
    try:
        stored = StoredModel(**json.loads((folder / STORED_FILE).read_bytes()))
        origin, task = stored.origin or origin, stored.task
        task = make_task(model=str(folder), **task.model_dump()) if task else CustomTask()
        with no_progress_bars(), fork_rng_state():
            return _load(folder, stored), task
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"the initial model in {folder} cannot be built from {origin}: {reason}; restore it "
            "from a backup"
        ) from error


def _load(folder: Path, stored: StoredModel) -> nn.Module:
    """Build a stored model, and set its values."""
    if stored.kind == DUAL_ENCODER:
        return load_folder(folder)
    values = load_file(folder / VALUES_FILE)
    if stored.kind == VALUES:
        return ModelValues(values, stored.params)
    model = _build(folder, stored)
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name, value in values.items():
        if name not in tensors or tensors[name].shape != value.shape:
            raise ValueError(f"{VALUES_FILE} has {name}, and the model has none of its shape")
        tensors[name].data = value
    return model


def stored_files(folder: Path) -> list[str]:
    """Return the paths of all files of the model stored in a run's folder, relative to that."""
    files = (folder / MODEL_FOLDER).rglob("*")
    return sorted(file.relative_to(folder).as_posix() for file in files if not file.is_dir())


def _stored_values(model: nn.Module) -> dict[str, Tensor]:
    """Return all params, each once, and all persistent buffers by name, without packed weights."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: t for name, t in model.named_buffers() if name in persistent}
    params = {name: t for name, t in model.named_parameters() if not is_packed(t)}
    return {n: t.detach().to(CPU).contiguous() for n, t in {**params, **buffers}.items()}


def _configuration(model: nn.Module, folder: Path) -> StoredModel | None:
    """Write the configurations of a transformers model and its adapters; return how to build it.

    Returns None and leaves no file for a model that these configurations do not define.
    """
    adapters = dict[str, Any](getattr(model, "peft_config", {}))
    base: Any = cast("Any", model).get_base_model() if adapters else model
    content: dict[str, Any] = {
        "kind": TRANSFORMERS,
        "class": type(base).__name__,
        "adapters": list(adapters),
        "active": list(getattr(model, "active_adapters", [])) if adapters else [],
        "dtype": str(getattr(base, "dtype", "")).removeprefix("torch."),
    }
    # A class of another module, or a changed one, has other params, or cannot be built at all.
    with suppress(Exception):
        content["origin"] = str(base.config._name_or_path) if is_quantized(model) else ""
        stored = StoredModel(**content)
        base.config.save_pretrained(folder)
        for name, config in adapters.items():
            config.save_pretrained(folder / "adapters" / name)
        if stored.origin:
            return stored
        with torch.device("meta"):
            built = _build(folder, stored)
        shapes = ({n: t.shape for n, t in m.state_dict().items()} for m in (model, built))
        if next(shapes) == next(shapes):
            return stored
    shutil.rmtree(folder / "adapters", ignore_errors=True)
    (folder / "config.json").unlink(missing_ok=True)
    return None


def _build(folder: Path, stored: StoredModel) -> nn.Module:
    """Build a model from the configurations in a folder; its values are new, or those of origin.

    Raises ValueError for a class that is no model of transformers, or an origin of a model that is
    not quantized.
    """
    import transformers

    loader: Any = getattr(transformers, stored.class_name, None)
    if not isinstance(loader, type) or not issubclass(loader, transformers.PreTrainedModel):
        raise ValueError(f"transformers has no model {stored.class_name!r}")
    config = load_pretrained(transformers.AutoConfig, str(folder))
    if stored.origin:
        if not getattr(config, "quantization_config", None):
            raise ValueError("only the weights of a quantized model are outside of its folder")
        dtype = getattr(torch, stored.dtype)
        settings: dict[str, Any] = {"config": config, "dtype": dtype, "device_map": {"": "cpu"}}
        model = pin_packed_layout(load_pretrained(loader, stored.origin, **settings))
    else:
        model = loader(config)
    adapted: Any = model
    for number, name in enumerate(stored.adapters):
        adapter = _without_sources(read_adapter_config(folder / "adapters" / name))
        if number:
            adapted.add_adapter(name, adapter)
        else:
            # An exported adapter names this base, and not the folder of the stored model.
            adapted.name_or_path = adapter.base_model_name_or_path
            adapted = import_peft().get_peft_model(model, adapter, adapter_name=name)
    if stored.active and len(stored.adapters) > 1:
        adapted.set_adapter(stored.active[0])
    if len(stored.active) > 1:  # a PeftModel takes one name, its tuner several
        adapted.base_model.set_adapter(stored.active)
    return adapted


def _without_sources(config: Any) -> Any:
    """Return a peft configuration whose adapter is built without other files or modules.

    Only the values that a new adapter begins with depend on these, and they are stored.
    """
    plain = {"megatron_config": None, "prompt_tuning_init": "RANDOM", "init_lora_weights": True}
    for name, value in plain.items():
        if getattr(config, name, None):
            setattr(config, name, value)
    return config


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
    """Return the size, mean and standard deviation of a task's images, or a `model`'s."""
    mean, std = (tuple(map(float, value.flatten())) for value in image_mean_std(task.source))
    size = task.image_size
    if not size and model is not None:
        size = int(cast("Any", model.backbone).config.vision_config.image_size)
    return Preprocessing(size, mean, std)
