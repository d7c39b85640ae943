"""A tracking service at arm's length: a thread talks to it, so that neither a slow nor a dead one delays a step."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from shardtrain.metrics.record import Record
from shardtrain.metrics.sinks import SinkContext, validation_tags
from shardtrain.utils.log import logger, redact
from shardtrain.utils.redact import redact_all

QUEUE_RECORDS = 10_000
"""Records that wait for the service; later ones are dropped and counted."""

CLOSE_SECONDS = 30.0
"""How long the end of a run waits for the service."""


def run_config(request: SinkContext) -> dict[str, Any]:
    """The configuration and the facts of a run as a service may show them, without secrets."""
    facts = {f"run.{key}": value for key, value in dataclasses.asdict(request.facts).items()}
    return dict(redact_all(dataclasses.asdict(request.config) | facts))


class Client(Protocol):
    """One run of a service, as its own client opened it."""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Send the values of a step."""
        ...

    def finish(self) -> None:
        """Send what is left; nothing comes after."""
        ...


class TrackerSink:
    """Sends records to a service; the first failure is one warning, and the sink is silent from then on.

    ``open_client`` is called in the thread, and ``fields`` gives the values of a record by the service's names.
    """

    def __init__(
        self, title: str, open_client: Callable[[], Client], fields: Callable[[Record], Mapping[str, Any]]
    ) -> None:
        self._title = title
        self._open_client = open_client
        self._fields = fields
        self.num_dropped = 0
        self._failed = self._closed = False
        self._queue: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(QUEUE_RECORDS)
        # A daemon: a service that hangs must not keep the process alive after training.
        self._thread = threading.Thread(target=self._work, name=title, daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Hand over a logged step."""
        self.scalars(record.step, self._fields(record))

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over results on held-out data."""
        self.scalars(step, validation_tags(values))

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand over the values of a step; returns at once."""
        if self._failed or self._closed:
            return
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Send what is left and finish the run, for a bounded time."""
        if self._closed:
            return
        self._closed = True
        try:
            self._queue.put(None, timeout=0 if self._failed else timeout_seconds)
        except queue.Full:
            self._failed = True
        if not self._failed:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                logger.warning(
                    f"{self._title} did not finish within {timeout_seconds:.0f} s; its last records may be missing"
                )
        if self.num_dropped:
            logger.warning(f"{self.num_dropped} records did not reach {self._title}; metrics.jsonl has them all")

    def _work(self) -> None:
        """Open the run, log what arrives, finish it."""
        try:
            client = self._open_client()
            while (item := self._queue.get()) is not None:
                step, values = item
                client.log(values, step=step)
            client.finish()
        except BaseException as error:  # even SystemExit, which W&B raises in this thread where it cannot log in
            reason = redact(f"{type(error).__name__}: {error}")
            logger.warning(f"{self._title} failed: {reason}; training continues without it")
            self._failed = True
