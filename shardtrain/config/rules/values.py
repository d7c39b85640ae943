"""Rules about one value: what is at least 1, what lies between 0 and 1, which words are known."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest, options
from shardtrain.config.settings import Value
from shardtrain.utils.errors import Problem


def problem(loaded: Loaded, option: str, rule: str, fix: str) -> Problem:
    """Return a Problem with the current value of an option and the place that set it.

    A user cannot remove an option that a preset sets. For these the fix "remove it" becomes "set it to" the default.
    """
    if loaded.is_from_preset(option):
        fix = fix.replace("remove it", f"set it to {json.dumps(options()[option].default)}")
    return Problem(option, loaded.value(option), rule, fix, loaded.where(option))


def any_of(names: Value) -> str:
    """Join values as prose: ``1, 2 or 4``."""
    words = [str(name) for name in names]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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
    "training.initial_loss_scale",
    "metrics.peak_flops",
    "checkpoint.mean_time_to_failure_hours",
)
MAY_BE_INFINITE = ("training.max_norm",)  # inf measures the norm and never scales
FROM_0_BELOW_1 = ("optimizer.beta1", "optimizer.beta2", "optimizer.muon_momentum")
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
MOST = 10**12
"""Of steps, rows, ranks and seconds: a run of a step in a millisecond gets there in 30 years."""
WORDS = {
    "activation_checkpoint.determinism_check": ("default", "none"),
    "checkpoint.exclude_from_loading": ("optimizer", "lr_scheduler", "dataloader", "train_state"),
}


def check_ranges(loaded: Loaded) -> Iterator[Problem]:
    """Numbers that lie outside their range; an unset option has none."""
    for names, fits, rule, fix in _RANGES:
        for option in names:
            value = loaded.value(option)
            if option == "validation.seq_len" and not loaded.is_set(option):
                continue  # it is training.seq_len, which is reported itself
            if value is None or (fits(value) and (math.isfinite(value) or option in MAY_BE_INFINITE)):
                continue
            yield problem(loaded, option, rule if math.isfinite(value) else "must be a finite number", fix)
    for option in (*AT_LEAST_1, *AT_LEAST_0, *MINUS_1_OR_AT_LEAST_1, "training.steps"):
        value = loaded.value(option)
        if isinstance(value, int) and value > MOST and option != "debug.seed":
            yield problem(loaded, option, f"must be at most {MOST}, beyond which no run gets", "use a smaller number")


_RANGES: tuple[tuple[tuple[str, ...], Any, str, str], ...] = (
    (AT_LEAST_1, lambda v: v >= 1, "must be at least 1", "use 1 or more"),
    (AT_LEAST_0, lambda v: v >= 0, "must not be negative", "use 0 or more"),
    (MINUS_1_OR_AT_LEAST_1, lambda v: v == -1 or v >= 1, "must be at least 1, or -1", "use 1 or more, or -1"),
    (ABOVE_0, lambda v: v > 0, "must be above 0", "use a positive number"),
    (("checkpoint.stop_exit_code",), lambda v: 0 <= v <= 255, "must be from 0 to 255", "use for example 75"),
    (FROM_0_BELOW_1, lambda v: 0 <= v < 1, "must be at least 0 and below 1", "use for example 0.9"),
    (FROM_0_TO_1, lambda v: 0 <= v <= 1, "must lie between 0 and 1", "write a share: 10 % is 0.1"),
)


def check_steps(loaded: Loaded) -> Iterator[Problem]:
    """A number of steps; -1, which once meant a run without end, is explained."""
    steps = loaded.config.training.steps
    if steps == -1:
        rule = "meant a run without end in torchtrain, which has no learning-rate schedule"
        yield problem(loaded, "training.steps", rule, "set the number of steps, or training.epochs")
    elif steps < 1:
        yield problem(loaded, "training.steps", "must be at least 1", "use 1 or more")
    if loaded.config.checkpoint.load_step < -1:
        yield problem(loaded, "checkpoint.load_step", "must be a step, or -1 for the newest", "use -1 or a step")


def check_words(loaded: Loaded) -> Iterator[Problem]:
    """Words out of a fixed set, where the schema cannot say so."""
    for option, known in WORDS.items():
        value = loaded.value(option)
        for word in value if isinstance(value, list) else [value]:
            if word not in known:
                near = nearest(word, known)
                rule = "must be" if not isinstance(value, list) else f'holds "{word}", which is not'
                fix = f'did you mean "{near}"?' if near else f'use "{known[0]}"'
                yield problem(loaded, option, f"{rule} {any_of(known)}", fix)


def check_forms(loaded: Loaded) -> Iterator[Problem]:
    """Texts of a certain form."""
    option = "activation_checkpoint.selective_ac_option"
    value = loaded.value(option)
    if value != "op" and not (value.isdecimal() and int(value) >= 1):
        yield problem(loaded, option, 'must be a number of layers in quotes, or "op"', 'use "1", "2", … or "op"')
    if "{rank}" not in loaded.config.metrics.save_log_file:
        rule = "would be one file for all ranks"
        yield problem(loaded, "metrics.save_log_file", rule, 'put {rank} into it, as in "logs/rank-{rank}.log"')
    if not 0 <= loaded.config.metrics.prometheus_port < 65536:
        yield problem(loaded, "metrics.prometheus_port", "is not a port", "use 1024 to 65535, or 0 for none")
    if loaded.config.checkpoint.keep_latest_k == 1:
        rule = "would delete the only good checkpoint before the next is known to be whole"
        yield problem(loaded, "checkpoint.keep_latest_k", rule, "keep 2 or more, or 0 for all")
