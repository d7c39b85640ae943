"""Load the frozen base weights of a LoRA run.

Checkpoints do not contain them, only a fingerprint that identifies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain import models, tasks
from shardtrain.checkpoint.collectives import (
    all_ranks,
    all_ranks_gather,
    broadcast_json,
    first_rank,
)
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.checkpoint.storage import Place, place
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.hf import importing
from shardtrain.hf.as_is import is_as_is
from shardtrain.hf.hub_model import check_noted
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
    config: Config,
    runner: Runner,
    adapters: spec.Spec,
    device: torch.device,
    checkpoints: Checkpoints,
) -> dict[str, Any]:
    """Load all weights except the adapters: frozen weights, and modules that are trained in full.

    A collective.

    Returns:
        The facts that checkpoints record: the adapters' options, and the path and the fingerprint of the
        base weights.

    Raises:
        ConfigError: the path contains adapters, or a different model than the configured one.
        CheckpointError: the weights cannot be read.
    """
    state: dict[str, Tensor] = {**runner.parameters(), **runner.buffers()}
    tensors = {}
    for name, tensor in state.items():
        if not is_adapter(name):
            tensors[f"{WEIGHTS_PREFIX}{name}"] = tensor.detach()

    if config.checkpoint.initial_load_in_hf:
        tensors = without_new_head(config, tensors)

    # _load_quantized fills all weights. The functions below then have nothing to fill, and return only the
    # fingerprint.
    if config.lora.base_dtype != quantize.WHOLE:
        _load_quantized(config, runner, device, tensors)
        tensors = {}
    if config.lora.random_base:
        base: dict[str, Any] = {
            "path": None,
            "fingerprint": random_fingerprint(config, device.type),
        }
    elif config.checkpoint.initial_load_in_hf:
        base = _load_hub(config, tensors)
    else:
        base = _load_checkpoint(
            config, place(str(config.checkpoint.initial_load_path)), checkpoints, tensors
        )

    # DoRA's magnitudes start as the norms of the weights, so compute them now that the weights are loaded.
    if adapters.use_dora:
        for part in runner.parts:
            spec.start_magnitudes(part)
    origin = base["path"] or "drawn from the seed (lora.random_base)"
    logger.info(f"frozen base weights: {origin}, fingerprint {str(base['fingerprint'])[:20]}")
    return {**adapters.facts(), "base": base}


def without_new_head(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors to load from a Hugging Face folder.

    These are all tensors, except the new classification head of a native model, which the folder lacks.
    """
    module = models.find(config.model.name)
    if not tasks.open_task(config).num_labels or is_as_is(module):
        return dict(tensors)
    logger.info(
        f"the folder does not contain the head of {config.task.name}; the head keeps its initial weights"
    )
    head = f"{WEIGHTS_PREFIX}{module.LAYOUT.last[-1]}."
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(head)}


def _load_quantized(
    config: Config, runner: Runner, device: torch.device, tensors: Mapping[str, Tensor]
) -> None:
    """Load all weights (a collective). Quantize the frozen matrices one at a time, to save memory.

    Raises:
        ConfigError: see ``FrozenWeights``.
        CheckpointError: see ``FrozenWeights``.
    """
    module, shape = models.configured(config.model)
    path = None if config.lora.random_base else Path(str(derived.initial_weights(config)))
    quantized_bytes = original_bytes = 0
    with FrozenWeights(path, module, shape, config) as weights:
        weights.fill(
            {name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in tensors.items()}
        )
        named_modules: list[tuple[str, torch.nn.Module]] = []
        for part in runner.parts:
            named_modules += part.named_modules()
        for name, linear in named_modules:
            # quantize.remove_quantized_weights has removed the weights that are to be quantized.
            if not isinstance(linear, FrozenLinear) or linear.weight is not None:
                continue
            # Read the unsharded weight, and keep only its quantized copy.
            weight = weights.read(f"{name}.weight", device)
            weight = weight.to(device, getattr(torch, config.training.dtype))
            if linear.transposed:
                weight = weight.t().contiguous()
            packed = quantize.Packed(weight, config.lora.base_dtype)
            linear.low_bits = packed
            quantized_bytes += packed.bytes
            original_bytes += weight.nbytes
    sizes = f"{format_bytes(quantized_bytes)} instead of {format_bytes(original_bytes)}"
    logger.info(f"frozen base weights quantized to {config.lora.base_dtype}: {sizes}")


def check_same(run: Run, path: object, facts: Mapping[str, Any]) -> None:
    """Reject a checkpoint that has no adapters, or whose adapters were trained on different base weights.

    Raises:
        ConfigError: the base weights differ.
        CheckpointError: the checkpoint has no adapters.
    """
    saved = facts.get(FACT)
    if spec.read_facts(facts, path) is None or not isinstance(saved, dict):
        raise CheckpointError(
            f"checkpoint {path} contains a full model and no adapters; to start from it, set {PATH} and use "
            "another job.dump_folder"
        )
    base = saved.get("base")
    old_path = old_fingerprint = None
    if isinstance(base, dict):
        old_path = base.get("path")
        old_fingerprint = base.get("fingerprint")
    if old_fingerprint != run.lora["base"]["fingerprint"]:
        rule = f"does not contain the base weights of the adapters in {path}"
        fix = f"use the original weights, which were at {old_path}"
        raise ConfigError(Problem(PATH, run.lora["base"]["path"], rule, fix))


def _load_hub(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    folder = Path(str(derived.initial_weights(config)))
    if tensors:
        all_ranks(partial(importing.fill_as_configured, tensors, folder, config))

    def hash_share() -> dict[str, str]:
        """Hash this rank's share of the files."""
        return fingerprint(folder, True, dist.get_rank(), dist.get_world_size())

    hashes: dict[str, str] = {}
    for share in all_ranks_gather(hash_share):
        hashes |= share
    return {"path": str(folder), "in_hf": True, "fingerprint": joined(hashes)}


def _load_checkpoint(
    config: Config, path: Place, checkpoints: Checkpoints, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    if FACT in checkpoints.facts(path):
        rule = "contains adapters without the base weights"
        fix = "merge the adapters first (shardtrain merge), or use the path of a full model"
        raise ConfigError(Problem(PATH, str(path), rule, fix))
    first_rank(lambda: check_noted(config.model, path))
    if tensors:
        checkpoints.load(path, tensors, {})
    return {
        "path": str(path),
        "in_hf": False,
        "fingerprint": broadcast_json(joined(fingerprint(path, False))),
    }
