"""Attention within documents on one device matches a float64 reference, for any document boundaries."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardtrain.data.batch import Batch
from shardtrain.models.layers import AttentionCore
from shardtrain.ops import attention_scores as scores
from shardtrain.ops import document_mask

B = 2
T = 24
N = 4
K = 2
H = 8
CUTS = st.lists(st.sets(st.integers(1, T - 1), max_size=T - 1), min_size=B, max_size=B)


def inputs(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def numbers(cuts: list[set[int]], gap: int = 1) -> Tensor:
    """Return ids of documents that begin at the given tokens of each row. Ids are ``gap`` apart."""
    begins = torch.zeros(len(cuts), T, dtype=torch.int64)
    for row, places in enumerate(cuts):
        begins[row, sorted(places)] = gap
    return begins.cumsum(1)


def by_hand(q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor) -> Tensor:
    """Reference: causal grouped-query attention within documents, in float64."""
    q = q.double()
    k = k.double().repeat_interleave(N // K, 2)
    v = v.double().repeat_interleave(N // K, 2)
    scores = torch.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.size(-1))
    same_document = documents_BT[:, :, None] == documents_BT[:, None, :]
    visible = same_document & torch.ones(T, T, dtype=torch.bool).tril()
    weights = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1)
    return torch.einsum("bnts,bsnh->btnh", weights, v)


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference, computed in float64."""
    return float((actual.detach().cpu().double() - expected.detach()).abs().max())


def largest_errors(
    function: Callable[..., Tensor], documents_BT: Tensor, parts: list[Tensor]
) -> list[float]:
    """Return the errors of the output and of the gradients of queries, keys and values."""
    *attention_inputs, gradient = parts
    exact = [x.detach().cpu().double().requires_grad_() for x in attention_inputs]
    expected = by_hand(*exact, documents_BT.cpu())
    expected.backward(gradient.cpu().double())
    leaves = [x.clone().requires_grad_() for x in attention_inputs]
    out = function(*leaves, documents_BT)
    out.backward(gradient)
    assert out.dtype == gradient.dtype
    errors = [distance(out, expected)]
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == gradient.dtype
        errors.append(distance(leaf.grad, exact_leaf.grad))
    return errors


@settings(max_examples=40, derandomize=True)
@given(
    CUTS,
    st.integers(1, 3),
    st.sampled_from([document_mask.attention, document_mask.masked_attention]),
)
def test_attention_within_documents_matches_the_reference(cuts, gap, function) -> None:
    # Values and gradients are about 1, and float32 has a precision of 1e-7.
    assert max(largest_errors(function, numbers(cuts, gap), inputs())) < 2e-6


def test_masks_are_created_for_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_mask, "_QUERIES_AT_ONCE", 7)
    documents_BT = numbers([{5, 9}, {7, 14}])
    errors = largest_errors(document_mask.masked_attention, documents_BT, inputs())
    assert max(errors) < 2e-6  # values and gradients are about 1, with float32 rounding


@settings(max_examples=20, derandomize=True)
@given(CUTS, st.integers(0, 9), st.sampled_from([0, 1, 5, 9, 40]))
def test_chunks_are_separate_documents(cuts, chunk, window) -> None:
    documents_BT = numbers(cuts, 3)
    q, k, v, _ = inputs()
    cut_BT = document_mask.chunked(documents_BT, chunk, (B, T), q.device)

    # Tokens share a chunk if they have the same document and the same chunk number in this document.
    place_T = torch.arange(T)
    for row, places in enumerate(cuts):
        starts = []
        for t in range(T):
            earlier_cuts = [cut for cut in places if cut <= t]
            starts.append(max(earlier_cuts, default=0))
        start_T = torch.tensor(starts)
        number_T = (place_T - start_T) // chunk if chunk else torch.zeros_like(place_T)
        same_TT = (start_T[:, None] == start_T) & (number_T[:, None] == number_T)

        assert torch.equal(cut_BT[row][:, None] == cut_BT[row], same_TT)

    # Without documents, a row is one document.
    chunks_of_rows_BT = document_mask.chunked(None, chunk, (B, T), q.device)

    if chunk == 0:
        assert chunks_of_rows_BT is None
    else:
        assert torch.equal(chunks_of_rows_BT, (place_T // chunk).expand(B, T))

    out = AttentionCore(window, chunk=chunk)(q, k, v, documents_BT)
    expected = AttentionCore(window)(q, k, v, cut_BT)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@settings(max_examples=20, derandomize=True)
@given(CUTS, st.sampled_from([0, 1, 5, 40]), st.sampled_from([-30.0, 0.0, 2.0, 30.0]))
def test_attention_with_sinks_matches_the_reference(cuts, window, level) -> None:
    """Forward and all gradients, for weak, typical and dominant sinks."""
    documents_BT = numbers(cuts)
    q, k, v, gradient = inputs()
    sinks_N = torch.linspace(-1.0, 1.0, N) + level
    exact = [x.double().requires_grad_() for x in (q, k, v, sinks_N)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks_N)]
    expected = scores.attention(*exact[:3], documents_BT, window, scores.PLAIN, exact[3])
    out = document_mask.attention(*leaves[:3], documents_BT, window, None, leaves[3])
    expected.backward(gradient.double())
    out.backward(gradient)

    # Gradients of sinks are sums of B T numbers of about 1.
    assert distance(out, expected) < 1e-5
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        assert distance(leaf.grad, exact_leaf.grad) < 1e-5


def test_negligible_sink_does_not_change_attention() -> None:
    documents_BT = numbers([{3}, {9}])
    q, k, v, _ = inputs()
    sinks_N = torch.full((N,), -200.0)
    with_sinks = document_mask.attention(q, k, v, documents_BT, sinks_N=sinks_N)
    without_sinks = document_mask.attention(q, k, v, documents_BT)

    torch.testing.assert_close(with_sinks, without_sinks, rtol=0, atol=0)


def test_bfloat16_has_its_usual_precision() -> None:
    documents_BT = numbers([{1, 9}, {12}])
    errors = largest_errors(document_mask.attention, documents_BT, inputs(torch.bfloat16))
    # 2^-8 relative to values up to about 4.
    assert max(errors) < 6e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 6e-2), (torch.float16, 1e-2), (torch.float32, 1e-4)]
)
def test_cuda_matches_attention_within_documents(dtype: torch.dtype, tolerance: float) -> None:
    for cuts in ([set(), set()], [{1, 2, 9}, {12}], [set(range(1, T)), {23}]):
        parts = inputs(dtype, "cuda")
        assert max(largest_errors(document_mask.attention, numbers(cuts).cuda(), parts)) < tolerance


def test_compiled_function_matches_eager() -> None:
    documents_BT = numbers([{3, 4}, {20}])
    q, k, v, gradient = inputs()

    def weighed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return document_mask.attention(q * 2, k, v, documents_BT) * gradient

    compiled = torch.compile(weighed, backend="aot_eager", fullgraph=True)
    results = []
    for function in (weighed, compiled):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        out.sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])

    for eager_value, compiled_value in zip(*results, strict=True):
        assert torch.equal(compiled_value, eager_value)


def test_meta_tensors_pass_through_forward_and_backward() -> None:
    with FakeTensorMode():
        q = torch.randn(B, T, N, H, requires_grad=True)
        k = torch.randn(B, T, K, H, requires_grad=True)
        v = torch.randn(B, T, K, H, requires_grad=True)
        out = document_mask.attention(q, k, v, torch.zeros(B, T, dtype=torch.int64))
        out.sum().backward()
        assert out.shape == q.shape
        assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)


def test_token_affects_only_its_own_document() -> None:
    documents_BT = numbers([{10, 15}, {1}])
    q, k, v, _ = inputs()
    changed_k = k.clone()
    changed_k[0, 11] += 1
    before = document_mask.attention(q, k, v, documents_BT)
    after = document_mask.attention(q, changed_k, v, documents_BT)
    has_changed_BT = (after != before).flatten(2).any(-1)

    # The document of token 11 ends before token 15. Earlier tokens do not see token 11.
    assert has_changed_BT.nonzero().tolist() == [[0, t] for t in range(11, 15)]


@pytest.mark.parametrize("bad", [[0, 0, 1, 0], [2, 1, 1, 1]])
def test_document_ids_that_do_not_ascend_are_rejected(bad: list[int]) -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="documents_BT must ascend"):
        document_mask.attention(q, q, q, torch.tensor([bad]))


def test_ragged_lists_each_beginning_once_and_never_joins_rows() -> None:
    documents_BT = numbers([{3, 4}, set()])
    # The second row begins with the last id of the first row.
    documents_BT[1] = documents_BT[0, -1]
    starts, longest = document_mask.ragged(documents_BT)

    assert starts.tolist() == [0, 3, 4, T, 2 * T]
    assert (starts.dtype, longest) == (torch.int32, T)


def test_document_ids_on_a_device_are_read_from_the_host_copy() -> None:
    documents_BT = numbers([{3}, {4}])
    batch = Batch(documents_BT, documents_BT, documents_BT, torch.arange(B), documents_BT)
    # Data on the meta device cannot be read.
    moved = batch.to("meta")
    assert moved.documents_BT is not None
    assert document_mask.on_host(moved.documents_BT) is documents_BT
    assert document_mask.on_host(documents_BT) is documents_BT
