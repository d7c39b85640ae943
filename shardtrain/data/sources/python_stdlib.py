"""The source text of the running Python's standard library: real data that is already on every machine.

The text differs between Python versions; the stream's fingerprint says so when a run is continued on another one.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from shardtrain.errors import ConfigError, DataError, Problem

MAX_BYTES = 16 * 2**20
"""Files are taken in order until they would exceed this many bytes; CPython 3.11 has about 11 MiB."""

# installed packages vary between machines, tests are a third of the text and say little, idlelib is often split off
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


def documents(path: str | None = None, option: str = "training.dataset_path") -> Iterator[str]:
    """One text per ``.py`` file, in the order of their relative paths.

    Bytes that are no UTF-8 become U+FFFD (no file of CPython has any outside its tests).

    Raises:
        ConfigError: when a path is given, as this dataset takes none.
        DataError: when the files are missing or unreadable, e.g. where the library is a zip of bytecode.
    """
    if path is not None:
        fix = 'remove it, or use the dataset "text"'
        raise ConfigError(Problem(option, path, "has no effect with the dataset python_stdlib", fix))
    return _texts(Path(sysconfig.get_path("stdlib")))


def _texts(root: Path) -> Iterator[str]:
    try:
        files = _source_files(root)
    except OSError as error:
        raise DataError(f"the dataset python_stdlib cannot list {error.filename}: {error.strerror}") from error
    if not files:
        raise DataError(
            f"the dataset python_stdlib found no .py files in {root} (removed, or packed in a zip); "
            'install the full Python, or use training.dataset="text" with training.dataset_path'
        )
    total_bytes = 0
    for file in files:
        try:
            content = (root / file).read_bytes()
        except OSError as error:
            raise DataError(f"the dataset python_stdlib cannot read {root / file}: {error.strerror}") from error
        total_bytes += len(content)
        if total_bytes > MAX_BYTES:
            return
        yield content.decode("utf-8", errors="replace")


def _source_files(root: Path) -> list[str]:
    """Relative POSIX paths of the .py files below root, sorted; skipped folders are not even listed."""

    def stop(error: OSError) -> None:
        # a folder that one host cannot list would give its ranks another dataset
        raise error

    found: list[str] = []
    if not root.is_dir():
        return found
    for folder, subfolders, files in os.walk(root, onerror=stop):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)
