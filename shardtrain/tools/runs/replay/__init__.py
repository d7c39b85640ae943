"""``shardtrain replay``: repeat steps of a run from the checkpoint before them, and compare every number.

This file reads the arguments and starts the ranks. It does not import torch before that. ``run`` is one rank.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtrain import config as configs
from shardtrain.config import Loaded
from shardtrain.config.command_line import VerbOption, number_of, take
from shardtrain.launch import environment, local
from shardtrain.tools.runs.replay.replay_plan import ReplayPlan, config_of, plan
from shardtrain.tools.runs.run_files import RunFolder
from shardtrain.utils import output_target, variables
from shardtrain.utils.arguments import print_requested_help
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat

USAGE = """\
usage: shardtrain replay STEP | FIRST:LAST [RUN_FOLDER | CONFIG.toml] [--nproc N] [--output FOLDER]
                         [--section.key VALUE ...]

Repeat steps of a run, starting at the newest undamaged checkpoint before them or at the beginning. Compare each step
with the run's line in metrics.jsonl, and every tensor if the run saved a checkpoint of the step. With the number of
ranks of the run, results must be bitwise equal. Nothing is written into the run's folder.

  RUN_FOLDER  the run's job.dump_folder, whose config.resolved.toml is used; or a configuration, as for train
  --nproc     number of ranks (default: that of the run)
  --output    folder for the logs of the replay (default: a temporary folder, which is removed if nothing differs)

Exit status: 0 if everything is equal; 4 at the first difference.

  shardtrain replay 1200 outputs
  shardtrain replay 1200:1210 outputs --nproc 1
"""


@dataclass(frozen=True)
class _Request:
    first: int
    last: int
    path: str | None
    nproc: int | None
    output: str | None
    overrides: tuple[str, ...]


def main(argv: Sequence[str]) -> int:
    """Run the verb and return the exit status.

    Raises:
        ConfigError: an argument or the configuration is invalid.
        CheckpointError: no checkpoint before the step is usable.
    """
    print_requested_help(argv, USAGE)
    request = _read(argv)
    if request.path and Path(request.path).is_dir():
        # The run may have moved since its configuration was written.
        moved = ("--job.dump_folder", request.path)
        loaded = RunFolder(Path(request.path)).load((*request.overrides, *moved))
    else:
        loaded = configs.load(request.path, request.overrides)
    # The heartbeat's thread must end before ranks are forked.
    with heartbeat("looking for a checkpoint before the step"):
        replay_plan = plan(loaded.config, request.first, request.last)

    output = Path(request.output or tempfile.mkdtemp(prefix="shardtrain-replay-"))
    if os.path.realpath(output) == os.path.realpath(replay_plan.run_folder):
        raise ConfigError(
            Problem(
                "--output",
                str(output),
                rule="is the run's own folder, which a replay does not change",
                fix="name another folder",
                where="command line",
            )
        )
    replayed = dataclasses.replace(loaded, config=config_of(loaded.config, replay_plan, output))
    # Ranks that are started as separate processes must share one folder, so pass it to them.
    arguments = ["replay", *argv]
    if not request.output:
        arguments += ["--output", str(output)]
    status = _start(replayed, replay_plan, request, arguments)
    if status == 0 and not request.output:
        shutil.rmtree(output, ignore_errors=True)
    return status


def _start(
    loaded: Loaded, replay_plan: ReplayPlan, request: _Request, arguments: Sequence[str]
) -> int:
    """Run as one of several ranks, or start the ranks."""

    def rank(replayed: Loaded) -> None:
        from shardtrain.tools.runs.replay import replay_rank

        replay_rank.main(replayed, replay_plan)

    environment.set_allocator_default(os.environ)

    # This process is a rank: started by shardtrain's launcher, or by torchrun or srun.
    if environment.is_rank(os.environ):
        if local.become_rank():
            local.leave(local.run_rank(loaded, rank))
        local.leave(local.run_rank(loaded, rank, variables.number(os.environ, "WORLD_SIZE", "")))

    # Start as many ranks as the run had, if this machine supports them.
    accelerators = environment.count_accelerators(loaded.config.training.device)
    wanted = request.nproc or replay_plan.world_size
    count = environment.choose_processes_here(loaded.config, wanted).count
    device = environment.device_type(loaded.config.training.device, accelerators)
    configs.require(loaded, world_size=count, device=device, num_devices=accelerators)
    environment.set_process_defaults(os.environ, count, environment.usable_cores(), alone=True)
    if count == 1:
        local.prepare(Path(loaded.config.job.dump_folder), note_killed=True)
        return local.run_rank(loaded, rank)
    # Import torch once, before the ranks are forked.
    if accelerators == 0:
        from shardtrain.tools.runs.replay import replay_rank  # noqa: F401

    return local.launch_verb(loaded, count, rank, arguments, accelerators)


def _read(arguments: Sequence[str]) -> _Request:
    """Parse the command line. Raise ConfigError for invalid arguments."""
    options = {
        "--nproc": VerbOption(number_of("processes"), "2"),
        "--output": VerbOption(output_target.folder_value, "FOLDER"),
    }
    taken = take(arguments, options)
    places, overrides = taken.places(2)
    if not places:
        raise _bad_step(None, "is not set")

    # STEP is one step, or FIRST:LAST.
    steps = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", places[0])
    rule = "is neither a step above 0 nor a range of steps"
    if steps is None:
        raise _bad_step(places[0], rule)
    first = int(steps[1])
    last = int(steps[2] or first)
    if not 1 <= first <= last:
        raise _bad_step(places[0], rule)
    path = places[1] if len(places) > 1 else None
    nproc = taken.verb_options.get("--nproc")
    output = taken.verb_options.get("--output")
    return _Request(first, last, path, nproc, output, overrides)


def _bad_step(text: str | None, rule: str) -> ConfigError:
    return ConfigError(
        Problem("STEP", text, rule=rule, fix="write it like 120 or 100:120", where="command line"),
    )
