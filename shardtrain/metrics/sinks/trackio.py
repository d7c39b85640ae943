"""trackio: W&B's interface with local files or, if TRACKIO_SPACE_ID is set, with a Hugging Face Space."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shardtrain.metrics.sinks import SinkContext
from shardtrain.metrics.sinks.tensorboard import require_package
from shardtrain.metrics.sinks.tracker import Client, TrackerSink, run_config


def open_sink(request: SinkContext) -> TrackerSink | None:
    """Return the sink of this rank, or None if it is disabled.

    Raise ConfigError if the package is missing.
    """
    if not request.config.metrics.enable_trackio or not request.is_wanted:
        return None
    require_package("trackio", "metrics.enable_trackio")
    return TrackerSink("trackio", lambda: _Run(request), lambda record: record.json_fields())


class _Run(Client):
    """One trackio run. A resumed run continues the run of the same name."""

    def __init__(self, request: SinkContext) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((request.folder / "trackio").absolute()))
        import trackio

        name = os.environ.get("TRACKIO_RUN_NAME") or request.folder.absolute().name
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or "shardtrain",
            name=name if request.rank is None else f"{name}-rank{request.rank}",
            space_id=os.environ.get("TRACKIO_SPACE_ID") or None,
            config=run_config(request),
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # log only the metrics of metrics.jsonl
            auto_log_cpu=False,
        )

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log({name: value for name, value in values.items() if name != "step"}, step=step)

    def finish(self) -> None:
        self._run.finish()
