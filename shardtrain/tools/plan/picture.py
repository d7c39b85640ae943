"""Print a plan: memory of each pipeline rank as a bar, and time by kind of cost."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from shardtrain.tools.plan.planning import CUTS, RESTART_SECONDS, SECONDS_PER_FAILURE, Plan
from shardtrain.tools.plan.rank_memory import RankMemory
from shardtrain.utils.units import format_bytes, format_count, format_seconds

WIDTH = 80
_LEAST_WIDTH = 60
BAR = 36
_MARKS = "PGOAB+"
"""Characters of a bar: parameters, gradients, optimizer states, activations, buffers, overhead."""
_MOST_RANKS = 16


def lines(
    plan: Plan,
    tokens: float | None = None,
    dollars_per_hour: float | None = None,
    save_seconds: float = 0.0,
    columns: int | None = None,
) -> list[str]:
    """Return the lines of a plan.

    Args:
        plan: The plan.
        tokens: Number of training tokens, to print days, energy and cost.
        dollars_per_hour: Price per device, to print the cost.
        save_seconds: Interval between checkpoints. 0 without checkpoints.
        columns: Width of the terminal. Longer sentences are wrapped.
    """
    width = min(WIDTH, max(_LEAST_WIDTH, columns or WIDTH))
    text = [
        *_head(plan),
        "",
        *_memory(plan, width),
        "",
        *_time(plan, width),
        *_budget(plan, tokens, dollars_per_hour, save_seconds, width),
        *_verdict(plan),
    ]
    if columns is None:
        return text

    # Tables are narrow enough, so this only wraps sentences.
    wrapped: list[str] = []
    for line in text:
        if len(line) <= max(columns, width):
            wrapped.append(line)
        else:
            indent = " " * (len(line) - len(line.lstrip()))
            wrapped += textwrap.wrap(
                line,
                max(columns, width),
                initial_indent=indent,
                subsequent_indent=indent + "  ",
            )
    return wrapped


def _head(plan: Plan) -> Iterator[str]:
    axes = [f"{axis} {size}" for axis, size in plan.sizes.items() if size > 1]
    mesh = " x ".join(axes) or "one device"
    yield f"{plan.model}: {format_count(plan.num_params)} parameters on {plan.world_size} x {plan.device.name}"
    job = plan.job
    pipeline = ""
    if job.pp > 1:
        pipeline = f", {job.schedule} of {len(job.stages)} stages"
    yield f"mesh: {mesh}{pipeline}; recompute {job.recompute}"
    micro_batches = "micro-batch"
    if job.num_microbatches > 1:
        micro_batches = "micro-batches"
    yield (
        f"batch: {job.rows} x {job.seq_len} tokens, {job.num_microbatches} {micro_batches}, "
        f"{format_count(job.tokens_per_step)} tokens per step"
    )
    for note in job.notes:
        yield f"note: {note}"


def _memory(plan: Plan, width: int) -> Iterator[str]:
    """Yield the parts of the fullest rank's memory and their sum, then a bar for each pipeline rank."""
    capacity = plan.device.memory_bytes
    label = width - 32
    rank = plan.fullest
    gradients, activations, gathered = rank.at_peak
    rows = [
        ("P parameters", rank.parameters),
        ("G gradients", gradients),
        ("O optimizer state", rank.optimizer),
        ("A activations", activations),
        ("B FSDP buffers", gathered),
        ("+ driver and allocator", plan.overhead_bytes),
    ]
    if rank.on_host:
        rows.append(("of these in host memory", rank.on_host))
    place = ""
    if plan.job.pp > 1:
        place = (
            f" of pipeline rank {rank.pp_rank} ({rank.layers} layers, {rank.in_flight} in flight)"
        )
    yield f"peak memory{place}, reached in {rank.when}"
    for name, size in rows:
        yield f"  {name:<{label}}{format_bytes(size):>12}"
    total = format_bytes(plan.peak_bytes)
    share = plan.peak_bytes / capacity
    yield f"  {'sum':<{label}}{total:>12}  {share:.0%} of {format_bytes(capacity)}"
    yield from _bars_of_ranks(plan)


def _bars_of_ranks(plan: Plan) -> Iterator[str]:
    """Yield a bar for each pipeline rank. If there are more than _MOST_RANKS, only for the first and the last."""
    capacity = plan.device.memory_bytes
    shown = plan.ranks
    num_hidden = len(plan.ranks) - _MOST_RANKS
    if num_hidden > 0:
        half = _MOST_RANKS // 2
        shown = (*plan.ranks[:half], *plan.ranks[-half:])
    scale = max(plan.peak_bytes, capacity)
    for rank in shown:
        peak = rank.peak + plan.overhead_bytes
        mark = " !" if peak > capacity else ""
        yield f"  pp {rank.pp_rank:<4}|{_bar(rank, plan, scale)}|{format_bytes(peak):>11}{mark}"
    if num_hidden > 0:
        yield f"  ({num_hidden} ranks in between are not shown)"


def _bar(rank: RankMemory, plan: Plan, scale: int) -> str:
    """Return a bar with the parts of a rank's memory in the order of _MARKS, and ^ at the capacity
    of the device.
    """
    gradients, activations, gathered = rank.at_peak
    on_device = (rank.parameters, gradients, rank.optimizer)
    if rank.on_host:
        on_device = (0, 0, 0)
    sizes = (*on_device, activations, gathered, plan.overhead_bytes)
    # Each part ends at its rounded cumulative sum, so rounding errors do not add up.
    bar = ""
    total = 0
    for mark, size in zip(_MARKS, sizes, strict=True):
        total += size
        end = round(BAR * total / scale)
        bar += mark * (end - len(bar))
    bar = bar.ljust(BAR, ".")
    # Overwrite the mark at the capacity, unless it is beyond the right end.
    limit = min(BAR - 1, round(BAR * plan.device.memory_bytes / scale))
    if limit >= BAR - 1:
        return bar
    return bar[:limit] + "^" + bar[limit + 1 :]


def _time(plan: Plan, width: int) -> Iterator[str]:
    yield (
        f"step: {format_seconds(plan.time.seconds)}, {plan.tokens_per_second:,.0f} tokens/s, "
        f"{plan.tps:,.0f} per device, MFU {plan.mfu:.1%}"
    )
    for name, seconds in plan.time.largest(len(plan.time.costs)):
        share = seconds / plan.time.seconds
        # Smaller costs would have no bar, and are not worth a change.
        if share >= 0.005:
            bar = "#" * round((width - 50) * share)
            yield f"  {name:<28}{format_seconds(seconds):>10}{share:>7.1%} {bar}"
    yield "changes that reduce the largest:"
    for name, _ in plan.time.largest(3):
        advice = f"{name}: {CUTS[name]}"
        yield from textwrap.wrap(advice, width, initial_indent="  ", subsequent_indent="    ")


def _budget(
    plan: Plan,
    tokens: float | None,
    dollars_per_hour: float | None,
    save_seconds: float,
    width: int,
) -> Iterator[str]:
    """Yield the lines of a number of training tokens: days, energy and cost, without and with failures."""
    if tokens is None:
        return

    def cost_of(device_hours: float) -> str:
        if not dollars_per_hour:
            return ""
        return f", ${device_hours * dollars_per_hour:,.0f}"

    days = plan.days(tokens)
    hours = days * 24 * plan.world_size
    cost = cost_of(hours)
    megawatt_hours = hours * plan.device.power_watts / 1000 / 1000
    yield ""
    yield f"{format_count(tokens)} tokens without failures: {days:,.1f} days, {hours:,.0f} device hours{cost}"
    yield f"  at most {megawatt_hours:,.1f} MWh (devices at {plan.device.power_watts:g} W each)"
    if not save_seconds:
        yield "  no checkpoint is saved (checkpoint.enable): a failure would lose the entire run"
        return

    # Failures also cost the work since the last checkpoint. With too many, a run makes no progress.
    count, longer = plan.failures(tokens, save_seconds)
    outcome = "training never ends with failures: save more often"
    if longer < math.inf:
        cost = cost_of(longer * 24 * plan.world_size)
        outcome = (
            f"{longer:,.1f} days with {count:,.0f} failures, goodput {days / longer:.1%}{cost}"
        )
    text = (
        f"{outcome} (one failure in {SECONDS_PER_FAILURE / 3600:,.0f} device hours, "
        f"as in the run of Llama 3 405B; saved every {format_seconds(save_seconds)}, "
        f"restarts take {format_seconds(RESTART_SECONDS)})"
    )
    yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")


def _verdict(plan: Plan) -> Iterator[str]:
    yield ""
    spare = plan.device.memory_bytes - plan.peak_bytes
    if plan.fits:
        yield f"fits: {format_bytes(spare)} free on each device"
        return
    yield f"does not fit: {format_bytes(-spare)} too much; possible changes:"
    for fix in plan.fixes:
        yield f"  {fix}"
