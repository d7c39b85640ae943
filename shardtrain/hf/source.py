"""Files of a model other than its weights, from a Hugging Face folder or from a checkpoint of an import or merge.

These are config.json, the tokenizer, the chat template and generation settings. An export copies them. A
run's configuration contains the path of the folder. ``import`` and ``merge`` store the files in the new
checkpoint, as one additional file that its manifest lists.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.manifest import MANIFEST, WEIGHTS_PREFIX, Manifest
from shardtrain.hf.bin_weights import BinWeights
from shardtrain.hf.mapping import Translation
from shardtrain.hf.quantized_weights import open_weights
from shardtrain.hf.weights import BIN, BIN_INDEX, HubWeights, has_safetensors, layer_file_reader
from shardtrain.hub_formats.config_json import CONFIG, MAX_JSON_BYTES, block_of, read_json
from shardtrain.utils import atomic_io, bounded_reads, checked_json, storage_errors, temporary
from shardtrain.utils.errors import CheckpointError, ConfigError

FACT = "hub_files"
FILE = "hub-files.bin"
NAMES = "hub_names"
TOKENIZERS = re.compile(
    r"tokenizer.*\.(json|model)|[\w-]*\.(model|tiktoken)|tekken\.json|vocab\.(json|txt)|merges\.txt"
)
"""Names of tokenizer files. Any one of them makes a tokenizer, except tokenizer_config.json."""
_TRAVEL = re.compile(
    TOKENIZERS.pattern
    + r"|special_tokens_map\.json|added_tokens\.json|(?!\.)[\w.-]*\.jinja|chat_template\.json"
    r"|(additional_)?chat_templates/(?!\.)[\w.-]+\.jinja|(generation|preprocessor|processor|sentence_bert)_config\.json"
    r"|modules\.json|(LICENSE|NOTICE)[\w.-]*|USE_POLICY\.md"
)
"""Names of a model's files other than config.json and weights. A checkpoint with other names is rejected."""


@dataclass(frozen=True)
class FolderSource:
    """Files of a model, from a folder or from a checkpoint.

    Attributes:
        where: The folder or checkpoint.
        config: Content of config.json. Empty if it does not exist.
        files: Name of each other file -> path, offset and size in bytes.
        rewritten: New content of some of these files.
    """

    where: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, tuple[Path, int, int]] = field(default_factory=dict)
    rewritten: Mapping[str, bytes] = field(default_factory=dict)

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: the file cannot be read.
        """
        if name in self.rewritten:
            return self.rewritten[name]
        path, begin, size = self.files[name]
        if size > MAX_JSON_BYTES:
            raise OSError(errno.EFBIG, f"is larger than {MAX_JSON_BYTES} bytes", str(path))
        with open(path, "rb", opener=atomic_io.without_waiting) as file:
            file.seek(begin)
            return file.read(size)

    @property
    def has_tokenizer(self) -> bool:
        """True if the files include a tokenizer."""
        tokenizer_files = filter(TOKENIZERS.fullmatch, self.files)
        return any(name != "tokenizer_config.json" for name in tokenizer_files)


def of_folder(folder: Path) -> FolderSource:
    """Return the files of a folder. Weights and config.json are optional.

    Raises:
        CheckpointError: config.json or a weights file is damaged.
    """
    config = {}
    if bounded_reads.is_present(folder / CONFIG):
        config = dict(read_json(folder / CONFIG))
    # DeepSeek's multi-token prediction layer follows the last layer. It is not imported, so an
    # export must not have it.
    if config.get("num_nextn_predict_layers") and has_weights(folder):
        with open_weights(folder, None) as weights:
            first = f"model.layers.{config.get('num_hidden_layers')}."
            if any(name.startswith(first) for name in weights.names()):
                config["num_nextn_predict_layers"] = 0
    # Copies of the model get only files of these kinds, such as tokenizers and licenses.
    files = {}
    paths: list[Path] = []
    if folder.is_dir():
        paths = sorted(folder.rglob("*"))
    for path in paths:
        name = path.relative_to(folder).as_posix()
        # A folder of licenses is no file of the model.
        if not _TRAVEL.fullmatch(name) or (path.is_dir() and not path.suffix):
            continue
        # Without its chat template or end tokens, the model would answer differently.
        try:
            descriptor = atomic_io.without_waiting(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}; copy or download it again"
            ) from None
        files[name] = (path, 0, os.fstat(descriptor).st_size)
        os.close(descriptor)
    return FolderSource(folder, config, files)


def of_checkpoint(folder: Path, stored: Manifest) -> FolderSource | None:
    """Return the Hugging Face files in a checkpoint, or None if it has none.

    Raises:
        CheckpointError: the list of files or config.json is invalid.
    """
    places = stored.facts.get(FACT)
    file = next((file for file in stored.files if file.name == FILE), None)
    if not isinstance(places, dict) or file is None:
        return None
    files: dict[str, tuple[Path, int, int]] = {}
    # Names and offsets are untrusted. An export would write a file outside the
    # output folder if its name were a path.
    for name, place in places.items():
        is_pair = isinstance(place, list) and len(place) == 2
        is_place = is_pair and all(type(number) is int and number >= 0 for number in place)
        is_name = name == CONFIG or _TRAVEL.fullmatch(name)
        if not is_place or sum(place) > file.bytes or not is_name:
            raise CheckpointError(
                f"checkpoint {folder}: its entry {name[:100]!r} is not a valid file; use another checkpoint",
            )
        files[name] = (folder / FILE, *place)
    # config.json is an attribute of the source, not one of its files.
    source = FolderSource(folder, {}, dict(files))
    try:
        config = {}
        if CONFIG in files:
            config = checked_json.parse(source.read(CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {folder}: its {CONFIG} cannot be read ({error}); use another checkpoint",
        ) from None
    files.pop(CONFIG, None)
    if not isinstance(config, dict):
        config = {}
    return FolderSource(folder, config, files)


def of_path(path: Path) -> FolderSource | None:
    """Return the files of a checkpoint or a folder, or None if the path is neither or the checkpoint has none."""
    if (path / MANIFEST).is_file():
        return of_checkpoint(path, manifest.read(path))
    if path.is_dir():
        return of_folder(path)
    return None


def unpacked(source: FolderSource) -> Path:
    """Write the files of a source to a temporary folder and return it. It is deleted when the process exits."""
    folder = temporary.make("hub")
    atexit.register(temporary.remove, folder)
    for name in source.files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(source.read(name))
    if source.config:
        (folder / CONFIG).write_text(json.dumps(source.config))
    return folder


def noted_model(folder: Path, stored: Manifest) -> dict[str, Any] | None:
    """Return the model description that ``import`` or ``merge`` stored in a checkpoint, or None in
    a run's checkpoint.

    Raises:
        CheckpointError: the description is invalid, or names a model file. Paths
            in an artifact are never followed.
    """
    noted = stored.facts.get("model")
    if not isinstance(noted, dict):
        return None
    # Facts are not checked when the manifest is read.
    name = noted.get("name")
    flavor = noted.get("flavor")
    overrides = noted.get("overrides")
    if not isinstance(name, str) or not isinstance(flavor, str):
        raise CheckpointError(
            f"checkpoint {folder}: its description of the model is invalid; name the run's TOML with --config"
        )
    if name.endswith(".py"):
        raise CheckpointError(
            f"checkpoint {folder} refers to a custom model file; name the run's TOML with --config",
        )
    if not isinstance(overrides, dict):
        overrides = {}
    overrides = dict(overrides)
    # transformers reads its config.json from a folder, so write the stored one to a temporary folder.
    if name == "transformers":
        source = of_checkpoint(folder, stored)
        if source is None or not source.config:
            raise CheckpointError(
                f"checkpoint {folder} has no {CONFIG} to describe its model; name the run's TOML with --config"
            )
        overrides["path"] = str(unpacked(source))
    labels = noted.get("labels")
    if not isinstance(labels, list):
        labels = []
    labels = [str(label) for label in labels]
    return {**noted, "name": name, "flavor": flavor, "overrides": overrides, "labels": labels}


def packed(source: FolderSource) -> tuple[bytes, dict[str, list[int]]]:
    """Concatenate all files of a source, starting with its config.json.

    Returns:
        The bytes, and for each file name a list of its offset and size.

    Raises:
        ConfigError: the files are larger than ``MAX_JSON_BYTES``.
        StorageError: a file cannot be read.
    """
    # The files are concatenated in memory, so check their sizes first.
    total_bytes = sum(size for _, _, size in source.files.values())
    if total_bytes > MAX_JSON_BYTES:
        raise ConfigError(
            f"{source.where} has more than {MAX_JSON_BYTES} bytes of files other than weights; remove unrelated files"
        )
    contents: dict[str, bytes] = {}
    if source.config:
        text = json.dumps(source.config, indent=2) + "\n"
        contents[CONFIG] = text.encode()
    for name in source.files:
        try:
            contents.setdefault(name, source.read(name))
        except OSError as error:
            raise storage_errors.cannot("read", source.where / name, error) from None
    data = bytearray()
    places = {}
    for name, content in contents.items():
        places[name] = [len(data), len(content)]
        data += content
    return bytes(data), places


def has_weights(folder: Path) -> bool:
    """True if a folder has files of weights in a supported format. Only names are checked."""
    return has_safetensors(folder) or layer_file_reader(folder) is not None


def dtypes_of(path: Path, translation: Translation) -> dict[str, str]:
    """Return the dtype of each of our tensors in a checkpoint or a folder, or {} if the folder has no weights.

    Only the manifest or file headers are read.
    """
    # A checkpoint of this package has our names.
    if (path / MANIFEST).is_file():
        stored = manifest.read(path).tensors
        dtypes = {}
        for name in translation.shapes:
            key = WEIGHTS_PREFIX + name
            if key in stored:
                dtypes[name] = stored[key].dtype
        return dtypes
    if has_weights(path):
        # Quantized weights are read in their dequantized dtype.
        block = block_of(read_json(path / CONFIG), str(path / CONFIG))
        with open_weights(path, block, translation.hub.prefix) as weights:
            return dtypes_in(weights, translation)
    if (path / BIN).is_file() or (path / BIN_INDEX).is_file():
        with BinWeights(path) as weights:
            return dtypes_in(weights, translation)
    return {}


def dtypes_in(weights: HubWeights, translation: Translation) -> dict[str, str]:
    """Return the dtype of each of our tensors in opened weights."""
    dtypes = {}
    for name in translation.sources:
        # Our tensor may consist of several pieces. All have the dtype of the first.
        first_piece = next(iter(translation.pieces_of(name)))
        if first_piece.name in weights:
            dtype = weights.dtype(first_piece.name)
            dtypes[name] = str(dtype).removeprefix("torch.")
    return dtypes
