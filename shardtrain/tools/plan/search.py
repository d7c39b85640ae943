"""``plan --search``: rank every legal mesh, schedule, recompute mode and micro-batch with equal tokens per step.

All candidates are estimated by formulas. The best candidates are planned again with a simulated pipeline and
checked by the rules of ``train``. Candidates that fit are ranked by tokens per second. If two are equally
fast, the candidate with less memory comes first.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardtrain import config as configs
from shardtrain import tasks
from shardtrain.config import Loaded, derived, ramps
from shardtrain.config.schema import Config
from shardtrain.config.toml_writer import set_toml
from shardtrain.facts.quantization import LINEAR, MX
from shardtrain.tools.plan import job_sizes, planning, rank_memory, shapes, timing
from shardtrain.tools.plan.hardware import Device
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.layer_memory import Kernels
from shardtrain.tools.plan.planning import Plan
from shardtrain.tools.plan.shapes import ModelShape
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.units import format_bytes, format_seconds

EQUAL = 0.005
"""Relative difference below which two candidates count as equally fast."""
NUM_SIMULATED = 80
"""Number of candidates that are planned with a simulated pipeline."""
_RECOMPUTE = (
    {"mode": "none"},
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "full"},
)
_LARGEST_MICROBATCH = 16
_MOST_MICROBATCHES = 512
"""Largest number of micro-batches in a pipeline. Larger numbers hardly change the bubble."""


@dataclass(frozen=True)
class Ranked:
    """A candidate: its options, and its plan."""

    options: dict[str, Any]
    plan: Plan

    def name(self) -> str:
        """Return mesh, schedule, recomputation and micro-batch as one line."""
        job = self.plan.job
        axes = [f"{axis} {size}" for axis, size in self.plan.sizes.items() if size > 1]
        text = " ".join(axes) or "one device"
        if job.pp > 1:
            text += f", {job.schedule}"
        text += f", recompute {job.recompute}, {job.rows} x {job.num_microbatches}"
        if job.float8:
            text += ", float8"
        return text


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        ranked: The best candidates that fit, best first.
        counted: Number of estimated candidates.
        fitting: Number of candidates that fit by the estimate.
        closest: If none fits, the candidate that needs the least memory.
    """

    ranked: list[Ranked]
    counted: int
    fitting: int
    closest: Ranked | None

    def as_dict(self, top: int) -> dict[str, Any]:
        """Return plain values for JSON, with the best ``top`` candidates."""
        ranked = []
        for candidate in self.ranked[:top]:
            ranked.append({"options": candidate.options, **candidate.plan.as_dict()})
        return {"counted": self.counted, "fitting": self.fitting, "ranked": ranked}


def run(loaded: Loaded, world_size: int, device: Device, float8: bool = False) -> SearchResult:
    """Rank variations of a configuration on ``world_size`` devices.

    The search changes mesh, schedule, recomputation and micro-batch. Model, sequence length, dtypes
    and tokens per step stay. With ``float8``, each candidate is also planned with float8 linear
    layers, which changes numbers.

    Raises:
        ConfigError: another part of the configuration is wrong, or the device has no float8.
    """
    config = loaded.config
    if float8 and "float8" not in device.flops:
        raise ConfigError(
            Problem(
                "--float8",
                device.name,
                rule="has no float8 products",
                fix="remove it",
                where="command line",
            )
        )
    converters: list[list[str]] = [config.model.converters]
    has_float8 = LINEAR in config.model.converters or MX in config.model.converters
    if float8 and not has_float8:
        converters.append([*config.model.converters, LINEAR])
    model = shapes.read(config)
    sequences = tasks.open_task(config).sequences_per_row
    kernels = planning.kernels_of(device, config, world_size)

    # Estimate all by formulas.
    fitting: list[_Estimate] = []
    least: _Estimate | None = None
    counted = 0
    global_batch = _global_batch(config, world_size)
    candidates = _candidates(config, model, world_size, device, global_batch)
    for mesh_options, names in itertools.product(candidates, converters):
        options = mesh_options
        if names != config.model.converters:
            options = {**mesh_options, "model.converters": names}
        changed = with_options(config, options)
        num_layers = len(model.layers)
        job = job_sizes.of_config(changed, world_size, num_layers, sequences, model.has_experts)
        # Inner stages must have layers. The first and the last have the embedding and the head.
        inner_stages = job.stages[1:-1]
        has_empty_stage = any(len(layers) == 0 for layers in inner_stages)
        if has_empty_stage or job.num_microbatches < 1:
            continue
        counted += 1
        peak = _peak_bytes(model, job, device, kernels)
        estimate = _Estimate(options, job, peak)
        if least is None or peak < least.peak_bytes:
            least = estimate
        if peak <= device.memory_bytes:
            seconds = timing.of_step(model, job, device, None).seconds
            fitting.append(estimate._replace(token_seconds=seconds / job.tokens_per_step))

    # Plan the best again with a simulated pipeline, and check them by the rules of train.
    fitting.sort(key=lambda estimate: (estimate.token_seconds, estimate.peak_bytes))
    ranked: list[Ranked] = []
    for estimate in fitting[:NUM_SIMULATED]:
        if not _is_legal(loaded, estimate.options, world_size):
            continue
        plan = planning.of_job(model, estimate.job, device, kernels)
        if plan.fits:
            ranked.append(Ranked(estimate.options, plan))
    ranked.sort(key=lambda candidate: (-candidate.plan.tps, candidate.plan.peak_bytes))
    # If none fits, show how much memory is missing.
    closest = None
    if least is not None and not ranked:
        plan = planning.of_job(model, least.job, device, kernels)
        closest = Ranked(least.options, plan)
    return SearchResult(ranked, counted, len(fitting), closest)


class _Estimate(NamedTuple):
    """A candidate with its estimated memory and, if it fits, its seconds per token."""

    options: dict[str, Any]
    job: PlannedJob
    peak_bytes: int
    token_seconds: float = 0.0


def _global_batch(config: Config, world_size: int) -> int:
    """Return the sequences per step: as configured, or the default of the configured mesh on these devices."""
    sizes = ramps.batch_sizes(config.training)
    if sizes:
        return sizes[-1]
    shards = max(1, world_size // derived.other_degrees(config))
    replicas = config.parallelism.data_parallel_replicate_degree
    return config.training.local_batch_size * replicas * shards


def _peak_bytes(model: ModelShape, job: PlannedJob, device: Device, kernels: Kernels) -> int:
    """Estimate the peak memory of the fullest rank.

    In a pipeline, only the first or the last rank can need the most memory. The first rank has most
    micro-batches in flight, and the last rank has the logits.
    """
    peak = 0
    for place in {0, job.pp - 1}:
        memory = rank_memory.of_rank(model, job, place, None, kernels)
        peak = max(peak, memory.peak)
    return peak + planning.overhead(peak, device)


def _candidates(
    config: Config, model: ModelShape, world_size: int, device: Device, global_batch: int
) -> Iterator[dict[str, Any]]:
    """Yield the options of every mesh that divides the model and the batch."""
    experts = None
    for layer in model.layers:
        if layer.experts:
            experts = layer.experts
            break
    # All sizes of a ramp must be divisible.
    all_batches = [*ramps.batch_sizes(config.training), global_batch]
    divided_batch = math.gcd(*all_batches)
    divided_length = math.gcd(*ramps.sequence_lengths(config.training))
    for tp, pp, cp in _splits(model, divided_length, world_size, device):
        # The remaining ranks are data-parallel. Each needs the same number of rows.
        ranks = world_size // (tp * pp * cp)
        if divided_batch % ranks:
            continue
        rows = global_batch // ranks
        for replicas in _replicas(ranks, tp * cp, device):
            shards = ranks // replicas
            # Stacked experts can be divided over the ranks that share them. A list of experts cannot.
            eps = [1]
            if experts and not experts.listed:
                ranks_of_experts = shards * cp * tp
                eps = [n for n in _divisors(experts.count) if ranks_of_experts % n == 0]
            for ep in eps:
                mesh = {
                    "parallelism.tensor_parallel_degree": tp,
                    "parallelism.pipeline_parallel_degree": pp,
                    "parallelism.context_parallel_degree": cp,
                    "parallelism.data_parallel_replicate_degree": replicas,
                    "parallelism.data_parallel_shard_degree": shards,
                }
                if experts:
                    mesh["parallelism.expert_parallel_degree"] = ep
                yield from _batches(config, mesh, pp, len(model.layers), rows, global_batch)


def _splits(
    model: ModelShape,
    seq_len: int,
    world_size: int,
    device: Device,
) -> Iterator[tuple[int, int, int]]:
    """Yield the degrees of tensor, pipeline and context parallelism that divide the model and the ranks."""
    layer = model.layers[0]
    # Tensor parallelism stays within a node.
    sizes = (*model.head_counts, model.vocab, seq_len, world_size)
    tps = []
    for degree in _divisors(device.devices_per_node):
        if all(size % degree == 0 for size in sizes):
            tps.append(degree)
    # Context parallelism needs causal attention without a window, and only pays off for long sequences.
    has_windows = any(one.limit for one in model.layers)
    cps = [1]
    if layer.causal and not has_windows:
        cps += [degree for degree in (2, 4, 8) if seq_len // degree >= 2048]
    # With context parallelism, each rank has two chunks of a sequence, which tensor parallelism splits.
    for tp in tps:
        for pp in _divisors(world_size // tp):
            if pp > min(len(model.layers), 64):
                break
            for cp in cps:
                is_even = cp == 1 or seq_len % (2 * cp * tp) == 0
                if is_even and world_size % (tp * pp * cp) == 0:
                    yield tp, pp, cp


def _batches(
    config: Config, mesh: dict[str, Any], pp: int, layers: int, rows: int, global_batch: int
) -> Iterator[dict[str, Any]]:
    """Yield options with each micro-batch, schedule and recompute mode of a mesh.

    ``rows`` is the number of sequences per step on each data rank.
    """
    for size in _divisors(rows):
        if size > _LARGEST_MICROBATCH:
            continue
        # A pipeline needs at least one micro-batch per rank.
        schedules: list[str | None] = [None]
        if pp > 1:
            count = rows // size
            if not pp <= count <= max(_MOST_MICROBATCHES, 2 * pp):
                continue
            # Schedules with several stages per rank need at least one layer per stage.
            schedules = ["1F1B"]
            if 2 * pp <= layers and count >= 2 * pp:
                schedules.append("Interleaved1F1B")
                if not config.compile.enable:
                    schedules.append("ZBVZeroBubble")
        # Without a pipeline, the micro-batch is the local batch, and gradients are accumulated.
        for schedule, recompute in itertools.product(schedules, _RECOMPUTE):
            options = dict(mesh)
            if schedule:
                options["parallelism.pipeline_parallel_schedule"] = schedule
                options["parallelism.pipeline_parallel_microbatch_size"] = size
            # A pipeline divides its local batch itself.
            options["training.local_batch_size"] = rows if schedule else size
            options["training.global_batch_size"] = global_batch
            for key, value in recompute.items():
                options[f"activation_checkpoint.{key}"] = value
            yield options


def _replicas(ranks: int, inner: int, device: Device) -> list[int]:
    """Return numbers of replicas: shards over all ranks, over a node, over a few nodes, and no shards."""
    ranks_of_node = max(1, device.devices_per_node // inner)
    shard_degrees = {ranks, ranks_of_node, 1}
    for groups in (2, 4, 8, 16):
        if ranks % groups == 0:
            shard_degrees.add(ranks // groups)

    replicas = set()
    for shards in shard_degrees:
        if ranks % shards == 0:
            replicas.add(ranks // shards)
    return sorted(replicas)


def _divisors(number: int) -> list[int]:
    """Return the divisors up to 4096, which no useful degree exceeds."""
    largest = min(number, 4096)
    return [n for n in range(1, largest + 1) if number % n == 0]


def with_options(config: Config, options: dict[str, Any]) -> Config:
    """Return the configuration with other values of some options (by full name)."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    changed_sections = {}
    for section, values in sections.items():
        changed_sections[section] = replace(getattr(config, section), **values)
    return replace(config, **changed_sections)


def _is_legal(loaded: Loaded, options: dict[str, Any], world_size: int) -> bool:
    """True if ``train`` accepts the candidate."""
    changed = replace(loaded, config=with_options(loaded.config, options))
    try:
        configs.require_to_build(changed, world_size)
    except ConfigError:
        return False
    return True


def as_toml(loaded: Loaded, best: Ranked) -> str:
    """Return the configuration with the options of a candidate, as TOML for ``train``."""
    chosen = with_options(loaded.config, best.options)
    # Only options with an origin are written. The others have their defaults.
    origins = dict(loaded.origins)
    for option in best.options:
        origins[option] = "plan --search"
    text = set_toml(replace(loaded, config=chosen, origins=origins))
    device = best.plan.device.name
    header = f"# {best.name()} on {best.plan.world_size} x {device}, by shardtrain plan --search"
    return f"{header}\n\n{text}"


def lines(result: SearchResult, top: int, columns: int | None = None) -> list[str]:
    """Return the lines of the ranking, for a terminal with ``columns``. They have 60 to 80 columns."""
    width = min(80, max(60, columns or 80))
    summary = f"{result.counted} candidates, {result.fitting} fit"
    if not result.ranked:
        return [summary, *_lines_of_none(result.closest)]

    text = [summary, f"{'':4}{'tokens/s/device':>15}{'MFU':>7}{'step':>9}{'memory':>11}"]
    indent = " " * 6
    for place, candidate in enumerate(result.ranked[:top], 1):
        plan = candidate.plan
        step = format_seconds(plan.time.seconds)
        memory = format_bytes(plan.peak_bytes)
        text.append(f"{place:>3} {plan.tps:>15,.0f}{plan.mfu:>7.1%}{step:>9}{memory:>11}")
        text += textwrap.wrap(
            candidate.name(), width, initial_indent=indent, subsequent_indent=indent
        )
    # The cost that sets the first two apart.
    if len(result.ranked) > 1:
        first, second = result.ranked[:2]
        text += textwrap.wrap(why(first.plan, second.plan), width)

    # The fastest for each amount of memory, as bars.
    front = pareto(result.ranked)
    if len(front) > 1:
        text.append("fastest candidates by memory:")
        highest_tps = max(candidate.plan.tps for candidate in front)
        for candidate in front[:8]:
            plan = candidate.plan
            memory = format_bytes(plan.peak_bytes)
            bar = "#" * round(36 * plan.tps / highest_tps)
            text.append(f"  {memory:>10} {plan.tps:>9,.0f} {bar}")
    return text


def _lines_of_none(closest: Ranked | None) -> list[str]:
    """Return the lines of a search in which no candidate fits."""
    if closest is None:
        return ["the model and the batch cannot be divided over any mesh of these devices"]
    plan = closest.plan
    needed = format_bytes(plan.peak_bytes)
    excess = format_bytes(max(0, plan.peak_bytes - plan.device.memory_bytes))
    return [
        f"no candidate fits; the closest one needs {needed}, {excess} too much:",
        f"  {closest.name()}",
        "more devices (--gpus) or larger devices (--device) would help",
    ]


def why(best: Plan, other: Plan) -> str:
    """Explain why the second candidate is worse: the cost that differs most, or the memory if both are equally fast."""
    # A cost that only one of the two has counts as 0 for the other.
    extra_seconds = {}
    for name in {*best.time.costs, *other.time.costs}:
        best_seconds = best.time.costs.get(name, 0.0)
        extra_seconds[name] = other.time.costs.get(name, 0.0) - best_seconds
    name, growth = max(extra_seconds.items(), key=lambda item: item[1])
    slower = other.time.seconds / best.time.seconds - 1
    if slower >= EQUAL and growth > 0:
        return f"the runner-up is {slower:.1%} slower: {name} takes {format_seconds(growth)} more"
    extra_bytes = other.peak_bytes - best.peak_bytes
    memory = "needs as much"
    if extra_bytes > 0:
        memory = f"needs {format_bytes(extra_bytes)} more"
    elif extra_bytes < 0:
        memory = f"needs {format_bytes(-extra_bytes)} less"
    return f"the runner-up is equally fast (within {EQUAL:.1%}) and {memory}"


def pareto(ranked: list[Ranked]) -> list[Ranked]:
    """Return the candidates that no other beats in both speed and memory, in the order of memory."""
    front: list[Ranked] = []

    def memory_then_speed(candidate: Ranked) -> tuple[int, float]:
        return candidate.plan.peak_bytes, -candidate.plan.tps

    # Candidates come in ascending memory, so one that is not faster than all before it is beaten.
    for candidate in sorted(ranked, key=memory_then_speed):
        is_faster = not front or candidate.plan.tps > front[-1].plan.tps
        if is_faster:
            front.append(candidate)
    return front
