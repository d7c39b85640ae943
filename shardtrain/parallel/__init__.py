"""Parallelism: a pure model, its layout and a mesh become a Runner. One file per axis or step, in one visible order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from shardtrain import init
from shardtrain.config.schema import Config
from shardtrain.layout import Draw, Layout
from shardtrain.loss import cross_entropy_sum
from shardtrain.parallel import compile, recompute, shard, tensor
from shardtrain.parallel.mesh import BATCH_AXES, LOSS_AXES, Mesh, build
from shardtrain.parallel.zero import SplitStates
from shardtrain.tied import tie, tied_names

__all__ = ["BATCH_AXES", "LOSS_AXES", "STEPS", "Batch", "Mesh", "Runner", "build", "parallelize"]

STEPS: tuple[Callable[[nn.Module, Layout, Mesh, Config], None], ...] = (
    tensor.apply,
    recompute.apply,
    compile.apply,
    shard.apply,  # last: it must see final parameters
)


class Batch(Protocol):
    """What a runner needs of a batch (``data.Batch``): integer tensors of shape (B, T)."""

    @property
    def tokens_BT(self) -> Tensor: ...  # noqa: D102
    @property
    def targets_BT(self) -> Tensor: ...  # noqa: D102
    @property
    def positions_BT(self) -> Tensor: ...  # noqa: D102


class Runner:
    """A model on a mesh: what the trainer may ask of it, the same for every parallelism."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: Config, vocab_size: int) -> None:
        self.model = model
        self._mesh, self._config = mesh, config
        split = mesh.size("tp") > 1 and not config.parallelism.disable_loss_parallel
        self._vocabulary = tensor.SplitVocabulary(mesh, vocab_size) if split else None
        self._chunk_loss = None if split else compile.compiled_chunk_loss(config)
        self._split_states: SplitStates | None = None

    def materialize(self, draws: Mapping[str, Draw], seed: int) -> None:
        """Give the parameters memory and their initial values, equal on every mesh."""
        offload = self._config.training.enable_cpu_offload
        ties = tied_names(self.model)
        self.model.to_empty(device="cpu" if offload else self._mesh.device)
        tie(self.model, ties)  # to_empty gives each module a parameter of its own
        for name, parameter in self.parameters().items():
            init.draw_(parameter, name, draws[name], seed)
        if self._config.parallelism.shard_optimizer_states:
            self._split_states = SplitStates(self.parameters(), self._mesh)

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by the names that the whole model has."""
        return dict(self.model.named_parameters())

    def optimizer_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates: the parameters, or this replica's slices of them."""
        return self.parameters() if self._split_states is None else self._split_states.slices

    def forward_backward(self, batches: Sequence[Batch], weight: Tensor) -> Tensor:
        """Add the gradients of ``weight`` times the loss sum over all batches of all ranks to the parameters.

        Gives ``weight`` times this rank's own loss sum, a float32 scalar. Gradients are communicated once, in the last
        batch's backward.
        """
        total = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        for index, batch in enumerate(batches):
            shard.set_gradient_sync(self.model, index == len(batches) - 1)
            loss = self._loss(batch, weight)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's loss sum of one batch, without gradients."""
        with torch.no_grad():
            return self._loss(batch, torch.ones((), device=self._mesh.device))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer change the parameters by their gradients, which are reduced, unscaled and clipped."""
        if self._split_states is not None:
            self._split_states.before_update()
        optimizer.step()
        if self._split_states is not None:
            self._split_states.after_update()

    def forget_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def _loss(self, batch: Batch, weight: Tensor) -> Tensor:
        logits_BTV = self.model(batch.tokens_BT, batch.positions_BT)
        return cross_entropy_sum(logits_BTV, batch.targets_BT, weight, self._vocabulary, self._chunk_loss)


def parallelize(model: nn.Module, layout: Layout, mesh: Mesh, config: Config, vocab_size: int) -> Runner:
    """Cut, swap and shard a model that is still on the meta device; no memory is used before ``materialize``."""
    if config.training.dtype != "float32":
        model.to(getattr(torch, config.training.dtype))
    for step in STEPS:
        step(model, layout, mesh, config)
    return Runner(model, mesh, config, vocab_size)
