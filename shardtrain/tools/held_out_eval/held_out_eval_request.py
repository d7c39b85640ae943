"""What ``shardtrain test`` is asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from shardtrain.config import Loaded
from shardtrain.config.command_line import CommandLine
from shardtrain.config.schema import Config

FOLDER = "testing"
"""Folder of the logs, below job.dump_folder: those of the run stay as they are."""
SPLITS = {"dev": "validation", "test": "test"}
"""Names of the files of a set -> what the task calls it."""


@dataclass(frozen=True)
class HeldOutOptions:
    """A config, which checkpoint of it, how many ranks, and where the files go."""

    loaded: Loaded
    checkpoint: str | None
    """A step name (``checkpoint.choice``), a path, or None."""
    arguments: CommandLine
    output: Path

    @property
    def nproc(self) -> int | None:
        """The ranks of this node that were asked for."""
        return self.arguments.nproc

    @property
    def launched(self) -> Loaded:
        """What the launcher needs to know: a folder for logs of its own, and that nothing is to be saved."""
        config = self.loaded.config
        job = dataclasses.replace(config.job, dump_folder=str(Path(config.job.dump_folder) / FOLDER))
        checkpoint = dataclasses.replace(config.checkpoint, enable=False)
        return Loaded(dataclasses.replace(config, job=job, checkpoint=checkpoint))


def sets_of(config: Config) -> list[str]:
    """The sets that the config names: "dev", "test"."""
    dev = config.validation.enable or config.validation.dataset != ""
    test = config.task.test_dataset_path is not None
    return [name for name, is_set in (("dev", dev), ("test", test)) if is_set]
