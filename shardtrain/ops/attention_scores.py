"""Attention with other scores than q k / sqrt(H): another scale, a soft cap, or a slope per head (ALiBi).

The score of query i and key j is ``cap(scale q_i k_j) - slope (i - j)``.
The cap is ``cap(s) = softcap tanh(s / softcap)`` (Gemma 2, section 2.2; Press et al. 2022).
Flash kernels only support the scale, so the other scores are computed with plain PyTorch operations.
The log-sum-exp is returned too, to merge results over parts of the keys. The backward pass is exact.
Shape suffixes: B batch, T tokens, l queries, s keys, N heads, K key-value heads, H head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardtrain.ops.sliding_window import Band

QUERIES_AT_ONCE = 256
"""Number of queries with scores in memory at the same time: (B, N, QUERIES_AT_ONCE, s) elements."""


class Scores(NamedTuple):
    """Parameters of an attention core's scores.

    Attributes:
        scale: Factor of q k. None means 1 / sqrt(H).
        softcap: Bound of the scores. 0 means no bound.
        slopes: ALiBi slopes, one per query head. Empty without ALiBi.
    """

    scale: float | None = None
    softcap: float = 0.0
    slopes: tuple[float, ...] = ()

    @property
    def has_kernel(self) -> bool:
        """True if flash kernels support these scores."""
        return not self.softcap and not self.slopes


PLAIN = Scores()


def scores_of(core: Any) -> Scores:
    """Return a core's scores from its optional attributes ``scale``, ``softcap`` and ``alibi_slopes``."""
    scale = getattr(core, "scale", None)
    slopes = getattr(core, "alibi_slopes", None)
    softcap = getattr(core, "softcap", None) or 0.0
    return Scores(
        None if scale is None else float(scale),
        float(softcap),
        tuple(float(slope) for slope in slopes or ()),
    )


def with_sinks(out_BlNH: Tensor, lse_BNl: Tensor, sinks_N: Tensor) -> tuple[Tensor, Tensor]:
    """Add a sink per head to the result of attention, and return the new output and log-sum-exp (gpt-oss, OpenAI 2025).

    A sink is an additional key with a value of zero and the same score for every query of its head.
    It only changes the sum of the softmax.
    The backward pass of attention without sinks remains correct with the returned tensors.
    """
    # The keys keep the fraction exp(lse) / (exp(lse) + exp(sink)) of the weights. The sink takes the rest.
    both_BNl = torch.logaddexp(lse_BNl, sinks_N.to(lse_BNl.dtype)[:, None])
    share_BlN1 = (lse_BNl - both_BNl).exp().transpose(1, 2)[..., None]
    return (out_BlNH * share_BlN1).to(out_BlNH.dtype), both_BNl


def sinks_gradient(
    gradient_BlNH: Tensor, out_BlNH: Tensor, lse_BNl: Tensor, sinks_N: Tensor
) -> Tensor:
    """Return the gradient (N,) of the sinks.

    Args:
        gradient_BlNH: Gradient of the output.
        out_BlNH: Output that ``with_sinks`` returned.
        lse_BNl: Log-sum-exp that ``with_sinks`` returned.
        sinks_N: Scores of the sinks.
    """
    # The derivative of a softmax is ds = p (dp - sum of p dp).
    # The dp of a sink is zero, because its value is zero.
    # The sum over all keys equals the sum of gradient times output.
    sum_BNl = (gradient_BlNH.to(lse_BNl.dtype) * out_BlNH).sum(-1).transpose(1, 2)
    weight_BNl = (sinks_N.to(lse_BNl.dtype)[:, None] - lse_BNl).exp()
    return -(weight_BNl * sum_BNl).sum((0, 2)).to(sinks_N.dtype)


def attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    documents_BT: Tensor | None,
    window: int,
    scores: Scores,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return causal attention (B, T, N, H) within documents and a window (0 for none).

    All scores (B, N, T, T) are in memory at the same time.
    """
    tokens = q_BTNH.size(1)
    seen_1TT = torch.ones(1, tokens, tokens, dtype=torch.bool, device=q_BTNH.device).tril()
    if window:
        seen_1TT = seen_1TT.triu(1 - window)
    seen_BTT = (
        seen_1TT
        if documents_BT is None
        else seen_1TT & (documents_BT[:, :, None] == documents_BT[:, None])
    )
    return masked_attention(q_BTNH, k_BTKH, v_BTKH, seen_BTT[:, None], scores, sinks_N)


def masked_attention(
    q_BlNH: Tensor,
    k_BsKH: Tensor,
    v_BsKH: Tensor,
    seen: Tensor | None,
    scores: Scores,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return attention (B, l, N, H) of queries that are the last l tokens of the keys.

    ``seen`` (B or 1, 1, l, s) is true for visible keys. None makes all keys visible.
    """
    q, k, v = _heads_first(q_BlNH, k_BsKH, v_BsKH)
    score_BNls, _ = _score(q, k, k.size(2) - q.size(2), scores)
    if seen is not None:
        score_BNls = score_BNls.masked_fill(~seen, -torch.inf)
    if sinks_N is not None:
        # Add a column for the sink to the softmax, and drop it, because its value is zero.
        column_BNl1 = sinks_N.to(score_BNls.dtype)[:, None, None].expand(*score_BNls.shape[:3], 1)
        weight_BNls = torch.cat((score_BNls, column_BNl1), dim=-1).softmax(-1)[..., :-1]
    else:
        weight_BNls = score_BNls.softmax(-1)
    return (weight_BNls @ v).transpose(1, 2).to(q_BlNH.dtype)


def attend(
    q_BlNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor, band: Band, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Attend to a part of the keys. Return the output (B, l, N, H) and the float32 log-sum-exp (B, N, l).

    Each query must see at least one key.
    """
    q, k, v = _heads_first(q_BlNH, k_BsKH, v_BsKH)
    score_BNls, _ = _score(q, k, band.last, scores, band)
    lse_BNl = score_BNls.logsumexp(-1)
    out_BNlH = (score_BNls - lse_BNl[..., None]).exp() @ v
    return out_BNlH.transpose(1, 2).to(q_BlNH.dtype), lse_BNl.float()


def attend_backward(
    gradient_BlNH: Tensor,
    q_BlNH: Tensor,
    k_BsKH: Tensor,
    v_BsKH: Tensor,
    out_BlNH: Tensor,
    lse_BNl: Tensor,
    band: Band,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from a part of the keys.

    ``out_BlNH`` and ``lse_BNl`` are the output and the log-sum-exp over all keys.
    """
    q, k, v = _heads_first(q_BlNH, k_BsKH, v_BsKH)
    gradient = gradient_BlNH.transpose(1, 2).to(q.dtype)
    out = out_BlNH.transpose(1, 2).to(q.dtype)
    score_BNls, slope_of_cap = _score(q, k, band.last, scores, band)
    weight_BNls = (score_BNls - lse_BNl[..., None]).exp()
    dv = weight_BNls.transpose(-2, -1) @ gradient
    # The derivative of a softmax is ds = p (dp - sum of p dp).
    # The sum over all keys equals the sum of gradient times output.
    d_weight = gradient @ v.transpose(-2, -1)
    d_score = weight_BNls * (d_weight - (gradient * out).sum(-1, keepdim=True))
    if slope_of_cap is not None:
        d_score = d_score * slope_of_cap
    d_score = d_score * _scale(q, scores)
    dq = (d_score @ k).transpose(1, 2)
    dk = (d_score.transpose(-2, -1) @ q).transpose(1, 2)
    dv = dv.transpose(1, 2)
    groups = q_BlNH.size(2) // k_BsKH.size(2)
    if groups > 1:
        # Several query heads share each key head.
        dk = dk.unflatten(2, (-1, groups)).sum(3)
        dv = dv.unflatten(2, (-1, groups)).sum(3)
    return dq.to(q_BlNH.dtype), dk.to(k_BsKH.dtype), dv.to(v_BsKH.dtype)


def _score(
    q_BNlH: Tensor, k_BNsH: Tensor, offset: int, scores: Scores, band: Band | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the scores (B, N, l, s), and the derivative of the soft cap (None without one).

    Query 0 is ``offset`` tokens after key 0.
    """
    score_BNls = (q_BNlH * _scale(q_BNlH, scores)) @ k_BNsH.transpose(-2, -1)
    slope_of_cap = None
    if scores.softcap:
        tanh_BNls = (score_BNls / scores.softcap).tanh()
        score_BNls = scores.softcap * tanh_BNls
        slope_of_cap = 1.0 - tanh_BNls.square()
    queries = q_BNlH.size(2)
    keys = k_BNsH.size(2)
    # ALiBi: a key loses a constant for each token between it and the query.
    if scores.slopes:
        if len(scores.slopes) != q_BNlH.size(1):
            raise ValueError(
                f"alibi_slopes has {len(scores.slopes)} numbers for {q_BNlH.size(1)} heads"
            )
        device = q_BNlH.device
        query_l = torch.arange(offset, offset + queries, device=device)
        key_s = torch.arange(keys, device=device)
        distance_ls = (query_l[:, None] - key_s).to(score_BNls.dtype)
        slope_N = torch.tensor(scores.slopes, device=device, dtype=score_BNls.dtype)
        score_BNls = score_BNls - slope_N[:, None, None] * distance_ls
    if band is not None:
        seen_ls = torch.ones(queries, keys, dtype=torch.bool, device=q_BNlH.device)
        seen_ls = seen_ls.tril_(band.last).triu_(band.first)
        score_BNls = score_BNls.masked_fill(~seen_ls, -torch.inf)
    return score_BNls, slope_of_cap


def _scale(q_BNlH: Tensor, scores: Scores) -> float:
    """Return the factor of q k."""
    return q_BNlH.size(-1) ** -0.5 if scores.scale is None else scores.scale


def _heads_first(q_BlNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as (B, N, tokens, H) in float32 or wider, with repeated grouped heads."""
    groups = q_BlNH.size(2) // k_BsKH.size(2)
    dtype = torch.promote_types(q_BlNH.dtype, torch.float32)
    if groups > 1:
        k_BsKH = k_BsKH.repeat_interleave(groups, dim=2)
        v_BsKH = v_BsKH.repeat_interleave(groups, dim=2)
    q = q_BlNH.transpose(1, 2).to(dtype)
    k = k_BsKH.transpose(1, 2).to(dtype)
    v = v_BsKH.transpose(1, 2).to(dtype)
    return q, k, v
