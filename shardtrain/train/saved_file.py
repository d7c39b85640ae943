"""Start a run from a single ``torch.save`` file.

PyTorch's tutorials and pytorch_universal_trainer write such files. A file contains a dict with
``model_state_dict``. To continue training, it must also have
``optimizer_state_dict``, ``scheduler_state_dict``, ``scaler_state_dict`` and ``global_step``. It is read as
data (``checkpoint/torch_file.py``): code in it is never run, and only one tensor at a time is in memory. All
checks are made before the run is changed.
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
from shardtrain.utils.errors import CheckpointError, fix_first
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run

WEIGHTS = ("model_state_dict", "state_dict", "model")
"""Keys under which such files store the weights."""
_WITHOUT_DECAY = ("bias", "LayerNorm.weight")
"""If the optimizer has two groups, parameters whose name contains one of these are in the second one.

The Trainer of ``transformers`` grouped parameters like this before 2023.
"""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_saved_file(path: Place | None) -> bool:
    """True if the path is a file and not a shardtrain checkpoint, which is a folder."""
    return isinstance(path, Path) and path.is_file()


class FileWeights(BinWeights):
    """The weights in a ``torch.save`` file.

    Their names have no prefixes of wrappers such as DDP (see ``without_wrappers``).
    """

    def __init__(self, path: Path) -> None:
        """Read the index of the file.

        Raises:
            CheckpointError: the file contains no dict of weights.
        """
        self.folder = path
        self.file = TorchFile(path)
        self._files = {path.name: self.file}
        table = self.file.value
        if not isinstance(table, dict):
            raise CheckpointError(
                f"{path} is not a table; a checkpoint file has {WEIGHTS[0]} and other keys"
            )
        self.table: Mapping[str, Any] = table
        # The weights are under one of the known keys.
        # Without any of these keys, the dict itself contains them.
        weights = table
        for key in WEIGHTS:
            if isinstance(table.get(key), dict):
                weights = table[key]
                break
        tensors = {}
        others = []
        for name, value in weights.items():
            if isinstance(value, Stored):
                tensors[name] = value
            else:
                others.append(str(name)[:80])
        if not tensors or (weights is not table and others):
            reason = f"{others[0]} is not a tensor" if others else "it is empty"
            raise CheckpointError(f"{path} has no table of weights ({reason})")
        self.stored = without_wrappers({str(name): stored for name, stored in tensors.items()})
        self._file_of = dict.fromkeys(self.stored, path.name)


def translate(
    weights: FileWeights, tensors: Mapping[str, Tensor], model: Model
) -> mapping.Translation:
    """Find each tensor of a model in the file. Names in ``tensors`` have the prefix that checkpoints use.

    Raises:
        CheckpointError: tensors are missing, unknown to this model, or have a different shape. The message
            names them.
    """
    module = models.find(model.name)
    named = {name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in tensors.items()}
    ignored_patterns: Sequence[str] = ()
    if as_is.is_as_is(module):
        shape = models.shape_of(module, model.flavor, model.overrides, model.norm_type)
        network: Any = models.build(module, shape)
        translation, ignored_patterns = as_is.fit(network, shape, weights)
        # as_is.fit ignores the head of another task, which a Hugging Face folder may contain. In a
        # checkpoint, such a head is an error.
        head_patterns = _patterns_of_heads(weights, translation, network.hf.base_model_prefix)
        ignored_patterns = [pattern for pattern in ignored_patterns if pattern not in head_patterns]
    else:
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        if any(name.endswith("tok_embeddings.weight") for name in weights.names()):
            # torchtitan has different names and a different order of query and key rows.
            # from-dcp converts both.
            fix = f"convert it with `shardtrain checkpoint from-dcp {weights.folder} NEW`"
            fix += " and set checkpoint.initial_load_path to NEW"
            raise CheckpointError(f"{weights.folder} has tensor names of torchtitan; {fix}")
        hub = HubFormat(model.name, "", {}, lambda _: {}, lambda _: {}, ())
        config = SimpleNamespace(head_dim=1, tied_embeddings=False)
        translation = mapping.Translation(hub, shapes, config, {name: name for name in shapes})
    # as_is.fit allows missing tensors, because a folder may lack a new head.
    # But a checkpoint must be complete.
    missing = sorted(set(named) - set(translation.sources))
    if missing:
        shown = ", ".join(missing[:10])
        raise CheckpointError(
            f"{weights.folder} does not fit {model.name}: {len(missing)} missing: {shown}"
        )
    mapping.check(translation, weights, ignored_patterns)
    return translation


def _patterns_of_heads(
    weights: FileWeights, translation: mapping.Translation, base_model_prefix: str
) -> set[str]:
    """Return a pattern for each tensor of the file that is outside of the base model and of this model."""
    used = {str(source) for source in translation.sources.values()}
    patterns = set()
    for name in weights.names():
        is_in_base_model = name.startswith(f"{base_model_prefix}.")
        if not is_in_base_model and not _aliased(name, weights, used):
            patterns.add(re.escape(name))
    return patterns


def fill(path: Path, tensors: Mapping[str, Tensor], model: Model) -> None:
    """Load this rank's shards of a model's tensors from the file. Their names have the prefix ``model.``.

    Raises:
        CheckpointError: a tensor is missing, unknown or has a different shape, or the file is damaged.
    """
    weights = FileWeights(path)
    translation = translate(weights, tensors, model)
    _fill(weights, tensors, translation)


def load(run: Run, path: Path, tensors: Mapping[str, Tensor], model_only: bool) -> None:
    """Load the file into the run, in place.

    Args:
        run: the run.
        path: the file.
        tensors: the model's tensors, by their names in checkpoints.
        model_only: True to load only the weights. Otherwise, the run continues at the step of the file. Its
            position in the data is then computed as if all earlier steps had used this run's batch size.

    Raises:
        CheckpointError: see ``fill``. Or the optimizer's state does not belong to this model, or a count is
            missing.
    """
    weights = FileWeights(path)
    translation = translate(weights, tensors, run.config.model)
    if model_only:
        _fill(weights, tensors, translation)
        logger.info(f"starting from the weights of {path}")
        return

    # Read and check everything before the run is changed.
    step = weights.table.get("global_step")
    if type(step) is not int or step < 0:
        raise CheckpointError(
            f"{path}: global_step is not a count; set checkpoint.initial_load_model_only=true to load only the weights"
        )
    states = _states(weights, translation)
    live_states = optim.state_tensors(run.optimizer, run.runner.optimizer_parameters().items())
    _check_is_adam(path, live_states)

    # Load the model and the optimizer.
    _fill(weights, tensors, translation)
    for name, tensor in live_states.items():
        parameter, _, state_name = name.rpartition(".")
        value = states[str(translation.sources[parameter])][state_name]
        _fill_state(tensor, value, weights)
    _load_scaler(run, weights, path)

    # Set the counts and the position in the data.
    run.state.step = step
    run.state.updates = _num_updates(weights, step)
    run.dataloader.seek(run.dataloader.step_sizes.after(0, step))
    run.state.samples_consumed = run.state.tokens_seen = run.dataloader.samples_consumed
    total_steps = weights.table.get("num_train_optimization_steps")
    if type(total_steps) is int and total_steps != run.total_steps:
        logger.warning(
            f"{path} is from a run with {total_steps} steps, but this run has {run.total_steps}: learning "
            "rates differ from the original run's"
        )
    logger.info(f"continuing from {path} at step {step}")


def _check_is_adam(path: Path, live_states: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the run's optimizer has states that Adam does not have."""
    state_names = {name.rpartition(".")[2] for name in live_states}
    other_states = sorted(state_names - {*_MOMENTS, "step"})
    if other_states:
        raise CheckpointError(
            f"{path} contains Adam's state, but this run's optimizer also needs {', '.join(other_states)}"
        )


def _fill_state(tensor: Tensor, value: Any, weights: FileWeights) -> None:
    """Fill this rank's part of a state of the optimizer with a number or a tensor of the file."""
    local = local_tensor(tensor)
    if not isinstance(value, Stored):
        local.fill_(value)
        return
    full_tensor = weights.file.tensor(value)
    if tensor.dim():
        local.copy_(full_tensor[local_slices(tensor)])
    else:
        local.copy_(full_tensor.reshape(()))


def _num_updates(weights: FileWeights, step: int) -> int:
    """Return the number of optimizer updates.

    This is the scheduler's count, because it does not include steps that float16 has skipped.
    """
    scheduler = weights.table.get("scheduler_state_dict")
    if not isinstance(scheduler, dict):
        return step
    last_epoch = scheduler.get("last_epoch")
    if type(last_epoch) is not int or last_epoch < 0:
        return step
    return min(step, last_epoch)


def _load_scaler(run: Run, weights: FileWeights, path: Path) -> None:
    """Load the loss scale, and clamp it to the range of this package's scaler."""
    scaler = weights.table.get("scaler_state_dict")
    if not run.scaler or not isinstance(scaler, dict) or "scale" not in scaler:
        return
    scale = scaler["scale"]
    finite_steps = scaler.get("_growth_tracker", 0)
    if (
        not isinstance(scale, int | float)
        or not math.isfinite(scale)
        or type(finite_steps) is not int
    ):
        raise CheckpointError(
            f"{path}: scaler_state_dict has no valid loss scale; use another file"
        )
    scale = min(LARGEST, max(SMALLEST, float(scale)))
    run.scaler.load({"scale": scale, "finite_steps": max(0, finite_steps)})


def _fill(
    weights: FileWeights, tensors: Mapping[str, Tensor], translation: mapping.Translation
) -> None:
    named = {name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in tensors.items()}
    mapping.fill(named, translation, weights)


def _states(weights: FileWeights, translation: mapping.Translation) -> dict[str, dict[str, Any]]:
    """Return Adam's state for each parameter, by the parameter's name in the file.

    The file identifies states by the number of their parameter. With one group, numbers follow the order of
    the model. With two groups, the parameters with weight decay come first. Every state must have the shape
    of its parameter.

    Raises:
        CheckpointError: the file has no complete Adam state of this model.
    """
    path = weights.folder
    fix = "set checkpoint.initial_load_model_only=true to load only the weights"
    table = weights.table.get("optimizer_state_dict")
    if not isinstance(table, dict) or not isinstance(table.get("state"), dict):
        raise CheckpointError(f"{path} has no optimizer_state_dict; {fix}")
    state = table["state"]
    groups = table.get("param_groups")
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        raise CheckpointError(f"{path}: optimizer_state_dict has no param_groups; {fix}")

    # Put the names into the order in which the optimizer has numbered its parameters.
    names = _parameter_names(weights, {str(source) for source in translation.sources.values()})
    numbers = []
    for group in groups:
        numbers += group["params"]
    is_fitting = len(groups) == 1
    if len(groups) == 2:
        without_decay = [name for name in names if any(part in name for part in _WITHOUT_DECAY)]
        with_decay = [name for name in names if name not in set(without_decay)]
        names = with_decay + without_decay
        is_fitting = len(groups[1]["params"]) == len(without_decay)
    if not is_fitting or len(numbers) != len(names):
        sizes = ", ".join(str(len(group["params"])) for group in groups)
        text = fix_first(
            f"{path}: the optimizer's groups have {sizes} parameters, but the model has {len(names)}",
            fix,
            f"if there are two groups, the second must contain exactly {' and '.join(_WITHOUT_DECAY)}",
            "sharded training may have changed the groups",
        )
        raise CheckpointError(text)

    # Each parameter needs a step count, and moments of the parameter's shape.
    states: dict[str, dict[str, Any]] = {}
    for number, name in zip(numbers, names, strict=True):
        parameter_state = state.get(number)
        moments: list[Any] = [None]
        if isinstance(parameter_state, dict):
            moments = [parameter_state.get(moment) for moment in _MOMENTS]
        shape = weights.shape(name)
        if not all(isinstance(moment, Stored) and moment.shape == shape for moment in moments):
            raise CheckpointError(
                f"{path}: the optimizer's state {number} does not fit the parameter {name}; {fix}"
            )
        step = parameter_state.get("step")
        is_scalar = isinstance(step, int | float)
        if isinstance(step, Stored):
            is_scalar = math.prod(step.shape) == 1
        if not is_scalar:
            raise CheckpointError(
                f"{path}: the optimizer's state {number} ({name}) has no step; {fix}"
            )
        states[name] = parameter_state
    return states


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), list)


def _parameter_names(weights: FileWeights, used: set[str]) -> list[str]:
    """Return the names of the used tensors, in the order of the file.

    A tensor with several names is listed once, at the position of its first name.
    """
    names: list[str] = []
    seen: set[tuple[str, int, tuple[int, ...]]] = set()
    for name in weights.stored:
        location = _location(weights, name)
        if location in seen:
            continue
        seen.add(location)
        if name not in used and not _aliased(name, weights, used):
            continue
        # The tensor may be used under another name.
        for other in used:
            if other == name or _location(weights, other) == location:
                names.append(other)
                break
    return names


def _location(weights: FileWeights, name: str) -> tuple[str, int, tuple[int, ...]]:
    """Return the storage, offset and shape of a tensor. They are equal for two names of the same tensor."""
    stored = weights.stored[name]
    return stored.key, stored.offset, stored.shape


def _aliased(name: str, weights: FileWeights, used: set[str]) -> bool:
    """True if one of the names in ``used`` refers to the same tensor as ``name``."""
    location = _location(weights, name)
    stored = [other for other in used if other in weights.stored]
    return any(_location(weights, other) == location for other in stored)
