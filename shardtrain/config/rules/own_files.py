"""Files of Python that options name: they are there, and hold what they are named for, as their text tells."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.utils import own_file
from shardtrain.utils.errors import Problem

SINK = (("Sink",), "define a class Sink with write, validation and close, as docs/extend.md shows")
"""What a file must hold, and the fix where it does not."""


def check_own_files(loaded: Loaded) -> Iterator[Problem]:
    """Sinks of the user's."""
    for path in loaded.config.metrics.sinks:
        yield from _check(loaded, "metrics.sinks", path, *SINK)


def _check(loaded: Loaded, option: str, path: str, names: tuple[str, ...], fix: str) -> Iterator[Problem]:
    found = own_file.fault(path, names, fix)
    if found is not None:
        yield Problem(option, path, *found, loaded.where(option))
