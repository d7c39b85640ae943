"""Laws of naming the odd and the slow: they always are, nobody else is, and the order of ranks changes nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardtrain.tools.doctor.outliers import equal, groups, odd, slow
from shardtrain.tools.doctor.result import Reports

sizes = st.integers(3, 64)


@given(sizes, st.data())
def test_one_odd_rank_is_named_wherever_it_is(size, data):
    place = data.draw(st.integers(0, size - 1))
    values = {rank: "2.13" for rank in range(size)} | {place: "2.12"}
    assert odd(values) == [place]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40))
def test_all_are_odd_without_a_majority_and_none_when_equal(texts):
    values = dict(enumerate(texts))
    counts = sorted((texts.count(text) for text in set(texts)), reverse=True)
    found = odd(values)
    if len(counts) == 1:
        assert found == []
    elif counts[0] == counts[1]:
        assert found == sorted(values)
    else:
        assert len(found) == len(texts) - counts[0] and len({values[rank] for rank in values if rank not in found}) == 1


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.randoms())
def test_the_order_in_which_ranks_answer_changes_nothing(texts, random):
    values = dict(enumerate(texts))
    shuffled = list(values.items())
    random.shuffle(shuffled)
    assert odd(dict(shuffled)) == odd(values) and groups(dict(shuffled)) == groups(values)


@given(st.lists(st.floats(90.0, 110.0), min_size=2, max_size=64), st.data())
def test_a_rank_with_a_third_of_the_rate_is_slow_and_nobody_else(rates, data):
    # the others differ by at most 11 %, far from the 30 % below the median that a finding takes
    place = data.draw(st.integers(0, len(rates)))
    values = dict(enumerate([*rates[:place], 30.0, *rates[place:]]))
    assert slow(values) == [place]


@given(st.lists(st.floats(90.0, 110.0), min_size=1, max_size=64))
def test_ranks_that_are_alike_are_not_slow(rates):
    assert slow(dict(enumerate(rates))) == []


@given(st.dictionaries(st.integers(0, 63), st.floats(1.0, 1e3), min_size=1), st.randoms(), st.integers(-9, 40))
def test_neither_order_nor_unit_decide_who_is_slow(rates, random, power):
    shuffled = list(rates.items())
    random.shuffle(shuffled)
    assert slow(dict(shuffled)) == slow(rates)
    assert slow({rank: rate * 2.0**power for rank, rate in rates.items()}) == slow(rates)  # a power of 2 rounds nothing


def test_a_row_names_the_versions_and_who_has_them():
    reports = Reports(3, {rank: {"hosts": {"hostname": f"host-{rank}"}} for rank in range(3)})
    row = equal(reports, "versions", "torch", {0: "2.13", 1: "2.12", 2: "2.13"}, "fail", "fix")
    assert row.verdict == "fail" and row.ranks == (1,)
    assert "2.12 on host-1 (rank 1)" in row.measured and "2.13 on host-0 (rank 0), host-2 (rank 2)" in row.measured
