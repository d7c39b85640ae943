"""Blocked attention matches attention in float64, with every kind of mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from tiers import cases
from torch import Tensor
from torch.nn import functional as F

from shardtrain.ops import attention_scores, chosen_kernels, document_mask
from shardtrain.ops.attention_scores import PLAIN
from shardtrain.ops.chosen_kernels import Kernels
from shardtrain.ops.cpu import blocked_attention, document_blocks


@pytest.fixture(autouse=True)
def _blocks():
    chosen_kernels.use(Kernels(blocked_attention=2.0, blocked_attention_float32=2.0))
    yield
    chosen_kernels.use(chosen_kernels.PYTORCH)


def drawn(dtype: torch.dtype, tokens: int, groups: int = 2, width: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (2 * groups, 2, 2, 2 * groups)
    return [torch.randn(2, tokens, count, width, generator=generator).to(dtype) for count in heads]


def exact(inputs: list[Tensor], visible_BTT: Tensor, scale: float | None) -> list[Tensor]:
    q, k, v, gradient = (x.double() for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    groups = q.size(2) // k.size(2)
    # PyTorch expects heads before tokens, and as many key heads as query heads.
    queries = leaves[0].transpose(1, 2)
    keys, values = (x.repeat_interleave(groups, dim=2).transpose(1, 2) for x in leaves[1:])
    mask = visible_BTT[:, None]
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    out = out.transpose(1, 2)
    out.backward(gradient)
    return [out.detach(), *gradients_of(leaves)]


def gradients_of(leaves: list[Tensor]) -> list[Tensor]:
    return [x.grad for x in leaves if x.grad is not None]


def visible_tokens(of_row: Tensor | None, tokens: int, window: int) -> Tensor:
    """Return a mask (B, T, T) of the tokens that each token sees: a causal window in its document."""
    visible = torch.ones(2, tokens, tokens, dtype=torch.bool).tril()
    if window:
        visible = visible.triu(1 - window)
    if of_row is not None:
        visible = visible & (of_row[:, :, None] == of_row[:, None])
    return visible


def causal(rows: int, tokens: int) -> Tensor:
    return torch.ones(rows, tokens, tokens, dtype=torch.bool).tril()


def largest_error(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error of the output and the gradients."""
    assert len(results) == len(expected)
    return max(error(actual, exact) for actual, exact in zip(results, expected, strict=True))


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected).norm() / expected.norm())


def attended(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    out, lse = blocked_attention.attend(q, k, v)
    return [out, *blocked_attention.attend_backward(gradient, q, k, v, lse)]


def documents(tokens: int) -> Tensor:
    first = torch.arange(tokens).div(tokens // 3 + 1, rounding_mode="floor")
    return torch.stack((first, torch.zeros(tokens, dtype=torch.int64)))


@pytest.mark.parametrize("tokens", [1, 100, 128, 300])
@pytest.mark.parametrize("window", [0, 1, 17, 200])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_blocked_attention_has_the_precision_of_bfloat16(
    tokens: int, window: int, packed: bool, scale: float | None
) -> None:
    inputs = drawn(torch.bfloat16, tokens)
    of_row = documents(tokens) if packed else None
    expected = exact(inputs, visible_tokens(of_row, tokens, window), scale)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = document_mask.attention(*leaves, of_row, window, scale)
    out.backward(inputs[3])
    results = [out, *gradients_of(leaves)]
    for name, actual, exact_value in zip("oqkv", results, expected, strict=True):
        # If a token attends only to itself, exact gradients of scores are 0, and rounding leaves small gradients.
        if (tokens == 1 or window == 1) and name in "qk":
            assert float(actual.abs().max()) <= 1e-2
            continue
        # Weights, gradients of scores and results are rounded to a relative 2^-9.
        assert error(actual, exact_value) <= 5e-3, name


@pytest.mark.parametrize(("window", "packed"), [(0, True), (17, True), (200, False)])
def test_blocked_attention_with_masks_matches_within_1e_6_in_float32(
    window: int, packed: bool
) -> None:
    inputs = drawn(torch.float32, 300)
    of_row = documents(300) if packed else None
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = document_mask.attention(*leaves, of_row, window)
    out.backward(inputs[3])
    results = [out, *gradients_of(leaves)]
    expected = exact(inputs, visible_tokens(of_row, 300, window), None)

    # Some units in the last place of float32 (2^-24).
    assert largest_error(results, expected) <= 1e-6


@pytest.mark.parametrize("groups", [1, 3])
def test_blocked_attention_matches_within_1e_6_in_float32(groups: int) -> None:
    q, k, v, gradient = inputs = drawn(torch.float32, 300, groups)
    results = attended(q, k, v, gradient)
    expected = exact(inputs, causal(2, 300), None)

    # Some units in the last place of float32 (2^-24).
    assert largest_error(results, expected) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores_bytes", [1, 5 * 64 * 80 * 4, 1 << 30])
def test_number_of_rows_and_heads_per_block_changes_no_number(
    dtype: torch.dtype, scores_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    # A row has three groups of heads. ``scores_bytes`` holds 1, 2 or all groups, or 2 or all rows.
    inputs = []
    for heads in (9, 3, 3, 9):
        inputs.append(torch.randn(5, 150, heads, 16, generator=generator).to(dtype))
    q, k, v, gradient = inputs
    monkeypatch.setattr(blocked_attention, "_SCORES_BYTES", scores_bytes)
    expected = exact(inputs, causal(5, 150), None)
    bound = 1e-6 if dtype == torch.float32 else 5e-3
    results = attended(q, k, v, gradient)

    assert largest_error(results, expected) <= bound


@pytest.mark.parametrize("groups", [1, 4])
def test_non_contiguous_tensors_are_supported(groups: int) -> None:
    inputs = drawn(torch.float32, 70, groups, 24)
    # Views of a fused product of queries, keys and values.
    fused = torch.cat([x.flatten(2) for x in inputs], dim=-1)
    widths = [x[0, 0].numel() for x in inputs]
    views = [part.unflatten(2, (-1, 24)) for part in fused.split(widths, dim=-1)]
    # Tensors that store heads before tokens.
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    expected = [result.double() for result in attended(*inputs)]

    for others in (views, transposed):
        # The order of sums may depend on the stride of rows.
        assert largest_error(attended(*others), expected) <= 5e-7


@pytest.mark.parametrize("size", [30.0, 1e4])
def test_large_scores_in_float32_match_softmax(size: float) -> None:
    q, k, v, gradient = drawn(torch.float32, 200)
    large_q = q * size
    results = attended(large_q, k, v, gradient)
    expected = exact([large_q, k, v, gradient], causal(2, 200), None)
    # The rounding of a score is an absolute error of the logarithm of a weight.
    bound = 4 * size * 2.0**-23 * 4

    assert all(bool(x.isfinite().all()) for x in results)
    assert largest_error(results, expected) <= max(1e-5, bound)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None, window: int) -> Tensor:
    return document_mask.attention(q, k, v, documents_BT, window)


def _by_flash_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None, window: int
) -> Tensor:
    chosen_kernels.use(chosen_kernels.PYTORCH)
    return document_mask.attention(q, k, v, documents_BT, window)


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None, window: int
) -> Tensor:
    return attention_scores.attention(q, k, v, documents_BT, window, PLAIN)


def _by_pytorch(inputs: list[Tensor], visible_BTT: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible_BTT[:, None], enable_gqa=True
    ).transpose(1, 2)
    out.backward(inputs[3])
    return [out, *gradients_of(leaves)]


@pytest.mark.parametrize("kernel", [_by_blocks, _by_flash_in_pieces, _written_out])
@pytest.mark.parametrize(
    ("deviation", "tokens", "width", "packed"),
    cases(
        [
            (1, 65, 64, False),
            (10, 300, 8, True),
            (40, 127, 32, False),
            (100, 201, 256, True),
            (100, 129, 8, False),
        ],
        nightly=itertools.product(
            (1, 10, 40, 100), (31, 64, 127, 517), (8, 16, 40, 64, 128, 256), (False, True)
        ),
    ),
)
def test_error_in_bfloat16_is_at_most_half_larger_than_the_error_of_pytorch(
    deviation: int, tokens: int, width: int, packed: bool, kernel: Callable[..., Tensor]
) -> None:
    """Scores have the given standard deviation. PyTorch's kernel gets the same inputs."""
    sizes = (deviation**0.5, deviation**0.5, 1.0, 1.0)
    inputs = []
    for x, size in zip(drawn(torch.float32, tokens, 1, width), sizes, strict=True):
        inputs.append((x * size).bfloat16())
    of_row = documents(tokens) if packed else None
    window = tokens // 4 if packed else 0
    visible = visible_tokens(of_row, tokens, window)
    expected = exact(inputs, visible, None)
    theirs = _by_pytorch(inputs, visible)

    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = kernel(*leaves, of_row, window)
    out.backward(inputs[3])
    results = [out, *gradients_of(leaves)]

    for name, actual, pytorch, exact_value in zip("oqkv", results, theirs, expected, strict=True):
        assert error(actual, exact_value) <= 1.5 * error(pytorch, exact_value), name


def test_compiler_and_fake_tensors_treat_it_as_one_operation() -> None:
    q, k, v, _ = drawn(torch.bfloat16, 20)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for arguments in ((*leaves, None, 0, None), (*leaves, documents(20), 5, 0.5)):
        torch.library.opcheck(
            document_blocks.operation,
            arguments,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
