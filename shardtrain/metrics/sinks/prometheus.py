"""Prometheus: an HTTP endpoint with the last logged step as gauges, which a server scrapes during the run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from shardtrain.metrics.sinks import SinkContext
from shardtrain.metrics.sinks.tensorboard import require_package
from shardtrain.metrics.step_record import Record
from shardtrain.utils.log import logger


def open_sink(request: SinkContext) -> PrometheusSink | None:
    """Return the sink of the writer rank, or None if it is disabled. If the port is not available, log a warning.

    Raises:
        ConfigError: the package is missing.
    """
    options = request.config.metrics
    if not options.prometheus_port or not request.facts.is_writer:
        return None
    require_package("prometheus_client", "metrics.prometheus_port", value=options.prometheus_port)
    labels = {"model": request.facts.model, "run": str(request.folder.absolute().name)}
    try:
        return PrometheusSink(options.prometheus_port, options.prometheus_address, labels)
    except OSError as error:
        where = f"{options.prometheus_address}:{options.prometheus_port}"
        logger.warning(
            f"cannot serve Prometheus metrics at {where}: {error.strerror}; training continues without them"
        )
        return None


class PrometheusSink:
    """Gauges named like the fields of ``metrics.jsonl``: ``shardtrain_loss``,
    ``shardtrain_tokens_per_second``, ...

    Raises:
        OSError: the server cannot listen on the address.
    """

    def __init__(self, port: int, address: str, labels: Mapping[str, str]) -> None:
        import prometheus_client

        self._labels = dict(labels)
        # Use a separate registry, because the library's default registry also exports facts about the
        # process.
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._server, self._thread = prometheus_client.start_http_server(
            port, address, self._registry
        )
        self.port = int(self._server.server_port)

    def write(self, record: Record) -> None:
        """Set the gauges to a logged step."""
        self._set(
            {name: value for name, value in record.json_fields().items() if name != "order_hash"}
        )

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges to results on held-out data."""
        self._set(
            {f"validation_{name}": value for name, value in values.items()}
            | {"validation_step": step}
        )

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, values: Mapping[str, Any]) -> None:
        from prometheus_client import Gauge

        for name, value in values.items():
            # Prometheus allows no other characters in a name.
            legal = re.sub(r"[^A-Za-z0-9]", "_", name)
            if legal not in self._gauges:
                help_text = f"{name} of the last logged step"
                self._gauges[legal] = Gauge(
                    f"shardtrain_{legal}", help_text, list(self._labels), registry=self._registry
                )
            gauge = self._gauges[legal].labels(**self._labels)
            # A value that is unknown at this step is NaN instead of the value of an earlier step.
            gauge.set(math.nan if value is None else value)
