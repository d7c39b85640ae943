"""Convert a folder of torch.distributed.checkpoint to a shardtrain checkpoint: weights, and state of Adam or AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
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
    folder: Path,
    output: Path,
    model: Model,
    with_optimizer: bool | None = None,
    seq_len: int | None = None,
) -> DcpImport:
    """Write the model in ``folder`` as a checkpoint with the same dtypes. One tensor at a time is in memory.

    Args:
        folder: Folder of torch.distributed.checkpoint, or a file of torch.save.
        output: New folder.
        model: The model's options.
        with_optimizer: True requires the state of Adam or AdamW, False skips it. None imports it if it is
            complete.
        seq_len: Sequence length of its training, if known. torchtitan stretches rotary angles of DeepSeek-V3 only for
            longer sequences.

    Raises:
        ConfigError: ``output`` exists, or the model is unknown.
        CheckpointError: tensors are missing or have other shapes, or a file is damaged. Nothing is
            written then.
        StorageError: the checkpoint cannot be written.
    """
    module, config = models.configured(model)
    network = models.build(module, config)
    parameters = {name: tuple(tensor.shape) for name, tensor in network.named_parameters()}
    buffers = {name: tuple(tensor.shape) for name, tensor in network.named_buffers()}
    shapes = parameters | buffers

    # Map our names to names in the folder.
    source: Folder = FlatFile(folder) if folder.is_file() else DcpFolder(folder)
    _remove_wrappers(source)
    naming, prefix = recognise(model.name, config, shapes, source.tensors)
    weights = {name: prefix + naming.theirs(name) for name in shapes}
    _check(weights, shapes, source, f"{model.name} {model.flavor}")

    result = DcpImport(naming, step=0, with_optimizer=False)
    _find_step(source, folder, result)
    if naming.kind == TORCHTITAN:
        result.notices += _other_angles(model.name, config, seq_len)
    states = _optimizer(source, naming, parameters, with_optimizer, result)
    result.with_optimizer = bool(states)

    # The folder may also have the head of a model that ties it to the embedding. It must be a copy.
    used = {*weights.values(), *states.values()}
    tied_head = prefix + naming.theirs("head.weight")
    if getattr(config, "tied_embeddings", False) and tied_head in source.tensors:
        _check_tied(source, tied_head, weights["embed.weight"])
        used.add(tied_head)
    result.notices += _skipped(source, used, model)

    # Our name -> their name.
    sources: dict[str, str] = {}
    for name, theirs in weights.items():
        sources[WEIGHTS_PREFIX + name] = theirs
    for name, theirs in states.items():
        sources[f"optimizer.{name}"] = theirs
    stored_shapes = {}
    stored_dtypes = {}
    for name, theirs in sources.items():
        entry = source.tensors[theirs]
        stored_shapes[name] = entry.shape
        stored_dtypes[name] = entry.dtype

    def read(name: str) -> Tensor:
        # Optimizer states have the same order of rows as their parameter.
        parameter = name.removeprefix(WEIGHTS_PREFIX).removeprefix("optimizer.")
        for moment in MOMENTS:
            parameter = parameter.removesuffix(f".{moment}")
        return naming.to_ours(parameter, source.tensor(sources[name]))

    # Every step of torchtitan is one update.
    tokens_seen = _count(source, "ntokens_seen") or 0
    counters = {"step": result.step, "updates": result.step, "tokens_seen": tokens_seen}
    facts: dict[str, Any] = {
        "state": TrainState().to_dict() | counters,
        "model": {"name": model.name, "flavor": model.flavor, "overrides": dict(model.overrides)},
    }
    single_process_writer.write(
        output,
        stored_shapes,
        stored_dtypes,
        read,
        facts,
        step=result.step,
        with_optimizer=result.with_optimizer,
    )
    return result


def _find_step(source: Folder, folder: Path, result: DcpImport) -> None:
    """Set the step from the train state or, if it has none, from the name of the folder."""
    step = _count(source, "step")
    if step is not None:
        result.step = step
        return
    result.step = _step_of_name(folder)
    item_names = [*source.tensors, *source.objects]
    if any(name.startswith("train_state.step") for name in item_names):
        result.notices.append(
            f"train_state.step: not a count; by the folder's name the step is {result.step}"
        )


def _check_tied(source: Folder, head: str, embed: str) -> None:
    """Raise CheckpointError if a head differs from the embedding, with which this model ties it."""
    head_entry = source.tensors[head]
    embed_entry = source.tensors[embed]
    # Compare the small entries first, because the tensors may be large.
    is_equal = head_entry.shape == embed_entry.shape and head_entry.dtype == embed_entry.dtype
    if is_equal:
        is_equal = source.tensor(head).equal(source.tensor(embed))
    if not is_equal:
        raise CheckpointError(
            f"{source.folder}: {head} differs from the embedding, but this model ties them"
        )


def _skipped(source: Folder, used: Set[str], model: Model) -> list[str]:
    """Return notices about items of the folder that are not imported.

    Raises:
        CheckpointError: the folder has weights that the model does not have.
    """
    # State of the other program is skipped, such as the position of its data loader.
    states = ("optimizer", "optim.", "train_state.", "lr_scheduler", "dataloader")
    surplus = []
    for name in sorted(source.tensors):
        if name not in used and not name.startswith(states):
            surplus.append(name)
    if surplus:
        fix = "name the model, flavor and overrides that it was trained with"
        if all(name.endswith(".moe.expert_bias") for name in surplus):
            fix = "add --model.overrides.load_balance_coeff=1e-3, the rate at which torchtitan moves them by default"
        raise CheckpointError(
            f"{source.folder} has tensors that {model.name} {model.flavor} does not have: {listed(surplus)}; {fix}"
        )

    # Name only the top level of each item, because the state of a data loader has thousands of items.
    skipped = set()
    for name in source.objects:
        skipped.add(name.split(".")[0])
    for name in source.tensors:
        is_known = name in used or name.startswith(("train_state.", "lr_scheduler", "dataloader"))
        if not is_known:
            skipped.add(name.split(".")[0])
    # Notices about the optimizer and the step give the reason, so omit both here.
    skipped -= {"optimizer", "train_state"}
    notices = []
    if skipped:
        notices.append(f"{listed(sorted(skipped))}: skipped, state of another program")
    if source.unread:
        types = [f"{name} ({dtype})" for name, dtype in source.unread.items()]
        notices.append(f"{listed(types)}: skipped, not a dtype of weights")
    return notices


def _check(
    weights: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], source: Folder, model: str
) -> None:
    """Raise CheckpointError unless the folder has every weight, with the right shape and a floating-point dtype."""
    missing = []
    integral = []
    wrong = []
    for name, theirs in weights.items():
        tensor = source.tensors.get(theirs)
        if tensor is None:
            missing.append(theirs)
            continue
        if not tensor.dtype.startswith(("float", "bfloat")):
            integral.append(f"{theirs} {tensor.dtype}")
        if tensor.shape != shapes[name]:
            wrong.append(f"{theirs} {list(tensor.shape)} instead of {list(shapes[name])}")

    parts = []
    if missing:
        parts.append(f"{len(missing)} missing: {listed(missing)}")
    if integral:
        parts.append(f"{len(integral)} not floating-point: {listed(integral)}")
    if wrong:
        parts.append(f"{len(wrong)} of another shape: {listed(wrong)}")
    if not parts:
        return
    text = "; ".join(parts)
    # If nothing matches, its names show which model it is.
    if len(missing) == len(weights):
        text += f" (it has {listed(sorted(source.tensors))})"
    raise CheckpointError(
        f"{source.folder} is not {model}: {text}; name the model, flavor and overrides that it was trained with"
    )


def _optimizer(
    source: Folder,
    naming: Naming,
    shapes: Mapping[str, tuple[int, ...]],
    wanted: bool | None,
    result: DcpImport,
) -> dict[str, str]:
    """Map our names of optimizer states to names in the folder. Empty if the states are not imported."""
    if wanted is False:
        return {}
    names, reason = _find_states(source, naming, shapes)
    if not reason:
        return names
    if wanted:
        raise CheckpointError(f"{source.folder}: no optimizer state: {reason}; remove --optimizer")
    result.notices.append(f"optimizer: skipped, {reason}")
    return {}


def _find_states(
    source: Folder, naming: Naming, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], str]:
    """Map our names of optimizer states to names in the folder. Also return why they are unusable, or ""."""
    prefix, stored_states = _stored_states(source)
    if not stored_states:
        return {}, "it has none"
    endings = tuple(f".{moment}" for moment in MOMENTS)
    unknown = [name for name in stored_states if not name.endswith(endings)]
    if unknown:
        return {}, f"it is from another optimizer, with {listed(unknown)}"

    names = {}
    missing = []
    wrong = []
    for name, shape in shapes.items():
        for moment in MOMENTS:
            theirs = f"{prefix}{naming.theirs(name)}.{moment}"
            names[f"{name}.{moment}"] = theirs
            # Steps are counts, and the other moments have the shape of their parameter.
            shape_of_moment = () if moment == "step" else shape
            if theirs not in source.tensors:
                missing.append(theirs)
            elif source.tensors[theirs].shape != shape_of_moment:
                wrong.append(theirs)
    if missing or wrong:
        return {}, f"parameters lack the state of Adam or AdamW: {listed(missing + wrong)}"
    return names, ""


def _stored_states(source: Folder) -> tuple[str, list[str]]:
    """Return the prefix of optimizer states in the folder, and their names. Empty if there are none."""
    for prefix in _OPTIMIZER:
        names = [name for name in source.tensors if name.startswith(prefix)]
        if names:
            return prefix, names
    return "", []


def _remove_wrappers(source: Folder) -> None:
    """Remove the parts that wrapped modules add to names, unless names would become equal."""
    tensors: dict[str, Any] = {}
    for name, tensor in source.tensors.items():
        for part in _WRAPPERS:
            name = name.replace(part, "")
        tensors[name] = tensor
    if len(tensors) == len(source.tensors):
        source.tensors = tensors


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


def _count(source: Folder, name: str) -> int | None:
    """Return a counter of torchtitan's train state. None if it is missing or not a count."""
    full_name = f"train_state.{name}"
    value: Any = None
    if full_name in source.tensors and source.tensors[full_name].shape == ():
        value = source.tensor(full_name).item()
    elif full_name in source.objects:
        value = source.value(full_name)
    # A count may be stored as a float. The folder is untrusted, so the value may be anything.
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        return None
    return value


def _step_of_name(folder: Path) -> int:
    """Return the step in a name such as "step-1000", or 0."""
    text = folder.name.removesuffix(".pt").removeprefix("step-")
    if not is_whole_number(text) or len(text) >= 12:
        return 0
    return int(text)
