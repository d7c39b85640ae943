"""Multi-token prediction (DeepSeek-V3, section 2.2): layers that predict tokens further ahead.

Depth k predicts the token k + 1 positions ahead. Its layer combines the output of depth k - 1 with
the embedding of the token k positions ahead, and runs one block of the model. Depth 0 is the model
itself. Embedding and head are those of the model:

    h_i^k = norm_k(block_k(eh_proj_k([enorm_k(embed(t_{i+k})); hnorm_k(h_i^{k-1})])))
    logits of t_{i+k+1} = head(h_i^k)

h^0 is the output of the model's last norm, and h^k includes the norm of depth k, as in Megatron-LM
and in the inference code of vLLM and SGLang for the published weights. As in the published weights,
the embedding comes first in the concatenation. The paper writes it second.

Shape suffixes: B batch, T tokens, D model, K depths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import Decoder, build_norm

_LAYER = "layers.*"
_MTP_LAYER = "mtp_layers.*"
_INPUT_STYLES = {
    "mtp_embed": "embed",
    "mtp_layers.*.join.enorm": "sequence",
    "mtp_layers.*.join.hnorm": "sequence",
    "mtp_layers.*.join.eh_proj": "router",
    "mtp_layers.*.shared_norm": "sequence",
}


class JoinNextToken(nn.Module):
    """Combine the output of the previous depth with the embedding of a token ahead."""

    def __init__(self, dim: int, norm_type: str, norm_eps: float) -> None:
        super().__init__()
        self.enorm = build_norm(norm_type, dim, norm_eps)
        self.hnorm = build_norm(norm_type, dim, norm_eps)
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x_BTD: Tensor, embedded_BTD: Tensor) -> Tensor:
        """Map two tensors (B, T, D) to one."""
        joined_BTX = torch.cat((self.enorm(embedded_BTD), self.hnorm(x_BTD)), dim=-1)
        return self.eh_proj(joined_BTX)


class MultiTokenDecoder(Decoder):
    """A decoder with multi-token prediction layers between its last norm and its head.

    The keys of ``mtp_layers`` continue the numbers of ``layers``, as in the published weights.
    Each layer maps x (B, T, D), embeddings (B, T, D), angles and documents to (B, T, D).
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        rope: nn.Module,
        layers: list[nn.Module],
        norm: nn.Module,
        tied: bool,
        mtp_layers: Iterable[nn.Module],
    ) -> None:
        super().__init__(vocab_size, dim, rope, layers, norm, tied)
        numbered = enumerate(mtp_layers, start=len(layers))
        self.mtp_layers = nn.ModuleDict({str(i): layer for i, layer in numbered})
        if self.mtp_layers:
            # A separate module with the same weight, because the last pipeline stage has no ``embed``
            self.mtp_embed = nn.Embedding(vocab_size, dim)
            self.mtp_embed.weight = self.embed.weight

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        next_tokens_BTK: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the next tokens (B, T, V), see ``Decoder``.

        With ``next_tokens_BTK``, also return the logits of K depths. The logits of all depths are
        concatenated along the batch, starting with depth 0: ((1 + K) B, T, V).
        ``next_tokens_BTK[:, i, k - 1]`` is the token k positions after token i.
        """
        x_BTD = self.embed(tokens_BT)
        angles = self.rope(positions_BT)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, angles, documents_BT)
        x_BTD = self.norm(x_BTD)
        # Pipeline stages before the last one have no ``mtp_layers``
        if next_tokens_BTK is not None and len(self.mtp_layers) > 0:
            # Look up the tokens of all depths in one call, because FSDP gathers the weight for each call
            tokens_XT = torch.cat(next_tokens_BTK.unbind(-1))
            embedded_KBTD = self.mtp_embed(tokens_XT).chunk(len(self.mtp_layers))
            outputs = [x_BTD]
            for layer, embedded_BTD in zip(self.mtp_layers.values(), embedded_KBTD, strict=True):
                outputs.append(layer(outputs[-1], embedded_BTD, angles, documents_BT))
            x_BTD = torch.cat(outputs)
        return self.head(x_BTD)

    forward.gives_output_of_head = True  # type: ignore[attr-defined]


def with_mtp_layers(layout: Layout) -> Layout:
    """Return a layout that also covers multi-token prediction layers with the blocks of ``layers``.

    Its patterns for attention cores and experts match both kinds of layers.
    """
    styles = dict(layout.tensor)
    for pattern, style in layout.tensor.items():
        if pattern.startswith(f"{_LAYER}."):
            styles[_mtp_path(pattern)] = style
    absent = [_mtp_path(pattern) for pattern in layout.optional if pattern.startswith(_LAYER)]
    buffers = [_mtp_path(pattern) for pattern in layout.buffers]
    return replace(
        layout,
        tensor={**styles, **_INPUT_STYLES},
        context=f"*{layout.context}",
        expert=layout.expert and f"*{layout.expert}",
        buffers=(*layout.buffers, *buffers),
        optional=(*layout.optional, *absent, _MTP_LAYER, "mtp_embed"),
        mtp_layers="mtp_layers",
        mtp_embed="mtp_embed",
    )


def with_mtp_draws(draws: Mapping[str, Draw], std: float) -> dict[str, Draw]:
    """Return initial distributions that also cover multi-token prediction layers."""
    added = {
        "mtp_layers.*.join.?norm.weight": Draw("ones"),
        "mtp_layers.*.shared_norm.weight": Draw("ones"),
        "mtp_layers.*.join.eh_proj.weight": Draw("normal", std=std),
    }
    for pattern, draw in draws.items():
        if pattern.startswith(f"{_LAYER}."):
            added[_mtp_path(pattern)] = draw
    return {**draws, **added}


def _mtp_path(pattern: str) -> str:
    return _MTP_LAYER + pattern.removeprefix(_LAYER)
