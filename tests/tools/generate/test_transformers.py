"""Greedy tokens equal ``transformers.generate`` on the same weights, also for rows of different lengths."""

from __future__ import annotations

import pytest
import torch
from hf_models import copy_weights

from shardtrain.models import find
from shardtrain.ops import chosen_kernels
from shardtrain.ops.cpu import packed_linear
from shardtrain.tools.generate.engine import Generator

OURS = {"vocab_size": 64, "dim": 32, "num_layers": 2, "num_heads": 4}
GROUPED = {**OURS, "num_kv_heads": 2, "head_dim": 8, "rope_theta": 10000.0}
THEIRS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
EXPERTS = {"moe_ffn_dim": 16, "num_experts": 8, "top_k": 2}
FAMILIES = [
    ("llama3", {**GROUPED, "ffn_dim": 48}, "Llama", {"head_dim": 8}),
    ("qwen3", {**GROUPED, "ffn_dim": 48}, "Qwen3", {"head_dim": 8}),
    ("mixtral", {**GROUPED, **EXPERTS, "moe_ffn_dim": 48}, "Mixtral", {"num_local_experts": 8}),
    (
        "deepseek_v3",
        {
            **OURS,
            **LATENT,
            **EXPERTS,
            "ffn_dim": 48,
            "num_dense_layers": 1,
            "rope_factor": 1.0,
            "num_groups": 1,
        }
        | {"top_groups": 1},
        "DeepseekV3",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
        }
        | {"topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16},
    ),
]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("name", "ours", "prefix", "changed"), FAMILIES, ids=[f[0] for f in FAMILIES]
)
def test_greedy_tokens_equal_those_of_transformers(
    name, ours, prefix, changed, packed, monkeypatch
):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{prefix}Config")(
        **{**THEIRS, **changed},
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        pad_token_id=0,
    )
    config.eos_token_id = None
    reference = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    reference.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    module = find(name)
    model = module.Model(module.Config(**{**ours, "norm_eps": config.rms_norm_eps}))
    copy_weights(reference, model)
    lengths = (4, 11, 7)
    longest = 11
    new = 20
    rows = [torch.randint(1, 64, (length,), generator=generator).tolist() for length in lengths]
    # padding is on the left
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    expected = reference.generate(tokens, attention_mask=mask, max_new_tokens=new, do_sample=False)[
        :, longest:
    ]
    if packed:  # pack even small weights in oneDNN's layout, as the command does with large ones
        monkeypatch.setattr(packed_linear, "_SMALLEST_NUMEL", {torch.float32: 0})
        monkeypatch.setattr(
            chosen_kernels, "_chosen", chosen_kernels.Kernels(packed_linear_float32=2.0)
        )
        assert packed_linear.use(model)
        assert isinstance(model.head, packed_linear.PackedLinear)
    generated = Generator(model, module.LAYOUT).generate(rows, new)

    assert generated == expected.tolist()
    assert len({tuple(row) for row in generated}) == 3
