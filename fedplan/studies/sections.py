# SPDX-License-Identifier: Apache-2.0
"""Sections of a study file on model, task, data, method and local training."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from fedplan.data.partition import Partition
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.kinds import TASK_KINDS
from fedplan.language.parser import parse_part
from fedplan.methods.method import Method
from fedplan.models.values import QUANTIZATIONS
from fedplan.studies.field_types import (
    AdapterName,
    ClientHookName,
    Count,
    LoopName,
    OptimizerName,
    PartitionKind,
    PartText,
    Positive,
    ProbeName,
    ProductText,
    Scalar,
    ServerOptimizerName,
    TaskKind,
    one_of_validator,
)
from fedplan.studies.section import STRICT, Section, as_value_error
from fedplan.training.activation_cache import DEFAULT_MEGABYTES, ActivationCache
from fedplan.training.fit import PRECISIONS, TrainArguments
from fedplan.training.optimizers import (
    DECAY,
    MOMENTUM,
    LRSchedule,
    make_client_optimizer,
    make_lr_schedule,
)

FORBIDDEN_SETTINGS = frozenset(
    (
        *("auto_map", "trust_remote_code", "code_revision", "use_kernels", "kernel_config"),
        *("use_safetensors", "gguf_file", "cache_dir", "offload_folder"),
        *("force_download", "token", "proxies"),
    )
)
"""Settings that make transformers run code, or read, write or download other files."""
MAX_LAYERS, MAX_SETTING = 1000, 2**31
"""Limits of layer counts and of other integers: a site builds an outline of unapproved models."""
LAYER_COUNT_NAME = re.compile("layer|depth|block|group|stage|expert")
"""Names of settings that count layers."""
IMPLEMENTATION_NAME = re.compile("_?(attn|experts)_implementation.*")
"""Settings that choose an implementation by name."""


def _validate_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings; raise ValueError for one, also nested, that is unsafe or too large."""
    for name, value in settings.items():
        if name in FORBIDDEN_SETTINGS:
            raise ValueError(f"{name} is not a setting of the model: leave it out")
        if IMPLEMENTATION_NAME.fullmatch(name) and any(sign in str(value) for sign in "/|@"):
            raise ValueError(
                f"{name} = {str(value)[:60]!r} would download code: use one of transformers' own, "
                "such as 'eager' or 'sdpa'"
            )
        limit = MAX_LAYERS if LAYER_COUNT_NAME.search(name) else MAX_SETTING
        numbers = cast("list[Any]", value) if isinstance(value, list) else [value]
        if any(isinstance(number, int) and number > limit for number in numbers):
            raise ValueError(f"{name} = {str(value)[:60]} is above the limit of {limit}")
        if isinstance(value, dict):
            _validate_settings(cast("dict[str, Any]", value))
    return settings


class AdapterSection(BaseModel):
    """A peft adapter to add to the model: a new one by its `type`, or a saved one by its `path`."""

    model_config = STRICT | ConfigDict(extra="allow")

    type: AdapterName = ""
    """Adapter type of peft, such as "lora"; other fields of this section are its peft settings."""
    path: str = ""
    """Saved adapter to start from, instead of a type: a folder or hub:org/name."""
    target: str = ""
    """Part whose layers get the adapter, such as "query | value"; default: peft's own choice."""

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that are passed to peft's configuration."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _validate_choice(self) -> AdapterSection:
        if bool(self.type) == bool(self.path):
            raise ValueError("set either type (a new adapter) or path (a saved one)")
        if self.path and (self.target or self.settings):
            extra_fields = ", ".join(["target"] * bool(self.target) + sorted(self.settings))
            raise ValueError(f"a saved adapter has its own settings: leave out {extra_fields}")
        if self.target and "target_modules" in self.settings:
            raise ValueError("set either target (a part) or target_modules (names of layers)")
        return self


class ModelSection(Section):
    """The initial model: pretrained weights, a type with new weights, or two encoders joined."""

    path: str = ""
    """Pretrained model: a folder or hub:org/name."""
    type: str = ""
    """Model type of transformers, such as "vit", for new weights drawn from the seed; instead of
    path."""
    config: Annotated[dict[str, Any], AfterValidator(_validate_settings)] = {}
    """Changes to the model's transformers configuration, such as { hidden_size = 64 }."""
    vision: str = ""
    """Dual encoder: folder or hub:org/name of the image encoder."""
    text: str = ""
    """Dual encoder: folder or hub:org/name of the text encoder."""
    bridge: str = ""
    """Dual encoder: safetensors file with the projections that join both encoders."""
    digest: str = ""
    """Expected digest of the initial model, from `fedplan digest`; another model is rejected."""
    freeze_batch_norm: bool = False
    """Freeze batch-norm statistics, so that training changes nothing but parameters."""
    layer_map_like: str = ""
    """For a model type that fedplan does not know: a known type with the same layers."""
    layer_map: dict[str, Any] = {}
    """For a model type that fedplan does not know: its layer map, as `fedplan propose` prints
    it."""
    from_python: str = ""
    """Set by fedplan.simulate: class of an in-memory model. Leave empty in files."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the loaded weights."""
    quantization: Annotated[
        str,
        AfterValidator(one_of_validator("quantization", ("", *QUANTIZATIONS))),
        Field(json_schema_extra={"enum": ["", *QUANTIZATIONS]}),
    ] = ""
    """Quantize linear layers, which are then frozen: "nf4", "fp4" or "int8"; default: no."""
    adapter: AdapterSection | None = None
    """Adapter of peft to add to the model."""

    @model_validator(mode="after")
    def _validate_choice(self) -> ModelSection:
        if bool(self.vision) != bool(self.text) or (self.bridge and not self.vision):
            raise ValueError("a dual encoder needs both vision and text; bridge joins them")
        if sum(map(bool, (self.path, self.type, self.vision, self.from_python))) != 1:
            raise ValueError(
                "set exactly one of: path (pretrained), type (new weights), vision and text"
            )
        if (self.layer_map_like or self.layer_map) and (
            self.vision or (self.layer_map_like and self.layer_map)
        ):
            raise ValueError(
                "set layer_map_like or layer_map, not both, and not for a dual encoder"
            )
        if self.quantization and not self.path:
            raise ValueError("quantization needs pretrained weights: set path")
        return self

    @property
    def is_plain(self) -> bool:
        """Whether the weights are float32, not quantized, and without an adapter."""
        return self.dtype == "float32" and not self.quantization and self.adapter is None


class TaskSection(Section):
    """The task of the model, and the dataset's columns of inputs and labels."""

    kind: TaskKind
    """Task, such as "text-classification" or "causal-lm", or the name of your own."""
    input: str | list[str] = "text"
    """Input column of the dataset; for two columns, both names separated by a space. A list has
    names with spaces in them."""
    label: str = ""
    """Label column, for tasks with labels."""
    label_separator: str = ""
    """Text between the labels of a cell, such as ";" in "red;blue", for several labels per row; an
    empty cell has none."""
    labels: list[str | int] = []
    """All labels; needed if clients are sites, or with [privacy]. Default: read from the data."""
    tokenizer: str = ""
    """Folder or hub:org/name of the tokenizer; default: the model's own."""
    max_length: Positive = Task.max_length
    """Maximum number of tokens of an example; longer texts are truncated, or split (causal-lm)."""
    image_size: Count = Task.image_size
    """Height and width of the model's input images, in pixels; required for images."""
    prompt_template: str = Task.template
    """Sentence around a label, for the task image-text."""
    packing: bool = Task.packing
    """Pack several conversations into one sequence."""
    class_weights: dict[str, Annotated[float, Field(gt=0)]] | Literal["balanced"] = {}
    """Loss weight of each label, such as { rare = 5.0 }, default 1; or "balanced": in inverse
    proportion to the label's number of training examples."""
    from_python: str = ""
    """Set by fedplan.simulate: text of an in-memory task. Leave empty in files."""

    @model_validator(mode="after")
    def _validate_fields(self) -> TaskSection:
        kind = TASK_KINDS.get(self.kind)
        if kind is None or self.from_python:
            return self  # a task of the user's own
        uses = {
            "label_separator": kind.answer_kind == "labels",
            "tokenizer": not self.kind.startswith("image-") or self.kind == "image-text",
            "prompt_template": self.kind == "image-text",
        }
        for name, used in uses.items():
            if getattr(self, name) != type(self).model_fields[name].default and not used:
                raise ValueError(f"{name} is not used by {self.kind}: leave it out")
        if "{}" not in self.prompt_template:
            raise ValueError(
                f"prompt_template is {self.prompt_template!r}: put {{}} where the label stands, as "
                f"in {Task.template!r}"
            )
        return self

    @property
    def input_columns(self) -> list[str]:
        """The names of the input columns."""
        return self.input.split() if isinstance(self.input, str) else self.input


class DataSection(Section):
    """The dataset, its training and test rows, and how rows are divided among clients.

    Set `test_path`, `test_split` or `test_filter` to have a common test set, which is never trained
    on. Validation examples are not trained on either: `evaluate.keep_best`, early stopping and
    whoever compares settings choose on them, never on a test.
    """

    path: str = ""
    """Dataset: a file, folder or hub:org/name; empty if each site has its own."""
    split: str = ""
    """Split of the dataset to train on, if it has several."""
    test_path: str = ""
    """Dataset of the common test set, if it is another file."""
    test_split: str = ""
    """Split of the dataset that is the common test set."""
    validation_split: str = ""
    """Split of the dataset that is the common validation set; it must be public with [privacy]."""
    train_filter: dict[str, str | int] = {}
    """Train only on rows with these column values, such as { year = 2024 }."""
    test_filter: dict[str, str | int] = {}
    """Use the rows with these column values as the common test set."""
    filter: dict[str, list[Scalar]] = {}
    """Use only rows with one of these values, to train and to test: { ward = ["a", "b"] }."""
    max_examples: Count = 0
    """Maximum number of training rows, drawn by the seed; 0: all."""
    max_test_examples: Count = 0
    """Maximum number of common test rows, drawn by the seed; 0: all."""
    partition: PartitionKind = "iid"
    """Partition among clients: "iid", "dirichlet", "pathological" or "column"."""
    num_clients: Count = 10
    """Number of clients; with partition = "column", the largest so many values, 0: all."""
    partition_column: str = Partition.column
    """Column whose values define the clients, or the labels to partition by."""
    alpha: Annotated[float, Field(ge=0)] = Partition.alpha
    """Concentration of labels with partition dirichlet; the smaller, the more clients differ."""
    classes_per_client: Count = Partition.classes_per_client
    """Maximum number of labels of a client, with partition pathological."""
    clients_per_value: Positive = Partition.clients_per_value
    """Clients per value of the column."""
    min_examples: Annotated[int, Field(ge=0)] = (
        Partition.min_examples + 1
    )  # to be tested on one more
    """Minimum number of examples of a client."""
    holdout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Fraction of each client's examples that is held out for its own test."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each client's training examples that is held out to choose on; 0: none."""
    group: str = ""
    """Column such as patient_id: rows with an equal value are on one side of every split, and at
    one client unless partition is "column"."""
    from_python: bool = False
    """Set by fedplan.simulate: the data came from Python. Leave out in files."""

    @model_validator(mode="after")
    def _validate_partition(self) -> DataSection:
        if self.partition == "column" and self.path and not self.partition_column:
            raise ValueError(
                'partition_column is empty: with partition = "column", name the column of clients'
            )
        if self.classes_per_client and self.partition != "pathological":
            raise ValueError(
                'classes_per_client is for partition = "pathological", and the partition is '
                f'"{self.partition}": leave it out, or change the partition'
            )
        return self


class MethodSection(Section):
    """A published method by `name` with its `settings`, your own `plan`, or both.

    Your own code is named as `package.module:attribute`, or by an entry point of an installed
    package.
    """

    name: str = ""
    """Method, such as "fedavg" (see `fedplan methods`), or the name of your own."""
    plan: str = ""
    """Plan, such as "chain(share(), keep(head))"; with a name, it is applied after the method's."""
    settings: dict[str, Scalar] = {}
    """Settings of the method."""
    probe: ProbeName = ""
    """Scoring function by which a plan with best(...) chooses layers; default: random."""
    joint_choice: bool = Method.joint_choice
    """All clients choose the same layers, by the sum of their scores."""
    phases: dict[str, Count] = {}
    """Number of rounds after which each phase of the plan starts, such as { frozen = 20 }."""
    base_method: MethodSection | None = None
    """Another method, whose local training and server optimizer are used."""
    compression: str = ""
    """Compression of updates, such as "pipe(delta(), bf16())"; default: none."""
    loop: LoopName = ""
    """Training loop of the clients; default: fedplan's own."""
    client_hooks: list[ClientHookName] = []
    """Client hooks around the local training, outermost first, outside the method's own."""
    server_optimizer: ServerOptimizerName = ""
    """Server optimizer, applied to the clients' mean; default: the method's."""
    server_optimizer_settings: dict[str, Scalar] = {}
    """Settings of the server optimizer."""
    lora_aggregation: ProductText = ""
    """Aggregation of LoRA matrices: average_separately(), by_svd() or by_residual(scale=1.0)."""
    from_python: list[str] = []
    """Set by fedplan.simulate: text of an in-memory method. Leave empty in files."""

    @model_validator(mode="after")
    def _validate_choice(self) -> MethodSection:
        if self.from_python:
            return self
        if not self.name and not self.plan:
            raise ValueError("set name (a published method), plan (your own), or both")
        if self.name and (self.probe or self.joint_choice):
            raise ValueError("probe and joint_choice are for a plan without name: use settings")
        if self.server_optimizer_settings and not self.server_optimizer:
            raise ValueError("server_optimizer_settings need a server_optimizer: set it")
        return self


class TrainConfig(Section):
    """Training arguments of a client's turn (the local training of one client in one round)."""

    rounds: Positive = 10
    """Number of rounds."""
    optimizer: OptimizerName = TrainArguments.optimizer.name
    """Optimizer of the clients: a torch class in lower case, such as "adamw" or "sgd", or your
    own."""
    optimizer_settings: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict[str, Scalar | list[Scalar]]
    )
    """Further arguments of the optimizer, by torch's names, such as { eps = 1e-6 }."""
    lr: Annotated[float, Field(gt=0)] = TrainArguments.lr
    """Learning rate, before the schedule."""
    lr_by_part: dict[PartText, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict[str, float]
    )
    """Learning rates of parts that differ from `lr`, such as { head = 1e-2 }."""
    lr_scheduler: str = TrainArguments.lr_scheduler.name
    """Learning-rate schedule by its transformers name, such as "linear" or "cosine"."""
    lr_scheduler_settings: dict[str, str | float] = Field(default_factory=dict[str, str | float])
    """Further arguments of the schedule, by their transformers names."""
    warmup: Annotated[float, Field(ge=0)] = LRSchedule.warmup
    """Learning-rate warm-up: below 1, a fraction of the schedule; else rounds or steps."""
    lr_scheduler_span: Literal["run", "round"] = "run"
    """Length of the schedule: the whole run ("run"), or each turn from its start ("round")."""
    weight_decay: Annotated[float, Field(ge=0)] = DECAY
    """Weight decay, if the optimizer has it."""
    decay_norm_and_bias: bool = TrainArguments.decay_norm_and_bias
    """Apply weight decay to norms and biases, too."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = MOMENTUM
    """Momentum, if the optimizer has it."""
    epochs: Positive = TrainArguments.epochs
    """Passes over the client's examples in each turn."""
    steps: Count = TrainArguments.steps
    """Optimizer steps in each turn; 0: as many as the epochs need."""
    batch_size: Positive = TrainArguments.batch_size
    """Examples in each batch."""
    gradient_accumulation_steps: Positive = TrainArguments.gradient_accumulation_steps
    """Batches per optimizer step (gradient accumulation)."""
    max_grad_norm: Annotated[float, Field(ge=0)] = TrainArguments.max_grad_norm
    """Maximum gradient norm of a step; 0: no clipping."""
    precision: Annotated[str, Field(json_schema_extra={"enum": [*PRECISIONS]})] = (
        TrainArguments.precision
    )
    """Precision of training: "float32", "tf32" (on CUDA), or mixed with "bf16" or "fp16"."""
    gradient_checkpointing: bool = TrainArguments.gradient_checkpointing
    """Use gradient checkpointing: recompute activations in the backward pass to save memory."""
    torch_compile: str = TrainArguments.torch_compile
    """Backend of torch.compile, such as "inductor"; default: do not compile."""
    group_by_length: bool = TrainArguments.group_by_length
    """Group texts of similar length into batches, to save padding."""
    num_workers: Count = TrainArguments.num_workers
    """Threads that prepare batches in advance; 0: none."""
    cache_activations: bool = TrainArguments.cache_activations
    """Cache the activations of frozen layers below all trained ones."""
    activation_cache_mb: Count = DEFAULT_MEGABYTES
    """Size of that activation cache per process, in megabytes; results do not depend on it."""

    @property
    def train_arguments(self) -> TrainArguments:
        """The training arguments as a TrainArguments, with optimizer and schedule objects."""
        decay_and_momentum = {
            name: value for name in ("weight_decay", "momentum") if (value := getattr(self, name))
        }
        settings = {**self.optimizer_settings, **decay_and_momentum}
        optimizer = make_client_optimizer(self.optimizer, settings)
        # A constant schedule does not depend on the rounds, so that rounds can be added later.
        is_constant = self.lr_scheduler == TrainArguments.lr_scheduler.name
        over = self.rounds if self.lr_scheduler_span == "run" and not is_constant else 0
        schedule = make_lr_schedule(
            self.lr_scheduler, self.lr_scheduler_settings, warmup=self.warmup, rounds=over
        )
        made = {
            "optimizer": optimizer,
            "lr_scheduler": schedule,
            "lr_by_part": tuple((parse_part(text), lr) for text, lr in self.lr_by_part.items()),
        }
        names = {field.name for field in fields(TrainArguments)} - made.keys()
        return TrainArguments(**made, **{name: getattr(self, name) for name in names})

    @property
    def activation_cache(self) -> ActivationCache | None:
        """A new activation cache at each access; None without `cache_activations`."""
        return ActivationCache(self.activation_cache_mb) if self.cache_activations else None

    @model_validator(mode="after")
    def _validate_schedule(self) -> TrainConfig:
        with as_value_error():
            self.train_arguments.lr_scheduler.factor(self.lr, 1, 1)
        if not self.decay_norm_and_bias and not self.weight_decay:
            raise ValueError(
                "decay_norm_and_bias = false exempts norms and biases from weight decay: set "
                "weight_decay, too"
            )
        return self
