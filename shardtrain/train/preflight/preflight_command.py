"""``shardtrain config check``: the verdict that ``train`` would give, in one report, with nothing started."""

from __future__ import annotations

import os
from collections.abc import Callable

from shardtrain.config import Loaded
from shardtrain.config.command_line import CommandLine, VerbOption, split, take
from shardtrain.launch import environment, nodes
from shardtrain.train.preflight import Machine, judge, machine
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.redact import one_line, redact

USAGE = """usage: shardtrain config check [CONFIG.toml] [--for-machine none|here|NAME] [--nproc N] [--section.key VALUE]

Lists everything that `shardtrain train` would refuse before its first step, all at once: wrong keys and values, paths,
the tokenizer, the data, the first weights, options that are not available, and a model that cannot fit. Nothing starts.

  --for-machine here   judge what `train` would do on this machine (the default)
  --for-machine none   judge the file alone: no path is looked at, and no device
  --for-machine NAME   judge the file, and memory and types of one such GPU for each rank: h100, a100, ...
  --nproc N            ranks, as for `train`

Exit status: 0 where `train` would begin, else the one that it would end with: 2 configuration, 3 data, 5 checkpoint.
"""

_OPTION = "--for-machine"
_MACHINE = VerbOption(example="h100, or none, or here")


def main(words: list[str], open_config: Callable[[CommandLine], tuple[Loaded, CommandLine]]) -> int:
    """Run the verb; gives the exit status. ``open_config`` reads the configuration as ``train`` does."""
    taken = take(words, {_OPTION: _MACHINE, _OPTION.replace("-m", "_m"): _MACHINE}, usage=USAGE)
    arguments = split(taken.rest)
    loaded, arguments = open_config(arguments)
    name = next(iter(taken.own.values()), "here")
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
    print(redact("\n".join([*lines, f"{loaded.path or 'defaults and command line'}: {counts}"])))
    return verdict.exit_code


def _here(loaded: Loaded, arguments: CommandLine) -> Machine:
    """This machine as ``train`` would use it: alone, or as one of several nodes. Raises ConfigError."""
    if environment.is_rank(os.environ) and not arguments.nnodes:
        return machine.this_machine(loaded, arguments.nproc)
    several = nodes.find(arguments, os.environ)
    if several is None:
        return machine.this_machine(loaded, arguments.nproc)
    count = nodes.choose_processes_here(loaded.config, arguments.nproc, several).count
    return machine.this_machine(loaded, None, count * several.most if several.least == several.most else None, count)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
