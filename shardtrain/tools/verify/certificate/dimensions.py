"""The dimensions of a certificate: everything about how a configuration runs that must not change a number.

Each ``Dimension`` either names the reason why it does not apply, or creates variants of the small run. This module does
not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shardtrain.config import Loaded
from shardtrain.tools.verify.certificate.small_run import ROWS, STEPS, SmallRun
from shardtrain.tools.verify.certificate.trial import Trial
from shardtrain.tools.verify.meshes import changed, own_axes
from shardtrain.utils.errors import ConfigError

MESH = "mesh"
ALL_STEPS = range(1, STEPS + 1)
SAVING = {"enable": True, "interval": 1}
STOP_AFTER = 2
"""Step after which a run is stopped and resumed."""


@dataclass(frozen=True)
class Variant:
    """One comparison with the run on one process.

    Attributes:
        label: Short description for the table.
        trials: Runs in order. Only the last one is compared; the others prepare it.
        is_exact: True if the numbers must be bitwise equal, because nothing is summed in another order.
        impossible: Reason why the variant is not supported.
    """

    label: str
    trials: Sequence[Trial] = ()
    is_exact: bool = False
    impossible: str = ""


@dataclass(frozen=True)
class VariantRequest:
    """What a dimension needs to create its variants: the small run, requested meshes, and ``--quick``."""

    run: SmallRun
    meshes: Sequence[str] = ()
    is_quick: bool = False


@dataclass(frozen=True)
class Dimension:
    """A dimension.

    Attributes:
        name: Name on the command line and in the certificate.
        reason_not_to_apply: Returns why the dimension does not apply to a configuration, or "".
        variants: Creates the comparisons.
    """

    name: str
    reason_not_to_apply: Callable[[SmallRun], str]
    variants: Callable[[VariantRequest], Iterator[Variant]] = field(repr=False)


def one_line(error: ConfigError) -> str:
    """Return the problems of an error in one line."""
    return str(error).replace("\n", "; ")


def always_applies(_: SmallRun) -> str:
    """Return "": the dimension applies to every configuration."""
    return ""


def task_variants(request: VariantRequest) -> Iterator[Variant]:
    """The run's own data and loss on small meshes, each with gradient accumulation."""
    names = list(request.meshes) or ["dp_shard=2", "tp=2"]
    if not request.meshes and not request.is_quick:
        names += ["pp=2", "cp=2", "dp_replicate=2"]
        own = own_axes(request.run.user)
        if own and own not in names:
            names.append(own)
    for mesh in names:
        name = f"task-{mesh}"
        try:
            loaded, plan = request.run.on_mesh(name, mesh)
        except ConfigError as error:
            yield Variant(mesh, impossible=one_line(error))
            continue
        yield Variant(mesh, [Trial(name, loaded, plan.num_ranks, ALL_STEPS)])


def accumulation_variants(request: VariantRequest) -> Iterator[Variant]:
    """Other sizes of a micro-batch, with the same rows per step."""
    least = request.run.rows_per_pass
    sizes = {least, ROWS // 2}
    if request.is_quick:
        sizes = {least}
    for size in sorted(sizes):
        name = f"accumulation-{size}"
        batch = {"local_batch_size": size}
        loaded = request.run.varied(name, {"training": batch})
        label = f"{ROWS // size} micro-batches of {size}"
        yield Variant(label, [Trial(name, loaded, 1, ALL_STEPS)])


def resume_variants(request: VariantRequest) -> Iterator[Variant]:
    """A run that is stopped after a save and resumed, on the same mesh and on another."""
    run = request.run
    later = range(STOP_AFTER + 1, STEPS + 1)
    same = run.varied("resume-same", {"checkpoint": SAVING})
    yield Variant(
        "one process",
        [
            Trial("resume-same-before", same, 1, (), stop_after=STOP_AFTER),
            Trial("resume-same", same, 1, later, resumes="resume-same-before"),
        ],
        is_exact=True,
    )
    for first, second in _mesh_changes(request):
        name = f"resume-{first}-{second}"
        label = f"{first}, then {second or 'one process'}"
        try:
            before, ranks_before = _saving(run, name, first)
            after, ranks_after = _saving(run, name, second)
        except ConfigError as error:
            yield Variant(label, impossible=one_line(error))
            continue
        stopped = Trial(f"{name}-before", before, ranks_before, (), stop_after=STOP_AFTER)
        yield Variant(label, [stopped, Trial(name, after, ranks_after, later, resumes=stopped.name)])


def _saving(run: SmallRun, name: str, mesh: str) -> tuple[Loaded, int]:
    """Return the configuration on a mesh, or on one process, that saves each step, and its number of ranks."""
    if not mesh:
        return run.varied(name, {"checkpoint": SAVING}), 1
    loaded, plan = run.on_mesh(name, mesh)
    return changed(loaded, {"checkpoint": SAVING}, set(), ""), plan.num_ranks


def _mesh_changes(request: VariantRequest) -> list[tuple[str, str]]:
    """Return pairs of meshes: before and after the restart. "" is one process."""
    if request.is_quick:
        return [("dp_shard=2", "")]
    return [("dp_shard=2", "tp=2"), ("tp=2", "")]


def mesh_reason(run: SmallRun) -> str:
    """Only next-token losses have synthetic batches."""
    name = run.user.config.task.name
    if name in ("language_model", "masked_language_model"):
        return ""
    return f"task.name={name} has its own loss; the dimension task compares it on meshes"


def no_variants(_: VariantRequest) -> Iterator[Variant]:
    """The dimension mesh runs the comparison of ``verify`` without trials."""
    yield from ()


DIMENSIONS = (
    Dimension(MESH, mesh_reason, no_variants),
    Dimension("task", always_applies, task_variants),
    Dimension("accumulation", always_applies, accumulation_variants),
    Dimension("resume", always_applies, resume_variants),
)
