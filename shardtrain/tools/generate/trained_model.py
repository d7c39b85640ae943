"""Open a trained model with its tokenizer from a run folder, a checkpoint, or a Hugging Face folder.

The checkpoint is verified before use. Its model is defined by the run's ``config.resolved.toml``, found
near the checkpoint. A Hugging Face folder has its own ``config.json`` and tokenizer. A model file of the
user is code, so it is loaded only if the user passes the configuration explicitly. Code in downloaded
folders is never run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain import config as configs
from shardtrain import data, distributed, models
from shardtrain.checkpoint import tensor_reader, tensors
from shardtrain.checkpoint.choice import reject_step, reject_use_ema
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX, Manifest
from shardtrain.checkpoint.storage import Place
from shardtrain.config import Config, Loaded, derived
from shardtrain.config.rules.image_rules import IMAGE_TEXT
from shardtrain.config.rules.task_rules import OF_TEXT
from shardtrain.config.schema import Parallelism, Training
from shardtrain.data.build_dataset import tokenizer_of
from shardtrain.distributed import expert_parallel
from shardtrain.distributed.process_group import World
from shardtrain.distributed.tensor_parallel import plan as tensor_parallel
from shardtrain.hf import importing, source
from shardtrain.hf.folder_config import is_hub_folder
from shardtrain.hf.generation_config import EOS, end_ids, read_settings, trained_tokens
from shardtrain.layout import Layout
from shardtrain.lora import frozen, spec
from shardtrain.lora.peft import PeftFolder
from shardtrain.ops import token_mixing
from shardtrain.ops.attention_core import Broken
from shardtrain.ops.tied import to_empty
from shardtrain.tools.generate.locate_checkpoint import find_checkpoint, load_config
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.python_api import python_function


@dataclass(frozen=True)
class OpenedModel:
    """A trained model and its tokenizer, if any.

    Attributes:
        name: Description of the model and checkpoint for messages.
        width: Number of ranks over which each layer is split.
        settings: Generation settings of the Hugging Face folder, or of the folder from which a
            checkpoint was imported.
        num_ranks: Number of ranks of the run that saved the checkpoint.
        token_mixing: Place where a user's model mixes or counts tokens outside of its cores. A cache
            would then give
            wrong tokens. None if no place was found.
    """

    model: nn.Module
    layout: Layout
    open_tokenizer: Callable[[], data.Tokenizer]
    config: Config
    name: str
    width: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    token_mixing: Broken | None = None

    def __repr__(self) -> str:
        return f"OpenedModel({self.name})"

    @property
    @python_function
    def tokenizer(self) -> data.Tokenizer:
        """Tokenizer, opened on first use. Uses of the weights without text do not require one.

        Raises:
            ConfigError: the model has no tokenizer, or its vocabulary exceeds the model's.
        """
        return self.open_tokenizer()

    @property
    def end_ids(self) -> frozenset[int]:
        """End tokens: those listed in the Hugging Face folder, or those that end a text in training."""
        listed = end_ids(self.settings)
        if listed:
            return frozenset(listed)
        try:
            return frozenset(trained_tokens(self.tokenizer, self.config)[EOS])
        except ConfigError:
            # The file of the chat template was moved, which only matters with --chat.
            eos_id = self.tokenizer.eos_id
            return frozenset() if eos_id is None else frozenset({eos_id})

    def with_data(self, **options: Any) -> OpenedModel:
        """Return the same model with some [data] options replaced. None keeps an option."""
        changes = {name: value for name, value in options.items() if value is not None}
        changed_data = replace(self.config.data, **changes)
        return replace(self, config=replace(self.config, data=changed_data))


def open_model(
    path: Path,
    config_file: Path | None = None,
    dtype: str | None = None,
    world: World | None = None,
    *,
    tokenizer_path: str | None = None,
    base: Path | None = None,
    adapter: Path | None = None,
    step: str | None = None,
    use_ema: bool = False,
    needs_text: bool = True,
    may_read_images: bool = False,
) -> OpenedModel:
    """Open a Hugging Face folder, a checkpoint, or the checkpoint ``step`` of a run. Collective.

    Args:
        dtype: Dtype of weights and computation. Defaults to the run's compute dtype.
        world: Ranks and device. Each layer is split over all ranks. Defaults to one rank on the CPU.
        tokenizer_path: Tokenizer of a Hugging Face folder without one.
        base: Current path of the frozen weights that a run's adapters were trained on.
        adapter: PEFT folder with adapters to add to the model.
        step: Step to open, or a rule to choose it: see ``checkpoint.choice``.
        use_ema: Open the averages of the trained weights (``training.ema_decay``).
        needs_text: Open the tokenizer now. Otherwise the model's own tokenizer is opened on first use.
        may_read_images: Accept a model that reads images.

    Raises:
        ConfigError: the configuration is missing or does not fit.
        CheckpointError: the checkpoint does not exist, is damaged, or belongs to another model.
    """
    config = load_config(path, config_file, tokenizer_path).config
    has_images = config.task.name == IMAGE_TEXT
    if config.task.name not in OF_TEXT and not (has_images and may_read_images):
        rule = "does not predict the next token, so it cannot generate text"
        fix = 'use "shardtrain test" for its predictions'
        if has_images:
            rule = "trains a model that reads images, and this verb passes no images to a model"
            fix = 'use "shardtrain generate" with --image, or "shardtrain train" with [validation]'
        raise ConfigError(Problem("task.name", config.task.name, rule, fix))
    module, shape = models.configured(config.model)
    # Only training uses the layers of multi-token prediction, so their weights are not loaded.
    shape = models.without_mtp(shape)
    weights = _StoredWeights(path, step, config, module, shape, base, adapter, use_ema)
    model = models.build(module, shape)
    kinds = ("causal", IMAGE_TEXT) if may_read_images else ("causal",)
    if getattr(model, "kind", "causal") not in kinds:
        raise ConfigError(
            Problem(
                "--from",
                str(path),
                rule=f"contains a {shape.class_name}, which cannot continue a text",
                fix="name a causal language model",
            )
        )
    # Trace a model of the user's, while it is on the meta device, for operations that a cache does not support.
    # The cache of this package's models is compared with a full forward pass by tests.
    mixing = None
    if config.model.name.endswith(".py"):
        mixing = token_mixing.outside_of_cores(model, module.LAYOUT)
    weights.adapt(model)

    open_tokenizer = functools.cache(
        functools.partial(_open_tokenizer, path, config, shape.vocab_size)
    )
    if needs_text or tokenizer_path is not None:
        open_tokenizer()

    # Set the dtype and kernels and split the layers on the meta device. Buffers keep their dtype, because
    # updates of router biases are too small for a narrower one. Save them here, because to_empty leaves
    # them undefined.
    dtype = dtype or derived.compute_dtype(config)
    buffers = []
    for owner in model.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            buffers.append((owner, name, buffer))
    model.to(getattr(torch, dtype))
    device = world.device if world is not None else torch.device("cpu")
    if device.type == "cpu":
        distributed.use_chosen_kernels(model)
    if world is not None and world.size > 1:
        _split(model, module.LAYOUT, config, getattr(shape, "num_experts", 0), world)

    # Allocate memory and load the weights.
    to_empty(model, device)
    for owner, name, buffer in buffers:
        owner._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    weights.fill(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    name = f"{derived.model_label(config.model)}, {weights.name}, {dtype} on {device.type}"
    return OpenedModel(
        model.eval(),
        module.LAYOUT,
        open_tokenizer,
        config,
        name,
        width=world.size if world is not None else 1,
        settings=weights.settings(),
        num_ranks=weights.num_ranks,
        token_mixing=mixing,
    )


def _open_tokenizer(path: Path, config: Config, vocab_size: int) -> data.Tokenizer:
    if not config.model.hf_assets_path and config.model.tokenizer_path is None:
        raise ConfigError(
            Problem(
                "--from",
                str(path),
                rule="has no tokenizer (tokenizer.json, tokenizer.model, vocab.json, ...)",
                fix='add --tokenizer with a path or "bytes"',
            )
        )
    tokenizer = tokenizer_of(config)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            Problem(
                "model.hf_assets_path",
                tokenizer.spec,
                rule=f"is a tokenizer with {tokenizer.vocab_size} ids, but the model has embeddings for {vocab_size}",
                fix="use the model's own tokenizer",
            )
        )
    return tokenizer


def _split(
    model: nn.Module, layout: Layout, config: Config, num_experts: int, world: World
) -> None:
    """Split each layer over all ranks, as in training.

    Use expert parallelism if the number of experts is divisible.
    """
    splits_experts = num_experts > 0 and num_experts % world.size == 0
    degrees = Parallelism(
        tensor_parallel_degree=world.size,
        data_parallel_shard_degree=1,
        disable_loss_parallel=True,  # every rank needs all logits, to choose the same token
        expert_parallel_degree=world.size if splits_experts else 1,
    )
    # The checks of a run's configuration require a batch.
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


class _StoredWeights:
    """Verified weights at a path.

    ``adapt`` adds adapter modules to the model, then ``fill`` loads the weights.
    """

    _stored: Manifest | None

    def __init__(
        self,
        path: Path,
        step: str | None,
        config: Config,
        module: ModuleType,
        shape: Any,
        base: Path | None,
        adapter: Path | None,
        use_ema: bool,
    ) -> None:
        """Find and verify the weights. Collective. Raises the errors of ``open_model``."""
        self.where: Place = path
        self.name = str(path)
        self.num_ranks = 1
        self._stored = None
        if is_hub_folder(path):
            reject_step(step, path)
            reject_use_ema(use_ema, path)
        else:
            chosen = find_checkpoint(path, config, step)
            # An address of an object store, or a folder, which may have other files next to the checkpoint.
            self.where = chosen.path
            path = Path(str(chosen.path))
            self.name = str(chosen)
            self._stored = chosen.stored
            if use_ema:
                self._stored = chosen.stored.with_averages(chosen.path)
                self.name += ", averaged weights"
            self.num_ranks = chosen.stored.world_size
        self._path = path
        self._config = config
        self._module = module
        self._shape = shape
        self._base = base
        self._spec = (
            None if self._stored is None else spec.read_facts(self._stored.facts, self.where)
        )
        if self._spec is None and base is not None:
            raise ConfigError(
                Problem(
                    "--base",
                    str(base),
                    rule="is only for adapters, but this is a full model",
                    fix="remove it",
                )
            )
        if self._spec is not None and adapter is not None:
            raise ConfigError(
                Problem(
                    "--adapter",
                    str(adapter),
                    rule=f"would be added to {self.where}, which already contains adapters",
                    fix="merge these first (shardtrain merge)",
                )
            )
        self._peft = None if adapter is None else PeftFolder(adapter, module, shape)

    def settings(self) -> dict[str, Any]:
        """Return the generation settings of the opened Hugging Face folder, or of the folder of an import.

        Empty if neither exists.
        """
        origin = source.of_path(self._path)
        if origin is None:
            return {}
        return read_settings(origin)

    def _adapters(self) -> spec.Spec | None:
        """Adapters of the model: those of ``--adapter``, or those of the checkpoint."""
        if self._peft is not None:
            return self._peft.spec
        return self._spec

    def adapt(self, model: nn.Module) -> None:
        """Add adapter modules, if any, to a model on the meta device."""
        adapters = self._adapters()
        if adapters is not None:
            spec.apply(model, adapters)

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Load this rank's shards of the model's tensors."""
        adapters = self._adapters()
        base_tensors: dict[str, Tensor] = {}
        adapter_tensors: dict[str, Tensor] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if adapters is not None and adapters.holds(name):
                adapter_tensors[name] = tensor
            else:
                base_tensors[name] = tensor

        # Adapter weights come from the PEFT folder or the checkpoint. Frozen weights come from the base model.
        if self._stored is None:
            importing.fill(_prefixed(base_tensors), self._path, self._module, self._shape)
        elif self._spec is None:
            self._read(base_tensors)
        else:
            frozen_weights = frozen.find(
                self._stored.facts, self._path, self._config, self._base, self._module, self._shape
            )
            with frozen_weights as weights:
                weights.fill(base_tensors)
            self._read(adapter_tensors)
        if self._peft is not None:
            self._peft.fill(dict(model.named_parameters(remove_duplicate=False)))

    def _read(self, named: Mapping[str, Tensor]) -> None:
        assert self._stored is not None
        weights = _prefixed(named)
        stored = self._stored
        # The model has no layers of multi-token prediction, unlike the checkpoint of its run.
        mtp_layers = self._module.LAYOUT.mtp_layers
        if mtp_layers:
            kept = {}
            for name, tensor in stored.tensors.items():
                if not name.startswith(f"{WEIGHTS_PREFIX}{mtp_layers}."):
                    kept[name] = tensor
            stored = replace(stored, tensors=kept)
        tensors.check_names(weights, stored, self.where)
        try:
            tensor_reader.read(weights, stored, self.where)
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.where} cannot be loaded: {error}") from error


def _prefixed(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{WEIGHTS_PREFIX}{name}": tensor.detach() for name, tensor in named.items()}
