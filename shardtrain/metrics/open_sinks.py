"""Which sinks a run writes to, opened in the order in which they are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardtrain.config.schema import Config
from shardtrain.metrics.record import RunFacts
from shardtrain.metrics.sinks import Sink, SinkContext, console
from shardtrain.metrics.sinks.metrics_jsonl import JsonlFiles
from shardtrain.metrics.sinks.own_sink import OwnSink


def open_sinks(config: Config, run_folder: Path, facts: RunFacts) -> Iterator[Sink]:
    """The sinks of this rank; their libraries are imported here, and raise ConfigError where one is missing."""
    yield console.Console(facts.total_steps)
    request = SinkContext(config, run_folder, facts)
    if facts.is_writer:
        files = JsonlFiles(run_folder, facts.start_step)
        yield files
        request = dataclasses.replace(request, records=files.records.history, validations=files.validations.history)
    for module in _optional_sinks(config):
        sink = module.open_sink(request)
        if sink is not None:
            yield sink
    if request.is_wanted:
        yield from (OwnSink(path, request) for path in config.metrics.sinks)
    if facts.is_writer:
        files.forget()  # an earlier part of the run is needed while sinks open; it would stay in memory


def _optional_sinks(config: Config) -> Iterator[Any]:
    """The modules of the sinks that ``[metrics]`` turns on, in the order in which they are written."""
    options = config.metrics
    if options.enable_tensorboard:
        from shardtrain.metrics.sinks import tensorboard

        yield tensorboard
    if options.enable_wandb:
        from shardtrain.metrics.sinks import wandb

        yield wandb
    if options.enable_mlflow:
        from shardtrain.metrics.sinks import mlflow

        yield mlflow
    if options.enable_trackio:
        from shardtrain.metrics.sinks import trackio

        yield trackio
    if options.prometheus_port:
        from shardtrain.metrics.sinks import prometheus

        yield prometheus
