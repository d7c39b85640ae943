"""Context parallelism: each rank holds a part of every sequence.

Only the cores of attention and recurrences communicate.

The attention core is replaced with one of three methods:

- "allgather" gathers all keys and values on each rank
- "alltoall" passes keys and values around a ring, with a running log-sum-exp (ring attention, Liu et
  al. 2023)
- "ulysses" redistributes q, k and v from split tokens to split heads (Jacobs et al. 2023)

Positions are split like the tokens, so rotary angles stay correct. A recurrence's core passes its state
from rank to rank (``recurrence.py``).

Shape suffixes: B batch, t tokens of this rank, T all tokens, N heads, K key-value heads, H head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.distributed.context_parallel import hf_cores
from shardtrain.distributed.context_parallel.gather import gathered_attention, natural_order
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.context_parallel.merged_attention import CoreFunction
from shardtrain.distributed.context_parallel.recurrence import SplitRecurrenceCore
from shardtrain.distributed.context_parallel.ring import ring_attention
from shardtrain.distributed.context_parallel.ulysses import ulysses_attention
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import RECURRENCE_METHODS, Layout, matches
from shardtrain.ops import attention_core, document_mask, token_mixing
from shardtrain.ops.attention_scores import scores_of
from shardtrain.utils.errors import ConfigError, Problem

AXIS = "cp"


class TokenBatch(Protocol):
    """Interface of a batch (``data.Batch``) that a runner uses: integer tensors of shape (B, T)."""

    @property
    def tokens_BT(self) -> Tensor: ...
    @property
    def targets_BT(self) -> Tensor: ...
    @property
    def positions_BT(self) -> Tensor: ...
    @property
    def documents_BT(self) -> Tensor | None: ...


class SplitAttentionCore(nn.Module):
    """Attention core for a rank's part of the sequence, causal over the full sequence.

    Every forward is a collective.

    The constructor copies the settings of the core that it replaces: ``window``, ``scale``, ``softcap``,
    ``chunk``, ``alibi_slopes`` (for this rank's heads) and ``heads_first``, see
    ``ops/attention_core.py``.
    """

    def __init__(
        self, function: CoreFunction, group: dist.ProcessGroup, balanced: bool, core: nn.Module
    ) -> None:
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
        """Attend from this rank's queries to all keys and values.

        Args:
            q_BtNH: queries of this rank's tokens, or (B, N, t, H) if heads come first.
            k_BtKH: keys of this rank's tokens. Dimensions are ordered as in the queries.
            v_BtKH: values, like the keys.
            documents_BT: document number of each token. Unlike the other arguments it covers the full
                sequences on every rank.
            sinks_N: attention sinks of this rank's heads: the score of an additional key whose value
                is zero.

        Returns:
            The outputs, in the shape of the queries.
        """
        if self.heads_first:
            q_BtNH = q_BtNH.transpose(1, 2)
            k_BtKH = k_BtKH.transpose(1, 2)
            v_BtKH = v_BtKH.transpose(1, 2)
        rows = q_BtNH.size(0)
        tokens = q_BtNH.size(1) * self._group.size()
        # Chunked attention is expressed as documents: a token sees only keys of its own chunk.
        documents_BT = document_mask.chunked(
            documents_BT, self.chunk, (rows, tokens), q_BtNH.device
        )
        # A window that covers the row limits nothing. The functions expect 0 for no window.
        window = self.window if self.window < tokens else 0
        inputs = (
            q_BtNH,
            k_BtKH,
            v_BtKH,
            self._group,
            self._balanced,
            documents_BT,
            window,
            self._scores,
            sinks_N,
        )
        out_BtNH = self._function(*inputs)
        return out_BtNH.transpose(1, 2) if self.heads_first else out_BtNH


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Replace the core of every attention and recurrence in place. Parameters do not change.

    Raises:
        ConfigError: LAYOUT.context and LAYOUT.recurrence name no module.
    """
    parallelism = config.parallelism
    function: CoreFunction = ring_attention
    if parallelism.context_parallel_rotate_method == "allgather":
        shared = None
        if mesh.device.type == "cpu":
            from shardtrain.distributed.cpu.shared_memory import SequenceExchange

            shared = SequenceExchange.between(mesh.group(AXIS))  # a collective
        function = partial(gathered_attention, shared=shared)
    if parallelism.context_parallel_method == "ulysses":
        function = ulysses_attention
    if hasattr(model, "hf"):
        hf_cores.apply(
            model, function, mesh.group(AXIS), is_balanced(config), bool(config.compile.enable)
        )
        return
    attentions = core_paths(model, layout.context)
    recurrences = core_paths(model, layout.recurrence)
    has_layers = len(getattr(model, layout.layers)) > 0  # a pipeline stage may have none
    if has_layers and not (attentions or recurrences):
        rule = "needs to know the attention core, which LAYOUT.context of the model does not name"
        fix = "name the weightless module that is softmax(q k) v there, or set the degree to 1"
        raise ConfigError(
            Problem("parallelism.context_parallel_degree", mesh.size(AXIS), rule, fix)
        )
    for path in (*attentions, *recurrences):
        original: Any = model.get_submodule(path)
        if path in attentions:
            core: nn.Module = SplitAttentionCore(
                function, mesh.group(AXIS), is_balanced(config), original
            )
        else:
            _require_methods(path, original, mesh)
            core = SplitRecurrenceCore(original, mesh.group(AXIS), is_balanced(config))
        if config.compile.enable:
            # Collectives in an autograd function break the graph anyway. Do not use disable as a
            # decorator: it would import the compiler in every run.
            core.forward = torch.compiler.disable(core.forward)  # type: ignore[method-assign]
        model.set_submodule(path, core)


def _require_methods(path: str, core: nn.Module, mesh: Mesh) -> None:
    """Raise ConfigError if a recurrence's core lacks a method that split sequences need."""
    missing = [name for name in RECURRENCE_METHODS if not hasattr(core, name)]
    if missing:
        rule = f"requires the method {missing[0]} of {path}, which LAYOUT.recurrence names"
        fix = "add it (docs/own_model.md), or set the degree to 1"
        raise ConfigError(
            Problem("parallelism.context_parallel_degree", mesh.size(AXIS), rule, fix)
        )


def core_paths(model: nn.Module, pattern: str) -> list[str]:
    """Return the paths of the modules that a pattern of the layout matches. Empty for an empty pattern."""
    if not pattern:
        return []
    return [path for path, _ in model.named_modules() if matches(path, pattern)]


def check_cores(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Test on small tensors that each type of attention core can be split by sequence (cp) and heads (tp).

    Also check that no module outside the cores mixes tokens where a rank has only part of a sequence.

    Args:
        model: the full model, on the meta device.

    Raises:
        ConfigError: the first violation.
    """
    splits_sequences = mesh.size(AXIS) > 1
    splits_heads = mesh.size("tp") > 1
    if hasattr(model, "hf"):
        if splits_sequences:
            check_network(model, config)
        return
    if not (splits_sequences or splits_heads):
        return
    if layout.context:
        _check_each_core(model, layout, mesh, config)
    if splits_sequences and (layout.context or layout.recurrence):
        broken = token_mixing.outside_of_cores(model, layout)
        if broken:
            raise _mixing_refusal("parallelism.context_parallel_degree", mesh.size(AXIS), broken)
    # Tensor parallelism also splits sequences between layers (sequence parallelism). Check this only for
    # next-token tasks, because other tasks may pool over tokens there.
    if splits_heads and config.task.name in OF_NEXT_TOKENS:
        broken = token_mixing.outside_of_gathered(model, layout)
        if broken:
            raise _mixing_refusal("parallelism.tensor_parallel_degree", mesh.size("tp"), broken)


def check_network(model: nn.Module, config: Config) -> None:
    """Check that context parallelism can split a ``transformers`` network, see ``hf_cores.check``.

    Raises:
        ConfigError: it cannot be split.
    """
    parallelism = config.parallelism
    degree = parallelism.context_parallel_degree
    ranks_over_heads = 1
    if parallelism.context_parallel_method == "ulysses":
        ranks_over_heads = degree * parallelism.tensor_parallel_degree
    seq_len = max(
        config.training.seq_len, config.validation.seq_len if config.validation.enable else 0
    )
    broken = hf_cores.check(model, seq_len, ranks_over_heads)
    if broken:
        option = "parallelism.context_parallel_degree"
        rule = f"splits sequences, and {model.config_name} {broken.rule}"
        raise ConfigError(Problem(option, degree, rule, f"{broken.fix}, or set the degree to 1"))


def _mixing_refusal(option: str, degree: int, broken: attention_core.Broken) -> ConfigError:
    rule = f"splits sequences, and the model {broken.rule}"
    return ConfigError(Problem(option, degree, rule, f"{broken.fix}, or set the degree to 1"))


def _check_each_core(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    calls = attention_core.trace(model, layout)
    checked = set()
    for path, core in model.named_modules():
        if not matches(path, layout.context):
            continue
        call = calls.get(path)
        # Most layers have equal cores, so check each combination of class, attributes and arguments once.
        attributes = {name: value for name, value in vars(core).items() if name[0] != "_"}
        kind = (type(core), repr(attributes), repr(call))
        if kind in checked:
            continue
        checked.add(kind)
        _check_core(path, core, call, mesh, config)


def _check_core(
    path: str, core: nn.Module, call: attention_core.CoreCall | None, mesh: Mesh, config: Config
) -> None:
    """Raise ConfigError if a core cannot be split by the mesh."""
    rule = f"needs an attention core that can be split, and {path}"

    # Context parallelism splits the core's sequences. Ulysses also splits its heads.
    broken = None
    ranks_over_heads = 1
    if mesh.size(AXIS) > 1:
        broken = attention_core.broken_when_split(core, call, config.training.seq_len)
        if config.parallelism.context_parallel_method == "ulysses":
            ranks_over_heads = mesh.size(AXIS, "tp")
    broken = broken or attention_core.broken_number_of_heads(core, call, ranks_over_heads)
    if broken:
        option = "parallelism.context_parallel_degree"
        raise ConfigError(Problem(option, mesh.size(AXIS), f"{rule} {broken.rule}", broken.fix))

    # Tensor parallelism splits the core's heads.
    if mesh.size("tp") == 1:
        return
    broken = attention_core.broken_number_of_heads(core, call, mesh.size("tp"))
    broken = broken or attention_core.broken_when_heads_are_dealt(core, call)
    if broken:
        option = "parallelism.tensor_parallel_degree"
        raise ConfigError(Problem(option, mesh.size("tp"), f"{rule} {broken.rule}", broken.fix))


def is_balanced(config: Config) -> bool:
    """True if each rank holds a chunk from the start and one from the end of each sequence.

    So all ranks have the same amount of work in causal attention.
    """
    return derived.is_context_balanced(config.parallelism)


def cut(batch: TokenBatch, mesh: Mesh, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's part of each sequence: tokens, targets and positions, each (B, T / cp).

    Document numbers are not split, because attention needs them for all tokens.
    """
    columns = (batch.tokens_BT, batch.targets_BT, batch.positions_BT)
    size = mesh.size(AXIS)
    rank = mesh.rank(AXIS)
    if size == 1:
        return columns
    balanced = is_balanced(config)
    tokens, targets, positions = (sequence_part(column, rank, size, balanced) for column in columns)
    return tokens, targets, positions


def splittable_length(tokens: int, mesh: Mesh) -> int:
    """Return the smallest length >= ``tokens`` that the mesh can split, with or without balanced chunks."""
    multiple = 1
    if mesh.size(AXIS) > 1:
        multiple = mesh.size(AXIS) * math.lcm(2, mesh.size("tp"))
    return -(-tokens // multiple) * multiple


def full_logits(
    model: nn.Module,
    tokens_BT: Tensor,
    positions_BT: Tensor,
    mesh: Mesh,
    config: Config,
    **documents: Tensor,
) -> Tensor:
    """Return the logits (B, T, V) of full rows, without gradients (a collective).

    Every rank must pass the same rows.
    """
    size = mesh.size(AXIS)
    if size == 1:
        return model(tokens_BT, positions_BT, **documents)  # type: ignore[no-any-return]
    balanced = is_balanced(config)
    parts = [sequence_part(x, mesh.rank(AXIS), size, balanced) for x in (tokens_BT, positions_BT)]
    logits_BtV = model(*parts, **documents).detach().contiguous()
    gathered = [torch.empty_like(logits_BtV) for _ in range(size)]
    dist.all_gather(gathered, logits_BtV, group=mesh.group(AXIS))
    return natural_order(torch.cat(gathered, dim=1), size, balanced)


def document_argument(batches: Sequence[TokenBatch]) -> dict[str, Tensor]:
    """Return the model's keyword argument ``documents_BT`` for the joined rows of all batches.

    Returns {} if the batches have no document numbers.

    Raises:
        ValueError: only some of the batches have documents.
    """
    documents = [batch.documents_BT for batch in batches if batch.documents_BT is not None]
    if not documents:
        return {}
    if len(documents) < len(batches):
        raise ValueError("all micro-batches of a step must have documents_BT, or none")
    return {"documents_BT": document_mask.joined(documents)}
