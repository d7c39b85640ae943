"""A Hugging Face folder into a checkpoint, or straight into the parameters of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain import models
from shardtrain.checkpoint import whole
from shardtrain.errors import ConfigError
from shardtrain.hub import as_is, mapping
from shardtrain.hub.model import HubModel, check_same, recognise, translation_of
from shardtrain.hub.weights import HubWeights
from shardtrain.log import logger
from shardtrain.state import TrainState

PREFIX = "model."


def to_checkpoint(folder: Path, output: Path, dtype: str = "", vocab_size: int = 0) -> HubModel:
    """Write the weights of ``folder`` as a checkpoint that holds weights alone; gives the model that they are of.

    ``dtype`` is that of the file's first weight where it is empty. With ``vocab_size`` the vocabulary grows: the new
    rows are the mean of those that are there, which leaves the old tokens' probabilities nearly as they were (Hewitt
    2021). One tensor at a time is in memory.

    Raises:
        ConfigError: for an architecture or a key of config.json that is not known, or an ``output`` that exists.
        CheckpointError: when tensors are missing, surplus or of other shapes, or a file is damaged.
        StorageError: when the checkpoint cannot be written.
    """
    found = recognise(folder)
    translation = translation_of(models.find(found.name), found.config, str(folder))
    with HubWeights(folder) as weights:
        _tell(mapping.check(translation, weights, found.passed_over))
        first = weights.dtype(next(iter(translation.their_shapes())))
        dtype = dtype or str(first).removeprefix("torch.")
        found = _grown(found, vocab_size)
        shapes = dict(translation.shapes)
        for name in shapes.keys() & {"embed.weight", "head.weight"}:
            shapes[name] = (found.config.vocab_size, *shapes[name][1:])

        def read(name: str) -> Tensor:
            name = name.removeprefix(PREFIX)
            tensor = mapping.read_whole(name, translation, weights, getattr(torch, dtype))
            more = shapes[name][0] - tensor.shape[0] if shapes[name] else 0
            return torch.cat((tensor, tensor.float().mean(0).to(tensor.dtype).expand(more, -1))) if more else tensor

        facts: dict[str, Any] = {
            "state": TrainState().to_dict(),
            "model": {"name": found.name, "flavor": found.flavor, "overrides": dict(found.overrides)},
        }
        whole.write(output, {PREFIX + name: shape for name, shape in shapes.items()}, dtype, read, facts)
    return found


def fill(tensors: Mapping[str, Tensor], folder: Path, module: Any, config: Any) -> None:
    """Fill this rank's part of a run's tensors (with the prefix ``model.``) straight from a Hugging Face folder.

    Raises:
        ConfigError: when the folder holds another model than the one configured.
        CheckpointError: when tensors are missing, surplus or of other shapes, or a file is damaged.
    """
    passed_over: Sequence[str]
    if as_is.is_as_is(module):
        as_is.check_same(config, folder)
    else:
        found = recognise(folder)
        check_same(module, config, found, folder)
        translation, passed_over = translation_of(module, config, str(folder)), found.passed_over
    with HubWeights(folder) as weights:
        if as_is.is_as_is(module):
            translation, passed_over = as_is.fit(models.build(module, config), config, weights)
        _tell(mapping.check(translation, weights, passed_over))
        named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        mapping.fill({name: named[name] for name in named.keys() & translation.sources.keys()}, translation, weights)


def _grown(found: HubModel, vocab_size: int) -> HubModel:
    if not vocab_size or vocab_size == found.config.vocab_size:
        return found
    if vocab_size < found.config.vocab_size:
        raise ConfigError(
            f"--vocab_size={vocab_size} is below the {found.config.vocab_size} rows of the file; give more"
        )
    return dataclasses.replace(
        found,
        overrides={**found.overrides, "vocab_size": vocab_size},
        config=dataclasses.replace(found.config, vocab_size=vocab_size),
    )


def _tell(ignored: list[str]) -> None:
    if ignored:
        logger.info(f"{len(ignored)} tensors of the file are passed over, such as {ignored[0]}")
