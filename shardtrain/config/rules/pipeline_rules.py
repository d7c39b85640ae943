"""Rules about pipeline and context parallelism: requirements of schedules, and combinations they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config import derived, ramps, stages
from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.rules.schedule_file import check_schedule_file
from shardtrain.config.rules.values import any_of, problem
from shardtrain.utils.errors import Problem

DEGREE = "parallelism.pipeline_parallel_degree"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_MODULES = "parallelism.module_fqns_per_model_part"


def check_pipeline(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of the schedule, of its stages, and of the number of micro-batches."""
    p = loaded.config.parallelism
    sizes = model_shape(loaded)
    schedule = stages.schedule_name(p.pipeline_parallel_schedule)
    if schedule is None:
        near = nearest(p.pipeline_parallel_schedule, stages.SCHEDULES)
        suggestion = f"did you mean {near}? " if near else ""
        yield problem(
            loaded,
            _SCHEDULE,
            rule="is not a schedule",
            fix=f"{suggestion}schedules are {', '.join(stages.SCHEDULES)}",
        )
    if p.pipeline_parallel_degree < 2 or schedule is None:
        return
    yield from _check_combinations(loaded, schedule)
    layers = (sizes or {}).get("num_layers")
    is_automatic = p.module_fqns_per_model_part is None
    if is_automatic:
        # Other rules report too few layers, and a negative number of layers per stage.
        has_layers = isinstance(layers, int) and layers >= p.pipeline_parallel_degree
        if not has_layers or (p.pipeline_parallel_layers_per_stage or 1) < 1:
            return
    count = stages.num_stages(p, layers or 0)
    problems = list(_check_stages(loaded, schedule, count))
    if not problems and is_automatic and layers:
        problems = list(_check_layers(loaded, layers, count))
    yield from problems
    if problems:
        return

    # The number of micro-batches depends on the stages, so it is only checked if the stages are right.
    all_rows = rows_of_steps(loaded)
    for rows in all_rows:
        yield from check_microbatches(loaded, rows, count)
    if not p.pipeline_parallel_schedule_csv or p.pipeline_parallel_microbatch_size < 1:
        return
    if len(loaded.config.training.batch_ramp) > 1:
        yield problem(
            loaded,
            ramps.BATCH_RAMP,
            rule="changes the number of micro-batches, which pipeline_parallel_schedule_csv fixes",
            fix="remove it, or use a named schedule",
        )
        return
    num_micro_batches = None
    if all_rows:
        num_micro_batches = all_rows[-1] // p.pipeline_parallel_microbatch_size
    yield from check_schedule_file(loaded, count, num_micro_batches)


def _check_combinations(loaded: Loaded, schedule: str) -> Iterator[Problem]:
    """The schedule can be compiled, a CSV file has its schedule, and the number of stages is
    specified once.
    """
    config = loaded.config
    if (
        schedule in stages.SPLIT_BACKWARD
        and config.compile.enable
        and "model" in config.compile.components
    ):
        yield problem(
            loaded,
            _SCHEDULE,
            rule=(
                "computes gradients of inputs and weights separately, for which torch.compile returns wrong gradients"
            ),
            fix="set compile.enable = false, or use 1F1B, GPipe, Interleaved1F1B or LoopedBFS",
        )
    csv = config.parallelism.pipeline_parallel_schedule_csv
    if schedule in stages.FROM_CSV and not csv:
        yield problem(
            loaded,
            _SCHEDULE,
            rule="requires a CSV file with the schedule",
            fix="name the file in parallelism.pipeline_parallel_schedule_csv, or use a named schedule",
        )
    if csv and schedule != "PipelineScheduleMulti":
        yield problem(
            loaded,
            "parallelism.pipeline_parallel_schedule_csv",
            rule="is only read by the schedule PipelineScheduleMulti",
            fix=f'set pipeline_parallel_schedule = "PipelineScheduleMulti" instead of "{schedule}"',
        )
    if config.parallelism.module_fqns_per_model_part is not None and loaded.is_set(_PER_STAGE):
        yield problem(loaded, _PER_STAGE, f"has no effect with {_MODULES}", "keep one of the two")


def _check_stages(loaded: Loaded, schedule: str, count: int) -> Iterator[Problem]:
    """Each rank has the number of stages that the schedule requires: one, exactly two, or at least two."""
    p = loaded.config.parallelism
    degree = p.pipeline_parallel_degree
    # Name the option that determines the number of stages.
    option = _PER_STAGE
    if p.module_fqns_per_model_part is not None:
        option = _MODULES
    if not loaded.is_set(option):
        option = _SCHEDULE
    rule = ""
    if count % degree:
        rule = f"which {degree} pipeline ranks cannot divide equally"
        fix = f"make {any_of([n * degree for n in (1, 2, 3)])} stages"
    elif schedule in stages.SINGLE and count != degree:
        rule = f"and {schedule} requires one per rank ({degree})"
        fix = f"make {degree} stages, or use Interleaved1F1B"
    elif schedule in stages.V_SHAPED and count != 2 * degree:
        rule = f"and {schedule} requires two per rank ({2 * degree})"
        fix = f"make {2 * degree} stages, or use Interleaved1F1B"
    elif schedule in stages.LOOPED and count < 2 * degree and not p.pipeline_parallel_schedule_csv:
        rule = f"and {schedule} requires at least two per rank ({2 * degree})"
        fix = f"make {2 * degree} stages or more, or use 1F1B"
    if rule:
        yield problem(loaded, option, f"makes {count} stages, {rule}", fix)


def _check_layers(loaded: Loaded, layers: int, count: int) -> Iterator[Problem]:
    """Every stage has a layer."""
    ranges = stages.layers_per_stage(loaded.config.parallelism, layers)
    empty = [index for index, part in enumerate(ranges) if not part]
    if not empty:
        return
    p = loaded.config.parallelism
    reserved = (
        p.pipeline_parallel_first_stage_less_layers + p.pipeline_parallel_last_stage_less_layers
    )
    rule = f"leaves stage {empty[0]} of {count} without a layer of the model's {layers}"
    fix = f"use a schedule or degree with at most {layers} stages"
    # There are enough layers if the embedding and the head do not count as layers.
    if reserved and count <= layers:
        ends = (
            "pipeline_parallel_first_stage_less_layers and pipeline_parallel_last_stage_less_layers"
        )
        fix = f"set {ends} to 0, or {fix}"
    option = _PER_STAGE if loaded.is_set(_PER_STAGE) else DEGREE
    yield problem(loaded, option, rule, fix)


def rows_of_steps(loaded: Loaded, world_size: int | None = None) -> list[int]:
    """Return the sequences per step on a data-parallel rank, for each size of a batch ramp.

    Empty if they depend on an unknown number of ranks.
    """
    t = loaded.config.training
    p = loaded.config.parallelism
    sizes = ramps.batch_sizes(t)
    # By default, a step is one local batch per data-parallel rank.
    if not sizes:
        return [t.local_batch_size]
    # A shard degree of -1 depends on the number of ranks.
    if world_size is None and p.data_parallel_shard_degree == -1:
        return []
    world_size = world_size or derived.other_degrees(loaded.config) * p.data_parallel_shard_degree
    ranks = derived.data_parallel_degree(loaded.config, world_size)
    return [size // ranks for size in sizes] if ranks else []


def check_microbatches(loaded: Loaded, rows: int, count: int) -> Iterator[Problem]:
    """Yield a problem if there are too few micro-batches, or if they do not fill the rounds of an
    interleaved schedule.

    Looped schedules also run with fewer micro-batches than stages, with a larger bubble; see
    ``pipeline_notes``.
    """
    p = loaded.config.parallelism
    size = p.pipeline_parallel_microbatch_size
    degree = p.pipeline_parallel_degree
    # Another rule reports a size that does not divide the local batch.
    if size < 1 or loaded.config.training.local_batch_size % size:
        return
    option = "parallelism.pipeline_parallel_microbatch_size"
    batches = rows // size
    # These schedules cannot start with fewer micro-batches than stages.
    schedule = stages.schedule_name(p.pipeline_parallel_schedule)
    needs_batch_per_stage = schedule in stages.SINGLE or schedule == "DualPipeV"
    if batches < 1 or (batches < count and needs_batch_per_stage):
        rule = f"makes {batches} micro-batches of the {rows} sequences of a step, fewer than the {count} stages"
        fix = f"raise training.local_batch_size or training.global_batch_size to {count * size} per data rank"
        yield problem(loaded, option, rule, f"{fix}, or use smaller micro-batches")
    elif schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        # PyTorch divides the micro-batches into equal rounds of at least one per rank.
        rounds = max(1, batches // degree)
        if batches % rounds:
            rule = f"makes {batches} micro-batches, which do not fill rounds of {degree}"
            fewer = batches // degree * degree
            nearby = [fewer * size, (fewer + degree) * size]
            yield problem(
                loaded,
                option,
                rule=rule,
                fix=f"make the sequences of a step {any_of(nearby)} per data rank",
            )


def pipeline_notes(loaded: Loaded) -> list[str]:
    """Return a note if a step has fewer micro-batches than stages."""
    p = loaded.config.parallelism
    rows = rows_of_steps(loaded)
    if p.pipeline_parallel_degree < 2 or not rows or p.pipeline_parallel_microbatch_size < 1:
        return []
    batches = rows[0] // p.pipeline_parallel_microbatch_size
    layers = (model_shape(loaded) or {}).get("num_layers")
    count = stages.num_stages(p, layers) if isinstance(layers, int) else 0
    if batches >= count:
        return []
    return [
        f"parallelism.pipeline_parallel_microbatch_size: {batches} micro-batches for {count} stages: ranks are "
        "idle for most of a step (raise training.local_batch_size)"
    ]


def check_context(loaded: Loaded) -> Iterator[Problem]:
    """Yield a load balancer that is not supported, and a degree that the heads of Ulysses do not allow."""
    p = loaded.config.parallelism
    sizes = model_shape(loaded) or {}
    cp = p.context_parallel_degree
    tp = p.tensor_parallel_degree
    if cp < 2 or tp < 1:
        return
    if p.context_parallel_load_balancer == "ptrr":
        yield problem(
            loaded,
            "parallelism.context_parallel_load_balancer",
            rule="is for FlexAttention's block masks, which the models do not use",
            fix='use "headtail" or "none"',
        )
    # Ulysses exchanges sequences for heads: each rank attends with some of the heads.
    heads = sizes.get("num_kv_heads") or sizes.get("num_heads")
    if p.context_parallel_method != "ulysses" or not isinstance(heads, int):
        return
    if heads % (tp * cp):
        legal = [n for n in range(1, heads + 1) if heads % (tp * n) == 0]
        divided = f"the {heads} KV heads"
        if tp > 1:
            divided += f", split {tp} ways by tensor_parallel_degree,"
        rule = f'does not divide {divided} as context_parallel_method="ulysses" requires'
        degrees = f"{any_of(legal)}, or " if legal else ""
        yield problem(
            loaded,
            "parallelism.context_parallel_degree",
            rule=rule,
            fix=f'use {degrees}context_parallel_method = "ring"',
        )
