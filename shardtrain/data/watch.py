"""Looking now and then whether the files that a run reads are still what they were."""

from __future__ import annotations

from collections.abc import Callable


class Watch:
    """Checks files every 16 rows for each of them up to every 256 rows; of very many, 16 files a row."""

    def __init__(self, check: Callable[[], None], num_files: int) -> None:
        self._check, self._every = check, max(min(256, 16 * num_files), num_files // 16, 1)
        self._left = self._every

    def __call__(self) -> None:
        """Count a row. Raises ConfigError where a file was changed or removed."""
        self._left -= 1
        if self._left <= 0:
            self._check()
            self._left = self._every
