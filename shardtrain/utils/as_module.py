"""Reject ``python -m shardtrain.MODULE`` for a module that is not a program.

Python would import the module, do nothing, and exit with status 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = '\nif __name__ == "__main__":'


def refuse_without_program(command: Sequence[str]) -> None:
    """Exit with status 2 and one line if the command runs a module that exists but is not a program.

    ``command`` is the interpreter's full command line, ``sys.orig_argv``.
    """
    module = module_to_run(command)
    if not module.startswith("shardtrain."):
        return
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:])
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if file.exists() and PROGRAM in file.read_text(encoding="utf-8"):
        return
    # For a module that does not exist, Python prints the error itself.
    if path.is_dir() or file.exists():
        print(
            f"error[2]: python -m {module} is not a command; use shardtrain VERB, see shardtrain --help",
            file=sys.stderr,
        )
        raise SystemExit(2)


def module_to_run(command: Sequence[str]) -> str:
    """Return the module after the interpreter's ``-m`` option, or "" without this option.

    >>> module_to_run(["python", "-u", "-X", "dev", "-m", "shardtrain.train", "-m", "x"])
    'shardtrain.train'
    >>> module_to_run(["python", "-um", "a.b"]), module_to_run(["python", "-mshardtrain.train"])
    ('a.b', 'shardtrain.train')
    >>> module_to_run(["python", "run.py", "-m", "x"])
    ''
    """
    # Follow Python's own rules: short options may be joined (-um), and -X and -W have a value.
    arguments = list(command[1:])
    while arguments and arguments[0].startswith("-") and not arguments[0].startswith("--"):
        option = arguments.pop(0)
        before, has_m, after = option.partition("m")
        if has_m and "X" not in before and "W" not in before:
            return after or "".join(arguments[:1])
        if option in ("-X", "-W") and arguments:
            arguments.pop(0)
    return ""
