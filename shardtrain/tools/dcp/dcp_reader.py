"""Convert a folder of torch.distributed.checkpoint to a shardtrain checkpoint: weights, and state of Adam or AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shardtrain import models
from shardtrain.checkpoint import single_process_writer
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.checkpoint.torch_file import FlatFile
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config.schema import Model
from shardtrain.tools.dcp.naming import TORCHTITAN, Naming, listed, recognise
from shardtrain.tools.dcp.stored import DcpFolder
from shardtrain.utils.errors import CheckpointError, ConfigError
from shardtrain.utils.variables import is_whole_number

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""State tensors of Adam and AdamW for each parameter."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts that compiled and recomputed modules add to names."""
_MAX_COUNT = 2**53
Folder = DcpFolder | FlatFile
_OPTIMIZER = ("optimizer.state.", "optim.state.", "optimizer.optimizer.state.")


@dataclass
class DcpImport:
    """Result of an import: the naming, the step, and notices about everything that was not imported."""

    naming: Naming
    step: int
    with_optimizer: bool
    notices: list[str] = field(default_factory=list)


def from_dcp(
    folder: Path, output: Path, model: Model, with_optimizer: bool | None = None, seq_len: int | None = None
) -> DcpImport:
    """Write the model in ``folder`` as a checkpoint with the same dtypes. One tensor at a time is in memory.

    Args:
        folder: Folder of torch.distributed.checkpoint, or a file of torch.save.
        output: New folder.
        model: The model's options.
        with_optimizer: True requires the state of Adam or AdamW, False skips it. None imports it if it is complete.
        seq_len: Sequence length of its training, if known. torchtitan stretches rotary angles of DeepSeek-V3 only for
            longer sequences.

    Raises:
        ConfigError: ``output`` exists, or the model is unknown.
        CheckpointError: tensors are missing or have other shapes, or a file is damaged. Nothing is written then.
        StorageError: the checkpoint cannot be written.
    """
    module, config = models.configured(model)
    network = models.build(module, config)
    parameters = dict(network.named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in {**parameters, **dict(network.named_buffers())}.items()}

    # Map our names to names in the folder.
    there = _unwrapped(FlatFile(folder) if folder.is_file() else DcpFolder(folder))
    naming, prefix = recognise(model.name, config, shapes, there.tensors)
    weights = {name: prefix + naming.theirs(name) for name in shapes}
    _check(weights, shapes, there, f"{model.name} {model.flavor}")

    # The step is in the train state or, if missing, in the name of the folder.
    step = _count(there, "step")
    found = DcpImport(naming, _step_of_name(folder) if step is None else step, False)
    if step is None and any(name.startswith("train_state.step") for name in [*there.tensors, *there.objects]):
        found.notices.append(f"train_state.step: not a count; by the folder's name the step is {found.step}")
    if naming.kind == TORCHTITAN:
        found.notices += _other_angles(model.name, config, seq_len)
    states = _optimizer(there, naming, {name: shapes[name] for name in parameters}, with_optimizer, found)

    # Other tensors of the folder may be a copy of a tied embedding, or state of the other program,
    # which is skipped. Weights that this model does not have are an error.
    used = {*weights.values(), *states.values()}
    tied = {prefix + naming.theirs("head.weight")} if getattr(config, "tied_embeddings", False) else set()
    for name in tied & there.tensors.keys():
        embed = weights["embed.weight"]
        one = there.tensors[name]
        other = there.tensors[embed]
        same = (one.shape, one.dtype) == (other.shape, other.dtype)
        if not same or not there.tensor(name).equal(there.tensor(embed)):
            raise CheckpointError(f"{folder}: {name} differs from the embedding, but this model ties them")
    rest = sorted(
        name
        for name in there.tensors
        if name not in used | tied and not name.startswith(("train_state.", "lr_scheduler", "dataloader"))
    )
    surplus = [name for name in rest if not name.startswith(("optimizer", "optim."))]
    if surplus:
        fix = "name the model, flavor and overrides that it was trained with"
        if all(name.endswith(".moe.expert_bias") for name in surplus):
            fix = "add --model.overrides.load_balance_coeff=1e-3, the rate at which torchtitan moves them by default"
        raise CheckpointError(
            f"{folder} has tensors that {model.name} {model.flavor} does not have: {listed(surplus)}; {fix}"
        )
    left = sorted({name.split(".")[0] for name in [*there.objects, *rest]} - {"optimizer", "train_state"})
    if left:
        found.notices.append(f"{listed(left)}: skipped, state of another program")
    if there.unread:
        types = [f"{name} ({dtype})" for name, dtype in there.unread.items()]
        found.notices.append(f"{listed(types)}: skipped, not a dtype of weights")

    # Optimizer states have the same order of rows as their parameter.
    ours = {WEIGHTS_PREFIX + name: theirs for name, theirs in weights.items()}
    ours |= {f"optimizer.{name}": theirs for name, theirs in states.items()}
    kinds = {name: there.tensors[theirs] for name, theirs in ours.items()}

    def read(name: str) -> Tensor:
        plain = name.removeprefix(WEIGHTS_PREFIX).removeprefix("optimizer.")
        for moment in MOMENTS:
            plain = plain.removesuffix(f".{moment}")
        return naming.to_ours(plain, there.tensor(ours[name]))

    counters = {"step": found.step, "updates": found.step, "tokens_seen": _count(there, "ntokens_seen") or 0}
    state = TrainState().to_dict() | counters
    noted = {"name": model.name, "flavor": model.flavor, "overrides": dict(model.overrides)}
    facts: dict[str, Any] = {"state": state, "model": noted}
    single_process_writer.write(
        output,
        {name: kind.shape for name, kind in kinds.items()},
        {name: kind.dtype for name, kind in kinds.items()},
        read,
        facts,
        step=found.step,
        with_optimizer=bool(states),
    )
    found.with_optimizer = bool(states)
    return found


def _check(weights: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], there: Folder, model: str) -> None:
    """Raise CheckpointError unless the folder has every weight, with the right shape and a floating-point dtype."""
    missing = []
    integral = []
    wrong = []
    for name, theirs in weights.items():
        if theirs not in there.tensors:
            missing.append(theirs)
            continue
        tensor = there.tensors[theirs]
        if not tensor.dtype.startswith(("float", "bfloat")):
            integral.append(f"{theirs} {tensor.dtype}")
        if tensor.shape != shapes[name]:
            wrong.append(f"{theirs} {list(tensor.shape)} instead of {list(shapes[name])}")
    lists = {"missing": missing, "not floating-point": integral, "of another shape": wrong}
    parts = [f"{len(names)} {fault}: {listed(names)}" for fault, names in lists.items() if names]
    if parts:
        has = f" (it has {listed(sorted(there.tensors))})" if len(missing) == len(weights) else ""
        raise CheckpointError(
            f"{there.folder} is not {model}: {'; '.join(parts)}{has}; name the model, flavor and overrides that it was "
            "trained with"
        )


def _optimizer(
    there: Folder, naming: Naming, shapes: Mapping[str, tuple[int, ...]], wanted: bool | None, found: DcpImport
) -> dict[str, str]:
    """Map our names of optimizer states to names in the folder. Empty if the states are not imported."""
    if wanted is False:
        return {}
    prefix = next((p for p in _OPTIMIZER if any(name.startswith(p) for name in there.tensors)), "")
    reason = ""
    names = {f"{name}.{moment}": f"{prefix}{naming.theirs(name)}.{moment}" for name in shapes for moment in MOMENTS}
    if not prefix:
        reason = "it has none"
    else:
        missing = [theirs for theirs in names.values() if theirs not in there.tensors]
        wrong = [
            theirs
            for ours, theirs in names.items()
            if theirs not in missing
            and there.tensors[theirs].shape != (() if ours.endswith(".step") else shapes[ours.rpartition(".")[0]])
        ]
        known = tuple(f".{moment}" for moment in MOMENTS)
        more = [name for name in there.tensors if name.startswith(prefix) and not name.endswith(known)]
        if more:
            reason = f"it is from another optimizer, with {listed(more)}"
        elif missing or wrong:
            reason = f"parameters lack the state of Adam or AdamW: {listed(missing + wrong)}"
    if reason and wanted:
        raise CheckpointError(f"{there.folder}: no optimizer state: {reason}; remove --optimizer")
    if reason:
        found.notices.append(f"optimizer: skipped, {reason}")
        return {}
    return names


def _unwrapped(there: Folder) -> Folder:
    """Remove the parts that wrapped modules add to names, unless names would become equal."""

    def plain(name: str) -> str:
        for word in _WRAPPERS:
            name = name.replace(word, "")
        return name

    names = {name: plain(name) for name in there.tensors}
    if len({*names.values()}) == len(names):
        there.tensors = {names[name]: tensor for name, tensor in there.tensors.items()}  # type: ignore[assignment]
    return there


def _other_angles(family: str, config: Any, seq_len: int | None) -> list[str]:
    """Return notices about rotary angles that torchtitan may have computed differently.

    Raises:
        ConfigError: torchtitan certainly computed them differently.
    """
    if family == "llama3" and config.rope_scaling == "none":
        return [
            "rotary angles: torchtitan v0.2 scales them in every Llama 3, including the debugmodel, but this model "
            'does not; if v0.2 trained it, set model.overrides rope_scaling = "llama3" and rope_scaling_factor = 8.0'
        ]
    if family not in ("deepseek_v2", "deepseek_v3") or config.rope_factor == 1.0:
        return []
    if seq_len is None:
        return [
            "rotary angles: this model stretches them, but torchtitan only does so if training.seq_len was above "
            f"{config.rope_original_seq_len}; if it was not, set model.overrides.rope_factor = 1.0"
        ]
    if seq_len <= config.rope_original_seq_len:
        raise ConfigError(
            f"model.overrides.rope_factor={config.rope_factor} differs from torchtitan's angles with training.seq_len="
            f"{seq_len}: it stretches rotary angles only above {config.rope_original_seq_len}; add "
            "--model.overrides.rope_factor=1.0, here and to later training"
        )
    return []


def _count(there: Folder, name: str) -> int | None:
    """Return a counter of torchtitan's train state. None if it is missing or not a count."""
    full = f"train_state.{name}"
    value: Any = None
    if full in there.tensors and there.tensors[full].shape == ():
        value = there.tensor(full).item()
    elif full in there.objects:
        value = there.value(full)
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    return value if type(value) is int and 0 <= value < _MAX_COUNT else None


def _step_of_name(folder: Path) -> int:
    """Return the step in a name such as "step-1000", or 0."""
    text = folder.name.removesuffix(".pt").removeprefix("step-")
    return int(text) if is_whole_number(text) and len(text) < 12 else 0
