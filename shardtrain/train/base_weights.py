"""Load the frozen base weights of a LoRA run. They are never saved; a fingerprint in checkpoints identifies them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain import models, tasks
from shardtrain.checkpoint.collectives import all_ranks, all_ranks_gather, broadcast_json, first_rank
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.checkpoint.storage import Place, place
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.hf import importing
from shardtrain.hf.as_is import is_as_is
from shardtrain.hf.model import check_noted
from shardtrain.lora import FACT, PATH, quantize, spec
from shardtrain.lora.frozen import FrozenWeights, fingerprint, joined, random_fingerprint
from shardtrain.lora.linear import FrozenLinear, is_adapter
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.log import logger
from shardtrain.utils.units import format_bytes

if TYPE_CHECKING:
    from shardtrain.distributed import Runner
    from shardtrain.train.run import Run


def load(
    config: Config, runner: Runner, adapters: spec.Spec, device: torch.device, checkpoints: Checkpoints
) -> dict[str, Any]:
    """Fill the frozen weights and the initial values of modules that are trained in full (a collective).

    Returns:
        What checkpoints record: the facts of the adapters, and path and fingerprint of the base weights.

    Raises:
        ConfigError: the path holds adapters, or another model than the configured one.
        CheckpointError: it cannot be read.
    """
    state: dict[str, Tensor] = {**runner.parameters(), **runner.buffers()}
    tensors = {f"{WEIGHTS_PREFIX}{name}": tensor.detach() for name, tensor in state.items() if not is_adapter(name)}

    if config.checkpoint.initial_load_in_hf:
        tensors = without_new_head(config, tensors)

    # This fills all weights, quantized ones included. Only the fingerprint is left to compute below.
    if config.lora.base_dtype != quantize.WHOLE:
        _load_in_low_bits(config, runner, device, tensors)
        tensors = {}
    if config.lora.random_base:
        mark: dict[str, Any] = {"path": None, "fingerprint": random_fingerprint(config, device.type)}
    elif config.checkpoint.initial_load_in_hf:
        mark = _load_hub(config, tensors)
    else:
        mark = _load_checkpoint(config, place(str(config.checkpoint.initial_load_path)), checkpoints, tensors)

    # DoRA starts its magnitudes from the norms of the loaded weights
    if adapters.use_dora:
        for part in runner.parts:
            spec.start_magnitudes(part)
    logger.info(
        f"frozen weights: {mark['path'] or 'as initialised (lora.random_base)'}, {str(mark['fingerprint'])[:20]}"
    )
    return {**adapters.facts(), "base": mark}


def without_new_head(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that a Hugging Face folder has: all except a new classification head of a native model."""
    module = models.find(config.model.name)
    if not tasks.open_task(config).num_labels or is_as_is(module):
        return dict(tensors)
    logger.info(f"the head of {config.task.name} is not in the folder; it keeps its initial weights")
    head = f"{WEIGHTS_PREFIX}{module.LAYOUT.last[-1]}."
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(head)}


def _load_in_low_bits(config: Config, runner: Runner, device: torch.device, tensors: Mapping[str, Tensor]) -> None:
    """Fill the frozen weights that are not quantized, and quantize the others one at a time (a collective).

    Raises:
        ConfigError: see ``FrozenWeights``.
        CheckpointError: see ``FrozenWeights``.
    """
    module, shape = models.configured(config.model)
    path = None if config.lora.random_base else Path(str(derived.initial_weights(config)))
    packed_bytes = whole_bytes = 0
    with FrozenWeights(path, module, shape, config) as weights:
        weights.fill({name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in tensors.items()})
        for part in runner.parts:
            for name, linear in part.named_modules():
                if isinstance(linear, FrozenLinear) and linear.weight is None:
                    weight = weights.read(f"{name}.weight", device)
                    weight = weight.to(device, getattr(torch, config.training.dtype))
                    weight = weight.t().contiguous() if linear.transposed else weight
                    linear.low_bits = packed = quantize.Packed(weight, config.lora.base_dtype)
                    packed_bytes += packed.bytes
                    whole_bytes += weight.nbytes
    sizes = f"{format_bytes(packed_bytes)} instead of {format_bytes(whole_bytes)}"
    logger.info(f"frozen weights in {config.lora.base_dtype}: {sizes}")


def check_same(run: Run, path: object, facts: Mapping[str, Any]) -> None:
    """Reject a checkpoint without adapters, or with adapters that were trained on other base weights.

    Raises:
        ConfigError: the base weights differ.
        CheckpointError: the checkpoint holds no adapters.
    """
    saved = facts.get(FACT)
    if spec.read_facts(facts, path) is None or not isinstance(saved, dict):
        raise CheckpointError(
            f"checkpoint {path} holds a whole model and no adapters; start from it with {PATH}, in another folder"
        )
    base = saved.get("base")
    old = base.get("fingerprint") if isinstance(base, dict) else None
    new = run.lora["base"]["fingerprint"]
    if old != new:
        rule = f"holds other weights than those beside which the adapters of {path} were trained"
        where = base.get("path") if isinstance(base, dict) else None
        raise ConfigError(Problem(PATH, run.lora["base"]["path"], rule, f"give those again: they were at {where}"))


def _load_hub(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    folder = Path(str(derived.initial_weights(config)))
    if tensors:
        all_ranks(partial(importing.fill_as_configured, tensors, folder, config))
    # Each rank hashes a share of the files
    hashes: dict[str, str] = {}
    for share in all_ranks_gather(lambda: fingerprint(folder, True, dist.get_rank(), dist.get_world_size())):
        hashes |= share
    return {"path": str(folder), "in_hf": True, "fingerprint": joined(hashes)}


def _load_checkpoint(
    config: Config, path: Place, checkpoints: Checkpoints, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    if FACT in checkpoints.facts(path):
        rule = "holds adapters, and not the weights beside which they were trained"
        raise ConfigError(Problem(PATH, str(path), rule, "merge them first (shardtrain merge), or name a whole model"))
    first_rank(lambda: check_noted(config.model, path))
    if tensors:
        checkpoints.load(path, tensors, {})
    mark = broadcast_json(joined(fingerprint(path, False)))
    return {"path": str(path), "in_hf": False, "fingerprint": mark}
