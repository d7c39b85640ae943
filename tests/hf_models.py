"""Compare logits and gradients of this package's models with Hugging Face's, for the same weights.

Hugging Face's code is an independent implementation of the same papers.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.wkv_b": "self_attn.kv_b_proj",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
    "attn.wq": "self_attn.q_proj",
    "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj",
    "attn.wo": "self_attn.o_proj",
    "attn.k_norm": "self_attn.k_norm",
    "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "moe.router.gate": "mlp.gate",
    "moe.shared.w1": "mlp.shared_experts.gate_proj",
    "moe.shared.w2": "mlp.shared_experts.down_proj",
    "moe.shared.w3": "mlp.shared_experts.up_proj",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj",
    "ffn.w3": "mlp.up_proj",
}
_NAMES_OF_NEOX = {
    "gpt_neox.embed_in": "model.embed_tokens",
    "gpt_neox.final_layer_norm": "model.norm",
    "gpt_neox.layers": "model.layers",
    ".attention.dense.": ".self_attn.o_proj.",
    ".dense_h_to_4h.": ".gate_proj.",
    ".dense_4h_to_h.": ".down_proj.",
}
"""Hugging Face's names of GPT-NeoX, and the corresponding names of Llama."""


def copy_weights(theirs: nn.Module, ours: nn.Module) -> None:
    """Copy the weights of Hugging Face's model, including the router's selection bias, to this package's model."""
    source = _like_llama(theirs.state_dict(), theirs.config)
    with torch.no_grad():
        for name, tensor in ours.state_dict().items():
            tensor.copy_(_find(name, source))


def _like_llama(source: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Rename the weights of GPT-NeoX to Llama's names, and split the fused query, key and value rows of each head."""
    if config.model_type != "gpt_neox":
        return source
    renamed = {}
    for name, tensor in source.items():
        for old, new in _NAMES_OF_NEOX.items():
            name = name.replace(old, new)
        prefix, fused, leaf = name.partition("attention.query_key_value.")
        if not fused:
            renamed[name] = tensor
            continue
        parts = tensor.unflatten(0, (config.num_attention_heads, 3, -1)).unbind(1)
        for letter, part in zip("qkv", parts, strict=True):
            renamed[f"{prefix}self_attn.{letter}_proj.{leaf}"] = part.flatten(0, 1)
    return renamed


def _find(name: str, source: dict[str, Tensor]) -> Tensor:
    layer = re.match(r"layers\.(\d+)\.(.*)", name)
    if layer is None:
        module_name, _, kind = name.rpartition(".")
        return source[_NAMES[f"{module_name}.weight"].removesuffix("weight") + kind]
    prefix = f"model.layers.{layer[1]}."
    rest = layer[2]
    if rest.startswith("moe.experts."):
        return _expert_weight(rest[-2:], f"{prefix}mlp.experts.", source)

    # q_norm is applied to each head in Qwen3, and to the latent of the queries in DeepSeek.
    if rest == "attn.q_norm.weight":
        latent = f"{prefix}self_attn.q_a_layernorm.weight"
        return source[latent] if latent in source else source[f"{prefix}self_attn.q_norm.weight"]
    # Small DeepSeek models project queries directly, without a latent.
    if rest == "attn.wq_b.weight" and f"{prefix}self_attn.q_proj.weight" in source:
        return source[f"{prefix}self_attn.q_proj.weight"]

    owner = rest if rest in _NAMES else rest.rpartition(".")[0]
    return source[prefix + _NAMES[owner] + rest[len(owner) :]]


def _expert_weight(ours: str, prefix: str, source: dict[str, Tensor]) -> Tensor:
    if ours == "w2":
        return source[f"{prefix}down_proj"]
    return source[f"{prefix}gate_up_proj"].chunk(2, dim=1)[0 if ours == "w1" else 1]


def assert_same_logits(
    theirs: nn.Module, ours: nn.Module, tolerance: float = 1e-4, tokens: int = 24
) -> None:
    """Assert equal logits for random weights, biases and tokens. Rounding errors are 1e-6, far below the tolerance."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(
                    torch.randn(tensor.shape, generator=generator)
                    * (0.2 if tensor.ndim > 1 else 0.1)
                )
                if tensor.ndim == 1:
                    tensor += 1.0
        copy_weights(theirs, ours)
        expected_BTV, logits_BTV = _logits(theirs, ours, tokens)
        assert expected_BTV.std() > 0.1
        torch.testing.assert_close(logits_BTV, expected_BTV, atol=tolerance, rtol=0)


def assert_same_logits_and_gradients(
    theirs: nn.Module, ours: nn.Module, lengths: tuple[int, ...]
) -> None:
    """Assert, for each number of tokens, equal logits to 1e-4 and equal gradients of a loss to 1e-4 of their norm."""
    for tokens in lengths:
        assert_same_logits(theirs, ours, tokens=tokens)

        for model, logits_BTV in zip((theirs, ours), _logits(theirs, ours, tokens), strict=True):
            model.zero_grad()
            logits_BTV.log_softmax(-1)[..., 7].sum().backward()
        gradients = {name: p.grad for name, p in theirs.named_parameters()}
        expected = _like_llama(gradients, theirs.config)
        # if tokens only attend to themselves, queries and keys have no gradient except rounding errors
        floor = 1e-2 * max(gradient.norm() for gradient in expected.values())
        for name, parameter in ours.named_parameters():
            gradient = _find(name, expected)
            error = float((parameter.grad - gradient).norm() / gradient.norm().clamp_min(floor))
            assert error <= 1e-4, (
                f"{tokens} tokens: gradient of {name} is off by {error:.1e} of its norm"
            )


def _logits(theirs: nn.Module, ours: nn.Module, tokens: int) -> tuple[Tensor, Tensor]:
    vocab_size: Any = theirs.config.vocab_size
    tokens_BT = torch.randint(
        0, vocab_size, (2, tokens), generator=torch.Generator().manual_seed(1)
    )
    return theirs.eval()(tokens_BT).logits, ours(tokens_BT, torch.arange(tokens).expand(2, -1))
