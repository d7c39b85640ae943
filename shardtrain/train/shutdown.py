"""The end of a run before its last step: it was asked to stop, the data have ended, or a rank is missing."""

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
from shardtrain.utils.errors import ConfigError, DataError, NotSaved, PeerError, Preempted, Problem, fix_first
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run

_ASSUMED_BYTES_PER_SECOND = 100e6
_ASSUMED_SECONDS = 1.0


def prepare(run: Run, checkpoints: Checkpoints, may_end_early: bool = False) -> None:
    """Connect the run and its checkpoints for the end that may come, and say whether the data last until then.

    Called before the first step and after each rollback. A rollback leaves out data, and that must not discard what
    was learned, so such a run ``may_end_early``.

    Raises:
        DataError: when a run that begins is known to have too few data, unless training.on_data_end allows it.
    """
    # whether the data last until the last step, where that is known
    left = run.dataloader.steps_left
    position = run.dataloader.samples_consumed
    if left is not None and run.dataloader.end is not None:
        left -= run.resilience.guard.steps_left_out(position, run.dataloader.end, run.dataloader.global_batch)
        training = run.config.training
        if training.epochs is not None:
            run.total_steps = run.state.step + left
        policy = replace(training, on_data_end="stop") if may_end_early else training
        if run.config.checkpoint.create_seed_checkpoint:
            note = ""  # no step is made
        else:
            note = check_enough(policy, run.state.step, left, run.total_steps)
        if note:
            logger.warning(note)
    tensors = {**weights(run), **run.optimizer_state_dict()}.values()
    num_bytes = sum(local_tensor(tensor).nbytes for tensor in tensors)
    # a request to stop may come before any save has been measured
    run.resilience.stop.assumed_save_seconds = _ASSUMED_SECONDS + num_bytes / _ASSUMED_BYTES_PER_SECOND
    # flags of a save travel with the sums of each step, and each of both reports to the other
    run.resilience.saving = checkpoints.saving
    checkpoints.saved_step = run.state.step
    options = run.config.checkpoint
    if options.enable and not options.load_only and (options.last_save_in_hf or options.hf_interval > 0):
        checkpoints.exporter = HubSaves(run.config, tasks.labels_of(run.config))
    checkpoints.on_written = run.resilience.stop.saves.add
    checkpoints.on_saved = run.resilience.ledger.saved
    if checkpoints.best.exhausted:
        _no_patience(run, checkpoints)


def save_after_step(run: Run, checkpoints: Checkpoints, pause: Callable[[], AbstractContextManager[None]]) -> None:
    """Save the step that has ended (a collective); ``pause`` stops the step timer."""
    stop = run.resilience.stop
    with pause(), run.resilience.phase("checkpoint"):
        started = time.perf_counter()
        save(run, checkpoints, last=run.state.step == run.total_steps)
        if checkpoints.saving.writing is None:  # else it is known when all is on disk
            stop.saves.add(time.perf_counter() - started - checkpoints.export_seconds)
        # a request to stop lets the step in progress end and then saves; warn once if that cannot be done in time
        step = stop.steps.quantile() or 0.0
        saving = stop.saves.quantile() or 0.0
        grace = run.config.checkpoint.grace_seconds
        if step + saving > grace and not stop.warned_of_grace:
            stop.warned_of_grace = True
            logger.warning(
                f"a step ({step:.1f} s) and a save ({saving:.1f} s) take longer than "
                f"checkpoint.grace_seconds={grace}: a request to stop would lose what came after the last checkpoint; "
                "raise it as far as your platform grants, make steps shorter, or save more often"
            )


def save_seed(run: Run, checkpoints: Checkpoints) -> None:
    """Save the state before the first step, for other runs to start from.

    Raises:
        ConfigError: when the run was continued from a checkpoint.
    """
    if run.state.step:
        rule = f"is for a run that begins, and this one is at {run.state.step} steps"
        fix = "remove it, or choose another job.dump_folder"
        raise ConfigError(Problem("checkpoint.create_seed_checkpoint", True, rule, fix))
    save(run, checkpoints, last=False, wait=True)


def note_validation(run: Run, checkpoints: Checkpoints, values: Mapping[str, float]) -> None:
    """Keep the best of a validation's values, and end the run where they have not improved for long (a collective)."""
    config = run.config
    if config.checkpoint.keep_best or config.validation.patience:
        # sums over different groups of ranks may differ in the last bit, and all ranks must agree on what is better
        checkpoints.best.observe(run.state.step, broadcast_json(dict(values)))
        if checkpoints.best.exhausted:
            _no_patience(run, checkpoints)


def _no_patience(run: Run, checkpoints: Checkpoints) -> None:
    found = checkpoints.best
    result = f"best {found.value:.6g} at step {found.step}" if found.step >= 0 else "none was finite"
    logger.warning(
        f"{found.metric} has not improved for {found.without_improvement} validations ({result}): the run ends at step "
        f"{run.state.step} of {run.total_steps} (validation.patience={found.patience})"
    )
    run.total_steps = run.state.step


def log_best_step(run: Run, checkpoints: Checkpoints) -> None:
    """Log the best step that the run has kept, and the commands that use it."""
    if not run.config.checkpoint.keep_best or checkpoints.best.kept < 0:
        return
    result = best.describe(best.read_pointer(folder_of(run.config.job.dump_folder, run.config.checkpoint.folder)))
    logger.info(
        f"best step: {checkpoints.best.kept} ({result}), last step: {run.state.step}; {choice.COMMANDS} use the best "
        "step of this folder, or the last one with --step=latest"
    )


def leave(run: Run, checkpoints: Checkpoints) -> NoReturn:
    """End the run after the step that all ranks agreed on: save what is not saved yet, unless a rank has no time.

    Raises:
        Preempted: everything is saved.
        NotSaved: there was no time for it.
    """
    # the request may reach a rank through the others before its own signal has come: all name the same one
    stop = run.resilience.stop
    step = run.state.step
    heard = first_word(stop.reason)
    reason = stop.reason or heard or "another rank's request"
    folder = folder_of(run.config.job.dump_folder, run.config.checkpoint.folder)
    with run.resilience.phase("checkpoint"):
        # what is in flight first: the checkpoint itself matters more than its copy in another format
        checkpoints.cancel_export()
        seconds = 0.9 * stop.remaining_seconds()
        written = checkpoints.finish(None if seconds == math.inf else seconds)
        in_time = written and run.resilience.stop_flag < NOT_IN_TIME
        if step > checkpoints.saved_step:
            # waiting for the save in the background has taken some of the time
            late = (stop.saves.quantile() or 0.0) > stop.remaining_seconds()
            if any_rank(late) or not in_time:
                newest = signals.newest_checkpoint(folder)
                raise NotSaved(
                    f"stopped by {reason} after step {step}; a save would have taken longer than the time left of "
                    f"checkpoint.grace_seconds={run.config.checkpoint.grace_seconds}; "
                    f"the last checkpoint is {newest or 'none'}"
                )
            logger.warning(f"asked to stop by {reason}: saving step {step}")
            save(run, checkpoints, last=False, wait=True)
    end = run_ends.SAVED if step else run_ends.BEFORE_FIRST_STEP
    raise Preempted(end.line.format(reason=reason, step=step, folder=folder / f"step-{step}"))


def data_ended(run: Run, checkpoints: Checkpoints) -> None:
    """The data ended before the last step, on all ranks at the same one: save, and say so.

    Raises:
        DataError: unless training.on_data_end is "stop".
    """
    with run.resilience.phase("checkpoint"):
        # a save in flight counts: the step may be on disk by then
        checkpoints.finish()
        if run.state.step > checkpoints.saved_step and checkpoints.is_due(run.state.step, run.state.step):
            save(run, checkpoints, last=False, wait=True)
        if run.config.training.on_data_end == "stop" and run.state.step == checkpoints.saved_step:
            checkpoints.export_last(run.state.step)
    if run.config.training.on_data_end == "repeat":
        raise DataError("the training data have no document in whole passes; the log says why")
    message = f"the training data ended after step {run.state.step} of {run.total_steps}"
    if run.config.training.on_data_end == "stop":
        logger.warning(message)
        return
    raise DataError(f'{message}; use more, or set training.on_data_end to "repeat" (begin again) or "stop" (exit 0)')


def explain(error: Exception, run: Run) -> Exception:
    """An error of a step, with the step and its data; it names what failed where PyTorch's message does not."""
    first = run.state.samples_consumed
    step = run.state.step + 1
    if run.dataloader.global_batch:
        error.add_note(f"in step {step} (sequences {first} to {first + run.dataloader.global_batch - 1} of the data)")
    if not isinstance(error, RuntimeError):
        return error
    if dead := data.death_of_worker(error):
        return dead
    # gloo names neither the collective nor the rank that is missing: the name of the function is in the traceback
    calls = [f for f in traceback.extract_tb(error.__traceback__) if "torch/distributed" in f.filename]
    if "gloo/transport" not in str(error) or not calls:
        return error
    return PeerError(
        fix_first(
            f"step {step}: {calls[-1].name} did not complete: {str(error).splitlines()[0].rpartition('] ')[2]}",
            "see the other logs, or raise comm.train_timeout_seconds",
            "another rank failed or is late",
        )
    )
