"""One rank of a replay: run the trainer's steps, and compare each with the run's metrics and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain.checkpoint import manifest, retention, tensor_reader
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.collectives import all_gather_json, any_rank, first_word
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config import Loaded
from shardtrain.distributed import LOSS_AXES, process_group
from shardtrain.ops.dtensor import local_tensor
from shardtrain.resilience.guards.loss_spikes import Rewind
from shardtrain.tools.runs import run_files
from shardtrain.tools.runs.replay.replay_plan import ReplayPlan
from shardtrain.tools.runs.run_files import RunFolder
from shardtrain.train import compatibility, shutdown, trainer
from shardtrain.train.build import set_numerics
from shardtrain.train.resume import resume, weights
from shardtrain.train.run import Run
from shardtrain.utils import log
from shardtrain.utils.errors import CheckpointError, DataError, NumericalError
from shardtrain.utils.heartbeat import heartbeat

OTHER_MESH = 1e-4
"""Relative tolerance of losses and norms with another number of ranks, where sums have another order."""


def main(loaded: Loaded, plan: ReplayPlan) -> None:
    """Replay the steps as one rank. All ranks raise NumericalError at the first difference."""
    config = loaded.config
    with process_group.join(config.comm, config.training.device) as world:
        folder = Path(config.job.dump_folder)
        console = world.rank in log.console_ranks()
        log.setup(world.rank, world.size, folder, config.metrics.save_log_file, console, False)
        config = compatibility.keep_batch_size(loaded, world).config
        set_numerics(config, world.device)  # the kernels of the run, too: others round otherwise
        with _heartbeat("building the model and opening its data", world):
            run = trainer.build(config, world)
        checkpoints = Checkpoints(config)
        with _heartbeat("loading the checkpoint", world):
            resume(run, checkpoints)
        run.resilience.guard.rewinds = [Rewind(*rewind) for rewind in plan.rewinds]
        shutdown.prepare(run, checkpoints, may_end_early=True)
        _compare_steps(run, plan, world)


def _compare_steps(run: Run, plan: ReplayPlan, world: process_group.World) -> None:
    same_mesh = plan.world_size in (None, world.size)
    records = {}
    for record in run_files.records(RunFolder(plan.run_folder).metrics):
        if record is not None:
            records[record["step"]] = record
    saved = set(retention.steps(plan.checkpoints))
    compared = 0
    _say(world, f"replaying steps {plan.base + 1} to {plan.last} on {world.size} ranks")
    if not same_mesh:
        _say(
            world,
            f"the run had {plan.world_size} ranks: numbers may differ by {OTHER_MESH:g}, tensors are not compared",
        )

    # Compare each step immediately. All ranks stop together at the first difference.
    while run.state.step < plan.last:
        with _heartbeat(f"step {run.state.step + 1}", world):
            outcome = trainer.step(run)
        if outcome is None:
            raise DataError(f"the data ended after step {run.state.step}, or the replay was stopped")
        step = run.state.step
        parts = []
        wrong = []
        total = run.mesh.sum(outcome.loss_sum.detach().double(), over=("pp", *LOSS_AXES)).item()
        mine = {
            "loss": total / outcome.global_tokens if outcome.global_tokens else math.nan,
            "grad_norm": outcome.grad_norm,
            "lr": outcome.lr,
            "tokens_seen": run.state.tokens_seen,
            "order_hash": f"{run.state.order_hash:016x}",
        }
        if step in records:
            parts.append("record")
            wrong += _differences(
                mine, records[step], 0.0 if same_mesh else OTHER_MESH, step == 1 or step - 1 in records
            )
        if step in saved and same_mesh:
            parts.append("checkpoint")
            with _heartbeat(f"comparing the checkpoint of step {step}", world):
                wrong += _compare_checkpoint(run, plan.checkpoints / f"step-{step}")
        compared += bool(parts)
        found = "; ".join(wrong) if wrong else "equal" if parts else "nothing recorded"
        numbers = f"loss {mine['loss']:.6f} grad_norm {mine['grad_norm']:.6f}"
        _say(world, f"step {step}: {numbers}: {f'{chr(32).join(parts)}: ' if parts else ''}{found}")
        if any_rank(bool(wrong)):
            raise NumericalError(f"step {step} differs from the run: {found}")
    if not compared:
        raise CheckpointError(f"{plan.run_folder} has neither a record nor a checkpoint of these steps to compare with")


def _differences(mine: Mapping[str, Any], record: Mapping[str, Any], tolerance: float, alone: bool) -> list[str]:
    """Describe the differences from a line of metrics.jsonl.

    The loss of a line is a mean over several steps, unless ``alone`` is set. A mean is not compared.
    """
    found = []
    for name, value in mine.items():
        if name not in record or (name == "loss" and not alone):
            continue
        theirs = record[name]
        if isinstance(value, float) and isinstance(theirs, float | int):
            same = abs(value - theirs) <= tolerance * abs(theirs)
        else:
            same = value == theirs or (theirs is None and isinstance(value, float) and not math.isfinite(value))
        if not same:
            found.append(f"{name} {value} was {theirs}")
    return found


def _compare_checkpoint(run: Run, path: Path) -> list[str]:
    """Compare weights, optimizer state and counters bitwise with a checkpoint of this step. Collective.

    Return a description of the first difference of each kind.
    """
    stored = manifest.read(path)
    damage = first_word(tensor_files.find_damaged_file(stored, path))
    if damage:
        raise CheckpointError(f"checkpoint {path}: {damage}; nothing to compare with")
    tensors = {**weights(run), **run.optimizer_state_dict()}
    wrong: list[str] = []
    for name, tensor in tensors.items():
        # A weights-only save has no optimizer state, and may have another dtype.
        if name in stored.tensors and stored.tensors[name].dtype == str(tensor.dtype).removeprefix("torch."):
            theirs = tensor.detach().clone()
            tensor_reader.read({name: theirs}, stored, path)
            if not torch.equal(_bits(tensor), _bits(theirs)):
                wrong.append(name)
    everyone = {name for names in all_gather_json(wrong) for name in names}
    order = {f"model.{name}": place for place, name in enumerate(run.names)}
    first = sorted(everyone, key=lambda name: (order.get(name, len(order)), name))
    found = [f"{first[0]} and {len(first) - 1} more tensors of {path.name} differ"] if first else []
    if stored.facts.get("state") != run.state.to_dict():
        found.append(f"counters of {path.name} differ")
    return found


def _bits(tensor: Tensor) -> Tensor:
    return local_tensor(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)


def _heartbeat(what: str, world: process_group.World) -> AbstractContextManager[None]:
    """Rank 0 prints a progress line every few seconds until ``what`` has ended."""
    return heartbeat(what, None if world.rank == 0 else 0)


def _say(world: process_group.World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)
