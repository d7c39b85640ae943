"""The trainer's interface to a model on a mesh, which does not depend on the kind of parallelism.

``Runner`` is the base class. ``PlainRunner`` runs a model without pipeline stages. ``PipelineRunner`` in
``pipeline_parallel.py`` runs the stages of this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.distributed import (
    compute_copies,
    expert_parallel,
    float8_modules,
    fsdp,
    grad_clip,
    hf_balance,
    loss_at_head,
    partial_gradients,
)
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.cores import TokenBatch
from shardtrain.distributed.embedding_noise import EmbeddingNoise
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.source_losses import SourceLosses
from shardtrain.distributed.token_metrics import TokenMetrics
from shardtrain.distributed.update_in_backward import UpdateInBackward
from shardtrain.distributed.zero1 import SplitStates
from shardtrain.layout import Draw
from shardtrain.ops import init_weights
from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.cross_entropy import ChunkFunction, Vocabulary, chunk_loss, cross_entropy_sum
from shardtrain.ops.dtensor import local_tensor
from shardtrain.ops.grouped_loss import GroupedLoss
from shardtrain.ops.linear_cross_entropy import linear_cross_entropy_sum
from shardtrain.ops.loss_terms import CROSS_ENTROPY, LossTerms
from shardtrain.ops.targets import IGNORE
from shardtrain.ops.tied import to_empty
from shardtrain.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    # Runs without QK-clip do not import it.
    from shardtrain.distributed.qk_clip import QKClip


@dataclass(frozen=True)
class ModelParts:
    """The sharded modules of a rank: the model, or one module per pipeline stage of the rank."""

    modules: Sequence[nn.Module]
    mesh: Mesh
    config: Config
    chunk_loss: ChunkFunction | None
    vocabulary: Vocabulary | None = None
    """Describes how tensor-parallel ranks split the columns of the logits. None if they do not."""
    has_experts: bool = False
    """True if the full model has experts, on this rank or on others."""
    training_chunk_loss: ChunkFunction | None = None
    """Like ``chunk_loss``, with the loss terms that only training adds."""
    embedding_noise: EmbeddingNoise | None = None
    """Noise on the output of the embedding, if this rank has one and training adds noise."""
    num_depths: int = 0
    """Number of multi-token prediction layers of the full model."""
    qk_clip: QKClip | None = None
    """Bounds the attention logits of this rank's modules, or None."""


def loss_terms(config: Config) -> LossTerms:
    """Return the terms that training adds to the cross-entropy."""
    return LossTerms(config.training.label_smoothing, config.training.z_loss_weight)


class Runner(ABC):
    """A sharded model that can run forward, backward and update.

    Attributes:
        model_parts: the modules of this rank and their configuration.
        parts: the modules of this rank.
        token_metrics: the user's training metrics, or None.
        embedding_noise: noise on the embedding, or None. The trainer calls its ``begin_step`` and
            ``end_step``.
        source_losses: losses by data source, or None. The trainer calls its ``begin_step`` and ``end_step``.
    """

    def __init__(self, parts: ModelParts) -> None:
        self.model_parts = parts
        self.parts = parts.modules
        self._mesh = parts.mesh
        self._config = parts.config
        self._chunk_loss = parts.chunk_loss
        self._training_chunk_loss = parts.training_chunk_loss
        self._terms = loss_terms(parts.config)
        self._vocabulary = parts.vocabulary
        self.embedding_noise = parts.embedding_noise
        self.source_losses = None
        if parts.config.metrics.per_source_loss:
            num_sources = len(parts.config.data.sources)
            self.source_losses = SourceLosses(num_sources, parts.mesh.device)
        self._has_experts = parts.has_experts
        self._split_states: SplitStates | None = None
        self._before_pass: float8_modules.BeforePass | None = None
        self._in_backward: UpdateInBackward | None = None
        self._balance = hf_balance.of(parts.modules, parts.mesh)
        metrics = parts.config.metrics.token_metrics
        self.token_metrics = TokenMetrics(metrics, parts.mesh) if metrics else None

    @abstractmethod
    def forward_backward(self, batches: Sequence[TokenBatch], weight: Tensor) -> Tensor:
        """Run forward and backward for all batches, and add the gradients to the parameters (a collective).

        The gradients are those of ``weight`` times the sum of the loss over all batches of all ranks. They
        are reduced over ranks once, with the last batch.

        Returns:
            ``weight`` times this rank's loss sum, a float64 scalar. Zero if another stage computes the loss.
        """

    @abstractmethod
    def evaluate(self, batch: TokenBatch) -> Tensor:
        """Return this rank's loss sum of one batch, without gradients (a collective).

        Zero if another stage computes the loss.
        """

    @property
    def has_loss(self) -> bool:
        """True if this rank computes the loss. With pipeline stages only ranks of the last stage do."""
        return True

    @property
    def counts_filler(self) -> bool:
        """True if batches must mark padding tokens (``data.mark_filler``), because experts must not count them."""
        if self._balance is not None:
            return True
        return self._has_experts and expert_parallel.has_experts(self.parts)

    def local_targets(self, batches: Sequence[TokenBatch]) -> int:
        """Return the number of target tokens whose loss this rank computes.

        With context parallelism these are the targets in its part of each sequence.
        """
        if not self.has_loss:
            return 0
        count = 0
        for batch in batches:
            _, targets_Bt, _ = self._cut(batch)
            count += int((targets_Bt != IGNORE).sum())
        return count

    def _loss_function(self) -> tuple[ChunkFunction | None, LossTerms]:
        """Return the function for the loss of a chunk, and the loss terms for a split vocabulary.

        Only the training loss has label smoothing and z-loss. The validation loss is the plain cross-entropy.
        """
        if torch.is_grad_enabled():
            return self._training_chunk_loss, self._terms
        return self._chunk_loss, CROSS_ENTROPY

    def _loss_of_logits(self, logits_BtV: Tensor, targets_Bt: Tensor, weight: Tensor) -> Tensor:
        """Return ``weight`` times the loss sum of this rank's logits, and update metrics of tokens and sources."""
        if self.token_metrics:
            self.token_metrics.add(logits_BtV, targets_Bt, self._vocabulary)
        return cross_entropy_sum(
            logits_BtV,
            targets_Bt,
            weight,
            self._vocabulary,
            *self._loss_function(),
            grouped=self._grouped_loss(targets_Bt),
        )

    def _plain_loss_of_logits(
        self, logits_BtV: Tensor, targets_Bt: Tensor, weight: Tensor
    ) -> Tensor:
        """Return ``weight`` times the loss sum of this rank's logits, without updating metrics."""
        return cross_entropy_sum(
            logits_BtV, targets_Bt, weight, self._vocabulary, *self._loss_function()
        )

    def _grouped_loss(self, targets_Bt: Tensor) -> GroupedLoss | None:
        """Return the sums by data source to which a loss must be added, or None."""
        if self.source_losses is None:
            return None
        return self.source_losses.grouped(targets_Bt)

    def _cut(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, targets and positions of this rank's part of each sequence, each (B, T / cp)."""
        if self._mesh.size("cp") == 1:
            return batch.tokens_BT, batch.targets_BT, batch.positions_BT
        return context_parallel.cut(batch, self._mesh, self._config)

    def materialize(self, draws: Mapping[str, Draw], seed: int) -> None:
        """Allocate parameters and buffers and initialize them, with the same values on every mesh."""
        is_offloaded = fsdp.offloads(self._config, self._mesh.device)
        parameter_device = torch.device("cpu") if is_offloaded else self._mesh.device
        for part in self.parts:
            to_empty(part, parameter_device)
            # Buffers start at zero, because LAYOUT.buffers declares no other value. Numbers that a class of
            # transformers sets are the exception.
            initial_buffers: Mapping[str, Tensor] = getattr(part, "initial_buffers", {})
            for path, module in part.named_modules():
                for name, buffer in module.named_buffers(recurse=False):
                    zeros = torch.zeros_like(buffer, device=self._mesh.device)
                    full_name = f"{path}.{name}" if path else name
                    if full_name in initial_buffers:
                        zeros.copy_(initial_buffers[full_name])
                    module._buffers[name] = zeros
        for name, parameter in self.parameters().items():
            init_weights.draw_(parameter, name, draws[name], seed)
        self._before_pass = float8_modules.before_pass(self.parts, self._mesh, self._config)
        if self._config.parallelism.shard_optimizer_states:
            trained = {}
            for name, parameter in self.parameters().items():
                if parameter.requires_grad:
                    trained[name] = parameter
            self._split_states = SplitStates(trained, self._mesh, derived.state_block(self._config))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the full model."""
        parameters: dict[str, nn.Parameter] = {}
        for part in self.parts:
            parameters.update(part.named_parameters())
        return parameters

    def counted_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank counts in sums over stages, such as the gradient norm.

        A tied parameter is on two stages, but only one of them counts it.
        """
        return self.parameters()

    def buffers(self) -> dict[str, Tensor]:
        """Return this rank's buffers by name, such as router biases.

        A buffer is the same on all ranks that hold it.
        """
        buffers: dict[str, Tensor] = {}
        for part in self.parts:
            buffers.update(part.named_buffers())
        return buffers

    def measures(self) -> dict[str, float]:
        """Return metrics of the last ``forward_backward``, equal on all ranks (a collective)."""
        metrics: dict[str, float] = {}
        if self._has_experts:
            metrics |= expert_parallel.measure(self.parts, self._mesh)
        if self._balance is not None:
            metrics |= self._balance.measures()
        if self.token_metrics:
            metrics |= self.token_metrics.means()
        if self.model_parts.qk_clip is not None:
            metrics |= self.model_parts.qk_clip.measures()
        return metrics

    def optimizer_parameters(self) -> dict[str, nn.Parameter]:
        """Return the tensors that the optimizer updates: the parameters, or slices of parameters with ZeRO-1."""
        return self.parameters() if self._split_states is None else self._split_states.slices

    def update_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Update each parameter during backward from now on. The learning rate must be set before backward."""
        parameters = self.optimizer_parameters().values()
        self._in_backward = UpdateInBackward(optimizer, parameters, self._mesh)

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of all gradients of the step, see ``grad_clip.gradient_norm`` (a collective)."""
        if self._in_backward is not None:
            return self._in_backward.norm()
        return grad_clip.gradient_norm(self.counted_parameters().values(), self._mesh)

    def update(self, optimizer: torch.optim.Optimizer, applies: Tensor | None = None) -> None:
        """Step the optimizer. Gradients must be reduced, unscaled and clipped.

        Args:
            optimizer: the optimizer of ``optimizer_parameters``.
            applies: a boolean scalar on the device. If it is False, the update changes nothing. The host
                does not read it; see ``optim.decides_on_device``.
        """
        # Backward has already updated the parameters, so only the router biases are left.
        if self._in_backward is not None:
            if self._has_experts:
                expert_parallel.update_biases(self.parts, self._mesh)
            return
        if self._split_states is not None:
            self._split_states.before_update()
        if applies is not None:
            # A fused optimizer's kernels read this attribute on the device. If it is 1, they change neither
            # weights nor optimizer state. PyTorch's GradScaler uses the same mechanism.
            optimizer.found_inf = (~applies).float()  # type: ignore[attr-defined]
        optimizer.step()
        if applies is not None:
            del optimizer.found_inf  # type: ignore[attr-defined]
        if self._split_states is not None:
            self._split_states.after_update()
        if self.model_parts.qk_clip is not None:
            self.model_parts.qk_clip.clip(self.parameters())
        if self._has_experts:
            expert_parallel.update_biases(self.parts, self._mesh, applies)

    def replace_weights(self, replacement: Callable[[nn.Parameter], Tensor]) -> None:
        """Set each trained weight to its replacement (a collective with ZeRO-1).

        Args:
            replacement: maps one of ``optimizer_parameters`` to a tensor with the same placements.
        """
        with torch.no_grad():
            if self._split_states is not None:
                self._split_states.copy_weights()
            for parameter in self.optimizer_parameters().values():
                if parameter.requires_grad:
                    local_tensor(parameter).copy_(local_tensor(replacement(parameter)))
            if self._split_states is not None:
                self._split_states.after_update()

    def zero_grad(self) -> None:
        """Set all gradients to None, which frees their memory, and forget the attention logits of the step."""
        for parameter in self.parameters().values():
            parameter.grad = None
        if self.model_parts.qk_clip is not None:
            self.model_parts.qk_clip.reset()


class PlainRunner(Runner):
    """Runner of a model without pipeline stages. Forward and backward process one batch at a time."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        self._has_compute_copies = compute_copies.are_used(self.parts[0])
        self._loss_at_head: dict[int, bool] = {}
        """For each number of tokens, True if the head computes the loss. A cache of ``loss_at_head.saves``."""

    def forward_backward(self, batches: Sequence[TokenBatch], weight: Tensor) -> Tensor:
        """Run one batch after the other. The backward pass of the last batch reduces the summed gradients."""
        if self._has_experts:
            expert_parallel.before_step(self.parts, weight)
        if self._before_pass:
            self._before_pass()
        if self.token_metrics:
            self.token_metrics.start()
        if self._balance is not None:
            with self._balance.step():
                return self._forward_backward(batches, weight)
        return self._forward_backward(batches, weight)

    def _forward_backward(self, batches: Sequence[TokenBatch], weight: Tensor) -> Tensor:
        balance = self._balance
        counts_first = balance is not None and len(batches) > 1
        # Use a wide dtype, because the losses of hundreds of micro-batches and then of all ranks are added up.
        total = torch.zeros((), dtype=sum_dtype(self._mesh.device), device=self._mesh.device)
        try:
            # The balance loss of a micro-batch depends on the experts' tokens in all other micro-batches. So
            # first run all micro-batches without gradients to count these tokens.
            if balance is not None and counts_first:
                balance.count(lambda: self._run_without_loss(batches))
                balance.sum_over_ranks(batches, weight)
            for index, batch in enumerate(batches):
                is_last = index == len(batches) - 1
                if len(batches) > 1:
                    fsdp.set_gradient_sync(self.parts[0], is_last)
                self._select_rows(index, batch)
                loss = self._loss(batch, weight)
                if balance is not None and not counts_first:
                    balance.sum_over_ranks(batches, weight)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        finally:
            # Backward has dropped only copies that received a gradient. Drop all others too, also after an
            # error.
            if self._has_compute_copies:
                compute_copies.drop(self.parts[0])
        # With tensor parallelism, some gradients are partial sums. Complete them once after all
        # micro-batches, with one collective per parameter, in the same order on all ranks.
        if self._mesh.size("tp") > 1:
            for parameter in self.parts[0].parameters():
                partial_gradients.sum_over_ranks(parameter)
        return total

    def evaluate(self, batch: TokenBatch) -> Tensor:
        if self._before_pass:
            self._before_pass()
        with torch.no_grad():
            return self._loss(batch, torch.ones((), device=self._mesh.device))

    def _run_without_loss(self, batches: Sequence[TokenBatch]) -> None:
        for index, batch in enumerate(batches):
            self._select_rows(index, batch)
            tokens_Bt, _, positions_Bt = self._cut(batch)
            documents = context_parallel.document_argument([batch])
            self.parts[0](tokens_Bt, positions_Bt, **documents)

    def _select_rows(self, index: int, batch: TokenBatch) -> None:
        """Select the noise and the sources of a micro-batch. Micro-batches have the same number of rows."""
        for user in (self.embedding_noise, self.source_losses):
            # Both are None for row tasks, whose batches have no ``tokens_BT``.
            if user is not None:
                num_rows = batch.tokens_BT.size(0)
                user.use_rows(index * num_rows, num_rows)

    def _loss(self, batch: TokenBatch, weight: Tensor) -> Tensor:
        model = self.parts[0]
        tokens_Bt, targets_Bt, positions_Bt = self._cut(batch)
        # Context-parallel ranks pass full rows of document numbers. Attention needs the numbers of all
        # tokens.
        documents = {} if batch.documents_BT is None else {"documents_BT": batch.documents_BT}

        # Let the head compute the loss if that avoids large logits.
        if self._computes_loss_at_head(targets_Bt.numel()):
            chunk = self._chunk_at_head(targets_Bt)

            def loss_of(hidden_BtD: Tensor, head_VD: Tensor) -> Tensor:
                return linear_cross_entropy_sum(hidden_BtD, head_VD, targets_Bt, weight, chunk)

            with loss_at_head.instead_of_logits(model, loss_of):
                return model(tokens_Bt, positions_Bt, **documents)  # type: ignore[no-any-return]

        # Otherwise the model must return logits. A user's model may return anything.
        out = model(tokens_Bt, positions_Bt, **documents)
        if not (isinstance(out, Tensor) and out.ndim == 3 and out.shape[:2] == targets_Bt.shape):
            description = f"a {type(out).__name__}"
            if isinstance(out, Tensor):
                description = f"a tensor of shape {tuple(out.shape)}"
            rule = f"returns {description} for tokens of shape {tuple(targets_Bt.shape)}"
            fix = "return one tensor of logits, (B, T, V)"
            raise ConfigError(Problem("model.name", self._config.model.name, rule, fix))
        return self._loss_of_logits(out, targets_Bt, weight)

    def _computes_loss_at_head(self, num_tokens: int) -> bool:
        if num_tokens not in self._loss_at_head:
            self._loss_at_head[num_tokens] = loss_at_head.saves(
                self.parts[0], num_tokens, self._mesh, self._config
            )
        return self._loss_at_head[num_tokens]

    def _chunk_at_head(self, targets_Bt: Tensor) -> ChunkFunction | None:
        """Return the loss of a chunk for the fused head, with metrics of tokens and sources."""
        chunk, _ = self._loss_function()
        if self.token_metrics:
            chunk = self.token_metrics.measuring(chunk)
        grouped = self._grouped_loss(targets_Bt)
        if grouped is not None:
            chunk = grouped.dividing(chunk or chunk_loss)
        return chunk
