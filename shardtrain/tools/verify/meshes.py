"""Mesh words such as "tp=2,pp=2" become plans: configurations whose degrees they set, or the reason why they cannot be.

A plan is checked by the rules of the configuration itself, in their words, before any process starts. No torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardtrain import config as configs
from shardtrain.config import Loaded, presets
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.utils.errors import ConfigError, Problem

OPTIONS = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
}
"""Mesh word -> option of [parallelism]."""
MAX_DEFAULT_RANKS = 8

DEFAULT_MESHES = (
    "dp_replicate=2",
    "dp_shard=2",
    "tp=2",
    "pp=2",
    "cp=2",
    "ep=2",
    "dp_replicate=2,dp_shard=2",
    "dp_shard=2,tp=2",
    "tp=2,pp=2",
    "cp=2,tp=2",
    "dp_shard=2,tp=2,pp=2",
)

RESHARD = "parallelism.fsdp_reshard_after_forward"
RECOMPUTE = "activation_checkpoint.mode"
SELECTIVE = "activation_checkpoint.selective_ac_option"
DEFAULT_OPTIONS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("pp=2", {"parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}),
    ("dp_shard=2,pp=2", {RESHARD: "always", RECOMPUTE: "full"}),
    ("dp_shard=2", {RESHARD: "never", RECOMPUTE: "none"}),
    ("tp=2", {RECOMPUTE: "selective", SELECTIVE: "op"}),
)
"""Meshes of the default list with options that split the backward pass, reshard and recompute otherwise."""


@dataclass(frozen=True)
class MeshPlan:
    """One mesh to compare with one process; ``problem`` is empty, or says why the mesh is not possible.

    ``options`` are those that are set besides the mesh, such as "activation_checkpoint.mode".
    """

    name: str
    schedule: str
    degrees: Mapping[str, int]
    loaded: Loaded
    problem: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def described_options(self) -> str:
        """The options in short, as the table has them: "reshard always, recompute full"."""
        parts = []
        if RESHARD in self.options:
            parts.append(f"reshard {self.options[RESHARD]}")
        if RECOMPUTE in self.options:
            parts.append(f"recompute {self.options[RECOMPUTE]} {self.options.get(SELECTIVE, '')}".strip())
        return ", ".join(parts)

    @property
    def num_ranks(self) -> int:
        """Processes of the mesh; experts are divided over ranks of the other axes."""
        return math.prod(degree for axis, degree in self.degrees.items() if axis != "ep")


def read(text: str) -> dict[str, int]:
    """The degree of each axis that a mesh word names: "tp=2,pp=2" -> {"tp": 2, "pp": 2}.

    ``ep`` divides experts over ranks of dp_shard, cp and tp; where these are too few, dp_shard becomes ``ep``.

    Raises:
        ConfigError: an axis is unknown or given twice, or a degree is not a whole number above 0.

    >>> read("tp=2, pp=2"), read("ep=2")
    ({'tp': 2, 'pp': 2}, {'ep': 2, 'dp_shard': 2})
    """
    degrees: dict[str, int] = {}
    words = text.split()
    if len(words) > 1 and "," not in text:
        fix = f"write {','.join(words)}"
        raise ConfigError(Problem("--mesh", text, "has no commas between its axes", fix, "command line"))
    for part in text.split(","):
        axis, _, degree = (piece.strip() for piece in part.partition("="))
        where = "command line"
        if axis not in OPTIONS:
            # "tp2" and "tp:2", or a configuration that was taken for the value of --mesh
            close = re.fullmatch(rf"({'|'.join(OPTIONS)})[:_ ]?(\d+)", axis)
            fix = f"write {close[1]}={close[2]}" if close else f"axes are {', '.join(OPTIONS)}"
            if "=" not in part and (text.endswith((".toml", ".py")) or text in presets.names()):
                fix = f"write {text} before all options"
            raise ConfigError(Problem("--mesh", text, f'names the axis "{axis}"', fix, where))
        if axis in degrees:
            raise ConfigError(Problem("--mesh", text, f"names {axis} twice", "name it once", where))
        if not degree.isdecimal() or int(degree) < 1:
            rule = f'gives {axis} the degree "{degree}"'
            raise ConfigError(Problem("--mesh", text, rule, f"write it like {axis}=2", where))
        degrees[axis] = int(degree)
    # ep is dealt out over ranks of the other axes: with too few of them, ranks of dp_shard are added
    experts = degrees.get("ep", 1)
    if "dp_shard" not in degrees and degrees.get("cp", 1) * degrees.get("tp", 1) % experts:
        degrees["dp_shard"] = experts
    return degrees


def requested(
    loaded: Loaded, meshes: Iterable[str], schedules: tuple[str, ...], allow_impossible: bool = False
) -> list[MeshPlan]:
    """Return the plans of ``--mesh`` and ``--schedule``.

    Raises:
        ConfigError: with every problem of every impossible plan, unless these are allowed.
    """
    plans = [plan for mesh in meshes for plan in _plans(loaded, mesh, schedules)]
    if schedules and not any(plan.schedule for plan in plans):
        fix = 'add a mesh with pp, like --mesh "pp=2"'
        raise ConfigError(
            Problem("--schedule", schedules[0], "has no effect without pipeline stages", fix, "command line")
        )
    problems = [plan.problem for plan in plans if plan.problem]
    if problems and not allow_impossible:
        raise ConfigError(list(dict.fromkeys(line for problem in problems for line in problem.splitlines())))
    return plans


def default(loaded: Loaded, schedules: tuple[str, ...]) -> list[MeshPlan]:
    """A list of small meshes for this model, its own axes first; those that are not possible say why."""
    names = list(DEFAULT_MESHES)
    if "num_experts" not in (model_shape(loaded) or {}):
        names.remove("ep=2")
    own = own_axes(loaded)
    if own and own not in names:
        names.insert(0, own)
    plans = [plan for name in names for plan in _plans(loaded, name, schedules)]

    # Meshes with other options. Of pipelines, schedules that are asked for are all that are tried.
    for name, options in DEFAULT_OPTIONS:
        if schedules and "pp" in name:
            continue
        schedule = options.get("parallelism.pipeline_parallel_schedule", "")
        if not schedule and "pp" in name:
            schedule = loaded.config.parallelism.pipeline_parallel_schedule
        plans.append(_plan(loaded, name, schedule, read(name), options))
    return plans


def own_axes(loaded: Loaded) -> str:
    """The configuration's own axes, each at 2, as a mesh word; empty where it has none or they need over 8 ranks."""
    p = loaded.config.parallelism
    axes = [axis for axis, option in OPTIONS.items() if getattr(p, option) > 1]
    ranks = 2 ** len([axis for axis in axes if axis != "ep"])
    return ",".join(f"{axis}=2" for axis in axes) if axes and ranks <= MAX_DEFAULT_RANKS else ""


def of_run(loaded: Loaded) -> list[str]:
    """Mesh words, of up to 8 ranks each, in which every kind of parallelism of a run that cuts the model has a part.

    Together, at the run's own degrees or the smallest that divide these; apart, where together they need more ranks;
    and heads and features dealt to as many ranks as in the run, which some models do not survive.
    """
    p = loaded.config.parallelism
    own = {axis: getattr(p, OPTIONS[axis]) for axis in ("tp", "pp", "cp", "ep") if getattr(p, OPTIONS[axis]) > 1}
    least = {axis: next(n for n in range(2, degree + 1) if degree % n == 0) for axis, degree in own.items()}

    # All together, if that fits into eight ranks: first at the run's own degrees, then at the least.
    for degrees in (own, least):
        words = [",".join(f"{axis}={degree}" for axis, degree in degrees.items())]
        if _ranks(words[0]) <= MAX_DEFAULT_RANKS:
            break
    else:
        words = [f"{axis}={degree}" for axis, degree in least.items()]

    # Heads may not survive being dealt to as many ranks as in the run, whatever they do on fewer.
    tp = own.get("tp", 1)
    if degrees.get("tp", 1) < tp <= MAX_DEFAULT_RANKS:
        words.append(f"tp={tp}")
    return [word for word in words if _ranks(word) <= MAX_DEFAULT_RANKS]


def _ranks(mesh: str) -> int:
    return math.prod(degree for axis, degree in read(mesh).items() if axis != "ep")


def _plans(loaded: Loaded, mesh: str, schedules: tuple[str, ...]) -> list[MeshPlan]:
    degrees = read(mesh)
    if degrees.get("pp", 1) == 1:
        return [_plan(loaded, mesh, "", degrees)]
    names = schedules or (loaded.config.parallelism.pipeline_parallel_schedule,)
    return [_plan(loaded, mesh, name, degrees) for name in names]


def _plan(
    loaded: Loaded, mesh: str, schedule: str, degrees: Mapping[str, int], options: Mapping[str, Any] | None = None
) -> MeshPlan:
    """A mesh as a configuration, checked by the rules of the configuration itself."""
    parallelism: dict[str, Any] = {option: degrees.get(axis, 1) for axis, option in OPTIONS.items()}
    parallelism |= {
        "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_layers_per_stage": None,
        "module_fqns_per_model_part": None,
    }
    if schedule:
        parallelism["pipeline_parallel_schedule"] = schedule
    if degrees.get("dp_replicate", 1) == 1:
        parallelism["shard_optimizer_states"] = False  # without replicas there is nothing to split it over
    rows = rows_per_data_rank(degrees)
    data_ranks = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    batch = {"local_batch_size": rows, "global_batch_size": rows * data_ranks}

    # Options that count as set by --mesh: a rule that one of them breaks is an error of the mesh.
    of_mesh = {f"parallelism.{OPTIONS[axis]}" for axis in degrees}
    if schedule:
        of_mesh.add("parallelism.pipeline_parallel_schedule")
    sections: dict[str, dict[str, Any]] = {"parallelism": parallelism, "training": batch}
    for option, value in (options or {}).items():
        section, _, name = option.partition(".")
        sections.setdefault(section, {})[name] = value
        of_mesh.add(option)
    loaded = changed(loaded, sections, of_mesh, f"--mesh {mesh}")
    problems = [*configs.check(loaded), *configs.unavailable(loaded)]
    return MeshPlan(mesh, schedule, degrees, loaded, "\n".join(map(str, problems)), options or {})


def rows_per_data_rank(degrees: Mapping[str, int]) -> int:
    """Sequences of a step on each data-parallel rank: two micro-batches for each pipeline rank, which suits all
    schedules, and two in any case, so that a dropped micro-batch shows."""
    return 2 * degrees.get("pp", 1)


def changed(loaded: Loaded, sections: Mapping[str, Mapping[str, Any]], given: set[str], where: str) -> Loaded:
    """A copy with options replaced; those in ``given`` are said to come from ``where``."""
    config = loaded.config
    for name, values in sections.items():
        config = dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **values)})
    origins = dict(loaded.origins)
    origins.update(dict.fromkeys(given, where))
    return dataclasses.replace(loaded, config=config, origins=origins)
