"""A shared folder that shows this process the files of other processes late, as network filesystems do."""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class LaggingFolder:
    """Hide files that other processes create below a folder, for ``seconds`` after the first access by this process.

    With ``kind`` "absent", hidden files do not exist. With "empty", their size is 0. Hidden folders do not exist. The
    patches stay until the process ends.
    """

    def __init__(self, folder: Path, seconds: float, kind: str) -> None:
        self._folder = folder
        self._seconds = seconds
        self._kind = kind
        self._created: set[Path] = set()
        """Paths created by this process."""
        self._renamed: set[Path] = set()
        """Folders renamed by this process. It has already seen their content."""
        self._first_access: dict[Path, float] = {}
        self._real_stat = os.stat
        for name in ("stat", "open", "scandir"):
            setattr(os, name, self._late(name, getattr(os, name)))
        builtins.open = io.open = self._late("io.open", io.open)  # type: ignore[assignment]
        for name in ("mkdir", "link", "rename", "replace"):
            setattr(os, name, self._making(name, getattr(os, name)))

    def _making(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> None:
            original(*arguments, **options)
            folder = options.get("dst_dir_fd", options.get("dir_fd"))
            path = _full_path(arguments[0] if name == "mkdir" else arguments[1], folder)
            self._created.add(path)
            if name == "rename":
                self._renamed.add(path)

        return call

    def _late(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def is_creating(arguments: Any, options: dict[str, Any]) -> bool:
            mode = arguments[0] if arguments else options.get("mode", "r")
            if name == "open":
                return bool(mode & os.O_CREAT)
            return name == "io.open" and "w" in mode

        def call(where: Any = ".", *arguments: Any, **options: Any) -> Any:
            if not isinstance(where, str | Path):
                return original(where, *arguments, **options)

            path = _full_path(where, options.get("dir_fd"))
            if is_creating(arguments, options) and not self._is_late(path.parent):
                self._created.add(path)
            if not self._is_late(path):
                return original(where, *arguments, **options)

            # The file exists. Simulate that this host does not see it yet, or sees it empty.
            status = self._real_stat(path)
            if name == "stat" and self._kind == "empty" and stat.S_ISREG(status.st_mode):
                return os.stat_result([*status[:6], 0, *status[7:10]])
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(where))

        return call

    def _is_late(self, path: Path) -> bool:
        if (
            path in self._created
            or self._renamed & {*path.parents}
            or self._folder not in path.parents
        ):
            return False
        first_access = self._first_access.setdefault(path, time.monotonic())
        return time.monotonic() - first_access < self._seconds


def _full_path(path: Any, folder: int | None) -> Path:
    return Path(path) if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}"), path)
