"""A checkpoint as a Hugging Face folder: weights, index, config and tokenizer, read back, and all of it or none."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain.checkpoint import files, manifest
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.manifest import Manifest
from shardtrain.errors import CheckpointError, ConfigError, StorageError
from shardtrain.hub import as_is, mapping
from shardtrain.hub.architecture import saved_config
from shardtrain.hub.mapping import Translation
from shardtrain.hub.model import CONFIG, translation_of
from shardtrain.hub.weights import INDEX, SINGLE, HubWeights

PREFIX = "model."
SHARD_BYTES = 5 * 10**9
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json", "merges.txt",
    "added_tokens.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Export:
    """What is written where."""

    checkpoint: Path
    output: Path
    module: Any
    config: Any
    """The model's Config."""
    dtype: str = "float32"
    shard_bytes: int = SHARD_BYTES
    tokenizer: Path | None = None
    """A folder whose tokenizer files are copied."""
    max_tokens: int = 0
    """What config.json says of positions; 0 says nothing."""


def export(wanted: Export) -> list[str]:
    """Write the folder, read it back, and give its files; when this returns every weight in it was compared.

    Memory stays below two tensors. What is written is renamed into place when it is whole and equal.

    Raises:
        ConfigError: when ``output`` exists, or the model has no form in this format.
        CheckpointError: when the checkpoint is damaged, or what was read back differs.
        StorageError: when the folder cannot be written.
    """
    if wanted.output.exists():
        raise ConfigError(f"{wanted.output} exists; give a new folder")
    stored = manifest.read(wanted.checkpoint)
    for file in stored.files:
        if damage := files.find_damage(wanted.checkpoint, file):
            raise CheckpointError(f"checkpoint {wanted.checkpoint}: {damage}; use another one")
    translation = translation_of(wanted.module, wanted.config, str(wanted.checkpoint))
    _check_stored(translation, stored, wanted.checkpoint)
    fields = config_fields(wanted)
    temporary = wanted.output.with_name(f"{wanted.output.name}.tmp-{secrets.token_hex(6)}")
    try:
        temporary.mkdir(parents=True)
        _write_weights(temporary, translation, stored, wanted)
        files.write_whole(temporary / CONFIG, (json.dumps(fields, indent=2) + "\n").encode())
        for name in _tokenizer_files(wanted.tokenizer):
            files.write_whole(temporary / name, (Path(str(wanted.tokenizer)) / name).read_bytes())
        _compare(temporary, translation, stored, wanted)
        files.sync_folder(temporary)
        files.rename(temporary, wanted.output)
    except OSError as error:
        raise StorageError(f"cannot write {error.filename}: {error.strerror}; choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(path.name for path in wanted.output.iterdir())


def config_fields(wanted: Export) -> dict[str, Any]:
    """The keys of ``config.json``; raises ConfigError for a model that the format cannot describe."""
    if as_is.is_as_is(wanted.module):
        return saved_config(wanted.config.path, wanted.config.class_name, wanted.dtype, wanted.config.num_labels)
    hub = wanted.module.HUB
    if getattr(wanted.config, "norm_type", "rmsnorm") not in ("rmsnorm", "fused_rmsnorm"):
        raise ConfigError(f"model.norm_type={wanted.config.norm_type!r} has no place in {hub.architecture}")
    said = hub.write(wanted.config)
    fields = {
        "architectures": [hub.architecture],
        "model_type": hub.model_type,
        **said,
        "torch_dtype": wanted.dtype,
        "use_cache": True,
    }
    if wanted.max_tokens:
        fields["max_position_embeddings"] = wanted.max_tokens
    return fields


def _check_stored(translation: Translation, stored: Manifest, checkpoint: Path) -> None:
    weights = {n.removeprefix(PREFIX): tuple(t.shape) for n, t in stored.tensors.items() if n.startswith(PREFIX)}
    wrong = sorted(n for n in weights.keys() | translation.shapes if weights.get(n) != translation.shapes.get(n))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"checkpoint {checkpoint} is not of the model configured: {len(wrong)} tensors differ, such as {name}: "
            f"{weights.get(name)} in place of {translation.shapes.get(name)}; give the run's own configuration"
        )


def _read_part(stored: Manifest, folder: Path, name: str, box: Sequence[slice], dtype: str) -> Tensor:
    found = tensor_files.read_part(stored, folder, PREFIX + name, box)
    return found.to(getattr(torch, dtype))


def _theirs(translation: Translation) -> dict[str, list[tuple[str, Any]]]:
    """Their tensors in the order in which a forward needs them: which pieces of ours make each."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for ours in translation.shapes:
        for piece in translation.pieces_of(ours):
            found.setdefault(piece.name, []).append((ours, piece))
    return found


def _write_weights(folder: Path, translation: Translation, stored: Manifest, wanted: Export) -> None:
    shapes, made_of = translation.their_shapes(), _theirs(translation)
    item = 4 if wanted.dtype == "float32" else 2
    shards: list[list[str]] = [[]]
    room = wanted.shard_bytes
    for name in made_of:
        size = math.prod(shapes[name]) * item
        if shards[-1] and size > room:
            shards.append([])
            room = wanted.shard_bytes
        shards[-1].append(name)
        room -= size
    total = sum(math.prod(shapes[name]) * item for name in made_of)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        header, begin = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            end = begin + math.prod(shapes[name]) * item
            header[name] = {"dtype": _TYPES[wanted.dtype], "shape": list(shapes[name]), "data_offsets": [begin, end]}  # type: ignore[dict-item]
            begin = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)

        def blocks(names: list[str] = names, text: bytes = text) -> Iterator[memoryview]:
            yield memoryview(len(text).to_bytes(8, "little") + text)
            for name in names:
                tensor = torch.empty(shapes[name], dtype=getattr(torch, wanted.dtype))
                for ours, piece in made_of[name]:
                    part = _read_part(stored, wanted.checkpoint, ours, piece.ours, wanted.dtype)
                    target = tensor[piece.theirs]
                    target.copy_(part.reshape(target.shape))
                yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)

        files.write_hashed(folder / file, blocks())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files.write_whole(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _compare(folder: Path, translation: Translation, stored: Manifest, wanted: Export) -> None:
    """Read the folder as an import would, and compare every weight, bit for bit."""
    with HubWeights(folder) as weights:
        mapping.check(translation, weights)
        for name, shape in translation.shapes.items():
            theirs = mapping.read_whole(name, translation, weights, getattr(torch, wanted.dtype))
            ours = _read_part(stored, wanted.checkpoint, name, [slice(0, size) for size in shape], wanted.dtype)
            if not torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8)):
                raise CheckpointError(f"{folder}: {name} was not read back as it was written; nothing was exported")


def _tokenizer_files(folder: Path | None) -> list[str]:
    return [name for name in TOKENIZER_FILES if folder is not None and (folder / name).is_file()]
