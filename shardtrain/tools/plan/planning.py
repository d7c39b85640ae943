"""The answer of ``shardtrain plan``: one configuration on so many devices, its memory, its time and what limits it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardtrain import tasks
from shardtrain.config import Loaded, derived
from shardtrain.config.schema import Config
from shardtrain.launch import environment
from shardtrain.ops.cpu import kernel_speed
from shardtrain.tools.plan import hardware, job_sizes, rank_memory, schedule, shapes, timing
from shardtrain.tools.plan.hardware import Device
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.rank_memory import RankMemory
from shardtrain.tools.plan.shapes import ModelShape
from shardtrain.tools.plan.timing import StepTime
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.units import GIB, format_bytes, format_count

CONTEXT_BYTES = GIB
"""On a GPU: the driver's context with NCCL's buffers."""
FRAGMENTS = 0.03
"""On a GPU: the share that PyTorch's allocator cannot hand out."""
SECONDS_PER_FAILURE = 54 * 86400 * 16384 / 419
"""Of one device: 419 unexpected interruptions in 54 days on 16,384 H100 (The Llama 3 Herd of Models, 2024, 3.3.4)."""
MOST_DEVICES = 1_000_000
"""That can be asked for."""
RESTART_SECONDS = 600.0
"""From a failure to the first step after it, of a large job: assumed."""
CUTS = {
    "matmul": "float8 products (model.converters) where the device has them; less activation_checkpoint",
    "attention": "a shorter training.seq_len, or a model with a window",
    "elementwise": "compile.enable fuses them",
    "kernel launches": "a larger training.local_batch_size, or compile.enable",
    "head and loss": "compile.components with loss; a smaller vocabulary",
    "tensor parallel": "a smaller parallelism.tensor_parallel_degree, within one node",
    "context parallel": "a smaller parallelism.context_parallel_degree",
    "expert exchange": "a smaller parallelism.expert_parallel_degree, within one node",
    "FSDP gathers": "a larger micro-batch, fsdp_reshard_after_forward = never, or replicas of shards in a node",
    "gradient reduction": "more tokens per step (training.global_batch_size), or reduction in bfloat16",
    "pipeline bubble and sends": "more micro-batches (training.local_batch_size), or an interleaved schedule",
    "casts": "a larger training.local_batch_size, or weights in bfloat16 (training.dtype)",
    "optimizer": "more shards (data_parallel_shard_degree), or parallelism.shard_optimizer_states",
}
"""Cost -> what would cut it."""


@dataclass(frozen=True)
class Plan:
    """What a configuration needs and gives on ``world_size`` devices.

    ``ranks`` is the memory at each place of the pipeline, in bytes; ``overhead_bytes`` come on top, for the driver and
    the allocator. ``time`` is that of one step. ``fixes`` are changes of the configuration that would fit, the first
    ones first; empty where it fits or none is known.
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
        mesh = " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        memory = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.device.memory_bytes)}"
        speed = f"{format_count(self.tokens_per_second)} tokens/s, MFU {100 * self.mfu:.1f}%"
        return f"Plan({self.model} on {self.world_size} x {self.device.name}{mesh and f', {mesh}'}: {memory}, {speed})"

    @property
    def world_size(self) -> int:
        """Devices."""
        return self.job.world_size

    @property
    def fullest(self) -> RankMemory:
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def peak_bytes(self) -> int:
        """The most that a device needs, with what driver and allocator take."""
        return self.fullest.peak + self.overhead_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.peak_bytes <= self.device.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Over all devices."""
        return self.job.tokens_per_step / self.time.seconds

    @property
    def tps(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_second / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs over the dense peak of the compute type, 0..1; recomputation counts as none."""
        return self.flops_per_token * self.tps / self.device.peak(self.job.compute_dtype)

    def days(self, tokens: float) -> float:
        """Days for so many tokens, without failures."""
        return tokens / self.tokens_per_second / 86400

    def failures(self, tokens: float, save_seconds: float) -> tuple[float, float]:
        """How many failures a run of so many tokens meets that saves at intervals, and the days that it takes then.

        A failure costs half an interval and a restart. Devices fail as in the run of Llama 3 405B: see the constant.
        The days are infinite where a run loses more than it gains.
        """
        per_second = self.world_size / SECONDS_PER_FAILURE
        kept = 1 - per_second * (save_seconds / 2 + RESTART_SECONDS)
        days = self.days(tokens) / kept if kept > 0 else math.inf
        return per_second * min(days, 1e6) * 86400, days

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
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
    """Plan a configuration whose rules hold; ``model`` is its shape where that is known already.

    Raises ConfigError where the model cannot be read, or the device has no peak of the compute type.
    """
    model = model or shapes.read(config)
    sequences = tasks.open_task(config).sequences_per_row
    job = job_sizes.of_config(config, world_size, len(model.layers), sequences, model.has_experts)
    plan = of_job(model, job, device, kernels_of(device, config, world_size))
    return plan if plan.fits else replace(plan, fixes=tuple(_fixes(model, job, device, config)))


def of_job(model: ModelShape, job: PlannedJob, device: Device, kernels: rank_memory.Kernels) -> Plan:
    """The same of a job, without fixes."""
    orders = schedule.orders(job.schedule, job.pp, len(job.stages), job.num_microbatches, job.recomputes_layers)
    ranks = tuple(rank_memory.of_ranks(model, job, orders, kernels))
    sizes = {
        "pp": job.pp,
        "dp_replicate": job.dp_replicate,
        "dp_shard": job.dp_shard,
        "cp": job.cp,
        "tp": job.tp,
    }
    if job.ep > 1:
        sizes["ep"] = job.ep
    time = timing.of_step(model, job, device, orders)
    over = overhead(max(rank.peak for rank in ranks), device)
    return Plan(model.name, model.num_params, device, sizes, job, ranks, over, time, model.flops_per_token)


def largest(config: Config, world_size: int, device: Device) -> dict[str, int]:
    """How far each may be raised alone until the device is full: sequence, rows of a micro-batch, layers; 0 where not.

    Sequences in multiples of 128 per rank that shares one, to 1 %; layers by one like the last, in whole pipelines.
    """
    model = shapes.read(config)
    sequences = tasks.open_task(config).sequences_per_row
    job = job_sizes.of_config(config, world_size, len(model.layers), sequences, model.has_experts)
    kernels = kernels_of(device, config, world_size)

    def fits(one: PlannedJob, shape: ModelShape = model) -> bool:
        orders = schedule.orders(one.schedule, one.pp, len(one.stages), one.num_microbatches, one.recomputes_layers)
        used = max(rank.peak for rank in rank_memory.of_ranks(shape, one, orders, kernels))
        return used + overhead(used, device) <= device.memory_bytes

    unit = 128 * job.cp * job.tp
    answer = {
        "training.seq_len": unit * _most(lambda n: fits(replace(job, seq_len=n * unit))),
        "training.local_batch_size": _most(lambda n: fits(replace(job, rows=n))),
    }
    if job.pp == 1:

        def deeper(count: int) -> bool:
            layers = (*model.layers, *model.layers[-1:] * count)[:count]
            return fits(replace(job, stages=(range(count),)), replace(model, layers=layers))

        answer["model.overrides.num_layers"] = _most(deeper)
    return answer


def _most(holds: Callable[[int], bool]) -> int:
    """The largest number for which it holds, to 1 %; 0 where it holds for none, and no more than 2^30."""
    if not holds(1):
        return 0
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
    """Whose kernels run on a device; those of a CPU as this machine has measured them for a run of so many ranks."""
    if not device.is_cpu:
        return "cuda"
    if config.training.cpu_kernels == "pytorch" or config.debug.deterministic:
        return "cpu"
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, environment.usable_cores() // world_size))
    measured = kernel_speed.remembered(threads)
    return "cpu by rows" if measured is not None and measured.uses("rms_norm") else "cpu"


def overhead(used: int, device: Device) -> int:
    """Bytes that driver and allocator take beside ``used``."""
    return 0 if device.is_cpu else CONTEXT_BYTES + int(used * FRAGMENTS)


def smallest_world(config: Config, device: Device) -> int:
    """Devices that a configuration asks for: its mesh, and where that leaves the shards open, whole nodes of it."""
    others = derived.other_degrees(config)
    shard = config.parallelism.data_parallel_shard_degree
    return others * shard if shard != -1 else math.lcm(others, device.devices_per_node)


_FILLS = 0.7
"""Below this share of the memory in a plan, the model is not why memory ran out. Plans are not exact."""


def lighter(config: Config, world_size: int, device: Device, memory_bytes: int = 0) -> list[str]:
    """Return up to three changes to a configuration that save at least a tenth of its memory, the fastest first.

    The result must also fit into ``memory_bytes`` per rank (0 if unknown). Empty if the model needs far less.
    """
    model = shapes.read(config)
    sequences = tasks.open_task(config).sequences_per_row
    job = job_sizes.of_config(config, world_size, len(model.layers), sequences, model.has_experts)
    now = of_job(model, job, device, kernels_of(device, config, world_size))
    if now.peak_bytes < _FILLS * memory_bytes:
        return []
    enough = min(0.9 * now.peak_bytes, memory_bytes or math.inf)
    plans = [one for one in _changed(model, job, device, config) if one[1].peak_bytes < enough]
    plans.sort(key=lambda one: (one[1].world_size, -one[1].tps))
    own = format_bytes(now.peak_bytes)
    return [f"{text}: {format_bytes(plan.peak_bytes)} planned, in place of {own}" for text, plan in plans[:3]]


def _fixes(model: ModelShape, job: PlannedJob, device: Device, config: Config) -> list[str]:
    """Up to three changes that would fit, the fastest first; where no single one does, the three that help most."""
    plans = _changed(model, job, device, config)
    fitting = sorted((one for one in plans if one[1].fits), key=lambda one: (one[1].world_size, -one[1].tps))
    if fitting:
        return [
            f"{text}: {format_bytes(plan.peak_bytes)}, {plan.tps:,.0f} tokens/s/device" for text, plan in fitting[:3]
        ]
    plans.sort(key=lambda one: one[1].peak_bytes)
    return [f"{text}: {format_bytes(plan.peak_bytes)}, still too much alone" for text, plan in plans[:3]]


def _changed(model: ModelShape, job: PlannedJob, device: Device, config: Config) -> list[tuple[str, Plan]]:
    """What may be changed for less memory, each alone, and what it would give."""
    changes: list[tuple[str, PlannedJob]] = []
    if job.recompute != "full":
        changes.append(('activation_checkpoint.mode="full"', replace(job, recompute="full")))
    if job.rows > 1 and job.rows % 2 == 0:
        option = "parallelism.pipeline_parallel_microbatch_size" if job.pp > 1 else "training.local_batch_size"
        halved = replace(job, rows=job.rows // 2, num_microbatches=job.num_microbatches * 2)
        changes.append((f"{option}={job.rows // 2} with the same global batch", halved))

    # Tensor parallelism within a node takes ranks from the shards; as fewer ranks then read data, each has more
    # micro-batches.
    heads = model.layers[0].heads
    kv_heads = model.layers[0].kv_heads
    for tp in (2, 4, 8):
        if job.tp < tp <= device.devices_per_node and heads % tp == 0 and kv_heads % tp == 0:
            shards, rest = divmod(job.dp_shard * job.tp, tp)
            if not rest and shards:
                split = replace(job, tp=tp, dp_shard=shards, num_microbatches=job.num_microbatches * tp // job.tp)
                changes.append((f"parallelism.tensor_parallel_degree={tp}", split))

    if job.stored_width == 4:
        changes.append(('training.dtype="bfloat16"', replace(job, stored_width=2, state_width=2)))
    if job.dp_replicate > 1:
        whole = replace(job, dp_replicate=1, dp_shard=job.dp_shard * job.dp_replicate)
        changes.append(("parallelism.data_parallel_replicate_degree=1 (shard over all)", whole))
    if not config.training.enable_cpu_offload and not device.is_cpu:
        changes.append(("training.enable_cpu_offload=true", replace(job, offload="all")))
    kernels = kernels_of(device, config, job.world_size)
    plans = [(text, of_job(model, one, device, kernels)) for text, one in changes]

    # The least multiple of the devices that fits, or the largest that is tried.
    for times in (2, 4, 8, 16, 32):
        more = of_job(model, replace(job, dp_shard=job.dp_shard * times), device, kernels)
        if more.fits or times == 32:
            plans.append((f"{times} times as many devices ({more.world_size})", more))
            break
    return plans


def refuse_unfit(loaded: Loaded, world_size: int) -> None:
    """Before a run is submitted: raise ConfigError where it does not fit on so many of the devices ``launch.device``.

    Raises:
        ConfigError: also for a device that is not known, and for a configuration that ``train`` would refuse to plan.
    """
    name = str(loaded.config.launch.device)
    device = hardware.find(name, "launch.device")
    plan = make(loaded.config, world_size, device)
    if plan.fits:
        return
    fix = f"for example {plan.fixes[0]}" if plan.fixes else "use more devices, or a smaller model"
    rule = (
        f"has {format_bytes(device.memory_bytes)}, and a rank of {world_size} is planned to need "
        f"{format_bytes(plan.peak_bytes)} (shardtrain plan shows for what)"
    )
    raise ConfigError(Problem("launch.device", name, rule, fix))
