"""Weights & Biases. Its usual environment variables configure the run."""

from __future__ import annotations

import os
from typing import Any

from shardtrain.metrics.sinks import SinkContext
from shardtrain.metrics.sinks.tensorboard import require_package
from shardtrain.metrics.sinks.tracker import Client, TrackerSink, run_config
from shardtrain.metrics.step_record import Record

INIT_SECONDS = 60.0
"""Maximum time to connect to the service at the start, in a separate thread."""


def run_options(all_ranks_rank: int | None) -> dict[str, Any]:
    """Return the arguments of ``wandb.init`` from WANDB_PROJECT, WANDB_TEAM and similar variables.

    ``all_ranks_rank`` is this rank if every rank logs. Then each rank is a separate run with the rank in
    its name.
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
        options["tags"] = [
            tag.strip() for tag in os.environ["WANDB_RUN_TAGS"].split(",") if tag.strip()
        ]
    if all_ranks_rank is not None:
        for key in ("name", "id"):
            if key in options:
                options[key] = f"{options[key]}-rank{all_ranks_rank}"
        options.setdefault("name", f"rank{all_ranks_rank}")
    if "id" in options and "resume_from" not in options and "fork_from" not in options:
        # A restarted job with the same ID continues its run. Without "allow", the client would refuse or
        # overwrite the run.
        options["resume"] = "allow"
    return options


def open_sink(request: SinkContext) -> TrackerSink | None:
    """Return the sink of this rank, or None if it is disabled.

    Raise ConfigError if the package is missing.
    """
    if not request.config.metrics.enable_wandb or not request.is_wanted:
        return None
    require_package("wandb", "metrics.enable_wandb")
    options = run_options(request.rank) | {
        "dir": str(request.folder),
        "config": run_config(request),
    }

    def open_client() -> Client:
        import wandb

        # Limit the time for which the client waits, and never prompt at the terminal.
        settings = wandb.Settings(
            init_timeout=INIT_SECONDS, login_timeout=INIT_SECONDS, console="off"
        )
        return wandb.init(settings=settings, **options)  # type: ignore[return-value]

    return TrackerSink(
        "W&B", open_client, lambda record: {**request.tags(record), **_known_names(record)}
    )


def _known_names(record: Record) -> dict[str, float]:
    """Return values by names that are common in W&B, in addition to TensorBoard's tags."""
    return {
        "loss": record.loss,
        "lr": record.lr,
        "step": record.step,
        "tokens_per_second": record.tokens_per_second,
        "step_time": record.step_seconds,
        "consumed_tokens": record.tokens_seen,
    }
