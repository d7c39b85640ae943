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
from shardtrain.checkpoint.safetensors_header import header
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
        source: Origin of the model. Its files are copied, and its config.json is kept except for changed fields.
        tokenizer: Folder whose tokenizer files replace those of ``source``.
        max_tokens: Value of ``max_position_embeddings`` in config.json without a ``source``. 0 omits the key.
        tokens: Special tokens of the run, see ``generation_config.trained_tokens``. Empty keeps those of ``source``.
        labels: Labels of a classification head that replaces the language model head.
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

    def sources(self) -> list[FolderSource]:
        """Return the sources of files other than weights, in descending priority."""
        own = source.of_folder(self.tokenizer) if self.tokenizer is not None else None
        return [one for one in (own, self.source) if one is not None]


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
        self.wanted = wanted
        self.stored = manifest.read(wanted.checkpoint)
        self.translation = translation_of(wanted.module, wanted.config, str(wanted.checkpoint), len(wanted.labels))
        if as_is.is_as_is(wanted.module) and wanted.source is not None:
            self.translation = _named_as_before(self.translation, wanted)
        _check_stored(self.translation, self.stored, wanted.checkpoint)
        fields = config_fields(wanted)
        self._shapes = self.translation.their_shapes()

        # Map each exported tensor to the pieces of our tensors of which it consists, in the order of a forward pass.
        self._made_of: dict[str, list[tuple[str, Any]]] = {}
        for ours in self.translation.shapes:
            for piece in self.translation.pieces_of(ours):
                self._made_of.setdefault(piece.name, []).append((ours, piece))

        # Take the dtype of a tensor from the first of these that exists: the option, the weights of the
        # source, the config.json of the source, the checkpoint.
        of_source: dict[str, str] = {}
        source_config: Mapping[str, Any] = {}
        if wanted.source is not None:
            of_source = source.dtypes_of(wanted.source.where, self.translation) if not wanted.dtype else {}
            source_config = wanted.source.config
        of_config = str(source_config.get("dtype") or source_config.get("torch_dtype")).removeprefix("torch.")
        self._types: dict[str, str] = {}
        for theirs, parts in self._made_of.items():
            ours = parts[0][0]
            stored_type = self.stored.tensors[WEIGHTS_PREFIX + ours].dtype
            default = of_config if of_config in COMPUTE_DTYPES else stored_type
            self._types[theirs] = wanted.dtype or of_source.get(ours) or default
        if wanted.source is None:
            fields["torch_dtype"] = next(iter(self._types.values()))
        self._files = _beside(wanted)

        # Write the special tokens of the run to config.json and generation_config.json.
        place = self._files.get(GENERATION)
        settings_file = {} if place is None else {GENERATION: place.files[GENERATION]}
        before = place or FolderSource(wanted.output)
        described = dataclasses.replace(before, config=fields, files=settings_file)
        self._described, changes = with_tokens(described, wanted.tokens)
        self._files |= dict.fromkeys(self._described.files, self._described)
        self.notice = f"special tokens are set to those of training: {'; '.join(changes)}" if changes else ""
        self.files = self._share_out()

    def check_source(self, part: int = 0, parts: int = 1) -> None:
        """Verify the hashes of every ``parts``-th file of the checkpoint, starting at ``part``.

        Raises:
            CheckpointError: a file is damaged.
        """
        for file in self.stored.files[part::parts]:
            if damage := files.find_damage(self.wanted.checkpoint, file):
                raise CheckpointError(f"checkpoint {self.wanted.checkpoint}: {damage}; use another one")

    def write_weights(
        self, folder: Path, file: str, check_cancelled: Callable[[], None] = lambda: None, wait_seconds: float = 0.0
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
        yield header({name: (self._types[name], self._shapes[name]) for name in names})
        for name in names:
            for box in mapping.row_blocks(self._shapes[name]):
                block = self._read_theirs(name, box)
                yield from pieces(memoryview(block.reshape(-1).view(torch.uint8).numpy().data), check_cancelled)

    def write_rest(self, folder: Path) -> None:
        """Write the index, config.json and the tokenizer's files.

        Raises:
            OSError: a file cannot be read or written.
        """
        if len(self.files) > 1:
            sizes = (self._bytes(name) for names in self.files.values() for name in names)
            weight_map = {name: file for file, names in self.files.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
            files.write_durable(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        files.write_durable(folder / CONFIG, (json.dumps(self._described.config, indent=2) + "\n").encode())
        for name, place in self._files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            files.write_durable(folder / name, place.read(name))

    def read_part(self, name: str, box: Sequence[slice]) -> Tensor:
        """Return a box of one of our tensors in its exported dtype."""
        found = tensors.read_part(self.stored, self.wanted.checkpoint, WEIGHTS_PREFIX + name, box)
        return found.to(self.dtype_of(name))

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the exported dtype of one of our tensors."""
        return getattr(torch, self._types[next(iter(self.translation.pieces_of(name))).name])  # type: ignore[no-any-return]

    def _read_theirs(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Return a box of an exported tensor."""
        if not box:
            return self.read_part(self._made_of[name][0][0], ())
        # Read directly if the exported tensor is one of ours under another name.
        rows = box[0]
        ours, piece = self._made_of[name][0]
        whole = piece.theirs[0]
        same = piece.ours == piece.theirs and not piece.transposed
        if len(self._made_of[name]) == 1 and same and whole.start == 0 == piece.ours[0].start:
            return self.read_part(ours, box)

        # Otherwise combine the rows of each piece that overlap with the box. If our tensor has an additional
        # dimension, it is the first, and its index is the expert.
        block = torch.empty([part.stop - part.start for part in box], dtype=self.dtype_of(self._made_of[name][0][0]))
        for ours, piece in self._made_of[name]:
            whole = piece.theirs[0]
            experts = len(piece.ours) - len(piece.theirs)
            begin = max(rows.start, whole.start)
            end = min(rows.stop, whole.stop)
            if begin >= end:
                continue
            shift = piece.ours[experts].start - whole.start
            wanted = (*piece.ours[:experts], slice(begin + shift, end + shift), *piece.ours[experts + 1 :])
            target = block[(slice(begin - rows.start, end - rows.start), *piece.theirs[1:])]
            target = target.transpose(-2, -1) if piece.transposed else target
            target.copy_(self.read_part(ours, wanted).reshape(target.shape))
        return block

    def _bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * ITEM_BYTES[self._types[name]]

    def _share_out(self) -> dict[str, list[str]]:
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
        return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


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
                files.write_unhashed(temporary / file, writer.blocks(file, check_cancelled))
                synced.append(syncing.submit(files.sync, temporary / file))
            writer.write_rest(temporary)
            _compare(temporary, writer)
            for future in synced:
                future.result()
        finally:
            # Report a damaged checkpoint first, because it may have caused the other error.
            checked.result()
    return sorted(path.name for path in wanted.output.iterdir()), writer.notice


def _stop_if_failed(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        if future.done():
            future.result()


def config_fields(wanted: Export) -> dict[str, Any]:
    """Return the content of ``config.json``: that of the source, with the fields that the run has changed.

    Raises:
        ConfigError: the format cannot describe the model.
    """
    before = dict(wanted.source.config) if wanted.source is not None else {}
    if as_is.is_as_is(wanted.module):
        c = wanted.config
        own = before if before.get("model_type") else dict(read_json(Path(c.path) / CONFIG))
        grown = c.vocab_size if c.vocab_size != c.own_vocab_size else 0
        labels = wanted.labels or [f"LABEL_{number}" for number in range(c.num_labels)]
        return _with_dtype(saved_config(own, c.class_name, labels, grown), wanted.dtype)
    hub = hub_of(wanted.module, str(wanted.checkpoint), len(wanted.labels))
    before = dict(hub.text_config(before))
    if getattr(wanted.config, "norm_type", "rmsnorm") not in ("rmsnorm", "fused_rmsnorm"):
        raise ConfigError(
            f"model.norm_type={wanted.config.norm_type!r} is not supported by {hub.architecture}; keep the checkpoint"
        )
    fields = hub.write(wanted.config)
    if before.get("model_type") == hub.model_type:
        changed = _changed(before, hub, wanted.config, fields)
        return _with_dtype(saved_config(changed, hub.architecture, wanted.labels), wanted.dtype)
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


def _changed(hf_config: dict[str, Any], hub: HubFormat, config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the source, updated with only the fields that the run has changed."""
    # Convert the source's Config with the same writer, so two spellings of the same value do not count as a
    # change. Use the model's value for fields that config.json lacks, or that affect neither model.
    described = type(config)(**hub.read(Fields(hf_config, CONFIG, hub.defaults)))
    unused = hub.unused(dataclasses.asdict(described)) & hub.unused(dataclasses.asdict(config))
    same = {key: getattr(config, key) for key in {*FREE, *unused} if hasattr(config, key)}
    old = hub.write(dataclasses.replace(described, **same))
    differ = {key: value for key, value in fields.items() if old.get(key) != value}
    rotary = ("rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct")
    # Files of transformers 5 have one table of all rotary options.
    if "rope_parameters" in hf_config and differ.keys() & set(rotary):
        table = {**(fields.get("rope_scaling") or {"rope_type": "default"})}
        table["rope_type"] = table.pop("type", None) or table["rope_type"]
        table["rope_theta"] = fields.get("rope_theta", fields.get("rotary_emb_base"))
        if "rotary_pct" in fields:
            table["partial_rotary_factor"] = fields["rotary_pct"]
        differ = {key: value for key, value in differ.items() if key not in rotary} | {"rope_parameters": table}
    changed = {**hf_config, **differ}
    # Exported weights are dequantized.
    changed.pop("quantization_config", None)
    return changed


def _with_dtype(found: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Set the dtype at the top level and in nested configurations. No-op if ``dtype`` is empty."""
    if not dtype:
        return found
    keys = [key for key in ("dtype", "torch_dtype") if key in found] or ["torch_dtype"]
    inner = {
        key: {**part, **{name: dtype for name in ("dtype", "torch_dtype") if name in part}}
        for key, part in found.items()
        if key.endswith("_config") and isinstance(part, dict)
    }
    return {**found, **inner, **dict.fromkeys(keys, dtype)}


def _beside(wanted: Export) -> dict[str, FolderSource]:
    """Map each copied file to its origin. All files of the tokenizer come from one origin."""
    source_of: dict[str, FolderSource] = {}
    for place in wanted.sources():
        has_tokenizer = any(other.has_tokenizer for other in source_of.values())
        for name in place.files:
            if name not in source_of and not (has_tokenizer and _OF_TOKENIZERS.fullmatch(name)):
                source_of[name] = place
    return source_of


def _named_as_before(translation: Translation, wanted: Export) -> Translation:
    """Return the translation with the tensor names of the source, because transformers accepts several names."""
    assert wanted.source is not None
    where = wanted.source.where
    if source.has_weights(where):
        with open_weights(where, None) as weights:
            names = as_is.fit(models.build(wanted.module, wanted.config), wanted.config, weights)[0].sources
    else:
        known = manifest.read(where).facts.get(source.NAMES) if (where / manifest.MANIFEST).is_file() else None
        names = known if isinstance(known, dict) and all(isinstance(name, str) for name in known.values()) else {}
    # With the names of another model, two tensors could have the same name.
    sources = {ours: names.get(ours, theirs) for ours, theirs in translation.sources.items()}
    if len({*sources.values()}) < len(sources):
        return translation
    return dataclasses.replace(translation, sources=sources)


def _check_stored(translation: Translation, stored: Manifest, checkpoint: Path) -> None:
    ours = {name: tuple(t.shape) for name, t in stored.tensors.items() if name.startswith(WEIGHTS_PREFIX)}
    weights = {name.removeprefix(WEIGHTS_PREFIX): shape for name, shape in ours.items()}
    wrong = sorted(n for n in weights.keys() | translation.shapes if weights.get(n) != translation.shapes.get(n))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"checkpoint {checkpoint} does not fit the configured model: {len(wrong)} tensors differ, such as {name}: "
            f"{weights.get(name)} instead of {translation.shapes.get(name)}; use the configuration of its run"
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
                theirs = mapping.read_part(name, box, translation, weights, writer.dtype_of(name))
                if not _same_bits(theirs, writer.read_part(name, box)):
                    raise CheckpointError(
                        f"{folder}: {name} differs from the written data when read back, so nothing was exported; "
                        "check the disk"
                    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have the same shape, dtype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # Compare as integers, because NaN is not equal to itself as a float.
    one = one.contiguous().reshape(-1).view(torch.uint8)
    other = other.contiguous().reshape(-1).view(torch.uint8)
    whole = one.numel() // 8 * 8
    if not torch.equal(one[:whole].view(torch.int64), other[:whole].view(torch.int64)):
        return False
    return torch.equal(one[whole:], other[whole:])
