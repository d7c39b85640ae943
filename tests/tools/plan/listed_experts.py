"""A model file whose experts are the modules of a list, as in networks of ``transformers`` 4."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, RotaryAngles, rotate

FLAVORS = {"tiny": {}}
LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.*_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.w[qkv]": "colwise",
        "layers.*.attn.wo": "rowwise",
        "layers.*.moe": "replicate",
        "layers.*.moe.gate": "replicate",
        "layers.*.moe.experts.*.*": "replicate",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
)


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    ffn_dim: int = 256
    num_experts: int = 8
    top_k: int = 2


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.wq = nn.Linear(c.dim, c.dim, bias=False)
        self.wk = nn.Linear(c.dim, c.dim, bias=False)
        self.wv = nn.Linear(c.dim, c.dim, bias=False)
        self.wo = nn.Linear(c.dim, c.dim, bias=False)
        self.core = AttentionCore()

    def forward(self, x_BTD: Tensor, angles: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        q_BTNH = rotate(self.wq(x_BTD).unflatten(-1, heads), angles)
        k_BTNH = rotate(self.wk(x_BTD).unflatten(-1, heads), angles)
        v_BTNH = self.wv(x_BTD).unflatten(-1, heads)
        return self.wo(self.core(q_BTNH, k_BTNH, v_BTNH, None).flatten(2))


class Expert(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.w2 = nn.Linear(c.ffn_dim, c.dim, bias=False)
        self.w3 = nn.Linear(c.dim, c.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.top_k = c.top_k
        self.gate = nn.Linear(c.dim, c.num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(c) for _ in range(c.num_experts)])

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_SD = x_BTD.flatten(0, 1)
        weight_SK, expert_SK = self.gate(x_SD).softmax(-1).topk(self.top_k)
        out_SD = torch.zeros_like(x_SD)
        for number, expert in enumerate(self.experts):
            token_R, place_R = torch.where(expert_SK == number)
            weight_R1 = weight_SK[token_R, place_R].unsqueeze(1)
            out_SD.index_add_(0, token_R, expert(x_SD[token_R]) * weight_R1)
        return out_SD.view_as(x_BTD)


class Layer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.dim)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.attn = Attention(c)
        self.moe = MoE(c)

    def forward(self, x_BTD: Tensor, angles: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles)
        return x_BTD + self.moe(self.mlp_norm(x_BTD))


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.dim // c.num_heads, 10000.0)
        self.layers = nn.ModuleDict({str(index): Layer(c) for index in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        angles = self.rope(positions_BT)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, angles)
        return self.head(self.norm(x_BTD))


def initial(c: Config) -> dict[str, Draw]:
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.*.*.weight": Draw("normal", std=0.1),
    }
