# SPDX-License-Identifier: Apache-2.0
"""Fields of a study: their types, the plug-ins they name, and other tools' words for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, Field

from fedplan.data.custom_task import CUSTOM_KIND
from fedplan.data.metrics import metric_named
from fedplan.data.partition import PARTITION_KINDS
from fedplan.data.tasks.kinds import TASK_NAMES, task_class
from fedplan.language.parser import parse_part
from fedplan.methods.lora import parse_product_rule
from fedplan.methods.registry import METHOD_REGISTRY, METHODS, SERVER_OPTIMIZER_REGISTRY
from fedplan.models.adapters import adapter_family
from fedplan.naming import NamedObject, Registry, unknown_name_message
from fedplan.privacy.accounting.accountant import NOISE_MULTIPLIERS
from fedplan.privacy.mechanisms.clipping import CLIPPING_NORMS
from fedplan.studies.section import found_by
from fedplan.training.client_hooks import CLIENT_HOOK_NAMES, get_client_hook
from fedplan.training.loops import LOOP_NAMES, get_training_loop
from fedplan.training.optimizers import OPTIMIZER_NAMES, make_client_optimizer
from fedplan.training.probes import PROBE_NAMES, get_probe

if TYPE_CHECKING:
    from fedplan.studies.schema import Study
    from fedplan.studies.sections import MethodSection


MAX_INT = 10**9
"""Largest integer of any field."""


def one_of_validator(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """Return a validator that accepts only `names`; `kind` is the word for one in the message."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(unknown_name_message(kind, name, names))
        return name

    return check


def _range_validator(
    bounds: tuple[float, float], *, zero: bool = False
) -> Callable[[float], float]:
    """Return a validator of numbers from a minimum to a maximum, or 0 if `zero` is set."""

    def check(value: float) -> float:
        minimum, maximum = bounds
        if not (minimum <= value <= maximum or (zero and value == 0)):
            or_zero = "0, or " if zero else ""
            raise ValueError(f"{value:g} must be {or_zero}a number from {minimum:g} to {maximum:g}")
        return value

    return check


Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Scalar = str | int | float | bool
ClippingNorm = Annotated[
    float,
    AfterValidator(_range_validator(CLIPPING_NORMS)),
    Field(json_schema_extra={"minimum": CLIPPING_NORMS[0], "maximum": CLIPPING_NORMS[1]}),
]
_NOISE_LIMITS = Field(json_schema_extra={"minimum": 0, "maximum": NOISE_MULTIPLIERS[1]})
NoiseMultiplier = Annotated[
    float, AfterValidator(_range_validator(NOISE_MULTIPLIERS, zero=True)), _NOISE_LIMITS
]
EvaluationNoise = Annotated[
    float, AfterValidator(_range_validator((0.25, NOISE_MULTIPLIERS[1]), zero=True)), _NOISE_LIMITS
]
TaskKind = Annotated[str, found_by(lambda kind: kind == CUSTOM_KIND or task_class(kind))]
PartitionKind = Annotated[
    str,
    AfterValidator(one_of_validator("partition", PARTITION_KINDS)),
    Field(json_schema_extra={"enum": [*PARTITION_KINDS]}),
]
ProbeName = Annotated[str, found_by(get_probe, optional=True)]
OptimizerName = Annotated[str, found_by(make_client_optimizer)]
ServerOptimizerName = Annotated[str, found_by(SERVER_OPTIMIZER_REGISTRY.find, optional=True)]
ProductText = Annotated[str, found_by(parse_product_rule, optional=True)]
ClientHookName = Annotated[str, found_by(get_client_hook)]
MetricName = Annotated[str, found_by(metric_named)]
PartText = Annotated[str, found_by(parse_part)]
LoopName = Annotated[str, found_by(get_training_loop, optional=True)]
AdapterName = Annotated[str, found_by(adapter_family, optional=True)]


def code_fingerprints(plugins: Iterable[NamedObject[Any]]) -> str:
    """Return a line with name and code digest of each plug-in; built-in objects have none."""
    return "".join(f"\n{p.name} {p.code_fingerprint}" for p in plugins if p.code_fingerprint)


def named_objects(study: Study) -> list[NamedObject[Any]]:
    """Return the object of each name in a study that affects training, also of base methods.

    Imports plug-ins; raises UnknownName if one is missing.
    """
    kind = "" if study.task.kind == CUSTOM_KIND else study.task.kind
    named: list[tuple[Registry[Any], str]] = [
        (TASK_NAMES, kind),
        (OPTIMIZER_NAMES, study.train.optimizer),
    ]
    section: MethodSection | None = study.method
    while section is not None:
        named += [
            (METHOD_REGISTRY, section.name),
            (PROBE_NAMES, section.probe),
            (LOOP_NAMES, section.loop),
            (SERVER_OPTIMIZER_REGISTRY, section.server_optimizer),
            *((CLIENT_HOOK_NAMES, name) for name in section.client_hooks),
        ]
        # Built-in methods such as safl take the name of a probe as a setting.
        if section.name in METHODS and isinstance(probe := section.settings.get("probe"), str):
            named.append((PROBE_NAMES, probe))
        section = section.base_method
    return [registry.find(name) for registry, name in named if name]


_SYNONYMS_BY_FIELD = {
    "clients.dropout_fraction": "client_drop_rate",
    "clients.fraction": "cohort_size fraction_fit fraction_train join_ratio train_cohort_size",
    "clients.min_updates": "min_available_clients min_available_nodes min_fit_clients "
    "min_train_nodes",
    "data.alpha": "dirichlet_alpha",
    "data.holdout_fraction": "val_split validation_split",
    "data.max_examples": "max_train_samples",
    "data.max_test_examples": "max_eval_samples",
    "data.num_clients": "num_partitions num_supernodes",
    "data.partition": "partitioner",
    "data.partition_column": "partition_by",
    "early_stopping.metric": "metric_for_best_model",
    "early_stopping.min_delta": "early_stopping_threshold",
    'early_stopping.mode = "max"': "greater_is_better",
    "early_stopping.patience": "early_stopping_patience patience",
    "evaluate.batch_size": "per_device_eval_batch_size",
    "evaluate.every": "eval_gap eval_steps eval_strategy evaluation_frequency evaluation_strategy",
    "evaluate.every (every evaluation asks all clients)": "fraction_evaluate",
    "device, at the top of the file, or in Python fp.RunOptions(device=...)": "device",
    'evaluate.keep_best = "global"': "load_best_model_at_end",
    "evaluate.trackers": "report_to",
    "fedplan run --resume RUN": "resume_from_checkpoint",
    "method.name": "algorithm strategy",
    "method.server_optimizer_settings = { lr = ... }": "central_learning_rate central_lr "
    "server_learning_rate",
    'method.settings = { mu = ... } of name = "fedprox"': "proximal_mu",
    'method.settings = { rank = ... } of name = "fedit"': "lora_r",
    'model.adapter = { type = "lora", lora_alpha = ... }': "lora_alpha",
    'model.adapter = { type = "lora", lora_dropout = ... }': "lora_dropout",
    "model.adapter.target": "target_modules",
    "model.dtype": "torch_dtype",
    "model.path": "model_name model_name_or_path",
    'model.quantization = "int8"': "load_in_8bit",
    'model.quantization = "nf4"': "load_in_4bit",
    "privacy.clipping_norm": "clip_norm clipping_bound clipping_threshold max_per_sample_grad_norm",
    "privacy.delta": "target_delta",
    "privacy.epsilon": "target_epsilon",
    "privacy.noise_multiplier": "sigma",
    "task.input": "text_column",
    "task.label": "label_column",
    "task.labels": "label_names num_classes num_labels",
    "task.max_length": "max_seq_length",
    "timeouts.updates": "round_timeout",
    "train.batch_size": "local_batch_size per_device_train_batch_size train_batch_size",
    "train.epochs": "local_epochs local_num_epochs num_train_epochs",
    "train.lr": "learning_rate local_learning_rate",
    "train.lr_scheduler": "lr_schedule lr_scheduler_type scheduler",
    "train.lr_scheduler_settings": "lr_scheduler_kwargs",
    "train.max_grad_norm": "local_max_grad_norm",
    "train.num_workers": "dataloader_num_workers",
    "train.optimizer": "optim optimiser",
    "train.optimizer_settings": "optim_args",
    "train.optimizer_settings = { betas = [...] }": "adam_beta1 adam_beta2 betas",
    "train.optimizer_settings = { eps = ... }": "adam_epsilon",
    'train.precision = "tf32"': "tf32",
    'train.precision = "bf16"': "bf16",
    'train.precision = "fp16"': "fp16",
    "train.rounds": "central_num_iterations global_rounds num_rounds num_server_rounds",
    "train.steps": "max_steps",
    "train.torch_compile": "torch_compile_backend",
    "train.warmup": "warmup_ratio warmup_steps",
    "train.weight_decay": "wd",
    "--output on the command line": "output_dir",
    "clients.fraction, or train.batch_size / privacy.examples_per_site": "sample_rate",
    "nothing: [privacy] always samples this way": "poisson_sampling",
    'train.lr_scheduler, such as "linear"': "learning_rate_decay",
}
"""Each field with the words for it in Trainer, TRL, Flower, PFLlib, pfl, Opacus and PyTorch."""
SYNONYMS = {word: field for field, words in _SYNONYMS_BY_FIELD.items() for word in words.split()}
"""Each word that users of other tools type, with the field that means the same here."""
SECTION_SYNONYMS = {
    "": {
        "differential_privacy": "privacy",
        "dp": "privacy",
        "evaluation": "evaluate",
        "secagg": 'aggregation with kind = "secure"',
        "server": "method.server_optimizer, or aggregation",
        "training": "train",
        "dataset": "data",
        "timeout": "timeouts",
    },
    "data": {"dataset": "data.path"},
    "model": {"name": "model.path", "model": "model.path"},
    "privacy": {"max_grad_norm": "privacy.clipping_norm"},  # Opacus
}
"""Words that have this meaning in one section only; "" is the top of the file."""
_SEARCHED_SECTIONS = ("train", "data", "clients", "privacy", "task", "evaluate")
"""Sections whose field names are clear enough to be suggested for a word in another section."""


def unknown_field_message(schema: type[BaseModel], location: Sequence[int | str]) -> str:
    """Return the message for an unknown field, with the field that the user most likely means.

    `schema`: the class of the whole file. `location`: the path of the unknown field. Looks for a
    word of another tool, then for a field of that name in this section and in others, then for the
    closest field of this section; else lists all fields of this section.
    """
    word, sections = str(location[-1])[:60], list(map(str, location[:-1]))
    fields, name = _section_fields(schema, sections), word.lower().replace("-", "_")
    by_section = SECTION_SYNONYMS.get(".".join(sections), {})
    if schema.__module__.startswith("fedplan.studies."):  # no study's words in a site's files
        suggestion = by_section.get(name) or SYNONYMS.get(name, "")
    else:
        suggestion = ""
    if not suggestion and name in fields:
        suggestion = ".".join([*sections, name])
    if not suggestion and name in schema.model_fields and not _section_fields(schema, [name]):
        suggestion = f"{name}, at the top of the file"
    suggestion = suggestion or " or ".join(
        f"{section}.{name}"
        for section in _SEARCHED_SECTIONS
        if name in _section_fields(schema, [section])
    )
    if suggestion:
        return f"there is no field {word!r}: did you mean {suggestion}?"
    return unknown_name_message("field", word, fields)


def missing_field_message(schema: type[BaseModel], location: Sequence[int | str]) -> str:
    """Return the message for a missing field, with its choices; arguments as above."""
    section = _section_type(schema, [str(name) for name in location[:-1]])
    field = section.model_fields.get(str(location[-1])) if section else None
    kind = field.annotation if field else None
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    remedy = f"set it to {' or '.join(map(repr, choices))}" if choices else "set it"
    return f"it is missing, and has no default: {remedy}"


def _section_fields(schema: type[BaseModel], sections: Sequence[str]) -> list[str]:
    """Return the names of a section's fields; empty if there is no section of that name."""
    section = _section_type(schema, sections)
    return list(section.model_fields) if section else []


def _section_type(schema: type[BaseModel], sections: Sequence[str]) -> type[BaseModel] | None:
    """Return the class of a section by its path, `schema` itself for an empty path, or None."""
    section: type[BaseModel] | None = schema
    is_key = False
    for name in sections:
        if is_key:  # of a table of sections, as "age" in statistics.columns.age
            is_key = False
            continue
        field = section.model_fields.get(name) if section else None
        types = get_args(field.annotation) or (field.annotation,) if field else ()
        section = next(
            (type_ for type_ in types if isinstance(type_, type) and issubclass(type_, BaseModel)),
            None,
        )
        is_key = field is not None and get_origin(field.annotation) is dict
    return section
