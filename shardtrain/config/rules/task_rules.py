"""Rules about [task]: the task's name, its labels, the meshes it supports, and options that only
some tasks read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.options import options
from shardtrain.config.rules.data_rules import is_changed
from shardtrain.config.rules.values import problem
from shardtrain.config.schema.task_options import OF_PAIRS
from shardtrain.config.task_file import has_task, read_task_file
from shardtrain.utils.errors import ConfigError, Problem

LANGUAGE_MODEL = "language_model"
CLASSIFICATION = "classification"
PREFERENCE = "preference"
KTO = "kto"
ORPO = "orpo"
SIMPO = "simpo"
REWARD_MODEL = "reward_model"
DISTILLATION = "distillation"
MASKED = "masked_language_model"
SEQUENCES = "sequence_to_sequence"
WITH_REFERENCE = (PREFERENCE, KTO)
NEW_HEAD = (CLASSIFICATION, REWARD_MODEL)
"""Tasks with a new head instead of the output layer over the vocabulary."""
OF_TEXT = (LANGUAGE_MODEL, DISTILLATION, PREFERENCE, KTO, ORPO, SIMPO)
"""Tasks whose model predicts the next token."""
_DEGREES = {
    "pipeline_parallel_degree": "splits the model, and the loss of this task requires the full model",
    "context_parallel_degree": "splits each sequence, and this task requires full sequences",
    "tensor_parallel_degree": "splits each layer, and this task does not declare support for that",
}
"""Degree -> the reason why a task that does not list it in its degrees cannot use it."""
# Options that split or pack documents. Tasks of rows do neither.
OF_DOCUMENTS = (
    "data.mode",
    "data.readers",
    "data.format",
    "data.packing",
    "data.long_documents",
    "data.document_mask",
    "data.stages",
)
# Options of [task] that each task reads. Tasks that are not listed may read all of them.
_OPTIONS = {
    CLASSIFICATION: ("labels", "num_labels", "label_field", "pair_field"),
    PREFERENCE: (
        *(
            "beta",
            "chosen_field",
            "rejected_field",
            "loss_type",
            "label_smoothing",
            "reference_free",
        ),
        *("reference_path", "nll_weight"),
    ),
    ORPO: ("beta", "chosen_field", "rejected_field"),
    SIMPO: ("beta", "gamma", "chosen_field", "rejected_field", "nll_weight"),
    REWARD_MODEL: ("chosen_field", "rejected_field"),
    DISTILLATION: ("teacher_path", "kd_ratio", "temperature", "divergence", "jsd_beta"),
    KTO: (
        "beta",
        "label_field",
        "desirable_weight",
        "undesirable_weight",
        "group_size",
        "reference_path",
    ),
}


def check_task(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of the task's file, of the mesh it must run on, and of options that it does not read."""
    c = loaded.config
    try:
        # The file is parsed, not imported, so torch is not required here.
        facts = read_task_file(c.task.name)
    except ConfigError as error:
        (reason,) = error.problems
        assert isinstance(reason, Problem)
        yield problem(loaded, "task.name", reason.rule, reason.fix)
        return
    if not has_task(c.task.name):
        yield problem(
            loaded,
            "task.name",
            rule="has no class Task",
            fix="define a class Task(RowTask), as shardtrain/tasks/classification.py does",
        )
        return
    # Batches of these tasks continue into the next epoch, so an epoch has no last batch.
    if c.training.last_batch != "rollover" and c.task.name in (LANGUAGE_MODEL, DISTILLATION, KTO):
        reason = "packs documents across epochs"
        if c.task.name == KTO:
            reason = "groups rows across epochs"
        yield problem(
            loaded,
            "training.last_batch",
            rule=f"is only supported for tasks of rows, and {c.task.name} {reason}",
            fix="remove it",
        )
    if c.task.name == LANGUAGE_MODEL:
        yield from _check_language_model(loaded)
        return
    # Only the language-model task adds this noise.
    if c.training.neftune_noise_alpha is not None:
        yield problem(
            loaded,
            "training.neftune_noise_alpha",
            rule=f'is not supported with task.name = "{c.task.name}"',
            fix="remove it",
        )
    # These change the loss of the next token, which other tasks do not compute in this form.
    for option in ("training.label_smoothing", "training.z_loss_weight"):
        if loaded.value(option):
            yield problem(
                loaded,
                option,
                rule=f'has no effect on the loss of task.name = "{c.task.name}"',
                fix="remove it",
            )
    yield from _check_mesh(loaded, facts.degrees)
    # Distillation is the only other task that reads documents.
    if c.task.name != DISTILLATION and c.data.sources:
        yield Problem(
            "data.sources",
            None,
            rule="mixes documents, and a task of rows reads one dataset",
            fix="use training.dataset and dataset_path",
            where=loaded.where("data.sources"),
        )
    yield from _check_options_of_other_tasks(loaded)
    if c.task.name == CLASSIFICATION:
        yield from _check_classification(loaded)
    if c.task.name in OF_PAIRS or c.task.name == KTO:
        yield from _check_answers(loaded)


def _check_language_model(loaded: Loaded) -> Iterator[Problem]:
    """A language model reads no option of [task]."""
    # without those of job.custom_config_module, which any file of the user's may read
    for option in options():
        if option.startswith("task.") and is_changed(loaded, option):
            yield problem(
                loaded,
                option,
                rule='has no effect with task.name = "language_model"',
                fix="name the task that reads it, or remove it",
            )


def _check_mesh(loaded: Loaded, supported_degrees: Collection[str]) -> Iterator[Problem]:
    """The task supports the degrees of the mesh."""
    c = loaded.config
    # Data-parallel axes need no entry: they shard any model.
    for degree, rule in _DEGREES.items():
        if degree not in supported_degrees and getattr(c.parallelism, degree) > 1:
            yield problem(
                loaded,
                f"parallelism.{degree}",
                rule=f"{rule} ({c.task.name})",
                fix="set it to 1: data-parallel axes shard any model",
            )

    # Tasks of rows with tensor parallelism. Distillation is a task of documents.
    is_tensor_parallel = (
        c.parallelism.tensor_parallel_degree > 1 and "tensor_parallel_degree" in supported_degrees
    )
    if c.task.name == DISTILLATION or not is_tensor_parallel:
        return
    if not c.parallelism.disable_loss_parallel:
        yield problem(
            loaded,
            "parallelism.disable_loss_parallel",
            rule="leaves each rank a part of the outputs, and a task of rows requires full outputs",
            fix="set it to true",
        )
    if c.compile.enable and "model" in c.compile.components:
        # DTensor with dynamic shapes: the compiler of torch 2.13 recurses in backward until Python's limit.
        yield problem(
            loaded,
            "compile.enable",
            rule="cannot compile tensor-parallel layers for rows of different lengths, which this task has",
            fix="set it to false, or tensor_parallel_degree to 1",
        )


def _check_options_of_other_tasks(loaded: Loaded) -> Iterator[Problem]:
    """Options that this task does not read. A user's task file may build on any task, and read all
    options.
    """
    # Only these tasks list all options that they read.
    task_options = _OPTIONS.get(loaded.config.task.name)
    if task_options is None:
        return
    all_options: set[str] = set().union(*_OPTIONS.values())
    for option in sorted(all_options - set(task_options)):
        if is_changed(loaded, f"task.{option}"):
            readers = " or ".join(
                f'"{name}"' for name, names in _OPTIONS.items() if option in names
            )
            yield problem(
                loaded,
                f"task.{option}",
                rule=f"is only read by task.name = {readers}",
                fix="remove it",
            )


def _check_rows(loaded: Loaded, *more: str) -> Iterator[Problem]:
    """A task of rows reads no options of documents, and none of a user's task file."""
    for option in (*OF_DOCUMENTS, *more):
        if is_changed(loaded, option):
            yield problem(
                loaded,
                option,
                rule="is for documents, and this task reads rows",
                fix="remove it",
            )
    if loaded.config.task.options:
        yield problem(loaded, "task.options", "is for a task file of yours", "remove it")


def _check_answers(loaded: Loaded) -> Iterator[Problem]:
    """Weights of tasks with answers are in range, and their three columns are different."""
    task = loaded.config.task
    data = loaded.config.data
    yield from _check_rows(loaded)

    # Factors of the loss, and the columns of the answers, which depend on the task.
    # A beta of 0 would make the loss independent of the model.
    if not 0 < task.beta < math.inf:
        yield problem(loaded, "task.beta", "must be above 0", "use 0.1")
    fields = {"data.prompt_field": data.prompt_field}
    if task.name == KTO:
        fields |= {
            "data.completion_field": data.completion_field,
            "task.label_field": task.label_field,
        }
        for option in ("task.desirable_weight", "task.undesirable_weight"):
            if not 0 < loaded.value(option) < math.inf:
                yield problem(loaded, option, "must be above 0", "use 1.0")
        # Other rows of a group serve as unrelated completions.
        if task.group_size < 2:
            yield problem(
                loaded,
                "task.group_size",
                rule="must be at least 2: KL is estimated with the completions of other rows",
                fix="use 8",
            )
    else:
        fields |= {
            "task.chosen_field": task.chosen_field,
            "task.rejected_field": task.rejected_field,
        }
    if not 0 <= task.gamma < math.inf:
        yield problem(loaded, "task.gamma", "must be 0 or above", "use 0.5")
    if not 0 <= task.nll_weight < math.inf:
        yield problem(loaded, "task.nll_weight", "must be 0 or above", "use 1.0")
    if task.name == PREFERENCE:
        yield from _check_pair_loss(loaded)

    # Each column needs a name, and no two may be the same column.
    for option, column in fields.items():
        if not column:
            yield problem(loaded, option, "must not be empty", "name the column")
    if len(set(fields.values())) < 3:
        *others, last = (option.rpartition(".")[2].removesuffix("_field") for option in fields)
        yield problem(
            loaded,
            list(fields)[-1],
            rule=f"names the column of another of {', '.join(others)} and {last}",
            fix="name three columns",
        )


def _check_pair_loss(loaded: Loaded) -> Iterator[Problem]:
    """Check that label smoothing fits the loss, and that the options of the reference model do not conflict."""
    task = loaded.config.task
    option = "task.label_smoothing"
    # At 0.5 and above, the smoothed labels would prefer the rejected answer.
    if not 0 <= task.label_smoothing < 0.5:
        yield problem(loaded, option, "must be at least 0 and below 0.5", "use 0.1")
    elif task.loss_type not in ("sigmoid", "robust") and is_changed(loaded, option):
        yield problem(
            loaded,
            option,
            rule=f'has no effect with task.loss_type = "{task.loss_type}"',
            fix='remove it, or use "sigmoid" or "robust"',
        )
    elif task.loss_type == "robust" and not task.label_smoothing:
        yield problem(
            loaded,
            option,
            rule='must be above 0 with task.loss_type = "robust", which is "sigmoid" otherwise',
            fix="use 0.1",
        )
    # A loss without a reference does not load one.
    if task.reference_free and task.reference_path:
        yield problem(
            loaded,
            "task.reference_path",
            rule="has no effect with task.reference_free = true",
            fix="remove one of them",
        )


def _check_classification(loaded: Loaded) -> Iterator[Problem]:
    """There are at least two labels with different names, and columns are all names or all numbers."""
    task = loaded.config.task
    yield from _check_rows(loaded, "data.separator")
    if not task.label_field:
        yield problem(
            loaded,
            "task.label_field",
            rule="must not be empty",
            fix="name the column of the label",
        )
    # A duplicate would make two classes of the same rows.
    if len(set(task.labels)) < len(task.labels) or len(task.labels) == 1:
        yield problem(
            loaded,
            "task.labels",
            rule="must contain at least two different names",
            fix="name each label once",
        )
    has_other_count = task.num_labels != len(task.labels)
    if task.labels and has_other_count and is_changed(loaded, "task.num_labels"):
        yield problem(
            loaded,
            "task.num_labels",
            rule=f"is not the number of task.labels, {len(task.labels)}",
            fix="remove it",
        )
    if (len(task.labels) or task.num_labels) < 2:
        yield problem(loaded, "task.num_labels", "must be at least 2", "use 2 or more")
    # A file either has a header with names, or its columns are numbered.
    has_numbered_text = loaded.config.data.text_field.isdecimal()
    if task.label_field and has_numbered_text != task.label_field.isdecimal():
        yield problem(
            loaded,
            "task.label_field",
            rule=f'and data.text_field="{loaded.config.data.text_field}" must both be numbers or both be names',
            fix="use numbers for files without a header, and names otherwise",
        )


def check_text_tasks(loaded: Loaded) -> Iterator[Problem]:
    """Yield options that masked and sequence-to-sequence models ignore, and wrong values of
    ``task.options``.
    """
    task = loaded.config.task
    if task.name not in (MASKED, SEQUENCES):
        return
    labels = ("task.labels", "task.num_labels", "task.label_field", "task.pair_field")
    for option in (*labels, *OF_DOCUMENTS, "data.separator"):
        if is_changed(loaded, option):
            yield problem(loaded, option, f"has no effect with task.name={task.name}", "remove it")
    # Sequence-to-sequence models have no options of their own.
    known = ("mask_fraction", "mask_token_id") if task.name == MASKED else ()
    # Report unknown names first, then wrong values of known ones.
    for name, value in task.options.items():
        where = loaded.origins.get(f"task.options.{name}", loaded.where("task.options"))
        if name not in known:
            yield Problem(
                f"task.options.{name}",
                value,
                rule=f"is not an option of {task.name}",
                fix=f"use {' or '.join(known)}" if known else "remove it",
                where=where,
            )
        elif name == "mask_fraction" and not (type(value) in (int, float) and 0 < float(value) < 1):
            yield Problem(
                f"task.options.{name}",
                value,
                rule="must be between 0 and 1",
                fix="use 0.15",
                where=where,
            )
        elif name == "mask_token_id" and not (type(value) is int and value >= 0):
            yield Problem(
                f"task.options.{name}",
                value,
                rule="must be the id of a token",
                fix="use 0 or more",
                where=where,
            )
