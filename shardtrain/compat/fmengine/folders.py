"""Write FMEngine's folders with one file per layer, and assemble folders from several places."""

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
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem, ShardtrainError, StorageError, require_new

_STEP = "global_step001"
_MAX_SHARDS = 256


def write(folder: Path, output: Path, num_shards: int) -> tuple[int, int]:
    """Write a Hugging Face folder, or one of a file per layer, for ``num_shards`` model-parallel ranks.

    Gives the number of tensors, and of layers. One layer at a time is in memory; all that was written is read back and
    compared before the folder has its name.

    Raises:
        ConfigError: when ``output`` exists, or the model cannot be divided so.
        CheckpointError: when tensors are missing, surplus or of other shapes, or a file is damaged.
        StorageError: when the folder cannot be written.
    """
    require_new(output)
    if not 1 <= num_shards <= _MAX_SHARDS:
        raise ConfigError(
            Problem("--mp_world_size", num_shards, f"must lie between 1 and {_MAX_SHARDS}", "use 1", "command line")
        )
    family, num_layers = family_of(folder)
    found = recognise(folder)
    with open_weights(folder, found.block) as weights:
        if found.hub is None:
            raise ConfigError(f"{folder} holds a {found.config.class_name}, which has no files per layer")

        # Assign each tensor to the file of its layer. A tied head is written too, because FMEngine
        # always has one.
        translation = translation_of(models.find(found.name), found.config, str(folder))
        mapping.check(translation, weights, found.passed_over)
        sources = {name: name for name in translation.their_shapes()}
        if getattr(found.config, "tied_embeddings", False):
            sources[f"{family.head}weight"] = f"{family.embed}weight"
        layers: dict[int, dict[str, str]] = {number: {} for number in range(num_layers + 3)}
        for name, where in sources.items():
            number, rest = family.place(name, num_layers)
            dim = family.divided(name)
            shape = weights.shape(where)
            if dim is not None and shape[dim] % num_shards:
                rule = f"does not divide the {shape[dim]} of {name}"
                fix = "use a divisor"
                if "embed" in name or "lm_head" in name:
                    more = -(-shape[dim] // num_shards) * num_shards
                    fix = f"use a divisor, or import with --vocab_size {more} first"
                raise ConfigError(Problem("--mp_world_size", num_shards, rule, fix, "command line"))
            layers[number][rest] = name
        heads = (getattr(found.config, "num_heads", 0), getattr(found.config, "num_kv_heads", 0))
        if any(count and count % num_shards for count in heads):
            rule = f"does not divide the {heads[0]} heads of queries, or the {heads[1]} of keys and values"
            raise ConfigError(Problem("--mp_world_size", num_shards, rule, "use a divisor of both", "command line"))

        # Write the files of a step, a state without weights for each model-parallel rank, and other
        # files.
        with files.new_folder(output) as temporary:
            step = temporary / _STEP
            step.mkdir()
            for number, names in layers.items():
                whole = {rest: _read(weights, sources[name]) for rest, name in names.items()}
                for shard in range(num_shards):
                    parts = {}
                    for rest, tensor in whole.items():
                        parts[rest] = _part(tensor, family.divided(names[rest]), shard, num_shards)
                    torch.save(parts, step / f"layer_{number:02d}-model_{shard:02d}-model_states.pt")
            for shard in range(num_shards):
                state: dict[str, Any] = {"dp_world_size": 1, "mp_world_size": num_shards, "module": None}
                state |= {"optimizer": None, "global_steps": 1, "skipped_steps": 1, "iteration": 1}
                torch.save(state, step / f"mp_rank_{shard:02d}_model_states.pt")
            (temporary / LATEST).write_text(_STEP)
            _copy_beside(folder, temporary)

            # Verify the files before the folder gets its final name.
            with LayerWeights(temporary) as written:
                for name, where in sources.items():
                    if not torch.equal(_bits(_read(written, name)), _bits(_read(weights, where))):
                        raise StorageError(f"{output}: {name} is not what was written; check the disk")
    return len(sources), num_layers


@contextlib.contextmanager
def errors_name(folder: Path, temporary: Path) -> Iterator[None]:
    """Within the block, name the user's ``folder`` in error messages instead of its temporary copy."""
    try:
        yield
    except ShardtrainError as error:
        raise type(error)(str(error).replace(str(temporary), str(folder))) from error


@contextlib.contextmanager
def staged(folder: Path, base: Path | None, step: str, beside: Path) -> Iterator[Path]:
    """Within the block, provide a folder of one step, with config.json and tokenizer of ``base`` if given.

    ``step`` is "latest" or the name of one. It is made next to ``beside``, and holds links to the weights.

    Raises:
        CheckpointError: when there is no such step, or no config.json.
    """
    where = _step(folder, step)
    places = [base] if base else [folder, folder.parent]  # a step's own folder has none
    described = next((place for place in places if (place / CONFIG).is_file()), places[0])
    if not (described / CONFIG).is_file():
        hint = (
            "it is not a Hugging Face folder" if base else "name the Hugging Face folder of its model with --base-model"
        )
        raise CheckpointError(f"{described / CONFIG} is missing: {hint}")
    with files.new_folder(beside, keep=False) as temporary, errors_name(folder, temporary):
        _copy_beside(described, temporary)
        (temporary / where.name).symlink_to(where.resolve(), target_is_directory=True)
        (temporary / LATEST).write_text(where.name)

        # FMEngine adds missing tokens and embedding rows for them, which config.json of the base
        # does not include.
        facts = dict(read_json(temporary / CONFIG))
        family, _ = family_of(temporary)
        with LayerWeights(temporary) as weights:
            name = f"{family.embed}weight"
            rows = weights.shape(name)[0] if name in weights else 0
        known = facts.get("vocab_size")
        if isinstance(known, int) and rows > known:
            (temporary / CONFIG).write_text(json.dumps({**facts, "vocab_size": rows}, indent=2))
            print(f"vocab_size is {rows} in place of {known}: FMEngine has added {rows - known} rows")
        yield temporary


def steps(folder: Path) -> list[str]:
    """Return the names of all steps of a folder.

    Raises:
        CheckpointError: it has no steps.
    """
    found = [path.name for path in layer_files.steps_of(folder)]
    if not found:
        layer_files.step_of(folder)
    return found


def write_adapters(folder: Path, output: Path, step: str, alpha: float, base: str = "") -> tuple[int, int]:
    """Write the adapters of a step as a PEFT folder. Return their rank and their number.

    ``alpha`` is lora_alpha of the JSON that they were trained with, which the files do not hold. ``base`` is the model
    that adapter_config.json names.

    Raises:
        ConfigError: when ``output`` exists.
        CheckpointError: when the step holds none, or they are divided among model-parallel ranks.
    """
    from safetensors.torch import save_file

    require_new(output)
    where = _step(folder, step)

    # File 0 is the embedding, and the first layer is in file 1.
    tensors: dict[str, Tensor] = {}
    ranks: set[int] = set()
    for (number, shard), path in sorted(layer_files.files_of(where).items()):
        opened = TorchFile(path)
        values = opened.value if isinstance(opened.value, dict) else {}
        for name, stored in values.items():
            kind = name.rpartition(".")[2] if isinstance(name, str) else ""
            if not isinstance(stored, Stored) or kind not in ("lora_A", "lora_B") or len(stored.shape) != 2:
                continue
            if shard:
                raise CheckpointError(
                    f"{where}: adapters of several model-parallel ranks cannot be put together: each rank drew lora_A "
                    "for itself; train them with --model_parallel_size 1"
                )
            ranks.add(stored.shape[0 if kind == "lora_A" else 1])
            tensors[f"base_model.model.model.layers.{number - 1}.{name}.weight"] = opened.tensor(stored)
    modules = sorted({name.split(".")[-3] for name in tensors})
    pairs = {name.rpartition(".lora_")[0] for name in tensors}
    if not tensors or len(ranks) != 1 or len(tensors) != 2 * len(pairs):
        what = "no adapters" if not tensors else f"adapters of ranks {sorted(ranks)}, or halves of some"
        raise CheckpointError(f"{where} holds {what}; name a folder that was trained with a lora block")
    (rank,) = ranks
    fields = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True},
        **{"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": modules, "bias": "none"},
    }
    with files.new_folder(output) as temporary:
        save_file(tensors, str(temporary / "adapter_model.safetensors"), {"format": "pt"})
        (temporary / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return rank, len(pairs)


def _step(folder: Path, step: str) -> Path:
    if step == "latest":
        return layer_files.step_of(folder)
    found = next((path for path in layer_files.steps_of(folder) if path.name == step), None)
    if found is None:
        there = ", ".join(path.name for path in layer_files.steps_of(folder)[:8]) or "none"
        raise CheckpointError(f"{folder} has no step {step!r} with files per layer; there is {there}")
    return found


def _copy_beside(folder: Path, output: Path) -> None:
    shutil.copyfile(folder / CONFIG, output / CONFIG)
    for name in source.of_folder(folder).files:
        if "/" not in name:
            shutil.copyfile(folder / name, output / name)


def _read(weights: Any, name: str) -> Tensor:
    tensor: Tensor = weights.read(name, [slice(0, size) for size in weights.shape(name)])
    return tensor


def _part(tensor: Tensor, dim: int | None, shard: int, num_shards: int) -> Tensor:
    if dim is None:
        return tensor.contiguous()
    size = tensor.shape[dim] // num_shards
    return tensor.narrow(dim, shard * size, size).clone(memory_format=torch.contiguous_format)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
