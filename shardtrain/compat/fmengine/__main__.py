"""``python -m shardtrain.compat.fmengine PROGRAM ...``: FMEngine's programs, with their original flags.

train         cli/train.py: one rank under torchrun or DeepSpeed's launcher, else start all ranks
deepspeed     DeepSpeed's launcher, only for cli/train.py: on this machine or on the hosts of a hostfile
torchrun      PyTorch's launcher; it runs ``train`` instead of cli/train.py
to_hf_format  cli/to_hf_format.py
from_hf       scripts/conversions/*/from_hf.py
commands DIR  write ``deepspeed`` and ``torchrun`` into a folder for PATH, and print the folder
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from shardtrain import cli
from shardtrain.utils.errors import ConfigError, Problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program and return its exit status. Print each error on one line, as ``shardtrain`` does."""
    return cli.run(_dispatch, arguments)


def _dispatch(arguments: list[str]) -> int:
    """Run the program that the first argument names."""
    name = arguments[0] if arguments else None
    if name in ("--help", "-h"):
        print(str(__doc__).replace("``", "`"), end="")
        return 0
    if name not in PROGRAMS:
        raise ConfigError(
            Problem(
                "shardtrain.compat.fmengine",
                name,
                rule="requires a program" if name is None else "does not exist",
                fix=f"use one of {', '.join(PROGRAMS)}",
                where="command line",
            )
        )
    module_name, function = PROGRAMS[name]
    module = importlib.import_module(f"shardtrain.compat.fmengine.{module_name}")
    program: Callable[[list[str]], int] = getattr(module, function)
    return program(arguments[1:])


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
