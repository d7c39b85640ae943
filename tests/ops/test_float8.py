"""Float8 products against an independent model of their rounding in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shardtrain.models import moe
from shardtrain.ops import float8

FORMATS = {"e4m3": (4, -6, 448.0), "e5m2": (3, -14, 57344.0)}
"""Significant bits, exponent of the smallest normal number, and largest number (Micikevicius et al. 2022, table 1)."""


def nearest(x: Tensor, name: str) -> Tensor:
    """Round to the nearest number of a format, ties to even, in float64."""
    bits, smallest, largest = FORMATS[name]
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), (exponent - 1).clamp_min(smallest) - (bits - 1))
    # torch.round rounds ties to even.
    nearest_x = torch.round(x / step) * step
    assert nearest_x.abs().max() <= largest
    return nearest_x


def on_grid(x: Tensor, dim: int | None, name: str) -> Tensor:
    """Round a tensor with the largest power-of-two scale that keeps its numbers within the format."""
    x = x.double()
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    exponent = torch.floor(torch.log2(FORMATS[name][2] / amax.clamp_min(2.0**-50)))
    scale = torch.exp2(exponent)
    return nearest(x * scale, name) / scale


def expected(recipe: str, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and the gradients of input and weight, in float64."""
    if recipe == "tensorwise":
        x8 = on_grid(x, None, "e4m3")
        w8 = on_grid(w, None, "e4m3")
        g8 = on_grid(g, None, "e5m2")
        return x8 @ w8.T, g8 @ w8, g8.T @ x8
    # Scales are along the summed dimension of each product.
    out = on_grid(x, 1, "e4m3") @ on_grid(w, 1, "e4m3").T
    if recipe == "rowwise":
        dx = on_grid(g, 1, "e4m3") @ on_grid(w, 0, "e4m3")
        dw = on_grid(g, 0, "e4m3").T @ on_grid(x, 0, "e4m3")
        return out, dx, dw
    # The third recipe computes the gradient of the weight without float8.
    dx = on_grid(g, 1, "e4m3") @ on_grid(w, None, "e4m3")
    dw = g.double().T @ x.double()
    return out, dx, dw


def numbers(seed: int, *shape: int) -> Tensor:
    """Numbers of many magnitudes, some of which underflow with the scale of the largest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(4 * torch.randn(shape, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", list(float8.RECIPES))
def test_linear_layer_matches_its_rounding_model_in_float64(recipe, dtype):
    """Only float32 sums differ, by 1e-6 of the sum of magnitudes. bfloat16 results are rounded once more."""
    x = numbers(0, 48, 64).to(dtype)
    w = numbers(1, 32, 64).to(dtype)
    g = numbers(2, 48, 32).to(dtype)
    layer = torch.nn.Linear(64, 32, bias=False).to(dtype)
    layer.weight.data.copy_(w)
    float8.convert(layer, recipe, emulate=True)
    x.requires_grad_()
    out = layer(x[None])[0]
    out.backward(g)
    exact = expected(recipe, x.detach(), w, g)

    # The rounding error of a sum is relative to the sum of the magnitudes.
    x_abs = x.detach().abs()
    w_abs = w.abs()
    g_abs = g.abs()
    sizes_of_sums = (x_abs @ w_abs.T, g_abs @ w_abs, g_abs.T @ x_abs)
    results = (out, x.grad, layer.weight.grad)
    for actual, expected_value, size in zip(results, exact, sizes_of_sums, strict=True):
        bound = 1e-6 * 2 * size.double()
        if dtype is torch.bfloat16:
            bound = bound + expected_value.abs() * 2.0**-8
        assert ((actual.double() - expected_value).abs() <= bound).all()
        assert actual.dtype is dtype


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_scale_is_the_largest_power_of_two_that_fits(name):
    largest = FORMATS[name][2]
    amax = torch.tensor(
        [1.0, 448.0, 449.0, 57344.0, 57345.0, 1e-3, 3e30, 1.75, 1.7500001, 2.0**-100, 0.0]
    )
    power = float8.powers(amax, float8.dtype_of(name)).double()
    fits = amax.double() * torch.exp2(power)

    assert (fits <= largest).all()
    assert (2 * fits > largest)[:9].all()
    # The last two numbers need a larger exponent than the largest supported exponent.
    assert power[9:].tolist() == [63.0, 63.0]


def test_nonfinite_numbers_are_propagated():
    """An infinite number is not rounded to the largest one of the format. Its tensor or row becomes NaN."""
    x = numbers(0, 4, 16)
    x[1, 3] = math.inf
    assert float8.rounded(x, None, "e4m3").isnan().all()

    by_row = float8.rounded(x, 1, "e4m3")
    assert by_row[1].isnan().all()
    assert by_row[[0, 2, 3]].isfinite().all()

    x[1, 3] = math.nan
    assert float8.rounded(x, 1, "e4m3")[1].isnan().all()


def test_rounding_again_changes_nothing():
    """FSDP rounds a weight before gathering it, and each product rounds the gathered weight again."""
    for seed in range(20):
        x = numbers(seed, 32, 16).bfloat16()
        once = float8.rounded(x, None, "e4m3")
        assert torch.equal(float8.rounded(once, None, "e4m3"), once)


def test_other_numbers_of_a_tensor_affect_only_small_numbers():
    x = numbers(0, 64, 64)
    separately = float8.rounded(x, None, "e4m3")
    together = float8.rounded(torch.cat([x, 5.3 * x]), None, "e4m3")[:64]
    # Smaller numbers are subnormal with the scale of the larger tensor.
    is_large = x.abs() > x.abs().max() * 5.3 * 2.0**-14

    assert torch.equal(separately[is_large], together[is_large])
    assert not torch.equal(separately, together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_match_their_rounding_model(dtype):
    counts = [5, 0, 17, 10]
    x = numbers(0, 32, 16).to(dtype)
    g = numbers(1, 32, 24).to(dtype)
    w = numbers(2, 4, 24, 16).to(dtype)
    x.requires_grad_()
    w.requires_grad_()
    out = float8.grouped_product(x, torch.tensor(counts), w, moe.product, emulate=True)
    out.backward(g)
    assert w.grad is not None
    assert w.grad[1].eq(0).all()  # the expert without tokens

    used_experts = [e for e, count in enumerate(counts) if count]
    results = (out, x.grad, w.grad[used_experts])
    outs, dxs, dws = [], [], []
    parts = zip(x.detach().split(counts), g.split(counts), w.detach().unbind(), strict=True)
    for x_e, g_e, w_e in parts:
        if len(x_e):
            out_e, dx_e, dw_e = expected("rowwise", x_e, w_e, g_e)
            outs.append(out_e)
            dxs.append(dx_e)
            dws.append(dw_e)
    exact = (torch.cat(outs), torch.cat(dxs), torch.stack(dws))

    # bfloat16 results are rounded to 8 bits, float32 results differ in the order of sums
    rounding = 2.0**-8 if dtype is torch.bfloat16 else 1e-5
    for actual, expected_value in zip(results, exact, strict=True):
        largest = float(expected_value.abs().max())
        assert torch.allclose(actual.double(), expected_value, rtol=rounding, atol=1e-6 * largest)


@pytest.mark.parametrize("recipe", list(float8.RECIPES))
def test_products_of_a_device_match_emulated_products(recipe):
    """A CPU also supports the scaled matmul of devices, but sums in a different order."""
    x = numbers(0, 40, 64).bfloat16()
    w = numbers(1, 32, 64).bfloat16()
    g = numbers(2, 40, 32).bfloat16()
    results = []
    for emulate in (False, True):
        x_ = x.clone().requires_grad_()
        w_ = w.clone().requires_grad_()
        out = float8.linear(x_, w_, recipe, emulate)
        out.backward(g)
        results.append((out.detach(), x_.grad, w_.grad))

    for on_device, emulated in zip(*results, strict=True):
        assert torch.allclose(
            on_device.float(), emulated.float(), rtol=2.0**-7, atol=1e-5 * emulated.abs().max()
        )


def _grouped_by_contract(a, b, scale_a, scale_b, offs, out_dtype, use_fast_accum):
    """Float64 reference for PyTorch's grouped float8 product, with its documented layouts and scales."""
    a = a.double()
    b = b.double()
    scale_a = scale_a.double()
    scale_b = scale_b.double()
    starts = [0, *offs.tolist()]
    if b.ndim == 3:
        parts = zip(starts, starts[1:], b, scale_b, strict=False)
        products = []
        for start, stop, b_e, s_e in parts:
            rows = a[start:stop] * scale_a[start:stop, None]
            products.append(rows @ (b_e * s_e))
        return torch.cat(products).to(out_dtype)
    # The gradient of the weights sums over tokens, so each group of tokens has separate scales.
    scales_a = scale_a.view(-1, a.size(0))
    scales_b = scale_b.view(-1, b.size(1))
    products = []
    for start, stop, s_a, s_b in zip(starts, starts[1:], scales_a, scales_b, strict=False):
        columns_of_a = a[:, start:stop] * s_a[:, None]
        rows_of_b = b[start:stop] * s_b
        products.append(columns_of_a @ rows_of_b)
    assert all(stop % 16 == 0 for stop in starts)
    return torch.stack(products).to(out_dtype)


def test_experts_on_a_device_get_valid_operands(monkeypatch):
    """The kernel runs only on GPUs. A substitute checks the layout of its operands and multiplies them."""
    laid_out = []

    def grouped_mm(*operands, **options):
        on_meta = [operand.to("meta") for operand in operands]
        # On the meta device, PyTorch checks strides, sizes and dtypes without the kernel.
        laid_out.append(original(*on_meta, **options).shape)
        return _grouped_by_contract(*operands, **options)

    original = torch._scaled_grouped_mm
    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped_mm)
    count_E = torch.tensor([5, 0, 17, 10])
    results = []
    x = numbers(0, 32, 16).bfloat16()
    g = numbers(1, 32, 48).bfloat16()
    w = numbers(2, 4, 48, 16).bfloat16()
    for emulate in (False, True):
        x_ = x.clone().requires_grad_()
        w_ = w.clone().requires_grad_()
        out = float8.grouped_product(x_, count_E, w_, moe.product, emulate)
        out.backward(g)
        results.append((out.detach(), x_.grad, w_.grad))

    for on_device, emulated in zip(*results, strict=True):
        assert torch.allclose(
            on_device.float(), emulated.float(), rtol=2.0**-7, atol=1e-5 * emulated.abs().max()
        )
    assert laid_out == [(32, 48), (32, 16), (4, 48, 16)]
