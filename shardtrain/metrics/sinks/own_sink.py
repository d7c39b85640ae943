"""Sinks in the user's Python files, each a ``class Sink``. Their failures never stop training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.metrics.sinks import SinkContext
from shardtrain.metrics.step_record import Record
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger, redact

METHODS = ("write", "validation", "close")


def find(path: str) -> Any:
    """Return the class ``Sink`` of a file.

    Raises:
        ConfigError: the file does not exist or has no such class, or the class lacks a method.
    """
    # ``Sink`` is checked before the first record, so a missing method is reported at the start.
    cls = own_file.load(path, own_file.SINK, "metrics.sinks").Sink
    missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
    if missing:
        raise ConfigError(
            Problem(
                "metrics.sinks",
                path,
                rule=f"has a class Sink without {', '.join(missing)}",
                fix=own_file.SINK.fix,
            )
        )
    return cls


class OwnSink:
    """Sink that a user's Python file defines. Its first failure logs one warning and disables it."""

    def __init__(self, path: str, request: SinkContext) -> None:
        self._path = path
        self._sink: Any = None
        # A user's class may raise anything.
        try:
            self._sink = find(path)(request)
        except Exception as error:
            self._fail(error)

    @property
    def summary(self) -> str:
        """Line of the sink for the end of a run, or ""."""
        return str(getattr(self._sink, "summary", "") or "")

    def write(self, record: Record) -> None:
        """Pass on a logged step."""
        self._call("write", record)

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on results on held-out data."""
        self._call("validation", step, dict(values))

    def close(self) -> None:
        """Close the sink."""
        self._call("close")

    def _call(self, name: str, *arguments: object) -> None:
        # The sink has failed before.
        if self._sink is None:
            return
        try:
            getattr(self._sink, name)(*arguments)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._sink = None
        reason = redact(f"{type(error).__name__}: {error}")
        logger.warning(
            f"the metric sink {self._path} failed: {reason}; training continues without it"
        )
