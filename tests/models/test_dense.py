"""Llama, Mistral (a window), Qwen2.5 (biases), TinyLlama and GPT-NeoX: logits and gradients match Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import assert_same_logits_and_gradients

from shardtrain.metrics.flops import count_model
from shardtrain.models import build, find, shape_of
from shardtrain.ops import init_weights
from shardtrain.utils.errors import ConfigError

TINY = {"vocab_size": 64, "dim": 32, "num_layers": 2, "num_heads": 4, "head_dim": 8, "ffn_dim": 48}
GROUPED = {**TINY, "num_kv_heads": 2}
HF_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
HF_GROUPED = {**HF_TINY, "num_key_value_heads": 2, "attn_implementation": "eager"}
LENGTHS = (1, 6, 7, 24, 150)
"""Token counts: below, equal to and above a window of 7, and more than one block of queries."""


def ours(name: str, **sizes: Any) -> torch.nn.Module:
    module = find(name)
    return module.Model(
        shape_of(module, "debugmodel", {"tied_embeddings": False, **sizes}, "rmsnorm")
    )


@pytest.mark.parametrize("window", [None, 1, 7])
def test_mistral_matches_hugging_face(window: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        **HF_GROUPED, head_dim=8, sliding_window=window, rms_norm_eps=1e-5
    )
    model = ours("mistral", **GROUPED, sliding_window=window or 0)

    assert_same_logits_and_gradients(transformers.MistralForCausalLM(config), model, LENGTHS)


@pytest.mark.parametrize("tied", [False, True])
def test_qwen2_matches_hugging_face(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        **HF_GROUPED, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=tied
    )
    model = ours("qwen2", **GROUPED, tied_embeddings=tied)

    assert_same_logits_and_gradients(transformers.Qwen2ForCausalLM(config), model, LENGTHS)


@pytest.mark.parametrize("family", ["llama2", "llama3"])
def test_llama_matches_hugging_face(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    theta = 1e4 if family == "llama2" else 5e5
    config = transformers.LlamaConfig(**HF_GROUPED, rope_theta=theta, rms_norm_eps=1e-5)

    assert_same_logits_and_gradients(
        transformers.LlamaForCausalLM(config), ours(family, **GROUPED), LENGTHS
    )


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {"rotary_pct": 0.5}),
        ({"use_parallel_residual": False}, {"rotary_pct": 0.5, "use_parallel_residual": False}),
        (
            {"rotary_pct": 0.25, "hidden_act": "gelu_fast"},
            {"rotary_pct": 0.25, "hidden_act": "gelu_tanh"},
        ),
        ({"rotary_pct": 1.0}, {"rotary_pct": 1.0}),
    ],
)
def test_neox_matches_hugging_face(changes: dict[str, Any], fields: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(**{**HF_TINY, "rotary_pct": 0.5, **changes})
    model = ours("neox", **TINY, **fields)
    assert_same_logits_and_gradients(transformers.GPTNeoXForCausalLM(config), model, LENGTHS)


def test_biases_exist_where_they_should_and_start_at_zero() -> None:
    expected = {
        "qwen2": {"attn.wq", "attn.wk", "attn.wv"},
        "neox": {
            "attn_norm",
            "attn.wq",
            "attn.wk",
            "attn.wv",
            "attn.wo",
            "ffn_norm",
            "ffn.w1",
            "ffn.w2",
        },
        "mistral": set(),
    }
    for family, modules in expected.items():
        module = find(family)
        shape = shape_of(module, "debugmodel", {}, "rmsnorm")
        names = [name for name, _ in build(module, shape).named_parameters()]
        biases = {name for name in names if name.endswith("bias")}

        expected_biases = {"norm.bias"} if family == "neox" else set()
        for layer in range(6):
            expected_biases |= {f"layers.{layer}.{module}.bias" for module in modules}
        assert biases == expected_biases

        # Biases start at zero.
        draws = init_weights.plan(names, module.initial(shape), module.LAYOUT, shape.num_layers)
        assert {draws[name].distribution for name in biases} <= {"zeros"}


def test_published_models_have_their_windows_angles_and_tied_embeddings() -> None:
    def shapes_of(family: str) -> dict[str, Any]:
        module = find(family)
        return {flavor: shape_of(module, flavor, {}, "rmsnorm") for flavor in module.FLAVORS}

    # Only Mistral 7B v0.1 has a window. Later versions have a larger rotary base.
    mistral = shapes_of("mistral")
    assert {name for name, shape in mistral.items() if shape.sliding_window} == {
        "debugmodel",
        "7B-v0.1",
    }
    assert mistral["7B-v0.1"].sliding_window == 4096
    for name, shape in mistral.items():
        assert shape.rope_theta == (1e4 if name in ("debugmodel", "7B-v0.1") else 1e6), name

    # Only small Qwen2 models tie their embeddings.
    qwen2 = shapes_of("qwen2")
    for name, shape in qwen2.items():
        assert shape.rope_theta == 1e6, name
        assert shape.qkv_bias, name
        assert not shape.sliding_window, name
    assert {name for name, shape in qwen2.items() if shape.tied_embeddings} == {
        "debugmodel",
        "0.5B",
        "1.5B",
        "3B",
    }

    neox = shapes_of("neox")
    for name, shape in neox.items():
        assert shape.num_heads * shape.head_dim == shape.dim, name
        assert shape.ffn_dim == 4 * shape.dim, name
    assert {name for name, shape in neox.items() if shape.hidden_act != "gelu"} == {"20B"}


def test_flops_of_attention_count_only_the_window() -> None:
    module = find("mistral")
    flops = {}
    for window in (0, 100, 300):
        shape = shape_of(module, "debugmodel", {"sliding_window": window}, "rmsnorm")
        flops[window] = count_model(build(module, shape), module.LAYOUT, shape)[1](200)

    assert flops[0] == flops[300]
    assert flops[0] - flops[100] == 12 * 6 * 16 * 16 * 100


@pytest.mark.parametrize(
    ("field", "value", "fragments"),
    [
        ("hidden_act", "relu", ["hidden_act", '"relu"', "gelu_tanh"]),
        ("rotary_pct", 0.1, ["rotary_pct=0.1", "turns 3 of the 32 features"]),
        ("rotary_pct", 0.0, ["rotary_pct=0.0", "turns 0 of the 32"]),
        ("rotary_pct", 1.5, ["rotary_pct=1.5", "turns 48 of the 32"]),
    ],
)
def test_neox_rejects_invalid_rotary_fractions(
    field: str, value: Any, fragments: list[str]
) -> None:
    module = find("neox")
    with pytest.raises(ConfigError) as error:
        build(module, shape_of(module, "debugmodel", {field: value}, "rmsnorm"))
    for fragment in fragments:
        assert fragment in str(error.value)
