"""Start a module of this package in a new Python process that imports nothing from the current directory.

``python -m MODULE`` puts the current directory first in ``sys.path``: a ``json.py`` or ``torch.py`` there
would run. ``-P`` prevents this, but then a package that is not installed, such as a clone, is not found
either. The new process therefore runs this file as a script. The script loads the same package that
started it. The folder of the package becomes the last entry of ``sys.path``. Files next to the package
then cannot replace modules of Python or PyTorch.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def command(module: str, *words: str) -> list[str]:
    """Return the command line that runs a module in a process of this interpreter.

    >>> command("shardtrain", "train")[1], command("shardtrain", "train")[3:]
    ('-P', ['shardtrain', 'train'])
    """
    return [sys.executable, "-P", __file__, module, *words]


if __name__ == "__main__":  # run the module that the command line names, as ``python -m`` would
    spec = importlib.util.spec_from_file_location(_PACKAGE.name, _PACKAGE / "__init__.py")
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE.name] = package
    spec.loader.exec_module(package)
    sys.path.append(str(_PACKAGE.parent))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
