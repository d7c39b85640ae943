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


def main(asked: HeldOutOptions) -> None:
    """Evaluate the sets.

    Rank 0 writes the files. Raise ShardtrainError for problems that the user can fix.
    """
    config = asked.loaded.config
    # Evaluate in the run's dtype. Converters such as float8 apply only to training.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, converters=[]))
    with process_group.join(config.comm, config.training.device) as world:
        console = world.rank in log.console_ranks()
        folder = Path(asked.launched.config.job.dump_folder)
        log.setup(world.rank, world.size, folder, config.metrics.save_log_file, console)
        mesh = distributed.build(config, world)
        often = None if world.rank == 0 else 0
        with heartbeat("building the model and loading its weights", often):
            built = build_model(config, mesh)
            if isinstance(built.task, tasks.RowTask):  # does not affect the metrics
                reference_models.load_frozen_models(built.task, built.runner, config, mesh)
            load(built, config, asked.checkpoint)
        files: dict[str, str | None] = {}
        for name in sets_of(config):
            with heartbeat(f"measuring {name}", often):
                found, labelled = measure(built, config, mesh, SPLITS[name])
            files |= files_of(name, built.task, found, labelled)
            values = {"rows": found.rows, **(found.values if labelled else {})}
            logger.info(
                f"{name}: " + "  ".join(f"{key}: {value:.6g}" for key, value in values.items())
            )
        first_rank(lambda: _write(asked.output, files))
        logger.info(
            f"written to {asked.output}: {', '.join(key for key, text in files.items() if text is not None)}"
        )


def load(built: BuiltModel, config: Config, wanted: str | None) -> Place:
    """Load the weights of a checkpoint, and return and log its path (a collective).

    Args:
        wanted: A step of the run (``checkpoint.choice``), the path of a checkpoint, or None for the default
            step.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, or belongs to another model.
    """
    options = dataclasses.replace(config.checkpoint, enable=True, load_only=True, load_step=-1)
    checkpoints = Checkpoints(dataclasses.replace(config, checkpoint=options))
    try:
        chosen = (
            checkpoints.choose(wanted) if wanted is None or is_step_name(wanted) else place(wanted)
        )
        path = chosen.path if isinstance(chosen, ChosenCheckpoint) else chosen
        use_ema = config.validation.use_ema
        kind = "averaged weights" if use_ema else "weights"
        logger.info(f"testing the {kind} of {chosen}")
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
    options: dict[str, Any] = {}
    labelled = True
    if isinstance(task, tasks.RowTask):
        labelled = task.is_labelled(split)
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
    found = validation.evaluate(built.runner, stream, mesh, labelled=labelled)
    assert found is not None  # evaluate returns None only when interrupted
    return found, labelled


def files_of(
    name: str, task: tasks.LanguageModel | tasks.RowTask, found: Evaluation, labelled: bool
) -> dict[str, str | None]:
    """Return the text of each result file by name. None removes a file of an earlier test."""
    results = None
    if labelled:
        values = task.results(found.values) if isinstance(task, tasks.RowTask) else found.values
        results = json.dumps(values) + "\n"
    files = {f"{name}_results.json": results}
    if isinstance(task, tasks.RowTask) and found.predictions:
        rows = [
            {key: values[row] for key, values in found.predictions.items()}
            for row in range(found.rows)
        ]
        files[f"{name}_prediction.txt"] = "".join(f"{task.prediction_text(row)}\n" for row in rows)
    return files


def _write(folder: Path, files: dict[str, str | None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if text is None:
            (folder / name).unlink(missing_ok=True)
        else:
            atomic_io.write(folder / name, text)
