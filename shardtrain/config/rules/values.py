"""Rules about a single option: ranges of numbers, fixed choices, and formats."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest, options
from shardtrain.config.settings import Value
from shardtrain.utils.errors import Problem
from shardtrain.utils.variables import is_whole_number


def problem(loaded: Loaded, option: str, rule: str, fix: str) -> Problem:
    """Return a Problem with the current value of an option and the place that set it.

    A user cannot remove an option that a preset sets. For these the fix "remove it" becomes "set it
    to" the default.
    """
    if loaded.is_from_preset(option):
        # JSON and TOML write numbers, strings and booleans the same way.
        fix = fix.replace(
            "remove it", f"set it to {json.dumps(options(type(loaded.config))[option].default)}"
        )
    return Problem(option, loaded.value(option), rule, fix, loaded.where(option))


def divisors(number: int, limit: int | None = None) -> list[int]:
    """Return the divisors of a positive number in rising order, up to ``limit``.

    >>> divisors(12), divisors(12, limit=4)
    ([1, 2, 3, 4, 6, 12], [1, 2, 3, 4])
    """
    largest = min(number, limit or number)
    return [divisor for divisor in range(1, largest + 1) if number % divisor == 0]


def any_of(names: Value) -> str:
    """Join values as prose: ``1, 2 or 4``."""
    texts = [str(name) for name in names]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} or {texts[-1]}"


AT_LEAST_1 = (
    "profiling.profile_freq",
    "profiling.profiler_active",
    "metrics.log_freq",
    "training.local_batch_size",
    "training.seq_len",
    "training.loss_scale_growth_interval",
    "training.nonfinite_max_skips",
    "training.spike_rewind_steps",
    "training.spike_skip_steps",
    "training.max_rewinds",
    "training.gc_freq",
    "training.epochs",
    "training.dataloader.prefetch_factor",
    "lr_scheduler.total_steps",
    "optimizer.muon_steps",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree",
    "parallelism.expert_tensor_parallel_degree",
    "checkpoint.interval",
    "checkpoint.grace_seconds",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "validation.local_batch_size",
    "validation.seq_len",
    "validation.freq",
    "validation.dataloader.prefetch_factor",
    "fault_tolerance.process_group_timeout_ms",
    "fault_tolerance.min_replica_size",
    "fault_tolerance.sync_steps",
    "fault_tolerance.num_fragments",
    "launch.nodes",
    "launch.min_nodes",
    "launch.devices_per_node",
    "launch.nproc_per_node",
    "launch.cpus_per_node",
    "launch.memory_gib_per_node",
    "launch.shared_memory_gib",
    "launch.ssh.connect_timeout_seconds",
    "launch.ssh.rendezvous_port",
    "launch.slurm.time_limit_minutes",
    "launch.slurm.sweep_at_once",
)
AT_LEAST_0 = (
    "training.replica_check_interval",
    "profiling.profiler_warmup",
    "metrics.sample_freq",
    "lr_scheduler.warmup_steps",
    "training.dataloader.num_workers",
    "validation.dataloader.num_workers",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "checkpoint.hf_interval",
    "checkpoint.keep_latest_k",
    "checkpoint.keep_every_n_steps",
    "checkpoint.snapshot_interval",
    "checkpoint.max_stall_seconds",
    "validation.patience",
    "validation.per_epoch",
    "comm.hang_timeout_seconds",
    "comm.straggler_window_steps",
    "comm.trace_buf_size",
    "debug.seed",
    "fault_tolerance.replica_id",
    "fault_tolerance.group_size",
    "fault_tolerance.fragment_sync_delay",
    "launch.max_restarts",
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.qk_clip_threshold",
    "training.z_loss_weight",
)
MINUS_1_OR_AT_LEAST_1 = (
    "training.global_batch_size",
    "parallelism.data_parallel_shard_degree",
    "validation.steps",
)
ABOVE_0 = (
    "training.spike_sigmas",
    "optimizer.eps",
    "optimizer.muon_update_rms",
    "training.max_norm",
    "training.neftune_noise_alpha",
    "training.mtp_loss_scaling_factor",
    "training.initial_loss_scale",
    "metrics.peak_flops",
    "checkpoint.mean_time_to_failure_hours",
)
# An infinite max_norm measures the norm of the gradients and never clips.
MAY_BE_INFINITE = ("training.max_norm",)
FROM_0_BELOW_1 = {
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.muon_momentum": 0.95,
    "training.label_smoothing": 0.1,
}
"""Option -> a usual value, which the message names."""
FROM_0_TO_1 = (
    "training.nonfinite_max_skip_fraction",
    "lr_scheduler.decay_ratio",
    "lr_scheduler.min_lr_factor",
    "lr_scheduler.warmup_proportion",
    "activation_checkpoint.memory_budget",
    "fault_tolerance.fragment_update_alpha",
    "data.bad_rows_max_fraction",
    "data.long_rows_max_fraction",
)
MAX_NUMBER = 10**12
"""Upper bound of steps, rows, ranks and seconds. A run with a step per millisecond reaches it after
30 years.
"""
CHOICES = {
    "activation_checkpoint.determinism_check": ("default", "none"),
    "checkpoint.exclude_from_loading": ("optimizer", "lr_scheduler", "dataloader", "train_state"),
}
"""Options whose legal values the schema does not list."""


def check_ranges(loaded: Loaded) -> Iterator[Problem]:
    """Yield numbers outside their range. An unset option is not checked."""
    # If an option is None, it is off or its default is computed.
    for option in AT_LEAST_1:
        # By default it is training.seq_len, which has its own entry.
        if option == "validation.seq_len" and not loaded.is_set(option):
            continue
        value = loaded.value(option)
        if value is not None:
            yield from _check_number(
                loaded, option, value >= 1, "must be at least 1", "use 1 or more"
            )
    for option in AT_LEAST_0:
        value = loaded.value(option)
        if value is not None:
            yield from _check_number(
                loaded, option, value >= 0, "must not be negative", "use 0 or more"
            )
    for option in MINUS_1_OR_AT_LEAST_1:
        value = loaded.value(option)
        is_valid = value == -1 or value >= 1
        yield from _check_number(
            loaded,
            option,
            is_valid,
            "must be at least 1, or -1",
            "use 1 or more, or -1",
        )
    for option in ABOVE_0:
        value = loaded.value(option)
        if value is not None:
            yield from _check_number(
                loaded, option, value > 0, "must be above 0", "use a positive number"
            )
    # An exit code is a byte.
    exit_code = loaded.config.checkpoint.stop_exit_code
    rule = "must be from 0 to 255"
    yield from _check_number(
        loaded,
        "checkpoint.stop_exit_code",
        0 <= exit_code <= 255,
        rule,
        "use for example 75",
    )
    for option, usual in FROM_0_BELOW_1.items():
        # At 1, a moving average would ignore all new values, and all labels would be smoothed away.
        value = loaded.value(option)
        is_valid = 0 <= value < 1
        yield from _check_number(
            loaded, option, is_valid, "must be at least 0 and below 1", f"use for example {usual}"
        )
    for option in FROM_0_TO_1:
        value = loaded.value(option)
        if value is not None:
            rule = "must be between 0 and 1"
            yield from _check_number(
                loaded, option, 0 <= value <= 1, rule, "write a fraction: 10 % is 0.1"
            )
    decay = loaded.config.training.ema_decay
    if decay is not None:
        is_valid = 0 < decay < 1
        rule = "must be above 0 and below 1"
        yield from _check_number(
            loaded, "training.ema_decay", is_valid, rule, "use for example 0.999"
        )
    yield from _check_large_numbers(loaded)


def _check_number(
    loaded: Loaded, option: str, is_in_range: bool, rule: str, fix: str
) -> Iterator[Problem]:
    """Yield a problem if a number is outside its range, or not finite and not one of MAY_BE_INFINITE."""
    is_finite = math.isfinite(loaded.value(option))
    if is_in_range and (is_finite or option in MAY_BE_INFINITE):
        return
    yield problem(loaded, option, rule if is_finite else "must be a finite number", fix)


def _check_large_numbers(loaded: Loaded) -> Iterator[Problem]:
    for option in (*AT_LEAST_1, *AT_LEAST_0, *MINUS_1_OR_AT_LEAST_1, "training.steps"):
        value = loaded.value(option)
        # A seed may be any number.
        if isinstance(value, int) and value > MAX_NUMBER and option != "debug.seed":
            yield problem(loaded, option, f"must be at most {MAX_NUMBER}", "use a smaller number")


def check_steps(loaded: Loaded) -> Iterator[Problem]:
    """Yield wrong numbers of steps, with an explanation for -1."""
    steps = loaded.config.training.steps
    # Users of torchtrain know -1, so explain it instead of only rejecting it.
    if steps == -1:
        yield problem(
            loaded,
            "training.steps",
            rule="meant a run without end in torchtrain, which has no learning-rate schedule",
            fix="set the number of steps, or training.epochs",
        )
    elif steps < 1:
        yield problem(loaded, "training.steps", "must be at least 1", "use 1 or more")
    # -1 is the newest checkpoint, and 0 the seed checkpoint.
    if loaded.config.checkpoint.load_step < -1:
        yield problem(
            loaded,
            "checkpoint.load_step",
            rule="must be a step, or -1 for the newest",
            fix="use -1 or a step",
        )


def check_choices(loaded: Loaded) -> Iterator[Problem]:
    """Yield values that are not in CHOICES. For an option that is a list, check every item."""
    for option, choices in CHOICES.items():
        value = loaded.value(option)
        is_list = isinstance(value, list)
        # For a list, the message must name the wrong item, not the list.
        for item in value if is_list else [value]:
            if item in choices:
                continue
            near = nearest(item, choices)
            rule = f'contains "{item}", which is not' if is_list else "must be"
            yield problem(
                loaded,
                option,
                rule=f"{rule} {any_of(choices)}",
                fix=f'did you mean "{near}"?' if near else f'use "{choices[0]}"',
            )


def check_forms(loaded: Loaded) -> Iterator[Problem]:
    """Yield values with a wrong format, and a number of kept checkpoints that is unsafe."""
    # The option is text, because it is a number or "op".
    option = "activation_checkpoint.selective_ac_option"
    value = loaded.value(option)
    is_layer_count = is_whole_number(value) and int(value) >= 1
    if value != "op" and not is_layer_count:
        yield problem(
            loaded,
            option,
            rule='must be a number of layers in quotes, or "op"',
            fix='use "1", "2", … or "op"',
        )
    # Ranks that write into one file would overwrite each other's lines.
    if "{rank}" not in loaded.config.metrics.save_log_file:
        yield problem(
            loaded,
            "metrics.save_log_file",
            rule="would be one file for all ranks",
            fix='put {rank} into it, as in "logs/rank-{rank}.log"',
        )
    if not 0 <= loaded.config.metrics.prometheus_port < 65536:
        yield problem(
            loaded,
            "metrics.prometheus_port",
            rule="is not a port",
            fix="use 1024 to 65535, or 0 for none",
        )
    if loaded.config.checkpoint.keep_latest_k == 1:
        yield problem(
            loaded,
            "checkpoint.keep_latest_k",
            rule="would delete the only valid checkpoint before the next one is known to be complete",
            fix="keep 2 or more, or 0 for all",
        )
