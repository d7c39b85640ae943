"""Sinks of the user's: a file with ``class Sink``, whose failures end neither a step nor a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.config.rules.own_files import SINK
from shardtrain.metrics.record import Record
from shardtrain.metrics.sinks import SinkContext
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger, redact

METHODS = ("write", "validation", "close")


def find(path: str) -> Any:
    """The class Sink of a file.

    Raises:
        ConfigError: when there is no such file, or no such class in it, or one without a method that it needs.
    """
    cls = own_file.load(path, "sink", "metrics.sinks", *SINK).Sink
    missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
    if missing:
        raise ConfigError(Problem("metrics.sinks", path, f"has a class Sink without {', '.join(missing)}", SINK[1]))
    return cls


class OwnSink:
    """The sink of a file; its first failure is one warning, and it is left alone from then on."""

    def __init__(self, path: str, request: SinkContext) -> None:
        self._path = path
        self._sink: Any = None
        try:
            self._sink = find(path)(request)
        except Exception as error:
            self._fail(error)

    @property
    def summary(self) -> str:
        """What the sink wants to have said at the end of a run, or nothing."""
        return str(getattr(self._sink, "summary", "") or "")

    def write(self, record: Record) -> None:
        """Hand over a logged step."""
        self._call("write", record)

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over results on held-out data."""
        self._call("validation", step, dict(values))

    def close(self) -> None:
        """Close it."""
        self._call("close")

    def _call(self, name: str, *arguments: object) -> None:
        if self._sink is None:
            return
        try:
            getattr(self._sink, name)(*arguments)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._sink = None
        reason = redact(f"{type(error).__name__}: {error}")
        logger.warning(f"the metric sink {self._path} failed: {reason}; training continues without it")
