"""Llama 3 in plain PyTorch without any trainer code, for the plain loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from work import DIM, EPS, FFN, HEAD_DIM, HEADS, KEY_HEADS, LAYERS, THETA, TOKENS, VOCABULARY


class Layer(nn.Module):
    """Pre-norm transformer block: attention and SwiGLU, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM, EPS), nn.RMSNorm(DIM, EPS)
        self.query = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.key = nn.Linear(DIM, KEY_HEADS * HEAD_DIM, bias=False)
        self.value = nn.Linear(DIM, KEY_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.gate, self.up = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN, bias=False)
        self.down = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (
            linear(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        query, key = (turn(heads, cos, sin).to(value.dtype) for heads in (query, key))
        key, value = (heads.repeat_interleave(HEADS // KEY_HEADS, dim=1) for heads in (key, value))
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings. Element i of a head is paired with element i + H/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """Llama with 5,770,496 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, EPS)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(TOKENS), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))
