"""Run a verb other than training, in this process or on several ranks that shard each layer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardtrain.launch import environment, local
from shardtrain.utils import temporary, variables
from shardtrain.utils.heartbeat import heartbeat

if TYPE_CHECKING:
    from shardtrain.config import Loaded

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in a shell."""


@dataclasses.dataclass(frozen=True)
class Verb:
    """Command to run: ``shardtrain NAME WORDS`` with ``nproc`` processes on ``device``."""

    name: str
    arguments: list[str]
    nproc: int
    device: str
    load: Callable[[], Callable[[], object]]
    """Imports the modules of the verb and returns the function to run on each rank.

    It is called once, before a fork.
    """
    check_output: Callable[[], None] = lambda: None
    """Raises before the work starts if the output cannot be written."""


def start(verb: Verb) -> int:
    """Run a verb on its ranks. Return the exit status."""
    if environment.is_rank(os.environ):
        _as_rank(verb)
    verb.check_output()
    environment.set_allocator_default(os.environ)
    environment.set_process_defaults(os.environ, verb.nproc, environment.usable_cores(), alone=True)
    # The heartbeat's thread must end before ranks are forked.
    with heartbeat("importing PyTorch"):
        # Import once in the parent, so forked ranks share the memory of the modules.
        run = verb.load()
    if verb.nproc == 1:
        try:
            run()
        except KeyboardInterrupt:
            return INTERRUPTED
        return 0
    folder = temporary.make(verb.name)
    loaded = _launched(folder)
    accelerators = environment.count_accelerators(verb.device)
    code = local.launch_verb(
        loaded, verb.nproc, lambda _: run(), [verb.name, *verb.arguments], accelerators
    )
    _close(folder, code)
    return code


def _as_rank(verb: Verb) -> NoReturn:
    """Run one rank of several, started by torchrun, by srun, or by ``start`` as a new process."""
    local.become_rank()
    action = verb.load()
    folder = temporary.make(verb.name)
    local.prepare(folder, note_killed=True)

    def run(_: Loaded) -> None:
        if os.environ["RANK"] == "0":
            verb.check_output()
        action()

    loaded = _launched(folder)
    code = local.run_rank(loaded, run, variables.number(os.environ, "WORLD_SIZE", ""))
    _close(folder, code)
    local.leave(code)


def _close(folder: Path, code: int) -> None:
    """Remove the folder of the ranks. After a failure keep it, because it contains their tracebacks."""
    if code:
        temporary.keep(folder)
    else:
        temporary.remove(folder)


def _launched(folder: Path) -> Loaded:
    """Return a configuration for the launcher, with ``folder`` for the logs of
    the ranks instead of a run's folder.
    """
    from shardtrain.config import Config, Loaded

    config = Config()
    return Loaded(
        dataclasses.replace(config, job=dataclasses.replace(config.job, dump_folder=str(folder)))
    )
