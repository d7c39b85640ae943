"""A checkpoint as a Hugging Face folder: weights, index, config and tokenizer, read back, and all of it or none."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain.checkpoint import files, manifest
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.background import pieces
from shardtrain.checkpoint.manifest import ITEM_BYTES, WEIGHTS_PREFIX, Manifest, StoredFile
from shardtrain.checkpoint.safetensors_header import header
from shardtrain.errors import CheckpointError, ConfigError, StorageError
from shardtrain.hub import as_is, mapping
from shardtrain.hub.architecture import saved_config
from shardtrain.hub.mapping import Translation
from shardtrain.hub.model import CONFIG, translation_of
from shardtrain.hub.weights import INDEX, SINGLE, HubWeights

SHARD_BYTES = 5 * 10**9
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


class Writer:
    """Writes the files of one export; every file on its own, so that ranks can share them out."""

    def __init__(self, wanted: Export) -> None:
        """Read what the checkpoint holds, and decide what goes into which file.

        Raises:
            ConfigError: when the model has no form in this format.
            CheckpointError: when the checkpoint cannot be read, or is of another model.
        """
        self.wanted, self.stored = wanted, manifest.read(wanted.checkpoint)
        self.translation = translation_of(wanted.module, wanted.config, str(wanted.checkpoint))
        _check_stored(self.translation, self.stored, wanted.checkpoint)
        self._fields = config_fields(wanted)
        self._shapes = self.translation.their_shapes()
        self._made_of = _theirs(self.translation)
        self.files = self._share_out()
        """Which of their tensors each file of weights holds."""

    def check_source(self, part: int = 0, parts: int = 1) -> None:
        """Read one part of ``parts`` of the checkpoint's files; raises CheckpointError where bytes have changed."""
        for file in self.stored.files[part::parts]:
            if damage := files.find_damage(self.wanted.checkpoint, file):
                raise CheckpointError(f"checkpoint {self.wanted.checkpoint}: {damage}; use another one")

    def write_weights(
        self, folder: Path, file: str, go_on: Callable[[], None] = lambda: None, wait_seconds: float = 0.0
    ) -> StoredFile:
        """Write one file of weights; ``go_on`` is called between pieces, and may raise. Raises OSError.

        ``wait_seconds`` is how long the folder, which another node may have made, may take to be seen from here.
        """
        names, dtype = self.files[file], self.wanted.dtype

        def blocks() -> Iterator[memoryview]:
            yield header({name: (dtype, self._shapes[name]) for name in names})
            for name in names:
                for box in mapping.row_blocks(self._shapes[name]):
                    block = self._read_theirs(name, box)
                    yield from pieces(memoryview(block.reshape(-1).view(torch.uint8).numpy().data), go_on)

        return files.write_hashed(folder / file, blocks(), wait_seconds)

    def write_rest(self, folder: Path) -> None:
        """Write all but the weights: index, config.json and the tokenizer's files. Raises OSError."""
        if len(self.files) > 1:
            sizes = (math.prod(self._shapes[name]) * self._item for names in self.files.values() for name in names)
            weight_map = {name: file for file, names in self.files.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
            files.write_whole(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        files.write_whole(folder / CONFIG, (json.dumps(self._fields, indent=2) + "\n").encode())
        for path in tokenizer_files(self.wanted.tokenizer):
            files.write_whole(folder / path.name, path.read_bytes())

    def read_part(self, name: str, box: Sequence[slice]) -> Tensor:
        """A box of one of our tensors, rounded to the exported type."""
        found = tensor_files.read_part(self.stored, self.wanted.checkpoint, WEIGHTS_PREFIX + name, box)
        return found.to(getattr(torch, self.wanted.dtype))

    def _read_theirs(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Some rows of one of their tensors."""
        if not box:
            return self.read_part(self._made_of[name][0][0], ())
        rows, rest = box[0], box[1:]
        block = torch.empty([part.stop - part.start for part in box], dtype=getattr(torch, self.wanted.dtype))
        for ours, piece in self._made_of[name]:
            whole, experts = piece.theirs[0], len(piece.ours) - len(piece.theirs)
            begin, end = max(rows.start, whole.start), min(rows.stop, whole.stop)
            if begin >= end:
                continue
            shift = piece.ours[experts].start - whole.start
            wanted = (*piece.ours[:experts], slice(begin + shift, end + shift), *piece.ours[experts + 1 :])
            target = block[(slice(begin - rows.start, end - rows.start), *rest)]
            target.copy_(self.read_part(ours, wanted).reshape(target.shape))
        return block

    @property
    def _item(self) -> int:
        return ITEM_BYTES[self.wanted.dtype]

    def _share_out(self) -> dict[str, list[str]]:
        shards: list[list[str]] = [[]]
        room = self.wanted.shard_bytes
        for name in self._made_of:
            size = math.prod(self._shapes[name]) * self._item
            if shards[-1] and size > room:
                shards.append([])
                room = self.wanted.shard_bytes
            shards[-1].append(name)
            room -= size
        if len(shards) == 1:
            return {SINGLE: shards[0]}
        return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def export(wanted: Export) -> list[str]:
    """Write the folder, read it back, and give its files; when this returns every weight in it was compared.

    A block of rows is in memory at a time. What is written is renamed into place when it is whole and equal.

    Raises:
        ConfigError: when ``output`` exists, or the model has no form in this format.
        CheckpointError: when the checkpoint is damaged, or what was read back differs.
        StorageError: when the folder cannot be written.
    """
    if wanted.output.exists():
        raise ConfigError(f"{wanted.output} exists; give a new folder")
    writer = Writer(wanted)
    writer.check_source()
    temporary = wanted.output.with_name(f"{wanted.output.name}.tmp-{secrets.token_hex(6)}")
    try:
        temporary.mkdir(parents=True)
        for file in writer.files:
            writer.write_weights(temporary, file)
        writer.write_rest(temporary)
        _compare(temporary, writer)
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
    ours = {name: tuple(t.shape) for name, t in stored.tensors.items() if name.startswith(WEIGHTS_PREFIX)}
    weights = {name.removeprefix(WEIGHTS_PREFIX): shape for name, shape in ours.items()}
    wrong = sorted(n for n in weights.keys() | translation.shapes if weights.get(n) != translation.shapes.get(n))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"checkpoint {checkpoint} is not of the model configured: {len(wrong)} tensors differ, such as {name}: "
            f"{weights.get(name)} in place of {translation.shapes.get(name)}; give the run's own configuration"
        )


def _theirs(translation: Translation) -> dict[str, list[tuple[str, Any]]]:
    """Their tensors in the order in which a forward needs them: which pieces of ours make each."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for ours in translation.shapes:
        for piece in translation.pieces_of(ours):
            found.setdefault(piece.name, []).append((ours, piece))
    return found


def _compare(folder: Path, writer: Writer) -> None:
    """Read the folder as an import would, and compare every weight, bit for bit."""
    translation, dtype = writer.translation, getattr(torch, writer.wanted.dtype)
    with HubWeights(folder) as weights:
        mapping.check(translation, weights)
        for name, shape in translation.shapes.items():
            for box in mapping.row_blocks(shape):
                theirs, ours = mapping.read_part(name, box, translation, weights, dtype), writer.read_part(name, box)
                if not torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8)):
                    raise CheckpointError(f"{folder}: {name} was not read back as it was written; nothing was exported")


def tokenizer_files(folder: Path | None) -> list[Path]:
    """The files of a folder that make a tokenizer; none without a folder."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()] if folder is not None else []
