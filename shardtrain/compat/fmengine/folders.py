"""Write FMEngine's folders, which have one file per layer, and PEFT folders with the adapters of such folders."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain import models
from shardtrain.checkpoint import files
from shardtrain.checkpoint.torch_file import Stored, TorchFile
from shardtrain.compat import layer_files
from shardtrain.compat.layer_files import LATEST, LayerWeights, family_of
from shardtrain.hf import mapping, source
from shardtrain.hf.hub_model import recognise, translation_of
from shardtrain.hf.quantized_weights import open_weights
from shardtrain.hub_formats.config_json import CONFIG, read_json
from shardtrain.utils.errors import (
    CheckpointError,
    ConfigError,
    Problem,
    ShardtrainError,
    StorageError,
    require_new,
)

_STEP = "global_step001"
_MAX_SHARDS = 256


def write(folder: Path, output: Path, num_shards: int) -> tuple[int, int]:
    """Write a new FMEngine folder for ``num_shards`` model-parallel ranks. Return the number of tensors and layers.

    ``folder`` is a Hugging Face folder or an FMEngine folder. Memory holds one layer at a time. All
    tensors are read back and compared before ``output`` appears.

    Raises:
        ConfigError: ``output`` exists, or the sizes of the model are not divisible by ``num_shards``.
        CheckpointError: tensors are missing, surplus or have wrong shapes, or a file is damaged.
        StorageError: the folder cannot be written.
    """
    require_new(output)
    if not 1 <= num_shards <= _MAX_SHARDS:
        raise ConfigError(
            Problem(
                "--mp_world_size",
                num_shards,
                rule=f"must be between 1 and {_MAX_SHARDS}",
                fix="use 1",
                where="command line",
            )
        )
    family, num_layers = family_of(folder)
    model = recognise(folder)
    with open_weights(folder, model.block) as weights:
        if model.hub is None:
            raise ConfigError(
                f"{folder}: {model.config.class_name} is not supported with one file per layer"
            )
        translation = translation_of(models.find(model.name), model.config, str(folder))
        mapping.check(translation, weights, model.passed_over)

        # Source of each tensor to write. FMEngine always has a head, so write a tied head as well.
        sources = {name: name for name in translation.their_shapes()}
        if getattr(model.config, "tied_embeddings", False):
            sources[f"{family.head}weight"] = f"{family.embed}weight"

        # Decide which tensors each file contains: file number -> name in the file -> full name.
        layers: dict[int, dict[str, str]] = {number: {} for number in range(num_layers + 3)}
        for name, source_name in sources.items():
            number, name_in_file = family.place(name, num_layers)
            _require_divisible(name, weights.shape(source_name), family.split_dim(name), num_shards)
            layers[number][name_in_file] = name
        num_heads = getattr(model.config, "num_heads", 0) or 0
        num_kv_heads = getattr(model.config, "num_kv_heads", 0) or 0
        if num_heads % num_shards or num_kv_heads % num_shards:
            raise ConfigError(
                Problem(
                    "--mp_world_size",
                    num_shards,
                    rule=(
                        f"must divide the {num_heads} query heads and the {num_kv_heads} key-value heads"
                    ),
                    fix="use a common divisor",
                    where="command line",
                )
            )

        with files.new_folder(output) as temporary:
            step = temporary / _STEP
            step.mkdir()
            for number, names in layers.items():
                tensors = {
                    name_in_file: _read(weights, sources[name])
                    for name_in_file, name in names.items()
                }
                for shard in range(num_shards):
                    parts = {}
                    for name_in_file, tensor in tensors.items():
                        dim = family.split_dim(names[name_in_file])
                        parts[name_in_file] = _part(tensor, dim, shard, num_shards)
                    torch.save(
                        parts, step / f"layer_{number:02d}-model_{shard:02d}-model_states.pt"
                    )

            # FMEngine also expects the training state of each model-parallel rank. Write it without weights.
            for shard in range(num_shards):
                state: dict[str, Any] = {
                    "dp_world_size": 1,
                    "mp_world_size": num_shards,
                    "module": None,
                }
                state |= {"optimizer": None, "global_steps": 1, "skipped_steps": 1, "iteration": 1}
                torch.save(state, step / f"mp_rank_{shard:02d}_model_states.pt")
            (temporary / LATEST).write_text(_STEP)
            _copy_config(folder, temporary)

            # Verify the files before the folder gets its final name.
            with LayerWeights(temporary) as written:
                for name, source_name in sources.items():
                    if not torch.equal(
                        _bits(_read(written, name)), _bits(_read(weights, source_name))
                    ):
                        raise StorageError(
                            f"{output}: {name} differs from the written tensor; check the disk"
                        )
    return len(sources), num_layers


def _require_divisible(name: str, shape: tuple[int, ...], dim: int | None, num_shards: int) -> None:
    """Raise ConfigError if ranks cannot split a tensor evenly along ``dim``."""
    if dim is None or shape[dim] % num_shards == 0:
        return
    fix = "use a divisor"
    if "embed" in name or "lm_head" in name:
        next_multiple = -(-shape[dim] // num_shards) * num_shards
        fix = f"use a divisor, or import with --vocab_size {next_multiple} first"
    raise ConfigError(
        Problem(
            "--mp_world_size",
            num_shards,
            rule=f"must divide the size {shape[dim]} of {name}",
            fix=fix,
            where="command line",
        )
    )


@contextlib.contextmanager
def errors_name(folder: Path, temporary: Path) -> Iterator[None]:
    """Replace the path of a temporary copy with the user's ``folder`` in errors of the block."""
    try:
        yield
    except ShardtrainError as error:
        raise type(error)(str(error).replace(str(temporary), str(folder))) from error


@contextlib.contextmanager
def staged(folder: Path, base: Path | None, step: str, output: Path) -> Iterator[Path]:
    """Yield a temporary FMEngine folder that contains one step, config.json and the tokenizer.

    Args:
        folder: The user's FMEngine folder, or a step folder of one.
        base: Hugging Face folder of config.json and the tokenizer. None if ``folder`` contains them.
        step: Name of the step, or "latest".
        output: The temporary folder is next to this path. It contains links to the weights.

    Raises:
        CheckpointError: the step or config.json does not exist.
    """
    step_folder = _step(folder, step)

    # A step folder has no config.json. Its parent may have one.
    candidates = [base] if base else [folder, folder.parent]
    config_folder = next((path for path in candidates if (path / CONFIG).is_file()), candidates[0])
    if not (config_folder / CONFIG).is_file():
        hint = "set --base-model to the Hugging Face folder of the model"
        if base:
            hint = "--base-model must be a Hugging Face folder"
        raise CheckpointError(f"{config_folder / CONFIG} does not exist; {hint}")
    with files.new_folder(output, keep=False) as temporary, errors_name(folder, temporary):
        _copy_config(config_folder, temporary)
        (temporary / step_folder.name).symlink_to(step_folder.resolve(), target_is_directory=True)
        (temporary / LATEST).write_text(step_folder.name)

        # FMEngine adds missing tokens to the tokenizer, and a row of the embedding for each. The
        # config.json of the base model does not count these rows.
        fields = dict(read_json(temporary / CONFIG))
        family, _ = family_of(temporary)
        with LayerWeights(temporary) as weights:
            name = f"{family.embed}weight"
            rows = weights.shape(name)[0] if name in weights else 0
        vocab_size = fields.get("vocab_size")
        if isinstance(vocab_size, int) and rows > vocab_size:
            (temporary / CONFIG).write_text(json.dumps({**fields, "vocab_size": rows}, indent=2))
            print(
                f"vocab_size={rows} instead of {vocab_size}: FMEngine added {rows - vocab_size} rows"
            )
        yield temporary


def steps(folder: Path) -> list[str]:
    """Return the names of a folder's steps.

    Raises:
        CheckpointError: it has no steps.
    """
    names = [path.name for path in layer_files.steps_of(folder)]
    if not names:
        layer_files.step_of(folder)
    return names


def write_adapters(
    folder: Path, output: Path, step: str, alpha: float, base: str = ""
) -> tuple[int, int]:
    """Write the adapters of a step as a PEFT folder. Return their rank and their number.

    Args:
        folder: FMEngine folder.
        output: New PEFT folder.
        step: Name of the step, or "latest".
        alpha: lora_alpha of the training JSON, which the weight files do not contain.
        base: Base model for adapter_config.json.

    Raises:
        ConfigError: ``output`` exists.
        CheckpointError: the step contains no adapters, or adapters of several model-parallel ranks.
    """
    from safetensors.torch import save_file

    require_new(output)
    step_folder = _step(folder, step)

    # File 0 contains the embedding, so layer 0 is in file 1.
    tensors: dict[str, Tensor] = {}
    ranks: set[int] = set()
    for (number, shard), path in sorted(layer_files.files_of(step_folder).items()):
        opened = TorchFile(path)
        values = opened.value if isinstance(opened.value, dict) else {}
        for name, stored in values.items():
            if not isinstance(name, str) or not isinstance(stored, Stored):
                continue
            kind = name.rpartition(".")[2]
            if kind not in ("lora_A", "lora_B") or len(stored.shape) != 2:
                continue
            if shard:
                raise CheckpointError(
                    f"{step_folder}: adapters of several model-parallel ranks cannot be joined, "
                    "because each rank initialized its own lora_A; train with "
                    "--model_parallel_size 1"
                )
            # The rank is the dimension that both factors share.
            ranks.add(stored.shape[0 if kind == "lora_A" else 1])
            peft_name = f"base_model.model.model.layers.{number - 1}.{name}.weight"
            tensors[peft_name] = opened.tensor(stored)
    modules = sorted({name.split(".")[-3] for name in tensors})
    pairs = {name.rpartition(".lora_")[0] for name in tensors}
    if not tensors:
        raise CheckpointError(
            f"{step_folder} contains no adapters; use the folder of a run with LoRA"
        )
    if len(ranks) != 1 or len(tensors) != 2 * len(pairs):
        raise CheckpointError(
            f"{step_folder}: all adapters must have the same rank, and both lora_A and lora_B (ranks: {sorted(ranks)})"
        )
    (rank,) = ranks
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
    }
    with files.new_folder(output) as temporary:
        save_file(tensors, str(temporary / "adapter_model.safetensors"), {"format": "pt"})
        (temporary / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return rank, len(pairs)


def _step(folder: Path, step: str) -> Path:
    """Return the folder of a step by its name, or of "latest". Raise CheckpointError if it does not exist."""
    if step == "latest":
        return layer_files.step_of(folder)
    candidates = layer_files.steps_of(folder)
    for path in candidates:
        if path.name == step:
            return path
    available = ", ".join(path.name for path in candidates[:8]) or "none"
    raise CheckpointError(f"{folder} has no step {step!r} with files per layer; it has {available}")


def _copy_config(folder: Path, output: Path) -> None:
    """Copy config.json and the tokenizer's files at the top of a folder."""
    shutil.copyfile(folder / CONFIG, output / CONFIG)
    for name in source.of_folder(folder).files:
        if "/" not in name:
            shutil.copyfile(folder / name, output / name)


def _read(weights: Any, name: str) -> Tensor:
    """Read an unsharded tensor."""
    tensor: Tensor = weights.read(name, [slice(0, size) for size in weights.shape(name)])
    return tensor


def _part(tensor: Tensor, dim: int | None, shard: int, num_shards: int) -> Tensor:
    """Return a contiguous shard of a tensor along ``dim``, or the tensor itself if it is replicated."""
    if dim is None:
        return tensor.contiguous()
    size = tensor.shape[dim] // num_shards
    return tensor.narrow(dim, shard * size, size).clone(memory_format=torch.contiguous_format)


def _bits(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, because NaN is not equal to itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
