"""MLflow: log to the server at MLFLOW_TRACKING_URI or, if it is not set, to files in the run folder."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.metrics.sinks import SinkContext
from shardtrain.metrics.sinks.tensorboard import require_package
from shardtrain.metrics.sinks.tracker import Client, TrackerSink, run_config
from shardtrain.utils import atomic_io

RUN_ID_FILE = "mlflow_run_id"
"""File in the run folder with the ID of the MLflow run, which a resumed run continues."""
_PARAMETER_LENGTH = 500
_AT_A_TIME = 100
"""Maximum number of parameters per request."""


def open_sink(request: SinkContext) -> TrackerSink | None:
    """Return the sink of this rank, or None if it is disabled.

    Raise ConfigError if the package is missing.
    """
    if not request.config.metrics.enable_mlflow or not request.is_wanted:
        return None
    require_package("mlflow", "metrics.enable_mlflow", pip="mlflow-skinny")
    return TrackerSink("MLflow", lambda: _Run(request), lambda record: record.json_fields())


class _Run(Client):
    """One MLflow run. Uses a client object instead of the library's global state."""

    def __init__(self, request: SinkContext) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        # Allow files for runs without a server, although the library recommends them only for small teams.
        # Limit the retries, so a dead server delays the thread for only a minute.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        where = (
            os.environ.get("MLFLOW_TRACKING_URI") or (request.folder / "mlruns").absolute().as_uri()
        )
        self._client = MlflowClient(tracking_uri=where)
        kept = Path(request.folder) / (
            RUN_ID_FILE if request.rank is None else f"{RUN_ID_FILE}.{request.rank}"
        )

        # A resumed run continues the same MLflow run.
        known = kept.read_text().strip() if request.facts.start_step and kept.is_file() else ""
        if known:
            self._id = known
            self._client.set_terminated(self._id, "RUNNING")
            return

        # A new run, with the configuration as its parameters.
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "shardtrain"
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        title = os.environ.get("MLFLOW_RUN_NAME") or (request.config.job.description or None)
        self._id = self._client.create_run(experiment, run_name=title).info.run_id
        atomic_io.write(kept, f"{self._id}\n")
        flat = list(_flat(run_config(request)))
        for start in range(0, len(flat), _AT_A_TIME):
            params = [
                Param(key, value[:_PARAMETER_LENGTH])
                for key, value in flat[start : start + _AT_A_TIME]
            ]
            self._client.log_batch(self._id, params=params)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Send the finite numbers. MLflow supports no other values."""
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = []
        for name, value in values.items():
            if type(value) in (int, float) and math.isfinite(value) and name != "step":
                # Replace the characters that MLflow does not allow in names.
                legal = "".join(char if char.isalnum() or char in "_-. /" else "_" for char in name)
                metrics.append(Metric(legal, float(value), now, step))
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs = []
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, str(value)))
    return pairs
