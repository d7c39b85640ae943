"""Datasets, one file each: the file's name is the TOML name, and ``documents(path, option)`` gives the texts.

``path`` is the dataset_path option or None, and ``option`` is how errors call it, e.g. "training.dataset_path". The
order of the documents must depend on their content and names alone, so that every rank sees the same dataset.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from types import ModuleType

from shardtrain.errors import ConfigError, Problem


def names() -> list[str]:
    """Names of the datasets that exist, sorted."""
    return sorted(file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_"))


def find(name: str, option: str = "training.dataset") -> ModuleType:
    """The module of a dataset, by the name of its file.

    Raises:
        ConfigError: when this folder has no such file; the error names the nearest and lists all.
    """
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f'did you mean "{near[0]}"? there are' if near else "use one of"
        problem = Problem(option, name, "is no file of shardtrain/data/sources", f"{hint} {', '.join(known)}")
        raise ConfigError(problem)
    return importlib.import_module(f"{__name__}.{name}")
