"""verl's configuration classes for the engine, and their translation to a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.workers.config import ActorConfig as VerlActorConfig
from verl.workers.config import CriticConfig as VerlCriticConfig
from verl.workers.config import EngineConfig as VerlEngineConfig

from shardtrain import config as configs
from shardtrain.config import Loaded, Problem
from shardtrain.hf.hub_model import recognise
from shardtrain.utils.errors import ConfigError

SECTIONS = (
    "model",
    "training",
    "parallelism",
    "activation_checkpoint",
    "compile",
    "quantize",
    "comm",
    "debug",
)
"""Sections that ``options`` may contain. verl configures data, losses, schedules, logs and checkpoints."""
OPTIMIZERS = ("AdamW", "Adam")


@dataclass
class EngineConfig(VerlEngineConfig):  # type: ignore[misc]
    """Configuration of the engine. Degrees have the names and defaults of ``[parallelism]``.

    Attributes:
        options: Other options of shardtrain by section, such as ``{"compile": {"enable": True}}``.
    """

    strategy: str = "shardtrain"
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ActorConfig(VerlActorConfig):  # type: ignore[misc]
    """Actor or reference policy that uses the engine."""

    strategy: str = "shardtrain"
    shardtrain: EngineConfig = field(default_factory=EngineConfig)
    use_remove_padding: bool = True
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.shardtrain


@dataclass
class CriticConfig(VerlCriticConfig):  # type: ignore[misc]
    """Critic that uses the engine."""

    strategy: str = "shardtrain"
    shardtrain: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.shardtrain


def translate(
    model: Any, engine: EngineConfig, optimizer: Any, device: str, has_values: bool
) -> Loaded:
    """Translate verl's configuration of the model, engine and optimizer to the configuration of a run.

    Args:
        model: verl's HFModelConfig.
        engine: configuration of this engine.
        optimizer: verl's FSDPOptimizerConfig. None for an engine that only runs forward.
        device: type of the device.
        has_values: True for a critic.

    Raises:
        ConfigError: options have no counterpart. The message lists them.
    """
    problems = _unsupported(model, engine, optimizer)
    if problems:
        raise ConfigError(problems)
    hub_model = recognise(Path(model.local_path))
    overrides = dict(hub_model.overrides)
    # Turn the load-balancing loss of experts off, because verl's losses do not include it.
    if hub_model.hub is None:
        overrides["balance_loss_coeff"] = 0.0
    settings: dict[str, Any] = {
        "model": {"name": hub_model.name, "flavor": hub_model.flavor, "overrides": overrides},
        "training": {"device": device, "mixed_precision_param": engine.dtype},
        "parallelism": {
            "data_parallel_replicate_degree": engine.data_parallel_replicate_degree,
            "data_parallel_shard_degree": engine.data_parallel_shard_degree,
            "tensor_parallel_degree": engine.tensor_parallel_degree,
            "pipeline_parallel_degree": engine.pipeline_parallel_degree,
            "context_parallel_degree": engine.context_parallel_degree,
            "expert_parallel_degree": engine.expert_parallel_degree,
        },
        "activation_checkpoint": {
            "mode": "full" if model.enable_gradient_checkpointing else "none",
            "cpu_offload": model.enable_activation_offload,
        },
        "debug": {"seed": engine.seed, "deterministic": engine.full_determinism},
    }
    if has_values:
        # This task replaces the head by one with a single output, which cannot be sharded by columns.
        settings["task"] = {"name": "reward_model"}
        settings["parallelism"]["disable_loss_parallel"] = True
    if optimizer is not None:
        settings["optimizer"] = _optimizer(optimizer)
        settings["training"]["max_norm"] = optimizer.clip_grad
    arguments = _arguments(settings)
    # Later arguments replace earlier ones, so ``options`` take precedence.
    arguments += _arguments(engine.options)
    return configs.load(None, arguments)


def _optimizer(optimizer: Any) -> dict[str, Any]:
    beta1, beta2 = optimizer.betas
    return {
        "name": optimizer.optimizer,
        "lr": optimizer.lr,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": optimizer.weight_decay,
        **(optimizer.override_optimizer_config or {}),
    }


def _arguments(settings: Mapping[str, Any], prefix: str = "--") -> list[str]:
    """Convert nested settings to command-line arguments."""
    arguments = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            arguments += _arguments(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            arguments.append(f"{prefix}{name}={str(value).lower()}")
        elif isinstance(value, list | tuple):
            arguments += [f"{prefix}{name}", *map(str, value)]
        else:
            arguments.append(f"{prefix}{name}={value}")
    return arguments


def _unsupported(model: Any, engine: EngineConfig, optimizer: Any) -> list[Problem]:
    """Return a problem for each option of verl that would have no effect."""
    problems = []

    def refuse(option: str, value: Any, fix: str) -> None:
        problems.append(Problem(option, value, "is not supported by the engine shardtrain", fix))

    # Model
    override_config = model.override_config
    if override_config.get("model_config", override_config):
        fix = "remove it, and set fields of the model with options.model.overrides of the engine"
        refuse("model.override_config", dict(override_config), fix)
    if model.lora_rank or model.lora.get("rank", 0):
        refuse("model.lora_rank", model.lora_rank, "set it to 0, or use the engine fsdp")
    if model.lora_adapter_path:
        refuse("model.lora_adapter_path", model.lora_adapter_path, "merge the adapter first")
    if model.use_liger:
        refuse("model.use_liger", True, "set it to false")
    if model.use_fused_kernels or engine.use_fused_kernels:
        fix = "set it to false, because this engine computes log-probabilities without a copy of the logits"
        refuse("model.use_fused_kernels", True, fix)
    if model.tiled_mlp.get("enabled"):
        refuse("model.tiled_mlp.enabled", True, "set it to false")
    if model.mtp.enable:
        refuse("model.mtp.enable", True, "set it to false")
    if not (model.use_remove_padding and engine.use_remove_padding):
        refuse("model.use_remove_padding", False, "set it to true: rows are always packed")

    # Engine
    if engine.router_replay.mode != "disabled":
        refuse("router_replay.mode", engine.router_replay.mode, 'set it to "disabled"')
    if engine.dtype == "float16":
        refuse("dtype", engine.dtype, 'use "bfloat16" or "float32"')
    for section in engine.options:
        if section not in SECTIONS:
            fix = f"use only {', '.join(SECTIONS)}; verl configures everything else"
            refuse(f"options.{section}", None, fix)

    # Optimizer
    if optimizer is None:
        return problems
    for name in ("optimizer", "optimizer_impl", "lr_scheduler_type", "clip_grad"):
        if not hasattr(optimizer, name):
            rule = "must be of verl's class FSDPOptimizerConfig"
            fix = "use verl's file optim/fsdp.yaml"
            problems.append(Problem("optim", type(optimizer).__name__, rule, fix))
            return problems
    if optimizer.optimizer not in OPTIMIZERS:
        refuse("optim.optimizer", optimizer.optimizer, f"use one of {', '.join(OPTIMIZERS)}")
    if optimizer.optimizer_impl != "torch.optim":
        refuse("optim.optimizer_impl", optimizer.optimizer_impl, 'use "torch.optim"')
    return problems
