"""DeepSeek-V3: published sizes, Hugging Face's logits, and properties of latent attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hf_models import assert_same_logits

from shardtrain.models import build, find, shape_of
from shardtrain.models.layers import RotaryAngles, rotate, rotate_pairs
from shardtrain.models.yarn import YarnAngles, yarn_scale

# 671B: the published weights without the MTP head and the routing biases (58 layers of 256)
SIZES = {
    "debugmodel": 33_014_016,
    "16B": 15_706_484_224,
    "236B": 235_741_434_880,
    "671B": 671_026_404_352,
}
TINY = {
    "vocab_size": 64,
    "dim": 32,
    "num_layers": 3,
    "num_dense_layers": 1,
    "num_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "ffn_dim": 48,
    "moe_ffn_dim": 16,
    "num_experts": 8,
    "top_k": 2,
    "num_groups": 4,
    "top_groups": 2,
}


def test_every_flavor_has_its_published_size() -> None:
    module = find("deepseek_v3")
    for flavor in module.FLAVORS:
        model = build(module, shape_of(module, flavor, {}, "rmsnorm"))
        assert sum(p.numel() for p in model.parameters()) == SIZES[flavor], flavor


@pytest.mark.parametrize(
    ("q_lora_rank", "factor", "norm_eps"),
    [(16, 40.0, 1e-6), (0, 40.0, 1e-6), (16, 1.0, 1e-6), (16, 40.0, 0.3)],
)
def test_logits_match_hugging_face(q_lora_rank: int, factor: float, norm_eps: float) -> None:
    """Covers models with and without compressed queries or YaRN, and with a large epsilon."""
    transformers = pytest.importorskip("transformers")
    yarn: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    }
    rope = {"rope_theta": 10000.0, **(yarn if factor > 1 else {"rope_type": "default"})}
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        q_lora_rank=q_lora_rank or None,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        rope_parameters=rope,
        rms_norm_eps=norm_eps,
    )
    module = find("deepseek_v3")
    sizes = {**TINY, "q_lora_rank": q_lora_rank, "rope_factor": factor, "norm_eps": norm_eps}
    ours = module.Model(module.Config(**sizes))

    assert_same_logits(transformers.DeepseekV3ForCausalLM(config), ours)


def test_both_pairings_of_rotary_features_have_the_same_scores() -> None:
    angles = RotaryAngles(8, 100.0)(torch.arange(5).expand(1, -1))
    q, k = torch.randn(2, 1, 5, 2, 8, generator=torch.Generator().manual_seed(0))

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("btnh,bsnh->bnts", q, k)

    # This permutation moves the two features of each adjacent pair half a head apart.
    halves = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    scores_of_pairs = scores(rotate_pairs(q, angles), rotate_pairs(k, angles))
    scores_of_halves = scores(rotate(q[..., halves], angles), rotate(k[..., halves], angles))
    torch.testing.assert_close(scores_of_pairs, scores_of_halves)


def test_yarn_keeps_high_frequencies_and_scales_low_ones() -> None:
    plain = RotaryAngles(64, 10000.0).inverse_frequencies()
    yarn = YarnAngles(64, 10000.0, 40.0, 4096, 32.0, 1.0).inverse_frequencies()
    turns = 4096 * plain / (2 * math.pi)  # rotations of each pair within the original context
    is_high = turns > 40
    is_low = turns < 0.7

    assert torch.equal(yarn[is_high], plain[is_high])
    torch.testing.assert_close(yarn[is_low], plain[is_low] / 40.0)
    # All frequencies lie between the unscaled and the fully scaled ones.
    assert (yarn <= plain).all()
    assert (yarn >= plain / 40 * 0.999).all()

    factor_of_1 = YarnAngles(64, 10000.0, 1.0, 4096, 32.0, 1.0).inverse_frequencies()
    torch.testing.assert_close(factor_of_1, plain)
    assert yarn_scale(1.0, 1.0) == 1.0
    assert yarn_scale(40.0, 1.0) == pytest.approx(1.3689, abs=1e-4)  # 0.1 ln(40) + 1


def test_first_layers_are_dense_and_others_have_experts() -> None:
    module = find("deepseek_v3")
    model = module.Model(module.Config(**{**TINY, "num_dense_layers": 2}))
    has_experts = [hasattr(layer.moe, "experts") for layer in model.layers.values()]
    assert has_experts == [False, False, True]
    assert [hasattr(layer.ffn, "w1") for layer in model.layers.values()] == [True, True, False]
