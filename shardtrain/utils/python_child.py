"""Command lines of new Python processes that import nothing from the current directory, here and on other hosts.

``python -m MODULE`` puts the current directory first in ``sys.path``: a ``json.py`` or ``torch.py`` there
would run. ``-P`` prevents this, but then a package that is not installed, such as a clone, is not found
either. The new process therefore runs this file as a script. The script loads the same package that
started it. The folder of the package becomes the last entry of ``sys.path``. Files next to the package
then cannot replace modules of Python or PyTorch.

On another host the place of this file is unknown, so ``remote_command`` uses ``-P -m``. The package must be
installed there, or be on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

SAFE = "-P"
"""Option of Python that removes the current directory from ``sys.path``. It exists since Python 3.11."""

_PACKAGE = Path(__file__).parents[1]


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module in a process of this interpreter.

    >>> command("shardtrain", "train")[1], command("shardtrain", "train")[3:]
    ('-P', ['shardtrain', 'train'])
    """
    return [sys.executable, SAFE, __file__, module, *arguments]


def remote_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module with the interpreter of another host or a container.

    >>> remote_command("python3", "shardtrain", "train")
    ['python3', '-P', '-m', 'shardtrain', 'train']
    """
    return [python, SAFE, "-m", module, *arguments]


def arguments_of(command: Sequence[str]) -> list[str]:
    """Return the arguments after the module in a command line of ``remote_command``.

    >>> arguments_of(["python3", "-P", "-m", "shardtrain", "train", "-m"])
    ['train', '-m']
    """
    return list(command[command.index("-m") + 2 :])


def is_too_old(line: str) -> bool:
    """True if a line of output reports that the interpreter has no option ``-P``.

    >>> is_too_old("Unknown option: -P"), is_too_old("unknown option -P"), is_too_old("error: -P")
    (True, True, False)
    """
    return re.fullmatch(r"[Uu]nknown option:? -P", line.strip()) is not None


if __name__ == "__main__":  # run the module that the command line names, as ``python -m`` would
    spec = importlib.util.spec_from_file_location(_PACKAGE.name, _PACKAGE / "__init__.py")
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE.name] = package
    spec.loader.exec_module(package)
    sys.path.append(str(_PACKAGE.parent))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
