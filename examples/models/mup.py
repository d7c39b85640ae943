"""Maximal update parametrization of Llama: tune the learning rate on a small width, and use it on a large one (Yang
et al. 2022, arXiv 2203.03466, table 8).

Use this file as ``model.name`` and as ``optimizer.name``. You tune the learning rate at the width ``BASE_DIM``. At
another width, with m = width / ``BASE_DIM``:

- The initial variance and the learning rate of hidden matrices are divided by m.
- The embedding, the norms and the head keep the initial values and the learning rate of the base.
- Logits are divided by m.
- Attention scores are divided by the head dimension instead of its root.

At the base width, the model and its training equal Llama with AdamW. Other sizes, such as ``ffn_dim``, must grow in
proportion to the width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from shardtrain.layout import Draw
from shardtrain.models.layers import AttentionCore
from shardtrain.models.llama import LAYOUT, Config
from shardtrain.models.llama import Model as Llama
from shardtrain.models.llama import initial as llama_initial

__all__ = ["FLAVORS", "LAYOUT", "Config", "Model", "build", "initial", "initial_state"]

# -----> The sizes of the model whose learning rate you tuned.
BASE_DIM = 64
BASE_HEAD_DIM = 16

# -----> Your sizes.
FLAVORS = {
    "base": {
        "vocab_size": 512, "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4,
        "head_dim": 16, "ffn_dim": 128,
    },
    "wide": {
        "vocab_size": 512, "dim": 256, "num_layers": 2, "num_heads": 16, "num_kv_heads": 16,
        "head_dim": 16, "ffn_dim": 512,
    },
}  # fmt: skip

HIDDEN = (".attn.wq.", ".attn.wk.", ".attn.wv.", ".attn.wo.", ".ffn.w1.", ".ffn.w2.", ".ffn.w3.")


class Head(nn.Linear):
    """The head, with logits divided by m."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD * (BASE_DIM / self.in_features))


class Model(Llama):
    def __init__(self, c: Config) -> None:
        if c.tied_embeddings:
            raise ValueError(
                "model.overrides.tied_embeddings must be false: the head has its own scale"
            )
        super().__init__(c)
        self.head = Head(c.dim, c.vocab_size, bias=False)
        scale = BASE_HEAD_DIM**0.5 / c.head_dim
        for layer in self.layers.values():
            layer.attn.core = AttentionCore(c.sliding_window, scale)


def initial(c: Config) -> dict[str, Draw]:
    """Return Llama's initial values, with the standard deviation of hidden matrices divided by the root of m."""
    base = llama_initial(replace(c, dim=BASE_DIM))
    draws = {}
    for pattern, draw in base.items():
        is_hidden = ".attn.w" in pattern or ".ffn.w" in pattern
        if is_hidden and draw.distribution == "normal":
            draw = replace(draw, std=draw.std * (BASE_DIM / c.dim) ** 0.5)
        draws[pattern] = draw
    return draws


class MupAdamW(torch.optim.AdamW):
    """AdamW that divides the learning rate of hidden matrices by m."""

    @torch.no_grad()
    def step(self) -> None:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] / group["width_factor"]
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def build(param_groups, options):
    groups = []
    for group in param_groups:
        # Split the group into parameters with factor 1 and parameters with factor m.
        by_factor: dict[float, dict[str, nn.Parameter]] = {}
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            by_factor.setdefault(width_factor(name, parameter), {})[name] = parameter
        for factor, members in by_factor.items():
            names = list(members)
            parameters = list(members.values())
            groups.append(
                {**group, "params": parameters, "param_names": names, "width_factor": factor}
            )
    return MupAdamW(groups, options.lr, (options.beta1, options.beta2), options.eps)


def width_factor(name: str, parameter: Tensor) -> float:
    """Return m for a hidden matrix, and 1 for other parameters."""
    if not any(part in name for part in HIDDEN) or parameter.ndim < 2:
        return 1.0
    # The width is the output dim of w2 and wo, and the input dim of all others.
    returns_width = ".ffn.w2." in name or ".attn.wo." in name
    width = parameter.size(0) if returns_width else parameter.size(1)
    return width / BASE_DIM


def initial_state(parameter):
    return {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
