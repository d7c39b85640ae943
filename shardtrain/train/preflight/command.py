"""``shardtrain config check``: the verdict that ``train`` would give, in one report, with nothing started."""

from __future__ import annotations

from collections.abc import Callable

from shardtrain.config import Loaded
from shardtrain.config.command_line import CommandLine, split
from shardtrain.train.preflight import judge, machine
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import redact

USAGE = """usage: shardtrain config check [CONFIG.toml] [--for-machine none|here|NAME] [--nproc N] [--section.key VALUE]

Tells everything that `shardtrain train` would refuse before its first step, all at once: wrong keys and values, paths,
the tokenizer, the data, the first weights, options that are not available, and a model that cannot fit. Nothing starts.

  --for-machine here   judge what `train` would do on this machine (the default)
  --for-machine none   judge the file alone: no path is looked at, and no device
  --for-machine NAME   judge the file, and memory and types of one such GPU for each rank: h100, a100, ...
  --nproc N            ranks, as for `train`

Exit status: 0 where `train` would begin, else the one that it would end with: 2 configuration, 3 data, 5 checkpoint.
"""

_OPTION = "--for-machine"


def main(words: list[str], open_config: Callable[[CommandLine], tuple[Loaded, CommandLine]]) -> int:
    """Run the verb; gives the exit status. ``open_config`` reads the configuration as ``train`` does."""
    name, rest = _take(words)
    arguments = split(rest)
    if arguments.help:
        print(USAGE, end="")
        return 0
    loaded, arguments = open_config(arguments)
    meant = None
    if name != "none":
        nproc = arguments.nproc
        meant = machine.here(loaded, nproc) if name == "here" else machine.named(name, loaded, nproc)
    verdict = judge(loaded, meant)
    lines = [f"error: {line}" for line in verdict.lines] + [f"note: {note}" for note in verdict.notes]
    counts = f"{_counted(len(verdict.lines), 'error')}, {_counted(len(verdict.notes), 'note')}"
    print(redact("\n".join([*lines, f"{loaded.path or 'defaults and command line'}: {counts}"])))
    return verdict.exit_code


def _take(words: list[str]) -> tuple[str, list[str]]:
    """The machine that is meant, and the other words."""
    name, rest = "here", []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        key, equals, value = word.partition("=")
        if key.replace("_", "-") != _OPTION:
            rest.append(word)
            continue
        name = value if equals else (remaining.pop(0) if remaining else "")
        if not name or name.startswith("--"):
            raise ConfigError(
                Problem(_OPTION, None, "has no value", "use none, here, or a name as h100", "command line")
            )
    return name, rest


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
