"""Options of ``shardtrain test``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from shardtrain.config import Loaded
from shardtrain.config.command_line import CommandLine
from shardtrain.config.schema import Config

FOLDER = "testing"
"""Log folder below job.dump_folder, separate from the run's logs."""
SPLITS = {"dev": "validation", "test": "test"}
"""Prefix of a set's result files -> the task's name of the split."""


@dataclass(frozen=True)
class HeldOutOptions:
    """Parsed options.

    Attributes:
        checkpoint: A step name (``checkpoint.choice``), a path, or None.
        output: Folder of the result files.
    """

    loaded: Loaded
    checkpoint: str | None
    arguments: CommandLine
    output: Path

    @property
    def nproc(self) -> int | None:
        """Requested number of ranks on this node."""
        return self.arguments.nproc

    @property
    def launched(self) -> Loaded:
        """Configuration for the launcher, with a separate log folder and without saving checkpoints."""
        config = self.loaded.config
        job = dataclasses.replace(
            config.job, dump_folder=str(Path(config.job.dump_folder) / FOLDER)
        )
        checkpoint = dataclasses.replace(config.checkpoint, enable=False)
        return Loaded(dataclasses.replace(config, job=job, checkpoint=checkpoint))


def sets_of(config: Config) -> list[str]:
    """Return the names of the configured sets: "dev", "test"."""
    dev = config.validation.enable or config.validation.dataset != ""
    test = config.task.test_dataset_path is not None
    return [name for name, is_set in (("dev", dev), ("test", test)) if is_set]
