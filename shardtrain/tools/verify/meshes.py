"""Convert mesh arguments such as "tp=2,pp=2" to plans: one configuration per mesh, or why it is impossible.

Plans are checked by the rules of the configuration before any process starts. This module does not
import torch.
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
from shardtrain.config.certificate import AXES
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.variables import is_whole_number

OPTIONS = {axis: option.removeprefix("parallelism.") for axis, option in AXES.items()}
"""Mesh axis -> option of [parallelism]."""
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
"""Additional meshes of the default list, with options for other backward passes, resharding and
recomputation.
"""


@dataclass(frozen=True)
class MeshPlan:
    """One mesh to compare with one process.

    Attributes:
        name: The mesh, such as "tp=2,pp=2".
        schedule: Pipeline schedule, or "".
        degrees: Number of ranks along each named axis.
        loaded: The configuration.
        problem: Reason why the mesh is impossible, or "".
        options: Options set in addition to the mesh, by name ("activation_checkpoint.mode").
    """

    name: str
    schedule: str
    degrees: Mapping[str, int]
    loaded: Loaded
    problem: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def described_options(self) -> str:
        """Short form of the options for the table: "reshard always, recompute full"."""
        parts = []
        if RESHARD in self.options:
            parts.append(f"reshard {self.options[RESHARD]}")
        if RECOMPUTE in self.options:
            text = f"recompute {self.options[RECOMPUTE]}"
            if self.options.get(SELECTIVE):
                text += f" {self.options[SELECTIVE]}"
            parts.append(text)
        return ", ".join(parts)

    @property
    def num_ranks(self) -> int:
        """Number of processes of the mesh."""
        return _num_ranks(self.degrees)


def _num_ranks(degrees: Mapping[str, int]) -> int:
    """Return the number of ranks of a mesh.

    ``ep`` adds no ranks, because it divides experts among ranks of other axes.
    """
    return math.prod(degree for axis, degree in degrees.items() if axis != "ep")


def read(text: str) -> dict[str, int]:
    """Parse a mesh argument: "tp=2,pp=2" -> {"tp": 2, "pp": 2}.

    ``ep`` divides experts among the ranks of dp_shard, cp and tp. If cp and tp have too few ranks, dp_shard
    is set to ``ep``.

    Raises:
        ConfigError: an axis is unknown or repeated, or a degree is not a positive integer.

    >>> read("tp=2, pp=2"), read("ep=2")
    ({'tp': 2, 'pp': 2}, {'ep': 2, 'dp_shard': 2})
    """
    degrees: dict[str, int] = {}
    # "tp=2 pp=2" would be read as tp with the degree "2 pp=2", whose message is confusing.
    pieces = text.split()
    if len(pieces) > 1 and "," not in text:
        raise _mesh_error(text, "has no commas between its axes", f"write {','.join(pieces)}")
    for part in text.split(","):
        axis, _, degree = (piece.strip() for piece in part.partition("="))
        if axis not in OPTIONS:
            raise _mesh_error(text, f'has an unknown axis "{axis}"', _axis_fix(text, part, axis))
        if axis in degrees:
            raise _mesh_error(text, f"names {axis} twice", "name it once")
        if not is_whole_number(degree) or int(degree) < 1:
            rule = f'has an invalid degree "{degree}" of {axis}'
            raise _mesh_error(text, rule, f"write it like {axis}=2")
        degrees[axis] = int(degree)

    experts = degrees.get("ep", 1)
    other_ranks = degrees.get("cp", 1) * degrees.get("tp", 1)
    if "dp_shard" not in degrees and other_ranks % experts:
        degrees["dp_shard"] = experts
    return degrees


def _mesh_error(text: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem("--mesh", text, rule, fix, "command line"))


def _axis_fix(text: str, part: str, axis: str) -> str:
    """Return the fix for an unknown axis."""
    # A configuration after --mesh was parsed as a mesh.
    if "=" not in part and (text.endswith((".toml", ".py")) or text in presets.names()):
        return f"write {text} before all options"
    # "tp2" or "tp:2"
    close = re.fullmatch(rf"({'|'.join(OPTIONS)})[:_ ]?(\d+)", axis)
    if close:
        return f"write {close[1]}={close[2]}"
    return f"axes are {', '.join(OPTIONS)}"


def requested(
    loaded: Loaded,
    meshes: Iterable[str],
    schedules: tuple[str, ...],
    allow_impossible: bool = False,
) -> list[MeshPlan]:
    """Return the plans of ``--mesh`` and ``--schedule``.

    Raises:
        ConfigError: a plan is impossible, unless ``allow_impossible``. The message lists every
            problem of every plan.
    """
    plans: list[MeshPlan] = []
    for mesh in meshes:
        plans += _plans(loaded, mesh, schedules)
    if schedules and not any(plan.schedule for plan in plans):
        raise ConfigError(
            Problem(
                "--schedule",
                schedules[0],
                rule="has no effect without pipeline stages",
                fix='add a mesh with pp, like --mesh "pp=2"',
                where="command line",
            )
        )
    # Plans of one configuration often have the same problems. List each once.
    problems: dict[str, None] = {}
    for plan in plans:
        problems.update(dict.fromkeys(plan.problem.splitlines()))
    if problems and not allow_impossible:
        raise ConfigError(list(problems))
    return plans


def default(loaded: Loaded, schedules: tuple[str, ...]) -> list[MeshPlan]:
    """Return plans of small meshes for this model, starting with its configured axes. Some may be impossible."""
    names = list(DEFAULT_MESHES)
    # ep divides experts, and this model has none.
    if "num_experts" not in (model_shape(loaded) or {}):
        names.remove("ep=2")
    configured = own_axes(loaded)
    if configured and configured not in names:
        names.insert(0, configured)
    plans: list[MeshPlan] = []
    for name in names:
        plans += _plans(loaded, name, schedules)

    # Add meshes with other options. If schedules are requested, do not add other pipelines.
    for name, options in DEFAULT_OPTIONS:
        if schedules and "pp" in name:
            continue
        schedule = options.get("parallelism.pipeline_parallel_schedule", "")
        if not schedule and "pp" in name:
            schedule = loaded.config.parallelism.pipeline_parallel_schedule
        plans.append(_plan(loaded, name, schedule, read(name), options))
    return plans


def own_axes(loaded: Loaded) -> str:
    """Return the mesh with the configured axes, each of size 2, or "" without such axes or for more than 8 ranks."""
    degrees = {}
    for axis, option in OPTIONS.items():
        if getattr(loaded.config.parallelism, option) > 1:
            degrees[axis] = 2
    if not degrees or _num_ranks(degrees) > MAX_DEFAULT_RANKS:
        return ""
    return _mesh_text(degrees)


def _mesh_text(degrees: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={degree}" for axis, degree in degrees.items())


def of_run(loaded: Loaded) -> list[str]:
    """Return meshes of up to 8 ranks that cover each configured kind of parallelism that splits the model.

    The first choice is one mesh with the configured degrees. The second choice is one mesh with their
    smallest divisors. If both need too many ranks, each axis gets a separate mesh. An additional mesh has
    the configured tp degree, because some models do not support that many tensor-parallel ranks.
    """
    parallelism = loaded.config.parallelism
    configured = {}
    least = {}
    for axis in ("tp", "pp", "cp", "ep"):
        degree = getattr(parallelism, OPTIONS[axis])
        if degree > 1:
            configured[axis] = degree
            # The smallest divisor above 1
            divisors = (number for number in range(2, degree + 1) if degree % number == 0)
            least[axis] = next(divisors)

    tested_tp = least.get("tp", 1)
    if _fits(_mesh_text(configured)):
        meshes = [_mesh_text(configured)]
        tested_tp = configured.get("tp", 1)
    elif _fits(_mesh_text(least)):
        meshes = [_mesh_text(least)]
    else:
        meshes = [f"{axis}={degree}" for axis, degree in least.items()]
    tp = configured.get("tp", 1)
    if tested_tp < tp <= MAX_DEFAULT_RANKS:
        meshes.append(f"tp={tp}")
    return [mesh for mesh in meshes if _fits(mesh)]


def _fits(mesh: str) -> bool:
    """True if a mesh has at most ``MAX_DEFAULT_RANKS`` ranks."""
    return _num_ranks(read(mesh)) <= MAX_DEFAULT_RANKS


def _plans(loaded: Loaded, mesh: str, schedules: tuple[str, ...]) -> list[MeshPlan]:
    """Return the plan of a mesh or, with pipeline stages, one plan for each schedule."""
    degrees = read(mesh)
    if degrees.get("pp", 1) == 1:
        return [_plan(loaded, mesh, "", degrees)]
    names = schedules or (loaded.config.parallelism.pipeline_parallel_schedule,)
    return [_plan(loaded, mesh, name, degrees) for name in names]


def _plan(
    loaded: Loaded,
    mesh: str,
    schedule: str,
    degrees: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
) -> MeshPlan:
    """Build the configuration of a mesh and check it."""
    parallelism: dict[str, Any] = {
        "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_layers_per_stage": None,
        "module_fqns_per_model_part": None,
    }
    # Axes that the mesh does not name are off, even if the configuration has them.
    for axis, option in OPTIONS.items():
        parallelism[option] = degrees.get(axis, 1)
    if schedule:
        parallelism["pipeline_parallel_schedule"] = schedule
    if degrees.get("dp_replicate", 1) == 1:
        # Optimizer states are sharded over replicas, so without replicas the option is an error.
        parallelism["shard_optimizer_states"] = False
    rows = rows_per_data_rank(degrees)
    data_ranks = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    batch = {"local_batch_size": rows, "global_batch_size": rows * data_ranks}

    # Report problems with these options as problems of --mesh.
    options_of_mesh = {f"parallelism.{OPTIONS[axis]}" for axis in degrees}
    if schedule:
        options_of_mesh.add("parallelism.pipeline_parallel_schedule")
    sections: dict[str, dict[str, Any]] = {"parallelism": parallelism, "training": batch}
    for option, value in (options or {}).items():
        section, _, name = option.partition(".")
        sections.setdefault(section, {})[name] = value
        options_of_mesh.add(option)
    loaded = changed(loaded, sections, options_of_mesh, f"--mesh {mesh}")
    problems = [*configs.check(loaded), *configs.unavailable(loaded)]
    problem = "\n".join(map(str, problems))
    return MeshPlan(mesh, schedule, degrees, loaded, problem, options or {})


def rows_per_data_rank(degrees: Mapping[str, int]) -> int:
    """Return the sequences per step on each data-parallel rank.

    Two micro-batches per pipeline rank suit all schedules. Meshes without a pipeline also have two, to detect
    a dropped micro-batch.
    """
    return 2 * degrees.get("pp", 1)


def without_ramps(loaded: Loaded) -> Loaded:
    """Return the configuration with steps of one size, which verify chooses itself.

    A ramp determines only the shape of a step. It does not depend on the mesh.
    """
    return changed(loaded, {"training": {"batch_ramp": [], "sequence_ramp": []}}, set(), "")


def changed(
    loaded: Loaded, sections: Mapping[str, Mapping[str, Any]], given: set[str], where: str
) -> Loaded:
    """Return a copy with other values of options.

    Messages show the origin ``where`` for the options in ``given``.
    """
    config = loaded.config
    for name, values in sections.items():
        section = dataclasses.replace(getattr(config, name), **values)
        config = dataclasses.replace(config, **{name: section})
    origins = dict(loaded.origins)
    origins.update(dict.fromkeys(given, where))
    return dataclasses.replace(loaded, config=config, origins=origins)
