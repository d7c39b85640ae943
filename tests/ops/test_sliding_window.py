"""Attention within a window matches a float64 reference, with and without documents."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardtrain.models.layers import AttentionCore
from shardtrain.ops import document_mask, sliding_window

B = 2
T = 24
N = 4
K = 2
H = 8
CUTS = st.lists(st.sets(st.integers(1, T - 1), max_size=T - 1), min_size=B, max_size=B)


def inputs(
    dtype: torch.dtype = torch.float32, device: str = "cpu", tokens: int = T, heads: int = N
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(B, tokens, heads, H), (B, tokens, K, H), (B, tokens, K, H), (B, tokens, heads, H)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def numbers(cuts: list[set[int]]) -> Tensor:
    """Return ids of documents that begin at the given tokens of each row."""
    begins = torch.zeros(len(cuts), T, dtype=torch.int64)
    for row, places in enumerate(cuts):
        begins[row, sorted(places)] = 1
    return begins.cumsum(1)


def visible(tokens: int, size: int) -> Tensor:
    """The definition: key j is at or before query i, and fewer than ``size`` tokens before it."""
    i = torch.arange(tokens)[:, None]
    j = torch.arange(tokens)[None]
    return (j <= i) & (j > i - size)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, size: int, documents_BT: Tensor | None = None
) -> Tensor:
    """Reference: causal grouped-query attention within a window, in float64."""
    q = q.double()
    k = k.double().repeat_interleave(N // K, 2)
    v = v.double().repeat_interleave(N // K, 2)
    scores = torch.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.size(-1))
    mask_BTT = visible(q.size(1), size).expand(B, -1, -1)
    if documents_BT is not None:
        mask_BTT = mask_BTT & (documents_BT[:, :, None] == documents_BT[:, None, :])
    return torch.einsum(
        "bnts,bsnh->btnh", scores.masked_fill(~mask_BTT[:, None], -math.inf).softmax(-1), v
    )


def largest_error(
    function: Callable[..., Tensor], size: int, documents_BT: Tensor | None, parts: list[Tensor]
) -> float:
    """Largest error of the output and of the gradients against the reference."""
    *attention_inputs, gradient = parts
    exact = [x.detach().cpu().double().requires_grad_() for x in attention_inputs]
    documents_on_cpu = None if documents_BT is None else documents_BT.cpu()
    expected = by_hand(*exact, size, documents_on_cpu)
    expected.backward(gradient.cpu().double())

    leaves = [x.clone().requires_grad_() for x in attention_inputs]
    out = function(*leaves, documents_BT, size)
    out.backward(gradient)

    pairs = [(out, expected)]
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        pairs.append((leaf.grad, exact_leaf.grad))
    errors = []
    for actual, target in pairs:
        assert actual.dtype == gradient.dtype
        error = float((actual.detach().cpu().double() - target.detach()).abs().max())
        assert not math.isnan(error)
        errors.append(error)
    return max(errors)


@settings(max_examples=60, derandomize=True)
@given(
    st.one_of(st.none(), CUTS),
    st.integers(1, T + 2),
    st.sampled_from([1, 5, 128]),
    st.sampled_from([document_mask.attention, document_mask.masked_attention]),
)
def test_attention_within_a_window_matches_the_reference(cuts, size, at_once, function) -> None:
    documents_BT = None if cuts is None else numbers(cuts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliding_window, "QUERIES_AT_ONCE", at_once)
        patch.setattr(document_mask, "_QUERIES_AT_ONCE", at_once)
        # values and gradients are about 1; float32 has a precision of 1e-7
        assert largest_error(function, size, documents_BT, inputs()) < 2e-6


def test_rows_longer_than_kernel_blocks_are_exact() -> None:
    """The window and the row span several key blocks of the kernel, some of which are outside the window."""
    parts = inputs(tokens=1300)  # values up to 4 and sums over 700 keys: more rounding than above
    assert largest_error(document_mask.attention, 700, None, parts) < 5e-6


def test_bfloat16_has_its_usual_precision() -> None:
    documents_BT = numbers([{1, 9}, {12}])
    error = largest_error(document_mask.attention, 5, documents_BT, inputs(torch.bfloat16))
    # bfloat16 has 8 significant bits, and gradients are up to 4: some units of 2^-6
    assert error < 6e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 6e-2), (torch.float16, 1e-2), (torch.float32, 1e-4)]
)
@pytest.mark.parametrize("size", [1, 5, 23])
def test_cuda_matches_attention_within_a_window(
    dtype: torch.dtype, tolerance: float, size: int
) -> None:
    parts = inputs(dtype, "cuda")
    for documents_BT in (None, numbers([{1, 2, 9}, {12}]).cuda()):
        assert largest_error(document_mask.attention, size, documents_BT, parts) < tolerance


def test_window_of_the_entire_row_is_bitwise_equal_to_no_window() -> None:
    *parts, _ = inputs()
    for size in (T, T + 5):
        assert torch.equal(AttentionCore(size)(*parts), AttentionCore()(*parts))

    documents_BT = numbers([{3}, {20}])
    assert torch.equal(
        AttentionCore(T)(*parts, documents_BT), AttentionCore()(*parts, documents_BT)
    )
    assert not torch.equal(AttentionCore(T - 1)(*parts), AttentionCore()(*parts))


@settings(max_examples=200, derandomize=True)
@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 30),
    st.integers(1, 30),
    st.sampled_from([1, 3, sys.maxsize]),
)
def test_blocks_cover_each_pair_within_the_window_once(q, s, offset, size, at_once) -> None:
    visits = torch.zeros(q, s, dtype=torch.int64)
    for queries, keys, band in sliding_window.blocks(q, s, offset, size, at_once):
        num_queries = queries.stop - queries.start
        num_keys = keys.stop - keys.start
        mask = sliding_window.mask(num_queries, num_keys, band, torch.empty(0))
        part = mask == 0

        assert part.any(1).all()
        assert part.any(0).all()
        assert part[-1, -1]  # kernels align the mask at the last key

        visits[queries, keys] += part.long()

    i = torch.arange(q)[:, None] + offset
    j = torch.arange(s)[None]
    is_within_window = (j <= i) & (j > i - size)
    assert torch.equal(visits, is_within_window.long())


def test_no_mask_grows_with_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    mask_sizes = []
    mask = sliding_window.mask

    def recorded_mask(q: int, s: int, *rest: object) -> Tensor:
        mask_sizes.append(q * s)
        return mask(q, s, *rest)

    monkeypatch.setattr("shardtrain.ops.flash_attention.mask", recorded_mask)
    *parts, _ = inputs(tokens=2000)
    document_mask.attention(*parts, None, 50)

    assert len(mask_sizes) == 16
    assert max(mask_sizes) <= 128 * (128 + 49)


def test_compiled_function_matches_eager() -> None:
    *parts, gradient = inputs()
    core = AttentionCore(7)
    results = []
    for function in (core, torch.compile(core, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in parts]
        (function(*leaves) * gradient).sum().backward()
        results.append([leaf.grad for leaf in leaves])

    for compiled_value, eager_value in zip(*results, strict=True):
        assert torch.equal(compiled_value, eager_value)


def test_meta_tensors_pass_through_forward_and_backward() -> None:
    with FakeTensorMode():
        q = torch.randn(B, T, N, H, requires_grad=True)
        k = torch.randn(B, T, K, H, requires_grad=True)
        v = torch.randn(B, T, K, H, requires_grad=True)
        out = document_mask.attention(q, k, v, None, 5)
        out.sum().backward()
        assert (out.shape, q.grad.shape, k.grad.shape) == (q.shape, q.shape, k.shape)
