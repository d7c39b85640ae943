"""Attention over a sequence split over ranks equals attention over the full sequence, forward and backward."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardtrain.distributed.context_parallel import gather, masks, merged_attention, ring, ulysses
from shardtrain.distributed.cpu import shared_memory
from shardtrain.distributed.cpu.shared_memory import SequenceExchange
from shardtrain.ops import chosen_kernels, sliding_window
from shardtrain.ops.attention_scores import PLAIN, Scores
from shardtrain.ops.chosen_kernels import Kernels
from shardtrain.ops.cpu import blocked_attention

B = 2
T = 48
N = 4
K = 2
H = 8


@functools.cache
def exchange() -> SequenceExchange:
    """Return the shared memory of the ranks. All ranks create it together in their first call."""
    sequence_exchange = SequenceExchange.between(dist.group.WORLD)
    assert sequence_exchange is not None
    return sequence_exchange


def gathered_by_memory(*inputs: Any) -> Tensor:
    return gather.gathered_attention(*inputs, shared=exchange())


KINDS = {
    "gathered, balanced": (gather.gathered_attention, True),
    "gathered, in order": (gather.gathered_attention, False),
    "gathered by memory, balanced": (gathered_by_memory, True),
    "gathered by memory, in order": (gathered_by_memory, False),
    "ring, balanced": (ring.ring_attention, True),
    "ring, in order": (ring.ring_attention, False),
    "ulysses": (ulysses.ulysses_attention, False),
}
if not Path("/dev/shm").is_dir():  # no file-backed shared memory
    KINDS = {name: kind for name, kind in KINDS.items() if "memory" not in name}


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    window: int = 0,
    scores_of: Scores = PLAIN,
) -> Tensor:
    """Reference: causal grouped-query attention in float64. A query sees at most ``window`` keys, or all if 0."""
    q = q.double()
    k = k.double().repeat_interleave(N // K, 2)
    v = v.double().repeat_interleave(N // K, 2)
    scale = scores_of.scale or 1 / math.sqrt(H)
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * scale
    if scores_of.softcap:
        scores = scores_of.softcap * (scores / scores_of.softcap).tanh()
    if scores_of.slopes:
        distance = torch.arange(T)[:, None] - torch.arange(T)
        slopes = torch.tensor(scores_of.slopes, dtype=torch.float64)
        scores = scores - slopes[:, None, None] * distance

    # A query does not see later keys, other documents, or keys outside the window.
    hidden = torch.ones(T, T).triu(1).bool().expand(B, T, T)
    if documents is not None:
        hidden = hidden | (documents[:, :, None] != documents[:, None])
    if window:
        hidden = hidden | torch.ones(T, T).tril(-window).bool()
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    return torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), v)


def part(full: Tensor, rank: int, size: int, balanced: bool) -> Tensor:
    if not balanced:
        return full.chunk(size, 1)[rank].contiguous()
    chunks = full.chunk(2 * size, 1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), 1)


def largest_errors(
    rank: int,
    dtype: torch.dtype,
    documents: Tensor | None = None,
    window: int = 0,
    scores: Scores = PLAIN,
) -> dict[str, list[float]]:
    size = dist.get_world_size()
    *full_inputs, gradient = inputs(dtype)
    leaves = [x.double().requires_grad_() for x in full_inputs]
    exact = by_hand(*leaves, documents, window, scores)
    exact.backward(gradient.double())
    expected = [exact.detach(), *(leaf.grad for leaf in leaves)]

    errors = {}
    for name, (function, balanced) in KINDS.items():
        if name == "ulysses" and K % size:
            continue
        local = [part(x, rank, size, balanced).requires_grad_() for x in full_inputs]
        out = function(*local, dist.group.WORLD, balanced, documents, window, scores)
        out.backward(part(gradient, rank, size, balanced))
        actual = [out.detach(), *(x.grad for x in local)]
        errors[name] = []
        for local_value, full_value in zip(actual, expected, strict=True):
            difference = local_value - part(full_value, rank, size, balanced)
            errors[name].append(float(difference.abs().max()))
    return errors


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_split_attention_matches_the_reference(num_ranks: int) -> None:
    for errors in run_ranks(num_ranks, largest_errors, torch.float32):
        for name, values in errors.items():
            # values and gradients are about 1; float32 has a precision of 1e-7
            assert max(values) < 2e-6, (
                name,
                values,
            )


def test_split_attention_in_bfloat16_has_the_precision_of_bfloat16() -> None:
    for errors in run_ranks(2, largest_errors, torch.bfloat16):
        for name, values in errors.items():
            assert max(values) < 6e-2, (name, values)  # 2^-8 relative to values up to about 4


def errors_of_large_scores(rank: int, kernels: Kernels) -> dict[str, list[float]]:
    """Errors of output and gradients in bfloat16, relative to those of PyTorch's kernel on one process."""
    chosen_kernels.use(kernels)  # global state of this forked rank
    size = dist.get_world_size()
    q, k, v, gradient = inputs(torch.float32)
    # the standard deviation of scores is 100
    full_inputs = [
        (10 * q).bfloat16(),
        (10 * k).bfloat16(),
        v.bfloat16(),
    ]
    gradient = gradient.bfloat16()

    exact_leaves = [x.double().requires_grad_() for x in full_inputs]
    exact_out = by_hand(*exact_leaves)
    exact_out.backward(gradient.double())
    exact = [exact_out.detach(), *(leaf.grad for leaf in exact_leaves)]

    leaves = [x.clone().requires_grad_() for x in full_inputs]
    q_BNTH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in leaves)
    pytorch_out = F.scaled_dot_product_attention(
        q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    pytorch_out.backward(gradient)
    pytorch = [pytorch_out, *(leaf.grad for leaf in leaves)]

    def error(actual: Tensor, expected: Tensor) -> float:
        return float((actual.detach().double() - expected).norm())

    errors = {}
    for name, (function, balanced) in KINDS.items():
        local = [part(x, rank, size, balanced).requires_grad_() for x in full_inputs]
        out = function(*local, dist.group.WORLD, balanced, None, 0, PLAIN)
        out.backward(part(gradient, rank, size, balanced))
        actual = [out, *(x.grad for x in local)]
        errors[name] = []
        for local_value, pytorch_value, exact_value in zip(actual, pytorch, exact, strict=True):
            expected = part(exact_value, rank, size, balanced)
            pytorch_error = error(part(pytorch_value, rank, size, balanced), expected)
            errors[name].append(error(local_value, expected) / pytorch_error)
    return errors


@pytest.mark.parametrize(
    "kernels", [Kernels(), Kernels(blocked_attention=2.0)], ids=["flash", "blocks"]
)
def test_split_attention_of_large_scores_in_bfloat16_has_the_error_of_pytorch_on_one_process(
    kernels: Kernels,
) -> None:
    for errors in run_ranks(2, errors_of_large_scores, kernels):
        for name, values in errors.items():
            assert max(values) <= 1.5, (name, values)


def random_documents(seed: int) -> Tensor:
    """Return ids of documents with random boundaries, from none to one per token."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(B, 1, generator=generator) ** 3
    begins = torch.rand(B, T, generator=generator) < share
    return begins.long().cumsum(1)


def errors_of_many_cuts(rank: int) -> dict[str, float]:
    """Return the largest error of each tensor over many ways to cut the tokens into documents."""
    edges = torch.zeros(B, T, dtype=torch.int64)
    edges[0, :: T // (2 * dist.get_world_size())] = 1
    one_per_chunk = edges.cumsum(1)
    one_per_token = torch.arange(T).expand(B, T)
    one_in_all = torch.zeros_like(one_per_token)
    random_cuts = [random_documents(seed) for seed in range(20)]
    cuts = [one_per_chunk, one_per_token, one_in_all, *random_cuts]
    worst: dict[str, float] = {}
    for documents in cuts:
        for name, values in largest_errors(rank, torch.float32, documents).items():
            assert not any(math.isnan(value) for value in values), name
            worst[name] = max(worst.get(name, 0.0), *values)
    return worst


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_split_attention_within_documents_matches_the_reference(num_ranks: int) -> None:
    for worst in run_ranks(num_ranks, errors_of_many_cuts):
        assert len(worst) >= 4
        # the maximum over 23 inputs; a single one without documents is below 2e-6
        assert max(worst.values()) < 4e-6, worst


def errors_of_many_windows(rank: int) -> dict[str, float]:
    worst: dict[str, float] = {}
    for window, at_once, cut in (
        (1, 5, 0),
        (2, 5, 2),
        (7, 128, 1),
        (12, 5, 0),
        (13, 5, 3),
        (25, 5, 1),
        (40, 128, 0),
    ):
        sliding_window.QUERIES_AT_ONCE = at_once  # global state of this forked rank
        documents = random_documents(cut) if cut else None
        for name, values in largest_errors(rank, torch.float32, documents, window).items():
            assert not any(math.isnan(value) for value in values), name
            worst[name] = max(worst.get(name, 0.0), *values)
    return worst


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_split_attention_within_a_window_matches_the_reference(num_ranks: int) -> None:
    for worst in run_ranks(num_ranks, errors_of_many_windows):
        assert len(worst) >= 4
        # few keys have large weights, and gradients reach 10
        assert max(worst.values()) < 5e-6, worst


SLOPES = (0.5, 0.25, 0.125, 0.0625)
SCORES = {
    "scale": Scores(scale=0.1),
    "soft cap": Scores(softcap=1.5),
    "slopes": Scores(slopes=SLOPES),
    "all": Scores(0.7, 2.0, SLOPES),
}


def errors_of_scores(rank: int) -> dict[str, float]:
    worst: dict[str, float] = {}
    merged_attention.QUERIES_AT_ONCE = (
        5  # global state of this forked rank; blocks end within chunks
    )
    for scores in SCORES.values():
        for documents, window in (
            (None, 0),
            (None, 13),
            (random_documents(2), 0),
            (random_documents(3), 7),
        ):
            for name, values in largest_errors(
                rank, torch.float32, documents, window, scores
            ).items():
                assert not any(math.isnan(value) for value in values), name
                worst[name] = max(worst.get(name, 0.0), *values)
    return worst


@pytest.mark.parametrize(
    "num_ranks", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))]
)
def test_split_attention_with_modified_scores_matches_the_reference(num_ranks: int) -> None:
    for worst in run_ranks(num_ranks, errors_of_scores):
        assert len(worst) >= 4
        # few keys have large weights, and gradients reach 10
        assert max(worst.values()) < 5e-6, worst


def errors_by_blocks(rank: int) -> dict[str, list[float]]:
    # global state of this forked rank
    chosen_kernels.use(Kernels(blocked_attention=2.0, blocked_attention_float32=2.0))
    num_calls = 0
    original = blocked_attention.attend_in_pieces

    def counted(*inputs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return original(*inputs)

    blocked_attention.attend_in_pieces = counted
    errors: dict[str, list[float]] = {"cuts": [], "windows": [], "scaled": []}
    # Blocks that end within chunks, and limited memory that holds parts of chunks
    for queries, half_bytes in ((64, 1 << 20), (5, 128 * (dist.get_world_size() - 1) * 7)):
        blocked_attention._QUERIES = queries
        shared_memory._HALF_BYTES = half_bytes
        exchange.cache_clear()
        calls_before = num_calls
        errors["cuts"] += errors_of_many_cuts(rank).values()
        errors["windows"] += errors_of_many_windows(rank).values()
        scaled = largest_errors(rank, torch.float32, scores=Scores(scale=0.1))
        errors["scaled"] += scaled.get("gathered, balanced", [])
        # at least once for each of the four gathering implementations
        assert num_calls >= calls_before + 4 * 30
    errors["bfloat16"] = [max(values) for values in largest_errors(rank, torch.bfloat16).values()]
    return errors


@pytest.mark.parametrize(
    "num_ranks", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))]
)
def test_split_attention_by_blocks_matches_the_reference(num_ranks: int) -> None:
    for errors in run_ranks(num_ranks, errors_by_blocks):
        assert max(errors.pop("bfloat16")) < 6e-2
        assert max(value for values in errors.values() for value in values) < 5e-6, errors


def assert_recomputation_is_bitwise(rank: int, documents: Tensor | None, window: int) -> None:
    """Compare the gradients of every implementation with and without recomputation."""
    *full_inputs, gradient = inputs(torch.bfloat16)
    for name, (function, balanced) in KINDS.items():
        gradients = []
        for recomputes in (False, True):
            local = [part(x, rank, 2, balanced).requires_grad_() for x in full_inputs]
            arguments = (*local, dist.group.WORLD, balanced, documents, window)
            run = (
                functools.partial(checkpoint, function, use_reentrant=False)
                if recomputes
                else function
            )
            out = run(*arguments)
            out.backward(part(gradient, rank, 2, balanced))
            gradients.append([x.grad for x in local])

        for saved_gradient, recomputed_gradient in zip(*gradients, strict=True):
            assert torch.equal(saved_gradient, recomputed_gradient), name


def recomputed_and_kept(rank: int) -> None:
    for kernels in (Kernels(), Kernels(blocked_attention=2.0)):
        chosen_kernels.use(kernels)
        assert_recomputation_is_bitwise(rank, None, 0)
        assert_recomputation_is_bitwise(rank, random_documents(1), 0)
        assert_recomputation_is_bitwise(rank, random_documents(2), 7)


def test_split_attention_can_be_recomputed() -> None:
    run_ranks(2, recomputed_and_kept)


def test_split_attention_within_a_window_in_bfloat16_has_the_precision_of_bfloat16() -> None:
    for errors in run_ranks(2, largest_errors, torch.bfloat16, None, 9):
        for name, values in errors.items():
            assert max(values) < 6e-2, (name, values)


@pytest.mark.parametrize("balanced", [True, False], ids=["balanced", "in order"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ring_visits_every_earlier_key_once(balanced: bool, size: int) -> None:
    tokens = 2 * 4
    order = torch.arange(size * tokens)[None, :, None, None]
    places = [part(order, rank, size, balanced).flatten() for rank in range(size)]
    for rank in range(size):
        # Count how often each query of this rank sees each key.
        visits = torch.zeros(tokens, size * tokens, dtype=torch.int64)
        for source in range(size):
            for rows, columns, causal in masks._causal_parts(tokens, source, rank, balanced):
                mask = torch.ones(tokens, tokens)[rows, columns]
                mask = mask.tril() if causal else mask
                visits[rows, places[source][columns]] += mask.long()

        expected = places[rank][:, None] >= torch.arange(size * tokens)[None]
        assert torch.equal(visits, expected.long()), rank
