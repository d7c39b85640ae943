"""End a run: after early stopping, a request to stop, the end of the data, or the loss of a rank."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from shardtrain import data, tasks
from shardtrain.checkpoint import best, choice
from shardtrain.checkpoint.collectives import any_rank, broadcast_json, first_word
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.storage import folder_of
from shardtrain.data.data_budget import check_enough
from shardtrain.hf.saving import HubSaves
from shardtrain.launch import run_ends, signals
from shardtrain.launch.stop_request import NOT_IN_TIME
from shardtrain.ops.dtensor import local_tensor
from shardtrain.train.resume import save, weights
from shardtrain.utils.errors import (
    ConfigError,
    DataError,
    NotSaved,
    PeerError,
    Preempted,
    Problem,
    fix_first,
)
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run

_ASSUMED_BYTES_PER_SECOND = 100e6
_ASSUMED_SECONDS = 1.0


def prepare(run: Run, checkpoints: Checkpoints, may_end_early: bool = False) -> None:
    """Connect the run to its checkpoints, and check that the data last until the final step.

    Called before the first step and after each rollback. A rollback skips data, which must not end the run
    with an error, so the caller then sets ``may_end_early``.

    Raises:
        DataError: the data are too few, and training.on_data_end does not allow it.
    """
    _check_data(run, may_end_early)
    # an estimate for a request to stop that comes before the first save has been measured
    state = {**weights(run), **run.averages_state_dict(), **run.optimizer_state_dict()}
    tensors = state.values()
    num_bytes = sum(local_tensor(tensor).nbytes for tensor in tensors)
    run.resilience.stop.assumed_save_seconds = (
        _ASSUMED_SECONDS + num_bytes / _ASSUMED_BYTES_PER_SECOND
    )
    # the sums of each step carry the flags of a background save
    run.resilience.saving = checkpoints.saving
    checkpoints.saved_step = run.state.step
    options = run.config.checkpoint
    if (
        options.enable
        and not options.load_only
        and (options.last_save_in_hf or options.hf_interval > 0)
    ):
        checkpoints.exporter = HubSaves(run.config, tasks.labels_of(run.config))
    checkpoints.on_written = run.resilience.stop.saves.add
    checkpoints.on_saved = run.resilience.ledger.saved
    if checkpoints.best.exhausted:
        _stop_early(run, checkpoints)


def _check_data(run: Run, may_end_early: bool) -> None:
    """Check the number of steps that the data have left, if it is known; set ``run.total_steps`` from the
    epochs."""
    loader = run.dataloader
    if loader.steps_left is None or loader.end is None:
        return
    steps_left = loader.steps_left - run.resilience.guard.steps_left_out(
        loader.samples_consumed, loader.end, loader.global_batch
    )
    training = run.config.training
    if training.epochs is not None:
        run.total_steps = run.state.step + steps_left
    # a seed checkpoint is saved without a step
    if run.config.checkpoint.create_seed_checkpoint:
        return
    policy = replace(training, on_data_end="stop") if may_end_early else training
    note = check_enough(policy, run.state.step, steps_left, run.total_steps)
    if note:
        logger.warning(note)


def save_after_step(
    run: Run, checkpoints: Checkpoints, pause: Callable[[], AbstractContextManager[None]]
) -> None:
    """Save after a step (a collective). ``pause`` stops the step timer."""
    stop = run.resilience.stop
    with pause(), run.resilience.phase("checkpoint"):
        started = time.perf_counter()
        save(run, checkpoints, last=run.state.step == run.total_steps)
        # the duration of a background save is known when it ends
        if checkpoints.saving.writing is None:
            stop.saves.add(time.perf_counter() - started - checkpoints.export_seconds)
        # A request to stop lets the current step end and then saves. Warn once if that takes longer than
        # the grace period.
        step_seconds = stop.steps.quantile() or 0.0
        save_seconds = stop.saves.quantile() or 0.0
        grace_seconds = run.config.checkpoint.grace_seconds
        if step_seconds + save_seconds > grace_seconds and not stop.warned_of_grace:
            stop.warned_of_grace = True
            logger.warning(
                f"a step ({step_seconds:.1f} s) and a save ({save_seconds:.1f} s) take longer than "
                f"checkpoint.grace_seconds={grace_seconds}: a request to stop would lose the steps "
                "after the last checkpoint; raise it if your platform allows, use shorter steps, "
                "or save more often"
            )


def save_seed(run: Run, checkpoints: Checkpoints) -> None:
    """Save the state before the first step, for other runs to start from.

    Raises:
        ConfigError: the run has resumed from a checkpoint.
    """
    if run.state.step:
        raise ConfigError(
            Problem(
                "checkpoint.create_seed_checkpoint",
                True,
                rule=f"requires a new run, and this one is at step {run.state.step}",
                fix="remove it, or choose another job.dump_folder",
            )
        )
    save(run, checkpoints, last=False, wait=True)


def note_validation(run: Run, checkpoints: Checkpoints, values: Mapping[str, float]) -> None:
    """Update the best step from a validation, and end the run if its patience is exhausted (a collective)."""
    config = run.config
    if not config.checkpoint.keep_best and not config.validation.patience:
        return
    # rank 0 decides for all: sums over different groups of ranks may differ in the last bit
    checkpoints.best.observe(run.state.step, broadcast_json(dict(values)))
    if checkpoints.best.exhausted:
        _stop_early(run, checkpoints)


def _stop_early(run: Run, checkpoints: Checkpoints) -> None:
    """End the run after this step, because validations have not improved."""
    tracker = checkpoints.best
    result = "no value was finite"
    if tracker.step >= 0:
        result = f"best {tracker.value:.6g} at step {tracker.step}"
    logger.warning(
        f"{tracker.metric} has not improved for {tracker.without_improvement} validations "
        f"({result}): the run ends at step {run.state.step} of {run.total_steps} "
        f"(validation.patience={tracker.patience})"
    )
    run.total_steps = run.state.step


def log_best_step(run: Run, checkpoints: Checkpoints) -> None:
    """Log the best step that the run has kept, and the commands that use it."""
    if not run.config.checkpoint.keep_best or checkpoints.best.kept < 0:
        return
    result = best.describe(
        best.read_pointer(folder_of(run.config.job.dump_folder, run.config.checkpoint.folder))
    )
    logger.info(
        f"best step: {checkpoints.best.kept} ({result}), last step: {run.state.step}; "
        f"{choice.COMMANDS} use the best step of this folder, or the last one with --step=latest"
    )


def leave(run: Run, checkpoints: Checkpoints) -> NoReturn:
    """End the run after a request to stop, which all ranks have agreed on. Save the step if there is time.

    Raises:
        Preempted: everything is saved.
        NotSaved: there was no time to save.
    """
    # a rank may hear of the request from other ranks before its own signal; all ranks report the same reason
    stop = run.resilience.stop
    step = run.state.step
    other_reason = first_word(stop.reason)
    reason = stop.reason or other_reason or "another rank's request"
    folder = folder_of(run.config.job.dump_folder, run.config.checkpoint.folder)
    with run.resilience.phase("checkpoint"):
        # finish the save in progress first, but not its copy in another format, which matters less
        checkpoints.cancel_export()
        seconds = 0.9 * stop.remaining_seconds()
        limit = None if seconds == math.inf else seconds
        is_written = checkpoints.finish(limit)
        is_in_time = is_written and run.resilience.stop_flag < NOT_IN_TIME
        if step > checkpoints.saved_step:
            # check again, because waiting for the background save has taken time
            is_late = (stop.saves.quantile() or 0.0) > stop.remaining_seconds()
            if any_rank(is_late) or not is_in_time:
                newest = signals.newest_checkpoint(folder)
                raise NotSaved(
                    f"stopped by {reason} after step {step}; a save would have taken longer than "
                    "the time left of "
                    f"checkpoint.grace_seconds={run.config.checkpoint.grace_seconds}; "
                    f"the last checkpoint is {newest or 'none'}"
                )
            logger.warning(f"stop requested by {reason}: saving step {step}")
            save(run, checkpoints, last=False, wait=True)
    end = run_ends.SAVED if step else run_ends.BEFORE_FIRST_STEP
    raise Preempted(end.line.format(reason=reason, step=step, folder=folder / f"step-{step}"))


def data_ended(run: Run, checkpoints: Checkpoints) -> None:
    """Save and end the run when the data end before the last step. This is at the same step on all ranks.

    Raises:
        DataError: training.on_data_end is not "stop".
    """
    training = run.config.training
    with run.resilience.phase("checkpoint"):
        # a save in progress may be of this step
        checkpoints.finish()
        if run.state.step > checkpoints.saved_step and checkpoints.is_due(
            run.state.step, run.state.step
        ):
            save(run, checkpoints, last=False, wait=True)
        if training.on_data_end == "stop" and run.state.step == checkpoints.saved_step:
            checkpoints.export_last(run.state.step)
    if training.on_data_end == "repeat":
        raise DataError(
            "the training data have no usable document in an entire pass; see the log for the reasons"
        )
    message = f"the training data ended after step {run.state.step} of {run.total_steps}"
    if training.on_data_end == "stop":
        logger.warning(message)
        return
    raise DataError(
        f'{message}; use more, or set training.on_data_end to "repeat" (begin again) or "stop" (exit 0)'
    )


def explain(error: Exception, run: Run) -> Exception:
    """Add the step and its range of sequences to an error that was raised in a step.

    For a dead worker or a missing rank, return a clearer error instead.
    """
    first = run.state.samples_consumed
    step = run.state.step + 1
    if run.dataloader.global_batch:
        error.add_note(
            f"in step {step} (sequences {first} to {first + run.dataloader.global_batch - 1} of the data)"
        )
    if not isinstance(error, RuntimeError):
        return error
    if dead := data.death_of_worker(error):
        return dead
    # gloo's message names neither the collective nor the missing rank; the traceback names the collective
    calls = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "torch/distributed" in frame.filename
    ]
    if "gloo/transport" not in str(error) or not calls:
        return error
    cause = str(error).splitlines()[0].rpartition("] ")[2]
    return PeerError(
        fix_first(
            f"step {step}: {calls[-1].name} did not complete: {cause}",
            "see the other logs, or raise comm.train_timeout_seconds",
            "another rank failed or is late",
        )
    )
