"""``plan --search``: every legal mesh, schedule, recompute mode and micro-batch for the same tokens per step, ranked.

Candidates are counted twice: all by formulas, the best again with their pipeline played out and under the rules that
``train`` has. What is compared is tokens per second of those that fit; a tie goes to the one with more memory to spare.
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

"""Converters of linear layers."""
EQUAL = 0.005
"""Candidates whose times differ by less are as fast as each other."""
PLAYED_OUT = 80
"""Candidates that are counted exactly."""
_RECOMPUTE = ({"mode": "none"}, {"mode": "selective", "selective_ac_option": "op"}, {"mode": "full"})
_LARGEST_MICROBATCH = 16
_MOST_MICROBATCHES = 512
"""In a pipeline; more change the bubble by less than any error here."""


@dataclass(frozen=True)
class Ranked:
    """A candidate: the options that make it, and its plan."""

    options: dict[str, Any]
    plan: Plan

    def name(self) -> str:
        """Mesh, schedule, recompute and micro-batch in one line."""
        job = self.plan.job
        mesh = " ".join(f"{axis} {size}" for axis, size in self.plan.sizes.items() if size > 1) or "one device"
        piped = f", {job.schedule}" if job.pp > 1 else ""
        types = ", float8" if job.float8 else ""
        return f"{mesh}{piped}, recompute {job.recompute}, {job.rows} x {job.num_microbatches}{types}"


@dataclass(frozen=True)
class SearchResult:
    """The best candidates, best first; how many were counted, and how many of them fit."""

    ranked: list[Ranked]
    counted: int
    fitting: int
    closest: Ranked | None
    """Where none fits: the one that needs least."""

    def as_dict(self, top: int) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "counted": self.counted,
            "fitting": self.fitting,
            "ranked": [{"options": one.options, **one.plan.as_dict()} for one in self.ranked[:top]],
        }


def run(loaded: Loaded, world_size: int, device: Device, float8: bool = False) -> SearchResult:
    """Rank what a configuration could be on so many devices.

    Its model, sequence length, types and tokens per step stay; mesh, schedule, recompute and micro-batch are chosen.
    With ``float8`` each candidate is counted with float8 products in its linear layers too, where the device has them;
    that changes numbers, so it has to be asked for.

    Raises:
        ConfigError: the configuration itself is wrong, but for what is chosen, or the device has no float8.
    """
    config = loaded.config
    if float8 and "float8" not in device.flops:
        raise ConfigError(Problem("--float8", device.name, "has no float8 products", "leave it out", "command line"))
    converters: list[list[str]] = [config.model.converters]
    if float8 and not {LINEAR, MX} & set(config.model.converters):
        converters.append([*config.model.converters, LINEAR])
    model = shapes.read(config)
    sequences = tasks.open_task(config).sequences_per_row
    kernels = planning.kernels_of(device, config, world_size)

    # Sequences of a step: what is set, or what the configuration's own mesh would have on these devices.
    global_batch = config.training.global_batch_size
    if global_batch == -1:
        shards = max(1, world_size // derived.other_degrees(config))
        replicas = config.parallelism.data_parallel_replicate_degree
        global_batch = config.training.local_batch_size * replicas * shards

    # First all by formulas. The first and the last rank of a pipeline need most memory: one has most micro-batches in
    # flight, the other has the logits.
    fitting: list[tuple[float, int, dict[str, Any], PlannedJob]] = []
    least: tuple[int, dict[str, Any], PlannedJob] | None = None
    counted = 0
    for of_mesh, names in itertools.product(_candidates(config, model, world_size, device, global_batch), converters):
        options = of_mesh if names == config.model.converters else {**of_mesh, "model.converters": names}
        changed = with_options(config, options)
        job = job_sizes.of_config(changed, world_size, len(model.layers), sequences, model.has_experts)
        if any(len(one) == 0 for one in job.stages[1:-1]) or job.num_microbatches < 1:
            continue
        counted += 1
        most = max(rank_memory.of_rank(model, job, place, None, kernels).peak for place in {0, job.pp - 1})
        most += planning.overhead(most, device)
        if least is None or most < least[0]:
            least = most, options, job
        if most <= device.memory_bytes:
            seconds = timing.of_step(model, job, device, None).seconds
            fitting.append((seconds / job.tokens_per_step, most, options, job))

    # Then the best again, with their pipelines played out and under the rules of train.
    fitting.sort(key=lambda one: (one[0], one[1]))
    ranked: list[Ranked] = []
    for _, _, options, job in fitting[:PLAYED_OUT]:
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
    """The options of every mesh of so many devices that divides the model and the batch."""
    layer = model.layers[0]
    layers = len(model.layers)
    seq_len = config.training.seq_len
    experts = next((one.experts for one in model.layers if one.experts), None)
    # tensor parallelism stays within a node; a context split needs plain causal attention, and pays for long sequences
    sizes = (layer.heads, layer.kv_heads, model.vocab, seq_len, world_size)
    tps = [n for n in _divisors(device.devices_per_node) if all(size % n == 0 for size in sizes)]
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
    """Micro-batches, schedules and recompute modes of one mesh; ``rows`` are the sequences of a step on a data rank."""
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
    """Replica counts: all shards over all ranks, shards within a node or a few, no shards."""
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
    """A configuration with some options replaced."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in sections.items()})


def _is_legal(loaded: Loaded, options: dict[str, Any], world_size: int) -> bool:
    """Whether ``train`` has nothing against a candidate but what it would have against the given configuration."""
    changed = replace(loaded, config=with_options(loaded.config, options))
    try:
        configs.require_to_build(changed, world_size)
    except ConfigError:
        return False
    return True


def as_toml(loaded: Loaded, best: Ranked) -> str:
    """The given configuration with the best candidate's options: TOML for ``train``."""
    chosen = with_options(loaded.config, best.options)
    origins = {**loaded.origins, **dict.fromkeys(best.options, "plan --search")}
    text = set_toml(replace(loaded, config=chosen, origins=origins))
    return f"# {best.name()} on {best.plan.world_size} x {best.plan.device.name}, by shardtrain plan --search\n\n{text}"


def lines(found: SearchResult, top: int, columns: int | None = None) -> list[str]:
    """The ranking as text of at most 80 columns, or those of a terminal, down to 60."""
    width = min(80, max(60, columns or 80))
    answer = [f"{found.counted} candidates, {found.fitting} fit"]
    if not found.ranked:
        if found.closest is None:
            return [*answer, "no mesh of these devices divides the model and the batch"]
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
        answer.append("most tokens/s for their memory:")
        widest = max(one.plan.tps for one in front)
        for one in front[:8]:
            bar = "#" * round(36 * one.plan.tps / widest)
            answer.append(f"  {format_bytes(one.plan.peak_bytes):>10} {one.plan.tps:>9,.0f} {bar}")
    return answer


def why(best: Plan, other: Plan) -> str:
    """Why the runner-up lost: the cost that grew most, or the memory where they are equally fast."""
    per_token = {
        name: other.time.costs.get(name, 0.0) - best.time.costs.get(name, 0.0)
        for name in {*best.time.costs, *other.time.costs}
    }
    name, grew = max(per_token.items(), key=lambda item: item[1])
    slower = other.time.seconds / best.time.seconds - 1
    if slower < EQUAL or grew <= 0:
        more = other.peak_bytes - best.peak_bytes
        memory = f"needs {format_bytes(abs(more))} {'more' if more > 0 else 'less'}" if more else "needs as much"
        return f"the runner-up is as fast to {EQUAL:.1%} and {memory}"
    return f"the runner-up is {slower:.1%} slower: {name} takes {format_seconds(grew)} more"


def pareto(ranked: list[Ranked]) -> list[Ranked]:
    """Those that no other beats in both speed and memory, the smallest first."""
    front: list[Ranked] = []
    for one in sorted(ranked, key=lambda one: (one.plan.peak_bytes, -one.plan.tps)):
        if not front or one.plan.tps > front[-1].plan.tps:
            front.append(one)
    return front
