"""Classify options that changed between a checkpoint and the resumed run: ignore, warn, data or error.

A resumed run must follow the saved run. A change that would alter its results is an error until the user
accepts it. A change that only affects speed, paths or output is ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from shardtrain.config import derived, ramps
from shardtrain.config.load import Loaded, value_of
from shardtrain.config.model_file import read_model_file, shape
from shardtrain.config.options import default_text, nearest, options
from shardtrain.config.schema import Config
from shardtrain.utils import bounded_reads, own_file
from shardtrain.utils.errors import ConfigError, Problem

Class = Literal["ignore", "warn", "data", "error"]
"""Effect of a change.

- ignore: results stay the same, up to rounding.
- warn: a normal change, although it alters the learning rate schedule.
- data: the fingerprint of the data decides, so moving a file is not a change.
- error: results differ from the next step on.
"""

ALL = "all"
ACCEPT = "checkpoint.accept_changes"

SECTIONS: dict[str, Class] = {
    "job": "ignore",
    "profiling": "ignore",
    "metrics": "ignore",
    "model": "error",
    "lora": "error",
    "optimizer": "error",
    "lr_scheduler": "error",
    # The mesh does not change results.
    "parallelism": "ignore",
    "checkpoint": "ignore",
    "activation_checkpoint": "ignore",
    "compile": "ignore",
    "quantize": "error",
    "comm": "ignore",
    "memory_estimation": "ignore",
    "fault_tolerance": "ignore",
    "validation": "ignore",
    "experimental": "ignore",
    "launch": "ignore",
}
"""Default class of each section. In sections that are missing here, every option needs an ``OPTIONS`` entry."""

OPTIONS: dict[str, Class] = {
    "model.hf_assets_path": "data",
    "model.tokenizer_path": "data",
    "model.print_after_conversion": "ignore",
    "optimizer.implementation": "ignore",
    "optimizer.early_step_in_backward": "ignore",
    "training.dataset": "data",
    "training.dataset_path": "data",
    "training.on_data_end": "ignore",
    "training.last_batch": "data",
    # Gradient accumulation keeps the global batch size, which is compared.
    "training.local_batch_size": "ignore",
    "training.global_batch_size": "error",
    "training.batch_ramp": "error",
    "training.seq_len": "data",
    "training.sequence_ramp": "error",
    "training.max_norm": "error",
    "training.label_smoothing": "error",
    "training.z_loss_weight": "error",
    "training.mtp_loss_scaling_factor": "error",
    "training.neftune_noise_alpha": "error",
    "training.ema_decay": "error",
    "training.steps": "warn",
    "training.epochs": "warn",
    "training.enable_cpu_offload": "ignore",
    "training.dtype": "error",
    "training.mixed_precision_param": "error",
    "training.mixed_precision_reduce": "error",
    # A resumed run loads its loss scale from the checkpoint.
    "training.initial_loss_scale": "ignore",
    "training.loss_scale_growth_interval": "error",
    "training.nonfinite_policy": "ignore",
    "training.nonfinite_max_skips": "ignore",
    "training.nonfinite_max_skip_fraction": "ignore",
    "training.spike_policy": "error",
    "training.spike_window": "error",
    "training.spike_sigmas": "error",
    "training.spike_rewind_steps": "error",
    "training.spike_skip_steps": "error",
    "training.max_rewinds": "ignore",
    "training.replica_check_interval": "ignore",
    "training.device": "ignore",
    "training.flash_attention": "ignore",
    "training.cpu_kernels": "ignore",
    "training.gc_freq": "ignore",
    "training.gc_debug": "ignore",
    "training.dataloader.num_workers": "ignore",
    "training.dataloader.persistent_workers": "ignore",
    "training.dataloader.pin_memory": "ignore",
    "training.dataloader.prefetch_factor": "ignore",
    "lora.initial_load_path": "ignore",
    # The base weights have a fingerprint.
    "lora.random_base": "ignore",
    "data.mode": "data",
    "data.cache_tokens": "ignore",
    "data.readers": "data",
    "data.format": "data",
    "data.text_field": "data",
    "data.prompt_field": "data",
    "data.completion_field": "data",
    "data.messages_field": "data",
    "data.tools_field": "data",
    "data.images_field": "data",
    # The names and sizes of images have a fingerprint.
    "data.image_folder": "ignore",
    "data.max_image_pixels": "data",
    "data.max_image_bytes": "data",
    "data.chat_template": "data",
    "data.learn_turn_separator": "data",
    "data.turn_end": "data",
    "data.template": "data",
    "data.add_bos": "data",
    "data.add_eos": "data",
    "data.separator": "data",
    "data.packing": "data",
    "data.long_documents": "data",
    "data.document_mask": "error",
    "data.split": "data",
    "data.subset": "data",
    "data.streaming": "data",
    "data.bad_rows": "ignore",
    "data.bad_rows_max_fraction": "ignore",
    "data.long_rows_max_fraction": "ignore",
    "data.max_row_bytes": "data",
    "data.artefact_memory_bytes": "ignore",
    "data.artefact_seconds": "ignore",
    "data.sources": "data",
    "data.stages": "data",
    "task.name": "error",
    "task.labels": "data",
    "task.num_labels": "data",
    "task.label_field": "data",
    "task.pair_field": "data",
    "task.beta": "error",
    "task.gamma": "error",
    "task.loss_type": "error",
    "task.label_smoothing": "error",
    "task.reference_free": "error",
    # The fingerprint of the reference model is compared, so its path may change.
    "task.reference_path": "ignore",
    "task.nll_weight": "error",
    "task.desirable_weight": "error",
    "task.undesirable_weight": "error",
    "task.group_size": "data",
    # The fingerprint of the teacher is compared, so its path may change.
    "task.teacher_path": "ignore",
    "task.kd_ratio": "error",
    "task.temperature": "error",
    "task.divergence": "error",
    "task.jsd_beta": "error",
    "task.chosen_field": "data",
    "task.rejected_field": "data",
    "task.frozen_modules": "error",
    "task.planned_images": "ignore",
    "task.test_dataset_path": "ignore",
    "task.test_split": "ignore",
    "task.options": "error",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": "ignore",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": "ignore",
    "quantize.linear.float8.emulate": "ignore",
    "quantize.grouped_mm.float8.emulate": "ignore",
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": "ignore",
    "debug.seed": "data",
    "debug.deterministic": "ignore",
    "debug.deterministic_warn_only": "ignore",
    "debug.moe_force_load_balance": "error",
}

FREED: dict[str, tuple[str, ...]] = {
    "optimizer": ("optimizer.",),
    "lr_scheduler": ("lr_scheduler.", "optimizer.lr", "training.steps", "training.epochs"),
    "train_state": ("training.", "lr_scheduler."),
    "dataloader": (),
}
"""Prefixes of the options that may change if checkpoint.exclude_from_loading contains a part.

"dataloader" has no prefixes, because options of the class "data" are compared by fingerprint."""


@dataclass(frozen=True)
class OptionChange:
    """An option whose value differs from the checkpoint's."""

    option: str
    old: Any
    new: Any
    kind: Class

    def __str__(self) -> str:
        """Format the change like ``optimizer.lr: 0.1 -> 0.2``."""
        return f"{self.option}: {show_value(self.old)} -> {show_value(self.new)}"


def class_of(option: str) -> Class | None:
    """Return the class of an option, or None if the tables do not contain it.

    >>> class_of("optimizer.lr"), class_of("metrics.log_freq"), class_of("training.steps")
    ('error', 'ignore', 'warn')
    """
    return OPTIONS.get(option, SECTIONS.get(option.partition(".")[0]))


FILES = "files"
"""Key in a record: maps options to the SHA-256 of the Python file that they name, if it affects results."""


def file_hashes(config: Config) -> dict[str, str]:
    """Return the SHA-256 of each configured Python file of a model, task, optimizer or schedule."""
    # Imported here, because the rules import this module.
    from shardtrain.config.rules.own_files_rules import named_files

    hashes = {}
    for option, path in named_files(config):
        if path.endswith(".py") and class_of(option) == "error":
            hashes[option] = hashlib.sha256(
                bounded_reads.read_all(path, own_file.MAX_BYTES)
            ).hexdigest()
    return hashes


def to_record(
    config: Config,
    world_size: int,
    files: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the options that a checkpoint stores, as JSON: all whose class is not "ignore".

    ``files`` is the result of ``file_hashes`` at the start of the run.
    """
    kept = {
        name: json_value(value_of(config, name))
        for name in options(type(config))
        if class_of(name) != "ignore"
    }
    # Store the resolved batch size instead of -1, so a resume on another mesh can detect a change.
    kept["training.global_batch_size"] = derived.global_batch_size(config, world_size)
    return {**kept, FILES: dict(files)}


def find(
    saved: Any,
    config: Config,
    world_size: int,
    excluded: Sequence[str] = (),
    files: Mapping[str, str] = MappingProxyType({}),
) -> list[OptionChange]:
    """Return the options that differ from a checkpoint's record.

    Options that the record or this version does not have are not compared. A missing record is not an error.
    Making a default explicit is not a change, such as setting ``lr_scheduler.total_steps`` to the number of
    steps.
    """
    if not isinstance(saved, Mapping):
        return []
    now = to_record(config, world_size)
    # An option without a class is an error: a new option must be classified before it may change.
    differing = {}
    for name, new in now.items():
        if name in saved and name != FILES and saved[name] != new:
            differing[name] = OptionChange(name, saved[name], new, class_of(name) or "error")

    # A Python file with the same path may have different contents.
    hashes = saved.get(FILES)
    if not isinstance(hashes, Mapping):
        hashes = {}
    for name, digest in files.items():
        before = hashes.get(name, digest)
        if before != digest and name not in differing:
            old = f"{now[name]} with the SHA-256 {str(before)[:12]}..."
            new = f"{now[name]} with the SHA-256 {str(digest)[:12]}..."
            differing[name] = OptionChange(name, old, new, "error")

    # A part that is not loaded from the checkpoint may have other options.
    for part in excluded:
        for name in list(differing):
            if name.startswith(FREED.get(part, ())):
                del differing[name]

    # The last size of a batch ramp is the global batch size, so one change is enough.
    if ramps.BATCH_RAMP in differing:
        differing.pop("training.global_batch_size", None)

    # Different options can describe the same schedule or the same model sizes.
    if _same_schedule(saved, now):
        for name in ("lr_scheduler.total_steps", "training.steps"):
            differing.pop(name, None)
    if _same_sizes(saved, now):
        for name in ("model.flavor", "model.overrides"):
            differing.pop(name, None)
    return list(differing.values())


def _same_schedule(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if both schedules have the same length, set by total_steps or by the number of training steps."""
    lengths = []
    for record in (saved, now):
        # The data determine the number of steps of an epoch.
        if record.get("training.epochs") is not None:
            return False
        lengths.append(record.get("lr_scheduler.total_steps") or record.get("training.steps"))
    return lengths[0] == lengths[1] is not None


def _same_sizes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if flavor and overrides together produce the saved model sizes."""
    if saved.get("model.name") != now["model.name"]:
        return False
    try:
        facts = read_model_file(now["model.name"])
        sizes = [
            shape(facts, record["model.flavor"], record["model.overrides"])
            for record in (saved, now)
        ]
    except (ConfigError, KeyError, TypeError):
        return False
    return sizes[0] == sizes[1]


def check_accepted(loaded: Loaded) -> Iterator[Problem]:
    """Yield a problem for each name in checkpoint.accept_changes that cannot match a change."""
    schema = type(loaded.config)
    known = [name for name in options(schema) if class_of(name) in ("error", None)]
    for word in loaded.config.checkpoint.accept_changes:
        if word in known or word == ALL:
            continue
        kind = class_of(word) if word in options(schema) else None
        fix = f'remove it, or use "{ALL}"'
        if kind is None:
            rule = f'contains "{word}", which is not an option'
            near = nearest(word, [*known, ALL])
            if near:
                fix = f'did you mean "{near}"?'
        elif kind == "data":
            rule = f'contains "{word}", which determines the data; changed data start at their first sample'
            fix = 'use checkpoint.exclude_from_loading = ["dataloader"]'
        else:
            rule = f'contains "{word}", which may be changed freely'
        yield Problem(ACCEPT, loaded.value(ACCEPT), rule, fix, loaded.where(ACCEPT))


def json_value(value: Any) -> Any:
    """Convert a value to JSON types. Dataclasses become dicts with all fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: json_value(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def show_value(value: Any) -> str:
    """Format a value of a checkpoint as one printable line of limited length."""
    text = "".join(c if c.isprintable() else "?" for c in default_text(value))
    return text if len(text) <= 200 else f"{text[:200]}..."
