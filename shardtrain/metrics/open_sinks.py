"""Open the metric sinks of a run, in the order in which they receive records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardtrain.config.schema import Config
from shardtrain.metrics.sinks import Sink, SinkContext, console
from shardtrain.metrics.sinks.metrics_jsonl import JsonlFiles
from shardtrain.metrics.sinks.own_sink import OwnSink
from shardtrain.metrics.step_record import RunFacts


def open_sinks(config: Config, run_folder: Path, facts: RunFacts) -> Iterator[Sink]:
    """Yield the sinks of this rank, and import their libraries.

    Raises:
        ConfigError: the package of an enabled sink is missing.
    """
    yield console.Console(facts.total_steps)
    request = SinkContext(config, run_folder, facts)
    if facts.is_writer:
        files = JsonlFiles(run_folder, facts.start_step)
        yield files
        request = dataclasses.replace(
            request, records=files.records.history, validations=files.validations.history
        )
    for module in _optional_sinks(config):
        sink = module.open_sink(request)
        if sink is not None:
            yield sink
    if request.is_wanted:
        yield from (OwnSink(path, request) for path in config.metrics.sinks)
    if facts.is_writer:
        files.forget()  # the history is needed only while sinks open


def _optional_sinks(config: Config) -> Iterator[Any]:
    """Yield the modules of the optional sinks that ``[metrics]`` enables, in the order in which records reach them."""
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
