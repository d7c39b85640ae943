"""The rules that a configuration must satisfy, and the notes about legal but doubtful configurations.

They require neither torch nor the machine of the run. ``check`` reports every problem, not only the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from shardtrain.config import stages
from shardtrain.config.changes import check_accepted
from shardtrain.config.frozen_models import check_frozen_models
from shardtrain.config.load import MAX_PROBLEMS, Loaded
from shardtrain.config.options import options
from shardtrain.config.rules.checkpoint_rules import (
    check_checkpoint,
    check_storage,
    checkpoint_notes,
)
from shardtrain.config.rules.data_rules import (
    check_data_ranges,
    check_dataset,
    check_kinds,
    check_sources,
    check_stages,
    check_templates,
    check_validation,
    data_notes,
)
from shardtrain.config.rules.experts_rules import check_experts, experts_notes
from shardtrain.config.rules.float8_rules import check_float8, float8_notes
from shardtrain.config.rules.image_rules import check_images
from shardtrain.config.rules.launch_rules import check_launch
from shardtrain.config.rules.lora_rules import check_lora
from shardtrain.config.rules.model_rules import (
    check_batch,
    check_layers,
    check_model,
    check_sequence,
    check_sizes,
    check_tensor_parallel,
    rotary_notes,
)
from shardtrain.config.rules.multi_token_rules import check_multi_token
from shardtrain.config.rules.option_pairs import (
    check_pairs,
    check_schedule,
    check_spikes,
    check_without_effect,
    spike_notes,
)
from shardtrain.config.rules.own_files_rules import check_own_files, schedule_options
from shardtrain.config.rules.pipeline_rules import check_context, check_pipeline, pipeline_notes
from shardtrain.config.rules.ramp_rules import check_ramps, ramp_notes
from shardtrain.config.rules.safety_rules import check_paths, check_secrets
from shardtrain.config.rules.task_rules import OF_TEXT, check_task, check_text_tasks
from shardtrain.config.rules.transformers_rules import check_transformers
from shardtrain.config.rules.values import check_choices, check_forms, check_ranges, check_steps
from shardtrain.config.schema import Config
from shardtrain.facts.quantization import CONVERTERS
from shardtrain.utils.errors import Problem

# The order of the messages: single options first, then sections, then combinations.
CHECKS: tuple[Callable[[Loaded], Iterator[Problem]], ...] = (
    check_steps,
    check_ranges,
    check_choices,
    check_accepted,
    check_storage,
    check_forms,
    check_spikes,
    check_paths,
    check_secrets,
    check_own_files,
    check_launch,
    check_model,
    check_sizes,
    check_dataset,
    check_data_ranges,
    check_sources,
    check_stages,
    check_kinds,
    check_templates,
    check_validation,
    check_task,
    check_frozen_models,
    check_tensor_parallel,
    check_sequence,
    check_layers,
    check_transformers,
    check_text_tasks,
    check_images,
    check_experts,
    check_multi_token,
    check_ramps,
    check_batch,
    check_pipeline,
    check_context,
    check_pairs,
    check_without_effect,
    check_schedule,
    check_checkpoint,
    check_lora,
    check_float8,
)


def check(loaded: Loaded) -> list[Problem]:
    """Return every problem, up to MAX_PROBLEMS, that can be known without torch and without this machine."""
    return list(islice(_problems(loaded), MAX_PROBLEMS))


def _problems(loaded: Loaded) -> Iterator[Problem]:
    for rule in CHECKS:
        # An option of a preset that an override disables gets a note. See _NO_EFFECT_CHECKS.
        for problem in rule(loaded):
            if rule not in _NO_EFFECT_CHECKS or not loaded.is_from_preset(problem.option):
                yield problem


_NO_EFFECT_CHECKS = (check_without_effect, check_schedule)
"""Rules about options without effect. If an override disables an option of a preset, the user gets
a note instead of an error, because the user did not write the option and cannot remove it.
"""


def notes(loaded: Loaded) -> list[str]:
    """Return lines about legal configurations that probably do not do what the user expects."""
    return [
        *_disabled_options(loaded),
        *_preset_options_without_effect(loaded),
        *_schedule_lengths(loaded),
        *_compiled_loss(loaded),
        *_repeated_recomputation(loaded),
        *_unsupported_options(loaded),
        *ramp_notes(loaded),
        *pipeline_notes(loaded),
        *experts_notes(loaded),
        *rotary_notes(loaded),
        *float8_notes(loaded),
        *checkpoint_notes(loaded),
        *spike_notes(loaded),
        *data_notes(loaded),
    ]


def _disabled_options(loaded: Loaded) -> Iterator[str]:
    """Yield a note for each feature that is off although the user has set its options."""
    for prefix, switch in _disabled_features(loaded.config):
        waiting = []
        # An option with its default value needs no note.
        for name, option in options(type(loaded.config)).items():
            is_affected = name.startswith(prefix) and name != switch
            if is_affected and loaded.is_set(name) and loaded.value(name) != option.default:
                waiting.append(name)
        if waiting:
            yield f"{', '.join(waiting)}: without effect unless {switch}"


def _disabled_features(c: Config) -> Iterator[tuple[str, str]]:
    """Yield, for each feature that is off, the prefix of its options and the setting that turns it on."""
    # Features with their own switch.
    if not c.checkpoint.enable:
        yield "checkpoint.", "checkpoint.enable"
    if not c.validation.enable:
        yield "validation.", "validation.enable"
    if not c.lora.enable:
        yield "lora.", "lora.enable"
    if not c.fault_tolerance.enable:
        yield "fault_tolerance.", "fault_tolerance.enable"
    if not c.memory_estimation.enable:
        yield "memory_estimation.", "memory_estimation.enable"
    if not c.compile.enable:
        yield "compile.", "compile.enable"
    if not c.profiling.enable_profiling:
        yield "profiling.profile", "profiling.enable_profiling"
        yield "profiling.save_traces", "profiling.enable_profiling"
    if not c.profiling.enable_memory_snapshot:
        yield "profiling.save_memory", "profiling.enable_memory_snapshot"
    if not c.metrics.enable_tensorboard:
        yield "metrics.save_tb_folder", "metrics.enable_tensorboard"
    for converter in CONVERTERS:
        if converter not in c.model.converters:
            yield f"{converter}.", f'"{converter}" in model.converters'

    # Parallelism
    p = c.parallelism
    if p.pipeline_parallel_degree == 1:
        yield "parallelism.pipeline_", "pipeline_parallel_degree > 1"
        yield "parallelism.module_fqns", "pipeline_parallel_degree > 1"
    if p.context_parallel_degree == 1:
        yield "parallelism.context_", "context_parallel_degree > 1"
    if p.tensor_parallel_degree == 1:
        yield "parallelism.enable_async", "tensor_parallel_degree > 1"

    # Samples
    if not c.checkpoint.enable and not c.metrics.sample_freq:
        yield "metrics.sample_prompt", "checkpoint.enable or metrics.sample_freq"
    if p.pipeline_parallel_degree > 1 or p.context_parallel_degree > 1:
        condition = "neither pipeline nor context parallelism; the sample at the end is generated in any case"
        yield "metrics.sample_freq", condition
    if c.task.name not in OF_TEXT:
        yield "metrics.sample_", "a task whose model continues a text"

    if p.context_parallel_method == "ulysses":
        yield "parallelism.context_parallel_rotate", 'context_parallel_method = "ring"'
        yield "parallelism.context_parallel_load", 'context_parallel_method = "ring"'


def _preset_options_without_effect(loaded: Loaded) -> Iterator[str]:
    for rule in _NO_EFFECT_CHECKS:
        for problem in rule(loaded):
            if loaded.is_from_preset(problem.option):
                yield f"{problem.option}={problem.value} of the preset {problem.rule}"


def _schedule_lengths(loaded: Loaded) -> Iterator[str]:
    """Learning-rate schedules that do not fit into the number of steps."""
    schedule = loaded.config.lr_scheduler
    steps = loaded.config.training.steps
    # With epochs, the number of steps is not known here.
    if loaded.config.training.epochs is not None:
        return
    # Only schedules that read warmup_steps can have too many of them.
    if steps >= 1 and "warmup_steps" in (schedule_options(schedule.name) or ()):
        decay_steps = (schedule.decay_ratio or 0) * steps
        if schedule.warmup_steps > steps:
            yield (
                f"lr_scheduler.warmup_steps={schedule.warmup_steps} exceeds the {steps} steps: "
                "the run ends before the peak rate"
            )
        elif schedule.decay_ratio is not None and schedule.warmup_steps + decay_steps > steps:
            yield (
                "lr_scheduler.warmup_steps and decay_ratio together exceed the number of steps: "
                "the decay begins right after the warmup"
            )
    if schedule.total_steps is not None and schedule.total_steps < steps:
        yield (
            f"lr_scheduler.total_steps={schedule.total_steps} is below {steps} steps: "
            "the remaining steps use the last rate"
        )


def _compiled_loss(loaded: Loaded) -> Iterator[str]:
    compiled = loaded.config.compile
    p = loaded.config.parallelism
    has_split_logits = p.tensor_parallel_degree > 1 and not p.disable_loss_parallel
    if compiled.enable and "loss" in compiled.components and has_split_logits:
        yield "compile.components: the loss on logits split by tensor parallelism is not compiled"


def _repeated_recomputation(loaded: Loaded) -> Iterator[str]:
    p = loaded.config.parallelism
    schedule = stages.schedule_name(p.pipeline_parallel_schedule)
    mode = loaded.config.activation_checkpoint.mode
    # Only these two modes recompute layers.
    is_recomputed = mode in ("full", "selective")
    if p.pipeline_parallel_degree > 1 and schedule in stages.SPLIT_BACKWARD and is_recomputed:
        yield (
            f"activation_checkpoint.mode={mode}: {schedule} recomputes a layer for the gradient of its input "
            "and again for each group of its weights, about ten times as often as 1F1B"
        )


def _unsupported_options(loaded: Loaded) -> Iterator[str]:
    """Options that exist so configurations of torchtitan can be read, and that have no effect here."""
    # Users may expect an effect of an option that they wrote.
    overlap = "parallelism.pipeline_parallel_expert_parallel_overlap"
    if loaded.is_set(overlap):
        yield f"{overlap}: without effect, the exchanges of experts are not overlapped with compute"
    dataloader = "checkpoint.enable_ft_dataloader_checkpoints"
    if loaded.is_set(dataloader):
        yield f"{dataloader}: without effect, there are no replica groups"
