"""Qwen3, dense and with experts: published sizes and Hugging Face's logits."""

from __future__ import annotations

import pytest
from hf_models import assert_same_logits

from shardtrain.layout import check
from shardtrain.models import build, find, shape_of

# totals of the published weights; computed for the debug models
SIZES = {
    ("qwen3", "debugmodel"): 31_987_968,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3_moe", "debugmodel_moe"): 315_758_848,
    ("qwen3_moe", "30B-A3B"): 30_532_122_624,
    ("qwen3_moe", "235B-A22B"): 235_093_634_560,
}
TINY = {
    "vocab_size": 64,
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
HF_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
EXPERTS = {"num_experts": 8, "top_k": 2, "moe_ffn_dim": 16}


def test_every_flavor_has_its_published_size() -> None:
    for name in ("qwen3", "qwen3_moe"):
        module = find(name)
        for flavor in module.FLAVORS:
            model = build(module, shape_of(module, flavor, {}, "rmsnorm"))
            assert sum(p.numel() for p in model.parameters()) == SIZES[name, flavor], (name, flavor)


@pytest.mark.parametrize(
    ("name", "extra"), [("qwen3", {}), ("qwen3_moe", {**EXPERTS, "load_balance_coeff": 1e-3})]
)
def test_the_layout_fits_every_module(name: str, extra: dict[str, float]) -> None:
    module = find(name)
    flavor = next(iter(module.FLAVORS))
    model = build(module, shape_of(module, flavor, {**TINY, **extra}, "rmsnorm"))
    paths = [n for n, _ in model.named_modules()]
    names = [n for n, _ in model.named_parameters()]

    assert check(module.LAYOUT, paths, names) == []


def test_routing_bias_exists_only_if_configured() -> None:
    module = find("qwen3_moe")
    plain = module.Model(module.Config(**TINY, **EXPERTS))
    assert not list(plain.named_buffers())

    biased = module.Model(module.Config(**TINY, **EXPERTS, load_balance_coeff=1e-3))
    assert [name for name, _ in biased.named_buffers()] == [
        f"layers.{i}.moe.router.expert_bias" for i in range(2)
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_dense_logits_match_hugging_face(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **HF_TINY, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=tied
        )
    )
    module = find("qwen3")

    assert_same_logits(
        reference, module.Model(module.Config(**TINY, ffn_dim=48, tied_embeddings=tied))
    )


@pytest.mark.parametrize("route_norm", [False, True])
def test_logits_with_experts_match_hugging_face(route_norm: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        **HF_TINY,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=route_norm,
    )
    module = find("qwen3_moe")
    ours = module.Model(module.Config(**TINY, **EXPERTS, route_norm=route_norm))

    assert_same_logits(transformers.Qwen3MoeForCausalLM(config), ours)
