"""``python -m shardtrain.compat.fmengine PROGRAM ...``: the programs of FMEngine, with their own flags.

train         cli/train.py: as a rank where torchrun or DeepSpeed's launcher started it, else with ranks of its own
deepspeed     the launcher, for cli/train.py alone: on this machine, or on the hosts of a hostfile
torchrun      PyTorch's own, which starts ``train`` where cli/train.py is named
to_hf_format  cli/to_hf_format.py
from_hf       scripts/conversions/*/from_hf.py
commands DIR  write ``deepspeed`` and ``torchrun`` into a folder for PATH, and print its name
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from shardtrain import cli
from shardtrain.utils.errors import ConfigError, Problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program; gives the exit status. Errors are one line each, as those of ``shardtrain``."""
    return cli.run(_dispatch, arguments)


def _dispatch(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else (None, [])
    if name in ("--help", "-h"):
        print(str(__doc__).replace("``", "`"), end="")
        return 0
    if name not in PROGRAMS:
        fix = f"use one of {', '.join(PROGRAMS)}"
        rule = "needs a program" if name is None else "is not one of its programs"
        raise ConfigError(Problem("shardtrain.compat.fmengine", name, rule, fix, "command line"))
    module, function = PROGRAMS[name]
    program: Callable[[list[str]], int] = getattr(
        importlib.import_module(f"shardtrain.compat.fmengine.{module}"), function
    )
    return program(rest)


PROGRAMS = {
    "train": ("launching", "train"),
    "deepspeed": ("launching", "deepspeed"),
    "torchrun": ("launching", "torchrun"),
    "to_hf_format": ("fmengine_command", "to_hf_format"),
    "from_hf": ("fmengine_command", "from_hf"),
    "commands": ("launching", "commands"),
}
"""Module and function of each program. The module is imported when its program runs."""

if __name__ == "__main__":
    sys.exit(main())
