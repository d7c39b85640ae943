"""A checkpoint that is one file of ``torch.save``, as PyTorch's tutorials and pytorch_universal_trainer write it.

The file is a table with ``model_state_dict`` and, if training is to continue, ``optimizer_state_dict``,
``scheduler_state_dict``, ``scaler_state_dict`` and ``global_step``. It is read as data (``checkpoint/torch_file.py``):
nothing in it is run, and one tensor at a time is in memory. Everything is compared before the first number of the run
changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardtrain import models, optim
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.checkpoint.storage import Place
from shardtrain.checkpoint.torch_file import Stored, TorchFile
from shardtrain.config.schema import Model
from shardtrain.hf import as_is, mapping
from shardtrain.hf.bin_weights import BinWeights
from shardtrain.hf.weights import without_wrappers
from shardtrain.hub_formats.format import HubFormat
from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.optim.grad_scaler import LARGEST, SMALLEST
from shardtrain.utils.errors import CheckpointError
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run

WEIGHTS = ("model_state_dict", "state_dict", "model")
_WITHOUT_DECAY = ("bias", "LayerNorm.weight")
"""The second of two groups: parameters whose name holds one of these (the Trainer of transformers, before 2023)."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_saved_file(path: Place | None) -> bool:
    """Whether a path leads to a file, where a shardtrain checkpoint is a folder."""
    return isinstance(path, Path) and path.is_file()


class FileWeights(BinWeights):
    """The weights of such a file by name, without the names of wrappers (``without_wrappers``)."""

    def __init__(self, path: Path) -> None:
        """Read what the file describes; raises CheckpointError where that is not a table of weights."""
        self.folder = path
        self.file = TorchFile(path)
        self._files = {path.name: self.file}
        table = self.file.value
        if not isinstance(table, dict):
            raise CheckpointError(f"{path} holds no table; a checkpoint has {WEIGHTS[0]} and what goes with it")
        self.table: Mapping[str, Any] = table
        named = next((table[key] for key in WEIGHTS if isinstance(table.get(key), dict)), table)
        found = {name: stored for name, stored in named.items() if isinstance(stored, Stored)}
        if not found or (named is not table and len(found) < len(named)):
            odd = next((str(name)[:80] for name, stored in named.items() if not isinstance(stored, Stored)), "nothing")
            raise CheckpointError(f"{path} holds no table of weights ({odd} is not a tensor)")
        self.stored = without_wrappers({str(name): stored for name, stored in found.items()})
        self._file_of = dict.fromkeys(self.stored, path.name)


def translate(weights: FileWeights, tensors: Mapping[str, Tensor], model: Model) -> mapping.Translation:
    """Where each tensor of a model is in the file.

    ``tensors`` are the model's, with the prefix of checkpoints. Raises CheckpointError naming tensors that are missing,
    not of this model, or of another shape.
    """
    module = models.find(model.name)
    named = {name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in tensors.items()}
    passed: Sequence[str] = ()
    if as_is.is_as_is(module):
        shape = models.shape_of(module, model.flavor, model.overrides, model.norm_type)
        network: Any = models.build(module, shape)
        found, passed = as_is.fit(network, shape, weights)
        # a folder of another head may hold what this network has no place for, and a checkpoint of it may not
        prefix = f"{network.hf.base_model_prefix}."
        used = {str(source) for source in found.sources.values()}
        others = {n for n in weights.names() if not n.startswith(prefix) and not _aliased(n, weights, used)}
        passed = [pattern for pattern in passed if pattern not in {re.escape(name) for name in others}]
    else:
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        if any(name.endswith("tok_embeddings.weight") for name in weights.names()):
            # torchtitan has other names, and other rows of queries and keys: a verb of its own puts both in order
            way = f"`shardtrain checkpoint from-dcp {weights.folder} NEW` makes a checkpoint of it"
            raise CheckpointError(f"{weights.folder} has torchtitan's names: {way}, for checkpoint.initial_load_path")
        hub = HubFormat(model.name, "", {}, lambda _: {}, lambda _: {}, ())
        config = SimpleNamespace(head_dim=1, tied_embeddings=False)
        found = mapping.Translation(hub, shapes, config, {name: name for name in shapes})
    missing = sorted(set(named) - set(found.sources))  # what a folder may leave to be drawn, a checkpoint has
    if missing:
        shown = ", ".join(missing[:10])
        raise CheckpointError(f"{weights.folder} does not fit {model.name}: {len(missing)} missing: {shown}")
    mapping.check(found, weights, passed)
    return found


def fill(path: Path, tensors: Mapping[str, Tensor], model: Model) -> None:
    """Fill this rank's part of a model's tensors (with the prefix ``model.``) from the file.

    Raises:
        CheckpointError: when tensors are missing, surplus or of other shapes, or the file is damaged.
    """
    weights = FileWeights(path)
    _fill(weights, tensors, translate(weights, tensors, model))


def load(run: Run, path: Path, tensors: Mapping[str, Tensor], model_only: bool) -> None:
    """Fill the run in place from the file; without ``model_only`` it continues at the step of the file.

    ``tensors`` are the model's, with the prefix of checkpoints. The data continue after that many steps.

    Raises:
        CheckpointError: as ``fill``, and where the optimizer's state is not that of the model or a counter is missing.
    """
    weights = FileWeights(path)
    translation = translate(weights, tensors, run.config.model)
    if model_only:
        _fill(weights, tensors, translation)
        logger.info(f"starting from the weights of {path}")
        return
    # everything is read and compared before the first tensor of the run changes
    step = weights.table.get("global_step")
    if type(step) is not int or step < 0:
        raise CheckpointError(
            f"{path}: global_step is not a count; for weights alone set checkpoint.initial_load_model_only=true"
        )
    updates = step
    scheduler = weights.table.get("scheduler_state_dict")
    if isinstance(scheduler, dict) and type(scheduler.get("last_epoch")) is int and scheduler["last_epoch"] >= 0:
        updates = min(step, scheduler["last_epoch"])  # updates that float16 left out moved no rate
    states = _states(weights, translation)
    live = optim.state_tensors(run.optimizer, run.runner.optimizer_parameters().items())
    odd = sorted({name.rpartition(".")[2] for name in live} - {*_MOMENTS, "step"})
    if odd:
        raise CheckpointError(f"{path} has the state of Adam, and this run's optimizer keeps {', '.join(odd)}")
    _fill(weights, tensors, translation)
    for name, tensor in live.items():
        parameter, _, moment = name.rpartition(".")
        value = states[str(translation.sources[parameter])][moment]
        if not isinstance(value, Stored):
            local_tensor(tensor).fill_(value)
            continue
        whole = weights.file.tensor(value)
        local_tensor(tensor).copy_(whole[local_slices(tensor)] if tensor.dim() else whole.reshape(()))
    # the scale of float16, within the bounds of ours
    scaler = weights.table.get("scaler_state_dict")
    if run.scaler and isinstance(scaler, dict) and "scale" in scaler:
        scale = scaler["scale"]
        grown = scaler.get("_growth_tracker", 0)
        if not isinstance(scale, int | float) or not math.isfinite(scale) or type(grown) is not int:
            raise CheckpointError(f"{path}: scaler_state_dict holds no loss scale; use another file")
        run.scaler.load({"scale": min(LARGEST, max(SMALLEST, float(scale))), "finite_steps": max(0, grown)})
    run.state.step = step
    run.state.updates = updates
    # the file knows no position in the data: they continue as if every step had had this batch
    run.dataloader.seek(step * run.dataloader.global_batch)
    run.state.samples_consumed = run.state.tokens_seen = run.dataloader.samples_consumed
    whole_run = weights.table.get("num_train_optimization_steps")
    if type(whole_run) is int and whole_run != run.total_steps:
        logger.warning(f"{path} is of a run of {whole_run} steps, and this one has {run.total_steps}: rates differ")
    logger.info(f"continuing from {path} at step {step}")


def _fill(weights: FileWeights, tensors: Mapping[str, Tensor], translation: mapping.Translation) -> None:
    named = {name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in tensors.items()}
    mapping.fill(named, translation, weights)


def _states(weights: FileWeights, translation: mapping.Translation) -> dict[str, dict[str, Any]]:
    """Adam's state of each parameter, by the name that it has in the file.

    The state is kept by number: parameters count in the order of the model, those that decay before the others where
    there are two groups. That the shapes fit one after the other is checked for each.
    """
    where = weights.folder
    table = weights.table.get("optimizer_state_dict")
    fix = "for its weights alone set checkpoint.initial_load_model_only = true"
    if not isinstance(table, dict) or not isinstance(table.get("state"), dict):
        raise CheckpointError(f"{where} holds no optimizer_state_dict; {fix}")
    groups = table.get("param_groups")
    state = table["state"]
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        raise CheckpointError(f"{where}: optimizer_state_dict has no param_groups; {fix}")
    wanted = {str(source) for source in translation.sources.values()}
    names: list[str] = []
    seen: set[tuple[str, int, tuple[int, ...]]] = set()
    for name, stored in weights.stored.items():  # of one tensor under several names the model counts the first
        place = (stored.key, stored.offset, stored.shape)
        if place not in seen and (name in wanted or _aliased(name, weights, wanted)):
            names.append(next(n for n in wanted if n == name or _place(weights, n) == place))
        seen.add(place)
    # the order in which the optimizer numbers its parameters
    numbers = [number for group in groups for number in group["params"]]
    if len(groups) == 2:
        later = [name for name in names if any(part in name for part in _WITHOUT_DECAY)]
        names = [name for name in names if name not in set(later)] + later
        fits = len(groups[1]["params"]) == len(later)
    else:
        fits = len(groups) == 1
    if not fits or len(numbers) != len(names):
        parts = ", ".join(str(len(group["params"])) for group in groups)
        raise CheckpointError(
            f"{where}: the optimizer holds groups of {parts} parameters, and the model has {len(names)}, parted by "
            f"{' and '.join(_WITHOUT_DECAY)} where there are two (as after training on shards of the model); {fix}"
        )
    found: dict[str, dict[str, Any]] = {}
    for number, name in zip(numbers, names, strict=True):
        one = state.get(number)
        moments = [one.get(moment) for moment in _MOMENTS] if isinstance(one, dict) else [None]
        if not all(isinstance(m, Stored) and m.shape == weights.shape(name) for m in moments):
            raise CheckpointError(f"{where}: the optimizer's state {number} is not that of {name}; {fix}")
        step = one.get("step")
        if not isinstance(step, Stored | int | float) or (isinstance(step, Stored) and math.prod(step.shape) != 1):
            raise CheckpointError(f"{where}: the optimizer's state {number} ({name}) has no step; {fix}")
        found[name] = one
    return found


def _place(weights: FileWeights, name: str) -> tuple[str, int, tuple[int, ...]]:
    stored = weights.stored[name]
    return stored.key, stored.offset, stored.shape


def _aliased(name: str, weights: FileWeights, wanted: set[str]) -> bool:
    place = _place(weights, name)
    return any(other in weights.stored and _place(weights, other) == place for other in wanted)
