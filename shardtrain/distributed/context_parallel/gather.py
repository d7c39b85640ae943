"""Context parallelism by all-gather: each rank gathers all keys and values and attends with its own queries.

With P ranks, rank r holds chunk r of P. With ``balanced`` it holds chunks r and 2P-1-r of 2P instead,
one from the start and one from the end. Every rank has the complete ``documents_BT``, so it knows the
mask without communication, and skips blocks of queries and keys that share no document.

Shape suffixes: B batch, t tokens of this rank, T all tokens, l queries and s keys of one call, N heads,
K key-value heads, H head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.distributed.context_parallel.masks import chunks_of
from shardtrain.distributed.context_parallel.merged_attention import PrefixAttention
from shardtrain.ops import chosen_kernels, document_mask
from shardtrain.ops.attention_scores import PLAIN, Scores

if TYPE_CHECKING:
    from shardtrain.distributed.cpu.shared_memory import SequenceExchange

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""``reduce_scatter_single`` since torch 2.13, and before that its old name, which is now deprecated."""


def gathered_attention(
    q_BtNH: Tensor,
    k_BtKH: Tensor,
    v_BtKH: Tensor,
    group: dist.ProcessGroup,
    balanced: bool,
    documents_BT: Tensor | None = None,
    window: int = 0,
    scores: Scores = PLAIN,
    sinks_N: Tensor | None = None,
    shared: SequenceExchange | None = None,
) -> Tensor:
    """Gather all keys and values, then attend with this rank's queries.

    Backward reduce-scatters the gradients. If ``shared`` is given, both use shared memory instead of the
    group's collectives.

    Each chunk of queries makes two calls: to all earlier chunks without a mask, and to its own chunk with
    a causal mask. The two results are merged by log-sum-exp, so no mask of shape (t, T) is needed.
    """
    documents_BT = None if documents_BT is None else document_mask.on_host(documents_BT)
    # Choose the kernel by the same rule as AttentionCore. Import its file here, because it is only for
    # CPUs.
    if sinks_N is None and scores.has_kernel and chosen_kernels.attends_in_blocks(q_BtNH):
        from shardtrain.distributed.cpu import gathered_blocks

        inputs = (q_BtNH, k_BtKH, v_BtKH)
        return gathered_blocks.attention(
            *inputs, documents_BT, window, scores.scale, group, balanced, shared
        )
    size = group.size()
    chunks = chunks_of(group.rank(), size, balanced)
    k_BTKH = natural_order(_GatherSequence.apply(k_BtKH, group, shared), size, balanced)
    v_BTKH = natural_order(_GatherSequence.apply(v_BtKH, group, shared), size, balanced)
    length = q_BtNH.size(1) // len(chunks)
    outputs = []
    for index, chunk in enumerate(chunks):
        q_BlNH = q_BtNH[:, index * length : (index + 1) * length]
        stop = (chunk + 1) * length
        # Use the keys up to the end of the chunk. With a window, skip the keys that even the chunk's first
        # query does not see.
        first = max(0, stop - length - window + 1) if window else 0
        keys = slice(first, stop)
        documents_Bs = None if documents_BT is None else documents_BT[:, keys]
        keys_values = k_BTKH[:, keys], v_BTKH[:, keys]
        outputs.append(
            PrefixAttention.apply(q_BlNH, *keys_values, documents_Bs, window, scores, sinks_N)
        )
    return torch.cat(outputs, dim=1)


def gathered_keys(k_BtKH: Tensor, group: dist.ProcessGroup, balanced: bool) -> Tensor:
    """Return the keys of all ranks in the order of the sequence (a collective)."""
    return natural_order(_GatherSequence.apply(k_BtKH, group, None), group.size(), balanced)


def natural_order(x_BTKH: Tensor, size: int, balanced: bool) -> Tensor:
    """Put the chunks of gathered, balanced sequences in order: 0, 2P-1, 1, 2P-2, ... to 0, 1, 2, ..."""
    if not balanced:
        return x_BTKH
    num_chunks = 2 * size
    chunks = x_BTKH.chunk(num_chunks, dim=1)
    in_order = []
    for index in range(num_chunks):
        # Rank r's two chunks are at 2r and 2r+1. The first half of the sequence is the ranks' first chunks.
        # The second half is the ranks' second chunks in reverse order.
        gathered_at = 2 * index
        if index >= size:
            gathered_at = 2 * (num_chunks - 1 - index) + 1
        in_order.append(chunks[gathered_at])
    return torch.cat(in_order, dim=1)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BtKH: Tensor, group: dist.ProcessGroup, shared: SequenceExchange | None
    ) -> Tensor:
        ctx.group = group
        ctx.shared = shared
        if shared is not None:
            gathered = shared.gather(x_BtKH.flatten(2))
            return gathered.unflatten(2, x_BtKH.shape[2:])
        x_BtKH = x_BtKH.contiguous()
        parts = [torch.empty_like(x_BtKH) for _ in range(group.size())]
        dist.all_gather(parts, x_BtKH, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Reduce in float32. A bfloat16 sum over ranks would lose small contributions.
        d_out = gradients[0]
        if ctx.shared is not None:
            gradient = ctx.shared.reduce_scatter(d_out.flatten(2))
            return gradient.unflatten(2, d_out.shape[2:]), None, None
        parts = d_out.float().chunk(ctx.group.size(), dim=1)
        gradient = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        _reduce_scatter(gradient, torch.cat(parts, dim=0), group=ctx.group)
        return gradient.to(d_out.dtype), None, None
