"""What the log says of a run when it begins, and when it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from shardtrain.metrics.record import TOTAL_SPEED, Record, RunFacts
from shardtrain.utils.log import logger
from shardtrain.utils.sparkline import bars_for, sparkline
from shardtrain.utils.units import format_count, format_seconds


class Steps(NamedTuple):
    """How far a run has come, and what this part of it took."""

    last_step: int
    tokens: int
    seconds: float


def log_header(facts: RunFacts, peak_flops: float | None) -> None:
    """Say what runs, and how the MFU is measured or why it is not."""
    steps = f"steps {facts.start_step + 1} to {facts.total_steps}"
    if facts.start_step >= facts.total_steps:
        steps = f"finished at step {facts.start_step}"
    logger.info(
        f"{facts.description or 'run'}: {facts.model or 'model'} with {format_count(facts.num_params)} parameters "
        f"on {facts.world_size} x {facts.device_name or facts.device_type}, {steps}"
    )
    if peak_flops:
        logger.info(f"MFU against a dense peak of {peak_flops / 1e12:,.1f} TFLOP/s in {facts.compute_dtype}")
    else:
        logger.info(
            f"the {facts.compute_dtype} peak of {facts.device_name or facts.device_type} is not known, so MFU is "
            "left out; set metrics.peak_flops to have it"
        )


def log_summary(
    facts: RunFacts,
    done: Steps,
    first: Record | None,
    last: Record | None,
    losses: Sequence[tuple[int, float]],
    notes: Sequence[str],
) -> None:
    """Say what a run did and how fast, draw its ``losses`` by step, and give the ``notes`` of sinks."""
    steps = done.last_step - facts.start_step
    if not steps and done.last_step >= facts.total_steps:
        logger.info(
            f"the run was finished already, at step {done.last_step}: to continue, raise training.steps or epochs; "
            "to start from scratch choose another job.dump_folder"
        )
        return
    if not steps:
        logger.info("no step was trained")
        return

    # What was trained, how fast, and the curve of the loss.
    loss = f"loss {first.loss:.4f} -> {last.loss:.4f}, " if first and last else ""
    speed = f"{done.tokens / done.seconds:,.0f} {TOTAL_SPEED}" if done.seconds > 0 else "-"
    logger.info(
        f"done: {steps} steps (to step {done.last_step}) in {format_seconds(done.seconds)}, {loss}"
        f"{format_count(done.tokens)} tokens, {speed}"
    )
    if len(losses) > 2:
        curve = sparkline([step for step, _ in losses], [loss for _, loss in losses], 60, bars_for(sys.stderr))
        logger.info(f"loss {curve}")
    for note in filter(None, notes):
        logger.info(note)
