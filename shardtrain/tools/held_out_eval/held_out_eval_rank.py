"""Evaluate a checkpoint on the held-out sets of its task as one rank. Write the result files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from shardtrain import distributed, tasks
from shardtrain.checkpoint.choice import ChosenCheckpoint, is_step_name
from shardtrain.checkpoint.collectives import all_ranks, first_rank
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.storage import Place, place
from shardtrain.config.schema import Config
from shardtrain.distributed import BATCH_AXES, Mesh, process_group
from shardtrain.tools.held_out_eval.held_out_eval_request import SPLITS, HeldOutOptions, sets_of
from shardtrain.train import base_weights, reference_models, saved_file, validation
from shardtrain.train.open_together import require_same_data, together
from shardtrain.train.resume import held_by
from shardtrain.train.run import model_state_dict
from shardtrain.train.task_model import BuiltModel, build_model
from shardtrain.train.validation import Evaluation
from shardtrain.utils import atomic_io, log
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.log import logger


def main(options: HeldOutOptions) -> None:
    """Evaluate the checkpoint on the held-out sets, and write the result files on rank 0.

    Raises:
        ShardtrainError: a problem that the user can fix.
    """
    config = options.loaded.config
    # Evaluate in the run's dtype. Converters such as float8 apply only to training.
    model_without_converters = dataclasses.replace(config.model, converters=[])
    config = dataclasses.replace(config, model=model_without_converters)
    with process_group.join(config.comm, config.training.device) as world:
        console = world.rank in log.console_ranks()
        folder = Path(options.launched.config.job.dump_folder)
        log.setup(world.rank, world.size, folder, config.metrics.save_log_file, console)
        mesh = distributed.build(config, world)
        # Only rank 0 reports progress.
        interval = None if world.rank == 0 else 0
        with heartbeat("building the model and loading its weights", interval):
            built = build_model(config, mesh)
            if isinstance(built.task, tasks.RowTask):  # does not affect the metrics
                reference_models.load_frozen_models(built.task, built.runner, config, mesh)
            load(built, config, options.checkpoint)

        # Measure all sets before writing, so a failure leaves no mix of old and new results.
        files: dict[str, str | None] = {}
        for name in sets_of(config):
            with heartbeat(f"measuring {name}", interval):
                evaluation, is_labelled = measure(built, config, mesh, SPLITS[name])
            files |= files_of(name, built.task, evaluation, is_labelled)
            values: dict[str, float] = {"rows": evaluation.rows}
            if is_labelled:
                values |= evaluation.values
            summary = "  ".join(f"{key}: {value:.6g}" for key, value in values.items())
            logger.info(f"{name}: {summary}")
        first_rank(lambda: _write(options.output, files))
        written = ", ".join(name for name, text in files.items() if text is not None)
        logger.info(f"written to {options.output}: {written}")


def load(built: BuiltModel, config: Config, wanted: str | None) -> Place:
    """Load the weights of a checkpoint, and return and log its path (a collective).

    Args:
        wanted: A step of the run (``checkpoint.choice``), the path of a checkpoint, or None for the default
            step.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, or belongs to another model.
    """
    # The run may have checkpoints disabled, or a step to load. Here, its checkpoints are only read.
    options = dataclasses.replace(config.checkpoint, enable=True, load_only=True, load_step=-1)
    checkpoints = Checkpoints(dataclasses.replace(config, checkpoint=options))
    try:
        chosen: ChosenCheckpoint | Place
        if wanted is None or is_step_name(wanted):
            chosen = checkpoints.choose(wanted)
            path = chosen.path
        else:
            path = place(wanted)
            chosen = path
        use_ema = config.validation.use_ema
        kind = "averaged weights" if use_ema else "weights"
        logger.info(f"testing the {kind} of {chosen}")
        # A checkpoint of adapters does not contain the frozen weights, so load these first.
        if built.adapters is not None:
            device = next(iter(built.runner.parameters().values())).device
            base_weights.load(config, built.runner, built.adapters, device, checkpoints)
        tensors = held_by(built.adapters, model_state_dict(built.runner))
        if saved_file.is_saved_file(path) and built.adapters is None:
            all_ranks(lambda: saved_file.fill(Path(str(path)), tensors, config.model))
        else:
            checkpoints.load(path, tensors, {}, use_ema)
    finally:
        checkpoints.close()
    return path


def measure(built: BuiltModel, config: Config, mesh: Mesh, split: str) -> tuple[Evaluation, bool]:
    """Evaluate the model on each row of a set (a collective). Also return True if the set has labels."""
    task = built.task
    # Only tasks of rows have several sets. A language model has its validation data.
    options: dict[str, Any] = {}
    is_labelled = True
    if isinstance(task, tasks.RowTask):
        is_labelled = task.is_labelled(split)
        options = {"split": split}
    with together(config):
        stream = task.open_dataloader(
            section=validation.section(config, mesh.device_mesh.size()),
            batch_rank=mesh.rank(*BATCH_AXES),
            num_batch_ranks=mesh.size(*BATCH_AXES),
            accumulation=1,
            shuffle=False,
            loop=False,
            **options,
        )
    task.check(stream, built.module, built.shape)
    require_same_data(stream, f"the data of {split}")
    evaluation = validation.evaluate(built.runner, stream, mesh, labelled=is_labelled)
    assert evaluation is not None  # evaluate returns None only when interrupted
    return evaluation, is_labelled


def files_of(
    name: str,
    task: tasks.LanguageModel | tasks.RowTask,
    evaluation: Evaluation,
    is_labelled: bool,
) -> dict[str, str | None]:
    """Return the text of each result file by name. None removes a file of an earlier test."""
    results = None
    if is_labelled:
        values = evaluation.values
        if isinstance(task, tasks.RowTask):
            values = task.results(values)
        results = json.dumps(values) + "\n"
    files = {f"{name}_results.json": results}
    if isinstance(task, tasks.RowTask) and evaluation.predictions:
        # Predictions are stored by column. The file has one line per row.
        lines = []
        for number in range(evaluation.rows):
            row = {}
            for key, column in evaluation.predictions.items():
                row[key] = column[number]
            lines.append(f"{task.prediction_text(row)}\n")
        files[f"{name}_prediction.txt"] = "".join(lines)
    return files


def _write(folder: Path, files: dict[str, str | None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if text is None:
            (folder / name).unlink(missing_ok=True)
        else:
            atomic_io.write(folder / name, text)
