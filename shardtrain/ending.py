"""The end of a run before its last step: it was asked to stop, the data have ended, or a rank is missing."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING, NoReturn

from shardtrain import data, stopping
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.storage import folder_of
from shardtrain.errors import DataError, NotSaved, PeerError, Preempted
from shardtrain.log import logger
from shardtrain.resume import optimizer_state, save, weights
from shardtrain.shards import local_tensor

if TYPE_CHECKING:
    from shardtrain.run import Run

_ASSUMED_BYTES_PER_SECOND, _ASSUMED_SECONDS = 100e6, 1.0


def expect(run: Run) -> None:
    """Assume how long a save will take, from this rank's bytes, until one has been measured."""
    tensors = {**weights(run), **optimizer_state(run)}.values()
    num_bytes = sum(local_tensor(tensor).nbytes for tensor in tensors)
    run.stop.assumed_save_seconds = _ASSUMED_SECONDS + num_bytes / _ASSUMED_BYTES_PER_SECOND


def timed_save(run: Run, checkpoints: Checkpoints, last: bool) -> int:
    """Save (a collective), remember how long it took, and give the step that is now saved."""
    started = time.perf_counter()
    with run.phases.within("checkpoint"):
        save(run, checkpoints, last)
    run.stop.saves.add(time.perf_counter() - started)
    return run.state.step


def leave(run: Run, checkpoints: Checkpoints, saved_step: int) -> NoReturn:
    """End the run after the step that all ranks agreed on: save what is not saved yet, unless a rank has no time.

    Raises:
        Preempted: everything is saved.
        NotSaved: there was no time for it.
    """
    step, reason = run.state.step, run.stop.reason or "another rank's request"
    folder = folder_of(run.config.job.dump_folder, run.config.checkpoint.folder)
    if step > saved_step:
        if run.stop_word >= stopping.NOT_IN_TIME:
            newest = stopping.newest_checkpoint(folder)
            raise NotSaved(
                f"stopped by {reason} after step {step}; a save would have taken longer than the time left of "
                f"checkpoint.grace_seconds={run.config.checkpoint.grace_seconds}; "
                f"the last checkpoint is {newest or 'none'}"
            )
        logger.warning(f"asked to stop by {reason}: saving step {step}")
        timed_save(run, checkpoints, last=False)
    where = f"everything is saved in {folder / f'step-{step}'}" if step else "before the first step"
    raise Preempted(f"stopped by {reason} after step {step}; {where}; the same command goes on from there")


def data_ended(run: Run, checkpoints: Checkpoints, saved_step: int) -> None:
    """The data ended before the last step, on all ranks at the same one: save, and say so.

    Raises:
        DataError: unless training.on_data_end is "stop".
    """
    if run.state.step > saved_step and checkpoints.is_due(run.state.step, run.state.step):
        timed_save(run, checkpoints, last=False)
    if run.config.training.on_data_end == "repeat":
        raise DataError("the training data have no document in whole passes; the log says why")
    message = f"the training data ended after step {run.state.step} of {run.total_steps}"
    if run.config.training.on_data_end == "stop":
        logger.warning(message)
        return
    raise DataError(f'{message}; use more, or set training.on_data_end to "repeat" (begin again) or "stop" (exit 0)')


def name_collective(error: RuntimeError, step: int) -> Exception:
    """An error that says which process or collective failed, where PyTorch's own does not; every other as it is."""
    if dead := data.death_of_worker(error):
        return dead
    calls = [f for f in traceback.extract_tb(error.__traceback__) if "torch/distributed" in f.filename]
    if "gloo/transport" not in str(error) or not calls:
        return error
    return PeerError(
        f"step {step}: {calls[-1].name} did not complete: {str(error).splitlines()[0].rpartition('] ')[2]}; "
        "another rank failed or is late: see the other logs, or raise comm.train_timeout_seconds"
    )
