"""Export of a checkpoint to a Hugging Face folder: weights, index, config.json and tokenizer.

Verified and atomic.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain import models
from shardtrain.checkpoint import files, manifest, tensors
from shardtrain.checkpoint.async_save import pieces
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX, Manifest, TensorFile
from shardtrain.checkpoint.written_header import header
from shardtrain.facts.dtypes import COMPUTE_DTYPES, ITEM_BYTES
from shardtrain.hf import as_is, mapping, source
from shardtrain.hf.generation_config import GENERATION, TOKENS, with_tokens
from shardtrain.hf.hub_model import hub_of, translation_of
from shardtrain.hf.mapping import Translation
from shardtrain.hf.quantized_weights import open_weights
from shardtrain.hf.source import TOKENIZERS, FolderSource
from shardtrain.hf.weights import INDEX, SINGLE, HubWeights
from shardtrain.hub_formats.config_json import CONFIG, read_json
from shardtrain.hub_formats.format import FREE, Fields, HubFormat
from shardtrain.models.architecture import saved_config
from shardtrain.utils.errors import CheckpointError, ConfigError, require_new

SHARD_BYTES = 5 * 10**9
_ROTARY = {"rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct"}
"""Fields of config.json for rotary positions."""
_DTYPE_KEYS = {"dtype", "torch_dtype"}
_OF_TOKENIZERS = re.compile(
    rf"{TOKENIZERS.pattern}|special_tokens_map\.json|added_tokens\.json|chat_template\..*|.*chat_templates/.*"
)


@dataclasses.dataclass(frozen=True)
class Export:
    """Options of an export.

    Attributes:
        config: The model's Config.
        dtype: dtype of all weights. If empty, each tensor keeps its dtype in ``source`` or in the checkpoint.
        shard_bytes: Maximum size of a weights file. A larger tensor gets a separate file.
        source: Origin of the model. Its files are copied, and its config.json
            is kept except for changed fields.
        tokenizer: Folder whose tokenizer files replace those of ``source``.
        max_tokens: Value of ``max_position_embeddings`` in config.json without a ``source``.
            0 omits the key.
        tokens: Special tokens of the run, see ``generation_config.trained_tokens``.
            Empty keeps those of ``source``.
        labels: Labels of a classification head that replaces the language model head.
        use_ema: Export the averages of the trained weights.
        drop_mtp: Leave out the layers of multi-token prediction.
    """

    checkpoint: Path
    output: Path
    module: Any
    config: Any
    dtype: str = ""
    shard_bytes: int = SHARD_BYTES
    source: FolderSource | None = None
    tokenizer: Path | None = None
    max_tokens: int = 0
    tokens: Mapping[str, list[int]] = dataclasses.field(default_factory=dict)
    labels: Sequence[str] = ()
    use_ema: bool = False
    drop_mtp: bool = False

    def sources(self) -> list[FolderSource]:
        """Return the sources of files other than weights, in descending priority."""
        sources = []
        if self.tokenizer is not None:
            sources.append(source.of_folder(self.tokenizer))
        if self.source is not None:
            sources.append(self.source)
        return sources


class Writer:
    """Writer of one export's files. Each file is independent, so ranks can write different files.

    Attributes:
        files: Tensor names of each weights file.
        notice: Message about special tokens that the export changes, or "".
    """

    def __init__(self, wanted: Export) -> None:
        """Read the manifest of the checkpoint, and assign tensors to files.

        Raises:
            ConfigError: the Hugging Face format cannot represent the model.
            CheckpointError: the checkpoint cannot be read, or belongs to another model.
        """
        if wanted.drop_mtp:
            wanted = dataclasses.replace(wanted, config=models.without_mtp(wanted.config))
        self.wanted = wanted
        self.stored = manifest.read(wanted.checkpoint)
        if wanted.use_ema:
            self.stored = self.stored.with_averages(wanted.checkpoint)
        self.translation = translation_of(
            wanted.module,
            wanted.config,
            str(wanted.checkpoint),
            len(wanted.labels),
        )
        if as_is.is_as_is(wanted.module) and wanted.source is not None:
            self.translation = _named_as_before(self.translation, wanted)
        _check_stored(self.translation, self.stored, wanted)
        # Before any file is written: this raises if config.json cannot describe the model.
        fields = config_fields(wanted)
        self._shapes = self.translation.their_shapes()

        # Map each exported tensor to the pieces of our tensors of which it consists,
        # in the order of a forward pass.
        self._made_of: dict[str, list[tuple[str, Any]]] = {}
        for ours in self.translation.shapes:
            for piece in self.translation.pieces_of(ours):
                self._made_of.setdefault(piece.name, []).append((ours, piece))
        # Some formats store one of our tensors under a second name, too.
        if not as_is.is_as_is(wanted.module):
            for copy, ours in self.translation.hub.copies(wanted.config).items():
                parts = [(ours, piece) for piece in self.translation.pieces_of(ours)]
                self._made_of[copy] = parts
                self._shapes[copy] = self.translation.shapes[ours]

        self._types = self._choose_dtypes()
        if wanted.source is None:
            fields["torch_dtype"] = next(iter(self._types.values()))
        self._files = _copied_files(wanted)

        # Write the special tokens of the run to config.json and generation_config.json.
        described = FolderSource(wanted.output, config=fields)
        if GENERATION in self._files:
            origin = self._files[GENERATION]
            described = dataclasses.replace(
                origin,
                config=fields,
                files={GENERATION: origin.files[GENERATION]},
            )
        self._described, changes = with_tokens(described, wanted.tokens)
        for name in self._described.files:
            self._files[name] = self._described
        self.notice = ""
        if changes:
            description = "; ".join(changes)
            self.notice = f"special tokens are set to those of training: {description}"
        self.files = self._assign_to_files()

    def _choose_dtypes(self) -> dict[str, str]:
        """Return the dtype of each exported tensor.

        It is the first of these that exists: the option, the dtype in the weights of the source,
        in its config.json, or in the checkpoint.
        """
        if self.wanted.dtype:
            return dict.fromkeys(self._made_of, self.wanted.dtype)
        origin = self.wanted.source
        source_types: dict[str, str] = {}
        config_type = ""
        if origin is not None:
            source_types = source.dtypes_of(origin.where, self.translation)
            dtype_in_config = origin.config.get("dtype") or origin.config.get("torch_dtype")
            config_type = str(dtype_in_config).removeprefix("torch.")
        types = {}
        for theirs, parts in self._made_of.items():
            # If a tensor consists of several parts, the first decides.
            ours, _ = parts[0]
            if source_types.get(ours):
                types[theirs] = source_types[ours]
            elif config_type in COMPUTE_DTYPES:
                types[theirs] = config_type
            else:
                types[theirs] = self.stored.tensors[WEIGHTS_PREFIX + ours].dtype
        return types

    def check_source(self, part: int = 0, parts: int = 1) -> None:
        """Verify the hashes of every ``parts``-th file of the checkpoint, starting at ``part``.

        Raises:
            CheckpointError: a file is damaged.
        """
        for file in self.stored.files[part::parts]:
            damage = files.find_damage(self.wanted.checkpoint, file)
            if damage:
                raise CheckpointError(
                    f"checkpoint {self.wanted.checkpoint}: {damage}; use another checkpoint"
                )

    def write_weights(
        self,
        folder: Path,
        file: str,
        check_cancelled: Callable[[], None] = lambda: None,
        wait_seconds: float = 0.0,
    ) -> TensorFile:
        """Write one file of weights.

        Args:
            check_cancelled: Called between pieces. It may raise to cancel the write.
            wait_seconds: Time to wait for the folder to become visible, if another node has created it.

        Raises:
            OSError: the file cannot be written.
        """
        return files.write_hashed(folder / file, self.blocks(file, check_cancelled), wait_seconds)

    def blocks(self, file: str, check_cancelled: Callable[[], None]) -> Iterator[memoryview]:
        """Yield the bytes of one weights file in pieces.

        Call ``check_cancelled``, which may raise, before each piece.
        """
        names = self.files[file]
        types_and_shapes = {name: (self._types[name], self._shapes[name]) for name in names}
        yield header(types_and_shapes)
        for name in names:
            # Blocks of rows limit the memory of the export. A single tensor may have many gigabytes.
            for box in mapping.row_blocks(self._shapes[name]):
                block = self._read_theirs(name, box)
                content = block.reshape(-1).view(torch.uint8).numpy()
                yield from pieces(memoryview(content.data), check_cancelled)

    def write_rest(self, folder: Path) -> None:
        """Write the index, config.json and the tokenizer's files.

        Raises:
            OSError: a file cannot be read or written.
        """
        # A single file needs no index.
        if len(self.files) > 1:
            total_size = 0
            weight_map = {}
            for file, names in self.files.items():
                for name in names:
                    total_size += self._bytes(name)
                    weight_map[name] = file
            index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
            _write_json(folder / INDEX, index)
        _write_json(folder / CONFIG, self._described.config)
        for name, origin in self._files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            files.write_durable(folder / name, origin.read(name))

    def read_part(self, name: str, box: Sequence[slice]) -> Tensor:
        """Return a box of one of our tensors in its exported dtype."""
        tensor = tensors.read_part(self.stored, self.wanted.checkpoint, WEIGHTS_PREFIX + name, box)
        return tensor.to(self.dtype_of(name))

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the exported dtype of one of our tensors."""
        first_piece = next(iter(self.translation.pieces_of(name)))
        dtype: torch.dtype = getattr(torch, self._types[first_piece.name])
        return dtype

    def _read_theirs(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Return a box of an exported tensor."""
        parts = self._made_of[name]
        first_ours, first_piece = parts[0]
        if not box:
            return self.read_part(first_ours, ())
        # Read directly if the exported tensor is one of ours under another name.
        is_same_place = first_piece.ours == first_piece.theirs and first_piece.theirs[0].start == 0
        if len(parts) == 1 and is_same_place and not first_piece.transposed:
            return self.read_part(first_ours, box)

        # Otherwise combine the rows of each piece that overlap with the box. If our tensor has an additional
        # dimension, it is the first, and its index is the expert.
        rows = box[0]
        shape = [part.stop - part.start for part in box]
        block = torch.empty(shape, dtype=self.dtype_of(first_ours))
        for ours, piece in parts:
            piece_rows = piece.theirs[0]
            begin = max(rows.start, piece_rows.start)
            end = min(rows.stop, piece_rows.stop)
            if begin >= end:
                continue
            # The same rows have different indices in our tensor.
            row_dim = len(piece.ours) - len(piece.theirs)
            shift = piece.ours[row_dim].start - piece_rows.start
            our_box = list(piece.ours)
            our_box[row_dim] = slice(begin + shift, end + shift)
            rows_of_block = slice(begin - rows.start, end - rows.start)
            target = block[(rows_of_block, *piece.theirs[1:])]
            if piece.transposed:
                target = target.transpose(-2, -1)
            values = self.read_part(ours, our_box)
            target.copy_(values.reshape(target.shape))
        return block

    def _bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * ITEM_BYTES[self._types[name]]

    def _assign_to_files(self) -> dict[str, list[str]]:
        # Fill files in order. A tensor that is larger than a file gets its own.
        shards: list[list[str]] = [[]]
        room = self.wanted.shard_bytes
        for name in self._made_of:
            size = self._bytes(name)
            if shards[-1] and size > room:
                shards.append([])
                room = self.wanted.shard_bytes
            shards[-1].append(name)
            room -= size
        if len(shards) == 1:
            return {SINGLE: shards[0]}
        # transformers uses the same names.
        names_by_file = {}
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            names_by_file[file] = names
        return names_by_file


def export(wanted: Export) -> tuple[list[str], str]:
    """Write the folder, read it back and compare every weight.

    Only one block of rows is in memory at a time. The folder is renamed to ``output`` when it is
    complete and verified.

    Returns:
        The names of its files, and a notice on changed special tokens.

    Raises:
        ConfigError: ``output`` exists, or the Hugging Face format cannot represent the model.
        CheckpointError: the checkpoint is damaged, or the folder differs when it is read back.
        StorageError: the folder cannot be written.
    """
    require_new(wanted.output)
    writer = Writer(wanted)
    # Use three threads: this one writes, one verifies the hashes of the checkpoint, and one syncs files to
    # disk. Errors of the other threads are raised here, before the next block or at the end.
    with (
        files.new_folder(wanted.output) as temporary,
        ThreadPoolExecutor(1, "export-check") as pool,
        ThreadPoolExecutor(1, "export-sync") as syncing,
    ):
        checked = pool.submit(writer.check_source)
        synced: list[Future[None]] = []
        try:
            for file in writer.files:
                check_cancelled = partial(_stop_if_failed, (checked, *synced))
                blocks = writer.blocks(file, check_cancelled)
                files.write_unhashed(temporary / file, blocks)
                synced.append(syncing.submit(files.sync, temporary / file))
            writer.write_rest(temporary)
            _compare(temporary, writer)
            for future in synced:
                future.result()
        finally:
            # Report a damaged checkpoint first, because it may have caused the other error.
            checked.result()
    return sorted(path.name for path in wanted.output.iterdir()), writer.notice


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2) + "\n"
    files.write_durable(path, text.encode())


def _stop_if_failed(futures: Iterable[Future[None]]) -> None:
    """Raise the error of a future that has failed."""
    for future in futures:
        if future.done():
            future.result()


def config_fields(wanted: Export) -> dict[str, Any]:
    """Return the content of ``config.json``: that of the source, with the fields that the run has changed.

    Raises:
        ConfigError: the format cannot describe the model.
    """
    source_config = {}
    if wanted.source is not None:
        source_config = dict(wanted.source.config)
    # A model of transformers is described by the config.json from which it was created.
    if as_is.is_as_is(wanted.module):
        config = wanted.config
        if not source_config.get("model_type"):
            source_config = dict(read_json(Path(config.path) / CONFIG))
        new_vocab_size = 0
        if config.vocab_size != config.own_vocab_size:
            new_vocab_size = config.vocab_size
        labels = wanted.labels
        if not labels:
            labels = [f"LABEL_{number}" for number in range(config.num_labels)]
        source_config = _with_depths(source_config, 0)
        fields = saved_config(source_config, config.class_name, labels, new_vocab_size)
        return _with_dtype(fields, wanted.dtype)

    # A native model is described by its format. The source keeps its fields if it is the same architecture.
    hub = hub_of(wanted.module, str(wanted.checkpoint), len(wanted.labels))
    source_config = dict(hub.text_config(source_config))
    if getattr(wanted.config, "norm_type", "rmsnorm") not in ("rmsnorm", "fused_rmsnorm"):
        raise ConfigError(
            f"model.norm_type={wanted.config.norm_type!r} is not supported by {hub.architecture}, "
            "so this model cannot be exported; use its checkpoint"
        )
    fields = hub.write(wanted.config)
    if source_config.get("model_type") == hub.model_type:
        changed = _changed(source_config, hub, wanted.config, fields)
        saved = saved_config(changed, hub.architecture, wanted.labels)
        return _with_dtype(saved, wanted.dtype)
    fields = {
        "architectures": [hub.architecture],
        "model_type": hub.model_type,
        **fields,
        **dict.fromkeys(TOKENS),
        "torch_dtype": wanted.dtype,
        "use_cache": True,
    }
    if wanted.max_tokens:
        fields["max_position_embeddings"] = wanted.max_tokens
    return saved_config(fields, hub.architecture, wanted.labels)


def _changed(
    hf_config: dict[str, Any],
    hub: HubFormat,
    config: Any,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """Return the config.json of the source, updated with only the fields that the run has changed."""
    # Convert the source's Config with the same writer, so two spellings of the same value do not count as a
    # change. Use the model's value for fields that config.json lacks, or that affect neither model.
    described = type(config)(**hub.read(Fields(hf_config, CONFIG, hub.defaults)))
    unused = hub.unused(dataclasses.asdict(described)) & hub.unused(dataclasses.asdict(config))
    without_effect = [key for key in {*FREE, *unused} if hasattr(config, key)]
    same = {key: getattr(config, key) for key in without_effect}
    source_fields = hub.write(dataclasses.replace(described, **same))
    changes = {}
    for key, value in fields.items():
        if source_fields.get(key) != value:
            changes[key] = value
    # Files of transformers 5 have one table of all rotary options.
    if "rope_parameters" in hf_config and changes.keys() & _ROTARY:
        table = dict(fields.get("rope_scaling") or {"rope_type": "default"})
        table["rope_type"] = table.pop("type", None) or table["rope_type"]
        table["rope_theta"] = fields.get("rope_theta", fields.get("rotary_emb_base"))
        fraction = fields.get("rotary_pct", fields.get("partial_rotary_factor"))
        if fraction is not None:
            table["partial_rotary_factor"] = fraction
        for key in _ROTARY:
            changes.pop(key, None)
        changes["rope_parameters"] = table
    num_depths = getattr(config, "num_nextn_predict_layers", 0)
    changed = _with_depths({**hf_config, **changes}, num_depths)
    # Exported weights are dequantized.
    changed.pop("quantization_config", None)
    return changed


def _with_depths(fields: Mapping[str, Any], num_depths: int) -> dict[str, Any]:
    """Return the fields with the number of layers of multi-token prediction that the export has.

    Without such layers, an absent key stays absent. The number of the source stays if lists with an item per
    layer include these layers.
    """
    name = "num_nextn_predict_layers"
    in_source = fields.get(name)
    if num_depths == 0:
        if not in_source:
            return {**fields}
        if isinstance(in_source, int):
            length = fields.get("num_hidden_layers", 0) + in_source
            if any(isinstance(value, list) and len(value) == length for value in fields.values()):
                return {**fields}
    return {**fields, name: num_depths}


def _with_dtype(fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the fields with the dtype at the top level and in nested configurations.

    If ``dtype`` is empty, nothing changes.
    """
    if not dtype:
        return fields
    changed = dict(fields)
    # Versions of transformers use different names for the key. Keep the name of the source.
    existing_keys = _DTYPE_KEYS & fields.keys()
    if not existing_keys:
        changed["torch_dtype"] = dtype
    for key in existing_keys:
        changed[key] = dtype
    for name, part in fields.items():
        if name.endswith("_config") and isinstance(part, dict):
            keys_of_part = _DTYPE_KEYS & part.keys()
            changed[name] = {**part, **dict.fromkeys(keys_of_part, dtype)}
    return changed


def _copied_files(wanted: Export) -> dict[str, FolderSource]:
    """Map each copied file to its origin. All files of the tokenizer come from one origin."""
    origin_of: dict[str, FolderSource] = {}
    for origin in wanted.sources():
        has_tokenizer = any(other.has_tokenizer for other in origin_of.values())
        for name in origin.files:
            is_second_tokenizer = has_tokenizer and _OF_TOKENIZERS.fullmatch(name)
            if name not in origin_of and not is_second_tokenizer:
                origin_of[name] = origin
    return origin_of


def _named_as_before(translation: Translation, wanted: Export) -> Translation:
    """Return the translation with the tensor names of the source folder. A tensor may have one of several names."""
    assert wanted.source is not None
    where = wanted.source.where
    names: Mapping[str, Any] = {}
    if source.has_weights(where):
        with open_weights(where, None) as weights:
            model = models.build(wanted.module, wanted.config)
            source_translation, _ = as_is.fit(model, wanted.config, weights)
            names = source_translation.sources
    elif (where / manifest.MANIFEST).is_file():
        # The source is a checkpoint, which may contain the names of the folder from which its run started.
        # Facts are not checked when the manifest is read.
        facts = manifest.read(where).facts
        recorded = facts.get(source.NAMES)
        if isinstance(recorded, dict) and all(isinstance(n, str) for n in recorded.values()):
            names = recorded
    sources = {ours: names.get(ours, theirs) for ours, theirs in translation.sources.items()}
    # With the names of another model, two tensors could have the same name.
    if len({*sources.values()}) < len(sources):
        return translation
    return dataclasses.replace(translation, sources=sources)


def _check_stored(translation: Translation, stored: Manifest, wanted: Export) -> None:
    """Raise CheckpointError if the weights of the checkpoint have other names or shapes than the model."""
    checkpoint = wanted.checkpoint
    dropped_prefix = ""
    if wanted.drop_mtp:
        dropped_prefix = f"{WEIGHTS_PREFIX}{wanted.module.LAYOUT.mtp_layers}."
    shapes = {}
    for name, tensor in stored.tensors.items():
        is_dropped = bool(dropped_prefix) and name.startswith(dropped_prefix)
        if name.startswith(WEIGHTS_PREFIX) and not is_dropped:
            shapes[name.removeprefix(WEIGHTS_PREFIX)] = tuple(tensor.shape)
    expected = translation.shapes
    all_names = shapes.keys() | expected.keys()
    wrong = [name for name in all_names if shapes.get(name) != expected.get(name)]
    if wrong:
        name = min(wrong)
        raise CheckpointError(
            f"checkpoint {checkpoint} does not fit the configured model: "
            f"{len(wrong)} tensors differ, such as {name}: {shapes.get(name)} instead of "
            f"{expected.get(name)}; use the configuration of its run"
        )


def _compare(folder: Path, writer: Writer) -> None:
    """Read the folder like an import does, and compare every weight bitwise.

    Raises:
        CheckpointError: a weight differs.
    """
    translation = writer.translation
    with HubWeights(folder) as weights:
        mapping.check(translation, weights)
        for name in translation.sources:
            for box in mapping.row_blocks(translation.shapes[name]):
                dtype = writer.dtype_of(name)
                theirs = mapping.read_part(name, box, translation, weights, dtype)
                ours = writer.read_part(name, box)
                if not _same_bits(theirs, ours):
                    raise CheckpointError(
                        f"{folder}: {name} differs from the written data when read back, "
                        "so nothing was exported; check the disk"
                    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have the same shape, dtype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # Compare as integers, because NaN is not equal to itself as a float.
    one = one.contiguous().reshape(-1).view(torch.uint8)
    other = other.contiguous().reshape(-1).view(torch.uint8)
    # Words of 8 bytes are faster to compare than bytes. The last bytes may not fill a word.
    num_in_words = one.numel() // 8 * 8
    words = one[:num_in_words].view(torch.int64)
    other_words = other[:num_in_words].view(torch.int64)
    if not torch.equal(words, other_words):
        return False
    return torch.equal(one[num_in_words:], other[num_in_words:])
