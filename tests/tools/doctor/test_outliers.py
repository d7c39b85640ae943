"""Exactly the deviating and slow ranks are named, for any order of the ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardtrain.tools.doctor.outliers import equal, slow
from shardtrain.tools.doctor.result import Reports
from shardtrain.utils.majority import groups, named, odd

sizes = st.integers(3, 64)


@given(sizes, st.data())
def test_one_deviating_rank_is_named_at_any_position(size, data):
    place = data.draw(st.integers(0, size - 1))
    values = {rank: "2.13" for rank in range(size)} | {place: "2.12"}
    assert odd(values) == [place]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40))
def test_without_a_majority_all_ranks_deviate_and_equal_ones_do_not(texts):
    values = dict(enumerate(texts))
    counts = sorted((texts.count(text) for text in set(texts)), reverse=True)
    outliers = odd(values)

    if len(counts) == 1:
        assert outliers == []
    elif counts[0] == counts[1]:
        assert outliers == sorted(values)
    else:
        assert len(outliers) == len(texts) - counts[0]
        assert len({values[rank] for rank in values if rank not in outliers}) == 1


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.randoms())
def test_the_order_of_ranks_does_not_matter(texts, random):
    values = dict(enumerate(texts))
    shuffled = list(values.items())
    random.shuffle(shuffled)
    assert odd(dict(shuffled)) == odd(values)
    assert groups(dict(shuffled)) == groups(values)


@given(st.lists(st.floats(90.0, 110.0), min_size=2, max_size=64), st.data())
def test_only_the_rank_with_a_third_of_the_rate_is_slow(rates, data):
    # The others are at most 11 % apart. A finding requires 30 % below the median.
    place = data.draw(st.integers(0, len(rates)))
    values = dict(enumerate([*rates[:place], 30.0, *rates[place:]]))
    assert slow(values) == [place]


@given(st.lists(st.floats(90.0, 110.0), min_size=1, max_size=64))
def test_similar_ranks_are_not_slow(rates):
    assert slow(dict(enumerate(rates))) == []


@given(
    st.dictionaries(st.integers(0, 63), st.floats(1.0, 1e3), min_size=1),
    st.randoms(),
    st.integers(-9, 40),
)
def test_order_and_unit_do_not_affect_slow_ranks(rates, random, power):
    shuffled = list(rates.items())
    random.shuffle(shuffled)
    assert slow(dict(shuffled)) == slow(rates)
    # multiplication by a power of 2 is exact
    assert slow({rank: rate * 2.0**power for rank, rate in rates.items()}) == slow(rates)


def test_a_row_names_the_versions_and_their_ranks():
    reports = Reports(3, {rank: {"hosts": {"hostname": f"host-{rank}"}} for rank in range(3)})
    row = equal(reports, "versions", "torch", {0: "2.13", 1: "2.12", 2: "2.13"}, "fail", "fix")
    assert row.verdict == "fail"
    assert row.ranks == (1,)
    assert "2.12 on host-1 (rank 1)" in row.measured
    assert "2.13 on host-0 (rank 0), host-2 (rank 2)" in row.measured


@given(
    st.lists(st.sampled_from("abc"), min_size=2, max_size=12).filter(
        lambda texts: len(set(texts)) > 1
    )
)
def test_an_error_names_a_rank_outside_the_largest_group(texts):
    values = dict(enumerate(texts))
    rank, other = named(values)
    assert other == groups(values)[0][1][0]
    assert values[rank] != values[other]
    assert 0 in (rank, other), "a description relative to rank 0 would not suffice"
