"""What an option that changed between a checkpoint and the run that continues it means: free, told, data or course.

A continued run is the run that was saved. An option that would set it on another course stops it until the change is
accepted; one that alters nothing but speed, place or what is written is free.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardtrain.config import derived
from shardtrain.config.load import Loaded, value_of
from shardtrain.config.model_file import read_model_file, shape
from shardtrain.config.options import default_text, nearest, options
from shardtrain.config.schema import Config
from shardtrain.utils.errors import ConfigError, Problem

Class = Literal["free", "told", "data", "course"]
"""free: the numbers stay the same, to rounding. told: meant to be changed, though it bends the schedule; the log says
so. data: the data's own fingerprint decides, so that a file that only moved is free. course: other numbers from the
next step on."""

ALL = "all"
ACCEPT = "checkpoint.accept_changes"

SECTIONS: dict[str, Class] = {
    "job": "free",
    "profiling": "free",
    "metrics": "free",
    "model": "course",
    "lora": "course",
    "optimizer": "course",
    "lr_scheduler": "course",
    "parallelism": "free",  # the mesh changes no number
    "checkpoint": "free",
    "activation_checkpoint": "free",
    "compile": "free",
    "quantize": "course",
    "comm": "free",
    "memory_estimation": "free",
    "fault_tolerance": "free",
    "validation": "free",
    "experimental": "free",
    "launch": "free",
}
"""Sections of which a new option has the class of the others; in those that are not here each option is named."""

OPTIONS: dict[str, Class] = {
    "model.hf_assets_path": "data",
    "model.tokenizer_path": "data",
    "model.print_after_conversion": "free",
    "optimizer.implementation": "free",
    "optimizer.early_step_in_backward": "free",
    "training.dataset": "data",
    "training.dataset_path": "data",
    "training.on_data_end": "free",
    "training.last_batch": "data",
    "training.local_batch_size": "free",  # accumulation makes up for it
    "training.global_batch_size": "course",
    "training.seq_len": "data",
    "training.max_norm": "course",
    "training.steps": "told",
    "training.epochs": "told",
    "training.enable_cpu_offload": "free",
    "training.dtype": "course",
    "training.mixed_precision_param": "course",
    "training.mixed_precision_reduce": "course",
    "training.initial_loss_scale": "free",  # a continued run has its own
    "training.loss_scale_growth_interval": "course",
    "training.nonfinite_policy": "free",
    "training.nonfinite_max_skips": "free",
    "training.nonfinite_max_skip_fraction": "free",
    "training.spike_policy": "course",
    "training.spike_window": "course",
    "training.spike_sigmas": "course",
    "training.spike_rewind_steps": "course",
    "training.spike_skip_steps": "course",
    "training.max_rewinds": "free",
    "training.replica_check_interval": "free",
    "training.device": "free",
    "training.cpu_kernels": "free",
    "training.gc_freq": "free",
    "training.gc_debug": "free",
    "training.dataloader.num_workers": "free",
    "training.dataloader.persistent_workers": "free",
    "training.dataloader.pin_memory": "free",
    "training.dataloader.prefetch_factor": "free",
    "lora.initial_load_path": "free",
    "lora.random_base": "free",  # the base has a fingerprint
    "data.mode": "data",
    "data.readers": "data",
    "data.format": "data",
    "data.text_field": "data",
    "data.prompt_field": "data",
    "data.completion_field": "data",
    "data.messages_field": "data",
    "data.tools_field": "data",
    "data.chat_template": "data",
    "data.template": "data",
    "data.add_bos": "data",
    "data.add_eos": "data",
    "data.separator": "data",
    "data.packing": "data",
    "data.long_documents": "data",
    "data.document_mask": "course",
    "data.split": "data",
    "data.subset": "data",
    "data.streaming": "data",
    "data.bad_rows": "free",
    "data.bad_rows_max_fraction": "free",
    "data.max_row_bytes": "data",
    "data.artefact_memory_bytes": "free",
    "data.artefact_seconds": "free",
    "data.sources": "data",
    "data.stages": "data",
    "task.name": "course",
    "task.labels": "data",
    "task.num_labels": "data",
    "task.label_field": "data",
    "task.pair_field": "data",
    "task.beta": "course",
    "task.gamma": "course",
    "task.desirable_weight": "course",
    "task.undesirable_weight": "course",
    "task.group_size": "data",
    "task.teacher_path": "free",  # what lies there has a fingerprint
    "task.kd_ratio": "course",
    "task.temperature": "course",
    "task.divergence": "course",
    "task.jsd_beta": "course",
    "task.chosen_field": "data",
    "task.rejected_field": "data",
    "task.test_dataset_path": "free",
    "task.test_split": "free",
    "task.options": "course",
    "debug.seed": "data",
    "debug.deterministic": "free",
    "debug.deterministic_warn_only": "free",
    "debug.moe_force_load_balance": "course",
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
class Change:
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
    ('course', 'free', 'told')
    """
    return OPTIONS.get(option, SECTIONS.get(option.partition(".")[0]))


def to_record(config: Config, world_size: int) -> dict[str, Any]:
    """What a checkpoint keeps of its configuration: every option that is not free, as JSON."""
    kept = {name: _plain(value_of(config, name)) for name in options() if class_of(name) != "free"}
    # what was written as "whatever this mesh gives" is the number that it gave
    kept["training.global_batch_size"] = derived.global_batch_size(config, world_size)
    return kept


def find(saved: Any, config: Config, world_size: int, excluded: Sequence[str] = ()) -> list[Change]:
    """The options that differ from a checkpoint's record; options that only one of the two versions has are not told.

    A record of another program version, or none at all, is not an error: what it does not name is not compared. A value
    that says what was so without it, as the number of steps in ``lr_scheduler.total_steps``, is not a change.
    """
    if not isinstance(saved, Mapping):
        return []
    now = to_record(config, world_size)
    freed = tuple(start for part in excluded for start in FREED.get(part, ()))
    same = tuple(name for is_same, names in _SPELT_OUT for name in names if is_same(saved, now))
    found = []
    for name, new in now.items():
        if name in saved and saved[name] != new and name not in same and not (freed and name.startswith(freed)):
            found.append(Change(name, saved[name], new, class_of(name) or "course"))
    return found


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


_SPELT_OUT: tuple[tuple[Callable[[Mapping[str, Any], Mapping[str, Any]], bool], tuple[str, ...]], ...] = (
    (_same_schedule, ("lr_scheduler.total_steps", "training.steps")),
    (_same_sizes, ("model.flavor", "model.overrides")),
)
"""Options that together say one thing, with whether it is the same thing."""


def check_accepted(loaded: Loaded) -> Iterator[Problem]:
    """Names in checkpoint.accept_changes that no change could have."""
    known = [name for name in options() if class_of(name) == "course"]
    for word in loaded.config.checkpoint.accept_changes:
        if word in known or word == ALL:
            continue
        kind = class_of(word) if word in options() else None
        rule = {
            None: f'holds "{word}", which is not an option',
            "free": f'holds "{word}", which may be changed freely',
            "told": f'holds "{word}", which may be changed freely',
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
