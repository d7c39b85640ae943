"""Convert a shardtrain checkpoint to a folder of torch.distributed.checkpoint, with PyTorch's own writer.

The names are those of torchtitan v0.2: weights at the top, ``optimizer.state.NAME.exp_avg``,
``optimizer.param_groups.NAME.lr``, ``train_state.step``, ``lr_scheduler.last_epoch``. PyTorch's writer
uses one thread, because with several it may report a failed write as a success (pytorch/pytorch#191391).
The folder gets its final name after all tensors were read back and are equal.
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
    """Options of an optimizer group. Except for ``name``, the names are PyTorch's."""

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
    """Write a checkpoint as a folder of torch.distributed.checkpoint. One tensor at a time is in memory.

    Args:
        checkpoint: A step folder.
        output: New folder.
        model: Name, flavor, overrides and norm_type of the model.
        kind: Naming of tensors, one of ``NAMINGS``.
        optimizer: Function from the name of a parameter to its group. None skips the optimizer.

    Returns:
        The number of tensors, and True if optimizer states are among them.

    Raises:
        ConfigError: ``output`` exists, or torchtitan does not have the model.
        CheckpointError: the checkpoint is damaged, contains adapters, or is of another model.
        StorageError: the folder cannot be written.
    """
    require_new(output)
    # Check the hashes of all files first. Otherwise a damaged tensor would be copied.
    stored = manifest.read(checkpoint)
    for file in stored.files:
        damage = files.find_damage(checkpoint, file)
        if damage:
            raise CheckpointError(f"checkpoint {checkpoint}: {damage}; use another checkpoint")
    model_name = str(model["name"])
    module = models.find(model_name)
    norm = str(model.get("norm_type") or "rmsnorm")
    config = models.shape_of(module, str(model["flavor"]), dict(model["overrides"]), norm)
    names = naming(kind, model_name, config)
    network = models.build(module, config)
    parameters = [name for name, _ in network.named_parameters()]
    buffers = [name for name, _ in network.named_buffers()]

    # Their name -> our name, and the name of the parameter that determines the order of rows.
    sources: dict[str, tuple[str, str]] = {}
    for name in parameters + buffers:
        ours = WEIGHTS_PREFIX + name
        if ours not in stored.tensors:
            raise CheckpointError(
                f"checkpoint {checkpoint} has no {name}; it is from another model, or contains adapters"
            )
        sources[names.theirs(name)] = (ours, name)
    # torchtitan's state dict has a tied head under both names, and loading needs both.
    if names.kind != OWN and getattr(names.config, "tied_embeddings", False):
        sources[names.theirs("head.weight")] = (f"{WEIGHTS_PREFIX}embed.weight", "embed.weight")

    # Write the optimizer only if its state is complete, because loading needs every tensor.
    objects: dict[str, Any] = {}
    states = _states(names, parameters)
    has_states = optimizer is not None
    for ours, _ in states.values():
        if ours not in stored.tensors:
            has_states = False
    if optimizer is not None and has_states:
        sources.update(states)
        objects = _objects(names, parameters, stored.facts["state"], optimizer)
    _write(checkpoint, stored, sources, objects, names, output)
    return len(sources), has_states


def _states(names: Naming, parameters: list[str]) -> dict[str, tuple[str, str]]:
    """Map their name of each optimizer state to ours, and to the name of its parameter."""
    states = {}
    for name in parameters:
        for moment in MOMENTS:
            theirs = f"optimizer.state.{names.theirs(name)}.{moment}"
            states[theirs] = (f"optimizer.{name}.{moment}", name)
    return states


def _objects(
    names: Naming,
    parameters: list[str],
    state: Mapping[str, Any],
    options: Callable[[str], Options],
) -> dict[str, Any]:
    """Return the items of the folder that are not tensors: optimizer groups, counters and the schedule."""
    objects: dict[str, Any] = {}
    for name in parameters:
        group = dataclasses.asdict(options(name))
        class_name = group.pop("name")
        # Loading needs every field of a group in this version of PyTorch, so take them from a new
        # optimizer.
        optimizer_class: Any = getattr(torch.optim, class_name)
        optimizer = optimizer_class([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        fields = optimizer.param_groups[0] | group
        fields.pop("params")
        for key, value in fields.items():
            objects[f"optimizer.param_groups.{names.theirs(name)}.{key}"] = value
    objects["train_state.step"] = int(state["step"])
    objects["train_state.ntokens_seen"] = int(state.get("tokens_seen", 0))

    # Loading needs the full state of a schedule, so take it from a new one.
    if parameters:
        first = options(parameters[0])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        schedule = scheduler.state_dict()
        updates = int(state.get("updates", state["step"]))
        schedule["last_epoch"] = updates
        schedule["_step_count"] = updates + 1
        schedule["base_lrs"] = [first.initial_lr]
        schedule["_last_lr"] = [first.lr]
        for key, value in schedule.items():
            objects[f"lr_scheduler.{key}"] = value
    return objects


def _write(
    checkpoint: Path,
    stored: Manifest,
    sources: Mapping[str, tuple[str, str]],
    objects: Mapping[str, Any],
    names: Naming,
    output: Path,
) -> None:
    """Write the folder, then read every tensor back."""

    def read(theirs: str) -> Tensor:
        ours, parameter = sources[theirs]
        entry = stored.tensors[ours]
        data = weights_file.whole_bytes(stored, checkpoint, entry)
        # ``frombuffer`` rejects an empty buffer.
        flat = torch.empty(0)
        if data:
            flat = torch.frombuffer(data, dtype=getattr(torch, entry.dtype))
        tensor = flat.view(entry.shape)
        return names.to_theirs(parameter, tensor).contiguous()

    # The planner reads each tensor when it is written, so the state dict only describes them.
    items: dict[str, Any] = {}
    for theirs, (ours, _) in sources.items():
        entry = stored.tensors[ours]
        items[theirs] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
    items.update(objects)
    with files.new_folder(output) as temporary:
        writer = FileSystemWriter(temporary, single_file_per_rank=True, thread_count=1)
        try:
            with warnings.catch_warnings():
                # One process writes the folder intentionally.
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.save(items, storage_writer=writer, planner=_Reader(read), no_dist=True)
        except dcp.api.CheckpointException as error:
            # This is a BaseException that wraps any error, such as Ctrl-C.
            cause, _ = next(iter(error.failures.values()), (error, None))
            if isinstance(cause, CheckpointError) or not isinstance(cause, Exception):
                raise cause from None
            raise StorageError(f"cannot write {output}: {cause}; choose another folder") from None
        # The writer may report success after a failed write, so compare every tensor.
        written = DcpFolder(temporary)
        for theirs in sources:
            written_bits = _bits(written.tensor(theirs))
            expected_bits = _bits(read(theirs))
            if not torch.equal(written_bits, expected_bits):
                raise StorageError(
                    f"{output}: {theirs} differs after it was written; check the disk"
                )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class _Reader(DefaultSavePlanner):
    """Planner that reads each tensor when it is written. The state dict only contains meta tensors."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._of = read

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self._of(write_item.index.fqn)
