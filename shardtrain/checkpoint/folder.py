"""The folder of checkpoints: ``step-N/`` each, whole or not there at all, and verified before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardtrain.checkpoint import manifest, rank0_storage, retention, tensor_reader
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.collectives import all_ranks, broadcast_json, first_rank, first_word
from shardtrain.checkpoint.manifest import MANIFEST, Manifest
from shardtrain.checkpoint.save import Saver
from shardtrain.checkpoint.storage import Place
from shardtrain.config.schema import Config
from shardtrain.utils.errors import CheckpointError, ConfigError
from shardtrain.utils.log import logger


class Checkpoints(Saver):
    """Finds and loads the checkpoints of a run, and saves them (``save.py``); all but ``steps`` are collectives."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._verified: tuple[Place, Manifest] | None = None

    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        return retention.steps(self._folder)

    def to_continue(self) -> Place | None:
        """The checkpoint to continue from, its bytes verified, or None for a fresh start.

        Without ``checkpoint.load_step`` it is the newest that is good: what is damaged is skipped, with a warning.

        Raises:
            CheckpointError: when the step asked for is missing or damaged, or none of those that are there is good.
            ConfigError: when another run is writing this folder.
        """
        if not self._options.enable:
            return None

        # The right to write the folder, before anything in it is looked at: a run that loads alone needs none.
        if not self._options.load_only:

            def take_folder() -> None:
                self._lease.acquire()
                self._storage.sweep()

            first_rank(take_folder)
            if not self._relays:
                rank0_storage.check_seen_by_all(self._folder, self._lease.nonce)
        self._check_writers(self._folder)

        # The first rank decides which steps there are: where a shared folder lags, ranks would start from different
        # ones. A folder without a manifest is not a checkpoint, and is named below; an object store has no folders.
        steps = self.steps()
        without = list[int]()
        if isinstance(self._folder, Path):
            without = sorted({*retention.step_folders(self._folder)} - {*steps})
        steps, without = broadcast_json([steps, without])
        if self._options.load_step != -1:
            return self._chosen(steps)

        # The newest that is good; what is skipped on the way is said once that is known.
        ways = [manifest.way_from_dcp(self._folder / f"step-{step}") for step in without]
        damages = [
            f"step-{step} has no {MANIFEST}{f': {way}' if way else ''}" for step, way in zip(without, ways, strict=True)
        ]
        for step in reversed(steps):
            path = self._folder / f"step-{step}"
            damage = self._verify(path)
            if not damage:
                for skipped in damages:
                    logger.warning(f"{skipped}: skipped, continuing from step-{step} in {self._folder}")
                return path
            damages.append(damage)
        if damages:
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be used: {'; '.join(damages[:3])}; fix it, or move the folder "
                "away to start from scratch"
            )
        return None

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

        reader = rank0_storage if self._relays else tensor_reader

        def read() -> None:
            try:
                reader.read(tensors, stored, path)
            except OSError as error:
                raise CheckpointError(f"checkpoint {path} cannot be loaded: {error}") from error

        all_ranks(read)
        return dict(stored.facts)

    def facts(self, path: Place) -> dict[str, Any]:
        """The facts of a checkpoint, verified; raises CheckpointError on all ranks when it is damaged."""
        return dict(self._verified_manifest(path).facts)

    def _verified_manifest(self, path: Place) -> Manifest:
        self._check_writers(path)
        if self._verified is None or self._verified[0] != path:
            damage = self._verify(path)
            if damage:
                raise retention.unusable(path, damage)
        assert self._verified is not None
        return self._verified[1]

    def newest_good(self, last: int, started_at: int) -> Place | None:
        """The newest whole checkpoint of this run's own history up to step ``last``, verified; None without one.

        Own is what this process has saved, and what it found up to the step at which it started.
        """
        self.finish()
        for step in [step for step in reversed(broadcast_json(self.steps())) if step <= last]:
            path = self._folder / f"step-{step}"
            damage = self._verify(path)
            if damage:
                logger.warning(f"{damage}: skipped")
                continue
            assert self._verified is not None
            stored = self._verified[1]
            own = step <= started_at or stored.run == broadcast_json(self._lease.nonce)
            if own and not stored.facts.get("weights_only"):
                return path
        return None

    def forget(self, steps: range, started_at: int) -> None:
        """Delete checkpoints of this run's own history that it has undone: a later start would take it up again."""

        def discard() -> None:
            for step in self.steps():
                path = self._folder / f"step-{step}"
                if step in steps and (step <= started_at or manifest.read(path).run == self._lease.nonce):
                    retention.discard(path)

        first_rank(discard)

    def _check_writers(self, folder: Place) -> None:
        """Refuse what anybody may have put there: hashes find damage, and not whose checkpoint it is."""
        looks = self._is_first and isinstance(folder, Path)  # who may write a store, the store decides
        writable = broadcast_json(retention.open_to_all(Path(str(folder))) if looks else "")
        if writable and not self._options.allow_shared_writable:
            raise ConfigError(
                f"checkpoint.folder: {writable} can be written by every user, who could put weights of his there; run "
                f'"chmod o-w {writable}", or set checkpoint.allow_shared_writable=true'
            )

    def _chosen(self, found: list[int]) -> Place:
        wanted = self._options.load_step
        if wanted not in found:
            raise retention.no_such_step(self._folder, wanted, found)
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
        # The manifest is read once, by the first rank, and checked by all: latin-1 makes a text of any bytes.
        problem = ""
        text = None
        try:
            text = manifest.read_bytes(path).decode("latin-1") if self._is_first else None
        except CheckpointError as error:
            problem = str(error)
        problem, text = broadcast_json([problem, text])
        if problem:
            return str(problem)
        try:
            stored = manifest.parse(text.encode("latin-1"), path)
        except CheckpointError as error:
            return str(error)  # the same bytes on every rank: the same refusal
        if retention.step_of(path) not in (None, stored.step):
            return f"checkpoint {path}: {MANIFEST} is of step {stored.step}"

        # The files are hashed by all ranks together, each its share.
        storage = rank0_storage if self._relays else tensor_files
        damage = first_word(storage.find_damaged_file(stored, path))
        if damage:
            return f"checkpoint {path}: {damage}"
        self._verified = path, stored
        return ""


def read_facts(path: Place) -> dict[str, Any]:
    """The counters of a run in a checkpoint; raises CheckpointError when they cannot be read."""
    return dict(manifest.read(path).facts)
