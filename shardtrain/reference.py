"""The weights that a run began with, frozen beside those that learn: what a task of preferences compares with.

They are read again at every start, from ``checkpoint.initial_load_path``, or drawn again from the seed, and sharded as
the model is. So they are no part of a checkpoint, and any mesh can continue a run. What ``first_weights.identity`` says
is part of what the data are known by, so that a run continues with no other reference than its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.agree import together
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.checkpoint.storage import Place
from shardtrain.config.schema import Config
from shardtrain.errors import CheckpointError
from shardtrain.first_weights import start_of
from shardtrain.hub import importing
from shardtrain.log import logger
from shardtrain.parallel import Mesh

if TYPE_CHECKING:
    from shardtrain.building import Built


def hold(task: Any, config: Config, mesh: Mesh) -> None:
    """Give a task that needs it the frozen model (a collective); does nothing for others.

    Raises:
        CheckpointError: when the first weights are damaged, or of another model.
    """
    if not getattr(task, "needs_reference", False):
        return
    from shardtrain.building import build_model  # which holds one for every run that needs it

    # adapters begin by adding nothing, so what they are beside is what the run began with
    built = build_model(replace(config, lora=replace(config.lora, enable=False)), mesh)
    start = start_of(config)
    if start is not None:
        _fill(built, config, start)
    for part in built.runner.parts:
        part.eval().requires_grad_(False)
    task.reference = built.runner.parts[0]
    logger.info(f"reference: {start or f'the weights drawn from debug.seed={config.debug.seed}'}, frozen")


def _fill(built: Built, config: Config, start: Place) -> None:
    named = {**built.runner.parameters(), **built.runner.buffers()}
    weights = {f"{WEIGHTS_PREFIX}{name}": tensor.detach() for name, tensor in named.items()}
    if config.checkpoint.initial_load_in_hf:
        quantized = config.checkpoint.initial_load_in_hf_quantized
        resize = config.checkpoint.initial_load_resize_embeddings
        together(lambda: importing.fill(weights, Path(str(start)), built.module, built.shape, quantized, resize))
        return

    def verify() -> None:
        if damage := tensor_files.find_damaged_file(manifest.read(start), start):
            raise CheckpointError(f"checkpoint {start} cannot be used: {damage}; use another one")

    together(verify)
    stored = manifest.read(start)
    tensor_files.check_names(weights, stored, start)
    together(lambda: tensor_files.read(weights, stored, start))
