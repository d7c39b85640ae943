"""``shardtrain verify``: check that training on a mesh gives the numbers of one process; if not, name the cause.

- ``request`` reads the command line.
- ``meshes`` and ``shrink`` choose the meshes and the small model.
- ``promises`` probes a model file.
- ``run`` is the steps of one rank.
- ``compare`` and ``diagnose`` judge the results.
- ``report`` prints them.

Torch is imported only before ranks start.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
import time
from collections.abc import Collection, Sequence
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


def main(words: Sequence[str]) -> int:
    """Run the verb and return its exit status, 0 or 4.

    Raises:
        ConfigError: a word, the configuration, a mesh asked for, or a promise of the model file is wrong.
    """
    request = read(words)
    loaded = load(request)
    if request.real:
        from shardtrain.tools.verify import real

        return real.main(request, loaded)

    task = plan(loaded, request)
    if not request.json:
        print(f"verify {model_name(task.reference)}: {request.steps} steps, each mesh against one process", flush=True)
        for note in task.notes:
            print(f"  {note}", flush=True)
    # Import PyTorch only now, so that a mistake on the command line is reported at once. Import it in this process,
    # because the ranks are forked from it and then need no import of their own.
    with heartbeat("importing PyTorch"):
        from shardtrain.train import trainer

    with temporary_folder("verify") as folder:
        task, probe_notes = probe(task, Path(folder))
        if not request.json:
            for note in probe_notes:
                print(f"  {note}", flush=True)
        rows = verify(task, trainer, Path(folder))

    status = verify_report.exit_code(rows, request)
    if request.json:
        print(verify_report.document(model_name(task.reference), [*task.notes, *probe_notes], rows, status))
    else:
        print(verify_report.table(rows))
    return status


def model_name(config: Config) -> str:
    """Model and flavor as one word."""
    return f"{config.model.name}/{config.model.flavor}"


def load(request: VerifyOptions) -> Loaded:
    """The configuration that is verified; a model file alone is its smallest flavor with the default options."""
    path = request.path
    overrides = list(request.overrides)
    if path is not None and path.endswith(".py"):
        facts = configs.read_model_file(path)
        if not any(word.partition("=")[0] == "--model.flavor" for word in overrides):
            overrides = ["--model.flavor", smallest(facts), *overrides]
        return _accepted(configs.load(None, ["--model.name", path, *overrides]))

    loaded = _accepted(configs.load(path, overrides))
    config = loaded.config
    if config.task.name == "language_model":
        return loaded
    if config.task.name != "masked_language_model":
        rule = "has its own loss, and verify only compares next-token losses"
        fix = 'verify the model under task.name="language_model": the mesh is the same'
        raise ConfigError(Problem("task.name", config.task.name, rule, fix, loaded.where("task.name")))

    # A masked language model is verified as one of next tokens. The loss of both is the cross-entropy of some of the
    # tokens, and the synthetic batches have targets at some places only. How rows are masked is not compared.
    default = Config()
    training = dataclasses.replace(
        config.training, dataset=default.training.dataset, dataset_path=default.training.dataset_path
    )
    config = dataclasses.replace(
        config, task=default.task, data=default.data, validation=default.validation, training=training
    )
    note = "task: masked_language_model as language_model, whose loss is the same sum, on data-parallel meshes"
    return _accepted(dataclasses.replace(loaded, config=config, notices=(*loaded.notices, note)))


def smallest(facts: configs.ModelFacts) -> str:
    """The flavor with the smallest product of its sizes."""

    def size(flavor: str) -> float:
        values = configs.shape(facts, flavor, {})
        product = 1.0
        for name in ("num_layers", "dim", "vocab_size"):
            value = values.get(name)
            product *= value if isinstance(value, int) and value > 0 else 1
        return product

    return min(facts.flavors, key=size)


def _accepted(loaded: Loaded) -> Loaded:
    problems = configs.check(loaded)
    if problems:
        raise ConfigError(problems)
    return loaded


def plan(loaded: Loaded, request: VerifyOptions) -> VerifyTask:
    """Return the meshes to run and the model's sizes for them.

    Raises:
        ConfigError: a requested mesh is impossible and ``allow_impossible`` is off, or the machine lacks devices.
    """
    if request.meshes:
        plans = meshes.requested(loaded, request.meshes, request.schedules, request.allow_impossible)
    else:
        plans = meshes.default(loaded, request.schedules)

    # The fields of a user's model file have names of their own, so that it takes building copies to find smaller sizes.
    small = None
    if loaded.config.model.name.endswith(".py") and not request.full:
        small = small_copy(plans, loaded)
    task = shrink.prepare(plans, loaded, request.steps, request.full, small)
    task = dataclasses.replace(task, notes=[*loaded.notices, *task.notes])

    # Meshes of the default list may be impossible: their row of the table says why.
    problems: list[str] = []
    if request.meshes and not request.allow_impossible:
        problems += [line for one in task.plans for line in one.problem.splitlines()]
    device = loaded.config.training.device
    if device not in ("auto", "cpu"):
        from shardtrain.launch import environment

        available = environment.count_accelerators(device)
        needed = max((one.num_ranks for one in task.plans if not one.problem), default=1)
        if available < needed:
            rule = f"needs {needed} devices, and this machine has {available}"
            problems.append(str(Problem("training.device", device, rule, 'use "cpu", or smaller meshes with --mesh')))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return task


def small_copy(plans: Sequence[MeshPlan], loaded: Loaded) -> dict[str, Any] | None:
    """Which sizes of a user's model file are made smaller, as ``own_sizes.smaller`` says; None where it is not built,
    which the probes say better."""
    from shardtrain.tools.verify import own_sizes

    possible = [one for one in plans if not one.problem]
    tp = math.lcm(1, *(one.degrees.get("tp", 1) for one in possible))
    with temporary_folder("verify") as folder:
        try:
            arguments = (loaded.config, shrink.needed_layers(possible), tp)
            (answer,) = forked_workers.run(1, own_sizes.smaller, *arguments, folder=Path(folder))
        except forked_workers.RankFailed:
            return None
    return dict(answer)


def probe(task: VerifyTask, folder: Path, kinds: Collection[str] | None = None) -> tuple[VerifyTask, list[str]]:
    """Ask the model alone for what every mesh needs: the task without plans that it rules out, and what was noticed.

    ``kinds`` are the kinds of parallelism whose promises count, as for ``promises.probe``; all do unless given.

    In processes of their own: this one must not have computed anything when ranks are forked from it.

    Raises:
        ConfigError: with every broken promise, or because the model cannot be built.
    """
    from shardtrain.tools.verify import probes, promises

    config = task.reference
    peers = folder / "peers"
    peers.mkdir()
    try:
        # First as two ranks, each with a row of its own. What they leave is compared with the model alone below, which
        # shows a model that asks for its rank. What cannot be built alone either is reported as that.
        if config.training.device in ("auto", "cpu"):
            try:
                limit = forked_workers.PROBE_TIMEOUT_SECONDS
                forked_workers.run(
                    2, probes.run_with_peers, config, str(peers), folder=peers, backend="gloo", limit_seconds=limit
                )
            except forked_workers.RankFailed as error:
                (peers / "error").write_text(str(error), encoding="utf-8")
        (answer,) = forked_workers.run(1, promises.probe, config, str(peers), kinds, folder=folder)
    except forked_workers.RankFailed as error:
        if error.refused:
            raise ConfigError(str(error).splitlines()) from None
        fix = "correct the model file"
        raise ConfigError(Problem("model.name", config.model.name, f"cannot be built: {error}", fix)) from None
    if answer["broken"]:
        raise ConfigError(answer["broken"])

    # A plan that splits an axis along which this model cannot be split keeps its row, with the reason as its problem.
    plans = []
    for one in task.plans:
        reasons = [reason for axis, reason in answer["impossible"].items() if one.degrees.get(axis, 1) > 1]
        if reasons and not one.problem:
            one = dataclasses.replace(one, problem="\n".join(reasons))
        plans.append(one)
    return dataclasses.replace(task, plans=plans), answer["notes"]


def verify(task: VerifyTask, trainer: Trainer, folder: Path) -> list[MeshResult]:
    """Run one process, then each plan; a row for each plan."""
    if not all(one.problem for one in task.plans):
        reference(task, trainer, folder)
    return [compare_plan(task, one, trainer, folder) for one in task.plans]


def reference(task: VerifyTask, trainer: Trainer, folder: Path) -> None:
    """Run the steps on one process; its record is shared by all meshes."""
    _run_alone(task, trainer, folder / "reference")


def shaken(task: VerifyTask, trainer: Trainer, folder: Path) -> Path:
    """The folder of the record of one process whose weights were moved by one unit in the last place; run once."""
    alone = folder / "shaken"
    if not alone.exists():
        _run_alone(task, trainer, alone, shaken=True)
    return alone


def _run_alone(task: VerifyTask, trainer: Trainer, alone: Path, shaken: bool = False) -> None:
    from shardtrain.tools.verify.verify_rank import run_steps

    alone.mkdir(parents=True)
    try:
        _run_ranks(1, partial(run_steps, shaken=shaken), trainer, task.reference, task, alone)
    except forked_workers.RankFailed as error:
        raise ConfigError(f"the model does not train on one process: {error}") from error


def _run_ranks(count: int, steps: Any, trainer: Trainer, config: Config, task: VerifyTask, folder: Path) -> None:
    from shardtrain.ops import accelerator

    device = config.training.device
    backend = accelerator.collectives("cpu" if device == "auto" else device)
    limit = forked_workers.TIMEOUT_SECONDS if task.unit_gain else forked_workers.FULL_TIMEOUT_SECONDS
    forked_workers.run(
        count, steps, trainer, config, task, str(folder), folder=folder, backend=backend, limit_seconds=limit
    )


def compare_plan(task: VerifyTask, one: MeshPlan, trainer: Trainer, folder: Path) -> MeshResult:
    """Run one mesh and judge it against the record of one process in ``folder``."""
    from shardtrain.tools.verify.judge import judge
    from shardtrain.tools.verify.verify_rank import run_steps

    if one.problem:
        return MeshResult(
            one.name, one.schedule, "not possible", cause=one.problem.replace("\n", "; "), options=one.described_options
        )
    started = time.perf_counter()
    ranks = Path(tempfile.mkdtemp(dir=folder))
    try:
        _run_ranks(one.num_ranks, run_steps, trainer, one.loaded.config, task, ranks)
    except forked_workers.RankFailed as error:
        verdict: Any = "not possible" if error.refused else "failed"
        seconds = time.perf_counter() - started
        return MeshResult(one.name, one.schedule, verdict, seconds, cause=str(error), options=one.described_options)

    # The judge gives None where numbers differ and only a shaken run of one process can tell whether that is rounding.
    # Most comparisons need none, so that run is made when the first one asks, and kept for the others.
    arguments = (one.loaded.config, dict(one.degrees), str(folder / "reference"), str(ranks), one.num_ranks, task.steps)
    (fields,) = forked_workers.run(1, judge, *arguments, folder=ranks)
    if fields is None:
        (fields,) = forked_workers.run(1, judge, *arguments, str(shaken(task, trainer, folder)), folder=ranks)
    shutil.rmtree(ranks, ignore_errors=True)
    verdict = "differs" if fields["first"] else "same"
    row = MeshResult(one.name, one.schedule, verdict, **fields, options=one.described_options)
    return dataclasses.replace(row, seconds=time.perf_counter() - started)
