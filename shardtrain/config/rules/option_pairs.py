"""Rules that join options: those that exclude each other, and those that need another to take effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardtrain.config import stages
from shardtrain.config.load import Loaded
from shardtrain.config.rules.own_files_rules import SCHEDULE_OPTIONS, schedule_options
from shardtrain.config.rules.values import problem
from shardtrain.config.schema import Config
from shardtrain.config.settings import COMMAND_LINE
from shardtrain.facts.lr_schedules import SCHEDULES
from shardtrain.facts.optimizers import OPTIMIZERS, PYTORCH_ADAMS
from shardtrain.utils.errors import Problem

Rule = tuple[str, Callable[[Config], bool], str, str]


def _compiles_model(c: Config) -> bool:
    return bool(c.compile.enable) and "model" in c.compile.components


def _keeps_operations(c: Config) -> bool:
    return c.activation_checkpoint.mode == "selective" and c.activation_checkpoint.selective_ac_option == "op"


# What cannot be asked of gradients that are gone: (whether a config asks for it, what it is, the fix).
_EARLY: tuple[tuple[Callable[[Config], bool], str, str], ...] = (
    (lambda c: not math.isinf(c.training.max_norm), "training.max_norm scales", "set training.max_norm = inf"),
    (
        lambda c: c.training.nonfinite_policy == "skip",
        "training.nonfinite_policy looks at first",
        'set training.nonfinite_policy = "stop"',
    ),
    (
        lambda c: c.training.spike_policy == "skip",
        "training.spike_policy looks at first",
        'set training.spike_policy = "log"',
    ),
    (
        lambda c: c.training.mixed_precision_param == "float16",
        "loss scaling looks at first",
        'set training.mixed_precision_param = "bfloat16"',
    ),
    (
        lambda c: c.parallelism.pipeline_parallel_degree > 1,
        "a pipeline adds up over micro-batches",
        "set pipeline_parallel_degree = 1",
    ),
    (
        lambda c: c.parallelism.shard_optimizer_states,
        "shard_optimizer_states deals to other ranks",
        "set shard_optimizer_states = false",
    ),
    (
        lambda c: c.optimizer.name not in OPTIMIZERS or not OPTIMIZERS[c.optimizer.name].updates_separately,
        "this optimizer may need together",
        'set optimizer.name = "AdamW"',
    ),
)

# (option to name, when it is wrong, the rule it breaks, the fix)
PAIRS: tuple[Rule, ...] = (
    *(
        (
            "optimizer.early_step_in_backward",
            lambda c, wrong=wrong: c.optimizer.early_step_in_backward and wrong(c),  # type: ignore[misc]
            f"updates before all gradients are known, which {what}",
            f"{fix}, or remove it",
        )
        for wrong, what, fix in _EARLY
    ),
    *(
        (
            f"optimizer.{name}",
            lambda c, off=off, name=name: getattr(c.optimizer, name) != off and c.optimizer.name not in PYTORCH_ADAMS,  # type: ignore[misc]
            "is for Adam and AdamW",
            'set optimizer.name = "AdamW", or remove it',
        )
        for name, off in (("state_dtype", "default"), ("bf16_stochastic_round", False))
    ),
    (
        "optimizer.bf16_stochastic_round",
        lambda c: (
            c.optimizer.bf16_stochastic_round
            and c.training.dtype != "bfloat16"
            and c.optimizer.state_dtype != "bfloat16"
        ),
        "rounds what is stored in bfloat16, and nothing is",
        'set optimizer.state_dtype = "bfloat16" or training.dtype = "bfloat16", or remove it',
    ),
    (
        "training.mixed_precision_param",
        lambda c: c.training.mixed_precision_param == "float16" and c.training.dtype == "bfloat16",
        "cannot compute in float16 what training.dtype stores in bfloat16",
        'set training.dtype = "float32", or mixed_precision_param = "bfloat16"',
    ),
    (
        "parallelism.shard_optimizer_states",
        lambda c: c.parallelism.shard_optimizer_states and c.parallelism.data_parallel_replicate_degree == 1,
        "needs copies of the model to share the state between",
        "set data_parallel_replicate_degree above 1, or remove it: FSDP shards the state anyway",
    ),
    (
        "parallelism.shard_optimizer_states",
        lambda c: c.parallelism.shard_optimizer_states and c.training.enable_cpu_offload,
        "does not go with training.enable_cpu_offload",
        "set one of the two to false",
    ),
    (
        "activation_checkpoint.mode",
        lambda c: c.activation_checkpoint.mode == "memory_budget" and not _compiles_model(c),
        "is a decision of the compiler",
        'set compile.enable = true with "model" in compile.components, or use another mode',
    ),
    (
        "activation_checkpoint.visualize_memory_budget_pareto",
        lambda c: (
            c.activation_checkpoint.visualize_memory_budget_pareto and c.activation_checkpoint.mode != "memory_budget"
        ),
        "draws the trade-off of memory_budget alone",
        'set activation_checkpoint.mode = "memory_budget", or remove it',
    ),
    (
        "activation_checkpoint.debug",
        lambda c: c.activation_checkpoint.debug and _keeps_operations(c),
        "follows recomputations of whole layers alone",
        'set selective_ac_option to a number of layers or mode = "full" while you debug, or remove it',
    ),
    (
        "activation_checkpoint.debug",
        lambda c: (
            c.activation_checkpoint.debug
            and c.activation_checkpoint.mode in ("full", "selective")
            and stages.splits_backward(c.parallelism)
        ),
        "follows one recomputation of a layer, and this schedule, which splits the backward, makes several",
        "use 1F1B, GPipe, Interleaved1F1B or LoopedBFS while you debug, or remove it",
    ),
    (
        "activation_checkpoint.debug",
        lambda c: (
            c.activation_checkpoint.debug
            and c.activation_checkpoint.mode in ("full", "selective")
            and _compiles_model(c)
        ),
        "follows the operations of eager layers, and compiled layers have none",
        "set compile.enable = false while you debug, or remove it",
    ),
    (
        "activation_checkpoint.cpu_offload",
        lambda c: c.activation_checkpoint.cpu_offload and c.activation_checkpoint.mode in ("none", "memory_budget"),
        "moves the inputs of recomputed layers, and this mode keeps none",
        'set activation_checkpoint.mode = "full" or "selective"',
    ),
    (
        "parallelism.enable_async_tensor_parallel",
        lambda c: (
            c.parallelism.enable_async_tensor_parallel
            and c.parallelism.tensor_parallel_degree > 1
            and not _compiles_model(c)
        ),
        "is a pass of the compiler",
        'set compile.enable = true with "model" in compile.components, or remove it',
    ),
    (
        "parallelism.pipeline_parallel_microbatch_size",
        lambda c: (
            c.parallelism.pipeline_parallel_degree > 1
            and c.parallelism.pipeline_parallel_microbatch_size > 0
            and c.training.local_batch_size % c.parallelism.pipeline_parallel_microbatch_size != 0
        ),
        "does not divide training.local_batch_size",
        "use a divisor of the local batch size",
    ),
    (
        "debug.deterministic_warn_only",
        lambda c: c.debug.deterministic_warn_only and not c.debug.deterministic,
        "softens debug.deterministic, which is off",
        "set debug.deterministic = true too, or remove it",
    ),
    (
        "checkpoint.create_seed_checkpoint",
        lambda c: c.checkpoint.create_seed_checkpoint and not c.checkpoint.enable,
        "needs checkpoints",
        "set checkpoint.enable = true, or remove it",
    ),
    (
        "checkpoint.load_only",
        lambda c: c.checkpoint.load_only and not c.checkpoint.enable,
        "loads nothing while checkpoints are off",
        "set checkpoint.enable = true, or remove it",
    ),
    (
        "checkpoint.load_step",
        lambda c: c.checkpoint.load_step >= 0 and not c.checkpoint.enable,
        "loads nothing while checkpoints are off",
        "set checkpoint.enable = true, or remove it",
    ),
    (
        "compile.components",
        lambda c: bool(c.compile.enable) and not c.compile.components,
        "leaves nothing to compile",
        'name "model", "loss" or both, or set compile.enable = false',
    ),
    (
        "profiling.profile_freq",
        lambda c: (
            c.profiling.enable_profiling
            and 0 < c.profiling.profile_freq < c.profiling.profiler_warmup + c.profiling.profiler_active
        ),
        "is less than profiler_warmup plus profiler_active",
        "raise it, or lower those",
    ),
    (
        "training.dataloader.persistent_workers",
        lambda c: c.training.dataloader.persistent_workers and c.training.dataloader.num_workers == 0,
        "needs workers",
        "set training.dataloader.num_workers above 0, or remove it",
    ),
    (
        "training.dataloader.prefetch_factor",
        lambda c: c.training.dataloader.prefetch_factor is not None and c.training.dataloader.num_workers == 0,
        "needs workers",
        "set training.dataloader.num_workers above 0, or remove it",
    ),
    (
        "validation.dataloader.persistent_workers",
        lambda c: c.validation.dataloader.persistent_workers and c.validation.dataloader.num_workers == 0,
        "needs workers",
        "set validation.dataloader.num_workers above 0, or remove it",
    ),
    (
        "validation.dataloader.prefetch_factor",
        lambda c: c.validation.dataloader.prefetch_factor is not None and c.validation.dataloader.num_workers == 0,
        "needs workers",
        "set validation.dataloader.num_workers above 0, or remove it",
    ),
)

# Options that were written down and cannot take effect: (option, when it has none, why, the fix).
WITHOUT_EFFECT: tuple[Rule, ...] = (
    (
        "metrics.sample_freq",
        lambda c: bool(c.metrics.sample_freq) and not c.metrics.sample_prompt,
        "has no text to continue",
        'set metrics.sample_prompt = "Once upon a time", or remove it',
    ),
    (
        "checkpoint.interval",
        lambda c: c.checkpoint.enable and c.checkpoint.interval_type == "automatic",
        'is not used with checkpoint.interval_type = "automatic"',
        "remove it",
    ),
    (
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        lambda c: (
            "quantize.linear.float8" in c.model.converters
            and not c.quantize.linear.float8.enable_fsdp_float8_all_gather
        ),
        "has no effect without enable_fsdp_float8_all_gather",
        "set quantize.linear.float8.enable_fsdp_float8_all_gather = true, or remove it",
    ),
    (
        "training.steps",
        lambda c: c.training.epochs is not None,
        "is set beside training.epochs, which decides the number of steps",
        "keep one of the two",
    ),
    (
        "training.on_data_end",
        lambda c: c.training.epochs is not None,
        "has no effect beside training.epochs, which ends the run with the data",
        "keep one of the two",
    ),
    (
        "training.mixed_precision_param",
        lambda c: c.training.dtype == "bfloat16" and c.training.mixed_precision_param == "float32",
        'has no effect with training.dtype = "bfloat16", which computes in bfloat16',
        'set training.dtype = "float32", or remove it',
    ),
    (
        "model.hf_assets_path",
        lambda c: (
            c.model.tokenizer_path not in (None, c.model.hf_assets_path)
            and not (Path(c.model.hf_assets_path) / "config.json").is_file()  # else sizes, weights or exports are its
        ),
        "has no effect beside model.tokenizer_path",
        "keep one of the two",
    ),
    *(
        (
            f"training.{name}",
            lambda c: c.training.mixed_precision_param != "float16",
            "has no effect without float16, which alone needs loss scaling",
            'set training.mixed_precision_param = "float16", or remove it',
        )
        for name in ("initial_loss_scale", "loss_scale_growth_interval")
    ),
    *(
        (
            f"optimizer.muon_{name}",
            lambda c: c.optimizer.name != "Muon" and not c.optimizer.name.endswith(".py"),
            "has no effect on another optimizer",
            'set optimizer.name = "Muon", or remove it',
        )
        for name in ("adamw_patterns", "momentum", "nesterov", "steps", "update_rms", "dtype")
    ),
    (
        "training.nonfinite_max_skips",
        lambda c: c.training.nonfinite_policy != "skip",
        "has no effect while nonfinite_policy stops the run",
        'set training.nonfinite_policy = "skip", or remove it',
    ),
    (
        "activation_checkpoint.memory_budget",
        lambda c: c.activation_checkpoint.mode != "memory_budget",
        "has no effect in this mode",
        'set activation_checkpoint.mode = "memory_budget", or remove it',
    ),
)


def check_pairs(loaded: Loaded) -> Iterator[Problem]:
    """Options that exclude each other or lack what they need."""
    for option, wrong, rule, fix in PAIRS:
        if wrong(loaded.config):
            yield problem(loaded, option, rule, fix)


_REPLACED_BY = {"model.hf_assets_path": "model.tokenizer_path"}
"""Options of a file that another one of the command line takes the place of, as it does with the option itself."""


def check_without_effect(loaded: Loaded) -> Iterator[Problem]:
    """Options that somebody wrote down and that could not take effect; a value equal to the default does no harm."""
    for option, wrong, rule, fix in WITHOUT_EFFECT:
        if loaded.origins.get(_REPLACED_BY.get(option, "")) == COMMAND_LINE != loaded.origins.get(option):
            continue
        if loaded.is_set(option) and not _is_default(loaded, option) and wrong(loaded.config):
            yield problem(loaded, option, rule, fix)


def check_schedule(loaded: Loaded) -> Iterator[Problem]:
    """Options that the learning-rate schedule does not read; a value equal to the default does no harm."""
    name = loaded.config.lr_scheduler.name
    options_read = schedule_options(name)
    if options_read is None:  # check_own_files reports an unknown name
        return
    for key in SCHEDULE_OPTIONS:
        option = f"lr_scheduler.{key}"
        if key in options_read or not loaded.is_set(option) or _is_default(loaded, option):
            continue
        users = [other for other in SCHEDULES if key in (schedule_options(other) or ())]
        fix = f'set lr_scheduler.name = "{users[0]}", or remove it'
        yield problem(loaded, option, f"has no effect with lr_scheduler.name = {name}", fix)


def check_spikes(loaded: Loaded) -> Iterator[Problem]:
    """A detector needs values to compare with, and going back needs checkpoints that are old enough."""
    training = loaded.config.training
    checkpoint = loaded.config.checkpoint
    if training.spike_window < 2:
        yield problem(loaded, "training.spike_window", "has no spread", "use 2 steps or more, such as 128")
    if training.spike_policy != "rewind":
        return
    policy = "training.spike_policy"
    if not checkpoint.enable or checkpoint.load_only:
        yield problem(loaded, policy, "goes back to checkpoints that this run saves", "set checkpoint.enable=true")
    kept = (checkpoint.keep_latest_k - 1) * checkpoint.interval
    if checkpoint.interval_type == "steps" and checkpoint.keep_latest_k and kept < training.spike_rewind_steps:
        rule = f"is more than the {kept} steps that checkpoint.keep_latest_k and checkpoint.interval keep"
        yield problem(loaded, "training.spike_rewind_steps", rule, "keep more checkpoints, or go back less")


def spike_notes(loaded: Loaded) -> list[str]:
    """Options of spikes that another policy leaves without effect."""
    policy = loaded.config.training.spike_policy
    idle: list[str] = []
    if policy != "rewind":
        idle += ["training.spike_rewind_steps", "training.spike_skip_steps", "training.max_rewinds"]
    if policy == "off":
        idle += ["training.spike_window", "training.spike_sigmas"]
    waiting = [name for name in idle if loaded.is_set(name)]
    return [f"{', '.join(waiting)}: without effect with training.spike_policy={policy}"] if waiting else []


def _is_default(loaded: Loaded, option: str) -> bool:
    value: Any = Config()
    for part in option.split("."):
        value = getattr(value, part)
    return bool(loaded.value(option) == value)
