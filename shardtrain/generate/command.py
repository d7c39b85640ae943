"""``shardtrain generate``: in this process, or on ranks that split each layer among them."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardtrain.generate import prompts, request
from shardtrain.generate.prompts import Row
from shardtrain.generate.request import Request

if TYPE_CHECKING:
    from shardtrain.config import Loaded

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell gives it."""


def main(words: list[str]) -> int:
    """Generate what the words ask for; gives the exit status."""
    asked = request.read(words)
    if asked is None:
        return 0
    from shardtrain.launch import environment, local

    rows = None if asked.input is None else prompts.read_rows(asked.input, asked.field, asked.prediction_field)
    if environment.is_rank(os.environ):
        _as_rank(asked, rows)
    if asked.output is not None:
        prompts.check_output(asked.output)
    cores = environment.usable_cores()
    environment.set_allocator_default(os.environ)
    environment.set_process_defaults(os.environ, asked.nproc, cores, alone=True)
    from shardtrain.generate import answer  # before a fork, so that no rank pays for the imports again

    if asked.nproc == 1:
        try:
            answer.run(asked, rows)
        except KeyboardInterrupt:
            return INTERRUPTED
        return 0
    folder = Path(tempfile.mkdtemp(prefix="shardtrain-generate-"))
    loaded = _launched(folder)
    if environment.count_accelerators(asked.device or "auto") == 0 and sys.platform == "linux":
        code = local.launch(loaded, asked.nproc, main=lambda _: answer.run(asked, rows))
    else:
        code = local.launch(loaded, asked.nproc, command=(sys.executable, "-m", "shardtrain", "generate", *words))
    if code == 0:  # else the traces of the ranks are there
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _as_rank(asked: Request, rows: list[Row] | None) -> NoReturn:
    """One rank of several, started by torchrun, by srun, or by ``main`` as a fresh process."""
    from shardtrain.launch import environment, local

    has_parent = "SHARDTRAIN_PARENT" in os.environ
    if has_parent:
        local.detach(int(os.environ["SHARDTRAIN_PARENT"]))
    environment.adopt_slurm(os.environ)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    environment.set_allocator_default(os.environ)
    environment.set_process_defaults(os.environ, local_ranks, environment.usable_cores(), alone=False)
    from shardtrain.generate import answer

    folder = Path(tempfile.mkdtemp(prefix="shardtrain-generate-"))
    local.prepare(folder)

    def run(_: Loaded) -> None:
        if asked.output is not None and os.environ["RANK"] == "0":
            prompts.check_output(asked.output)
        answer.run(asked, rows)

    loaded = _launched(folder)
    code = local.run_child(loaded, run) if has_parent else local.run_rank(loaded, run, int(os.environ["WORLD_SIZE"]))
    if code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    local.leave(code)


def _launched(folder: Path) -> Loaded:
    """What the launcher needs to know: where logs of ranks go. The run's own folder is left as it is."""
    from shardtrain.config import Config, Loaded

    config = Config()
    return Loaded(dataclasses.replace(config, job=dataclasses.replace(config.job, dump_folder=str(folder))))
