"""Model in Phi-3's style (Abdin et al. 2024): fused q, k, v, interleaved gate and value, and a window."""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, RotaryAngles, rotate


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    hidden_size: int = 32
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_dim: int = 48
    sliding_window: int = 19
    resid_pdrop: float = 0.0


LAYOUT = Layout(
    first=("embed_tokens",),
    layers="layers",
    last=("norm", "lm_head"),
    tensor={
        "embed_tokens": "embed",
        "layers.*.*_layernorm": "sequence",
        "layers.*.self_attn": "gather",
        "layers.*.self_attn.qkv_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.gate_up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "norm": "sequence",
        "lm_head": "head",
    },
    context="layers.*.self_attn.core",
)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.hidden_size // c.num_heads
        self.group = c.num_heads // c.num_kv_heads
        # for each KV head: queries, key, value
        self.qkv_proj = nn.Linear(
            c.hidden_size, c.num_kv_heads * (self.group + 2) * self.head_dim, bias=False
        )
        self.core = AttentionCore(window=c.sliding_window)
        self.o_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)

    def forward(self, x, angles, documents_BT=None):
        parts = self.qkv_proj(x).unflatten(-1, (-1, self.group + 2, self.head_dim))
        q, k, v = parts.split((self.group, 1, 1), dim=-2)
        q = rotate(q.flatten(2, 3), angles)
        k = rotate(k.squeeze(-2), angles)
        out = self.core(q, k, v.squeeze(-2), documents_BT)
        return self.o_proj(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.ffn_dim, bias=False)
        self.down_proj = nn.Linear(c.ffn_dim, c.hidden_size, bias=False)

    def forward(self, x):
        gate_up = self.gate_up_proj(x)
        return self.down_proj(F.silu(gate_up[..., ::2]) * gate_up[..., 1::2])


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=1e-5)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.drop = nn.Dropout(c.resid_pdrop)

    def forward(self, x, angles, documents_BT=None):
        x = x + self.drop(self.self_attn(self.input_layernorm(x), angles, documents_BT))
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.rotary_emb = RotaryAngles(c.hidden_size // c.num_heads, 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, input_ids, position_ids, documents_BT=None):
        hidden = self.embed_tokens(input_ids)
        angles = self.rotary_emb(position_ids)
        for layer in self.layers.values():
            hidden = layer(hidden, angles, documents_BT)
        return self.lm_head(self.norm(hidden))


FLAVORS = {"tiny": {}}


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
    }
