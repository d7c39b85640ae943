"""Import of optional libraries, with separate messages for a missing library and a failed import."""

from __future__ import annotations

import importlib
from typing import Any

from shardtrain.utils import limits
from shardtrain.utils.errors import ConfigError, OutOfMemoryError, Problem


def load(
    name: str,
    option: str,
    value: object = None,
    install: str = '"shardtrain[hf]"',
    otherwise: str = "",
) -> Any:
    """Import an optional library or a module of one, and return it.

    Args:
        name: The module, such as ``jinja2`` or ``torchao.quantization``.
        option: The option that needs the library, with its ``value``.
        install: The argument of ``pip install`` that installs it.
        otherwise: Another fix, such as a setting that does not need the library.

    Raises:
        ConfigError: The library is not installed, or its import failed.
        OutOfMemoryError: The import ran out of memory.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # an installed library may raise anything when it is imported
        if limits.is_out_of_memory(error):
            raise OutOfMemoryError(limits.explain(error)) from error
        library = name.partition(".")[0]
        rule = f"needs the {library} library, which is not installed"
        fix = f"pip install {install}"
        # A library that is installed may fail because one that it needs is missing or too old.
        if not isinstance(error, ModuleNotFoundError) or error.name != library:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            rule = (
                f"needs the {library} library, which is installed but cannot be imported ({reason})"
            )
            fix = f"repair it, for example with pip install --force-reinstall {install}"
        if otherwise:
            fix += f", or {otherwise}"
        raise ConfigError(Problem(option, value, rule, fix)) from error
