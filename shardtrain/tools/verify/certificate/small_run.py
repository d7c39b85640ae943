"""Derive the small configuration on one process that all dimensions of a certificate vary.

It keeps the user's data, task, adapters, optimizer and kind of model. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain import config as configs
from shardtrain.config import Config, Loaded, folder_model, ramps
from shardtrain.config.changes import class_of, show_value
from shardtrain.config.derived import compute_dtype
from shardtrain.config.load import value_of
from shardtrain.config.options import options
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.schema import (
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Compile,
    Job,
    Launch,
    Metrics,
    Parallelism,
    Profiling,
    Validation,
)
from shardtrain.config.schema.data_options import DataLoaderOptions
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.tools.verify import meshes, shrink
from shardtrain.tools.verify.certificate.substitutes import with_substitutes
from shardtrain.tools.verify.meshes import MeshPlan, changed
from shardtrain.utils.errors import ConfigError

STEPS = 3
ROWS = 8
"""Sequences per step."""
_KTO_GROUP = 2
_MAX_TOKENS = {True: 64, False: 256}
"""Maximum sequence length, for next-token tasks and for others, whose prompts must fit."""
ROUNDING_EPS = 1e-3
"""AdamW with a small eps turns a rounding error of 1e-8 in a gradient into 1e-4 in a weight."""

EMA_DECAY = 0.5
"""With a usual decay, averages of three steps would differ from the initial weights by less than a tolerance."""

NOISE = "training.neftune_noise_alpha"
BALANCE_LOSS = "model.overrides.balance_loss_coeff"
_NOTED = (
    "model.check",
    "model.converters",
    "model.overrides",
    "lora.",
    "lr_scheduler.",
    "optimizer.eps",
    "optimizer.lr",
    "task.group_size",
    "training.batch_ramp",
    "training.sequence_ramp",
    "training.global_batch_size",
    "training.mixed_precision_param",
)
"""Options whose changes have their own notes, or that are about something else than numbers."""

SmallCopy = Callable[[Sequence[MeshPlan], Loaded], dict[str, Any] | None]


@dataclass(frozen=True)
class SmallRun:
    """The configuration that trials vary.

    Attributes:
        user: The user's configuration.
        with_substitutes: The user's configuration with replacements for missing data.
        loaded: The small configuration on one process, with all rows in one pass.
        rows_per_pass: Smallest number of rows of a forward pass.
        notes: Changes from the user's configuration.
        folder: Folder of temporary files.
    """

    user: Loaded
    with_substitutes: Loaded
    loaded: Loaded
    rows_per_pass: int
    notes: Sequence[str]
    folder: Path

    @property
    def config(self) -> Config:
        """The small configuration on one process."""
        return self.loaded.config

    def varied(self, name: str, sections: Mapping[str, Mapping[str, Any]]) -> Loaded:
        """Return the configuration with other options and its own output folder.

        Raises:
            ConfigError: the options are not supported together.
        """
        return self.checked(name, changed(self.loaded, sections, set(), ""))

    def on_mesh(self, name: str, mesh: str) -> tuple[Loaded, MeshPlan]:
        """Return the configuration on a mesh, with gradient accumulation, and the plan of the mesh.

        Raises:
            ConfigError: the mesh is not supported.
        """
        plan = meshes.requested(self.loaded, [mesh], ())[0]
        data_ranks = plan.degrees.get("dp_replicate", 1) * plan.degrees.get("dp_shard", 1)
        # A pipeline divides the rows of a pass itself. Other meshes accumulate gradients over several passes.
        local = ROWS // data_ranks
        if not plan.schedule:
            local = max(self.rows_per_pass, local // 2)
        sections: dict[str, dict[str, Any]] = {
            "training": {"local_batch_size": local, "global_batch_size": ROWS}
        }
        if plan.degrees.get("dp_replicate", 1) > 1:
            is_sharded = self.user.config.parallelism.shard_optimizer_states
            sections["parallelism"] = {"shard_optimizer_states": is_sharded}
        return self.checked(name, changed(plan.loaded, sections, set(), "")), plan

    def validating(self, name: str, local_batch_size: int, mesh: str = "") -> tuple[Loaded, int]:
        """Return the configuration that validates after the last step, and its number of ranks.

        Raises:
            ConfigError: the mesh is not supported.
        """
        loaded, num_ranks = self.loaded, 1
        if mesh:
            loaded, plan = self.on_mesh(name, mesh)
            num_ranks = plan.num_ranks
        user = self.with_substitutes.config.validation
        options = {
            **_defaults(user),
            "local_batch_size": local_batch_size,
            "seq_len": self.config.training.seq_len,
            "freq": STEPS,
            "per_epoch": 0,
            "steps": -1,
            "patience": 0,
            "dataloader": DataLoaderOptions(),
        }
        return self.checked(name, changed(loaded, {"validation": options}, set(), "")), num_ranks

    def checked(self, name: str, loaded: Loaded) -> Loaded:
        """Set the output folder, and raise ConfigError if the configuration breaks a rule."""
        job = {"dump_folder": str(self.folder / "runs" / name)}
        # The rules reject options without effect if the user has set them. Without origins, no option counts
        # as set by the user, so the rules accept options of a feature that verify has turned off.
        loaded = dataclasses.replace(changed(loaded, {"job": job}, set(), ""), origins={})
        problems = [*configs.check(loaded), *configs.unavailable(loaded)]
        if problems:
            raise ConfigError(problems)
        return loaded


def prepare(
    user: Loaded, requested_meshes: Sequence[str], folder: Path, small_copy: SmallCopy
) -> SmallRun:
    """Return the small run of a configuration. ``small_copy`` finds small sizes of a user's model file.

    Raises:
        ConfigError: the configuration is wrong, or has no small version.
    """
    loaded, notes = with_substitutes(meshes.without_ramps(user), folder)
    for line in ramps.describe(user.config.training):
        notes.append(f"{line}; all steps of the small run have one size")
    complete = loaded
    config = loaded.config
    rows_per_pass = 1
    if config.task.name == "kto":
        # A batch of KTO consists of groups, so a small batch needs small groups.
        rows_per_pass = _KTO_GROUP
        loaded = changed(loaded, {"task": {"group_size": _KTO_GROUP}}, set(), "")
        notes.append(f"task.group_size: {config.task.group_size} -> {_KTO_GROUP}")

    small = _small_model(loaded, requested_meshes, notes, small_copy)
    seq_len = min(config.training.seq_len, _MAX_TOKENS[config.task.name in OF_NEXT_TOKENS])
    notes.append(
        f"{STEPS} steps of {ROWS} sequences of {seq_len} tokens, some targets removed; "
        "gradients clipped only in the last step"
    )
    sections = _one_process(config)
    sections["model"]["overrides"] = small
    sections["training"] |= {"seq_len": seq_len}
    notes += _notes_on_numbers(config)
    loaded = dataclasses.replace(changed(loaded, sections, set(), ""), origins={})
    notes += _notes_on_options(user.config, loaded.config)
    for option in row_dependent(user):
        notes.append(f"packing: {option} off, because its effect on a token depends on the row")
    run = SmallRun(user, complete, loaded, rows_per_pass, notes, folder)
    return dataclasses.replace(run, loaded=run.checked("reference", loaded))


def _small_model(
    loaded: Loaded, requested_meshes: Sequence[str], notes: list[str], small_copy: SmallCopy
) -> dict[str, Any]:
    """Return overrides of the model's sizes. The vocabulary does not change, because the tokenizer determines it."""
    # All meshes that are requested, or all default meshes, must divide the small sizes.
    plans = meshes.requested(
        loaded, requested_meshes or meshes.DEFAULT_MESHES, (), allow_impossible=True
    )
    sizes_of_copy = None
    if loaded.config.model.name.endswith(".py"):
        sizes_of_copy = small_copy(plans, loaded)
    task = shrink.prepare(plans, loaded, STEPS, full=False, small_copy=sizes_of_copy)
    overrides = dict(task.reference.model.overrides)
    overrides.pop("vocab_size", None)
    if "vocab_size" in loaded.config.model.overrides:
        overrides["vocab_size"] = loaded.config.model.overrides["vocab_size"]
    notes += [note for note in task.notes if note.startswith("model:")]
    return overrides


def _one_process(config: Config) -> dict[str, dict[str, Any]]:
    """Return the options of one process that computes all rows of a step in one pass, in float32."""
    sections: dict[str, dict[str, Any]] = {
        "job": _defaults(Job()),
        "metrics": _defaults(
            Metrics(log_freq=1000, per_source_loss=config.metrics.per_source_loss)
        ),
        "profiling": _defaults(Profiling()),
        "launch": _defaults(Launch()),
        "comm": _defaults(Comm()),
        "checkpoint": _defaults(Checkpoint()),
        "compile": _defaults(Compile(enable=False)),
        "activation_checkpoint": _defaults(ActivationCheckpoint(mode="none")),
        "validation": _defaults(Validation()),
        "parallelism": _defaults(Parallelism(data_parallel_shard_degree=1)),
        "model": {"converters": [], "check": False, "print_after_conversion": False},
        "optimizer": {
            "lr": 1e-2,
            "eps": ROUNDING_EPS,
            "early_step_in_backward": False,
            "state_dtype": "default",
            "bf16_stochastic_round": False,
        },
        "lr_scheduler": {
            "name": "warmup_stable_decay",
            "warmup_steps": 1,
            "total_steps": None,
            "decay_ratio": None,
        },
        "training": {
            "steps": STEPS,
            "epochs": None,
            "local_batch_size": ROWS,
            "global_batch_size": ROWS,
            "on_data_end": "repeat",
            "dtype": "float32",
            "mixed_precision_param": "float32",
            "mixed_precision_reduce": "float32",
            "enable_cpu_offload": False,
            "spike_policy": "off",
            "nonfinite_policy": "stop",
            "replica_check_interval": 0,
            "device": "cpu",
            "cpu_kernels": "pytorch",
            "dataloader": DataLoaderOptions(),
        },
    }
    context = {
        "context_parallel_method": config.parallelism.context_parallel_method,
        "context_parallel_load_balancer": config.parallelism.context_parallel_load_balancer,
        "context_parallel_rotate_method": config.parallelism.context_parallel_rotate_method,
    }
    sections["parallelism"] |= context
    # A schedule file describes the configuration's own number of ranks and micro-batches.
    if not config.parallelism.pipeline_parallel_schedule_csv:
        schedule = config.parallelism.pipeline_parallel_schedule
        sections["parallelism"]["pipeline_parallel_schedule"] = schedule
    # Tasks other than next-token losses require full logits, so they do not shard the vocabulary.
    sections["parallelism"]["disable_loss_parallel"] = config.task.name not in OF_NEXT_TOKENS
    if config.lora.enable:
        sections["lora"] = {
            "rank": min(config.lora.rank, 4),
            "dropout": 0.0,
            "base_dtype": "training",
            "initial_load_path": None,
            "random_base": True,
        }
    if config.training.ema_decay is not None:
        sections["training"]["ema_decay"] = EMA_DECAY
        # Averages require a checkpoint or a validation that uses them. This saves only the last step.
        sections["checkpoint"] = _defaults(Checkpoint(enable=True, interval=STEPS))
    return sections


def _defaults(section: Any) -> dict[str, Any]:
    """Return the fields of a section."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def row_dependent(loaded: Loaded) -> list[str]:
    """Return options whose effect on a token depends on its row, by definition. The dimension packing does without.

    NEFTune draws noise for each place of a row. The balance loss of experts is a sum over sequences. That of
    transformers is none, because it pools all tokens of a step.
    """
    names = []
    if loaded.config.training.neftune_noise_alpha is not None:
        names.append(NOISE)
    sizes = model_shape(loaded) or {}
    if sizes.get("balance_loss_coeff") and loaded.config.model.name != folder_model.NAME:
        names.append(BALANCE_LOSS)
    return names


def _notes_on_options(user: Config, small: Config) -> list[str]:
    """Return a note for each option that the user has set, changes numbers, and has another value in the small run."""
    notes = []
    defaults = Config()
    for name in options(Config):
        is_about_numbers = class_of(name) == "error" or name == "training.device"
        if not is_about_numbers or name.startswith(_NOTED):
            continue
        value = value_of(user, name)
        small_value = value_of(small, name)
        if value not in (small_value, value_of(defaults, name)):
            notes.append(f"{name}: {show_value(value)} -> {show_value(small_value)}")
    return notes


def _notes_on_numbers(config: Config) -> list[str]:
    """Return a note for each change of the user's options that changes numbers."""
    notes = ["float32; dropout off; weights at unit gain instead of the configured weights"]
    if compute_dtype(config) != "float32":
        notes.append(f"precision: {compute_dtype(config)} -> float32")
    if config.model.converters:
        notes.append(f"converters: {', '.join(config.model.converters)} off")
    if config.lora.enable:
        notes.append(
            f"lora: rank {config.lora.rank} -> {min(config.lora.rank, 4)}, random frozen weights in float32"
        )
    notes.append(f"optimizer: lr 0.01, eps {ROUNDING_EPS:g}, another rate at each step")
    return notes
