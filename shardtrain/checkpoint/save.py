"""Atomic writing of checkpoints: while all ranks wait, or in the background while training continues.

All ranks write into a draft folder. When every rank has written, rank 0 publishes it as ``step-N``, which never changes
after that. See ``storage.py`` for how it is published, and ``manifest.py`` for what it contains.
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
from shardtrain.checkpoint.collectives import all_ranks, all_ranks_to_first, any_rank, broadcast_json, first_rank
from shardtrain.checkpoint.exports import Exporter
from shardtrain.checkpoint.interval import Interval, IsDue
from shardtrain.checkpoint.lease import Lease
from shardtrain.checkpoint.manifest import Manifest, TensorFile
from shardtrain.checkpoint.storage import Place, storage_of
from shardtrain.config.schema import Checkpoint, Config
from shardtrain.utils.errors import CheckpointError, NumericalError, StorageError, fix_first
from shardtrain.utils.log import logger

FAILURES_IN_A_ROW = 2
"""Failed saves after which a run may continue."""
CRASH_SECONDS = 3.0
"""How long a rank that ends with an error waits for the save in flight."""
CANCEL_SECONDS = 1.0
"""How long it then waits for the writing thread, which checks between blocks of a file whether it is cancelled."""


COMPARED = "replicas_compared"
"""Key among the facts of a checkpoint: how many replicated parts were compared between ranks before it was saved."""


class Saver:
    """Saves the checkpoints of a run; all methods but ``is_due`` and ``close`` are collectives."""

    def __init__(self, config: Config) -> None:
        self._options: Checkpoint = config.checkpoint
        self._storage = storage_of(config.job.dump_folder, config.checkpoint.folder)
        self._folder = self._storage.folder
        self._run_folder = Path(config.job.dump_folder)
        self._lease = self._storage.lease
        self._run_lease: Lease | None = None
        """Held by a run that writes no checkpoint below ``job.dump_folder``."""
        self._origin = self._lease.nonce
        """ID of the run in its manifests. A resumed run keeps it. Used by rank 0 only."""
        self._is_first = dist.get_rank() == 0
        self._relays = self._options.storage == "first_node" and dist.get_world_size() > 1
        self._number = 0
        """Counts the saves of this process, so that each draft has a name of its own."""
        self._plan: save_plan.SavePlan | None = None
        """The plan of the last save, reused by the next one if the tensors are the same."""
        self._staging = Staging(self._options.async_mode == "async_with_pinned_mem")
        self.best = Best(config)
        self.interval = Interval(self._options)
        self.saving = Saving()
        # Only rank 0's clock decides: by their own clocks ranks would save at different steps.
        self.saving.by_clock = self._saves and self._options.interval_type != "steps"
        if self._is_first and self.saving.by_clock:
            self.saving.is_time = self.interval.is_time
        self.is_due = IsDue(self._options, self.saving, self.best)
        self.saved_step = 0
        """The newest step on disk, or the step that the run resumed from; equal on all ranks."""
        self.failures_in_a_row = self.skipped = 0
        self._export_is_due = self._export_must = False
        self.export_seconds = 0.0
        """How long the newest save waited for an export, which is not part of the save."""
        self.exporter: Exporter | None = None
        """Writes some of the checkpoints once more, in another format."""
        self.on_saved: Callable[[int], object] = lambda step: None
        """Called with the step of each checkpoint once it is complete."""
        self.on_written: Callable[[float], object] = lambda seconds: None
        """Called with the seconds that a save in the background took until it was on disk."""

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
        """Save weights, the rest of the tensors and the facts, and delete what retention does not keep.

        With ``checkpoint.async_mode`` it returns when the tensors are copied, unless it is the ``last`` or is to
        ``wait``; ``poll`` completes it later. While an earlier save is in flight it waits for at most
        ``checkpoint.max_stall_seconds`` and is then skipped; a new best checkpoint waits as long as it takes.

        Raises:
            StorageError: on all ranks, when one could not write; older checkpoints are as they were. Not raised where
                ``checkpoint.on_save_error`` is "continue", unless it is the last, is to wait, or the third in a row.
            ConfigError: when another run has taken over the folder.
            NumericalError: on all ranks, before anything is written, when replicas of a tensor differ; names it, the
                odd ranks, and the last checkpoint whose replicas were equal.
        """
        begun = time.monotonic()
        # The last save is neither skipped nor written in the background: the process ends after it.
        must_succeed = last or wait

        # One save at a time: wait for the one in flight, or skip this one.
        if not self.finish(None if must_succeed or self.best.is_new(step) else self._options.max_stall_seconds):
            self.skipped += 1
            self.saving.clear_flags()
            self.interval.restart()
            assert self.saving.writing is not None
            logger.warning(
                f"the save of step {step} is skipped: that of step {self.saving.writing.step} is still being written "
                f"after checkpoint.max_stall_seconds={self._options.max_stall_seconds} ({self.skipped} in all); save "
                "less often, or to faster storage"
            )
            return

        # What is saved: the last checkpoint may be the weights alone, in the type of exports.
        if last and self._options.last_save_model_only:
            weights = tensor_files.cast(weights, self._options.export_dtype.replace("auto", "float32"))
            rest = {}
            facts = {**facts, "weights_only": True}
        tensors = {**weights, **rest}
        facts = {"weights_only": False, **facts}

        # Who writes what (a collective). The last plan is reused as long as every rank has the same tensors.
        shares = self._plan = save_plan.plan(tensors, self._plan)

        # Only one rank writes a replicated part, so a replica that differs would go unnoticed.
        if self._options.compare_replicas:
            odd = replica_comparison.find_odd(tensors, shares.held, facts.get("state") or {})
            if odd:
                self.refuse(step, odd)
            facts[COMPARED] = holders.num_replicated(shares.held)

        # Write it now, or copy it and write in the background. Errors are equal on all ranks, so all ranks tolerate one
        # or none does.
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
                self._export_if_due(step, must_succeed or self._options.async_mode == "disabled", must_succeed)
        # The flags that ranks have exchanged in this step are about the save before this one.
        self.saving.clear_flags()
        self.interval.note(time.monotonic() - begun - self.export_seconds)
        self.interval.restart()

    def poll(self) -> None:
        """Finish the background save, once every rank knows that all have written (see ``Saving``).

        Raises:
            StorageError: as ``save`` does.
        """
        if self.saving.writing is not None and self.saving.has_ended(dist.get_world_size()):
            self._finish_one()

    def finish(self, limit_seconds: float | None = None) -> bool:
        """Wait for saves and exports in flight; False, on all ranks, if one has not ended within the limit.

        Raises:
            StorageError: as ``save`` does.
        """
        begun = time.monotonic()
        # A loop, since an export may begin when a save ends.
        while self.saving.writing is not None:
            left = None if limit_seconds is None else limit_seconds - (time.monotonic() - begun)
            if not self._finish_one(left):
                return False
        return True

    def _finish_one(self, limit_seconds: float | None = None) -> bool:
        """Wait for the save or export in flight and handle its result (a collective); False past the limit."""
        writing = self.saving.writing
        assert writing is not None
        if not async_save.ended_everywhere(writing, limit_seconds):
            return False
        self.saving.writing = None
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
                logger.warning(f"{self._name(writing)} was cancelled: there was no time for it")
            else:
                logger.info(f"saved {self._name(writing)}")
        return True

    def export_last(self, step: int) -> None:
        """Export the checkpoint of the last step, if that is wanted.

        Raises:
            StorageError: when it cannot be written.
        """
        self._export_is_due = self.exporter is not None and self.exporter.is_due(step, True)
        self._export_if_due(step, wait=True, must=True)

    def cancel_export(self) -> None:
        """Cancel an export in flight and begin no other: there is no time for one."""
        self._export_is_due = False
        self.exporter = None
        writing = self.saving.writing
        if writing is not None and writing.is_export:
            writing.cancel()
            self.finish()

    def close(self) -> None:
        """Release the lease of the folder. A save in flight, when a run ends with an error, gets a few seconds."""
        # Not a collective: other ranks may be gone. Rank 0's thread commits once all have written, so only rank 0 knows
        # whether there is a checkpoint.
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
        # The lease is released last: until then no other run may write the folder.
        if self._is_first:
            self._storage.abandon_all()
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
        self, step: int, tensors: Mapping[str, Tensor], shares: save_plan.SavePlan, facts: Mapping[str, Any]
    ) -> None:
        """Write the checkpoint while all ranks wait (a collective)."""
        nonce, _ = first_rank(lambda: self._prepare(step, sum(shares.bytes_of)))
        draft = self._draft(step, nonce)
        # Every rank writes its file, or sends it to rank 0 where only that one has access to the folder.
        if self._relays:
            written = all_ranks(lambda: [*map(_fields, rank0_storage.write(tensors, shares, draft))])
        else:
            written = all_ranks_to_first(lambda: _fields(tensor_files.write(tensors, shares, draft)))
        stored_files = [TensorFile(*fields) for fields in written if fields]
        # Commit after all have written, and delete old checkpoints after the commit.
        first_rank(lambda: self._commit(draft, self._manifest(step, stored_files, shares, facts)))
        first_rank(lambda: self._tidy(step, facts))
        if self._relays:
            node_disks.note(self._run_folder, [step])

    def _begin(
        self, step: int, tensors: Mapping[str, Tensor], shares: save_plan.SavePlan, facts: Mapping[str, Any]
    ) -> None:
        """Copy what this rank writes, and leave the rest to a thread (a collective)."""
        rank = dist.get_rank()
        size = dist.get_world_size()
        staged: list[memoryview] = []

        def copy_and_prepare() -> list[str] | None:
            local_tensors = [tensors[name] for name in shares.names_of(rank)]
            staged.append(self._staging.copy(local_tensors, shares.bytes_of[rank]))
            return self._prepare(step, sum(shares.bytes_of)) if self._is_first else None

        # After this every rank has its copy, so training may continue and change the tensors.
        nonce, token = all_ranks(copy_and_prepare)
        draft = self._draft(step, nonce)
        others = [r for r in range(1, size) if shares.bytes_of[r]]

        # In a thread, without collectives: their order relative to the trainer's would differ between ranks.
        def write(check_cancelled: Callable[[], None]) -> None:
            stored_files = []
            if shares.bytes_of[rank]:
                blocks = async_save.pieces(staged[0], check_cancelled)
                stored_files.append(tensor_files.write_blocks(blocks, rank, size, draft))
            if not self._is_first:
                for file in stored_files:
                    async_save.write_marker(draft, rank, token, file)
                return
            stored_files += [async_save.wait_for_marker(draft, r, token, check_cancelled) for r in others]
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
        last_good = broadcast_json(self._newest_compared() if self._is_first and self._saves else None)
        fix = "start from scratch"
        good = "no checkpoint is known to be without it"
        if last_good is not None:
            fix = f"continue with checkpoint.load_step={last_good}"
            good = f"the last checkpoint known to be without it is {self._folder / f'step-{last_good}'}"
        cause = "a device computes wrongly, or ranks ran different programs"
        subject = f"step {step}: {odd}, but replicas must be bitwise equal"
        raise NumericalError(
            fix_first(subject, f"{fix}, without the device of those ranks", cause, f"step {step} was not saved", good)
        )

    def _newest_compared(self) -> int | None:
        """The newest step of this run on disk whose manifest says that replicas were compared."""
        with contextlib.suppress(OSError):
            for step in reversed(retention.steps(self._folder)):
                with contextlib.suppress(CheckpointError):
                    path = self._folder / f"step-{step}"
                    if step <= self.saved_step and COMPARED in manifest.read(path).facts and retention.is_whole(path):
                        return step
        return None

    def _manifest(
        self, step: int, stored_files: list[TensorFile], shares: save_plan.SavePlan, facts: Mapping[str, Any]
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
        """Export a checkpoint that is on disk: in the background, unless it is to ``wait``."""
        if not self._export_is_due:
            return
        self._export_is_due = False
        self._export_must = must
        assert self.exporter is not None and isinstance(self._folder, Path)
        size = 1 if self._relays else dist.get_world_size()
        begun = time.monotonic()
        try:
            self.saving.writing = exports.begin(self.exporter, self._folder / f"step-{step}", self._lease, size)
        except BaseException as error:
            self._tolerate(error, must)
        if wait:
            self.finish()
            self.export_seconds = time.monotonic() - begun

    def _name(self, writing: Writing) -> Place:
        return self._folder / f"step-{writing.step}{retention.HUB if writing.is_export else ''}"

    def _saved(self, step: int) -> None:
        self.saved_step = step
        self.failures_in_a_row = 0
        self.on_saved(step)
        logger.info(f"saved checkpoint {self._folder / f'step-{step}'}")

    def _tolerate(self, error: BaseException, must: bool) -> None:
        """Raise the error of a save, unless the run is to continue without it; the same on all ranks."""
        self.failures_in_a_row += 1
        tolerated = self._options.on_save_error == "continue" and self.failures_in_a_row <= FAILURES_IN_A_ROW
        if must or not tolerated or not isinstance(error, StorageError):
            raise error
        logger.warning(
            f"{error}: training continues with the checkpoint of step {self.saved_step} as the newest "
            f"(checkpoint.on_save_error; {self.failures_in_a_row} of {FAILURES_IN_A_ROW} in a row)"
        )

    def _prepare(self, step: int, planned: int) -> list[str]:
        """Create the draft of a save; returns the nonce of the lease, which ends its name, and a token of the save."""
        self._lease.acquire()
        self._lease.check()
        self._storage.prepare(self._draft(step, self._lease.nonce), planned)
        return [self._lease.nonce, secrets.token_hex(4)]

    def _commit(self, draft: Place, stored: Manifest) -> None:
        self._storage.publish(draft, stored, self._lease.check)

    def _tidy(self, saved: int, facts: Mapping[str, Any]) -> None:
        """After a commit: name the best one, and delete what retention does not keep."""
        self.best.point(self._folder, facts.get("best"))
        options = self._options
        keep = options.keep_latest_k
        retention.delete_old(self._folder, saved, keep, options.keep_every_n_steps, self.best.kept, self._origin)


def _fields(file: TensorFile | None) -> list[Any] | None:
    return None if file is None else [file.name, file.bytes, file.sha256]
