"""A verb other than training, in this process or on ranks that split each layer among them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardtrain.launch import environment, local
from shardtrain.utils import temporary
from shardtrain.utils.heartbeat import heartbeat

if TYPE_CHECKING:
    from shardtrain.config import Loaded

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell gives it."""


@dataclasses.dataclass(frozen=True)
class Verb:
    """What is run: ``shardtrain NAME WORDS``, by ``nproc`` processes on ``device``."""

    name: str
    words: list[str]
    nproc: int
    device: str
    load: Callable[[], Callable[[], object]]
    """Imports what the verb needs and gives what each rank does: called before a fork, so that no rank pays again."""
    check_output: Callable[[], None] = lambda: None
    """Refuses, before any work, an output that cannot be written."""


def start(verb: Verb) -> int:
    """Run a verb on its ranks; gives the exit status."""
    if environment.is_rank(os.environ):
        _as_rank(verb)
    verb.check_output()
    environment.set_allocator_default(os.environ)
    environment.set_process_defaults(os.environ, verb.nproc, environment.usable_cores(), alone=True)
    with heartbeat("importing PyTorch"):  # its thread has ended when ranks are forked
        # imported once: forks share what is there
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
    code = local.launch_verb(loaded, verb.nproc, lambda _: run(), [verb.name, *verb.words], accelerators)
    _close(folder, code)
    return code


def _as_rank(verb: Verb) -> NoReturn:
    """One rank of several, started by torchrun, by srun, or by ``start`` as a fresh process."""
    local.become_rank()
    action = verb.load()
    folder = temporary.make(verb.name)
    local.prepare(folder)

    def run(_: Loaded) -> None:
        if os.environ["RANK"] == "0":
            verb.check_output()
        action()

    loaded = _launched(folder)
    code = local.run_rank(loaded, run, int(os.environ["WORLD_SIZE"]))
    _close(folder, code)
    local.leave(code)


def _close(folder: Path, code: int) -> None:
    """Remove the folder of the ranks. After a failure keep it, because it has the traces."""
    if code:
        temporary.keep(folder)
    else:
        temporary.remove(folder)


def _launched(folder: Path) -> Loaded:
    """What the launcher needs to know: where logs of ranks go. The run's own folder is left as it is."""
    from shardtrain.config import Config, Loaded

    config = Config()
    return Loaded(dataclasses.replace(config, job=dataclasses.replace(config.job, dump_folder=str(folder))))
