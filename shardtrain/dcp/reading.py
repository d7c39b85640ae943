"""A folder of torch.distributed.checkpoint as a checkpoint of ours: weights, and the state of Adam or AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shardtrain import models
from shardtrain.checkpoint import whole
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.config.schema import Model
from shardtrain.dcp.naming import Naming, listed, recognise
from shardtrain.dcp.stored import DcpFolder
from shardtrain.errors import CheckpointError
from shardtrain.state import TrainState

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What Adam and AdamW keep of each parameter."""
_OPTIMIZER = ("optimizer.state.", "optim.state.", "optimizer.optimizer.state.")
_COUNTERS = {"step": "step", "tokens_seen": "ntokens_seen"}


@dataclass
class Read:
    """What was taken from a folder, and what was not."""

    naming: Naming
    step: int
    with_optimizer: bool
    notices: list[str] = field(default_factory=list)


def from_dcp(folder: Path, output: Path, model: Model, with_optimizer: bool | None = None) -> Read:
    """Write the model of ``folder`` as a checkpoint, each tensor in the type that it has there.

    ``with_optimizer`` None takes the optimizer's state if the folder has that of Adam or AdamW for all parameters, True
    requires it. One tensor at a time is in memory.

    Raises:
        ConfigError: when ``output`` exists, or the model is not known.
        CheckpointError: when tensors are missing or of other shapes, or a file is damaged; nothing is written then.
        StorageError: when the checkpoint cannot be written.
    """
    module = models.find(model.name)
    config = models.shape_of(module, model.flavor, model.overrides, model.norm_type)
    network = models.build(module, config)
    parameters = dict(network.named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in {**parameters, **dict(network.named_buffers())}.items()}
    there = DcpFolder(folder)
    naming, prefix = recognise(model.name, config, shapes, there.tensors)
    weights = {name: prefix + naming.theirs(name) for name in shapes}
    _check(weights, shapes, there, f"{model.name} {model.flavor}")
    found = Read(naming, _step(there), False)
    states = _optimizer(there, naming, {name: shapes[name] for name in parameters}, with_optimizer, found)
    used = {*weights.values(), *states.values()}
    tied = {prefix + naming.theirs("head.weight")} if getattr(config, "tied_embeddings", False) else set()
    for name in tied & there.tensors.keys():
        if not there.tensor(name).equal(there.tensor(weights["embed.weight"])):
            raise CheckpointError(f"{folder}: {name} is not the embedding, and this model has both as one tensor")
    rest = sorted(name for name in there.tensors if name not in used | tied and not _is_told(name))
    surplus = [name for name in rest if not name.startswith(("optimizer", "optim."))]
    if surplus:
        fix = "name the model, flavor and overrides that it was trained with"
        if all(name.endswith(".moe.expert_bias") for name in surplus):
            fix = "add --model.overrides.load_balance_coeff=1e-3, the rate at which torchtitan moves them by default"
        raise CheckpointError(
            f"{folder} has tensors that {model.name} {model.flavor} has not: {listed(surplus)}; {fix}"
        )
    left = sorted({name.split(".")[0] for name in [*there.objects, *rest]} - {"optimizer", "train_state"})
    if left:
        found.notices.append(f"{', '.join(left)}: not taken, the state of another program")
    ours = {WEIGHTS_PREFIX + name: theirs for name, theirs in weights.items()}
    ours |= {f"optimizer.{name}": theirs for name, theirs in states.items()}
    kinds = {name: there.tensors[theirs] for name, theirs in ours.items()}

    def read(name: str) -> Tensor:
        plain = name.removeprefix(WEIGHTS_PREFIX).removeprefix("optimizer.")
        for moment in MOMENTS:
            plain = plain.removesuffix(f".{moment}")
        return naming.to_ours(plain, there.tensor(ours[name]))

    state = TrainState().to_dict() | _counters(there, found.step)
    noted = {"name": model.name, "flavor": model.flavor, "overrides": dict(model.overrides)}
    facts: dict[str, Any] = {"state": state, "model": noted}
    whole.write(
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


def _check(weights: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], there: DcpFolder, model: str) -> None:
    missing = [theirs for theirs in weights.values() if theirs not in there.tensors]
    wrong = [
        f"{theirs} {list(there.tensors[theirs].shape)} in place of {list(shapes[name])}"
        for name, theirs in weights.items()
        if theirs in there.tensors and there.tensors[theirs].shape != shapes[name]
    ]
    if missing or wrong:
        parts = [f"{len(missing)} missing: {listed(missing)}"] if missing else []
        parts += [f"{len(wrong)} of another shape: {listed(wrong)}"] if wrong else []
        has = f" (it has {listed(sorted(there.tensors))})" if len(missing) == len(weights) else ""
        raise CheckpointError(
            f"{there.folder} is not {model}: {'; '.join(parts)}{has}; name the model, flavor and overrides that it was "
            "trained with"
        )


def _optimizer(
    there: DcpFolder, naming: Naming, shapes: Mapping[str, tuple[int, ...]], wanted: bool | None, found: Read
) -> dict[str, str]:
    """Our names of the optimizer's tensors to theirs; none where they are not taken."""
    if wanted is False:
        return {}
    prefix = next((p for p in _OPTIMIZER if any(name.startswith(p) for name in there.tensors)), "")
    reason = ""
    names = {f"{name}.{moment}": f"{prefix}{naming.theirs(name)}.{moment}" for name in shapes for moment in MOMENTS}
    if not prefix:
        reason = "it holds none"
    else:
        missing = [theirs for theirs in names.values() if theirs not in there.tensors]
        wrong = [
            theirs
            for ours, theirs in names.items()
            if theirs not in missing
            and there.tensors[theirs].shape != (() if ours.endswith(".step") else shapes[ours.rpartition(".")[0]])
        ]
        if missing or wrong:
            reason = f"it is not that of Adam or AdamW for every parameter: {listed(missing + wrong)}"
    if reason and wanted:
        raise CheckpointError(f"{there.folder}: no state of the optimizer: {reason}; leave out --optimizer")
    if reason:
        found.notices.append(f"optimizer: not taken, {reason}")
        return {}
    return names


def _step(there: DcpFolder) -> int:
    """The step that the folder says it is of: by its counters, or by its name."""
    for name in ("train_state.step", "train_state.steps"):
        if name in there.tensors and there.tensors[name].shape == ():
            return int(there.tensor(name))
        if name in there.objects and type(value := there.value(name)) is int and value >= 0:
            return value
    text = there.folder.name.removeprefix("step-")
    return int(text) if text.isdecimal() and len(text) < 12 else 0


def _counters(there: DcpFolder, step: int) -> dict[str, int]:
    found = {"step": step, "updates": step}
    tokens = there.value("train_state.ntokens_seen") if "train_state.ntokens_seen" in there.objects else 0
    if type(tokens) is int and 0 <= tokens < 2**62:
        found["tokens_seen"] = tokens
    return found


def _is_told(name: str) -> bool:
    return name.startswith(("train_state.", "lr_scheduler", "dataloader"))
