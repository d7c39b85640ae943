"""Implement verl's BaseEngine with the trainer's mesh, sharded model, runner, optimizer and checkpoints.

verl's losses are sums divided by the number of tokens of all data-parallel ranks. verl also multiplies them by the
number of these ranks, because its other engines average gradients. This engine sums gradients, so it divides the loss
by the number of data-parallel ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.device import get_device_id, get_device_name
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from shardtrain import config as configs
from shardtrain import distributed, optim
from shardtrain.checkpoint.collectives import all_ranks, first_rank
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.compat.verl import micro_batches
from shardtrain.compat.verl.engine_config import EngineConfig, translate
from shardtrain.config import derived
from shardtrain.distributed import BATCH_AXES, fsdp, grad_clip
from shardtrain.distributed.context_parallel.cores import splittable_length
from shardtrain.distributed.pipeline_parallel import AllStages
from shardtrain.distributed.process_group import World
from shardtrain.distributed.token_runner import (
    Outputs,
    TokenLossPipeline,
    TokenLossRunner,
    with_token_losses,
)
from shardtrain.hf import hf_export, importing, source
from shardtrain.hf.hub_model import translation_of
from shardtrain.hf.mapping import in_hub_format
from shardtrain.ops.dtensor import to_full
from shardtrain.train import document_isolation
from shardtrain.train.base_weights import without_new_head
from shardtrain.train.build import set_numerics
from shardtrain.train.run import model_state_dict
from shardtrain.train.task_model import build_model
from shardtrain.utils import variables
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

_FACT = "verl"
"""Key of the engine's state in the facts of a checkpoint."""
LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]
"""verl's loss of a micro-batch. Takes model_output, data and dp_group, and returns the loss and metrics."""


class VerlEngine(BaseEngine):  # type: ignore[misc]
    """Base class of the engines.

    Attributes:
        has_values: True if the model returns one value per token instead of logits, as a critic does.
    """

    has_values = False

    def __init__(
        self,
        model_config: Any,
        engine_config: EngineConfig,
        optimizer_config: Any,
        checkpoint_config: Any,
    ) -> None:
        """Check the configuration, and build the mesh (a collective). ``initialize`` builds the model.

        Raises:
            ConfigError: an option is not supported.
        """
        super().__init__()
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.mode: str | None = None
        device_type = get_device_name()
        device = torch.device(device_type)
        if device_type != "cpu":
            device = torch.device(device_type, get_device_id())
        trained = None if engine_config.forward_only else optimizer_config
        loaded = translate(model_config, engine_config, trained, device_type, self.has_values)
        world = World(
            dist.get_rank(),
            dist.get_world_size(),
            variables.number(os.environ, "LOCAL_RANK", "0"),
            device,
        )
        configs.require_to_build(loaded, world.size)
        self.config = loaded.config
        self.mesh = distributed.build(self.config, world)

    def initialize(self) -> None:
        """Build the model, load its weights, and build the optimizer (a collective)."""
        config = self.config
        set_numerics(config, self.mesh.device)

        # The sharded model and its weights
        built = build_model(
            config, self.mesh, with_loss=partial(with_token_losses, has_values=self.has_values)
        )
        self.built = built
        self.runner: TokenLossRunner | TokenLossPipeline = built.runner  # type: ignore[assignment]
        weights = without_new_head(config, model_state_dict(built.runner))
        folder = Path(self.model_config.local_path)
        all_ranks(partial(importing.fill, weights, folder, built.module, built.shape))

        # Rows are packed, so the model must not attend across sequences.
        model = self.runner.parts[0]
        if isinstance(self.runner, TokenLossPipeline):
            model = AllStages(self.runner)
        document_isolation.check(model, built.module, self.mesh, config)

        # The optimizer and its schedule
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None
        if not self.engine_config.forward_only:
            self.optimizer = optim.build(
                built.runner.optimizer_parameters().items(),
                config.optimizer,
                built.names,
                config.debug.seed,
            )
            self.lr_scheduler = self._build_lr_scheduler(self.optimizer)

        # verl expects that offloaded tensors stay in host memory until it enters train or eval mode.
        self.to(
            "cpu",
            model=self.is_param_offload_enabled,
            optimizer=self.is_optimizer_offload_enabled,
            grad=self.is_param_offload_enabled,
        )

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the same learning-rate schedule as verl's engine fsdp."""
        options = self.optimizer_config
        total_steps = options.total_training_steps
        warmup_steps = options.lr_warmup_steps
        if warmup_steps is None or warmup_steps <= 0:
            warmup_steps = int(options.lr_warmup_steps_ratio * total_steps)
        if options.lr_scheduler_type == "constant":
            return get_constant_schedule_with_warmup(optimizer, warmup_steps)
        return get_cosine_schedule_with_warmup(
            optimizer,
            warmup_steps,
            total_steps,
            min_lr_ratio=options.min_lr_ratio,
            num_cycles=options.num_cycles,
            zero_indexed_step=options.zero_indexed_step,
        )

    # Position in the mesh

    def get_data_parallel_rank(self) -> int:
        return self.mesh.rank(*BATCH_AXES)

    def get_data_parallel_size(self) -> int:
        return self.mesh.size(*BATCH_AXES)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data_parallel_group

    @cached_property
    def _data_parallel_group(self) -> dist.ProcessGroup:
        if self.mesh.size("dp_replicate") == 1:
            return self.mesh.group("dp_shard")
        return self.mesh.submesh(*BATCH_AXES)._flatten("dp").get_group()

    def is_mp_src_rank_with_outputs(self) -> bool:
        is_last_stage = self.mesh.rank("pp") == self.mesh.size("pp") - 1
        return is_last_stage and self.mesh.rank("cp", "tp") == 0

    # Modes and offload

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload)

    def train_mode(self, **kwargs: Any) -> Mode:
        return Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> Mode:
        return Mode(self, "eval", **kwargs)

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        target = torch.device("cpu") if device == "cpu" else self.mesh.device
        if model:
            for part in self.runner.parts:
                part.to(target)
        if optimizer and self.optimizer is not None:
            for states in self.optimizer.state.values():
                for name, value in states.items():
                    if isinstance(value, Tensor):
                        states[name] = value.to(target)

    # Training

    def optimizer_zero_grad(self) -> None:
        self.runner.zero_grad()

    def optimizer_step(self) -> float:
        """Clip the gradients, update the weights, and return the gradient norm.

        If the norm is not finite, skip the update.
        """
        assert self.optimizer is not None, "an engine with forward_only has no optimizer"
        norm = float(self.runner.gradient_norm())
        if not math.isfinite(norm):
            logger.warning(f"the gradient norm is {norm}, so this update is skipped")
            self.runner.zero_grad()
            return norm
        factor = min(1.0, self.config.training.max_norm / (norm + 1e-6))
        grad_clip.scale_gradients(self.runner.parameters().values(), factor)
        self.runner.update(self.optimizer)
        return norm

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    # Weights for the rollout

    def get_per_tensor_param(
        self, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return an iterator over all unsharded weights in the compute dtype, by their Hugging Face names.

        Each step of the iterator is a collective. The keyword arguments of verl only apply to adapters.
        """
        dtype = getattr(torch, derived.compute_dtype(self.config))
        translation = translation_of(
            self.built.module, self.built.shape, self.model_config.local_path
        )
        tensors: dict[str, Tensor] = {**self.runner.parameters(), **self.runner.buffers()}
        device = self.mesh.device

        # A pipeline rank only has the tensors of its stages. For each tensor, find the last rank that has it.
        names = list(translation.sources)
        rank = self.mesh.rank("pp")
        holders = torch.tensor([rank if name in tensors else -1 for name in names], device=device)
        holders = self.mesh.max(holders, over=("pp",))

        def unsharded() -> Iterator[tuple[str, Tensor]]:
            for name, holder in zip(names, holders.tolist(), strict=True):
                if name in tensors:
                    # The tensor may be offloaded, but it must be gathered on the device.
                    full = to_full(tensors[name].detach().to(device)).to(dtype)
                # The rank found above broadcasts the tensor to the other pipeline ranks.
                if self.mesh.size("pp") > 1:
                    if holder != rank:
                        full = torch.empty(translation.shapes[name], dtype=dtype, device=device)
                    group = self.mesh.group("pp")
                    dist.broadcast(full, dist.get_global_rank(group, holder), group)
                yield name, full

        return in_hub_format(unsharded(), translation), None

    # Checkpoints

    @cached_property
    def _manager(self) -> BaseCheckpointManager:
        """verl's manager, which decides what to save and load, and which checkpoints to keep."""
        return BaseCheckpointManager(
            self.runner, self.optimizer, checkpoint_config=self.checkpoint_config
        )

    def _checkpoints(self, local_path: str) -> Checkpoints:
        checkpoint = replace(
            self.config.checkpoint, enable=True, folder=".", keep_latest_k=0, async_mode="disabled"
        )
        job = replace(self.config.job, dump_folder=local_path)
        return Checkpoints(replace(self.config, job=job, checkpoint=checkpoint))

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        assert self.optimizer is not None
        named = self.runner.optimizer_parameters().items()
        states = optim.state_tensors(self.optimizer, named)
        return {f"optimizer.{name}": tensor for name, tensor in states.items()}

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write ``local_path/step-N``, which can be loaded on any mesh (a collective).

        With "hf_model" in ``save_contents``, also write ``local_path/huggingface``.

        Raises:
            StorageError: the checkpoint cannot be written.
        """
        _refuse_hdfs(hdfs_path)
        manager = self._manager
        is_first = dist.get_rank() == 0
        if is_first:
            manager.ensure_checkpoint_capacity(max_ckpt_to_keep)

        # verl's configuration selects the parts of a checkpoint: model, optimizer and other state.
        rest: dict[str, Tensor] = {}
        facts: dict[str, Any] = {
            "state": TrainState().to_dict() | {"step": global_step},
            "model": {
                "name": self.config.model.name,
                "flavor": self.config.model.flavor,
                "overrides": dict(self.config.model.overrides),
            },
        }
        if self.optimizer is not None and manager.should_save_optimizer:
            rest = self._optimizer_tensors()
        if self.lr_scheduler is not None and manager.should_save_extra:
            facts[_FACT] = {"lr_scheduler_steps": self.lr_scheduler.last_epoch}

        checkpoints = self._checkpoints(local_path)
        try:
            weights = model_state_dict(self.runner)
            checkpoints.save(global_step, weights, rest, facts, last=False, wait=True)
        finally:
            checkpoints.close()
        if manager.should_save_hf_model:
            first_rank(partial(self._export, Path(local_path), global_step))
        if is_first:
            manager.register_checkpoint(local_path, max_ckpt_to_keep)

    def _export(self, folder: Path, step: int) -> None:
        hf_export.export(
            hf_export.Export(
                folder / f"step-{step}",
                folder / "huggingface",
                self.built.module,
                self.built.shape,
                source=source.of_folder(Path(self.model_config.local_path)),
            )
        )

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **kwargs: Any,
    ) -> None:
        """Load the newest step that ``save_checkpoint`` wrote to a folder (a collective). Nothing is deleted.

        Raises:
            CheckpointError: the folder has no undamaged checkpoint of this model.
        """
        _refuse_hdfs(hdfs_path)
        manager = self._manager
        checkpoints = self._checkpoints(local_path)
        path = checkpoints.choose(None).path
        rest = {}
        if self.optimizer is not None and manager.should_load_optimizer:
            rest = self._optimizer_tensors()
        facts = checkpoints.load(path, model_state_dict(self.runner), rest)
        saved = facts.get(_FACT)
        if self.lr_scheduler is not None and manager.should_load_extra and isinstance(saved, dict):
            self._resume_lr_scheduler(int(saved["lr_scheduler_steps"]))

    def _resume_lr_scheduler(self, steps: int) -> None:
        """Set the position of the learning-rate schedule, and the learning rate of this position."""
        scheduler = self.lr_scheduler
        scheduler.last_epoch = steps
        rates = [
            base * factor(steps)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        scheduler._last_lr = rates
        optim.set_learning_rate(self.optimizer, rates[0])

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run forward and, unless ``forward_only``, backward for this rank's part of a batch (a collective)."""
        micro_batches.check(data)
        group = self.get_data_parallel_group()

        # verl's losses divide by the number of tokens of all data-parallel ranks.
        num_tokens = data["loss_mask"].sum().to(self.mesh.device)
        dist.all_reduce(num_tokens, group=group)
        tensordict_utils.assign_non_tensor(
            data,
            batch_num_tokens=num_tokens.item(),
            dp_size=self.get_data_parallel_size(),
            # verl limits the tokens per device, and a context-parallel rank has only a part of each sequence.
            sp_size=self.mesh.size("cp"),
        )
        parts, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)

        # Pack each micro-batch. The runner calls the loss, which adds its results to ``outputs``.
        outputs: list[dict[str, Any]] = []
        packed = []
        multiple = splittable_length(self.mesh.size("tp"), self.mesh)
        for part in parts:
            micro_batch = part.to(self.mesh.device)
            loss = partial(self._loss, micro_batch, loss_function, outputs)
            packed.append(micro_batches.pack(micro_batch, multiple, loss))
        if forward_only:
            self.runner.forward_only(packed)
        else:
            weight = torch.tensor(1 / self.get_data_parallel_size(), device=self.mesh.device)
            self.runner.forward_backward(packed, weight)
            # Keep the model's outputs only for callers that need them, because all micro-batches would add up.
            if not tensordict_utils.get_non_tensor_data(data, "return_model_output", False):
                for output in outputs:
                    del output["model_output"]
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)  # type: ignore[no-any-return]

    def _loss(
        self,
        micro_batch: TensorDict,
        loss_function: LossFunction | None,
        outputs: list[dict[str, Any]],
        values: Outputs,
    ) -> Tensor:
        """Return verl's loss of a micro-batch, and add its results to ``outputs``."""
        if not tensordict_utils.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            values.pop("entropy", None)
        model_output = {}
        for name, values_1T in values.items():
            model_output[name] = micro_batches.nested_like(values_1T, micro_batch["input_ids"])
        loss = torch.ones((), device=self.mesh.device)
        metrics: dict[str, Any] = {}
        if loss_function is not None:
            loss, metrics = loss_function(
                model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
            )
        outputs.append(
            {
                "model_output": detach_tree(model_output),
                "loss": loss.detach().item(),
                "metrics": metrics,
            }
        )
        return loss


def _refuse_hdfs(hdfs_path: str | None) -> None:
    if hdfs_path is not None:
        rule = "is not supported by the engine shardtrain"
        raise ConfigError(Problem("trainer.default_hdfs_dir", hdfs_path, rule, "set it to null"))


@EngineRegistry.register(  # type: ignore[untyped-decorator]
    model_type="language_model", backend="shardtrain", device=["cuda", "cpu"]
)
class LanguageModelEngine(VerlEngine):
    """Engine of policies, reference policies and SFT."""


@EngineRegistry.register(  # type: ignore[untyped-decorator]
    model_type="value_model", backend="shardtrain", device=["cuda", "cpu"]
)
class ValueModelEngine(VerlEngine):
    """Engine of critics."""

    has_values = True


class Mode(BaseEngineCtx):  # type: ignore[misc]
    """Context manager: put the model into train or eval mode, and load offloaded tensors."""

    def __enter__(self) -> None:
        super().__enter__()
        for part in self.engine.runner.parts:
            part.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for part in self.engine.runner.parts:
            fsdp.free_gathered(part)
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)
