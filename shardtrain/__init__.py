"""shardtrain: one trainer for large transformer models, from a laptop CPU to thousands of GPUs.

    import shardtrain

    config = shardtrain.load_config("debug", {"training.steps": 20})
    with shardtrain.Trainer(config) as trainer:
        trainer.train()
    model = shardtrain.load_model(config.config.job.dump_folder)
    print(shardtrain.generate(model, "def main", max_new_tokens=20)[0])

Importing this package imports neither torch nor any optional library; a name brings what it needs when it is used.
"""

from __future__ import annotations

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from shardtrain.api import StepResult, Trainer, evaluate, generate, load_config, load_model, plan, report, verify

__version__ = "0.1.0"
__all__ = ["StepResult", "Trainer", "evaluate", "generate", "load_config", "load_model", "plan", "report", "verify"]

if _sys.argv[:1] == ["-m"]:  # Python is looking for the module of `python -m`
    from shardtrain.utils import as_module as _as_module

    _as_module.refuse_without_program(_sys.orig_argv)


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardtrain import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
