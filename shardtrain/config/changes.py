"""What an option that changed between a checkpoint and the run that continues it means: ignore, warn, data or error.

A continued run is the run that was saved. An option that would make it another run is an error until the change is
accepted; one that alters nothing but speed, place or what is written is ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from shardtrain.config import derived
from shardtrain.config.load import Loaded, value_of
from shardtrain.config.model_file import read_model_file, shape
from shardtrain.config.options import default_text, nearest, options
from shardtrain.config.rules.own_files_rules import named_files
from shardtrain.config.schema import Config
from shardtrain.utils.errors import ConfigError, Problem

Class = Literal["ignore", "warn", "data", "error"]
"""ignore: the numbers stay the same, to rounding. warn: meant to be changed, though it bends the schedule. data: the
data's own fingerprint decides, so that a file that only moved is the same. error: other numbers from the next step
on."""

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
    "parallelism": "ignore",  # the mesh changes no number
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
"""Sections of which a new option has the class of the others; in those that are not here each option is named."""

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
    "training.local_batch_size": "ignore",  # accumulation makes up for it
    "training.global_batch_size": "error",
    "training.seq_len": "data",
    "training.max_norm": "error",
    "training.steps": "warn",
    "training.epochs": "warn",
    "training.enable_cpu_offload": "ignore",
    "training.dtype": "error",
    "training.mixed_precision_param": "error",
    "training.mixed_precision_reduce": "error",
    "training.initial_loss_scale": "ignore",  # a continued run has its own
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
    "lora.random_base": "ignore",  # the base has a fingerprint
    "data.mode": "data",
    "data.cache_tokens": "ignore",
    "data.readers": "data",
    "data.format": "data",
    "data.text_field": "data",
    "data.prompt_field": "data",
    "data.completion_field": "data",
    "data.messages_field": "data",
    "data.tools_field": "data",
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
    "task.desirable_weight": "error",
    "task.undesirable_weight": "error",
    "task.group_size": "data",
    "task.teacher_path": "ignore",  # what lies there has a fingerprint
    "task.kd_ratio": "error",
    "task.temperature": "error",
    "task.divergence": "error",
    "task.jsd_beta": "error",
    "task.chosen_field": "data",
    "task.rejected_field": "data",
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
"""What a part left out by checkpoint.exclude_from_loading frees: restarted, it has no course to leave. What the data
decide is compared with the data."""


@dataclass(frozen=True)
class OptionChange:
    """An option that is not what it was in the checkpoint."""

    option: str
    old: Any
    new: Any
    kind: Class

    def __str__(self) -> str:
        """As ``optimizer.lr: 0.1 -> 0.2``."""
        return f"{self.option}: {_shown(self.old)} -> {_shown(self.new)}"


def class_of(option: str) -> Class | None:
    """The class of an option, or None where the tables do not know it.

    >>> class_of("optimizer.lr"), class_of("metrics.log_freq"), class_of("training.steps")
    ('error', 'ignore', 'warn')
    """
    return OPTIONS.get(option, SECTIONS.get(option.partition(".")[0]))


FILES = "files"
"""Key of a record: the SHA-256 of the text of each Python file that decides the course, by the option that names it."""


def file_hashes(config: Config) -> dict[str, str]:
    """Hash the Python files of model, task, optimizer and schedule that the configuration names."""
    named = {option: path for option, path in named_files(config) if path.endswith(".py")}
    texts = {option: Path(path).read_bytes() for option, path in named.items() if class_of(option) == "error"}
    return {option: hashlib.sha256(text).hexdigest() for option, text in texts.items()}


def to_record(config: Config, world_size: int, files: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """What a checkpoint keeps of its configuration: every option whose change matters, as JSON.

    ``files`` are the ``file_hashes`` of the start of the run.
    """
    kept = {name: _plain(value_of(config, name)) for name in options() if class_of(name) != "ignore"}
    # -1 means whatever this mesh gives: kept is the number that it gave, or another mesh would change it unnoticed
    kept["training.global_batch_size"] = derived.global_batch_size(config, world_size)
    return {**kept, FILES: dict(files)}


def find(
    saved: Any,
    config: Config,
    world_size: int,
    excluded: Sequence[str] = (),
    files: Mapping[str, str] = MappingProxyType({}),
) -> list[OptionChange]:
    """The options that differ from a checkpoint's record; options that only one of the two versions has are left out.

    A record of another program version, or none at all, is not an error: what it does not name is not compared. A value
    that says what was so without it, as the number of steps in ``lr_scheduler.total_steps``, is not a change.
    """
    if not isinstance(saved, Mapping):
        return []
    now = to_record(config, world_size)
    # An option that no table knows is an error: a new one has to be given a class before its change is let through
    differing = {
        name: OptionChange(name, saved[name], new, class_of(name) or "error")
        for name, new in now.items()
        if name in saved and name != FILES and saved[name] != new
    }
    saved_files = saved.get(FILES)
    hashes = saved_files if isinstance(saved_files, Mapping) else {}
    for name, digest in files.items():
        before = hashes.get(name, digest)
        if before != digest and name not in differing:
            old, new = (f"{now[name]} with the SHA-256 {str(text)[:12]}..." for text in (before, digest))
            differing[name] = OptionChange(name, old, new, "error")
    for part in excluded:
        for start in FREED.get(part, ()):
            differing = {name: change for name, change in differing.items() if not name.startswith(start)}
    # Options that together say one thing, and say the same as before in another way
    if _same_schedule(saved, now):
        for name in ("lr_scheduler.total_steps", "training.steps"):
            differing.pop(name, None)
    if _same_sizes(saved, now):
        for name in ("model.flavor", "model.overrides"):
            differing.pop(name, None)
    return list(differing.values())


def _same_schedule(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the schedule is as long as it was, by its own length or by that of the run."""
    if any(record.get("training.epochs") is not None for record in (saved, now)):
        return False
    lengths = [record.get("lr_scheduler.total_steps") or record.get("training.steps") for record in (saved, now)]
    return lengths[0] == lengths[1] is not None


def _same_sizes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether flavor and overrides give the sizes that they gave, whichever of the two says so."""
    if saved.get("model.name") != now["model.name"]:
        return False
    try:
        facts = read_model_file(now["model.name"])
        sizes = [shape(facts, record["model.flavor"], record["model.overrides"]) for record in (saved, now)]
    except (ConfigError, KeyError, TypeError):
        return False
    return sizes[0] == sizes[1]


def check_accepted(loaded: Loaded) -> Iterator[Problem]:
    """Names in checkpoint.accept_changes that no change could have."""
    known = [name for name in options() if class_of(name) == "error"]
    for word in loaded.config.checkpoint.accept_changes:
        if word in known or word == ALL:
            continue
        kind = class_of(word) if word in options() else None
        rule = {
            None: f'holds "{word}", which is not an option',
            "ignore": f'holds "{word}", which may be changed freely',
            "warn": f'holds "{word}", which may be changed freely',
            "data": f'holds "{word}", which the data decide: other data begin at their first sample',
        }[kind]
        near = nearest(word, [*known, ALL])
        fix = f'did you mean "{near}"?' if near and kind is None else f'leave it out, or use "{ALL}"'
        if kind == "data":
            fix = 'use checkpoint.exclude_from_loading = ["dataloader"]'
        yield Problem(ACCEPT, loaded.value(ACCEPT), rule, fix, loaded.where(ACCEPT))


def _plain(value: Any) -> Any:
    """A value as JSON has it, entries of tables with all their fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: Any) -> str:
    """One short line, whatever a checkpoint holds."""
    text = "".join(c if c.isprintable() else "?" for c in default_text(value))
    return text if len(text) <= 200 else f"{text[:200]}..."
