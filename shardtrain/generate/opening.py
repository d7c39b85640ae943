"""A trained model with its tokenizer, from the folder of a run, of a checkpoint, or in Hugging Face format.

The checkpoint's bytes are verified before they are used. The model is that of the run's ``config.resolved.toml``, found
beside the checkpoint; a Hugging Face folder has its own ``config.json`` and tokenizer. A model file of a user's is
code, so a path to one is followed only where the user names the configuration: what lies in a folder from elsewhere is
never run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shardtrain import config as configs
from shardtrain import data, models, parallel
from shardtrain.checkpoint import agree, files, manifest, retention
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.manifest import MANIFEST, WEIGHTS_PREFIX, Manifest
from shardtrain.config import Config, Loaded, derived
from shardtrain.config.check_task import OF_TEXT
from shardtrain.config.schema import Parallelism, Training
from shardtrain.data.opening import tokenizer_of
from shardtrain.errors import CheckpointError, ConfigError, Problem
from shardtrain.hub import importing
from shardtrain.hub.opening import config_of, is_hub_folder
from shardtrain.layout import Layout
from shardtrain.log import logger
from shardtrain.parallel import expert, tensor
from shardtrain.parallel.world import World
from shardtrain.run_folder import RESOLVED_CONFIG
from shardtrain.tied import tie, tied_names

_LEVELS = 4
"""A checkpoint lies at most so deep below its run's folder: job.dump_folder, checkpoint.folder, step-N."""


@dataclass(frozen=True)
class Opened:
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


def open_model(
    path: Path,
    config_file: Path | None = None,
    dtype: str | None = None,
    here: World | None = None,
    tokenizer_path: str | None = None,
) -> Opened:
    """Open ``step-N``, a folder of such, a run's folder, whose newest good checkpoint is taken, or a Hugging Face one.

    ``dtype`` is the type to hold and compute in; that in which the run computed unless given. ``here`` says where; with
    more than one rank each layer is split over all (a collective). The model is on the CPU unless given.
    ``tokenizer_path`` is for a Hugging Face folder that has no tokenizer.

    Raises:
        ConfigError: when the configuration is missing or does not fit.
        CheckpointError: when there is no checkpoint, or it is damaged or of another model.
    """
    config = load_config(path, config_file, tokenizer_path).config
    if config.task.name not in OF_TEXT:
        rule = "predicts no next token, and there is no text to generate"
        raise ConfigError(Problem("task.name", config.task.name, rule, 'ask "shardtrain test" for its predictions'))
    found = None if is_hub_folder(path) else _find_checkpoint(path, config)
    module = models.find(config.model.name)
    shape = models.shape_of(module, config.model.flavor, config.model.overrides, config.model.norm_type)
    model = models.build(module, shape)
    tokenizer = tokenizer_of(config)
    if tokenizer.vocab_size > shape.vocab_size:
        rule = f"names a tokenizer with {tokenizer.vocab_size} ids, and the model has rows for {shape.vocab_size}"
        raise ConfigError(Problem("model.hf_assets_path", tokenizer.spec, rule, "use the model's own"))
    dtype = dtype or derived.compute_dtype(config)
    # biases of routers change by steps too small for another type: buffers keep theirs
    buffers = [(owner, name, b) for owner in model.modules() for name, b in owner.named_buffers(recurse=False)]
    model.to(getattr(torch, dtype))
    if here is not None and here.size > 1:
        _split(model, module.LAYOUT, config, getattr(shape, "num_experts", 0), here)
    device = here.device if here is not None else torch.device("cpu")
    ties = tied_names(model)
    model.to_empty(device=device)
    tie(model, ties)
    for owner, name, buffer in buffers:
        owner._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    with torch.no_grad():
        if found is None:
            importing.fill(_weights(model), path, module, shape)
        else:
            _fill(model, found[1], found[0])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    where = path if found is None else found[0]
    name = f"{config.model.name} {config.model.flavor}, {where}, {dtype} on {device.type}"
    return Opened(
        model.eval(), module.LAYOUT, tokenizer, config, name, here.size if here is not None else 1, found is None
    )


def load_config(path: Path, config_file: Path | None = None, tokenizer_path: str | None = None) -> Loaded:
    """The configuration of a run, from its checkpoint's or its own folder, unless the user names it."""
    if is_hub_folder(path):
        if config_file is not None:
            rule = f"has no effect: {path} is a Hugging Face folder, which says what it is"
            raise ConfigError(Problem("--config", str(config_file), rule, "leave it out"))
        return config_of(path, tokenizer_path)
    if tokenizer_path is not None:
        rule = "is for a Hugging Face folder, and a run has its own"
        raise ConfigError(Problem("--tokenizer", tokenizer_path, rule, "leave it out"))
    if config_file is not None:
        return configs.load(config_file)
    if not path.exists():
        raise ConfigError(Problem("--from", str(path), "does not exist", "name a run's folder or a checkpoint"))
    levels = [path.resolve(), *path.resolve().parents][:_LEVELS]
    found = next((level / RESOLVED_CONFIG for level in levels if (level / RESOLVED_CONFIG).is_file()), None)
    if found is None:
        rule = f"has no {RESOLVED_CONFIG} in it or above it"
        raise ConfigError(Problem("--from", str(path), rule, "name the run's configuration with --config"))
    loaded = configs.load(found)
    if loaded.config.model.name.endswith(".py"):
        rule = f"is a file of code, and {found} was found, not named"
        fix = f"if you trust it, add --config {found}"
        raise ConfigError(Problem("model.name", loaded.config.model.name, rule, fix))
    return loaded


def _find_checkpoint(path: Path, config: Config) -> tuple[Path, Manifest]:
    """The folder of a good checkpoint, all its bytes read (a collective)."""
    if (path / MANIFEST).exists() or retention.step_of(path) is not None:
        stored, damage = _verify(path)
        if stored is None:
            raise CheckpointError(f"{damage}; use another one")
        return path, stored
    folder = next((f for f in (path, path / config.checkpoint.folder) if retention.step_folders(f)), None)
    if folder is None:
        raise CheckpointError(f"--from {path} holds no checkpoint: no folder named step-N in it or in its checkpoint/")
    damages: list[str] = []
    # the first rank decides: where a shared folder lags, ranks would open different steps
    for step in reversed(agree.exchange(retention.step_folders(folder))[0]):
        stored, damage = _verify(folder / f"step-{step}")
        if stored is not None:
            for passed in damages:
                logger.warning(f"{passed}: passed over, using step-{step}")
            return folder / f"step-{step}", stored
        damages.append(damage)
    raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(damages[:3])}")


def _verify(path: Path) -> tuple[Manifest | None, str]:
    """The manifest of a checkpoint that is good, or what is wrong with it; ranks share the reading."""
    stored, damage = None, ""
    try:
        stored = manifest.read(path)
    except CheckpointError as error:
        damage = str(error)
    said = agree.exchange(damage)
    if stored is not None and not any(said):
        rank, size = _place()
        found = (files.find_damage(path, file) for file in stored.files[rank::size])
        said = agree.exchange(next((f"checkpoint {path}: {text}" for text in found if text), ""))
    damage = next((text for text in said if text), "")
    return (None, damage) if damage else (stored, "")


def _place() -> tuple[int, int]:
    group = torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if group else (0, 1)


def _split(model: nn.Module, layout: Layout, config: Config, num_experts: int, here: World) -> None:
    """Split each layer over all ranks, as in training; experts are dealt out where their number allows it."""
    degrees = Parallelism(
        tensor_parallel_degree=here.size,
        data_parallel_shard_degree=1,
        disable_loss_parallel=True,  # every rank needs all logits, to choose the same token
        expert_parallel_degree=here.size if num_experts and num_experts % here.size == 0 else 1,
    )
    training = Training(seq_len=64 * here.size, local_batch_size=1)
    config = Config(model=config.model, parallelism=degrees, training=training)
    problems = list(configs.check(Loaded(config)))
    if problems:
        raise ConfigError(problems)
    mesh = parallel.build(config, here)
    tensor.apply(model, layout, mesh, config)
    if layout.expert:
        expert.mesh_of_experts(mesh, config)
        expert.apply(model, layout, mesh, config)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {f"{WEIGHTS_PREFIX}{name}": tensor.detach() for name, tensor in named.items()}


def _fill(model: nn.Module, stored: Manifest, folder: Path) -> None:
    weights = _weights(model)
    tensor_files.check_names(weights, stored, folder)
    try:
        tensor_files.read(weights, stored, folder)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be loaded: {error}") from error
