"""A shardtrain checkpoint as a folder of torch.distributed.checkpoint, with PyTorch's own writer.

The names are those that torchtitan v0.2 gives its own: weights at the top, ``optimizer.state.NAME.exp_avg``,
``optimizer.param_groups.NAME.lr``, ``train_state.step``, ``lr_scheduler.last_epoch``. PyTorch's writer is asked for one
thread, because with several it may report a failed write as a success (pytorch/pytorch#191391); what it has written is
read back, and the folder has its name only then.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from shardtrain import models
from shardtrain.checkpoint import files, manifest, weights_file
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX, Manifest
from shardtrain.tools.dcp.dcp_reader import MOMENTS
from shardtrain.tools.dcp.naming import OWN, Naming, naming
from shardtrain.tools.dcp.stored import DcpFolder
from shardtrain.utils.errors import CheckpointError, StorageError, require_new


@dataclasses.dataclass(frozen=True)
class Options:
    """What a configuration says of a group of the optimizer, under PyTorch's names but for the first."""

    name: str
    """Adam or AdamW, which differ in how weights decay."""
    lr: float
    initial_lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def to_dcp(
    checkpoint: Path,
    output: Path,
    model: Mapping[str, Any],
    kind: str,
    optimizer: Callable[[str], Options] | None,
) -> tuple[int, bool]:
    """Write a checkpoint as a folder of torch.distributed.checkpoint; gives the number of tensors, and whether the
    optimizer's are among them.

    ``model`` has name, flavor, overrides and norm_type. ``optimizer`` gives the group of a parameter by its name; None
    leaves the optimizer out. One tensor at a time is in memory.

    Raises:
        ConfigError: when ``output`` exists, or torchtitan has no such model.
        CheckpointError: when the checkpoint is damaged, holds adapters, or is of another model.
        StorageError: when the folder cannot be written.
    """
    require_new(output)
    stored = manifest.read(checkpoint)
    for file in stored.files:
        if damage := files.find_damage(checkpoint, file):
            raise CheckpointError(f"checkpoint {checkpoint}: {damage}; use another one")
    module = models.find(str(model["name"]))
    norm = str(model.get("norm_type") or "rmsnorm")
    config = models.shape_of(module, str(model["flavor"]), dict(model["overrides"]), norm)
    names = naming(kind, str(model["name"]), config)
    network = models.build(module, config)
    parameters = [name for name, _ in network.named_parameters()]
    weights = [*parameters, *(name for name, _ in network.named_buffers())]
    missing = [name for name in weights if WEIGHTS_PREFIX + name not in stored.tensors]
    if missing:
        raise CheckpointError(f"checkpoint {checkpoint} has no {missing[0]}; is it of another model, or of adapters?")
    # their name -> ours, and the name of the parameter that decides the order of rows
    found = {names.theirs(name): (WEIGHTS_PREFIX + name, name) for name in weights}
    if names.kind != OWN and getattr(names.config, "tied_embeddings", False):
        # its state dict holds a tied head under both names, and a load of it asks for both
        found[names.theirs("head.weight")] = (f"{WEIGHTS_PREFIX}embed.weight", "embed.weight")
    sources = found
    objects: dict[str, Any] = {}
    whole = optimizer is not None and all(
        f"optimizer.{name}.{moment}" in stored.tensors for name in parameters for moment in MOMENTS
    )
    if optimizer is not None and whole:
        more, objects = _optimizer(names, parameters, stored, optimizer)
        sources |= more
    _write(checkpoint, stored, sources, objects, names, output)
    return len(sources), whole


def _optimizer(
    names: Naming, parameters: list[str], stored: Manifest, options: Callable[[str], Options]
) -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    sources: dict[str, tuple[str, str]] = {}
    objects: dict[str, Any] = {}
    for name in parameters:
        theirs = names.theirs(name)
        for moment in MOMENTS:
            sources[f"optimizer.state.{theirs}.{moment}"] = (f"optimizer.{name}.{moment}", name)
        group = dataclasses.asdict(options(name))
        # a load asks for every field that this PyTorch has in a group of that kind, so one is made to look
        kind: type[torch.optim.Optimizer] = getattr(torch.optim, group.pop("name"))
        one = kind([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # type: ignore[call-arg]
        group = {**{key: value for key, value in one.param_groups[0].items() if key != "params"}, **group}
        objects |= {f"optimizer.param_groups.{theirs}.{key}": value for key, value in group.items()}
    state = stored.facts["state"]
    objects["train_state.step"] = int(state["step"])
    objects["train_state.ntokens_seen"] = int(state.get("tokens_seen", 0))
    # all that PyTorch keeps of a schedule that is a function of the step, since a load asks for all of it
    if parameters:
        first = options(parameters[0])
        schedule = torch.optim.lr_scheduler.LambdaLR(one, lambda _: 1.0).state_dict()
        updates = int(state.get("updates", state["step"]))
        schedule |= {"last_epoch": updates, "_step_count": updates + 1}
        schedule |= {"base_lrs": [first.initial_lr], "_last_lr": [first.lr]}
        objects |= {f"lr_scheduler.{key}": value for key, value in schedule.items()}
    return sources, objects


def _write(
    checkpoint: Path,
    stored: Manifest,
    sources: Mapping[str, tuple[str, str]],
    objects: Mapping[str, Any],
    names: Naming,
    output: Path,
) -> None:
    def read(theirs: str) -> Tensor:
        ours, parameter = sources[theirs]
        kind = stored.tensors[ours]
        data = weights_file.whole_bytes(stored, checkpoint, kind)
        flat = torch.frombuffer(data, dtype=getattr(torch, kind.dtype)) if data else torch.empty(0)
        return names.to_theirs(parameter, flat.view(kind.shape)).contiguous()

    described: dict[str, Any] = {
        theirs: torch.empty(stored.tensors[ours].shape, dtype=getattr(torch, stored.tensors[ours].dtype), device="meta")
        for theirs, (ours, _) in sources.items()
    }
    with files.new_folder(output) as temporary:
        writer = FileSystemWriter(temporary, single_file_per_rank=True, thread_count=1)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant here
                dcp.save({**described, **objects}, storage_writer=writer, planner=_Reader(read), no_dist=True)
        except dcp.api.CheckpointException as error:  # which is not an Exception
            cause = next(iter(error.failures.values()), (error, None))[0]
            if isinstance(cause, CheckpointError) or not isinstance(cause, Exception):  # such as Ctrl-C
                raise cause from None
            raise StorageError(f"cannot write {output}: {cause}; choose another folder") from None
        there = DcpFolder(temporary)
        for theirs in sources:
            if not torch.equal(_bits(there.tensor(theirs)), _bits(read(theirs))):
                raise StorageError(f"{output}: {theirs} is not what was written; check the disk")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class _Reader(DefaultSavePlanner):
    """Gives each tensor when it is its turn to be written; those of the state dict only describe it."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._of = read

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self._of(write_item.index.fqn)
