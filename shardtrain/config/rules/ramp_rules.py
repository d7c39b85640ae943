"""Rules for ``training.batch_ramp`` and ``training.sequence_ramp``, and for the global batch on a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from shardtrain.config import ramps
from shardtrain.config.load import Loaded
from shardtrain.config.ramps import BATCH_RAMP, SEQUENCE_RAMP
from shardtrain.config.rules.values import MAX_NUMBER, any_of, divisors, problem
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.utils.errors import Problem

BATCH = "training.global_batch_size"
_EXAMPLES = {BATCH_RAMP: "[[0, 32], [1000, 64]]", SEQUENCE_RAMP: "[[0, 512], [1000, 2048]]"}


def check_ramps(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of the ramps that do not depend on the mesh."""
    training = loaded.config.training
    batch_problems = list(_check_form(loaded, BATCH_RAMP))
    yield from batch_problems
    # A ramp with a wrong form has no last size.
    if training.batch_ramp and not batch_problems:
        last = training.batch_ramp[-1][1]
        if training.global_batch_size not in (-1, last):
            yield problem(
                loaded,
                BATCH,
                rule=f"must be {last}, the last size of {BATCH_RAMP}",
                fix="remove it, or make it the last size of the ramp",
            )
        if training.last_batch != "rollover":
            yield problem(
                loaded,
                "training.last_batch",
                rule=f"requires steps of equal size, and {BATCH_RAMP} changes the size",
                fix="remove one of the two",
            )
    sequence_problems = list(_check_form(loaded, SEQUENCE_RAMP))
    yield from sequence_problems
    if training.sequence_ramp and not sequence_problems:
        yield from _check_lengths(loaded)


def _check_form(loaded: Loaded, option: str) -> Iterator[Problem]:
    """Yield problems unless a ramp is a list of pairs of a step and a size that both increase, from step 0."""
    ramp = loaded.value(option)
    if not ramp:
        return
    fix = f"write {_EXAMPLES[option]}"
    if any(len(pair) != 2 for pair in ramp):
        yield problem(loaded, option, "must have pairs of a step and a size", fix)
        return
    steps = [step for step, _ in ramp]
    sizes = [size for _, size in ramp]
    # The ramp determines the size of every step, including the first.
    if steps[0] != 0:
        yield problem(loaded, option, "must begin at step 0", fix)
    elif not _increases(steps):
        yield problem(loaded, option, "must have increasing steps", fix)
    if sizes[0] < 1 or not _increases(sizes):
        yield problem(loaded, option, "must have increasing sizes of at least 1", fix)
    if max(*steps, *sizes) > MAX_NUMBER:
        yield problem(loaded, option, f"must have numbers up to {MAX_NUMBER:,}", fix)


def _increases(values: list[int]) -> bool:
    return all(value < following for value, following in pairwise(values))


def _check_lengths(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of ``training.sequence_ramp``.

    A shorter sequence is a part of a row of ``seq_len`` tokens, so each length must divide ``seq_len``. Only
    next-token losses without noise support such parts.
    """
    training = loaded.config.training
    lengths = ramps.sequence_lengths(training)
    seq_len = training.seq_len
    # Rows have seq_len tokens, so the last length is that of entire rows.
    if lengths[-1] != seq_len:
        yield problem(
            loaded,
            SEQUENCE_RAMP,
            rule=f"must end with training.seq_len {seq_len}",
            fix=f"make {seq_len} its last length, or set seq_len to {lengths[-1]}",
        )
        return
    # A row is cut into equal parts.
    other_lengths = [length for length in lengths if seq_len % length]
    if other_lengths:
        yield problem(
            loaded,
            SEQUENCE_RAMP,
            rule=f"has {_listed(other_lengths)}, which must divide training.seq_len {seq_len}",
            fix=f"use {any_of(divisors(seq_len)[-5:])}",
        )
    if loaded.config.task.name not in OF_NEXT_TOKENS:
        yield problem(
            loaded,
            SEQUENCE_RAMP,
            rule=f'requires a task of packed texts, which task.name="{loaded.config.task.name}" is not',
            fix="remove it",
        )
    if training.neftune_noise_alpha is not None:
        yield problem(
            loaded,
            SEQUENCE_RAMP,
            rule="is not supported with training.neftune_noise_alpha, whose noise depends on the row",
            fix="remove one of the two",
        )


def check_batch_on(loaded: Loaded, data_ranks: int) -> Iterator[Problem]:
    """Yield a problem if a global batch is not a multiple of the local batch times the data-parallel ranks."""
    training = loaded.config.training
    # Sequences of one forward and backward pass, over all ranks.
    per_pass = training.local_batch_size * data_ranks
    # check_ramps reports a ramp with an invalid form.
    if per_pass < 1 or any(_check_form(loaded, BATCH_RAMP)):
        return
    sizes = ramps.batch_sizes(training)
    wrong_sizes = [size for size in sizes if size >= 1 and size % per_pass]
    if not wrong_sizes:
        return
    multiple = (
        f"local_batch_size {training.local_batch_size} times {data_ranks} data-parallel ranks"
    )
    if training.batch_ramp:
        yield problem(
            loaded,
            BATCH_RAMP,
            rule=f"has {_listed(wrong_sizes)}, which must be multiples of {per_pass} ({multiple})",
            fix="use multiples, or lower local_batch_size",
        )
        return
    nearby = nearest_multiples(wrong_sizes[0], per_pass)
    yield problem(
        loaded,
        BATCH,
        rule=f"is not a multiple of {multiple}",
        fix=f"use {any_of(nearby)}, or -1",
    )


def ramp_notes(loaded: Loaded) -> list[str]:
    """Return a note for each ramp that the run does not complete."""
    training = loaded.config.training
    notes = []
    for option in (BATCH_RAMP, SEQUENCE_RAMP):
        ramp = loaded.value(option)
        # With epochs, the number of steps is not known here.
        if ramp and training.epochs is None and training.steps <= ramp[-1][0]:
            notes.append(
                f"{option}: the run ends after {training.steps} steps, before step {ramp[-1][0]} of the ramp"
            )
    return notes


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """Return the nearest multiples of ``divisor`` below and above a value. 0 is not returned."""
    below = value // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple]


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
