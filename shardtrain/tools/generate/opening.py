"""A trained model with its tokenizer, from the folder of a run, of a checkpoint, or in Hugging Face format.

The checkpoint's bytes are verified before they are used. The model is that of the run's ``config.resolved.toml``, found
beside the checkpoint; a Hugging Face folder has its own ``config.json`` and tokenizer. A model file of a user's is
code, so a path to one is followed only where the user names the configuration: what lies in a folder from elsewhere is
never run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from shardtrain import config as configs
from shardtrain import data, distributed, models
from shardtrain.config import Config, Loaded, derived
from shardtrain.config.rules.task import OF_TEXT
from shardtrain.config.schema import Parallelism, Training
from shardtrain.data.build_dataset import tokenizer_of
from shardtrain.distributed import expert_parallel, tensor_parallel
from shardtrain.distributed.process_group import World
from shardtrain.layout import Layout
from shardtrain.ops.tied import tie, tied_names
from shardtrain.tools.generate.load_weights import Held
from shardtrain.tools.generate.locate_checkpoint import load_config
from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class OpenedModel:
    """What text can be generated from."""

    model: nn.Module
    layout: Layout
    tokenizer: data.Tokenizer
    config: Config
    name: str
    """Model and checkpoint in words."""
    width: int = 1
    """Ranks over which each layer is split."""
    from_hub: bool = False
    """Whether it lay in a Hugging Face folder."""

    def __repr__(self) -> str:
        return f"OpenedModel({self.name})"

    def with_bos(self, add_bos: bool | None) -> OpenedModel:
        """The same with data.add_bos set, or as it is where that is None."""
        if add_bos is None:
            return self
        config = replace(self.config, data=replace(self.config.data, add_bos=add_bos))
        return replace(self, config=config)


def open_model(
    path: Path,
    config_file: Path | None = None,
    dtype: str | None = None,
    world: World | None = None,
    *,
    tokenizer_path: str | None = None,
    base: Path | None = None,
    adapter: Path | None = None,
) -> OpenedModel:
    """Open ``step-N``, a folder of such, a run's folder, whose newest good checkpoint is taken, or a Hugging Face one.

    ``dtype`` is the type to hold and compute in; that in which the run computed unless given. The model is on the
    device of ``world``, and with more than one rank each layer is split over all (a collective); else on the CPU.
    ``tokenizer_path`` is for a Hugging Face folder that has no tokenizer. ``base`` is where the weights beside a run's
    adapters are now, ``adapter`` a folder of PEFT to add to a whole model.

    Raises:
        ConfigError: when the configuration is missing or does not fit.
        CheckpointError: when there is no checkpoint, or it is damaged or of another model.
    """
    config = load_config(path, config_file, tokenizer_path).config
    if config.task.name not in OF_TEXT:
        rule = "predicts no next token, and there is no text to generate"
        raise ConfigError(Problem("task.name", config.task.name, rule, 'ask "shardtrain test" for its predictions'))
    module = models.find(config.model.name)
    shape = models.shape_of(module, config.model.flavor, config.model.overrides, config.model.norm_type)
    held = Held(path, config, module, shape, base, adapter)
    model = models.build(module, shape)
    if getattr(model, "kind", "causal") != "causal":
        rule = f"holds a {shape.class_name}, which does not continue a text"
        raise ConfigError(Problem("--from", str(path), rule, "name a causal language model"))
    held.adapt(model)
    tokenizer = tokenizer_of(config)
    if tokenizer.vocab_size > shape.vocab_size:
        rule = f"names a tokenizer with {tokenizer.vocab_size} ids, and the model has rows for {shape.vocab_size}"
        raise ConfigError(Problem("model.hf_assets_path", tokenizer.spec, rule, "use the model's own"))
    dtype = dtype or derived.compute_dtype(config)
    # biases of routers change by steps too small for another type: buffers keep theirs
    buffers = [(owner, name, b) for owner in model.modules() for name, b in owner.named_buffers(recurse=False)]
    model.to(getattr(torch, dtype))
    device = world.device if world is not None else torch.device("cpu")
    if device.type == "cpu":
        distributed.use_chosen_kernels(model)
    if world is not None and world.size > 1:
        _split(model, module.LAYOUT, config, getattr(shape, "num_experts", 0), world)
    ties = tied_names(model)
    model.to_empty(device=device)
    tie(model, ties)
    for owner, name, buffer in buffers:
        owner._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    held.fill(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    name = f"{config.model.name} {config.model.flavor}, {held.where}, {dtype} on {device.type}"
    width = world.size if world is not None else 1
    return OpenedModel(model.eval(), module.LAYOUT, tokenizer, config, name, width, held.from_hub)


def _split(model: nn.Module, layout: Layout, config: Config, num_experts: int, world: World) -> None:
    """Split each layer over all ranks, as in training; experts are dealt out where their number allows it."""
    degrees = Parallelism(
        tensor_parallel_degree=world.size,
        data_parallel_shard_degree=1,
        disable_loss_parallel=True,  # every rank needs all logits, to choose the same token
        expert_parallel_degree=world.size if num_experts and num_experts % world.size == 0 else 1,
    )
    training = Training(seq_len=64 * world.size, local_batch_size=1)
    config = Config(model=config.model, parallelism=degrees, training=training)
    problems = list(configs.check(Loaded(config)))
    if problems:
        raise ConfigError(problems)
    mesh = distributed.build(config, world)
    tensor_parallel.apply(model, layout, mesh, config)
    if layout.expert:
        expert_parallel.mesh_of_experts(mesh, config)
        expert_parallel.apply(model, layout, mesh, config)
