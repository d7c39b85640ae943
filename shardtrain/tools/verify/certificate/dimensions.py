"""The dimensions of a certificate: everything about how a configuration runs that must not change a number.

Each ``Dimension`` either names the reason why it does not apply, or creates variants of the small run. This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardtrain.config import Loaded, derived
from shardtrain.config.schema.data_options import DataLoaderOptions
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.tools.verify.certificate import small_run
from shardtrain.tools.verify.certificate.small_run import ROWS, STEPS, SmallRun
from shardtrain.tools.verify.certificate.trial import SKIPPED_STEP, Trial
from shardtrain.tools.verify.meshes import changed, own_axes
from shardtrain.utils.errors import ConfigError

MESH = "mesh"
PRECISION = "precision"
VALIDATION = "validation"
ALL_STEPS = range(1, STEPS + 1)
Sections = Mapping[str, Mapping[str, Any]]
SAVING = {"enable": True, "interval": 1}
"""Options in [checkpoint] that save every step."""
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
        without_resume: The meshes of a resumed run without the resume. They run if the variant differs, because
            the cause may then be a mesh.
    """

    label: str
    trials: Sequence[Trial] = ()
    is_exact: bool = False
    impossible: str = ""
    without_resume: Sequence[Variant] = ()


@dataclass(frozen=True)
class VariantRequest:
    """Inputs from which a dimension creates its variants: the small run, requested meshes, and ``--quick``."""

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
    # A combination of axes may have a fault that no single axis has, so add the user's mesh.
    if not request.meshes and not request.is_quick:
        names += ["pp=2", "cp=2", "dp_replicate=2"]
        configured = own_axes(request.run.user)
        if configured and configured not in names:
            names.append(configured)
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
    # On the same mesh nothing is summed in another order, so the numbers must be bitwise equal.
    same = run.varied("resume-same", {"checkpoint": SAVING})
    stopped = Trial("resume-same-before", same, 1, (), stop_after=STOP_AFTER)
    resumed = Trial("resume-same", same, 1, later, resumes=stopped.name)
    yield Variant("one process", [stopped, resumed], is_exact=True)

    # On another mesh, the checkpoint is also resharded.
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
        resumed = Trial(name, after, ranks_after, later, resumes=stopped.name)
        without = [_without_resume(run, name, mesh) for mesh in (first, second) if mesh]
        yield Variant(label, [stopped, resumed], without_resume=without)


def _without_resume(run: SmallRun, name: str, mesh: str) -> Variant:
    """Return all steps on a mesh, without a resume."""
    name = f"{name}-all-{mesh}"
    loaded, plan = run.on_mesh(name, mesh)
    return Variant(mesh, [Trial(name, loaded, plan.num_ranks, ALL_STEPS)])


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


def skipped_reason(run: SmallRun) -> str:
    """Return why the dimension does not apply, or "" if it does.

    A run skips an update in float16, or if ``training.nonfinite_policy`` is "skip". Other runs stop.
    """
    user = run.user.config
    if derived.compute_dtype(user) == "float16" or user.training.nonfinite_policy == "skip":
        return ""
    return "a run in this precision stops at an overflow (training.nonfinite_policy)"


def skipped_variants(request: VariantRequest) -> Iterator[Variant]:
    """Compare runs whose gradients overflow in one step with a run that never computes this step."""
    run = request.run
    scales_loss = derived.compute_dtype(run.user.config) == "float16"
    sections: dict[str, dict[str, Any]] = {}
    if not scales_loss:
        sections["training"] = {
            "nonfinite_policy": "skip",
            "nonfinite_max_skips": 1,
            "nonfinite_max_skip_fraction": 0.01,
        }
    later = range(SKIPPED_STEP + 1, STEPS + 1)
    computed = [step for step in ALL_STEPS if step != SKIPPED_STEP]
    without = Trial(
        "skipped-without",
        run.varied("skipped-without", {}),
        num_ranks=1,
        steps=computed,
        is_reference=True,
        compared_with="skipped-without",
        leaves_out=True,
        scales_loss=scales_loss,
    )

    def trial(name: str, loaded: Loaded, num_ranks: int, **options: Any) -> Trial:
        return Trial(
            name,
            loaded,
            num_ranks,
            compared_with=without.name,
            overflows=True,
            scales_loss=scales_loss,
            **options,
        )

    label = f"overflow in step {SKIPPED_STEP}"
    one = run.varied("skipped-one", sections)
    yield Variant(f"one process, {label}", [without, trial("skipped-one", one, 1, steps=computed)])
    saving = run.varied("skipped-resumed", {**sections, "checkpoint": SAVING})
    stopped = trial("skipped-before", saving, 1, steps=(), stop_after=SKIPPED_STEP)
    resumed = trial("skipped-resumed", saving, 1, steps=later, resumes=stopped.name)
    yield Variant(f"one process, {label}, then resumed", [without, stopped, resumed])
    names = ["dp_shard=2"]
    if not request.is_quick:
        names += ["tp=2", "pp=2"]
    for mesh in list(request.meshes) or names:
        name = f"skipped-{mesh}"
        try:
            loaded, plan = run.on_mesh(name, mesh)
            loaded = run.checked(name, changed(loaded, sections, set(), ""))
        except ConfigError as error:
            yield Variant(f"{mesh}, {label}", impossible=one_line(error))
            continue
        on_mesh = trial(name, loaded, plan.num_ranks, steps=computed)
        yield Variant(f"{mesh}, {label}", [without, on_mesh])


def workers_variants(request: VariantRequest) -> Iterator[Variant]:
    """Processes that prepare batches. They must not change which rows a step has."""
    numbers = (2,) if request.is_quick else (1, 3)
    for number in numbers:
        name = f"workers-{number}"
        options = DataLoaderOptions(num_workers=number, prefetch_factor=2)
        batch = {"dataloader": options, "local_batch_size": request.run.rows_per_pass}
        loaded = request.run.varied(name, {"training": batch})
        yield Variant(f"{number} workers", [Trial(name, loaded, 1, ALL_STEPS)])


def packing_reason(run: SmallRun) -> str:
    """Documents are only independent if attention between them is masked."""
    config = run.config
    if config.task.name not in OF_NEXT_TOKENS:
        return f"task.name={config.task.name} does not pack rows"
    formats = {config.data.format}
    if config.data.sources:
        formats = {source.format or config.data.format for source in config.data.sources.values()}
    packing = derived.packing_kind(config.data, formats)
    if packing == "padded":
        return "each sequence has one document (data.packing)"
    # "auto" masks documents, except in concatenated texts.
    mask = config.data.document_mask
    is_unmasked_by_default = packing == "concat" and formats == {"text"}
    if mask == "off" or (mask == "auto" and is_unmasked_by_default):
        return "documents of a sequence attend to each other (data.document_mask)"
    return ""


def packing_variants(request: VariantRequest) -> Iterator[Variant]:
    """Every document in its own sequence, with positions from 0.

    Documents are shortened in this dimension, because a short sequence of long documents has no border. So
    it has its own reference.
    """
    # The cache would return the tokens of complete documents.
    run = request.run
    sections: dict[str, dict[str, Any]] = {"data": {"cache_tokens": False}}
    # These options depend on which documents share a row by design, so they are turned off.
    row_dependent = small_run.row_dependent(run.user)
    if small_run.NOISE in row_dependent:
        sections["training"] = {"neftune_noise_alpha": None}
    if small_run.BALANCE_LOSS in row_dependent:
        overrides = {**run.config.model.overrides, "balance_loss_coeff": 0.0}
        sections["model"] = {"overrides": overrides}
    packed = Trial(
        "packed",
        run.varied("packed", sections),
        num_ranks=1,
        steps=(),
        is_reference=True,
        shortens_documents=True,
    )
    separate = Trial(
        "separate",
        run.varied("separate", sections),
        num_ranks=1,
        steps=ALL_STEPS,
        compared_with=packed.name,
        shortens_documents=True,
        separates_documents=True,
    )
    yield Variant("separate documents", [packed, separate])


def recompute_variants(request: VariantRequest) -> Iterator[Variant]:
    """Recomputation of activations in backward."""
    choices = {
        "full": {"mode": "full"},
        "every 2nd layer": {"mode": "selective", "selective_ac_option": "2"},
        "by operation": {"mode": "selective", "selective_ac_option": "op"},
    }
    for number, (label, options) in enumerate(choices.items()):
        if request.is_quick and number:
            return
        sections = {"activation_checkpoint": options}
        yield _one_process_variant(request, f"recompute-{number}", label, sections)


def offload_variants(request: VariantRequest) -> Iterator[Variant]:
    """Activations or parameters in host memory."""
    activations = {"activation_checkpoint": {"mode": "full", "cpu_offload": True}}
    yield _one_process_variant(request, "offload-activations", "activations", activations)
    if not request.is_quick:
        parameters = {"training": {"enable_cpu_offload": True}}
        yield _one_process_variant(request, "offload-parameters", "parameters", parameters)


def compile_reason(run: SmallRun) -> str:
    """Compiling takes most of a minute, so it is checked for runs that compile."""
    compiles = run.user.config.compile.enable
    if compiles:
        return ""
    value = "false" if compiles is False else "unset"
    return f"compile.enable is {value}; set it to true to check compiled code"


def compile_variants(request: VariantRequest) -> Iterator[Variant]:
    """The model and the loss compiled, with the configured components and backend."""
    user = request.run.user.config.compile
    options = {"enable": True, "components": user.components, "backend": user.backend}
    yield _one_process_variant(request, "compile", f"backend {user.backend}", {"compile": options})


def validation_reason(run: SmallRun) -> str:
    """Only runs that validate have a validation loss."""
    return "" if run.user.config.validation.enable else "validation.enable=false"


def validation_variants(request: VariantRequest) -> Iterator[Variant]:
    """The validation loss and metrics with other batch sizes and on two ranks."""
    # Most of these sizes do not divide the number of rows, so the last batch is not full.
    sizes = [("", 5), ("dp_shard=2", 4)]
    if not request.is_quick:
        sizes += [("", 1), ("dp_replicate=2", 3)]
    for mesh, size in sizes:
        name = f"validation-{mesh}-{size}"
        label = f"{mesh or 'one process'}, batches of {size}"
        try:
            loaded, num_ranks = request.run.validating(name, size, mesh)
        except ConfigError as error:
            yield Variant(label, impossible=one_line(error))
            continue
        yield Variant(label, [Trial(name, loaded, num_ranks, ALL_STEPS)])


def _one_process_variant(
    request: VariantRequest, name: str, label: str, sections: Sections
) -> Variant:
    """Return a variant on one process with other options."""
    try:
        loaded = request.run.varied(name, sections)
    except ConfigError as error:
        return Variant(label, impossible=one_line(error))
    return Variant(label, [Trial(name, loaded, 1, ALL_STEPS)])


def mesh_reason(run: SmallRun) -> str:
    """Only next-token losses have synthetic batches."""
    name = run.user.config.task.name
    if name in ("language_model", "masked_language_model"):
        return ""
    return f"task.name={name} has its own loss; the dimension task compares it on meshes"


def precision_reason(run: SmallRun) -> str:
    """The precision of the run. It applies only if this is not float32, which all other dimensions use."""
    config = run.user.config
    dtypes = {
        config.training.dtype,
        derived.compute_dtype(config),
        config.training.mixed_precision_reduce,
    }
    if dtypes == {"float32"} and not config.model.converters:
        return "the run computes in float32"
    return mesh_reason(run)


def no_variants(_: VariantRequest) -> Iterator[Variant]:
    """The dimensions mesh and precision run the comparison of ``verify`` without trials."""
    yield from ()


DIMENSIONS = (
    Dimension(MESH, mesh_reason, no_variants),
    Dimension(PRECISION, precision_reason, no_variants),
    Dimension("task", always_applies, task_variants),
    Dimension("accumulation", always_applies, accumulation_variants),
    Dimension("packing", packing_reason, packing_variants),
    Dimension("workers", always_applies, workers_variants),
    Dimension("resume", always_applies, resume_variants),
    Dimension("skipped", skipped_reason, skipped_variants),
    Dimension("recompute", always_applies, recompute_variants),
    Dimension("offload", always_applies, offload_variants),
    Dimension("compile", compile_reason, compile_variants),
    Dimension(VALIDATION, validation_reason, validation_variants),
)
