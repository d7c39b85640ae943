"""Numbers of parameter elements on one rank, as sharded by FSDP and as gathered."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.shapes import ModelShape, ParameterShape


def trained(parameters: Iterable[ParameterShape]) -> tuple[ParameterShape, ...]:
    """Return the parameters that are not frozen."""
    return tuple(parameter for parameter in parameters if parameter.trained)


def parameters_of_stage(model: ModelShape, job: PlannedJob, index: int) -> list[ParameterShape]:
    """Return all parameters of a pipeline stage, unsharded."""
    parameters: list[ParameterShape] = []
    if index == 0:
        parameters += model.first
    for number in job.stages[index]:
        parameters += model.layers[number].parameters
    if index == len(job.stages) - 1:
        parameters += model.last
        # The last stage has a copy of the embedding for multi-token prediction.
        if index > 0 and job.heads > 1 and not model.tied:
            parameters += model.first
    return parameters


def sharded(parameter: ParameterShape, job: PlannedJob) -> int:
    """Return the elements of a parameter on the first rank, which has the largest shard.

    FSDP splits the first dimension into chunks as ``torch.chunk`` does.
    """
    if parameter.style == "expert":
        return _sharded_experts(parameter, job)
    shape = parameter.on_tensor_rank(job.tp)
    if not shape:
        return 1
    rows = -(-shape[0] // (job.dp_shard * job.cp))
    return rows * math.prod(shape[1:])


def _sharded_experts(parameter: ParameterShape, job: PlannedJob) -> int:
    """Return the elements of stacked expert matrices (experts, ...) on the first rank."""
    num_experts = parameter.shape[0]
    experts_per_rank = -(-num_experts // job.ep)
    numel_per_expert = math.prod(parameter.shape[1:])
    ranks = job.dp_shard
    if job.ep * job.cp * job.tp > 1 or ranks > experts_per_rank:
        ranks = max(1, job.dp_shard * job.cp * job.tp // job.ep)
        # With more ranks than experts, FSDP splits another dimension.
        if ranks * job.ep > num_experts:
            return -(-experts_per_rank * numel_per_expert // ranks)
    experts_per_shard = -(-experts_per_rank // ranks)
    return experts_per_shard * numel_per_expert


@lru_cache(maxsize=4096)
def unsharded(parameters: tuple[ParameterShape, ...], tp: int, ep: int) -> int:
    """Return the elements of parameters that FSDP has gathered on one rank."""
    total = 0
    for parameter in parameters:
        if parameter.style == "expert":
            total += -(-parameter.numel // ep)
        else:
            total += math.prod(parameter.on_tensor_rank(tp))
    return total
