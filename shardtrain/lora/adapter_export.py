"""Export of a checkpoint's adapters to a PEFT folder. The export is verified and atomic."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from shardtrain import models
from shardtrain.checkpoint import files
from shardtrain.lora import peft
from shardtrain.lora.adapter_targets import linears_of, their_names
from shardtrain.lora.merging import Adapters
from shardtrain.ops.tied import tied_names
from shardtrain.utils.errors import CheckpointError, require_new


def export(
    checkpoint: Path,
    output: Path,
    module: ModuleType,
    shape: Any,
    base: str,
    dtype: str = "float32",
    use_ema: bool = False,
) -> list[str]:
    """Write the folder, read it back, and return the names of its files.

    Args:
        base: Name or path of the base model, for ``base_model_name_or_path``.
        use_ema: Export the averages of the adapters.

    Raises:
        ConfigError: ``output`` exists, or PEFT's format cannot represent an adapter.
        CheckpointError: the checkpoint is damaged or has no adapters.
        StorageError: the folder cannot be written.
    """
    from safetensors.torch import save

    require_new(output)
    adapters = Adapters(checkpoint, use_ema)
    labels = adapters.num_labels(module)
    names = peft.names_of(adapters.spec, module, shape, labels)

    # Compute the content of PEFT's files: the configuration, and each factor in PEFT's layout.
    model = models.build(module, shape, labels)
    linears = list(their_names(linears_of(model), module, shape).values())
    fields = peft.config_fields(adapters.spec, names, linears, base)
    # A checkpoint contains a tied tensor once, under the first of its names.
    first_of_tied = {}
    for group in tied_names(model):
        for name in group:
            first_of_tied[name] = group[0]
    torch_dtype = getattr(torch, dtype)
    tensors = {}
    peft_tensors = {}
    for name, peft_name in names.tensors.items():
        stored_name = first_of_tied.get(name, name)
        tensor = adapters.read(stored_name).to(torch_dtype)
        tensors[name] = tensor
        peft_tensors[peft_name] = names.theirs(name, tensor).contiguous().clone()

    # Write to a temporary folder, read it back and compare. Rename it to ``output`` only if it is equal.
    with files.new_folder(output) as temporary:
        config_text = json.dumps(fields, indent=2) + "\n"
        files.write_durable(temporary / peft.WEIGHTS, save(peft_tensors, metadata={"format": "pt"}))
        files.write_durable(temporary / peft.CONFIG, config_text.encode())
        written = peft.PeftFolder(temporary, module, shape, labels)
        read_back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        written.fill(read_back)
        for name, tensor in tensors.items():
            if not torch.equal(read_back[name], tensor):
                raise CheckpointError(
                    f"{temporary} differs from the written data when read back, so nothing was exported; check the disk"
                )
    return sorted(path.name for path in output.iterdir())
