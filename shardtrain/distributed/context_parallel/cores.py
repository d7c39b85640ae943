"""Context parallelism: each rank holds a part of every sequence, and only attention communicates.

The attention core is replaced by one that gathers keys and values ("allgather"), passes them round a ring with a
running log-sum-exp ("alltoall"; Liu et al. 2023, ring attention), or exchanges heads for tokens ("ulysses"; Jacobs et
al. 2023). Positions are split with the tokens, so rotary angles follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.distributed.context_parallel.gather import gathered_attention, ring_attention, ulysses_attention
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout, matches
from shardtrain.ops import attention_core, document_mask, token_mixing
from shardtrain.ops.attention_scores import Scores, scores_of
from shardtrain.utils.errors import ConfigError, Problem

AXIS = "cp"
CoreFunction = Callable[
    [Tensor, Tensor, Tensor, dist.ProcessGroup, bool, Tensor | None, int, Scores, Tensor | None], Tensor
]


class TokenBatch(Protocol):
    """What a runner needs of a batch (``data.Batch``): integer tensors of shape (B, T)."""

    @property
    def tokens_BT(self) -> Tensor: ...
    @property
    def targets_BT(self) -> Tensor: ...
    @property
    def positions_BT(self) -> Tensor: ...
    @property
    def documents_BT(self) -> Tensor | None: ...


class SplitAttentionCore(nn.Module):
    """The attention core of a rank that holds a part of the sequence; causal over the whole sequence.

    It reads the attributes of the core that it replaces: ``window``, ``scale``, ``softcap``,
    ``chunk``, ``alibi_slopes`` (those of this rank's heads) and ``heads_first`` (see ``ops/attention_core.py``).
    """

    def __init__(self, function: CoreFunction, group: dist.ProcessGroup, balanced: bool, core: nn.Module) -> None:
        super().__init__()
        self._function = function
        self._group = group
        self._balanced = balanced
        self.window = int(getattr(core, "window", 0) or 0)
        self.heads_first = bool(getattr(core, "heads_first", False))
        self.chunk = int(getattr(core, "chunk", 0) or 0)
        self._scores = scores_of(core)

    def forward(
        self,
        q_BtNH: Tensor,
        k_BtKH: Tensor,
        v_BtKH: Tensor,
        documents_BT: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attention of this rank's queries to all keys and values: (B, t, N, H), or (B, N, t, H) if heads come first.

        ``documents_BT`` are the documents of whole rows, which every rank has: they are not cut. ``sinks_N`` are scores
        of one more key per head of this rank, whose value is zero.
        """
        if self.heads_first:
            q_BtNH = q_BtNH.transpose(1, 2)
            k_BtKH = k_BtKH.transpose(1, 2)
            v_BtKH = v_BtKH.transpose(1, 2)
        rows = q_BtNH.size(0)
        tokens = q_BtNH.size(1) * self._group.size()
        documents_BT = document_mask.chunked(documents_BT, self.chunk, (rows, tokens), q_BtNH.device)
        window = self.window if self.window < tokens else 0
        inputs = (q_BtNH, k_BtKH, v_BtKH, self._group, self._balanced, documents_BT, window, self._scores, sinks_N)
        out_BtNH = self._function(*inputs)
        return out_BtNH.transpose(1, 2) if self.heads_first else out_BtNH


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Replace every attention core, in place; parameters are not touched."""
    p = config.parallelism
    gathered = p.context_parallel_rotate_method == "allgather"
    function: CoreFunction = ring_attention
    if gathered:
        shared = None
        if mesh.device.type == "cpu":
            from shardtrain.distributed.cpu.shared_memory import SequenceExchange

            shared = SequenceExchange.between(mesh.group(AXIS))  # a collective
        function = partial(gathered_attention, shared=shared)
    if p.context_parallel_method == "ulysses":
        function = ulysses_attention
    cores = [path for path, _ in model.named_modules() if layout.context and matches(path, layout.context)]
    if not cores and len(getattr(model, layout.layers)):  # a pipeline stage may have no layers
        rule = "needs to know the attention core, which LAYOUT.context of the model does not name"
        fix = "name the weightless module that is softmax(q k) v there, or set the degree to 1"
        raise ConfigError(Problem("parallelism.context_parallel_degree", mesh.size(AXIS), rule, fix))
    for path in cores:
        core = SplitAttentionCore(function, mesh.group(AXIS), is_balanced(config), model.get_submodule(path))
        if config.compile.enable:
            # collectives in an autograd function break the graph anyway; a decorator would import the compiler
            core.forward = torch.compiler.disable(core.forward)  # type: ignore[method-assign]
        model.set_submodule(path, core)


def check_cores(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Test on small tensors that each kind of attention core can be split, by sequence (cp) and by heads (tp).

    The model is the whole one, on the meta device. Outside of the cores no module may mix tokens, where a rank has only
    some of them. Raises ConfigError for the first violation.
    """
    splits_sequences = mesh.size(AXIS) > 1
    splits_heads = mesh.size("tp") > 1
    if not (splits_sequences or splits_heads) or hasattr(model, "tensor_plan"):
        return
    if layout.context:
        _check_each_core(model, layout, mesh, config)
    if splits_sequences and layout.context and (broken := token_mixing.outside_of_cores(model, layout)):
        rule = f"splits sequences, and the model {broken.rule}"
        fix = f"{broken.fix}, or set the degree to 1"
        raise ConfigError(Problem("parallelism.context_parallel_degree", mesh.size(AXIS), rule, fix))
    # tensor parallelism too splits sequences between layers; tasks other than next tokens may pool over tokens there
    if (
        splits_heads
        and config.task.name in OF_NEXT_TOKENS
        and (broken := token_mixing.outside_of_gathered(model, layout))
    ):
        rule = f"splits sequences, and the model {broken.rule}"
        fix = f"{broken.fix}, or set the degree to 1"
        raise ConfigError(Problem("parallelism.tensor_parallel_degree", mesh.size("tp"), rule, fix))


def _check_each_core(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    splits_sequences = mesh.size(AXIS) > 1
    splits_heads = mesh.size("tp") > 1
    calls = attention_core.trace(model, layout)
    checked = set()
    for path, core in model.named_modules():
        if not matches(path, layout.context):
            continue
        # cores of equal type and attributes that are called alike are checked once
        kind = (type(core), repr({k: v for k, v in vars(core).items() if k[0] != "_"}), repr(calls.get(path)))
        if kind in checked:
            continue
        checked.add(kind)
        call = calls.get(path)
        option = "parallelism.context_parallel_degree"
        broken = attention_core.broken_when_split(core, call, config.training.seq_len) if splits_sequences else None
        ranks = (
            mesh.size(AXIS, "tp") if splits_sequences and config.parallelism.context_parallel_method == "ulysses" else 1
        )
        if broken is None:
            broken = attention_core.broken_number_of_heads(core, call, ranks)
        if broken is None and splits_heads:
            option = "parallelism.tensor_parallel_degree"
            broken = attention_core.broken_number_of_heads(core, call, mesh.size("tp"))
            broken = broken or attention_core.broken_when_heads_are_dealt(core, call)
        if broken:
            degree = mesh.size(AXIS if option.endswith("context_parallel_degree") else "tp")
            rule = f"needs an attention core that can be split, and {path} {broken.rule}"
            raise ConfigError(Problem(option, degree, rule, broken.fix))


def is_balanced(config: Config) -> bool:
    """Whether each rank holds a chunk of the head and one of the tail of the sequence, for equal causal work."""
    return derived.is_context_balanced(config.parallelism)


def cut(batch: TokenBatch, mesh: Mesh, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and positions of this rank's part of each sequence, each (B, T / cp).

    Documents are not split: attention needs those of all tokens.
    """
    columns = (batch.tokens_BT, batch.targets_BT, batch.positions_BT)
    size = mesh.size(AXIS)
    rank = mesh.rank(AXIS)
    if size == 1:
        return columns
    parts = [sequence_part(column, rank, size, is_balanced(config)) for column in columns]
    return parts[0], parts[1], parts[2]


def document_argument(batches: Sequence[TokenBatch]) -> dict[str, Tensor]:
    """The keyword argument with the documents of all rows; empty where batches have none."""
    all_documents = [batch.documents_BT for batch in batches]
    given = [documents_BT for documents_BT in all_documents if documents_BT is not None]
    if not given:
        return {}
    if len(given) < len(all_documents):
        raise ValueError("of the micro-batches of a step, some have documents_BT and some have none")
    return {"documents_BT": document_mask.joined(given)}
