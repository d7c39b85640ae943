"""End a run: its last save, early stopping, a request to stop, the end of the data, or a lost rank."""

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
    """Connect the run to its checkpoints, and check that there are enough data for all steps.

    This is called before the first step and after each rollback. A rollback skips data. If the rest is then
    too short for all steps, the run must not fail, so the caller sets ``may_end_early`` after a rollback.

    Raises:
        DataError: there are not enough data, and training.on_data_end does not allow this.
    """
    _check_data(run, may_end_early)
    # Estimate the duration of a save, in case a request to stop comes before the first save was measured.
    state = {**weights(run), **run.averages_state_dict(), **run.optimizer_state_dict()}
    tensors = state.values()
    num_bytes = sum(local_tensor(tensor).nbytes for tensor in tensors)
    run.resilience.stop.assumed_save_seconds = (
        _ASSUMED_SECONDS + num_bytes / _ASSUMED_BYTES_PER_SECOND
    )
    # The all-reduce of each step also exchanges the state of a background save.
    run.resilience.saving = checkpoints.saving
    checkpoints.saved_step = checkpoints.saved_step_after(run.state.step)
    options = run.config.checkpoint
    exports = options.last_save_in_hf or options.hf_interval > 0
    if options.enable and not options.load_only and exports:
        checkpoints.exporter = HubSaves(run.config, tasks.labels_of(run.config))
    # Saves report their durations, which decide whether a requested stop still has time to save.
    checkpoints.on_written = run.resilience.stop.saves.add
    checkpoints.on_saved = run.resilience.ledger.saved
    # The run may have been resumed from a checkpoint that early stopping saved.
    if checkpoints.best.exhausted:
        _stop_early(run, checkpoints)


def _check_data(run: Run, may_end_early: bool) -> None:
    """Check that the remaining data are enough for the remaining steps, if their number is known.

    With ``training.epochs``, set ``run.total_steps`` from the data.
    """
    loader = run.dataloader
    if loader.steps_left is None or loader.end is None:
        return
    first_row = loader.samples_consumed

    def step_of(row: int) -> int:
        return loader.step_sizes.step_of(first_row, row)

    skipped_steps = run.resilience.guard.num_excluded_steps(first_row, loader.end, step_of)
    steps_left = loader.steps_left - skipped_steps
    training = run.config.training
    if training.epochs is not None:
        run.total_steps = run.state.step + steps_left
    # A seed checkpoint is saved without any step, so it needs no data.
    if run.config.checkpoint.create_seed_checkpoint:
        return
    policy = replace(training, on_data_end="stop") if may_end_early else training
    note = check_enough(policy, run.state.step, steps_left, run.total_steps)
    if note:
        logger.warning(note)


def save_after_step(
    run: Run, checkpoints: Checkpoints, pause: Callable[[], AbstractContextManager[None]]
) -> None:
    """Save after a step (a collective). ``pause()`` excludes the save from the measured step time."""
    stop = run.resilience.stop
    with pause(), run.resilience.phase("checkpoint"):
        started = time.perf_counter()
        save(run, checkpoints, last=run.state.step == run.total_steps)
        # Record the duration. For a background save, it is recorded when the save ends.
        if checkpoints.saving.writing is None:
            stop.saves.add(time.perf_counter() - started - checkpoints.export_seconds)
        # After a request to stop, the run finishes the current step and saves. Warn once if both together
        # take longer than the grace period.
        step_seconds = stop.steps.quantile() or 0.0
        save_seconds = stop.saves.quantile() or 0.0
        grace_seconds = run.config.checkpoint.grace_seconds
        if step_seconds + save_seconds > grace_seconds and not stop.warned_of_grace:
            stop.warned_of_grace = True
            logger.warning(
                f"a step ({step_seconds:.1f} s) and a save ({save_seconds:.1f} s) take longer than "
                f"checkpoint.grace_seconds={grace_seconds}: a request to stop would lose the steps "
                "after the last checkpoint; raise the option if your platform allows it, use shorter steps, "
                "or save more often"
            )


def save_seed(run: Run, checkpoints: Checkpoints) -> None:
    """Save the state before the first step. Other runs can start from this seed checkpoint.

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
    """Update the best step with a validation's result (a collective). End the run if patience is exhausted."""
    config = run.config
    if not config.checkpoint.keep_best and not config.validation.patience:
        return
    # Rank 0 decides for all ranks, because their sums may differ in the last bits.
    checkpoints.best.observe(run.state.step, broadcast_json(dict(values)))
    if checkpoints.best.exhausted:
        _stop_early(run, checkpoints)


def _stop_early(run: Run, checkpoints: Checkpoints) -> None:
    """End the run after this step, because its validations have not improved."""
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
    """Log which best step the run has kept, and which commands use it."""
    if not run.config.checkpoint.keep_best or checkpoints.best.kept < 0:
        return
    folder = folder_of(run.config.job.dump_folder, run.config.checkpoint.folder)
    pointer = best.read_pointer(folder)
    # A warning has reported a best.json that could not be written.
    if pointer.get("step") != checkpoints.best.kept:
        return
    logger.info(
        f"best step: {checkpoints.best.kept} ({best.describe(pointer)}), last step: {run.state.step}; "
        f"{choice.COMMANDS} use the best step of this folder, or the last one with --step=latest"
    )


def leave(run: Run, checkpoints: Checkpoints) -> NoReturn:
    """End the run after a request to stop that all ranks know of. Save the current step if there is time.

    Raises:
        Preempted: everything is saved.
        NotSaved: there was no time to save.
    """
    # A rank may learn of the request from other ranks before it gets the signal itself. Such a rank reports
    # the reason of another rank.
    stop = run.resilience.stop
    step = run.state.step
    other_reason = first_word(stop.reason)
    reason = stop.reason or other_reason or "another rank's request"
    folder = folder_of(run.config.job.dump_folder, run.config.checkpoint.folder)
    with run.resilience.phase("checkpoint"):
        # First finish a save that is in progress. But cancel its copy in another format, which is less
        # important.
        checkpoints.cancel_export()
        seconds = 0.9 * stop.remaining_seconds()
        limit = None if seconds == math.inf else seconds
        is_written = checkpoints.finish(limit)
        is_in_time = is_written and run.resilience.stop_flag < NOT_IN_TIME
        if step > checkpoints.saved_step:
            # Check the remaining time again, because waiting for the background save has used some of it.
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
    """Save and end the run, because the data have ended before the last step (a collective).

    Raises:
        DataError: training.on_data_end is not "stop".
    """
    training = run.config.training
    with run.resilience.phase("checkpoint"):
        # Finish a save in progress first, because it may be the save of this step.
        checkpoints.finish()
        if run.state.step > checkpoints.saved_step and checkpoints.is_due(
            run.state.step, run.state.step
        ):
            save(run, checkpoints, last=False, wait=True)
        if training.on_data_end == "stop" and run.state.step == checkpoints.saved_step:
            checkpoints.export_last(run.state.step)
    if training.on_data_end == "repeat":
        raise DataError(
            "an entire pass over the training data found no usable document; see the log for the reasons"
        )
    message = f"the training data ended after step {run.state.step} of {run.total_steps}"
    if training.on_data_end == "stop":
        logger.warning(message)
        return
    raise DataError(
        f"{message}; use more data, or set training.on_data_end to "
        '"repeat" (begin again) or "stop" (exit 0)'
    )


def explain(error: Exception, run: Run) -> Exception:
    """Add a note with the step and its sequences to an error that was raised in a step, and return the error.

    For a dead worker or a missing rank, return a clearer error instead.
    """
    first = run.state.samples_consumed
    step = run.state.step + 1
    num_rows = run.dataloader.step_sizes.batch_at(first)
    if num_rows:
        error.add_note(f"in step {step} (sequences {first} to {first + num_rows - 1} of the data)")
    if not isinstance(error, RuntimeError):
        return error
    if dead_worker := data.death_of_worker(error):
        return dead_worker

    # gloo's message names neither the collective nor the missing rank.
    # Take the collective from the traceback.
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
