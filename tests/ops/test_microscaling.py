"""Rounding to MX against an independent, table-based model of the specification in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shardtrain.ops import microscaling

RULES = ("floor", "rceil")
E4M3 = torch.tensor(
    [n * 2.0**-9 for n in range(8)]
    + [(8 + n) * 2.0 ** (e - 10) for e in range(1, 16) for n in range(8)][:-1],
    dtype=torch.float64,
)
"""All float8 e4m3 numbers from 0 to 448: subnormals, then eight per exponent. The last code would be NaN."""
POWERS = torch.exp2(torch.arange(-127, 128, dtype=torch.float64))
"""All scales of e8m0."""


def nearest(x: Tensor) -> Tensor:
    """Round to the nearest e4m3 number, ties to the even code, and saturate at 448."""
    size = x.abs().clamp(max=448)
    above = torch.searchsorted(E4M3, size).clamp(min=1)
    below = above - 1
    to_below = size - E4M3[below]
    to_above = E4M3[above] - size
    lower = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    return torch.copysign(E4M3[torch.where(lower, below, above)], x)


def model(x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Return rows rounded in float64, and the scale code of each block."""
    rows, length = x.shape
    filled = x.new_zeros(rows, -(-length // 32) * 32, dtype=torch.float64)
    filled[:, :length] = x
    blocks = filled.view(rows, -1, 32)
    amax = blocks.abs().amax(-1)
    # Section 6.3: the largest power of two in the block, divided by the format's largest power of two (2^8).
    if rule == "floor":
        scale = (torch.searchsorted(POWERS * 2**8, amax, right=True) - 1).clamp(min=0)
    else:
        scale = torch.searchsorted(POWERS * 448, amax)
    power = POWERS[scale][..., None]
    return (nearest(blocks / power) * power).view_as(filled)[:, :length], scale


def numbers(seed: int, *shape: int) -> Tensor:
    """Numbers of many magnitudes, within blocks and between them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(4 * torch.randn(shape, generator=generator))


def edges() -> Tensor:
    """Blocks whose maximum is at an edge of a rule, with numbers at and near midpoints of float8 values."""
    tops = [0.0, 1.0, 1.75, 448.0, 256.0, 2.0**-126, 2.0**-118, 2.0**-119, 2.0**119, 2.0**127]
    for top in (1.0, 1.75, 448.0):
        tops += [math.nextafter(top, 0.0), math.nextafter(top, 1e9)]
    finfo = torch.finfo(torch.float32)
    tops += [
        1 - 2.0**-24,
        1.75 + 2.0**-22,
        1.75 - 2.0**-23,
        448 + 2.0**-15,
        finfo.max,
        finfo.tiny,
        2.0**-149,
        1.9999999,
    ]
    shares = [
        1.0,
        0.5,
        17 / 32,
        19 / 32,
        0.99,
        2.0**-15,
        3 * 2.0**-17,
        2.0**-18,
        1.01 * 2.0**-18,
        2.0**-40,
        0.0,
        480 / 511,
    ]
    rows = []
    for top in tops:
        row = [top * share for share in shares]
        negative = [-number for number in row]
        padding = [0.0] * (32 - 2 * len(row))
        rows.append([*row, *negative, *padding])
    return torch.tensor(rows, dtype=torch.float64).float()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_matches_the_specification_exactly(dtype, rule):
    """Scales and numbers match exactly, except for bfloat16 subnormals and 2^128."""
    inputs = [
        numbers(0, 64, 256),
        numbers(1, 64, 128) * 1e-30,
        numbers(2, 3, 100),
        numbers(3, 5, 7),
        edges(),
    ]
    for x in inputs:
        x = x.to(dtype)
        # The largest float32 number is infinite in bfloat16.
        x = torch.where(x.isfinite(), x, 1.0)
        bits, scale = microscaling.to_mx(x, rule)
        expected, expected_scale = model(x, rule)

        assert torch.equal(scale.long(), expected_scale)

        meant = bits.double().unflatten(1, (-1, 32)) * POWERS[scale.long()][..., None]
        assert torch.equal(meant.flatten(1)[:, : x.size(1)], expected)
        actual = microscaling.rounded(x, rule)
        assert actual.dtype is dtype
        assert torch.equal(actual, expected.to(dtype))


def test_floor_clips_and_rceil_does_not():
    """``floor`` clips numbers above 448 times the scale, by up to an eighth. ``rceil`` clips nothing."""
    x = torch.full((1, 32), 511.0)
    assert microscaling.rounded(x, "floor").unique().tolist() == [448.0]
    assert microscaling.rounded(x, "rceil").unique().tolist() == [512.0]
    assert microscaling.rounded(torch.full((1, 32), 448.0), "rceil").unique().tolist() == [448.0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_block_with_a_nonfinite_number_is_nan(value, rule):
    x = numbers(0, 4, 96)
    x[1, 40] = value  # in the second of three blocks of the row
    bits, scale = microscaling.to_mx(x, rule)

    assert scale[1, 1] == 0xFF
    assert (scale == 0xFF).sum() == 1

    actual = microscaling.rounded(x, rule)
    assert actual[1, 32:64].isnan().all()
    assert actual.isnan().sum() == 32
    assert bits.view(4, 3, 32)[1, 1].float().isnan().all()


def test_zeros_keep_their_signs_and_have_the_smallest_scale():
    x = torch.tensor([[0.0, -0.0] * 16])
    bits, scale = microscaling.to_mx(x, "floor")
    assert scale.tolist() == [[0]]
    assert torch.equal(bits.view(torch.uint8), torch.tensor([[0, 128] * 16]).byte())


@pytest.mark.parametrize("shape", [(0, 64, 32), (4, 64, 0), (0, 5, 7)], ids=str)
@pytest.mark.parametrize("emulate", [True, False])
def test_empty_tensors_are_supported(shape, emulate):
    rows, inputs, outputs = shape
    x = torch.ones(rows, inputs, requires_grad=True)
    w = torch.ones(outputs, inputs, requires_grad=True)
    out = microscaling.linear(x, w, "floor", emulate)
    out.sum().backward()

    assert out.shape == (rows, outputs)
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape
    assert w.grad.eq(0).all() or rows
    assert microscaling.product(x[:, :0], w[:, :0], "floor", emulate).eq(0).all()


@pytest.mark.parametrize("rule", RULES)
def test_parts_with_complete_blocks_round_like_the_full_tensor(rule):
    """Tensor parallelism and FSDP round shards of a tensor, so they depend on this property."""
    x = numbers(0, 64, 192).bfloat16()
    full = microscaling.rounded(x, rule)
    columns = [microscaling.rounded(part, rule) for part in x.split([96, 32, 64], dim=1)]

    assert torch.equal(full, torch.cat(columns, 1))

    rows = [microscaling.rounded(part, rule) for part in x.split(16)]
    assert torch.equal(full, torch.cat(rows))


@pytest.mark.parametrize("rule", RULES)
def test_rounding_again_changes_nothing(rule):
    x = numbers(0, 64, 192).bfloat16()
    once = microscaling.rounded(x, rule)
    assert torch.equal(microscaling.rounded(once, rule), once)


def products(x: Tensor, w: Tensor, g: Tensor, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and gradients of input and weight in float64, with operands rounded along the summed dimension."""

    # Operands of the output are rounded along inputs I, of the input's gradient along outputs O, and of
    # the weight's gradient along rows R.
    def rounded(rows: Tensor) -> Tensor:
        return model(rows, rule)[0]

    out = rounded(x) @ rounded(w).T
    dx = rounded(g) @ rounded(w.T).T
    dw = rounded(g.T) @ rounded(x.T).T
    return out, dx, dw


@pytest.mark.parametrize("sizes", [(64, 96, 32), (40, 48, 80)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_linear_layer_matches_its_rounding_model(rule, dtype, sizes):
    """Only sums differ: by 1e-15 in float64, by 1e-6 of the sum of magnitudes in float32. bfloat16 rounds once more.

    With the second sizes, summed dimensions are not divisible by 32.
    """
    rows, inputs, outputs = sizes
    half = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    x = numbers(0, rows, inputs).to(half)
    w = numbers(1, outputs, inputs).to(half)
    g = numbers(2, rows, outputs).to(half)
    x_ = x.to(dtype).requires_grad_()
    w_ = w.to(dtype).requires_grad_()
    out = microscaling.linear(x_[None], w_, rule, emulate=True)[0]
    out.backward(g.to(dtype))

    # The rounding error of a sum is relative to the sum of the magnitudes.
    x_abs = x.abs().double()
    w_abs = w.abs().double()
    g_abs = g.abs().double()
    sizes_of_sums = (x_abs @ w_abs.T, g_abs @ w_abs, g_abs.T @ x_abs)
    results = (out, x_.grad, w_.grad)
    exact = products(x, w, g, rule)

    epsilon = 1e-15 if dtype is torch.float64 else 2e-6
    for actual, expected, size in zip(results, exact, sizes_of_sums, strict=True):
        bound = epsilon * 2 * size
        if dtype is torch.bfloat16:
            bound = bound + expected.abs() * 2.0**-8
        assert actual.dtype is dtype
        assert ((actual.double() - expected).abs() <= bound).all()


def laid_out(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Return scales (rows, blocks), each read from its place in the cuBLAS layout of 1D block scaling factors."""
    tiles = -(-blocks // 4)
    scales = torch.empty(rows, blocks, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            # A tile of 512 bytes has the scales of 128 rows and 4 blocks.
            tile = row // 128 * tiles + block // 4
            row_of_tile = row % 128
            offset = row_of_tile % 32 * 16 + row_of_tile // 32 * 4 + block % 4
            scales[row, block] = scale[512 * tile + offset]
    return scales


def test_scales_have_the_layout_documented_by_cublas():
    for rows, blocks in ((1, 1), (128, 4), (130, 5), (300, 9)):
        generator = torch.Generator().manual_seed(rows)
        scale = torch.randint(0, 255, (rows, blocks), generator=generator, dtype=torch.uint8)
        actual = microscaling.swizzled(scale)
        assert actual.numel() == 512 * -(-rows // 128) * -(-blocks // 4)
        assert torch.equal(laid_out(actual, rows, blocks), scale)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", [(64, 96, 32), (200, 48, 160)], ids=str)
def test_product_on_a_device_gets_valid_operands(monkeypatch, rule, sizes):
    """A substitute for the GPU kernel undoes the layout, multiplies in float64, and rounds once.

    Its operands also pass PyTorch's checks of dtypes, strides and sizes.
    """
    original = torch._scaled_mm
    shapes = []

    def scaled_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        assert scale_a.dtype is scale_b.dtype is torch.float8_e8m0fnu
        on_meta = [operand.to("meta") for operand in (a, b, scale_a, scale_b)]
        shapes.append(tuple(original(*on_meta, out_dtype=out_dtype).shape))

        def represented_numbers(operand: Tensor, scale: Tensor) -> Tensor:
            assert operand.dtype is torch.float8_e4m3fn
            assert operand.is_contiguous()
            assert operand.size(1) % 32 == 0
            blocks = operand.size(1) // 32
            power = POWERS[laid_out(scale.view(torch.uint8), operand.size(0), blocks).long()]
            numbers_of_blocks = operand.double().unflatten(1, (blocks, 32))
            return (numbers_of_blocks * power[..., None]).flatten(1)

        product = represented_numbers(a, scale_a) @ represented_numbers(b.t(), scale_b).T
        return product.to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    rows, inputs, outputs = sizes
    x = numbers(0, rows, inputs).bfloat16()
    w = numbers(1, outputs, inputs).bfloat16()
    g = numbers(2, rows, outputs).bfloat16()
    x_ = x.clone().requires_grad_()
    w_ = w.clone().requires_grad_()
    microscaling_out = microscaling.linear(x_, w_, rule, emulate=False)
    microscaling_out.backward(g)
    results = (microscaling_out, x_.grad, w_.grad)

    for actual, expected in zip(results, products(x, w, g, rule), strict=True):
        assert torch.equal(actual, expected.bfloat16())
    assert shapes == [(rows, outputs), (rows, inputs), (outputs, inputs)]


def test_recipes_match_those_of_torchao():
    layer = torch.nn.Linear(64, 32)
    x = numbers(0, 8, 64)
    microscaling.convert(layer, "mxfp8_emulated")
    expected = microscaling.linear(x, layer.weight, "floor", emulate=True) + layer.bias

    assert torch.equal(layer(x), expected)
    assert "mxfp8_emulated" in repr(layer)
    assert set(dict(layer.named_parameters())) == {"weight", "bias"}
    assert microscaling.RECIPES["mxfp8_cublas"] == ("floor", False)
    assert microscaling.RECIPES["mxfp8_cublas_rceil"] == ("rceil", False)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_bitwise_equal_to_torchao(dtype, rule):
    """Compare blocks from 2^-100 to 2^100. torchao has inexact scales below, and hides NaN and infinity."""
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    mode = getattr(config.ScaleCalculationMode, rule.upper(), None)
    if mode is None:
        pytest.skip(f"this torchao has no rule {rule}")
    exponents = 20 * torch.randn(256, 1, generator=torch.Generator().manual_seed(1))
    x = numbers(0, 256, 256) * torch.exp2(exponents)
    x = torch.where(x.abs() < 2.0**-100, 0.0, x).to(dtype)
    x[0] = 0
    x[1, :32] = 448
    bits, scale = microscaling.to_mx(x, rule)
    their_scale, their_bits = mx_tensor.to_mx(x, torch.float8_e4m3fn, 32, mode)

    assert torch.equal(scale, their_scale.view(torch.uint8))
    assert torch.equal(bits.view(torch.uint8), their_bits.view(torch.uint8))
