"""Verb ``test``: run in this process, or on several ranks that split the rows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from shardtrain import config as configs
from shardtrain.checkpoint.choice import step_name
from shardtrain.config import Loaded
from shardtrain.config.command_line import CommandLine, VerbOption, split, take
from shardtrain.tools.held_out_eval.held_out_eval_request import HeldOutOptions, sets_of
from shardtrain.utils import output_target, variables
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat

HELP = """\
usage: shardtrain test CONFIG.toml [--step latest|best|N] [--nproc N] [--output FOLDER]
                       [--section.key VALUE ...]

Evaluate a trained model on validation.dataset ("dev") and on task.test_dataset_path ("test"), each row once. These
files are written into job.dump_folder, or into FOLDER:

  dev_results.json, test_results.json          the metrics of the task
  dev_prediction.txt, test_prediction.txt      one line per row, in the order of the data

For a test set without labels, only predictions are written.

  --step        checkpoint of the run: latest, best or a number (default: best with checkpoint.keep_best, else latest)
  --checkpoint  as --step, or the path of a checkpoint

  shardtrain test my_classifier.toml --step latest
"""


Opener = Callable[[CommandLine], tuple[Loaded, CommandLine]]
"""Loads the configuration of a command line. Also returns the command line, with nodes and processes from the
file."""


def main(argv: list[str], open_config: Opener | None = None) -> int:
    """Run the verb with its command-line arguments. Return the exit status."""
    options = _read(argv, open_config or _open_toml)
    from shardtrain.launch import agent, environment, local

    if environment.is_rank(os.environ):
        _as_rank(options)

    # On several nodes our launcher runs the verb on each node. Otherwise start the ranks here.
    code = agent.run_verb("test", argv, options.loaded.config, options.nproc, options.arguments)
    if code is not None:
        return code
    environment.set_allocator_default(os.environ)
    config = options.loaded.config
    accelerators = environment.count_accelerators(config.training.device)
    choice = environment.choose_processes_here(config, options.nproc)
    _require(options.loaded, choice.count, accelerators)
    environment.set_process_defaults(
        os.environ, choice.count, environment.usable_cores(), alone=True
    )
    with heartbeat("importing PyTorch"):  # before the fork, so ranks share the imports
        from shardtrain.tools.held_out_eval import held_out_eval_rank

    if choice.count == 1:
        local.prepare(Path(options.launched.config.job.dump_folder), note_killed=True)
        return local.run_rank(options.launched, lambda _: held_out_eval_rank.main(options))
    argv = ["test", *argv]
    return local.launch_verb(
        options.launched,
        choice.count,
        lambda _: held_out_eval_rank.main(options),
        argv,
        accelerators,
    )


def _as_rank(options: HeldOutOptions) -> NoReturn:
    """Run as one of several ranks, started by torchrun, by srun, or by ``main`` as a new process."""
    from shardtrain.launch import environment, local

    has_parent = local.become_rank()
    size = variables.number(os.environ, "WORLD_SIZE", "")
    from shardtrain.tools.held_out_eval import held_out_eval_rank

    if has_parent:
        local.leave(local.run_rank(options.launched, lambda _: held_out_eval_rank.main(options)))
    _require(
        options.loaded, size, environment.count_accelerators(options.loaded.config.training.device)
    )
    local.leave(local.run_rank(options.launched, lambda _: held_out_eval_rank.main(options), size))


def _require(loaded: Loaded, world_size: int, accelerators: int) -> None:
    from shardtrain.launch import environment

    device = environment.device_type(loaded.config.training.device, accelerators)
    configs.require(loaded, world_size=world_size, device=device, num_devices=accelerators)


def _open_toml(arguments: CommandLine) -> tuple[Loaded, CommandLine]:
    return configs.load(arguments.path, arguments.overrides), arguments


def _read(argv: list[str], open_config: Opener) -> HeldOutOptions:
    """Parse a command line. Raise ConfigError for invalid options, and HelpPrinted for ``--help``."""
    options = {
        "--step": VerbOption(step_name, "best"),
        "--checkpoint": VerbOption(),
        "--output": VerbOption(output_target.folder_value, "FOLDER"),
    }
    taken = take(argv, options, usage=HELP)
    values = taken.verb_options
    arguments = split(taken.rest)
    loaded, arguments = open_config(arguments)
    config = loaded.config
    # No training step runs, so the global batch size does not need to fit these ranks.
    training = dataclasses.replace(config.training, global_batch_size=-1)
    loaded = dataclasses.replace(loaded, config=dataclasses.replace(config, training=training))
    if not sets_of(loaded.config):
        raise ConfigError(
            Problem(
                "validation.dataset",
                None,
                rule="is not set, and neither is task.test_dataset_path",
                fix="name a held-out set",
            )
        )
    output = values.get("--output", config.job.dump_folder)
    if "--step" in values and "--checkpoint" in values:
        raise ConfigError(
            Problem(
                "--checkpoint",
                values["--checkpoint"],
                rule="is another name of --step",
                fix="use one of them",
            )
        )
    return HeldOutOptions(
        loaded, values.get("--step", values.get("--checkpoint")), arguments, Path(output)
    )
