"""Laws of choosing a token: what may be drawn, how often, and that one number decides."""

from __future__ import annotations

import pytest
import torch

from shardtrain.ops.sampling import Draws, Sampling, choose, penalise_

SHARES = torch.tensor([0.05, 0.5, 0.15, 0.3])
LOGITS = SHARES.log()[None]
EVENLY = [(i + 0.5) / 1000 for i in range(1000)]


def counts(sampling):
    """How often each token comes out of numbers spread evenly."""
    chosen = choose(LOGITS.expand(1000, -1), sampling, EVENLY)
    return torch.bincount(torch.tensor(chosen), minlength=4).div(1000)


def test_the_likeliest_is_taken_at_temperature_zero():
    assert choose(LOGITS, Sampling(), []) == [1]


def test_tokens_are_drawn_by_their_probabilities():
    torch.testing.assert_close(counts(Sampling(temperature=1.0)), SHARES, atol=0.002, rtol=0)
    hot = SHARES.sqrt() / SHARES.sqrt().sum()
    torch.testing.assert_close(counts(Sampling(temperature=2.0)), hot, atol=0.002, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0, top_k=2), [1, 3]),
        (Sampling(temperature=1.0, top_k=99), [0, 1, 2, 3]),
        (Sampling(temperature=1.0, top_p=0.5), [1]),  # the first token has the probability already
        (Sampling(temperature=1.0, top_p=0.51), [1, 3]),
        (Sampling(temperature=1.0, top_p=0.9), [1, 3, 2]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.6), [1, 3]),
    ],
)
def test_only_the_likeliest_are_drawn_where_asked_for(sampling, kept):
    expected = torch.zeros(4)
    expected[kept] = SHARES[kept] / SHARES[kept].sum()
    torch.testing.assert_close(counts(sampling), expected, atol=0.002, rtol=0)


@pytest.mark.parametrize("spread", [3.0, 0.1])  # of which 1,024 tokens have most of the probability, or little
def test_top_p_of_a_large_vocabulary_draws_what_sorting_all_of_it_does(spread):
    logits = spread * torch.randn(4, 30_000, generator=torch.Generator().manual_seed(0))
    logits[3] = logits[3] / 30  # a row that needs them all beside others that may not
    shares, ids = logits.softmax(-1).double().sort(descending=True)
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= 0.8, 0.0)
    for u in (0.0, 0.3, 0.7, 0.99):
        drawn = torch.searchsorted(shares.cumsum(-1), u * shares.sum(-1, keepdim=True), right=True)
        expected = ids.gather(-1, drawn)[:, 0].tolist()
        assert choose(logits, Sampling(temperature=1.0, top_p=0.8), [u] * 4) == expected
        assert choose(logits[:1], Sampling(temperature=1.0, top_p=0.8), [u]) == expected[:1]


def test_the_ends_of_the_numbers_draw_tokens_that_can_be_drawn():
    impossible = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    largest = 1 - 2**-53
    assert choose(impossible, Sampling(temperature=1.0), [0.0]) == [1]
    assert choose(impossible, Sampling(temperature=1.0), [largest]) == [2]


def test_a_penalty_makes_what_was_there_less_likely():
    logits = torch.tensor([[2.0, -2.0, 3.0], [2.0, -2.0, 3.0]])
    penalise_(logits, [[0, 1, 1], [2, 99]], 2.0)
    assert logits.tolist() == [[1.0, -4.0, 3.0], [2.0, -2.0, 1.5]]


def test_a_row_has_the_same_numbers_whatever_rows_are_beside_it():
    alone, beside = Draws(5, [3]), Draws(5, [1, 3])
    assert [alone.next([0])[0] for _ in range(3)] == [beside.next([0, 1])[1] for _ in range(3)]
