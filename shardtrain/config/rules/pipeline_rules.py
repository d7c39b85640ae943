"""Rules of pipeline and context parallelism: what a schedule needs, and what may not be combined with it."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config import derived, stages
from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.rules.schedule_file import check_schedule_file
from shardtrain.config.rules.values import any_of, problem
from shardtrain.utils.errors import Problem

_DEGREE = "parallelism.pipeline_parallel_degree"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_MODULES = "parallelism.module_fqns_per_model_part"


def check_pipeline(loaded: Loaded) -> Iterator[Problem]:
    """The stages of the schedule are there, none is empty, and there are micro-batches enough for them."""
    p = loaded.config.parallelism
    sizes = model_shape(loaded)
    schedule = stages.schedule_name(p.pipeline_parallel_schedule)
    if schedule is None:
        near = nearest(p.pipeline_parallel_schedule, stages.SCHEDULES)
        fix = (f"did you mean {near}? " if near else "") + f"schedules are {', '.join(stages.SCHEDULES)}"
        yield problem(loaded, _SCHEDULE, "is not a schedule", fix)
    if p.pipeline_parallel_degree < 2 or schedule is None:
        return
    yield from _check_combinations(loaded, schedule)
    layers = (sizes or {}).get("num_layers")
    # Too few layers, and a negative number of layers per stage, are reported by rules of their own
    if p.module_fqns_per_model_part is None and (
        not isinstance(layers, int)
        or layers < p.pipeline_parallel_degree
        or (p.pipeline_parallel_layers_per_stage or 1) < 1
    ):
        return
    count = stages.num_stages(p, layers or 0)
    found = list(_check_stages(loaded, schedule, count))
    if not found and p.module_fqns_per_model_part is None and layers:
        found = list(_check_layers(loaded, layers, count))
    yield from found
    if found:
        return
    # Micro-batches are counted against the stages, so stages that are wrong would only give more wrong numbers
    rows = known_rows(loaded)
    if rows is not None:
        yield from check_microbatches(loaded, rows, count)
    if p.pipeline_parallel_schedule_csv and p.pipeline_parallel_microbatch_size > 0:
        yield from check_schedule_file(loaded, count, rows and rows // p.pipeline_parallel_microbatch_size)


def _check_combinations(loaded: Loaded, schedule: str) -> Iterator[Problem]:
    config = loaded.config
    if schedule in stages.SPLIT_BACKWARD and config.compile.enable and "model" in config.compile.components:
        rule = "computes gradients of inputs and weights apart, which torch.compile gets wrong without a word"
        fix = "set compile.enable = false, or use 1F1B, GPipe, Interleaved1F1B or LoopedBFS"
        yield problem(loaded, _SCHEDULE, rule, fix)
    csv = config.parallelism.pipeline_parallel_schedule_csv
    if schedule in stages.FROM_CSV and not csv:
        fix = "name the file in parallelism.pipeline_parallel_schedule_csv, or use a named schedule"
        yield problem(loaded, _SCHEDULE, "means a schedule of your own, and there is none", fix)
    if csv and schedule != "PipelineScheduleMulti":
        rule = "is only read by the schedule PipelineScheduleMulti"
        fix = f'set pipeline_parallel_schedule = "PipelineScheduleMulti" in place of "{schedule}"'
        yield problem(loaded, "parallelism.pipeline_parallel_schedule_csv", rule, fix)
    if config.parallelism.module_fqns_per_model_part is not None and loaded.is_set(_PER_STAGE):
        yield problem(loaded, _PER_STAGE, f"cannot hold beside {_MODULES}", "keep one of the two")


def _check_stages(loaded: Loaded, schedule: str, count: int) -> Iterator[Problem]:
    """Stages per rank: one, exactly two, or at least two, as the schedule wants."""
    p = loaded.config.parallelism
    degree = p.pipeline_parallel_degree
    option = _MODULES if p.module_fqns_per_model_part is not None else _PER_STAGE
    option = option if loaded.is_set(option) else _SCHEDULE
    if count % degree:
        rule = f"makes {count} stages, which {degree} pipeline ranks cannot share equally"
        yield problem(loaded, option, rule, f"make {any_of([n * degree for n in (1, 2, 3)])} stages")
    elif schedule in stages.SINGLE and count != degree:
        rule = f"makes {count} stages, and {schedule} takes one per rank ({degree})"
        yield problem(loaded, option, rule, f"make {degree} stages, or use Interleaved1F1B")
    elif schedule in stages.V_SHAPED and count != 2 * degree:
        rule = f"makes {count} stages, and {schedule} takes two per rank ({2 * degree})"
        yield problem(loaded, option, rule, f"make {2 * degree} stages, or use Interleaved1F1B")
    elif schedule in stages.LOOPED and count < 2 * degree and not p.pipeline_parallel_schedule_csv:
        rule = f"makes {count} stages, and {schedule} takes at least two per rank ({2 * degree})"
        yield problem(loaded, option, rule, f"make {2 * degree} stages or more, or use 1F1B")


def _check_layers(loaded: Loaded, layers: int, count: int) -> Iterator[Problem]:
    """Every stage gets a layer."""
    ranges = stages.layers_per_stage(loaded.config.parallelism, layers)
    empty = [index for index, part in enumerate(ranges) if not part]
    if not empty:
        return
    p = loaded.config.parallelism
    less = p.pipeline_parallel_first_stage_less_layers + p.pipeline_parallel_last_stage_less_layers
    rule = f"leaves stage {empty[0]} of {count} without a layer of the model's {layers}"
    fix = f"use a schedule or degree with at most {layers} stages"
    if less and count <= layers:
        fix = (
            "set pipeline_parallel_first_stage_less_layers and pipeline_parallel_last_stage_less_layers to 0, or " + fix
        )
    yield problem(loaded, _PER_STAGE if loaded.is_set(_PER_STAGE) else _DEGREE, rule, fix)


def known_rows(loaded: Loaded, world_size: int | None = None) -> int | None:
    """Sequences of one step on a data-parallel rank, or None where that depends on the number of ranks."""
    t = loaded.config.training
    p = loaded.config.parallelism
    if t.global_batch_size == -1:
        return t.local_batch_size
    if world_size is None and p.data_parallel_shard_degree == -1:
        return None
    world_size = world_size or derived.other_degrees(loaded.config) * p.data_parallel_shard_degree
    ranks = derived.data_parallel_degree(loaded.config, world_size)
    return t.global_batch_size // ranks if ranks else None


def check_microbatches(loaded: Loaded, rows: int, count: int) -> Iterator[Problem]:
    """Check that there are enough micro-batches, and that they fill the rounds of an interleaved schedule.

    Looped schedules also run with fewer micro-batches than stages, with a larger bubble; see ``pipeline_notes``.
    """
    p = loaded.config.parallelism
    size = p.pipeline_parallel_microbatch_size
    degree = p.pipeline_parallel_degree
    if size < 1 or loaded.config.training.local_batch_size % size:
        return  # reported by itself
    option = "parallelism.pipeline_parallel_microbatch_size"
    batches = rows // size
    schedule = stages.schedule_name(p.pipeline_parallel_schedule)
    if batches < count and (schedule in stages.SINGLE or schedule == "DualPipeV" or batches < 1):
        rule = f"makes {batches} micro-batches of the {rows} sequences of a step, fewer than the {count} stages"
        fix = f"raise training.local_batch_size or training.global_batch_size to {count * size} per data rank"
        yield problem(loaded, option, rule, f"{fix}, or use smaller micro-batches")
    elif schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, batches // degree)
        if batches % rounds:
            rule = f"makes {batches} micro-batches, which do not fill rounds of {degree}"
            nearby = [n * size for n in (batches // degree * degree, -(-batches // degree) * degree)]
            yield problem(loaded, option, rule, f"make the sequences of a step {any_of(nearby)} per data rank")


def pipeline_notes(loaded: Loaded) -> list[str]:
    """Return a note if a step has fewer micro-batches than stages."""
    p = loaded.config.parallelism
    rows = known_rows(loaded)
    if p.pipeline_parallel_degree < 2 or rows is None or p.pipeline_parallel_microbatch_size < 1:
        return []
    batches = rows // p.pipeline_parallel_microbatch_size
    layers = (model_shape(loaded) or {}).get("num_layers")
    count = stages.num_stages(p, layers) if isinstance(layers, int) else 0
    if batches >= count:
        return []
    return [
        f"parallelism.pipeline_parallel_microbatch_size: {batches} micro-batches for {count} stages: ranks wait for "
        "most of a step (raise training.local_batch_size)"
    ]


def check_context(loaded: Loaded) -> Iterator[Problem]:
    """What the ways of context parallelism need."""
    p = loaded.config.parallelism
    sizes = model_shape(loaded) or {}
    cp = p.context_parallel_degree
    tp = p.tensor_parallel_degree
    if cp < 2 or tp < 1:
        return
    if p.context_parallel_load_balancer == "ptrr":
        rule = "balances FlexAttention's block masks, which this attention does not use"
        yield problem(loaded, "parallelism.context_parallel_load_balancer", rule, 'use "headtail" or "none"')
    heads = sizes.get("num_kv_heads") or sizes.get("num_heads")
    if p.context_parallel_method != "ulysses" or not isinstance(heads, int):
        return
    if heads % (tp * cp):
        legal = [n for n in range(1, heads + 1) if heads % (tp * n) == 0]
        what = f"the {heads} KV heads" + (f", {tp} ways split by tensor_parallel_degree," if tp > 1 else "")
        rule = f'does not divide {what} as context_parallel_method="ulysses" needs'
        fix = f"use {any_of(legal)}, or " if legal else "use "
        yield problem(loaded, "parallelism.context_parallel_degree", rule, fix + 'context_parallel_method = "ring"')
