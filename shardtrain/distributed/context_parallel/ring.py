"""Context parallelism by a ring: ranks pass keys and values on, and merge the attention to each rank's keys.

Sequences are split as in ``gather.py``. Shape suffixes: B batch, t tokens of this rank, T all
tokens, N heads, K key-value heads, n heads after an exchange, H head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.distributed.context_parallel.masks import ring_pieces
from shardtrain.distributed.context_parallel.merged_attention import (
    Merged,
    backward_of,
    sinks_gradient_of,
    window_of,
)
from shardtrain.ops import document_mask
from shardtrain.ops.attention_scores import PLAIN, Scores


def ring_attention(
    q_BtNH: Tensor,
    k_BtKH: Tensor,
    v_BtKH: Tensor,
    group: dist.ProcessGroup,
    balanced: bool,
    documents_BT: Tensor | None = None,
    window: int = 0,
    scores: Scores = PLAIN,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attend to the keys of all ranks, which are passed around the ring.

    A rank holds the keys and values of only one rank at a time.
    """
    documents_BT = None if documents_BT is None else document_mask.on_host(documents_BT)
    inputs = (q_BtNH, k_BtKH, v_BtKH, group, balanced, documents_BT, window, scores, sinks_N)
    return _Ring.apply(*inputs)  # type: ignore[no-any-return]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BtNH: Tensor,
        k_BtKH: Tensor,
        v_BtKH: Tensor,
        group: dist.ProcessGroup,
        balanced: bool,
        documents_BT: Tensor | None,
        window: int,
        scores: Scores,
        sinks_N: Tensor | None,
    ) -> Tensor:
        merged = Merged(q_BtNH, scores)
        ctx.scores = scores
        keys_values = torch.stack((k_BtKH, v_BtKH))
        window_blocks = window_of(window, q_BtNH.size(1) * group.size(), q_BtNH, scores)
        ctx.pieces = ring_pieces(
            q_BtNH.size(1), group.rank(), group.size(), balanced, documents_BT, window_blocks
        )
        # The queries stay on their rank. The keys and values of all ranks travel around the ring.
        for pieces in ctx.pieces:
            for piece in pieces:
                merged.attend(piece, q_BtNH, *keys_values)
            keys_values = _pass_on(keys_values, group)
        merged.add_sinks(sinks_N)
        out_BtNH = merged.out_BtNH.to(q_BtNH.dtype)
        ctx.save_for_backward(q_BtNH, k_BtKH, v_BtKH, out_BtNH, merged.lse_BNt, sinks_N)
        ctx.group = group
        return out_BtNH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BtNH, k_BtKH, v_BtKH, out_BtNH, lse_BNt, sinks_N = ctx.saved_tensors
        dq_BtNH = torch.zeros_like(q_BtNH, dtype=torch.float32)
        keys_values = torch.stack((k_BtKH, v_BtKH))
        # Keys and values travel around the ring together with their gradients, to which every rank adds
        # its contribution. After a complete round, they are back at the rank that owns them.
        summed = torch.zeros_like(keys_values, dtype=torch.float32)
        for pieces in ctx.pieces:
            for piece in pieces:
                batch, rows, columns = piece[:3]
                k, v = keys_values
                dq, dk, dv = backward_of(
                    piece, ctx.scores, gradients[0], q_BtNH, k, v, out_BtNH, lse_BNt
                )
                dq_BtNH[batch, rows] += dq
                summed[0][batch, columns] += dk
                summed[1][batch, columns] += dv
            keys_values = _pass_on(keys_values, ctx.group)
            summed = _pass_on(summed, ctx.group)
        dtype = q_BtNH.dtype
        dsinks_N = sinks_gradient_of(gradients[0], out_BtNH, lse_BNt, sinks_N)
        return (
            dq_BtNH.to(dtype),
            summed[0].to(dtype),
            summed[1].to(dtype),
            None,
            None,
            None,
            None,
            None,
            dsinks_N,
        )


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send a tensor to the next rank of the ring. Return the tensor from the previous rank."""
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    rank = group.rank()
    ranks = group.size()
    next_rank = dist.get_global_rank(group, (rank + 1) % ranks)
    previous = dist.get_global_rank(group, (rank - 1) % ranks)
    # Batch both, because NCCL could deadlock if all ranks of the ring started with their send.
    send = dist.P2POp(dist.isend, tensor, next_rank, group)
    receive = dist.P2POp(dist.irecv, received, previous, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return received
