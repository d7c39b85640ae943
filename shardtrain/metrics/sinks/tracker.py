"""Send metrics to a tracking service in a thread, so a slow or dead service never delays a step."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from shardtrain.metrics.sinks import SinkContext, validation_tags
from shardtrain.metrics.step_record import Record
from shardtrain.utils.log import logger, redact
from shardtrain.utils.redact import redact_all

QUEUE_RECORDS = 10_000
"""Maximum number of queued records. Additional records are dropped and counted."""

CLOSE_SECONDS = 30.0
"""Maximum time for which the end of a run waits for the service."""


def run_config(request: SinkContext) -> dict[str, Any]:
    """Return the configuration and the facts of a run, with secrets redacted."""
    values = dataclasses.asdict(request.config)
    for key, value in dataclasses.asdict(request.facts).items():
        values[f"run.{key}"] = value
    return dict(redact_all(values))


class Client(Protocol):
    """Interface of an open run in the client library of a service."""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Send the values of a step."""
        ...

    def finish(self) -> None:
        """Send pending values and end the run."""
        ...


class TrackerSink:
    """Send records to a service. The first failure logs a warning and disables the sink.

    ``open_client`` is called in the thread. ``fields`` returns the values of a record by the names of the
    service.
    """

    def __init__(
        self,
        title: str,
        open_client: Callable[[], Client],
        fields: Callable[[Record], Mapping[str, Any]],
    ) -> None:
        self._title = title
        self._open_client = open_client
        self._fields = fields
        self.num_dropped = 0
        self._failed = False
        self._closed = False
        self._queue: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(QUEUE_RECORDS)
        # Use a daemon thread, because a hanging service must not keep the process alive after training.
        self._thread = threading.Thread(target=self._work, name=title, daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue a logged step."""
        self.scalars(record.step, self._fields(record))

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Queue results on held-out data."""
        self.scalars(step, validation_tags(values))

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue the values of a step. Never blocks."""
        # Steps may still be logged while the service is closed.
        if self._failed or self._closed:
            return
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Send queued values and finish the run, within a time limit."""
        if self._closed:
            return
        self._closed = True
        try:
            # None ends the thread.
            self._queue.put(None, timeout=0 if self._failed else timeout_seconds)
        except queue.Full:
            self._failed = True
        if not self._failed:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                problem = f"{self._title} did not finish within {timeout_seconds:.0f} s"
                logger.warning(f"{problem}; its last records may be missing")
        # A slow service may lose records, which the file still has.
        if self.num_dropped:
            logger.warning(
                f"{self.num_dropped} records did not reach {self._title}; metrics.jsonl has them all"
            )

    def _work(self) -> None:
        """Thread function: open the run, send queued values, finish the run."""
        try:
            client = self._open_client()
            while (item := self._queue.get()) is not None:
                step, values = item
                client.log(values, step=step)
            client.finish()
        except (
            BaseException
        ) as error:  # also SystemExit, which W&B raises in this thread if it cannot log in
            reason = redact(f"{type(error).__name__}: {error}")
            logger.warning(f"{self._title} failed: {reason}; training continues without it")
            self._failed = True
