"""Find, verify and load the checkpoints ``step-N/`` of a run's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from shardtrain.checkpoint import (
    choice,
    manifest,
    node_disks,
    rank0_storage,
    retention,
    tensor_reader,
)
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.collectives import all_ranks, broadcast_json, first_rank, first_word
from shardtrain.checkpoint.lease import LEASE, Lease
from shardtrain.checkpoint.manifest import Manifest
from shardtrain.checkpoint.save import Saver
from shardtrain.checkpoint.snapshots import CompleteSnapshot, Snapshots
from shardtrain.checkpoint.storage import Place
from shardtrain.checkpoint.verification import verify
from shardtrain.config.schema import Config
from shardtrain.utils import storage_errors
from shardtrain.utils.errors import CheckpointError, ConfigError
from shardtrain.utils.log import logger


class Checkpoints(Saver):
    """Find, load and save the checkpoints of a run. All methods except ``steps`` are collectives.

    ``save.py`` implements saving.

    Attributes:
        snapshots: Snapshots in host memory, from which a restart continues. None without them.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._verified: tuple[Place, Manifest] | None = None
        self._holder = 0  # the rank whose node has the checkpoint that was verified last
        self.snapshots: Snapshots | None = None
        self._snapshot: CompleteSnapshot | None = None
        self._newest_on_disk = 0
        self._is_from_memory = False

    @property
    def folder(self) -> Place:
        """The folder or address of the run's checkpoints."""
        return self._folder

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint, in ascending order."""
        return retention.steps(self._folder)

    def take_run_folder(self) -> None:
        """Make this run the only one that writes ``job.dump_folder``, until ``close`` (a collective).

        - A run that saves to a checkpoint folder inside ``job.dump_folder`` takes only the lease of the
          checkpoint folder, unless the run folder has a lease file.
        - All other runs take the lease of the run folder. If the checkpoint folder is inside the run
          folder, they also check, without waiting, that no live run of this host holds its lease.

        Raises:
            FolderTaken: another run writes the folder.
        """
        first_rank(self._take_run_folder)

    def _take_run_folder(self) -> None:
        run_folder = self._run_folder
        saves = self._options.enable and not self._options.load_only
        is_inside = isinstance(self._folder, Path) and self._folder.is_relative_to(run_folder)
        # In this case, the lease of the checkpoint folder protects the run folder, too.
        if saves and is_inside and not os.path.lexists(run_folder / LEASE):
            return
        self._run_lease = Lease(run_folder)
        try:
            self._run_lease.acquire()
            if is_inside and not saves:
                self._lease.refuse_if_held_here()
        except OSError as error:
            # For example, the filesystem has no links. Checkpoints require the lease, and metrics do not.
            problem = storage_errors.cannot("lock", str(run_folder), error)
            logger.warning(
                f"{problem}; start no other run in this job.dump_folder until this is fixed"
            )

    def to_continue(self) -> Place | None:
        """Return the verified checkpoint to resume from, or None to start from scratch.

        Without ``checkpoint.load_step``, it is the newest undamaged checkpoint. Damaged checkpoints are
        skipped with a warning. A newer snapshot in host memory takes precedence.

        Raises:
            CheckpointError: the requested step is missing or damaged, or all checkpoints are damaged.
            ConfigError: another run is writing this folder.
        """
        if not self._options.enable:
            return None

        # Acquire the lease to write the folder before reading it. A run that only loads needs no lease.
        if not self._options.load_only:

            def take_folder() -> None:
                self._lease.acquire()
                self._storage.sweep()

            first_rank(take_folder)
            if not self._relays:
                rank0_storage.check_seen_by_all(self._folder, self._lease.nonce)
        self._check_writers(self._folder)

        # Choose the newest undamaged checkpoint. Warn about skipped ones only once it is known.
        holders, incomplete, notes = self._survey()
        if self._options.load_step != -1:
            return self._continued(self._requested(holders))
        self._newest_on_disk = max(holders, default=0)
        # A snapshot is only useful if it is newer than all saved checkpoints, also those on disks of lost
        # nodes.
        if self.snapshots is not None:
            noted_steps = [step for step, _ in notes]
            newest_saved = max([*holders, *noted_steps], default=-1)
            self._snapshot = self.snapshots.find(newer_than=newest_saved)
        if self._snapshot is not None:
            self._verified = self._snapshot.path, self._snapshot.stored
            return self._continued(self._snapshot.path)
        # Without a snapshot, do not silently continue from an old checkpoint if a newer one was lost with its
        # node.
        newest_seen = max([*holders, *incomplete], default=-1)
        node_disks.refuse_lost(newest_seen, notes, self._run_folder)
        damages = list(incomplete.values())
        for step in sorted(holders, reverse=True):
            path = self._folder / f"step-{step}"
            damage = self._verify(path, holders[step])
            if not damage:
                for skipped in damages:
                    logger.warning(
                        f"{skipped}: skipped, continuing from step-{step} in {self._folder}"
                    )
                return self._continued(path)
            damages.append(damage)
        if damages:
            reasons = "; ".join(damages[:3])
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be used: {reasons}; fix it, or move the folder "
                "away to start from scratch"
            )
        return None

    def _continued(self, path: Place) -> Place:
        """Adopt the run ID of the verified checkpoint at ``path``, from which this run continues."""
        assert self._verified is not None
        _, stored = self._verified
        self._origin = stored.origin
        return path

    def choose(self, step: str | None) -> choice.ChosenCheckpoint:
        """Return the checkpoint that ``--step`` names; see ``choice.choose``."""
        self._check_writers(self._folder)
        reader = 0 if self._relays else None
        chosen = choice.choose(self._folder, step, partial(verify, reader=reader))
        self._verified = chosen.path, chosen.stored
        return chosen

    def load(
        self,
        path: Place,
        weights: Mapping[str, Tensor],
        rest: Mapping[str, Tensor],
        use_ema: bool = False,
    ) -> dict[str, Any]:
        """Load weights and the other tensors in place, and return the facts.

        Args:
            use_ema: load the averages of the trained weights into the weights.

        Raises:
            CheckpointError: on all ranks, before a tensor is changed, if the checkpoint is damaged
                or does not fit.
        """
        stored = self._verified_manifest(path)
        if use_ema:
            stored = stored.with_averages(path)
        if stored.facts.get("weights_only") and rest:
            raise CheckpointError(
                f"checkpoint {path} contains only weights, so the run cannot resume from it; "
                "start another run with checkpoint.initial_load_path, "
                "or save with checkpoint.last_save_model_only=false"
            )
        # Check all names before the first tensor changes, because a half-loaded model cannot be used.
        tensors = {**weights, **rest}
        tensor_files.check_names(tensors, stored, path)

        def read() -> None:
            try:
                if self._relays:
                    rank0_storage.read(tensors, stored, path, self._holder)
                else:
                    tensor_reader.read(tensors, stored, path)
            except OSError as error:
                raise CheckpointError(f"checkpoint {path} cannot be loaded: {error}") from error

        self._is_from_memory = self._snapshot is not None and path == self._snapshot.path
        if self._is_from_memory:
            assert self.snapshots is not None and self._snapshot is not None
            self.snapshots.load(tensors, self._snapshot)
            newest = "no checkpoint is on disk"
            if self._newest_on_disk:
                newest = f"the newest checkpoint on disk is of step {self._newest_on_disk}"
            logger.info(f"restored step {stored.step} from snapshots in host memory; {newest}")
        else:
            all_ranks(read)
        return dict(stored.facts)

    def saved_step_after(self, step: int) -> int:
        """Return the newest step on disk, after the state of ``step`` was loaded."""
        # A snapshot is not on disk, and is lost with the memory of its nodes.
        if self._is_from_memory:
            return self._newest_on_disk
        return step

    def take_snapshot(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        rest: Mapping[str, Tensor],
        facts: Mapping[str, Any],
    ) -> None:
        """Copy the training state to host memory; see ``Snapshots.take``. The arguments are those of ``save``."""
        assert self.snapshots is not None
        tensors = {**weights, **rest}
        facts = {"weights_only": False, **facts}
        self.snapshots.take(step, tensors, facts, self._lease.nonce, self._origin)

    def close(self) -> None:
        if self.snapshots is not None:
            self.snapshots.close()
        super().close()

    def facts(self, path: Place) -> dict[str, Any]:
        """Verify a checkpoint and return its facts. Raises CheckpointError on all ranks if it is damaged."""
        return dict(self._verified_manifest(path).facts)

    def has_averages(self, path: Place) -> bool:
        """True if a checkpoint has averages of the trained weights. Raises as ``facts`` does."""
        return self._verified_manifest(path).has_averages

    def _verified_manifest(self, path: Place) -> Manifest:
        self._check_writers(path)
        # Verifying reads every byte of the checkpoint, so do it once.
        if self._verified is None or self._verified[0] != path:
            damage = self._verify(path)
            if damage:
                raise retention.unusable(path, damage)
        assert self._verified is not None
        _, stored = self._verified
        return stored

    def newest_good(self, last: int, started_at: int) -> Place | None:
        """Return the newest undamaged checkpoint of this run up to step ``last``, verified, or None.

        Checkpoints of this run are those that this process has saved, and those up to the step at
        which it started.
        """
        self.finish()
        holders, _, _ = self._survey()
        candidates = [step for step in holders if step <= last]
        for step in sorted(candidates, reverse=True):
            path = self._folder / f"step-{step}"
            damage = self._verify(path, holders[step])
            if damage:
                logger.warning(f"{damage}: skipped")
                continue
            assert self._verified is not None
            _, stored = self._verified
            # A later checkpoint in the folder may be of another run.
            is_of_this_run = step <= started_at or stored.run == broadcast_json(self._lease.nonce)
            if is_of_this_run and not stored.facts.get("weights_only"):
                return path
        return None

    def forget(self, steps: range, started_at: int) -> None:
        """Delete checkpoints of this run that a rollback has undone, so no later start resumes from them."""

        def discard() -> None:
            for step in self.steps():
                if step not in steps:
                    continue
                path = self._folder / f"step-{step}"
                is_of_this_run = step <= started_at or manifest.read(path).run == self._lease.nonce
                if is_of_this_run and retention.is_of(path, self._origin):
                    retention.discard(path)

        first_rank(discard)
        if self._relays:
            # Discard on all nodes: otherwise the next start finds these checkpoints on a node that
            # saved earlier.
            all_ranks(lambda: discard() if node_disks.speaks_for_its_node() else None)
            holders, _, _ = self._survey()
            node_disks.note(self._run_folder, holders)

    def _check_writers(self, folder: Place) -> None:
        """Reject a folder that every user can write: hashes detect damage, not a planted checkpoint."""
        # An object store has its own access control.
        can_check = isinstance(folder, Path) and (self._is_first or self._relays)
        exposed = ""
        if can_check:
            exposed = retention.open_to_all(Path(str(folder)))
        writable = first_word(exposed)
        if writable and not self._options.allow_shared_writable:
            raise ConfigError(
                f"checkpoint.folder: {writable} is writable for every user, "
                "who could replace the weights; run "
                f'"chmod o-w {writable}", or set checkpoint.allow_shared_writable=true'
            )

    def _requested(self, holders: dict[int, list[int]]) -> Place:
        """Verify the checkpoint of ``checkpoint.load_step``, and return it. Warn about newer ones."""
        wanted = self._options.load_step
        steps = sorted(holders)
        if wanted not in steps:
            raise retention.no_such_step(self._folder, wanted, steps)
        damage = self._verify(self._folder / f"step-{wanted}", holders[wanted])
        if damage:
            raise CheckpointError(
                f"checkpoint.load_step={wanted}: {damage}; choose another step, or -1 for the newest that is good"
            )
        # A restart with the default options would silently continue from one of these.
        later = [step for step in steps if step > wanted]
        if later:
            later_steps = ", ".join(map(str, later))
            logger.warning(
                f"checkpoint.load_step={wanted} is not the newest: steps "
                f"{later_steps} stay in {self._folder}, "
                "and a start with load_step=-1 loads the newest of them until this run passes it"
            )
        return self._folder / f"step-{wanted}"

    def _survey(self) -> tuple[dict[int, list[int]], dict[int, str], list[Any]]:
        """Find which ranks hold which checkpoints (a collective); see ``node_disks.survey``."""
        return node_disks.survey(
            self._folder, self._run_folder, self._options.storage == "first_node"
        )

    def _verify(self, path: Place, holders: Sequence[int] = (0,)) -> str:
        """Return a description of the damage to a checkpoint, or "" and remember its manifest (a collective).

        ``holders`` are ranks whose nodes have a copy. The first one with a good copy will read it
        for all ranks.
        """
        damages = []
        for holder in holders:
            host = ""
            if holder:
                host = node_disks.host_of(holder)
            # With one reader, the nodes do not share the folder, and only this rank sees the files.
            reader = None
            if self._relays:
                reader = holder
            stored, damage = verify(path, reader)
            if stored is not None:
                self._verified = path, stored
                self._holder = holder
                if host:
                    logger.warning(
                        f"{path} is on {host}, and not on the node of rank 0, which keeps later checkpoints",
                    )
                return ""
            if host:
                damage += f" (on {host})"
            damages.append(damage)
        return "; ".join(damages)


def read_facts(path: Place) -> dict[str, Any]:
    """Return the facts (counters of the run) of a checkpoint. Raises CheckpointError if it cannot be read."""
    return dict(manifest.read(path).facts)
