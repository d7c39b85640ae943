"""Attention within packed documents by blocks of matrix products, as a custom operation with its own backward pass.

Shape suffixes: B batch, T tokens, N heads, K key-value heads, H head.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from shardtrain.ops.attention_operation import register_attention
from shardtrain.ops.cpu import blocked_attention
from shardtrain.ops.shared_documents import Shared, shared
from shardtrain.ops.sliding_window import Band


def attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    documents_BT: Tensor | None,
    window: int,
    scale: float | None,
) -> Tensor:
    """Compute ``document_mask.attention`` by blocks. Sinks are not supported."""
    return operation(q_BTNH, k_BTKH, v_BTKH, documents_BT, window, scale)[0]  # type: ignore[no-any-return]


def _pieces(
    q_BTNH: Tensor, documents_BT: Tensor | None, window: int
) -> Iterator[blocked_attention.Piece]:
    """Yield a piece for each document of each row. Without documents, yield one piece for all rows."""
    tokens = slice(0, q_BTNH.size(1))
    band = Band(1 - window, 0) if window else blocked_attention.CAUSAL
    documents = [Shared(slice(None), tokens, tokens)]
    if documents_BT is not None:
        documents = shared(documents_BT, documents_BT)
    for row, document, _ in documents:
        yield blocked_attention.Piece(row, document, document, band)


def _forward(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    documents_BT: Tensor | None,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    keys_values_2BKTH = blocked_attention.heads_first(k_BTKH, v_BTKH)
    pieces = _pieces(q_BTNH, documents_BT, window)
    return blocked_attention.attend_in_pieces(q_BTNH, keys_values_2BKTH, pieces, scale)


def _backward(
    gradient_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    lse_BNT: Tensor,
    documents_BT: Tensor | None,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    keys_values_2BKTH = blocked_attention.heads_first(k_BTKH, v_BTKH)
    inputs = (gradient_BTNH, q_BTNH, keys_values_2BKTH, lse_BNT)
    pieces = _pieces(q_BTNH, documents_BT, window)
    dq_BTNH, dkeys_values_2BKTH = blocked_attention.attend_in_pieces_backward(
        *inputs, pieces, scale
    )
    dk_BTKH, dv_BTKH = (
        blocked_attention.tokens_first(x_BKTH, q_BTNH.dtype) for x_BKTH in dkeys_values_2BKTH
    )
    return dq_BTNH, dk_BTKH, dv_BTKH


operation = register_attention("blocked_attention", _forward, _backward, keeps_output=False)
