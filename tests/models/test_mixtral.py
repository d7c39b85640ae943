"""Mixtral: published sizes and Hugging Face's logits."""

from __future__ import annotations

import pytest
from hf_models import assert_same_logits

from shardtrain.models import build, find, shape_of

SIZES = {"debugmodel": 16_399_616, "8x7B": 46_702_792_704, "8x22B": 140_620_634_112}
TINY = {
    "vocab_size": 64,
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}


def test_every_flavor_has_its_published_size() -> None:
    module = find("mixtral")
    for flavor in module.FLAVORS:
        model = build(module, shape_of(module, flavor, {}, "rmsnorm"))
        assert sum(p.numel() for p in model.parameters()) == SIZES[flavor], flavor


def test_logits_match_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        sliding_window=None,
    )
    module = find("mixtral")
    ours = module.Model(module.Config(**TINY, moe_ffn_dim=24, num_experts=4))

    assert_same_logits(transformers.MixtralForCausalLM(config), ours)
