"""Shared pure pieces of the in-tree models: norms, rotary angles, attention, the gated feed-forward, the decoder.

Shape suffixes: B batch, T tokens, D model, N heads, K key-value heads, H head, h half a head, F feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.ops import attention_scores, document_mask
from shardtrain.utils.errors import ConfigError, Problem


def build_norm(norm_type: str, dim: int, eps: float) -> nn.Module:
    """Build the norm that ``model.norm_type`` names, over the last ``dim`` features.

    rmsnorm and fused_rmsnorm are the same module: PyTorch's RMSNorm is one fused kernel. np_layernorm has no
    parameters. Raises ConfigError for an unknown name.
    """
    if norm_type in ("rmsnorm", "fused_rmsnorm"):
        return nn.RMSNorm(dim, eps=eps)
    if norm_type == "layernorm":
        return nn.LayerNorm(dim, eps=eps, bias=False)
    if norm_type == "np_layernorm":
        return nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
    # model.norm_type itself is checked when it is read
    fix = "use rmsnorm, fused_rmsnorm, layernorm or np_layernorm"
    raise ConfigError(Problem("model.overrides.norm_type", norm_type, "is not a norm", fix))


class RotaryAngles(nn.Module):
    """Cosines and sines of the rotary position embedding, computed from positions (Su et al. 2021, RoFormer).

    Has no buffers: angles are computed from the positions it is given, so split or packed sequences need nothing
    special, and there is nothing to initialize after the meta device. ``scaling`` is "none", "linear" (positions
    divided by ``factor``, Chen et al. 2023) or "llama3" (Llama 3.1: long wavelengths divided by ``factor``, short ones
    kept, a linear ramp in between).
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: str = "none",
        factor: float = 8.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_seq_len: int = 8192,
    ) -> None:
        super().__init__()
        if scaling not in ("none", "linear", "llama3"):
            raise ValueError(f"rope_scaling={scaling!r} is unknown; use none, linear or llama3")
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        self.factor = factor
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor
        self.original_seq_len = original_seq_len

    def inverse_frequencies(self, device: torch.device | None = None) -> Tensor:
        """Radians per position of each pair of features, float32, shape (H/2,)."""
        exponents_h = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        frequencies_h = 1.0 / (self.theta**exponents_h)
        if self.scaling == "linear":
            return frequencies_h / self.factor
        if self.scaling == "llama3":
            wavelengths_h = 2 * math.pi / frequencies_h
            low = self.low_freq_factor
            high = self.high_freq_factor
            turns_h = self.original_seq_len / wavelengths_h
            # Turns within the original context: below ``low`` is a long wavelength, above ``high`` a short one.
            # Llama 4 sets both to 1, which makes the ramp a step
            ramp_h = ((turns_h - low) / (high - low)).clamp(0.0, 1.0) if high > low else (turns_h >= low).float()
            return frequencies_h * (ramp_h + (1.0 - ramp_h) / self.factor)
        return frequencies_h

    def forward(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32, each of shape (B, T, 1, H/2), for integer positions (B, T)."""
        angles_BT1h = positions_BT.float()[..., None, None] * self.inverse_frequencies(positions_BT.device)
        return angles_BT1h.cos(), angles_BT1h.sin()


def rotate(x_BTNH: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x_i, x_{i+H/2}) by its angle, in float32; the pairing of Hugging Face's Llama weights."""
    cos_BT1h, sin_BT1h = angles
    a_BTNh, b_BTNh = x_BTNH.float().chunk(2, dim=-1)
    rotated = (a_BTNh * cos_BT1h - b_BTNh * sin_BT1h, b_BTNh * cos_BT1h + a_BTNh * sin_BT1h)
    return torch.cat(rotated, dim=-1).type_as(x_BTNH)


def rotate_pairs(x_BTNH: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x_2i, x_2i+1) by its angle, in float32; the pairing of DeepSeek's weights."""
    cos_BT1h, sin_BT1h = angles
    a_BTNh, b_BTNh = x_BTNH.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = (a_BTNh * cos_BT1h - b_BTNh * sin_BT1h, b_BTNh * cos_BT1h + a_BTNh * sin_BT1h)
    return torch.stack(rotated, dim=-1).flatten(-2).type_as(x_BTNH)


class AttentionCore(nn.Module):
    """softmax(q k / sqrt(H)) v with a causal mask, without weights: the one module that context parallelism replaces.

    window:       a token attends to itself and the ``window - 1`` tokens before it; 0 means no window.
    chunk:        documents are cut into chunks of so many tokens, and a token attends within its chunk; 0 means none.
    scale:        replaces 1 / sqrt(H).
    softcap:      bounds the scaled scores by softcap tanh(score / softcap); 0 means none.
    alibi_slopes: one number per query head of the whole model; slope times distance in tokens is subtracted from the
                  scores.
    has_sinks:    whether the core is called with ``sinks_N`` too, one score per query head of the rank.
    heads_first:  whether q, k, v and the output are (B, N, T, H) rather than (B, T, N, H).

    Context parallelism reads these attributes to compute the same over split sequences; tensor parallelism reduces
    ``alibi_slopes`` to those of a rank's heads.
    """

    heads_first = False
    has_sinks = False

    def __init__(
        self,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Sequence[float] | None = None,
        chunk: int = 0,
    ) -> None:
        super().__init__()
        self.chunk = chunk
        self.window = window
        self.scale = scale
        self.softcap = softcap
        self.alibi_slopes = None if alibi_slopes is None else tuple(alibi_slopes)

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Attention of queries (B, T, N, H) to keys and values (B, T, K, H), N a multiple of K: (B, T, N, H).

        With ``documents_BT`` a token attends within its own document alone.
        """
        return self._attend(q_BTNH, k_BTKH, v_BTKH, documents_BT, None)

    def _attend(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor | None, sinks_N: Tensor | None
    ) -> Tensor:
        if self.chunk:
            shape = (q_BTNH.size(0), q_BTNH.size(1))
            documents_BT = document_mask.chunked(documents_BT, self.chunk, shape, q_BTNH.device)
        # No fused kernel has soft caps or ALiBi, so these scores are computed in blocks of queries
        if self.softcap or self.alibi_slopes:
            scores = attention_scores.scores_of(self)
            return attention_scores.attention(q_BTNH, k_BTKH, v_BTKH, documents_BT, self.window, scores, sinks_N)
        # Documents, a window shorter than the sequence, and sinks need masked kernels. Plain attention goes there too
        # where blocks were measured to be faster on this CPU
        masked = documents_BT is not None or 0 < self.window < q_BTNH.size(1) or sinks_N is not None
        if masked or document_mask.in_blocks(q_BTNH):
            return document_mask.attention(q_BTNH, k_BTKH, v_BTKH, documents_BT, self.window, self.scale, sinks_N)
        # Plain causal attention: PyTorch chooses the kernel
        q_BNTH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        grouped = q_BNTH.size(1) != k_BKTH.size(1)
        out_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, is_causal=True, scale=self.scale, enable_gqa=grouped
        )
        return out_BNTH.transpose(1, 2)


class SinkAttentionCore(AttentionCore):
    """An attention core that is given the scores of sinks: ``core(q, k, v, documents_BT, sinks_N)``."""

    has_sinks = True

    def forward(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents_BT: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """``sinks_N`` are scores of one more key per head, whose value is zero."""
        return self._attend(q_BTNH, k_BTKH, v_BTKH, documents_BT, sinks_N)


class HeadNumbers(nn.Module):
    """One number per query head, (N,); with tensor parallelism a rank holds those of its heads."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """The numbers."""
        return self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (Ainslie et al. 2023)."""

    def __init__(
        self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, qkv_bias: bool = False, window: int = 0
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=qkv_bias)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=qkv_bias)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=qkv_bias)
        self.core = AttentionCore(window)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)

    def forward(self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        # The number of heads follows from the weights, since a tensor-parallel rank has only some of the heads.
        q_BTNH, k_BTKH, v_BTKH = (w(x_BTD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        out_BTNH = self.core(rotate(q_BTNH, angles), rotate(k_BTKH, angles), v_BTKH, documents_BT)
        return self.wo(out_BTNH.flatten(2))


class NormedAttention(Attention):
    """Grouped-query attention whose queries and keys are normalised per head (Dehghani et al. 2023; Qwen3)."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, norm_eps: float) -> None:
        super().__init__(dim, num_heads, num_kv_heads, head_dim)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps)

    def forward(self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        q_BTNH, k_BTKH, v_BTKH = (w(x_BTD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q_BTNH = rotate(self.q_norm(q_BTNH), angles)
        k_BTKH = rotate(self.k_norm(k_BTKH), angles)
        out_BTNH = self.core(q_BTNH, k_BTKH, v_BTKH, documents_BT)
        return self.wo(out_BTNH.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU feed-forward: w2(silu(w1 x) * w3 x) (Shazeer 2020)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Decoder(nn.Module):
    """The chain that models share: embed -> layers -> norm -> head. V is the vocabulary."""

    def __init__(
        self, vocab_size: int, dim: int, rope: nn.Module, layers: Iterable[nn.Module], norm: nn.Module, tied: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.rope = rope
        # A dict, so that layers keep their names on a pipeline stage that has dropped earlier ones
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        self.norm = norm
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of integer tokens (B, T) at integer positions (B, T).

        ``documents_BT`` numbers the documents of each row, ascending; tokens attend within their document. It is passed
        to the attention cores unchanged, and is never split: a context-parallel rank has it for whole rows.

        On a pipeline stage the modules of other stages are ``nn.Identity``, so that it takes (B, T, D) in place of
        tokens, or returns it in place of logits.
        """
        x_BTD = self.embed(tokens_BT)
        angles = self.rope(positions_BT)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, angles, documents_BT)
        return self.head(self.norm(x_BTD))

    # The output of the head is returned unchanged, so the loss may be fused with it: see distributed/loss_at_head.py
    forward.gives_output_of_head = True  # type: ignore[attr-defined]
