"""``shardtrain config check``: report all problems that ``train`` would find, without starting anything."""

from __future__ import annotations

import os
from collections.abc import Callable

from shardtrain.config import Loaded
from shardtrain.config.command_line import CommandLine, VerbOption, split, take
from shardtrain.launch import environment, nodes
from shardtrain.train.preflight import Machine, judge, machine
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.redact import one_line

USAGE = """usage: shardtrain config check [CONFIG.toml] [--for-machine none|here|NAME] [--nproc N] [--section.key VALUE]

Lists all problems that would stop `shardtrain train` before its first step: wrong keys and values, paths, tokenizer,
data, initial weights, options that are not available, and a model that does not fit. Starts nothing.

  --for-machine here   check for this machine (the default)
  --for-machine none   check only the configuration, without paths and devices
  --for-machine NAME   check the configuration for a known GPU (h100, a100, ...), with one GPU per rank
  --nproc N            number of ranks, as for `train`

Exit status: 0 if `train` would start, else the exit status of `train`: 2 configuration, 3 data, 5 checkpoint.
"""

_OPTION = "--for-machine"
_MACHINE = VerbOption(example="h100, or none, or here")


def main(argv: list[str], open_config: Callable[[CommandLine], tuple[Loaded, CommandLine]]) -> int:
    """Run the command and return its exit status.

    ``open_config`` reads the configuration as ``train`` does.
    """
    options = {_OPTION: _MACHINE, _OPTION.replace("-m", "_m"): _MACHINE}
    taken = take(argv, options, usage=USAGE)
    arguments = split(taken.rest)
    loaded, arguments = open_config(arguments)
    name = next(iter(taken.verb_options.values()), "here")
    target = None
    if name == "here":
        target = _here(loaded, arguments)
    elif name != "none":
        target = machine.named(name, loaded, arguments.nproc)
    with heartbeat("checking configuration, data, tokenizer and model"):
        verdict = judge(loaded, target)
    lines = [f"error: {one_line(line)}" for line in verdict.lines]
    lines += [f"note: {one_line(note)}" for note in verdict.notes]
    counts = f"{_counted(len(verdict.lines), 'error')}, {_counted(len(verdict.notes), 'note')}"
    lines.append(one_line(f"{loaded.path or 'defaults and command line'}: {counts}"))
    print("\n".join(lines))
    return verdict.exit_code


def _here(loaded: Loaded, arguments: CommandLine) -> Machine:
    """Return this machine as ``train`` would use it: as a single node, or as one of several nodes.

    Raises:
        ConfigError: the number of ranks or nodes is not valid.
    """
    if environment.is_rank(os.environ) and not arguments.nnodes:
        return machine.this_machine(loaded, arguments.nproc)
    node_range = nodes.find(arguments, os.environ)
    if node_range is None:
        return machine.this_machine(loaded, arguments.nproc)
    local_ranks = nodes.choose_processes_here(loaded.config, arguments.nproc, node_range).count
    # The world size is only known if the number of nodes is fixed.
    world_size = None
    if node_range.least == node_range.most:
        world_size = local_ranks * node_range.most
    return machine.this_machine(loaded, None, world_size, local_ranks)


def _counted(count: int, noun: str) -> str:
    if count != 1:
        noun = f"{noun}s"
    return f"{count} {noun}"
