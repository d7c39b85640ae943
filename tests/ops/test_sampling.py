"""Sampling: the set of possible tokens, their frequencies, and the choice from one random number."""

from __future__ import annotations

import pytest
import torch

from shardtrain.ops.sampling import Draws, Sampling, choose, penalise_

SHARES = torch.tensor([0.05, 0.5, 0.15, 0.3])
LOGITS = SHARES.log()[None]
EVENLY = [(i + 0.5) / 1000 for i in range(1000)]


def counts(sampling):
    """Count how often each token is drawn for evenly spaced random numbers."""
    chosen = choose(LOGITS.expand(1000, -1), sampling, EVENLY)
    return torch.bincount(torch.tensor(chosen), minlength=4).div(1000)


def assert_shares(sampling, expected):
    # Each boundary between two tokens lies between two of a thousand random numbers.
    torch.testing.assert_close(counts(sampling), expected, atol=0.002, rtol=0)


def test_most_likely_token_is_chosen_at_temperature_zero():
    assert choose(LOGITS, Sampling(), []) == [1]


def test_tokens_are_drawn_with_their_probabilities():
    assert_shares(Sampling(temperature=1.0), SHARES)
    roots = SHARES.sqrt()
    assert_shares(Sampling(temperature=2.0), roots / roots.sum())


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [
        (Sampling(temperature=1.0, top_k=2), [1, 3]),
        (Sampling(temperature=1.0, top_k=99), [0, 1, 2, 3]),
        # The most likely token reaches a probability of 0.5 by itself.
        (Sampling(temperature=1.0, top_p=0.5), [1]),
        (Sampling(temperature=1.0, top_p=0.51), [1, 3]),
        (Sampling(temperature=1.0, top_p=0.9), [1, 3, 2]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.6), [1, 3]),
    ],
)
def test_top_k_and_top_p_draw_only_the_most_likely_tokens(sampling, drawn):
    expected = torch.zeros(4)
    expected[drawn] = SHARES[drawn] / SHARES[drawn].sum()
    assert_shares(sampling, expected)


@pytest.mark.parametrize("spread", [3.0, 0.1])
def test_top_p_of_a_large_vocabulary_matches_a_full_sort(spread):
    # With a large spread, 1,024 tokens have most of the probability. With a small spread, they have little.
    logits = spread * torch.randn(4, 30_000, generator=torch.Generator().manual_seed(0))
    # The last row needs the entire vocabulary, even if the others do not.
    logits[3] = logits[3] / 30
    sampling = Sampling(temperature=1.0, top_p=0.8)

    # The reference sorts all tokens and removes those after the first with a sum of 0.8.
    shares, ids = logits.softmax(-1).double().sort(descending=True)
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= 0.8, 0.0)
    for u in (0.0, 0.3, 0.7, 0.99):
        drawn = torch.searchsorted(shares.cumsum(-1), u * shares.sum(-1, keepdim=True), right=True)
        expected = ids.gather(-1, drawn)[:, 0].tolist()

        assert choose(logits, sampling, [u] * 4) == expected
        assert choose(logits[:1], sampling, [u]) == expected[:1]


def test_extreme_random_numbers_draw_possible_tokens():
    impossible = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    largest = 1 - 2**-53
    assert choose(impossible, Sampling(temperature=1.0), [0.0]) == [1]
    assert choose(impossible, Sampling(temperature=1.0), [largest]) == [2]


def test_penalty_makes_earlier_tokens_less_likely():
    logits = torch.tensor([[2.0, -2.0, 3.0], [2.0, -2.0, 3.0]])
    penalise_(logits, [[0, 1, 1], [2, 99]], 2.0)
    assert logits.tolist() == [[1.0, -4.0, 3.0], [2.0, -2.0, 1.5]]


def test_rows_of_a_batch_are_independent():
    one_row = Draws(5, [3])
    two_rows = Draws(5, [1, 3])
    for _ in range(3):
        assert one_row.next([0])[0] == two_rows.next([0, 1])[1]
