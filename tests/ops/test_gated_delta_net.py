"""The chunked gated delta rule equals its step-by-step form, in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardtrain.ops import gated_delta_net
from shardtrain.ops.gated_delta_net import (
    DeltaChunk,
    convolve,
    document_starts,
    step_by_step,
    unit_length,
)

ROWS = 2
KEY_HEADS = 2
HEADS = 6
KEY_DIM = 5
VALUE_DIM = 3
DOCUMENTS = {
    "one": [],
    "borders": [8, 16],
    "inside blocks": [3, 13, 20],
    "one token each": list(range(1, 130)),
    "one-token documents": [5, 6, 7, 8, 9],
}


def inputs(tokens: int) -> list[Tensor]:
    """Return queries, keys, values, decays, strengths and an incoming state. Some heads forget within a token."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*sizes: int) -> Tensor:
        return torch.randn(ROWS, *sizes, generator=generator, dtype=torch.float64)

    decay = -torch.nn.functional.softplus(random(tokens, HEADS)) * torch.linspace(0.0, 30.0, HEADS)
    return [
        unit_length(random(tokens, KEY_HEADS, KEY_DIM)),
        unit_length(random(tokens, KEY_HEADS, KEY_DIM)),
        random(tokens, HEADS, VALUE_DIM),
        decay,
        random(tokens, HEADS).sigmoid(),
        random(HEADS, KEY_DIM, VALUE_DIM),
    ]


def starts_of(documents: str, tokens: int) -> Tensor | None:
    """Return the mask of document starts. The second row has its borders one token later."""
    if documents == "one":
        return None
    starts = torch.zeros(ROWS, tokens, dtype=torch.bool)
    for start in DOCUMENTS[documents]:
        for row in range(ROWS):
            if start + row < tokens:
                starts[row, start + row] = True
    return starts


def with_gradients(function, tensors: list[Tensor]) -> list[Tensor]:
    """Return the results of a function, and the gradients of its arguments for random weights of the results."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = function(*leaves)
    generator = torch.Generator().manual_seed(7)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in results
    )
    return [
        *(x.detach() for x in results),
        *torch.autograd.grad(loss, leaves, materialize_grads=True),
    ]


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("tokens", "block"), [(1, 64), (24, 8), (21, 8), (130, 64)])
def test_chunks_equal_the_step_by_step_form(tokens: int, block: int, documents: str) -> None:
    starts = starts_of(documents, tokens)

    def chunked(q, k, v, decay, beta, state):
        return DeltaChunk(q, k, v, decay, beta, starts, block).run(state)

    def by_steps(q, k, v, decay, beta, state):
        return step_by_step(q, k, v, decay, beta, state, starts)

    results = with_gradients(chunked, inputs(tokens))
    references = with_gradients(by_steps, inputs(tokens))

    for actual, expected in zip(results, references, strict=True):
        # float64 sums in a different order
        assert (actual - expected).norm() <= 1e-12 * expected.norm() + 1e-14


@pytest.mark.parametrize("documents", ["one", "inside blocks"])
def test_the_transition_maps_any_incoming_to_the_outgoing_state(documents: str) -> None:
    starts = starts_of(documents, 21)

    def by_transition(q, k, v, decay, beta, state):
        factor, offset = DeltaChunk(q, k, v, decay, beta, starts, 8).transition()
        return [factor @ state + offset]

    def by_scan(q, k, v, decay, beta, state):
        return [DeltaChunk(q, k, v, decay, beta, starts, 8).run(state)[1]]

    tensors = inputs(21)
    results = with_gradients(by_transition, tensors)
    references = with_gradients(by_scan, tensors)

    for actual, expected in zip(results, references, strict=True):
        # float64 sums in a different order
        assert (actual - expected).norm() <= 1e-12 * expected.norm() + 1e-14


def test_two_chunks_with_a_state_between_them_equal_one() -> None:
    *tokens, state = inputs(21)
    expected, expected_state = DeltaChunk(*tokens, block=8).run(state)

    first_tokens = [x[:, :9] for x in tokens]
    last_tokens = [x[:, 9:] for x in tokens]
    first, state_between = DeltaChunk(*first_tokens, block=8).run(state)
    second, last_state = DeltaChunk(*last_tokens, block=8).run(state_between)

    # float64 sums in a different order
    both = torch.cat((first, second), dim=1)
    torch.testing.assert_close(both, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(last_state, expected_state, rtol=1e-12, atol=1e-13)


def test_no_tensor_has_two_dimensions_of_tokens() -> None:
    """Memory of the chunked form grows linearly with tokens."""
    tokens = 1024
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        DeltaChunk(*inputs(tokens)[:5]).run()

    assert largest <= ROWS * HEADS * tokens * gated_delta_net.BLOCK


@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_the_convolution_equals_pytorchs_within_each_document(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, 6, generator=generator, dtype=torch.float64)
    filters = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    documents = torch.tensor([[0, 1, 1, 1, 1, 1, 2, 3, 3, 9, 9, 9]])[:, :tokens]
    no_tail = x.new_zeros(1, 3, 6)

    def expected(part: Tensor) -> Tensor:
        return F.conv1d(part.mT, filters.unsqueeze(1), padding=3, groups=6)[..., : part.size(1)].mT

    torch.testing.assert_close(convolve(x, filters, no_tail, None), expected(x))

    # packed documents have the same results as separate ones
    lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
    separately = torch.cat([expected(part) for part in x.split(lengths, dim=1)], dim=1)
    together = convolve(x, filters, no_tail, document_starts(documents))
    torch.testing.assert_close(together, separately)

    # the convolution reads the tokens before a chunk, unless a document begins
    tail = x.new_ones(1, 3, 6)
    continued = convolve(x, filters, tail, None)
    torch.testing.assert_close(continued, expected(torch.cat((tail, x), dim=1))[:, 3:])

    fresh = torch.zeros(1, tokens, dtype=torch.bool)
    fresh[:, 0] = True
    torch.testing.assert_close(convolve(x, filters, tail, fresh), expected(x))
