"""``plan --search``: rank every legal mesh, schedule, recompute mode and micro-batch with the same tokens per step.

All candidates are estimated by formulas. The best are planned again with a simulated pipeline and checked by the rules
of ``train``. Candidates that fit are ranked by tokens per second, and of equally fast ones, the one with less memory is
first.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardtrain import config as configs
from shardtrain import tasks
from shardtrain.config import Loaded, derived
from shardtrain.config.schema import Config
from shardtrain.config.toml_writer import set_toml
from shardtrain.facts.quantization import LINEAR, MX
from shardtrain.tools.plan import job_sizes, planning, rank_memory, shapes, timing
from shardtrain.tools.plan.hardware import Device
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.planning import Plan
from shardtrain.tools.plan.shapes import ModelShape
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.units import format_bytes, format_seconds

EQUAL = 0.005
"""Relative difference below which two candidates count as equally fast."""
NUM_SIMULATED = 80
"""Number of candidates that are planned with a simulated pipeline."""
_RECOMPUTE = ({"mode": "none"}, {"mode": "selective", "selective_ac_option": "op"}, {"mode": "full"})
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
        mesh = " ".join(f"{axis} {size}" for axis, size in self.plan.sizes.items() if size > 1) or "one device"
        piped = f", {job.schedule}" if job.pp > 1 else ""
        types = ", float8" if job.float8 else ""
        return f"{mesh}{piped}, recompute {job.recompute}, {job.rows} x {job.num_microbatches}{types}"


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
        return {
            "counted": self.counted,
            "fitting": self.fitting,
            "ranked": [{"options": one.options, **one.plan.as_dict()} for one in self.ranked[:top]],
        }


def run(loaded: Loaded, world_size: int, device: Device, float8: bool = False) -> SearchResult:
    """Rank variations of a configuration on ``world_size`` devices.

    The search changes mesh, schedule, recomputation and micro-batch. Model, sequence length, dtypes and tokens per step
    stay. With ``float8``, each candidate is also planned with float8 linear layers, which changes numbers.

    Raises:
        ConfigError: another part of the configuration is wrong, or the device has no float8.
    """
    config = loaded.config
    if float8 and "float8" not in device.flops:
        raise ConfigError(Problem("--float8", device.name, "has no float8 products", "remove it", "command line"))
    converters: list[list[str]] = [config.model.converters]
    if float8 and not {LINEAR, MX} & set(config.model.converters):
        converters.append([*config.model.converters, LINEAR])
    model = shapes.read(config)
    sequences = tasks.open_task(config).sequences_per_row
    kernels = planning.kernels_of(device, config, world_size)

    # Sequences per step, as configured, or those of the configured mesh on these devices.
    global_batch = config.training.global_batch_size
    if global_batch == -1:
        shards = max(1, world_size // derived.other_degrees(config))
        replicas = config.parallelism.data_parallel_replicate_degree
        global_batch = config.training.local_batch_size * replicas * shards

    # Estimate all by formulas. Of a pipeline, only the first and the last rank can need the most
    # memory: the first has most micro-batches in flight, the last has the logits.
    fitting: list[tuple[float, int, dict[str, Any], PlannedJob]] = []
    least: tuple[int, dict[str, Any], PlannedJob] | None = None
    counted = 0
    for of_mesh, names in itertools.product(_candidates(config, model, world_size, device, global_batch), converters):
        options = of_mesh if names == config.model.converters else {**of_mesh, "model.converters": names}
        changed = with_options(config, options)
        job = job_sizes.of_config(changed, world_size, len(model.layers), sequences, model.has_experts)
        has_empty_stage = any(len(layers) == 0 for layers in job.stages[1:-1])
        if has_empty_stage or job.num_microbatches < 1:
            continue
        counted += 1
        peak = max(rank_memory.of_rank(model, job, place, None, kernels).peak for place in {0, job.pp - 1})
        peak += planning.overhead(peak, device)
        if least is None or peak < least[0]:
            least = peak, options, job
        if peak <= device.memory_bytes:
            seconds = timing.of_step(model, job, device, None).seconds
            fitting.append((seconds / job.tokens_per_step, peak, options, job))

    # Plan the best again with a simulated pipeline, and check them by the rules of train.
    fitting.sort(key=lambda one: (one[0], one[1]))
    ranked: list[Ranked] = []
    for _, _, options, job in fitting[:NUM_SIMULATED]:
        if _is_legal(loaded, options, world_size):
            plan = planning.of_job(model, job, device, kernels)
            if plan.fits:
                ranked.append(Ranked(options, plan))
    ranked.sort(key=lambda one: (-one.plan.tps, one.plan.peak_bytes))
    closest = None
    if least is not None and not ranked:
        closest = Ranked(least[1], planning.of_job(model, least[2], device, kernels))
    return SearchResult(ranked, counted, len(fitting), closest)


def _candidates(
    config: Config, model: ModelShape, world_size: int, device: Device, global_batch: int
) -> Iterator[dict[str, Any]]:
    """Yield the options of every mesh that divides the model and the batch."""
    layer = model.layers[0]
    layers = len(model.layers)
    seq_len = config.training.seq_len
    experts = next((one.experts for one in model.layers if one.experts), None)
    # Tensor parallelism stays within a node.
    sizes = (layer.heads, layer.kv_heads, model.vocab, seq_len, world_size)
    tps = [n for n in _divisors(device.devices_per_node) if all(size % n == 0 for size in sizes)]
    # Context parallelism needs causal attention without a window, and only pays off for long sequences.
    can_split = not any(one.limit for one in model.layers) and model.layers[0].causal
    for tp in tps:
        for pp in _divisors(world_size // tp):
            if pp > min(layers, 64):
                break
            for cp in [n for n in (1, 2, 4, 8) if n == 1 or (can_split and seq_len // n >= 2048)]:
                if world_size % (tp * pp * cp) or (cp > 1 and seq_len % (2 * cp * tp)):
                    continue
                ranks = world_size // (tp * pp * cp)
                if global_batch % ranks:
                    continue
                for replicas in _replicas(ranks, tp * cp, device):
                    for ep in _expert_degrees(experts, ranks // replicas * cp * tp):
                        mesh = {
                            "parallelism.tensor_parallel_degree": tp,
                            "parallelism.pipeline_parallel_degree": pp,
                            "parallelism.context_parallel_degree": cp,
                            "parallelism.data_parallel_replicate_degree": replicas,
                            "parallelism.data_parallel_shard_degree": ranks // replicas,
                        }
                        if experts:
                            mesh["parallelism.expert_parallel_degree"] = ep
                        yield from _batches(config, mesh, pp, layers, global_batch // ranks, global_batch)


def _batches(
    config: Config, mesh: dict[str, Any], pp: int, layers: int, rows: int, global_batch: int
) -> Iterator[dict[str, Any]]:
    """Yield options with each micro-batch, schedule and recompute mode of a mesh.

    ``rows`` is the number of sequences per step on each data rank.
    """
    for size in [n for n in _divisors(rows) if n <= _LARGEST_MICROBATCH]:
        schedules: list[str | None] = [None]
        if pp > 1:
            count = rows // size
            if not pp <= count <= max(_MOST_MICROBATCHES, 2 * pp):
                continue
            schedules = ["1F1B"]
            if 2 * pp <= layers and count >= 2 * pp:
                schedules.append("Interleaved1F1B")
                if not config.compile.enable:
                    schedules.append("ZBVZeroBubble")
        for schedule in schedules:
            for recompute in _RECOMPUTE:
                options = dict(mesh)
                if schedule:
                    options["parallelism.pipeline_parallel_schedule"] = schedule
                    options["parallelism.pipeline_parallel_microbatch_size"] = size
                options["training.local_batch_size"] = rows if schedule else size
                options["training.global_batch_size"] = global_batch
                options |= {f"activation_checkpoint.{key}": value for key, value in recompute.items()}
                yield options


def _replicas(ranks: int, inner: int, device: Device) -> list[int]:
    """Return numbers of replicas: shards over all ranks, over a node, over a few nodes, and no shards."""
    shards = {ranks, 1, max(1, device.devices_per_node // inner)}
    shards |= {ranks // n for n in (2, 4, 8, 16) if ranks % n == 0}
    return sorted({ranks // n for n in shards if ranks % n == 0})


def _expert_degrees(experts: shapes.ExpertShape | None, ranks: int) -> list[int]:
    if experts is None:
        return [1]
    return [n for n in _divisors(experts.count) if ranks % n == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, 4096) + 1) if number % n == 0]


def with_options(config: Config, options: dict[str, Any]) -> Config:
    """Return the configuration with other values of some options (by full name)."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    replaced = {name: replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return replace(config, **replaced)


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
    origins = {**loaded.origins, **dict.fromkeys(best.options, "plan --search")}
    text = set_toml(replace(loaded, config=chosen, origins=origins))
    return f"# {best.name()} on {best.plan.world_size} x {best.plan.device.name}, by shardtrain plan --search\n\n{text}"


def lines(found: SearchResult, top: int, columns: int | None = None) -> list[str]:
    """Return the lines of the ranking, for a terminal with ``columns``. They have 60 to 80 columns."""
    width = min(80, max(60, columns or 80))
    answer = [f"{found.counted} candidates, {found.fitting} fit"]
    if not found.ranked:
        if found.closest is None:
            return [*answer, "the model and the batch cannot be divided over any mesh of these devices"]
        plan = found.closest.plan
        over = format_bytes(max(0, plan.peak_bytes - plan.device.memory_bytes))
        answer.append(f"none fits; the closest needs {format_bytes(plan.peak_bytes)}, {over} too much:")
        answer.append(f"  {found.closest.name()}")
        return [*answer, "more devices (--gpus) or larger ones (--device) would help"]
    best = found.ranked[0].plan
    answer.append(f"{'':4}{'tokens/s/device':>15}{'MFU':>7}{'step':>9}{'memory':>11}")
    for place, one in enumerate(found.ranked[:top], 1):
        plan = one.plan
        answer.append(
            f"{place:>3} {plan.tps:>15,.0f}{plan.mfu:>7.1%}{format_seconds(plan.time.seconds):>9}"
            f"{format_bytes(plan.peak_bytes):>11}"
        )
        answer += textwrap.wrap(one.name(), width, initial_indent="      ", subsequent_indent="      ")
    if len(found.ranked) > 1:
        answer += textwrap.wrap(why(best, found.ranked[1].plan), width)
    front = pareto(found.ranked)
    if len(front) > 1:
        answer.append("fastest candidates by memory:")
        widest = max(one.plan.tps for one in front)
        for one in front[:8]:
            bar = "#" * round(36 * one.plan.tps / widest)
            answer.append(f"  {format_bytes(one.plan.peak_bytes):>10} {one.plan.tps:>9,.0f} {bar}")
    return answer


def why(best: Plan, other: Plan) -> str:
    """Explain why the second candidate is worse: the cost that differs most, or the memory if both are equally fast."""
    per_token = {
        name: other.time.costs.get(name, 0.0) - best.time.costs.get(name, 0.0)
        for name in {*best.time.costs, *other.time.costs}
    }
    name, grew = max(per_token.items(), key=lambda item: item[1])
    slower = other.time.seconds / best.time.seconds - 1
    if slower < EQUAL or grew <= 0:
        more = other.peak_bytes - best.peak_bytes
        comparison = "more" if more > 0 else "less"
        memory = f"needs {format_bytes(abs(more))} {comparison}" if more else "needs as much"
        return f"the runner-up is as fast to {EQUAL:.1%} and {memory}"
    return f"the runner-up is {slower:.1%} slower: {name} takes {format_seconds(grew)} more"


def pareto(ranked: list[Ranked]) -> list[Ranked]:
    """Return the candidates that no other beats in both speed and memory, in the order of memory."""
    front: list[Ranked] = []
    for one in sorted(ranked, key=lambda one: (one.plan.peak_bytes, -one.plan.tps)):
        if not front or one.plan.tps > front[-1].plan.tps:
            front.append(one)
    return front
