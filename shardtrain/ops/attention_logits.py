"""Largest attention logit of each head, for QK-clip (distributed/qk_clip.py).

A logit is the scaled product of a query and a key that it attends to, before a soft cap or ALiBi.
Attention kernels do not return logits, so the products are computed a second time.
Shape suffixes: B batch, l queries, s keys, N heads, K key-value heads, G query heads per key-value head,
H head.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_NUMEL = 1 << 24
"""Number of logits in memory at the same time."""


# A custom operation, so that selective recomputation neither stores its products nor counts its matmuls.
@torch.library.custom_op("shardtrain::max_attention_logits", mutates_args=())
def max_attention_logits(
    q_BlNH: Tensor, k_BsKH: Tensor, documents_Bs: Tensor | None, window: int, scale: float
) -> Tensor:
    """Return the largest logit of each query head, (N,), in float32 or wider.

    Args:
        q_BlNH: queries of the last l tokens of the keys.
        k_BsKH: keys.
        documents_Bs: document number of each key. None if each row is one document.
        window: number of tokens that a token attends to, including itself. 0 for no window.
        scale: factor of the products.
    """
    dtype = torch.promote_types(q_BlNH.dtype, torch.float32)
    num_rows, num_queries, num_heads, _ = q_BlNH.shape
    num_keys, num_key_heads = k_BsKH.shape[1:3]
    # (B, K, G, l, H) and (B, K, 1, H, s)
    q = q_BlNH.unflatten(2, (num_key_heads, -1)).permute(0, 2, 3, 1, 4).to(dtype) * scale
    k = k_BsKH.permute(0, 2, 3, 1).unsqueeze(2).to(dtype)
    largest_N = q_BlNH.new_full((num_heads,), -torch.inf, dtype=dtype)
    at_once = max(1, _MAX_NUMEL // max(1, num_rows * num_heads * num_keys))
    for start in range(0, num_queries, at_once):
        stop = min(start + at_once, num_queries)
        # Token numbers of these queries, and the keys from the start of the window to the last query.
        first = num_keys - num_queries + start
        last = num_keys - num_queries + stop
        low = max(0, first - window + 1) if window else 0
        query_l1 = torch.arange(first, last, device=q.device)[:, None]
        key_s = torch.arange(low, last, device=q.device)
        is_visible = key_s <= query_l1
        if window:
            is_visible = is_visible & (key_s > query_l1 - window)
        if documents_Bs is not None:
            documents_Bl1 = documents_Bs[:, first:last, None]
            is_visible = is_visible & (documents_Bl1 == documents_Bs[:, None, low:last])
            is_visible = is_visible[:, None, None]
        logits = q[:, :, :, start:stop] @ k[..., low:last]
        logits = logits.masked_fill(~is_visible, -torch.inf)
        largest_N = torch.maximum(largest_N, logits.amax(dim=(0, 3, 4)).flatten())
    return largest_N


@max_attention_logits.register_fake
def _(
    q_BlNH: Tensor, k_BsKH: Tensor, documents_Bs: Tensor | None, window: int, scale: float
) -> Tensor:
    dtype = torch.promote_types(q_BlNH.dtype, torch.float32)
    return q_BlNH.new_empty((q_BlNH.size(2),), dtype=dtype)
