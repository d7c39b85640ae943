"""Building blocks of the native models: norms, rotary angles, attention, SwiGLU, the decoder.
Shape suffixes: B batch, T tokens, D model, N heads, K key-value heads, H head, h half a head, F
feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.ops import attention_scores, chosen_kernels, document_mask
from shardtrain.utils.errors import ConfigError, Problem


def build_norm(norm_type: str, dim: int, eps: float) -> nn.Module:
    """Build the norm that ``model.norm_type`` names, over the last ``dim`` features.

    rmsnorm and fused_rmsnorm are the same module: PyTorch's RMSNorm is one fused kernel.
    np_layernorm has no parameters. Raises ConfigError for an unknown name.
    """
    if norm_type in ("rmsnorm", "fused_rmsnorm"):
        return nn.RMSNorm(dim, eps=eps)
    if norm_type == "layernorm":
        return nn.LayerNorm(dim, eps=eps, bias=False)
    if norm_type == "np_layernorm":
        return nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
    # model.norm_type itself is checked when it is read
    raise ConfigError(
        Problem(
            "model.overrides.norm_type",
            norm_type,
            rule="is not a norm",
            fix="use rmsnorm, fused_rmsnorm, layernorm or np_layernorm",
        )
    )


class RotaryAngles(nn.Module):
    """Cosines and sines of the rotary position embedding (Su et al. 2021, RoFormer).

    The angles are computed from the ``positions_BT`` of each call. Split and packed sequences
    therefore need no special case, and there are no buffers to initialize after the meta device.

    Args:
        head_dim: rotated features per head (H).
        theta: base of the wavelengths.
        scaling: "none", "linear" or "llama3". "linear" divides positions by ``factor`` (Chen et al.
            2023). "llama3" divides the frequencies of long wavelengths by ``factor``, keeps those
            of short ones, and has a linear ramp in between (Llama 3.1).
        factor: stretch of the context.
        low_freq_factor: a wavelength is long if it completes fewer turns than this within the
            original context.
        high_freq_factor: a wavelength is short if it completes more turns than this.
        original_seq_len: original context in tokens.

    Raises ValueError for an unknown ``scaling``.
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
        """Return the radians per position of each pair of features, float32, shape (H/2,)."""
        exponents_h = (
            torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        )
        frequencies_h = 1.0 / (self.theta**exponents_h)
        if self.scaling == "linear":
            return frequencies_h / self.factor
        if self.scaling == "none":
            return frequencies_h
        # llama3: the ramp is 0 for long wavelengths and 1 for short ones. Llama 4 sets low = high,
        # which makes it a step
        wavelengths_h = 2 * math.pi / frequencies_h
        turns_h = self.original_seq_len / wavelengths_h
        low = self.low_freq_factor
        high = self.high_freq_factor
        ramp_h = (turns_h >= low).float()
        if high > low:
            ramp_h = ((turns_h - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies_h * (ramp_h + (1.0 - ramp_h) / self.factor)

    def forward(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for integer positions (B, T), float32, each of shape (B, T, 1, H/2)."""
        angles_BT1h = positions_BT.float()[..., None, None] * self.inverse_frequencies(
            positions_BT.device
        )
        return angles_BT1h.cos(), angles_BT1h.sin()


def rotate(x_BTNH: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x_i, x_{i+H/2}) by its angle, in float32. Hugging Face's Llama weights use
    this pairing.
    """
    cos_BT1h, sin_BT1h = angles
    a_BTNh, b_BTNh = x_BTNH.float().chunk(2, dim=-1)
    rotated_a_BTNh = a_BTNh * cos_BT1h - b_BTNh * sin_BT1h
    rotated_b_BTNh = b_BTNh * cos_BT1h + a_BTNh * sin_BT1h
    rotated_BTNH = torch.cat((rotated_a_BTNh, rotated_b_BTNh), dim=-1)
    return rotated_BTNH.type_as(x_BTNH)


def rotate_pairs(x_BTNH: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x_2i, x_2i+1) by its angle, in float32. DeepSeek's weights use this pairing."""
    cos_BT1h, sin_BT1h = angles
    a_BTNh, b_BTNh = x_BTNH.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated_a_BTNh = a_BTNh * cos_BT1h - b_BTNh * sin_BT1h
    rotated_b_BTNh = b_BTNh * cos_BT1h + a_BTNh * sin_BT1h
    rotated_BTNH = torch.stack((rotated_a_BTNh, rotated_b_BTNh), dim=-1).flatten(-2)
    return rotated_BTNH.type_as(x_BTNH)


class AttentionCore(nn.Module):
    """Compute softmax(q k / sqrt(H)) v with a causal mask. It has no weights, and context
    parallelism replaces it.

    Context parallelism reads the attributes below to compute the same function over split
    sequences. Tensor parallelism keeps only the ``alibi_slopes`` of the rank's heads.

    Attributes:
        window: a token attends to itself and the ``window - 1`` tokens before it; 0 means no
            window.
        chunk: documents are split into chunks of this many tokens, and a token attends within its
            chunk; 0 means no chunks.
        scale: replaces 1 / sqrt(H).
        softcap: bounds the scaled scores by softcap tanh(score / softcap); 0 means no bound.
        alibi_slopes: one slope per query head of the unsharded model. Slope times distance in
            tokens is subtracted from the scores.
        has_sinks: True if the core takes ``sinks_N``, one score per query head of the rank.
        heads_first: True if q, k, v and the output are (B, N, T, H) instead of (B, T, N, H).
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

    def forward(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Attend with queries (B, T, N, H) to keys and values (B, T, K, H). Return (B, T, N, H).

        N is a multiple of K. With ``documents_BT`` a token attends only within its own document.
        """
        return self._attend(q_BTNH, k_BTKH, v_BTKH, documents_BT, None)

    def _attend(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents_BT: Tensor | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        if self.chunk:
            shape = (q_BTNH.size(0), q_BTNH.size(1))
            documents_BT = document_mask.chunked(documents_BT, self.chunk, shape, q_BTNH.device)
        # No fused kernel supports soft caps or ALiBi, so these scores are computed in blocks of queries
        if self.softcap or self.alibi_slopes:
            scores = attention_scores.scores_of(self)
            return attention_scores.attention(
                q_BTNH, k_BTKH, v_BTKH, documents_BT, self.window, scores, sinks_N
            )
        # Documents, a window shorter than the sequence, and sinks need masked kernels. Plain causal
        # attention also uses them if a measurement on this CPU showed that the blocked kernel is faster
        has_window = 0 < self.window < q_BTNH.size(1)
        needs_mask = documents_BT is not None or has_window or sinks_N is not None
        if needs_mask or chosen_kernels.attends_in_blocks(q_BTNH):
            return document_mask.attention(
                q_BTNH, k_BTKH, v_BTKH, documents_BT, self.window, self.scale, sinks_N
            )
        # Plain causal attention: PyTorch chooses the kernel
        q_BNTH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        is_grouped = q_BNTH.size(1) != k_BKTH.size(1)
        out_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, is_causal=True, scale=self.scale, enable_gqa=is_grouped
        )
        return out_BNTH.transpose(1, 2)


class SinkAttentionCore(AttentionCore):
    """Attention core with a sink per head: ``core(q, k, v, documents_BT, sinks_N)``."""

    has_sinks = True

    def forward(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents_BT: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attend as AttentionCore does. ``sinks_N`` is the score of one additional key per head,
        whose value is zero.
        """
        return self._attend(q_BTNH, k_BTKH, v_BTKH, documents_BT, sinks_N)


class HeadNumbers(nn.Module):
    """A parameter whose first dimension is ordered by head, such as one scalar per query head, (N,).

    With tensor parallelism a rank has the part that belongs to its heads.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        """Return the parameter of the heads of this rank, such as (N,)."""
        return self.weight


def scaled_equally(head_dim: int) -> dict[str, list[float]]:
    """Return the powers of QK-clip for attention whose logits are products of the outputs of ``wq`` and ``wk``."""
    return {"wq": [0.5] * head_dim, "wk": [0.5] * head_dim}


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (Ainslie et al. 2023)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        window: int = 0,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=qkv_bias)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=qkv_bias)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=qkv_bias)
        self.core = AttentionCore(window)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        # The weights determine the number of heads, because a tensor-parallel rank has only some of
        # the heads
        q_BTNH = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKH = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKH = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTNH = rotate(q_BTNH, angles)
        k_BTKH = rotate(k_BTKH, angles)
        out_BTNH = self.core(q_BTNH, k_BTKH, v_BTKH, documents_BT)
        return self.wo(out_BTNH.flatten(2))

    def qk_clip_powers(self) -> dict[str, list[float]]:
        """Return the powers of the clipping factor, see ``distributed/qk_clip.py``."""
        return scaled_equally(self.head_dim)


class NormedAttention(Attention):
    """Grouped-query attention whose queries and keys are normalized per head (Dehghani et al. 2023;
    Qwen3).
    """

    def __init__(
        self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, norm_eps: float
    ) -> None:
        super().__init__(dim, num_heads, num_kv_heads, head_dim)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        q_BTNH = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKH = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKH = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTNH = rotate(self.q_norm(q_BTNH), angles)
        k_BTKH = rotate(self.k_norm(k_BTKH), angles)
        out_BTNH = self.core(q_BTNH, k_BTKH, v_BTKH, documents_BT)
        return self.wo(out_BTNH.flatten(2))

    def qk_clip_powers(self) -> dict[str, list[float]]:
        """Return nothing, because the scale of the weights does not change normalized queries and keys."""
        return {}


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
    """The chain of modules that models share: embed -> layers -> norm -> head. V is the vocabulary.

    With ``tied`` the head uses the weight of the embedding.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        rope: nn.Module,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        tied: bool,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.rope = rope
        # In a ModuleDict the layers keep their names on a pipeline stage without the earlier layers
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        self.norm = norm
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Return logits (B, T, V) of integer tokens (B, T) at integer positions (B, T).

        ``documents_BT`` numbers the documents of each row in ascending order; tokens attend within
        their document. It reaches the attention cores unchanged and is never split: a
        context-parallel rank has the numbers of full rows.

        On a pipeline stage the modules of other stages are ``nn.Identity``. A stage without the
        embedding takes (B, T, D) instead of tokens, and a stage without the head returns (B, T, D)
        instead of logits.
        """
        x_BTD = self.embed(tokens_BT)
        angles = self.rope(positions_BT)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, angles, documents_BT)
        return self.head(self.norm(x_BTD))

    # The head's output is returned unchanged, so the loss can be fused with the head: see
    # distributed/loss_at_head.py
    forward.gives_output_of_head = True  # type: ignore[attr-defined]
