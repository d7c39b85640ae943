"""Rules about combinations of options: options that exclude each other, and options that require
another option.

Each rule is a function that yields a ``Problem`` with the option to change. ``PAIR_RULES`` apply to
every configuration. ``NO_EFFECT_RULES`` apply only to options that a user wrote with a value other
than the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardtrain.config import stages
from shardtrain.config.load import Loaded
from shardtrain.config.rules.own_files_rules import SCHEDULE_OPTIONS, schedule_options
from shardtrain.config.rules.values import any_of, problem
from shardtrain.config.schema import Config
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.facts.lr_schedules import SCHEDULES
from shardtrain.facts.optimizers import OPTIMIZERS, PYTORCH_ADAMS
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import COMMAND_LINE, Problem

Rule = Callable[[Loaded], Iterator[Problem]]

ADAM_ONLY = {"state_dtype": "default", "bf16_stochastic_round": False}
"""Options of ``[optimizer]`` that other optimizers ignore, with their defaults."""
FLOAT16_ONLY = ("initial_loss_scale", "loss_scale_growth_interval")
"""Options of ``[training]`` that only loss scaling reads."""
MUON_ONLY = ("adamw_patterns", "momentum", "nesterov", "steps", "update_rms", "dtype")
"""Options ``optimizer.muon_*`` that only Muon reads."""
_REPLACED_BY = {"model.hf_assets_path": "model.tokenizer_path"}
"""Options of a file that another option of the command line replaces, like a repetition of the
option itself.
"""


def check_pairs(loaded: Loaded) -> Iterator[Problem]:
    """Yield options that exclude each other, and options without an option that they require."""
    for rule in PAIR_RULES:
        yield from rule(loaded)


def check_without_effect(loaded: Loaded) -> Iterator[Problem]:
    """Yield options without effect that a user wrote. A value equal to the default is harmless and
    not reported.
    """
    for rule in NO_EFFECT_RULES:
        for pair_problem in rule(loaded):
            option = pair_problem.option
            is_written = loaded.is_set(option) and not _is_default(loaded, option)
            # A file's option is not reported if the command line sets the option that replaces it.
            replacement = loaded.origins.get(_REPLACED_BY.get(option, ""))
            is_replaced = replacement == COMMAND_LINE and loaded.origins.get(option) != COMMAND_LINE
            if is_written and not is_replaced:
                yield pair_problem


# The optimizer


def qk_clip(loaded: Loaded) -> Iterator[Problem]:
    """QK-clip scales the weights of attention modules of this package after an update of Muon."""
    c = loaded.config
    if not c.optimizer.qk_clip_threshold:
        return

    def conflict(rule: str, fix: str) -> Problem:
        return problem(loaded, "optimizer.qk_clip_threshold", rule, f"{fix}, or remove it")

    # A user's optimizer file may contain QK-clip.
    name = c.optimizer.name
    if name != "Muon" and not name.endswith(".py"):
        yield conflict("is only supported by Muon", 'set optimizer.name = "Muon"')
    if c.optimizer.early_step_in_backward:
        yield conflict(
            rule="scales weights after the update, and optimizer.early_step_in_backward updates in backward",
            fix="set it to false",
        )
    if c.model.name == "transformers":
        yield conflict(
            rule='is not supported with model.name = "transformers", whose query and key weights are not known',
            fix="use a model of this package",
        )
    if c.lora.enable:
        yield conflict(
            rule="scales the query and key weights, which lora.enable freezes",
            fix="set lora.enable = false",
        )
    if c.task.name not in OF_NEXT_TOKENS:
        yield conflict(
            rule=f'is not supported with task.name = "{c.task.name}", whose padding depends on the mesh',
            fix=f"use {any_of(OF_NEXT_TOKENS)}",
        )


def early_step(loaded: Loaded) -> Iterator[Problem]:
    """``optimizer.early_step_in_backward`` updates before all gradients are known, and frees them."""
    c = loaded.config
    if not c.optimizer.early_step_in_backward:
        return

    def conflict(user_of_gradients: str, fix: str) -> Problem:
        return problem(
            loaded,
            "optimizer.early_step_in_backward",
            rule=f"updates before all gradients are known, which {user_of_gradients}",
            fix=f"{fix}, or remove it",
        )

    # Clipping divides by the norm of all gradients.
    if not math.isinf(c.training.max_norm):
        yield conflict("training.max_norm requires", "set training.max_norm = inf")
    # Both policies decide before the update, and from all gradients.
    if c.training.nonfinite_policy == "skip":
        yield conflict(
            'training.nonfinite_policy = "skip" requires',
            'set training.nonfinite_policy = "stop"',
        )
    if c.training.spike_policy == "skip":
        yield conflict(
            'training.spike_policy = "skip" requires', 'set training.spike_policy = "log"'
        )
    # The loss scale is checked for overflow before the update.
    if c.training.mixed_precision_param == "float16":
        yield conflict("loss scaling requires", 'set training.mixed_precision_param = "bfloat16"')
    if c.parallelism.pipeline_parallel_degree > 1:
        yield conflict("a pipeline sums over micro-batches", "set pipeline_parallel_degree = 1")
    if c.parallelism.shard_optimizer_states:
        yield conflict(
            "shard_optimizer_states distributes to other ranks",
            "set shard_optimizer_states = false",
        )
    # A user's optimizer file is not in the table. An unknown name has its own problem.
    facts = OPTIMIZERS.get(c.optimizer.name)
    is_own_file = c.optimizer.name.endswith(".py")
    if is_own_file or (facts is not None and not facts.updates_separately):
        yield conflict("this optimizer may require", 'set optimizer.name = "AdamW"')


def adam_only_options(loaded: Loaded) -> Iterator[Problem]:
    """Other optimizers ignore these options."""
    optimizer = loaded.config.optimizer
    if optimizer.name in PYTORCH_ADAMS:
        return
    for name, default in ADAM_ONLY.items():
        if getattr(optimizer, name) != default:
            yield problem(
                loaded,
                f"optimizer.{name}",
                rule="is only supported by Adam and AdamW",
                fix='set optimizer.name = "AdamW", or remove it',
            )


def stochastic_rounding(loaded: Loaded) -> Iterator[Problem]:
    """Stochastic rounding applies to parameters and optimizer states that are stored in bfloat16."""
    c = loaded.config
    if not c.optimizer.bf16_stochastic_round:
        return
    if c.training.dtype != "bfloat16" and c.optimizer.state_dtype != "bfloat16":
        yield problem(
            loaded,
            "optimizer.bf16_stochastic_round",
            rule="requires parameters or optimizer states in bfloat16",
            fix='set optimizer.state_dtype = "bfloat16" or training.dtype = "bfloat16", or remove it',
        )


def shard_states_without_replicas(loaded: Loaded) -> Iterator[Problem]:
    """``shard_optimizer_states`` divides the states between replicas."""
    p = loaded.config.parallelism
    if p.shard_optimizer_states and p.data_parallel_replicate_degree == 1:
        yield problem(
            loaded,
            "parallelism.shard_optimizer_states",
            rule="requires replicas of the model to divide the state between",
            fix="set data_parallel_replicate_degree above 1, or remove it: FSDP shards the state anyway",
        )


def shard_states_with_offload(loaded: Loaded) -> Iterator[Problem]:
    """``shard_optimizer_states`` is not implemented for parameters in host memory."""
    c = loaded.config
    if c.parallelism.shard_optimizer_states and c.training.enable_cpu_offload:
        yield problem(
            loaded,
            "parallelism.shard_optimizer_states",
            rule="is not supported with training.enable_cpu_offload",
            fix="set one of the two to false",
        )


def float16_from_bfloat16(loaded: Loaded) -> Iterator[Problem]:
    """Parameters stored in bfloat16 have too few digits for computing in float16."""
    t = loaded.config.training
    if t.mixed_precision_param == "float16" and t.dtype == "bfloat16":
        yield problem(
            loaded,
            "training.mixed_precision_param",
            rule='cannot compute in float16 with parameters in training.dtype = "bfloat16"',
            fix='set training.dtype = "float32", or mixed_precision_param = "bfloat16"',
        )


# Activation checkpointing and the compiler.


def memory_budget_without_compiler(loaded: Loaded) -> Iterator[Problem]:
    """The compiler implements the mode ``memory_budget``."""
    mode = loaded.config.activation_checkpoint.mode
    if mode == "memory_budget" and not _compiles_model(loaded.config):
        yield problem(
            loaded,
            "activation_checkpoint.mode",
            rule="requires the compiler",
            fix='set compile.enable = true with "model" in compile.components, or use another mode',
        )


def pareto_without_memory_budget(loaded: Loaded) -> Iterator[Problem]:
    """Only the mode ``memory_budget`` computes the trade-off that this option plots."""
    activation = loaded.config.activation_checkpoint
    if activation.visualize_memory_budget_pareto and activation.mode != "memory_budget":
        yield problem(
            loaded,
            "activation_checkpoint.visualize_memory_budget_pareto",
            rule="plots the trade-off of the mode memory_budget, which is not selected",
            fix='set activation_checkpoint.mode = "memory_budget", or remove it',
        )


def checkpoint_debug_per_operation(loaded: Loaded) -> Iterator[Problem]:
    """PyTorch's debug mode does not support selective recomputation of operations."""
    activation = loaded.config.activation_checkpoint
    is_per_operation = activation.mode == "selective" and activation.selective_ac_option == "op"
    if activation.debug and is_per_operation:
        yield problem(
            loaded,
            "activation_checkpoint.debug",
            rule="only supports recomputation of entire layers",
            fix='set selective_ac_option to a number of layers or mode = "full" while you debug, or remove it',
        )


def checkpoint_debug_with_split_backward(loaded: Loaded) -> Iterator[Problem]:
    """PyTorch's debug mode expects one recomputation per layer. A split backward recomputes several times."""
    c = loaded.config
    if not _debugs_recomputation(c):
        return
    if stages.splits_backward(c.parallelism):
        yield problem(
            loaded,
            "activation_checkpoint.debug",
            rule="expects one recomputation per layer, and this schedule, which splits the backward, makes several",
            fix="use 1F1B, GPipe, Interleaved1F1B or LoopedBFS while you debug, or remove it",
        )


def checkpoint_debug_with_compiler(loaded: Loaded) -> Iterator[Problem]:
    """PyTorch's debug mode records eager operations, which a compiled layer does not run."""
    c = loaded.config
    if not _debugs_recomputation(c):
        return
    if _compiles_model(c):
        yield problem(
            loaded,
            "activation_checkpoint.debug",
            rule="records the operations of eager layers, and the layers are compiled",
            fix="set compile.enable = false while you debug, or remove it",
        )


def offload_without_recomputation(loaded: Loaded) -> Iterator[Problem]:
    """``cpu_offload`` moves the saved inputs of recomputed layers to host memory."""
    activation = loaded.config.activation_checkpoint
    if activation.cpu_offload and activation.mode in ("none", "memory_budget"):
        yield problem(
            loaded,
            "activation_checkpoint.cpu_offload",
            rule="moves the inputs of recomputed layers to host memory, and this mode saves none",
            fix='set activation_checkpoint.mode = "full" or "selective"',
        )


def async_tensor_parallel_without_compiler(loaded: Loaded) -> Iterator[Problem]:
    """Async tensor parallelism requires the compiler, which implements it."""
    p = loaded.config.parallelism
    is_used = p.enable_async_tensor_parallel and p.tensor_parallel_degree > 1
    if is_used and not _compiles_model(loaded.config):
        yield problem(
            loaded,
            "parallelism.enable_async_tensor_parallel",
            rule="requires the compiler",
            fix='set compile.enable = true with "model" in compile.components, or remove it',
        )


def compile_nothing(loaded: Loaded) -> Iterator[Problem]:
    """``compile.enable`` requires at least one component."""
    if loaded.config.compile.enable and not loaded.config.compile.components:
        yield problem(
            loaded,
            "compile.components",
            rule="must not be empty with compile.enable = true",
            fix='name "model", "loss" or both, or set compile.enable = false',
        )


# Pipelines, checkpoints, diagnostics and workers.


def microbatch_size(loaded: Loaded) -> Iterator[Problem]:
    """A pipeline splits the local batch into micro-batches of equal size."""
    p = loaded.config.parallelism
    # A size of 0 or less is reported by the limits of the option itself.
    if p.pipeline_parallel_degree <= 1 or p.pipeline_parallel_microbatch_size <= 0:
        return
    if loaded.config.training.local_batch_size % p.pipeline_parallel_microbatch_size:
        yield problem(
            loaded,
            "parallelism.pipeline_parallel_microbatch_size",
            rule="does not divide training.local_batch_size",
            fix="use a divisor of the local batch size",
        )


def seed_checkpoint_without_checkpoints(loaded: Loaded) -> Iterator[Problem]:
    """A seed checkpoint is a checkpoint."""
    checkpoint = loaded.config.checkpoint
    if checkpoint.create_seed_checkpoint and not checkpoint.enable:
        yield problem(
            loaded,
            "checkpoint.create_seed_checkpoint",
            rule="requires checkpoint.enable = true",
            fix="set checkpoint.enable = true, or remove it",
        )


def load_without_checkpoints(loaded: Loaded) -> Iterator[Problem]:
    """Without ``checkpoint.enable`` nothing is loaded."""
    checkpoint = loaded.config.checkpoint
    if checkpoint.enable:
        return
    # These options have an effect only when a checkpoint is loaded.
    rule = "loads nothing while checkpoints are off"
    fix = "set checkpoint.enable = true, or remove it"
    if checkpoint.load_only:
        yield problem(loaded, "checkpoint.load_only", rule, fix)
    if checkpoint.load_step >= 0:
        yield problem(loaded, "checkpoint.load_step", rule, fix)


def warn_only_without_deterministic(loaded: Loaded) -> Iterator[Problem]:
    """``deterministic_warn_only`` turns the errors of ``deterministic`` into warnings."""
    debug = loaded.config.debug
    if debug.deterministic_warn_only and not debug.deterministic:
        yield problem(
            loaded,
            "debug.deterministic_warn_only",
            rule="requires debug.deterministic = true",
            fix="set debug.deterministic = true, or remove it",
        )


def profile_interval(loaded: Loaded) -> Iterator[Problem]:
    """The steps of warmup and recording must fit into the interval between two profiles."""
    profiling = loaded.config.profiling
    num_profiled_steps = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and 0 < profiling.profile_freq < num_profiled_steps:
        yield problem(
            loaded,
            "profiling.profile_freq",
            rule="is less than profiler_warmup plus profiler_active",
            fix="raise it, or lower those",
        )


def data_workers(loaded: Loaded) -> Iterator[Problem]:
    """Options of data-loading workers require workers."""
    sections = {
        "training.dataloader": loaded.config.training.dataloader,
        "validation.dataloader": loaded.config.validation.dataloader,
    }
    for section, options in sections.items():
        if options.num_workers != 0:
            continue
        fix = f"set {section}.num_workers above 0, or remove it"
        if options.persistent_workers:
            yield problem(loaded, f"{section}.persistent_workers", "requires workers", fix)
        if options.prefetch_factor is not None:
            yield problem(loaded, f"{section}.prefetch_factor", "requires workers", fix)


def loss_of_sources(loaded: Loaded) -> Iterator[Problem]:
    """``metrics.per_source_loss`` requires several sources, and only supports the task language_model."""
    c = loaded.config
    if not c.metrics.per_source_loss:
        return
    # One source needs no comparison: its loss is the loss of the run.
    if len(c.data.sources) < 2:
        yield problem(
            loaded,
            "metrics.per_source_loss",
            rule="requires several [data.sources]",
            fix="add another source, or remove it",
        )
    # Only this task computes a loss per source.
    if c.task.name != "language_model":
        yield problem(
            loaded,
            "metrics.per_source_loss",
            rule=f'is not supported with task.name = "{c.task.name}"',
            fix="remove it",
        )


def averages_without_use(loaded: Loaded) -> Iterator[Problem]:
    """Averages of weights are kept for checkpoints and validation, which need them to exist."""
    c = loaded.config
    has_averages = c.training.ema_decay is not None
    if c.validation.use_ema and not has_averages:
        yield problem(
            loaded,
            "validation.use_ema",
            rule="requires training.ema_decay",
            fix="set training.ema_decay = 0.999, or remove it",
        )
    # Averages that nothing reads cost memory and time in each step.
    is_validated = c.validation.enable and c.validation.use_ema
    if has_averages and not is_validated and not c.checkpoint.enable:
        yield problem(
            loaded,
            "training.ema_decay",
            rule="has no effect without a checkpoint or a validation that uses the averages",
            fix="set checkpoint.enable = true or validation.use_ema = true, or remove it",
        )


PAIR_RULES: tuple[Rule, ...] = (
    qk_clip,
    early_step,
    adam_only_options,
    stochastic_rounding,
    float16_from_bfloat16,
    shard_states_without_replicas,
    shard_states_with_offload,
    memory_budget_without_compiler,
    pareto_without_memory_budget,
    checkpoint_debug_per_operation,
    checkpoint_debug_with_split_backward,
    checkpoint_debug_with_compiler,
    offload_without_recomputation,
    async_tensor_parallel_without_compiler,
    microbatch_size,
    warn_only_without_deterministic,
    seed_checkpoint_without_checkpoints,
    load_without_checkpoints,
    compile_nothing,
    profile_interval,
    data_workers,
    averages_without_use,
    loss_of_sources,
)


# Options without effect. check_without_effect drops those that nobody wrote.


def sample_frequency(loaded: Loaded) -> Iterator[Problem]:
    """Samples require a prompt, because a sample continues one."""
    metrics = loaded.config.metrics
    if metrics.sample_freq and not metrics.sample_prompt:
        yield problem(
            loaded,
            "metrics.sample_freq",
            rule="requires metrics.sample_prompt",
            fix='set metrics.sample_prompt = "Once upon a time", or remove it',
        )


def automatic_interval(loaded: Loaded) -> Iterator[Problem]:
    """An automatic interval of checkpoints is computed during the run."""
    checkpoint = loaded.config.checkpoint
    if checkpoint.enable and checkpoint.interval_type == "automatic":
        yield problem(
            loaded,
            "checkpoint.interval",
            rule='has no effect with checkpoint.interval_type = "automatic"',
            fix="remove it",
        )


def float8_scales(loaded: Loaded) -> Iterator[Problem]:
    """Precomputed scales are for the float8 all-gather of FSDP."""
    c = loaded.config
    section = "quantize.linear.float8"
    # Without the converter, another rule reports the entire section.
    if section in c.model.converters and not c.quantize.linear.float8.enable_fsdp_float8_all_gather:
        yield problem(
            loaded,
            f"{section}.precompute_float8_dynamic_scale_for_fsdp",
            rule="has no effect without enable_fsdp_float8_all_gather",
            fix=f"set {section}.enable_fsdp_float8_all_gather = true, or remove it",
        )


def steps_and_epochs(loaded: Loaded) -> Iterator[Problem]:
    """``training.epochs`` determines the number of steps and ends the run with the data."""
    if loaded.config.training.epochs is None:
        return
    yield problem(
        loaded,
        "training.steps",
        rule="has no effect with training.epochs, which determines the number of steps",
        fix="keep one of the two",
    )
    yield problem(
        loaded,
        "training.on_data_end",
        rule="has no effect with training.epochs, which ends the run with the data",
        fix="keep one of the two",
    )


def float32_compute(loaded: Loaded) -> Iterator[Problem]:
    """With parameters stored in bfloat16, forward and backward compute in bfloat16."""
    t = loaded.config.training
    if t.dtype == "bfloat16" and t.mixed_precision_param == "float32":
        yield problem(
            loaded,
            "training.mixed_precision_param",
            rule='has no effect with training.dtype = "bfloat16", which computes in bfloat16',
            fix='set training.dtype = "float32", or remove it',
        )


def assets_and_tokenizer(loaded: Loaded) -> Iterator[Problem]:
    """The assets folder has no effect if the tokenizer is elsewhere and the folder has no config.json.

    With a config.json the folder may also be the source of sizes and weights, or the model for exports.
    """
    model = loaded.config.model
    if model.tokenizer_path in (None, model.hf_assets_path):
        return
    if not bounded_reads.is_present(Path(model.hf_assets_path) / "config.json"):
        yield problem(
            loaded,
            "model.hf_assets_path",
            rule="has no effect with model.tokenizer_path",
            fix="keep one of the two",
        )


def float16_only_options(loaded: Loaded) -> Iterator[Problem]:
    """Only float16 requires loss scaling."""
    if loaded.config.training.mixed_precision_param == "float16":
        return
    rule = "has no effect without float16, the only dtype with loss scaling"
    fix = 'set training.mixed_precision_param = "float16", or remove it'
    for name in FLOAT16_ONLY:
        yield problem(loaded, f"training.{name}", rule, fix)


def muon_only_options(loaded: Loaded) -> Iterator[Problem]:
    """Only Muon reads these options; an optimizer file of the user's may read them too."""
    optimizer = loaded.config.optimizer
    if optimizer.name == "Muon" or optimizer.name.endswith(".py"):
        return
    for name in MUON_ONLY:
        yield problem(
            loaded,
            f"optimizer.muon_{name}",
            rule="is only supported by Muon",
            fix='set optimizer.name = "Muon", or remove it',
        )


def max_skips(loaded: Loaded) -> Iterator[Problem]:
    """Only the policy "skip" counts skipped steps."""
    if loaded.config.training.nonfinite_policy != "skip":
        yield problem(
            loaded,
            "training.nonfinite_max_skips",
            rule="has no effect while nonfinite_policy stops the run",
            fix='set training.nonfinite_policy = "skip", or remove it',
        )


def memory_budget(loaded: Loaded) -> Iterator[Problem]:
    """Only the mode ``memory_budget`` reads the budget."""
    if loaded.config.activation_checkpoint.mode != "memory_budget":
        yield problem(
            loaded,
            "activation_checkpoint.memory_budget",
            rule="has no effect in this mode",
            fix='set activation_checkpoint.mode = "memory_budget", or remove it',
        )


NO_EFFECT_RULES: tuple[Rule, ...] = (
    sample_frequency,
    automatic_interval,
    float8_scales,
    steps_and_epochs,
    float32_compute,
    assets_and_tokenizer,
    float16_only_options,
    muon_only_options,
    max_skips,
    memory_budget,
)


def check_schedule(loaded: Loaded) -> Iterator[Problem]:
    """Yield options that the learning-rate schedule ignores. A value equal to the default is not reported."""
    name = loaded.config.lr_scheduler.name
    options_read = schedule_options(name)
    # check_own_files reports an unknown name
    if options_read is None:
        return
    for key in SCHEDULE_OPTIONS:
        option = f"lr_scheduler.{key}"
        if key in options_read or not loaded.is_set(option) or _is_default(loaded, option):
            continue
        # Suggest a schedule that reads the option.
        users = [other for other in SCHEDULES if key in (schedule_options(other) or ())]
        yield problem(
            loaded,
            option,
            rule=f"has no effect with lr_scheduler.name = {name}",
            fix=f'set lr_scheduler.name = "{users[0]}", or remove it',
        )


def check_spikes(loaded: Loaded) -> Iterator[Problem]:
    """Yield options of the loss-spike detector that cannot work: too short a window, or checkpoints
    that are too new.
    """
    training = loaded.config.training
    checkpoint = loaded.config.checkpoint
    # The threshold of a spike is a number of standard deviations, which need two values.
    if training.spike_window < 2:
        yield problem(
            loaded,
            "training.spike_window",
            rule="must be at least 2 to have a standard deviation",
            fix="use 2 steps or more, such as 128",
        )
    # Only "rewind" needs a checkpoint from before the spike.
    if training.spike_policy != "rewind":
        return
    if not checkpoint.enable or checkpoint.load_only:
        yield problem(
            loaded,
            "training.spike_policy",
            rule="requires checkpoints that this run saves",
            fix="set checkpoint.enable=true",
        )

    # The oldest kept checkpoint must be old enough.
    kept_steps = (checkpoint.keep_latest_k - 1) * checkpoint.interval
    is_bounded = checkpoint.interval_type == "steps" and checkpoint.keep_latest_k
    if is_bounded and kept_steps < training.spike_rewind_steps:
        yield problem(
            loaded,
            "training.spike_rewind_steps",
            rule=f"exceeds the {kept_steps} steps that checkpoint.keep_latest_k and checkpoint.interval keep",
            fix="keep more checkpoints, or rewind fewer steps",
        )


def spike_notes(loaded: Loaded) -> list[str]:
    """Return a note with the options of spikes that have no effect with the policy."""
    policy = loaded.config.training.spike_policy
    unused: list[str] = []
    if policy != "rewind":
        unused += [
            "training.spike_rewind_steps",
            "training.spike_skip_steps",
            "training.max_rewinds",
        ]
    if policy == "off":
        unused += ["training.spike_window", "training.spike_sigmas"]
    # Defaults need no note.
    names = [name for name in unused if loaded.is_set(name)]
    if not names:
        return []
    return [f"{', '.join(names)}: without effect with training.spike_policy={policy}"]


def _compiles_model(c: Config) -> bool:
    """True if the layers are compiled. The compiler may also be enabled for the loss only."""
    return bool(c.compile.enable) and "model" in c.compile.components


def _debugs_recomputation(c: Config) -> bool:
    """True if PyTorch's debug mode records recomputed layers."""
    return c.activation_checkpoint.debug and c.activation_checkpoint.mode in ("full", "selective")


def _is_default(loaded: Loaded, option: str) -> bool:
    value: Any = Config()
    for part in option.split("."):
        value = getattr(value, part)
    return bool(loaded.value(option) == value)
