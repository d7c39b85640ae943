"""Starts Python with a module of this package, so that no file of the current directory is imported.

``python -m`` puts the current directory first in ``sys.path``: a ``json.py`` or ``torch.py`` there would run. ``-P``
leaves it out. Modules that a user starts with ``-m`` themselves leave it out too: see ``shardtrain/__init__.py``.
"""

from __future__ import annotations

import sys

OPTIONS = ("-P", "-m")
"""Options of the interpreter before the name of a module."""


def command(module: str, *words: str) -> list[str]:
    """Return the command line of a module of this package, for a process of this interpreter.

    >>> command("shardtrain", "train")[1:]
    ['-P', '-m', 'shardtrain', 'train']
    """
    return [sys.executable, *OPTIONS, module, *words]
