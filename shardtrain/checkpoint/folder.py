"""The folder of checkpoints: ``step-N/`` each, whole or not there at all, and verified before it is used.

A checkpoint is written as ``step-N.tmp-<run>``, put on disk, and renamed when every rank has written; what is then in
``step-N`` never changes. ``manifest.py`` says what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain import __version__
from shardtrain.checkpoint import manifest, relay, retention
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.agree import exchange, together
from shardtrain.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from shardtrain.checkpoint.storage import Place, storage_of
from shardtrain.config.schema import Checkpoint, Config
from shardtrain.errors import CheckpointError
from shardtrain.log import logger


class Checkpoints:
    """Saves and finds the checkpoints of a run; all methods but ``steps`` and ``is_due`` are collectives."""

    def __init__(self, config: Config) -> None:
        self._options: Checkpoint = config.checkpoint
        self._storage = storage_of(config.job.dump_folder, config.checkpoint.folder)
        self._folder, self._lease = self._storage.folder, self._storage.lease
        self._is_first = dist.get_rank() == 0
        self._saves = 0
        self._relays = self._options.storage == "first_node" and dist.get_world_size() > 1
        self._verified: tuple[Place, Manifest] | None = None

    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        return retention.steps(self._folder)

    def to_continue(self) -> Place | None:
        """The checkpoint to continue from, its bytes verified, or None for a fresh start.

        Without ``checkpoint.load_step`` it is the newest that is good: what is damaged is passed over, and said aloud.

        Raises:
            CheckpointError: when the step asked for is missing or damaged, or none of those that are there is good.
            ConfigError: when another run is writing this folder.
        """
        if not self._options.enable:
            return None
        if not self._options.load_only:
            together(self._begin_to_write, only_first=True)
            if not self._relays:
                relay.check_seen_by_all(self._folder, self._lease.nonce)
        # the first rank decides: where a shared folder lags, ranks would start from different steps
        found, without = exchange([self.steps(), self._without_manifest()])[0]
        if self._options.load_step != -1:
            return self._chosen(found)
        damages = [f"step-{step} has no {MANIFEST}" for step in without]
        for step in reversed(found):
            path = self._folder / f"step-{step}"
            damage = self._verify(path)
            if not damage:
                for passed in damages:
                    logger.warning(f"{passed}: passed over, continuing from step-{step} in {self._folder}")
                return path
            damages.append(damage)
        if damages:
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be used: {'; '.join(damages[:3])}; mend it, or move the folder "
                "away to begin anew"
            )
        return None

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether a checkpoint is to be saved after this step."""
        options = self._options
        if not options.enable or options.load_only:
            return False
        first = options.enable_first_step_checkpoint and step == 1
        return first or step == total_steps or step % options.interval == 0

    def save(
        self, step: int, weights: Mapping[str, Tensor], rest: Mapping[str, Tensor], facts: Mapping[str, Any], last: bool
    ) -> None:
        """Save weights, the rest of the tensors and the facts, and delete what is older than keep_latest_k.

        Raises:
            StorageError: on all ranks, when one could not write; older checkpoints are as they were.
            ConfigError: when another run has taken over the folder.
        """
        weights_only = last and self._options.last_save_model_only
        if weights_only:
            weights, rest = tensor_files.cast(weights, self._options.export_dtype), {}
        tensors = {**weights, **rest}
        self._saves += 1
        draft = self._storage.draft(step, exchange(self._lease.nonce)[0], self._saves)
        shares = tensor_files.plan(tensors)
        try:
            planned = sum(shares.bytes_of)
            together(lambda: self._prepare(draft, planned), only_first=True)
            if self._relays:
                written = together(lambda: [*map(_fields, relay.write(tensors, shares, draft))])[0]
            else:
                written = together(lambda: _fields(tensor_files.write(tensors, shares, draft)))
            stored = Manifest(
                step=step,
                world_size=dist.get_world_size(),
                run=self._lease.nonce,
                created_by=f"shardtrain {__version__}, torch {torch.__version__}",
                files=tuple(StoredFile(*fields) for fields in written if fields),
                tensors=shares.tensors,
                facts={**facts, "weights_only": weights_only},
            )
            together(lambda: str(self._storage.publish(draft, stored, self._lease.check)), only_first=True)
        except BaseException:
            if self._is_first:
                self._storage.abandon(draft)
            raise
        logger.info(f"saved checkpoint {self._folder / f'step-{step}'}")
        together(lambda: self._delete_old(step), only_first=True)

    def load(self, path: Place, weights: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill weights and the rest in place and give the facts.

        Raises:
            CheckpointError: on all ranks, before a tensor is touched, when the checkpoint is damaged or does not fit.
        """
        stored = self._verified_manifest(path)
        if stored.facts.get("weights_only") and rest:
            raise CheckpointError(
                f"checkpoint {path} holds weights only, so the run cannot be continued from it; start another run with "
                "checkpoint.initial_load_path, or save with checkpoint.last_save_model_only=false"
            )
        tensors = {**weights, **rest}
        tensor_files.check_names(tensors, stored, path)

        def read() -> None:
            try:
                (relay if self._relays else tensor_files).read(tensors, stored, path)
            except OSError as error:
                raise CheckpointError(f"checkpoint {path} cannot be loaded: {error}") from error

        together(read)
        return dict(stored.facts)

    def facts(self, path: Place) -> dict[str, Any]:
        """The facts of a checkpoint, verified; raises CheckpointError on all ranks when it is damaged."""
        return dict(self._verified_manifest(path).facts)

    def _verified_manifest(self, path: Place) -> Manifest:
        if self._verified is None or self._verified[0] != path:
            damage = self._verify(path)
            if damage:
                raise CheckpointError(f"checkpoint {path} cannot be used: {damage}; use another one")
        assert self._verified is not None
        return self._verified[1]

    def close(self) -> None:
        """Let other runs write the folder."""
        if self._is_first:
            self._lease.release()

    def _chosen(self, found: list[int]) -> Place:
        wanted = self._options.load_step
        if wanted not in found:
            known = ", ".join(map(str, found)) or "none"
            raise CheckpointError(
                f"checkpoint.load_step={wanted}: {self._folder} has no such step; it has {known}; use one of those, "
                "or -1 for the newest"
            )
        damage = self._verify(self._folder / f"step-{wanted}")
        if damage:
            raise CheckpointError(
                f"checkpoint.load_step={wanted}: {damage}; choose another step, or -1 for the newest that is good"
            )
        later = [step for step in found if step > wanted]
        if later:
            logger.warning(
                f"checkpoint.load_step={wanted} is not the newest: steps {', '.join(map(str, later))} stay in "
                f"{self._folder}, and a start with load_step=-1 would take the newest of them until this run passes it"
            )
        return self._folder / f"step-{wanted}"

    def _verify(self, path: Place) -> str:
        """What is wrong with a checkpoint's bytes, all read, shared out over the ranks; empty when nothing is."""
        problem, text = "", None
        try:
            text = manifest.read_bytes(path).decode("latin-1") if self._is_first else None
        except CheckpointError as error:
            problem = str(error)
        problem, text = exchange([problem, text])[0]
        if problem:
            return str(problem)
        try:
            stored = manifest.parse(text.encode("latin-1"), path)
        except CheckpointError as error:
            return str(error)  # the same bytes on every rank: the same refusal
        if retention.step_of(path) not in (None, stored.step):
            return f"checkpoint {path}: {MANIFEST} is of step {stored.step}"
        damages = exchange((relay if self._relays else tensor_files).find_damaged_file(stored, path))
        damage = next((f"checkpoint {path}: {found}" for found in damages if found), "")
        if not damage:
            self._verified = path, stored
        return damage

    def _without_manifest(self) -> list[int]:
        if not isinstance(self._folder, Path):
            return []  # an object store has no folders: without a manifest there is no checkpoint
        return sorted({*retention.step_folders(self._folder)} - {*self.steps()})

    def _begin_to_write(self) -> None:
        self._lease.acquire()
        self._storage.sweep()

    def _prepare(self, draft: Place, planned: int) -> None:
        self._lease.acquire()
        self._lease.check()
        self._storage.prepare(draft, planned)

    def _delete_old(self, saved: int) -> None:
        keep = self._options.keep_latest_k
        # steps after this one are another history, which the user went back from: no part of what is counted here
        own = [step for step in self.steps() if step <= saved]
        if not keep or len(own) <= keep:
            return
        whole = {step for step in own[-keep:] if retention.is_whole(self._folder / f"step-{step}")}
        if len(whole) < keep:
            whole = {step for step in own if retention.is_whole(self._folder / f"step-{step}")}
        for step in retention.to_delete(own, keep, whole):
            try:
                retention.discard(self._folder / f"step-{step}")
            except OSError as error:  # the new one is safe, and the next save tries again
                logger.warning(f"cannot delete the old checkpoint {self._folder / f'step-{step}'}: {error.strerror}")


def _fields(file: StoredFile | None) -> list[Any] | None:
    return None if file is None else [file.name, file.bytes, file.sha256]


def read_facts(path: Place) -> dict[str, Any]:
    """The counters of a run in a checkpoint; raises CheckpointError when they cannot be read."""
    return dict(manifest.read(path).facts)
