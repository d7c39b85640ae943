"""Plan one configuration on a number of devices: memory, time, and changes that would help."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardtrain import tasks
from shardtrain.config import Loaded, derived
from shardtrain.config.schema import Config
from shardtrain.distributed.mesh import AXES
from shardtrain.launch import environment
from shardtrain.ops.cpu import kernel_speed
from shardtrain.tools.plan import hardware, job_sizes, rank_memory, schedule, shapes, timing
from shardtrain.tools.plan.hardware import Device
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.rank_memory import RankMemory
from shardtrain.tools.plan.schedule import Action
from shardtrain.tools.plan.shapes import ModelShape
from shardtrain.tools.plan.timing import StepTime
from shardtrain.utils import variables
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.units import GIB, format_bytes, format_count

CONTEXT_BYTES = GIB
"""Memory of the driver's context and of NCCL's buffers on a GPU."""
FRAGMENTS = 0.03
"""Share of a GPU's memory that PyTorch's allocator loses to fragmentation."""
SECONDS_PER_FAILURE = 54 * 86400 * 16384 / 419
"""Mean time between failures of one device.

It is from 419 unexpected interruptions in 54 days on 16,384 H100 (The Llama 3 Herd of Models, 2024,
section 3.3.4).
"""
MOST_DEVICES = 1_000_000
"""Largest number of devices of a plan."""
RESTART_SECONDS = 600.0
"""Assumed time from a failure to the next step of a large job."""
CUTS = {
    "matmul": "float8 products (model.converters) where the device has them; less activation_checkpoint",
    "attention": "a shorter training.seq_len, or a model with a window",
    "elementwise": "compile.enable fuses them",
    "kernel launches": "a larger training.local_batch_size, or compile.enable",
    "head and loss": '"loss" in compile.components, or a smaller vocabulary',
    "tensor parallel": "a smaller parallelism.tensor_parallel_degree, within one node",
    "context parallel": "a smaller parallelism.context_parallel_degree",
    "expert exchange": "a smaller parallelism.expert_parallel_degree, within one node",
    "FSDP gathers": "a larger micro-batch, fsdp_reshard_after_forward = never, or replicas of shards in a node",
    "gradient reduction": "more tokens per step (training.global_batch_size), or reduction in bfloat16",
    "pipeline bubble and sends": "more micro-batches (training.local_batch_size), or an interleaved schedule",
    "sums on the host": "a larger training.global_batch_size, so that there are fewer steps",
    "casts": "a larger training.local_batch_size, or weights in bfloat16 (training.dtype)",
    "optimizer": "more shards (data_parallel_shard_degree), or parallelism.shard_optimizer_states",
}
"""Cost -> changes that reduce it."""


@dataclass(frozen=True)
class Plan:
    """Memory and time of a configuration.

    Attributes:
        model: Label of the model.
        num_params: Number of parameters.
        device: The device.
        sizes: Degree of each mesh axis.
        job: Sizes of the run.
        ranks: Memory at each place of the pipeline.
        overhead_bytes: Memory of the driver and of fragmentation, in addition to ``ranks``.
        time: Time of one step.
        flops_per_token: Model FLOPs.
        fixes: Changes with which the configuration would fit, best first. Empty if it fits or none is known.
    """

    model: str
    num_params: int
    device: Device
    sizes: Mapping[str, int]
    job: PlannedJob
    ranks: tuple[RankMemory, ...]
    overhead_bytes: int
    time: StepTime
    flops_per_token: float
    fixes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        axes = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1]
        where = f"{self.world_size} x {self.device.name}"
        if axes:
            where += f", {' '.join(axes)}"
        memory = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.device.memory_bytes)}"
        speed = f"{format_count(self.tokens_per_second)} tokens/s, MFU {100 * self.mfu:.1f}%"
        return f"Plan({self.model} on {where}: {memory}, {speed})"

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.job.world_size

    @property
    def fullest(self) -> RankMemory:
        """The rank with the largest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def peak_bytes(self) -> int:
        """Largest peak of a rank, with the overhead."""
        return self.fullest.peak + self.overhead_bytes

    @property
    def fits(self) -> bool:
        """True if the largest peak fits into the memory of the device."""
        return self.peak_bytes <= self.device.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all devices."""
        return self.job.tokens_per_step / self.time.seconds

    @property
    def tps(self) -> float:
        """Tokens per second per device."""
        return self.tokens_per_second / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs relative to the dense peak of the compute dtype, 0..1, without recomputed FLOPs."""
        flops_per_second = self.flops_per_token * self.tps
        return flops_per_second / self.device.peak(self.job.compute_dtype)

    def days(self, tokens: float) -> float:
        """Return the days for a number of tokens, without failures."""
        return tokens / self.tokens_per_second / 86400

    def failures(self, tokens: float, save_seconds: float) -> tuple[float, float]:
        """Return the expected failures and the days for a number of tokens, with a save every
        ``save_seconds``.

        A failure costs half an interval and a restart. Devices fail at the rate of
        ``SECONDS_PER_FAILURE``. The days are infinite if failures cost more time than passes
        between them.
        """
        failures_per_second = self.world_size / SECONDS_PER_FAILURE
        lost_seconds = save_seconds / 2 + RESTART_SECONDS
        useful_share = 1 - failures_per_second * lost_seconds
        days = math.inf
        if useful_share > 0:
            days = self.days(tokens) / useful_share
        # Failures of an endless run are counted for a finite number of days.
        counted_days = min(days, 1e6)
        num_failures = failures_per_second * counted_days * 86400
        return num_failures, days

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return {
            "model": self.model,
            "num_params": self.num_params,
            "device": self.device.name,
            "world_size": self.world_size,
            "mesh": dict(self.sizes),
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "memory_bytes": self.device.memory_bytes,
            "overhead_bytes": self.overhead_bytes,
            "ranks": [rank.as_dict() for rank in self.ranks],
            "step_seconds": self.time.seconds,
            "costs_seconds": dict(self.time.costs),
            "bubble": self.time.bubble,
            "tokens_per_step": self.job.tokens_per_step,
            "tokens_per_second": self.tokens_per_second,
            "tps": self.tps,
            "mfu": self.mfu,
            "fixes": list(self.fixes),
            "notes": list(self.job.notes),
        }


def make(config: Config, world_size: int, device: Device, model: ModelShape | None = None) -> Plan:
    """Plan a valid configuration. ``model`` is its shape, if the caller has read it already.

    Raises:
        ConfigError: the model cannot be read, or the device has no peak for the compute dtype.
    """
    if model is None:
        model = shapes.read(config)
    task = tasks.open_task(config)
    sequences = task.sequences_per_row
    job = job_sizes.of_config(config, world_size, len(model.layers), sequences, model.has_experts)
    job = replace(job, notes=(*job.notes, *task.plan_notes()))
    kernels = kernels_of(device, config, world_size)
    plan = of_job(model, job, device, kernels)
    if plan.fits:
        return plan
    # Fixes are found by planning many other jobs, so look for them only if the job does not fit.
    fixes = _fixes(model, job, device, config)
    return replace(plan, fixes=tuple(fixes))


def of_job(
    model: ModelShape, job: PlannedJob, device: Device, kernels: rank_memory.Kernels
) -> Plan:
    """Plan a job. The plan has no suggested fixes."""
    orders = _orders(job)
    ranks = tuple(rank_memory.of_ranks(model, job, orders, kernels))
    peak = max(rank.peak for rank in ranks)
    # ep divides experts among the ranks of other axes, so it is not one of the axes.
    sizes = {axis: getattr(job, axis) for axis in AXES}
    if job.ep > 1:
        sizes["ep"] = job.ep
    return Plan(
        model=model.name,
        num_params=model.num_params,
        device=device,
        sizes=sizes,
        job=job,
        ranks=ranks,
        overhead_bytes=overhead(peak, device),
        time=timing.of_step(model, job, device, orders),
        flops_per_token=model.flops_per_token,
    )


def _orders(job: PlannedJob) -> Sequence[Sequence[Action]]:
    """Return the actions of each pipeline rank."""
    return schedule.orders(
        job.schedule,
        job.pp,
        len(job.stages),
        job.num_microbatches,
        job.recomputes_layers,
    )


def largest(config: Config, world_size: int, device: Device) -> dict[str, int]:
    """Return the largest sequence length, micro-batch and number of layers that fit if only this option changes.

    A value is 0 if nothing fits, and exact to 1 %. Sequence lengths are multiples of 128 tokens per rank that
    shares a sequence. Added layers are copies of the last layer. With a pipeline, the number of layers is
    missing.
    """
    model = shapes.read(config)
    sequences = tasks.open_task(config).sequences_per_row
    job = job_sizes.of_config(config, world_size, len(model.layers), sequences, model.has_experts)
    kernels = kernels_of(device, config, world_size)

    def fits(changed: PlannedJob, shape: ModelShape = model) -> bool:
        ranks = rank_memory.of_ranks(shape, changed, _orders(changed), kernels)
        used = max(rank.peak for rank in ranks)
        return used + overhead(used, device) <= device.memory_bytes

    # One function for each option: True if a value of it fits.
    unit = 128 * job.cp * job.tp

    def fits_length(units: int) -> bool:
        return fits(replace(job, seq_len=units * unit))

    def fits_rows(rows: int) -> bool:
        return fits(replace(job, rows=rows))

    def fits_layers(count: int) -> bool:
        added_layers = model.layers[-1:] * count
        layers = (*model.layers, *added_layers)[:count]
        changed_model = replace(model, layers=layers)
        return fits(replace(job, stages=(range(count),)), changed_model)

    largest_values = {
        "training.seq_len": unit * _largest_number(fits_length),
        "training.local_batch_size": _largest_number(fits_rows),
    }
    if job.pp == 1:
        largest_values["model.overrides.num_layers"] = _largest_number(fits_layers)
    return largest_values


def _largest_number(holds: Callable[[int], bool]) -> int:
    """Return the largest number up to 2^30 for which a condition holds, to 1 %. 0 if it does not
    hold for 1.
    """
    if not holds(1):
        return 0
    # Find the power of two below the limit, then halve the interval up to the next power.
    low = 1
    while low < 2**30 and holds(2 * low):
        low *= 2
    high = 2 * low
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def kernels_of(device: Device, config: Config, world_size: int) -> rank_memory.Kernels:
    """Return the kernels of a device.

    Those of a CPU depend on what this machine has measured for ``world_size`` ranks.
    """
    if not device.is_cpu:
        return "cuda"
    if config.training.cpu_kernels == "pytorch" or config.debug.deterministic:
        return "cpu"
    # The measurements of this machine depend on the number of threads per rank.
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    threads = max(1, environment.usable_cores() // world_size)
    if variables.is_thread_counts(chosen):
        threads = int(chosen.partition(",")[0])
    measured = kernel_speed.remembered(threads)
    if measured is not None and measured.uses("rms_norm"):
        return "cpu by rows"
    return "cpu"


def overhead(used: int, device: Device) -> int:
    """Return the bytes of the driver and of fragmentation, if ranks use ``used`` bytes."""
    if device.is_cpu:
        return 0
    return CONTEXT_BYTES + int(used * FRAGMENTS)


def smallest_world(config: Config, device: Device) -> int:
    """Return the number of devices of the configured mesh.

    With an open shard degree, it fills complete nodes.
    """
    others = derived.other_degrees(config)
    shards = config.parallelism.data_parallel_shard_degree
    if shards != -1:
        return others * shards
    return math.lcm(others, device.devices_per_node)


_FILLS = 0.7
"""If a plan needs less than this share of the memory, the model is not the reason why memory ran out."""


def lighter(config: Config, world_size: int, device: Device, memory_bytes: int = 0) -> list[str]:
    """Return up to three changes to a configuration that save at least a tenth of its memory, the
    fastest first.

    The result must also fit into ``memory_bytes`` per rank (0 if unknown). The result is
    empty if the configuration needs far less than ``memory_bytes`` already.
    """
    model = shapes.read(config)
    sequences = tasks.open_task(config).sequences_per_row
    job = job_sizes.of_config(config, world_size, len(model.layers), sequences, model.has_experts)
    kernels = kernels_of(device, config, world_size)
    now = of_job(model, job, device, kernels)
    if now.peak_bytes < _FILLS * memory_bytes:
        return []
    limit = min(0.9 * now.peak_bytes, memory_bytes or math.inf)
    changes = []
    for change in _changes(model, job, device, config):
        if change.plan.peak_bytes < limit:
            changes.append(change)
    changes.sort(key=_fewest_devices_then_fastest)
    current = format_bytes(now.peak_bytes)
    texts = []
    for change in changes[:3]:
        planned = format_bytes(change.plan.peak_bytes)
        texts.append(f"{change.text}: {planned} planned instead of {current}")
    return texts


@dataclass(frozen=True)
class _Change:
    """A change of the configuration, as text, and the plan after it."""

    text: str
    plan: Plan


def _fewest_devices_then_fastest(change: _Change) -> tuple[int, float]:
    """Sort key: fewer devices come first, and of changes with equal devices the fastest."""
    return change.plan.world_size, -change.plan.tps


def _fixes(model: ModelShape, job: PlannedJob, device: Device, config: Config) -> list[str]:
    """Return up to three changes that fit, the fastest first.

    If none fits, the three that save most memory.
    """
    changes = _changes(model, job, device, config)
    fitting = [change for change in changes if change.plan.fits]
    fitting.sort(key=_fewest_devices_then_fastest)
    fixes = []
    for change in fitting[:3]:
        memory = format_bytes(change.plan.peak_bytes)
        fixes.append(f"{change.text}: {memory}, {change.plan.tps:,.0f} tokens/s/device")
    if fixes:
        return fixes
    # No single change fits. Suggest the changes that come closest.
    changes.sort(key=lambda change: change.plan.peak_bytes)
    for change in changes[:3]:
        memory = format_bytes(change.plan.peak_bytes)
        fixes.append(f"{change.text}: {memory}, which is still too much")
    return fixes


def _changes(model: ModelShape, job: PlannedJob, device: Device, config: Config) -> list[_Change]:
    """Plan each single change that may need less memory."""
    kernels = kernels_of(device, config, job.world_size)
    changes: list[_Change] = []
    for text, changed in _changed_jobs(model, job, device, config):
        changes.append(_Change(text, of_job(model, changed, device, kernels)))

    # Try more devices: the smallest multiple that fits, or else the largest multiple.
    for times in (2, 4, 8, 16, 32):
        changed = replace(job, dp_shard=job.dp_shard * times)
        plan = of_job(model, changed, device, kernels)
        if plan.fits or times == 32:
            text = f"{times} times as many devices ({plan.world_size})"
            changes.append(_Change(text, plan))
            break
    return changes


def _changed_jobs(
    model: ModelShape, job: PlannedJob, device: Device, config: Config
) -> Iterator[tuple[str, PlannedJob]]:
    """Yield single changes on the same devices, as text, and the job after each."""
    if job.recompute != "full":
        yield 'activation_checkpoint.mode="full"', replace(job, recompute="full")
    # Half of the rows need half of the activations. Twice the micro-batches keep the global batch.
    if job.rows > 1 and job.rows % 2 == 0:
        option = "training.local_batch_size"
        if job.pp > 1:
            option = "parallelism.pipeline_parallel_microbatch_size"
        rows = job.rows // 2
        halved = replace(job, rows=rows, num_microbatches=job.num_microbatches * 2)
        yield f"{option}={rows} with the same global batch", halved

    # Tensor parallelism within a node takes ranks from the shards. Fewer ranks then read data, so
    # each has more micro-batches.
    for tp in (2, 4, 8):
        fits_node = job.tp < tp <= device.devices_per_node
        divides_heads = all(count % tp == 0 for count in model.head_counts)
        if not fits_node or not divides_heads:
            continue
        shards, rest = divmod(job.dp_shard * job.tp, tp)
        if rest or not shards:
            continue
        num_microbatches = job.num_microbatches * tp // job.tp
        split = replace(job, tp=tp, dp_shard=shards, num_microbatches=num_microbatches)
        yield f"parallelism.tensor_parallel_degree={tp}", split

    if job.stored_width == 4:
        yield 'training.dtype="bfloat16"', replace(job, stored_width=2, state_width=2)
    # Replicas of the weights become shards.
    if job.dp_replicate > 1:
        shards = job.dp_shard * job.dp_replicate
        without_replicas = replace(job, dp_replicate=1, dp_shard=shards)
        text = "parallelism.data_parallel_replicate_degree=1 (shard over all)"
        yield text, without_replicas
    if not config.training.enable_cpu_offload and not device.is_cpu:
        yield "training.enable_cpu_offload=true", replace(job, offload="all")


def refuse_unfit(loaded: Loaded, world_size: int) -> None:
    """Check before a run is submitted that it fits on ``world_size`` devices of the type ``launch.device``.

    Raises:
        ConfigError: the run does not fit, the device is unknown, or the configuration cannot be planned.
    """
    name = str(loaded.config.launch.device)
    device = hardware.find(name, "launch.device")
    plan = make(loaded.config, world_size, device)
    if plan.fits:
        return
    fix = "use more devices, or a smaller model"
    if plan.fixes:
        fix = f"for example {plan.fixes[0]}"
    rule = (
        f"has {format_bytes(device.memory_bytes)}, but each of {world_size} ranks is planned to need "
        f"{format_bytes(plan.peak_bytes)} (shardtrain plan shows details)"
    )
    raise ConfigError(Problem("launch.device", name, rule, fix))
