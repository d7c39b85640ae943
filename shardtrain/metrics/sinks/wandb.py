"""Weights & Biases, at arm's length: a thread talks to it, so that neither a slow nor a dead service holds a step."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from shardtrain.config.schema import Config
from shardtrain.metrics.record import Record
from shardtrain.metrics.sinks import Request, validation_tags
from shardtrain.metrics.sinks.tensorboard import missing_package
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger, redact
from shardtrain.utils.redact import redact_all

QUEUE_RECORDS = 10_000
"""Records that wait for the service; later ones are dropped and counted."""

CLOSE_SECONDS = 30.0
"""How long the end of a run waits for the service."""

INIT_SECONDS = 60.0
"""How long the client may try to reach the service at start, in its own thread."""


def run_options(all_ranks_rank: int | None) -> dict[str, Any]:
    """Arguments of ``wandb.init`` from WANDB_PROJECT, _TEAM, _RUN_NAME, _RUN_ID, _RUN_NOTES and the like.

    ``all_ranks_rank`` is this rank where every rank logs: each is then a run of its own, with the rank in its name.
    """
    environment = {
        "entity": "WANDB_TEAM",
        "name": "WANDB_RUN_NAME",
        "id": "WANDB_RUN_ID",
        "notes": "WANDB_RUN_NOTES",
        "group": "WANDB_RUN_GROUP",
        "job_type": "WANDB_RUN_JOB_TYPE",
        "resume_from": "WANDB_RESUME_FROM",
        "fork_from": "WANDB_FORK_FROM",
    }
    options: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT") or "shardtrain"}
    options |= {key: os.environ[name] for key, name in environment.items() if os.environ.get(name)}
    if os.environ.get("WANDB_RUN_TAGS"):
        options["tags"] = [tag.strip() for tag in os.environ["WANDB_RUN_TAGS"].split(",") if tag.strip()]
    if all_ranks_rank is not None:
        for key in ("name", "id"):
            if key in options:
                options[key] = f"{options[key]}-rank{all_ranks_rank}"
        options.setdefault("name", f"rank{all_ranks_rank}")
    if "id" in options and "resume_from" not in options and "fork_from" not in options:
        # A restarted job with the same id continues its run; without "allow" the client would refuse or overwrite.
        options["resume"] = "allow"
    return options


def problem(config: Config) -> Problem | None:
    """Why the sink that a config asks for cannot be opened."""
    return missing_package("wandb", "metrics.enable_wandb") if config.metrics.enable_wandb else None


def open_sink(request: Request) -> WandbSink | None:
    """The sink of this rank."""
    if not request.config.metrics.enable_wandb or not request.is_wanted:
        return None
    facts = {f"run.{key}": value for key, value in dataclasses.asdict(request.facts).items()}
    run_config = redact_all(dataclasses.asdict(request.config) | facts)
    return WandbSink(request.folder, run_config, request.rank, request.tags)


class WandbSink:
    """Sends records to one W&B run; the first failure is one warning, and the sink is silent from then on.

    Raises ConfigError where the package is missing.
    """

    def __init__(
        self,
        run_folder: Path,
        run_config: Mapping[str, Any],
        all_ranks_rank: int | None = None,
        tags: Callable[[Record], Mapping[str, float]] | None = None,
    ) -> None:
        self._tags = tags or (lambda record: record.tags("cpu"))
        problem = missing_package("wandb", "metrics.enable_wandb")
        if problem:
            raise ConfigError(problem)
        self.num_dropped = 0
        self._failed = False
        self._closed = False
        self._queue: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(QUEUE_RECORDS)
        options = run_options(all_ranks_rank) | {"dir": str(run_folder), "config": dict(run_config)}
        # A daemon: a service that hangs must not keep the process alive after training.
        self._thread = threading.Thread(target=self._work, args=(options,), name="wandb", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Hand over a logged step."""
        self.scalars(record.step, {**self._tags(record), **_known_names(record)})

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over results on held-out data."""
        self.scalars(step, validation_tags(values))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
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
                logger.warning(f"W&B did not finish within {timeout_seconds:.0f} s; its last records may be missing")
        if self.num_dropped:
            logger.warning(f"{self.num_dropped} records did not reach W&B; metrics.jsonl has them all")

    def _work(self, options: dict[str, Any]) -> None:
        """Open the run, log what arrives, finish it."""
        try:
            import wandb

            run = wandb.init(settings=_settings(wandb), **options)
            while (item := self._queue.get()) is not None:
                step, values = item
                run.log(values, step=step)
            run.finish()
        except BaseException as error:  # even SystemExit, which the client raises in this thread where it cannot log in
            logger.warning(f"W&B failed: {redact(f'{type(error).__name__}: {error}')}; training goes on without it")
            self._failed = True


def _settings(wandb: ModuleType) -> object:
    """Bounds on the client's own waiting, and no question at the terminal."""
    return wandb.Settings(init_timeout=INIT_SECONDS, login_timeout=INIT_SECONDS, console="off")


def _known_names(record: Record) -> dict[str, float]:
    """Names that users of W&B know, beside the tags of TensorBoard."""
    return {
        "loss": record.loss,
        "lr": record.lr,
        "step": record.step,
        "tokens_per_second": record.tokens_per_second,
        "step_time": record.step_seconds,
        "consumed_tokens": record.tokens_seen,
    }
