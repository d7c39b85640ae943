"""shardtrain: one trainer for large transformer models, from a laptop CPU to thousands of GPUs.

    import shardtrain

    config = shardtrain.load_config("debug", {"training.steps": 20})
    with shardtrain.Trainer(config) as trainer:
        trainer.train()
    model = shardtrain.load_model(config.config.job.dump_folder)
    print(shardtrain.generate(model, "def main", max_new_tokens=20)[0])

Importing this package imports neither torch nor any optional library; a name brings what it needs when it is used.
"""

import os as _os
import sys as _sys

if _sys.argv[:1] == ["-m"]:  # Python is looking for the module of `python -m`
    # The current directory is first in sys.path. Remove it before another import finds a json.py or torch.py in it.
    # It becomes the last entry if the package was found there, as in a clone that is not installed.
    if (
        not _sys.flags.safe_path
        and _os.path.isdir(_sys.path[0])
        and _os.path.samefile(".", _sys.path[0])
    ):
        _current = _sys.path.pop(0)
        if _current == _os.path.dirname(__path__[0]):
            _sys.path.append(_current)
    from shardtrain.utils import as_module as _as_module

    _as_module.refuse_without_program(_sys.orig_argv)

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from shardtrain.api import (
        StepResult,
        Trainer,
        evaluate,
        generate,
        load_config,
        load_model,
        plan,
        report,
        verify,
    )

__version__ = "0.1.0"
__all__ = [
    "StepResult",
    "Trainer",
    "evaluate",
    "generate",
    "load_config",
    "load_model",
    "plan",
    "report",
    "verify",
]


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from shardtrain import api
    except ModuleNotFoundError as error:
        from shardtrain.utils.verbs import BEYOND_THE_CORE

        if error.name not in BEYOND_THE_CORE:
            raise
        fix = "install the complete package: pip install shardtrain"
        raise ImportError(
            f"shardtrain.{name} needs {error.name}, which is not installed; {fix}"
        ) from None
    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
