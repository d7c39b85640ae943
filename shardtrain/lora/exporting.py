"""The adapters of a checkpoint as a folder that PEFT opens: read back, and all of it or none."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from shardtrain import models
from shardtrain.checkpoint import files
from shardtrain.errors import CheckpointError, ConfigError, StorageError
from shardtrain.lora import peft
from shardtrain.lora.merging import Adapters
from shardtrain.lora.targets import their_names


def export(
    checkpoint: Path, output: Path, module: ModuleType, shape: Any, base: str, dtype: str = "float32"
) -> list[str]:
    """Write the folder, read it back, and give its files. ``base`` is what it says of the model that it is for.

    Raises:
        ConfigError: when ``output`` exists, or an adapter has no form in this format.
        CheckpointError: when the checkpoint is damaged or holds no adapters.
        StorageError: when the folder cannot be written.
    """
    from safetensors.torch import save

    if output.exists():
        raise ConfigError(f"{output} exists; give a new folder")
    adapters = Adapters(checkpoint)
    names = peft.names_of(adapters.spec, module, shape)
    model = models.build(module, shape)
    linears = [path for path, m in model.named_modules() if type(m) is torch.nn.Linear]
    all_theirs = their_names(linears, module, shape)
    theirs = {path: all_theirs[path] for path in adapters.spec.modules}
    fields = peft.config_fields(adapters.spec, theirs, list(all_theirs.values()), base)
    tensors = {their: adapters.read(ours).to(getattr(torch, dtype)).contiguous() for ours, their in names.items()}
    temporary = output.with_name(f"{output.name}.tmp-{secrets.token_hex(6)}")
    try:
        temporary.mkdir(parents=True)
        files.write_whole(temporary / peft.WEIGHTS, save(tensors, metadata={"format": "pt"}))
        files.write_whole(temporary / peft.CONFIG, (json.dumps(fields, indent=2) + "\n").encode())
        found = peft.PeftFolder(temporary, module, shape)
        again = {ours: torch.zeros_like(tensors[their]) for ours, their in names.items()}
        found.fill(again)
        if not all(torch.equal(again[ours], tensors[their]) for ours, their in names.items()):
            raise CheckpointError(f"{temporary} was not read back as it was written; nothing was exported")
        files.sync_folder(temporary)
        files.rename(temporary, output)
    except OSError as error:
        raise StorageError(f"cannot write {error.filename}: {error.strerror}; choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(path.name for path in output.iterdir())
