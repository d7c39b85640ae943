"""Shared layers: rotary angles, attention, norms and feed-forward against independent float64 formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shardtrain.models.layers import (
    Attention,
    AttentionCore,
    FeedForward,
    RotaryAngles,
    build_norm,
    rotate,
)
from shardtrain.utils.errors import ConfigError

LLAMA31 = {
    "scaling": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_seq_len": 8192,
}
LLAMA32 = {**LLAMA31, "factor": 32.0}


def rotary_reference(
    head_dim: int, theta: float, scaling: str, factor: float = 8.0, original: int = 8192
) -> list[float]:
    """Reference for rotary frequencies: radians per position of each feature pair, in Python floats."""
    frequencies = []
    for pair in range(head_dim // 2):
        frequency = theta ** (-2 * pair / head_dim)
        wavelength = 2 * math.pi / frequency
        if scaling == "linear":
            frequency /= factor
        elif scaling == "llama3":
            if wavelength > original / 1.0:  # longer than the limit set by low_freq_factor
                frequency /= factor
            elif wavelength > original / 4.0:
                smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    return frequencies


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(
    ("options", "scaling", "factor"),
    [
        ({}, "none", 1.0),
        ({"scaling": "linear", "factor": 4.0}, "linear", 4.0),
        (LLAMA31, "llama3", 8.0),
        (LLAMA32, "llama3", 32.0),
    ],
)
def test_rotary_frequencies_follow_their_formula(head_dim, theta, options, scaling, factor) -> None:
    expected = torch.tensor(rotary_reference(head_dim, theta, scaling, factor), dtype=torch.float64)
    frequencies = RotaryAngles(head_dim, theta, **options).inverse_frequencies()
    assert frequencies.dtype == torch.float32
    # a few float32 roundings
    torch.testing.assert_close(frequencies.double(), expected, rtol=2e-6, atol=0)


def test_llama3_scaling_changes_only_long_wavelengths() -> None:
    plain, scaled = (RotaryAngles(128, 5e5, **o).inverse_frequencies() for o in ({}, LLAMA31))
    assert torch.equal(plain[:20], scaled[:20])
    torch.testing.assert_close(scaled[-10:], plain[-10:] / 8)
    assert ((scaled <= plain) & (scaled >= plain / 8 * (1 - 1e-6))).all()


def test_unknown_scaling_is_rejected() -> None:
    with pytest.raises(ValueError, match="rope_scaling='yarn'"):
        RotaryAngles(16, 1e4, scaling="yarn")


def test_rotary_angles_match_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        rope_theta=5e5,
        max_position_embeddings=131072,
        rope_scaling={**scaling, "original_max_position_embeddings": 8192},
    )
    reference = LlamaRotaryEmbedding(config).inv_freq
    frequencies = RotaryAngles(128, 5e5, **LLAMA31).inverse_frequencies()

    torch.testing.assert_close(frequencies, reference, rtol=1e-6, atol=0)  # float32 rounding


def test_angles_are_float32_cosines_and_sines_of_position_times_frequency() -> None:
    positions = torch.tensor([[0, 1, 5], [100, 7, 7]])
    cos, sin = RotaryAngles(8, 1e4)(positions)
    assert cos.shape == sin.shape == (2, 3, 1, 4)
    assert cos.dtype == sin.dtype == torch.float32

    # an angle of 10 has an error of 1e-6 in float32
    angle = 100 * rotary_reference(8, 1e4, "none")[1]
    assert cos[1, 0, 0, 1].item() == pytest.approx(math.cos(angle), abs=1e-5)
    assert sin[1, 0, 0, 1].item() == pytest.approx(math.sin(angle), abs=1e-5)
    assert torch.equal(cos[0, 0], torch.ones(1, 4))
    assert torch.equal(cos[1, 1], cos[1, 2])


def test_rotary_angles_have_no_tensors() -> None:
    assert not RotaryAngles(8, 1e4).state_dict(keep_vars=True)
    assert not list(RotaryAngles(8, 1e4).buffers())


def test_rotation_acts_on_pairs_half_a_head_apart_and_keeps_norms_and_dtype() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    angles = RotaryAngles(8, 1e4)(torch.arange(3)[None])
    rotated = rotate(x.float(), angles).double()

    # The reference multiplies complex numbers: pairs of features times exp(i * position * frequency).
    complex_x = torch.complex(x[..., :4], x[..., 4:])
    frequencies = torch.tensor(rotary_reference(8, 1e4, "none"), dtype=torch.float64)
    exact_angles = torch.arange(3.0).double()[:, None, None] * frequencies
    product = complex_x * torch.polar(torch.ones(3, 1, 4).double(), exact_angles)
    expected = torch.cat([product.real, product.imag], -1)

    # float32 rounding
    torch.testing.assert_close(rotated, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), atol=1e-5, rtol=0)
    assert rotate(x.bfloat16(), angles).dtype == torch.bfloat16


def attention_reference(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """Causal attention in float64, one query of one head at a time."""
    q = q_BTNH.double()
    k = k_BTKH.double()
    v = v_BTKH.double()
    out = torch.zeros_like(q)
    heads_per_key = q.size(2) // k.size(2)
    for b in range(q.size(0)):
        for t in range(q.size(1)):
            for n in range(q.size(2)):
                keys = k[b, : t + 1, n // heads_per_key]
                values = v[b, : t + 1, n // heads_per_key]
                scores = keys @ q[b, t, n] / math.sqrt(q.size(-1))
                weights = (scores - scores.max()).exp()
                out[b, t, n] = (weights / weights.sum()) @ values
    return out


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_attention_core_is_causal_softmax_over_grouped_heads(
    num_heads: int, num_kv_heads: int
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 7, num_heads, 8, requires_grad=True)
    k = torch.randn(2, 7, num_kv_heads, 8, requires_grad=True)
    v = torch.randn(2, 7, num_kv_heads, 8, requires_grad=True)
    out = AttentionCore()(q, k, v)
    expected = attention_reference(q, k, v)

    # float32 against float64
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)

    coefficients = torch.randn_like(out)
    gradients = torch.autograd.grad((out * coefficients).sum(), (q, k, v))
    expected_gradients = torch.autograd.grad((expected * coefficients.double()).sum(), (q, k, v))

    torch.testing.assert_close(gradients, expected_gradients, atol=2e-6, rtol=1e-5)


def test_attention_core_has_no_weights() -> None:
    assert not list(AttentionCore().parameters())
    assert not list(AttentionCore().buffers())


def test_attention_derives_head_counts_from_weights() -> None:
    """Weights of half of the heads compute the contribution of these heads, as tensor parallelism requires."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    angles = RotaryAngles(4, 1e4)(torch.arange(5)[None])
    full_attention = Attention(16, num_heads=4, num_kv_heads=2, head_dim=4)
    parts = []
    for part in range(2):
        half = Attention(16, num_heads=4, num_kv_heads=2, head_dim=4)
        for name in ("wq", "wk", "wv"):
            half.get_submodule(name).weight = torch.nn.Parameter(
                getattr(full_attention, name).weight.chunk(2)[part]
            )
        half.wo.weight = torch.nn.Parameter(full_attention.wo.weight.chunk(2, dim=1)[part])
        parts.append(half(x, angles))

    torch.testing.assert_close(parts[0] + parts[1], full_attention(x, angles), atol=1e-6, rtol=1e-5)


def test_feed_forward_is_swiglu() -> None:
    torch.manual_seed(0)
    ffn = FeedForward(8, 12)
    x = torch.randn(2, 3, 8)
    w1, w2, w3 = (ffn.get_submodule(name).weight.double() for name in ("w1", "w2", "w3"))
    gate = x.double() @ w1.T
    silu = gate / (1 + (-gate).exp())
    expected = (silu * (x.double() @ w3.T)) @ w2.T

    torch.testing.assert_close(ffn(x).double(), expected, atol=1e-6, rtol=1e-5)  # float32 rounding


@pytest.mark.parametrize("norm_type", ["rmsnorm", "fused_rmsnorm", "layernorm", "np_layernorm"])
def test_norms_follow_their_formula_and_have_their_parameters(norm_type: str) -> None:
    torch.manual_seed(0)
    norm = build_norm(norm_type, 16, 1e-5)
    x = torch.randn(3, 16, requires_grad=True)
    has_weight = norm_type != "np_layernorm"
    names = {name for name, _ in norm.named_parameters()}
    assert names == ({"weight"} if has_weight else set())

    values = x.detach().double()
    if "layernorm" in norm_type:
        values = values - values.mean(-1, keepdim=True)
    expected = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if has_weight:
        torch.nn.init.normal_(norm.weight)
        expected = expected * norm.weight.double()
    out = norm(x)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)  # float32 rounding

    out.square().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_fused_rmsnorm_is_an_alias_of_rmsnorm() -> None:
    x = torch.randn(3, 16)
    assert torch.equal(build_norm("rmsnorm", 16, 1e-5)(x), build_norm("fused_rmsnorm", 16, 1e-5)(x))


def test_unknown_norm_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"batchnorm.*np_layernorm"):
        build_norm("batchnorm", 16, 1e-5)
