"""What the trainer may ask of a model on a mesh; the same questions whatever the parallelism.

``Runner`` holds what all have in common; ``PlainRunner`` runs one model, ``pipeline.PipelineRunner`` some stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardtrain.config.schema import Config
from shardtrain.distributed import context_parallel, expert_parallel, fsdp
from shardtrain.distributed.context_parallel import Batch
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.zero1 import SplitStates
from shardtrain.layout import Draw
from shardtrain.ops import init_weights
from shardtrain.ops.cross_entropy import ChunkFunction, cross_entropy_sum
from shardtrain.ops.targets import IGNORE
from shardtrain.ops.tied import tie, tied_names


@dataclass(frozen=True)
class ModelParts:
    """A rank's share of a model, cut and sharded: one part, or one per pipeline stage that the rank holds."""

    modules: Sequence[nn.Module]
    mesh: Mesh
    config: Config
    chunk_loss: ChunkFunction | None


class Runner(ABC):
    """A model on a mesh."""

    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts.modules
        self._mesh, self._config, self._chunk_loss = parts.mesh, parts.config, parts.chunk_loss
        self._split_states: SplitStates | None = None

    @abstractmethod
    def forward_backward(self, batches: Sequence[Batch], weight: Tensor) -> Tensor:
        """Add the gradients of ``weight`` times the loss sum over all batches of all ranks to the parameters.

        Gives ``weight`` times this rank's own loss sum, a float64 scalar: zero where another stage has the loss.
        Gradients are communicated once.
        """

    @abstractmethod
    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's loss sum of one batch, without gradients; zero where another stage has the loss."""

    @property
    def has_loss(self) -> bool:
        """Whether the loss is computed here."""
        return True

    @property
    def counts_filler(self) -> bool:
        """Whether it matters which tokens of a batch are filler: to experts it does (``data.mark_filler``)."""
        return expert_parallel.has_experts(self.parts)

    def own_targets(self, batches: Sequence[Batch]) -> int:
        """Target tokens whose loss this rank computes: with context parallelism those of its part of each sequence."""
        if not self.has_loss:
            return 0
        targets = (context_parallel.cut(batch, self._mesh, self._config)[1] for batch in batches)
        return sum(int((targets_Bt != IGNORE).sum()) for targets_Bt in targets)

    def materialize(self, draws: Mapping[str, Draw], seed: int) -> None:
        """Give the parameters memory and their initial values, equal on every mesh."""
        offload = self._config.training.enable_cpu_offload
        for part in self.parts:
            ties = tied_names(part)
            part.to_empty(device="cpu" if offload else self._mesh.device)
            tie(part, ties)  # to_empty gives each module a parameter of its own
            for module in part.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = torch.zeros_like(buffer, device=self._mesh.device)  # see LAYOUT.buffers
        for name, parameter in self.parameters().items():
            init_weights.draw_(parameter, name, draws[name], seed)
        if self._config.parallelism.shard_optimizer_states:
            trained = {name: parameter for name, parameter in self.parameters().items() if parameter.requires_grad}
            self._split_states = SplitStates(trained, self._mesh)

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by the names that the whole model has."""
        return {name: parameter for part in self.parts for name, parameter in part.named_parameters()}

    def counted_parameters(self) -> dict[str, nn.Parameter]:
        """Those that sums over pipeline stages count on this rank: each parameter of the model in one stage."""
        return self.parameters()

    def buffers(self) -> dict[str, Tensor]:
        """What this rank's parts remember beside their parameters: biases of routers, equal on all ranks."""
        return {name: buffer for part in self.parts for name, buffer in part.named_buffers()}

    def measures(self) -> dict[str, float]:
        """What a model of this kind reports of the last ``forward_backward``, equal on all ranks (a collective)."""
        return expert_parallel.measure(self.parts, self._mesh)

    def optimizer_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates: the parameters, or this replica's slices of them."""
        return self.parameters() if self._split_states is None else self._split_states.slices

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer change the parameters by their gradients, which are reduced, unscaled and clipped."""
        if self._split_states is not None:
            self._split_states.before_update()
        optimizer.step()
        if self._split_states is not None:
            self._split_states.after_update()
        expert_parallel.update_biases(self.parts, self._mesh)

    def forget_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.parameters().values():
            parameter.grad = None


class PlainRunner(Runner):
    """One whole model: forward, backward, one batch after the other."""

    def forward_backward(self, batches: Sequence[Batch], weight: Tensor) -> Tensor:
        """See Runner; the last batch's backward communicates the gradients of all."""
        expert_parallel.before_step(self.parts, weight)
        # float64: hundreds of micro-batches, and then ranks, are added one by one
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for index, batch in enumerate(batches):
            fsdp.set_gradient_sync(self.parts[0], index == len(batches) - 1)
            loss = self._loss(batch, weight)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self._loss(batch, torch.ones((), device=self._mesh.device))

    def _loss(self, batch: Batch, weight: Tensor) -> Tensor:
        tokens_Bt, targets_Bt, positions_Bt = context_parallel.cut(batch, self._mesh, self._config)
        logits_BtV = self.parts[0](tokens_Bt, positions_Bt, **context_parallel.document_argument([batch]))
        return cross_entropy_sum(logits_BtV, targets_Bt, weight, chunk=self._chunk_loss)
