"""Compare the first step of each architecture of ``transformers`` on each mesh with that of one process.

The step of one process is in turn compared with ``transformers``.

    nice -n 5 python benchmarks/architectures.py [--only llama,gpt2] [--meshes tp,ep] [--workers 2]
        [--out benchmarks/results/architectures_cpu.json]

The architectures are the tiny random folders of tests/hf_architectures.py, including TABLE_ONLY, with four
layers. A cell is ``same`` if the loss and each gradient of the first step agree to 1e-5 in float32, and the
initial weights are bitwise equal. Otherwise it is ``refused``, with the error that comes before ranks start,
or a fault: ``differs`` or ``fails``. The ranks are forks of a process that has imported PyTorch, with one thread each.

The output file is written after each architecture. ``--only`` and ``--meshes`` replace the selected cells of an
existing file and keep the others. The file has the date and the versions of the last measurement of each
architecture. ``docs/figures.py`` generates the table in docs/models.md from this file.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
import transformers
from hf_architectures import ARCHITECTURES, EXPERTS, TABLE_ONLY
from hf_meshes import FirstStep, deep_folder, difference, first_step, hf_tiny, piped
from ranks import run_ranks
from tiny import make_run, whole

from shardtrain import models
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.distributed.tensor_parallel import hf_plan
from shardtrain.train.preflight import meta_model
from shardtrain.train.resume import resume
from shardtrain.utils.errors import ConfigError

ALL = {**ARCHITECTURES, **TABLE_ONLY}
TOLERANCE = 1e-5
ROWS = 4
"""Rows per step, divided among the data-parallel ranks."""
WHOLE_LOSS = "parallelism.disable_loss_parallel"
"""Option that the plan of an architecture may require under tensor parallelism."""

_RING = {"context_parallel_degree": 2, "context_parallel_rotate_method": "alltoall"}
MESHES: dict[str, dict[str, Any]] = {
    "dp_shard": {"data_parallel_shard_degree": 2},
    "tp": {"tensor_parallel_degree": 2},
    "pp 1F1B": piped(2, "1F1B"),
    "pp ZBV": piped(2, "ZBVZeroBubble"),
    "cp gather": {"context_parallel_degree": 2},
    "cp ring": _RING,
    "cp Ulysses": {"context_parallel_degree": 2, "context_parallel_method": "ulysses"},
    "ep": {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
    "tp x pp": piped(2, "1F1B", tensor_parallel_degree=2),
    "pp x cp x dp": piped(2, "1F1B", data_parallel_shard_degree=2, **_RING),
    "ep x tp": {"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
}
"""Name of a column -> options of ``[parallelism]``. Each axis has two ranks."""
SEQUENCES = "tp sequences"
"""Column of the runs with tensor parallelism whose sequences are split between the layers."""
DEGREES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class Cell:
    """The result of one architecture on one mesh.

    Attributes:
        verdict: ``same``, ``refused``, ``differs``, ``fails``, or ``no experts`` if the mesh splits experts.
        difference: largest relative difference of loss, gradient norm and gradients.
        option: the option that a refusal names.
        text: rule of the refusal, or last line of the failure.
        loss_parallel: False if the plan requires ``disable_loss_parallel``, which the run then had.
    """

    architecture: str
    mesh: str
    verdict: str
    difference: float | None = None
    option: str = ""
    text: str = ""
    loss_parallel: bool = True


def num_ranks(mesh: str) -> int:
    """Return the product of the degrees of a mesh. Expert parallelism reuses the ranks of other axes."""
    ranks = 1
    for name, degree in MESHES[mesh].items():
        if name.endswith("_degree") and name.startswith(DEGREES):
            ranks *= degree
    return ranks


def config_of(path: Path, output: Path, mesh: str, loss_parallel: bool) -> Config:
    """Return the configuration of a cell."""
    parallelism = {**MESHES[mesh], "disable_loss_parallel": not loss_parallel}
    rows = ROWS // parallelism.get("data_parallel_shard_degree", 1)
    training = {"local_batch_size": rows, "global_batch_size": ROWS}
    return hf_tiny(
        path, output / mesh.replace(" ", "_"), parallelism=parallelism, training=training
    )


def first_steps(rank: int, configs: Sequence[Config]) -> list[FirstStep]:
    """Run the first step of each configuration in this process. Return the results in order."""
    return [first_step(rank, config) for config in configs]


def measure(
    name: str, meshes: Sequence[str], path: Path, output: Path, expected: FirstStep
) -> Iterator[Cell]:
    """Compare the first step on each mesh with ``expected``, the first step of one process."""
    accepted: dict[str, Config] = {}
    for mesh in meshes:
        config = config_of(path, output, mesh, loss_parallel=True)
        errors, _ = meta_model.build(config, num_ranks(mesh))
        if errors and _option(errors[0]) == WHOLE_LOSS:
            config = config_of(path, output, mesh, loss_parallel=False)
            errors, _ = meta_model.build(config, num_ranks(mesh))
        if errors:
            yield _refused(name, mesh, errors[0])
            if mesh == "tp":
                yield _refused(name, SEQUENCES, errors[0])
        else:
            accepted[mesh] = config
    for ranks in sorted({num_ranks(mesh) for mesh in accepted}):
        for cell in _compared(
            name, {mesh: accepted[mesh] for mesh in accepted if num_ranks(mesh) == ranks}, expected
        ):
            yield cell
            if cell.mesh == "tp":
                yield _with_split_sequences(cell, accepted["tp"])


def _with_split_sequences(cell: Cell, config: Config) -> Cell:
    """Return the cell of SEQUENCES: the result of tp if its plan splits sequences, otherwise a refusal."""
    module, shape = models.configured(config.model)
    resolved = hf_plan.resolve(models.build(module, shape), config)
    if resolved.sequences is None:
        option = "parallelism.tensor_parallel_degree"
        return Cell(
            cell.architecture, SEQUENCES, "refused", option=option, text=resolved.unsplit_sequences
        )
    return dataclasses.replace(cell, mesh=SEQUENCES)


def _compared(name: str, configs: dict[str, Config], expected: FirstStep) -> Iterator[Cell]:
    """Run all meshes with the same number of ranks in one set of processes, to warm up only once.

    If a mesh fails, run each mesh in separate processes.
    """
    ranks = num_ranks(next(iter(configs)))
    try:
        by_rank = run_ranks(ranks, first_steps, list(configs.values()))
    except AssertionError as error:
        if len(configs) > 1:
            for mesh, config in configs.items():
                yield from _compared(name, {mesh: config}, expected)
            return
        lines = [line for line in str(error).splitlines() if line.strip()]
        yield Cell(name, next(iter(configs)), "fails", text=lines[-1])
        return
    for index, (mesh, config) in enumerate(configs.items()):
        loss_parallel = not config.parallelism.disable_loss_parallel
        try:
            distance = difference([steps[index] for steps in by_rank], expected)
        except AssertionError as error:
            yield Cell(
                name, mesh, "differs", text=str(error).splitlines()[0], loss_parallel=loss_parallel
            )
            continue
        verdict = "same" if distance <= TOLERANCE else "differs"
        yield Cell(name, mesh, verdict, distance, loss_parallel=loss_parallel)


def _option(error: Exception) -> str:
    problem = error.problems[0] if isinstance(error, ConfigError) else ""
    return "" if isinstance(problem, str) else problem.option


def _refused(name: str, mesh: str, error: Exception) -> Cell:
    problem = error.problems[0] if isinstance(error, ConfigError) else str(error)
    if isinstance(problem, str):
        return Cell(name, mesh, "fails", text=problem)
    splits_experts = "expert_parallel_degree" in MESHES.get(mesh, {})
    verdict = "no experts" if splits_experts and name not in EXPERTS else "refused"
    return Cell(name, mesh, verdict, option=problem.option, text=problem.rule)


def transformers_step(rank: int, config: Config, class_name: str) -> FirstStep:
    """Return loss and gradients of the ``transformers`` class, for the same weights and rows."""
    run = make_run(rank, config)
    initial = whole(run)
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    batch = next(run.dataloader)

    cls = getattr(transformers, class_name)
    network = cls(cls.config_class.from_pretrained(config.model.overrides["path"])).eval()
    weights = {path.removeprefix("hf."): weight for path, weight in whole(run).items()}
    network.load_state_dict(weights, strict=False)
    logits = network(input_ids=batch.tokens_BT).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=-100
    )
    loss.backward()
    gradients = {
        f"hf.{path}": p.grad for path, p in network.named_parameters() if p.grad is not None
    }
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    return FirstStep(initial, float(loss.detach()), norm, gradients)


def rows_of(name: str, meshes: Sequence[str], output: Path) -> list[Cell]:
    """Return the cells of one architecture. The first cell compares one process with ``transformers``."""
    torch.set_num_threads(1)
    cells = []
    for cell in _cells(name, meshes, output):
        detail = cell.text if cell.difference is None else f"{cell.difference:.1e}"
        print(f"{cell.architecture:16s} {cell.mesh:14s} {cell.verdict:10s} {detail}", flush=True)
        cells.append(cell)
    return cells


def _cells(name: str, meshes: Sequence[str], output: Path) -> Iterator[Cell]:
    path = deep_folder(name)
    config = hf_tiny(
        path, output / name / "one", training={"local_batch_size": ROWS, "global_batch_size": ROWS}
    )
    ours, theirs = run_ranks(1, both_steps, config, ALL[name][0])[0]
    distance = difference([ours], theirs)
    yield Cell(name, "one process", "same" if distance <= TOLERANCE else "differs", distance)
    yield from measure(name, meshes, path, output / name, ours)


def both_steps(rank: int, config: Config, class_name: str) -> tuple[FirstStep, FirstStep]:
    """Return the first step of this package in one process, and that of ``transformers``."""
    return first_step(rank, config), transformers_step(rank, config, class_name)


def columns() -> list[str]:
    """Return the column names: "one process", then the meshes, with SEQUENCES inserted after "tp"."""
    names = ["one process", *MESHES]
    names.insert(names.index("tp") + 1, SEQUENCES)
    return names


def write(file: Path, new_cells: list[Cell]) -> list[dict[str, Any]]:
    """Replace measured cells in the file, and return all cells in the order of the table."""
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    measured: dict[str, dict[str, str]] = {}
    if file.exists():
        previous = json.loads(file.read_text())
        measured = previous.get("measured", {})
        for cell in previous["cells"]:
            cells[cell["architecture"], cell["mesh"]] = cell
    for new in new_cells:
        cells[new.architecture, new.mesh] = asdict(new)
        measured[new.architecture] = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    names = list(ALL)
    meshes = columns()
    keys = [key for key in cells if key[0] in names and key[1] in meshes]
    keys.sort(key=lambda key: (names.index(key[0]), meshes.index(key[1])))
    rows = [cells[key] for key in keys]
    dates = {name: measured[name] for name in names if name in measured}
    content = {"tolerance": TOLERANCE, "measured": dates, "cells": rows}
    file.write_text(json.dumps(content, indent=1) + "\n")
    return rows


def main() -> int:
    """Measure, write the file and print the share of equal cells; return 1 if a cell differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    installed = [name for name, entry in ALL.items() if hasattr(transformers, entry[0])]
    parser.add_argument("--only", default=",".join(installed), help="architectures")
    parser.add_argument("--meshes", default=",".join(MESHES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/architectures_cpu.json"
    )
    options = parser.parse_args()
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        names = options.only.split(",")
        meshes = options.meshes.split(",")
        with ProcessPoolExecutor(options.workers) as pool:
            rows_of_one = partial(rows_of, meshes=meshes, output=Path(folder))
            for future in as_completed([pool.submit(rows_of_one, name) for name in names]):
                rows = write(options.out, future.result())
    verdicts = [row["verdict"] for row in rows if row["verdict"] != "no experts"]
    faults = sum(verdict in ("differs", "fails") for verdict in verdicts)
    same = verdicts.count("same")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = f"{time.monotonic() - start:.0f} s, {usage.ru_utime + usage.ru_stime:.0f} CPU s"
    print(f"{same} of {len(verdicts)} are the same, {faults} faults, {times}")
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
