"""How layers become pipeline stages: schedules, stages per rank, which modules each stage holds. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from shardtrain.config.schema import Parallelism

SINGLE = ("1F1B", "GPipe", "PipelineScheduleSingle")
"""Schedules with one stage per rank."""
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "PipelineScheduleMulti")
"""Schedules with several stages per rank, rank r holding r, r + P, r + 2P, ..."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules with two stages per rank, rank r holding r and 2P - 1 - r."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute the gradients of inputs and of weights apart; torch.compile gives wrong ones for them."""
FROM_CSV = ("PipelineScheduleSingle", "PipelineScheduleMulti")
"""Schedules that mean: as the file in pipeline_parallel_schedule_csv says."""
SCHEDULES = (*SINGLE, *LOOPED, *V_SHAPED)


def schedule_name(name: str) -> str | None:
    """The schedule's own spelling, whatever the case of ``name``; None for an unknown one.

    >>> schedule_name("1f1b"), schedule_name("zbvzerobubble"), schedule_name("2F2B")
    ('1F1B', 'ZBVZeroBubble', None)
    """
    return next((known for known in SCHEDULES if known.lower() == name.lower()), None)


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether gradients of inputs and of weights may be computed apart, as the named schedule or its file says."""
    if parallelism.pipeline_parallel_degree < 2:
        return False
    schedule = schedule_name(parallelism.pipeline_parallel_schedule)
    return schedule in SPLIT_BACKWARD or bool(parallelism.pipeline_parallel_schedule_csv)


def num_stages(parallelism: Parallelism, num_layers: int) -> int:
    """Stages of the whole pipeline, over all ranks."""
    degree = parallelism.pipeline_parallel_degree
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if per_stage is not None:
        return -(-_weighted_layers(parallelism, num_layers) // per_stage)
    return degree if schedule_name(parallelism.pipeline_parallel_schedule) in SINGLE else 2 * degree


def stages_of_rank(schedule: str, rank: int, degree: int, stages: int) -> list[int]:
    """Stages that a pipeline rank holds, in the order of the forward pass.

    >>> stages_of_rank("Interleaved1F1B", 1, 2, 4), stages_of_rank("ZBVZeroBubble", 1, 2, 4)
    ([1, 3], [1, 2])
    """
    if schedule in V_SHAPED:
        return [rank, 2 * degree - 1 - rank]
    return list(range(rank, stages, degree))


def layers_per_stage(parallelism: Parallelism, num_layers: int) -> list[range]:
    """The layers of each stage, dealt as evenly as whole layers allow.

    The ends weigh as many layers as the two ``less_layers`` options say, so that the stages with the embedding and the
    head get fewer. Layers that are over go to stages that would have none, then to the earliest. A range may be empty
    where there are too few layers: the config check refuses that.

    >>> p = Parallelism(pipeline_parallel_degree=2)
    >>> layers_per_stage(p, 5)
    [range(0, 3), range(3, 5)]
    """
    count = num_stages(parallelism, num_layers)
    ends = [0] * count
    ends[0] += parallelism.pipeline_parallel_first_stage_less_layers
    ends[-1] += parallelism.pipeline_parallel_last_stage_less_layers
    even, left_over = divmod(_weighted_layers(parallelism, num_layers), count)
    sizes = [max(0, even - weight) for weight in ends]
    # False sorts before True: stages without a layer first
    for stage in sorted(range(count), key=lambda stage: (sizes[stage] > 0, stage))[:left_over]:
        sizes[stage] += 1
    starts = [sum(sizes[:stage]) for stage in range(count)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def modules_per_stage(
    parallelism: Parallelism, first: Sequence[str], layers: str, layer_names: Sequence[str], last: Sequence[str]
) -> list[list[str]]:
    """Module paths of each stage; explicit lists may use torchtitan's names for the ends."""
    explicit = parallelism.module_fqns_per_model_part
    if explicit is not None:
        aliases = {"tok_embeddings": "embed", "output": "head"}
        known = {*first, *last}
        return [[name if name in known else aliases.get(name, name) for name in part] for part in explicit]
    parts = [
        [f"{layers}.{layer_names[index]}" for index in indices]
        for indices in layers_per_stage(parallelism, len(layer_names))
    ]
    parts[0] = [*first, *parts[0]]
    parts[-1] = [*parts[-1], *last]
    return parts


def _weighted_layers(parallelism: Parallelism, num_layers: int) -> int:
    return (
        num_layers
        + parallelism.pipeline_parallel_first_stage_less_layers
        + parallelism.pipeline_parallel_last_stage_less_layers
    )
