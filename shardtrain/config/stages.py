"""Division of layers into pipeline stages: schedules, stages per rank and modules per stage. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from shardtrain.config.schema import Parallelism

SINGLE = ("1F1B", "GPipe", "PipelineScheduleSingle")
"""Schedules with one stage per rank."""
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "PipelineScheduleMulti")
"""Schedules with several stages per rank: rank r of P has the stages r, r + P, r + 2P, ..."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules with two stages per rank: rank r of P has the stages r and 2P - 1 - r."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute gradients of inputs and weights separately. With torch.compile the gradients are wrong."""
FROM_CSV = ("PipelineScheduleSingle", "PipelineScheduleMulti")
"""Schedules that are read from the file in pipeline_parallel_schedule_csv."""
SCHEDULES = (*SINGLE, *LOOPED, *V_SHAPED)


def schedule_name(name: str) -> str | None:
    """Return the canonical spelling of a schedule, ignoring the case of ``name``. None if it is unknown.

    >>> schedule_name("1f1b"), schedule_name("zbvzerobubble"), schedule_name("2F2B")
    ('1F1B', 'ZBVZeroBubble', None)
    """
    return next((known for known in SCHEDULES if known.lower() == name.lower()), None)


def splits_backward(parallelism: Parallelism) -> bool:
    """True if the schedule, or its file, may compute gradients of inputs and weights separately."""
    if parallelism.pipeline_parallel_degree < 2:
        return False
    schedule = schedule_name(parallelism.pipeline_parallel_schedule)
    return schedule in SPLIT_BACKWARD or bool(parallelism.pipeline_parallel_schedule_csv)


def num_stages(parallelism: Parallelism, num_layers: int) -> int:
    """Return the number of stages of all pipeline ranks."""
    degree = parallelism.pipeline_parallel_degree
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if per_stage is not None:
        return -(-_weighted_layers(parallelism, num_layers) // per_stage)
    if schedule_name(parallelism.pipeline_parallel_schedule) in SINGLE:
        return degree
    return 2 * degree


def stages_of_rank(schedule: str, rank: int, degree: int, stages: int) -> list[int]:
    """Return the stages of a pipeline rank, in the order of the forward pass.

    >>> stages_of_rank("Interleaved1F1B", 1, 2, 4), stages_of_rank("ZBVZeroBubble", 1, 2, 4)
    ([1, 3], [1, 2])
    """
    if schedule in V_SHAPED:
        return [rank, 2 * degree - 1 - rank]
    return list(range(rank, stages, degree))


def layers_per_stage(parallelism: Parallelism, num_layers: int) -> list[range]:
    """Divide the layers evenly into stages, and return the layers of each stage.

    The two ``less_layers`` options are weights of the embedding and the head, in layers. The
    first and the last stage therefore get fewer layers. Remaining layers go to stages without a
    layer first, then to the earliest stages. With too few layers a range may be empty, which the
    checks of the configuration reject.

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
    # Stages without a layer come first, because False sorts before True.
    for stage in sorted(range(count), key=lambda stage: (sizes[stage] > 0, stage))[:left_over]:
        sizes[stage] += 1
    starts = [sum(sizes[:stage]) for stage in range(count)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def modules_per_stage(
    parallelism: Parallelism,
    first: Sequence[str],
    layers: str,
    layer_names: Sequence[str],
    last: Sequence[str],
) -> list[list[str]]:
    """Return the module paths of each stage. Explicit lists may use torchtitan's names of embedding and head."""
    explicit = parallelism.module_fqns_per_model_part
    if explicit is not None:
        # A user's model may have a module with one of torchtitan's names.
        aliases = {"tok_embeddings": "embed", "output": "head"}
        for name in (*first, *last):
            aliases.pop(name, None)
        return [[aliases.get(name, name) for name in part] for part in explicit]
    parts = []
    for indices in layers_per_stage(parallelism, len(layer_names)):
        parts.append([f"{layers}.{layer_names[index]}" for index in indices])
    parts[0] = [*first, *parts[0]]
    parts[-1] = [*parts[-1], *last]
    return parts


def _weighted_layers(parallelism: Parallelism, num_layers: int) -> int:
    return (
        num_layers
        + parallelism.pipeline_parallel_first_stage_less_layers
        + parallelism.pipeline_parallel_last_stage_less_layers
    )
