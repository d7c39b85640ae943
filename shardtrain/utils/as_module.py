"""``python -m shardtrain.MODULE`` of a module that is not a program: Python would run its lines and end with 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = '\nif __name__ == "__main__":'


def refuse_without_program(command: Sequence[str]) -> None:
    """End the process with 2 and one line where the command's module exists and does nothing by itself.

    ``command`` is the interpreter's own command line, ``sys.orig_argv``.
    """
    module = named(command)
    if not module.startswith("shardtrain."):
        return
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:])
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if file.exists() and PROGRAM in file.read_text(encoding="utf-8"):
        return
    if path.is_dir() or file.exists():  # of another name Python itself says that there is no such module
        print(
            f"error[2]: python -m {module} is not a command; use shardtrain VERB, see shardtrain --help",
            file=sys.stderr,
        )
        raise SystemExit(2)


def named(command: Sequence[str]) -> str:
    """The module after ``-m``, "" where there is none.

    >>> named(["python", "-u", "-X", "dev", "-m", "shardtrain.train", "-m", "x"]), named(["python", "-um", "a.b"])
    ('shardtrain.train', 'a.b')
    >>> named(["python", "-mshardtrain.train"]), named(["python", "run.py", "-m", "x"])
    ('shardtrain.train', '')
    """
    # As Python reads its own options: they may be joined (-um), and the values of -X and -W are not options.
    words = list(command[1:])
    while words and words[0].startswith("-") and not words[0].startswith("--"):
        word = words.pop(0)
        before, has_m, after = word.partition("m")
        if has_m and "X" not in before and "W" not in before:
            return after or (words[0] if words else "")
        if word in ("-X", "-W") and words:
            words.pop(0)
    return ""
