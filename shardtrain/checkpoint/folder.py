"""The folder of checkpoints: ``step-N/`` each, complete or not there at all.

A checkpoint is written as ``step-N.tmp`` and renamed when every rank has written, so a save cut short is never found.
Counters are JSON; tensors are DCP shards.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.config.schema import Checkpoint, Config
from shardtrain.errors import CheckpointError, StorageError
from shardtrain.log import logger

FACTS = "train_state.json"
_STEP = re.compile(r"step-(\d+)")


class Checkpoints:
    """Saves and finds the checkpoints of a run; all methods but ``steps`` and ``is_due`` are collectives."""

    def __init__(self, config: Config) -> None:
        self._options: Checkpoint = config.checkpoint
        self._folder = Path(config.job.dump_folder) / config.checkpoint.folder
        self._is_first = dist.get_rank() == 0

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        found = [path for path in self._folder.glob("step-*") if _STEP.fullmatch(path.name)]
        return sorted(int(path.name[5:]) for path in found if (path / tensor_files.METADATA).is_file())

    def to_continue(self) -> Path | None:
        """The checkpoint to continue from, or None for a fresh start; raises CheckpointError for a missing one."""
        if not self._options.enable:
            return None
        steps, wanted = self.steps(), self._options.load_step
        if wanted == -1:
            newest = self._same_on_all_ranks(steps[-1] if steps else -1)
            return self._folder / f"step-{newest}" if newest != -1 else None
        if wanted not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"checkpoint.load_step={wanted}: {self._folder} has no such step; it has {known}; use one of those, "
                "or -1 for the newest"
            )
        later = [step for step in steps if step > wanted]
        if later:
            logger.warning(
                f"checkpoint.load_step={wanted} is not the newest: steps {', '.join(map(str, later))} stay in "
                f"{self._folder}, and a start with load_step=-1 would take the newest of them until this run passes it"
            )
        return self._folder / f"step-{wanted}"

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
        """Save weights, the rest of the tensors and the facts, and delete what is older than keep_latest_k."""
        weights_only = last and self._options.last_save_model_only
        if weights_only:
            weights, rest = tensor_files.cast(weights, self._options.export_dtype), {}
        final = self._folder / f"step-{step}"
        temporary = final.with_suffix(".tmp")
        self._on_first(lambda: self._prepare(temporary))
        tensor_files.write({**weights, **rest}, temporary)
        self._on_first(lambda: self._commit(temporary, final, {**facts, "weights_only": weights_only}))
        logger.info(f"saved checkpoint {final}")

    def load(self, path: Path, weights: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill weights and the rest in place and give the facts; raises CheckpointError where they are not there."""
        facts = read_facts(path)
        if facts.get("weights_only") and rest:
            raise CheckpointError(
                f"checkpoint {path} holds weights only, so the run cannot be continued from it; start another run with "
                "checkpoint.initial_load_path, or save with checkpoint.last_save_model_only=false"
            )
        tensor_files.read({**weights, **rest}, path)
        return facts

    def _prepare(self, temporary: Path) -> None:
        shutil.rmtree(temporary, ignore_errors=True)  # what a save cut short has left
        temporary.mkdir(parents=True)

    def _commit(self, temporary: Path, final: Path, facts: Mapping[str, Any]) -> None:
        (temporary / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        if final.exists():  # a run that went back to an older step writes its own history
            shutil.rmtree(final)
        temporary.rename(final)
        keep, saved = self._options.keep_latest_k, int(final.name[5:])
        # steps after this one are another history, which the user went back from: no part of what is counted here
        own = [step for step in self.steps() if step <= saved]
        for step in own[:-keep] if keep else []:
            shutil.rmtree(self._folder / f"step-{step}")

    def _on_first(self, action: Callable[[], None]) -> None:
        if self._is_first:
            try:
                action()
            except OSError as error:
                reason = error.strerror or str(error)
                raise StorageError(
                    f"cannot write checkpoint {error.filename or self._folder}: {reason}; free space or mend "
                    "job.dump_folder, then start again"
                ) from error
        dist.barrier()

    @staticmethod
    def _same_on_all_ranks(value: int) -> int:
        """What the first rank says: where a shared folder lags, ranks would start from different steps."""
        said = torch.tensor(value)
        dist.broadcast(said, src=0)
        return int(said)


def read_facts(path: Path) -> dict[str, Any]:
    """The counters beside a checkpoint's tensors; raises CheckpointError when they cannot be read."""
    try:
        facts = json.loads((path / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path}: {FACTS} cannot be read: {error}") from error
    if not (isinstance(facts, dict) and isinstance(facts.get("state"), dict)):
        raise CheckpointError(f"checkpoint {path}: {FACTS} holds no counters of a run; use another checkpoint")
    return facts
