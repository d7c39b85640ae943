"""Context parallelism by DeepSpeed-Ulysses: an all-to-all gives each rank all tokens of some heads.

Shape suffixes: B batch, t tokens of this rank, T all tokens, N heads, K key-value heads, n heads
after an exchange, H head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardtrain.distributed.context_parallel.merged_attention import PrefixAttention
from shardtrain.ops import chosen_kernels, document_mask
from shardtrain.ops.attention_scores import PLAIN, Scores


def ulysses_attention(
    q_BtNH: Tensor,
    k_BtKH: Tensor,
    v_BtKH: Tensor,
    group: dist.ProcessGroup,
    _: bool,
    documents_BT: Tensor | None = None,
    window: int = 0,
    scores: Scores = PLAIN,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Redistribute q, k and v to full sequences of some heads, attend, and redistribute the output back."""
    q_BTnH = _HeadsForTokens.apply(q_BtNH, group)
    k_BTkH = _HeadsForTokens.apply(k_BtKH, group)
    v_BTkH = _HeadsForTokens.apply(v_BtKH, group)
    heads = slice(group.rank() * q_BTnH.size(2), (group.rank() + 1) * q_BTnH.size(2))
    if scores.slopes:
        scores = scores._replace(slopes=scores.slopes[heads])
    sinks_n = None if sinks_N is None else sinks_N[heads]
    # Scores without a flash kernel, such as soft caps, are computed in blocks of queries.
    if not scores.has_kernel:
        documents_BT = None if documents_BT is None else document_mask.on_host(documents_BT)
        out_BTnH = PrefixAttention.apply(
            q_BTnH, k_BTkH, v_BTkH, documents_BT, window, scores, sinks_n
        )
        return _TokensForHeads.apply(out_BTnH, group)  # type: ignore[no-any-return]
    masked = documents_BT is not None or 0 < window < q_BTnH.size(1) or sinks_n is not None
    # Choose the kernel by the same rule as AttentionCore.
    if masked or chosen_kernels.attends_in_blocks(q_BTnH):
        out_BTnH = document_mask.attention(
            q_BTnH, k_BTkH, v_BTkH, documents_BT, window, scores.scale, sinks_n
        )
        return _TokensForHeads.apply(out_BTnH, group)  # type: ignore[no-any-return]
    # scaled_dot_product_attention expects heads before tokens.
    q_BnTH = q_BTnH.transpose(1, 2)
    k_BkTH = k_BTkH.transpose(1, 2)
    v_BkTH = v_BTkH.transpose(1, 2)
    grouped = q_BnTH.size(1) != k_BkTH.size(1)
    out_BnTH = F.scaled_dot_product_attention(
        q_BnTH, k_BkTH, v_BkTH, is_causal=True, scale=scores.scale, enable_gqa=grouped
    )
    return _TokensForHeads.apply(out_BnTH.transpose(1, 2), group)  # type: ignore[no-any-return]


class _HeadsForTokens(torch.autograd.Function):
    """All-to-all from all heads of some tokens, (B, t, N, H), to some heads of all tokens, (B, T, N / P, H)."""

    @staticmethod
    def forward(ctx: Any, x_BtNH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _heads_for_tokens(x_BtNH, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _tokens_for_heads(gradients[0], ctx.group), None


class _TokensForHeads(torch.autograd.Function):
    """The inverse of ``_HeadsForTokens``."""

    @staticmethod
    def forward(ctx: Any, x_BTnH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _tokens_for_heads(x_BTnH, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _heads_for_tokens(gradients[0], ctx.group), None


def _heads_for_tokens(x_BtNH: Tensor, group: dist.ProcessGroup) -> Tensor:
    # all_to_all_single requires contiguous memory.
    parts_PBtnH = torch.stack(x_BtNH.chunk(group.size(), dim=2))
    received_PBtnH = torch.empty_like(parts_PBtnH)
    dist.all_to_all_single(received_PBtnH, parts_PBtnH, group=group)
    return torch.cat(received_PBtnH.unbind(0), dim=1)


def _tokens_for_heads(x_BTnH: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts_PBtnH = torch.stack(x_BTnH.chunk(group.size(), dim=1))
    received_PBtnH = torch.empty_like(parts_PBtnH)
    dist.all_to_all_single(received_PBtnH, parts_PBtnH, group=group)
    return torch.cat(received_PBtnH.unbind(0), dim=2)
