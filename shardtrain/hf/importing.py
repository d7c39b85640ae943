"""A Hugging Face folder into a checkpoint, or straight into the parameters of a run."""

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
from shardtrain.hf.hub_model import HubModel, check_same, recognise, translation_of
from shardtrain.hf.quantized_weights import open_weights
from shardtrain.hf.weights import HubWeights
from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger


def to_checkpoint(
    folder: Path, output: Path, dtype: str = "", vocab_size: int = 0, legacy_bin: bool = False
) -> HubModel:
    """Write the weights of ``folder`` as a checkpoint that holds weights alone; gives the model that they are of.

    Each tensor keeps the type that it has in the file unless ``dtype`` is given. With ``vocab_size`` the vocabulary
    grows: the new rows are the mean of those that are there, which leaves the old tokens' probabilities nearly as they
    were (Hewitt 2021). One tensor at a time is in memory. What belongs to the model beside its weights, such as the
    tokenizer, is kept with them. ``legacy_bin`` reads pytorch_model.bin.

    Raises:
        ConfigError: for an architecture that is not known, or an ``output`` that exists.
        CheckpointError: when tensors are missing, surplus or of other shapes, or a file is damaged.
        StorageError: when the checkpoint cannot be written.
    """
    passed_over: Sequence[str]
    found = recognise(folder)
    module = models.find(found.name)
    for notice in found.notices:
        logger.info(notice)
    prefix = found.hub.prefix if found.hub else ""
    with BinWeights(folder) if legacy_bin else open_weights(folder, found.block, prefix) as weights:
        if found.hub is None:
            translation, passed_over = as_is.fit(models.build(module, found.config), found.config, weights)
        else:
            translation = translation_of(module, found.config, str(folder))
            passed_over = found.passed_over
        _tell(mapping.check(translation, weights, passed_over))
        types = source.dtypes_in(weights, translation)
        if dtype:
            types = dict.fromkeys(types, dtype)
        found = _grown(found, vocab_size)
        shapes = {name: translation.shapes[name] for name in translation.sources}
        for name in shapes.keys() & {"embed.weight", "head.weight"}:
            shapes[name] = (found.config.vocab_size, *shapes[name][1:])

        def read(name: str) -> Tensor:
            name = name.removeprefix(WEIGHTS_PREFIX)
            tensor = mapping.read_whole(name, translation, weights, getattr(torch, types[name]))
            new_rows = shapes[name][0] - tensor.shape[0] if shapes[name] else 0
            if not new_rows:
                return tensor
            mean = tensor.float().mean(0).to(tensor.dtype)
            return torch.cat((tensor, mean.expand(new_rows, -1)))

        beside, places = source.packed(source.of_folder(folder))
        facts: dict[str, Any] = {
            "state": TrainState().to_dict(),
            "model": {"name": found.name, "flavor": found.flavor, "overrides": dict(found.overrides)},
            source.FACT: places,
        }
        # Of the names that a tensor of transformers may have, those that the file has
        if found.hub is None:
            names = {ours: theirs for ours, theirs in translation.sources.items() if isinstance(theirs, str)}
            facts[source.NAMES] = names
        prefixed = {WEIGHTS_PREFIX + name: shape for name, shape in shapes.items()}
        kinds = {WEIGHTS_PREFIX + name: types[name] for name in shapes}
        single_process_writer.write(output, prefixed, kinds, read, facts, {source.FILE: beside})
    return found


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
    """Fill this rank's part of a run's tensors (with the prefix ``model.``) straight from a Hugging Face folder.

    ``quantized`` says whether its weights are to be quantised; None takes either. With ``resize`` the model may have
    more rows in its embedding and head than the folder: see ``fill_rows``. ``legacy_bin`` reads pytorch_model.bin.
    ``chosen`` are the names of ``model.overrides``: see ``hub_model.check_fields``.

    Raises:
        ConfigError: when the folder holds another model than the one configured, or is quantised and should not be.
        CheckpointError: when tensors are missing, surplus or of other shapes, or a file is damaged.
    """
    passed_over: Sequence[str]
    # A network of transformers has the names of its own folder: nothing is recognised or renamed
    found = None if as_is.is_as_is(module) else recognise(folder)
    if found is None:
        as_is.check_same(config, folder)
    else:
        own = sized_as(found, config) if resize else config
        check_same(module, own, found, folder, chosen)
        translation = translation_of(module, own, str(folder))
        passed_over = found.passed_over
    block = found.block if found else None
    if quantized is not None and quantized != (block is not None):
        rule = "is for quantised weights, and these are not" if quantized else "is needed: these weights are quantised"
        fix = f"set it to {str(not quantized).lower()}"
        raise ConfigError(Problem("checkpoint.initial_load_in_hf_quantized", quantized, f"{rule} ({folder})", fix))
    prefix = found.hub.prefix if found and found.hub else ""
    with BinWeights(folder) if legacy_bin else open_weights(folder, block, prefix) as weights:
        if found is None:
            own = as_is.own_sizes(config) if resize else config
            translation, passed_over = as_is.fit(models.build(module, own), own, weights)
        _tell(mapping.check(translation, weights, passed_over))
        named = {name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in tensors.items()}
        fill_rows({name: named[name] for name in named.keys() & translation.sources.keys()}, translation, weights)


def fill_as_configured(tensors: Mapping[str, Tensor], folder: Path, config: Config) -> None:
    """Call ``fill`` with the model and the ``initial_load_*`` options of a run. Adapters never start from a pickle."""
    module, shape = models.configured(config.model)
    options = config.checkpoint
    legacy_bin = options.initial_load_legacy_bin and not config.lora.enable
    resize = options.initial_load_resize_embeddings
    quantized = options.initial_load_in_hf_quantized
    fill(tensors, folder, module, shape, quantized, resize, legacy_bin, config.model.overrides.keys())


def sized_as(found: HubModel, config: Any) -> Any:
    """A model's Config with the rows of a folder's vocabulary, where the folder has fewer.

    Raises:
        ConfigError: where the folder has more.
    """
    as_is.check_rows(config.vocab_size, found.config.vocab_size)
    return dataclasses.replace(config, vocab_size=found.config.vocab_size)


def fill_rows(tensors: Mapping[str, Tensor], translation: mapping.Translation, weights: HubWeights) -> None:
    """Fill our tensors in place; of one with more rows than its file has, each row beyond is the mean of all there.

    The mean is what ``resize_token_embeddings`` of transformers draws around, with a variance of 1e-9 of that of the
    rows. Here it is added up in float64 in one order, so that it is the same on every mesh.
    """
    grown = {
        name: tensor
        for name, tensor in tensors.items()
        if translation.shapes[name] and tensor.ndim and tensor.shape[0] > translation.shapes[name][0]
    }
    mapping.fill({name: tensor for name, tensor in tensors.items() if name not in grown}, translation, weights)
    for name, tensor in grown.items():
        # Rows that are there and that this rank holds
        rows, *rest = translation.shapes[name]
        local = local_tensor(tensor).detach()
        (own, *others) = local_slices(tensor)
        old = slice(min(own.start, rows), min(own.stop, rows))
        if old.start < old.stop:
            part = mapping.read_part(name, (old, *others), translation, weights, tensor.dtype)
            local[: old.stop - own.start].copy_(part)
        # Rows beyond: every rank that holds some reads the whole tensor for its mean
        if own.stop > rows:
            total = torch.zeros(rest, dtype=torch.float64)
            for box in mapping.row_blocks((rows, *rest)):
                total += mapping.read_part(name, box, translation, weights, torch.float32).double().sum(0)
            local[max(0, rows - own.start) :].copy_((total / rows)[tuple(others)].to(tensor.dtype))


def _grown(found: HubModel, vocab_size: int) -> HubModel:
    if not vocab_size or vocab_size == found.config.vocab_size:
        return found
    if vocab_size < found.config.vocab_size:
        raise ConfigError(
            f"--vocab_size={vocab_size} is below the {found.config.vocab_size} rows of the file; give more"
        )
    if found.hub is None:
        raise ConfigError(
            f"--vocab_size={vocab_size} has no effect on {found.config.class_name}, a class of transformers"
        )
    return dataclasses.replace(
        found,
        overrides={**found.overrides, "vocab_size": vocab_size},
        config=dataclasses.replace(found.config, vocab_size=vocab_size),
    )


def _tell(ignored: list[str]) -> None:
    if ignored:
        logger.info(f"{len(ignored)} tensors of the file are skipped, such as {ignored[0]}")
