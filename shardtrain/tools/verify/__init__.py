"""``shardtrain verify``: check that training on a mesh computes the same numbers as one process, or
name the cause.

- ``verify_request`` reads the command line.
- ``meshes``, ``shrink`` and ``own_sizes`` choose the meshes and the small model.
- ``probes`` and ``promises`` test the model without a mesh.
- ``verify_rank`` runs the steps of one rank.
- ``compare``, ``diagnose`` and ``judge`` evaluate the results.
- ``verify_report`` prints them.
- ``certificate`` varies everything else that must not change a number, and writes the proof to a file.
- ``precision`` compares in the run's own precision, with ``rounding_noise``, ``module_rounding`` and
  ``update_rounding``.
- ``compare_recordings`` compares two recordings of any trainers,
  with ``recordings`` and ``recorded_differences``.

Torch is imported only before ranks start.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain import config as configs
from shardtrain.config import Config, Loaded
from shardtrain.tools.verify import forked_workers, meshes, shrink, verify_report
from shardtrain.tools.verify.meshes import MeshPlan
from shardtrain.tools.verify.shrink import VerifyTask
from shardtrain.tools.verify.verify_report import MeshResult
from shardtrain.tools.verify.verify_request import VerifyOptions, read
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.temporary import temporary_folder

if TYPE_CHECKING:
    from shardtrain.tools.verify.verify_rank import Trainer

__all__ = ["VerifyTask", "compare_plan", "main", "plan", "probe", "reference", "shaken", "verify"]


def main(arguments: Sequence[str]) -> int:
    """Run the verb and return its exit status, 0 or 4.

    Raises:
        ConfigError: an argument, the configuration, a requested mesh or the model file is invalid.
        DataError: a recording is missing or damaged.
    """
    request = read(arguments)
    if request.compare:
        from shardtrain.tools.verify import compare_recordings

        return compare_recordings.main(request.compare, request.rounding, request.json)
    if request.check or request.certificate:
        loaded = _require_valid(configs.load(request.path, list(request.overrides)))
        if request.check:
            from shardtrain.tools.verify.certificate import check_command

            return check_command.main(request.check, loaded, request.json)
        from shardtrain.tools.verify import certificate
        from shardtrain.tools.verify.certificate.mesh_engine import MeshEngine

        return certificate.main(
            request, loaded, MeshEngine(comparable, plan, _probe_in_float32, verify, small_copy)
        )
    loaded = load(request)
    if request.real:
        from shardtrain.tools.verify import real

        return real.main(request, loaded)

    # Print the plan before the ranks start, because they may take minutes.
    task = plan(loaded, request)
    if not request.json:
        model = model_name(task.reference)
        print(f"verify {model}: {request.steps} steps, each mesh against one process", flush=True)
        for note in task.notes:
            print(f"  {note}", flush=True)
    # Import PyTorch only now, so an invalid argument is reported immediately. Import it in this process,
    # so its forks, the ranks, do not need to import it again.
    with heartbeat("importing PyTorch"):
        from shardtrain.train import trainer

    with temporary_folder("verify") as folder:
        task, probe_notes = _probe_in_float32(task, Path(folder))
        if not request.json:
            for note in probe_notes:
                print(f"  {note}", flush=True)
        rows = verify(task, trainer, Path(folder))

    status = verify_report.exit_code(rows, request)
    if request.json:
        notes = [*task.notes, *probe_notes]
        print(verify_report.document(model_name(task.reference), notes, rows, status))
    else:
        print(verify_report.table(rows))
    return status


def _probe_in_float32(task: VerifyTask, folder: Path) -> tuple[VerifyTask, list[str]]:
    """Test the model itself in float32.

    If the meshes run in the model's own precision, its casts are off here.
    The comparison of meshes covers them.
    """
    from shardtrain.tools.verify import casts

    with casts.off() if task.own_precision is not None else nullcontext():
        return probe(task, folder)


def model_name(config: Config) -> str:
    """Return "MODEL/FLAVOR"."""
    return f"{config.model.name}/{config.model.flavor}"


def load(request: VerifyOptions) -> Loaded:
    """Load the configuration to verify. A model file is verified with its smallest flavor and
    default options.

    Raises:
        ConfigError: the configuration is wrong, or its task has another kind of loss.
    """
    path = request.path
    overrides = list(request.overrides)
    if path is not None and path.endswith(".py"):
        facts = configs.read_model_file(path)
        option_names = [argument.partition("=")[0] for argument in overrides]
        if "--model.flavor" not in option_names:
            overrides = ["--model.flavor", smallest(facts), *overrides]
        return _require_valid(configs.load(None, ["--model.name", path, *overrides]))

    loaded = _require_valid(configs.load(path, overrides))
    return meshes.without_ramps(comparable(loaded))


def comparable(loaded: Loaded) -> Loaded:
    """Return a configuration of next-token prediction, whose losses verify compares.

    Raises:
        ConfigError: the task has another kind of loss.
    """
    config = loaded.config
    if config.task.name == "language_model":
        return loaded
    if config.task.name != "masked_language_model":
        raise ConfigError(
            Problem(
                "task.name",
                config.task.name,
                rule="has its own loss, and verify only compares next-token losses",
                fix='verify the model with task.name="language_model", which is parallelized in the same way',
                where=loaded.where("task.name"),
            )
        )

    # Both losses are the cross-entropy of some of the tokens, and only some synthetic tokens have targets. So
    # a masked language model is verified with the task language_model. The masking of rows is not compared.
    default = Config()
    training = dataclasses.replace(
        config.training,
        dataset=default.training.dataset,
        dataset_path=default.training.dataset_path,
    )
    config = dataclasses.replace(
        config,
        task=default.task,
        data=default.data,
        validation=default.validation,
        training=training,
    )
    note = "task: masked_language_model as language_model, whose loss is the same sum, on data-parallel meshes"
    return _require_valid(
        dataclasses.replace(loaded, config=config, notices=(*loaded.notices, note))
    )


def smallest(facts: configs.ModelFacts) -> str:
    """Return the flavor with the smallest product of layers, width and vocabulary."""

    def size(flavor: str) -> float:
        values = configs.shape(facts, flavor, {})
        product = 1.0
        for name in ("num_layers", "dim", "vocab_size"):
            value = values.get(name)
            if isinstance(value, int) and value > 0:
                product *= value
        return product

    return min(facts.flavors, key=size)


def _require_valid(loaded: Loaded) -> Loaded:
    problems = configs.check(loaded)
    if problems:
        raise ConfigError(problems)
    return loaded


def plan(loaded: Loaded, request: VerifyOptions) -> VerifyTask:
    """Choose the meshes to run and the sizes of the model.

    Raises:
        ConfigError: a requested mesh is impossible and ``allow_impossible`` is off, or the machine
            lacks devices.
    """
    if request.meshes:
        plans = meshes.requested(
            loaded, request.meshes, request.schedules, request.allow_impossible
        )
    else:
        plans = meshes.default(loaded, request.schedules)

    # The size fields of a user's model file have unknown names, so find smaller sizes by building
    # copies of the model.
    small = None
    if loaded.config.model.name.endswith(".py") and not request.full:
        small = small_copy(plans, loaded)
    task = shrink.prepare(plans, loaded, request.steps, request.full, small, request.precision)
    task = dataclasses.replace(task, notes=[*loaded.notices, *task.notes])

    # Meshes of the default list may be impossible. Their row in the table then contains the reason.
    problems: list[str] = []
    if request.meshes and not request.allow_impossible:
        for mesh_plan in task.plans:
            problems += mesh_plan.problem.splitlines()
    device = loaded.config.training.device
    if device not in ("auto", "cpu"):
        from shardtrain.launch import environment

        available = environment.count_accelerators(device)
        numbers = [mesh_plan.num_ranks for mesh_plan in task.plans if not mesh_plan.problem]
        needed = max(numbers, default=1)
        if available < needed:
            rule = f"requires {needed} devices, but this machine has {available}"
            fix = 'use "cpu", or smaller meshes with --mesh'
            problems.append(str(Problem("training.device", device, rule, fix)))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return task


def small_copy(plans: Sequence[MeshPlan], loaded: Loaded) -> dict[str, Any] | None:
    """Run ``own_sizes.smaller`` in a separate process, for a user's model file.

    Return None if the model cannot be built. The probes report that with a better message.
    """
    from shardtrain.tools.verify import own_sizes

    # The widths of the copy must be divisible by the tp degree of every mesh.
    possible = [mesh_plan for mesh_plan in plans if not mesh_plan.problem]
    tp_degrees = [mesh_plan.degrees.get("tp", 1) for mesh_plan in possible]
    tp = math.lcm(1, *tp_degrees)
    arguments = (loaded.config, shrink.needed_layers(possible), tp)
    with temporary_folder("verify") as folder:
        try:
            (answer,) = forked_workers.run(1, own_sizes.smaller, *arguments, folder=Path(folder))
        except forked_workers.RankFailed:
            return None
    return dict(answer)


def probe(
    task: VerifyTask,
    folder: Path,
    kinds: Collection[str] | None = None,
) -> tuple[VerifyTask, list[str]]:
    """Test the model itself for the properties that every mesh requires, before any mesh runs.

    The probes run in separate processes, because this process must not compute before it forks the ranks.

    Args:
        task: The planned task.
        folder: Folder for temporary files.
        kinds: Kinds of parallelism that count, as for ``promises.probe``. None for all.

    Returns:
        The task, with a problem in each plan that the model does not support, and notes.

    Raises:
        ConfigError: the model breaks a promise or cannot be built. The message lists all broken promises.
    """
    from shardtrain.tools.verify import probes, promises

    config = task.reference
    peers = folder / "peers"
    peers.mkdir()
    try:
        # First run the model as two ranks, to detect a model that depends on its rank by the comparison
        # below. A model that cannot be built fails again below, where the error is reported.
        if config.training.device in ("auto", "cpu"):
            try:
                forked_workers.run(
                    2,
                    probes.run_with_peers,
                    config,
                    str(peers),
                    folder=peers,
                    backend="gloo",
                    limit_seconds=forked_workers.PROBE_TIMEOUT_SECONDS,
                )
            except forked_workers.RankFailed as error:
                (peers / "error").write_text(str(error), encoding="utf-8")
        (answer,) = forked_workers.run(1, promises.probe, config, str(peers), kinds, folder=folder)
    except forked_workers.RankFailed as error:
        if error.refused:
            raise ConfigError(str(error).splitlines()) from None
        raise ConfigError(
            Problem(
                "model.name",
                config.model.name,
                rule=f"cannot be built: {error}",
                fix="correct the model file",
            )
        ) from None
    if answer["broken"]:
        raise ConfigError(answer["broken"])

    # A plan with an axis that the model does not support still has a row in the table.
    plans = []
    for mesh_plan in task.plans:
        reasons = []
        for axis, reason in answer["impossible"].items():
            if mesh_plan.degrees.get(axis, 1) > 1:
                reasons.append(reason)
        if reasons and not mesh_plan.problem:
            mesh_plan = dataclasses.replace(mesh_plan, problem="\n".join(reasons))
        plans.append(mesh_plan)
    return dataclasses.replace(task, plans=plans), answer["notes"]


def verify(task: VerifyTask, trainer: Trainer, folder: Path) -> list[MeshResult]:
    """Train on one process, then on each mesh. Return the result of each mesh.

    In the run's own precision, the first row is for one process.
    """
    if task.own_precision is not None:
        from shardtrain.tools.verify import precision

        return precision.verify(task, trainer, folder)
    # If no mesh is possible, there is nothing to compare with one process.
    if not all(mesh_plan.problem for mesh_plan in task.plans):
        reference(task, trainer, folder)
    return [compare_plan(task, mesh_plan, trainer, folder) for mesh_plan in task.plans]


def reference(task: VerifyTask, trainer: Trainer, folder: Path) -> None:
    """Run the steps on one process. All meshes are compared with its record."""
    _run_on_one_process(task, trainer, folder / "reference")


def shaken(task: VerifyTask, trainer: Trainer, folder: Path) -> Path:
    """Return the folder with the records of a run of one process with added rounding errors, which
    ``compare`` describes.

    The first call runs it.
    """
    record_folder = folder / "shaken"
    if not record_folder.exists():
        _run_on_one_process(task, trainer, record_folder, shaken=True)
    return record_folder


def _run_on_one_process(
    task: VerifyTask,
    trainer: Trainer,
    record_folder: Path,
    shaken: bool = False,
) -> None:
    from shardtrain.tools.verify.verify_rank import run_steps

    record_folder.mkdir(parents=True)
    try:
        _run_ranks(
            1, partial(run_steps, shaken=shaken), trainer, task.reference, task, record_folder
        )
    except forked_workers.RankFailed as error:
        raise ConfigError(f"the model does not train on one process: {error}") from error


def _run_ranks(
    count: int,
    steps: Any,
    trainer: Trainer,
    config: Config,
    task: VerifyTask,
    folder: Path,
) -> None:
    from shardtrain.ops import accelerator

    device = config.training.device
    device_type = "cpu" if device == "auto" else device
    backend = accelerator.collectives(device_type)
    limit = forked_workers.FULL_TIMEOUT_SECONDS
    if task.unit_gain:
        limit = forked_workers.TIMEOUT_SECONDS
    arguments = (trainer, config, task, str(folder))
    forked_workers.run(
        count, steps, *arguments, folder=folder, backend=backend, limit_seconds=limit
    )


def compare_plan(task: VerifyTask, one: MeshPlan, trainer: Trainer, folder: Path) -> MeshResult:
    """Train on one mesh and compare it with the record of one process in ``folder``."""
    from shardtrain.tools.verify.judge import judge
    from shardtrain.tools.verify.verify_rank import run_steps

    result = MeshResult(one.name, one.schedule, "not possible", options=one.described_options)
    if one.problem:
        return dataclasses.replace(result, cause=one.problem.replace("\n", "; "))
    started = time.perf_counter()
    ranks = Path(tempfile.mkdtemp(dir=folder))
    try:
        _run_ranks(one.num_ranks, run_steps, trainer, one.loaded.config, task, ranks)
    except forked_workers.RankFailed as error:
        seconds = time.perf_counter() - started
        verdict: Any = "not possible" if error.refused else "failed"
        return dataclasses.replace(result, verdict=verdict, seconds=seconds, cause=str(error))

    # The judge returns None if only a shaken run of one process can show whether a difference is
    # rounding. Most comparisons do not need that run, so run it when it is first needed, and keep
    # it for the other meshes.
    config = one.loaded.config
    arguments = (
        config,
        dict(one.degrees),
        str(folder / "reference"),
        str(ranks),
        one.num_ranks,
        task.steps,
    )
    (fields,) = forked_workers.run(1, judge, *arguments, folder=ranks)
    if fields is None:
        shaken_folder = str(shaken(task, trainer, folder))
        (fields,) = forked_workers.run(1, judge, *arguments, shaken_folder, folder=ranks)
    shutil.rmtree(ranks, ignore_errors=True)
    verdict = "differs" if fields["first"] else "same"
    seconds = time.perf_counter() - started
    return dataclasses.replace(result, verdict=verdict, seconds=seconds, **fields)
