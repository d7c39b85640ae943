"""Import of a Hugging Face folder, to a checkpoint or directly to the parameters of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain import models
from shardtrain.checkpoint import single_process_writer
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config.schema import Config
from shardtrain.hf import as_is, mapping, source
from shardtrain.hf.bin_weights import BinWeights
from shardtrain.hf.hub_model import (
    HubModel,
    check_mtp,
    check_same,
    recognise,
    translation_of,
    with_mtp,
)
from shardtrain.hf.quantized_weights import open_weights
from shardtrain.hf.weights import HubWeights
from shardtrain.hub_formats.config_json import Quantized
from shardtrain.hub_formats.format import HubFormat
from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger


def to_checkpoint(
    folder: Path,
    output: Path,
    dtype: str = "",
    vocab_size: int = 0,
    legacy_bin: bool = False,
    keep_mtp: bool = False,
) -> HubModel:
    """Write the weights of ``folder`` as a checkpoint without optimizer state,
    and return the recognized model.

    Only one tensor is in memory at a time. The checkpoint also keeps the other files of the model,
    such as the tokenizer.

    Args:
        dtype: dtype of all weights. If empty, each tensor keeps its dtype in the file.
        vocab_size: New vocabulary size. New rows are the mean of the existing rows, which hardly changes the
            probabilities of the existing tokens (Hewitt 2021). 0 keeps the size.
        legacy_bin: Read pytorch_model.bin.
        keep_mtp: Also import the layers of multi-token prediction.

    Raises:
        ConfigError: the architecture is unknown, ``output`` exists, or ``keep_mtp`` has no effect.
        CheckpointError: tensors are missing, unexpected or have other shapes, or a file is damaged.
        StorageError: the checkpoint cannot be written.
    """
    passed_over: Sequence[str]
    hub_model = recognise(folder)
    if keep_mtp:
        hub_model = with_mtp(hub_model, folder)
    module = models.find(hub_model.name)
    for notice in hub_model.notices:
        logger.info(notice)
    with _opened(folder, legacy_bin, hub_model.hub, hub_model.block) as weights:
        # A transformers class determines its tensor names with its own code.
        if hub_model.hub is None:
            translation, passed_over = as_is.fit(
                models.build(module, hub_model.config), hub_model.config, weights
            )
        else:
            translation = translation_of(module, hub_model.config, str(folder))
            passed_over = hub_model.passed_over
        _tell(mapping.check(translation, weights, passed_over))
        types = source.dtypes_in(weights, translation)
        if dtype:
            types = dict.fromkeys(types, dtype)
        # Only the embedding and the head have a row per token.
        hub_model = _grown(hub_model, vocab_size)
        shapes = {name: translation.shapes[name] for name in translation.sources}
        for name in shapes.keys() & {"embed.weight", "head.weight"}:
            shapes[name] = (hub_model.config.vocab_size, *shapes[name][1:])

        def read(name: str) -> Tensor:
            name = name.removeprefix(WEIGHTS_PREFIX)
            tensor = mapping.read_whole(name, translation, weights, getattr(torch, types[name]))
            # A scalar has no rows.
            if not shapes[name] or shapes[name][0] == tensor.shape[0]:
                return tensor
            new_rows = shapes[name][0] - tensor.shape[0]
            mean = tensor.float().mean(0).to(tensor.dtype)
            return torch.cat((tensor, mean.expand(new_rows, -1)))

        # The checkpoint carries the other files, so a later export can write them again.
        beside, places = source.packed(source.of_folder(folder))
        facts: dict[str, Any] = {
            "state": TrainState().to_dict(),
            "model": {
                "name": hub_model.name,
                "flavor": hub_model.flavor,
                "overrides": dict(hub_model.overrides),
            },
            source.FACT: places,
        }
        # Record the names in the file, because a transformers tensor may have several names.
        if hub_model.hub is None:
            names = {}
            for ours, theirs in translation.sources.items():
                if isinstance(theirs, str):
                    names[ours] = theirs
            facts[source.NAMES] = names
        prefixed = {WEIGHTS_PREFIX + name: shape for name, shape in shapes.items()}
        kinds = {WEIGHTS_PREFIX + name: types[name] for name in shapes}
        single_process_writer.write(output, prefixed, kinds, read, facts, {source.FILE: beside})
    return hub_model


def fill(
    tensors: Mapping[str, Tensor],
    folder: Path,
    module: Any,
    config: Any,
    quantized: bool | None = None,
    resize: bool = False,
    legacy_bin: bool = False,
    chosen: Collection[str] = (),
) -> None:
    """Fill this rank's part of a run's tensors directly from a Hugging Face folder.
    Names have the prefix ``model.``.

    Args:
        quantized: True if the folder must have quantized weights, False if it must not. None accepts both.
        resize: Allow more rows in the model's embedding and head than in the folder. See ``fill_rows``.
        legacy_bin: Read pytorch_model.bin.
        chosen: Names in ``model.overrides``. See ``hub_model.check_fields``.

    Raises:
        ConfigError: the folder contains another model than the configured model,
            or does not match ``quantized``.
        CheckpointError: tensors are missing, unexpected or have other shapes, or a file is damaged.
    """
    passed_over: Sequence[str]
    # A transformers class uses the names in its folder, so the model need not be recognized.
    hub_model = None if as_is.is_as_is(module) else recognise(folder)
    if hub_model is None:
        as_is.check_same(config, folder)
    else:
        source_config = sized_as(hub_model, config) if resize else config
        check_same(module, source_config, hub_model, folder, chosen)
        check_mtp(source_config, hub_model, folder)
        translation = translation_of(module, source_config, str(folder))
        passed_over = hub_model.passed_over
    block = hub_model.block if hub_model else None
    if quantized is not None and quantized != (block is not None):
        rule = "must be true for quantized weights"
        if quantized:
            rule = "requires quantized weights"
        raise ConfigError(
            Problem(
                "checkpoint.initial_load_in_hf_quantized",
                quantized,
                rule=f"{rule} ({folder})",
                fix=f"set it to {str(not quantized).lower()}",
            )
        )
    hub = None
    if hub_model:
        hub = hub_model.hub
    with _opened(folder, legacy_bin, hub, block) as weights:
        if hub_model is None:
            source_config = as_is.own_sizes(config) if resize else config
            translation, passed_over = as_is.fit(
                models.build(module, source_config), source_config, weights
            )
        _tell(mapping.check(translation, weights, passed_over))
        # Tensors that the folder's format lacks keep their values.
        in_folder = {}
        for key, tensor in tensors.items():
            name = key.removeprefix(WEIGHTS_PREFIX)
            if name in translation.sources:
                in_folder[name] = tensor
        fill_rows(in_folder, translation, weights)


def _opened(folder: Path, legacy_bin: bool, hub: HubFormat | None, block: Quantized) -> HubWeights:
    """Open the weights of a folder. Their names are those of ``hub`` without its prefix."""
    if legacy_bin:
        return BinWeights(folder)
    return open_weights(folder, block, hub.prefix if hub else "")


def fill_as_configured(tensors: Mapping[str, Tensor], folder: Path, config: Config) -> None:
    """Call ``fill`` with the model and the ``initial_load_*`` options of a run.

    Runs with adapters never read a pickle.
    """
    module, shape = models.configured(config.model)
    options = config.checkpoint
    legacy_bin = options.initial_load_legacy_bin and not config.lora.enable
    resize = options.initial_load_resize_embeddings
    quantized = options.initial_load_in_hf_quantized
    fill(
        tensors, folder, module, shape, quantized, resize, legacy_bin, config.model.overrides.keys()
    )


def sized_as(hub_model: HubModel, config: Any) -> Any:
    """Return a model's Config with the vocabulary size of a folder.

    Raises:
        ConfigError: the folder has a larger vocabulary than the model.
    """
    as_is.check_rows(config.vocab_size, hub_model.config.vocab_size)
    return dataclasses.replace(config, vocab_size=hub_model.config.vocab_size)


def fill_rows(
    tensors: Mapping[str, Tensor], translation: mapping.Translation, weights: HubWeights
) -> None:
    """Fill our tensors in place. Rows that the file does not contain become the mean of its rows.

    ``resize_token_embeddings`` of transformers draws new rows around the same mean, with 1e-9
    times the variance of the rows. Here the mean is accumulated in float64 in a fixed order, so
    it is the same on every mesh.
    """
    grown = {}
    unchanged = {}
    for name, tensor in tensors.items():
        shape = translation.shapes[name]
        if shape and tensor.ndim and tensor.shape[0] > shape[0]:
            grown[name] = tensor
        else:
            unchanged[name] = tensor
    mapping.fill(unchanged, translation, weights)
    for name, tensor in grown.items():
        # Read the rows of this rank that the file contains.
        rows = translation.shapes[name][0]
        local = local_tensor(tensor).detach()
        (own_rows, *others) = local_slices(tensor)
        old = slice(min(own_rows.start, rows), min(own_rows.stop, rows))
        if old.start < old.stop:
            part = mapping.read_part(name, (old, *others), translation, weights, tensor.dtype)
            local[: old.stop - own_rows.start].copy_(part)
        # Each rank with new rows reads the full tensor to compute the mean.
        if own_rows.stop > rows:
            mean = _mean_row(name, translation, weights)
            first_new_row = max(0, rows - own_rows.start)
            local[first_new_row:].copy_(mean[tuple(others)].to(tensor.dtype))


def _mean_row(name: str, translation: mapping.Translation, weights: HubWeights) -> Tensor:
    """Return the mean of the rows that the file contains, in float64."""
    shape = translation.shapes[name]
    total = torch.zeros(shape[1:], dtype=torch.float64)
    for box in mapping.row_blocks(shape):
        rows = mapping.read_part(name, box, translation, weights, torch.float32)
        total += rows.double().sum(0)
    return total / shape[0]


def _grown(hub_model: HubModel, vocab_size: int) -> HubModel:
    if not vocab_size or vocab_size == hub_model.config.vocab_size:
        return hub_model
    if vocab_size < hub_model.config.vocab_size:
        raise ConfigError(
            f"--vocab_size={vocab_size} is below the {hub_model.config.vocab_size} rows of the file; use a larger size"
        )
    if hub_model.hub is None:
        raise ConfigError(
            f"--vocab_size={vocab_size} has no effect on {hub_model.config.class_name} of transformers; remove it"
        )
    return dataclasses.replace(
        hub_model,
        overrides={**hub_model.overrides, "vocab_size": vocab_size},
        config=dataclasses.replace(hub_model.config, vocab_size=vocab_size),
    )


def _tell(ignored: list[str]) -> None:
    if ignored:
        logger.info(f"{len(ignored)} tensors of the file are skipped, such as {ignored[0]}")
