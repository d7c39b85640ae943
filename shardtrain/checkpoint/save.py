"""Atomic writing of checkpoints: while all ranks wait, or in the background while training continues.

All ranks write into a draft folder. When every rank has written, rank 0 publishes it as ``step-N``,
which never changes after that. See ``storage.py`` for how it is published, and ``manifest.py`` for
what it contains.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain import __version__
from shardtrain.checkpoint import (
    async_save,
    exports,
    holders,
    manifest,
    node_disks,
    rank0_storage,
    replica_comparison,
    retention,
    save_plan,
)
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.async_save import Saving, Staging, Writing
from shardtrain.checkpoint.best import Best
from shardtrain.checkpoint.collectives import (
    all_ranks,
    all_ranks_to_first,
    any_rank,
    broadcast_json,
    first_rank,
)
from shardtrain.checkpoint.exports import Exporter
from shardtrain.checkpoint.interval import Interval
from shardtrain.checkpoint.lease import Lease
from shardtrain.checkpoint.manifest import Manifest, TensorFile
from shardtrain.checkpoint.save_due import IsDue
from shardtrain.checkpoint.storage import Place, storage_of
from shardtrain.config.schema import Checkpoint, Config
from shardtrain.utils.errors import CheckpointError, NumericalError, StorageError, fix_first
from shardtrain.utils.log import logger

FAILURES_IN_A_ROW = 2
"""Number of consecutive failed saves after which a run may still continue."""
CRASH_SECONDS = 3.0
"""Time that a failing rank waits for a save in progress."""
CANCEL_SECONDS = 1.0
"""Further time that it waits for the writing thread, which checks for a cancellation between blocks
of a file.
"""

COMPARED = "replicas_compared"
"""Key of the checkpoint's facts: number of replicated boxes that were compared between ranks before
saving.
"""


class Saver:
    """Save the checkpoints of a run. All methods except ``is_due`` and ``close`` are collectives.

    Attributes:
        saved_step: The newest step on disk, or the step that the run resumed from. Equal on all ranks.
        export_seconds: Time that the last ``save`` waited for an export, which is not part of the save.
        exporter: Exports some of the checkpoints to another format.
        on_saved: Called with the step of each checkpoint once it is complete.
        on_written: Called with the duration of a background save once it is on disk.
    """

    def __init__(self, config: Config) -> None:
        self._options: Checkpoint = config.checkpoint
        self._storage = storage_of(config.job.dump_folder, config.checkpoint.folder)
        self._folder = self._storage.folder
        self._run_folder = Path(config.job.dump_folder)
        self._lease = self._storage.lease
        # Lease of ``job.dump_folder``, for a run that saves no checkpoints below it.
        self._run_lease: Lease | None = None
        # ID of the run in its manifests. A resumed run keeps it. Only rank 0 uses it.
        self._origin = self._lease.nonce
        self._removals = retention.Removals()
        self._is_first = dist.get_rank() == 0
        self._relays = self._options.storage == "first_node" and dist.get_world_size() > 1
        # Number of saves of this process, for unique names of drafts.
        self._number = 0
        # Plan of the last save. The next save reuses it if the tensors are the same.
        self._plan: save_plan.SavePlan | None = None
        self._staging = Staging(self._options.async_mode == "async_with_pinned_mem")
        self.best = Best(config)
        self.interval = Interval(self._options)
        self.saving = Saving()
        # Only rank 0's clock decides. With their own clocks, ranks would save at different steps.
        self.saving.by_clock = self._saves and self._options.interval_type != "steps"
        if self._is_first and self.saving.by_clock:
            self.saving.is_time = self.interval.is_time
        self.is_due = IsDue(self._options, self.saving, self.best)
        self.saved_step = 0
        self.failures_in_a_row = self.skipped = 0
        self._export_is_due = self._export_must = False
        self.export_seconds = 0.0
        self.exporter: Exporter | None = None
        self.on_saved: Callable[[int], object] = lambda step: None
        self.on_written: Callable[[float], object] = lambda seconds: None

    @property
    def _saves(self) -> bool:
        return self._options.enable and not self._options.load_only

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        rest: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        last: bool,
        wait: bool = False,
    ) -> None:
        """Save a checkpoint, and delete old ones that retention does not keep.

        With ``checkpoint.async_mode`` it returns once the tensors are copied, and ``poll``
        completes the save later. It returns only after the save if it is the ``last`` one or
        ``wait`` is set. While an earlier save is in progress, it waits for up to
        ``checkpoint.max_stall_seconds`` and then skips this save. A new best checkpoint is never
        skipped.

        Args:
            weights: Parameters and buffers of the model, by name.
            rest: The other tensors, such as the optimizer's state.
            facts: Counters of the run, as JSON values.

        Raises:
            StorageError: on all ranks, if one could not write. Older checkpoints are unchanged. Not
                raised if ``checkpoint.on_save_error`` is "continue", except for the last save, with
                ``wait``, or for the third failure in a row.
            ConfigError: another run has taken over the folder.
            NumericalError: on all ranks, before anything is written, if replicas of a tensor
                differ. The message has the tensor, the odd ranks, and the last checkpoint with
                equal replicas.
        """
        begun = time.monotonic()
        # The last save is neither skipped nor written in the background: the process ends after it.
        must_succeed = last or wait

        # Only one save may run at a time. Wait for the save in progress, or skip this save.
        limit: float | None = self._options.max_stall_seconds
        if must_succeed or self.best.is_new(step):
            limit = None
        if not self.finish(limit):
            self.skipped += 1
            self.saving.clear_flags()
            self.interval.restart()
            assert self.saving.writing is not None
            logger.warning(
                f"skipped the save of step {step}: the save of step {self.saving.writing.step} is "
                "still in progress after "
                f"checkpoint.max_stall_seconds={self._options.max_stall_seconds} ({self.skipped} "
                "skipped in total); save less often, or to faster storage"
            )
            return

        # The last checkpoint may contain only the weights, in the dtype of exports.
        if last and self._options.last_save_model_only:
            weights = tensor_files.cast(
                weights, self._options.export_dtype.replace("auto", "float32")
            )
            rest = {}
            facts = {**facts, "weights_only": True}
        tensors = {**weights, **rest}
        facts = {"weights_only": False, **facts}

        # Assign pieces to ranks (a collective). The last plan is reused until a rank's tensors change.
        shares = self._plan = save_plan.plan(tensors, self._plan)

        # Only one rank writes a replicated box, so a replica that differs would go unnoticed.
        if self._options.compare_replicas:
            odd = replica_comparison.find_odd(tensors, shares.holdings, facts.get("state") or {})
            if odd:
                self.refuse(step, odd)
            facts[COMPARED] = holders.num_replicated(shares.holdings)

        # Write now, or copy the tensors and write in the background. All ranks see the same
        # error, so they agree on whether to tolerate it.
        self._export_is_due = self.exporter is not None and self.exporter.is_due(step, last)
        self.export_seconds = 0.0
        self._number += 1
        in_background = self._options.async_mode != "disabled" and not must_succeed
        try:
            if in_background:
                self._begin(step, tensors, shares, facts)
            else:
                self._save_now(step, tensors, shares, facts)
        except BaseException as error:
            self._abandon(step)
            self._tolerate(error, must_succeed)
        else:
            if not in_background:
                self._saved(step)
                self._export_if_due(
                    step,
                    must_succeed or self._options.async_mode == "disabled",
                    must_succeed,
                )
        # The flags that ranks exchanged in this step belong to the previous save.
        self.saving.clear_flags()
        self.interval.note(time.monotonic() - begun - self.export_seconds)
        self.interval.restart()

    def poll(self) -> None:
        """Complete the background save once all ranks have written their files (see ``Saving``).

        Raises:
            StorageError: as ``save`` does.
        """
        if self.saving.writing is not None and self.saving.has_ended(dist.get_world_size()):
            self._finish_one()

    def finish(self, limit_seconds: float | None = None) -> bool:
        """Wait for saves and exports in progress. Return False on all ranks if one does not end
        within the limit.

        Raises:
            StorageError: as ``save`` does.
        """
        begun = time.monotonic()
        # Repeat, because an export may start when a save ends.
        while self.saving.writing is not None:
            left = None
            if limit_seconds is not None:
                left = limit_seconds - (time.monotonic() - begun)
            if not self._finish_one(left):
                return False
        return True

    def _finish_one(self, limit_seconds: float | None = None) -> bool:
        """Wait for the save or export in progress and handle its result (a collective). False if
        the limit passes.
        """
        writing = self.saving.writing
        assert writing is not None
        if not async_save.ended_everywhere(writing, limit_seconds):
            return False
        self.saving.writing = None
        # A save counts only if every rank has written its part.
        try:
            all_ranks(writing.result)
        except BaseException as error:
            self._abandon(writing.step)
            self._tolerate(error, must=writing.is_export and self._export_must)
        else:
            if not writing.is_export:
                self._saved(writing.step)
                self.on_written(writing.seconds)
                self.interval.note_write(writing.seconds)
                self._export_if_due(writing.step, wait=False, must=False)
            elif any_rank(writing.cancelled):
                self._abandon(writing.step)
                logger.warning(f"{self._name(writing)} was cancelled because the run has to stop")
            else:
                logger.info(f"saved {self._name(writing)}")
        return True

    def export_last(self, step: int) -> None:
        """Export the checkpoint of the last step, if an export is due.

        Raises:
            StorageError: it cannot be written.
        """
        self._export_is_due = self.exporter is not None and self.exporter.is_due(step, True)
        self._export_if_due(step, wait=True, must=True)

    def cancel_export(self) -> None:
        """Cancel an export in progress and start no other, because the run has to stop soon."""
        self._export_is_due = False
        self.exporter = None
        writing = self.saving.writing
        if writing is not None and writing.is_export:
            writing.cancel()
            self.finish()

    def close(self) -> None:
        """Release the lease of the folder. If the run ends with an error, wait a few seconds for a
        save in progress.
        """
        # Not a collective, because other ranks may have ended. Rank 0's thread commits once all
        # have written, so only rank 0 knows if there is a checkpoint.
        writing = self.saving.writing
        if writing is not None:
            if not writing.wait(CRASH_SECONDS):
                writing.cancel()
                writing.wait(CANCEL_SECONDS)
            if self._is_first:
                if writing.ended and not writing.failed:
                    logger.info(f"saved checkpoint {self._name(writing)}")
                else:
                    self._abandon(writing.step)
            self.saving.writing = None
        # Release the lease last. Until then no other run may write to the folder.
        if self._is_first:
            self._storage.abandon_all()
            self._removals.finish()
            self._lease.release()
            if self._run_lease is not None:
                self._run_lease.release()

    def _draft(self, step: int, nonce: str) -> Place:
        return self._storage.draft(step, nonce, self._number)

    def _abandon(self, step: int) -> None:
        if self._is_first:
            self._storage.abandon(self._draft(step, self._lease.nonce))
            exports.abandon(self._folder / f"step-{step}", self._lease)

    def _save_now(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        shares: save_plan.SavePlan,
        facts: Mapping[str, Any],
    ) -> None:
        """Write the checkpoint while all ranks wait (a collective)."""
        nonce, _ = first_rank(lambda: self._prepare(step, sum(shares.bytes_of)))
        draft = self._draft(step, nonce)
        # Every rank writes its file, or sends it to rank 0 if only rank 0 has access to the folder.
        if self._relays:
            written = all_ranks(
                lambda: [*map(_fields, rank0_storage.write(tensors, shares, draft))]
            )
        else:
            written = all_ranks_to_first(
                lambda: _fields(tensor_files.write(tensors, shares, draft))
            )
        stored_files = [TensorFile(*fields) for fields in written if fields]
        # Commit after all have written, and delete old checkpoints after the commit.
        first_rank(lambda: self._commit(draft, self._manifest(step, stored_files, shares, facts)))
        first_rank(lambda: self._tidy(step, facts))
        if self._relays:
            node_disks.note(self._run_folder, [step])

    def _begin(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        shares: save_plan.SavePlan,
        facts: Mapping[str, Any],
    ) -> None:
        """Copy this rank's data, and start a thread that writes it (a collective)."""
        rank = dist.get_rank()
        size = dist.get_world_size()
        staged: list[memoryview] = []

        def copy_and_prepare() -> list[str] | None:
            local_tensors = [tensors[name] for name in shares.names_of(rank)]
            staged.append(self._staging.copy(local_tensors, shares.bytes_of[rank]))
            if self._is_first:
                return self._prepare(step, sum(shares.bytes_of))
            return None

        nonce, token = all_ranks(copy_and_prepare)  # the result of rank 0
        # Every rank now has its copy, so training may change the tensors.
        draft = self._draft(step, nonce)
        others = [r for r in range(1, size) if shares.bytes_of[r]]

        # This runs in a thread. It must not use collectives: their order relative to the trainer's
        # would differ between ranks.
        def write(check_cancelled: Callable[[], None]) -> None:
            stored_files = []
            if shares.bytes_of[rank]:
                blocks = async_save.pieces(staged[0], check_cancelled)
                stored_files.append(tensor_files.write_blocks(blocks, rank, size, draft))
            if not self._is_first:
                for file in stored_files:
                    async_save.write_marker(draft, rank, token, file)
                return
            stored_files += async_save.wait_for_markers(draft, others, token, check_cancelled)
            self._commit(draft, self._manifest(step, stored_files, shares, facts))
            self._tidy(step, facts)

        self.saving.writing = Writing(step, write)

    def refuse(self, step: int, odd: str) -> NoReturn:
        """Stop a run whose replicas differ (a collective); ``odd`` names the ranks and the tensor.

        Raises:
            NumericalError: names the last checkpoint that was compared before it was saved.
        """
        with contextlib.suppress(StorageError):
            self.finish()
        # Rank 0 reads the folder for all: a shared folder may lag, and all must raise the same error.
        last_good = None
        if self._is_first and self._saves:
            last_good = self._newest_compared()
        last_good = broadcast_json(last_good)
        fix = "start from scratch"
        good = "no checkpoint is known to be without it"
        if last_good is not None:
            fix = f"continue with checkpoint.load_step={last_good}"
            good = f"the last checkpoint known to be without it is {self._folder / f'step-{last_good}'}"
        cause = "a device computes wrongly, or ranks ran different programs"
        subject = f"step {step}: {odd}, but replicas must be bitwise equal"
        raise NumericalError(
            fix_first(
                subject,
                f"{fix}, without the device of those ranks",
                cause,
                f"step {step} was not saved",
                good,
            )
        )

    def _newest_compared(self) -> int | None:
        """Return the newest step of this run on disk whose replicas were compared before saving, or None."""
        with contextlib.suppress(OSError):
            for step in reversed(retention.steps(self._folder)):
                with contextlib.suppress(CheckpointError):
                    path = self._folder / f"step-{step}"
                    if step > self.saved_step or COMPARED not in manifest.read(path).facts:
                        continue
                    if retention.is_complete(path):
                        return step
        return None

    def _manifest(
        self,
        step: int,
        stored_files: list[TensorFile],
        shares: save_plan.SavePlan,
        facts: Mapping[str, Any],
    ) -> Manifest:
        return Manifest(
            step=step,
            world_size=dist.get_world_size(),
            run=self._lease.nonce,
            created_by=f"shardtrain {__version__}, torch {torch.__version__}",
            files=tuple(stored_files),
            tensors=shares.tensors,
            facts=facts,
            origin=self._origin,
        )

    def _export_if_due(self, step: int, wait: bool, must: bool) -> None:
        """Export a checkpoint that is on disk, in the background unless ``wait`` is set."""
        if not self._export_is_due:
            return
        self._export_is_due = False
        self._export_must = must
        assert self.exporter is not None and isinstance(self._folder, Path)
        size = 1 if self._relays else dist.get_world_size()
        begun = time.monotonic()
        try:
            self.saving.writing = exports.begin(
                self.exporter,
                self._folder / f"step-{step}",
                self._lease,
                size,
            )
        except BaseException as error:
            self._tolerate(error, must)
        if wait:
            self.finish()
            self.export_seconds = time.monotonic() - begun

    def _name(self, writing: Writing) -> Place:
        suffix = retention.HUB if writing.is_export else ""
        return self._folder / f"step-{writing.step}{suffix}"

    def _saved(self, step: int) -> None:
        self.saved_step = step
        self.failures_in_a_row = 0
        self.on_saved(step)
        logger.info(f"saved checkpoint {self._folder / f'step-{step}'}")

    def _tolerate(self, error: BaseException, must: bool) -> None:
        """Raise the error of a save, unless the run may continue without it. Equal on all ranks."""
        self.failures_in_a_row += 1
        tolerated = (
            self._options.on_save_error == "continue"
            and self.failures_in_a_row <= FAILURES_IN_A_ROW
        )
        if must or not tolerated or not isinstance(error, StorageError):
            raise error
        logger.warning(
            f"{error}: training continues, and the newest checkpoint is that of step {self.saved_step} "
            f"(checkpoint.on_save_error; {self.failures_in_a_row} of {FAILURES_IN_A_ROW} in a row)"
        )

    def _prepare(self, step: int, planned: int) -> list[str]:
        """Create the draft of a save. Return the nonce of the lease, which ends its name, and a
        token of the save.
        """
        self._lease.acquire()
        self._lease.check()
        self._storage.prepare(self._draft(step, self._lease.nonce), planned)
        return [self._lease.nonce, secrets.token_hex(4)]

    def _commit(self, draft: Place, stored: Manifest) -> None:
        self._storage.publish(draft, stored, self._lease.check)

    def _tidy(self, saved: int, facts: Mapping[str, Any]) -> None:
        """Update ``best.json`` after a commit, and delete checkpoints that retention does not keep."""
        self.best.point(self._folder, facts.get("best"))
        options = self._options
        retention.delete_old(
            self._folder,
            saved,
            keep=options.keep_latest_k,
            forever=options.keep_every_n_steps,
            spare=self.best.kept,
            origin=self._origin,
            removals=self._removals,
        )


def _fields(file: TensorFile | None) -> list[Any] | None:
    if file is None:
        return None
    return [file.name, file.bytes, file.sha256]
