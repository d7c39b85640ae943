"""All rules that need neither torch nor this machine; every problem is found, not the first alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from shardtrain.config import stages
from shardtrain.config.changes import check_accepted
from shardtrain.config.load import MAX_PROBLEMS, Loaded
from shardtrain.config.options import options
from shardtrain.config.rules.checkpoint_rules import check_checkpoint, check_storage, checkpoint_notes
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
from shardtrain.config.rules.option_pairs import (
    check_pairs,
    check_schedule,
    check_spikes,
    check_without_effect,
    spike_notes,
)
from shardtrain.config.rules.own_files_rules import check_own_files, schedule_options
from shardtrain.config.rules.pipeline_rules import check_context, check_pipeline, pipeline_notes
from shardtrain.config.rules.safety_rules import check_paths, check_secrets
from shardtrain.config.rules.task_rules import OF_TEXT, check_task, check_text_tasks
from shardtrain.config.rules.transformers_rules import check_transformers
from shardtrain.config.rules.values import check_forms, check_ranges, check_steps, check_words
from shardtrain.config.schema import Config
from shardtrain.config.teacher import check_distillation
from shardtrain.facts.quantization import CONVERTERS
from shardtrain.utils.errors import Problem

CHECKS: tuple[Callable[[Loaded], Iterator[Problem]], ...] = (
    check_steps,
    check_ranges,
    check_words,
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
    check_distillation,
    check_tensor_parallel,
    check_sequence,
    check_layers,
    check_transformers,
    check_text_tasks,
    check_experts,
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
    """Return every problem, up to a hundred, that can be known without torch and without the machine of the run."""
    return list(islice(_problems(loaded), MAX_PROBLEMS))


def _problems(loaded: Loaded) -> Iterator[Problem]:
    for rule in CHECKS:
        for problem in rule(loaded):
            if rule not in _OF_IDLE_OPTIONS or not loaded.is_from_preset(problem.option):
                yield problem


_OF_IDLE_OPTIONS = (check_without_effect, check_schedule)
"""Rules about options without effect. An option of a preset that an override makes idle is a note instead: the user
did not write it and cannot remove it."""


# A feature that is off, and the options that wait for it: (when it is off, the options' start, what would turn it on).
_SWITCHES: tuple[tuple[Callable[[Config], bool], str, str], ...] = (
    (lambda c: not c.checkpoint.enable, "checkpoint.", "checkpoint.enable"),
    (lambda c: not c.validation.enable, "validation.", "validation.enable"),
    (lambda c: not c.lora.enable, "lora.", "lora.enable"),
    (lambda c: not c.fault_tolerance.enable, "fault_tolerance.", "fault_tolerance.enable"),
    (lambda c: not c.memory_estimation.enable, "memory_estimation.", "memory_estimation.enable"),
    (lambda c: not c.compile.enable, "compile.", "compile.enable"),
    (lambda c: not c.profiling.enable_profiling, "profiling.profile", "profiling.enable_profiling"),
    (lambda c: not c.profiling.enable_profiling, "profiling.save_traces", "profiling.enable_profiling"),
    (lambda c: not c.profiling.enable_memory_snapshot, "profiling.save_memory", "profiling.enable_memory_snapshot"),
    (lambda c: not c.metrics.enable_tensorboard, "metrics.save_tb_folder", "metrics.enable_tensorboard"),
    *(
        (lambda c, name=name: name not in c.model.converters, f"{name}.", f'"{name}" in model.converters')  # type: ignore[misc]
        for name in CONVERTERS
    ),
    (lambda c: c.parallelism.pipeline_parallel_degree == 1, "parallelism.pipeline_", "pipeline_parallel_degree > 1"),
    (lambda c: c.parallelism.pipeline_parallel_degree == 1, "parallelism.module_fqns", "pipeline_parallel_degree > 1"),
    (lambda c: c.parallelism.context_parallel_degree == 1, "parallelism.context_", "context_parallel_degree > 1"),
    (lambda c: c.parallelism.tensor_parallel_degree == 1, "parallelism.enable_async", "tensor_parallel_degree > 1"),
    (
        lambda c: not c.checkpoint.enable and not c.metrics.sample_freq,
        "metrics.sample_prompt",
        "checkpoint.enable or metrics.sample_freq",
    ),
    (
        lambda c: c.parallelism.pipeline_parallel_degree > 1 or c.parallelism.context_parallel_degree > 1,
        "metrics.sample_freq",
        "neither pipeline nor context parallelism; the sample at the end is drawn all the same",
    ),
    (lambda c: c.task.name not in OF_TEXT, "metrics.sample_", "a task whose model continues a text"),
    (
        lambda c: c.parallelism.context_parallel_method == "ulysses",
        "parallelism.context_parallel_rotate",
        'context_parallel_method = "ring"',
    ),
    (
        lambda c: c.parallelism.context_parallel_method == "ulysses",
        "parallelism.context_parallel_load",
        'context_parallel_method = "ring"',
    ),
)


def notes(loaded: Loaded) -> list[str]:
    """What is not an error and still worth a line: options of features that are off, and lengths that get cut."""
    found = []
    for is_off, start, switch in _SWITCHES:
        if not is_off(loaded.config):
            continue
        waiting = [
            name
            for name, option in options().items()
            if name.startswith(start)
            and name != switch
            and loaded.is_set(name)
            and loaded.value(name) != option.default
        ]
        if waiting:
            found.append(f"{', '.join(waiting)}: without effect unless {switch}")
    for rule in _OF_IDLE_OPTIONS:
        for problem in rule(loaded):
            if loaded.is_from_preset(problem.option):
                found.append(f"{problem.option}={problem.value} of the preset {problem.rule}")
    schedule = loaded.config.lr_scheduler
    steps = loaded.config.training.steps
    if loaded.config.training.epochs is None and "warmup_steps" in (schedule_options(schedule.name) or ()):
        if schedule.warmup_steps > steps >= 1:
            found.append(
                f"lr_scheduler.warmup_steps={schedule.warmup_steps} is more than the {steps} steps: "
                "the run ends before the peak rate"
            )
        elif schedule.decay_ratio is not None and schedule.warmup_steps + schedule.decay_ratio * steps > steps >= 1:
            found.append(
                "lr_scheduler.warmup_steps and decay_ratio together take more than all steps: "
                "the decay begins right after the warmup"
            )
    if schedule.total_steps is not None and loaded.config.training.epochs is None and schedule.total_steps < steps:
        found.append(
            f"lr_scheduler.total_steps={schedule.total_steps} is below {steps} steps: the rest keeps the last rate"
        )
    compiled = loaded.config.compile
    p = loaded.config.parallelism
    split_logits = p.tensor_parallel_degree > 1 and not p.disable_loss_parallel
    if compiled.enable and "loss" in compiled.components and split_logits:
        found.append("compile.components: the loss on logits split by tensor parallelism is not compiled")
    schedule_name = stages.schedule_name(p.pipeline_parallel_schedule)
    recompute = loaded.config.activation_checkpoint.mode
    if p.pipeline_parallel_degree > 1 and schedule_name in stages.SPLIT_BACKWARD and recompute in ("full", "selective"):
        found.append(
            f"activation_checkpoint.mode={recompute}: {schedule_name} recomputes a layer for the gradient of its input "
            "and again for each group of its weights, some ten times where 1F1B does so once"
        )
    overlap = "parallelism.pipeline_parallel_expert_parallel_overlap"
    if loaded.is_set(overlap):
        found.append(f"{overlap}: without effect, experts' exchanges are not overlapped with compute")
    if loaded.is_set("checkpoint.enable_ft_dataloader_checkpoints"):
        found.append("checkpoint.enable_ft_dataloader_checkpoints: without effect, there are no replica groups")
    found += pipeline_notes(loaded) + experts_notes(loaded) + rotary_notes(loaded) + float8_notes(loaded)
    return found + checkpoint_notes(loaded) + spike_notes(loaded) + data_notes(loaded)
