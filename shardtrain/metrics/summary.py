"""Log lines at the start and at the end of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from shardtrain.metrics.step_record import TOTAL_SPEED, Record, RunFacts
from shardtrain.utils.log import logger
from shardtrain.utils.sparkline import bars_for, sparkline
from shardtrain.utils.units import format_count, format_seconds


class Steps(NamedTuple):
    """Last step of a run, with the tokens and seconds of this process."""

    last_step: int
    tokens: int
    seconds: float


def log_header(facts: RunFacts, peak_flops: float | None) -> None:
    """Log the model, the devices, the steps, and the peak FLOP/s to which MFU is relative."""
    # A resumed run may have no step left.
    steps = f"steps {facts.start_step + 1} to {facts.total_steps}"
    if facts.start_step >= facts.total_steps:
        steps = f"finished at step {facts.start_step}"
    logger.info(
        f"{facts.description or 'run'}: {facts.model or 'model'} with {format_count(facts.num_params)} parameters "
        f"on {facts.world_size} x {facts.device_name or facts.device_type}, {steps}"
    )
    if peak_flops:
        logger.info(
            f"MFU against a dense peak of {peak_flops / 1e12:,.1f} TFLOP/s in {facts.compute_dtype}"
        )
    else:
        logger.info(
            f"the {facts.compute_dtype} peak of {facts.device_name or facts.device_type} is unknown, so MFU is "
            "omitted; set metrics.peak_flops to log it"
        )


def log_summary(
    facts: RunFacts,
    done: Steps,
    first: Record | None,
    last: Record | None,
    losses: Sequence[tuple[int, float]],
    notes: Sequence[str],
) -> None:
    """Log the steps, tokens and speed of a run, and its loss curve.

    Args:
        facts: constant facts of the run.
        done: the steps of this process.
        first: the first record with a loss.
        last: the last record with a loss.
        losses: (step, loss) of logged steps, for the curve.
        notes: lines of the sinks.
    """
    # Without a step there is neither a loss nor a speed.
    steps = done.last_step - facts.start_step
    if not steps and done.last_step >= facts.total_steps:
        logger.info(
            f"the run had already finished at step {done.last_step}: to continue, increase training.steps or epochs; "
            "to start from scratch, choose another job.dump_folder"
        )
        return
    if not steps:
        logger.info("no step was trained")
        return

    loss = ""
    if first and last:
        loss = f"loss {first.loss:.4f} -> {last.loss:.4f}, "
    speed = "-"
    if done.seconds > 0:
        speed = f"{done.tokens / done.seconds:,.0f} {TOTAL_SPEED}"
    logger.info(
        f"done: {steps} steps (to step {done.last_step}) in {format_seconds(done.seconds)}, {loss}"
        f"{format_count(done.tokens)} tokens, {speed}"
    )
    # One or two points do not show a curve.
    if len(losses) > 2:
        logged_steps, values = zip(*losses, strict=True)
        curve = sparkline(logged_steps, values, 60, bars_for(sys.stderr))
        logger.info(f"loss {curve}")
    for note in filter(None, notes):
        logger.info(note)
