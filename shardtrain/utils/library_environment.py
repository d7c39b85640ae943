"""Environment variables that keep PyTorch and trackers from running other people's code.

torch.compile starts ``python -c`` to try the libraries it builds. It loads these libraries from a folder
in the shared temporary directory whose name everybody can predict. Trackers start Python services, too.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardtrain.utils import user_cache
from shardtrain.utils.errors import ConfigError, Problem

COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
SAFE_PATH = "PYTHONSAFEPATH"


@contextlib.contextmanager
def protected() -> Iterator[None]:
    """Set the variables for the block and restore their previous values afterwards."""
    variables = {SAFE_PATH: "1", COMPILER_CACHE: str(compiler_cache())}
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def require_compiler_cache(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if the user's ``TORCHINDUCTOR_CACHE_DIR`` cannot be used.

    PyTorch's import would fail there.
    """
    chosen = environment.get(COMPILER_CACHE)
    if not chosen:
        return
    try:
        os.makedirs(chosen, exist_ok=True)
        is_usable = os.access(chosen, os.W_OK | os.X_OK)
        reason = "this user may not write it"
    except (OSError, ValueError) as error:
        is_usable = False
        reason = getattr(error, "strerror", None) or str(error)
    if not is_usable:
        rule = f"is not a folder that can be written: {reason}"
        raise ConfigError(Problem(COMPILER_CACHE, chosen, rule, "name another folder, or unset it"))


def compiler_cache() -> Path:
    """Return the user's ``TORCHINDUCTOR_CACHE_DIR`` or a folder in which only this user can create files.

    PyTorch's default is used if this user owns it. Another user may have created it first: the cache is
    then in the user's own cache folder. PyTorch's import sets the variable to the default without a check
    of the owner, so this value of the variable is no choice of the user.
    """
    default = _default_compiler_cache()
    chosen = os.environ.get(COMPILER_CACHE)
    if chosen and (default is None or Path(chosen) != default):
        return Path(chosen)
    with contextlib.suppress(OSError):
        if default is not None and _is_private_folder(default):
            return default
    return user_cache.folder() / "torchinductor"


def _default_compiler_cache() -> Path | None:
    """Return PyTorch's default. None if the user has no name."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):
        return None
    user = re.sub(r'[\\/:*?"<>|]', "_", name)
    return Path(tempfile.gettempdir(), f"torchinductor_{user}").absolute()


def _is_private_folder(path: Path) -> bool:
    """Create the folder if it does not exist. Return True if only this user can create files in it."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own_folder and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
