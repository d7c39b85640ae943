"""Log-probabilities and entropies per token and their gradients, compared with ``torch.distributions``."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch.distributions import Categorical

from shardtrain.ops import token_probabilities as module
from shardtrain.ops.token_probabilities import token_probabilities

TOKENS, COLUMNS = 12, 33


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, TOKENS // 2, COLUMNS, generator=generator) * 4
    # A masked column, and a token of which every column but the target is masked
    logits[0, 0, 5] = -torch.inf
    logits[1, 2] = -torch.inf
    logits[1, 2, 7] = 3.0
    targets = torch.randint(6, COLUMNS, (2, TOKENS // 2), generator=generator)
    targets[1, 2] = 7
    temperatures = torch.rand(2, TOKENS // 2, generator=generator) + 0.5
    weights = torch.randn(2, 2, TOKENS // 2, generator=generator)
    return logits, targets, temperatures, weights


def expected() -> tuple[torch.Tensor, ...]:
    """PyTorch's own values in float64, and the gradient of their weighted sum."""
    logits, targets, temperatures, weights = inputs()
    leaf = logits.double().requires_grad_()
    # the entropy of torch.distributions is finite if logits are only very small
    categorical = Categorical(logits=leaf.clamp_min(-1e4) / temperatures.double()[..., None])
    log_probabilities = categorical.log_prob(targets)
    entropies = categorical.entropy()
    (weights[0] * log_probabilities + weights[1] * entropies).sum().backward()
    assert leaf.grad is not None
    return log_probabilities.detach(), entropies.detach(), leaf.grad


def computed(vocabulary: object = None, columns: slice = slice(None)) -> tuple[torch.Tensor, ...]:
    logits, targets, temperatures, weights = inputs()
    leaf = logits[..., columns].clone().requires_grad_()
    log_probabilities, entropies = token_probabilities(leaf, targets, temperatures, vocabulary)  # type: ignore[arg-type]
    (weights[0] * log_probabilities + weights[1] * entropies).sum().backward()
    assert leaf.grad is not None
    return log_probabilities.detach(), entropies.detach(), leaf.grad


def assert_same(actual: tuple[torch.Tensor, ...], reference: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(actual, reference, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)  # float32 rounding


@pytest.mark.parametrize("tokens_per_chunk", [1, 5, 100])
def test_values_and_gradients_equal_those_of_torch_distributions(monkeypatch, tokens_per_chunk):
    monkeypatch.setattr(module, "CPU_CHUNK_NUMEL", tokens_per_chunk * COLUMNS)
    assert_same(computed(), expected())


def test_a_loss_may_use_only_one_of_the_two_outputs():
    logits, targets, temperatures, _ = inputs()
    for index in (0, 1):
        leaf = logits.clone().requires_grad_()
        outputs = token_probabilities(leaf, targets, temperatures)
        outputs[index].sum().backward()

        reference = logits.double().requires_grad_()
        categorical = Categorical(logits=reference.clamp_min(-1e4) / temperatures[..., None])
        expected_outputs = (categorical.log_prob(targets), categorical.entropy())
        expected_outputs[index].sum().backward()

        assert_same((leaf.grad,), (reference.grad,))


class Split:
    """Vocabulary columns split into two uneven parts, or all on the first of two ranks."""

    size = COLUMNS

    def __init__(self, rank: int, columns: int) -> None:
        self.columns = columns
        self.offset = columns * rank

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(values) for _ in range(2)]
        torch.distributed.all_gather(parts, values)
        return torch.stack(parts)


def _on_a_rank(rank: int, columns: int) -> tuple[torch.Tensor, ...]:
    return computed(Split(rank, columns), slice(columns * rank, columns * (rank + 1)))


@pytest.mark.parametrize("columns", [17, COLUMNS])
def test_the_vocabulary_may_be_split_over_ranks(columns):
    first, second = run_ranks(2, _on_a_rank, columns)
    for values in (first, second):
        assert_same(values[:2], expected()[:2])
    gradient = torch.cat((first[2], second[2]), dim=-1)
    assert_same((gradient,), expected()[2:])
