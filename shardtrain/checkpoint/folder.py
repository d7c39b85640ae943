"""The folder of checkpoints: ``step-N/`` each, complete or not there at all.

A checkpoint is written as ``step-N.tmp`` and renamed when every rank has written, so a save cut short is never found.
Counters are JSON; tensors are DCP shards.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.config.schema import Checkpoint, Config
from shardtrain.errors import CheckpointError
from shardtrain.log import logger

FACTS = "train_state.json"
_STEP = re.compile(r"step-(\d+)")


class Checkpoints:
    """Saves and finds the checkpoints of a run; all methods but the first two are collectives."""

    def __init__(self, config: Config) -> None:
        self._options: Checkpoint = config.checkpoint
        self._folder = Path(config.job.dump_folder) / config.checkpoint.folder
        self._total_steps = config.training.steps
        self._is_first = dist.get_rank() == 0

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        found = [path for path in self._folder.glob("step-*") if _STEP.fullmatch(path.name)]
        return sorted(int(path.name[5:]) for path in found if (path / tensor_files.METADATA).is_file())

    def to_continue(self) -> Path | None:
        """The checkpoint to continue from, or None for a fresh start; raises CheckpointError for a missing one."""
        if not self._options.enable:
            return None
        steps = self.steps()
        if self._options.load_step != -1:
            if self._options.load_step not in steps:
                known = ", ".join(map(str, steps)) or "none"
                raise CheckpointError(
                    f"checkpoint.load_step={self._options.load_step}: {self._folder} has no such step; it has {known}"
                )
            return self._folder / f"step-{self._options.load_step}"
        return self._folder / f"step-{steps[-1]}" if steps else None

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
        keep = self._options.keep_latest_k
        for step in self.steps()[:-keep] if keep else []:
            shutil.rmtree(self._folder / f"step-{step}")

    def _on_first(self, action: Any) -> None:
        if self._is_first:
            action()
        dist.barrier()


def read_facts(path: Path) -> dict[str, Any]:
    """The counters beside a checkpoint's tensors; raises CheckpointError when they cannot be read."""
    try:
        facts = json.loads((path / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path}: {FACTS} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise CheckpointError(f"checkpoint {path}: {FACTS} holds no table")
    return facts
