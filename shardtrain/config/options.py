"""Flat table of all options in ``config/schema``: dotted name, type, default and help text."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import textwrap
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from shardtrain.config import schema
from shardtrain.config.schema import (
    Config,
    data_options,
    launch_options,
    lora_options,
    safety_options,
    task_options,
    watch_options,
)
from shardtrain.config.settings import Kind, Value
from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class Option:
    """An option: dotted name such as ``training.steps``, type in the schema, default and help text."""

    name: str
    kind: Any
    default: Any
    help: str

    @functools.cached_property
    def entry(self) -> type | None:
        """Dataclass of the entries, if the option contains tables as ``data.sources`` does (see ``nested.py``)."""
        inner = None
        if get_origin(self.kind) in (dict, list):
            inner = get_args(self.kind)[-1]
        return inner if dataclasses.is_dataclass(inner) else None  # type: ignore[return-value]

    @property
    def is_table(self) -> bool:
        """True if the option is a table of plain values with free keys, such as ``model.overrides``."""
        return get_origin(self.kind) is dict and self.entry is None


def options(schema: type[Config] = Config) -> Mapping[str, Option]:
    """Return all options by dotted name, in the order of the schema.

    ``schema`` is the type of the configuration, which ``job.custom_config_module`` may extend.
    """
    return _all_options(cast(Any, schema))


@functools.cache
def _all_options(schema: Any) -> Mapping[str, Option]:
    all_options: dict[str, Option] = {}
    for name, cls in sections(schema).items():
        if name:
            all_options |= options_of(name, cls)
    return types.MappingProxyType(all_options)


def options_of(section: str, cls: type) -> dict[str, Option]:
    """Return the options of a dataclass by dotted name, without the options of nested sections."""
    options_of_class: dict[str, Option] = {}
    hints = get_type_hints(cls)
    annotations = inspect.get_annotations(cls)
    texts: dict[str, str] = {}
    for owner in cls.__mro__:
        # A class built from a user's file contains its texts, see ``custom_sections``.
        of_owner = vars(owner).get("option_help")
        texts |= _help_texts().get(owner.__name__, {}) if of_owner is None else of_owner
    # Inherited fields come last.
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name not in annotations):
        kind = hints[field.name]
        # Nested sections have their own entry in ``sections``.
        if dataclasses.is_dataclass(kind):
            continue
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        name = f"{section}.{field.name}"
        options_of_class[name] = Option(name, kind, default, texts.get(field.name, ""))
    return options_of_class


def sections(schema: type[Config] = Config) -> Mapping[str, type]:
    """Return all sections by dotted name, each followed by its nested sections.
    "" is the full configuration.
    """
    return _all_sections(cast(Any, schema))


@functools.cache
def _all_sections(schema: Any) -> Mapping[str, type]:
    all_sections: dict[str, type] = {}

    def visit(name: str, cls: type) -> None:
        all_sections[name] = cls
        hints = get_type_hints(cls)
        # Nested sections follow their parent.
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(hints[field.name]):
                visit(f"{name}.{field.name}".lstrip("."), hints[field.name])

    visit("", schema)
    return types.MappingProxyType(all_sections)


@functools.cache
def _help_texts() -> Mapping[str, Mapping[str, str]]:
    """Return the docstring of each field of the schema's classes, on one line, by class name and field."""
    help_texts: dict[str, dict[str, str]] = {}
    parts = (
        schema,
        data_options,
        launch_options,
        lora_options,
        safety_options,
        task_options,
        watch_options,
    )
    # Python does not store docstrings of fields. Parse the source, and read
    # the text below each annotated name.
    nodes: list[ast.stmt] = []
    for module in parts:
        nodes += ast.parse(inspect.getsource(module)).body
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        texts: dict[str, str] = {}
        for field, below in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            text = ""
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = " ".join(str(below.value.value).split())
            texts[field.target.id] = text
        help_texts[node.name] = texts
    return help_texts


def kind_text(kind: Kind) -> str:
    """Format a type for the documentation of options.

    >>> kind_text(list[str]), kind_text(int | None), kind_text(Literal["a", "b"])
    ('list of text', 'integer or unset', '"a" | "b"')
    """
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Literal:
        return " | ".join(f'"{arg}"' for arg in args)
    if origin in (Union, types.UnionType):
        names = [kind_text(arg) for arg in args if arg is not type(None)]
        if type(None) in args:
            names.append("unset")
        return " or ".join(names)
    if origin is list:
        if dataclasses.is_dataclass(args[0]):
            return "list of tables"
        return f"list of {kind_text(args[0])}"
    if origin is dict:
        if dataclasses.is_dataclass(args[1]):
            return "table of tables"
        return "table"
    return {bool: "true | false", int: "integer", float: "number", str: "text"}[kind]


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar of ``names``, ignoring case. None if no name is similar enough."""
    by_lower_case = {other.lower(): other for other in names}
    matches = difflib.get_close_matches(name.lower(), by_lower_case, 1, cutoff)
    return by_lower_case[matches[0]] if matches else None


# Option -> its names in other programs.
_OTHER_WORDS = {
    "activation_checkpoint.mode": ("gradient_checkpointing", "activation_checkpointing", "recompute"),
    "checkpoint.folder": ("checkpoint_dir", "ckpt_dir", "checkpoint.dir", "checkpoint.path"),
    "checkpoint.interval": (
        "save_steps", "save_every", "save_interval", "checkpoint.freq", "checkpoint.steps", "checkpoint.save_freq",
    ),
    "checkpoint.keep_latest_k": ("save_total_limit", "keep_last", "max_checkpoints"),
    "comm.train_timeout_seconds": ("comm.timeout", "ddp_timeout", "nccl_timeout"),
    "compile.enable": ("torch_compile", "training.compile"),
    "job.dump_folder": ("output", "output_dir", "out_dir", "save_dir", "log_dir", "logdir", "default_root_dir"),
    "lora.alpha": ("lora_alpha",),
    "lora.dropout": ("lora_dropout",),
    "lora.rank": ("lora_r", "lora_rank", "lora.r"),
    "lr_scheduler.decay_type": ("lr_scheduler_type", "lr_schedule", "lr_decay_style"),
    "lr_scheduler.warmup_steps": ("warmup_ratio", "warmup_iters", "lr_warmup_steps", "warmup"),
    "metrics.enable_tensorboard": ("tensorboard", "tensorboard_dir"),
    "metrics.enable_wandb": ("wandb", "use_wandb", "report_to"),
    "metrics.log_freq": ("logging_steps", "log_interval", "log_every", "log_every_n_steps"),
    "model.hf_assets_path": ("tokenizer", "tokenizer_name", "tokenizer_name_or_path"),
    "model.overrides.num_nextn_predict_layers": ("mtp_num_layers", "num_mtp_layers", "num_nextn_predict_layers"),
    "model.overrides.num_layers": ("n_layer", "n_layers", "num_layers", "num_hidden_layers"),
    "optimizer.beta1": ("adam_beta1",),
    "optimizer.beta2": ("adam_beta2",),
    "optimizer.eps": ("adam_epsilon", "adam_eps"),
    "optimizer.lr": ("learning_rate", "max_lr", "peak_lr"),
    "optimizer.name": ("optim", "optimizer_name"),
    "optimizer.qk_clip_threshold": ("qk_clip", "use_qk_clip"),
    "parallelism.context_parallel_degree": ("cp", "context_parallel_size"),
    "parallelism.data_parallel_replicate_degree": ("ddp", "hsdp"),
    "parallelism.data_parallel_shard_degree": ("fsdp", "zero", "zero_stage", "dp"),
    "parallelism.expert_parallel_degree": ("ep", "expert_model_parallel_size"),
    "parallelism.pipeline_parallel_degree": ("pp", "pipeline_model_parallel_size"),
    "parallelism.shard_optimizer_states": ("zero1", "use_distributed_optimizer"),
    "parallelism.tensor_parallel_degree": ("tp", "tensor_model_parallel_size"),
    "profiling.enable_profiling": ("profile", "profiling.enable"),
    "training.dataloader.num_workers": ("dataloader_num_workers", "data_workers"),
    "training.dataset": ("dataset_name",),
    "training.dataset_path": ("train_file", "train_data", "data_path", "data_files", "data_dir", "dataset_dir"),
    "training.epochs": ("num_train_epochs", "num_epochs", "max_epochs"),
    "training.max_norm": (
        "grad_clip", "clip_grad", "max_grad_norm", "clip_grad_norm", "gradient_clipping", "gradient_clip_val",
    ),
    "training.mixed_precision_param": ("bf16", "fp16", "precision", "amp", "mixed_precision"),
    "training.mtp_loss_scaling_factor": ("mtp_loss_weight", "mtp_lambda"),
    "training.seq_len": (
        "max_length", "max_seq_length", "model_max_length", "block_size", "context_length", "seq_length",
        "sequence_length", "sequence_len",
    ),
    "training.steps": ("max_steps", "num_steps", "train_iters", "max_iters", "total_steps"),
    "validation.dataset_path": ("eval_file", "val_file", "val_data", "eval_data", "eval_dataset", "validation_file"),
    "validation.freq": (
        "eval_steps", "eval_interval", "eval_every", "val_check_interval", "validation.interval",
    ),
}  # fmt: skip
_ENVIRONMENT = (
    "set WANDB_PROJECT, WANDB_TEAM, WANDB_RUN_NAME and WANDB_RUN_GROUP in the environment"
)
# Name in another program -> hint, also for names that no single option corresponds to.
_WAYS = {
    **{word: f"did you mean {option}?" for option, words in _OTHER_WORDS.items() for word in words},
    **dict.fromkeys(
        ("rampup_batch_size", "batch_size_scheduler", "batch_rampup", "batch_size_warmup"),
        "set training.batch_ramp to pairs of a step and a batch size, such as [[0, 32], [1000, 64]]",
    ),
    **dict.fromkeys(
        ("curriculum_learning", "sequence_length_scheduler", "seq_len_warmup"),
        "set training.sequence_ramp to pairs of a step and a length, such as [[0, 512], [1000, 2048]]",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"),
        "set training.global_batch_size, the sequences of a step over all ranks",
    ),
    **dict.fromkeys(
        (
            "training.classifer_free_guidance_prob",
            "training.classifier_free_guidance_prob",
            "training.img_size",
            "training.test_mode",
            "encoder.autoencoder_path",
            "encoder.clip_encoder",
            "encoder.max_t5_encoding_len",
            "encoder.t5_encoder",
            "eval.classifier_free_guidance_scale",
            "eval.denoising_steps",
            "eval.enable_classifer_free_guidance",
            "eval.eval_freq",
            "eval.save_img_folder",
            "inference.img_size",
            "inference.local_batch_size",
            "inference.prompts_path",
            "inference.save_img_folder",
            "validation.all_timesteps",
            "validation.classifier_free_guidance_scale",
            "validation.denoising_steps",
            "validation.enable_classifier_free_guidance",
            "validation.eval_freq",
            "validation.save_img_count",
            "validation.save_img_folder",
        ),
        "remove it: image models such as torchtitan's flux are not supported",
    ),
    **dict.fromkeys(
        (
            "data.max_images_per_batch",
            "data.max_patches_per_image",
            "data.patch_size",
            "data.spatial_merge_size",
            "data.packing_buffer_size",
        ),
        "remove it: image encoders such as torchtitan's experiment vlm are not supported",
    ),
    **dict.fromkeys(
        (
            "compile.graph_passes",
            "compile.joint_passes",
            "compile.passes",
            "compile.model_backend_override",
            "experimental.comms_bucket_reorder_strategy",
            "experimental.autop_force_bf16",
        ),
        "remove it: compile.enable compiles each layer with PyTorch's own passes",
    ),
    **dict.fromkeys(
        (
            "profiler.profiler_repeat",
            "profiler.profiler_skip_first",
            "profiler.profiler_skip_first_wait",
        ),
        "set profiling.profile_freq, after which every trace begins",
    ),
    **dict.fromkeys(
        ("profiler.memory_snapshot_freq", "profiler.memory_snapshot_max_entries"),
        "set profiling.enable_memory_snapshot and profiling.profile_freq",
    ),
    "parallelism.context_parallel_ptrr_mask_key": "set parallelism.context_parallel_load_balancer",
    "optimizer.param_groups": 'set optimizer.no_weight_decay = ["*.bias"], or optimizer.name to a file of yours',
    "optimizer.optimizer_factory_kwargs_by_name": "set optimizer.lr, beta1, beta2, eps and weight_decay",
    "debug.batch_invariant": "remove it: rows of generate and evaluate do not depend on each other, up to rounding",
    "vocab_size": "set model.overrides.vocab_size",
    **dict.fromkeys(
        ("batch_size", "micro_batch_size", "train_batch_size", "per_device_train_batch_size"),
        "did you mean training.local_batch_size, or training.global_batch_size over all ranks?",
    ),
    **dict.fromkeys(
        (
            "gpu",
            "gpus",
            "nprocs",
            "num_gpus",
            "nproc_per_node",
            "num_processes",
            "devices",
            "world_size",
        ),
        "the number of processes is --nproc N, and for plan the number of devices --gpus N",
    ),
    **dict.fromkeys(
        ("master_addr", "master_port", "rdzv_backend"),
        "set --rdzv_endpoint HOST:PORT, together with --nnodes N and --node_rank K",
    ),
    **dict.fromkeys(
        ("model_name_or_path", "pretrained", "base_model"),
        "set checkpoint.initial_load_path to its folder, with --checkpoint.initial_load_in_hf",
    ),
    **dict.fromkeys(
        ("deepspeed", "ds_config"),
        "sharding is parallelism.data_parallel_shard_degree, on by default",
    ),
    **dict.fromkeys(
        ("fp8", "float8", "float8.enable"), "add quantize.linear.float8 to model.converters"
    ),
    **dict.fromkeys(
        (
            "wandb_project",
            "wandb_group",
            "wandb_name",
            "wandb_run_name",
            "wandb_entity",
            "run_name",
        ),
        _ENVIRONMENT,
    ),
}
"""Fixes for option names of other programs, by full name or by the part after the last dot."""
_FEW_SECTIONS = 3
"""Maximum number of sections with the same key for which the first is suggested.
``enable`` is in too many sections.
"""


def suggestion(name: str, extra: Iterable[str] = (), schema: type[Config] = Config) -> str:
    """Return the fix for an unknown dotted option: the most similar option, or the command that lists all.

    ``extra`` contains further valid names, such as names in older files.
    """
    known_options = options(schema)
    schema_sections = sections(schema)
    known = [*known_options, *extra]
    section, _, key = name.rpartition(".")
    # TOML keys are case-sensitive.
    if name.lower() in known_options:
        return f"did you mean {name.lower()}?"
    # The option of another program that does the same here under another name.
    if name in _WAYS or (key in _WAYS and section.count(".") == 0):
        return _WAYS.get(name) or _WAYS[key]

    # A misspelled table of tables. The user chooses the names of its entries: data.source.web.weight.
    parts = name.split(".")
    for option in known_options.values():
        if option.entry and parts[2:] and nearest(".".join(parts[:2]), [option.name], 0.85):
            return f"did you mean {'.'.join([option.name, *parts[2:]])}?"

    # A misspelled key of an existing section.
    within = {}
    for other in known:
        other_section, _, other_key = other.rpartition(".")
        if other_section == section:
            within[other_key] = other
    match = nearest(key, within, 0.75)
    if match:
        return f"did you mean {within[match]}?"

    # An existing key in another section: use the most similar section, or the first of few.
    same_key = {}
    for other in known_options:
        other_section, _, other_key = other.rpartition(".")
        if other_key == key:
            same_key[other_section] = other
    alike = nearest(section, same_key)
    if alike is None and 1 <= len(same_key) <= _FEW_SECTIONS:
        alike = next(iter(same_key))
    if alike is not None:
        return f"did you mean {same_key[alike]}?"

    # Otherwise the section may be misspelled.
    known_sections = {other.rpartition(".")[0] for other in known}
    known_sections.update(filter(None, schema_sections))
    near_section = nearest(section, known_sections)
    if near_section and section not in known_sections:
        if f"{near_section}.{key}" in known_options:
            return f"did you mean {near_section}.{key}?"
        return f"did you mean a key of [{near_section}]?"

    # Any similar option. Its key must be similar too, not only its section.
    match = None
    if not same_key:
        match = nearest(name, known, 0.75)
    if match and nearest(key, [match.rpartition(".")[2]], 0.75):
        return f"did you mean {match}?"
    if section and section in schema_sections:
        return f"`shardtrain config show` lists the options of [{section}]"
    return "`shardtrain config show` lists the options"


def help_text(name: str = "", schema: type[Config] = Config) -> str:
    """Return the help of a section, of one option, or (without a name) the list of sections.

    Raises:
        ConfigError: no section or option has that name.
    """
    # An option with entries is described together with the options of each entry.
    if name in options(schema):
        option = options(schema)[name]
        below = {}
        if option.entry:
            below = options_of(f"{name}.{entry_name(option)}", option.entry)
        texts = []
        for each in (option, *below.values()):
            texts.append(
                f"--{each.name}  ({kind_text(each.kind)}; default {default_text(each.default)})"
            )
            texts.append(
                textwrap.fill(each.help, 100, initial_indent="    ", subsequent_indent="    ")
            )
        return "\n".join(texts)
    # A field of an entry, such as data.sources.web.weight, is described with its table.
    for option in options(schema).values():
        if option.entry and name.startswith(f"{option.name}."):
            return help_text(option.name, schema)
    if name not in sections(schema):
        section = None
        if "." not in name:
            section = nearest(name, filter(None, sections(schema)))
        # A key without its section is more likely than a misspelled section.
        if any(other.rpartition(".")[2] == name for other in options(schema)):
            section = None
        raise ConfigError(
            Problem(
                name,
                None,
                rule="is neither a section nor an option",
                fix=f"did you mean {section}?" if section else suggestion(name, schema=schema),
            )
        )
    if not name:
        lines = ["Sections:"]
        for section, cls in sections(schema).items():
            if section:
                lines.append(f"  [{section}]  {_first_line(cls)}")
        return "\n".join(lines)
    lines = [f"[{name}]  {_first_line(sections(schema)[name])}"]
    lines += [help_text(other, schema) for other in options(schema) if other.startswith(f"{name}.")]
    return "\n".join(lines)


def entry_name(option: Option) -> str:
    """Return the placeholder for the name of an entry in help texts: NAME, or N in a list."""
    return "N" if get_origin(option.kind) is list else "NAME"


def _first_line(cls: type) -> str:
    """Return the first line of a class's own docstring."""
    return (cls.__doc__ or "").strip().splitlines()[0]


def default_text(value: Value) -> str:
    """Format a default as TOML, or as "unset"."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(default_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {default_text(item)}" for key, item in value.items()) + "}"
    return str(value)
