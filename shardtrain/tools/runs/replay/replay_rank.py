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
from shardtrain.train.run import Outcome, Run, named_training_weights
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
        # Use the kernels of the run, because others round differently.
        set_numerics(config, world.device)
        with _heartbeat("building the model and opening its data", world):
            run = trainer.build(config, world)
        checkpoints = Checkpoints(config)
        with _heartbeat("loading the checkpoint", world):
            resume(run, checkpoints)
        run.resilience.guard.rewinds = [Rewind(*rewind) for rewind in plan.rewinds]
        shutdown.prepare(run, checkpoints, may_end_early=True)
        _compare_steps(run, plan, world)


def _compare_steps(run: Run, plan: ReplayPlan, world: process_group.World) -> None:
    """Run the steps of the plan, and compare each immediately. Collective.

    All ranks raise NumericalError at the first difference.
    """
    records = {}
    for record in run_files.records(RunFolder(plan.run_folder).metrics):
        if record is not None:
            records[record["step"]] = record
    saved_steps = set(retention.steps(plan.checkpoints))
    _say(world, f"replaying steps {plan.base + 1} to {plan.last} on {world.size} ranks")

    # Sums have another order with another number of ranks.
    same_mesh = plan.world_size in (None, world.size)
    tolerance = 0.0
    if not same_mesh:
        tolerance = OTHER_MESH
        rule = f"numbers may differ by {OTHER_MESH:g}, tensors are not compared"
        _say(world, f"the run had {plan.world_size} ranks: {rule}")

    num_compared = 0
    while run.state.step < plan.last:
        with _heartbeat(f"step {run.state.step + 1}", world):
            outcome = trainer.step(run)
        if outcome is None:
            raise DataError(
                f"the data ended after step {run.state.step}, or the replay was stopped"
            )

        # Compare with the line of metrics.jsonl, and with the checkpoint, if the run wrote them.
        step = run.state.step
        numbers = _numbers(run, outcome)
        sources = []
        differences: list[str] = []
        if step in records:
            sources.append("record")
            # The loss of a record is a mean over the steps since the record before it.
            is_of_one_step = step == 1 or step - 1 in records
            differences += _differences(numbers, records[step], tolerance, is_of_one_step)
        if step in saved_steps and same_mesh:
            sources.append("checkpoint")
            with _heartbeat(f"comparing the checkpoint of step {step}", world):
                differences += _compare_checkpoint(run, plan.checkpoints / f"step-{step}")

        # All ranks stop together if the shard of any rank differs.
        result = "nothing recorded"
        text = f"loss {numbers['loss']:.6f} grad_norm {numbers['grad_norm']:.6f}"
        if sources:
            num_compared += 1
            result = "; ".join(differences) or "equal"
            text += f": {' '.join(sources)}"
        _say(world, f"step {step}: {text}: {result}")
        if any_rank(bool(differences)):
            raise NumericalError(f"step {step} differs from the run: {result}")
    if not num_compared:
        raise CheckpointError(
            f"{plan.run_folder} has neither a record nor a checkpoint of these steps to compare with",
        )


def _numbers(run: Run, outcome: Outcome) -> dict[str, Any]:
    """Return the numbers of the last step under their names in metrics.jsonl. Collective."""
    local_sum = outcome.loss_sum.detach().double()
    loss_sum = run.mesh.sum(local_sum, over=("pp", *LOSS_AXES)).item()
    loss = math.nan
    if outcome.global_tokens:
        loss = loss_sum / outcome.global_tokens
    return {
        "loss": loss,
        "grad_norm": outcome.grad_norm,
        "lr": outcome.lr,
        "tokens_seen": run.state.tokens_seen,
        "order_hash": f"{run.state.order_hash:016x}",
    }


def _differences(
    numbers: Mapping[str, Any], record: Mapping[str, Any], tolerance: float, is_of_one_step: bool
) -> list[str]:
    """Describe the differences from a line of metrics.jsonl.

    The loss of a line is a mean over several steps, unless ``is_of_one_step`` is set. A mean is not compared.
    """
    differences = []
    for name, value in numbers.items():
        if name not in record or (name == "loss" and not is_of_one_step):
            continue
        recorded = record[name]
        if isinstance(value, float) and isinstance(recorded, float | int):
            is_equal = abs(value - recorded) <= tolerance * abs(recorded)
        elif isinstance(value, float) and not math.isfinite(value):
            # A record has null for infinite numbers and NaN.
            is_equal = recorded is None
        else:
            is_equal = value == recorded
        if not is_equal:
            differences.append(f"{name} {value} was {recorded}")
    return differences


def _compare_checkpoint(run: Run, path: Path) -> list[str]:
    """Compare weights, optimizer state and counters bitwise with a checkpoint of this step. Collective.

    Return a description of the first difference of each kind.
    """
    stored = manifest.read(path)
    damage = first_word(tensor_files.find_damaged_file(stored, path))
    if damage:
        raise CheckpointError(f"checkpoint {path}: {damage}; nothing to compare with")
    with run.evaluation_weights() as training_weights:
        tensors = {**weights(run), **run.averages_state_dict(), **run.optimizer_state_dict()}
        tensors |= named_training_weights(training_weights)
        differing = _differing(tensors, stored, path)

    differences = []
    on_any_rank: set[str] = set()
    for names in all_gather_json(differing):
        on_any_rank.update(names)
    if on_any_rank:
        # Report the first parameter of the model whose shard differs on any rank. Optimizer states come last.
        first = _first_in_model(on_any_rank, list(run.names))
        differences.append(f"{first} and {len(on_any_rank) - 1} more tensors of {path.name} differ")
    if stored.facts.get("state") != run.state.to_dict():
        differences.append(f"counters of {path.name} differ")
    return differences


def _differing(tensors: dict[str, Tensor], stored: manifest.Manifest, path: Path) -> list[str]:
    """Return the names of the tensors whose local part differs from the checkpoint."""
    differing: list[str] = []
    for name, tensor in tensors.items():
        # A weights-only save has no optimizer state, and may have another dtype.
        entry = stored.tensors.get(name)
        if entry is None or entry.dtype != str(tensor.dtype).removeprefix("torch."):
            continue
        saved = tensor.detach().clone()
        tensor_reader.read({name: saved}, stored, path)
        if not torch.equal(_bits(tensor), _bits(saved)):
            differing.append(name)
    return differing


def _first_in_model(tensors: set[str], parameters: list[str]) -> str:
    """Return the tensor of the earliest parameter, or of other tensors the first by name."""
    for name in parameters:
        if f"model.{name}" in tensors:
            return f"model.{name}"
    return min(tensors)


def _bits(tensor: Tensor) -> Tensor:
    return local_tensor(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)


def _heartbeat(what: str, world: process_group.World) -> AbstractContextManager[None]:
    """Rank 0 prints a progress line every few seconds until ``what`` has ended."""
    return heartbeat(what, None if world.rank == 0 else 0)


def _say(world: process_group.World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)
