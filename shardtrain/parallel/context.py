"""Context parallelism: each rank holds a part of every sequence, and attention alone sees the others.

The attention core is replaced by one that gathers keys and values ("allgather"), passes them round a ring with a
running log-sum-exp ("alltoall"; Liu et al. 2023, ring attention), or exchanges heads for tokens ("ulysses"; Jacobs et
al. 2023). Positions are cut with the tokens, so rotary angles follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.errors import ConfigError, Problem
from shardtrain.layout import Layout, matches
from shardtrain.parallel.attention import gathered_attention, ring_attention, ulysses_attention
from shardtrain.parallel.mesh import Mesh
from shardtrain.parallel.pieces import sequence_part

AXIS = "cp"
CoreFunction = Callable[[Tensor, Tensor, Tensor, dist.ProcessGroup, bool, Tensor | None, int], Tensor]


class Batch(Protocol):
    """What a runner needs of a batch (``data.Batch``): integer tensors of shape (B, T)."""

    @property
    def tokens_BT(self) -> Tensor: ...  # noqa: D102
    @property
    def targets_BT(self) -> Tensor: ...  # noqa: D102
    @property
    def positions_BT(self) -> Tensor: ...  # noqa: D102
    @property
    def documents_BT(self) -> Tensor | None: ...  # noqa: D102


class SplitAttentionCore(nn.Module):
    """The attention core of a rank that holds a part of the sequence; causal over the whole sequence.

    ``window`` is that of the core whose place it takes: how many tokens a token sees, or 0 for no window.
    """

    def __init__(self, function: CoreFunction, group: dist.ProcessGroup, balanced: bool, window: int = 0) -> None:
        super().__init__()
        self._function, self._group, self._balanced, self.window = function, group, balanced, window

    @torch.compiler.disable  # collectives inside an autograd function end a graph anyway
    def forward(self, q_BtNH: Tensor, k_BtKH: Tensor, v_BtKH: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Attention of this rank's queries to all keys and values: (B, t, N, H).

        ``documents_BT`` are the documents of whole rows, which every rank has: they are not cut.
        """
        window = self.window if self.window < q_BtNH.size(1) * self._group.size() else 0
        return self._function(q_BtNH, k_BtKH, v_BtKH, self._group, self._balanced, documents_BT, window)


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Replace every attention core, in place; parameters are not touched."""
    if mesh.size(AXIS) == 1:
        return
    p = config.parallelism
    gathered = p.context_parallel_rotate_method == "allgather"
    function: CoreFunction = gathered_attention if gathered else ring_attention
    if p.context_parallel_method == "ulysses":
        function = ulysses_attention
    cores = [path for path, _ in model.named_modules() if layout.context and matches(path, layout.context)]
    if not cores and len(getattr(model, layout.layers)):  # a pipeline stage may hold an end alone
        rule = "needs to know the attention core, which LAYOUT.context of the model does not name"
        fix = "name the weightless module that is softmax(q k) v there, or set the degree to 1"
        raise ConfigError(Problem("parallelism.context_parallel_degree", mesh.size(AXIS), rule, fix))
    for path in cores:
        window = getattr(model.get_submodule(path), "window", 0)
        model.set_submodule(path, SplitAttentionCore(function, mesh.group(AXIS), is_balanced(config), window))


def is_balanced(config: Config) -> bool:
    """Whether ranks hold a chunk from the head and one from the tail of the sequence, and so equal causal work."""
    return derived.is_context_balanced(config.parallelism)


def cut(batch: Batch, mesh: Mesh, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and positions of this rank's part of each sequence, each (B, T / cp).

    Documents are not cut: attention needs those of all tokens, and every rank has them.
    """
    columns = (batch.tokens_BT, batch.targets_BT, batch.positions_BT)
    size, rank = mesh.size(AXIS), mesh.rank(AXIS)
    if size == 1:
        return columns
    parts = [sequence_part(column, rank, size, is_balanced(config)) for column in columns]
    return parts[0], parts[1], parts[2]


def document_argument(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """The keyword argument that tells a model the documents of all rows; empty where batches have none."""
    documents = [batch.documents_BT for batch in batches]
    given = [documents_BT for documents_BT in documents if documents_BT is not None]
    if not given:
        return {}
    if len(given) < len(documents):
        raise ValueError("of the micro-batches of a step, some have documents_BT and some have none")
    return {"documents_BT": given[0] if len(given) == 1 else torch.cat(given)}
