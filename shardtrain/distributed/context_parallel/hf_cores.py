"""Context parallelism for ``transformers`` networks: our cores replace the network's attention function.

``check`` traces how the network calls attention, and stores each call on its attention module. ``apply``
puts a core into each of these modules. A rank's rows are parts of sequences, so the network always
receives their positions. The document numbers of the full rows reach the cores as a keyword argument of
each block. An attribute would not be enough: recomputation calls a block again in backward, when other
micro-batches may have run in between, and only the arguments are still those of its micro-batch.

Shape suffixes: B batch, t tokens of this rank, T all tokens, N heads, K key-value heads, H head, V head of values.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.distributed.context_parallel.merged_attention import CoreFunction
from shardtrain.ops import attention_interface, document_mask
from shardtrain.ops.attention_core import Broken
from shardtrain.ops.attention_interface import AttentionCall, Untraceable
from shardtrain.ops.attention_scores import Scores

_CALL = "attention_call"
_DOCUMENTS = "split_documents_BT"
"""Keyword argument of the blocks that carries the document numbers."""
_CORES = "split_cores"


class RoutedCore:
    """Attention over a split sequence, for one module of ``transformers``. Each forward is a collective.

    Attributes:
        documents_BT: document number of each token of the full rows, or None.
    """

    def __init__(
        self, function: CoreFunction, group: dist.ProcessGroup, balanced: bool, call: AttentionCall
    ) -> None:
        self._function = function
        self._group = group
        self._balanced = balanced
        self._attention_call = call
        self.documents_BT: Tensor | None = None

    def forward(
        self,
        q_BNtH: Tensor,
        k_BKtH: Tensor,
        v_BKtV: Tensor,
        scale: float | None,
        softcap: float | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Return the outputs (B, t, N, V) of this rank's queries, which attend to the keys of all ranks."""
        width = q_BNtH.size(-1)
        value_width = v_BKtV.size(-1)
        if scale is None:
            scale = width**-0.5
        scores = Scores(scale, softcap or 0.0)
        if value_width != width:
            # The kernels require queries, keys and values of the same width. Padding with zeros changes
            # neither the scores nor the outputs, whose padding is cut off below.
            widest = max(width, value_width)
            q_BNtH, k_BKtH, v_BKtV = (
                F.pad(x, (0, widest - x.size(-1))) for x in (q_BNtH, k_BKtH, v_BKtV)
            )
        q_BtNH, k_BtKH, v_BtKH = (x.transpose(1, 2) for x in (q_BNtH, k_BKtH, v_BKtV))
        rows = q_BtNH.size(0)
        tokens = q_BtNH.size(1) * self._group.size()
        # Chunked attention is expressed as documents: a token sees only keys of its own chunk.
        documents_BT = document_mask.chunked(
            self.documents_BT, self._attention_call.chunk, (rows, tokens), q_BtNH.device
        )
        # A window that covers the row limits nothing. The functions expect 0 for no window.
        window = self._attention_call.window
        if window >= tokens:
            window = 0
        out_BtNH = self._function(
            q_BtNH,
            k_BtKH,
            v_BtKH,
            self._group,
            self._balanced,
            documents_BT,
            window,
            scores,
            sinks_N,
        )
        return out_BtNH[..., :value_width]


def check(model: Any, seq_len: int, ranks_over_heads: int) -> Broken | None:
    """Trace the attention of a network, and keep the calls in its modules for ``apply``.

    Args:
        model: the full model, on the meta device.
        seq_len: longest sequence of the run.
        ranks_over_heads: number of ranks that heads are split over. It must divide the number of
            key-value heads.

    Returns:
        The reason why sequences cannot be split, or None.
    """
    if "position_ids" not in inspect.signature(model.hf.forward).parameters:
        return Broken(
            "takes no position_ids",
            "use a model file of this package",
        )
    broken = _broken_angles(model, seq_len)
    if broken:
        return broken
    try:
        calls = attention_interface.trace(model, seq_len)
    except Untraceable as error:
        return error.broken
    for path, call in calls.items():
        if call.key_heads % ranks_over_heads:
            rule = f"has {call.key_heads} key-value heads in {path}, which {ranks_over_heads} ranks cannot divide"
            return Broken(rule, 'use a divisor of them, or context_parallel_method="ring"')
        model.get_submodule(path).__dict__[_CALL] = call
    return None


def _broken_angles(model: nn.Module, seq_len: int) -> Broken | None:
    """Return a problem if rotary angles would depend on which tokens of a sequence the rank holds."""
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        tables = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        # In newer networks, each type of layer has its own rope type and table
        by_layer = kinds if isinstance(kinds, dict) else {"": kinds}
        for layer, kind in by_layer.items():
            if kind is None:
                continue
            if "dynamic" in kind:
                return Broken(
                    f'has rotary angles of type "{kind}" in {path}, which depend on a rank\'s tokens',
                    _FIX,
                )
            table = tables.get(layer, tables)
            limit = table.get("original_max_position_embeddings") or 0
            if kind == "longrope" and seq_len > limit:
                rule = f'has rotary angles of type "longrope" in {path}, which change beyond {limit} tokens of a rank'
                return Broken(rule, f"use sequences of at most {limit} tokens")
    return None


_FIX = "use a model without them"


def apply(
    model: Any, function: CoreFunction, group: dist.ProcessGroup, balanced: bool, is_compiled: bool
) -> None:
    """Put a core into each attention module that ``check`` traced, in place.

    Parameters and their names do not change.
    """
    model.passes_positions = True
    model.original_attention = model.hf.config._attn_implementation
    attention_interface.route(model.hf)
    for module in model.modules():
        call = module.__dict__.get(_CALL)
        if call is None:
            continue
        core = RoutedCore(function, group, balanced, call)
        if is_compiled:
            # Collectives in an autograd function break the graph anyway
            core.forward = torch.compiler.disable(core.forward)  # type: ignore[method-assign]
        module.__dict__[attention_interface.CORE] = core
    _pass_documents(model)


def _pass_documents(model: Any) -> None:
    """Install hooks that pass the model's ``documents_BT`` on to the cores of each block."""
    current: dict[str, Tensor | None] = {_DOCUMENTS: None}

    def remember(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        current[_DOCUMENTS] = keywords.get("documents_BT")

    def add(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        return inputs, {**keywords, **current}

    model.register_forward_pre_hook(remember, with_kwargs=True)
    for block in model.blocks.values():
        cores = [module.__dict__.get(attention_interface.CORE) for module in block.modules()]
        block.__dict__[_CORES] = [core for core in cores if core is not None]
        # Replace the class, as FSDP does. If the instance had its own forward, compile.apply would take
        # the block for a recomputed one.
        block_class: Any = type(block)
        block.__class__ = _class_with_documents(block_class)
        block.register_forward_pre_hook(add, with_kwargs=True)


@functools.cache
def _class_with_documents(block_class: Any) -> Any:
    """Return a subclass with the same name whose forward also takes the document numbers.

    It passes them to its attention cores.
    """

    def forward(
        self: Any, *inputs: Any, split_documents_BT: Tensor | None = None, **keywords: Any
    ) -> Any:
        for core in self.split_cores:
            core.documents_BT = split_documents_BT
        return block_class.forward(self, *inputs, **keywords)

    return type(block_class.__name__, (block_class,), {"forward": forward})
