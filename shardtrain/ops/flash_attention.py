"""Attention to a part of the keys with a device's flash kernel (Dao et al. 2022), forward and backward.

Outputs over parts of the keys can be merged with their log-sum-exps. The backward pass of each part is
exact if it receives the merged output and log-sum-exp. Shape suffixes: B batch, l queries, s keys, N
heads, K key-value heads, H head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardtrain.ops import accelerator, attention_scores, device_kernels
from shardtrain.ops.attention_scores import PLAIN, Scores
from shardtrain.ops.sliding_window import Band, mask
from shardtrain.utils.errors import ConfigError, Problem


def attend(
    q_BlNH: Tensor,
    k_BsKH: Tensor,
    v_BsKH: Tensor,
    causal: bool,
    band: Band | None = None,
    scores: Scores = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, l, N, H) and its log-sum-exp (B, N, l), in float32 or wider.

    Args:
        causal: Use a causal mask. It requires equally many queries and keys.
        band: Visible keys of each query, instead of ``causal``. Each query must see at least one key.
        scores: Parameters of the scores. Scores without a flash kernel require a ``band``.

    Raises:
        ConfigError: an accelerator has no flash kernel for the dtype.
    """
    if not scores.has_kernel:
        assert band is not None
        return attention_scores.attend(q_BlNH, k_BsKH, v_BsKH, band, scores)

    if accelerator.is_accelerator(q_BlNH.device):
        if q_BlNH.dtype not in (torch.float16, torch.bfloat16):
            dtype = str(q_BlNH.dtype).removeprefix("torch.")
            rule = "has no flash attention kernel on CUDA, which split sequences require"
            fix = 'use bfloat16 or float16, or parallelism.context_parallel_method="ulysses"'
            raise ConfigError(Problem("training.mixed_precision_param", dtype, rule, fix))
        # The kernel takes the rows of a batch one after another, with the start of each row.
        q, k, v = _end_to_end(q_BlNH, k_BsKH, v_BsKH)
        rows = _Rows(q_BlNH, k_BsKH, band)
        out_SNH, lse_NS, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            *rows.starts,
            *rows.lengths,
            0.0,
            causal and band is None,
            False,
            scale=scores.scale,
            **rows.window,
        )
        lse_NBl = lse_NS.unflatten(1, q_BlNH.shape[:2])
        return out_SNH.view_as(q_BlNH), lse_NBl.transpose(0, 1).contiguous()

    q, k, v = _heads_first(q_BlNH, k_BsKH, v_BsKH)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_mask(q, k, band), scale=scores.scale
    )
    return out.transpose(1, 2), lse.to(torch.promote_types(q.dtype, torch.float32))


def attend_backward(
    gradient_BlNH: Tensor,
    q_BlNH: Tensor,
    k_BsKH: Tensor,
    v_BsKH: Tensor,
    out_BlNH: Tensor,
    lse_BNl: Tensor,
    causal: bool,
    band: Band | None = None,
    scores: Scores = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from one part of the keys.

    ``out_BlNH`` and ``lse_BNl`` are the output and the log-sum-exp over all keys.
    """
    if not scores.has_kernel:
        assert band is not None
        return attention_scores.attend_backward(
            gradient_BlNH, q_BlNH, k_BsKH, v_BsKH, out_BlNH, lse_BNl, band, scores
        )
    if accelerator.is_accelerator(q_BlNH.device):
        gradient, q, k, v, out = _end_to_end(gradient_BlNH, q_BlNH, k_BsKH, v_BsKH, out_BlNH)
        rows = _Rows(q_BlNH, k_BsKH, band)
        lse_NS = lse_BNl.transpose(0, 1).flatten(1).contiguous()
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            gradient,
            q,
            k,
            v,
            out,
            lse_NS,
            *rows.starts,
            *rows.lengths,
            0.0,
            causal and band is None,
            *_no_randomness(q),
            scale=scores.scale,
            **rows.window,
        )
        return dq.view_as(q_BlNH), dk.view_as(k_BsKH), dv.view_as(v_BsKH)
    q, k, v = _heads_first(q_BlNH, k_BsKH, v_BsKH)
    gradient = gradient_BlNH.transpose(1, 2).contiguous()
    out = out_BlNH.transpose(1, 2).contiguous()
    lse = lse_BNl.to(torch.promote_types(q.dtype, torch.float32)).contiguous()
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, lse, 0.0, causal, attn_mask=_mask(q, k, band), scale=scores.scale
    )
    dq, dk, dv = [x.transpose(1, 2) for x in grads[:3]]
    groups = q_BlNH.size(2) // k_BsKH.size(2)
    if groups > 1:
        # Several query heads share each key head.
        dk = dk.unflatten(2, (-1, groups)).float().sum(3).to(dk.dtype)
        dv = dv.unflatten(2, (-1, groups)).float().sum(3).to(dv.dtype)
    return dq, dk, dv


def has_flash(x_BTNH: Tensor) -> bool:
    """True if the accelerator has a flash kernel for this dtype and head width."""
    is_short = x_BTNH.dtype in (torch.float16, torch.bfloat16)
    width = x_BTNH.size(-1)
    return (
        is_short
        and width % 8 == 0
        and width <= 256
        and device_kernels.has_flash_attention(x_BTNH.device)
    )


def _mask(q_BNlH: Tensor, k_BNsH: Tensor, band: Band | None) -> Tensor | None:
    return None if band is None else mask(q_BNlH.size(2), k_BNsH.size(2), band, q_BNlH)


class _Rows:
    """Arguments for rows of equal length in the ragged layout, in which all rows are concatenated.

    Only this form of the kernels supports windows, and grouped heads without repeating keys and values.
    """

    def __init__(self, q_BlNH: Tensor, k_BsKH: Tensor, band: Band | None) -> None:
        self.lengths = q_BlNH.size(1), k_BsKH.size(1)
        self.starts = []
        for length in self.lengths:
            end = (q_BlNH.size(0) + 1) * length
            starts = torch.arange(0, end, length, dtype=torch.int32, device=q_BlNH.device)
            self.starts.append(starts)
        self.window: dict[str, int] = {}
        if band is None:
            return
        # Kernels align the last query with the last key. A band aligns the first query with the first key.
        past = self.lengths[1] - self.lengths[0]
        self.window = {"window_size_left": past - band.first, "window_size_right": band.last - past}


def _end_to_end(*tensors: Tensor) -> list[Tensor]:
    """Concatenate the rows of each tensor."""
    return [x.flatten(0, 1).contiguous() for x in tensors]


def _ragged_window(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def attend_ragged(
    q_SNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    starts: Tensor,
    longest: int,
    window: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within concatenated sequences on CUDA. Return output (S, N, H) and log-sum-exp (N, S).

    This calls the operator of ``torch.nn.attention.varlen``, but also returns the log-sum-exp.

    Args:
        starts: First token of each sequence, followed by S. An int32 tensor on the device.
        longest: Number of tokens of the longest sequence.
        window: Number of tokens that a token attends to. 0 for no window.
    """
    q, k, v = (x.contiguous() for x in (q_SNH, k_SKH, v_SKH))
    lengths = (starts, starts, longest, longest)
    causal = not window
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, causal, False, scale=scale, **_ragged_window(window)
    )
    return out, lse


def attend_ragged_backward(
    gradient_SNH: Tensor,
    q_SNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    out_SNH: Tensor,
    lse_NS: Tensor,
    starts: Tensor,
    longest: int,
    window: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of ``attend_ragged``."""
    gradient, q, k, v, out = [x.contiguous() for x in (gradient_SNH, q_SNH, k_SKH, v_SKH, out_SNH)]
    lengths = (starts, starts, longest, longest)
    causal = not window
    return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
        gradient,
        q,
        k,
        v,
        out,
        lse_NS.contiguous(),
        *lengths,
        0.0,
        causal,
        *_no_randomness(q),
        scale=scale,
        **_ragged_window(window),
    )


def repeat_heads(q_BTNH: Tensor, *keys_values: Tensor) -> list[Tensor]:
    """Repeat keys and values to the number of query heads. Each key-value head serves N / K query heads."""
    groups = q_BTNH.size(2) // keys_values[0].size(2)
    return [x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in keys_values]


def _heads_first(q_BlNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        x.transpose(1, 2).contiguous() for x in (q_BlNH, *repeat_heads(q_BlNH, k_BsKH, v_BsKH))
    )
    return q, k, v


def _no_randomness(q: Tensor) -> tuple[Tensor, Tensor]:
    # Seed and offset of dropout. The operator requires the tensors, but does not read them without dropout.
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return random_state, random_state
