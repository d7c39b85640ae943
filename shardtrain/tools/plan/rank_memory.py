"""Bytes that each rank of a pipeline needs, in closed form: weights, gradients, optimizer states,
activations, buffers.

Activations are the tensors that autograd saves for backward in the layers of this package
(models/layers.py). They are counted one by one, as Korthikanti et al. 2022 (arXiv 2205.05198) do,
and agree with the dry run, which traces them.

The peak is found by counting the moments of a step: the end of forward, the loss, and the backward
passes of the head, the last layer and the embedding. FSDP has gathered other weights at each
moment, and other gradients exist. So the peak is less than the sum of the maxima.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardtrain.facts.optimizers import SMALLEST_8BIT_NUMEL, STATE_BLOCK
from shardtrain.tools.plan import schedule
from shardtrain.tools.plan.fsdp_memory import GatheredBytes
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.layer_memory import Kernels
from shardtrain.tools.plan.parameter_shards import parameters_of_stage, sharded, trained, unsharded
from shardtrain.tools.plan.schedule import Action
from shardtrain.tools.plan.shapes import ModelShape, ParameterShape
from shardtrain.tools.plan.stage_memory import BEFORE_BACKWARD, Moment, StageBytes, stage_bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the ranks at one place of the pipeline.

    Attributes:
        pp_rank: Place in the pipeline.
        layers: Number of layers.
        parameters: Shards of weights.
        gradients: Maximum of gradients.
        optimizer: Shards of optimizer states, and of averages of the weights.
        activations: Maximum of activations.
        gathered: Maximum of FSDP's buffers.
        kept: Activations that wait for their backward pass.
        in_flight: Number of micro-batches with such activations.
        when: Name of the moment of the peak.
        at_peak: Gradients, activations and gathered weights at that moment.
        piped: Buffers of the pipeline, which the dry run does not count.
        on_host: Part of parameters, gradients and optimizer states that is in host memory.
    """

    pp_rank: int
    layers: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    kept: int
    in_flight: int
    when: str
    at_peak: tuple[int, int, int] = (0, 0, 0)
    piped: int = 0
    on_host: int = 0

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Sum of the maxima on the device. It is an upper bound, which the dry run also computes."""
        states_on_device = self.states - self.on_host
        return states_on_device + self.activations + self.gathered

    @property
    def reserved(self) -> int:
        """Memory that PyTorch's allocator reserves on a GPU.

        FSDP's buffers are not shared between streams.
        """
        return self.total + self.piped

    @property
    def peak(self) -> int:
        """Maximum on the device at any moment."""
        gradients, activations, gathered = self.at_peak
        states_on_device = self.parameters + self.optimizer + gradients - self.on_host
        return states_on_device + activations + gathered

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and sums as plain values for JSON."""
        values = asdict(self)
        names = ("gradients", "activations", "gathered")
        values["at_peak"] = dict(zip(names, self.at_peak, strict=True))
        values["total"] = self.total
        values["reserved"] = self.reserved
        values["peak"] = self.peak
        return values


def of_ranks(
    model: ModelShape, job: PlannedJob, orders: Sequence[Sequence[Action]], kernels: Kernels
) -> list[RankMemory]:
    """Return the memory of each place of the pipeline.

    ``orders`` has the actions of each (``schedule.orders``).
    """
    ranks = []
    for rank in range(job.pp):
        order = orders[rank] if orders else ()
        ranks.append(of_rank(model, job, rank, order, kernels))
    return ranks


def of_rank(
    model: ModelShape, job: PlannedJob, rank: int, order: Sequence[Action] | None, kernels: Kernels
) -> RankMemory:
    """Return the memory of the first rank at one place of the pipeline. No other rank there needs more.

    Without an ``order`` of actions, a formula estimates the number of micro-batches in flight.
    """
    stages = job.stages_of_rank(rank) if job.pp > 1 else [0]
    parameters_by_stage = [parameters_of_stage(model, job, index) for index in stages]
    if model.tied and job.pp == 1:
        # The rank has both ends of the model, which are one tensor. Count it once.
        without_head = [one for one in parameters_by_stage[0] if one.style != "head"]
        parameters_by_stage = [without_head]

    # Add up parameters, with the low-bit copies of frozen parameters, then optimizer states and gradients.
    parameters = 0
    trained_parameters: list[ParameterShape] = []
    for stage_parameters in parameters_by_stage:
        num_elements = sum(sharded(parameter, job) for parameter in stage_parameters)
        parameters += num_elements * job.stored_width
        trained_parameters += trained(stage_parameters)
    num_layers = 0
    for index in stages:
        num_layers += len(job.stages[index])
        for number in job.stages[index]:
            parameters += model.layers[number].low_bits_bytes
    optimizer = _optimizer_bytes(trained_parameters, job)
    gradients, accumulated = _gradient_bytes(
        model, job, stages, parameters_by_stage, trained_parameters
    )

    # Activations and FSDP's buffers, at each moment of a step.
    bytes_by_stage = {index: stage_bytes(model, job, index, kernels) for index in stages}
    gathered = sum(GatheredBytes(model, job, index).most for index in stages)
    if job.pp > 1:
        kept, in_flight, moments = _in_pipeline(
            model, job, rank, order, bytes_by_stage, accumulated
        )
        activations = kept + max(stage.most - stage.kept for stage in bytes_by_stage.values())
        piped = max(moment.activations for moment in moments) - activations
    else:
        piped = 0
        in_flight = 1
        kept = bytes_by_stage[0].kept
        activations = bytes_by_stage[0].most
        update = Moment("the update", 0, 0, gradients)
        moments = []
        for moment in (*bytes_by_stage[0].moments, update):
            moments.append(replace(moment, gradients=max(accumulated, moment.gradients)))

    peak = _peak(moments, job, gradients)
    on_host = 0
    if job.offload == "optimizer":
        on_host = optimizer
    elif job.offload == "all":
        on_host = parameters + gradients + optimizer
    return RankMemory(
        pp_rank=rank,
        layers=num_layers,
        parameters=parameters,
        gradients=max(gradients, accumulated),
        optimizer=optimizer,
        activations=activations,
        gathered=gathered,
        kept=kept,
        in_flight=in_flight,
        when=peak.name,
        at_peak=(peak.gradients, peak.activations, peak.gathered),
        piped=piped,
        on_host=on_host,
    )


def _peak(moments: Sequence[Moment], job: PlannedJob, gradients: int) -> Moment:
    """Return the moment that needs the most memory. ``gradients`` are those of the optimizer."""
    adjusted = []
    for moment in moments:
        # Updates in backward free gradients, and offloaded gradients are in host memory.
        if job.offload == "all":
            moment = replace(moment, gradients=gradients)
        elif job.early_step:
            moment = replace(moment, gradients=min(moment.gradients, gradients))
        adjusted.append(moment)
    return max(adjusted, key=lambda moment: moment.activations + moment.gathered + moment.gradients)


def _optimizer_bytes(trained_parameters: Sequence[ParameterShape], job: PlannedJob) -> int:
    """Return the bytes of this rank's optimizer states, and of its averages of the weights."""
    states = 0.0
    num_elements = 0
    for parameter in trained_parameters:
        numel = sharded(parameter, job)
        states += _state_bytes(parameter, numel, job)
        num_elements += numel
    if job.shard_states:
        states = math.ceil(states / job.dp_replicate)
    averages = num_elements * job.average_width
    # PyTorch counts the steps of each parameter in a separate tensor of 4 bytes.
    return int(states) + averages + 4 * len(trained_parameters)


def _gradient_bytes(
    model: ModelShape,
    job: PlannedJob,
    stages: Sequence[int],
    parameters_by_stage: Sequence[Sequence[ParameterShape]],
    trained_parameters: Sequence[ParameterShape],
) -> tuple[int, int]:
    """Return the bytes of gradients for the optimizer, and of gradients accumulated over micro-batches."""
    if job.early_step:
        num_elements = _gradients_before_early_step(model, job, stages)
    else:
        num_elements = sum(sharded(parameter, job) for parameter in trained_parameters)
    gradients = num_elements * job.gradient_bytes
    if job.num_microbatches == 1:
        return gradients, 0
    if not job.fsdp or not job.reduces_once:
        return gradients, gradients
    # FSDP reduces gradients after the last micro-batch. Until then they are unsharded, in the dtype
    # of the reduction.
    num_unsharded = 0
    for parameters in parameters_by_stage:
        num_unsharded += unsharded(trained(parameters), job.tp, job.ep)
    return gradients, num_unsharded * job.reduce_width


def _in_pipeline(
    model: ModelShape,
    job: PlannedJob,
    rank: int,
    order: Sequence[Action] | None,
    bytes_by_stage: Mapping[int, StageBytes],
    accumulated: int,
) -> tuple[int, int, list[Moment]]:
    """Return the bytes in flight, the number of micro-batches in flight, and the memory of a pipeline
    rank at each moment of a step.

    The latter includes PyTorch's buffers. Each stage has a receive buffer for each micro-batch of
    the step. A rank with several stages also holds everything that it sent until the end of the
    step.
    """
    last = len(job.stages) - 1
    count = job.num_microbatches
    stream = job.local_tokens // job.tp * model.dim * job.compute_width
    num_stages = len(bytes_by_stage)
    # A stage receives activations from the stage before and gradients from the stage after. It
    # sends the opposite, but only to stages of other ranks.
    num_received = 0
    num_sent = 0
    for index in bytes_by_stage:
        for other in (index - 1, index + 1):
            if not 0 <= other <= last:
                continue
            num_received += 1
            if other not in bytes_by_stage:
                num_sent += 1
    received = num_received * count * stream
    sent = 0
    if num_stages > 1:
        # The last quarter is sent after the peak.
        sent = num_sent * count * stream * 3 // 4

    # The most activations in flight: ``total`` in the entire step, and ``later`` after backward has begun,
    # when gradients exist.
    kept_by_stage = {}
    total_by_stage = {}
    for index, stage in bytes_by_stage.items():
        output = stream if index < last and not sent else 0
        kept_by_stage[index] = stage.kept
        total_by_stage[index] = stage.kept + stage.extra + output
    if order is None:
        in_flight = schedule.in_flight(job.schedule, rank, job.pp, num_stages, count)
        kept = in_flight * sum(kept_by_stage.values()) // num_stages
        total = in_flight * sum(total_by_stage.values()) // num_stages
        later = total
        if job.schedule in ("GPipe", "LoopedBFS"):
            later = total * (count - 1) // count
    else:
        kept, in_flight, _ = schedule.most_kept(kept_by_stage, order)
        waiting = {index: stage.waiting for index, stage in bytes_by_stage.items()}
        total, _, later = schedule.most_kept(total_by_stage, order, waiting)

    # Count the weights that are gathered at this moment. If FSDP never frees them, these are all weights of
    # all stages.
    frees_gathered = job.fsdp and job.frees_gathered
    all_gathered = 0
    if job.fsdp:
        for index in bytes_by_stage:
            parameters = tuple(parameters_of_stage(model, job, index))
            all_gathered += unsharded(parameters, job.tp, job.ep) * job.compute_width
    moments = []
    for stage in bytes_by_stage.values():
        for moment in stage.moments:
            more = moment.activations - stage.kept + received + sent
            if moment.name in BEFORE_BACKWARD:
                # Both ``total`` and this moment include the stage's output. Count it once.
                more -= stage.output
            gathered = moment.gathered if frees_gathered else all_gathered
            moments.append(Moment(moment.name, total + more, gathered, 0))
            moments.append(Moment(moment.name, later + more, gathered, accumulated))
    return kept, in_flight, moments


def _state_bytes(parameter: ParameterShape, numel: int, job: PlannedJob) -> float:
    """Return the bytes of optimizer states for ``numel`` elements of a parameter, with the scales
    of 8-bit states.
    """
    if job.state_width > 1:
        return numel * job.states * job.state_width
    # Small parameters have float32 states.
    if len(parameter.shape) < 2 or parameter.numel < SMALLEST_8BIT_NUMEL:
        return numel * job.states * 4
    # Each row is divided into blocks, and each block has a float32 scale.
    columns = parameter.shape[-1]
    blocks_per_row = -(-columns // STATE_BLOCK)  # rounded up
    num_blocks = numel / columns * blocks_per_row
    return job.states * (numel + 4 * num_blocks)


def _gradients_before_early_step(model: ModelShape, job: PlannedJob, stages: Sequence[int]) -> int:
    """Return the elements of gradients that exist at the same time when updates happen in backward.

    FSDP reduces the gradients of a unit together. Without it, each gradient is used as soon as it
    is complete.
    """
    units = [model.first, model.last]
    for index in stages:
        for number in job.stages[index]:
            units.append(model.layers[number].parameters)
    most = 0
    for unit in units:
        sizes = [sharded(parameter, job) for parameter in trained(unit)]
        simultaneous = sum(sizes) if job.fsdp else max(sizes, default=0)
        most = max(most, simultaneous)
    return most
